"""Qwen3-Coder's, Qwen3.5's and Qwen3.6's calls: <function=name> with each parameter between <parameter=key> and </parameter>.

The rule for whoever edits it: the template writes one newline on either side of a value, and only that one is no part of it.
"""

from collections.abc import Sequence
from typing import Final

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall
from polarnode.tokens.syntax.body import Body
from polarnode.tokens.syntax.tagged import Tags, read_tagged

_TAGS: Final = Tags(
    call=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
    value=lambda text: text.removeprefix("\n").removesuffix("\n"),
)


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls between a call's marks, None if they are malformed."""
    return read_tagged(body, tools, _TAGS)
