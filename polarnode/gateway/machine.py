"""What is asked of the engine beside its sampling: a request as it can be kept, and what its reader is told
where it can not.

Pure, and applied to a request before anything is planned or counted, so that both see the same prompt. The
rule for whoever edits it: what a client asked for and does not get is a note, never silence.

Answers that need no engine, in their dialect's words: one that was given before, and the empty one of a
client that only warms up.

The rule for whoever edits it: what is said again is what was said, part for part; only its shape, streamed or
whole, is the new request's.

One model request as a machine: told what happened, it says what to do next.

No clock, no socket, no engine: time comes in events as values (monotonic seconds), and whoever waits obeys
the commands in their order. The rules for whoever edits it: every plan is ended exactly once, by `Record` or
by `Abandon`; a turn's `Record` stands before the last bytes of its answer, because a harness acts on them at
once; a stream that failed is never ended cleanly; after the end every event is late and answered with
nothing.
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
from polarnode.core.errors import ContextTooLong, EngineError
from polarnode.core.ports import Chunk
from polarnode.core.trajectory import TurnState
from polarnode.gateway.call_events import (
    Abandon,
    Abort,
    Answered,
    Asked,
    Break,
    ClientLeft,
    Command,
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
from polarnode.gateway.sample import AnswerParser, Sample, order_of, request_ids, turn_of
from polarnode.merge.attach import Plan
from polarnode.merge.token_extras import CallExtras
from polarnode.providers.contract import JSON_TYPE, Call, Dialect, Fault, LastWords, Reply, StreamWriter

# ── asking ────────────────────────────────────────────────────────────


def as_kept(request: ModelRequest, *, headers: bool = False) -> ModelRequest:
    """The request with a constraint only where it can hold. `headers`: the model writes one before each
    message of its own (gpt-oss).

    An engine holds it from the first token on. So it does not go with tools that may be called nor with
    headers, and thinking that the client did not ask for is switched off, because the constrained text is
    then the whole answer.
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


# ── speaking ────────────────────────────────────────────────────────────

NOTHING = Answer(parts=(), finish_reason="stop")


def speak(dialect: Dialect, call: Call, answers: Sequence[Answer], usage: Usage) -> list[Outgoing]:
    """An answer from its first byte to its last."""
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
    return [Send(b"".join((*data, writer.end(answers, usage))), writer.content_type), Done()]


def silence(dialect: Dialect, call: Call) -> list[Outgoing]:
    """The answer to a request that is not to be generated."""
    return speak(dialect, call, [NOTHING] * call.request.choices, Usage())


def _deltas(answer: Answer) -> Iterator[Delta]:
    told: tuple[TokenLogprob, ...] = answer.logprobs
    for part in answer.parts:
        match part:
            case TextPart(text):
                yield TextDelta(text, told)
                told = ()
            case ThinkingPart(text):
                yield ThinkingDelta(text)
            case ToolCall():
                yield part
            case _:
                assert_never(part)


# ── machine ────────────────────────────────────────────────────────────

SESSION_OVER: Final = Fault(
    kind="session_over", message="this session is over and its key opens nothing any more: stop"
)
CANCELLED: Final = Fault(
    kind="cancelled", message="the generation was ended for new weights or by an operator: ask again"
)


@frozen(kw_only=True)
class Terms:
    """What one exchange is held to. `sampling` is the task's and wins; `token_room` is what the session may
    still sample (None: no limit).

    `carry` is what its turns carry.
    """

    session_id: str
    dialect: Dialect
    call: Call
    sampling: Sampling
    context_length: int
    token_room: int | None
    stop_ids: tuple[int, ...]
    # for a plan's answer, its prompt and the stop strings
    new_parser: "Callable[[Plan, array[int], tuple[str, ...]], AnswerParser]"
    token_bytes: Callable[[int], bytes]
    carry: CallExtras = field(factory=CallExtras)


@define(eq=False)
class Exchange:
    """One request from `Asked` to its end. Every method is synchronous."""

    terms: Terms
    over: bool = field(default=False, init=False)
    _asked: Asked | None = field(default=None, init=False)
    _samples: list[Sample] = field(factory=list, init=False)  # one a choice, once the prompt is there
    _writer: StreamWriter | None = field(default=None, init=False)  # None: the answer goes out whole
    _opened: bool = field(default=False, init=False)  # bytes are out: no status can be chosen any more
    _started: bool = field(default=False, init=False)  # the writer's start is out

    def receive(self, event: Event) -> list[Command]:
        """What to do now, in this order."""
        return [] if self.over else list(self._told(event))

    def ended(self, choice: int) -> bool:
        """Whether nothing more is wanted of this choice."""
        return self.over or self._samples[choice].answer is not None

    def _told(self, event: Event) -> Iterator[Command]:
        match event:
            case Asked():
                yield from self._begin(event)
            case Rendered():
                yield from self._generate(event)
            case Unrenderable(error=error):
                yield from self._refuse(Fault.of(error))
            case Produced(chunk=chunk, at=at, choice=choice):
                yield from self._produced(choice, chunk, at)
            case EngineFailed(error=error, at=at, choice=choice):
                yield from self._failed(choice, error, at)
            case ClientLeft(at=at):
                yield from self._cut(at, None)
            case SessionEnded(at=at):
                yield from self._cut(at, SESSION_OVER)
            case Quiet():
                yield from self._quiet()
            case _:
                assert_never(event)

    def _begin(self, asked: Asked) -> Iterator[Command]:
        self._asked = asked
        if asked.request.stream:
            self._writer = self.terms.dialect.stream(self.terms.call)
        yield Render(asked.plans[0])

    def _generate(self, rendered: Rendered) -> Iterator[Command]:
        length, limit = len(rendered.prompt), self.terms.context_length
        if length >= limit:
            yield from self._refuse(Fault.of(ContextTooLong(prompt_tokens=length, limit=limit)))
            return
        ask, used = self._ask, self._sampling(limit - length)
        before = rendered.prompt[: length - len(ask.spoken)] if ask.spoken else rendered.prompt
        for choice, (plan, request_id) in enumerate(
            zip(ask.plans, request_ids(self.terms.call.id, len(ask.plans)), strict=True)
        ):
            sample = Sample(
                plan=plan,
                request_id=request_id,
                request=ask.request,
                rendered=rendered,
                # one seed for all would make them one answer
                used=used if used.seed is None else evolve(used, seed=used.seed + choice),
                parser=self.terms.new_parser(plan, before, used.stop),
                token_bytes=self.terms.token_bytes,
                spoken=ask.spoken,
                carry=self.terms.carry,
            )
            self._samples.append(sample)
        for choice, sample in enumerate(self._samples):
            yield Generate(
                order_of(sample, stop_ids=self.terms.stop_ids, affinity=self.terms.session_id), choice
            )

    def _sampling(self, room: int) -> Sampling:
        """What is sampled with: the task's word, then the harness's; temperature 1 and all the room there is
        when nobody says.

        What was spoken of the answer before counts against what was asked for; several choices share what the
        session may still sample.
        """
        ask = self._ask
        said = self.terms.sampling.over(ask.request.sampling)
        if self.terms.token_room is not None:
            room = max(1, min(room, self.terms.token_room // len(ask.plans)))
        limit = room if said.max_tokens is None else max(1, min(said.max_tokens - len(ask.spoken), room))
        return evolve(
            said, temperature=1.0 if said.temperature is None else said.temperature, max_tokens=limit
        )

    def _produced(self, choice: int, chunk: Chunk, at: float) -> Iterator[Command]:
        if not self._samples:
            raise ValueError("an exchange is rendered before anything is produced")
        sample = self._samples[choice]
        if sample.answer is not None:
            return
        data = self._shown(choice, sample.take(chunk, at))
        reason = sample.at_end
        if reason is not None and chunk.finish_reason is None:
            yield Abort(sample.request_id)
        reason = reason or chunk.finish_reason
        if reason is None:
            yield from self._send(data)
        elif reason == "abort":
            yield from self._lost(choice, "abort", CANCELLED, at)
        else:
            yield from self._end(choice, reason, data, at)

    def _end(self, choice: int, reason: FinishReason, data: bytes, at: float) -> Iterator[Command]:
        """A sample came to its end."""
        sample = self._samples[choice]
        deltas = sample.finish(reason)
        yield self._record(sample, "complete", at)
        data += self._shown(choice, deltas)
        if any(self._under_way()):
            yield from self._send(data)
        else:
            yield from self._answer(data)

    def _answer(self, data: bytes) -> Iterator[Command]:
        """All samples ended: the answer is whole."""
        self.over = True
        answers = tuple(sample.answer for sample in self._samples if sample.answer is not None)
        call, usage = self.terms.call, self._usage()
        yield Answered(call=call, answers=answers, usage=usage)
        if self._writer is None:
            yield Reply(
                status=200,
                headers=(("content-type", JSON_TYPE),),
                body=self.terms.dialect.whole(call, answers, usage),
            )
        else:
            yield Send(data + self._writer.end(answers, usage), self._writer.content_type)
            yield Done()

    def _failed(self, choice: int, error: EngineError, at: float) -> Iterator[Command]:
        if not self._samples:
            raise ValueError("an exchange is rendered before the engine can fail it")
        if self._samples[choice].answer is None:
            yield from self._lost(
                choice,
                "error",
                Fault(kind="engine_failed", message=f"the model's engine failed: {error}"),
                at,
            )

    def _lost(self, choice: int, reason: FinishReason, fault: Fault, at: float) -> Iterator[Command]:
        """One sample will not come to its end, by no fault of its client: the whole call fails, and the other
        samples are cut.

        What was sampled before an abort (new weights, an operator) is partial: told to ask again, its client
        gets the rest of that answer.
        """
        self.over = True
        for place, sample in list(self._under_way()):
            lost = place == choice and not (reason == "abort" and sample.ids)
            sample.finish(reason if place == choice else "abort")
            yield self._record(sample, "failed" if lost else "partial", at)
            if place != choice:
                yield Abort(sample.request_id)
        yield from self._broken(fault)

    def _cut(self, at: float, fault: Fault | None) -> Iterator[Command]:
        """The call ends before its answer. `fault` is what to tell its client, None when that is gone."""
        self.over = True
        for _, sample in list(self._under_way()):
            sample.finish("abort")
            yield self._record(sample, "partial", at)
            yield Abort(sample.request_id)
        if not self._samples and self._asked is not None:
            yield from self._abandoned(fault)
        if fault is not None:
            yield from self._broken(fault)

    def _refuse(self, fault: Fault) -> Iterator[Command]:
        """No turn comes of it. After the prompt was there only the engine can refuse it, and then none of its
        samples was begun.
        """
        self.over = True
        yield from self._abandoned(fault)
        yield from self._broken(fault)

    def _abandoned(self, fault: Fault | None) -> Iterator[Command]:
        for place, plan in enumerate(self._ask.plans):
            yield Abandon(plan, fault if place == 0 else None)

    def _broken(self, fault: Fault) -> Iterator[Command]:
        """Say that there is no answer: with a status while nothing is out, else in the stream, which then
        ends without its end.
        """
        if self._writer is None or not self._opened:
            yield self.terms.dialect.error(fault)
            return
        said = self._writer.failed(fault)
        data = said.data if isinstance(said, LastWords) else said
        if data:
            yield Send(data, self._writer.content_type, alone=True)
        yield Done() if isinstance(said, LastWords) else Break()

    def _quiet(self) -> Iterator[Command]:
        if self._writer is not None:
            yield from self._send(self._writer.keep_alive())

    def _shown(self, choice: int, deltas: list[Delta]) -> bytes:
        """The stream's bytes for what came; they begin with its start."""
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

    def _under_way(self) -> Iterator[tuple[int, Sample]]:
        return ((choice, sample) for choice, sample in enumerate(self._samples) if sample.answer is None)

    def _record(self, sample: Sample, state: TurnState, at: float) -> Record:
        return Record(turn_of(sample, self._ask, session_id=self.terms.session_id, state=state, at=at))

    def _usage(self) -> Usage:
        """Of all samples: one prompt, and what each of them added."""
        each = [sample.usage() for sample in self._samples]
        return evolve(
            each[0],
            completion_tokens=sum(usage.completion_tokens for usage in each),
            thinking_tokens=sum(usage.thinking_tokens for usage in each),
        )

    @property
    def _ask(self) -> Asked:
        if self._asked is None:
            raise ValueError("an exchange begins with Asked")
        return self._asked
