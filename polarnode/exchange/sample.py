"""What the engine sampled for one answer so far, beside the parser that reads it.

The rule for whoever edits it: ids, logprobs and version spans are cut together or not at all.
"""

from array import array
from collections.abc import Callable
from typing import Protocol

from attrs import define, evolve, field

from polarnode.conversation import Alternative, Answer, Delta, FinishReason, ModelRequest, Sampling, TokenLogprob, Usage
from polarnode.exchange.events import Rendered
from polarnode.merge.carried import Carry
from polarnode.merge.lineage import Plan
from polarnode.ports import Chunk
from polarnode.records import RoutedExperts, TopLogprobs, VersionSpan, floats, ids
from polarnode.tokens.flow import joined
from polarnode.tokens.parse import Finished


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

    def finish(self, reason: FinishReason) -> Finished: ...


@define(eq=False, kw_only=True)
class Sample:
    """One answer: its plan, what the engine gave so far, and the parser that reads it.

    `spoken` was sampled of it before, for a client that left: it is part of the prompt and of the answer, and never of this turn's sample.
    `answer` is there when it is at its end.
    """

    plan: Plan
    request_id: str
    request: ModelRequest
    rendered: Rendered
    used: Sampling
    parser: AnswerParser
    token_bytes: Callable[[int], bytes]
    spoken: "array[int]" = field(factory=ids)
    carry: Carry = field(factory=Carry)
    ids: "array[int]" = field(factory=ids, init=False)
    logprobs: "array[float]" = field(factory=floats, init=False)
    spans: tuple[VersionSpan, ...] = field(default=(), init=False)
    top: list[TopLogprobs] = field(factory=list, init=False)  # a chunk each, where they are carried
    routed: RoutedExperts | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)
    first_at: float | None = field(default=None, init=False)
    answer: Answer | None = field(default=None, init=False)
    _unshown: list[Delta] = field(factory=list, init=False)  # what was spoken: it leaves with the first chunk, which knows the cached tokens

    constraint_after: int | None = field(init=False)  # the id behind which a constraint begins: the end of a thought that the prompt opened

    def __attrs_post_init__(self) -> None:
        self.constraint_after = self.parser.thought_end
        if self.spoken:
            self._unshown = self.parser.feed(self.spoken)

    @property
    def at_end(self) -> FinishReason | None:
        """Why nothing after what was read belongs to the answer: a stop string, or the one call that was asked for."""
        if self.parser.stopped is not None:
            return "stop_string"
        return "tool_calls" if self.request.one_call and self.parser.calls else None

    def take(self, chunk: Chunk, at: float) -> list[Delta]:
        """Read a chunk up to the token that ends the answer: what is after it was sampled, but is no part of this turn."""
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
        """What the turn carries of a chunk; the last token kept has no experts, for nothing was computed from it."""
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
        return (TokenLogprob(data=self.token_bytes(chunk.ids[place]), logprob=chunk.logprobs[place], top=top),)


def _within(spans: tuple[VersionSpan, ...], length: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `length` tokens."""
    if not spans or spans[-1].end <= length:
        return spans
    return tuple(evolve(span, end=min(span.end, length)) for span in spans if span.start < length)
