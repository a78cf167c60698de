"""GLM 4.5's and 4.6's calls: the name, then <arg_key> and <arg_value> in turns, with or without newlines between them.

The rule for whoever edits it: these tags are control tokens of GLM's tokenizers, so one that a value spells is text.
"""

from collections.abc import Sequence

from polarnode.conversation import Tool
from polarnode.tokens.calls import SPACE, ReadCall
from polarnode.tokens.syntax.body import Body, Cursor
from polarnode.tokens.syntax.tagged import is_name
from polarnode.tokens.syntax.values import arguments_json


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
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
    arguments = arguments_json(pairs, name, tools, untyped=True)  # the template writes what is no string as JSON, and so does SGLang read it
    return None if arguments is None else (ReadCall(name, arguments),)


def _pair(cursor: Cursor) -> tuple[str, str] | None:
    key = cursor.until("</arg_key>") if cursor.take("<arg_key>") else None
    cursor.skip()
    value = cursor.until("</arg_value>", without="<arg_key>") if cursor.take("<arg_value>") else None
    if key is None or value is None or not is_name(key.strip(SPACE)):
        return None
    return key.strip(SPACE), value
