"""A client leaves in the middle of an answer and asks the same again: it gets the whole answer, and not one
token is sampled or trained twice.
"""

from pathlib import Path
from typing import Any

import pytest
from live_kit import ServingNode
from matrix_cases import LONG

from polarnode.core.trajectory import Trajectory

pytestmark = [pytest.mark.podman, pytest.mark.engine]

LEAVER = Path(__file__).with_name("leaver.py")
WAYS = [(api, how) for how in ("stream", "whole") for api in ("chat", "responses", "anthropic", "google")]
PIECES = 3  # of the answer are heard before the client leaves: some twelve tokens of a thousand
TEXT = LONG.steps[0].text


@pytest.fixture(scope="module")
def sessions(steered: ServingNode) -> dict[tuple[str, str], str]:
    """One session for each API, streamed and whole."""
    return {way: steered.submit(**task(*way))[0] for way in WAYS}


def task(api: str, how: str) -> dict[str, Any]:
    check = (
        f"import pathlib; heard = pathlib.Path('heard.txt').read_text(); raise SystemExit(heard != {TEXT!r}"
        " or heard.find(pathlib.Path('before.txt').read_text()))"
    )
    return {
        "instruction": f"This is case {LONG.name}.",
        "harness": {"name": "shell", "command": ["python3", "/work/leaver.py", api, how, str(PIECES)]},
        "runtime": {"files": [{"path": "leaver.py", "text": LEAVER.read_text()}]},
        "evaluator": {"name": "command", "config": {"argv": ["python3", "-c", check]}},
        "sampling": {"temperature": 1.0},
    }


@pytest.mark.parametrize(("api", "how"), WAYS, ids=["-".join(way) for way in WAYS])
def test_answer_abandoned_midway_is_resent(
    steered: ServingNode, sessions: dict[tuple[str, str], str], api: str, how: str
) -> None:
    """An answer left in the middle is given whole when it is asked for again."""
    session = sessions[api, how]
    trajectory = steered.finished(session)
    print(
        api,
        how,
        [(turn.kind, turn.reason, turn.state, len(turn.sampled)) for turn in trajectory.turns],
        trajectory.metrics,
    )
    assert trajectory.outcome.status == "completed", trajectory.outcome
    assert trajectory.reward == 1.0, trajectory.metrics
    whole = steered.forced(session)[0]["ids"]
    assert [token for turn in trajectory.turns for token in turn.sampled] == whole, (
        "sampled once, whoever heard it"
    )
    assert trainable(trajectory) == len(whole)
    assert len(trajectory.traces) == 1
    assert as_it_should(trajectory) or (how == "whole" and len(trajectory.turns) == 1), (
        "only who heard nothing may have left before the first token"
    )


def trainable(trajectory: Trajectory) -> int:
    return sum(sum(trace.loss_mask) for trace in trajectory.traces)


def as_it_should(trajectory: Trajectory) -> bool:
    """Cut, and gone on with where it was cut; or said again, where all of it was there before a slow client
    had left.
    """
    if trajectory.metrics["replayed"]:
        return len(trajectory.turns) == 1
    return [turn.state for turn in trajectory.turns] == ["partial", "complete"] and trajectory.metrics[
        "resumed_turns"
    ] == 1
