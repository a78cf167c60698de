"""`python -m polarnode.engine.external`: an engine host for a server that somebody else runs and updates.

To the node it speaks `engine/protocol.py` as every host does, so that routing, fairness, cancellation and the
checks of what is sampled are the same. The server's streams are read here, off the node's loop. `Server` is
the port to a server, and `Versions` says what its labels of weights mean. A kind of server is a class that
satisfies `Server`: `external_sglang.py` has SGLang's, and `external_vllm.py` has vLLM's and how the two are
told apart.

Every request of the node gets exactly one end (a last `Piece`, or `Failed`). A server that is not there yet,
or that cannot give what the node records, is waited for. A server that is lost ends this process, whose calls
fail, and the next process waits for it again.
"""

import os
import socket
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.backoff import Backoff
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.core.weights import PauseMode
from polarnode.engine.embedded import lifeline
from polarnode.engine.protocol import (
    Abort,
    Continue,
    Done,
    ExpertShape,
    Failed,
    Forget,
    FrameDecoder,
    Generate,
    HostFatal,
    Load,
    Message,
    Pause,
    Piece,
    Ready,
    RowLogprobs,
    ScoreTokens,
    Shutdown,
    Start,
    ToNode,
    Update,
    Waiting,
    encode_frames,
)

# The variable of the servers' API key, which is read from here and written nowhere.
KEY_VARIABLE = "POLARNODE_ENGINE_KEY"
LOOK_S = 1.0  # seconds between looks at a server's weights and load, which are two small requests
# Seconds between tries to reach a server: one that loads a model takes minutes, and a try costs nothing.
TRIES = Backoff(first_s=0.5, longest_s=5.0)
ABORT_TIMEOUT_S = 5.0  # seconds to deliver an abort; a server also ends what nobody reads any more
READ_SIZE = 1 << 18  # bytes from the node in one system call

# ── port ──────────────────────────────────────────────────────────────────────


class ServerUnreachable(Exception):
    """The server does not answer, or not in time. It may later."""


class UnfitServer(Exception):
    """The server answers, but cannot give what the node records. The sentence says what to change."""


@frozen(kw_only=True)
class Wanted:
    """What a server must agree with. `words` are ids of the node's tokenizer and their texts. `experts` is
    the shape of the routed experts that the node asks for. `context_length` is the most tokens of a request;
    None means the server's own limit.
    """

    url: str
    vocab_size: int
    words: tuple[tuple[int, str], ...] = ()
    context_length: int | None = None
    experts: ExpertShape | None = None


Send = Callable[[ToNode], None]


class Server(Protocol):
    """One server that samples by token ids. Every method may raise ServerUnreachable, and is bounded in time,
    except `generate`, which lasts as long as the sample.
    """

    async def model(self) -> str:
        """The folder or name that its tokenizer comes from."""

    async def probe(self) -> Ready:
        """What the server is. Raises Unfit if it cannot give exact ids, logprobs, or the wanted
        vocabulary.
        """

    async def look(self) -> Load:
        """The server's load, and the version of the weights it serves now (UNKNOWN_VERSION if nobody named
        it).
        """

    async def generate(self, order: Generate, send: Send) -> None:
        """Sample, and send what comes, its end included. A new version is sent as a Load before its first
        Piece. To leave early this is cancelled, and `abort` follows.
        """

    async def score(self, order: ScoreTokens) -> RowLogprobs | Failed:
        """Score a row. Returns the end of it."""

    async def abort(self, rid: str) -> None:
        """End a request. One that is over or unknown is ignored."""

    async def pause(self, mode: PauseMode) -> None:
        """Hold generation on the server."""

    async def resume(self) -> None: ...


@define(eq=False)
class Versions:
    """What a server's label of its weights means. `nameless` are the labels that the server has if nobody
    named any.

    A label names weights until other weights come under it. From then on it says nothing, until it changes.
    `note` is given what each look finds. `source` is where the weights came from, as far as the server says
    it.
    """

    nameless: frozenset[str]
    label: str | None = field(default=None, init=False)
    source: str | None = field(default=None, init=False)
    _reused: bool = field(default=False, init=False)

    def note(self, label: str, source: str) -> None:
        if label != self.label:
            self._reused = False
        elif source != self.source:
            self._reused = True
        self.label, self.source = label, source

    def named(self, label: str) -> str:
        """The version that a label names, or UNKNOWN_VERSION."""
        reused = self._reused and label == self.label
        return UNKNOWN_VERSION if label in self.nameless or reused else label


# ── serving ───────────────────────────────────────────────────────────────────


@define(eq=False)
class Serving:
    """One server and one connection to the node. `run` ends with the connection, or with the server."""

    server: Server
    stream: trio.SocketStream
    _outbox: list[ToNode] = field(factory=list, init=False)
    _wake: trio.Event = field(factory=trio.Event, init=False)
    _look_now: trio.Event = field(factory=trio.Event, init=False)  # set when a call failed, to look at once
    _calls: dict[str, trio.CancelScope] = field(factory=dict, init=False)

    async def run(self, decoder: FrameDecoder) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_all, nursery.cancel_scope)
            nursery.start_soon(self._follow)
            await self._obey(decoder, nursery)
            nursery.cancel_scope.cancel()

    async def _obey(self, decoder: FrameDecoder, nursery: trio.Nursery) -> None:
        while data := await self.stream.receive_some(READ_SIZE):
            for message in decoder.feed(data):
                if isinstance(message, Shutdown):
                    return
                self._handle(message, nursery)

    def send(self, message: ToNode) -> None:
        """Queue a message. The queue is bounded by the requested tokens."""
        self._outbox.append(message)
        self._wake.set()

    async def _send_all(self, whole: trio.CancelScope) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            messages, self._outbox = self._outbox, []
            for frame in encode_frames(messages):
                await self.stream.send_all(frame)
            if any(isinstance(message, HostFatal) for message in messages):
                whole.cancel()

    def _handle(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case Generate(rid=rid) | ScoreTokens(rid=rid):
                scope = self._calls[rid] = trio.CancelScope()
                nursery.start_soon(self._generate, message, scope)
            case Abort(rid=rid):
                if rid in self._calls:
                    self._calls[rid].cancel()
            case Forget():
                pass  # servers that somebody else runs evict by themselves
            case Pause() | Continue():
                nursery.start_soon(self._hold, message)
            case _:
                if not isinstance(message, Update):
                    raise ValueError(f"the node may not send {type(message).__name__} here")
                sentence = "the weights of an external engine are changed at its own server"
                self.send(Done(call=message.call, ok=False, message=sentence))

    async def _follow(self) -> None:
        """Wait for the server, then report its weights and load until it is lost."""
        self.send(await self._wait_reachable())
        last: Load | None = None
        try:
            while True:
                load = await self.server.look()
                if load != last:
                    self.send(load)
                    last = load
                with trio.move_on_after(LOOK_S):
                    await self._look_now.wait()
                self._look_now = trio.Event()
        except (ServerUnreachable, UnfitServer) as error:  # the server may have been replaced by another
            self.send(HostFatal(message=str(error)))

    async def _wait_reachable(self) -> Ready:
        waiting: Waiting | None = None
        for attempt in count():
            try:
                return await self.server.probe()
            except ServerUnreachable as error:
                found = Waiting(message=str(error))
            except UnfitServer as error:
                found = Waiting(message=str(error), unfit=True)
            if found != waiting:
                self.send(found)
                waiting = found
            await trio.sleep(TRIES.delay(attempt))
        raise AssertionError("it tries for ever")

    async def _generate(self, order: Generate | ScoreTokens, scope: trio.CancelScope) -> None:
        over = False
        try:
            with scope:
                await self._sampled(order)
                over = True
            if not over and isinstance(order, ScoreTokens):
                self.send(Failed(rid=order.rid, message="the row was given up", retryable=True))
            elif not over:
                self.send(Piece(rid=order.rid, ids=b"", logprobs=b"", version="", finish="abort"))
        finally:
            self._calls.pop(order.rid, None)
            if not over:
                with (
                    trio.move_on_after(ABORT_TIMEOUT_S, shield=True),
                    suppress(ServerUnreachable, UnfitServer),
                ):
                    await self.server.abort(order.rid)

    async def _sampled(self, order: Generate | ScoreTokens) -> None:
        try:
            if isinstance(order, ScoreTokens):
                self.send(await self.server.score(order))
            else:
                await self.server.generate(order, self.send)
        except ServerUnreachable as error:
            self.send(Failed(rid=order.rid, message=str(error), retryable=True))
            self._look_now.set()
        except Exception as error:  # an isolation edge: one request's fault must not end its siblings
            self.send(Failed(rid=order.rid, message=f"{type(error).__name__}: {error}", retryable=True))

    async def _hold(self, order: Pause | Continue) -> None:
        done = Done(call=order.call, ok=True)
        try:
            if isinstance(order, Pause):
                await self.server.pause(order.mode)
            else:
                await self.server.resume()
        except (ServerUnreachable, UnfitServer) as error:
            done = evolve(done, ok=False, message=str(error))
        self.send(done)


# ── program ───────────────────────────────────────────────────────────────────


@asynccontextmanager
async def connect(wanted: Wanted, key: str | None) -> AsyncIterator[Server]:
    """The server at an address. Nothing is sent yet, because the kind shows when it first answers."""
    from polarnode.engine.external_sglang import open_client
    from polarnode.engine.external_vllm import AnyServer

    async with open_client(wanted, key) as client:
        yield AnyServer(wanted, client)


async def _converse(fd: int) -> None:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))
    decoder = FrameDecoder()
    while not (messages := decoder.feed(data := await stream.receive_some(READ_SIZE))):
        if not data:
            raise EOFError("the node closed the connection before it sent what to start")
    start = messages[0]
    if not isinstance(start, Start):
        raise ValueError(f"expected Start first, got {type(start).__name__}")
    async with connect(read_requirements(start.arguments), os.environ.get(KEY_VARIABLE) or None) as server:
        await Serving(server, stream).run(decoder)


def read_requirements(arguments: Mapping[str, Any]) -> Wanted:
    """Read the arguments of Start, as `settings.engine_arguments` makes them."""
    experts = arguments["experts"]
    return Wanted(
        url=arguments["url"],
        vocab_size=arguments["vocab_size"],
        words=tuple((token, text) for token, text in arguments["words"]),
        context_length=arguments["context_length"],
        experts=None if experts is None else ExpertShape(*experts),
    )


def main() -> None:
    """Read the settings, and serve until ordered to stop."""
    parser = ArgumentParser(prog="polarnode.engine.external")
    for name in ("--fd", "--lifeline-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--tag", required=True)
    options = parser.parse_args()
    if os.getsid(0) != os.getpid():
        sys.exit("polarnode.engine.external must lead a session of its own: the node starts it, see --engine")
    scratch = Path(tempfile.gettempdir())
    lifeline.watch(options.lifeline_fd, tag=options.tag, scratch=scratch)
    try:
        trio.run(_converse, options.fd)
    finally:
        lifeline.remove_leftovers(tag=options.tag, scratch=scratch)


if __name__ == "__main__":
    # Import this module under its own name, because the servers' modules import it too, and its errors must
    # be the same classes there.
    from polarnode.engine.external import main as run

    run()
