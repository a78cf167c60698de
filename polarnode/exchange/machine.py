"""One model request as a machine: told what happened, it says what to do next.

No clock, no socket, no engine: time comes in events as values (monotonic seconds), and whoever waits obeys the commands in their order. The
rules for whoever edits it: every plan is ended exactly once, by `Record` or by `Abandon`; a turn's `Record` stands before the last bytes of
its answer, because a harness acts on them at once; a stream that failed is never ended cleanly; after the end every event is late and answered
with nothing.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import assert_never

from attrs import define, evolve, field, frozen

from polarnode.conversation import Answer, Delta, FinishReason, ModelRequest, Sampling
from polarnode.errors import ContextTooLong, EngineError
from polarnode.exchange.commands import Abandon, Abort, Break, Command, Done, Generate, Record, Render, Send
from polarnode.exchange.events import Asked, ClientLeft, EngineFailed, Event, Produced, Quiet, Rendered, SessionEnded, Unrenderable
from polarnode.exchange.sample import AnswerParser, Sample
from polarnode.ports import Chunk, GenerateOrder
from polarnode.providers.dialect import JSON_TYPE, Call, Dialect, Fault, Reply, StreamWriter
from polarnode.records import Turn, TurnState

SESSION_OVER = Fault(kind="session_over", message="this session is over and its key opens nothing any more: stop")


@frozen(kw_only=True)
class Terms:
    """What one exchange is held to. `sampling` is the task's and wins; `token_room` is what the session may still sample (None: no limit)."""

    session_id: str
    dialect: Dialect
    call: Call
    sampling: Sampling
    context_length: int
    token_room: int | None
    stop_ids: tuple[int, ...]
    new_parser: "Callable[[array[int], tuple[str, ...]], AnswerParser]"  # for a prompt and the stop strings


@define(eq=False)
class Exchange:
    """One request from `Asked` to its end. Every method is synchronous."""

    terms: Terms
    over: bool = field(default=False, init=False)
    _asked: Asked | None = field(default=None, init=False)
    _sample: Sample | None = field(default=None, init=False)
    _writer: StreamWriter | None = field(default=None, init=False)  # None: the answer goes out whole
    _opened: bool = field(default=False, init=False)  # bytes are out: no status can be chosen any more
    _started: bool = field(default=False, init=False)  # the writer's start is out

    def receive(self, event: Event) -> list[Command]:
        """What to do now, in this order."""
        return [] if self.over else list(self._told(event))

    def _told(self, event: Event) -> Iterator[Command]:
        match event:
            case Asked():
                yield from self._begin(event)
            case Rendered():
                yield from self._generate(event)
            case Unrenderable(error=error):
                yield from self._refuse(Fault.of(error))
            case Produced(chunk=chunk, at=at):
                yield from self._produced(chunk, at)
            case EngineFailed(error=error, at=at):
                yield from self._failed(error, at)
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
        yield Render(asked.plan)

    def _generate(self, rendered: Rendered) -> Iterator[Command]:
        length, limit = len(rendered.prompt), self.terms.context_length
        if length >= limit:
            yield from self._refuse(Fault.of(ContextTooLong(prompt_tokens=length, limit=limit)))
            return
        used = self._sampling(limit - length)
        self._sample = Sample(rendered=rendered, used=used, parser=self.terms.new_parser(rendered.prompt, used.stop))
        yield Generate(
            GenerateOrder(
                request_id=self.terms.call.id,
                prompt=rendered.prompt,
                sampling=used,
                stop_ids=self.terms.stop_ids,
                affinity=self.terms.session_id,
            )
        )

    def _sampling(self, room: int) -> Sampling:
        """What is sampled with: the task's word, then the harness's; temperature 1 and all the room there is when nobody says."""
        said = self.terms.sampling.over(self._ask.request.sampling)
        if self.terms.token_room is not None:
            room = max(1, min(room, self.terms.token_room))
        limit = room if said.max_tokens is None else max(1, min(said.max_tokens, room))
        return evolve(said, temperature=1.0 if said.temperature is None else said.temperature, max_tokens=limit)

    def _produced(self, chunk: Chunk, at: float) -> Iterator[Command]:
        sample = self._sampled
        data = self._shown(sample.take(chunk, at))
        if sample.parser.stopped is not None:
            if chunk.finish_reason is None:
                yield Abort(self.terms.call.id)
            yield from self._end("stop_string", data, at)
        elif chunk.finish_reason is not None:
            yield from self._end(chunk.finish_reason, data, at)
        else:
            yield from self._send(data)

    def _end(self, reason: FinishReason, data: bytes, at: float) -> Iterator[Command]:
        """A sample came to its end. One that the engine aborted (for new weights) is answered with what there is, and is partial."""
        self.over = True
        finished = self._sampled.parser.finish(reason)
        usage = self._sampled.usage()
        yield Record(self._turn("partial" if reason == "abort" else "complete", finished.answer, at))
        data += self._shown(list(finished.deltas))
        if self._writer is None:
            body = self.terms.dialect.whole(self.terms.call, [finished.answer], usage)
            yield Reply(status=200, headers=(("content-type", JSON_TYPE),), body=body)
        else:
            yield Send(data + self._writer.end([finished.answer], usage), self._writer.content_type)
            yield Done()

    def _failed(self, error: EngineError, at: float) -> Iterator[Command]:
        self.over = True
        yield Record(self._turn("failed", self._sampled.parser.finish("error").answer, at))
        yield from self._broken(Fault(kind="engine_failed", message=f"the model's engine failed: {error}"))

    def _cut(self, at: float, fault: Fault | None) -> Iterator[Command]:
        """The call ends before its answer. `fault` is what to tell its client, None when that is gone."""
        self.over = True
        if self._sample is not None:
            yield Record(self._turn("partial", self._sample.parser.finish("abort").answer, at))
            yield Abort(self.terms.call.id)
        elif self._asked is not None:
            yield Abandon(self._asked.plan, fault)
        if fault is not None:
            yield from self._broken(fault)

    def _refuse(self, fault: Fault) -> Iterator[Command]:
        self.over = True
        yield Abandon(self._ask.plan, fault)
        yield from self._broken(fault)

    def _broken(self, fault: Fault) -> Iterator[Command]:
        """Say that there is no answer: with a status while nothing is out, else in the stream, which then ends without its end."""
        if self._writer is None or not self._opened:
            yield self.terms.dialect.error(fault)
            return
        data = self._writer.failed(fault)
        if data:
            yield Send(data, self._writer.content_type)
        yield Break()

    def _quiet(self) -> Iterator[Command]:
        if self._writer is not None:
            yield from self._send(self._writer.keep_alive())

    def _shown(self, deltas: list[Delta]) -> bytes:
        """The stream's bytes for what came; they begin with its start."""
        if self._writer is None or self._sample is None:
            return b""
        data = b""
        if not self._started:
            self._started = True
            data = self._writer.start(prompt_tokens=len(self._sample.rendered.prompt), cached_tokens=self._sample.cached_tokens)
        return data + b"".join(map(self._writer.delta, deltas))

    def _send(self, data: bytes) -> Iterator[Command]:
        if data and self._writer is not None:
            self._opened = True
            yield Send(data, self._writer.content_type)

    def _turn(self, state: TurnState, answer: Answer, at: float) -> Turn:
        """The turn as it is now. An answer nobody could have seen a token of is none, so that no request attaches to it."""
        ask, sample, plan = self._ask, self._sampled, self._ask.plan
        shown = answer if sample.ids else None
        return Turn(
            session_id=self.terms.session_id,
            index=plan.index,
            provider=ask.request.provider,
            lineage=plan.lineage,
            parent=plan.parent,
            kind=plan.kind,
            reason=plan.reason,
            role=plan.role,
            state=state,
            prompt_delta=sample.rendered.delta,
            prompt_length=len(sample.rendered.prompt),
            close_length=sample.rendered.close_length,
            sampled=sample.ids,
            logprobs=sample.logprobs,
            version_spans=sample.spans,
            finish_reason=answer.finish_reason,
            request_key=plan.request_key,
            before_key=plan.before_key,
            message_key=plan.after(shown) if shown is not None and state != "failed" else "",
            answer=shown,
            asked=ask.request.sampling,
            used=sample.used,
            usage=sample.usage(),
            started=ask.wall,
            first_token_s=None if sample.first_at is None else sample.first_at - ask.at,
            ended_s=at - ask.at,
            notes=(*plan.notes, *_notes(ask.request, sample)),
        )

    @property
    def _ask(self) -> Asked:
        if self._asked is None:
            raise ValueError("an exchange begins with Asked")
        return self._asked

    @property
    def _sampled(self) -> Sample:
        if self._sample is None:
            raise ValueError("an exchange is rendered before anything is produced")
        return self._sample


def _notes(request: ModelRequest, sample: Sample) -> Iterator[str]:
    """What a reader of the turn should know of how it was asked."""
    if sample.rendered.close_length:
        yield f"closed: the first {sample.rendered.close_length} ids end the parent's cut sample"
    if request.conversation.tool_choice != "auto":
        yield f"tool_choice {request.conversation.tool_choice!r} was asked: nothing makes the model obey it"
    if request.ignored:
        yield f"ignored: {', '.join(request.ignored)}"
