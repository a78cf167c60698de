"""Calls as tags, each parameter between tags of its own, its value bare text: what two syntaxes share but for the tags.

The rule for whoever edits it: every tag is closed by its own, nothing but blanks stands between them, and a value ends at the first tag that
closes it, because the models' templates escape nothing. An opening tag inside a value is one that was left unclosed before it.
"""

from collections.abc import Callable, Sequence

from attrs import frozen

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall
from polarnode.tokens.syntax.body import Body, Cursor
from polarnode.tokens.syntax.values import arguments_json


@frozen(kw_only=True)
class Tags:
    """Each as what stands before its name, what ends the name, and what closes it. `value`: what of the text between tags is the value."""

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: Callable[[str], str]


def read_tagged(body: Body, tools: Sequence[Tool], tags: Tags) -> tuple[ReadCall, ...] | None:
    """All calls of a body, one at least; None if anything in it is malformed."""
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
    arguments = arguments_json(pairs, name, tools, untyped=False)  # as SGLang's detectors: text, where no schema says more
    return None if arguments is None else ReadCall(name, arguments)


def _parameter(cursor: Cursor, tags: Tags) -> tuple[str, str] | None:
    opening, ending, closing = tags.parameter
    key = cursor.until(ending) if cursor.take(opening) else None
    text = None if key is None else cursor.until(closing, without=opening)
    if key is None or text is None or not is_name(key):
        return None
    return key, tags.value(text)


def is_name(text: str) -> bool:
    """Whether a text can be a tool's or a parameter's name: not empty, no blanks around it, no tag in it."""
    return bool(text) and text == text.strip() and not any(letter in text for letter in '<>"\n')
