"""Responses: our own `encrypted_content`, which clients carry without reading it.

It is no secret: what it holds was sampled for this very client. It is compact, [A-Za-z0-9_-] only, and says by its beginning that it is ours.
The rule for whoever edits it: what was sealed yesterday must open today; a new kind of content gets a new field, never another spelling.
"""

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from typing import Final

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.wire import dump_json, read_json

_OURS: Final = "pn1_"
_LONGEST: Final = 16 << 20  # bytes once opened: a million tokens of thinking are 4-6 MB; a client may send a small text that unpacks to more


@frozen(kw_only=True)
class Sealed:
    """What an item stands for. `thinking` is empty where the item shows it anyway; `summary` is a compaction's."""

    signature: str = ""
    thinking: str = ""
    summary: str | None = None


def seal(content: Sealed) -> str:
    """`content` as an opaque text."""
    said: dict[str, Json] = {"s": content.signature or None, "t": content.thinking or None, "c": content.summary}
    packed = zlib.compress(dump_json({name: value for name, value in said.items() if value is not None}), 1)
    return _OURS + urlsafe_b64encode(packed).decode().rstrip("=")


def unseal(opaque: str) -> Sealed | None:
    """What was sealed; None when it is not ours, or no longer whole."""
    if not opaque.startswith(_OURS):
        return None
    text = opaque.removeprefix(_OURS)
    try:
        packed = zlib.decompressobj()
        data = packed.decompress(urlsafe_b64decode(text + "=" * (-len(text) % 4)), _LONGEST)
        said = read_json(data) if packed.eof else None
    except (NotBase64, ValueError, zlib.error, Refused):
        return None
    return _read(said) if isinstance(said, dict) else None


def _read(said: dict[str, Json]) -> Sealed:
    summary = said.get("c")
    return Sealed(signature=_text(said.get("s")), thinking=_text(said.get("t")), summary=summary if isinstance(summary, str) else None)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
