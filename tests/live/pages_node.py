"""A node that was started in a folder as a page says, and the blocks of pages run in that folder."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen
from live_kit import PATIENCE_S, PROGRAM, short_temporary, until
from pages_kit import Block

from polarnode.client import PolarnodeClient, Unreachable


@frozen(kw_only=True)
class Beside:
    """A folder in which a node serves at a port; `session_id` is put in the place of SESSION."""

    folder: Path
    port: int
    session_id: str = "SESSION"

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
