"""Parts of the log in PostgreSQL that are wrong in ways of their own: order of names, takeovers, two at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from journal_samples import make_spec
from log_kit import NOW, claim, end, join, open_postgres, submit
from psycopg.types.json import Jsonb

from polarnode.core.cursors import Cursor
from polarnode.core.task import EvaluationSpec
from polarnode.core.trajectory import Outcome
from polarnode.groups.group import SessionFacts
from polarnode.journal.log.endings import ending_bodies
from polarnode.journal.log.port import NodeFacts
from polarnode.journal.log.postgres import callbacks, evaluations, events, membership, queries, weights
from polarnode.journal.log.postgres.connection import Database, open_database
from polarnode.journal.log.rules import compute_gap


def test_ended_task_event_body() -> None:
    facts = [
        SessionFacts(
            session_id=f"s{index}",
            sample_index=index,
            outcome=Outcome(status=status),
            reward=1.0,
            trainable_tokens=3,
        )
        for index, status in ((1, "timeout"), (0, "completed"))
    ]
    found = ending_bodies(make_spec(num_samples=2), facts, task_id="t", submitted=1.0, finished=2.0)
    assert found["task"] == {
        "task_id": "t",
        "group_id": "t",
        "counts": {"completed": 1, "timeout": 1},
        "submitted": 1.0,
        "finished": 2.0,
    }
    assert found["group"]["rewards"] == [1.0, 1.0]


async def test_names_are_compared_as_bytes(dsn: str) -> None:
    """A database whose language sorts `:` and letters otherwise finds the same runs."""
    async with open_postgres(dsn, watch=False) as log:
        for name in ("a", "a:run-2", "a:runner", "A:run-9", "b"):
            await submit(log, name)
    with open_database(dsn, name="x") as db:
        db.execute('ALTER TABLE tasks ALTER COLUMN task_id TYPE text COLLATE "en-x-icu"')
        found = queries.latest_run(db, "a")
    assert found is not None
    assert found.task_id == "a:run-2"


async def test_evaluation_of_dead_node_is_taken(dsn: str) -> None:
    async with open_postgres(dsn, watch=False) as log:
        dead, node = await join(log, "dead"), await join(log)
        await submit(log, "t")
        (held,) = await claim(log, node)
        await log.finish_claim(held, end(held))
        spec = EvaluationSpec(task_id="t")
        await log.submit_evaluation(
            spec, {"t-0": None}, evaluation_id="e", idempotency_key=None, incarnation=dead, now=NOW
        )
    with open_database(dsn, name="x") as db:
        assert not evaluations.pending_evaluations(db, node), "its node is alive"
        membership.leave(db, dead)
        assert [each.evaluation_id for each in evaluations.pending_evaluations(db, node)] == ["e"]


def test_two_versions_served_at_once(dsn: str) -> None:
    """The one that was brought last is the current one, whichever was faster."""
    with open_database(dsn, name="x") as db:
        membership.join(db, NodeFacts(name="n"))
        for number in range(8):
            weights.add_weights(db, f"v{number}", {}, model="", shared=True, at=NOW)

    def serve(number: int) -> bool:
        with open_database(dsn, name="server") as db:
            return weights.make_current(db, f"v{number}", model="", holders=2)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(serve, range(8)))[-1]
    with open_database(dsn, name="x") as db:
        found = weights.weights(db, model="", adapters=False, latest=False, limit=None)
        assert [each.version for each in found if each.current] == ["v7"]


def test_gap_for_each_cursor() -> None:
    """Where a reader goes on that asks after position 7 or 3, by what this log knows of the one it read."""
    here: dict[str, Any] = {"log": "b", "last": 9, "pruned": 4}
    assert compute_gap(Cursor(position=7, log="b"), **here, known=True, lost_after=None) is None
    found = [
        compute_gap(Cursor(position=7, log="x"), **here, known=False, lost_after=None),
        compute_gap(Cursor(position=7, log="a"), **here, known=True, lost_after=6),
        compute_gap(Cursor(position=11, log="b"), **here, known=True, lost_after=None),
        compute_gap(Cursor(position=3), **here, known=False, lost_after=None),
        compute_gap(Cursor(position=11), **here, known=False, lost_after=None),
    ]
    assert [each and each.position for each in found] == [4, 6, 9, 4, 4]


async def test_events_deleted_between_two_reads(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention deletes between the two statements of a page: its reader is told, and skips nothing unsaid."""
    real, pruned = events.find_gap, list[int]()

    def find_gap(db: Database, asked: Cursor) -> Any:
        found = real(db, asked)
        if not pruned:
            pruned.append(2)
            db.execute("SELECT forget_events(2, 0)")
        return found

    async with open_postgres(dsn, watch=False) as log:
        node = await join(log)
        await submit(log, "t")
        (held,) = await claim(log, node)
        await log.finish_claim(held, end(held))
        monkeypatch.setattr(events, "find_gap", find_gap)
        found = await log.events(Cursor())
        assert pruned
        assert found.gap is not None
        assert (found.gap.position, [each.seq for each in found.page.events]) == (2, [3])


def test_latest_versions_are_read_once(dsn: str) -> None:
    """Each node asks for them at all news of weights: what it costs must not grow with the square of the versions."""
    query = f"EXPLAIN {weights.SELECT_WEIGHTS}{weights.ONLY_LATEST}{weights.LIST_CLAUSE}"
    with open_database(dsn, name="x") as db:
        plan = db.execute(query.encode(), {"model": "m", "adapters": False, "limit": None}).fetchall()
    assert any("hashed SubPlan" in str(line) for line in plan), plan


def test_known_weights_are_no_news(dsn: str) -> None:
    with open_database(dsn, name="x") as db, open_database(dsn, name="listener") as listener:
        listener.execute("LISTEN polarnode")

        def news() -> int:
            return len(list(listener.notifies(timeout=0.2)))

        one, two = (membership.join(db, NodeFacts(name=name)).incarnation for name in ("a", "b"))
        weights.add_weights(db, "v1", {}, model="", shared=False, at=NOW)
        news()
        for number in (1, 0):
            weights.add_weight_holder(db, "v1", one, model="")
            assert news() == number
            weights.report_serving(db, one, {"": "v1"})
            assert news() == number
            weights.add_weight_holder(db, "v1", two, model="")
            assert weights.make_current(db, "v1", model="", holders=2)
            assert news() == 2 * number


async def test_older_version_never_becomes_current(dsn: str) -> None:
    """Two trainers at two nodes: the version that was brought first finds its second holder last."""
    async with open_postgres(dsn, watch=False) as log:
        one, two = await join(log, "one"), await join(log, "two")
        for version in ("v1", "v2"):
            await log.add_weights(version, {}, at=NOW)
            await log.add_weight_holder(version, one)
        await log.add_weight_holder("v2", two)
        assert await log.make_current("v2")
        await log.add_weight_holder("v1", two)
        assert not await log.make_current("v1")
        found = {each.version: (each.current, each.counted) for each in await log.weights()}
        assert found == {"v1": (False, False), "v2": (True, True)}
        await log.add_weights("v3", {}, shared=True, at=NOW)
        assert await log.make_current("v3")
        (row,) = [each for each in await log.weights() if each.version == "v2"]
        assert row.holders == (), "rows of holders are kept for what may still be copied"


def test_silent_receiver_backlog_stays_unread(dsn: str) -> None:
    """Its backlog may be 100,000 events, and each node looks some times a second for what can be sent."""
    with open_database(dsn, name="x") as db:
        for table, columns, values in (
            ("events", "position, kind, key, task_id, group_id, at, bytes", "n, 'task', n, n / 8, '', 0, 0"),
            ("callbacks", "position, task_id, url", "n, n / 8, CASE n WHEN 9 THEN 'there' ELSE 'gone' END"),
        ):
            rows = f"SELECT {values} FROM generate_series(1, 20000) n"
            db.execute(f"INSERT INTO {table} ({columns}) {rows}".encode())
        db.execute("ANALYZE callbacks")
        plan = db.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {callbacks.LEASE_CALLBACKS}".encode(),
            {"limit": 32, "seconds": 75.0, "each": 4, "rooms": Jsonb({"gone": 0})},
        ).fetchone()
        assert plan is not None
        (top,) = plan["QUERY PLAN"]
        assert top["Plan"]["Actual Rows"] == 1
        pages = top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"]
        assert pages < 100, f"{pages} pages were read"
