"""One contract for every client: the synchronous one, and the asynchronous one under Trio and under asyncio,
over a real control plane.
"""

import gzip
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
from client_kit import (
    KINDS,
    Child,
    Node,
    answering,
    chunked,
    event,
    free_port,
    last_id,
    open_client,
    open_node,
)
from journal_samples import make_spec, make_trajectory
from sources_kit import DATA

from polarnode.client import AsyncPolarnodeClient, ClientError, PolarnodeClient, Unreachable
from polarnode.containers.files import artifacts_path
from polarnode.core.codec import read_json
from polarnode.core.errors import Busy, DiskFull, Refused
from polarnode.core.status import LiveSessionStatus, SessionChanges, TimeSeries


@attrs.define(eq=False)
class Bench:
    """A node and one kind of client of it."""

    kind: str
    node: Node
    stack: ExitStack

    def client(self, url: str | None = None, **said: Any) -> Any:
        return self.stack.enter_context(
            open_client(self.kind, url or self.node.url, **({"token": "secret"} | said))
        )


@pytest.fixture(params=KINDS)
def bench(request: Any, tmp_path: Path) -> Iterator[Bench]:
    with open_node(tmp_path / "journal.sqlite") as node, ExitStack() as stack:
        yield Bench(request.param, node, stack)


@pytest.fixture(params=KINDS)
def kind(request: Any) -> str:
    return str(request.param)


# ── the same methods ──────────────────────────────────────────────────────────


def methods(cls: type) -> dict[str, list[inspect.Parameter]]:
    found = {
        name: each
        for name, each in inspect.getmembers(cls, callable)
        if not name.startswith("_") and name != "aclose"
    }
    return {name: list(inspect.signature(each).parameters.values()) for name, each in found.items()}


def test_clients_have_equal_signatures() -> None:
    assert methods(AsyncPolarnodeClient) == methods(PolarnodeClient)
    assert [field.name for field in attrs.fields(AsyncPolarnodeClient) if field.init] == [
        field.name for field in attrs.fields(PolarnodeClient)
    ]


# ── tasks ─────────────────────────────────────────────────────────────────────


def test_task_is_submitted_seen_and_cancelled(bench: Bench) -> None:
    client = bench.client()
    taken = client.submit(make_spec(task_id="mine-odd", num_samples=2))
    assert (taken.task_id, taken.session_ids, taken.created) == (
        "mine-odd",
        ("mine-odd-0", "mine-odd-1"),
        True,
    )
    again = client.submit({"instruction": "do it", "harness": {"name": "pi"}}, idempotency_key="k")
    assert client.submit(
        {"instruction": "do it", "harness": {"name": "pi"}}, idempotency_key="k"
    ) == attrs.evolve(again, created=False)
    status = client.task_status("mine-odd")
    assert (status.counts, status.finished, [each.status for each in status.sessions]) == (
        {"pending": 2},
        False,
        ["pending"] * 2,
    )
    assert client.task("mine-odd")["spec"]["num_samples"] == 2
    assert [task["task_id"] for task in client.tasks(limit=1)] == [again.task_id]
    assert [task["task_id"] for task in client.tasks(before=again.task_id)] == ["mine-odd"]
    assert (client.cancel("mine-odd"), client.cancel("mine-odd")) == (True, False)
    assert client.status()["journal"]["last_seq"] == 0
    assert "polarnode_live_sessions" in client.metrics()
    assert client.session("mine-odd-1")["session"]["status"] == "pending"


def test_source_is_submitted_by_task(bench: Bench) -> None:
    client = bench.client()
    [submitted] = client.submit_source(
        DATA / "polar" / "task.json", harness="pi", samples=3, over={"runtime": {"volumes": []}}
    )
    assert (submitted.task_id, len(submitted.session_ids)) == ("calc-7", 3)
    with pytest.raises(Refused, match="no convention is known for somebody/else"):
        client.submit_source(DATA / "swe" / "rows.jsonl", harness="codex")
    assert len(client.tasks()) == 1, "nothing of a source that can not be read whole"


def test_error_is_the_nodes_sentence(bench: Bench) -> None:
    client = bench.client()
    with pytest.raises(ClientError, match="did you mean num_samples") as caught:
        client.submit({"instruction": "x", "harness": {"name": "pi"}, "nun_samples": 1})
    assert (caught.value.status, caught.value.type, caught.value.path) == (
        400,
        "invalid_request",
        "$.nun_samples",
    )
    with pytest.raises(ClientError, match="no task 'none'") as missing:
        client.task("none")
    assert missing.value.status == 404
    with pytest.raises(ClientError, match="token") as stranger:
        next(bench.client(token="wrong").trajectories())
    assert stranger.value.status == 401
    with pytest.raises(Refused, match="ack needs a consumer"):
        client.trajectories(ack=True)


def test_full_node_is_awaited_with_patience(bench: Bench) -> None:
    service = bench.node.plane.service
    service.refuses = Busy("64 tasks wait already", retry_after=7.0)
    with pytest.raises(ClientError, match="64 tasks") as caught:
        bench.client(patience_s=2.0).submit(make_spec())
    assert (caught.value.passes, caught.value.retry_after) == (True, 7.0)
    service.refuses = DiskFull("the disk is full: make room")
    with pytest.raises(ClientError, match="make room") as full:
        bench.client().submit(make_spec())  # would be waited for ten minutes, if it were
    assert full.value.status == 507


# ── trajectories ──────────────────────────────────────────────────────────────


def test_trajectories_singly_and_all(bench: Bench) -> None:
    bench.node.publish("s0", "s1", "s2")
    client = bench.client()
    expected = [make_trajectory(f"s{number}", turns=2) for number in range(3)]
    events = list(client.trajectories(follow=False, turns="full"))
    assert [event.trajectory for event in events] == expected
    assert [(event.seq, event.key) for event in events] == [
        (1, "trajectory:s0"),
        (2, "trajectory:s1"),
        (3, "trajectory:s2"),
    ]
    assert client.trajectory("s1", turns="full") == expected[1]
    assert client.trajectory("s1", arrays="json").traces == expected[1].traces
    assert [line["session_id"] for line in client.export(min_reward=0.5)] == ["s0", "s1", "s2"]
    assert list(client.export(outcome="failed")) == []


def test_stream_waits_for_new_events(bench: Bench) -> None:
    stream = bench.client().trajectories()
    for number in range(3):
        bench.node.publish(f"s{number}")
        assert next(stream).key == f"trajectory:s{number}"
    stream.close()


def test_unacknowledged_work_comes_again(bench: Bench) -> None:
    bench.node.publish(*(f"s{number}" for number in range(5)))
    client = bench.client(ack_every_s=0.0)
    stream = client.trajectories(consumer="trainer", ack=True, follow=False)
    assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
    assert bench.node.position("trainer") == 2, "the third is still being worked on"
    stream.close()
    assert [event.seq for event in client.trajectories(consumer="trainer", ack=True, follow=False)] == [
        3,
        4,
        5,
    ]
    assert bench.node.position("trainer") == 5
    assert list(client.trajectories(consumer="trainer", ack=True, follow=False)) == []
    assert client.acknowledge("trainer", 1) == 5
    assert [event.seq for event in client.trajectories(consumer="trainer", after=3, follow=False)] == [4, 5]


def test_artifacts_come_as_a_file(bench: Bench, tmp_path: Path) -> None:
    bench.node.publish("s0")
    kept, target = b"\0kept\xff" * 100_000, tmp_path / "here.tar"
    artifacts_path(tmp_path, "s0").write_bytes(kept)
    assert bench.client().artifacts("s0", target) == len(kept)
    assert target.read_bytes() == kept
    with pytest.raises(ClientError, match="no session") as missing:
        bench.client().artifacts("none", tmp_path / "never.tar")
    assert missing.value.status == 404
    assert not (tmp_path / "never.tar").exists()


def test_snapshots_are_listed(bench: Bench, tmp_path: Path) -> None:
    bench.node.publish("s0")
    assert bench.client().snapshots("s0") == ()
    (tmp_path / "s0.snapshot-2.json").write_text("{}")
    (found,) = bench.client().snapshots("s0")
    assert (found.turn, found.resumable, found.why_not) == (2, False, "its archive is gone")
    with pytest.raises(ClientError, match="no session") as missing:
        bench.client().snapshots("none")
    assert missing.value.status == 404


def test_consumers_are_listed_and_forgotten(bench: Bench) -> None:
    bench.node.publish("s0", "s1")
    client = bench.client()
    assert client.consumers() == ()
    client.acknowledge("trainer", 1)
    [found] = client.consumers()
    assert (found.consumer, found.position, found.behind_events, found.holds) == ("trainer", 1, 1, True)
    assert client.forget_consumer("trainer") is None
    assert client.consumers() == ()
    with pytest.raises(ClientError, match="no consumer"):
        client.forget_consumer("trainer")


def test_trajectories_in_trainer_format(bench: Bench) -> None:
    bench.node.publish("s0")
    client = bench.client()
    one = client.formatted("s0", "slime", arrays="json")
    assert (one["format"], one["session_id"], one["reward"]) == ("slime", "s0", 1.0)
    [event] = client.trajectories(follow=False, format="slime", arrays="json")
    assert (event.data, event.trajectory) == (one, None)
    with pytest.raises(ClientError, match="format must be one of"):
        client.formatted("s0", "nobodys")
    pieces = client.export_bytes(format="slime", arrays="json")
    assert next(pieces) == b""
    assert [read_json(line) for line in b"".join(pieces).splitlines()] == [one]


# ── live sessions ─────────────────────────────────────────────────────────────

LIVE = LiveSessionStatus(session_id="a", task_id="t", harness="pi", phase="run", turns=1, sampled_tokens=5)


def test_live_sessions_arrive_as_changed(bench: Bench) -> None:
    service, client = bench.node.plane.service, bench.client()
    service.listed = (LIVE,)
    stream = client.live_sessions()
    assert next(stream) == SessionChanges(node="n0", sessions=(LIVE,), whole=True)
    for status in (
        attrs.evolve(LIVE, turns=2, sampled_tokens=9),
        attrs.evolve(LIVE, phase="ended", outcome="failed"),
    ):
        service.listed = (status,)
        assert next(stream) == SessionChanges(node="n0", sessions=(status,))
    stream.close()
    assert list(client.live_sessions(follow=False)) == [SessionChanges(node="n0", sessions=(), whole=True)]


def test_new_connection_forgets_known_nodes(kind: str) -> None:
    def answer(request: bytes, number: int) -> bytes | None:
        node = b"one" if number == 0 else b"two"
        told = b'event: sessions\ndata: {"node":"%b","sessions":[],"whole":true}\n\n' % node
        return None if number == 2 else chunked(b": polarnode\n\n", told)

    with answering(answer) as url, open_client(kind, url, patience_s=2.0) as client:
        stream = client.live_sessions()
        assert [next(stream).node for _ in range(3)] == ["one", "one", "two"]
        stream.close()


def test_groups_and_timeseries_without_consumer(bench: Bench) -> None:
    client = bench.client()
    client.submit(make_spec(task_id="t", num_samples=2))
    bench.node.publish("t-0", "t-1")
    [group] = client.finished_groups(state="complete", task_id="t")
    assert (group["task_id"], group["rewards"], len(group["sessions"])) == ("t", [1.0, 1.0], 2)
    assert client.finished_groups(state="dropped") == []
    assert client.finished_groups(until=0.0) == []
    with pytest.raises(ClientError, match="state must be one of") as caught:
        client.finished_groups(state="done")
    assert caught.value.path == "?state"
    assert client.consumers() == ()
    assert client.timeseries() == TimeSeries(every_s=10.0, at=(), values={})
    bench.node.plane.history.look()
    assert (client.timeseries().at, client.timeseries(since=1.0).at) == ((1.0,), ())


# ── groups ────────────────────────────────────────────────────────────────────


def test_whole_groups_are_acknowledged_when_done(bench: Bench) -> None:
    client = bench.client(ack_every_s=0.0)
    for task_id in "ab":
        client.submit(make_spec(task_id=task_id, num_samples=2))
    bench.node.publish("a-0", task_id="a")
    bench.node.publish("b-0", "b-1", task_id="b")  # and its group's end, while a goes on
    groups = client.groups(consumer="trainer", ack=True)
    first = next(groups)
    assert [one.session_id for one in first.trajectories] == ["b-0", "b-1"]
    assert (first.task_id, [member.session_id for member in first.members]) == ("b", ["b-0", "b-1"])
    bench.node.publish("a-1", task_id="a")
    assert [one.session_id for one in next(groups).trajectories] == ["a-0", "a-1"]
    assert bench.node.position("trainer") == 0, "a is being worked on, and it began before all of b"
    groups.close()
    assert [
        group.task_id for group in client.groups(consumer="trainer", ack=True, follow=False, skip={"b"})
    ] == ["a"]
    assert bench.node.position("trainer") > 6
    assert list(client.groups(consumer="trainer", ack=True, follow=False)) == []


def test_leaving_loop_loses_no_acknowledgement(bench: Bench) -> None:
    """The client's own second between acknowledgements has not passed when the loop is left."""
    client = bench.client()
    for task_id in "abc":
        client.submit(make_spec(task_id=task_id))
        bench.node.publish(f"{task_id}-0", task_id=task_id)
    with client.groups(consumer="asking", ack=True) as groups:
        assert [next(groups).task_id, next(groups).task_id] == ["a", "b"]
    assert next(client.groups(consumer="asking")).task_id == "b", "it may have been in the middle of b"
    with client.groups(consumer="saying") as groups:
        for group in groups:
            group.ack()
            if group.task_id == "b":
                break
    assert [group.task_id for group in client.groups(consumer="saying", follow=False)] == ["c"]
    with client.trajectories(consumer="reading", ack=True) as events:
        _ = [next(events) for _ in range(3)]
    assert bench.node.position("reading") == 2


def test_dropped_group_parts_are_refetched(bench: Bench) -> None:
    client = bench.client()
    client.submit(make_spec(task_id="a", num_samples=3))
    bench.node.publish("a-0", "a-1", "a-2", task_id="a", turns=3)
    kept = list(client.groups(follow=False, turns="full"))
    fetched = list(client.groups(follow=False, turns="full", kept_bytes=0))
    late = list(client.groups(follow=False, turns="full", after=2))
    assert kept == fetched == late
    assert [len(one.turns) for one in kept[0].trajectories] == [3, 3, 3]


# ── a node that goes and comes ────────────────────────────────────────────────


def test_absent_node_is_reported(bench: Bench) -> None:
    client = bench.client(f"http://127.0.0.1:{free_port()}", patience_s=0.3)
    for ask in (
        client.status,
        lambda: next(client.trajectories()),
        lambda: next(client.groups()),
        lambda: client.submit(make_spec()),
    ):
        with pytest.raises(Unreachable, match="is the node running"):
            ask()


def test_stream_continues_after_node_death(kind: str, tmp_path: Path) -> None:
    """Killed in mid-stream; each event comes once, in order. Many deaths at random moments are in
    test_client.py.
    """
    node = Child(tmp_path / "journal.sqlite", free_port())
    node.start(sessions=10)
    try:
        with open_client(kind, node.url, token="secret") as client:
            stream = client.trajectories()
            found = [next(stream) for _ in range(7)]
            node.kill()
            node.start(sessions=20)
            found += [next(stream) for _ in range(13)]
            stream.close()
    finally:
        node.kill()
    assert [event.key for event in found] == [f"trajectory:s{number}" for number in range(20)]


def test_event_cut_midway_is_refetched(kind: str) -> None:
    answers = (
        chunked(b": hello\n\n", event(1), event(2)[:25]),  # cut within an event
        chunked(event(2)[:7], event(2)[7:]) + b"fff",  # cut within a chunk's size
        b"",  # nothing at all
        # a node that is starting
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n",
        chunked(b'event: error\ndata: {"error":{"message":"damaged"}}\n\n', end=True),
        chunked(b": hello\n\n", event(2), event(3), end=True),  # what was had already, too
    )
    asked: list[int] = []

    def answer(request: bytes, number: int) -> bytes:
        asked.append(last_id(request))
        return answers[number]

    with answering(answer) as url, open_client(kind, url) as client:
        found = list(client.trajectories(follow=False))
    assert [(one.seq, one.key, one.data) for one in found] == [(n, f"task:{n}", {"n": n}) for n in (1, 2, 3)]
    assert asked == [0, 1, 2, 2, 2, 2]


GARBAGE = {
    "no SSE at all": b"<html>busy</html>\n\n" * 50,
    "no number": b'event: task\ndata: {"task":{}}\n\n',
    "a number that is none": b'event: task\nid: x\ndata: {"task":{}}\n\n',
    "no JSON": b"event: task\nid: 1\ndata: {{{\n\n",
    "not an object": b"event: task\nid: 1\ndata: 7\n\n",
    "another kind's body": b'event: task\nid: 1\ndata: {"group":{}}\n\n',
    "bytes": bytes(range(256)) * 20,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_unreachable_in_time(kind: str, name: str) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(
            answering(lambda request, number: chunked(b": hello\n\n", GARBAGE[name], end=True))
        )
        client = stack.enter_context(open_client(kind, url, patience_s=0.3))
        with pytest.raises(Unreachable):
            list(client.trajectories())


PACKED = gzip.compress(b"{}", mtime=0)  # no client decompresses: a small answer could expand to a huge one


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\n<html", "502 Bad Gateway"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<html", "not from polarnode"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "not an object"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s"
            % (len(PACKED), PACKED),
            "not from polarnode",
        ),
        (b'HTTP/1.1 400 Bad\r\nContent-Length: 13\r\n\r\n{"error":"no"}'[:-1], "400 Bad"),
    ],
)
def test_foreign_answer_is_reported(kind: str, answer: bytes, sentence: str) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(answering(lambda request, number: answer))
        client = stack.enter_context(open_client(kind, url + "/prefix/"))
        with pytest.raises(ClientError, match=sentence):
            client.status()


def test_page_instead_of_stream_is_refused(kind: str) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"
    with ExitStack() as stack:
        client = stack.enter_context(
            open_client(kind, stack.enter_context(answering(lambda request, number: page)))
        )
        with pytest.raises(ClientError, match="text/html, not the event stream of polarnode"):
            next(client.trajectories())


def test_cut_download_leaves_no_file(kind: str, tmp_path: Path) -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nonly this"
    with (
        answering(lambda request, number: cut) as url,
        open_client(kind, url) as client,
        pytest.raises(Unreachable),
    ):
        client.artifacts("s", tmp_path / "cut.tar")


# ── logs ──────────────────────────────────────────────────────────────────────


def test_logs_are_read_in_pieces(bench: Bench, tmp_path: Path) -> None:
    client = bench.client()
    client.submit(make_spec(task_id="t", num_samples=2))
    (tmp_path / "t-0.log").write_text("one\ntwo\n")
    (tmp_path / "node.log").write_text("begun\n")
    piece = client.log("t-0", offset=4)
    assert (piece.text, piece.next_offset, piece.ended) == ("two\n", 8, False)
    assert client.log("t-0", tail=1).text == "two\n"
    names = [each.name for each in client.node_logs()]
    assert names[0] == "node"
    assert client.node_log("node").text == "begun\n"
    with pytest.raises(ClientError, match="no log is called 'no/thing'") as missing:
        client.node_log("no/thing")
    assert missing.value.status == 404


def test_client_may_begin_at_newest_event(bench: Bench) -> None:
    client = bench.client()
    bench.node.publish("old")
    assert list(client.trajectories(after="newest", follow=False)) == []
    stream = client.trajectories(after="newest", consumer="fresh", ack=True, follow=False)
    assert list(stream) == []
    bench.node.publish("new")
    assert [each.key for each in client.trajectories(consumer="fresh", follow=False)] == ["trajectory:new"]
    again = client.trajectories(after="newest", consumer="fresh", follow=False)
    assert [each.key for each in again] == ["trajectory:new"], "it has a position"


def test_lost_first_connection_keeps_start(kind: str) -> None:
    asked: list[bytes] = []

    def answer(request: bytes, number: int) -> bytes | None:
        asked.append(request)
        begun = chunked(b": polarnode\n\n", b"id: 7\n\n")
        return begun if number == 0 else chunked(b": polarnode\n\n", event(8), end=True)

    with answering(answer) as url, open_client(kind, url, token="secret", patience_s=20.0) as client:
        found = next(iter(client.trajectories(after="newest")))
    assert found.seq == 8
    assert b"begin=newest" in asked[0]
    assert last_id(asked[0]) == 0
    assert last_id(asked[1]) == 7
