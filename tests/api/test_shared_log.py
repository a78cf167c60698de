"""Control planes of nodes that share one PostgreSQL: what a reader at one sees of another, and what it is told
while the database is away or another one has taken its place.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from control_plane_parts import Answer, Caller, Plane, open_plane
from journal_samples import make_spec
from log_kit import claim, end, join, open_postgres
from postgres_kit import Cluster, running_cluster

from polarnode.api.exports import _encoded_lines
from polarnode.api.query import Query
from polarnode.client import PolarnodeClient
from polarnode.core.codec.json import plain
from polarnode.core.codec.tasks import task_json
from polarnode.core.cursors import Cursor
from polarnode.journal import queries
from polarnode.journal.log.port import FILLED_ANSWERS, Log, LogUnavailable, NodeFacts
from polarnode.journal.values import json_encoder

STEP_S = 0.05  # between looks at what comes within a second


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


@asynccontextmanager
async def open_planes(dsn: str, folder: Path, count: int = 2) -> AsyncIterator[list[tuple[Plane, Caller]]]:
    """Control planes, each over a connection of its own to the same log."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            log = await stack.enter_async_context(open_postgres(dsn, name=f"n{number}"))
            path = folder / f"n{number}" / "journal.sqlite"
            path.parent.mkdir()
            plane = await stack.enter_async_context(open_plane(path, log=log))
            found.append((plane, Caller(url=plane.url)))
        yield found


async def run_task(log: Log, node: int, name: str) -> None:
    await log.submit(make_spec(), task_id=name, session_ids=(f"{name}-0",), submitted=1.0)
    for held in await claim(log, node):
        assert await log.finish_claim(held, end(held)) in FILLED_ANSWERS


async def until_away(log: Log, *, away: bool) -> None:
    while (await log.unavailable_reason() is not None) != away:  # noqa: ASYNC110 - what it waits for is a server
        await trio.sleep(STEP_S)


async def until_answered(ask: Callable[[], Awaitable[Answer]], holds: Callable[[Any], bool]) -> Any:
    while not holds(said := (await ask()).json()):  # noqa: ASYNC110 - the same
        await trio.sleep(STEP_S)
    return said


def error_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["type"]


# ── readers ───────────────────────────────────────────────────────────────────


async def test_readers_at_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Each has every event once and in order, and both write the same positions."""
    async with open_planes(cluster.database(), tmp_path) as ((first, one), (second, two)):
        logs = (first.service.log, second.service.log)
        nodes = [await join(log, f"n{number}") for number, log in enumerate(logs)]
        async with one.stream(consumer="a") as left, two.stream(consumer="b") as right:
            async with trio.open_nursery() as nursery:

                async def work(which: int) -> None:
                    for number in range(4):
                        await run_task(logs[which], nodes[which], f"t{which}{number}")

                for which in range(2):
                    nursery.start_soon(work, which)
            read = [[await stream.event() for _ in range(24)] for stream in (left, right)]
        name = await logs[0].log_name()
        assert read[0] == read[1]
        assert [each["id"] for each in read[0]] == [f"{name}:{number}" for number in range(1, 25)]
        assert len({each["data"]["key"] for each in read[0]}) == 24
        assert {each["data"]["journal"] for each in read[0]} == {name}


async def test_acknowledgement_counts_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    async with open_planes(cluster.database(), tmp_path) as ((first, one), (_, two)):
        log = first.service.log
        await run_task(log, await join(log), "t")
        async with one.stream(consumer="c") as stream:
            position = (await stream.event())["id"]
            answer = (await one.post("/v1/trajectories/ack", {"consumer": "c", "id": position})).json()
            name = await log.log_name()
            assert answer == {"consumer": "c", "position": 1, "id": f"{name}:1", "pending": []}
            said = await until_answered(
                lambda: two.get("/v1/consumers"), lambda said: said["consumers"][0]["connected"] == 1
            )
            assert said["consumers"][0]["position"] == 1
            assert error_of(await two.call("DELETE", "/v1/consumers/c")) == (409, "conflict")
        async with two.stream(consumer="c", follow="false") as stream:
            assert await stream.rest() == ["group:t", "task:t"], "it goes on at another node"
        async with two.stream({"Last-Event-ID": position}, follow="false") as stream:
            assert await stream.rest() == ["group:t", "task:t"]
        async with two.stream(after=2, follow="false") as stream:
            assert await stream.rest() == ["task:t"], "a bare number is one of the log as it is now"


async def test_client_continues_at_another_node(cluster: Cluster, tmp_path: Path) -> None:
    def read(caller: Caller) -> list[tuple[str, str]]:
        client = PolarnodeClient(caller.url, token=caller.token)
        events = client.trajectories(consumer="c", ack=True, follow=False)
        return [(each.key, each.id) for each in events]

    def acknowledge(caller: Caller, position: int | str) -> int | str:
        return PolarnodeClient(caller.url, token=caller.token).acknowledge("c", position)

    async with open_planes(cluster.database(), tmp_path) as ((first, one), (_, two)):
        log = first.service.log
        node, name = await join(log), await log.log_name()
        await run_task(log, node, "a")
        found = await trio.to_thread.run_sync(read, one)
        assert found == [("trajectory:a-0", f"{name}:1"), ("group:a", f"{name}:2"), ("task:a", f"{name}:3")]
        await run_task(log, node, "b")
        assert [key for key, _ in await trio.to_thread.run_sync(read, two)] == [
            "trajectory:b-0",
            "group:b",
            "task:b",
        ]
        for position in (f"{name}:5", 5):
            assert await trio.to_thread.run_sync(acknowledge, one, position) == f"{name}:6", "never back"


async def test_reads_at_another_node(cluster: Cluster, tmp_path: Path) -> None:
    async with open_planes(cluster.database(), tmp_path) as ((first, one), (second, two)):
        assert (await one.post("/v1/tasks", task_json(make_spec(task_id="t")))).status == 202
        log = first.service.log
        node = await join(log)
        for held in await claim(log, node):
            await log.finish_claim(held, end(held))
        whole = (await two.get("/v1/tasks/t")).json()
        assert whole["counts"] == {"completed": 1}
        session = whole["sessions"][0]["session_id"]
        assert (await two.get(f"/v1/trajectories/{session}")).json()["task_id"] == "t"
        assert len((await two.get(f"/v1/sessions/{session}")).json()["turns"]) == 1
        assert [each["task_id"] for each in (await two.get("/v1/groups")).json()["groups"]] == ["t"]
        assert len((await two.get("/v1/export")).text.splitlines()) == 1
        assert not await second.journal.reader.query(queries.tasks), "nothing of it is in its own journal"


async def test_status_lists_every_node(cluster: Cluster, tmp_path: Path) -> None:
    async with open_planes(cluster.database(), tmp_path, count=1) as ((plane, one),):
        log = plane.service.log
        facts = NodeFacts(name="n7", url="https://a:secret@10.0.0.7:8080", version="1", labels={"gpu": "x"})
        node = (await log.join(facts)).incarnation
        await log.submit(make_spec(), task_id="t", session_ids=("t-0",), submitted=1.0)
        await claim(log, node)
        said = await until_answered(
            lambda: one.get("/v1/status"), lambda said: said["queued"] == 1 and said["log"]["identity"]
        )
        assert said["log"] == {"kind": "postgresql", "identity": await log.log_name(), "away": None}
        assert said["nodes"] == [
            {
                "name": "n7",
                "url": "https://10.0.0.7:8080",
                "state": "alive",
                "running": 1,
                "draining": False,
                "labels": {"gpu": "x"},
                "serving": {},
                "version": "1",
            }
        ]
        text = (await one.get("/metrics")).text
        assert "polarnode_open_places 1.0" in text
        assert "polarnode_log_away 0.0" in text


async def test_old_fleet_position_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    async with open_planes(cluster.database(), tmp_path, count=1) as ((_, one),):
        answer = await one.get("/v1/trajectories/stream", after="vAAAAAAAAAAAB")
        assert error_of(answer) == (400, "invalid_request")
        assert "a fleet of an earlier release" in answer.json()["error"]["message"]
        headers = {"Last-Event-ID": "vAAAAAAAAAAAB"}
        answer = await one.call("GET", "/v1/trajectories/stream", headers=headers)
        assert error_of(answer) == (400, "invalid_request")


# ── the log is away ───────────────────────────────────────────────────────────


async def test_missing_log_is_answered_503(tmp_path: Path) -> None:
    with running_cluster() as cluster:
        async with open_planes(cluster.database(), tmp_path, count=1) as ((plane, one),):
            log = plane.service.log
            node = await join(log)
            await run_task(log, node, "a")
            async with one.stream() as stream:
                assert [(await stream.event())["event"] for _ in range(3)] == ["trajectory", "group", "task"]
                await until_answered(
                    lambda: one.get("/v1/status"), lambda said: said["journal"]["last_seq"] == 3
                )
                await trio.to_thread.run_sync(cluster.stop)
                await until_away(log, away=True)
                for answer in (
                    await one.post("/v1/tasks", plain(task_json(make_spec()))),
                    await one.get("/v1/tasks"),
                    await one.get("/v1/export"),
                    await one.get("/v1/trajectories/stream", consumer="c"),
                    await one.post("/v1/trajectories/ack", {"consumer": "c", "seq": 1}),
                ):
                    assert error_of(answer) == (503, "log_away")
                    assert int(answer.headers["retry-after"]) > 0
                said = (await one.get("/v1/status")).json()
                assert said["log"]["away"]
                assert (said["nodes"], said["journal"]["last_seq"]) == (None, 3)
                ready = await one.get("/readyz")
                assert (ready.status, "the log is away" in ready.json()["reason"]) == (503, True)
                assert "polarnode_log_away 1.0" in (await one.get("/metrics")).text
                await trio.to_thread.run_sync(cluster.start)
                await until_away(log, away=False)
                await run_again(log, node, "b")
                assert (await stream.event())["data"]["key"] == "trajectory:b-0", "the stream stayed open"
            assert (await one.get("/readyz")).status == 200


async def run_again(log: Log, node: int, name: str) -> None:
    """The first calls may still meet a connection that was cut."""
    while True:
        try:
            return await run_task(log, node, name)
        except LogUnavailable:
            await trio.sleep(STEP_S)


async def test_failover_reports_gap_to_stream(tmp_path: Path) -> None:
    """A stream goes on at the standby, and is told what it read that the standby never had."""
    with running_cluster() as primary:
        name = primary.database().rpartition("=")[2]
        with primary.standby() as standby:
            dsn = (
                f"host={primary.folder},{standby.folder} port={primary.port},{standby.port} user=postgres"
                f" dbname={name} target_session_attrs=read-write"
            )
            async with open_planes(dsn, tmp_path, count=1) as ((plane, one),):
                log = plane.service.log
                node = await join(log)
                await run_task(log, node, "a")
                await trio.to_thread.run_sync(wait_replayed, primary, standby, name)
                await trio.to_thread.run_sync(standby.stop)  # it is behind from now on
                await run_task(log, node, "b")
                old = await log.log_name()
                async with one.stream(consumer="c") as stream:
                    read = [await stream.event() for _ in range(6)]
                    assert read[-1]["id"] == f"{old}:6"
                    await trio.to_thread.run_sync(primary.crash)
                    await trio.to_thread.run_sync(standby.start)
                    await trio.to_thread.run_sync(standby.promote)
                    gap = await stream.event()
                    new = gap["data"]["journal"]
                    assert (gap["event"], gap["id"], new != old) == ("gap", f"{new}:3", True)
                    said: Any = gap["data"]["gap"]
                    assert (said["after"], said["oldest"]) == (6, 4)
                    assert f"the log {old} was lost after event 3" in said["reason"]
                    await run_again(log, node, "d")
                    assert (await stream.event())["id"] == f"{new}:4"
                async with one.stream({"Last-Event-ID": f"{old}:5"}, follow="false") as stream:
                    assert (await stream.event())["data"]["gap"]["oldest"] == 4, "and whoever comes again"
                last = Cursor(position=60, log=old)  # of an export that began before the failover
                with trio.fail_after(20):
                    lines = [line async for line in _encoded_lines(log, Query(), json_encoder(), last)]
                assert len(lines) == 2, "the sessions of a and d"
                odd = await one.get("/v1/sessions/%00")
                assert (odd.status, "U+0000" in odd.text) == (400, True), odd.text


def wait_replayed(primary: Cluster, standby: Cluster, name: str) -> None:
    with psycopg.connect(primary.dsn(name), autocommit=True) as db:
        target = db.execute("SELECT pg_current_wal_lsn()").fetchone()
    with psycopg.connect(standby.dsn(name), autocommit=True) as db:
        for _ in range(600):
            row = db.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", target).fetchone()
            if row is not None and row[0]:
                return
            time.sleep(STEP_S)
    raise AssertionError("the standby did not follow")
