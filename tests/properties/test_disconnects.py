"""Whenever, and however, a call is cut: its plan ends exactly once, its turn holds exactly what was sampled,
and nothing goes on running.
"""

import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import trio
import trio.testing
from attrs import define, field
from fakes_engine import ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_kit import CONTEXT, AsgiClient, HandEngine, Stage, served, spelled, stage
from tokens_kit import model

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import FinishReason
from polarnode.core.errors import EngineError
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Turn
from polarnode.engine.calls import Call
from polarnode.engine.protocol import Piece
from polarnode.merge.builders import build
from polarnode.merge.invariants import Counts, check

Cut = Literal["client", "session", "node"]

PIECES = ("One", " two", " three", " four")
PATHS = ("/v1/chat/completions", "/v1/messages")
# Before anything is asked, before the first chunk, between chunks, before the end: seconds after the request,
# one piece a second from 2 s on.
MOMENTS = st.sampled_from((0.0, 1.5, 2.5, 3.5, 4.5, 5.5))


def body(*, stream: bool, text: str = "hi") -> bytes:
    return json.dumps(
        {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": text}], "stream": stream}
    ).encode()


@define(eq=False)
class HostEngine(HandEngine):
    """Its pieces come through a `Call`, as those of an engine host: a whole answer's reader sleeps meanwhile."""

    call: Call | None = None
    sent: list[Piece] = field(factory=list)  # before there was a call

    def give(self, *pieces: str, finish: FinishReason | None = None) -> None:
        tokens = spelled(*pieces)
        logprobs = floats([-0.5] * len(tokens)).tobytes()
        self.sent.append(
            Piece(rid="0", ids=ids(tokens).tobytes(), logprobs=logprobs, version="0", finish=finish)  # type: ignore[arg-type]
        )
        self._pass_on()

    def _pass_on(self) -> None:
        while self.call is not None and self.sent:
            self.call.take(self.sent.pop(0))

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with HandEngine.generate(self, order):
            self.call = Call(rid="0", whole=order.whole)
            self._pass_on()
            try:
                yield self.call
            finally:
                self.call = None


ENGINES = st.sampled_from((HandEngine, HostEngine))


async def play(
    here: Stage, engine: HandEngine, asgi: AsgiClient, path: str, *, stream: bool, cut: Cut, at: float
) -> int:
    """A call with a piece a second, cut at a moment. How many pieces the engine had given."""
    given_pieces = 0

    async def speak() -> None:
        nonlocal given_pieces
        await trio.sleep(2)
        for piece in PIECES:
            engine.give(piece)
            given_pieces += 1
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speak)
        async with trio.open_nursery() as node:
            node.start_soon(asgi.request, here.app, path, body(stream=stream))
            await trio.sleep(at)
            match cut:
                case "client":
                    asgi.leave()
                case "session":
                    await here.s1.close()
                case "node":
                    node.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    return given_pieces


@settings(max_examples=60, deadline=None)
@given(
    path=st.sampled_from(PATHS),
    stream=st.booleans(),
    cut=st.sampled_from(("client", "session", "node")),
    at=MOMENTS,
    kind=ENGINES,
)
def test_cut_call_keeps_sampled_tokens(
    path: str, stream: bool, cut: Cut, at: float, kind: type[HandEngine]
) -> None:
    """A cut call keeps what was sampled and leaves nothing running."""

    async def main() -> None:
        engine = kind()
        here = stage(engine)
        asgi = AsgiClient()
        pieces = await play(here, engine, asgi, path, stream=stream, cut=cut, at=at)
        assert (engine.running, here.s1.calls.count) == (0, 0)
        assert len(here.turns) <= 1
        if engine.orders:  # a generation was asked for: it is a turn, whatever became of it
            (turn,) = here.turns
            assert (turn.state, turn.finish_reason) == ("partial", "abort")
            assert list(turn.sampled) == spelled(*PIECES[:pieces])
            assert len(turn.logprobs) == len(turn.sampled)
            assert [(span.start, span.end) for span in turn.version_spans] == (
                [(0, len(turn.sampled))] if pieces else []
            )
            assert (turn.answer is None) is (pieces == 0)
        assert not asgi.whole or asgi.status == 410  # a stream that was cut never looks like one that ended
        assert here.s1.lineages._graph.plans == {}  # no plan is left under way

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=20, deadline=None)
@given(path=st.sampled_from(PATHS), stream=st.booleans(), at=st.sampled_from((2.5, 3.5, 4.5)), kind=ENGINES)
def test_repeated_request_resumes_cut_sample(
    path: str, stream: bool, at: float, kind: type[HandEngine]
) -> None:
    """The same request after a cut goes on where it was cut."""

    async def main() -> None:
        engine = kind()
        here = stage(engine)
        await play(here, engine, AsgiClient(), path, stream=stream, cut="client", at=at)
        engine.channel = trio.open_memory_channel[Any](10)
        engine.give(" and the end.", "<|im_end|>", finish="stop")
        again = AsgiClient()
        await again.request(here.app, path, body(stream=stream))
        assert again.whole
        first, second = here.turns
        assert (second.kind, second.reason, second.state, second.lineage) == (
            "continue",
            "resumed",
            "complete",
            first.lineage,
        )
        assert (list(second.prompt_delta), second.prompt_length) == (
            [],
            first.prompt_length + len(first.sampled),
        )
        assert list(engine.orders[1].prompt) == list(first.prompt_delta) + list(first.sampled)
        assert first.answer is not None
        assert second.answer is not None
        assert second.answer.text == first.answer.text + " and the end."
        assert second.answer.text.encode() in again.body or stream

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=20, deadline=None)
@given(path=st.sampled_from(PATHS), stream=st.booleans(), pieces=st.integers(0, 3))
def test_engine_death_leaves_failed_turn(path: str, stream: bool, pieces: int) -> None:
    """An engine that dies leaves a failed turn and no clean end."""

    async def main() -> None:
        engine = HandEngine()
        here = stage(engine)
        asgi = AsgiClient()
        for piece in PIECES[:pieces]:
            engine.give(piece)
        engine.fail(EngineError("the host died"))
        await asgi.request(here.app, path, body(stream=stream))
        (turn,) = here.turns
        assert (turn.state, turn.finish_reason, list(turn.sampled)) == (
            "failed",
            "error",
            spelled(*PIECES[:pieces]),
        )
        assert asgi.status == 500 if asgi.whole else asgi.status == 200
        assert here.s1.refusal() is None  # and the session goes on

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# ── and the same is asked again ───────────────────────────────────────────────

WHOLE = ("<think>", "\nHm, well.\n", "</think>", "\n\nOne, two, \u00fc\U0001f642.", "<tool_call>",
         '\n{"name": "look", "arguments": {"path": "a"}}\n', "</tool_call>", "<|im_end|>")  # fmt: skip


def going_on(order: GenerateOrder) -> list[int]:
    """One answer for every asking: all of it, or what is still to come of it when the prompt ends with its
    beginning.
    """
    whole, prompt = spelled(*WHOLE), list(order.prompt)
    said = next(size for size in range(len(whole), -1, -1) if prompt[len(prompt) - size :] == whole[:size])
    return whole[said:]


@define(eq=False)
class Slowly:
    """A chunk a second."""

    chunks: AsyncIterator[Chunk]

    def __aiter__(self) -> "Slowly":
        return self

    async def __anext__(self) -> Chunk:
        await trio.sleep(1)
        return await self.chunks.__anext__()


@define(eq=False)
class SlowEngine(ScriptedEngine):
    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with ScriptedEngine.generate(self, order) as chunks:
            yield Slowly(chunks)


def slow_engine() -> SlowEngine:
    return SlowEngine(reply=going_on, vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT)


def held_by(turns: list[Turn]) -> Counts:
    """The laws on the turns of a session, for both builders."""
    check(turns, build(BuilderSpec(name="per_request"), turns))
    return check(turns, build(BuilderSpec(name="prefix_merging"), turns))


# behind them a client needs nothing more of a stream
LAST_WORDS = (b"[DONE]", b"message_stop", b"event: response.completed")

# How an attempt is left: after so many messages of its answer, or after so many seconds of its generation.
LEAVING = st.lists(st.tuples(st.sampled_from(("messages", "seconds")), st.integers(0, 20)), max_size=5)


@settings(max_examples=80, deadline=None)
@given(path=st.sampled_from((*PATHS, "/v1/responses")), stream=st.booleans(), leaving=LEAVING)
def test_disconnects_sample_no_token_twice(path: str, stream: bool, leaving: list[tuple[str, int]]) -> None:
    """However often a client leaves no token is sampled twice."""

    async def main() -> None:
        engine = slow_engine()
        here = stage(engine)
        asked = (
            {"model": "m", "input": "hi", "stream": stream}
            if path == "/v1/responses"
            else json.loads(body(stream=stream))
        )
        given_body = json.dumps(asked).encode()
        delivered = 0
        for how, count in [*leaving, ("never", 0)]:
            asgi = AsgiClient(leave_at=count if how == "messages" else None)
            with trio.move_on_after(count + 0.5) if how == "seconds" else trio.CancelScope():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(asgi.request, here.app, path, given_body)
                    if how == "seconds":
                        await trio.sleep(count + 0.25)
                        asgi.leave()
            if delivered == 0:
                assert sum(len(turn.sampled) for turn in here.turns) <= len(spelled(*WHOLE))
            delivered += asgi.whole or any(mark in asgi.body for mark in LAST_WORDS)
        turn = here.turns[-1]
        assert turn.answer is not None
        assert [type(part).__name__ for part in turn.answer.parts] == ["ThinkingPart", "TextPart", "ToolCall"]
        assert (turn.answer.text, turn.answer.malformed_calls) == ("One, two, \u00fc\U0001f642.", 0)
        counts = held_by(here.turns)
        assert (
            counts.trainable
            == counts.sampled
            == len(spelled(*WHOLE)) * max(1, sum(turn.state == "complete" for turn in here.turns))
        )
        # a new sample only after an answer that arrived
        assert sum(turn.state == "complete" for turn in here.turns) <= delivered
        assert here.s1.lineages._graph.plans == {}
        assert here.s1.retries._in_progress == {}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# ── over real sockets ─────────────────────────────────────────────────────────


def half_close(stream: trio.SocketStream) -> None:
    stream.socket.shutdown(socket.SHUT_WR)  # Hypercorn takes it for leaving, and so do we


def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize(
    "leave", [half_close, reset, lambda stream: stream.socket.close()], ids=["half-close", "reset", "close"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_disconnect_ends_the_generation(leave: Any, stream: bool) -> None:
    """Every way of leaving a socket ends the generation."""
    engine = HandEngine()
    here = stage(engine)
    asked = body(stream=stream)
    head = (
        b"POST /v1/messages HTTP/1.1\r\nHost: node\r\nX-Api-Key: key-s1\r\nContent-Length: %d\r\n\r\n"
        % len(asked)
    )
    async with served(here.app) as base:
        client = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
        await client.send_all(head + asked)
        with trio.fail_after(20):
            await engine.asked.wait()
            engine.give("Half ")
            if stream:
                while b"Half" not in await client.receive_some():
                    pass
            else:
                while engine.given != spelled("Half "):
                    await engine.took.wait()
            leave(client)
            await engine.left.wait()
        await client.aclose()
    (turn,) = here.turns
    assert (turn.state, list(turn.sampled)) == ("partial", spelled("Half "))


async def test_disconnect_in_body_asks_nothing() -> None:
    """A client that leaves in the middle of its body asked nothing."""
    engine = HandEngine()
    here = stage(engine)
    async with served(here.app) as base:
        client = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
        await client.send_all(
            b"POST /v1/messages HTTP/1.1\r\nHost: node\r\nX-Api-Key: key-s1\r\nContent-Length: 1000\r\n\r\n{"
        )
        await client.aclose()
    assert (engine.orders, here.turns, here.s1.budget.counters.refusals) == ([], [], {})


async def test_closing_server_keeps_turns() -> None:
    """A server that closes keeps the turns of its calls."""
    engine = HandEngine()
    here = stage(engine)
    asked = body(stream=True)
    async with served(here.app) as base:
        client = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
        await client.send_all(
            b"POST /v1/messages HTTP/1.1\r\nHost: node\r\nX-Api-Key: key-s1\r\nContent-Length: %d\r\n\r\n%b"
            % (len(asked), asked)
        )
        engine.give("Half ")
        with trio.fail_after(20):
            while b"Half" not in await client.receive_some():
                pass
    await client.aclose()
    assert [(turn.state, list(turn.sampled)) for turn in here.turns] == [("partial", spelled("Half "))]
    assert engine.running == 0


# How many bytes of the answer a client reads before it leaves, and how.
BYTES = st.lists(
    st.tuples(st.integers(0, 3000), st.sampled_from((reset, lambda stream: stream.socket.close()))),
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from(PATHS), stream=st.booleans(), leaving=BYTES)
def test_next_answer_whole_after_any_cut(path: str, stream: bool, leaving: list[tuple[int, Any]]) -> None:
    """At whatever byte a client leaves its next answer is whole and the laws hold."""

    async def main() -> None:
        here = stage(
            ScriptedEngine(reply=going_on, vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT)
        )
        asked = body(stream=stream)
        head = (
            b"POST %b HTTP/1.1\r\nHost: n\r\nConnection: close\r\nAuthorization: Bearer"
            b" key-s1\r\nContent-Length: %d\r\n\r\n"
        )
        async with served(here.app) as base:
            for size, leave in [*leaving, (None, None)]:
                client = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
                await client.send_all(head % (path.encode(), len(asked)) + asked)
                got = b""
                while (size is None or len(got) < size) and (
                    more := await client.receive_some(7 if size is not None else None)
                ):
                    got += more
                if leave is not None:
                    leave(client)
                await client.aclose()
        assert got.startswith(b"HTTP/1.1 200")
        assert got.endswith(b"0\r\n\r\n") is stream
        whole = [turn for turn in here.turns if turn.state == "complete"]
        assert {turn.answer.text for turn in whole if turn.answer is not None} == {
            "One, two, \u00fc\U0001f642."
        }
        counts = held_by(here.turns)
        assert counts.trainable == counts.sampled == len(whole) * len(spelled(*WHOLE))

    trio.run(main)
