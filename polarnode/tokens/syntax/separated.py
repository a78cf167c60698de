"""DeepSeek V3.1's calls: the name, the separator, the arguments.

The rule for whoever edits it: what is behind the separator is one strict JSON object and nothing else.
"""

from collections.abc import Sequence

from polarnode.conversation import Tool
from polarnode.tokens.calls import SPACE, ReadCall, read_object
from polarnode.tokens.syntax.body import Body, Cursor
from polarnode.tokens.syntax.tagged import is_name


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between a call's marks, None if it is malformed."""
    parted = head_and_arguments(body)
    if parted is None or not is_name(parted[0]):
        return None
    return (ReadCall(*parted),)


def head_and_arguments(body: Body) -> tuple[str, str] | None:
    """What stands before the separator and the arguments' text behind it; None if they are no object."""
    cursor = Cursor(body)
    head = cursor.until(body.separator)
    if head is None or read_object(cursor.rest) is None:
        return None
    return head.strip(SPACE), cursor.rest.strip(SPACE)
