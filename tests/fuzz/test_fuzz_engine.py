"""The node's end of the engine protocol, against a host that sends anything: a call gets exactly what a whole
piece of its own carried, or an engine fault; what was recorded before stays; and the node itself goes on.
"""

import json
import logging
import math
import socket
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import trio
from attrs import define, field
from fakes_engine import joined, order
from fuzz_json import ODD
from fuzz_kit import Target, play, run
from hypothesis import strategies as st
from plane_kit import AsgiClient, spelled, stage
from tokens_kit import model

from polarnode.core.errors import EngineError
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.engine.host import Host, HostAdapters
from polarnode.engine.host_process import HostProcess
from polarnode.engine.protocol import (
    _CODES,
    _FIELDS,
    MAX_FRAME_BYTES,
    Abort,
    Done,
    Failed,
    HostFatal,
    Load,
    Piece,
    Ready,
    RoutedRows,
)
from polarnode.engine.settings import EngineSettings

VOCABULARY = model().tokenizer.vocab_size
CONTEXT = 4096
RID = "0" * 32
SAID = spelled("Hello", ".", "<|im_end|>")
READY = Ready(
    vocab_size=VOCABULARY, context_length=CONTEXT, capacity=CONTEXT, max_total_tokens=CONTEXT, weight_version="0", sglang_version="0"
)  # fmt: skip


def raw(message: Any) -> list[Any]:
    """A message as it stands in a frame, to be changed."""
    return [_CODES[type(message)], *(getattr(message, name) for name in _FIELDS[type(message)])]


def packed(values: Any) -> bytes:
    body = msgpack.packb(values, unicode_errors="surrogatepass")
    return len(body).to_bytes(4, "big") + bytes(body)


def piece(ids: list[int], **more: Any) -> Piece:
    count = len(ids)
    return Piece(
        rid=RID,
        ids=array("i", ids).tobytes(),
        logprobs=array("f", [-0.5] * count).tobytes(),
        version="0",
        **more,
    )


WHOLE = [piece(SAID[:1]), piece(SAID[1:], finish="stop", spans=(("0", 0, len(SAID)),))]
ALTERNATIVES = piece(
    SAID[:1],
    alternative_ids=array("i", [1, 2]).tobytes(),
    alternative_logprobs=array("f", [-1, -2]).tobytes(),
)
EXPERTS = RoutedRows(rid=RID, start=0, layers=1, top_k=1, wide=False, data=b"\1")
GOOD: tuple[Any, ...] = (
    *WHOLE,
    ALTERNATIVES,
    EXPERTS,
    Failed(rid=RID, message="no", retryable=True),
    Done(call=0, ok=True),
    Load(running=1, waiting=0, token_usage=0.5, weight_version="0"),
    READY,
    Abort(rid=RID),
    HostFatal(message="out of memory"),
)
BYTES = st.binary(max_size=12) | st.sampled_from(
    (
        array("i", [-1]).tobytes(), array("i", [VOCABULARY]).tobytes(), array("i", [2**31 - 1]).tobytes(), array("f", [math.nan]).tobytes(),
        array("f", [math.inf]).tobytes(), array("f", [-math.inf]).tobytes(), array("i", SAID).tobytes(), bytes(3),
    )
)  # fmt: skip
PLAIN_ODD = [value for value in ODD if not (isinstance(value, int) and abs(value) >= 2**64)]
SPANS = st.lists(
    st.tuples(st.sampled_from(("0", "1")), st.integers(-1, 5), st.integers(-1, 5)).map(list), max_size=3
)


@st.composite
def messages(draw: st.DrawFn) -> list[Any]:
    """A message that was valid, with up to two of its fields changed."""
    found = raw(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(found) - 1))
        old = found[place]
        match draw(st.sampled_from(("odd", "fit", "fit", "remove", "extra"))):
            case "odd":
                found[place] = draw(st.sampled_from(PLAIN_ODD))
            case "fit" if isinstance(old, bytes):
                found[place] = draw(BYTES)
            case "fit" if isinstance(old, tuple):
                found[place] = draw(SPANS)
            case "fit" if isinstance(old, int):
                found[place] = draw(st.integers(-2, 40))
            case "remove" if len(found) > 1:
                del found[place]
            case _:
                found.insert(place, old)
    return found


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """What a host sends: frames of messages, in any order, cut anywhere or with bytes put in."""
    frames = [packed(draw(st.lists(messages(), max_size=3))) for _ in range(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        frames.append(packed([raw(each) for each in WHOLE]))
    sent = b"".join(frames)
    match draw(st.sampled_from(("whole", "whole", "whole", "cut", "put", "long"))):
        case "cut":
            return sent[: draw(st.integers(0, len(sent)))]
        case "put":
            place = draw(st.integers(0, len(sent)))
            return sent[:place] + draw(st.binary(min_size=1, max_size=6)) + sent[place:]
        case "long":
            return sent + (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"x"
    return sent


@define(eq=False)
class HostileEngine:
    """An engine of one host, whose process is these bytes."""

    sent: bytes
    taken: list[Chunk] = field(factory=list)
    hosts: list[Host] = field(factory=list)

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        settings = EngineSettings(model_path=Path("/nowhere"), device="cpu", state_dir=Path("/nowhere"))
        process = HostProcess(
            index=0, gpus=(), settings=settings, ports=lambda: 1, environment={}, program=()
        )
        host = Host(
            index=0,
            process=process,
            adapters=HostAdapters(index=0, kept={}, ask=process.ask),
            settings=settings,
            on_change=lambda: None,
            settled=trio.lowlevel.checkpoint,
            state="ready",
            ready=READY,
        )
        self.hosts.append(host)
        call = await host.calls.begin(order, context_length=CONTEXT)
        assert call is not None, "a host that serves nothing else takes it at once"
        ours, theirs = socket.socketpair()
        failed: EngineError | None = None
        async with (
            trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._send, theirs, order.request_id)
            nursery.start_soon(self._host, host, stream)
            try:
                yield self._chunks(call)
            except EngineError as error:  # out of the nursery as it is, as from the real engines
                failed = error
            finally:
                host.calls.end(call)
                nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _chunks(self, call: Any) -> AsyncIterator[Chunk]:
        async for chunk in call:
            self.taken.append(chunk)
            yield chunk

    async def _send(self, theirs: socket.socket, rid: str) -> None:
        data = self.sent.replace(RID.encode(), rid.encode())
        async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as stream:
            for start in range(0, len(data), 1 << 14):
                await stream.send_all(data[start : start + (1 << 14)])

    async def _host(self, host: Host, stream: trio.SocketStream) -> None:
        """As `HostProcess.run` and `Host.run`, without a process."""
        async with trio.open_nursery() as nursery:
            host.process._scope = nursery.cancel_scope
            await host.process._receive(stream, host._handle, nursery)
            nursery.cancel_scope.cancel()
        host._end_calls(host.process._failure or "its end was closed")


async def sampled(sent: bytes) -> None:
    """One generation: chunks that fit together, an end or an engine fault."""
    engine = HostileEngine(sent=sent)
    top = 2
    with trio.fail_after(60):
        with suppress(EngineError):  # an engine fault is a right answer
            async with engine.generate(order([1], top_logprobs=top, request_id=RID)) as stream:
                async for _ in stream:
                    pass
    check_chunks(engine.taken)
    assert not engine.hosts[0].calls.in_flight


def check_chunks(taken: list[Chunk]) -> None:
    for chunk in taken:
        assert len(chunk.ids) == len(chunk.logprobs)
        assert all(0 <= token < VOCABULARY for token in chunk.ids)
        assert all(map(math.isfinite, chunk.logprobs))
        if chunk.top_logprobs is not None:
            assert (
                len(chunk.top_logprobs.ids)
                == len(chunk.top_logprobs.logprobs)
                == chunk.top_logprobs.k * len(chunk.ids)
            )
            assert all(0 <= token < VOCABULARY for token in chunk.top_logprobs.ids)
        if chunk.finish_reason is not None and chunk.finish_reason != "error":
            ends = 0
            for span in chunk.version_spans:
                assert span.start == ends
                ends = span.end
            assert ends == len(joined(taken))
        if chunk.routed is not None:
            assert chunk.routed.width > 0
            assert len(chunk.routed.data) % chunk.routed.width == 0


async def asked(sent: bytes) -> None:
    """A model call over such a host: answered or the provider's retryable error, and a turn that holds no
    token but those that arrived whole.
    """
    engine = HostileEngine(sent=sent)
    here = stage(engine, context=CONTEXT)
    asgi = AsgiClient()
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    with trio.fail_after(60):
        await asgi.request(here.app, "/v1/chat/completions", json.dumps(body).encode())
    assert asgi.status in (200, 400, 500, 502, 503, 529), asgi.status
    if asgi.status != 200:
        assert json.loads(asgi.body)["error"]["message"]
    for turn in here.turns:
        arrived = joined(engine.taken)
        assert list(turn.sampled) == arrived[: len(turn.sampled)]
        assert len(turn.logprobs) == len(turn.sampled)
        assert all(map(math.isfinite, turn.logprobs))
        assert asgi.status == 200 or turn.state != "complete"
    assert here.s1.calls.count == 0


TARGETS = (
    Target(
        name="engine_calls",
        inputs=streams(),
        check=lambda sent: run(sampled, sent, size=len(sent)),
        examples=300,
    ),
    Target(
        name="engine_turns",
        inputs=streams(),
        check=lambda sent: run(asked, sent, size=len(sent)),
        examples=150,
    ),
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_hostile_host_costs_only_its_calls(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sends anything costs at most its calls."""
    # each death is one line of log, and here is nothing but deaths
    monkeypatch.setattr(logging.getLogger("polarnode.engine.host"), "disabled", True)
    play(target)
