"""Google: how our tool-call ids come back on this wire.

They go out as the house minted them (`call_…`). Gemini CLI can be set to keep its own book of contexts, and then puts the function's name and
two underscores before every id; that is taken off again, so that an id is, letter for letter, the one that was minted and signed. An id of
another kind (the ones Gemini CLI invents, another server's history) passes unchanged.
"""

import re

_OURS = re.compile(r"call_[0-9a-f]{16,}")


def inward(call_id: str, name: str) -> str:
    """The id as the house minted it."""
    bare = call_id.removeprefix(f"{name}__")
    return bare if _OURS.fullmatch(bare) else call_id
