"""One model call of a session: a loop that obeys an Exchange, beside a loop that sends, beside a watch for the client's leaving.

The rules for whoever edits it. The three are tasks of their own, so that a client that stops reading never holds up a record, and a session
that closes never waits for a client. Whatever ends a call early, its turn is recorded synchronously before anything else is awaited; a
cancellation is never swallowed but where this file made it. Leaving the engine's block is the abort.
"""

from collections.abc import AsyncIterator
from typing import Final, assert_never

import trio
from attrs import define, field, frozen
from hypercorn.typing import ASGIReceiveCallable

from polarnode.conversation import ModelRequest
from polarnode.errors import EngineError, Refused
from polarnode.exchange import (
    Abandon,
    Abort,
    Asked,
    Break,
    ClientLeft,
    Done,
    EngineFailed,
    Event,
    Exchange,
    Generate,
    Outgoing,
    Produced,
    Quiet,
    Record,
    Render,
    Send,
    SessionEnded,
    Terms,
    Unrenderable,
)
from polarnode.merge.lineage import Plan
from polarnode.ports import Chunk, GenerateOrder
from polarnode.providers.dialect import Call, Dialect, Fault, Reply
from polarnode.shell.live import LiveSession
from polarnode.web.model import Model
from polarnode.web.stream import Responder, deliver, wait_left

OUTBOX: Final = 16  # pieces on their way to a client; what a slow one has not taken waits in the engine's own queue


@frozen(kw_only=True)
class Incoming:
    """A request as it came: who asks, in which dialect, what. `key` is the digest of its body, by which a retry is known."""

    session: LiveSession
    dialect: Dialect
    request: ModelRequest
    key: str


@define(eq=False)
class ModelCall:
    """One call. `run` returns when its answer has left, or when nobody waits for it any more."""

    model: Model
    incoming: Incoming
    responder: Responder
    _exchange: Exchange | None = field(default=None, init=False)
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)  # cancelled when the client leaves or the session closes
    _watching: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _last_words: list[Outgoing] = field(factory=list, init=False)  # to a client whose call was not taken, or is cut
    _outbox: "trio.MemorySendChannel[Outgoing]" = field(init=False)
    _sending: "trio.MemoryReceiveChannel[Outgoing]" = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._outbox, self._sending = trio.open_memory_channel(OUTBOX)

    async def run(self, receive: ASGIReceiveCallable) -> None:
        """Answer the request whose body was read."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, receive)
            nursery.start_soon(self._obey_exchange)
            await deliver(self._sending, self.responder, pace=self.model.pace, on_quiet=self._sign_of_life)
            self._watching.cancel()

    async def _watch(self, receive: ASGIReceiveCallable) -> None:
        with self._watching:
            await wait_left(receive)
            self._scope.cancel()

    def _sign_of_life(self) -> list[Outgoing]:
        commands = [] if self._exchange is None else self._exchange.receive(Quiet())
        return [command for command in commands if isinstance(command, Send)]

    # ── the loop that obeys ───────────────────────────────────────────────────

    async def _obey_exchange(self) -> None:
        session = self.incoming.session
        with self._outbox:  # closed at the end, which the sender takes for "nothing more comes"
            fault = session.refusal()  # in one step with the plan: no other call can spend what is left in between
            if fault is not None:
                self._refuse(fault)
            else:
                with session.call(self._scope):
                    await self._planned()
            for command in self._last_words:
                await self._outbox.send(command)

    async def _planned(self) -> None:
        session, request = self.incoming.session, self.incoming.request
        try:
            plan = session.lineages.plan(request.conversation, request_key=self.incoming.key, hints=request.hints)
        except Refused as error:
            self._refuse(Fault.of(error))
            return
        asked = Asked(request=request, plan=plan, at=trio.current_time(), wall=self.model.now())
        exchange = self._exchange = Exchange(self._terms(asked))
        try:
            await self._tell(exchange, asked)
        finally:
            self._settle(exchange)

    def _refuse(self, fault: Fault) -> None:
        self.incoming.session.refused(fault)
        self._last_words.append(self.incoming.dialect.error(fault))

    def _terms(self, asked: Asked) -> Terms:
        session, request, references = self.incoming.session, self.incoming.request, self.incoming.session.lineages.references
        call = Call(
            request=request,
            id=self.responder.request_id,
            created=int(asked.wall),
            signature=references.signature(asked.plan.index),
        )
        return Terms(
            session_id=session.session_id,
            dialect=self.incoming.dialect,
            call=call,
            sampling=session.sampling,
            context_length=self.model.context_length,
            token_room=session.token_room,
            stop_ids=self.model.template.stop_ids,
            new_parser=lambda prompt, stop: self.model.parser(prompt, stop, lambda k: references.call_id(asked.plan.index, k)),
        )

    async def _tell(self, exchange: Exchange, event: Event) -> None:
        """Tell the machine what happened, and do what it says."""
        for command in exchange.receive(event):
            match command:
                case Render(plan):
                    await self._render(exchange, plan)
                case Generate(order):
                    await self._generate(exchange, order)
                case Record() | Abandon() | Abort():
                    self._keep(command)
                case Send() | Done() | Break() | Reply():
                    await self._outbox.send(command)
                case _:
                    assert_never(command)

    async def _render(self, exchange: Exchange, plan: Plan) -> None:
        history = self.incoming.session.lineages.history(plan)
        try:
            event: Event = await self.model.prompt(plan, self.incoming.request.conversation, history)
        except Refused as error:
            event = Unrenderable(error=error)
        await self._tell(exchange, event)

    async def _generate(self, exchange: Exchange, order: GenerateOrder) -> None:
        try:
            async with self.model.engine.generate(order) as chunks:
                await self._take(exchange, chunks)
            return
        except EngineError as error:
            failed: Event = EngineFailed(error=error, at=trio.current_time())
        except Refused as error:  # the engine holds less than we were told
            failed = Unrenderable(error=error)
        await self._tell(exchange, failed)

    async def _take(self, exchange: Exchange, chunks: AsyncIterator[Chunk]) -> None:
        try:
            async for chunk in chunks:
                await self._tell(exchange, Produced(chunk=chunk, at=trio.current_time()))
                if exchange.over:
                    return
        except trio.Cancelled:
            self._settle(exchange)  # before the block is left, which may have to wait for the engine
            raise
        raise EngineError("the sample ended without a reason")

    # ── what is done at once ──────────────────────────────────────────────────

    def _settle(self, exchange: Exchange) -> None:
        """Record a call that is cut short. Nothing, when the exchange came to its own end."""
        now = trio.current_time()
        for command in exchange.receive(SessionEnded(at=now) if self.incoming.session.over else ClientLeft(at=now)):
            if isinstance(command, Record | Abandon | Abort):
                self._keep(command)
            elif isinstance(command, Send | Break | Reply):
                self._last_words.append(command)

    def _keep(self, command: Record | Abandon | Abort) -> None:
        session = self.incoming.session
        match command:
            case Record(turn):
                session.commit(turn)
            case Abandon(plan, fault):
                session.lineages.abandon(plan)
                if fault is not None:
                    session.refused(fault)
            case Abort():
                pass  # whoever takes chunks sees that the exchange is over, and leaves the engine's block
            case _:
                assert_never(command)
