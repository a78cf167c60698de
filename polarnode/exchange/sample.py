"""What the engine sampled for one request so far, beside the parser that reads it.

The rule for whoever edits it: ids, logprobs and version spans are cut together or not at all.
"""

from array import array
from typing import Protocol

from attrs import define, evolve, field

from polarnode.conversation import Delta, FinishReason, Sampling, Usage
from polarnode.exchange.events import Rendered
from polarnode.ports import Chunk
from polarnode.records import VersionSpan, floats, ids
from polarnode.tokens.parse import Finished


class AnswerParser(Protocol):
    """What the machine needs of `tokens.parse.Parser`."""

    thinking_tokens: int

    @property
    def stopped(self) -> str | None: ...

    def feed(self, ids: "array[int]") -> list[Delta]: ...

    def finish(self, reason: FinishReason) -> Finished: ...


@define(eq=False)
class Sample:
    """What the engine gave so far, with the parser that reads it."""

    rendered: Rendered
    used: Sampling
    parser: AnswerParser
    ids: "array[int]" = field(factory=ids)
    logprobs: "array[float]" = field(factory=floats)
    spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    first_at: float | None = None

    def take(self, chunk: Chunk, at: float) -> list[Delta]:
        """Read a chunk up to the token that completes a stop string: what is after it was sampled, but is no part of this turn."""
        kept, deltas = self._read(chunk)
        if self.first_at is None and kept:
            self.first_at = at
        self.ids.extend(chunk.ids[:kept])
        self.logprobs.extend(chunk.logprobs[:kept])
        self.spans = _within(chunk.version_spans, len(self.ids))
        self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        return deltas

    def _read(self, chunk: Chunk) -> tuple[int, list[Delta]]:
        if not self.used.stop:
            return len(chunk.ids), self.parser.feed(chunk.ids)
        deltas: list[Delta] = []
        for place in range(len(chunk.ids)):
            deltas += self.parser.feed(chunk.ids[place : place + 1])
            if self.parser.stopped is not None:
                return place + 1, deltas
        return len(chunk.ids), deltas

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.rendered.prompt),
            completion_tokens=len(self.ids),
            cached_tokens=min(self.cached_tokens, len(self.rendered.prompt)),
            thinking_tokens=self.parser.thinking_tokens,
        )


def _within(spans: tuple[VersionSpan, ...], length: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `length` tokens."""
    return tuple(evolve(span, end=min(span.end, length)) for span in spans if span.start < length)
