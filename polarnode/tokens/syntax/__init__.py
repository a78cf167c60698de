"""A family that was not taught to call: whatever it writes is text.

The rule for whoever edits it: there is nothing to read here; a family that calls has another row in the
table.

How model families write their calls: one small module a syntax, and the table that finds it.

Every module has one function, `read(body, tools)`: all calls of a body, or None if any of it is malformed,
for then it is given back as the text it was. Whoever adds a syntax adds a module, its word in
`family.CallSyntax` and its line here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polarnode.core.conversation import Tool
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.syntax import harmony, json_calls, tag_calls
from polarnode.tokens.syntax.body import CallBody
from polarnode.tokens.tool_calls import ReadCall

# ── none ────────────────────────────────────────────────────────────


def read_none(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """No call."""
    return None


# ── syntax ────────────────────────────────────────────────────────────

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
