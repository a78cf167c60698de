"""One model call of a session: this module drives the machine `Exchange`. A second task sends a stream.

The two are separate tasks, so that a client that stops reading never delays a record, and a session that
closes never waits for a client. A whole response is recorded before it is sent, after the call has left its
session, so it needs one task. The HTTP connection tells the call when its client has left.

Invariants: whatever ends a call early, its turn is recorded synchronously before anything else is awaited. A
cancellation is swallowed only where this module made it. Leaving the engine's block aborts the generation.

A stream ends properly or not at all: when the app returns without the last body message, Hypercorn cuts the
connection without the terminal chunk, and the client sees a broken stream. Keep-alives are the dialect's own
data events, never SSE comments.
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
    MAX_FREE_REPEATS,
    BookkeepingCommand,
    Break,
    ChunkProduced,
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
    OutgoingCommand,
    PromptRendered,
    Quiet,
    RecordTurn,
    Render,
    RequestReceived,
    RequestRefused,
    Send,
    SessionEnded,
    StartGeneration,
)
from polarnode.gateway.inherited import recorded_chunk
from polarnode.gateway.live_sessions import Attempt, LiveSession, wait_ended
from polarnode.gateway.machine import EMPTY_ANSWER, Exchange, ExchangeSettings
from polarnode.http.asgi import ResponseSender, wait_disconnected
from polarnode.http.connections import ClientDeparture
from polarnode.providers.contract import Dialect, ModelCallInfo, Reply, ServedModel
from polarnode.support.concurrency import ThreadShare
from polarnode.tokens.families import Family
from polarnode.tokens.parser import Parser
from polarnode.tokens.template import Template

# ── sending ─────────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class KeepAlivePacing:
    """The seconds of silence after which a keep-alive is sent: before the first byte, and after it.

    The first is short, so that headers are sent long before any client times out (60 s). It is not zero, so
    that an engine that is down or a context that is too long can still be reported with a status. The second
    is half the shortest time-out measured in a harness.
    """

    opening_s: float = 1.0
    quiet_s: float = 10.0


async def deliver(
    outgoing: "trio.MemoryReceiveChannel[OutgoingCommand]",
    to: ResponseSender,
    *,
    pacing: KeepAlivePacing,
    on_quiet: Callable[[], list[OutgoingCommand]],
) -> None:
    """Send commands until the response ends or the channel closes. `on_quiet` is called when nothing was sent
    for the time in `pacing`; it returns a keep-alive.
    """
    while True:
        commands: list[OutgoingCommand] = []
        # One cancel scope serves many chunks, until a silence, because a new one costs 10 us per chunk.
        with trio.CancelScope() as silence:
            while not commands:
                silence.deadline = trio.current_time() + (pacing.quiet_s if to.opened else pacing.opening_s)
                try:
                    commands = _drain_queued(await outgoing.receive(), outgoing)
                except trio.EndOfChannel:
                    return
                # After the deadline a send in here would be cancelled, so it waits until the scope has
                # exited.
                if not silence.cancel_called:
                    silence.deadline = math.inf
                    if await _sent(commands, to):
                        return
                    commands = []
        if await _sent(commands or on_quiet(), to):
            return


def _drain_queued(
    first: OutgoingCommand, outgoing: "trio.MemoryReceiveChannel[OutgoingCommand]"
) -> list[OutgoingCommand]:
    """The first command and those queued since. Bytes of a stream are joined, so that a busy node makes fewer
    writes. Nothing is sent later than it would be otherwise.
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


async def _sent(commands: list[OutgoingCommand], to: ResponseSender) -> bool:
    """Send these commands. Returns whether one of them ended the response."""
    for command, following in zip_longest(commands, commands[1:]):
        if await _send_command(command, to, last=isinstance(following, EndStream)):
            return True
    return False


async def _send_command(command: OutgoingCommand, to: ResponseSender, *, last: bool) -> bool:
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
class IncomingCall:
    """A request that may be answered: its session, its dialect, and its `key`, by which the same request is
    recognised when it is sent again.
    """

    session: LiveSession
    dialect: Dialect
    request: ModelRequest
    key: str

    @property
    def name(self) -> str:
        """The request's identity. Two requests have the same identity only if either may receive the other's
        response. The agent is part of it, because two agents of a harness may send the same body at once.
        """
        return f"{self.dialect.name} {self.request.hints.get('agent', '')} {self.key}"


# ── model ────────────────────────────────────────────────────────────

T = TypeVar("T")

# The number of rendering threads. Encoding releases the GIL but rendering does not, so more threads would
# only slow the event loop.
RENDER_THREADS: Final = 2
# New text up to this length is rendered in the event loop. That takes about 2 ms, and a tool's result has
# half of this length. Changing threads takes 0.1 ms in an idle node, and in a busy one as long as the
# rendering itself.
MAX_INLINE_CHARS: Final = 8_000
MAX_INLINE_MESSAGES: Final = 100  # A template takes 10 us for each message.


@define(eq=False, kw_only=True)
class Model:
    """The one model of the node: its engine, and its chat template, which is rendered without blocking the
    event loop.

    `context_length` is in tokens; `now` returns seconds since the epoch. Rendering is pure, and may be
    abandoned while its thread still runs, so its arguments must not change meanwhile.
    """

    id: str
    engine: Engine
    template: Template
    tokenizer: Tokenizer
    family: Family
    context_length: int
    now: Callable[[], float]
    pacing: KeepAlivePacing = field(factory=KeepAlivePacing)
    _render_limiter: trio.CapacityLimiter = field(
        factory=lambda: trio.CapacityLimiter(RENDER_THREADS), init=False
    )

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
        """Render a request as ids. They are `history`, the ids of the turn it extends (None for a root),
        followed by the `new` messages. Where the answer continues a last message of the assistant, its text
        `prefill` comes last. `threads` are the session's.

        Raises Refused when the template rejects the messages, and ContextTooLong for a long text beyond the
        context.
        """
        template, conversation = self.template, conversation.before_prefill
        if history is None:
            # The new messages include the thinking that the client left out.
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
        """Run `render` in one of the session's `threads` and return its result. With None it runs here."""
        return render() if threads is None else await ThreadShare(threads, self._render_limiter).run(render)


def _is_long(messages: Sequence[Message], prefill: str) -> bool:
    return (
        len(messages) > MAX_INLINE_MESSAGES
        or len(prefill)
        + sum(
            len(message.text) + len(message.thinking) + sum(len(call.arguments) for call in message.calls)
            for message in messages
        )
        > MAX_INLINE_CHARS
    )


# ── model call ────────────────────────────────────────────────────────────

# The number of chunks queued for a client. Chunks that a slow client has not read wait in the engine's own
# queue.
MAX_OUTBOX_COMMANDS: Final = 16


@define(eq=False)
class ModelCall:
    """One call. `run` returns when its response is sent or its client has left."""

    model: Model
    incoming: IncomingCall
    responder: ResponseSender
    _exchange: Exchange | None = field(default=None, init=False)
    _attempt: Attempt = field(init=False)
    # This scope is cancelled when the client leaves or the session closes.
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    # The turn of a fork's parent whose answer this call repeats.
    _given: Turn | None = field(default=None, init=False)
    # An earlier call with the same request, whose client left.
    _cut: CutCall | None = field(default=None, init=False)
    _answered: bool = field(default=False, init=False)  # whether the response is an answer and not a fault
    _finished: bool = field(default=False, init=False)  # whether the last outgoing command is in the outbox
    # These commands are sent after the call has left its session: a whole response, or what the client of a
    # stream that was cut is still told.
    _last_words: list[OutgoingCommand] = field(factory=list, init=False)
    # The queue of a streamed response, whose chunks a second task sends. It is None for a whole response,
    # which needs no second task.
    _outbox: "trio.MemorySendChannel[OutgoingCommand] | None" = field(default=None, init=False)

    async def run(self, receive: ASGIReceiveCallable, departure: ClientDeparture | None) -> None:
        """Answer the request, whose body has been read. `departure` reports when the client leaves; without
        it the call watches `receive` for that.
        """
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
        outbox, sending = trio.open_memory_channel[OutgoingCommand](MAX_OUTBOX_COMMANDS)
        self._outbox = outbox
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drive_stream, outbox)
            await deliver(sending, self.responder, pacing=self.model.pacing, on_quiet=self._keep_alive)

    def _keep_alive(self) -> list[OutgoingCommand]:
        commands = [] if self._exchange is None else self._exchange.receive(Quiet())
        return [command for command in commands if isinstance(command, Send)]

    # ── driving the machine ─────────────────────────────────────────────

    async def _drive_stream(self, outbox: "trio.MemorySendChannel[OutgoingCommand]") -> None:
        with outbox:  # Closing the outbox ends the task that sends.
            await self._drive()
            for command in self._last_words:
                await outbox.send(command)

    async def _drive(self) -> None:
        if self._attempt.earlier:
            await wait_ended(self._attempt.earlier)
        if self._scope.cancel_called:
            return  # The client left before anything was planned.
        session, samples = self.incoming.session, self.incoming.request.choices
        # There is no checkpoint between here and the plan, so no other call can spend the remaining budget in
        # between.
        wall, undelivered = self.model.now(), self._attempt.take_over()
        if isinstance(undelivered, CutCall) and undelivered.turn is not None and session.token_room == 0:
            kept = session.cut_answer(undelivered.turn, self.responder.request_id, created=int(wall))
            if kept is not None:
                undelivered = kept
                self._keep_books(KeepResponse(kept))
        self._cut = undelivered if isinstance(undelivered, CutCall) else None
        charged = self._is_charged
        messages = self.incoming.request.conversation.messages
        refusal = session.refusal(messages, samples=samples, charged=charged)
        event: Event | None = RequestReceived(
            at=trio.current_time(), wall=wall, refusal=refusal, undelivered=undelivered
        )
        exchange = self._exchange = Exchange(self._exchange_settings(wall))
        with session.call(self._scope, samples=samples if refusal is None else 0, charged=charged):
            try:
                while event is not None:
                    event = await self._carry_out(exchange, exchange.receive(event))
            finally:
                self._settle(exchange)

    @property
    def _is_charged(self) -> bool:
        """Whether the call's turns count against the budget of turns. A request that is repeated because its
        client left counts as one turn together with the earlier call, so it may go on even when the budget is
        spent.
        """
        return self._cut is None or self._cut.repeats >= MAX_FREE_REPEATS

    def _exchange_settings(self, wall: float) -> ExchangeSettings:
        incoming, session = self.incoming, self.incoming.session
        # The exchange must not hold `self`: that cycle would keep the whole session until the garbage
        # collector runs, which is rare.
        model, references, tools = (
            self.model,
            session.lineages.references,
            incoming.request.conversation.tools,
        )
        return ExchangeSettings(
            session_id=session.session_id,
            dialect=incoming.dialect,
            request_key=incoming.key,
            lineages=session.lineages,
            check_plan=session.check_resumed,
            extras=session.carrier.carry,
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
                case Render():
                    event = await self._render_prompt(command)
                case StartGeneration():
                    generations.append(command)
                case RecordTurn() | CountRefusal() | CountPrewarm() | CountReplay() | KeepResponse():
                    self._keep_books(command)
                case _:
                    assert_never(command)
        if len(generations) == 1:
            await self._generate(exchange, generations[0])
        elif generations:
            async with trio.open_nursery() as nursery:
                for generation in generations:
                    nursery.start_soon(self._generate_parallel, exchange, generation, nursery.cancel_scope)
        return event

    async def _put(self, command: OutgoingCommand) -> None:
        """Queue a command for the client, without a checkpoint where there is room, because every chunk was
        already awaited.
        """
        if self._outbox is None:
            self._last_words.append(command)
            return
        try:
            self._outbox.send_nowait(command)
        except trio.WouldBlock:
            await self._outbox.send(command)

    async def _render_prompt(self, command: Render) -> PromptRendered | RequestRefused:
        session, plan = self.incoming.session, command.plan
        try:
            rendered = await self.model.prompt(
                self.incoming.request.conversation,
                plan.new,
                command.history,
                threads=session.threads,
                prefill=command.prefill,
            )
            session.reserve_prompt(
                self._scope, len(rendered.prompt), context_length=self.model.context_length
            )
        except (Refused, Busy) as error:
            return RequestRefused(error=error)
        if session.on_held is not None:
            await session.on_held(plan, self.incoming.request)
        return rendered

    async def _generate_parallel(
        self, exchange: Exchange, generation: StartGeneration, others: trio.CancelScope
    ) -> None:
        """Generate one of several samples. When the whole call is finished, cancel the other samples."""
        await self._generate(exchange, generation)
        # The others are not cancelled sooner, because one of them may be about to queue the last bytes.
        if self._finished:
            others.cancel()

    async def _generate(self, exchange: Exchange, generation: StartGeneration) -> None:
        choice, began = generation.choice, trio.current_time()
        self._given = self.incoming.session.inherited_answer(exchange.plans[choice], generation.order)
        if self._given is not None:
            recorded = recorded_chunk(self._given, generation.order)
            produced = ChunkProduced(chunk=recorded, at=began, choice=choice)
            await self._carry_out(exchange, exchange.receive(produced))
            return
        try:
            async with self.model.engine.generate(generation.order) as chunks:
                self.incoming.session.waited(trio.current_time() - began)
                await self._take(exchange, choice, chunks)
            return
        except (EngineError, EngineRefusal) as error:
            failed: Event = EngineFailed(error=error, at=trio.current_time(), choice=choice)
        except Refused as error:  # The limits of the engine are lower than it reported.
            failed = RequestRefused(error=error)
        await self._carry_out(exchange, exchange.receive(failed))

    async def _take(self, exchange: Exchange, choice: int, chunks: AsyncIterator[Chunk]) -> None:
        try:
            async for chunk in chunks:
                produced = ChunkProduced(chunk=chunk, at=trio.current_time(), choice=choice)
                await self._carry_out(exchange, exchange.receive(produced))
                if exchange.ended(choice):
                    return
        except trio.Cancelled:
            withheld = chunks.withheld() if isinstance(chunks, WithheldChunks) else None
            if withheld is not None:  # It has no finish reason, so no command follows.
                exchange.receive(ChunkProduced(chunk=withheld, at=trio.current_time(), choice=choice))
            # This runs before the engine's block exits, because leaving it may wait for the engine.
            self._settle(exchange)
            raise
        raise EngineError("the sample ended without a reason")

    # ── synchronous bookkeeping ──────────────────────────────────────────────────

    def _settle(self, exchange: Exchange) -> None:
        """Record a call that is cut short. This does nothing when the exchange has ended by itself."""
        now = trio.current_time()
        cut = SessionEnded(at=now) if self.incoming.session.over else ClientLeft(at=now)
        for command in exchange.receive(cut):
            if isinstance(command, Send | EndStream | Break | Reply):
                self._last_words.append(command)
            elif not isinstance(command, Render | StartGeneration):
                self._keep_books(command)

    def _keep_books(self, command: BookkeepingCommand) -> None:
        """Record the turn, count, or keep the response, as the command says. This never awaits."""
        session, incoming = self.incoming.session, self.incoming
        match command:
            case RecordTurn(turn, resumable, owed):
                turn = turn if self._given is None else evolve(turn, used=self._given.used)
                session.commit(turn, charged=self._is_charged)
                if resumable:
                    self._attempt.keep(CutCall(turn.index))
                elif owed:
                    cut = self._cut
                    self._attempt.keep(CutCall() if cut is None else evolve(cut, repeats=cut.repeats + 1))
                elif turn.refused:
                    # A repeated request is then another turn, because the engine refused this one.
                    self._attempt.delivered()
            case KeepResponse(response):
                self._answered = True
                self._attempt.keep(response)
                if len(response.answers) == 1:
                    call = response.call(incoming.request, calls_first=session.calls_first)
                    incoming.dialect.remember(call, response.answers[0], session.memory)
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
