"""Calls whose arguments are one strict JSON object, which is kept as it was written.

- `json` (Hermes, Qwen3, SmolLM3 and many more): between marks one object of exactly `name` and `arguments`.
- `fenced` (DeepSeek V3, R1): `function`, the separator, the name, and the arguments in a json code fence.
- `separated` (DeepSeek V3.1): the name, the separator, the arguments and nothing else.
- `numbered` (Kimi K2): an id with the name and a number, `functions.name:0`, then the arguments. The id is
  the model's own, and the result is shown under it. The number counts through the whole conversation, so it
  is not the place of the call in its answer.
- `bare_json` (Llama 3): an answer without marks that is one object of `name` and `parameters`, or several
  with semicolons between them. Only its end decides, so it is held back as long as it may be a call.
  `BareCallScanner`
  gives up at the first letter that no call has, so that an answer that merely is JSON is streamed.
"""

from collections.abc import Sequence
from typing import Final

from attrs import define, field

from polarnode.core.conversation import Json, Tool
from polarnode.tokens.syntax.tag_calls import is_name
from polarnode.tokens.tool_calls import (
    SPACE,
    CallBody,
    Cursor,
    ReadCall,
    arguments_of,
    read_first,
    read_object,
)

# ── json ──────────────────────────────────────────────────────────────────────────────────────────


def read_json(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between the marks of a call. None if it is malformed."""
    value = read_object(body.text)
    if value is None or value.keys() != {"name", "arguments"}:
        return None
    name, arguments = value["name"], arguments_of(value, body.text, "arguments")
    if not isinstance(name, str) or not name or arguments is None:
        return None
    return (ReadCall(name, arguments),)


# ── fenced ────────────────────────────────────────────────────────────────────────────────────────

_FENCE_OPEN: Final = "\n```json\n"
_CLOSE: Final = "\n```"


def read_fenced(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between the marks of a call. None if it is malformed."""
    cursor = Cursor(body)
    kind = cursor.until(body.separator)
    name = cursor.until(_FENCE_OPEN)
    if kind is None or kind.strip(SPACE) != "function" or name is None or not is_name(name):
        return None
    written = cursor.rest.rstrip(SPACE)
    arguments = written.removesuffix(_CLOSE)
    if arguments == written or read_object(arguments) is None:
        return None
    return (ReadCall(name, arguments.strip(SPACE)),)


# ── separated ─────────────────────────────────────────────────────────────────────────────────────


def read_separated(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between the marks of a call. None if it is malformed."""
    parted = head_and_arguments(body)
    if parted is None or not is_name(parted[0]):
        return None
    return (ReadCall(*parted),)


def head_and_arguments(body: CallBody) -> tuple[str, str] | None:
    """The text before the separator, and the text of the arguments after it. None if that is no object."""
    cursor = Cursor(body)
    head = cursor.until(body.separator)
    if head is None or read_object(cursor.rest) is None:
        return None
    return head.strip(SPACE), cursor.rest.strip(SPACE)


# ── numbered ──────────────────────────────────────────────────────────────────────────────────────


def read_numbered(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between the marks of a call. None if it is malformed. An id without a name is malformed,
    because the tool would be a guess.
    """
    parted = head_and_arguments(body)
    if parted is None:
        return None
    model_id, arguments = parted
    name, colon, number = model_id.removeprefix("functions.").rpartition(":")
    if not colon or not (number.isascii() and number.isdigit()) or not is_name(name):
        return None
    return (ReadCall(name, arguments, model_id),)


# ── bare json ─────────────────────────────────────────────────────────────────────────────────────

_ARGUMENTS: Final = ("parameters", "arguments")
# Llama is shown tools with `"type": "function"`, and sometimes repeats it in a call.
_CALL_KEYS: Final = frozenset(("type", "name", *_ARGUMENTS))
_MAX_KEY_CHARS: Final = max(map(len, _CALL_KEYS))


def read_bare_json(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls of which a whole answer consists. None if it is anything else."""
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
    return None if arguments is None or not value.keys() <= _CALL_KEYS else ReadCall(name, arguments)


@define(eq=False)
class BareCallScanner:
    """Whether a text, read piece by piece, may still become such an answer."""

    _keys: set[str] = field(factory=set, init=False)
    _depth: int = field(default=0, init=False)
    _string: bool = field(default=False, init=False)
    _escaped: bool = field(default=False, init=False)
    _key: str | None = field(default=None, init=False)  # the key being written
    # what is expected next outside strings: an object, its end, a key, a colon or a value
    _between: str = field(default="object", init=False)

    @property
    def called(self) -> bool:
        """Whether enough was written that the text can only be a call."""
        return "name" in self._keys and not self._keys.isdisjoint(_ARGUMENTS)

    def goes_on(self, text: str) -> bool:
        """Read more text. Returns whether it may still be a call."""
        return all(self._read_quoted(letter) if self._string else self._plain(letter) for letter in text)

    def _read_quoted(self, letter: str) -> bool:
        if self._escaped or letter == "\\":
            self._escaped = not self._escaped
            return self._key is None  # No key of a call is written with an escape.
        if letter != '"':
            self._key = None if self._key is None else self._key + letter
            # A longer key is not that of a call. It is not kept, because adding letters to it would take
            # quadratic time.
            return self._key is None or len(self._key) <= _MAX_KEY_CHARS
        self._string = False
        if self._key is None:
            return True
        self._keys.add(self._key)
        is_key, self._key, self._between = self._key in _CALL_KEYS, None, "colon"
        return is_key

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
        """Read a letter before an object or after one."""
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
