"""MiniMax M2's calls: one pair of marks around any number of <invoke name="...">, each parameter in <parameter name="...">.

The rule for whoever edits it: a value is all of the text between its tags, because the template writes nothing around it.
"""

from collections.abc import Sequence
from typing import Final

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall
from polarnode.tokens.syntax.body import Body
from polarnode.tokens.syntax.tagged import Tags, read_tagged

_TAGS: Final = Tags(
    call=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', '">', "</parameter>"),
    value=str,
)


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls between a section's marks, None if they are malformed."""
    return read_tagged(body, tools, _TAGS)
