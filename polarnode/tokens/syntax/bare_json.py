"""Llama 3's calls: an answer that is one JSON object of `name` and `parameters`, or several with semicolons between them, without marks.

The rule for whoever edits it: such an answer can only be known at its end, so it is held back while it may still be a call. `Begun` gives up
at the first letter that no call has, because an answer that merely is JSON must be streamed like any other.
"""

from collections.abc import Sequence
from typing import Final

from attrs import define, field

from polarnode.conversation import Json, Tool
from polarnode.tokens.calls import SPACE, ReadCall, arguments_of, read_first
from polarnode.tokens.syntax.body import Body, Cursor

_ARGUMENTS: Final = ("parameters", "arguments")
_KEYS: Final = frozenset(("type", "name", *_ARGUMENTS))  # Llama shows tools with `"type": "function"`, and at times repeats it in a call


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls that an answer is, None if it is anything else."""
    cursor, calls = Cursor(body), []
    while True:
        cursor.skip()
        first = read_first(body.text, cursor.at)
        call = None if first is None else _call(first[0], body.text[cursor.at : first[1]])
        if first is None or call is None:
            return None
        calls.append(call)
        cursor.at = first[1]
        cursor.skip()
        if cursor.over:
            return tuple(calls)
        if not cursor.take(";"):
            return None


def _call(value: dict[str, Json], text: str) -> ReadCall | None:
    name, keys = value.get("name"), [key for key in _ARGUMENTS if key in value]
    if not isinstance(name, str) or not name or len(keys) != 1 or value.get("type", "function") != "function":
        return None
    arguments = arguments_of(value, text, keys[0])
    return None if arguments is None or not value.keys() <= _KEYS else ReadCall(name, arguments)


@define(eq=False)
class Begun:
    """Whether a text, letter by letter, may still be the beginning of such an answer."""

    _keys: set[str] = field(factory=set, init=False)
    _depth: int = field(default=0, init=False)
    _string: bool = field(default=False, init=False)
    _escaped: bool = field(default=False, init=False)
    _key: str | None = field(default=None, init=False)  # the key being written
    _between: str = field(default="object", init=False)  # what stands outside of strings next: an object, its end, a key, a colon or a value

    @property
    def called(self) -> bool:
        """Whether so much was written that it can only have been meant as a call."""
        return "name" in self._keys and not self._keys.isdisjoint(_ARGUMENTS)

    def goes_on(self, text: str) -> bool:
        """Read more; whether it may still be a call."""
        return all(self._quoted(letter) if self._string else self._plain(letter) for letter in text)

    def _quoted(self, letter: str) -> bool:
        if self._escaped or letter == "\\":
            self._escaped = not self._escaped
            return self._key is None  # no call's key is written with an escape
        if letter != '"':
            self._key = None if self._key is None else self._key + letter
            return True
        self._string = False
        if self._key is None:
            return True
        self._keys.add(self._key)
        known, self._key, self._between = self._key in _KEYS, None, "colon"
        return known

    def _plain(self, letter: str) -> bool:
        if letter in SPACE:
            return True
        if self._depth == 0:
            return self._outside(letter)
        if letter == '"':
            self._string = True
            self._key = "" if self._depth == 1 and self._between == "key" else None
            return True
        if self._depth == 1 and self._between == "key":
            return False
        self._inside(letter)
        return True

    def _outside(self, letter: str) -> bool:
        """Before an object, or behind one."""
        if self._between == "object" and letter == "{":
            self._depth, self._between = 1, "key"
            return True
        if self._between == "end" and letter == ";":
            self._between = "object"
            return True
        return False

    def _inside(self, letter: str) -> None:
        if letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self._between = "end" if self._depth == 0 else self._between
        elif letter in ",:" and self._depth == 1:
            self._between = "key" if letter == "," else "value"
