"""What the providers' shapes share: reading a body, refusing a field, and joining parts of text.

A provider's shapes are attrs classes of the JSON that it accepts. `core.codec.json.structure` reads them and
reports the path of what does not fit. Unknown fields are always accepted, because a 400 makes Claude Code
change its prompt and ends most other harnesses. Content that the model cannot see is never accepted. A
validator raises `Refused`: without a path it names the object, with a path a field of it.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any, TypeVar, cast

import attrs
import numpy
import orjson

from polarnode.core.codec.json import dump_json, read_json, structure
from polarnode.core.codec.limits import COUNT, MAX_STOP_CHARS, SEED, STOPS
from polarnode.core.conversation import Json, Message
from polarnode.core.errors import Refused
from polarnode.providers.read_parts import PartsCache

T = TypeVar("T")

Check = Callable[[Any, Any, Any], None]

NESTED = 230  # The levels of nested JSON that are accepted. Real schemas have about ten.

# The escapes in a body that is mended. Each takes 100 bytes meanwhile; 10 MB of source code have 0.3 million.
MENDED = 1_000_000

# The alternatives are, in this order: a surrogate pair, a lone surrogate, any other escape (so that
# `\\ud800`, an escaped backslash, is skipped).
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


# A data URL in base64, with its media type. Programs that write base64 may wrap it (at 76 columns) or escape
# its slashes (PHP's JSON).
_DATA_URL = re.compile(
    r"data:([a-z]+/[a-z0-9.+-]+)?(?:;[a-z]+=[^;,\s\"]+)*;base64,"
    r"[A-Za-z0-9+/_\\-]++={0,2}(?:\r?\n(?:[A-Za-z0-9+/]{60,}+|[A-Za-z0-9+/]++={1,2})(?=\s|\Z))*+",
    re.IGNORECASE,
)
# A line that consists of such a URL, alone or as a picture of Markdown.
_URL_LINE = re.compile(
    rf"^([ \t]*)(?:{_DATA_URL.pattern}|!\[[^\]\n]*\]\({_DATA_URL.pattern}\))(?=[ \t]*\r?$)",
    re.IGNORECASE | re.MULTILINE,
)
# The fields of a part of MCP or of a model's API that hold its bytes, beside a field with their media type.
_MEDIA_TYPES = ("mimeType", "media_type", "mime_type")
_BINARY_TYPES = ("image/", "audio/", "video/", "application/pdf", "application/octet-stream")
_BYTES = ("data", "blob", "base64")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}\s*")
# The number of replacements in one JSON text up to which its spelling is kept. Each is a search through the
# whole text.
_MAX_REPLACEMENTS = 20
_HINTS = (";base64,", *(f'"{name}"' for name in _MEDIA_TYPES))


def read_body(body: bytes, shape: type[T], parts: PartsCache | None = None) -> tuple[T, tuple[str, ...]]:
    """The body as a `shape`, and the paths of its top-level fields that the shape does not have. `parts`
    caches the parts of the session's earlier requests. Raises Refused with a path.
    """
    value = read_value(body)
    if not isinstance(value, dict):
        return structure(value, shape), ()
    found = structure(value, shape) if parts is None else parts.structure(value, shape)
    return found, _unknown(value, shape)


def read_value(body: bytes) -> Json:
    """Parse JSON as harnesses in JavaScript write it: half a surrogate pair (a truncated emoji) becomes
    U+FFFD instead of a refusal.

    Raises Refused if the JSON is nested so deeply that parts of it could not be written again in an answer or
    a template, where a 400 is no longer possible.
    """
    try:
        value = read_json(body)
    except Refused:
        if body.count(b"\\") > MENDED:
            raise
        mended = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)
        if mended == body:
            raise
        value = read_json(mended)
    if _opened(body) > NESTED and not _writable(value):
        raise Refused("the JSON is nested too deeply: flatten it", path=_deepest_path(value))
    return value


def _opened(body: bytes) -> int:
    """How many brackets and braces open in a body. `bytes.count` takes six times as long: 60 us for a body of
    66 KB.
    """
    # With this bit set, only these two of all bytes become an opening brace.
    return int(numpy.count_nonzero((numpy.frombuffer(body, numpy.uint8) | 0x20) == ord("{")))


def _writable(value: Json) -> bool:
    # orjson reads 1,024 levels and writes 254. An answer that repeats a part adds some levels around it.
    for _ in range(254 - NESTED):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def _deepest_path(value: Json) -> str:
    """The path to the value that is nested too deeply, as far down as a user would look."""
    path = "$"
    for _ in range(2):
        inside = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, part in inside:
            if not _writable(part):
                path, value = path + (f".{key}" if isinstance(key, str) else f"[{key}]"), part
                break
    return path


def _unknown(value: Mapping[str, Json], shape: type[Any]) -> tuple[str, ...]:
    names = _field_aliases(cast(Hashable, shape))
    return tuple(f"$.{name}" for name, raw in value.items() if name not in names and raw is not None)


@cache
def _field_aliases(shape: Hashable) -> frozenset[str]:
    return frozenset(field.alias for field in attrs.fields(cast(Any, shape)))


def within(low: float, high: float) -> Check:
    """A validator: the number is in [low, high], or absent."""

    def check(_: object, field: Any, value: float | None) -> None:
        if value is not None and not low <= value <= high:
            raise Refused(f"{field.alias} must be from {low} to {high}, not {value}", path=f"$.{field.alias}")

    return check


def at_least(low: int) -> Check:
    """A validator: the number is at least `low` and within the engine's range, or absent."""

    def check(_: object, field: Any, value: int | None) -> None:
        if value is not None and value < low:
            raise Refused(f"{field.alias} must be at least {low}, not {value}", path=f"$.{field.alias}")
        if value is not None and value > COUNT:
            raise Refused(f"{field.alias} must be at most {COUNT}, not {value}", path=f"$.{field.alias}")

    return check


def seed_fits(_: object, field: Any, value: int | None) -> None:
    """A validator: the seed is an integer of 64 bits, with room for one more seed per choice, or absent."""
    if value is not None and not -SEED <= value <= SEED:
        raise Refused(f"{field.alias} must be from {-SEED} to {SEED}, not {value}", path=f"$.{field.alias}")


def above_zero(high: float) -> Check:
    """A validator: the number is in (0, high], or absent."""

    def check(_: object, field: Any, value: float | None) -> None:
        if value is not None and not 0 < value <= high:
            raise Refused(
                f"{field.alias} must be above 0 and at most {high}, not {value}", path=f"$.{field.alias}"
            )

    return check


def some(_: object, field: Any, value: tuple[Any, ...]) -> None:
    """A validator: the list is not empty."""
    if not value:
        raise Refused(f"{field.alias} is empty: send at least one", path=f"$.{field.alias}")


def no_empty_strings(_: object, field: Any, value: str | tuple[str, ...] | None) -> None:
    """A validator for stop strings: none is empty (it would end every answer at once), and neither their
    number nor their length exceeds the limits.
    """
    if value is None:
        return
    strings = as_tuple(value)
    if "" in strings:
        raise Refused(f"{field.alias} holds an empty string: remove it", path=f"$.{field.alias}")
    if len(strings) > STOPS:
        raise Refused(
            f"{field.alias} holds {len(strings)} strings: send at most {STOPS}", path=f"$.{field.alias}"
        )
    if any(len(string) > MAX_STOP_CHARS for string in strings):
        raise Refused(
            f"{field.alias} holds a string of more than {MAX_STOP_CHARS} characters: shorten it",
            path=f"$.{field.alias}",
        )


def unserved(sentence: str) -> Check:
    """A validator: the field is absent. It is for fields that could only be ignored silently."""

    def check(_: object, field: Any, value: object) -> None:
        if value is not None:
            raise Refused(sentence, path=f"$.{field.alias}")

    return check


def refuse_non_text(_: object, __: object, kind: str) -> None:
    """A validator that refuses a content part which is not text. So no such part is ever constructed; code
    that still meets one raises the same error.
    """
    raise non_text_error(kind)


def non_text_error(kind: str) -> Refused:
    return Refused(f"this model reads text only: remove the {kind} part")


def unseen(kind: str) -> str:
    """The text that replaces a part of a tool's result that is not text. A refusal would end the run because
    of a tool's output.
    """
    return f"[{kind}: not shown, because this model reads text only]"


def replace_media(text: str) -> str:
    """A tool's result with its media replaced by a placeholder, because base64 takes a token for every two
    characters. A data URL is replaced if it is all of the result or all of a line, and so is such data in a
    result that is JSON. All other text is unchanged, even a file's code that contains a data URL, because an
    agent edits it.
    """
    if not any(hint in text for hint in _HINTS):
        return text
    whole = _replace_media_in_text(text)
    if whole is not None:
        return whole
    shown = _URL_LINE.sub(lambda found: found[1] + unseen(found[2] or found[3] or "data"), text)
    lines = shown.split("\n")  # Each line of a log may be JSON.
    if len(lines) == 1 or not any(hint in shown for hint in _HINTS):
        return shown
    return "\n".join(_replace_media_in_text(line) or line for line in lines)


def _replace_media_in_text(text: str) -> str | None:
    """A JSON text with its media replaced, otherwise as it was written. None if it is no JSON
    object or list.
    """
    if text.lstrip()[:1] not in ("{", "["):
        return None
    found: dict[str, str] = {}
    try:
        described = _replace_value_media(orjson.loads(text.encode(errors="replace")), found)
        if len(found) > _MAX_REPLACEMENTS:
            return compact(described)
        for old, new in found.items():
            for spelling in (_spelled(old), old.replace("/", "\\/")):
                text = text.replace(spelling, _spelled(new))
        same = not found or orjson.loads(text.encode(errors="replace")) == described
        return text if same else compact(described)
    except (orjson.JSONDecodeError, RecursionError, Refused):
        return None


def _spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def replace_json_media(value: Json) -> Json:
    """A tool's result as JSON, with the media in each of its strings replaced as by `replace_media`. A result
    that is nested too deeply for that is unchanged, and `compact` refuses it.
    """
    try:
        return _replace_value_media(value, {})
    except RecursionError:
        return value


def _replace_value_media(value: Json, found: dict[str, str]) -> Json:
    """The value with its media replaced. `found` collects each replaced text with its replacement."""
    match value:
        case str():
            new = replace_media(value)
            if new is not value and new != value:
                found[value] = new
            return new
        case list():
            return [_replace_value_media(item, found) for item in value]
        case dict():
            kind = next((name for key in _MEDIA_TYPES if isinstance(name := value.get(key), str)), "")
            return {key: _member(key, item, kind, found) for key, item in value.items()}
        case _:
            return value


def _member(key: str, item: Json, kind: str, found: dict[str, str]) -> Json:
    """A member of an object whose media type is `kind`, or empty, with its media replaced."""
    if key in _BYTES and isinstance(item, str) and kind.startswith(_BINARY_TYPES) and _BASE64.fullmatch(item):
        found[item] = unseen(kind)
        return found[item]
    return _replace_value_media(item, found)


def as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    return (value,) if isinstance(value, str) else value or ()


def paragraphs(texts: Iterable[str]) -> str:
    """Join the text parts of a client, each on a new line. Empty parts are dropped, so that None, "" and []
    are the same text.
    """
    return "\n".join(text for text in texts if text)


def join_answers(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages, with neighbouring messages of the assistant joined into one."""
    for role, run in groupby(messages, key=lambda message: message.role):
        if role == "assistant":
            first, *others = run
            yield first.joined(*others) if others else first
        else:
            yield from run


def parse_strict_json(text: str) -> Json:
    """Parse JSON that a model wrote. Python's parser is used, because its integers are unbounded. Raises
    ValueError or RecursionError if it is not JSON.
    """
    value: Json = json.loads(text, parse_constant=_no_constant)
    return value


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is Python's, not JSON's")


def compact(value: Json) -> str:
    """JSON without whitespace, keys in the client's order. Raises Refused if it is nested too deeply to be
    written (250 levels).
    """
    try:
        return dump_json(value).decode()
    except (TypeError, RecursionError):
        raise Refused("the JSON is nested too deeply: flatten it") from None
