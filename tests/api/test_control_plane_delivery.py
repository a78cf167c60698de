"""Delivery over a real socket: consumers as things, repeats that are known, readers that stop in the middle
and cost nobody anything.
"""

import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import attrs
import pytest
import trio
from control_plane_parts import Caller, Plane, Stream, open_plane
from journal_samples import make_identity, make_spec, make_trajectory
from journal_writes import publish_attempt, publish_end, submit_task

from polarnode.api import exports
from polarnode.api.query import Query
from polarnode.core.cursors import Cursor
from polarnode.http import server
from polarnode.journal import queries
from polarnode.journal.journal import Journal
from polarnode.journal.log.port import Log, LogPage
from polarnode.journal.values import EventPage, RetentionLimits, StoredEvent

Started = Callable[..., AbstractAsyncContextManager[tuple[Plane, Caller]]]


@pytest.fixture
def started(tmp_path: Path) -> Started:
    @asynccontextmanager
    async def starter(**more: Any) -> AsyncIterator[tuple[Plane, Caller]]:
        async with open_plane(tmp_path / "journal.sqlite", **more) as plane:
            yield plane, Caller(url=plane.url)

    return starter


async def publish(journal: Journal, *names: str, sampled: int = 3) -> None:
    """Sessions of nobody's task: an event each."""
    for name in names:
        trajectory = make_trajectory(name, task_id="x", sampled=sampled)
        journal.writer.record_turn(trajectory.turns[0])
        publish_end(journal, trajectory)
        await journal.writer.flush()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - a socket that the kernel gives up has no event here
        await trio.sleep(0.01)


async def acknowledge(client: Caller, consumer: str, seq: int) -> int:
    answer = await client.post("/v1/trajectories/ack", {"consumer": consumer, "seq": seq})
    return int(answer.json()["position"])


# ── consumers ─────────────────────────────────────────────────────────────────


async def test_consumers_are_listed_and_forgotten(started: Started) -> None:
    async with started() as (plane, client):
        assert (await client.get("/v1/consumers")).json() == {"consumers": []}
        await publish(plane.journal, "a", "b")
        async with client.stream(consumer="one/a b") as stream:
            await stream.event()
            (one,) = (await client.get("/v1/consumers")).json()["consumers"]
            assert (
                one["consumer"],
                one["position"],
                one["behind_events"],
                one["connected"],
                one["holds"],
            ) == ("one/a b", 0, 2, 1, True)
            assert set(one) == {
                "consumer",
                "position",
                "behind_events",
                "behind_bytes",
                "missed",
                "moved",
                "heard",
                "connected",
                "holds",
            }
            refused = await client.call("DELETE", f"/v1/consumers/{quote('one/a b')}")
            assert (refused.status, refused.json()["error"]["type"]) == (409, "conflict")
        await until(lambda: "one/a b" not in plane.journal.consumers.connected)
        assert await acknowledge(client, "one/a b", 1) == 1
        assert (await client.call("DELETE", f"/v1/consumers/{quote('one/a b', safe='')}")).json() == {
            "consumer": "one/a b",
            "forgotten": True,
        }
        assert (await client.call("DELETE", "/v1/consumers/none")).status == 404
        async with client.stream(consumer="one/a b", follow="false") as stream:
            assert await stream.rest() == ["trajectory:a", "trajectory:b"]


async def test_consumer_is_registered_by_any_stream(started: Started) -> None:
    """A consumer is known however its first stream begins."""
    async with started() as (plane, client):
        await publish(plane.journal, "a", "b")
        for name, params, headers in (("after", {"after": 1}, {}), ("header", {}, {"Last-Event-ID": "1"})):
            async with client.stream(headers, consumer=name, follow="false", **params) as stream:
                assert await stream.rest() == ["trajectory:b"]
        assert [(one.consumer, one.position) for one in plane.journal.consumers.describe()] == [
            ("after", 0),
            ("header", 0),
        ]


async def test_readers_of_one_name_share_position(started: Started) -> None:
    """Two readers of one name both read all, and share a position."""
    async with started() as (plane, client):
        await publish(plane.journal, "a", "b", "c")
        async with client.stream(consumer="one") as first, client.stream(consumer="one") as second:
            assert (
                [(await first.event())["id"] for _ in range(3)]
                == [(await second.event())["id"] for _ in range(3)]
                == ["1", "2", "3"]
            )
            assert plane.journal.consumers.describe()[0].connected == 2
            assert (await acknowledge(client, "one", 2), await acknowledge(client, "one", 1)) == (2, 2)
            await publish(plane.journal, "d")
            assert (await first.event())["id"] == (await second.event())["id"] == "4"


# ── redelivery ────────────────────────────────────────────────────────────────


async def all_kinds(plane: Plane) -> None:
    """A session that lost its place, the one that holds it, and their task's end."""
    submit_task(plane.journal, make_spec(), task_id="t", session_ids=("lost",), idempotency_key=None)
    lost = make_trajectory("lost")
    plane.journal.writer.record_turn(lost.turns[0])
    publish_attempt(
        plane.journal, attrs.evolve(lost, retried_as="again"), attrs.evolve(make_identity("again"), attempt=1)
    )
    await publish(plane.journal, "again")
    publish_end(plane.journal, make_trajectory("again", turns=0))
    await plane.journal.writer.flush()


async def test_event_is_identical_at_each_delivery(started: Started) -> None:
    kinds = "trajectory,group,task,attempt"

    async def read(client: Caller, **params: Any) -> list[tuple[str, str, Any]]:
        found = []
        async with client.stream(follow="false", kinds=kinds, arrays="base64", **params) as stream:
            while event := await stream.event():
                found.append((event["id"], event["data"]["key"], event["data"]))
        return found

    async with started() as (plane, client):
        await all_kinds(plane)
        first = await read(client, consumer="one")
        assert first[0][1] == "attempt:lost"
        assert await read(client, consumer="two") == first
        assert await acknowledge(client, "one", 1) == 1
        assert await read(client, consumer="one") == first[1:]
    async with started() as (_, client):
        assert await read(client, consumer="one") == first[1:]
        assert await read(client, after=0) == first


async def test_acknowledging_settles_a_gap(started: Started) -> None:
    async with started(retention=RetentionLimits(acknowledged=3 << 18, everything=3 << 18)) as (
        plane,
        client,
    ):
        await plane.journal.consumers.acknowledge("one", 0)
        await publish(plane.journal, *(f"s{number}" for number in range(100)), sampled=2000)
        oldest = plane.journal.commits.progress.first_seq
        assert plane.journal.consumers.describe()[0].missed == oldest - 1 > 0
        for name in ("one", "fresh"):
            for _ in range(2):  # again, until it is acknowledged
                async with client.stream(consumer=name, follow="false") as stream:
                    gap = await stream.event()
                    assert (gap["event"], gap["data"]["key"]) == ("gap", f"gap:0-{oldest}")
                    assert gap["data"]["gap"] == {
                        "after": 0,
                        "oldest": oldest,
                        "reason": f"retention deleted the events up to {oldest - 1}",
                    }
            assert await acknowledge(client, name, int(gap["id"])) == oldest - 1
            async with client.stream(consumer=name, follow="false") as stream:
                assert (await stream.event())["id"] == str(oldest)
        assert {one.missed for one in plane.journal.consumers.describe()} == {0}


@pytest.mark.parametrize("resumes", [True, False])
async def test_late_acknowledgement_leaves_no_gap(started: Started, *, resumes: bool) -> None:
    """Its next life's stream began before, and all others have read the events: they are pruned at once."""
    async with started(retention=RetentionLimits(acknowledged=0, everything=1 << 40)) as (plane, _):
        await plane.journal.consumers.acknowledge("one", 0)
        await publish(plane.journal, "a", "b", "c")
        query = Query(consumer="one", follow=False)
        stream = exports.event_stream(plane.service.log, query, Cursor(), resumes=resumes)
        assert await anext(stream) == exports.GREETING
        await plane.journal.consumers.acknowledge("one", 2)
        await until(lambda: plane.journal.commits.progress.first_seq == 3)
        text = b"".join([piece async for piece in stream])
        assert b"\nid: 3\n" in text
        assert (b"event: gap" in text) == (not resumes), "who asks for them by number is told"


async def test_gap_without_events_leads_onward(started: Started) -> None:
    async with started(retention=RetentionLimits(acknowledged=0, everything=0)) as (plane, client):
        await publish(plane.journal, "a")
        await until(lambda: plane.journal.commits.progress.first_seq == 2)
        async with client.stream(consumer="one", follow="false") as stream:
            said = (await stream.event())["data"]["gap"]
            assert (said["after"], said["oldest"]) == (0, 2)
            assert await stream.event() == {}
        assert await acknowledge(client, "one", 1) == 1
        async with client.stream(consumer="one", follow="false") as stream:
            assert await stream.event() == {}


# ── slow readers ──────────────────────────────────────────────────────────────

SESSIONS = 400  # of some 60 kB as JSON: 24 MB, more than the kernel takes of a connection that nobody reads
SAMPLED = 4000


def held_by_streams() -> int:
    """Bytes of the events that any stream has in its hands."""
    return sum(len(each.body) for each in gc.get_objects() if type(each) is StoredEvent)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> "Counter[str | None]":
    """How many pages each consumer's stream has read."""
    counted: Counter[str | None] = Counter()
    read = exports._look

    async def counting(log: Log, query: Query, seen: Cursor) -> Any:
        counted[query.consumer] += 1
        return await read(log, query, seen)

    monkeypatch.setattr(exports, "_look", counting)
    return counted


async def numbers(stream: Stream, last: int) -> list[int]:
    found: list[int] = []
    while not found or found[-1] < last:
        found.append(int((await stream.event())["id"]))
    return found


async def test_stopped_reader_resumes_exactly(started: Started, pages: "Counter[str | None]") -> None:
    """A reader that stops in the middle costs a page, and goes on exactly."""
    async with (
        started() as (plane, client),
        client.stream(consumer="slow") as slow,
        client.stream(consumer="quick") as quick,
    ):
        found: list[int] = []
        async with trio.open_nursery() as nursery:

            async def read_on() -> None:
                found.extend(await numbers(quick, SESSIONS))

            nursery.start_soon(read_on)
            await publish(plane.journal, "s0", sampled=SAMPLED)
            assert (await slow.event())["id"] == "1"
            for number in range(1, SESSIONS):
                await publish(plane.journal, f"s{number}", sampled=SAMPLED)
        assert found == list(range(1, SESSIONS + 1)), "who reads on has them all, as they come"
        assert pages["slow"] < pages["quick"], "the other is stuck in the middle"
        largest = max(len(event.body) for event in (await plane.journal.reader.events(SESSIONS - 1)).events)
        assert 0 < held_by_streams() <= 2 * (queries.PAGE_BYTES + largest)
        assert plane.journal.health.statistics().backlog_bytes == 0
        assert await numbers(slow, SESSIONS) == list(range(2, SESSIONS + 1)), (
            "and goes on where it was when it reads again"
        )


async def test_stalled_reader_is_cut_and_resumes(
    started: Started, pages: "Counter[str | None]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALLED_MS", 300)
    async with started() as (plane, client):
        await publish(plane.journal, *(f"s{number}" for number in range(SESSIONS)), sampled=SAMPLED)
        async with client.stream(consumer="slow") as slow:
            seen = [int((await slow.event())["id"])]
            await until(lambda: "slow" not in plane.journal.consumers.connected)
            assert pages["slow"] < SESSIONS / EVENTS_OF_A_PAGE
            with pytest.raises(trio.BrokenResourceError):
                await read_to_the_cut(slow, seen)
        assert seen == list(range(1, len(seen) + 1)), "what the kernel had is whole"
        async with client.stream({"Last-Event-ID": str(seen[-1])}, consumer="slow") as stream:
            assert await numbers(stream, SESSIONS) == list(range(seen[-1] + 1, SESSIONS + 1))


async def read_to_the_cut(stream: Stream, seen: list[int]) -> None:
    while event := await stream.event():
        seen.append(int(event["id"]))


EVENTS_OF_A_PAGE = queries.PAGE_BYTES // 60_000


# ── how events are written ────────────────────────────────────────────────────


JOURNAL = "j0123456789abcdef"


def test_small_events_join_large_split() -> None:
    """Small events leave together, and large ones in pieces."""
    small = tuple(
        StoredEvent(seq=seq, kind="group", key=f"group:{seq}", body=b'{"a":1}') for seq in range(1, 5)
    )
    large = StoredEvent(
        seq=5, kind="trajectory", key="trajectory:l", body=b'"' + b"x" * (3 * exports.WRITE_BYTES) + b'"'
    )
    assert len(pieces_of(small)) == 1
    pieces = pieces_of((*small, large, *small))
    assert max(map(len, pieces)) <= 2 * exports.WRITE_BYTES
    assert b"".join(pieces) == b"".join(
        b"event: %b\nid: %d\ndata: %b\n\n" % (event.kind.encode(), event.seq, event.json(JOURNAL))
        for event in (*small, large, *small)
    )
    assert EventPage(events=small, seen=4, first_seq=1, last_seq=4).follows(0)


def pieces_of(events: tuple[StoredEvent, ...]) -> list[bytes]:
    alone: Any = SimpleNamespace(shared=False)
    page = EventPage(events=events, seen=0, first_seq=1, last_seq=9)
    return list(exports._pieces(alone, LogPage(log=JOURNAL, page=page)))


# ── beginning at the newest event ─────────────────────────────────────────────


async def test_new_reader_may_begin_at_newest(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        await publish(plane.journal, "old")
        begun = plane.journal.commits.progress.last_seq
        async with (
            caller.stream(begin="newest") as stream,
            caller.stream(begin="newest", consumer="c") as other,
        ):
            assert (await stream.block())["comment"] == "polarnode"
            assert await stream.block() == {"id": str(begun)}, "where a browser begins again"
            await publish(plane.journal, "new")
            for each in (stream, other):
                assert (await each.event())["data"]["key"] == "trajectory:new"
        assert (await caller.get("/v1/consumers")).json()["consumers"][0]["position"] == begun
        # a consumer that has a position goes on from it
        async with caller.stream(begin="newest", consumer="c", follow="false") as stream:
            assert "trajectory:new" in await stream.rest()
        headers = {"Last-Event-ID": "0"}
        async with caller.stream(headers, begin="newest", follow="false") as stream:
            assert (await stream.rest())[0] == "trajectory:old"
        both = await caller.get("/v1/trajectories/stream", begin="newest", after=0)
        assert (both.status, both.json()["error"]["message"]) == (
            400,
            "begin cannot go with after: send one of them",
        )
