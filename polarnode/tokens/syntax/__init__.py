"""How model families write their calls: one small module a syntax, and the table that finds it.

Every module has one function, `read(body, tools)`: all calls of a body, or None if any of it is malformed, for then it is given back as the
text it was. Whoever adds a syntax adds a module, its word in `family.CallSyntax` and its line here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall
from polarnode.tokens.family import CallSyntax
from polarnode.tokens.syntax import (
    arg_xml,
    bare_json,
    braces,
    fenced,
    function_xml,
    harmony,
    invoke_xml,
    json,
    none,
    numbered,
    separated,
)
from polarnode.tokens.syntax.body import Body

Reader = Callable[[Body, Sequence[Tool]], tuple[ReadCall, ...] | None]

READERS: Final[Mapping[CallSyntax, Reader]] = {
    "none": none.read,
    "json": json.read,
    "bare_json": bare_json.read,
    "function_xml": function_xml.read,
    "invoke_xml": invoke_xml.read,
    "arg_xml": arg_xml.read,
    "fenced": fenced.read,
    "separated": separated.read,
    "numbered": numbered.read,
    "braces": braces.read,
    "harmony": harmony.read,
}
