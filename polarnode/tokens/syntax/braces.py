"""Gemma 4's calls: call:name{key:value}, with strings between marks of their own and everything else as JSON has it.

The rule for whoever edits it: the quote is a control token of Gemma's tokenizers and nothing in a string is escaped, so a string ends at the
next quote that was sampled as one. Whole arguments are written anew as JSON, in the model's order and with its own numbers.
"""

import json
from collections.abc import Callable, Sequence
from typing import Final

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall, read_value
from polarnode.tokens.syntax.body import Body, Cursor
from polarnode.tokens.syntax.tagged import is_name

QUOTE: Final = '<|"|>'
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "None": "null"}  # None: Gemma 4's first templates write Python's
_DEEP: Final = 100  # levels of nesting: far more than any tool takes, far fewer than Python's stack


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
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
    """What follows an opening brace, up to its closing one."""
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
    """Members with commas between them, up to what closes them."""
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
