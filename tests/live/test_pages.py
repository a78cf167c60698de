"""The commands of the pages, as they stand, in one folder beside one node with a simulated engine.

Three things are put in their place: the node's port, SESSION, and the first task of the README, whose harness has an
image that takes minutes to build.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_kit import free_port, until
from pages_kit import RUN, Block, shell_blocks
from pages_node import Beside, serving

pytestmark = [pytest.mark.podman]
TUTORIAL, *OTHERS = RUN

SCRIPT = (
    'curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" --json'
    """ '{"model": "policy", "messages": [{"role": "user", "content": "Say a word."}]}' && echo kiwi > out.txt"""
)
HELLO = f"""
instruction = "Write the word kiwi to out.txt"
harness = {{ name = "shell", command = ["bash", "-c", '''{SCRIPT}'''] }}
evaluator = {{ name = "command", config = {{ script = 'test "$(cat out.txt)" = kiwi' }} }}
"""


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
    [block for page in OTHERS for block in shell_blocks(page) if not block.note],
    ids=lambda block: f"{Path(block.page).stem}-{block.line}",
)
def test_page_commands_run_as_written(block: Block, beside: Beside) -> None:
    done = beside.run(block)
    assert done.returncode == 0, f"{block.page}:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
    assert done.stdout + done.stderr
