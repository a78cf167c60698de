"""Anthropic Messages: how our references look on this wire.

The house mints tool-call ids as `call_…`; this API's clients see `toolu_…` of the same. Both ways are here, so that the id a harness echoes
is again, letter for letter, the one that was minted and signed. An id of neither kind (another server's history) passes unchanged.
"""

_OURS = "call_"
_THEIRS = "toolu_"


def outward(call_id: str) -> str:
    """The id as this API spells it."""
    return _THEIRS + call_id.removeprefix(_OURS) if call_id.startswith(_OURS) else call_id


def inward(tool_use_id: str) -> str:
    """The id as the house minted it."""
    return _OURS + tool_use_id.removeprefix(_THEIRS) if tool_use_id.startswith(_THEIRS) else tool_use_id
