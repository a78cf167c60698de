"""Calls between marks as one JSON object of `name` and `arguments`: Hermes, Qwen3, SmolLM3 and many more.

The rule for whoever edits it: exactly those two members, and the arguments' text as it was written.
"""

from collections.abc import Sequence

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall, arguments_of, read_object
from polarnode.tokens.syntax.body import Body


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between a call's marks, None if it is malformed."""
    value = read_object(body.text)
    if value is None or value.keys() != {"name", "arguments"}:
        return None
    name, arguments = value["name"], arguments_of(value, body.text, "arguments")
    if not isinstance(name, str) or not name or arguments is None:
        return None
    return (ReadCall(name, arguments),)
