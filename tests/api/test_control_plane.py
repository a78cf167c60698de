"""The trainer's routes over a real socket: tasks, the numbered stream, refusals."""

import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest
import trio
from control_plane_parts import Answer, Caller, Plane, open_plane
from journal_samples import make_identity, make_trajectory, make_turn
from journal_writes import publish_attempt, publish_end

from polarnode.api import app, exports, routes, service
from polarnode.api.query import last_event_id, read_query
from polarnode.containers.files import artifacts_path
from polarnode.core.codec import read_trajectory
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Busy, DiskFull, EngineError, Refused
from polarnode.core.trajectory import NewMessages
from polarnode.journal import queries
from polarnode.journal.values import RetentionLimits

Started = Callable[..., AbstractAsyncContextManager[tuple[Plane, Caller]]]
TASK = {"instruction": "do it", "harness": {"name": "pi"}}


@pytest.fixture
def started(tmp_path: Path) -> Started:
    @asynccontextmanager
    async def starter(**more: Any) -> AsyncIterator[tuple[Plane, Caller]]:
        async with open_plane(tmp_path / "journal.sqlite", **more) as plane:
            yield plane, Caller(url=plane.url)

    return starter


def error_of(response: Answer) -> tuple[int, str, str, str | None]:
    said = response.json()["error"]
    return response.status, said["type"], said["message"], said.get("path")


async def publish(plane: Plane, session_id: str, **more: Any) -> None:
    trajectory = make_trajectory(session_id, **more)
    for turn in trajectory.turns:
        plane.journal.writer.record_turn(turn)
    publish_end(plane.journal, trajectory)
    await plane.journal.writer.flush()


# ── the door ──────────────────────────────────────────────────────────────────


async def test_only_probes_need_no_token(started: Started) -> None:
    async with started() as (plane, client):
        for method, path in (
            ("GET", "/v1/status"),
            ("POST", "/v1/tasks"),
            ("GET", "/v1/trajectories/stream"),
            ("GET", "/nowhere"),
        ):
            for authorization in ("", "Bearer wrong", "Bearer secret2", "secret", "Bearer sécret"):
                response = await client.call(method, path, headers={"Authorization": authorization})
                assert error_of(response)[:2] == (401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
        bare = {"Authorization": ""}
        assert (await client.call("GET", "/healthz", headers=bare)).status == 200
        assert (await client.call("GET", "/readyz", headers=bare)).json() == {"ready": True}
        plane.service.is_ready = False
        unready = await client.call("GET", "/readyz", headers=bare)
        assert unready.status == 503
        assert unready.json() == {"ready": False, "reason": "the journal's disk is full"}


async def test_without_token_everyone_is_admitted(started: Started) -> None:
    async with started(token=None) as (_, client):
        assert (await client.call("GET", "/v1/tasks", headers={"Authorization": ""})).json() == {"tasks": []}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/status?x=1"), ("GET", "/v1/tasks/t?x=1"), ("POST", "/v1/trajectories/ack?x=1")],
)
async def test_unknown_parameter_is_refused(started: Started, method: str, path: str) -> None:
    async with started() as (_, client):
        status, _, sentence, where = error_of(await client.call(method, path))
    assert (status, where) == (400, "?x")
    assert sentence.startswith("x is not a parameter of this route: it takes ")


async def test_unknown_path_gets_sentence(started: Started) -> None:
    async with started() as (_, client):
        assert error_of(await client.get("/v1/weights"))[:2] == (404, "not_found")
        assert error_of(await client.call("PUT", "/v1/tasks"))[:2] == (405, "method_not_allowed")
        assert error_of(await client.get("/v1/tasks/none"))[1:3] == (
            "not_found",
            "no task 'none' is in the log: look at GET /v1/tasks",
        )
        assert error_of(await client.call("DELETE", "/v1/tasks/none"))[0] == 404
        assert error_of(await client.get("/v1/trajectories/none"))[0] == 404
        assert error_of(await client.get("/v1/sessions/none"))[0] == 404


async def test_too_many_values_are_refused_unparsed(started: Started) -> None:
    async with started() as (_, client):
        body = b'{"instruction":[' + b"[]," * 1_000_000 + b"no JSON"
        status, kind, sentence = error_of(await client.call("POST", "/v1/tasks", body=body))[:3]
        assert (status, kind) == (400, "invalid_request")
        assert "the body has more than 1,000,000 values" in sentence
        files = json.dumps({"files": ["," * 2_000_000]}).encode()  # as many commas, in a text
        sentence = error_of(await client.call("POST", "/v1/tasks", body=files))[2]
        assert "files is not a known field" in sentence


async def test_oversized_body_is_refused(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", 1000)
    async with started() as (_, client):
        assert error_of(await client.call("POST", "/v1/tasks", body=b" " * 2000))[:2] == (413, "too_large")


async def test_bug_hides_its_details(started: Started) -> None:
    async with started() as (plane, client):
        plane.service.has_a_bug = True
        assert error_of(await client.get("/v1/status")) == (
            500,
            "internal",
            "this is a bug of polarnode: its log has the details",
            None,
        )


# ── tasks ─────────────────────────────────────────────────────────────────────


async def test_task_is_submitted_and_shown(started: Started) -> None:
    async with started() as (plane, client):
        taken = await client.post("/v1/tasks", {**TASK, "task_id": "t", "num_samples": 2})
        assert (taken.status, taken.json()) == (
            202,
            {"task_id": "t", "session_ids": ["t-0", "t-1"], "created": True},
        )
        await publish(plane, "t-0", task_id="t")
        seen = (await client.get("/v1/tasks/t")).json()
        assert (seen["counts"], seen["finished"], seen["spec"]["num_samples"]) == (
            {"completed": 1, "pending": 1},
            False,
            2,
        )
        assert [
            (one["session_id"], one["status"], one["reward"], one["turns"], one["sampled_tokens"])
            for one in seen["sessions"]
        ] == [
            ("t-0", "completed", 1.0, 1, 3),
            ("t-1", "pending", None, 0, 0),
        ]
        assert "token_ids" not in json.dumps(seen)
        (listed,) = (await client.get("/v1/tasks", limit=5)).json()["tasks"]
        assert listed == {key: value for key, value in seen.items() if key != "spec"}


async def test_repeated_task_gets_same_answer(started: Started) -> None:
    async with started() as (_, client):
        first = (await client.post("/v1/tasks", TASK, Idempotency_Key="k")).json()
        again = (await client.post("/v1/tasks", TASK, Idempotency_Key="k")).json()
        assert again == {**first, "created": False}
        other = await client.post("/v1/tasks", {**TASK, "priority": 3}, Idempotency_Key="k")
        assert error_of(other)[:2] == (409, "conflict")
        assert len((await client.get("/v1/tasks")).json()["tasks"]) == 1


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        (b"", None, "empty"),
        (b"{", None, "line 1"),
        (b"[]", "$", "the body must be an object"),
        (json.dumps({**TASK, "nun_samples": 1}).encode(), "$.nun_samples", "did you mean num_samples?"),
        (json.dumps({**TASK, "budgets": {"run_s": "long"}}).encode(), "$.budgets.run_s", "must be a number"),
        (json.dumps({"instruction": "x"}).encode(), "$.harness", "is missing"),
    ],
)
async def test_invalid_task_is_refused_with_path(
    started: Started, body: bytes, path: str | None, words: str
) -> None:
    async with started() as (_, client):
        status, kind, message, where = error_of(await client.call("POST", "/v1/tasks", body=body))
        assert (status, kind, where) == (400, "invalid_request", path)
        assert words in message


@pytest.mark.parametrize("levels", [100, 248, 252, 253, 500, 1000, 1023, 20_000])
@pytest.mark.parametrize("field", ["metadata", "harness", "unknown"])
async def test_deep_task_is_no_bug(started: Started, levels: int, field: str) -> None:
    deep = '{"v":' + "[" * levels + "]" * levels + "}"
    body = json.dumps({**TASK, field: "HERE"}).replace('"HERE"', deep).encode()
    async with started() as (_, client):
        status, kind, message, _ = error_of(await client.call("POST", "/v1/tasks", body=body))
    assert (status, kind) == (400, "invalid_request")
    assert len(message) < 500


async def test_deepest_accepted_task_is_readable(started: Started) -> None:
    deep: Any = 1
    for _ in range(99):
        deep = [deep]
    async with started() as (_, client):
        taken = (await client.post("/v1/tasks", {**TASK, "metadata": {"v": deep}})).json()
        shown = (await client.call("GET", f"/v1/tasks/{taken['task_id']}")).json()
    assert shown["spec"]["metadata"] == {"v": deep}


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Refused("no such harness", path="$.harness.name"), 400, "invalid_request"),
        (Busy("the queue is full: try again later", retry_after=2.5), 429, "busy"),
        (DiskFull("make room"), 507, "disk_full"),
        (EngineError("the engine died"), 500, "engine"),
    ],
)
async def test_refusal_has_status_and_kind(started: Started, refusal: Any, status: int, kind: str) -> None:
    async with started() as (plane, client):
        plane.service.refuses = refusal
        response = await client.post("/v1/tasks", TASK)
        assert error_of(response)[:3] == (status, kind, str(refusal))
        assert response.headers.get("retry-after") == ("3" if kind == "busy" else None)


async def test_full_disk_refuses_new_task(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as (_, client):
        known = (await client.post("/v1/tasks", {**TASK, "task_id": "known"})).json()
        monkeypatch.setattr("polarnode.journal.health.DISK_FREE_BYTES", 1 << 60)
        assert error_of(await client.post("/v1/tasks", TASK))[:2] == (507, "disk_full")
        again = await client.post("/v1/tasks", {**TASK, "task_id": "known"})
        assert (again.status, again.json()) == (
            202,
            {**known, "created": False},
        ), "what was taken before is answered again"
        assert "make room" in (await client.get("/v1/status")).json()["journal"]["warning"]


async def test_task_is_cancelled_once(started: Started) -> None:
    async with started() as (_, client):
        await client.post("/v1/tasks", {**TASK, "task_id": "t"})
        assert (await client.call("DELETE", "/v1/tasks/t")).json() == {"task_id": "t", "cancelled": True}
        assert (await client.call("DELETE", "/v1/tasks/t")).json() == {"task_id": "t", "cancelled": False}


# ── the stream ────────────────────────────────────────────────────────────────


async def test_stream_follows_and_resumes_exactly(started: Started) -> None:
    async with started() as (plane, client):
        await client.post("/v1/tasks", {**TASK, "task_id": "t", "num_samples": 2, "group_id": "g"})
        await publish(plane, "t-0", task_id="t")
        async with client.stream() as stream:
            first = await stream.event()
            assert (first["id"], first["event"], first["data"]["key"]) == (
                "1",
                "trajectory",
                "trajectory:t-0",
            )
            assert (
                read_trajectory(first["data"]["trajectory"]).traces
                == make_trajectory("t-0", task_id="t").traces
            )
            await publish(plane, "t-1", task_id="t", sample_index=1)
            found = [await stream.event() for _ in range(3)]
            assert [(one["id"], one["event"]) for one in found] == [
                ("2", "trajectory"),
                ("3", "group"),
                ("4", "task"),
            ]
            assert found[1]["data"]["group"]["rewards"] == [1.0, 1.0]
        for after in range(5):
            keys = ["trajectory:t-0", "trajectory:t-1", "group:t", "task:t"][after:]
            async with client.stream(after=after, follow="false") as stream:
                assert await stream.rest() == keys
            async with client.stream({"Last-Event-ID": str(after)}, after=0, follow="false") as stream:
                assert await stream.rest() == keys


async def test_two_consumers_have_own_positions(started: Started) -> None:
    async with started() as (plane, client):
        for number in range(3):
            await publish(plane, f"s{number}", task_id="x")

        async def ack(consumer: str, seq: int) -> int:
            response = await client.post("/v1/trajectories/ack", {"consumer": consumer, "seq": seq})
            assert response.json()["consumer"] == consumer
            return int(response.json()["position"])

        async def read(consumer: str) -> list[str]:
            async with client.stream(consumer=consumer, follow="false") as stream:
                return await stream.rest()

        assert await read("one") == await read("two") == ["trajectory:s0", "trajectory:s1", "trajectory:s2"]
        assert (await client.get("/v1/status")).json()["journal"]["positions"] == {"one": 0, "two": 0}
        assert (await ack("one", 2), await ack("one", 1), await ack("two", 1), await ack("two", 99)) == (
            2,
            2,
            1,
            3,
        )
        assert (await read("one"), await read("two")) == (["trajectory:s2"], [])
        async with client.stream(consumer="two", after=1, follow="false") as stream:
            assert await stream.rest() == ["trajectory:s1", "trajectory:s2"]


async def test_stream_is_filtered(started: Started) -> None:
    async with started() as (plane, client):
        await client.post("/v1/tasks", {**TASK, "task_id": "t", "group_id": "g"})
        await publish(plane, "other", task_id="x", group_id="h", status="failed", reward=0.0)
        await publish(plane, "t-0", task_id="t")
        for params, keys in (
            ({"task_id": "t"}, ["trajectory:t-0", "group:t", "task:t"]),
            ({"group_id": "h"}, ["trajectory:other"]),
            ({"outcome": "failed"}, ["trajectory:other", "group:t", "task:t"]),
            ({"min_reward": "0.5"}, ["trajectory:t-0", "group:t", "task:t"]),
        ):
            async with client.stream(follow="false", **params) as stream:
                assert await stream.rest() == keys


async def test_stream_has_requested_kinds(started: Started) -> None:
    """Sessions that lost their place come to nobody who did not ask; they are read by their id like any
    other.
    """
    async with started() as (plane, client):
        await client.post("/v1/tasks", {**TASK, "task_id": "t"})
        lost = attrs.evolve(
            make_trajectory("t-0", task_id="t", status="interrupted", reward=None), retried_as="again"
        )
        for turn in lost.turns:
            plane.journal.writer.record_turn(turn)
        publish_attempt(plane.journal, lost, attrs.evolve(make_identity("again", task_id="t"), attempt=1))
        await publish(plane, "again", task_id="t")
        for kinds, keys in (
            (None, ["trajectory:again", "group:t", "task:t"]),
            ("attempt", ["attempt:t-0"]),
            ("attempt,trajectory", ["attempt:t-0", "trajectory:again"]),
            ("group", ["group:t"]),
        ):
            async with client.stream(follow="false", **({} if kinds is None else {"kinds": kinds})) as stream:
                assert await stream.rest() == keys
        task = (await client.get("/v1/tasks/t")).json()
        assert [(one["session_id"], one["attempt"]) for one in task["sessions"]] == [("again", 1)]
        assert (await client.get("/v1/trajectories/t-0")).json()["retried_as"] == "again"
        assert (await client.get("/v1/sessions/t-0")).json()["session"]["retried_as"] == "again"
        status, _, _, path = error_of(await client.get("/v1/trajectories/stream", kinds="attempts"))
        assert (status, path) == (400, "?kinds")


async def test_task_stream_ends_without_follow(started: Started) -> None:
    async with started() as (plane, client):
        await client.post("/v1/tasks", {**TASK, "task_id": "t"})
        async with client.stream(task_id="t", follow="false") as stream, trio.open_nursery() as nursery:
            assert "comment" in await stream.block()
            nursery.start_soon(partial(publish, plane, "noise", task_id="x"))
            with trio.move_on_after(0.3) as waiting:
                await stream.event()
            assert waiting.cancelled_caught, "it does not end while the task runs"
        async with client.stream(task_id="t", follow="false") as stream:
            await publish(plane, "t-0", task_id="t")
            assert await stream.rest() == ["trajectory:t-0", "group:t", "task:t"]


async def test_quiet_stream_sends_signs_of_life(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "KEEP_ALIVE_S", 0.05)
    async with started() as (plane, client), client.stream(task_id="t") as stream:
        assert (await stream.block())["comment"] == "polarnode"
        assert (await stream.block())["comment"] == "keep-alive"
        for number in range(5):  # events that its filter passes over are no excuse for silence
            await publish(plane, f"s{number}", task_id="x")
        assert (await stream.block())["comment"] == "keep-alive"
        await publish(plane, "mine", task_id="t")
        assert (await stream.event())["data"]["key"] == "trajectory:mine"


async def test_late_reader_gets_gap(started: Started) -> None:
    async with started(retention=RetentionLimits(acknowledged=3 << 18, everything=3 << 18)) as (
        plane,
        client,
    ):
        for number in range(80):
            await publish(plane, f"s{number}", task_id="x", sampled=2000)
        oldest = plane.journal.commits.progress.first_seq
        assert oldest > 1
        async with client.stream(after=0, follow="false") as stream:
            gap = await stream.event()
            assert (gap["event"], gap["id"]) == ("gap", str(oldest - 1))
            assert gap["data"] == {
                "seq": oldest - 1,
                "journal": plane.journal.id,
                "key": f"gap:0-{oldest}",
                "gap": {
                    "after": 0,
                    "oldest": oldest,
                    "reason": f"retention deleted the events up to {oldest - 1}",
                },
            }
            assert len(await stream.rest()) == 81 - oldest


async def test_position_of_another_journal_restarts(started: Started) -> None:
    async with started() as (plane, client):
        await publish(plane, "a", task_id="x")
        async with client.stream(after=1000, follow="false") as stream:
            gap = (await stream.event())["data"]["gap"]
            assert (gap["after"], gap["oldest"]) == (1000, 1)
            assert "another log's" in gap["reason"]
            assert await stream.rest() == ["trajectory:a"]


async def test_stream_trouble_is_an_event(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_disk(*_: object) -> NoReturn:
        raise sqlite3.OperationalError("disk I/O error")

    async with started() as (plane, client):
        await publish(plane, "a", task_id="x")
        plane.journal.writer._thread.db.execute("PRAGMA wal_checkpoint")
        async with client.stream() as stream:
            assert (await stream.event())["data"]["key"] == "trajectory:a"
            await publish(plane, "b", task_id="x")
            assert (await stream.event())["data"]["key"] == "trajectory:b"
            monkeypatch.setattr(queries, "events", no_disk)
            await publish(plane, "c", task_id="x")
            trouble = await stream.event()
            if trouble["event"] == "trajectory":  # a look that was under way gave it yet
                await publish(plane, "d", task_id="x")
                trouble = await stream.event()
            assert (trouble["event"], trouble["data"]["error"]["type"]) == ("error", "journal")
            assert "disk I/O error" in trouble["data"]["error"]["message"]
            assert await stream.block() == {}


async def test_unreadable_event_does_not_end_stream(started: Started) -> None:
    async with started() as (plane, client):
        await publish(plane, "a", task_id="x")
        turn = attrs.evolve(make_turn("b"), new_messages=NewMessages(tools="no JSON"))
        plane.journal.writer.record_turn(turn)
        publish_end(plane.journal, attrs.evolve(make_trajectory("b", task_id="x"), turns=(turn,)))
        await publish(plane, "c", task_id="x")
        async with client.stream(turns="full", consumer="trainer", follow="false") as stream:
            seen = [await stream.event() for _ in range(3)]
            assert await stream.block() == {}
        assert [(each["event"], each["data"]["key"]) for each in seen] == [
            ("trajectory", "trajectory:a"),
            ("unreadable", "trajectory:b"),
            ("trajectory", "trajectory:c"),
        ]
        lost = seen[1]["data"]["unreadable"]
        assert (lost["kind"], lost["session_id"], lost["task_id"]) == ("trajectory", "b", "x")
        assert "cannot be written" in lost["reason"]
        acknowledged = await client.post("/v1/trajectories/ack", {"consumer": "trainer", "seq": 3})
        assert acknowledged.json() == {"consumer": "trainer", "position": 3, "id": "3", "pending": []}
        status, kind, message, _ = error_of(await client.get("/v1/trajectories/b", turns="full"))
        assert (status, kind) == (410, "unreadable")
        assert "cannot be written" in message
        assert (await client.get("/v1/trajectories/b")).status == 200, "its table has no tools"
        lines = (await client.get("/v1/export", turns="full")).body.splitlines()
        assert [json.loads(line).get("session_id") for line in lines] == ["a", None, "c"]
        assert json.loads(lines[1])["unreadable"]["session_id"] == "b"
        journal = (await client.get("/v1/status")).json()["journal"]
        assert (journal["damaged_rows"], journal["damaged"][0]["row"]) == (1, "2")


# ── one trajectory, one session, all of them ──────────────────────────────────


async def test_trajectory_in_both_array_formats(started: Started) -> None:
    async with started() as (plane, client):
        await publish(plane, "a", turns=3)
        expected = make_trajectory("a", turns=3)
        for arrays in ("json", "base64"):
            full = (await client.get("/v1/trajectories/a", arrays=arrays, turns="full")).json()
            assert full["arrays"] == arrays
            assert read_trajectory(full) == expected
        table = (await client.get("/v1/trajectories/a")).json()
        assert [row["sampled_length"] for row in table["turns"]] == [3, 3, 3]
        assert "sampled" not in table["turns"][0]


async def test_running_session_is_shown(started: Started) -> None:
    async with started() as (plane, client):
        await client.post("/v1/tasks", {**TASK, "task_id": "t"})
        plane.journal.writer.record_turn(make_turn("t-0"))
        await plane.journal.writer.flush()
        assert "is not over yet" in error_of(await client.get("/v1/trajectories/t-0"))[2]
        seen = (await client.get("/v1/sessions/t-0")).json()
        assert (seen["session"]["status"], seen["trajectory"]) == ("pending", None)
        assert seen["turns"][0]["sampled"] == [1000, 1001, 1002]
        await publish(plane, "t-0", task_id="t")
        seen = (await client.get("/v1/sessions/t-0", arrays="base64")).json()
        assert (seen["session"]["status"], seen["trajectory"]["reward"], seen["trajectory"]["turns"]) == (
            "completed",
            1.0,
            [],
        )


@pytest.mark.parametrize("path", ["/v1//status", "/v1/tasks//", "/v1/sessions//artifacts"])
async def test_double_slash_is_not_found(started: Started, path: str) -> None:
    """It was answered by a redirect, in HTML."""
    async with started() as (_, client):
        assert error_of(await client.get(path))[:2] == (404, "not_found")


async def test_artifacts_are_streamed_as_kept(started: Started, tmp_path: Path) -> None:
    async with started() as (plane, client):
        await publish(plane, "a")
        kept = b"not really a tar " * 200_000
        artifacts_path(tmp_path, "a").write_bytes(kept)
        found = await client.get("/v1/sessions/a/artifacts")
        assert (found.status, found.headers["content-type"], found.headers["content-length"]) == (
            200,
            "application/x-tar",
            str(len(kept)),
        )
        assert found.text.encode() == kept
        assert error_of(await client.get("/v1/sessions/a/artifacts", arrays="json"))[0] == 400


async def test_snapshots_are_listed_without_content(started: Started, tmp_path: Path) -> None:
    async with started() as (plane, client):
        await publish(plane, "a")
        assert (await client.get("/v1/sessions/a/snapshots")).json() == {"session_id": "a", "snapshots": []}
        (tmp_path / "a.snapshot-3.json").write_text("{}")
        (tmp_path / "a.snapshot-x.json").write_text("{}")
        found = (await client.get("/v1/sessions/a/snapshots")).json()["snapshots"]
        assert [(each["turn"], each["resumable"], each["why_not"]) for each in found] == [
            (3, False, "its archive is gone")
        ]
        (tmp_path / "a.snapshot-3.tar").write_bytes(b"")
        found = (await client.get("/v1/sessions/a/snapshots")).json()["snapshots"]
        assert "a.snapshot-3.json cannot be read: " in found[0]["why_not"]
        assert (await client.get("/v1/sessions/none/snapshots")).status == 404
        assert error_of(await client.get("/v1/sessions/a/snapshots", arrays="json"))[0] == 400


async def test_unforked_session_has_no_forks(started: Started) -> None:
    async with started() as (plane, client):
        await publish(plane, "a")
        assert (await client.get("/v1/sessions/a/forks")).json() == {"session_id": "a", "forks": []}
        assert (await client.get("/v1/sessions/none/forks")).status == 404
        assert error_of(await client.get("/v1/sessions/a/forks", arrays="json"))[0] == 400


async def test_missing_artifacts_are_explained(started: Started, tmp_path: Path) -> None:
    async with started() as (plane, client):
        await publish(plane, "a")
        (tmp_path / "secret.artifacts.tar").write_bytes(b"of nobody")
        assert error_of(await client.get("/v1/sessions/a/artifacts"))[:3:2] == (
            404,
            (
                "session 'a' has no artifacts: its task names none in runtime.artifacts, or its harness has"
                " not ended"
            ),
        )
        for unknown in ("secret", "..%2Fjournal", "none"):
            assert (await client.get(f"/v1/sessions/{unknown}/artifacts")).status == 404


async def test_export_has_trajectory_per_line(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarnode.journal.queries.PAGE_BYTES", 2000)
    async with started() as (plane, client):
        assert (await client.get("/v1/export")).text == ""
        await client.post("/v1/tasks", {**TASK, "task_id": "t"})
        for number in range(5):
            await publish(
                plane,
                f"s{number}",
                task_id="x",
                reward=number / 4,
                status="failed" if number == 2 else "completed",
            )
        await publish(plane, "t-0", task_id="t")
        lines = (await client.get("/v1/export", turns="full")).text.splitlines()
        assert [read_trajectory(json.loads(line)).session_id for line in lines] == [
            "s0",
            "s1",
            "s2",
            "s3",
            "s4",
            "t-0",
        ]
        assert read_trajectory(json.loads(lines[5])) == make_trajectory("t-0", task_id="t")
        some = (
            await client.get("/v1/export", min_reward=0.5, outcome="completed", task_id="x")
        ).text.splitlines()
        assert [json.loads(line)["session_id"] for line in some] == ["s3", "s4"]


# ── parameters ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "params", "where", "words"),
    [
        ("/v1/trajectories/stream", {"aftr": "1"}, "?aftr", "it takes consumer, after"),
        ("/v1/trajectories/stream", {"after": "-1"}, "?after", "must be a position"),
        ("/v1/trajectories/stream", {"after": "1" * 30}, "?after", "must be a position"),
        ("/v1/trajectories/stream", {"follow": "1"}, "?follow", "true or false"),
        ("/v1/trajectories/stream", {"outcome": "won"}, "?outcome", "one of completed"),
        ("/v1/trajectories/stream", {"consumer": ""}, "$.consumer", "1 to 128"),
        ("/v1/trajectories/x", {"arrays": "xml"}, "?arrays", "one of json, base64"),
        ("/v1/export", {"min_reward": "nan"}, "?min_reward", "must be a number"),
        ("/v1/export", {"turns": "none"}, "?turns", "one of table, full"),
        ("/v1/tasks", {"limit": "0"}, "?limit", "1 to 1000"),
        ("/v1/tasks/x", {"a": "b"}, "?a", "takes none"),
    ],
)
async def test_invalid_parameter_is_refused(
    started: Started, path: str, params: dict[str, str], where: str, words: str
) -> None:
    async with started() as (_, client):
        status, kind, message, at = error_of(await client.get(path, **params))
        assert (status, kind, at) == (400, "invalid_request", where)
        assert words in message


async def test_acknowledgement_is_parsed_strictly(started: Started) -> None:
    async with started() as (_, client):
        for body, path in (
            ({"consumer": "a"}, "$.id"),
            ({"consumer": "a", "seq": 1, "id": "1"}, "$.id"),
            ({"consumer": "a", "id": "one"}, "$.id"),
            ({"consumer": "a", "id": "vAAAAAAAAAAAB"}, "$.id"),
            ({"consumer": "a", "seq": 1, "x": 1}, "$.x"),
            ({"consumer": "", "seq": 1}, "$.consumer"),
            ({"consumer": "a", "seq": -1}, "$.seq"),
            ({"consumer": "a", "seq": 1 << 63}, "$.seq"),
        ):
            assert error_of(await client.post("/v1/trajectories/ack", body))[3] == path


def test_last_event_id_is_cursor() -> None:
    """The header that a browser sends is a cursor or nothing."""
    assert (last_event_id(None), last_event_id("")) == (None, None)
    assert last_event_id("12") == Cursor(position=12)
    assert last_event_id("7f-1-0:12") == Cursor(position=12, log="7f-1-0")
    with pytest.raises(Refused, match="Last-Event-ID must be a position"):
        last_event_id("x")
    assert read_query({}).follow


def test_small_modules_beside_routes() -> None:
    """What the tests above drive, named where it is a value: open paths, sentences, bodies, answers."""
    assert set(app.OPEN_PATHS) == {"/healthz", "/readyz"}
    assert all("see docs/api.md" in service.SENTENCES[code][1] for code in (404, 405))
    assert routes.Ack(consumer="a", seq=1).seq == 1
    assert service.Submitted(task_id="t", session_ids=()).created


# ── web pages of other origins ────────────────────────────────────────────────


@pytest.mark.parametrize("token", [None, "secret"])
async def test_foreign_web_page_is_refused(token: str | None, started: Started) -> None:
    """Also one that has the token. The Host is checked where there is none: a rebound name is the page's own."""
    page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    async with started(token=token) as (_, client):
        for headers in (page, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
            answer = await client.call("POST", "/v1/tasks", headers=headers, body=json.dumps(TASK).encode())
            assert error_of(answer)[:2] == (403, "forbidden")
        answer = await client.call(
            "POST", "/v1/tasks", headers={"Content-Type": "text/plain"}, body=json.dumps(TASK).encode()
        )
        assert error_of(answer)[:2] == (415, "not_json")
        rebound = await client.call("GET", "/v1/tasks", headers={"Host": "evil.example:18181"})
        assert rebound.status == (403 if token is None else 200)
        assert (await client.get("/v1/tasks")).json() == {"tasks": []}


async def test_token_in_query_is_ignored(started: Started) -> None:
    async with started() as (_, client):
        for query in ("token=secret", "access_token=secret", "key=secret"):
            answer = await client.call("GET", f"/v1/tasks?{query}", headers={"Authorization": ""})
            assert error_of(answer)[:2] == (401, "unauthorized")


# ── a full socket ─────────────────────────────────────────────────────────────


async def silent(stack: AsyncExitStack, plane: Plane, sent: bytes) -> None:
    """A connection that sends so much, and then nothing; a whole request is answered first."""
    stream = await trio.open_tcp_stream("127.0.0.1", int(plane.url.rpartition(":")[2]))
    await stack.enter_async_context(stream)
    await stream.send_all(sent)
    if sent.endswith(b"\r\n\r\n"):  # a request that is still being answered rightly keeps its place
        assert await stream.receive_some()


WRONG = b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n"


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize(
    "sent", [b"", b"GET /v1/tasks HT", WRONG], ids=["nothing", "half a head", "no token"]
)
async def test_stranger_connections_block_no_trainer(
    token: str | None, sent: bytes, started: Started
) -> None:
    """A stream that is open goes on, and whoever has the token gets in, as do the probes."""
    async with (
        started(token=token, connections=16) as (plane, client),
        AsyncExitStack() as held,
        client.stream(follow="true") as stream,
    ):
        for _ in range(100):
            await silent(held, plane, sent)
        with trio.fail_after(10):
            assert (await client.get("/v1/tasks")).status == 200
            assert (await client.call("GET", "/healthz", headers={"Authorization": ""})).status == 200
            await publish(plane, "s1")
            assert (await stream.event())["event"] == "trajectory"


async def test_streams_leave_places_for_requests(started: Started) -> None:
    async with started(connections=8) as (_, client), AsyncExitStack() as held:
        for _ in range(6):
            await held.enter_async_context(client.stream(follow="true"))
        for path in ("/v1/trajectories/stream", "/v1/trajectories/stream?follow=false"):
            assert error_of(await client.get(path))[:2] == (429, "busy")
        assert (await client.get("/v1/status")).status == 200


async def test_no_token_is_logged(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the right one nor a guess, in whatever comes of a request."""
    caplog.set_level(logging.DEBUG)
    async with started() as (plane, client):
        for authorization in ("Bearer secret", "Bearer guess-4711"):
            for path in ("/v1/tasks", "/nowhere", "/v1/status", "/v1/tasks?limit=x"):
                await client.call("GET", path, headers={"Authorization": authorization})
        plane.service.has_a_bug = True
        await client.post("/v1/tasks", TASK)
        await silent_close(plane, b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
    for word in ("secret", "guess-4711"):
        assert word not in caplog.text


async def silent_close(plane: Plane, sent: bytes) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", int(plane.url.rpartition(":")[2])) as stream:
        await stream.send_all(sent)
        while await stream.receive_some():
            pass
