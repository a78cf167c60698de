"""How model families write tool calls: the table of syntaxes.

A reader takes a body and the tools, and returns all calls of the body. If any of it is malformed it returns
None, and the body is then visible text. To add a syntax, add its reader, its word in `families.CallSyntax`
and its line here. `read_none` is for families that were not trained to call: whatever they write is text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polarnode.core.conversation import Tool
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.syntax import harmony, json_calls, tag_calls
from polarnode.tokens.tool_calls import CallBody, ReadCall

# ── none ──────────────────────────────────────────────────────────────────────────────────────────


def read_none(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """Return None, because these families have no calls."""
    return None


# ── syntax ────────────────────────────────────────────────────────────────────────────────────────

Reader = Callable[[CallBody, Sequence[Tool]], tuple[ReadCall, ...] | None]

READERS: Final[Mapping[CallSyntax, Reader]] = {
    "none": read_none,
    "json": json_calls.read_json,
    "bare_json": json_calls.read_bare_json,
    "function_xml": tag_calls.read_function_xml,
    "invoke_xml": tag_calls.read_invoke_xml,
    "arg_xml": tag_calls.read_arg_xml,
    "fenced": json_calls.read_fenced,
    "separated": json_calls.read_separated,
    "numbered": json_calls.read_numbered,
    "braces": tag_calls.read_braces,
    "harmony": harmony.read_harmony,
}
