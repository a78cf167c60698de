"""What the engine sampled for one answer so far, beside the parser that reads it.

The rule for whoever edits it: ids, logprobs and version spans are cut together or not at all.

What is told of a sample: to the engine, as an order, and to the session, as a turn. Pure functions of it.

The rule for whoever edits it: what stands in a turn is what was planned, what was sampled and what was used,
never what should have been.
"""

from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Protocol

from attrs import define, evolve, field

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import (
    Alternative,
    Answer,
    Delta,
    FinishReason,
    ModelRequest,
    Sampling,
    TokenLogprob,
    Usage,
)
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn, TurnState, VersionSpan
from polarnode.gateway.call_events import Asked, Rendered
from polarnode.merge.attach import Plan
from polarnode.merge.token_extras import CallExtras, turn_extras
from polarnode.merge.transcript import new_messages_of
from polarnode.tokens.output_parser import joined
from polarnode.tokens.parser import ParsedAnswer

# ── sample ────────────────────────────────────────────────────────────


class AnswerParser(Protocol):
    """What the machine needs of `tokens.parse.Parser`."""

    thinking_tokens: int

    @property
    def stopped(self) -> str | None: ...

    @property
    def calls(self) -> int: ...

    @property
    def thought_end(self) -> int | None: ...

    def feed(self, ids: "array[int]", told: tuple[TokenLogprob, ...] = ()) -> list[Delta]: ...

    def finish(self, reason: FinishReason) -> ParsedAnswer: ...


@define(eq=False, kw_only=True)
class Sample:
    """One answer: its plan, what the engine gave so far, and the parser that reads it.

    `spoken` was sampled of it before, for a client that left: it is part of the prompt and of the answer, and
    never of this turn's sample. `answer` is there when it is at its end.
    """

    plan: Plan
    request_id: str
    request: ModelRequest
    rendered: Rendered
    used: Sampling
    parser: AnswerParser
    token_bytes: Callable[[int], bytes]
    spoken: "array[int]" = field(factory=ids)
    carry: CallExtras = field(factory=CallExtras)
    ids: "array[int]" = field(factory=ids, init=False)
    logprobs: "array[float]" = field(factory=floats, init=False)
    spans: tuple[VersionSpan, ...] = field(default=(), init=False)
    top: list[TopLogprobs] = field(factory=list, init=False)  # a chunk each, where they are carried
    routed: RoutedExperts | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)
    first_at: float | None = field(default=None, init=False)
    answer: Answer | None = field(default=None, init=False)
    # what was spoken: it leaves with the first chunk, which knows the cached tokens
    _unshown: list[Delta] = field(factory=list, init=False)

    # the id behind which a constraint begins: the end of a thought that the prompt opened
    constraint_after: int | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.constraint_after = self.parser.thought_end
        if self.spoken:
            self._unshown = self.parser.feed(self.spoken)

    @property
    def at_end(self) -> FinishReason | None:
        """Why nothing after what was read belongs to the answer: a stop string, or the one call that was
        asked for.
        """
        if self.parser.stopped is not None:
            return "stop_string"
        return "tool_calls" if self.request.one_call and self.parser.calls else None

    def take(self, chunk: Chunk, at: float) -> list[Delta]:
        """Read a chunk up to the token that ends the answer: what is after it was sampled, but is no part of
        this turn.
        """
        kept, deltas = self._read(chunk)
        if self.first_at is None and kept:
            self.first_at = at
        self.ids.extend(chunk.ids[:kept])
        self.logprobs.extend(chunk.logprobs[:kept])
        self.spans = _within(chunk.version_spans, len(self.ids))
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        self._keep(chunk, kept)
        if self._unshown:
            deltas, self._unshown = joined([*self._unshown, *deltas]), []
        return deltas

    def _keep(self, chunk: Chunk, kept: int) -> None:
        """What the turn carries of a chunk; the last token kept has no experts, for nothing was computed from
        it.
        """
        if self.carry.top_logprobs and chunk.top_logprobs is not None and kept:
            self.top.append(chunk.top_logprobs.until(kept).narrowed(self.carry.top_logprobs))
        if chunk.routed is not None:
            self.routed = chunk.routed.between(0, len(self.rendered.prompt) + len(self.ids) - 1)

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Read no more. What was not shown yet."""
        finished = self.parser.finish(reason)
        self.answer = finished.answer
        return [*self._unshown, *finished.deltas]

    def usage(self) -> Usage:
        """As the client sees it: what was spoken before is of its answer."""
        prompt = len(self.rendered.prompt) - len(self.spoken)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=len(self.spoken) + len(self.ids),
            cached_tokens=min(self.cached_tokens, prompt),
            thinking_tokens=self.parser.thinking_tokens,
        )

    def _read(self, chunk: Chunk) -> tuple[int, list[Delta]]:
        """Token by token only where one of them may be the last, or each is told of: 2 us a token more."""
        if not self.used.stop and not self.request.one_call and self.request.logprobs is None:
            return len(chunk.ids), self.parser.feed(chunk.ids)
        deltas: list[Delta] = []
        for place in range(len(chunk.ids)):
            deltas += self.parser.feed(chunk.ids[place : place + 1], self._told(chunk, place))
            if self.at_end is not None:
                return place + 1, joined(deltas)
        return len(chunk.ids), joined(deltas)

    def _told(self, chunk: Chunk, place: int) -> tuple[TokenLogprob, ...]:
        if self.request.logprobs is None:
            return ()
        likely = () if chunk.top_logprobs is None else chunk.top_logprobs.row(place)[: self.request.logprobs]
        top = tuple(Alternative(data=self.token_bytes(token), logprob=logprob) for token, logprob in likely)
        return (
            TokenLogprob(data=self.token_bytes(chunk.ids[place]), logprob=chunk.logprobs[place], top=top),
        )


def _within(spans: tuple[VersionSpan, ...], length: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `length` tokens."""
    if not spans or spans[-1].end <= length:
        return spans
    return tuple(evolve(span, end=min(span.end, length)) for span in spans if span.start < length)


# ── told ────────────────────────────────────────────────────────────


def request_ids(call_id: str, count: int) -> Iterator[str]:
    """A name of 32 hex digits for each sample of a call; the first is the call's own. None is the beginning
    of another, as all are as long.
    """
    yield call_id
    for choice in range(1, count):
        yield blake2b(f"{call_id}.{choice}".encode(), digest_size=16).hexdigest()


def order_of(sample: Sample, *, stop_ids: tuple[int, ...], affinity: str) -> GenerateOrder:
    """What the engine is asked for."""
    return GenerateOrder(
        request_id=sample.request_id,
        prompt=sample.rendered.prompt,
        sampling=sample.used,
        stop_ids=stop_ids,
        affinity=affinity,
        constraint=sample.request.constraint,
        constraint_after=sample.constraint_after,
        top_logprobs=max(sample.request.logprobs or 0, sample.carry.top_logprobs),
        routed_from=sample.carry.routed_from,
    )


def turn_of(sample: Sample, asked: Asked, *, session_id: str, state: TurnState, at: float) -> Turn:
    """The turn of a sample that ended. An answer nobody could have seen a token of is none, so that no
    request attaches to it.

    Its logprobs are not kept beside the answer: the turn has those of every token, and alternatives where its
    task asked for them.
    """
    plan, answer = sample.plan, sample.answer
    if answer is None:
        raise ValueError(f"turn {plan.index} is told of before its sample ended")
    shown = evolve(answer, logprobs=()) if sample.ids else None
    held = turn_extras(sample.carry, sampled=len(sample.ids), top=sample.top, routed=sample.routed)
    return Turn(
        session_id=session_id,
        index=plan.index,
        provider=asked.request.provider,
        lineage=plan.lineage,
        parent=plan.parent,
        kind=plan.kind,
        reason=plan.reason,
        role=plan.role,
        state=state,
        prompt_delta=sample.rendered.delta,
        prompt_length=len(sample.rendered.prompt),
        close_length=sample.rendered.close_length,
        matched=plan.matched,
        messages=plan.total,
        heard=new_messages_of(plan, asked.request.conversation),
        sampled=sample.ids,
        logprobs=sample.logprobs,
        version_spans=sample.spans,
        finish_reason=answer.finish_reason,
        request_key=plan.request_key,
        before_key=plan.before_key,
        message_key=plan.after(shown) if shown is not None and state != "failed" else "",
        answer=shown,
        asked=asked.request.sampling,
        used=sample.used,
        usage=sample.usage(),
        started=asked.wall,
        first_token_s=None if sample.first_at is None else sample.first_at - asked.at,
        ended_s=at - asked.at,
        notes=(*plan.notes, *_notes(sample), *held.notes),
        top=held.top,
        routed=held.routed,
    )


def _notes(sample: Sample) -> Iterator[str]:
    """What a reader of the turn should know of how it was asked."""
    request, rendered = sample.request, sample.rendered
    if rendered.close_length:
        yield f"closed: the first {rendered.close_length} ids end the parent's cut sample"
    yield from rendered.notes
    if request.conversation.tool_choice != "auto":
        yield f"tool_choice {request.conversation.tool_choice!r} was asked: nothing makes the model obey it"
    yield from request.notes
    if request.ignored:
        yield f"ignored: {', '.join(request.ignored)}"
