"""The client against a control plane in its own process: a node that is killed and comes again, cut streams, errors.

The client is synchronous, so the node runs in a child; what the child writes it was told by the test, over HTTP or before it started.
"""

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import attrs
import pytest
import trio
from control_plane_parts import open_plane
from journal_samples import make_spec, make_trajectory

from polarnode import client as client_module
from polarnode.client import ClientError, Event, PolarnodeClient, Unreachable
from polarnode.errors import Refused
from polarnode.shell.journal import Journal

TASK = "t"


# ── the node, in a child ──────────────────────────────────────────────────────


async def serve(path: Path, port: int, sessions: int, pause_s: float) -> None:
    """Serve, and publish sessions of the task until there are so many: one every `pause_s` while it serves, or, without a pause, all before.
    Whatever a life before published stands."""
    async with open_plane(path, port=port) as plane:
        if not pause_s:
            await publish_all(plane.journal, sessions, pause_s)
        print(plane.url, flush=True)
        if pause_s:
            await publish_all(plane.journal, sessions, pause_s)
        await trio.sleep_forever()


async def publish_all(journal: Journal, sessions: int, pause_s: float) -> None:
    for number in range(sessions):
        publish(journal, number)
        await journal.flushed()
        await trio.sleep(pause_s)


def publish(journal: Journal, number: int) -> None:
    trajectory = make_trajectory(f"s{number}", task_id=TASK, sample_index=number, turns=2)
    for turn in trajectory.turns:
        journal.turn(turn)
    journal.publish(trajectory)


@attrs.define(eq=False)
class Child:
    """A node's process, on one port through all its lives."""

    path: Path
    port: int
    process: "subprocess.Popen[str] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, sessions: int = 0, pause_s: float = 0.0) -> None:
        argv = [sys.executable, __file__, str(self.path), str(self.port), str(sessions), str(pause_s)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.url

    def kill(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()
        self.process = None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path / "journal.sqlite", free_port())
    yield child
    child.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client_of(node: Child, **more: float) -> PolarnodeClient:
    return PolarnodeClient(node.url, token="secret", **more)


# ── tasks and single answers ──────────────────────────────────────────────────


def test_a_task_is_submitted_seen_and_cancelled(node: Child) -> None:
    node.start()
    client = client_of(node)
    taken = client.submit(make_spec(task_id="mine-odd", num_samples=2))
    assert (taken.task_id, taken.session_ids, taken.created) == ("mine-odd", ("mine-odd-0", "mine-odd-1"), True)
    again = client.submit({"instruction": "do it", "harness": {"name": "pi"}}, idempotency_key="k")
    assert client.submit({"instruction": "do it", "harness": {"name": "pi"}}, idempotency_key="k") == attrs.evolve(again, created=False)
    assert client.task("mine-odd")["counts"] == {"pending": 2}
    assert [task["task_id"] for task in client.tasks(limit=1)] == [again.task_id]
    assert [task["task_id"] for task in client.tasks(before=again.task_id)] == ["mine-odd"]
    assert (client.cancel("mine-odd"), client.cancel("mine-odd")) == (True, False)
    assert client.status()["journal"]["last_seq"] == 0
    assert client.session("mine-odd-1")["session"]["status"] == "pending"


def test_trajectories_one_by_one_and_all(node: Child) -> None:
    node.start(sessions=3)
    client = client_of(node)
    expected = [make_trajectory(f"s{number}", task_id=TASK, sample_index=number, turns=2) for number in range(3)]
    events = list(client.trajectories(follow=False, turns="full"))
    assert [event.trajectory for event in events] == expected
    assert [(event.seq, event.key) for event in events] == [(1, "trajectory:s0"), (2, "trajectory:s1"), (3, "trajectory:s2")]
    assert client.trajectory("s1", turns="full") == expected[1]
    assert client.trajectory("s1", arrays="json").traces == expected[1].traces
    assert [line["session_id"] for line in client.export(min_reward=0.5)] == ["s0", "s1", "s2"]
    assert list(client.export(outcome="failed")) == []


def test_an_error_is_the_nodes_sentence(node: Child) -> None:
    node.start()
    client = client_of(node)
    with pytest.raises(ClientError, match="did you mean num_samples") as caught:
        client.submit({"instruction": "x", "harness": {"name": "pi"}, "nun_samples": 1})
    assert (caught.value.status, caught.value.type, caught.value.path) == (400, "invalid_request", "$.nun_samples")
    with pytest.raises(ClientError, match="no task 'none'") as missing:
        client.task("none")
    assert missing.value.status == 404
    with pytest.raises(ClientError, match="token") as stranger:
        next(PolarnodeClient(node.url, token="wrong").trajectories())
    assert stranger.value.status == 401
    assert "wrong" not in repr(PolarnodeClient(node.url, token="wrong"))


def test_a_node_that_is_not_there_is_said(node: Child) -> None:
    client = client_of(node, patience_s=0.3)
    with pytest.raises(Unreachable, match="is the node running"):
        client.status()
    with pytest.raises(Unreachable):
        next(client.trajectories())
    with pytest.raises(Unreachable):
        client.submit(make_spec())


def test_who_acknowledges_needs_a_name(node: Child) -> None:
    with pytest.raises(Refused, match="ack needs a consumer"):
        client_of(node).trajectories(ack=True)


# ── the stream through the node's deaths ──────────────────────────────────────


def test_a_stream_goes_on_after_kill_9_without_missing_or_repeating(node: Child) -> None:
    """The node is killed and started again five times while the client reads 120 events; each comes once, in order."""
    count, kills = 120, 5
    node.start(sessions=count, pause_s=0.01)
    chance = random.Random(3)

    def kill_now_and_then() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.1, 0.4))
            node.kill()
            node.start(sessions=count, pause_s=0.01)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    found = list(islice(client_of(node).trajectories(), count))
    killer.join()
    assert [event.seq for event in found] == list(range(1, count + 1))
    assert sorted(event.key for event in found) == sorted(f"trajectory:s{number}" for number in range(count))


def test_a_task_named_is_followed_to_its_end(node: Child) -> None:
    node.start()
    client = client_of(node)
    client.submit(make_spec(task_id=TASK, num_samples=4))
    keys: list[str] = []
    reader = threading.Thread(target=lambda: keys.extend(event.key for event in client.trajectories(task_id=TASK)))
    reader.start()
    node.kill()
    node.start(sessions=4)  # the stand-in names the task's sessions t-0 …, these are others of the same task
    client.submit(make_spec(task_id="other"))
    reader.join(1.0)
    assert reader.is_alive(), "its own sessions are still pending"
    assert client.task(TASK)["counts"]["pending"] == 4
    node.kill()
    trio.run(end_task, node.path)
    node.start()
    reader.join(60)
    assert keys[:4] == [f"trajectory:s{number}" for number in range(4)]
    assert keys[4:] == [*(f"trajectory:t-{number}" for number in range(4)), "group:t", "task:t"]


async def end_task(path: Path) -> None:
    async with open_plane(path) as plane:
        for left in await plane.journal.unfinished():
            if left.identity.task_id == TASK:
                plane.journal.publish(make_trajectory(left.identity.session_id, task_id=TASK, turns=0, status="interrupted"))


def test_what_was_worked_on_is_acknowledged_and_the_rest_comes_again(node: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ACK_EVERY_S", 0.0)
    node.start(sessions=5)
    client = client_of(node)
    read = partial(client.trajectories, consumer="trainer", ack=True, follow=False)
    stream = read()
    assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
    assert position(client) == 2, "the third is still being worked on"
    stream.close()  # type: ignore[attr-defined]
    assert [event.seq for event in read()] == [3, 4, 5]
    assert position(client) == 5
    assert list(read()) == []
    assert client.acknowledge("trainer", 1) == 5
    assert [event.seq for event in client.trajectories(consumer="trainer", after=3, follow=False)] == [4, 5]


def position(client: PolarnodeClient) -> int:
    return int(client.status()["journal"]["positions"]["trainer"])


# ── a stream that is cut anywhere ─────────────────────────────────────────────


@contextmanager
def cutting(answers: list[bytes]) -> Iterator[str]:
    """A server that gives one raw answer a connection and hangs up; the requests are kept in `answers`' place."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def answer() -> None:
        for raw in tuple(answers):
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(65536))
                connection.sendall(raw)
        answers[:] = asked

    server = threading.Thread(target=answer)
    server.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.join(30)
    listener.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes, end: bool = False) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + (b"0\r\n\r\n" if end else b"")


def event(seq: int) -> bytes:
    return b'event: task\nid: %d\ndata: {"seq":%d,"key":"task:%d","task":{"n":%d}}\n\n' % (seq, seq, seq, seq)


def test_a_cut_in_the_middle_of_an_event_is_asked_for_again() -> None:
    answers = [
        chunked(b": hello\n\n", event(1), event(2)[:25]),  # cut within an event
        chunked(event(2)[:7], event(2)[7:]) + b"fff",  # cut within a chunk's size
        b"",  # nothing at all
        chunked(b'event: error\ndata: {"error":{"message":"damaged"}}\n\n', end=True),
        chunked(b": hello\n\n", event(3), end=True),
    ]
    with cutting(answers) as url:
        found = list(PolarnodeClient(url).trajectories(follow=False))
    assert found == [Event(seq=n, kind="task", key=f"task:{n}", data={"n": n}) for n in (1, 2, 3)]
    last_ids = [line for request in answers for line in request.split(b"\r\n") if line.startswith(b"Last-Event-ID")]
    assert last_ids == [b"Last-Event-ID: 1", b"Last-Event-ID: 2", b"Last-Event-ID: 2", b"Last-Event-ID: 2"]


def test_an_answer_that_is_no_polarnodes_is_said_so() -> None:
    with cutting([b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\n<html"]) as url, pytest.raises(ClientError, match="502 Bad Gateway"):
        PolarnodeClient(url + "/prefix/").status()


def test_other_kinds_of_events_have_no_trajectory() -> None:
    assert Event(seq=1, kind="gap", key="gap", data={"after": 0, "oldest": 2}).trajectory is None


if __name__ == "__main__":
    trio.run(serve, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
