"""docs/tutorial.md, followed word by word: its files are written and its commands run, in its order, in one folder."""

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from live_kit import free_port, podman
from pages_kit import RUN, Block, blocks, shell_blocks
from pages_node import Beside, serving

pytestmark = [pytest.mark.podman]
PAGE, *_ = RUN
NODE = "polarnode --engine simulated\n"
TRAINER = "python train.py\n"
IMAGE = "localhost/tutorial"


def follow(block: Block, reader: Beside, node: ExitStack) -> str:
    """Do what a block says, and return what it prints."""
    if block.note.startswith("file: "):
        file = reader.folder / block.note.removeprefix("file: ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(block.text.replace("127.0.0.1:8080", f"127.0.0.1:{reader.port}"))
        return ""
    if block.text == TRAINER:
        return "".join(ran(block, reader) for _ in range(2))  # started again, it goes on where it was
    if block.text == NODE:
        node.enter_context(serving(reader.folder, reader.port))
        return ""
    if block.note:
        assert block.note == "needs a GPU", block.note
        return ""
    return ran(block, reader)


def ran(block: Block, reader: Beside) -> str:
    """Run what a block says, and return what it prints."""
    done: subprocess.CompletedProcess[str] = reader.run(block)
    assert done.returncode == 0, f"{block.page}:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_tutorial_works_as_written(podman_works: None, tmp_path: Path) -> None:
    reader, printed = Beside(folder=tmp_path, port=free_port()), ""
    try:
        with ExitStack() as node:
            for block in blocks(PAGE):
                printed += follow(block, reader, node)
    finally:
        podman("rmi", "--force", "--ignore", IMAGE)
    assert "shell" in printed
    assert "«" in printed, "inspect marks what is trained"
    steps = re.findall(
        r"^step (\d): rewards (\[.*\]), (\d+) trained tokens, loss (-?[\d.]+)$", printed, re.MULTILINE
    )
    assert [step for step, *_ in steps] == ["1", "2", "3", "1", "2"], "what was trained does not come again"
    for _, rewards, tokens, _ in steps:
        found = [float(reward) for reward in rewards.strip("[]").split(", ")]
        assert len(found) == 4
        assert all(0 < reward <= 1 for reward in found), "random words have letters"
        assert int(tokens) > 100
    assert sum(block.text == NODE for block in shell_blocks(PAGE)) == 1
