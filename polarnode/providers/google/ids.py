"""Google: how our tool-call ids come back on this wire.

They go out as the house minted them (`call_…`). Gemini CLI can be set to keep its own book of contexts, and then puts the function's name and
two underscores before every id; other clients drop ids and keep the signature beside the call. Both are read back to the id that was minted,
letter for letter. An id of another kind (the ones Gemini CLI invents, another server's history) passes unchanged.
"""

import re
from base64 import b64decode
from binascii import Error as NotBase64

_OURS = re.compile(r"call_[0-9a-f]{16,}")
_REFERENCE = re.compile(rb"[0-9a-f]{16}")  # what we sign with, and what the id of each call of the turn begins with


def inward(call_id: str, name: str) -> str:
    """The id as the house minted it."""
    bare = call_id.removeprefix(f"{name}__")
    return bare if _OURS.fullmatch(bare) else call_id


def of_signature(signature: str | None, place: int) -> str | None:
    """The id of a turn's call at `place`, from 0, by its signature alone; None when that is not ours. Whether it is true is not judged here."""
    try:
        said = b64decode((signature or "").replace("-", "+").replace("_", "/"), validate=True)
    except (NotBase64, ValueError):
        return None
    return f"call_{said.decode()}{place:02x}" if _REFERENCE.fullmatch(said) else None
