"""Bodies read to a limit, answers sent as they come: in virtual time, against a recording of what left."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, field

from polarnode.gateway.call import KeepAlivePacing, deliver
from polarnode.gateway.exchange import Break, EndStream, OutgoingCommand, Send
from polarnode.http import asgi
from polarnode.http.asgi import (
    BodyBudget,
    ClientDisconnected,
    OverBudget,
    ResponseSender,
    TooLarge,
    TooSlow,
    announced_length,
    header_map,
    read_body,
)
from polarnode.http.connections import ClientDeparture, DirectApp, Head, ResponseWriter
from polarnode.http.server import Address, open_server
from polarnode.providers.contract import Reply

PACE = KeepAlivePacing(opening_s=1.0, quiet_s=10.0)


@define(eq=False)
class Wire:
    """What was written, and when. Its socket takes `takes` writes and then none."""

    takes: int = 1_000
    departure: ClientDeparture = field(factory=ClientDeparture)
    head: Head | None = None
    bodies: list[bytes] = field(factory=list)
    times: list[float] = field(factory=list)
    ended: bool = False

    async def write(self, head: Head | None, data: bytes, *, end: bool) -> bool:
        await trio.lowlevel.checkpoint()
        self.head = head or self.head
        self.bodies.append(data)
        self.times.append(trio.current_time())
        self.ended = end
        return len(self.bodies) <= self.takes


def parts(*bodies: bytes, left: bool = False) -> Callable[[], Any]:
    """What Hypercorn hands an app: the body in parts, then a disconnect."""
    messages = [
        {"type": "http.request", "body": body, "more_body": place + 1 < len(bodies) or left}
        for place, body in enumerate(bodies)
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        await trio.lowlevel.checkpoint()
        return messages.pop(0)

    return receive


# ── bodies ────────────────────────────────────────────────────────────────────


async def read(
    receive: Any, *, limit: int = 1000, budget: BodyBudget | None = None, announced: int = 0
) -> object:
    """A body, read through its own endpoint."""
    with (budget or BodyBudget(1000)).reserve() as reservation:
        return await read_body(receive, reservation=reservation, limit=limit, announced=announced)


async def test_bodies_share_one_memory_limit() -> None:
    budget = BodyBudget(free=10)
    with budget.reserve() as first:
        assert await read_body(parts(b"x" * 6), reservation=first, limit=10) == b"x" * 6
        receive = parts(b"x" * 4, b"x")
        assert await read(receive, budget=budget) == OverBudget()
        # a client that still sends would not read its refusal
        assert (await receive())["type"] == "http.disconnect"
        assert await read(parts(b"x" * 4), budget=budget) == b"x" * 4
        assert await read(parts(b"x" * 5), limit=4, budget=budget) == TooLarge(5)
    assert budget.free == 10, "given back, however the request ended"
    assert await read(parts(b"x" * 10), budget=budget) == b"x" * 10


async def test_body_is_assembled() -> None:
    assert await read(parts(b"ab", b"", b"cd")) == b"abcd"
    assert await read(parts(b"")) == b""


async def test_oversized_body_is_drained() -> None:
    receive = parts(b"x" * 6, b"x" * 6, b"x" * 6)
    assert await read(receive, limit=10) == TooLarge(18)
    assert (await receive())["type"] == "http.disconnect"  # a client that still sends would not read its 413
    assert await read(parts(b"x" * 5, b"x" * 5), limit=10) == b"x" * 10


async def test_endless_body_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_DRAINED_BYTES", 20)
    receive = parts(*[b"x" * 8] * 10)
    assert await read(receive, limit=10) == TooLarge(24)
    assert (await receive())["type"] == "http.request"


async def test_announced_oversized_body_is_discarded() -> None:
    budget = BodyBudget(100)
    with budget.reserve() as reservation:
        receive = parts(b"x" * 6, b"x" * 6)
        assert await read_body(receive, reservation=reservation, limit=10, announced=12) == TooLarge(12)
        assert reservation.bytes == 0
        assert (await receive())["type"] == "http.disconnect", "and the connection is left clean"
    assert announced_length({"content-length": "12"}) == 12
    assert announced_length({}) == announced_length({"content-length": "-1"}) == 0


async def test_sessions_share_body_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sessions share a budget beyond the first bytes of each body."""
    monkeypatch.setattr(asgi, "MAX_UNSHARED_BYTES", 4)
    node = BodyBudget(10)
    one, other = BodyBudget(20, shared=node), BodyBudget(20, shared=node)
    with one.reserve() as first:
        assert await read_body(parts(b"x" * 7, b"x" * 6), reservation=first, limit=20) == b"x" * 13
        assert node.free == 1
        assert await read(parts(b"x" * 4), budget=other) == b"x" * 4, "a short body needs nothing of it"
        assert await read(parts(b"x" * 6), budget=other) == OverBudget()
        assert (node.free, other.free) == (1, 20)
    assert (node.free, one.free) == (10, 20)


async def test_stalled_body_holds_nothing(autojump_clock: trio.testing.MockClock) -> None:
    budget = BodyBudget(100)
    messages = iter([{"type": "http.request", "body": b"x" * 60, "more_body": True}])

    async def receive() -> Any:
        return next(messages, None) or await trio.sleep_forever()

    assert await read(receive, budget=budget) == TooSlow()
    assert (trio.current_time(), budget.free) == (asgi.MAX_BODY_S, 100)


async def test_client_leaves_during_body() -> None:
    assert await read(parts(b"ab", left=True)) == ClientDisconnected()


def test_headers_are_found_case_insensitively() -> None:
    assert header_map([(b"X-Api-Key", b"k"), (b"A", b"1"), (b"a", b"2")]) == {"x-api-key": "k", "a": "2"}


# ── answers ───────────────────────────────────────────────────────────────────


async def delivered(*script: OutgoingCommand | float, signs: int = 99, close: bool = True) -> Wire:
    """Deliver a script: commands, and seconds of silence between them; `signs` of life are to be had."""
    wire, left = Wire(), [signs]
    sender, receiver = trio.open_memory_channel[OutgoingCommand](0)

    def on_quiet() -> list[OutgoingCommand]:
        left[0] -= 1
        return [Send(b"alive")] if left[0] >= 0 else []

    async def tell() -> None:
        with sender:
            for step in script:
                if isinstance(step, float):
                    await trio.sleep(step)
                else:
                    await sender.send(step)
            if not close:
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        await deliver(receiver, ResponseSender(wire, "id7"), pacing=PACE, on_quiet=on_quiet)
        nursery.cancel_scope.cancel()
    return wire


async def test_stream_opens_with_first_bytes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    wire = await delivered(Send(b"a"), 1.0, Send(b"b"), 1.0, EndStream(), close=False)
    assert wire.head is not None
    assert wire.head[0] == 200
    assert dict(wire.head[1]) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache",
        b"x-request-id": b"id7",
    }
    assert wire.bodies == [b"a", b"b", b""]
    assert wire.ended


async def test_waiting_pieces_leave_together() -> None:
    wire = Wire()
    send, receive = trio.open_memory_channel[OutgoingCommand](10)
    for command in (
        Send(b"a"),
        Send(b"b"),
        Send(b"c"),
        Send(b"alone", alone=True),
        EndStream(),
        Send(b"late"),
    ):
        send.send_nowait(command)
    await deliver(receive, ResponseSender(wire, "id7"), pacing=PACE, on_quiet=list)
    assert wire.bodies == [b"abc", b"alone"]
    assert wire.ended


async def test_piece_at_end_of_silence(
    mock_clock: trio.testing.MockClock,
) -> None:
    wire = Wire()
    send, receive = trio.open_memory_channel[OutgoingCommand](2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(deliver, receive, ResponseSender(wire, "id7"), pacing=PACE, on_quiet=list))
        await trio.testing.wait_all_tasks_blocked()
        send.send_nowait(Send(b"a"))
        mock_clock.jump(PACE.opening_s)  # before the one who waits has run
        await trio.testing.wait_all_tasks_blocked()
        assert wire.bodies == [b"a"]
        send.send_nowait(EndStream())
        mock_clock.jump(PACE.quiet_s)
    assert wire.ended


async def test_reply_has_its_length(autojump_clock: trio.testing.MockClock) -> None:
    wire = await delivered(
        Reply(status=400, headers=(("content-type", "application/json"), ("retry-after", "2")), body=b"{}"),
        close=False,
    )
    assert wire.head is not None
    status, headers = wire.head
    assert status == 400
    assert (b"content-length", b"2") in headers
    assert (b"retry-after", b"2") in headers
    assert (b"x-request-id", b"id7") in headers
    assert wire.bodies == [b"{}"]
    assert wire.ended


async def test_broken_stream_is_not_ended(autojump_clock: trio.testing.MockClock) -> None:
    wire = await delivered(Send(b"half"), Break(), close=False)
    assert wire.bodies == [b"half"]
    assert not wire.ended


async def test_nothing_sent_after_last_piece(autojump_clock: trio.testing.MockClock) -> None:
    assert (await delivered()).bodies == []
    assert not (await delivered(Send(b"half"))).ended


async def test_silences_are_broken_in_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Headers leave within a second, and every silence is broken after ten."""
    wire = await delivered(25.5, Send(b"a"), 9.0, Send(b"b"), 11.0, EndStream())
    assert wire.bodies == [b"alive", b"alive", b"alive", b"a", b"b", b"alive", b""]
    assert [round(at, 1) for at in wire.times] == [1.0, 11.0, 21.0, 25.5, 34.5, 44.5, 45.5]


async def test_answer_without_signs_waits_silently(
    autojump_clock: trio.testing.MockClock,
) -> None:
    wire = await delivered(300.0, Reply(status=200, headers=(), body=b"late"), signs=0)
    assert wire.bodies == [b"late"]
    assert trio.current_time() == 300.0


def test_pace_suits_least_patient_harness() -> None:
    """60 s for headers, 15-30 s between events (harnesses.md 14.4, 14.5)."""
    assert KeepAlivePacing().opening_s < 60
    assert KeepAlivePacing().quiet_s <= 10


# ── what was delivered ────────────────────────────────────────────────────────


async def sent(takes: int, *commands: OutgoingCommand) -> bool:
    """Whether commands that wait together are delivered to a socket that takes so many writes."""
    responder = ResponseSender(Wire(takes), "id")
    send, receive = trio.open_memory_channel[OutgoingCommand](10)
    for command in commands:
        send.send_nowait(command)
    send.close()
    await deliver(receive, responder, pacing=PACE, on_quiet=list)
    return responder.delivered


async def test_delivered_when_last_bytes_taken() -> None:
    """The last bytes of a stream are written together with its end, if that is there in time."""
    reply = Reply(status=200, headers=(), body=b"{}")
    assert [await sent(takes, reply) for takes in (0, 1)] == [False, True]
    assert [await sent(takes, Send(b"a"), EndStream()) for takes in (0, 1)] == [False, True]
    alone = Send(b"b", alone=True)
    assert [await sent(takes, Send(b"a"), alone, EndStream()) for takes in range(3)] == [False, False, True]


@pytest.mark.parametrize(("takes", "expected"), [(0, False), (1, True), (2, True)])
async def test_end_after_last_bytes_is_optional(takes: int, expected: bool) -> None:
    """Many clients close as soon as they have read the last bytes of the dialect."""
    responder = ResponseSender(Wire(takes), "id")
    await responder.stream(b"a", "text/plain")
    await responder.end()
    assert responder.delivered == expected


async def test_cut_stream_is_not_delivered() -> None:
    assert not await sent(99, Send(b"a"), Break())
    assert not await sent(99, Send(b"a"))


@pytest.mark.parametrize(("reads", "expected"), [(1 << 30, True), (10, False)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_socket_delivery_is_reported_truly(reads: int, expected: bool, streamed: bool) -> None:
    """Over a socket the server says what was taken."""
    found = list[bool]()
    ended = trio.Event()

    async def serve(scope: Any, receive: Any, response: ResponseWriter) -> None:
        responder = ResponseSender(response, "id")
        body = b"x" * (64 << 20)  # more than any socket's buffers
        if streamed:
            await responder.stream(body, "text/plain")
            await responder.end()
        else:
            await responder.reply(Reply(status=200, headers=(), body=body))
        found.append(responder.delivered)
        ended.set()

    async with open_server(DirectApp(serve), Address(host="127.0.0.1", port=0)) as address:
        client = await trio.open_tcp_stream(address.host, address.port)
        await client.send_all(b"GET / HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n")
        while reads > 0 and (got := await client.receive_some(min(reads, 1 << 20))):
            reads -= len(got)
        await client.aclose()
        with trio.fail_after(30):
            await ended.wait()
    assert found == [expected]
