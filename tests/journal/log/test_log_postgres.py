"""What the log in PostgreSQL does beside the contract: wake-ups, restarts, failover, roles, migrations; and each rule
fails once its SQL is taken away.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
import trio
from attrs import evolve
from journal_samples import make_spec
from log_kit import NOW, claim, end, expire_node, join, keys, open_postgres, submit
from postgres_kit import Cluster, migrate_now, mutated, running_cluster
from psycopg.types.json import Jsonb

from polarnode.core.cursors import Cursor
from polarnode.core.errors import ConfigError, JournalError
from polarnode.core.task import EvaluationSpec, GroupSpec
from polarnode.journal.log.news import wait_events
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import FILLED_ANSWERS, ClaimOffer, Log, LogUnavailable, NodeFacts
from polarnode.journal.log.postgres import callbacks, connection, events, membership, places, postgres
from polarnode.journal.log.postgres.connection import LogConnection, check_dsn, open_database
from polarnode.journal.log.postgres.migrations import (
    Migration,
    check_version,
    prepare_tables,
    read_migrations,
)
from polarnode.journal.values import RetentionLimits

# ── wake-ups ──────────────────────────────────────────────────────────────────


async def test_finish_wakes_reader_elsewhere(dsn: str) -> None:
    async with open_postgres(dsn) as log, open_postgres(dsn, name="other") as other:
        node = await join(other)
        await submit(other, "t")
        (held,) = await claim(other, node)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other.finish_claim, held, end(held))
                seen = log.event_news
                while not (await log.events(Cursor())).page.events:
                    await wait_events(log, seen, 30)
                    seen = log.event_news


async def test_cancel_wakes_other_node(dsn: str) -> None:
    async with open_postgres(dsn) as log, open_postgres(dsn, name="other") as other:
        node = await join(log)
        await submit(log, "t")
        (held,) = await claim(log, node)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other.cancel, "t", NOW)
                seen = log.news
                while held.session_id not in await log.sessions_to_stop(node):
                    await log.wait_news(seen, 30)
                    seen = log.news


async def test_silent_node_loses_its_places(dsn: str) -> None:
    """No test waits for a lease elsewhere; here a node that signs and one that does not are watched."""
    async with open_postgres(dsn) as watcher, open_postgres(dsn, watch=False) as silent:
        alive = await join(watcher, "alive")
        dead = await join(silent, "dead")
        await submit(watcher, "t")
        await claim(silent, dead)
        with trio.fail_after(60):
            while not (again := await claim(watcher, alive)):
                await watcher.wait_news(watcher.news, 1)
        assert again[0].attempt == 1
        assert [each.incarnation for each in await watcher.nodes()] == [alive]


# ── the log is away ───────────────────────────────────────────────────────────


async def test_log_recovers_after_database_crash() -> None:
    with running_cluster() as cluster:
        async with open_postgres(cluster.database()) as log:
            node = await join(log)
            await submit(log, "t", num_samples=2)
            one, two = await claim(log, node)
            assert await log.finish_claim(one, end(one)) in FILLED_ANSWERS
            await trio.to_thread.run_sync(cluster.crash)
            with pytest.raises(LogUnavailable, match="the log is away") as raised:
                await log.finish_claim(two, end(two))
            assert raised.value.retry_after > 0
            with trio.fail_after(30):
                while await log.unavailable_reason() is None:  # noqa: ASYNC110 - its watcher says so
                    await trio.sleep(0.05)
            await trio.to_thread.run_sync(cluster.start)
            assert await log.finish_claim(one, end(one)) == "already"
            assert await log.finish_claim(two, end(two)) in FILLED_ANSWERS
            with trio.fail_after(30):
                while await log.unavailable_reason() is not None:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert await keys(log) == ["trajectory:t-0", "trajectory:t-1", "group:t", "task:t"]


async def test_database_outage_expires_no_node() -> None:
    with running_cluster() as cluster:
        dsn = cluster.database()
        async with open_postgres(dsn) as one, open_postgres(dsn, name="two") as two:
            first, second = await join(one, "one"), await join(two, "two")
            await submit(one, "t")
            await claim(one, first)
            await trio.sleep(1.5)  # each has seen the other's sign
            with cluster.frozen():
                await trio.sleep(7)  # longer than the lease
            await trio.sleep(2)
            with trio.fail_after(30):
                assert set(await one.read_signs()) == {first, second}
            assert len(await one.claims(first)) == 1


def test_stopped_client_releases_locks(dsn: str) -> None:
    """A process that is stopped within a transaction is ended by the server, and others go on."""
    with open_database(dsn, name="stopped") as db:
        db.execute("BEGIN")
        db.execute("UPDATE log SET position = position")
        began = time.monotonic()
        with open_database(dsn, name="other") as other:
            assert other.execute("UPDATE log SET position = position").rowcount == 1
        assert time.monotonic() - began < 15
        with pytest.raises(psycopg.Error):
            db.execute("COMMIT")


def test_bad_dsn_is_named() -> None:
    with pytest.raises(ConfigError, match="DSN of libpq") as raised:
        check_dsn("postgresql://user:secret@host/db?nonsense=1")
    assert "secret" not in str(raised.value)


def test_one_caller_waits_for_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited in line for the connection is not kept for another time-out each."""
    asked = list[str]()

    def refused(dsn: str, *, name: str) -> Any:
        asked.append(name)
        raise psycopg.OperationalError("no route to host")

    monkeypatch.setattr(connection, "open_database", refused)
    lost = LogConnection("", "x")
    for _ in range(3):
        with pytest.raises(LogUnavailable, match="no route to host"):
            lost.run_now(membership.read_signs)
    assert asked == ["x"]
    monkeypatch.setattr(connection, "REFUSE_CALLS_S", 0.0)
    with pytest.raises(LogUnavailable):
        lost.run_now(membership.read_signs)
    assert len(asked) == 2


def test_unreachable_server_raises_log_away() -> None:
    with pytest.raises(LogUnavailable, match="the log is away"):
        LogConnection("host=/nowhere dbname=x", "n").run_now(check_version)


# ── failover and restore ──────────────────────────────────────────────────────


async def test_promotion_reports_a_gap() -> None:
    """What an asynchronous standby lacks is a gap with a name; a node commits it again by its key."""
    with running_cluster() as primary:
        dsn = primary.database()
        name = dsn.rpartition("=")[2]
        async with open_postgres(dsn, watch=False) as log:
            node = await join(log)
            await submit(log, "t", num_samples=4)
            held = await claim(log, node)
            assert await log.finish_claim(held[0], end(held[0])) in FILLED_ANSWERS
            with primary.standby() as standby:
                _wait_replayed(primary, standby, name)
                standby.stop()  # it is behind from now on
                assert await log.finish_claim(held[1], end(held[1])) in FILLED_ANSWERS
                assert await log.finish_claim(held[2], end(held[2])) in FILLED_ANSWERS
                old = await log.acknowledge("c", Cursor(position=3, log=await log.log_name()), now=NOW)
                early = Cursor(position=1, log=old.log)
                primary.crash()
                standby.start()
                standby.promote()
                async with open_postgres(standby.dsn(name), watch=False) as other:
                    assert await other.log_name() != old.log
                    page = await other.events(old)
                    assert page.gap is not None
                    assert (page.gap.position, page.gap.asked) == (1, old)
                    assert "lost after event 1" in page.gap.reason
                    assert (await other.events(early)).gap is None, "who had read no more misses nothing"
                    # what was acknowledged at the old primary is not acknowledged here
                    assert (await other.acknowledge("c", old, now=NOW)).position == 1
                    assert await other.finish_claim(held[0], end(held[0])) == "already"
                    for each in held[1:]:
                        assert await other.finish_claim(each, end(each)) in FILLED_ANSWERS
                    assert len(await keys(other)) == 6


async def test_synchronous_standby_loses_nothing() -> None:
    with running_cluster() as primary:
        name = primary.database().rpartition("=")[2]
        with primary.standby(synchronous=True) as standby:
            async with open_postgres(primary.dsn_with(standby, name)) as log:
                node = await join(log)
                await submit(log, "t", num_samples=4)
                held = await claim(log, node)
                for each in held[:3]:
                    assert await log.finish_claim(each, end(each)) in FILLED_ANSWERS
                read = Cursor(position=3, log=await log.log_name())
                await trio.to_thread.run_sync(primary.crash)
                await trio.to_thread.run_sync(standby.promote)
                with trio.fail_after(60):
                    assert (
                        await retry_until_answered(
                            partial(log.finish_claim, held[0], end(held[0])), meanwhile=""
                        )
                        == "already"
                    )
                assert await log.log_name() != read.log
                assert (await log.events(read)).gap is None, "the new primary has all that was read"
                assert await log.finish_claim(held[3], end(held[3])) in FILLED_ANSWERS
                assert len(await keys(log)) == 6


def _wait_replayed(primary: Cluster, standby: Cluster, name: str) -> None:
    with psycopg.connect(primary.dsn(name), autocommit=True) as db:
        target = db.execute("SELECT pg_current_wal_lsn()").fetchone()
    with psycopg.connect(standby.dsn(name), autocommit=True) as db:
        for _ in range(600):
            row = db.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", target).fetchone()
            if row is not None and row[0]:
                return
            time.sleep(0.05)
    raise AssertionError("the standby did not follow")


async def test_unmarked_restore_is_found(cluster: Cluster) -> None:
    async with open_postgres(cluster.database(), watch=False) as log:
        await submit(log, "t")
        old = await log.log_name()
        page = await log.events(Cursor(position=9, log=old))
        assert page.gap is not None
        assert "mark it as restored" in page.gap.reason
        new = await log.mark_restored()
        assert new != old
        assert await log.log_name() == new
        page = await log.events(Cursor(position=9, log=old))
        assert page.gap is not None
        assert "was lost after event 0" in page.gap.reason
        unknown = await log.events(Cursor(position=9, log="elsewhere-1-0"))
        assert unknown.gap is not None
        assert "does not know the log elsewhere-1-0" in unknown.gap.reason


async def test_claim_lost_with_primary(dsn: str) -> None:
    """The log lost a claim; the node that has it finishes all the same, unless another claimed the place."""
    async with open_postgres(dsn, watch=False) as log:
        node = await join(log)
        await submit(log, "t", num_samples=2)
        one, two = await claim(log, node)
        with open_database(dsn, name="restore") as db:
            db.execute("UPDATE places SET state = 'queued', attempt = -1, incarnation = NULL")
        later = evolve(two, attempt=1, session_id="second-attempt")
        assert await log.finish_claim(one, end(one)) in FILLED_ANSWERS
        assert await log.finish_claim(later, end(later)) in FILLED_ANSWERS


# ── each rule fails without its SQL ───────────────────────────────────────────


async def _claimed_by_two(log: Log, other: Log) -> None:
    one, two = await join(log, "one"), await join(other, "two")
    await submit(log, "t", num_samples=40)
    taken: list[str] = []

    async def take(by: Log, node: int) -> None:
        for _ in range(20):
            taken.extend(each.session_id for each in await claim(by, node, 2))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, log, one)
        nursery.start_soon(take, other, two)
    assert sorted(taken) == sorted({*taken})
    assert len(taken) == 40


async def test_two_nodes_claim_different_places(dsn: str) -> None:
    async with open_postgres(dsn, watch=False) as log, open_postgres(dsn, watch=False) as other:
        await _claimed_by_two(log, other)


def test_claim_waits_for_no_lock(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim_beside_lock(statement: str) -> int:
        with (
            open_database(dsn, name="holder") as holder,
            open_database(dsn, name="node") as db,
            holder.transaction(),
        ):
            holder.execute("SELECT 1 FROM places WHERE place = 0 FOR UPDATE")
            db.execute("SET lock_timeout = '300ms'")
            values: dict[str, Any] = {
                "incarnation": node,
                "room": 9,
                "window": 9,
                "labels": Jsonb({}),
                "model": "",
                "images": [],
                "begun_only": False,
                "serving": Jsonb({}),
                "avoided": [],
            }
            return len(db.execute(statement.encode(), values).fetchall())

    with open_database(dsn, name="setup") as db:
        node = membership.join(db, NodeFacts(name="n")).incarnation
        _submit_now(db, "t", 3)
    without = places.CLAIM_QUEUED.replace(" SKIP LOCKED", "")
    assert without != places.CLAIM_QUEUED
    with pytest.raises(psycopg.errors.LockNotAvailable):
        claim_beside_lock(without)
    assert claim_beside_lock(places.CLAIM_QUEUED) == 2


def _submit_now(db: Any, task_id: str, num_samples: int, **more: Any) -> None:
    places.submit(
        db,
        make_spec(num_samples=num_samples, **more),
        task_id=task_id,
        session_ids=tuple(f"{task_id}-{index}" for index in range(num_samples)),
        idempotency_key=None,
        callback_kinds=("trajectory",),
        submitted=NOW,
    )


Rule = Callable[[Log], Any]


async def _fenced_out(log: Log) -> None:
    await submit(log, "t")
    old = await join(log)
    (held,) = await claim(log, old)
    await log.join(NodeFacts(name="n"))
    assert await log.finish_claim(held, end(held)) == "another"


async def _attempt_not_filled(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    await log.put_back(held, end(held, status="interrupted"))
    assert await log.finish_claim(held, end(held)) == "another"


async def _positions_after_pruning(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    await log.acknowledge("c", Cursor(position=3), now=NOW)
    assert await log.prune(RetentionLimits(acknowledged=0), now=NOW) == 3
    await submit(log, "u")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    assert [each.seq for each in (await log.events(Cursor(position=3))).page.events] == [4, 5, 6]


async def _whole_body(log: Log) -> None:
    """A body of which some parts are missing is written again before the place is filled."""
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    whole = end(held, turns=2)
    with open_database(log._writer.dsn, name="partly") as db:  # type: ignore[attr-defined]
        places.put_body(db, evolve(whole, parts=(b"other", *whole.parts[1:])), node)
    assert await log.finish_claim(held, whole) in FILLED_ANSWERS
    found = await log.trajectory("t-0")
    assert found is not None
    assert len(found.turns) == 2


async def _spent_is_ended(log: Log) -> None:
    await submit(log, "t", retries=0)
    node = await join(log)
    (held,) = await claim(log, node)
    await log.put_back(held)
    assert not await claim(log, node)
    assert len(await log.claim_endings(node, 9)) == 1


async def _identity_changes(log: Log) -> None:
    old = await log.log_name()
    assert await log.mark_restored() != old


async def _enough_stops(log: Log) -> None:
    await submit(log, "t", num_samples=2, group=GroupSpec(early_stop_min=1))
    node = await join(log)
    (held,) = await claim(log, node, 1)
    await log.finish_claim(held, end(held))
    assert not await claim(log, node)


async def _two_holders(log: Log) -> None:
    node, dead = await join(log), await join(log, "dead")
    await log.add_weights("v", {}, at=NOW)
    for each in (node, dead):
        await log.add_weight_holder("v", each)
    await expire_node(log, dead)
    assert not await log.make_current("v")


RULES: list[tuple[Rule, str, str]] = [
    (
        _fenced_out,
        "AND held.session_id = p_session AND held.incarnation = p_incarnation)",
        "AND held.session_id = p_session)",
    ),
    (
        _attempt_not_filled,
        "IF EXISTS (SELECT 1 FROM sessions WHERE session_id = p_session AND outcome IS NOT NULL) THEN\n        RETURN 'another'",
        "IF false THEN\n        RETURN 'another'",
    ),
    (
        _positions_after_pruning,
        "UPDATE log SET position = position + 1, stored = stored + p_bytes RETURNING position INTO given;",
        "SELECT coalesce(max(position), 0) + 1 INTO given FROM events; UPDATE log SET position = given;",
    ),
    (
        _whole_body,
        "IF NOT body_is_whole(p_session, p_incarnation, p_parts, p_bytes) THEN RETURN 'body'; END IF;\n    SELECT count(*)",
        "SELECT count(*)",
    ),
    (_spent_is_ended, "spent = spent OR lost_once_more,", "spent = spent,"),
    (_identity_changes, "UPDATE log SET restored = restored + 1;", ""),
    (_enough_stops, "enough = enough OR coalesce(usable + 1 >= early_stop_min, false)", "enough = enough"),
    (
        _two_holders,
        "WHERE weight_holders.number = wanted.number AND nodes.state = 'alive')) THEN",
        "WHERE weight_holders.number = wanted.number)) THEN",
    ),
]


@pytest.mark.parametrize(("rule", "sql", "without"), RULES, ids=[rule.__name__[1:] for rule, _, _ in RULES])
async def test_rule_needs_its_sql_clause(cluster: Cluster, rule: Rule, sql: str, without: str) -> None:
    async with open_postgres(cluster.database(), watch=False) as log:
        await rule(log)
    async with open_postgres(cluster.database(mutated(sql, without)), watch=False) as log:
        with _fails():
            await rule(log)


@contextlib.contextmanager
def _fails() -> Any:
    """Fail as a test does, or by writing a key twice; a mistake in the changed SQL is no proof."""
    with pytest.raises((AssertionError, psycopg.errors.UniqueViolation, JournalError)) as raised:
        yield
    assert not isinstance(raised.value, LogUnavailable)


# rules whose SQL is a statement of the node: the constant is replaced


async def _expired_by_old_sign(log: Log) -> None:
    node = await join(log)
    watched = (await log.read_signs())[node]
    await log.give_sign(node)
    assert not await log.declare_lost(node, watched)


async def _inherits(log: Log) -> None:
    await submit(log, "t")
    node = await join(log)
    await claim(log, node)
    assert len((await log.join(NodeFacts(name="n"))).inherited) == 1


async def _lost_retries_count(log: Log) -> None:
    await submit(log, "t", retries=0)
    node = await join(log)
    await claim(log, node)
    await expire_node(log, node)
    assert not await claim(log, await join(log, "other"))


async def _stale_claims_nothing(log: Log) -> None:
    node = await join(log)
    await log.add_weights("v", {}, shared=True, at=NOW)
    await log.make_current("v")
    await submit(log, "t")
    assert not await claim(log, node, serving={"": "u"})


async def _labels_required(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", requires={"zone": "x"})
    assert not await claim(log, node)


async def _lease_in_order(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", callback_url="http://r")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    assert len(await log.lease_callbacks(9, seconds=60)) == 1


async def _ack_never_back(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    await log.acknowledge("c", Cursor(position=3), now=NOW)
    assert (await log.acknowledge("c", Cursor(position=1), now=NOW)).position == 3


async def _retention_waits(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    await log.acknowledge("slow", Cursor(position=1), now=NOW)
    await log.acknowledge("quick", Cursor(position=3), now=NOW)
    assert await log.prune(RetentionLimits(acknowledged=0), now=NOW) == 1


CONSTANTS: list[tuple[Rule, Any, str, str, str]] = [
    (_expired_by_old_sign, membership, "DECLARE_LOST", "AND sign = %s", "AND %s >= 0"),
    (_inherits, membership, "JOIN_NODE", "old.name = began.name", "false"),
    (_lost_retries_count, places, "PUT_BACK_LOST", "spent OR retries >= held.max_retries", "spent"),
    (
        _stale_claims_nothing,
        places,
        "CLAIM_QUEUED",
        "w.version IS DISTINCT FROM %(serving)s ->> w.adapter",
        "%(serving)s IS NULL",
    ),
    (_labels_required, places, "CLAIM_QUEUED", "t.requires <@ %(labels)s", "%(labels)s IS NOT NULL"),
    (
        _lease_in_order,
        callbacks,
        "LEASE_CALLBACKS",
        "c.task_id > oldest.task_id",
        "c.position > oldest.position",
    ),
    (
        _ack_never_back,
        events,
        "INSERT_POSITION",
        "greatest(consumers.position, EXCLUDED.position)",
        "EXCLUDED.position",
    ),
    (
        _retention_waits,
        events,
        "SELECT_PRUNE_INPUTS",
        "SELECT min(position) FROM consumers",
        "SELECT max(position) FROM consumers",
    ),
]


@pytest.mark.parametrize(
    ("rule", "module", "name", "sql", "without"), CONSTANTS, ids=[each[0].__name__[1:] for each in CONSTANTS]
)
async def test_rule_needs_its_statement(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    rule: Rule,
    module: Any,
    name: str,
    sql: str,
    without: str,
) -> None:
    async with open_postgres(cluster.database(), watch=False) as log:
        await rule(log)
    text = getattr(module, name)
    assert sql in text
    monkeypatch.setattr(module, name, text.replace(sql, without))
    async with open_postgres(cluster.database(), watch=False) as log:
        with _fails():
            await rule(log)


def test_large_body_blocks_nobody(dsn: str) -> None:
    """A body of 100 MB is written in parts, and what holds the others is the short function alone."""
    with open_database(dsn, name="a") as db, open_database(dsn, name="b") as other:
        node = membership.join(db, NodeFacts(name="n")).incarnation
        for name in ("large", "small"):
            _submit_now(db, name, 1)
        large, small = places.claim(db, ClaimOffer(incarnation=node, room=2))
        body = end(large)
        body = evolve(body, parts=(*body.parts, *(bytes(4 << 20) for _ in range(25))))
        done = threading.Event()

        def finish_large() -> None:
            assert places.finish_claim(db, large, body) in FILLED_ANSWERS
            done.set()

        thread = threading.Thread(target=finish_large)
        thread.start()
        answers = 0
        while not done.is_set() and answers < 1:
            answers += places.finish_claim(other, small, end(small)) in FILLED_ANSWERS
        held = not done.is_set()
        thread.join()
        assert answers == 1
        assert held, "the small one was finished while the large one was written"


# ── sweeping ──────────────────────────────────────────────────────────────────


async def test_bodies_without_event_are_swept(dsn: str) -> None:
    async with open_postgres(dsn, watch=False) as log:
        node = await join(log)
        await submit(log, "t", num_samples=2)
        one, two = await claim(log, node)
        with open_database(dsn, name="x") as db:
            places.put_body(db, end(one), 999)  # of an incarnation that never finished
            await log.finish_claim(one, end(one))
            places.put_body(db, end(two), node)  # finishes now
            db.execute("UPDATE bodies SET at = at - interval '2 hours'")
            await log.prune(RetentionLimits(), now=NOW)
            rows = db.execute("SELECT DISTINCT session_id, written_by FROM bodies ORDER BY 1").fetchall()
        assert [tuple(row.values()) for row in rows] == [("t-0", node), ("t-1", node)]


async def test_refused_evaluations_are_swept(dsn: str) -> None:
    async with open_postgres(dsn, watch=False) as log:
        node, now = await join(log), time.time()
        spec = EvaluationSpec(task_id="t")
        for name, error, age in (("old", "unknown", 8), ("young", "unknown", 6), ("pending", None, 8)):
            await log.submit_evaluation(
                spec,
                {"x": error},
                evaluation_id=name,
                idempotency_key=None,
                incarnation=node,
                now=now - age * 86400,
            )
        await log.prune(RetentionLimits(), now=NOW)
        found = [name for name in ("old", "young", "pending") if await log.evaluation(name) is not None]
        assert found == ["young", "pending"]


async def test_old_weight_versions_are_swept(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "VERSIONS_KEPT", 2)
    async with open_postgres(dsn, watch=False) as log:
        for version in ("v1", "v2", "v3", "v4", "v5"):
            await log.add_weights(version, {"version": version}, shared=True, at=NOW)
            if version == "v2":
                assert await log.make_current(version)
        await log.prune(RetentionLimits(), now=NOW)
        assert [row.version for row in await log.weights()] == ["v5", "v4", "v2"]


async def test_incarnation_is_given_once(dsn: str) -> None:
    """A promoted standby that lacks the last start of a node gives its number to no other."""
    async with open_postgres(dsn, watch=False) as log:
        await log.log_name()
        node = await join(log, "a")
        with open_database(dsn, name="x") as db:  # as the standby had it
            db.execute("DELETE FROM nodes")
            db.execute("SELECT setval(pg_get_serial_sequence('nodes', 'incarnation'), %s, false)", (node,))
            db.execute("UPDATE log SET restored = restored + 1")
        other = await join(log, "b")
        assert other != node
        assert not await log.give_sign(node), "it joins again"
        assert await join(log, "c") == other + 1


async def test_retention_runs_by_itself(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "PRUNE_S", 0.05)
    async with open_postgres(dsn, retention=RetentionLimits(acknowledged=0)) as log:
        node = await join(log)
        for task in ("a", "b"):
            await submit(log, task)
            (held,) = await claim(log, node)
            await log.finish_claim(held, end(held))
        await log.acknowledge("trainer", Cursor(position=3), now=time.time())
        with trio.fail_after(60):
            while len(found := (await log.events(Cursor())).page.events) > 3:  # noqa: ASYNC110 - nobody tells of what was deleted
                await trio.sleep(0.05)
        assert [each.seq for each in found] == [4, 5, 6]
        with open_database(dsn, name="x") as db:
            row = db.execute("SELECT stored, (SELECT sum(bytes) FROM events) AS kept FROM log").fetchone()
            assert row is not None
            assert row["stored"] == row["kept"]


async def test_retention_spares_young_rows(dsn: str) -> None:
    """A node may tell a new primary of them again, where an unknown task is taken for a lost one."""
    async with open_postgres(dsn, watch=False) as log:
        node = await join(log)
        await submit(log, "t")
        (held,) = await claim(log, node)
        await log.finish_claim(held, end(held))
        await log.acknowledge("trainer", Cursor(position=3), now=NOW)
        with open_database(dsn, name="x") as db:
            assert events.prune(db, RetentionLimits(acknowledged=0), NOW, 9, young=NOW) == 0
            assert events.prune(db, RetentionLimits(acknowledged=0), NOW, 9, young=NOW + 1) == 3


# ── plans ─────────────────────────────────────────────────────────────────────

FILL = """
INSERT INTO tasks (task_id, group_id, submitted, spec, priority, requires, image, adapter, by_caller, max_retries,
    finished, enough)
SELECT 't' || n, 't' || n, 1, '{}', 0, '{}', '', '', false, 0, n <= 4000, n <= 4000 FROM generate_series(1, 8000) n;
INSERT INTO places (task_id, place, priority, number, state, session_id)
SELECT task_id, 0, 0, number, CASE WHEN finished THEN 'over' ELSE 'queued' END, 's' || number FROM tasks;
INSERT INTO sessions (session_id, task_id, place) SELECT session_id, task_id, place FROM places;
INSERT INTO events (position, kind, key, task_id, group_id, session_id, at, bytes)
SELECT number, 'trajectory', 'e' || number, task_id, task_id, 's' || number, 1, 1 FROM tasks WHERE finished;
INSERT INTO callbacks (position, task_id, url) SELECT position, task_id, 'http://r' FROM events WHERE position > 2000;
"""


def test_statements_use_indexes(dsn: str) -> None:
    """Each look of a node is by an index, whatever waits and whatever is over."""
    values: dict[str, Any] = {"incarnation": 1, "room": 2, "window": 9, "labels": Jsonb({}), "model": ""}
    values |= {
        "images": [],
        "begun_only": False,
        "serving": Jsonb({}),
        "avoided": [],
        "upto": 4000,
        "all": False,
        "limit": 9,
        "young": 2.0,
    }
    with open_database(dsn, name="x") as db:
        membership.join(db, NodeFacts(name="n"))
        for statement in FILL.split(";\n"):
            db.execute(statement.encode())
        db.execute("ANALYZE")
        for statement in (places.CLAIM_QUEUED, places.CLAIM_ENDINGS, events.SELECT_PRUNABLE):
            rows = db.execute(b"EXPLAIN " + statement.encode(), values).fetchall()
            plan = "\n".join(row["QUERY PLAN"] for row in rows)
            for table in ("tasks", "places", "sessions", "events", "callbacks"):
                assert f"Seq Scan on {table}" not in plan, plan


# ── migrations ────────────────────────────────────────────────────────────────


def test_migrations_are_applied_once(cluster: Cluster) -> None:
    dsn = cluster.database()
    assert migrate_now(dsn) == ()
    more = (*read_migrations(), Migration(number=9, name="0009_more.sql", text="CREATE TABLE more (a int)"))
    assert migrate_now(dsn, more) == ("0009_more.sql",)
    with (
        open_database(dsn, name="x") as db,
        pytest.raises(ConfigError, match=r"has migration 0009 .* knows up to 0003"),
    ):
        check_version(db)
    with pytest.raises(ConfigError, match="0009"):
        migrate_now(dsn)


def test_failed_migration_leaves_nothing(cluster: Cluster) -> None:
    dsn = cluster.database()
    broken = Migration(number=4, name="0004_broken.sql", text="CREATE TABLE half (a int); SELECT 1/0")
    with pytest.raises(ConfigError, match=r"0004_broken\.sql failed"):
        migrate_now(dsn, (*read_migrations(), broken))
    with open_database(dsn, name="x") as db:
        assert db.execute("SELECT to_regclass('half') AS found").fetchone() == {"found": None}
        check_version(db)


def test_nodes_begin_on_empty_database(cluster: Cluster) -> None:
    """One makes the tables and the others wait: what is made in between is no log of another version."""
    dsn = cluster.database(())
    refused: list[Exception] = []

    def begin() -> None:
        with open_database(dsn, name="x") as db:
            try:
                prepare_tables(db)
            except ConfigError as error:
                refused.append(error)

    nodes = [threading.Thread(target=begin) for _ in range(8)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert refused == []
    with open_database(dsn, name="x") as db:
        check_version(db)


def test_missing_migrations_are_named(cluster: Cluster) -> None:
    dsn = cluster.database(read_migrations()[:1])
    with (
        open_database(dsn, name="x") as db,
        pytest.raises(ConfigError, match=r"lacks 0002_functions\.sql, 0003_roles\.sql"),
    ):
        check_version(db)


async def test_task_stays_with_its_model(dsn: str) -> None:
    """A node of another model that joins later leaves what waits; the task itself stays as it was sent."""
    spec = make_spec(num_samples=1)
    async with open_postgres(dsn) as log:
        node = await join(log)
        record = await log.submit(spec, task_id="t", session_ids=("t-0",), submitted=NOW, model="policy")
        assert record.spec.requires == {}
        assert await claim(log, node, labels={"model": "judge"}) == ()
        (held,) = await claim(log, node, labels={"model": "policy"})
        assert held.spec.requires == {}


# ── roles ─────────────────────────────────────────────────────────────────────


def _login(cluster: Cluster, dsn: str, role: str) -> str:
    with (
        contextlib.suppress(psycopg.errors.DuplicateObject),
        psycopg.connect(cluster.dsn(), autocommit=True) as db,
    ):
        db.execute(f"CREATE ROLE a_{role} LOGIN IN ROLE polarnode_{role}".encode())
    return dsn.replace("user=postgres", f"user=a_{role}")


def test_restore_is_marked_without_search_path(cluster: Cluster) -> None:
    """An administrator's session has no search path of ours."""
    with psycopg.connect(cluster.database(), autocommit=True) as db:
        marked = "SELECT polarnode.mark_restored() AS identity"
        first, second = (db.execute(marked).fetchone() for _ in range(2))
    assert first is not None
    assert second is not None
    assert first != second


async def test_node_role_can_do_everything(cluster: Cluster) -> None:
    dsn = _login(cluster, cluster.database(), "node")
    async with open_postgres(dsn) as log:
        node = await join(log)
        await submit(log, "t", callback_url="http://r")
        (held,) = await claim(log, node)
        assert await log.finish_claim(held, end(held)) in FILLED_ANSWERS
        await log.acknowledge("c", Cursor(position=3), now=NOW)
        await log.lease_callbacks(1, seconds=1)
        await log.prune(RetentionLimits(), now=NOW)
        await log.mark_restored()
    with open_database(dsn, name="x") as db:
        for statement in (
            "CREATE TABLE polarnode.mine (a int)",
            "DELETE FROM migrations",
            "DROP TABLE events",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(statement.encode())


def test_reader_role_sees_no_prompt(cluster: Cluster) -> None:
    dsn = _login(cluster, cluster.database(), "reader")
    with open_database(dsn, name="x") as db:
        for statement in (
            "SELECT task_id, state FROM places",
            "SELECT position, kind, key FROM events",
            "SELECT name, state FROM nodes",
            "SELECT * FROM consumers",
        ):
            db.execute(statement.encode())
        for statement in (
            "SELECT spec FROM tasks",
            "SELECT data FROM bodies",
            "SELECT body FROM events",
            "SELECT outcome FROM sessions",
            "SELECT url FROM callbacks",
            "SELECT spec FROM evaluations",
            "UPDATE consumers SET position = 0",
            "SELECT mark_restored()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(statement.encode())
