"""A family that was not taught to call: whatever it writes is text.

The rule for whoever edits it: there is nothing to read here; a family that calls has another row in the table.
"""

from collections.abc import Sequence

from polarnode.conversation import Tool
from polarnode.tokens.calls import ReadCall
from polarnode.tokens.syntax.body import Body


def read(body: Body, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """No call."""
    return None
