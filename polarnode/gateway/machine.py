"""One model call as a machine without I/O: it takes events and returns the commands to carry out next.

It has no clock, socket or engine. Time comes in events as values (monotonic seconds), and the caller carries
out the commands in their order. It decides whether a request is refused, replayed, resumed, answered with an
empty response, or generated, and plans the turns of a generation in the lineages of its session.

Invariants. Every plan is ended exactly once: by `RecordTurn`, or because the exchange abandons it. A turn's
`RecordTurn` precedes the last bytes of its response, because a harness acts on them at once. A stream that
failed is never ended properly, except with bytes that report the failure. After the end every event is late
and yields nothing.
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
from polarnode.core.errors import ContextTooLong, EngineError, EngineRefusal, Refused, shortened
from polarnode.core.ports import Chunk
from polarnode.core.trajectory import TurnState
from polarnode.gateway.call_events import (
    Break,
    ChunkProduced,
    ClientLeft,
    Command,
    CountPrewarm,
    CountRefusal,
    CountReplay,
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
    UndeliveredResponse,
)
from polarnode.gateway.sample import MAX_NOTE_CHARS, AnswerParser, Sample, make_order, request_ids, turn_of
from polarnode.merge.attach import RESUMED, Plan
from polarnode.merge.figures import REFUSED
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import CallExtras
from polarnode.providers.contract import (
    JSON_TYPE,
    Dialect,
    Fault,
    FinalBytes,
    ModelCallInfo,
    Reply,
    StreamWriter,
)

# ── constraints the engine can enforce ────────────────────────────────


def enforceable_request(request: ModelRequest, *, headers: bool = False) -> ModelRequest:
    """The request, with its constraint only where the engine can enforce it. `headers`: the model writes a
    header before each of its messages (gpt-oss).

    An engine enforces a constraint from the first token on. So a constraint cannot be combined with callable
    tools or with headers. Thinking that the client did not ask for is switched off, because the constrained
    text is the whole answer. A dropped constraint leaves a note. Apply this before planning and counting, so
    that both see the same prompt.
    """
    constraint, conversation = request.constraint, request.conversation
    if constraint is None:
        return request
    why = None
    if conversation.tools and conversation.tool_choice != "none":
        why = "the model may call tools: ask without tools, or with tool_choice none"
    elif headers:
        why = "this model's messages have headers of their own: say in the prompt what the answer must be"
    if why is not None:
        note = f"constraint: the {constraint.kind} was not held, because {why}"
        return evolve(request, constraint=None, notes=(*request.notes, note))
    return (
        request
        if conversation.thinking is not None
        else evolve(request, conversation=evolve(conversation, thinking=False))
    )


def resumable(request: ModelRequest) -> bool:
    """Whether a cut sample of the request can be resumed. It cannot with a constraint, because an engine
    would begin the constraint again, nor with logprobs, because they are not kept.
    """
    return request.choices == 1 and request.logprobs is None and request.constraint is None


# ── responses that need no engine ────────────────────────────────────────

EMPTY_ANSWER: Final = Answer(parts=(), finish_reason="stop")


def render_cached_response(
    dialect: Dialect, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage
) -> list[OutgoingCommand]:
    """Render a known response from its first byte to its last, part by part, streamed or whole as the new
    request asks.
    """
    if not call.request.stream:
        return [
            Reply(
                status=200, headers=(("content-type", JSON_TYPE),), body=dialect.whole(call, answers, usage)
            )
        ]
    writer = dialect.stream(call)
    data = [writer.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)]
    for choice, answer in enumerate(answers):
        data += [writer.delta(delta, choice=choice) for delta in _answer_deltas(answer)]
    return [Send(b"".join((*data, writer.end(answers, usage))), writer.content_type), EndStream()]


def render_empty_response(dialect: Dialect, call: ModelCallInfo) -> list[OutgoingCommand]:
    """Render the response to a request that asks for no generation."""
    return render_cached_response(dialect, call, [EMPTY_ANSWER] * call.request.choices, Usage())


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


# ── machine ────────────────────────────────────────────────────────────

SESSION_OVER_FAULT: Final = Fault(
    kind="session_over", message="this session is over and its key is no longer accepted: stop"
)
CANCELLED_FAULT: Final = Fault(
    kind="cancelled", message="the generation was ended for new weights or by an operator: ask again"
)


def engine_refusal(error: EngineRefusal, request: ModelRequest) -> Fault:
    """The fault of a request that the engine refuses. Sampling parameters are checked when they are read, so
    the refusal is about the constraint if there is one.
    """
    constraint = request.constraint
    if constraint is None:
        return Fault.of(error)
    sentence = f"{error}: mend what the answer must match, or leave it out"
    return Fault.of(Refused(sentence, path=constraint.path))


def refused(record: RecordTurn, fault: Fault) -> RecordTurn:
    """The record of a turn that the engine refused."""
    note = f"{REFUSED}: {shortened(fault.message, MAX_NOTE_CHARS)}"
    turn = evolve(record.turn, refused=True, notes=(*record.turn.notes, note))
    return evolve(record, turn=turn, owed=False)


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

    terms: ExchangeSettings
    over: bool = field(default=False, init=False)
    _requested: RequestReceived | None = field(default=None, init=False)
    plans: tuple[Plan, ...] = field(default=(), init=False)  # one per choice, once the turns are planned
    # The part of the answer that is already sampled, if the exchange resumes a cut turn. The prompt ends with
    # it.
    _resumed_prefix: "array[int]" = field(factory=ids, init=False)
    _call: ModelCallInfo = field(init=False)  # It has its signature once the turns are planned.
    _samples: list[Sample] = field(factory=list, init=False)  # one per choice, once the prompt is rendered
    _writer: StreamWriter | None = field(default=None, init=False)  # None: the response is sent whole
    _opened: bool = field(default=False, init=False)  # whether bytes were sent, which fixes the status
    _started: bool = field(default=False, init=False)  # whether the writer's start was sent

    def __attrs_post_init__(self) -> None:
        self._call = self.terms.call

    def receive(self, event: Event) -> list[Command]:
        """Handle an event. Returns the commands to carry out now, in this order."""
        return [] if self.over else list(self._handle(event))

    def ended(self, choice: int) -> bool:
        """Whether this choice needs no more tokens. If so, the caller stops iterating over its chunks."""
        return self.over or self._samples[choice].answer is not None

    def _handle(self, event: Event) -> Iterator[Command]:
        match event:
            case ChunkProduced(chunk=chunk, at=at, choice=choice):
                yield from self._produced(choice, chunk, at)
            case RequestReceived():
                self._requested = event
                yield from self._begin(event)
            case PromptRendered():
                yield from self._generate(event)
            case RequestRefused(error=error):
                yield from self._refuse(Fault.of(error))
            case EngineFailed(error=error, at=at, choice=choice):
                yield from self._failed(choice, error, at)
            case ClientLeft(at=at):
                yield from self._cut(at, None)
            case SessionEnded(at=at):
                yield from self._cut(at, SESSION_OVER_FAULT)
            case Quiet():
                if self._writer is not None:
                    yield from self._send(self._writer.keep_alive())
            case _:
                assert_never(event)

    def _begin(self, requested: RequestReceived) -> Iterator[Command]:
        """Answer without the engine where possible, else plan. A session that is over answers nothing. With a
        spent budget, an undelivered response and a request for no generation are still answered.
        """
        dialect, call = self.terms.dialect, self._call
        refusal, undelivered = requested.refusal, requested.undelivered
        if refusal is not None and refusal.kind == "session_over":
            yield from self._refuse(refusal)
        elif not call.request.generate:
            self.over = True
            yield CountPrewarm(call)
            yield from render_empty_response(dialect, call)
        elif isinstance(undelivered, UndeliveredResponse):
            self.over = True
            yield CountReplay()
            yield from render_cached_response(
                dialect,
                undelivered.call(call.request, calls_first=call.calls_first),
                undelivered.answers,
                undelivered.usage,
            )
        elif refusal is not None:
            yield from self._refuse(refusal)
        else:
            yield from self._plan(None if undelivered is None else undelivered.turn)

    def _plan(self, cut_turn: int | None) -> Iterator[Command]:
        """Plan one turn per sample, and ask for their prompt. The first resumes the cut turn where that is
        possible.
        """
        terms, lineages, request = self.terms, self.terms.lineages, self._call.request
        plan: Plan | None = None
        try:
            if cut_turn is not None:
                plan = lineages.resume(cut_turn, total=len(request.conversation.messages))
            if plan is None:
                plan = lineages.plan(request.conversation, request_key=terms.request_key, hints=request.hints)
            terms.check_plan(plan, request.conversation)
            self.plans = (plan, *lineages.also(plan, request.choices - 1))
        except Refused as error:
            if plan is not None:
                lineages.abandon_plan(plan)
            yield from self._refuse(Fault.of(error))
            return
        self._resumed_prefix = lineages.resumed_prefix(plan)
        self._call = evolve(self._call, signature=lineages.references.signature(plan.index))
        if request.stream:
            self._writer = terms.dialect.stream(self._call)
        yield Render(
            plan,
            history=None if plan.parent is None else lineages.history(plan),
            # A resumed answer has the prefill in its history already.
            prefill="" if plan.reason == RESUMED else plan.prefill,
        )

    def _generate(self, rendered: PromptRendered) -> Iterator[Command]:
        plans, request = self.plans, self._call.request
        if not plans:
            raise ValueError("an exchange is planned before its prompt is rendered")
        length, limit = len(rendered.prompt), self.terms.context_length
        if length >= limit:
            yield from self._refuse(Fault.of(ContextTooLong(prompt_tokens=length, limit=limit)))
            return
        prefix, used = self._resumed_prefix, self._sampling(limit - length)
        extras = self.terms.extras(plans[0].parent)
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
                parser=self.terms.new_parser(plan, before, used.stop),
                token_bytes=self.terms.token_bytes,
                resumed_prefix=prefix,
                carry=extras,
            )
            self._samples.append(sample)
        for choice, sample in enumerate(self._samples):
            order = make_order(
                sample,
                stop_ids=self.terms.stop_ids,
                affinity=self.terms.session_id,
                adapter=self.terms.adapter,
            )
            yield StartGeneration(order, choice)

    def _sampling(self, room: int) -> Sampling:
        """The sampling to use: the task's values, then the harness's, then temperature 1 and as many tokens
        as fit.

        A resumed prefix counts against the requested maximum. Several choices share the tokens that the
        session may still sample.
        """
        plans, prefix = self.plans, self._resumed_prefix
        merged = self.terms.sampling.over(self._call.request.sampling)
        if self.terms.token_room is not None:
            room = max(1, min(room, self.terms.token_room // len(plans)))
        limit = room if merged.max_tokens is None else max(1, min(merged.max_tokens - len(prefix), room))
        return evolve(
            merged,
            temperature=1.0 if merged.temperature is None else merged.temperature,
            max_tokens=limit,
        )

    def _produced(self, choice: int, chunk: Chunk, at: float) -> Iterator[Command]:
        if not self._samples:
            raise ValueError("an exchange is rendered before anything is produced")
        sample = self._samples[choice]
        if sample.answer is not None:
            return
        data = self._shown(choice, sample.take(chunk, at))
        reason = sample.at_end or chunk.finish_reason
        if reason == "abort" and sample.full:
            reason = "length"
        if reason is None:
            yield from self._send(data)
        elif reason == "abort":
            yield from self._fail_call(choice, "abort", CANCELLED_FAULT, at)
        else:
            yield from self._end(choice, reason, data, at)

    def _end(self, choice: int, reason: FinishReason, data: bytes, at: float) -> Iterator[Command]:
        """Record a complete sample. After the last one the response is complete."""
        sample = self._samples[choice]
        deltas = sample.finish(reason)
        yield self._record(sample, "complete", at)
        data += self._shown(choice, deltas)
        if any(self._in_progress()):
            yield from self._send(data)
            return
        self.over = True
        whole, call = self._whole(), self._call
        yield KeepResponse(whole)
        if self._writer is None:
            yield from render_cached_response(self.terms.dialect, call, whole.answers, whole.usage)
        else:
            yield Send(data + self._writer.end(whole.answers, whole.usage), self._writer.content_type)
            yield EndStream()

    def _whole(self) -> UndeliveredResponse:
        """The response with the answers of all samples."""
        call = self._call
        return UndeliveredResponse(
            id=call.id,
            created=call.created,
            signature=call.signature,
            answers=tuple(sample.answer for sample in self._samples if sample.answer is not None),
            usage=self._usage(),
        )

    def _failed(self, choice: int, error: EngineError | EngineRefusal, at: float) -> Iterator[Command]:
        if not self._samples:
            raise ValueError("an exchange is rendered before the engine can fail it")
        if self._samples[choice].answer is not None:
            return
        if isinstance(error, EngineError):
            fault = Fault(kind="engine_failed", message=f"the model's engine failed: {error}")
            yield from self._fail_call(choice, "error", fault, at)
            return
        fault = engine_refusal(error, self._call.request)
        yield CountRefusal(fault)
        yield from self._fail_call(choice, "error", fault, at)

    def _fail_call(self, choice: int, reason: FinishReason, fault: Fault, at: float) -> Iterator[Command]:
        """End the call when the engine loses or refuses one sample: the whole call fails, and the other
        samples are cut.

        What was sampled before an abort (for new weights, or by an operator) is recorded as partial. The
        client is asked to send the request again, and then gets the rest of that answer.
        """
        self.over, refusal = True, fault.kind == "bad_request"
        for place, sample in list(self._in_progress()):
            lost = place == choice and not (reason == "abort" and sample.ids)
            sample.finish(reason if place == choice else "abort")
            record = self._record(sample, "failed" if lost else "partial", at)
            if refusal:  # The client was answered with a refusal, so no answer is owed.
                record = refused(record, fault) if lost else evolve(record, owed=False)
            yield record
        yield from self._broken(fault)

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
            yield KeepResponse(self._whole())
        if not self._samples:
            self._abandon_plans()
        if fault is not None:
            if self.plans and not self._samples:
                yield CountRefusal(fault)
            yield from self._broken(fault)

    def _refuse(self, fault: Fault) -> Iterator[Command]:
        """Refuse the request, without a turn. After the prompt is rendered only the engine can refuse it, and
        then none of the samples has begun.
        """
        self.over = True
        self._abandon_plans()
        yield CountRefusal(fault)
        yield from self._broken(fault)

    def _abandon_plans(self) -> None:
        for plan in self.plans:
            self.terms.lineages.abandon_plan(plan)

    def _broken(self, fault: Fault) -> Iterator[Command]:
        """Report that there is no answer: by a status as long as nothing is sent, else within the stream,
        which then breaks without its end.
        """
        if self._writer is None or not self._opened:
            yield self.terms.dialect.error(fault)
            return
        failure = self._writer.failed(fault)
        data = failure.data if isinstance(failure, FinalBytes) else failure
        if data:
            yield Send(data, self._writer.content_type, alone=True)
        yield EndStream() if isinstance(failure, FinalBytes) else Break()

    def _shown(self, choice: int, deltas: list[Delta]) -> bytes:
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
        if self._requested is None:
            raise ValueError("an exchange begins with RequestReceived")
        turn = turn_of(sample, self._requested, session_id=self.terms.session_id, state=state, at=at)
        partial = state == "partial"
        can_resume = partial and bool(turn.sampled) and resumable(sample.request)
        return RecordTurn(turn, resumable=can_resume, owed=partial)

    def _usage(self) -> Usage:
        """The usage of all samples together: one prompt, and the sum of their completions."""
        each = [sample.usage() for sample in self._samples]
        return evolve(
            each[0],
            completion_tokens=sum(usage.completion_tokens for usage in each),
            thinking_tokens=sum(usage.thinking_tokens for usage in each),
        )
