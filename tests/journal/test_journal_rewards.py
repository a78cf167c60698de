"""Rewards given after a session's first: numbered in the transaction, once for each evaluation, never in place
of the first.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from journal_samples import Clock, write_sessions

from polarnode.core.status import RewardEvent
from polarnode.core.task import EvaluationSpec, EvaluatorSpec
from polarnode.journal import entries, queries
from polarnode.journal.check import check_journal
from polarnode.journal.entries import evaluation_entry, refusal_entry, reward_entry
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.values import EventFilters, RetentionLimits

SPEC = EvaluationSpec(sessions=("a", "b"), evaluator=EvaluatorSpec(name="command"), reason="a wrong test")
REWARDS = EventFilters(kinds=("reward",))


def accept(journal: Journal, name: str, sessions: Mapping[str, str | None], **more: Any) -> None:
    journal.writer.write(
        evaluation_entry(SPEC, sessions, evaluation_id=name, idempotency_key=None, now=5.0, **more)
    )


def give(journal: Journal, name: str, session_id: str, reward: float | None, **more: Any) -> None:
    given = RewardEvent(
        session_id=session_id,
        task_id=session_id,
        group_id=session_id,
        reward=reward,
        evaluation_id=name,
        given=6.0,
        **more,
    )
    journal.writer.write(reward_entry(given))


async def keys(journal: Journal, filters: EventFilters | None = None) -> list[str]:
    await journal.writer.flush()
    return [each.key for each in (await journal.reader.events(0, filters=filters)).events]


async def test_each_evaluation_gives_numbered_reward(tmp_path: Path) -> None:
    """Each evaluation gives a session one numbered reward."""
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1.0) as journal:
        write_sessions(journal)
        await journal.writer.flush()
        first = await journal.reader.events(0, filters=EventFilters(task_id="a"))
        accept(journal, "e1", {"a": None, "b": None, "gone": "no session gone"})
        accept(journal, "e2", {"a": None})
        for _ in range(2):  # an entry may be applied twice
            give(journal, "e1", "a", 0.5)
            give(journal, "e2", "a", None, error="the judge is down", boundary="evaluator")
        assert await keys(journal, REWARDS) == ["reward:a:1", "reward:a:2"]
        assert not [key for key in await keys(journal) if key.startswith("reward")], (
            "a usual reader gets none"
        )
        found = await journal.reader.query(entries.evaluation, "e1")
        assert found is not None
        assert (found.spec, found.submitted) == (SPEC, 5.0)
        assert [
            (one.session_id, one.state, one.n, one.first_reward, one.reward) for one in found.sessions
        ] == [
            ("a", "evaluated", 1, 1.0, 0.5),
            ("b", "pending", None, 1.0, None),
            ("gone", "refused", None, None, None),
        ]
        assert [each.evaluation_id for each in await journal.reader.query(entries.pending_evaluations)] == [
            "e1"
        ]
        last = (await journal.reader.events(0, filters=REWARDS)).events[-1]
        body = orjson.loads(last.body)
        assert (body["n"], body["reward"], body["error"]) == (2, None, "the judge is down")
        assert (await journal.reader.events(0, filters=EventFilters(task_id="a"))).events == first.events
    async with open_journal(path, now=lambda: 1.0) as journal:  # another life
        assert [each.evaluation_id for each in await journal.reader.query(entries.pending_evaluations)] == [
            "e1"
        ]
        journal.writer.write(refusal_entry("e1", "b", "it is damaged"))
        await journal.writer.flush()
        assert await journal.reader.query(entries.pending_evaluations) == ()
        assert await journal.reader.query(entries.placed_sessions, "a", None) == ("a",)
        assert await journal.reader.query(entries.placed_sessions, None, "b") == ("b",)
    assert check_journal(path).faults == ()


async def test_pruning_removes_evaluation_after_rewards(tmp_path: Path) -> None:
    """Pruning takes an evaluation with its last reward."""
    path, clock = tmp_path / "journal.sqlite", Clock(1000.0)
    retention = RetentionLimits(acknowledged_s=10.0)
    async with open_journal(path, now=lambda: clock.time, retention=retention) as journal:
        write_sessions(journal)
        accept(journal, "e1", {"a": None, "b": None})
        give(journal, "e1", "a", 0.5)
        await journal.writer.flush()
        for seconds in (0.0, 1000.0, 2000.0):
            clock.time += seconds
            await journal.consumers.acknowledge("trainer", journal.commits.progress.last_seq)
        assert await journal.reader.query(queries.session, "a") is None
        found = await journal.reader.query(entries.evaluation, "e1")
        assert found is not None, "one of its sessions is pending"
        give(journal, "e1", "b", 1.0)
        await journal.writer.flush()
        found = await journal.reader.query(entries.evaluation, "e1")
        assert found is not None
        assert found.sessions[1].error == "session b was pruned while it was evaluated"
        assert journal.commits.progress.last_seq == 7, "what was pruned gets no event"


async def test_damaged_reward_is_unreadable_event(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1.0) as journal:
        write_sessions(journal)
        accept(journal, "e1", {"a": None, "b": None})
        give(journal, "e1", "a", 0.5)
        give(journal, "e1", "b", 0.5)
        await journal.writer.flush()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE events SET body = x'7b7d' WHERE key = 'reward:a:1'")
        db.execute("UPDATE evaluations SET body = x'7b7d'")
    db.close()
    assert {each.table for each in check_journal(path).faults} == {"events", "evaluations"}
    async with open_journal(path, now=lambda: 1.0) as journal:
        damaged, whole = (await journal.reader.events(0, filters=REWARDS)).events
        assert (damaged.kind, damaged.key, whole.kind) == ("unreadable", "reward:a:1", "reward")
        found = await journal.reader.query(entries.evaluation, "e1")
        assert found is not None
        assert found.spec is None
