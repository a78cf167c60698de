"""Random ids."""

import secrets
from typing import Final

ID_BYTES: Final = 8  # 64 random bits, so that ids never collide


def new_id() -> str:
    """A new random id, for example of a session."""
    return secrets.token_hex(ID_BYTES)
