"""What the tests of the model plane share: the tiny model's own language, an engine moved by hand, a session
behind a door.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import trio
from attrs import define, field
from tokens_kit import model

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import FinishReason, Sampling
from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.core.ports import Chunk, Engine, GenerateOrder
from polarnode.core.task import Budgets
from polarnode.core.trajectory import Turn, VersionSpan
from polarnode.gateway.call import KeepAlivePacing, Model
from polarnode.gateway.endpoint import ModelPlane
from polarnode.gateway.live_sessions import LiveSession, LiveSessions, SessionBudget
from polarnode.http.connections import ClientDeparture, DirectApp, Head
from polarnode.http.server import Address, open_server
from polarnode.merge.lineage import Lineages

ANYWHERE = Address(host="127.0.0.1", port=0)
CONTEXT = 4096


def spelled(*pieces: str) -> list[int]:
    """Ids of pieces; one that is a control string becomes its id."""
    return list(model().spelled(*pieces))


def answers(*texts: str) -> Callable[[GenerateOrder], list[int]]:
    """A reply of ScriptedEngine, a text a call, the last for ever; pieces of a text, separated by |, may be
    control strings.
    """
    asked: dict[str, int] = {}

    def reply(order: GenerateOrder) -> list[int]:
        place = asked.setdefault(order.request_id, len(asked))
        return spelled(*texts[min(place, len(texts) - 1)].split("|"), "<|im_end|>")

    return reply


@define(eq=False)
class HandEngine:
    """An engine that gives what the test puts into `give`: pieces of text, a finish reason after them, or an
    error. One call at a time.
    """

    orders: list[GenerateOrder] = field(factory=list)
    running: int = 0
    given: list[int] = field(factory=list)  # what the last call was given
    asked: trio.Event = field(factory=trio.Event)
    took: trio.Event = field(factory=trio.Event)  # set, and renewed, when a chunk is taken
    left: trio.Event = field(factory=trio.Event)  # set when a call's block is left
    channel: Any = field(factory=lambda: trio.open_memory_channel[Any](100))

    def give(self, *pieces: str, finish: FinishReason | None = None) -> None:
        self.channel[0].send_nowait((spelled(*pieces), finish))

    def fail(self, error: EngineError | EngineRefusal) -> None:
        self.channel[0].send_nowait(error)

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        self.orders.append(order)
        self.running += 1
        self.given = []
        self.asked.set()
        try:
            await trio.lowlevel.checkpoint()
            yield self
        finally:
            self.running -= 1
            self.asked = trio.Event()
            self.left.set()

    def __aiter__(self) -> "HandEngine":
        return self

    async def __anext__(self) -> Chunk:
        found = await self.channel[1].receive()
        if isinstance(found, EngineError | EngineRefusal):
            raise found
        tokens, finish = found
        self.given += tokens
        self.took.set()
        self.took = trio.Event()
        spans = (VersionSpan(version="0", start=0, end=len(self.given)),)
        return Chunk(
            ids=ids(tokens), logprobs=floats([-0.5] * len(tokens)), finish_reason=finish, version_spans=spans
        )


@define(eq=False)
class Stage:
    """A plane with its sessions; `s1` is the first, `turns` what its journal got."""

    plane: ModelPlane
    s1: LiveSession
    turns: list[Turn]

    @property
    def app(self) -> DirectApp:
        return self.plane.app_for("s1")


def stage(
    engine: Engine,
    *,
    sampling: Sampling | None = None,
    pacing: KeepAlivePacing | None = None,
    context: int = CONTEXT,
    **budgets: Any,
) -> Stage:
    sessions, turns = LiveSessions(), list[Turn]()
    s1 = new_session("s1", sampling=sampling, turns=turns, **budgets)
    sessions.add(s1)
    plane = ModelPlane(
        sessions=sessions,
        model=Model(
            engine=engine,
            template=model().template,
            tokenizer=model().tokenizer,
            family=model().family,
            context_length=context,
            id="tiny",
            now=lambda: 1_700_000_000.0,
            pacing=pacing or KeepAlivePacing(),
        ),
    )
    return Stage(plane, s1, turns)


def new_session(
    name: str, *, sampling: Sampling | None = None, turns: list[Turn] | None = None, **budgets: Any
) -> LiveSession:
    """A session whose key is `key-` and its name."""
    return LiveSession(
        session_id=name,
        key=f"key-{name}",
        lineages=Lineages(session_id=name, secret=b"secret"),
        sampling=sampling or Sampling(),
        budget=SessionBudget(Budgets(**budgets)),
        record=(turns if turns is not None else []).append,
    )


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The base URL of an app on a real socket."""
    async with open_server(app, ANYWHERE) as address:
        yield f"http://{address.host}:{address.port}"


# ── without sockets, in virtual time ──────────────────────────────────────────


def _set_event(event: trio.Event) -> trio.Event:
    event.set()
    return event


@define(eq=False)
class AsgiClient:
    """One request by hand, and the writer of its response: the body is there, the client leaves when `leave`
    is called; `sent` is what it got, as ASGI's messages.

    `leave_at`: it leaves by itself when that many messages were sent to it, and the one after gets nowhere.
    `reading`: every write to it waits until this is set.
    """

    sent: list[Any] = field(factory=list)
    departure: ClientDeparture = field(factory=ClientDeparture)
    leave_at: int | None = None
    reading: trio.Event = field(factory=lambda: _set_event(trio.Event()))
    _gone: trio.Event = field(factory=trio.Event)

    def leave(self) -> None:
        self._gone.set()
        self.departure.note()

    async def request(
        self, app: DirectApp, path: str, body: bytes, *, key: str = "key-s1", cuts: Sequence[int] = ()
    ) -> None:
        """`cuts`: the body comes in pieces, cut at these places."""
        places = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
        unread = [body[start:end] for start, end in pairwise(places)]
        scope: Any = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"",
            "headers": [(b"authorization", b"Bearer " + key.encode()), (b"content-type", b"application/json")],
        }  # fmt: skip

        async def receive() -> Any:
            await trio.lowlevel.checkpoint()
            if unread:
                piece = unread.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(unread)}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        await app.serve(scope, receive, self)

    async def write(self, head: Head | None, data: bytes, *, end: bool) -> bool:
        """Take a part of the response, as the messages that ASGI has for it. A client may leave between the
        last bytes of a stream and its end.
        """
        await self.reading.wait()
        sized = False
        if head is not None:
            sized = any(name == b"content-length" for name, _ in head[1])
            self._take({"type": "http.response.start", "status": head[0], "headers": head[1]})
        if sized:
            return self._take({"type": "http.response.body", "body": data, "more_body": not end})
        taken = self._take({"type": "http.response.body", "body": data, "more_body": True}) if data else False
        if end:
            ended = self._take({"type": "http.response.body", "body": b"", "more_body": False})
            taken = taken or ended
        return taken

    def _take(self, message: Any) -> bool:
        if len(self.sent) == self.leave_at:
            self.leave()
        if not self.departure.left:
            self.sent.append(message)
        return not self.departure.left

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def whole(self) -> bool:
        """Whether the answer was ended properly."""
        return bool(self.sent) and self.sent[-1].get("more_body") is False


def prompts(orders: Sequence[GenerateOrder]) -> list[list[int]]:
    return [list(order.prompt) for order in orders]
