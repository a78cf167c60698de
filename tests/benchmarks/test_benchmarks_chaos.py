"""The chaos run finds what is lost, and a round of it loses nothing."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from journal_samples import make_trajectory, write_sessions

from polarnode.core.conversation import Answer, TextPart
from polarnode.core.trajectory import Damaged, Trajectory
from polarnode.journal.journal import open_journal

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script() -> Iterator[Any]:
    """The script as a module."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        import chaos

        yield chaos
    finally:
        sys.path[:] = before
        sys.modules.pop("chaos", None)


def answered(session_id: str, *texts: str, **more: Any) -> Trajectory:
    whole = make_trajectory(session_id, task_id=session_id, turns=len(texts))
    turns = tuple(
        attrs.evolve(turn, answer=Answer(parts=(TextPart(text),), finish_reason="stop"))
        for turn, text in zip(whole.turns, texts, strict=True)
    )
    return attrs.evolve(whole, turns=turns, **more)


def counted(script: Any, ledger: Any, *delivered: Trajectory, changes: Any = ()) -> Any:
    readers = script.Readers(client=None, url="")
    readers.trajectories.update({each.session_id: each for each in delivered})
    found = script.Account()
    found.answers([ledger], readers, list(changes))
    found.places(readers)
    return found


def test_delivered_answers_are_no_fault(script: Any) -> None:
    ledger = script.Ledger("s", "s", texts=["a", "b"], ended=True)
    assert counted(script, ledger, answered("s", "a", "b")).faults == []


def test_each_loss_is_a_fault(script: Any) -> None:
    ledger = script.Ledger("s", "s", texts=["a", "b", "c"], ended=True)
    assert counted(script, ledger).faults == ["session s was never delivered"]
    assert counted(script, ledger, answered("s", "a", "c")).faults == ["session s lost 1 of 3 answers"]
    twice = counted(script, ledger, answered("s", "a", "b", "c"), answered("t", "a"))
    assert twice.faults == ["1 answers are in two turns"]
    place = answered("s", "a", "b", "c")
    doubled = counted(script, ledger, place, attrs.evolve(place, session_id="t", turns=()))
    assert doubled.faults == ["places with two sessions: [('s', 0)]"]


def test_last_answer_may_be_missing(script: Any) -> None:
    """Only the last answer before a kill may be missing."""
    killed = script.Ledger("s", "s", texts=["a", "b", "c"])
    assert counted(script, killed, answered("s", "a", "b")).faults == []
    assert counted(script, killed, answered("s", "a", "c")).faults == ["session s lost 1 of 3 answers"]


def test_only_damaged_turn_is_named(script: Any) -> None:
    ledger = script.Ledger("s", "s", texts=["a", "b"], ended=True)
    named = answered("s", "b", damaged=(Damaged(part="turns[0]", reason="r"),))
    change = script.Change("turns", "s/0", "body", "s")
    assert counted(script, ledger, named, changes=[change]).faults == []
    assert counted(script, ledger, named).faults == ["session s: 1 turns named, fewer were damaged"]


def test_missing_events_are_a_fault(script: Any) -> None:
    readers = script.Readers(client=None, url="", events={1: "trajectory:a", 3: "task:a"})
    found = script.Account()
    found.events(readers, 3)
    assert found.faults == ["events [2] never came"]


async def test_every_changed_byte_is_found(script: Any, tmp_path: Path) -> None:
    """Forty single bytes in random rows, each in a journal of its own."""
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
        write_sessions(journal)
        await journal.writer.flush()
    fine = (tmp_path / "journal.sqlite").read_bytes()
    for seed in range(40):
        path = tmp_path / f"{seed}.sqlite"
        path.write_bytes(fine)
        change = script.damaged(path, random.Random(seed))
        account = script.Account()
        account.named(path, [change])
        assert account.faults == [], (seed, change)
        assert account.figures["rows named by check"] == 1


@pytest.mark.podman
@pytest.mark.usefixtures("podman")
def test_one_round_loses_nothing() -> None:
    command = [sys.executable, str(FOLDER / "chaos.py"), "--rounds", "1", "--seed", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("all is accounted for\n")
