"""Callbacks against receivers on this machine that fail, hang, die and come back: each event is taken, in the
order of its task.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import polar_client as polar
import pytest
import trio
from attrs import define, field, fields
from callback_kit import CallbackReceiver, open_receiver
from control_plane_parts import Caller
from journal_samples import make_spec
from log_kit import end

from polarnode.api import callbacks
from polarnode.api import callbacks as module
from polarnode.api.app import control_plane
from polarnode.api.callbacks import (
    CallbackReceivers,
    CallbackService,
    callback_networks,
    open_callbacks,
    shown,
)
from polarnode.api.routes import ControlRoutes
from polarnode.core.backoff import Backoff
from polarnode.core.errors import ConfigError, Refused
from polarnode.http.server import Address, open_server
from polarnode.integrations.polar.extension import callback_formats
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Claim, ClaimOffer, LeasedCallback, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.pending_callbacks import CallbackCounts
from polarnode.journal.values import RetentionLimits
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.node import Node as WholeNode
from polarnode.trainers.polar import Origin, with_origin

FORMATS = callback_formats(node="n0")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, shorter: none of them is what is tested."""
    monkeypatch.setattr(callbacks, "PAUSES", Backoff(first_s=0.05, longest_s=0.2, jitter=0.25))
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "SETTLE_S", 0.5)


@define(eq=False)
class Node:
    """What of a node a callback needs."""

    journal: Journal
    log: SqliteLog
    callbacks: CallbackService
    claims: dict[str, Claim] = field(factory=dict)

    async def task(
        self, task_id: str, url: str | None, *, samples: int = 1, form: Any = "event"
    ) -> list[str]:
        spec = make_spec(
            callback_url=url,
            callback_format=form,
            num_samples=samples,
            metadata=with_origin({}, Origin(task_id=f"their {task_id}")),
        )
        ids = tuple(f"{task_id}-{index}" for index in range(samples))
        kinds = self.callbacks.kinds_for(spec)
        await self.log.submit(spec, task_id=task_id, session_ids=ids, callback_kinds=kinds, submitted=1.0)
        return list(ids)

    async def over(self, session_id: str) -> None:
        if session_id not in self.claims:
            for claim in await self.log.claim(ClaimOffer(incarnation=1, room=100)):
                self.claims[claim.session_id] = claim
        claim = self.claims.pop(session_id)
        metadata = with_origin({}, Origin(task_id=f"their {claim.task_id}"))
        await self.log.finish_claim(claim, end(claim, metadata=metadata))

    async def whole(self, task_id: str, url: str, **more: Any) -> None:
        for session_id in await self.task(task_id, url, **more):
            await self.over(session_id)

    async def pending(self) -> int:
        return (await self.log.count_callbacks()).pending

    async def settled(self) -> None:
        """Until nothing is owed."""
        with trio.fail_after(120):
            while await self.pending():  # noqa: ASYNC110 (what another task writes has no event here)
                await trio.sleep(0.02)


@asynccontextmanager
async def open_log(journal: Journal) -> AsyncIterator[SqliteLog]:
    log = SqliteLog(journal)
    await log.join(NodeFacts(name="n0"))
    yield log


@asynccontextmanager
async def open_node(path: Path, receivers: CallbackReceivers | None = None) -> AsyncIterator[Node]:
    async with (
        open_journal(path / "journal.sqlite", now=lambda: 1000.0) as journal,
        open_log(journal) as log,
        open_callbacks(log, formats=FORMATS, receivers=receivers) as callbacks,
    ):
        yield Node(journal, log, callbacks)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as opened:
        yield opened


@pytest.fixture
async def receiver() -> AsyncIterator[CallbackReceiver]:
    async with open_receiver() as opened:
        yield opened


def of(task_id: str, samples: int = 1) -> list[str]:
    return [
        *(f"trajectory:{task_id}-{index}" for index in range(samples)),
        f"group:{task_id}",
        f"task:{task_id}",
    ]


# ── what is told ──────────────────────────────────────────────────────────────


async def test_task_events_arrive_once_in_order(node: Node, receiver: CallbackReceiver) -> None:
    await node.whole("t", receiver.url, samples=2)
    await receiver.until(4)
    await node.settled()
    assert receiver.keys == of("t", 2)
    first = receiver.got[0][1]
    assert (first["key"], first["trajectory"]["session_id"], set(first) - {"journal"}) == (
        "trajectory:t-0",
        "t-0",
        {"seq", "key", "trajectory"},
    )
    assert receiver.got[2][1]["group"]["task_id"] == "t"
    head = receiver.heads[0]
    assert (head["content-type"], head["polarnode-event"], head["polarnode-seq"]) == (
        "application/json",
        "trajectory",
        "1",
    )
    assert (node.callbacks.statistics().taken, node.callbacks.statistics().failed) == (4, 0)


async def test_task_without_callback_owes_nothing(node: Node) -> None:
    await node.task("t", None)
    await node.over("t-0")
    assert await node.pending() == 0


async def test_replaced_session_is_not_sent(node: Node, receiver: CallbackReceiver) -> None:
    await node.task("t", receiver.url)
    [claim] = await node.log.claim(ClaimOffer(incarnation=1, room=1))
    again = await node.log.put_back(claim, end(claim, status="interrupted"), keep=True)
    assert again is not None
    node.claims[again.session_id] = again
    await node.over(again.session_id)
    await receiver.until(3)
    assert receiver.keys == [f"trajectory:{again.session_id}", "group:t", "task:t"]


async def test_polar_task_sends_all_results_once(node: Node, receiver: CallbackReceiver) -> None:
    await node.whole("t", receiver.url, samples=3, form="polar_task")
    await receiver.until(1)
    await node.settled()
    assert receiver.keys == ["task:t"]
    result = polar.read(receiver.got[0][1], polar.TaskResult)
    assert (result.task_id, result.status, [each.session_id for each in result.results]) == (
        "their t",
        "completed",
        ["t-0", "t-1", "t-2"],
    )


async def test_polar_session_sends_each_end(node: Node, receiver: CallbackReceiver) -> None:
    await node.whole("t", receiver.url, form="polar_session")
    await receiver.until(1)
    await node.settled()
    (key, body), *rest = receiver.got
    assert (key, rest) == ("trajectory:t-0", [])
    assert polar.read(body, polar.SessionResult).task_id == "their t"


async def test_oversized_body_is_streamed_with_length(
    node: Node, receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.whole("held", receiver.url, samples=3, form="polar_task")
    await receiver.until(1)
    monkeypatch.setattr(callbacks, "MAX_HELD_BYTES", 100)
    await node.whole("made", receiver.url, samples=3, form="polar_task")
    await receiver.until(2)
    held, made = (json.dumps(body).replace("held", "").replace("made", "") for _, body in receiver.got)
    assert held == made
    assert all("content-length" in head and "transfer-encoding" not in head for head in receiver.heads)


# ── where they go ─────────────────────────────────────────────────────────────


def at(
    answers: dict[str, list[str]], *, own: tuple[str, ...] = (), ports: tuple[int, ...] = (), **more: Any
) -> CallbackReceivers:
    """Receivers with a resolver that knows these names alone, and looks up nothing."""

    async def resolve(host: str, port: int) -> list[str]:
        await trio.lowlevel.checkpoint()
        if host not in answers:
            raise OSError("no such name")
        return answers[host]

    return CallbackReceivers(resolve=resolve, is_own=lambda text: text in own, own_ports=[ports], **more)


@pytest.mark.parametrize(
    ("address", "port", "reason"),
    [
        ("127.0.0.1", 9000, None),
        ("::1", 9000, None),
        ("10.1.2.3", 80, None),
        ("::ffff:192.168.1.1", 80, None),
        ("100.64.0.9", 80, None),
        ("fd12::1", 80, None),
        ("169.254.169.254", 80, "link-local, metadata"),
        ("::ffff:169.254.169.254", 80, "link-local, metadata"),
        ("64:ff9b::a9fe:a9fe", 80, "link-local, metadata"),
        ("2002:a9fe:a9fe::1", 80, "link-local, metadata"),
        ("fe80::1", 80, "link-local, metadata"),
        ("fe80::1%eth0", 80, "link-local, metadata"),
        ("fd00:ec2::254", 80, "link-local, metadata"),
        ("100.100.100.200", 80, "link-local, metadata"),
        ("168.63.129.16", 80, "link-local, metadata"),
        ("192.0.0.192", 80, "link-local, metadata"),
        ("0.0.0.0", 80, "link-local, metadata"),
        ("::", 80, "link-local, metadata"),
        ("0.1.2.3", 80, "link-local, metadata"),
        ("224.0.0.1", 80, "link-local, metadata"),
        ("ff02::1", 80, "link-local, metadata"),
        ("255.255.255.255", 80, "link-local, metadata"),
        ("240.0.0.1", 80, "link-local, metadata"),
        ("fec0::1", 80, "link-local, metadata"),
        ("::127.0.0.1", 80, "link-local, metadata"),
        ("64:ff9b::127.0.0.1", 80, "link-local, metadata"),
        ("64:ff9b::10.0.0.6", 80, "link-local, metadata"),
        ("64:ff9b::192.168.1.1", 80, "link-local, metadata"),
        ("64:ff9b::100.64.0.1", 80, "link-local, metadata"),
        ("64:ff9b:1::10.0.0.6", 80, "link-local, metadata"),
        ("64:ff9b::8.8.8.8", 80, "callback_networks"),
        ("93.184.216.34", 443, "callback_networks"),
        ("2606:4700::1111", 443, "callback_networks"),
        ("127.0.0.1", 8080, "a socket of this node itself"),
        ("127.3.2.1", 8080, "a socket of this node itself"),
        ("::ffff:127.0.0.1", 8080, "a socket of this node itself"),
        ("10.0.0.5", 8080, "a socket of this node itself"),
        ("10.0.0.6", 8080, None),
    ],
)
def test_allowed_callback_addresses(address: str, port: int, reason: str | None) -> None:
    receivers = at({}, own=("10.0.0.5",), ports=(8080,))
    found = receivers.refusal(address, port)
    assert found is None if reason is None else reason in str(found)
    everywhere = at({}, own=("10.0.0.5",), ports=(8080,), networks=callback_networks(["0.0.0.0/0", "::/0"]))
    if reason is not None and reason != "callback_networks":
        assert everywhere.refusal(address, port) == found  # a setting does not open these
    else:
        assert everywhere.refusal(address, port) is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://169.254.169.254/latest/meta-data", "link-local, metadata"),
        ("http://[::ffff:169.254.169.254]:80/", "link-local, metadata"),
        ("http://93.184.216.34/", "callback_networks"),
        ("http://localhost:8080/v1/tasks", "a socket of this node itself"),
        ("http://127.0.0.1:8080/v1/tasks", "a socket of this node itself"),
        ("https://127.0.0.1/", "a socket of this node itself"),
    ],
)
def test_forbidden_callback_address_is_refused(url: str, reason: str) -> None:
    receivers = at({}, ports=(8080, 443))
    with pytest.raises(Refused, match=f"^callback_url leads to .*{reason}") as refused:
        receivers.check(url)
    assert refused.value.path == "$.callback_url"
    for taken in ("http://127.0.0.1:8081/", "http://trainer.example:8080/", "http://10.0.0.1/"):
        receivers.check(taken)


async def test_checked_address_is_connected(tmp_path: Path, receiver: CallbackReceiver) -> None:
    """A name that answers with another address at each look-up gains nothing: it is looked up once an attempt,
    and the name itself is never connected to.
    """
    port = receiver.url.rpartition(":")[2].partition("/")[0]
    answers = {"trainer.invalid": ["169.254.169.254", "93.184.216.34", "127.0.0.1"]}
    url = f"http://trainer.invalid:{port}/taken?secret=1"
    async with open_node(tmp_path, at(answers)) as node:
        await node.whole("t", url)
        await receiver.until(3)
        await node.settled()
    assert receiver.keys == of("t")
    assert {head["host"] for head in receiver.heads} == {f"trainer.invalid:{port}"}


async def test_own_sockets_get_no_callback(tmp_path: Path, receiver: CallbackReceiver) -> None:
    """Neither by address nor by a name for it; the event stays pending, and is sent once it may be."""
    port = int(receiver.url.rpartition(":")[2].partition("/")[0])
    receivers = at({"inside.invalid": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}, ports=(port,))
    async with open_node(tmp_path, receivers) as node:
        await node.whole("direct", receiver.url)
        await node.whole("named", f"http://inside.invalid:{port}/")
        with trio.fail_after(60):
            while len(node.callbacks.statistics().trouble) < 2:  # noqa: ASYNC110 (another task's table)
                await trio.sleep(0.02)
        assert receiver.heads == []
        assert await node.pending() == 6
        troubles = set(node.callbacks.statistics().trouble.values())
        assert troubles == {"its host leads to a socket of this node itself: give the address of a receiver"}
        receivers.own_ports.clear()
        await receiver.until(6)
        await node.settled()


async def test_status_reveals_no_open_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port, one that speaks another protocol, one that is silent and a name that is none read alike."""
    monkeypatch.setattr(callbacks, "ATTEMPT_S", 0.3)

    async def speaks(stream: trio.SocketStream) -> None:
        await stream.send_all(b"220 mail.example ESMTP\r\n")

    async def is_silent(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    known = at({"127.0.0.1": ["127.0.0.1"]})
    async with trio.open_nursery() as nursery, open_node(tmp_path, known) as node:
        urls = ["http://127.0.0.1:1/", "http://no-such-host.invalid/"]
        for handler in (speaks, is_silent):
            [listener] = await nursery.start(partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))
            urls.append(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/")
        for number, url in enumerate(urls):
            await node.whole(f"t{number}", url)
        with trio.fail_after(60):
            while len(node.callbacks.statistics().trouble) < len(urls):  # noqa: ASYNC110 (another task's table)
                await trio.sleep(0.02)
        assert set(node.callbacks.statistics().trouble.values()) == {callbacks.NO_ANSWER_REASON}
        nursery.cancel_scope.cancel()


def test_invalid_networks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"callback_networks: '10.1.2.3/8' is no network .* write it as"):
        read_config(flags={"callback_networks": ["10.1.2.3/8"], "cpu": True})
    assert read_config(flags={"callback_networks": ["203.0.113.0/24"], "cpu": True}).callback_networks == (
        "203.0.113.0/24",
    )


# ── until it is taken ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("manner", ["refuse", "redirect", "cut"])
async def test_rejected_event_is_sent_again(node: Node, receiver: CallbackReceiver, manner: str) -> None:
    receiver.manner = manner
    await node.whole("t", receiver.url)
    await receiver.wait_asked(4)
    assert receiver.got == []
    assert await node.pending() == 3
    assert list(node.callbacks.statistics().trouble) == [receiver.url]
    receiver.manner = "take"
    await receiver.until(3)
    await node.settled()
    assert receiver.keys == of("t")
    assert node.callbacks.statistics().failed >= 3
    assert node.callbacks.statistics().trouble == {}


async def test_unreadable_result_is_not_accepted(
    node: Node, receiver: CallbackReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """A bridge that could not read a result has not taken it."""
    receiver.manner = "not ok"
    await node.whole("t", receiver.url, form="polar_task")
    await receiver.wait_asked(3)
    assert await node.pending() == 1
    assert "did not take the event" in node.callbacks.statistics().trouble[receiver.url]
    assert "invalid payload" not in node.callbacks.statistics().trouble[receiver.url]
    assert "did not take task:t: it answered {'ok': false}, 'invalid payload'" in caplog.text
    receiver.manner = "take"
    await receiver.until(1)
    await node.settled()
    assert node.callbacks.statistics().trouble == {}


async def test_status_alone_accepts_event(node: Node, receiver: CallbackReceiver) -> None:
    receiver.manner = "not ok"
    await node.whole("t", receiver.url)
    await node.settled()
    assert node.callbacks.statistics().failed == 0


async def test_receiver_answer_is_not_decompressed(node: Node, receiver: CallbackReceiver) -> None:
    """3 kB of gzip in gzip are 2 GiB; that a body is not what it is declared to be shows that nobody tried."""
    receiver.manner = "encode"
    await node.whole("t", receiver.url)
    await receiver.until(3)
    await node.settled()
    assert receiver.keys == of("t")
    assert node.callbacks.statistics().failed == 0


async def test_hanging_receiver_is_asked_again(
    node: Node, receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "ATTEMPT_S", 0.3)
    receiver.manner = "hang"
    await node.whole("t", receiver.url)
    await receiver.wait_asked(2)
    assert node.callbacks.statistics().trouble[receiver.url] == callbacks.NO_ANSWER_REASON
    receiver.manner = "take"
    await receiver.until(3)
    await node.settled()
    assert receiver.keys == of("t")


async def test_absent_receiver_gets_events_later(node: Node) -> None:
    async with open_receiver() as gone:
        url = gone.url
    await node.whole("t", url)
    with trio.fail_after(60):
        while not node.callbacks.statistics().failed:  # noqa: ASYNC110 (a count has no event)
            await trio.sleep(0.02)
    async with open_receiver(port=int(url.split(":")[2].split("/")[0])) as back:
        await back.until(3)
        assert back.keys == of("t")


async def test_dead_url_delays_no_other(node: Node, receiver: CallbackReceiver) -> None:
    """Though it has more to be told than there are places, and answers none of it for as long as it may."""
    async with open_receiver() as dead:
        dead.manner = "hang"
        for index in range(3 * module.AT_ONCE):
            await node.whole(f"dead{index}", dead.url)
        await dead.wait_asked(module.MAX_POSTS_PER_URL)
        await node.whole("t", receiver.url)
        await receiver.until(3)
        assert receiver.keys == of("t")
        assert dead.asked == module.MAX_POSTS_PER_URL


async def test_rejected_task_delays_no_other(node: Node) -> None:
    """One receiver that refuses one task for ever, and takes the others."""
    async with open_receiver() as picky:
        await node.whole("bad", picky.url)
        picky.manner = "refuse"
        await picky.wait_asked(1)
        picky.manner = "take"
        for name in ("a", "b", "c"):
            await node.whole(name, picky.url)
        await picky.until(12)
        assert {
            name: [key for key in picky.keys if key.endswith(f":{name}") or f":{name}-" in key]
            for name in ("a", "b", "c", "bad")
        } == {name: of(name) for name in ("a", "b", "c", "bad")}


async def test_pruned_events_are_counted(tmp_path: Path) -> None:
    """The journal's own pruning: with nothing kept, each event goes with the next commit."""
    async with open_receiver() as receiver:
        receiver.manner = "refuse"
        nothing = RetentionLimits(acknowledged=0, everything=1)
        async with (
            open_journal(tmp_path / "journal", now=lambda: 1000.0, retention=nothing) as journal,
            open_log(journal) as log,
            open_callbacks(log, formats=FORMATS) as callbacks,
        ):
            node = Node(journal, log, callbacks)
            for index in range(5):
                await node.whole(f"t{index}", receiver.url)
            with trio.fail_after(60):
                while callbacks.statistics().expired < 12:
                    index += 1
                    await node.whole(f"t{index}", receiver.url)
                    await trio.sleep(0.05)
            assert await node.pending() < 4
            assert receiver.got == []
        async with open_journal(tmp_path / "journal", now=lambda: 1000.0) as journal:
            assert (await SqliteLog(journal).count_callbacks()).expired >= 12


# ── over the node's death ─────────────────────────────────────────────────────


async def test_pending_events_survive_restart(tmp_path: Path) -> None:
    async with open_receiver() as receiver:
        receiver.manner = "hang"
        async with open_node(tmp_path) as first:
            for index in range(5):
                await first.whole(f"t{index}", receiver.url)
            await receiver.wait_asked(1)
        receiver.manner = "take"
        async with open_node(tmp_path) as second:
            await receiver.until(15)
            await second.settled()
    assert receiver.counts == dict.fromkeys([key for index in range(5) for key in of(f"t{index}")], 1)


@define(eq=False)
class SlowLog:
    """Two events of one task, of a log whose looks wait for `looks`; it sends them as well."""

    looks: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1))
    left: list[int] = field(factory=lambda: [1, 2])
    leased: int = 0
    arrived: trio.Event = field(factory=trio.Event)
    sent: trio.Event = field(factory=trio.Event)  # the first one
    news: int = 0
    callbacks_pending: bool = True

    async def wait_news(self, seen: int, seconds: float) -> None:
        await trio.sleep(seconds)

    async def count_callbacks(self) -> CallbackCounts:
        await trio.lowlevel.checkpoint()
        return CallbackCounts(pending=len(self.left), expired=0)

    async def lease_callbacks(self, limit: int, **_: Any) -> tuple[LeasedCallback, ...]:
        async with self.looks:
            if not self.left or self.leased == self.left[0]:
                return ()
            self.leased = self.left[0]
            return (LeasedCallback(position=self.leased, key="", task_id="t", url="http://r", lease=1),)

    async def accept_callback(self, callback: LeasedCallback) -> bool:
        await trio.lowlevel.checkpoint()
        self.left.remove(callback.position)
        return True

    async def send(self, callback: LeasedCallback) -> bool:
        self.arrived.set()
        await self.sent.wait()
        return True


async def test_settling_waits_for_following_events() -> None:
    """The next event of a task is there once the one before it was accepted, and the look for it may take long."""
    log: Any = SlowLog()
    sender, settled = CallbackService(log=log, poster=log), trio.Event()

    async def settle() -> None:
        await sender.settle()
        settled.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run, trio.Event())
        await log.arrived.wait()
        nursery.start_soon(settle)
        while sender._looks < 9:  # noqa: ASYNC110 - they find nothing: the second event waits for the first
            await trio.sleep(module.LOOK_S)
        async with log.looks:
            log.sent.set()
            await trio.sleep(9 * module.LOOK_S)
            assert not settled.is_set()
        await settled.wait()
        assert not log.left
        nursery.cancel_scope.cancel()


async def test_stopping_node_sends_last_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 60.0)
    async with open_receiver() as receiver, open_receiver() as dead:
        dead.manner = "refuse"
        async with open_node(tmp_path) as node:
            await node.whole("t", receiver.url, samples=3)
            await node.whole("d", dead.url)
        assert receiver.keys == of("t", 3)
        assert dead.asked  # and is not waited for


async def test_event_at_node_death_repeats_key(
    tmp_path: Path,
) -> None:
    """An event taken as the node dies comes at most again, and under the same key."""
    async with open_receiver() as receiver:
        for _ in range(3):
            async with open_node(tmp_path) as life:
                if await life.log.task("t") is None:
                    await life.whole("t", receiver.url, samples=4)
                await receiver.until(1 + len(set(receiver.keys)) if len(set(receiver.keys)) < 6 else 6)
        async with open_node(tmp_path) as last:
            await receiver.until(6)
            await last.settled()
    assert set(receiver.keys) == set(of("t", 4))
    firsts = list(dict.fromkeys(receiver.keys))
    assert firsts == of("t", 4)


async def test_unknown_format_is_refused(node: Node, tmp_path: Path) -> None:
    parts: dict[str, Any] = dict.fromkeys(attr.name for attr in fields(WholeNode) if attr.init)
    service = WholeNode(
        **(
            parts
            | {"journal": node.journal, "log": node.log, "callbacks": node.callbacks, "config": NodeConfig()}
        )
    )
    app = control_plane(ControlRoutes(service=service, sessions_dir=tmp_path).rows(), token="secret")
    async with open_server(app, Address(host="127.0.0.1", port=0)) as address:
        caller = Caller(url=f"http://127.0.0.1:{address.port}")
        task = {"instruction": "do it", "harness": {"name": "pi"}, "callback_url": "http://127.0.0.1:1/"}
        response = await caller.post("/v1/tasks", {**task, "callback_format": "polar_tasks"})
        listed = (await caller.get("/v1/tasks")).json()
    assert (response.status, response.json()["error"]) == (
        400,
        {
            "type": "invalid_request",
            "message": "must be one of 'event', 'polar_task', 'polar_session', not 'polar_tasks'",
            "path": "$.callback_format",
        },
    )
    assert listed == {"tasks": []}


def test_query_is_not_shown() -> None:
    assert shown("http://host:80/done?token=secret") == "http://host:80/done"
