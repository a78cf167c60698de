"""What the tests of forks share: a node whose engine says the scripts of `forking_node.py`, its tasks, and what a
trajectory of one says.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_kit import HERE, ServingNode, serving, short_temporary

from polarnode.core.trajectory import Trajectory, Turn
from polarnode.harnesses import HARNESSES

WANTED = os.environ.get("POLARNODE_FORKS", "pi")
RESUMING = tuple(each.name for each in HARNESSES.values() if each.resume is not None)
_PROGRAM = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent / 'kits')]}; from forking_node import run; run()",
)


def forking_program(folder: Path, **settings: int) -> tuple[str, ...]:
    """The program of such a node, with settings that are written into a folder."""
    file = folder / "node.toml"
    file.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
    return (*_PROGRAM, "--config", str(file))


@contextmanager
def forking_node(folder: Path, **settings: int) -> Iterator[ServingNode]:
    program = forking_program(folder, **settings)
    with short_temporary() as temporary, serving(folder / "state", temporary, program=program) as node:
        yield node


def parameters(names: Sequence[str]) -> list[Any]:
    """`names` as parameters of a test; those that POLARNODE_FORKS does not name are skipped, but not with `all`."""
    skip = pytest.mark.skip(reason="not of CI's part: make fork-matrix runs it")
    chosen = names if WANTED == "all" else WANTED.split(",")
    return [pytest.param(name, marks=() if name in chosen else skip) for name in names]


def task(harness: str, case: str, **more: Any) -> dict[str, Any]:
    """A task whose script is the case, by a harness whose tools tell which it is, or not."""
    instruction = f"Look around. This is case {case} of {harness}."
    return {"instruction": instruction, "harness": {"name": harness}, **more}


def told(turn: Turn, which: str) -> str:
    """What a tool result of a turn's request says of the workdir, `before` the command or `after` it."""
    assert turn.new_messages is not None
    text = "".join(each.text for each in turn.new_messages.messages if each.role == "tool")
    return re.findall(rf"{which}=([0-9a-f]{{16}})", text)[-1]


def prompt(turn: Turn) -> tuple[object, ...]:
    """What two turns with the same prompt, token for token, have alike."""
    return turn.before_key, turn.prompt_length, turn.prompt_delta


def trained(found: Trajectory) -> int:
    """The tokens that a trajectory's rows train."""
    return sum(sum(trace.loss_mask) for trace in found.traces)
