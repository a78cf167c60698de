"""Calls written as tags: names and parameters between tags, values as bare text.

Every tag is closed by its own, only blanks stand between tags, and a value ends at the first tag that closes
it, because the templates escape nothing. An opening tag inside a value means that the tag before it was left
unclosed.

- `arg_xml` (GLM 4.5, 4.6): the name, then <arg_key> and <arg_value> in turns. The tags are control tokens of
  GLM's tokenizers, so a tag that a value spells is text.
- `function_xml` (Qwen3-Coder, Qwen3.5, Qwen3.6): <function=name>, each parameter between <parameter=key> and
  </parameter>. The template writes one newline on either side of a value; only that one is dropped.
- `invoke_xml` (MiniMax M2): one pair of marks around any number of <invoke name="...">, each parameter in
  <parameter name="...">. A value is all of the text between its tags.
- `braces` (Gemma 4): call:name{key:value}, strings between quote tokens, everything else as in JSON. A string
  ends at the next quote that was sampled as a control token. Arguments are written as JSON again, in the
  model's order and with its own numbers.
"""

import json
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.conversation import Tool
from polarnode.tokens.syntax.body import CallBody, Cursor
from polarnode.tokens.syntax.values import arguments_json
from polarnode.tokens.tool_calls import SPACE, ReadCall, read_value

# ── shared by tag syntaxes ────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Tags:
    """The tags of a syntax: each has the text before a name, the text that ends the name, and the closing
    tag. `value` extracts the value from the text between tags.
    """

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: Callable[[str], str]


def read_tagged(body: CallBody, tools: Sequence[Tool], tags: Tags) -> tuple[ReadCall, ...] | None:
    """All calls of a body, at least one; None if anything in it is malformed."""
    cursor, calls = Cursor(body), []
    cursor.skip()
    while not cursor.over:
        call = _call(cursor, tools, tags)
        if call is None:
            return None
        calls.append(call)
        cursor.skip()
    return tuple(calls) or None


def _call(cursor: Cursor, tools: Sequence[Tool], tags: Tags) -> ReadCall | None:
    opening, ending, closing = tags.call
    name = cursor.until(ending) if cursor.take(opening) else None
    if name is None or not is_name(name):
        return None
    pairs = []
    cursor.skip()
    while not cursor.take(closing):
        pair = _parameter(cursor, tags)
        if pair is None:
            return None
        pairs.append(pair)
        cursor.skip()
    # as SGLang's detectors: text, unless the schema has a type
    arguments = arguments_json(pairs, name, tools, untyped=False)
    return None if arguments is None else ReadCall(name, arguments)


def _parameter(cursor: Cursor, tags: Tags) -> tuple[str, str] | None:
    opening, ending, closing = tags.parameter
    key = cursor.until(ending) if cursor.take(opening) else None
    text = None if key is None else cursor.until(closing, without=opening)
    if key is None or text is None or not is_name(key):
        return None
    return key, tags.value(text)


def is_name(text: str) -> bool:
    """Whether a text can be the name of a tool or parameter: not empty, no blanks around it, no tag in it."""
    return bool(text) and text == text.strip() and not any(letter in text for letter in '<>"\n')


# ── arg xml ───────────────────────────────────────────────────────────────────────────────────────


def read_arg_xml(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between a call's marks, None if it is malformed."""
    first = body.find("<arg_key>", 0)
    cursor = Cursor(body, len(body.text) if first < 0 else first)
    name = body.text[: cursor.at].strip(SPACE)
    if not is_name(name):
        return None
    pairs = []
    while not cursor.over:
        pair = _pair(cursor)
        if pair is None:
            return None
        pairs.append(pair)
        cursor.skip()
    # the template writes non-strings as JSON, and SGLang reads them so
    arguments = arguments_json(pairs, name, tools, untyped=True)
    return None if arguments is None else (ReadCall(name, arguments),)


def _pair(cursor: Cursor) -> tuple[str, str] | None:
    key = cursor.until("</arg_key>") if cursor.take("<arg_key>") else None
    cursor.skip()
    value = cursor.until("</arg_value>", without="<arg_key>") if cursor.take("<arg_value>") else None
    if key is None or value is None or not is_name(key.strip(SPACE)):
        return None
    return key.strip(SPACE), value


# ── function xml ──────────────────────────────────────────────────────────────────────────────────

_FUNCTION_TAGS: Final = Tags(
    call=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
    value=lambda text: text.removeprefix("\n").removesuffix("\n"),
)


def read_function_xml(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls between a call's marks, None if they are malformed."""
    return read_tagged(body, tools, _FUNCTION_TAGS)


# ── invoke xml ────────────────────────────────────────────────────────────────────────────────────

_INVOKE_TAGS: Final = Tags(
    call=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', '">', "</parameter>"),
    value=str,
)


def read_invoke_xml(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls between a section's marks, None if they are malformed."""
    return read_tagged(body, tools, _INVOKE_TAGS)


# ── braces ────────────────────────────────────────────────────────────────────────────────────────

QUOTE: Final = '<|"|>'
# None: Gemma 4's first templates write Python's
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "None": "null"}
_DEEP: Final = 100  # levels of nesting: far more than any tool needs, far fewer than Python's stack allows


def read_braces(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between a call's marks, None if it is malformed."""
    cursor = Cursor(body)
    cursor.skip()
    name = cursor.until("{") if cursor.take("call:") else None
    if name is None or not is_name(name):
        return None
    try:
        arguments = _object(cursor, 0)
    except ValueError:
        return None
    cursor.skip()
    return (ReadCall(name, arguments),) if cursor.over else None


def _value(cursor: Cursor, depth: int) -> str:
    if depth > _DEEP:
        raise ValueError("nested too deeply")
    if cursor.take(QUOTE):
        return _string(cursor)
    if cursor.take("{"):
        return _object(cursor, depth)
    if cursor.take("["):
        return _list(cursor, depth)
    return _word(cursor)


def _object(cursor: Cursor, depth: int) -> str:
    """The object after an opening brace, up to its closing one."""
    found: dict[str, str] = {}

    def member() -> None:
        key = _key(cursor)
        if key in found:
            raise ValueError("a key is written twice")
        cursor.skip()
        found[key] = _value(cursor, depth + 1)

    _members(cursor, "}", member)
    return "{" + ", ".join(f"{key}: {value}" for key, value in found.items()) + "}"


def _list(cursor: Cursor, depth: int) -> str:
    found: list[str] = []
    _members(cursor, "]", lambda: found.append(_value(cursor, depth + 1)))
    return "[" + ", ".join(found) + "]"


def _members(cursor: Cursor, closing: str, member: Callable[[], None]) -> None:
    """Members with commas between them, up to the closing bracket."""
    cursor.skip()
    if cursor.take(closing):
        return
    while True:
        member()
        cursor.skip()
        if cursor.take(closing):
            return
        if not cursor.take(","):
            raise ValueError("members without a comma between them")
        cursor.skip()


def _key(cursor: Cursor) -> str:
    if cursor.take(QUOTE):
        key = _string(cursor)
        if not cursor.take(":"):
            raise ValueError("a key without a value")
        return key
    name = cursor.until(":")
    if name is None or not is_name(name) or any(letter in name for letter in "{}[],"):
        raise ValueError("a key without a value")
    return json.dumps(name, ensure_ascii=False)


def _string(cursor: Cursor) -> str:
    text = cursor.until(QUOTE)
    if text is None:
        raise ValueError("a string without an end")
    return json.dumps(text, ensure_ascii=False)


def _word(cursor: Cursor) -> str:
    """A number or one of JSON's words."""
    word = ""
    while cursor.next and cursor.next not in ",]} \t\r\n":
        word += cursor.next
        cursor.at += 1
    if word in _WORDS:
        return _WORDS[word]
    if not isinstance(read_value(word), int | float):
        raise ValueError("a string without quotes")
    return word
