"""One model call of a session, from the request that was read to its recorded turn and its sent response.

`ModelCall.run` is the story: the pure `Exchange` decides what happens, and the call carries out its commands.
It renders the prompt, has the engine generate, records turns and answers the client. A whole response is
recorded before it is sent, after the call has left its session, so it needs one task. A stream is sent by a
second task, so that a client that stops reading never delays a record, and a session that closes never waits
for a client. The HTTP connection tells the call when its client has left.

Invariants: whatever ends a call early, its turn is recorded synchronously before anything else is awaited. A
cancellation is swallowed only where this module made it. Leaving the engine's block aborts the generation.

A stream ends properly or not at all: when the app returns without the last part of its response, the
connection is cut without the terminal chunk, and the client sees a broken stream. Keep-alives are the
dialect's own data events, never SSE comments.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Final, assert_never

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.conversation import Conversation, Message, ModelRequest, Tool
from polarnode.core.errors import Busy, EngineError, EngineRefusal, Refused
from polarnode.core.ports import Engine, Tokenizer, WithheldChunks
from polarnode.core.trajectory import Turn
from polarnode.gateway.exchange import (
    EMPTY_ANSWER,
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
    Exchange,
    ExchangeSettings,
    KeepResponse,
    OutgoingCommand,
    Quiet,
    RecordTurn,
    Render,
    RequestReceived,
    RequestRefused,
    Send,
    SessionEnded,
    StartGeneration,
    UndeliveredResponse,
)
from polarnode.gateway.fork_inheritance import recorded_chunk
from polarnode.gateway.live_sessions import Attempt, LiveSession, wait_ended
from polarnode.gateway.sample import PromptRendered
from polarnode.http.asgi import ResponseSender
from polarnode.providers.contract import Dialect, ModelCallInfo, Reply, ServedModel
from polarnode.support.concurrency import ThreadShare
from polarnode.tokens.families import Family
from polarnode.tokens.parser import Parser
from polarnode.tokens.template import Template

# ── what a call is made of ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class KeepAlivePacing:
    """The seconds of silence after which a keep-alive is sent: before the first byte, and after it.

    The first is short, so that headers are sent long before any client times out (60 s). It is not zero, so
    that an engine that is down or a context that is too long can still be reported with a status. The second
    is half the shortest time-out measured in a harness.
    """

    opening_s: float = 1.0
    quiet_s: float = 10.0


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
        threads: trio.CapacityLimiter | None,
        prefill: str = "",
    ) -> PromptRendered:
        """Render a request as ids. They are `history`, the ids of the turn it extends (None for a root),
        followed by the `new` messages. Where the answer continues a last message of the assistant, its text
        `prefill` comes last. `threads` are the session's, for a prompt that takes long to render; without
        them it is rendered here.

        Raises Refused when the template rejects the messages, and ContextTooLong for a long text beyond the
        context.
        """
        template, limit, conversation = self.template, self.context_length, conversation.before_prefill

        def render() -> PromptRendered:
            if history is None:
                # The new messages include the thinking that the client left out.
                whole = evolve(conversation, messages=new)
                root = template.root(whole, context_length=limit, prefill=prefill)
                return PromptRendered(prompt=root, delta=root, notes=template.notes(new))
            suffix = template.suffix(
                new, conversation=conversation, sampled=history, context_length=limit, prefill=prefill
            )
            return PromptRendered(
                prompt=history + suffix.ids,
                delta=suffix.ids,
                close_length=suffix.close_length,
                notes=suffix.notes,
            )

        is_long = (history is None and conversation.tools) or _is_long(new, prefill)
        if threads is None or not is_long:
            return render()
        return await ThreadShare(threads, self._render_limiter).run(render)

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


# ── the call ────────────────────────────────────────────────────────────

# The number of chunks queued for a client. Chunks that a slow client has not read wait in the engine's own
# queue.
MAX_OUTBOX_COMMANDS: Final = 16


@define(eq=False)
class ModelCall:
    """One call. `run` returns when its response is sent or its client has left."""

    model: Model
    incoming: IncomingCall
    responder: ResponseSender
    _attempt: Attempt = field(init=False)
    # This scope is cancelled when the client leaves or the session closes.
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _exchange: Exchange | None = field(default=None, init=False)
    # An earlier call with the same request, whose client left.
    _cut: CutCall | None = field(default=None, init=False)
    # Whether the call's turns count against the budget of turns.
    _charged: bool = field(default=True, init=False)
    # The turn of a fork's parent whose answer this call repeats.
    _given: Turn | None = field(default=None, init=False)
    _answered: bool = field(default=False, init=False)  # whether the response is an answer and not a fault
    _finished: bool = field(default=False, init=False)  # whether the last outgoing command is queued
    # The queue of a streamed response, whose chunks a second task sends. It is None for a whole response,
    # which needs no second task.
    _outbox: "trio.MemorySendChannel[OutgoingCommand] | None" = field(default=None, init=False)
    # These commands are sent after the call has left its session: a whole response, or what the client of a
    # stream that was cut is still told.
    _last_commands: list[OutgoingCommand] = field(factory=list, init=False)

    async def run(self) -> None:
        """Answer the request, whose body has been read."""
        departure, session = self.responder.writer.departure, self.incoming.session
        with session.retries.attempt(self.incoming.name) as self._attempt:
            departure.then = self._scope.cancel
            if departure.left:
                self._scope.cancel()
            try:
                if self.incoming.request.stream:
                    outbox, queued = trio.open_memory_channel[OutgoingCommand](MAX_OUTBOX_COMMANDS)
                    self._outbox = outbox
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._drive_stream, outbox)
                        await deliver(
                            queued, self.responder, pacing=self.model.pacing, on_quiet=self._keep_alive
                        )
                else:
                    await self._drive()
                    await _send_commands(self._last_commands, self.responder)
            finally:
                departure.then = None
            if self._answered and self.responder.delivered:
                self._attempt.delivered()

    async def _drive_stream(self, outbox: "trio.MemorySendChannel[OutgoingCommand]") -> None:
        with outbox:  # Closing the outbox ends the task that sends.
            await self._drive()
            for command in self._last_commands:
                await outbox.send(command)

    def _keep_alive(self) -> list[OutgoingCommand]:
        commands = [] if self._exchange is None else self._exchange.receive(Quiet())
        return [command for command in commands if isinstance(command, Send)]

    async def _drive(self) -> None:
        """Take the exchange from the request to its end."""
        # 1. Wait for earlier calls with the same request, because this call may take over their response.
        if self._attempt.earlier:
            await wait_ended(self._attempt.earlier)
        if self._scope.cancel_called:
            return  # The client left before anything was planned.
        # 2. Ask the session whether it accepts the call. There is no checkpoint between here and the plan, so
        #    no other call can spend the remaining budget in between.
        session, request, wall = self.incoming.session, self.incoming.request, self.model.now()
        undelivered = self._take_over(wall)
        self._cut = undelivered if isinstance(undelivered, CutCall) else None
        # A request that is repeated because its client left counts as one turn together with the earlier
        # call, so it may go on even when the budget is spent.
        self._charged = self._cut is None or self._cut.repeats >= MAX_FREE_REPEATS
        refusal = session.refusal(
            request.conversation.messages, samples=request.choices, charged=self._charged
        )
        # 3. Do what the exchange decides. The request leads to its prompt, the prompt to the generation, and
        #    its chunks to the response. A call that ends sooner is recorded as it is.
        event: Event | None = RequestReceived(
            at=trio.current_time(), wall=wall, refusal=refusal, undelivered=undelivered
        )
        exchange = self._exchange = Exchange(self._exchange_settings(wall))
        samples = request.choices if refusal is None else 0
        with session.calls.enter(self._scope, samples=samples, charged=self._charged):
            try:
                while event is not None:
                    event = await self._carry_out(exchange, exchange.receive(event))
            finally:
                self._settle(exchange)

    def _take_over(self, wall: float) -> UndeliveredResponse | CutCall | None:
        """What an earlier call with this request did not deliver. A cut turn that cannot go on, because other
        calls took the last tokens of the budget, is taken for the whole answer.
        """
        undelivered, session = self._attempt.take_over(), self.incoming.session
        if not isinstance(undelivered, CutCall) or session.budget.token_room != 0:
            return undelivered
        cut = next((turn for turn in session.lineages.turns if turn.index == undelivered.turn), None)
        if cut is None or cut.answer is None:
            return undelivered
        whole = UndeliveredResponse(
            id=self.responder.request_id,
            created=int(wall),
            signature=session.lineages.references.signature(cut.index),
            answers=(evolve(cut.answer, finish_reason="length"),),
            usage=cut.usage,
        )
        self._keep_books(KeepResponse(whole))
        return whole

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
            token_room=session.budget.token_room,
            stop_ids=model.template.stop_ids,
            new_parser=lambda plan, prompt, stop: model.parser(
                prompt, stop, partial(references.call_id, plan.index), tools
            ),
            token_bytes=model.tokenizer.token_bytes,
            adapter=session.adapter,
        )

    # ── carrying out commands ─────────────────────────────────────────────

    async def _carry_out(self, exchange: Exchange, commands: list[Command]) -> Event | None:
        """Carry out commands in their order. Returns the event that one of them produces, if any."""
        event: Event | None = None
        generations: list[StartGeneration] = []
        for command in commands:
            match command:
                case Send():
                    await self._queue(command)
                case EndStream() | Break() | Reply():
                    await self._queue(command)
                    self._finished = True
                case Render():
                    event = await self._render(command)
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

    async def _queue(self, command: OutgoingCommand) -> None:
        """Queue a command for the client, without a checkpoint where there is room, because every chunk was
        already awaited.
        """
        if self._outbox is None:
            self._last_commands.append(command)
            return
        try:
            self._outbox.send_nowait(command)
        except trio.WouldBlock:
            await self._outbox.send(command)

    async def _render(self, command: Render) -> PromptRendered | RequestRefused:
        session, request, limit = self.incoming.session, self.incoming.request, self.model.context_length
        try:
            rendered = await self.model.prompt(
                request.conversation,
                command.plan.new,
                command.history,
                threads=session.threads,
                prefill=command.prefill,
            )
            session.calls.reserve_prompt(self._scope, len(rendered.prompt), context_length=limit)
        except (Refused, Busy) as error:
            return RequestRefused(error=error)
        if session.before_generation is not None:
            await session.before_generation(command.plan, request)
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
        """Have one sample generated, and pass its chunks to the exchange as they come."""
        session, order, choice = self.incoming.session, generation.order, generation.choice
        began, recorded = trio.current_time(), session.inherited.answers
        if recorded is not None:  # A fork is given its parent's answers again while it asks the same.
            self._given = recorded.take(exchange.plans[choice], order, alone=session.calls.samples == 1)
            if self._given is not None:
                chunk = recorded_chunk(self._given, order)
                produced = ChunkProduced(chunk=chunk, at=began, choice=choice)
                await self._carry_out(exchange, exchange.receive(produced))
                return
        try:
            async with self.model.engine.generate(order) as chunks:
                session.budget.count_wait(trio.current_time() - began)
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
        except (EngineError, EngineRefusal) as error:
            failed: Event = EngineFailed(error=error, at=trio.current_time(), choice=choice)
        except Refused as error:  # The limits of the engine are lower than it reported.
            failed = RequestRefused(error=error)
        await self._carry_out(exchange, exchange.receive(failed))

    def _settle(self, exchange: Exchange) -> None:
        """Record a call that is cut short. This does nothing when the exchange has ended by itself."""
        now = trio.current_time()
        cut = SessionEnded(at=now) if self.incoming.session.calls.closed else ClientLeft(at=now)
        for command in exchange.receive(cut):
            if isinstance(command, Send | EndStream | Break | Reply):
                self._last_commands.append(command)
            elif not isinstance(command, Render | StartGeneration):
                self._keep_books(command)

    def _keep_books(self, command: BookkeepingCommand) -> None:
        """Record the turn, count, or keep the response, as the command says. This never awaits."""
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
                    # A repeated request is then another turn, because the engine refused this one.
                    self._attempt.delivered()
            case KeepResponse(response):
                self._answered = True
                self._attempt.keep(response)
                if len(response.answers) == 1:
                    call = response.call(incoming.request, calls_first=session.calls_first)
                    incoming.dialect.remember(call, response.answers[0], session.earlier.memory)
            case CountRefusal(fault):
                request = incoming.request
                session.budget.count_refusal(fault, request.conversation.messages, samples=request.choices)
            case CountPrewarm(call):
                session.budget.counters.prewarmed += 1
                incoming.dialect.remember(call, EMPTY_ANSWER, session.earlier.memory)
            case CountReplay():
                session.budget.counters.replayed += 1
                self._answered = True
            case _:
                assert_never(command)


# ── sending ─────────────────────────────────────────────────────────────────────────────────────────


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
                    commands = _join_queued(await outgoing.receive(), outgoing)
                except trio.EndOfChannel:
                    return
                # After the deadline a send in here would be cancelled, so it waits until the scope has
                # exited.
                if not silence.cancel_called:
                    silence.deadline = math.inf
                    if await _send_commands(commands, to):
                        return
                    commands = []
        if await _send_commands(commands or on_quiet(), to):
            return


def _join_queued(
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


async def _send_commands(commands: list[OutgoingCommand], to: ResponseSender) -> bool:
    """Send these commands. Returns whether one of them ended the response."""
    for command, following in zip_longest(commands, commands[1:]):
        match command:
            case Send(data, content_type):
                await to.stream(data, content_type, last=isinstance(following, EndStream))
                continue
            case Reply():
                await to.reply(command)
            case EndStream():
                await to.end()
            case Break():
                pass  # returning breaks the connection
            case _:
                assert_never(command)
        return True
    return False
