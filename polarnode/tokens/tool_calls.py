"""What all syntaxes of tool calls share: strict JSON with the exact text that was written, and the body of a
call with a cursor over it.

Strict JSON means one object without duplicate keys, NaN, infinity, or half of a surrogate pair. Nothing is
repaired, because a repaired call is one that the model never made. A change here changes what counts as
malformed in every syntax, and so what is trained as a call.

If a tag is a control token of the model, it has a meaning only where it was sampled as one; spelled in
ordinary tokens it is text. The cursor only moves forward, so that reading is linear in the body.
"""

import json
import math
from collections.abc import Container, Mapping
from typing import Final, NoReturn

from attrs import define, field, frozen

from polarnode.core.conversation import Json, TokenLogprob

SPACE: Final = " \t\n\r"  # JSON's own blanks; str.strip() would remove more


@frozen
class ReadCall:
    """A call as sampled: the name, the text of the arguments object, and the model's own id for it if its
    syntax has one.
    """

    name: str
    arguments: str
    model_id: str | None = None


def read_value(text: str) -> Json:
    """The JSON value of a text, with keys in their order. Raises ValueError for anything that is
    not strict.
    """
    try:
        value: Json = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check(value, text)
    return value


def read_object(text: str) -> dict[str, Json] | None:
    """The JSON object of a text, with keys in their order. None for anything else or not strict."""
    try:
        value = read_value(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_first(text: str, at: int) -> tuple[dict[str, Json], int] | None:
    """The JSON object that begins at a place of a text, and its end. None if there is no strict one."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        _check(value, text[at:end])
    except (ValueError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) else None


def arguments_of(value: Mapping[str, Json], text: str, key: str) -> str | None:
    """The source text of a call's arguments, the member `key` of the object in `text`. None if they are no
    object.

    Arguments may be written as a string that contains an object, as models do that were trained on doubly
    encoded calls. The result is then the text of that object, as the harness would parse it.
    """
    match value[key]:
        case dict():
            return _member_source(text, key)
        case str() as inner if read_object(inner) is not None:
            return inner.strip(SPACE)
        case _:
            return None


def _check(value: Json, text: str) -> None:
    if "\\u" in text:
        # JSON can spell half a surrogate pair, which is no text.
        json.dumps(value, ensure_ascii=False).encode()


def _member_source(text: str, name: str) -> str:
    """The exact text of one member's value in an object that is known to be well formed."""
    at = text.index("{") + 1
    while True:
        key, at = _DECODER.raw_decode(text, _skip_blanks(text, at))
        start = _skip_blanks(text, _skip_blanks(text, at) + 1)  # skips the colon
        _, end = _DECODER.raw_decode(text, start)
        if key == name:
            return text[start:end]
        at = _skip_blanks(text, end) + 1  # skips the comma


def _skip_blanks(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at


def _unique_members(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is written twice")
    return value


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond a float's range")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_members, parse_float=_finite_float, parse_constant=_no_constant
)


# ── the body of a call ──────────────────────────────────────────────────────────────────────────────


@frozen(eq=False)
class CallBody:
    """The text between the marks of a call. `marks` are the places where control tokens begin in it;
    `control` are the control strings of this model.

    `separator` is the text of the family's control token between a call's head and its arguments; empty if it
    has none.
    """

    text: str
    marks: frozenset[int] = frozenset()
    control: Container[str] = ()
    separator: str = ""

    def find(self, tag: str, start: int, end: int | None = None) -> int:
        """The position of the next such tag; -1 if there is none before the end."""
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
        """Skip a tag if it is next. Returns whether it was."""
        here = self.body.has(tag, self.at)
        self.at += len(tag) if here else 0
        return here

    def until(self, tag: str) -> str | None:
        """The text before the next such tag; moves after the tag. None if there is no such tag or the tag is
        empty.
        """
        end = self.body.find(tag, self.at) if tag else -1
        if end < 0:
            return None
        text, self.at = self.body.text[self.at : end], end + len(tag)
        return text


@frozen
class RegionExtent:
    """How much a region held at one time, to which it can be restored."""

    pieces: int
    size: int
    marks: int
    logprobs: int


@define(eq=False)
class HeldRegion:
    """Text that is held back while it is read, with the places of its control tokens and the logprobs of the
    tokens that wrote it.

    The first `hidden` characters are from the prompt, not the sample, and are never shown.
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
        """Mark what is held so far as part of the prompt. It is read with the rest, but not shown."""
        self.hidden = self._size

    @property
    def spot(self) -> RegionExtent:
        """How much is held now."""
        return RegionExtent(len(self._pieces), self._size, len(self._marks), len(self.logprobs))

    def back(self, spot: RegionExtent) -> None:
        """Restore what was held at that time."""
        del self._pieces[spot.pieces :], self._marks[spot.marks :], self.logprobs[spot.logprobs :]
        self._size = spot.size

    def since(self, spot: RegionExtent) -> list[tuple[str, bool]]:
        """The pieces added since then, and for each whether it was sampled as a control token."""
        at, marks, pieces = spot.size, set(self._marks[spot.marks :]), []
        for piece in self._pieces[spot.pieces :]:
            pieces.append((piece, at in marks and bool(piece)))
            at += len(piece)
        return pieces

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def shown(self) -> str:
        """The part that belongs to the sample."""
        return self.text[self.hidden :]

    def body(self, *, control: Container[str], separator: str, start: int) -> CallBody:
        """The held text from a place on, as a body to read."""
        return CallBody(
            self.text[start:],
            frozenset(mark - start for mark in self._marks if mark >= start),
            control,
            separator,
        )
