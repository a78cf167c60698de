"""Visible text, thinking and calls in the order they come, and how much of them may be shown already.

Two rules live here and nowhere else. Newlines at the edges of a part are separators the template taught, not text: leading ones are dropped,
trailing ones wait for what follows, and are shown if the same part goes on. A stop string is looked for in visible text only. The parts of
an answer are folded from the very deltas given out, so that a stream can not differ from the whole. Where logprobs are asked for, each
text comes with those of the tokens that wrote it, and they are shown, held back and dropped with it.
"""

from collections.abc import Iterable
from typing import Literal, assert_never

from attrs import Factory, define, field

from polarnode.conversation import Delta, Part, TextDelta, TextPart, ThinkingDelta, ThinkingPart, TokenLogprob, ToolCall

Kind = Literal["text", "thinking"]
Told = tuple[TokenLogprob, ...]  # the tokens that wrote a text; empty where nobody asks for them


@define(eq=False)
class _Writers:
    """Whose text is held: stretches of it from the left, each with the tokens that wrote it. A token belongs to its text's first letter shown."""

    _stretches: list[tuple[int, Told]] = field(factory=list)

    def add(self, length: int, told: Told) -> None:
        if told or self._stretches:
            self._stretches.append((length, told))

    def take(self, length: int) -> Told:
        """The tokens of the first letters, which leave."""
        taken: list[TokenLogprob] = []
        while length > 0 and self._stretches:
            size, told = self._stretches.pop(0)
            taken += told
            if size > length:
                self._stretches.insert(0, (size - length, ()))
            length -= size
        return tuple(taken)

    def clear(self) -> None:
        self._stretches.clear()


@define(eq=False)
class Flow:
    """What was written so far. `stopped` is the stop string that was hit: nothing is taken after it."""

    _stop: tuple[str, ...] = ()
    stopped: str | None = field(default=None, init=False)
    _kind: Kind | None = field(default=None, init=False)
    _held: str = field(default="", init=False)
    _writers: _Writers = field(factory=_Writers, init=False)
    _ready: list[Delta] = field(default=Factory(list), init=False)
    _taken: list[Delta] = field(default=Factory(list), init=False)

    def write(self, kind: Kind, text: str, told: Told = ()) -> None:
        """More of one kind; shown when it can not be a separator or the start of a stop string any more."""
        if self.stopped is not None:
            return
        if kind != self._kind:
            text = text.lstrip("\n")
            if not text:
                return
            self.release()
            self._kind = kind
        self._held += text
        self._writers.add(len(text), told)
        if kind == "text":
            self._watch()
        self._show(self._sure())

    def call(self, call: ToolCall) -> None:
        """A whole call; what was held before it is a separator."""
        if self.stopped is None:
            self.release()
            self._ready.append(call)

    def release(self, *, exactly: bool = False) -> None:
        """End the part being written: what a stop string held back is text, trailing newlines are not, but for text that must stay as it was."""
        self._show(len(self._held if exactly else self._held.rstrip("\n")))
        self._kind, self._held = None, ""
        self._writers.clear()

    def take(self) -> list[Delta]:
        """Everything that became sure since the last time."""
        ready, self._ready = joined(self._ready), []
        self._taken += ready
        return ready

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all that was taken, neighbours of one kind joined."""
        return fold(self._taken)

    @property
    def told(self) -> Told:
        """The tokens of all visible text that was taken."""
        return tuple(token for delta in self._taken if isinstance(delta, TextDelta) for token in delta.logprobs)

    def _watch(self) -> None:
        """Cut at the stop string that is complete first (the longest of those), as a watcher of single characters would."""
        found = [(at + len(stop), -len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            end, length, self.stopped = min(found)
            self._held = self._held[: end + length].rstrip("\n")

    def _sure(self) -> int:
        """How much of what is held can be shown."""
        watched = self._kind == "text" and self.stopped is None
        end = len(self._held) - (max((_begun(self._held, stop) for stop in self._stop), default=0) if watched else 0)
        return len(self._held[:end].rstrip("\n"))

    def _show(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if not text or self._kind is None:
            return
        told = self._writers.take(length)
        self._ready.append(TextDelta(text, told) if self._kind == "text" else ThinkingDelta(text))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text could be the start of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas, neighbours of one kind as one: each costs an event of a stream."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(last, TextDelta) and isinstance(delta, TextDelta):
            out[-1] = TextDelta(last.text + delta.text, last.logprobs + delta.logprobs)
        elif isinstance(last, ThinkingDelta) and isinstance(delta, ThinkingDelta):
            out[-1] = ThinkingDelta(last.text + delta.text)
        else:
            out.append(delta)
    return out


def fold(deltas: list[Delta]) -> tuple[Part, ...]:
    """The parts that deltas add up to."""
    parts: list[Part] = []
    run: list[str] = []
    for place, delta in enumerate(deltas):
        if isinstance(delta, ToolCall):
            parts.append(delta)
            continue
        run.append(delta.text)
        if place + 1 == len(deltas) or type(deltas[place + 1]) is not type(delta):
            parts.append(_part(delta, "".join(run)))
            run = []
    return tuple(parts)


def _part(delta: TextDelta | ThinkingDelta, text: str) -> Part:
    match delta:
        case TextDelta():
            return TextPart(text)
        case ThinkingDelta():
            return ThinkingPart(text)
        case _:
            assert_never(delta)
