"""Kimi K2's calls: an id that holds the name and a number, `functions.name:0`, then the arguments.

The rule for whoever edits it: the id is the model's own word for its call, and its result is shown to it under that id. Kimi counts through
the whole conversation, so the number says nothing about the place among an answer's calls.
"""

from collections.abc import Sequence

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall
from polarnode.tokens.syntax.body import Body
from polarnode.tokens.syntax.separated import head_and_arguments
from polarnode.tokens.syntax.tagged import is_name


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between a call's marks, None if it is malformed: an id without a name is, because which tool is meant would be a guess."""
    parted = head_and_arguments(body)
    if parted is None:
        return None
    spoken, arguments = parted
    name, colon, number = spoken.removeprefix("functions.").rpartition(":")
    if not colon or not (number.isascii() and number.isdigit()) or not is_name(name):
        return None
    return (ReadCall(name, arguments, spoken),)
