"""One model call as a state machine without I/O: it takes events and returns the commands to carry out next.

An event says what happened, a command says what to do next, and all of them are values. The exchange has no
clock, socket or engine: times come in events (monotonic seconds), and the caller carries out the commands in
their order. It decides whether a request is refused, answered with an undelivered response or an empty one,
resumed, or generated, and plans the turns of a generation in the lineages of its session.

Invariants. Every plan is ended exactly once: by `RecordTurn`, or because the exchange abandons it. A turn's
`RecordTurn` precedes the last bytes of its response, because a harness acts on them at once. A stream that
failed is never ended properly, except with bytes that report the failure. After the end every event is late
and yields nothing.

Whoever adds an event adds it to `Event`, and a command to `Command`: mypy then names the code that does not
handle it.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, assert_never

from attrs import define, evolve, field, frozen

from polarnode.core.arrays import ids
from polarnode.core.conversation import (
    Answer,
    Conversation,
    Delta,
    FinishReason,
    ModelRequest,
    Sampling,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.core.errors import Busy, ContextTooLong, EngineError, EngineRefusal, Refused, shortened
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn, TurnState
from polarnode.gateway.sample import (
    MAX_NOTE_CHARS,
    AnswerParser,
    PromptRendered,
    Sample,
    make_order,
    request_ids,
    turn_of,
)
from polarnode.merge.attach import RESUMED, Plan
from polarnode.merge.figures import REFUSED
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import CallExtras
from polarnode.providers.contract import (
    JSON_TYPE,
    STREAM_TYPE,
    Dialect,
    Fault,
    FinalBytes,
    ModelCallInfo,
    Reply,
    StreamWriter,
)

# ── responses that did not reach their client ─────────────────────────────────────

# A client that leaves and repeats its request without having got a token costs no turn this many times.
# Clients ask ten times at most (Claude Code); a client that always left could otherwise ask without end.
MAX_FREE_REPEATS: Final = 16


@frozen(kw_only=True)
class UndeliveredResponse:
    """A whole response that did not reach its client, with the ids it was sent under.

    It does not hold its request, which may be megabytes: the client sends the request again.
    """

    id: str
    created: int
    signature: str
    answers: tuple[Answer, ...]
    usage: Usage

    def call(self, request: ModelRequest, *, calls_first: bool = False) -> ModelCallInfo:
        """The call whose response this is, when it is sent again."""
        return ModelCallInfo(
            request=request,
            id=self.id,
            created=self.created,
            signature=self.signature,
            calls_first=calls_first,
        )


@frozen
class CutCall:
    """A call whose client left before it was answered. `turn` is the index of its cut turn, which the same
    request may resume; None where the request has to be answered from the beginning. `repeats` counts how
    often the request was sent again and its client left again without a further token.
    """

    turn: int | None = None
    repeats: int = 0


# ── events ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class RequestReceived:
    """A request was read. `at` is in monotonic seconds, `wall` in seconds since the epoch.

    `refusal` says why the session accepts no new call; None when it accepts one. `undelivered` is what a
    client that sent this body earlier did not receive: a whole response, or a call that was cut.
    """

    at: float
    wall: float
    refusal: Fault | None = None
    undelivered: UndeliveredResponse | CutCall | None = None


@frozen(kw_only=True)
class RequestRefused:
    """The request is refused by the chat template, because its prompt is too long for the engine, or because
    its session has no room for the prompt now.
    """

    error: Refused | Busy


@frozen(kw_only=True)
class ChunkProduced:
    """The engine sampled some tokens."""

    chunk: Chunk
    at: float
    choice: int = 0


@frozen(kw_only=True)
class EngineFailed:
    """The engine failed this generation, or refused it because of what the request asked for."""

    error: EngineError | EngineRefusal
    at: float
    choice: int = 0


@frozen(kw_only=True)
class ClientLeft:
    """The client disconnected."""

    at: float


@frozen(kw_only=True)
class SessionEnded:
    """The session closed during this call; its client may still be connected."""

    at: float


@frozen
class Quiet:
    """Nothing was sent for so long that the client should get a keep-alive."""


Event = (
    RequestReceived
    | PromptRendered
    | RequestRefused
    | ChunkProduced
    | EngineFailed
    | ClientLeft
    | SessionEnded
    | Quiet
)


# ── commands ────────────────────────────────────────────────────────────


@frozen
class Render:
    """Render the plan as ids. `PromptRendered` or `RequestRefused` follows. Several samples share one prompt,
    and only the plan of the first is rendered.

    `history` are the ids of the turn that the plan extends; None for a root. `prefill` is the text that the
    answer continues, unless the history has it already.
    """

    plan: Plan
    history: "array[int] | None" = None
    prefill: str = ""


@frozen
class StartGeneration:
    """Generate with the engine. `ChunkProduced`, `EngineFailed` or `RequestRefused` follow, until
    `Exchange.ended(choice)`. Several in one list are sampled concurrently.
    """

    order: GenerateOrder
    choice: int = 0


@frozen
class RecordTurn:
    """Record this turn now, without awaiting anything. `resumable`: the same request may resume the turn when
    it is sent again. `owed`: the client got no answer, so the same request, sent again, counts as the same
    turn of the budget.
    """

    turn: Turn
    resumable: bool = False
    owed: bool = False


@frozen
class CountRefusal:
    """Count a refused request."""

    fault: Fault


@frozen
class CountPrewarm:
    """Count a request that asks for no generation; its empty response follows. A later request may refer to
    that response by the id in `call`.
    """

    call: ModelCallInfo


@frozen
class CountReplay:
    """Count an undelivered response that is sent again. The response remains undelivered until its last bytes
    are written.
    """


@frozen
class KeepResponse:
    """Keep a whole response until it is delivered. Its bytes follow."""

    response: UndeliveredResponse


@frozen
class Send:
    """Send bytes of a stream. The first bytes open it with `content_type`. `alone`: write them in a chunk of
    their own, which some clients require.
    """

    data: bytes
    content_type: str = STREAM_TYPE
    alone: bool = False


@frozen
class EndStream:
    """End the stream properly. Either it is whole, or its last bytes report the failure in the way of its
    API.
    """


@frozen
class Break:
    """Break the connection: the stream is not whole, and no client may take it for a whole one."""


# A Reply is a whole response. It only ever comes before the first Send.
OutgoingCommand = Send | EndStream | Break | Reply
BookkeepingCommand = RecordTurn | CountRefusal | CountPrewarm | CountReplay | KeepResponse
Command = Render | StartGeneration | BookkeepingCommand | OutgoingCommand


# ── responses that need no engine ────────────────────────────────────────

EMPTY_ANSWER: Final = Answer(parts=(), finish_reason="stop")


def render_cached_response(
    dialect: Dialect, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage
) -> list[OutgoingCommand]:
    """Render a known response from its first byte to its last, part by part, streamed or whole as the new
    request asks.
    """
    if not call.request.stream:
        body = dialect.whole(call, answers, usage)
        return [Reply(status=200, headers=(("content-type", JSON_TYPE),), body=body)]
    writer = dialect.stream(call)
    data = [writer.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)]
    for choice, answer in enumerate(answers):
        data += [writer.delta(delta, choice=choice) for delta in _answer_deltas(answer)]
    return [Send(b"".join((*data, writer.end(answers, usage))), writer.content_type), EndStream()]


def _answer_deltas(answer: Answer) -> Iterator[Delta]:
    logprobs: tuple[TokenLogprob, ...] = answer.logprobs
    for part in answer.parts:
        match part:
            case TextPart(text):
                yield TextDelta(text, logprobs)
                logprobs = ()
            case ThinkingPart(text):
                yield ThinkingDelta(text)
            case ToolCall():
                yield part
            case _:
                assert_never(part)


# ── exchange ────────────────────────────────────────────────────────────

SESSION_OVER_FAULT: Final = Fault(
    kind="session_over", message="this session is over and its key is no longer accepted: stop"
)
CANCELLED_FAULT: Final = Fault(
    kind="cancelled", message="the generation was ended for new weights or by an operator: ask again"
)


def resumable(request: ModelRequest) -> bool:
    """Whether a cut sample of the request can be resumed. It cannot with a constraint, because an engine
    would begin the constraint again, nor with logprobs, because they are not kept.
    """
    return request.choices == 1 and request.logprobs is None and request.constraint is None


@frozen(kw_only=True)
class ExchangeSettings:
    """The limits and dependencies of one exchange. `sampling` is the task's, and takes precedence over the
    request's. `token_room` is the number of tokens that the session may still sample (None: no limit).

    `lineages` are the session's, in which the turns are planned. `check_plan` raises Refused for a plan that
    the session does not accept. `extras` says which token extras the turns after a parent keep.
    """

    session_id: str
    dialect: Dialect
    call: ModelCallInfo
    request_key: str
    lineages: Lineages
    check_plan: Callable[[Plan, Conversation], None]
    extras: Callable[[int | None], CallExtras]
    sampling: Sampling
    context_length: int
    token_room: int | None
    stop_ids: tuple[int, ...]
    # makes the parser for a plan's answer, given its prompt and the stop strings
    new_parser: "Callable[[Plan, array[int], tuple[str, ...]], AnswerParser]"
    token_bytes: Callable[[int], bytes]
    adapter: str = ""  # the adapter that samples; empty for the base model


@define(eq=False)
class Exchange:
    """One request from `RequestReceived` to its end. Every method is synchronous."""

    settings: ExchangeSettings
    over: bool = field(default=False, init=False)
    plans: tuple[Plan, ...] = field(default=(), init=False)  # one per choice, once the turns are planned
    _requested: RequestReceived | None = field(default=None, init=False)
    # The part of the answer that is already sampled, if the exchange resumes a cut turn. The prompt ends with
    # it.
    _resumed_prefix: "array[int]" = field(factory=ids, init=False)
    _call: ModelCallInfo = field(init=False)  # It has its signature once the turns are planned.
    _samples: list[Sample] = field(factory=list, init=False)  # one per choice, once the prompt is rendered
    _writer: StreamWriter | None = field(default=None, init=False)  # None: the response is sent whole
    _opened: bool = field(default=False, init=False)  # whether bytes were sent, which fixes the status
    _started: bool = field(default=False, init=False)  # whether the writer's start was sent

    def __attrs_post_init__(self) -> None:
        self._call = self.settings.call

    def receive(self, event: Event) -> list[Command]:
        """Handle an event. Returns the commands to carry out now, in this order."""
        commands: Iterator[Command]
        if self.over:
            return []
        match event:
            case ChunkProduced(chunk=chunk, at=at, choice=choice):
                commands = self._take_chunk(choice, chunk, at)
            case RequestReceived():
                commands = self._begin(event)
            case PromptRendered():
                commands = self._generate(event)
            case RequestRefused(error=error):
                commands = self._refuse(Fault.of(error))
            case EngineFailed(error=error, at=at, choice=choice):
                commands = self._fail_sample(choice, error, at)
            case ClientLeft(at=at):
                commands = self._cut(at, None)
            case SessionEnded(at=at):
                commands = self._cut(at, SESSION_OVER_FAULT)
            case Quiet():
                commands = self._send(b"" if self._writer is None else self._writer.keep_alive())
            case _:
                assert_never(event)
        return list(commands)

    def ended(self, choice: int) -> bool:
        """Whether this choice needs no more tokens. If so, the caller stops iterating over its chunks."""
        return self.over or self._samples[choice].answer is not None

    # ── from the request to its generation ──────────────────────────────────

    def _begin(self, requested: RequestReceived) -> Iterator[Command]:
        """Answer without the engine where possible, else plan. A session that is over answers nothing. With a
        spent budget, an undelivered response and a request for no generation are still answered.
        """
        self._requested = requested
        dialect, call = self.settings.dialect, self._call
        refusal, undelivered = requested.refusal, requested.undelivered
        if refusal is not None and refusal.kind == "session_over":
            yield from self._refuse(refusal)
        elif not call.request.generate:
            self.over = True
            yield CountPrewarm(call)
            yield from render_cached_response(dialect, call, [EMPTY_ANSWER] * call.request.choices, Usage())
        elif isinstance(undelivered, UndeliveredResponse):
            self.over = True
            yield CountReplay()
            again = undelivered.call(call.request, calls_first=call.calls_first)
            yield from render_cached_response(dialect, again, undelivered.answers, undelivered.usage)
        elif refusal is not None:
            yield from self._refuse(refusal)
        else:
            yield from self._plan(None if undelivered is None else undelivered.turn)

    def _plan(self, cut_turn: int | None) -> Iterator[Command]:
        """Plan one turn per sample, and ask for their prompt. The first resumes the cut turn where that is
        possible.
        """
        settings, lineages, request = self.settings, self.settings.lineages, self._call.request
        plan: Plan | None = None
        try:
            if cut_turn is not None:
                plan = lineages.resume(cut_turn, total=len(request.conversation.messages))
            if plan is None:
                plan = lineages.plan(
                    request.conversation, request_key=settings.request_key, hints=request.hints
                )
            settings.check_plan(plan, request.conversation)
            self.plans = (plan, *lineages.also(plan, request.choices - 1))
        except Refused as error:
            if plan is not None:
                lineages.abandon_plan(plan)
            yield from self._refuse(Fault.of(error))
            return
        self._resumed_prefix = lineages.resumed_prefix(plan)
        self._call = evolve(self._call, signature=lineages.references.signature(plan.index))
        if request.stream:
            self._writer = settings.dialect.stream(self._call)
        yield Render(
            plan,
            history=None if plan.parent is None else lineages.history(plan),
            # A resumed answer has the prefill in its history already.
            prefill="" if plan.reason == RESUMED else plan.prefill,
        )

    def _generate(self, rendered: PromptRendered) -> Iterator[Command]:
        """Have the engine generate one sample per plan, or refuse a prompt that fills the context."""
        settings, plans, request = self.settings, self.plans, self._call.request
        if not plans:
            raise ValueError("an exchange is planned before its prompt is rendered")
        length, limit = len(rendered.prompt), settings.context_length
        if length >= limit:
            yield from self._refuse(Fault.of(ContextTooLong(prompt_tokens=length, limit=limit)))
            return
        # The sampling is the task's values, then the harness's, then temperature 1 and as many tokens as fit.
        # Several choices share the tokens that the session may still sample. A resumed prefix counts against
        # the requested maximum.
        prefix, room = self._resumed_prefix, limit - length
        if settings.token_room is not None:
            room = max(1, min(room, settings.token_room // len(plans)))
        used = settings.sampling.over(request.sampling)
        used = evolve(
            used,
            temperature=1.0 if used.temperature is None else used.temperature,
            max_tokens=room if used.max_tokens is None else max(1, min(used.max_tokens - len(prefix), room)),
        )
        extras = settings.extras(plans[0].parent)
        before = rendered.prompt[: length - len(prefix)] if prefix else rendered.prompt
        for choice, (plan, request_id) in enumerate(
            zip(plans, request_ids(self._call.id, len(plans)), strict=True)
        ):
            sample = Sample(
                plan=plan,
                request_id=request_id,
                request=request,
                rendered=rendered,
                # With the same seed all answers would be the same.
                used=used if used.seed is None else evolve(used, seed=used.seed + choice),
                parser=settings.new_parser(plan, before, used.stop),
                token_bytes=settings.token_bytes,
                resumed_prefix=prefix,
                carry=extras,
            )
            self._samples.append(sample)
        for choice, sample in enumerate(self._samples):
            order = make_order(
                sample,
                stop_ids=settings.stop_ids,
                affinity=settings.session_id,
                adapter=settings.adapter,
            )
            yield StartGeneration(order, choice)

    # ── from the first chunk to the last bytes ──────────────────────────────────

    def _take_chunk(self, choice: int, chunk: Chunk, at: float) -> Iterator[Command]:
        """Read the next tokens of a sample and send what they show. The turn of a complete sample is
        recorded. After the last sample the response is complete too, and is kept until it is delivered.
        """
        if not self._samples:
            raise ValueError("an exchange is rendered before anything is produced")
        sample = self._samples[choice]
        if sample.answer is not None:
            return
        data = self._stream_bytes(choice, sample.take(chunk, at))
        reason = sample.at_end or chunk.finish_reason
        if reason == "abort" and sample.full:
            reason = "length"
        if reason is None:
            yield from self._send(data)
            return
        if reason == "abort":
            yield from self._fail_call(choice, "abort", CANCELLED_FAULT, at)
            return
        deltas = sample.finish(reason)
        yield self._record(sample, "complete", at)
        data += self._stream_bytes(choice, deltas)
        if any(self._in_progress()):
            yield from self._send(data)
            return
        self.over = True
        whole, call = self._whole_response(), self._call
        yield KeepResponse(whole)
        if self._writer is None:
            yield from render_cached_response(self.settings.dialect, call, whole.answers, whole.usage)
        else:
            yield Send(data + self._writer.end(whole.answers, whole.usage), self._writer.content_type)
            yield EndStream()

    def _whole_response(self) -> UndeliveredResponse:
        """The response with the answers of all samples. Its usage is one prompt, and the sum of their
        completions.
        """
        call, usages = self._call, [sample.usage() for sample in self._samples]
        return UndeliveredResponse(
            id=call.id,
            created=call.created,
            signature=call.signature,
            answers=tuple(sample.answer for sample in self._samples if sample.answer is not None),
            usage=evolve(
                usages[0],
                completion_tokens=sum(usage.completion_tokens for usage in usages),
                thinking_tokens=sum(usage.thinking_tokens for usage in usages),
            ),
        )

    def _stream_bytes(self, choice: int, deltas: list[Delta]) -> bytes:
        """The stream's bytes for these deltas, preceded by the stream's start if that was not sent yet."""
        if self._writer is None:
            return b""
        data = []
        if not self._started:
            self._started = True
            usage = self._samples[choice].usage()
            data.append(
                self._writer.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
            )
        return b"".join((*data, *(self._writer.delta(delta, choice=choice) for delta in deltas)))

    def _send(self, data: bytes) -> Iterator[Command]:
        if data and self._writer is not None:
            self._opened = True
            yield Send(data, self._writer.content_type)

    def _in_progress(self) -> Iterator[tuple[int, Sample]]:
        return ((choice, sample) for choice, sample in enumerate(self._samples) if sample.answer is None)

    def _record(self, sample: Sample, state: TurnState, at: float) -> RecordTurn:
        requested = self._requested
        if requested is None:
            raise ValueError("an exchange begins with RequestReceived")
        turn = turn_of(
            sample,
            session_id=self.settings.session_id,
            state=state,
            wall=requested.wall,
            began=requested.at,
            at=at,
        )
        partial = state == "partial"
        can_resume = partial and bool(turn.sampled) and resumable(sample.request)
        return RecordTurn(turn, resumable=can_resume, owed=partial)

    # ── ends without an answer ──────────────────────────────────

    def _refuse(self, fault: Fault) -> Iterator[Command]:
        """Refuse the request, without a turn. After the prompt is rendered only the engine can refuse it, and
        then none of the samples has begun.
        """
        self.over = True
        self._abandon_plans()
        yield CountRefusal(fault)
        yield from self._report(fault)

    def _fail_sample(self, choice: int, error: EngineError | EngineRefusal, at: float) -> Iterator[Command]:
        """The engine failed this sample, or refused it because of what the request asked for."""
        if not self._samples:
            raise ValueError("an exchange is rendered before the engine can fail it")
        if self._samples[choice].answer is not None:
            return
        if isinstance(error, EngineError):
            fault = Fault(kind="engine_failed", message=f"the model's engine failed: {error}")
        else:
            # Sampling parameters are checked when they are read, so the refusal is about the constraint if
            # there is one.
            constraint, remedy = (
                self._call.request.constraint,
                "mend what the answer must match, or leave it out",
            )
            fault = Fault.of(
                error if constraint is None else Refused(f"{error}: {remedy}", path=constraint.path)
            )
            yield CountRefusal(fault)
        yield from self._fail_call(choice, "error", fault, at)

    def _fail_call(self, choice: int, reason: FinishReason, fault: Fault, at: float) -> Iterator[Command]:
        """End the call when the engine loses or refuses one sample: the whole call fails, and the other
        samples are cut.

        What was sampled before an abort (for new weights, or by an operator) is recorded as partial. The
        client is asked to send the request again, and then gets the rest of that answer.
        """
        self.over = True
        for place, sample in list(self._in_progress()):
            lost = place == choice and not (reason == "abort" and sample.ids)
            sample.finish(reason if place == choice else "abort")
            record = self._record(sample, "failed" if lost else "partial", at)
            if fault.kind == "bad_request":  # The client was answered with a refusal, so no answer is owed.
                record = evolve(record, owed=False)
                if lost:
                    note = f"{REFUSED}: {shortened(fault.message, MAX_NOTE_CHARS)}"
                    turn = evolve(record.turn, refused=True, notes=(*record.turn.notes, note))
                    record = evolve(record, turn=turn)
            yield record
        yield from self._report(fault)

    def _cut(self, at: float, fault: Fault | None) -> Iterator[Command]:
        """End the call before its answer is complete. `fault` is reported to the client; None when the client
        has left.

        A sample that has all its tokens counts as complete, though the engine did not report its end. It
        could not be resumed, and with a spent budget it could not be asked for again.
        """
        self.over, partial = True, False
        for _, sample in list(self._in_progress()):
            partial = partial or not sample.full
            sample.finish("length" if sample.full else "abort")
            yield self._record(sample, "complete" if sample.full else "partial", at)
        if self._samples and not partial and fault is None:
            yield KeepResponse(self._whole_response())
        if not self._samples:
            self._abandon_plans()
        if fault is not None:
            if self.plans and not self._samples:
                yield CountRefusal(fault)
            yield from self._report(fault)

    def _abandon_plans(self) -> None:
        for plan in self.plans:
            self.settings.lineages.abandon_plan(plan)

    def _report(self, fault: Fault) -> Iterator[Command]:
        """Report that there is no answer: by a status as long as nothing is sent, else within the stream,
        which then breaks without its end.
        """
        if self._writer is None or not self._opened:
            yield self.settings.dialect.error(fault)
            return
        failure = self._writer.failed(fault)
        data = failure.data if isinstance(failure, FinalBytes) else failure
        if data:
            yield Send(data, self._writer.content_type, alone=True)
        yield EndStream() if isinstance(failure, FinalBytes) else Break()
