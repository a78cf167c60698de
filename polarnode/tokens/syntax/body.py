"""The body of a call: its text, where control tokens stand in it, and a cursor over it.

A tag that is a control token of the model means something only where it was sampled as one; spelled in
ordinary tokens it is text. The cursor only moves forward, so that reading is linear in the body.
"""

from collections.abc import Container

from attrs import define, field, frozen

from polarnode.core.conversation import TokenLogprob
from polarnode.tokens.tool_calls import SPACE


@frozen(eq=False)
class CallBody:
    """The text between a call's marks. `marks`: where control tokens begin in it; `control`: the
    control strings of this model.

    `separator` is the spelling of the family's control token between a call's head and its arguments,
    empty where it has none.
    """

    text: str
    marks: frozenset[int] = frozenset()
    control: Container[str] = ()
    separator: str = ""

    def find(self, tag: str, start: int, end: int | None = None) -> int:
        """The position of the next such tag, -1 if there is none before the end."""
        at = self.text.find(tag, start, end)
        while at >= 0 and not self._means(tag, at):
            at = self.text.find(tag, at + 1, end)
        return at

    def has(self, tag: str, at: int) -> bool:
        return self.text.startswith(tag, at) and self._means(tag, at)

    def _means(self, tag: str, at: int) -> bool:
        return at in self.marks or tag not in self.control


@define(eq=False)
class Cursor:
    """A place in a body that only moves forward."""

    body: CallBody
    at: int = 0

    @property
    def over(self) -> bool:
        return self.at >= len(self.body.text)

    @property
    def next(self) -> str:
        """The next letter, empty at the end."""
        return self.body.text[self.at : self.at + 1]

    @property
    def rest(self) -> str:
        return self.body.text[self.at :]

    def skip(self) -> None:
        """Skip blanks."""
        text, size = self.body.text, len(self.body.text)
        while self.at < size and text[self.at] in SPACE:
            self.at += 1

    def take(self, tag: str) -> bool:
        """Skip a tag if it is next; returns whether it was."""
        here = self.body.has(tag, self.at)
        self.at += len(tag) if here else 0
        return here

    def until(self, tag: str, *, without: str = "") -> str | None:
        """The text before the next such tag; moves after the tag. None if there is none, the tag is
        empty, or `without` stands before it.
        """
        end = self.body.find(tag, self.at) if tag else -1
        if end < 0 or (without and self.body.find(without, self.at, end) >= 0):
            return None
        text, self.at = self.body.text[self.at : end], end + len(tag)
        return text


@define(eq=False)
class Region:
    """Held-back text while it is read, with the places of its control tokens and the logprobs of the tokens
    that wrote it.

    The first `hidden` characters are the prompt's, not the sample's, and are never shown.
    """

    logprobs: list[TokenLogprob] = field(factory=list)
    hidden: int = 0
    _pieces: list[str] = field(factory=list)
    _size: int = 0
    _marks: list[int] = field(factory=list)

    def add(self, text: str, logprobs: "list[TokenLogprob]", *, mark: bool = False) -> None:
        if mark:
            self._marks.append(self._size)
        self._pieces.append(text)
        self._size += len(text)
        self.logprobs += logprobs

    def clear(self) -> None:
        self._pieces, self._marks, self.logprobs = [], [], []
        self._size = self.hidden = 0

    def hide(self) -> None:
        """Mark what is held so far as part of the prompt: it is read with the rest and not shown."""
        self.hidden = self._size

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def shown(self) -> str:
        """The sample's own part."""
        return self.text[self.hidden :]

    def body(self, *, control: Container[str], separator: str, start: int) -> CallBody:
        """The held text from a place on, as a body to read."""
        return CallBody(
            self.text[start:],
            frozenset(mark - start for mark in self._marks if mark >= start),
            control,
            separator,
        )
