"""One model call of a session: the machine `Exchange` is driven here; a stream is sent by a task beside it.

The two are separate tasks, so that a client that stops reading never delays a record, and a session that
closes never waits for a client. A whole response is recorded before it is sent, after the call has left its
session, so it needs one task. The connection calls when its client has left.

Invariants: whatever ends a call early, its turn is recorded synchronously before anything else is awaited. A
cancellation is swallowed only where this module made it. Leaving the engine's block aborts the generation.

A stream ends properly or not at all: returning without the last body message makes Hypercorn cut the
connection without the terminal chunk, which a client sees as a broken stream. Keep-alives are the dialect's
own data events, never SSE comments.
"""

import math
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Final, TypeVar, assert_never

import trio
from attrs import define, evolve, field, frozen
from hypercorn.typing import ASGIReceiveCallable

from polarnode.core.conversation import Conversation, Message, ModelRequest, Tool
from polarnode.core.errors import Busy, EngineError, EngineRefusal, Refused
from polarnode.core.ports import Chunk, Engine, Tokenizer, WithheldChunks
from polarnode.core.trajectory import Turn
from polarnode.gateway.call_events import (
    FREE_REPEATS,
    Abandon,
    Bookkeeping,
    Break,
    ClientLeft,
    Command,
    CountPrewarm,
    CountRefusal,
    CountReplay,
    CutCall,
    EndStream,
    EngineFailed,
    Event,
    KeepResponse,
    Outgoing,
    Planned,
    PlanTurns,
    Produced,
    PromptRendered,
    Quiet,
    RecordTurn,
    Render,
    Requested,
    RequestRefused,
    Send,
    SessionEnded,
    StartGeneration,
)
from polarnode.gateway.inherited import chunk_of
from polarnode.gateway.live_sessions import Attempt, LiveSession, wait_ended
from polarnode.gateway.machine import EMPTY_ANSWER, Exchange, Terms
from polarnode.http.asgi import Responder, wait_disconnected
from polarnode.http.connections import Departure
from polarnode.merge.attach import RESUMED, Plan
from polarnode.providers.contract import Dialect, ModelCallInfo, Reply, ServedModel
from polarnode.support.concurrency import ThreadShare
from polarnode.tokens.families import Family
from polarnode.tokens.parser import Parser
from polarnode.tokens.template import Template

# ── sending ─────────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class KeepAlivePacing:
    """Seconds of silence before a keep-alive: before the first byte, and after it.

    The first is short, so that headers are sent long before any client times out (60 s), and not zero, so
    that an engine that is down or a context that is too long can still be reported with a status. The second
    is half the shortest time-out measured in a harness.
    """

    opening_s: float = 1.0
    quiet_s: float = 10.0


async def deliver(
    outgoing: "trio.MemoryReceiveChannel[Outgoing]",
    to: Responder,
    *,
    pacing: KeepAlivePacing,
    on_quiet: Callable[[], list[Outgoing]],
) -> None:
    """Send commands until the response ends or the channel closes. `on_quiet` returns a keep-alive when
    nothing was sent for the time in `pacing`.
    """
    while True:
        commands: list[Outgoing] = []
        # one scope for many chunks, until a silence: a new one costs 10 us per chunk
        with trio.CancelScope() as silence:
            while not commands:
                silence.deadline = trio.current_time() + (pacing.quiet_s if to.opened else pacing.opening_s)
                try:
                    commands = _with_more(await outgoing.receive(), outgoing)
                except trio.EndOfChannel:
                    return
                # after the deadline a send here would be cancelled: it waits until the scope exits
                if not silence.cancel_called:
                    silence.deadline = math.inf
                    if await _sent(commands, to):
                        return
                    commands = []
        if await _sent(commands or on_quiet(), to):
            return


def _with_more(first: Outgoing, outgoing: "trio.MemoryReceiveChannel[Outgoing]") -> list[Outgoing]:
    """The first command and those queued since. Bytes of a stream are joined, so that a busy node writes less
    often, not later.
    """
    found = [first]
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while True:
            more, last = outgoing.receive_nowait(), found[-1]
            if isinstance(more, Send) and isinstance(last, Send) and not more.alone:
                found[-1] = Send(last.data + more.data, last.content_type)
            else:
                found.append(more)
    return found


async def _sent(commands: list[Outgoing], to: Responder) -> bool:
    """Send these commands. Returns whether one of them ended the response."""
    for command, following in zip_longest(commands, commands[1:]):
        if await _send_one(command, to, last=isinstance(following, EndStream)):
            return True
    return False


async def _send_one(command: Outgoing, to: Responder, *, last: bool) -> bool:
    """Send one command. Returns whether it ended the response. `last`: the end of the stream follows."""
    match command:
        case Send(data, content_type):
            await to.stream(data, content_type, last=last)
            return False
        case Reply():
            await to.reply(command)
        case EndStream():
            await to.end()
        case Break():
            pass  # returning breaks the connection
        case _:
            assert_never(command)
    return True


# ── one call ────────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Incoming:
    """A request that may be answered: its session, its dialect, and `key`, by which it is known when it is
    sent again.
    """

    session: LiveSession
    dialect: Dialect
    request: ModelRequest
    key: str

    @property
    def name(self) -> str:
        """The request's identity. Two requests have the same name only if one may receive the other's
        response: two agents of a harness may send the same body at once.
        """
        return f"{self.dialect.name} {self.request.hints.get('agent', '')} {self.key}"


# ── model ────────────────────────────────────────────────────────────

T = TypeVar("T")

# rendering threads: encoding releases the GIL but rendering does not, so more threads only slow the event
# loop
RENDERINGS: Final = 2
# new text up to this length is rendered in place: in about 2 ms, and a result of a tool has half of it; to
# change threads takes 0.1 ms of an idle node, and of a busy one as long as the rendering
INLINE_CHARS: Final = 8_000
INLINE_MESSAGES: Final = 100  # a template takes 10 us for each


@define(eq=False, kw_only=True)
class Model:
    """The one model of the node: its engine, and its template, rendered without blocking the event loop.

    `context_length` is in tokens; `now` returns seconds since the epoch. Rendering is pure and may be
    abandoned in its thread, so its arguments must not change meanwhile.
    """

    id: str
    engine: Engine
    template: Template
    tokenizer: Tokenizer
    family: Family
    context_length: int
    now: Callable[[], float]
    pacing: KeepAlivePacing = field(factory=KeepAlivePacing)
    _renderings: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(RENDERINGS), init=False)

    @property
    def served(self) -> ServedModel:
        """The model's entry in a list of models."""
        return ServedModel(id=self.id, context_length=self.context_length)

    async def prompt(
        self,
        conversation: Conversation,
        new: tuple[Message, ...],
        history: "array[int] | None",
        *,
        threads: trio.CapacityLimiter,
        prefill: str = "",
    ) -> PromptRendered:
        """Render a request as ids: `history`, the ids of the turn it extends (None for a root), followed by
        the `new` messages and, where the answer goes on with a last message, its text `prefill`. `threads`
        are the session's.

        Raises Refused when the template rejects them, and ContextTooLong for a long text beyond the context.
        """
        template, conversation = self.template, conversation.before_prefill
        if history is None:
            # includes the thinking that the client left out
            whole = evolve(conversation, messages=new)
            root, notes = await self._rendered(
                lambda: (
                    template.root(whole, context_length=self.context_length, prefill=prefill),
                    template.notes(new),
                ),
                threads if conversation.tools or _is_long(new, prefill) else None,
            )
            return PromptRendered(prompt=root, delta=root, notes=notes)
        suffix = await self._rendered(
            lambda: template.suffix(
                new,
                conversation=conversation,
                sampled=history,
                context_length=self.context_length,
                prefill=prefill,
            ),
            threads if _is_long(new, prefill) else None,
        )
        return PromptRendered(
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
        """Return the parser of the sample that follows `prompt`; `tools` are the tools in the prompt."""
        return Parser(
            tokenizer=self.tokenizer,
            family=self.family,
            call_id=call_id,
            opens_thinking=self.template.opens_thinking(prompt),
            stop=stop,
            tools=tools,
            prompt=prompt,
        )

    async def _rendered(self, render: Callable[[], T], threads: trio.CapacityLimiter | None) -> T:
        """What `render` returns, from one of the session's `threads`; None renders in place."""
        return render() if threads is None else await ThreadShare(threads, self._renderings).run(render)


def _is_long(messages: Sequence[Message], prefill: str) -> bool:
    return (
        len(messages) > INLINE_MESSAGES
        or len(prefill)
        + sum(
            len(message.text) + len(message.thinking) + sum(len(call.arguments) for call in message.calls)
            for message in messages
        )
        > INLINE_CHARS
    )


# ── model call ────────────────────────────────────────────────────────────

# chunks queued for a client; those that a slow client has not read wait in the engine's own queue
OUTBOX: Final = 16


@define(eq=False)
class ModelCall:
    """One call. `run` returns when its response is sent, or when its client has left."""

    model: Model
    incoming: Incoming
    responder: Responder
    _exchange: Exchange | None = field(default=None, init=False)
    _attempt: Attempt = field(init=False)
    # cancelled when the client leaves or the session closes
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _planned: Planned | None = field(default=None, init=False)
    _given: Turn | None = field(default=None, init=False)  # of a fork's parent, whose answer is given again
    _cut: CutCall | None = field(default=None, init=False)  # the same call before, whose client left
    _answered: bool = field(default=False, init=False)  # the response is an answer, not a fault
    _finished: bool = field(default=False, init=False)  # the last outgoing command is in the outbox
    # sent after the call has left its session: a whole response, or what the client of a cut stream is sent
    _last_words: list[Outgoing] = field(factory=list, init=False)
    # of a stream, whose chunks are sent beside the call; a whole response needs no second task
    _outbox: "trio.MemorySendChannel[Outgoing] | None" = field(default=None, init=False)

    async def run(self, receive: ASGIReceiveCallable, departure: Departure | None) -> None:
        """Answer the request, whose body has been read. Without a `departure` its `receive` is watched."""
        with self.incoming.session.retries.attempt(self.incoming.name) as self._attempt:
            if departure is None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, receive)
                    await self._answer()
                    nursery.cancel_scope.cancel()
            else:
                departure.then = self._scope.cancel
                if departure.left:
                    self._scope.cancel()
                try:
                    await self._answer()
                finally:
                    departure.then = None
            if self._answered and self.responder.delivered:
                self._attempt.delivered()

    async def _watch(self, receive: ASGIReceiveCallable) -> None:
        await wait_disconnected(receive)
        self._scope.cancel()

    async def _answer(self) -> None:
        if not self.incoming.request.stream:
            await self._drive()
            await _sent(self._last_words, self.responder)
            return
        outbox, sending = trio.open_memory_channel[Outgoing](OUTBOX)
        self._outbox = outbox
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drive_stream, outbox)
            await deliver(sending, self.responder, pacing=self.model.pacing, on_quiet=self._keep_alive)

    def _keep_alive(self) -> list[Outgoing]:
        commands = [] if self._exchange is None else self._exchange.receive(Quiet())
        return [command for command in commands if isinstance(command, Send)]

    # ── driving the machine ─────────────────────────────────────────────

    async def _drive_stream(self, outbox: "trio.MemorySendChannel[Outgoing]") -> None:
        with outbox:  # closing it at the end stops the sender
            await self._drive()
            for command in self._last_words:
                await outbox.send(command)

    async def _drive(self) -> None:
        if self._attempt.earlier:
            await wait_ended(self._attempt.earlier)
        if self._scope.cancel_called:
            return  # the client left before anything was planned
        session, samples = self.incoming.session, self.incoming.request.choices
        # No checkpoint before the plan: no other call can spend the remaining budget in between.
        wall, undelivered = self.model.now(), self._attempt.take_over()
        if isinstance(undelivered, CutCall) and undelivered.turn is not None and session.token_room == 0:
            kept = session.cut_answer(undelivered.turn, self.responder.request_id, created=int(wall))
            if kept is not None:
                undelivered = kept
                self._keep_books(KeepResponse(kept))
        self._cut = undelivered if isinstance(undelivered, CutCall) else None
        charged = self._charged
        messages = self.incoming.request.conversation.messages
        refusal = session.refusal(messages, samples=samples, charged=charged)
        event: Event | None = Requested(
            at=trio.current_time(), wall=wall, refusal=refusal, undelivered=undelivered
        )
        exchange = self._exchange = Exchange(self._terms(wall))
        with session.call(self._scope, samples=samples if refusal is None else 0, charged=charged):
            try:
                while event is not None:
                    event = await self._carry_out(exchange, exchange.receive(event))
            finally:
                self._settle(exchange)

    @property
    def _charged(self) -> bool:
        """Whether its turns count against the budget of turns: what is asked again because its client left is
        one turn of it, and goes on at the last one.
        """
        return self._cut is None or self._cut.repeats >= FREE_REPEATS

    def _terms(self, wall: float) -> Terms:
        incoming, session = self.incoming, self.incoming.session
        # The exchange must not hold `self`: that cycle would keep the whole session until the garbage
        # collector runs, which is rare.
        model, references, tools = (
            self.model,
            session.lineages.references,
            incoming.request.conversation.tools,
        )
        return Terms(
            session_id=session.session_id,
            dialect=incoming.dialect,
            call=ModelCallInfo(
                request=incoming.request,
                id=self.responder.request_id,
                created=int(wall),
                signature="",
                calls_first=session.calls_first,
            ),
            sampling=session.sampling,
            context_length=model.context_length,
            token_room=session.token_room,
            stop_ids=model.template.stop_ids,
            new_parser=lambda plan, prompt, stop: model.parser(
                prompt, stop, partial(references.call_id, plan.index), tools
            ),
            token_bytes=model.tokenizer.token_bytes,
            adapter=session.adapter,
        )

    async def _carry_out(self, exchange: Exchange, commands: list[Command]) -> Event | None:
        """Carry out commands in their order. Returns the event that one of them produces, if any."""
        event: Event | None = None
        generations: list[StartGeneration] = []
        for command in commands:
            match command:
                case Send():
                    await self._put(command)
                case EndStream() | Break() | Reply():
                    await self._put(command)
                    self._finished = True
                case PlanTurns(resume):
                    event = self._plan(resume)
                case Render(plan):
                    event = await self._render(plan)
                case StartGeneration():
                    generations.append(command)
                case (
                    RecordTurn()
                    | Abandon()
                    | CountRefusal()
                    | CountPrewarm()
                    | CountReplay()
                    | KeepResponse()
                ):
                    self._keep_books(command)
                case _:
                    assert_never(command)
        if len(generations) == 1:
            await self._generate(exchange, generations[0])
        elif generations:
            async with trio.open_nursery() as nursery:
                for generation in generations:
                    nursery.start_soon(self._generate_beside, exchange, generation, nursery.cancel_scope)
        return event

    async def _put(self, command: Outgoing) -> None:
        """Queue a command for the client, without a checkpoint where there is room: every chunk was already
        awaited.
        """
        if self._outbox is None:
            self._last_words.append(command)
            return
        try:
            self._outbox.send_nowait(command)
        except trio.WouldBlock:
            await self._outbox.send(command)

    def _plan(self, cut_turn: int | None) -> Planned | RequestRefused:
        """Plan one turn per sample. The first resumes the cut turn where that is possible."""
        session, request = self.incoming.session, self.incoming.request
        lineages, plan = session.lineages, None
        try:
            if cut_turn is not None:
                plan = lineages.resume(cut_turn, total=len(request.conversation.messages))
            if plan is None:
                plan = lineages.plan(request.conversation, request_key=self.incoming.key, hints=request.hints)
            session.check_resumed(plan, request.conversation)
            plans = (plan, *lineages.also(plan, request.choices - 1))
        except Refused as error:
            if plan is not None:
                lineages.abandon(plan)
            return RequestRefused(error=error)
        self._planned = Planned(
            plans=plans,
            resumed_prefix=lineages.resumed_prefix(plan),
            signature=lineages.references.signature(plan.index),
            carry=session.carrier.carry(plan.parent),
        )
        return self._planned

    async def _render(self, plan: Plan) -> PromptRendered | RequestRefused:
        session = self.incoming.session
        history = None if plan.parent is None else session.lineages.history(plan)
        try:
            rendered = await self.model.prompt(
                self.incoming.request.conversation,
                plan.new,
                history,
                threads=session.threads,
                # what goes on after a cut has it in its history
                prefill="" if plan.reason == RESUMED else plan.prefill,
            )
            session.hold_prompt(self._scope, len(rendered.prompt), context_length=self.model.context_length)
        except (Refused, Busy) as error:
            return RequestRefused(error=error)
        if session.on_held is not None:
            await session.on_held(plan, self.incoming.request)
        return rendered

    async def _generate_beside(
        self, exchange: Exchange, generation: StartGeneration, others: trio.CancelScope
    ) -> None:
        """Generate one of several samples. When the call is finished all of them end."""
        await self._generate(exchange, generation)
        if self._finished:  # not sooner: another sample of this call may be about to queue the last bytes
            others.cancel()

    async def _generate(self, exchange: Exchange, generation: StartGeneration) -> None:
        choice, began = generation.choice, trio.current_time()
        if self._planned is not None:
            plan = self._planned.plans[choice]
            self._given = self.incoming.session.inherited_answer(plan, generation.order)
        if self._given is not None:
            recorded = chunk_of(self._given, generation.order)
            produced = Produced(chunk=recorded, at=began, choice=choice)
            await self._carry_out(exchange, exchange.receive(produced))
            return
        try:
            async with self.model.engine.generate(generation.order) as chunks:
                self.incoming.session.waited(trio.current_time() - began)
                await self._take(exchange, choice, chunks)
            return
        except (EngineError, EngineRefusal) as error:
            failed: Event = EngineFailed(error=error, at=trio.current_time(), choice=choice)
        except Refused as error:  # the engine's limits are lower than it reported
            failed = RequestRefused(error=error)
        await self._carry_out(exchange, exchange.receive(failed))

    async def _take(self, exchange: Exchange, choice: int, chunks: AsyncIterator[Chunk]) -> None:
        try:
            async for chunk in chunks:
                produced = Produced(chunk=chunk, at=trio.current_time(), choice=choice)
                await self._carry_out(exchange, exchange.receive(produced))
                if exchange.ended(choice):
                    return
        except trio.Cancelled:
            withheld = chunks.withheld() if isinstance(chunks, WithheldChunks) else None
            if withheld is not None:  # it has no end, so it brings no command
                exchange.receive(Produced(chunk=withheld, at=trio.current_time(), choice=choice))
            self._settle(exchange)  # before the block exits, which may wait for the engine
            raise
        raise EngineError("the sample ended without a reason")

    # ── synchronous bookkeeping ──────────────────────────────────────────────────

    def _settle(self, exchange: Exchange) -> None:
        """Record a call that is cut short. Does nothing when the exchange has ended by itself."""
        now = trio.current_time()
        cut = SessionEnded(at=now) if self.incoming.session.over else ClientLeft(at=now)
        for command in exchange.receive(cut):
            if isinstance(command, Send | EndStream | Break | Reply):
                self._last_words.append(command)
            elif not isinstance(command, PlanTurns | Render | StartGeneration):
                self._keep_books(command)

    def _keep_books(self, command: Bookkeeping) -> None:
        """Record, count and remember. Never awaits."""
        session, incoming = self.incoming.session, self.incoming
        match command:
            case RecordTurn(turn, resumable, owed):
                turn = turn if self._given is None else evolve(turn, used=self._given.used)
                session.commit(turn, charged=self._charged)
                if resumable:
                    self._attempt.keep(CutCall(turn.index))
                elif owed:
                    cut = self._cut
                    self._attempt.keep(CutCall() if cut is None else evolve(cut, repeats=cut.repeats + 1))
                elif turn.refused:
                    self._attempt.delivered()  # a repeated mistake is another turn
            case KeepResponse(response):
                self._answered = True
                self._attempt.keep(response)
                if len(response.answers) == 1:
                    call = response.call(incoming.request, calls_first=session.calls_first)
                    incoming.dialect.remember(call, response.answers[0], session.memory)
            case Abandon(plan, fault):
                session.lineages.abandon(plan)
                if fault is not None:
                    session.refused(fault)
            case CountRefusal(fault):
                request = incoming.request
                session.refused(fault, request.conversation.messages, samples=request.choices)
            case CountPrewarm(call):
                session.counters.prewarmed += 1
                incoming.dialect.remember(call, EMPTY_ANSWER, session.memory)
            case CountReplay():
                session.counters.replayed += 1
                self._answered = True
            case _:
                assert_never(command)
