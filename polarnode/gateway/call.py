"""A model request as it came, between the route that read it and the call that answers it.

The rule for whoever edits it: two requests have one name only where the one may be given the other's answer.

The one model of the node, as its calls need it: an engine, and a template that is rendered without holding up
the event loop.

The rule for whoever edits it: rendering is pure and may be abandoned in its thread; nothing it is given is
changed by anyone meanwhile.

One model call of a session: a loop that obeys an Exchange, beside a loop that sends, beside a watch for the
client's leaving.

The rules for whoever edits it. The three are tasks of their own, so that a client that stops reading never
holds up a record, and a session that closes never waits for a client. Whatever ends a call early, its turn is
recorded synchronously before anything else is awaited; a cancellation is never swallowed but where this file
made it. Leaving the engine's block is the abort.
"""

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Final, TypeVar, assert_never

import trio
from attrs import define, evolve, field, frozen
from hypercorn.typing import ASGIReceiveCallable

from polarnode.core.conversation import Conversation, Message, ModelRequest, Tool
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import Chunk, Engine, Tokenizer
from polarnode.gateway.call_events import (
    Abandon,
    Abort,
    Answered,
    Asked,
    Break,
    ClientLeft,
    Done,
    EngineFailed,
    Event,
    Generate,
    Outgoing,
    Produced,
    Quiet,
    Record,
    Render,
    Rendered,
    Send,
    SessionEnded,
    Unrenderable,
)
from polarnode.gateway.delivery import Pace, deliver
from polarnode.gateway.live_sessions import LiveSession, Owed, wait_ended
from polarnode.gateway.machine import NOTHING, Exchange, Terms, silence, speak
from polarnode.http.asgi import Responder, wait_left
from polarnode.merge.attach import Plan
from polarnode.providers.contract import Call, Dialect, Fault, Reply, ServedModel
from polarnode.tokens.families import Family
from polarnode.tokens.parser import Parser
from polarnode.tokens.template import Template

# ── incoming ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Incoming:
    """A request as it came: who asks, in which dialect, what. `key` is the digest of its body, by which a
    retry is known.
    """

    session: LiveSession
    dialect: Dialect
    request: ModelRequest
    key: str

    @property
    def name(self) -> str:
        """Whose body it is: two agents of a harness may ask the same at once."""
        return f"{self.dialect.name} {self.request.hints.get('agent', '')} {self.key}"

    @property
    def can_go_on(self) -> bool:
        """Whether a cut sample of it can be continued: an engine begins constraints anew, and logprobs are
        kept for no one.
        """
        request = self.request
        return request.choices == 1 and request.logprobs is None and request.constraint is None


# ── model ────────────────────────────────────────────────────────────

T = TypeVar("T")

# at once, in threads: encoding leaves the GIL alone but rendering does not, and more only take the loop's
# turns
RENDERINGS: Final = 2
# new text up to this is rendered in place, in about 2 ms; a thread's way there and back costs as much under
# load
INLINE_CHARS: Final = 2_000


@define(eq=False, kw_only=True)
class Model:
    """What is served. `context_length` in tokens, `now` is wall seconds."""

    id: str
    engine: Engine
    template: Template
    tokenizer: Tokenizer
    family: Family
    context_length: int
    now: Callable[[], float]
    pace: Pace = field(factory=Pace)
    _renderings: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(RENDERINGS), init=False)

    @property
    def served(self) -> ServedModel:
        """As the lists of models show it."""
        return ServedModel(id=self.id, context_length=self.context_length)

    async def root(self, conversation: Conversation) -> "array[int]":
        """The whole conversation in ids, int32. Refused when the template does not take it."""
        long = bool(conversation.tools) or _is_long(conversation.messages)
        return await self._rendered(lambda: self.template.root(conversation), long=long)

    async def prompt(
        self, conversation: Conversation, new: tuple[Message, ...], history: "array[int] | None"
    ) -> Rendered:
        """A request in ids: `history`, what the turn it extends ends with (None for a root), and the messages
        after it.

        Refused when the template does not take what is new.
        """
        if history is None:
            # with the thoughts that the client did not show
            root = await self.root(evolve(conversation, messages=new))
            return Rendered(prompt=root, delta=root, notes=self.template.limits.notes(new))
        suffix = await self._rendered(
            lambda: self.template.suffix(new, conversation=conversation, sampled=history), long=_is_long(new)
        )
        return Rendered(
            prompt=history + suffix.ids,
            delta=suffix.ids,
            close_length=suffix.close_length,
            notes=suffix.notes,
        )

    def parser(
        self,
        prompt: "array[int]",
        stop: tuple[str, ...],
        call_id: Callable[[int], str],
        tools: Sequence[Tool],
    ) -> Parser:
        """What reads the sample that follows a prompt; `tools` are those it showed."""
        return Parser(
            tokenizer=self.tokenizer,
            family=self.family,
            call_id=call_id,
            opens_thinking=self.template.opens_thinking(prompt),
            stop=stop,
            tools=tools,
            prompt=prompt,
        )

    async def _rendered(self, render: Callable[[], T], *, long: bool) -> T:
        if not long:
            return render()
        return await trio.to_thread.run_sync(render, limiter=self._renderings, abandon_on_cancel=True)


def _is_long(messages: Sequence[Message]) -> bool:
    return (
        sum(len(message.text) + sum(len(call.arguments) for call in message.calls) for message in messages)
        > INLINE_CHARS
    )


# ── model call ────────────────────────────────────────────────────────────

# pieces on their way to a client; what a slow one has not taken waits in the engine's own queue
OUTBOX: Final = 16


@define(eq=False)
class ModelCall:
    """One call. `run` returns when its answer has left, or when nobody waits for it any more."""

    model: Model
    incoming: Incoming
    responder: Responder
    _exchange: Exchange | None = field(default=None, init=False)
    # cancelled when the client leaves or the session closes
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _answered: bool = field(default=False, init=False)  # what is sent is the answer, not a fault
    _told: bool = field(default=False, init=False)  # the exchange is over, and all it said was handed over
    _watching: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    # to a client whose call was not taken, or is cut
    _last_words: list[Outgoing] = field(factory=list, init=False)
    _outbox: "trio.MemorySendChannel[Outgoing]" = field(init=False)
    _sending: "trio.MemoryReceiveChannel[Outgoing]" = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._outbox, self._sending = trio.open_memory_channel(OUTBOX)

    async def run(self, receive: ASGIReceiveCallable) -> None:
        """Answer the request whose body was read."""
        retries = self.incoming.session.retries
        with retries.asking(self.incoming.name) as earlier:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, receive)
                nursery.start_soon(self._obey_exchange, earlier)
                await deliver(
                    self._sending, self.responder, pace=self.model.pace, on_quiet=self._sign_of_life
                )
                if self._answered and self.responder.delivered:
                    retries.delivered(self.incoming.name)
                self._watching.cancel()

    async def _watch(self, receive: ASGIReceiveCallable) -> None:
        with self._watching:
            await wait_left(receive)
            self._scope.cancel()

    def _sign_of_life(self) -> list[Outgoing]:
        commands = [] if self._exchange is None else self._exchange.receive(Quiet())
        return [command for command in commands if isinstance(command, Send)]

    # ── the loop that obeys ───────────────────────────────────────────────────

    async def _obey_exchange(self, earlier: tuple[trio.Event, ...]) -> None:
        with self._outbox:  # closed at the end, which the sender takes for "nothing more comes"
            await wait_ended(earlier)
            if self._scope.cancel_called:
                return  # the client left before anything was planned
            if not self._is_spoken():
                await self._generated()
            for command in self._last_words:
                await self._outbox.send(command)

    def _is_spoken(self) -> bool:
        """Whether the answer needs no engine, and is said: the one that is owed to this client, or the empty
        one it asks for.
        """
        session, request, dialect = self.incoming.session, self.incoming.request, self.incoming.dialect
        owed = session.retries.owed(self.incoming.name)
        if session.over:
            return False
        if not request.generate:
            call = self._call(created=self.model.now(), signature="")
            session.counters.prewarmed += 1
            dialect.remember(call, NOTHING, session.memory)  # a client may go on from it by name
            self._last_words += silence(dialect, call)
            return True
        if isinstance(owed, Owed):
            session.counters.replayed += 1
            self._answered = True
            self._last_words += speak(dialect, owed.call(request), owed.answers, owed.usage)
            return True
        return False

    async def _generated(self) -> None:
        session, samples = self.incoming.session, self.incoming.request.choices
        # in one step with the plan: no other call can spend what is left in between
        fault = session.refusal(samples=samples)
        if fault is not None:
            self._refuse(fault)
            return
        with session.call(self._scope, samples=samples):
            await self._planned()

    async def _planned(self) -> None:
        session, request = self.incoming.session, self.incoming.request
        try:
            plans = self._plans()
        except Refused as error:
            self._refuse(Fault.of(error))
            return
        spoken = session.lineages.resumed_prefix(plans[0])
        asked = Asked(
            request=request, plans=plans, at=trio.current_time(), wall=self.model.now(), spoken=spoken
        )
        exchange = self._exchange = Exchange(self._terms(asked))
        try:
            await self._tell(exchange, asked)
        finally:
            self._settle(exchange)

    def _plans(self) -> tuple[Plan, ...]:
        """One a sample: the first goes on where the same request was cut, if it was."""
        lineages, request = self.incoming.session.lineages, self.incoming.request
        owed = self.incoming.session.retries.owed(self.incoming.name)
        resumed = (
            lineages.resume(owed, total=len(request.conversation.messages)) if isinstance(owed, int) else None
        )
        plan = resumed or lineages.plan(
            request.conversation, request_key=self.incoming.key, hints=request.hints
        )
        return (plan, *lineages.also(plan, request.choices - 1))

    def _refuse(self, fault: Fault) -> None:
        self.incoming.session.refused(fault, samples=self.incoming.request.choices)
        self._last_words.append(self.incoming.dialect.error(fault))

    def _call(self, *, created: float, signature: str) -> Call:
        return Call(
            request=self.incoming.request,
            id=self.responder.request_id,
            created=int(created),
            signature=signature,
        )

    def _terms(self, asked: Asked) -> Terms:
        session, references = self.incoming.session, self.incoming.session.lineages.references
        # Not `self` in what the exchange keeps: a cycle of the two would hold the whole session until the
        # collector comes, which is rarely.
        model, tools = self.model, asked.request.conversation.tools
        return Terms(
            session_id=session.session_id,
            dialect=self.incoming.dialect,
            call=self._call(created=asked.wall, signature=references.signature(asked.plans[0].index)),
            sampling=session.sampling,
            context_length=self.model.context_length,
            token_room=session.token_room,
            stop_ids=self.model.template.stop_ids,
            new_parser=lambda plan, prompt, stop: model.parser(
                prompt, stop, partial(references.call_id, plan.index), tools
            ),
            token_bytes=self.model.tokenizer.token_bytes,
            carry=session.carrier.carry(asked.plans[0].parent),
        )

    async def _tell(self, exchange: Exchange, event: Event) -> None:
        """Tell the machine what happened, and do what it says."""
        orders: list[Generate] = []
        was_over, commands = exchange.over, exchange.receive(event)
        ends = exchange.over and not was_over
        for command in commands:
            match command:
                case Render(plan):
                    await self._render(exchange, plan)
                case Generate():
                    orders.append(command)
                case Record() | Abandon() | Answered() | Abort():
                    self._keep(command)
                case Send() | Done() | Break() | Reply():
                    await self._put(command)
                case _:
                    assert_never(command)
        self._told = self._told or ends
        await self._generate_all(exchange, orders)

    async def _put(self, command: Outgoing) -> None:
        """On its way to the client; without a stop where there is room, as every chunk was waited for
        already.
        """
        try:
            self._outbox.send_nowait(command)
        except trio.WouldBlock:
            await self._outbox.send(command)

    async def _render(self, exchange: Exchange, plan: Plan) -> None:
        history = None if plan.parent is None else self.incoming.session.lineages.history(plan)
        try:
            event: Event = await self.model.prompt(self.incoming.request.conversation, plan.new, history)
        except Refused as error:
            event = Unrenderable(error=error)
        await self._tell(exchange, event)

    async def _generate_all(self, exchange: Exchange, orders: list[Generate]) -> None:
        """Side by side; when the call is over all of them are."""
        if len(orders) == 1:
            await self._generate(exchange, orders[0])
        elif orders:
            async with trio.open_nursery() as nursery:
                for order in orders:
                    nursery.start_soon(self._generate_one, exchange, order, nursery.cancel_scope)

    async def _generate_one(self, exchange: Exchange, asked: Generate, others: trio.CancelScope) -> None:
        await self._generate(exchange, asked)
        if self._told:  # not sooner: another sample of this call may be about to hand over the last words
            others.cancel()

    async def _generate(self, exchange: Exchange, asked: Generate) -> None:
        try:
            async with self.model.engine.generate(asked.order) as chunks:
                await self._take(exchange, asked.choice, chunks)
            return
        except EngineError as error:
            failed: Event = EngineFailed(error=error, at=trio.current_time(), choice=asked.choice)
        except Refused as error:  # the engine holds less than we were told
            failed = Unrenderable(error=error)
        await self._tell(exchange, failed)

    async def _take(self, exchange: Exchange, choice: int, chunks: AsyncIterator[Chunk]) -> None:
        try:
            async for chunk in chunks:
                await self._tell(exchange, Produced(chunk=chunk, at=trio.current_time(), choice=choice))
                if exchange.ended(choice):
                    return
        except trio.Cancelled:
            self._settle(exchange)  # before the block is left, which may have to wait for the engine
            raise
        raise EngineError("the sample ended without a reason")

    # ── what is done at once ──────────────────────────────────────────────────

    def _settle(self, exchange: Exchange) -> None:
        """Record a call that is cut short. Nothing, when the exchange came to its own end."""
        now = trio.current_time()
        for command in exchange.receive(
            SessionEnded(at=now) if self.incoming.session.over else ClientLeft(at=now)
        ):
            if isinstance(command, Record | Abandon | Abort | Answered):
                self._keep(command)
            elif isinstance(command, Send | Done | Break | Reply):
                self._last_words.append(command)

    def _keep(self, command: Record | Abandon | Answered | Abort) -> None:
        session, incoming = self.incoming.session, self.incoming
        match command:
            case Record(turn):
                session.commit(turn)
                if turn.state == "partial" and turn.sampled and incoming.can_go_on:
                    session.retries.owe(incoming.name, turn.index)
            case Answered(call=call, answers=answers):
                self._answered = True
                session.retries.owe(incoming.name, Owed.of(command))
                if len(answers) == 1:
                    incoming.dialect.remember(call, answers[0], session.memory)
            case Abandon(plan, fault):
                session.lineages.abandon(plan)
                if fault is not None:
                    session.refused(fault)
            case Abort():
                pass  # whoever takes chunks sees that its sample is over, and leaves the engine's block
            case _:
                assert_never(command)
