"""DeepSeek V3's and R1's calls: `function`, the separator, the name, and the arguments in a fence of json.

The rule for whoever edits it: the fence is the template's, letter for letter; what is in it is strict JSON.
"""

from collections.abc import Sequence
from typing import Final

from polarnode.conversation import Tool
from polarnode.tokens.calls import SPACE, ReadCall, read_object
from polarnode.tokens.syntax.body import Body, Cursor
from polarnode.tokens.syntax.tagged import is_name

_OPEN: Final = "\n```json\n"
_CLOSE: Final = "\n```"


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between a call's marks, None if it is malformed."""
    cursor = Cursor(body)
    kind = cursor.until(body.separator)
    name = cursor.until(_OPEN)
    if kind is None or kind.strip(SPACE) != "function" or name is None or not is_name(name):
        return None
    written = cursor.rest.rstrip(SPACE)
    arguments = written.removesuffix(_CLOSE)
    if arguments == written or read_object(arguments) is None:
        return None
    return (ReadCall(name, arguments.strip(SPACE)),)
