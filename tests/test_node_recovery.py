"""A node that was killed: what its sessions had is published at its next start, once, and within the laws."""

import time
from pathlib import Path

import merge_toys as toys
import pytest
from journal_samples import make_identity, make_spec

from polarnode.config import NodeConfig
from polarnode.merge.checks import check
from polarnode.node import _recover
from polarnode.records import Built
from polarnode.shell.journal import Journal, open_journal
from polarnode.tasks import BuilderSpec, TaskSpec


def ran(journal: Journal, session_id: str, *, task_id: str = "t", turns: int = 0, cut: bool = False) -> toys.Session:
    """A session that is under way in the journal, with this many turns and perhaps one that was cut."""
    journal.session_started(make_identity(session_id, task_id=task_id))
    session, history = toys.Session(session_id), [toys.user()]
    for _ in range(turns):
        _, message = session.say(toys.ask(*history), "an answer")
        history += [message, toys.user("more")]
    if cut:
        session.say(toys.ask(*history), "half a", state="partial")
    for turn in session.turns:
        journal.turn(turn)
    return session


def submitted(journal: Journal, *session_ids: str, spec: TaskSpec | None = None) -> None:
    journal.task_submitted(spec or make_spec(metadata={"split": "train"}), task_id="t", session_ids=session_ids, idempotency_key=None)


async def recovered(path: Path, said: list[str], *, import_paths: tuple[str, ...] = ()) -> None:
    async with open_journal(path, now=time.time) as journal:
        await _recover(journal, NodeConfig(import_paths=import_paths), said.append)


async def test_sessions_of_an_earlier_life_become_interrupted_trajectories(tmp_path: Path) -> None:
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "with-turns", "without", "not-begun")
        session = ran(journal, "with-turns", turns=3, cut=True)
        ran(journal, "without")
    await recovered(path, said)
    assert said == ["3 sessions of an earlier life were interrupted; their turns are kept"]
    async with open_journal(path, now=time.time) as journal:
        found = await journal.trajectory("with-turns")
        assert found is not None
        assert (found.outcome.status, found.outcome.boundary, found.reward) == ("interrupted", "node", None)
        assert found.outcome.reason == "the node ended while the session ran; 4 turns were captured"
        assert (found.turns, found.harness, found.metadata) == (session.turns, "pi", {"split": "train"})
        counts = check(found.turns, Built(traces=found.traces, left_out=found.left_out))
        assert counts.trainable == counts.sampled == sum(len(turn.sampled) for turn in session.turns) > 0
        for name in ("without", "not-begun"):
            other = await journal.trajectory(name)
            assert other is not None
            assert (other.outcome.status, other.turns, other.traces) == ("interrupted", (), ())
        page = await journal.events(0)
        kinds = [event.kind for event in page.events]
        assert kinds == ["trajectory"] * 3 + ["group", "task"], "who waits for the group learns that it is over"


async def test_recovering_again_finds_nothing(tmp_path: Path) -> None:
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "one")
        ran(journal, "one", turns=1)
    await recovered(path, said)
    await recovered(path, said)
    assert len(said) == 1


async def test_a_capture_without_a_task_is_built_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=time.time) as journal:
        ran(journal, "capture", task_id="capture", turns=2)
    await recovered(path, [])
    async with open_journal(path, now=time.time) as journal:
        found = await journal.trajectory("capture")
        assert found is not None
        assert (found.outcome.status, len(found.turns), len(found.traces)) == ("interrupted", 2, 1)


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_session_whose_builder_is_gone_keeps_its_turns(tmp_path: Path, allowed: bool) -> None:
    """One session that can not be built must not keep the node from starting, nor the others from their traces."""
    path, said = tmp_path / "journal.sqlite", list[str]()
    async with open_journal(path, now=time.time) as journal:
        submitted(journal, "one", spec=make_spec(builder=BuilderSpec(import_path="session_kit:garbage_builder")))
        ran(journal, "one", turns=2)
        ran(journal, "capture", task_id="capture", turns=1)
    await recovered(path, said, import_paths=("session_kit",) if allowed else ())
    async with open_journal(path, now=time.time) as journal:
        one, other = await journal.trajectory("one"), await journal.trajectory("capture")
        assert one is not None
        assert other is not None
        assert (one.outcome.status, one.outcome.boundary, len(one.turns), one.traces) == ("error", "client", 2, ())
        assert len(other.traces) == 1
