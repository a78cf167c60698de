"""The `group` event as the journal writes it: from what its tables hold, with the last trajectory, and over
changes of the tables.
"""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from attrs import evolve
from journal_samples import make_identity, make_spec, make_trajectory
from journal_writes import publish_attempt, publish_end, submit_task

from polarnode.core.task import GroupSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.groups import SessionFacts, facts_of, read_group
from polarnode.journal import queries
from polarnode.journal.journal import Journal, open_journal

LOST = Outcome(status="error", boundary="engine", reason="it died", log_tail="x" * 1000)


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Journal]:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
        yield journal


def take(journal: Journal, *sessions: str, **group: Any) -> None:
    spec = make_spec(num_samples=len(sessions), group=GroupSpec(**group))
    submit_task(journal, spec, task_id="t", session_ids=sessions, idempotency_key=None)


def publish(journal: Journal, trajectory: Trajectory) -> None:
    for turn in trajectory.turns:
        journal.writer.record_turn(turn)
    publish_end(journal, trajectory)


async def told(journal: Journal) -> tuple[list[str], dict[str, Any]]:
    """The keys of all events, and the body of the group's."""
    await journal.writer.flush()
    page = await journal.reader.events(0)
    bodies = [event.body for event in page.events if event.kind == "group"]
    return [event.key for event in page.events], orjson.loads(bodies[0]) if bodies else {}


async def test_group_event_explains_each_session(tmp_path: Path) -> None:
    """The event says of each session whether it counts, and why."""
    stale = evolve(make_trajectory("b", sample_index=1, reward=0.0, status="timeout"), staleness=3)
    lost = evolve(make_trajectory("c", sample_index=2, reward=None), outcome=LOST)
    silent = make_trajectory("d", sample_index=3, turns=0)
    async with opened(tmp_path) as journal:
        take(journal, "a", "b", "c", "d", max_staleness=2)
        for each in (lost, stale, silent):
            publish(journal, each)
        assert (await told(journal))[0] == ["trajectory:c", "trajectory:b", "trajectory:d"]
        publish(journal, evolve(make_trajectory("a"), staleness=0))
        keys, group = await told(journal)
    assert keys[3:] == ["trajectory:a", "group:t", "task:t"]
    assert group == {
        "task_id": "t",
        "group_id": "t",
        "sessions": [
            {
                "session_id": "a",
                "sample_index": 0,
                "status": "completed",
                "reward": 1.0,
                "usable": True,
                "staleness": 0,
                "stale": False,
                "why": None,
            },
            {
                "session_id": "b",
                "sample_index": 1,
                "status": "timeout",
                "reward": 0.0,
                "usable": False,
                "staleness": 3,
                "stale": True,
                "why": "stale: 3 weight updates behind, 2 are allowed",
            },
            {
                "session_id": "c",
                "sample_index": 2,
                "status": "error",
                "reward": None,
                "usable": False,
                "staleness": None,
                "stale": False,
                "why": "lost to the machine: engine",
            },
            {
                "session_id": "d",
                "sample_index": 3,
                "status": "completed",
                "reward": 1.0,
                "usable": False,
                "staleness": None,
                "stale": False,
                "why": "no trainable token",
            },
        ],
        "rewards": [1.0, 0.0, None, 1.0],
        "state": "partial",
        "reason": (
            "some are missing: 1 of 4 sessions are usable (1 stale, 1 lost to the machine, 1 no trainable"
            " token)"
        ),
        "usable": 1,
        "requires": {
            "early_stop_min": None,
            "min_usable": 1,
            "max_staleness": 2,
            "stale": "drop",
            "drop_uniform_reward": False,
            "fork": None,
        },
    }


@pytest.mark.parametrize(
    ("spec", "rewards", "state", "word"),
    [
        ({}, (1.0, 1.0), "complete", None),
        ({"drop_uniform_reward": True}, (1.0, 1.0), "dropped", "uniform reward"),
        ({"drop_uniform_reward": True}, (1.0, 0.0), "complete", None),
        ({"min_usable": 2}, (1.0, None), "dropped", "too few"),
        ({"min_usable": 1}, (1.0, None), "partial", "some are missing"),
    ],
)
async def test_group_is_judged_by_task_settings(
    tmp_path: Path, spec: dict[str, Any], rewards: Any, state: str, word: str | None
) -> None:
    async with opened(tmp_path) as journal:
        take(journal, "a", "b", **spec)
        for index, reward in enumerate(rewards):
            publish(journal, make_trajectory("ab"[index], sample_index=index, reward=reward))
        _, group = await told(journal)
    assert (group["state"], str(group["reason"]).partition(":")[0]) == (state, str(word))
    assert read_group(group).state == state


async def test_places_match_their_trajectories(tmp_path: Path) -> None:
    published = evolve(make_trajectory("a", turns=2), staleness=1)
    async with opened(tmp_path) as journal:
        take(journal, "a", "b")
        publish(journal, published)
        journal.writer.record_session(make_identity("b", sample_index=1))
        publish_attempt(
            journal,
            evolve(make_trajectory("b", sample_index=1), retried_as="b2"),
            evolve(make_identity("b2", sample_index=1), attempt=1),
        )
        await journal.writer.flush()
        assert await journal.reader.query(queries.finished_places, "t") == (facts_of(published),), (
            "a place that is tried again is not over"
        )
        publish(journal, evolve(make_trajectory("b2", sample_index=1), outcome=LOST, reward=None, attempt=1))
        await journal.writer.flush()
        found = await journal.reader.query(queries.finished_places, "t")
        assert [each.session_id for each in found] == ["a", "b2"]
        assert found[1].outcome == evolve(LOST, log_tail=None), "nobody needs its log"


async def test_older_journal_groups_use_known_places(
    tmp_path: Path,
) -> None:
    """A group that is partly of an older journal is judged by what is known."""
    async with opened(tmp_path) as journal:
        take(journal, "a", "b")
        publish(journal, make_trajectory("a"))
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    db.execute("UPDATE sessions SET trainable = NULL, staleness = NULL, outcome_checksum = NULL")
    (spec,) = db.execute("SELECT spec FROM tasks").fetchone()
    without = {name: part for name, part in orjson.loads(spec).items() if name != "group"}
    db.execute("UPDATE tasks SET spec = ?, checksum = NULL", (orjson.dumps(without),))
    db.commit()
    assert queries.finished_places(db, "t") == (
        SessionFacts(session_id="a", sample_index=0, outcome=Outcome(status="completed"), reward=1.0),
    )
    db.close()
    async with opened(tmp_path) as journal:
        publish(journal, make_trajectory("b", sample_index=1, turns=0))
        _, group = await told(journal)
    assert [each["why"] for each in group["sessions"]] == [None, "no trainable token"]
