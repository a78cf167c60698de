"""The commands of the pages, as they stand, in one folder beside one node with a simulated engine.

Three things are put in their place: the node's port, SESSION, and the first task of the README, whose harness has an
image that takes minutes to build.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import frozen
from live_kit import PATIENCE_S, PROGRAM, free_port, short_temporary, until
from pages_kit import RUN, Block, shell_blocks

from polarnode.client import PolarnodeClient, Unreachable

pytestmark = [pytest.mark.podman]

SCRIPT = (
    'curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" --json'
    """ '{"model": "policy", "messages": [{"role": "user", "content": "Say a word."}]}' && echo kiwi > out.txt"""
)
HELLO = f"""
instruction = "Write the word kiwi to out.txt"
harness = {{ name = "shell", command = ["bash", "-c", '''{SCRIPT}'''] }}
evaluator = {{ name = "command", config = {{ script = 'test "$(cat out.txt)" = kiwi' }} }}
"""


@frozen(kw_only=True)
class Beside:
    """A folder in which a node was started, and a session of it that is over."""

    folder: Path
    port: int
    session_id: str

    def run(self, block: Block) -> "subprocess.CompletedProcess[str]":
        text = block.text.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}").replace(
            "SESSION", self.session_id
        )
        programs = Path(sys.executable).parent
        own = {"POLARNODE_URL": f"http://127.0.0.1:{self.port}", "PATH": f"{programs}:{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@contextmanager
def serving(folder: Path, port: int) -> Iterator[PolarnodeClient]:
    """A node without a token that was started in a folder, until the end of the block."""
    with short_temporary() as temporary, (folder / "said.txt").open("ab") as said:
        process = subprocess.Popen(
            [*PROGRAM, "--engine", "simulated", "--port", str(port)],
            cwd=folder,
            env={**os.environ, "POLARNODE_NODE_ID": f"pages-{port}", "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        client = PolarnodeClient(f"http://127.0.0.1:{port}", patience_s=PATIENCE_S)

        def ready() -> bool:
            assert process.poll() is None, (folder / "said.txt").read_text()[-3000:]
            with suppress(Unreachable):
                return any(host["state"] == "ready" for host in client.status()["engine"]["hosts"])
            return False

        try:
            until(ready, "the node is ready")
            yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S / 4)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def beside(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    folder, port = tmp_path_factory.mktemp("pages"), free_port()
    (folder / "hello.toml").write_text(HELLO)
    with serving(folder, port) as client:
        ((session_id,),) = (each.session_ids for each in client.submit_source(folder / "hello.toml"))
        until(lambda: client.session(session_id)["session"]["outcome"], "the session ends")
        assert client.trajectory(session_id).reward == 1.0
        yield Beside(folder=folder, port=port, session_id=session_id)


@pytest.mark.parametrize(
    "block",
    [block for page in RUN for block in shell_blocks(page) if not block.note],
    ids=lambda block: f"{Path(block.page).stem}-{block.line}",
)
def test_the_commands_of_a_page_run_as_they_stand(block: Block, beside: Beside) -> None:
    done = beside.run(block)
    assert done.returncode == 0, f"{block.page}:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
    assert done.stdout + done.stderr
