"""Keys of messages and paths: exact for the client's text, tolerant of what harnesses change in the node's
answers.

A path is the chain of a request's messages from its root (tools and thinking flag). Its key identifies
everything up to one place, and equal keys mean that the same prompt ids may be used again. `TrailCache`
keeps the paths of the last requests, so that a history that only grows is hashed once.

Invariants: no text of a client is ignored. No change that harnesses make to an answer counts (surrounding
whitespace, JSON spelling, ids, thinking). Volatile lines that a harness puts into its prompt are dropped by
its provider module, never here. A trail keeps a number for each message, not its text. The number covers
everything that a key covers, and uses Python's own string hash, whose seed is random, so a client cannot
construct a message with the number of another.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from json import JSONDecoder
from operator import attrgetter, is_
from typing import Any, Final

import orjson
from attrs import define, field, frozen

from polarnode.core.conversation import Conversation, Message, Tool
from polarnode.core.errors import Refused

# ── trails of earlier requests ────────────────────────────────────────────────────────────────────

# The number of trails kept. The harnesses observed interleave up to four agents, with side calls of one
# request each. A trail of a thousand messages takes some 100 KB.
_MAX_TRAILS: Final = 8

_call = attrgetter("id", "name", "arguments")


@frozen(kw_only=True)
class RequestTrail:
    """The path of a request: a number for each message, and a key before each message and after the last.
    `ours` are the places after assistant messages that were exactly a turn's answer, `odd` the places after
    all other assistant messages, both ascending.
    """

    root: str
    numbers: "array[int]"
    keys: Sequence[str]
    ours: Sequence[int]
    odd: Sequence[int]

    def last_exact_place(self, length: int) -> int:
        """The last place in `ours` among the first `length` messages, or 0."""
        found = bisect_right(self.ours, length)
        return self.ours[found - 1] if found else 0


@define(eq=False)
class TrailCache:
    """The most recent requests of a session, the latest last."""

    _kept: list[RequestTrail] = field(factory=list)

    def longest(self, root: str, numbers: "array[int]") -> tuple[RequestTrail | None, int]:
        """The trail that has the longest common prefix with a request, and the length of that prefix in
        messages.
        """
        best: RequestTrail | None = None
        length = 0
        for trail in reversed(self._kept):
            shared = _shared(trail.numbers, numbers) if trail.root == root else 0
            if shared > length:
                best, length = trail, shared
            if shared == len(numbers):
                break
        return best, length

    def keep(self, trail: RequestTrail) -> None:
        """Remember the path of a request. It replaces a path that it continues."""
        grown = (
            kept
            for kept in self._kept
            if kept.root == trail.root and trail.numbers[: len(kept.numbers)] == kept.numbers
        )
        old = next(grown, None)
        if old is not None:
            self._kept.remove(old)
        self._kept.append(trail)
        del self._kept[:-_MAX_TRAILS]


def message_numbers(messages: Sequence[Message]) -> "array[int]":
    """An int64 for each message that covers everything that its key covers. Most of the time of a plan is
    spent here, so no Python function is called per message.
    """
    return array(
        "q",
        [
            hash(
                (message.role, message.text, *map(_call, message.calls))
                if message.calls
                else (message.role, message.text)
            )
            for message in messages
        ],
    )


def _shared(one: "array[int]", other: "array[int]") -> int:
    """The length of the common prefix of two arrays."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────

# 128 bits: a key represents megabytes of text, and a session makes some thousands of lookups.
_KEY_BYTES: Final = 16
# A label only explains why a path is new. A collision costs a wrong word in a report.
_LABEL: Final = 8
NO_KEY: Final = "-"

# Deeper JSON is compared as it is written. The schemas and arguments observed in seven harnesses nest fewer
# than 12 levels.
_DEEPEST: Final = 100

# A session has a handful of tool lists (main agent, sub-agents, side calls), and a long one some thousand
# calls of some hundred bytes. 8192 calls of 1 KB, each kept in two spellings, are 16 MB at the very most.
_MAX_TOOL_LISTS: Final = 64
# The tool lists themselves that are kept, because some dialects return the same list again: one for each
# agent that harnesses interleave.
_MAX_LATEST_TOOLS: Final = 4
_MAX_CACHED_CALLS: Final = 8192
_MAX_CACHED_CHARS: Final = 1024
# The limit on the characters of longer calls that are kept for the request being read. In a prompt of 128k
# tokens half of the text may be calls.
_MAX_PREPARED_CHARS: Final = 2 << 20

# All characters that Python or JavaScript strips, because harnesses in both languages trim the node's text.
_BLANK_CHARS: Final = "".join(chr(code) for code in range(0x3001) if chr(code).isspace()) + "\ufeff"


@frozen(kw_only=True)
class Path:
    """Where a request stands. `key` (32 hex digits) identifies its whole path. The others are labels (8 hex
    digits, "-" for none) of its first parts.

    `agent` is who asks, `tools` the tool list, `thinking` one of d, y, n, `system` the path to the end of the
    leading system messages, `opening` the path to the first assistant message. `bare` (32 hex digits) is the
    path without the last message if that is a user's, because a harness may remove that message later. `text`
    is kept in a turn as `before_key`.
    """

    agent: str
    tools: str
    thinking: str
    system: str
    opening: str
    key: str
    bare: str = NO_KEY

    @property
    def text(self) -> str:
        return ".".join(
            (self.agent, self.tools, self.thinking, self.system, self.opening, self.key, self.bare)
        )

    @classmethod
    def read(cls, text: str) -> "Path":
        # Journals of 0.1 have no `bare`.
        agent, tools, thinking, system, opening, key, *bare = text.split(".")
        return cls(
            agent=agent,
            tools=tools,
            thinking=thinking,
            system=system,
            opening=opening,
            key=key,
            bare=bare[0] if bare else NO_KEY,
        )


def label(text: str) -> str:
    """A short name for a text: 8 hex digits, or "-" for the empty text."""
    return _digest(text)[:_LABEL] if text else NO_KEY


def tools_key(tools: Sequence[Tool]) -> str:
    """One key for a tool list as a template shows it: in its order, with schemas compared by meaning; "-" for
    no tools.
    """
    if not tools:
        return NO_KEY
    described = [[tool.name, tool.description, tool.parameters] for tool in tools]
    try:
        return _digest(_tagged_text(described, _DEEPEST))
    except (ValueError, RecursionError) as error:
        raise Refused(
            f"the tools' parameters cannot be read ({error}): nest them less deeply", path="$.tools"
        ) from error


def thinking_letter(conversation: Conversation) -> str:
    """The thinking flag as one letter: d (default), y, n."""
    return "d" if conversation.thinking is None else "y" if conversation.thinking else "n"


def root_key(tools: str, thinking: str) -> str:
    """The key with which every path starts. It covers what a template renders at the head of a prompt besides
    messages.
    """
    return _digest(f"{tools}.{thinking}")


def advance(key: str, message: Message, *, canonical: Callable[[str], str] | None = None) -> str:
    """The key of a path after one more message. O(bytes of the message). `canonical` is a memoised
    `canonical_arguments`.
    """
    spell = canonical or _canonical
    if message.role != "assistant":
        return _digest(f"{key}{message.role}|{message.text}")
    parts = [message.text.strip(_BLANK_CHARS)]
    for call in message.calls:
        parts += (call.name, spell(call.arguments))
    return _digest(f"{key}assistant|" + "".join(f"{len(part)}:{part}" for part in parts))


def same_text(one: str, other: str) -> bool:
    """Whether two texts of an answer differ at most in surrounding whitespace."""
    return one.strip(_BLANK_CHARS) == other.strip(_BLANK_CHARS)


def strip_ending(text: str, end: str) -> str | None:
    """The text before an ending, whatever blanks surround the ending. None if the text ends otherwise."""
    whole, bare = text.rstrip(_BLANK_CHARS), end.strip(_BLANK_CHARS)
    return whole.removesuffix(bare) if bare and whole.endswith(bare) else None


def canonical_arguments(arguments: str) -> str:
    """Arguments by meaning: type-tagged, keys sorted, numbers by value (1 equals 1.0, true does not equal 1).
    No text means {}.

    Text that is not JSON, repeats a key or nests too deeply is compared verbatim.
    """
    text = arguments.strip(_BLANK_CHARS)
    try:
        return "=" + _tagged_text(_DECODER.decode(text) if text else {}, _DEEPEST)
    except (ValueError, RecursionError):
        return "!" + arguments


# The number of recent calls whose canonical form is kept. Each call is canonicalised for its turn's key, for
# the check of that key, and in the next request.
_MAX_LATEST_CALLS: Final = 256
_cached_canonical = lru_cache(_MAX_LATEST_CALLS)(canonical_arguments)


def _canonical(arguments: str) -> str:
    short = len(arguments) <= _MAX_CACHED_CHARS
    return _cached_canonical(arguments) if short else canonical_arguments(arguments)


@define(eq=False)
class FingerprintCache:
    """Results that a session's requests need again and again. Each request brings its tools and its whole
    history, and parsing JSON is most of the time of a fingerprint.

    Measured: 12 tools of 31 KB take 310 us to parse and 40 us to look up, a call's arguments 5 us and 0.1 us,
    a message of 120 characters 1.4 us and 0.2 us.
    """

    trails: TrailCache = field(factory=TrailCache)
    _tools: dict[bytes, str] = field(factory=dict)
    _arguments: dict[str, str] = field(factory=dict)
    _prepared: dict[str, str] = field(factory=dict)
    _latest_tools: tuple[tuple[Sequence[Tool], str], ...] = ()  # the tool lists themselves, with their keys
    # The messages of the latest request with their numbers, because dialects return the same objects for
    # messages that a request repeats.
    _latest_numbers: tuple[Sequence[Message], "array[int]"] = ((), array("q"))

    def prepare(self, conversation: Conversation) -> None:
        """Canonicalise the tools and the calls of a request that will be planned. Any thread may do this; a
        call with a million numbers takes a second.
        """
        self.tools_key(conversation.tools)
        long: dict[str, str] = {}
        room = _MAX_PREPARED_CHARS
        for message in conversation.messages:
            for call in message.calls:
                read = self.canonical(call.arguments)
                if len(call.arguments) > _MAX_CACHED_CHARS and len(read) <= room:
                    room -= len(read)
                    long[call.arguments] = read
        self._prepared = long

    def tools_key(self, tools: Sequence[Tool]) -> str:
        """As the function of that name. The list object of an earlier request is recognised."""
        for latest, key in self._latest_tools:
            if latest is tools:
                return key
        key = self._cached_tools_key(tools)
        self._latest_tools = ((tools, key), *self._latest_tools[: _MAX_LATEST_TOOLS - 1])
        return key

    def numbers(self, messages: Sequence[Message]) -> "array[int]":
        """As `message_numbers`. Message objects of the request before are recognised."""
        latest, known = self._latest_numbers
        same = list(map(is_, latest, messages))
        shared = same.index(False) if False in same else len(same)
        numbers = known[:shared] + message_numbers(messages[shared:])
        self._latest_numbers = (messages, numbers)
        return numbers

    def _cached_tools_key(self, tools: Sequence[Tool]) -> str:
        try:
            written = orjson.dumps([[tool.name, tool.description, tool.parameters] for tool in tools])
        except TypeError:  # A list that orjson cannot write (a number beyond 64 bits) is read every time.
            return tools_key(tools)
        name = blake2b(written, digest_size=_KEY_BYTES).digest()
        if name not in self._tools:
            _make_room(self._tools, _MAX_TOOL_LISTS)
            self._tools[name] = tools_key(tools)
        return self._tools[name]

    def canonical(self, arguments: str) -> str:
        """As `canonical_arguments`."""
        cached = self._arguments.get(arguments) or self._prepared.get(arguments)
        if cached is not None:
            return cached
        read = _canonical(arguments)
        if len(arguments) <= _MAX_CACHED_CHARS:
            _make_room(self._arguments, _MAX_CACHED_CALLS)
            self._arguments[arguments] = read
        return read


def _make_room(memo: dict[Any, str], most: int) -> None:
    if len(memo) >= most:
        memo.clear()


def _digest(text: str) -> str:
    # JSON may hold half a surrogate pair, and a message with one is still a message, hence surrogatepass.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).hexdigest()


class _JsonNumber(str):
    """A JSON number by value: its digits without zeros at either end, and an exponent."""

    __slots__ = ()


def _number(literal: str) -> _JsonNumber:
    mantissa, _, exponent = literal.lower().partition("e")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return _JsonNumber("0")
    sign = "-" if mantissa.startswith("-") else ""
    return _JsonNumber(
        f"{sign}{significant}e{int(exponent or 0) - len(fraction) + len(digits) - len(significant)}"
    )


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key stands twice")
    return members


def _no_number(literal: str) -> _JsonNumber:
    raise ValueError(f"{literal} is not JSON")


_DECODER: Final = JSONDecoder(
    object_pairs_hook=_members, parse_int=_number, parse_float=_number, parse_constant=_no_number
)


def _tagged_text(value: object, depth: int) -> str:
    """A value as text that no other value has. Strings and keys carry their length, so nothing inside them
    can pass for structure.
    """
    if depth == 0:
        raise ValueError(f"nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        return (
            "{"
            + "".join(f"{len(key)}:{key}{_tagged_text(value[key], depth - 1)}" for key in sorted(value))
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + "".join([_tagged_text(item, depth - 1) for item in value]) + "]"
    return _scalar_text(value)


def _scalar_text(value: object) -> str:
    if isinstance(value, _JsonNumber):
        return f"#{value};"
    if isinstance(value, str):
        return f'"{len(value)}:{value}'
    if value is None or isinstance(value, bool):
        return {None: "n", True: "t", False: "f"}[value]
    if isinstance(value, (int, float)):
        return f"#{_number(repr(value))};"
    raise ValueError(f"a {type(value).__name__} is not JSON")
