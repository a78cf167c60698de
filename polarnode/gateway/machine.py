"""One model call as a machine without I/O: it takes events and returns the commands to carry out next.

It has no clock, socket or engine. Time comes in events as values (monotonic seconds), and the caller carries
out the commands in their order. It decides whether a request is refused, replayed, resumed, answered with an
empty response, or generated.

Invariants. Every plan is ended exactly once, by `RecordTurn` or by `Abandon`. A turn's `RecordTurn` precedes
the last bytes of its response, because a harness acts on them at once. A stream that failed is never ended
properly, except with bytes that report the failure. After the end every event is late and yields nothing.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, assert_never

from attrs import define, evolve, field, frozen

from polarnode.core.conversation import (
    Answer,
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
    Abandon,
    Break,
    ClientLeft,
    Command,
    CountPrewarm,
    CountRefusal,
    CountReplay,
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
    UndeliveredResponse,
)
from polarnode.gateway.sample import NOTE_CHARS, AnswerParser, Sample, order_of, request_ids, turn_of
from polarnode.merge.attach import Plan
from polarnode.merge.figures import REFUSED
from polarnode.providers.contract import (
    JSON_TYPE,
    Dialect,
    Fault,
    LastWords,
    ModelCallInfo,
    Reply,
    StreamWriter,
)

# ── constraints the engine can enforce ────────────────────────────────


def held_request(request: ModelRequest, *, headers: bool = False) -> ModelRequest:
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
) -> list[Outgoing]:
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
        data += [writer.delta(delta, choice=choice) for delta in _deltas(answer)]
    return [Send(b"".join((*data, writer.end(answers, usage))), writer.content_type), EndStream()]


def render_empty_response(dialect: Dialect, call: ModelCallInfo) -> list[Outgoing]:
    """Render the response to a request that asks for no generation."""
    return render_cached_response(dialect, call, [EMPTY_ANSWER] * call.request.choices, Usage())


def _deltas(answer: Answer) -> Iterator[Delta]:
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

SESSION_OVER: Final = Fault(
    kind="session_over", message="this session is over and its key is no longer accepted: stop"
)
CANCELLED: Final = Fault(
    kind="cancelled", message="the generation was ended for new weights or by an operator: ask again"
)


def refusal_of(error: EngineRefusal, request: ModelRequest) -> Fault:
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
    note = f"{REFUSED}: {shortened(fault.message, NOTE_CHARS)}"
    turn = evolve(record.turn, refused=True, notes=(*record.turn.notes, note))
    return evolve(record, turn=turn, owed=False)


@frozen(kw_only=True)
class Terms:
    """The limits and dependencies of one exchange. `sampling` is the task's, and takes precedence over the
    request's. `token_room` is the number of tokens that the session may still sample (None: no limit).
    """

    session_id: str
    dialect: Dialect
    call: ModelCallInfo
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
    """One request from `Requested` to its end. Every method is synchronous."""

    terms: Terms
    over: bool = field(default=False, init=False)
    _requested: Requested | None = field(default=None, init=False)
    _planned: Planned = field(factory=lambda: Planned(plans=()), init=False)
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
            case Produced(chunk=chunk, at=at, choice=choice):
                yield from self._produced(choice, chunk, at)
            case Requested():
                self._requested = event
                yield from self._begin(event)
            case Planned():
                yield from self._plan(event)
            case PromptRendered():
                yield from self._generate(event)
            case RequestRefused(error=error):
                yield from self._refuse(Fault.of(error))
            case EngineFailed(error=error, at=at, choice=choice):
                yield from self._failed(choice, error, at)
            case ClientLeft(at=at):
                yield from self._cut(at, None)
            case SessionEnded(at=at):
                yield from self._cut(at, SESSION_OVER)
            case Quiet():
                if self._writer is not None:
                    yield from self._send(self._writer.keep_alive())
            case _:
                assert_never(event)

    def _begin(self, requested: Requested) -> Iterator[Command]:
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
            yield PlanTurns(resume=None if undelivered is None else undelivered.turn)

    def _plan(self, planned: Planned) -> Iterator[Command]:
        if self._requested is None:
            raise ValueError("an exchange begins with Requested")
        self._planned, self._call = planned, evolve(self._call, signature=planned.signature)
        if self._call.request.stream:
            self._writer = self.terms.dialect.stream(self._call)
        yield Render(planned.plans[0])

    def _generate(self, rendered: PromptRendered) -> Iterator[Command]:
        planned, request = self._planned, self._call.request
        if not planned.plans:
            raise ValueError("an exchange is planned before its prompt is rendered")
        length, limit = len(rendered.prompt), self.terms.context_length
        if length >= limit:
            yield from self._refuse(Fault.of(ContextTooLong(prompt_tokens=length, limit=limit)))
            return
        prefix, used = planned.resumed_prefix, self._sampling(limit - length)
        before = rendered.prompt[: length - len(prefix)] if prefix else rendered.prompt
        for choice, (plan, request_id) in enumerate(
            zip(planned.plans, request_ids(self._call.id, len(planned.plans)), strict=True)
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
                carry=planned.carry,
            )
            self._samples.append(sample)
        for choice, sample in enumerate(self._samples):
            order = order_of(
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
        plans, prefix = self._planned.plans, self._planned.resumed_prefix
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
            yield from self._lost(choice, "abort", CANCELLED, at)
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
            yield from self._lost(choice, "error", fault, at)
            return
        fault = refusal_of(error, self._call.request)
        yield CountRefusal(fault)
        yield from self._lost(choice, "error", fault, at)

    def _lost(self, choice: int, reason: FinishReason, fault: Fault, at: float) -> Iterator[Command]:
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
            yield from self._abandoned(fault)
        if fault is not None:
            yield from self._broken(fault)

    def _refuse(self, fault: Fault) -> Iterator[Command]:
        """Refuse the request, without a turn. After the prompt is rendered only the engine can refuse it, and
        then none of the samples has begun.
        """
        self.over = True
        if self._planned.plans:
            yield from self._abandoned(fault)
        else:
            yield CountRefusal(fault)
        yield from self._broken(fault)

    def _abandoned(self, fault: Fault | None) -> Iterator[Command]:
        for place, plan in enumerate(self._planned.plans):
            yield Abandon(plan, fault if place == 0 else None)

    def _broken(self, fault: Fault) -> Iterator[Command]:
        """Report that there is no answer: by a status as long as nothing is sent, else within the stream,
        which then breaks without its end.
        """
        if self._writer is None or not self._opened:
            yield self.terms.dialect.error(fault)
            return
        failure = self._writer.failed(fault)
        data = failure.data if isinstance(failure, LastWords) else failure
        if data:
            yield Send(data, self._writer.content_type, alone=True)
        yield EndStream() if isinstance(failure, LastWords) else Break()

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
            raise ValueError("an exchange begins with Requested")
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
