"""Who is waited for, and what is kept for whom: consumers, retention by bytes and age, what callbacks are
owed.
"""

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from journal_samples import Clock, make_identity, make_spec, make_trajectory, make_turn
from journal_writes import cancel_task, publish_end, submit_task

from polarnode.core.errors import ConfigError, Refused
from polarnode.journal import consumers, health, pending_callbacks, queries, retention, writer
from polarnode.journal.entries import ROW_BYTES, JournalEntry
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.queries import ByteCache
from polarnode.journal.values import EventFilters, RetentionLimits, json_encoder
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.settings import retention_settings

Open = Callable[..., AbstractAsyncContextManager[Journal]]
HOUR = 3600.0
ALL = RetentionLimits(acknowledged=1 << 40, everything=1 << 50)  # nothing goes for its size


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Open:
    @asynccontextmanager
    async def opener(**more: Any) -> AsyncIterator[Journal]:
        async with open_journal(tmp_path / "journal.sqlite", now=lambda: clock.time, **more) as found:
            yield found

    return opener


def accepted(seq: int) -> JournalEntry:
    """The receiver of an event accepted it."""
    return JournalEntry(ROW_BYTES, partial(pending_callbacks.delete_callback, seq=seq))


async def publish(found: Journal, *names: str, sampled: int = 3, **spec: Any) -> None:
    """A task of one session each: three events."""
    for name in names:
        submit_task(
            found, make_spec(**spec), task_id=f"task-{name}", session_ids=(name,), idempotency_key=None
        )
        trajectory = make_trajectory(name, task_id=f"task-{name}", sampled=sampled)
        found.writer.record_turn(trajectory.turns[0])
        publish_end(found, trajectory)
        await found.writer.flush()


async def commit(found: Journal) -> None:
    """Something else is written: what is due goes."""
    cancel_task(found, "nobody's")
    await found.writer.flush()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the writer does by itself."""
    while not holds():  # noqa: ASYNC110 - a commit that nobody asked for has no event
        await trio.sleep(0.01)


# ── consumers as things ───────────────────────────────────────────────────────


async def test_consumers_are_listed_with_lag(opened: Open, clock: Clock) -> None:
    async with opened() as found:
        await found.consumers.acknowledge("slow", 0)
        await publish(found, "a", "b")
        clock.time = 2000.0
        await found.consumers.acknowledge("quick", 5)
        clock.time = 3000.0
        await found.consumers.acknowledge("quick", 4)
        quick, slow = found.consumers.describe()
        assert (quick.consumer, quick.position, quick.behind_events, quick.moved, quick.last_seen) == (
            "quick",
            5,
            1,
            2000.0,
            3000.0,
        )
        assert (slow.consumer, slow.position, slow.behind_events, slow.moved, slow.missed) == (
            "slow",
            0,
            6,
            1000.0,
            0,
        )
        stored = found.health.statistics().stored_bytes
        assert slow.behind_bytes == stored
        assert quick.behind_bytes == stored // 6
    async with opened() as found:
        assert [(each.consumer, each.position, each.moved) for each in found.consumers.describe()] == [
            ("quick", 5, 2000.0),
            ("slow", 0, 1000.0),
        ]


async def test_forgotten_consumer_starts_over(opened: Open) -> None:
    async with opened() as found:
        await publish(found, "a")
        await found.consumers.acknowledge("one", 2)
        assert await found.consumers.forget("one")
        assert not await found.consumers.forget("one")
        assert found.consumers.describe() == ()
        assert found.consumers.position("one") == 0
        assert await found.consumers.acknowledge("one", 1) == 1


async def test_departing_reader_revives_no_consumer(opened: Open) -> None:
    """A reader that leaves does not bring a forgotten consumer back."""
    async with opened() as found:
        await found.consumers.acknowledge("one", 0)
        found.consumers.track_stream("one", 1)
        assert found.consumers.connected == {"one"}
        found.consumers.track_stream("one", 1)
        assert [each.connected for each in found.consumers.describe()] == [2]
        found.consumers.track_stream("one", -1)
        await found.consumers.forget("one")
        found.consumers.track_stream("one", -1)
        await found.writer.flush()
        assert (found.consumers.describe(), found.consumers.connected) == ((), frozenset())


async def test_too_many_consumers_are_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "MAX_CONSUMERS", 2)
    async with opened() as found:
        await found.consumers.acknowledge("one", 0)
        await found.consumers.acknowledge("two", 0)
        with pytest.raises(Refused, match="DELETE /v1/consumers"):
            await found.consumers.acknowledge("three", 0)
        assert await found.consumers.acknowledge("two", 0) == 0
        await found.consumers.forget("one")
        assert await found.consumers.acknowledge("three", 0) == 0


async def test_silent_consumer_makes_room_for_new(
    opened: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "MAX_CONSUMERS", 2)
    async with opened(retention=attrs.evolve(ALL, silence_s=HOUR)) as found:
        for name in ("first", "second"):
            await found.consumers.acknowledge(name, 0)
            clock.time += 2 * HOUR
        await found.consumers.acknowledge("third", 0)
        assert [each.consumer for each in found.consumers.describe()] == ["second", "third"]
    assert retention.MAX_CONSUMERS == 200


# ── who is waited for ─────────────────────────────────────────────────────────


async def test_silent_consumer_holds_no_events(opened: Open, clock: Clock) -> None:
    """A consumer that is silent for too long holds nothing but its place."""
    limits = attrs.evolve(ALL, acknowledged_s=HOUR, silence_s=10 * HOUR)
    async with opened(retention=limits) as found:
        await found.consumers.acknowledge("gone", 0)
        await publish(found, "a", "b")
        await found.consumers.acknowledge("here", 3)
        clock.time += 10 * HOUR
        await found.consumers.acknowledge("here", 4)
        assert {each.consumer: each.holds for each in found.consumers.describe()} == {
            "gone": False,
            "here": True,
        }
        assert found.health.statistics().acknowledged_seq == 4
        clock.time += HOUR
        await commit(found)
        assert found.commits.progress.first_seq == 5
        gone, here = found.consumers.describe()
        assert (gone.position, gone.missed, gone.behind_events) == (0, 4, 2)
        assert (here.position, here.missed) == (4, 0)


async def test_node_downtime_is_no_silence(opened: Open, clock: Clock) -> None:
    limits = attrs.evolve(ALL, silence_s=HOUR)
    async with opened(retention=limits) as found:
        await found.consumers.acknowledge("away", 0)
    clock.time += 100 * HOUR
    async with opened(retention=limits) as found:
        assert found.consumers.describe()[0].holds
        clock.time += 2 * HOUR
        assert not found.consumers.describe()[0].holds
        await found.consumers.acknowledge("away", 0)
        assert found.consumers.describe()[0].holds


async def test_open_stream_is_never_silent(opened: Open, clock: Clock) -> None:
    async with opened(retention=attrs.evolve(ALL, silence_s=HOUR)) as found:
        await found.consumers.acknowledge("reading", 0)
        found.consumers.track_stream("reading", 1)
        clock.time += 100 * HOUR
        await commit(found)
        assert found.consumers.describe()[0].holds
        found.consumers.track_stream("reading", -1)
        await found.writer.flush()
        assert found.consumers.describe()[0].last_seen == clock.time


async def test_unread_events_remain_without_consumers(opened: Open, clock: Clock) -> None:
    """Where no consumer is waited for, events that nobody has read remain."""
    limits = RetentionLimits(acknowledged=0, everything=1 << 50, silence_s=HOUR)
    async with opened(retention=limits) as found:
        await publish(found, "a")
        assert found.commits.progress.first_seq == 1, "without a consumer nothing is acknowledged"
        await found.consumers.acknowledge("one", 1)
        await found.consumers.acknowledge("two", 2)
        clock.time += 2 * HOUR
        await commit(found)
        assert found.commits.progress.first_seq == 2


# ── retention ─────────────────────────────────────────────────────────────────


async def test_acknowledged_events_expire_by_age(opened: Open, clock: Clock) -> None:
    async with opened(retention=attrs.evolve(ALL, acknowledged_s=HOUR)) as found:
        await publish(found, "a", "b")
        clock.time += 50 * HOUR
        await found.consumers.acknowledge("one", 3)  # old events, acknowledged just now
        await commit(found)
        assert found.commits.progress.first_seq == 1
        clock.time += HOUR / 2
        await found.consumers.acknowledge("one", 6)
        clock.time += HOUR / 2
        await commit(found)
        assert (
            found.commits.progress.first_seq,
            await found.reader.query(queries.trajectory, "a"),
            await found.reader.query(queries.task, "task-a"),
        ) == (4, None, None)
        assert await found.reader.query(queries.trajectory, "b") is not None
        clock.time += HOUR / 2
        await commit(found)
        assert found.commits.progress.first_seq == 7


async def test_new_consumer_makes_events_unacknowledged(opened: Open, clock: Clock) -> None:
    async with opened(retention=attrs.evolve(ALL, acknowledged_s=HOUR)) as found:
        await publish(found, "a")
        await found.consumers.acknowledge("one", 3)
        clock.time += HOUR / 2
        await found.consumers.acknowledge("new", 0)
        clock.time += HOUR
        await commit(found)
        assert found.commits.progress.first_seq == 1
        await found.consumers.acknowledge("new", 3)
        await commit(found)
        assert found.commits.progress.first_seq == 1, "an hour from when all had it"
        clock.time += HOUR
        await commit(found)
        assert found.commits.progress.first_seq == 4


async def test_expired_events_go_without_writes(
    opened: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PRUNE_INTERVAL_S", 0.01)
    async with opened(retention=attrs.evolve(ALL, acknowledged_s=HOUR)) as found:
        await publish(found, "a")
        await found.consumers.acknowledge("one", 3)
        clock.time += HOUR
        await until(lambda: found.commits.progress.first_seq == 4)


async def test_low_disk_prunes_acknowledged_events(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(retention=ALL) as found:
        await publish(found, "a", "b")
        await found.consumers.acknowledge("one", 4)
        monkeypatch.setattr(writer, "PRUNE_DISK_FREE_BYTES", 1 << 62)
        await commit(found)
        assert found.commits.progress.first_seq == 5


async def test_pruning_pauses_and_continues(opened: Open) -> None:
    names = [f"s{number}" for number in range(200)]
    async with opened(retention=ALL) as found:
        await publish(found, *names, sampled=2000)
        stored = found.health.statistics().stored_bytes
    most = stored // 2
    async with opened(retention=RetentionLimits(acknowledged=1 << 20, everything=most)) as found:
        await commit(found)
        await until(lambda: found.health.statistics().stored_bytes <= most)
        assert most * 0.8 < found.health.statistics().stored_bytes <= most
        assert (await found.reader.events(found.commits.progress.first_seq - 1, limit=1000)).events[
            0
        ].seq == found.commits.progress.first_seq


async def test_callback_events_are_kept(opened: Open, tmp_path: Path) -> None:
    """What a callback was or will be sent is kept until all of it goes."""
    url = "http://127.0.0.1:9/"
    async with opened(retention=RetentionLimits(acknowledged=0, everything=1 << 50)) as found:
        await found.consumers.acknowledge("one", 0)
        await publish(found, "a")
        await publish(found, "b", callback_url=url)
        await publish(found, "c")
        await found.consumers.acknowledge("one", 9)
        await commit(found)
        assert found.commits.progress.first_seq == 4, "b is owed to its callback"
        for seq in (4, 5, 6):
            found.writer.write(accepted(seq))
        await commit(found)
        assert found.commits.progress.first_seq == 10
        submit_task(
            found,
            make_spec(num_samples=2, callback_url=url),
            task_id="t",
            session_ids=("x", "y"),
            idempotency_key=None,
        )
        publish_end(found, make_trajectory("x", task_id="t", turns=0))
        await found.writer.flush()
        found.writer.write(accepted(10))
        await found.consumers.acknowledge("one", 10)
        await commit(found)
        assert found.commits.progress.first_seq == 10, "its task's end may tell of all its sessions"
    async with opened(retention=RetentionLimits(acknowledged=0, everything=0)) as found:
        await commit(found)
        assert found.commits.progress.first_seq == 11
        assert [
            left.identity.session_id for left in await found.reader.query(queries.unfinished_sessions)
        ] == ["y"], "a session that is not over stays"
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        assert db.execute("SELECT count(*) FROM callbacks WHERE seq <= 10").fetchone() == (0,)
    db.close()


async def test_taskless_session_is_pruned_whole(opened: Open) -> None:
    async with opened(retention=RetentionLimits(acknowledged=0, everything=1 << 50)) as found:
        found.writer.record_session(make_identity("capture", task_id="capture-1"))
        found.writer.record_turn(make_turn("capture"))
        publish_end(found, make_trajectory("capture", task_id="capture-1"))
        await found.writer.flush()
        await found.consumers.acknowledge("one", 1)
        await commit(found)
        assert (
            await found.reader.query(queries.session, "capture"),
            await found.reader.query(queries.turns, "capture"),
            found.commits.progress.first_seq,
        ) == (
            None,
            (),
            2,
        )


def test_retention_defaults_match_settings() -> None:
    assert retention_settings(NodeConfig()) == RetentionLimits()
    said = NodeConfig(keep_acknowledged_mb=1, keep_mb=2, keep_acknowledged_hours=0.5, consumer_hours=2.0)
    assert retention_settings(said) == RetentionLimits(
        acknowledged=1 << 20, everything=2 << 20, acknowledged_s=1800.0, silence_s=7200.0
    )


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("keep_acknowledged_mb = 0", "keep_acknowledged_mb must be 1 to keep_mb"),
        ("keep_mb = 100", "keep_acknowledged_mb must be 1 to keep_mb"),
        ("keep_acknowledged_hours = 0", "more than 0 hours"),
        ("consumer_hours = inf", "more than 0 hours"),
    ],
)
def test_invalid_limits_are_refused(toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(toml=toml)


# ── what whoever holds tasks back is told ─────────────────────────────────────


async def test_waiting_events_and_age_are_reported(opened: Open, clock: Clock) -> None:
    async with opened() as found:
        await found.consumers.acknowledge("one", 0)
        assert (
            found.health.statistics().unacknowledged_events,
            found.health.statistics().oldest_unacknowledged_s,
        ) == (
            0,
            None,
        )
        await publish(found, "a")
        clock.time += 100
        await publish(found, "b")
        await found.consumers.acknowledge("one", 1)
        clock.time += 10
        state = found.health.statistics()
        assert (state.acknowledged_seq, state.unacknowledged_events, state.oldest_unacknowledged_s) == (
            1,
            5,
            110.0,
        )
        assert 0 < state.unacknowledged_bytes < state.stored_bytes < state.most_bytes
        await found.consumers.acknowledge("one", 6)
        assert (
            found.health.statistics().unacknowledged_bytes,
            found.health.statistics().oldest_unacknowledged_s,
        ) == (
            0,
            None,
        )


async def test_free_pages_count_as_room(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(retention=RetentionLimits(acknowledged=3 << 18, everything=1 << 50)) as found:
        await found.consumers.acknowledge("one", 0)
        await publish(found, *(f"s{number}" for number in range(60)), sampled=4000)
        await found.consumers.acknowledge("one", 180)
        await until(lambda: found.health.statistics().stored_bytes <= 3 << 18)
        state = found.health.statistics()
        assert state.free_bytes > 1 << 19
        monkeypatch.setattr(health, "DISK_FREE_BYTES", state.disk_free + state.free_bytes // 2)
        assert not found.health.statistics().refuses_tasks
        monkeypatch.setattr(health, "WAL_KEPT_BYTES", 1 << 62)
        assert found.health.statistics().refuses_tasks, "what is written anew goes through a log first"


# ── what is made once ─────────────────────────────────────────────────────────


async def test_event_json_is_cached_between_readers(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON of an event is made once for all consumers that read alike."""
    async with opened() as found:
        await publish(found, "a", "b")
        first = await found.reader.events(0, encoder=json_encoder("base64"))
        again = await found.reader.events(
            0, encoder=json_encoder("base64"), filters=EventFilters(kinds=("trajectory",))
        )
        other = await found.reader.events(0, encoder=json_encoder("json"))
        assert again.events[1].body is first.events[3].body
        assert other.events[0].body != first.events[0].body


def test_recent_cache_respects_its_bound() -> None:
    recent, made = ByteCache(limit=100), []

    def make(size: int) -> bytes:
        made.append(size)
        return bytes(size)

    for key, size in (
        ("a", 40),
        ("b", 40),
        ("a", 40),
        ("c", 40),
        ("a", 40),
        ("b", 40),
        ("large", 60),
        ("large", 60),
    ):
        assert len(recent.get(key, lambda size=size: make(size))) == size  # type: ignore[misc]
        assert recent.cached_bytes <= 100
    assert made == [40, 40, 40, 40, 60, 60], "b was the least lately used; what is too large is never kept"


async def test_concurrent_requests_share_one_value() -> None:
    """Concurrent requests make a value once, and each gets a failure of its own."""
    recent, made = ByteCache(), []

    def slowly() -> bytes:
        made.append(1)
        trio.from_thread.run(trio.sleep, 0.05)
        return b"x"

    async def ask() -> None:
        assert await trio.to_thread.run_sync(lambda: recent.get("k", slowly)) == b"x"

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ask)
    assert made == [1]

    def fails() -> bytes:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            recent.get("bad", fails)
    assert recent.get("bad", lambda: b"good") == b"good"
