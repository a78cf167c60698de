"""One sample of a call: the engine's output so far, the parser that reads it, the order for the engine, and
the turn.

Invariants: ids, logprobs and version spans are cut together or not at all. A turn holds what was planned,
sampled and used, never what should have been.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, Protocol

from attrs import define, evolve, field, frozen

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
from polarnode.merge.attach import Plan
from polarnode.merge.figures import new_messages_of
from polarnode.merge.token_extras import CallExtras, turn_extras
from polarnode.tokens.output_parser import joined
from polarnode.tokens.parser import ParsedAnswer

# The number of notes on one request in its turn, and the characters of each. The requests of ten harnesses
# have fewer than ten notes.
NOTES: Final = 100
MAX_NOTE_CHARS: Final = 500


class AnswerParser(Protocol):
    """The part of `tokens.parser.Parser` that a sample uses."""

    thinking_tokens: int

    @property
    def stopped(self) -> str | None: ...

    @property
    def calls(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def thought_end(self) -> int | None: ...

    def feed(self, ids: "array[int]", logprobs: tuple[TokenLogprob, ...] = (), /) -> list[Delta]: ...

    def finish(self, reason: FinishReason) -> ParsedAnswer: ...


@frozen(kw_only=True)
class PromptRendered:
    """The prompt of a call as ids (int32); an event of its exchange. It ends with `delta`, whose first
    `close_length` ids close the parent's cut sample.

    `notes` say where the prompt differs from what the template would render, or from what the client sent.
    """

    prompt: "array[int]"
    delta: "array[int]"
    close_length: int = 0
    notes: tuple[str, ...] = ()


@define(eq=False, kw_only=True)
class Sample:
    """One answer: its plan, the engine's output so far, and the parser that reads it.

    `resumed_prefix` was sampled earlier, for a client that left. It is part of the prompt and of the answer,
    but never of this turn's sample. `answer` is set when the sample ends.
    """

    plan: Plan
    request_id: str
    request: ModelRequest
    rendered: PromptRendered
    used: Sampling
    parser: AnswerParser
    token_bytes: Callable[[int], bytes]
    resumed_prefix: "array[int]" = field(factory=ids)
    carry: CallExtras = field(factory=CallExtras)
    ids: "array[int]" = field(factory=ids, init=False)
    logprobs: "array[float]" = field(factory=floats, init=False)
    spans: tuple[VersionSpan, ...] = field(default=(), init=False)
    top: list[TopLogprobs] = field(factory=list, init=False)  # one per chunk, if requested
    routed: RoutedExperts | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)
    first_at: float | None = field(default=None, init=False)
    answer: Answer | None = field(default=None, init=False)
    # The deltas of the resumed prefix. They are sent with the first chunk, which has the count of cached
    # tokens.
    _unsent_deltas: list[Delta] = field(factory=list, init=False)
    # The id after which a constraint begins: the end of a thought that the prompt opened.
    constraint_after: int | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.constraint_after = self.parser.thought_end
        if self.resumed_prefix:
            self._unsent_deltas = self.parser.feed(self.resumed_prefix)

    @property
    def at_end(self) -> FinishReason | None:
        """Why the answer ends with the tokens read so far: a stop string, or the one call that was requested.
        None if it does not end.
        """
        if self.parser.stopped is not None:
            return "stop_string"
        return "tool_calls" if self.request.one_call and self.parser.calls else None

    @property
    def full(self) -> bool:
        """Whether the sample has all the tokens that it may have, so that nothing is missing from a cut
        answer.
        """
        return self.used.max_tokens is not None and len(self.ids) >= self.used.max_tokens

    @property
    def reads_each_token(self) -> bool:
        """Whether a token may end the answer before the engine does. Each token must then be read as it
        comes.
        """
        return bool(self.used.stop) or self.request.one_call

    def take(self, chunk: Chunk, at: float) -> list[Delta]:
        """Read a chunk up to the token that ends the answer; later tokens are not part of this turn. Returns
        the deltas to send.
        """
        kept, deltas = self._read(chunk)
        if self.first_at is None and kept:
            self.first_at = at if chunk.first_at is None else chunk.first_at
        self.ids.extend(chunk.ids[:kept])
        self.logprobs.extend(chunk.logprobs[:kept])
        self.spans = _within(chunk.version_spans, len(self.ids))
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        if self.carry.top_logprobs and chunk.top_logprobs is not None and kept:
            self.top.append(chunk.top_logprobs.until(kept).narrowed(self.carry.top_logprobs))
        if chunk.routed is not None:
            # The last token has no experts, because nothing was computed from it.
            self.routed = chunk.routed.between(0, len(self.rendered.prompt) + len(self.ids) - 1)
        if self._unsent_deltas:
            deltas, self._unsent_deltas = joined([*self._unsent_deltas, *deltas]), []
        return deltas

    def finish(self, reason: FinishReason) -> list[Delta]:
        """End the sample. Returns the deltas that are not sent yet."""
        finished = self.parser.finish(reason)
        self.answer = finished.answer
        return [*self._unsent_deltas, *finished.deltas]

    def usage(self) -> Usage:
        """The usage reported to the client: a resumed prefix counts as completion."""
        prompt = len(self.rendered.prompt) - len(self.resumed_prefix)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=len(self.resumed_prefix) + len(self.ids),
            cached_tokens=min(self.cached_tokens, prompt),
            thinking_tokens=self.parser.thinking_tokens,
        )

    def _read(self, chunk: Chunk) -> tuple[int, list[Delta]]:
        """Read the ids of a chunk. They are read one by one only if one of them may be the last or logprobs
        are requested, because that costs 2 us more per token.
        """
        if not self.reads_each_token and self.request.logprobs is None:
            return len(chunk.ids), self.parser.feed(chunk.ids)
        deltas: list[Delta] = []
        for place in range(len(chunk.ids)):
            deltas += self.parser.feed(chunk.ids[place : place + 1], self._logprobs(chunk, place))
            if self.at_end is not None:
                return place + 1, joined(deltas)
        return len(chunk.ids), joined(deltas)

    def _logprobs(self, chunk: Chunk, place: int) -> tuple[TokenLogprob, ...]:
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


# ── order and turn ────────────────────────────────────────────────────────────


def request_ids(call_id: str, count: int) -> Iterator[str]:
    """Yield an id of 32 hex digits per sample of a call; the first is the call's own. All have the same
    length, so that none is a prefix of another.
    """
    yield call_id
    for choice in range(1, count):
        yield blake2b(f"{call_id}.{choice}".encode(), digest_size=16).hexdigest()


def make_order(
    sample: Sample, *, stop_ids: tuple[int, ...], affinity: str, adapter: str = ""
) -> GenerateOrder:
    """The order for the engine to generate a sample."""
    return GenerateOrder(
        request_id=sample.request_id,
        prompt=sample.rendered.prompt,
        sampling=sample.used,
        stop_ids=stop_ids,
        affinity=affinity,
        chain=str(sample.plan.lineage),
        constraint=sample.request.constraint,
        constraint_after=sample.constraint_after,
        top_logprobs=max(sample.request.logprobs or 0, sample.carry.top_logprobs),
        routed_from=sample.carry.routed_from,
        adapter=adapter,
        whole=not sample.request.stream and not sample.reads_each_token,
    )


def turn_of(
    sample: Sample, *, session_id: str, state: TurnState, wall: float, began: float, at: float
) -> Turn:
    """The turn of a sample that ended. A turn without a sampled token has no answer, so that no request
    extends it. `wall` is when the request was received, in seconds since the epoch; `began` is the same time,
    and `at` the sample's end, in monotonic seconds.

    The answer keeps no logprobs: the turn has those of every token, and top logprobs if its task requests
    them.
    """
    plan, request, answer = sample.plan, sample.request, sample.answer
    if answer is None:
        raise ValueError(f"turn {plan.index} is recorded before its sample ended")
    shown = evolve(answer, logprobs=()) if sample.ids else None
    held = turn_extras(sample.carry, sampled=len(sample.ids), top=sample.top, routed=sample.routed)
    return Turn(
        session_id=session_id,
        index=plan.index,
        provider=request.provider,
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
        new_messages=new_messages_of(plan, request.conversation),
        sampled=sample.ids,
        logprobs=sample.logprobs,
        version_spans=sample.spans,
        finish_reason=answer.finish_reason,
        request_key=plan.request_key,
        before_key=plan.before_key,
        message_key=plan.after(shown) if shown is not None and state != "failed" else "",
        answer=shown,
        prefill=plan.prefill,
        asked=request.sampling,
        used=sample.used,
        usage=sample.usage(),
        started=wall,
        first_token_s=None if sample.first_at is None else sample.first_at - began,
        ended_s=at - began,
        notes=(*plan.notes, *_notes(sample), *held.notes),
        top=held.top,
        routed=held.routed,
    )


def _notes(sample: Sample) -> Iterator[str]:
    """The notes on the request for readers of the turn."""
    request, rendered = sample.request, sample.rendered
    if rendered.close_length:
        yield f"closed: the first {rendered.close_length} ids end the parent's cut sample"
    yield from rendered.notes
    yield from _first(sample.parser.notes)
    if request.conversation.tool_choice != "auto":
        yield f"tool_choice {request.conversation.tool_choice!r} was asked: nothing makes the model obey it"
    yield from _first(request.notes)
    if request.ignored:
        yield f"ignored: {', '.join(_first(request.ignored))}"


def _first(lines: Sequence[str]) -> Iterator[str]:
    """The first lines, shortened, and how many follow. A client may cause hundreds of thousands of lines."""
    yield from (
        line if len(line) <= MAX_NOTE_CHARS else line[:MAX_NOTE_CHARS] + "…" for line in lines[:NOTES]
    )
    if len(lines) > NOTES:
        yield f"{len(lines) - NOTES} more"
