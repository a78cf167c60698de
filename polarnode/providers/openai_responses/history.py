"""Responses: what remains after an answer: compaction summaries, sealed content, and stored answers.

Compaction: the model writes a summary, which is sent sealed and read back as a user's message.
`_SUMMARY_INTRODUCTION` begins with the words by which `merge.roles` recognises a compacted history.
`INSTRUCTION` and `_SUMMARY_INTRODUCTION` must not change while sessions are open, because they are part of
prompts.

Sealed content is this node's own `encrypted_content`, which clients echo unread. It is not secret, because it
was sampled for this client. It is compact, [A-Za-z0-9_-] only, with a prefix that marks it as this node's.
Sealed content must remain readable: a new kind of content gets a new field, never another encoding.

Stored answers serve `previous_response_id` and `item_reference`. Of an answer's input only the part is kept
that it adds, with the name of the earlier answer with whose input it begins. Most clients send the whole
conversation every time, so whole inputs would take gigabytes in a session of a thousand turns.
"""

import re
import zlib
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, cast

from attrs import field, frozen

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.providers.contract import Memory
from polarnode.providers.openai_responses.shapes import JsonObject
from polarnode.providers.shapes import compact

# ── compaction ────────────────────────────────────────────────────────────

# This is the last message of the whole conversation, so that the prompt extends the previous one and is in
# the engine's cache.
INSTRUCTION: Final = (
    "Stop here and summarize this conversation, so that another model can go on without having seen it. Do"
    " not call any tools. Write plain text with: the task and every instruction of the user that still holds;"
    " what was done and found, with exact names, paths, commands and values; what failed and why; the state"
    " things are in now; and what has to be done next. Leave out nothing that is needed to finish."
)

_SUMMARY_INTRODUCTION: Final = (
    "Another language model started to solve this problem and wrote the summary below. What was said before"
    " it is no longer shown. Build on what was done, and do not do it again."
)


def retold(summary: str) -> str:
    """The message that replaces the summarised history. If the model called a tool instead of writing, the
    text says that there is no summary.
    """
    return f"{_SUMMARY_INTRODUCTION}\n\n{summary if summary.strip() else '(It wrote nothing.)'}"


# ── sealed content ────────────────────────────────────────────────────────────

_OURS: Final = "pn1_"
# The limit on the bytes of a request's sealed items after decompression. A million tokens of thinking are 4-6
# MB. A client may send a small text that decompresses to more.
MAX_UNSEALED_BYTES: Final = 16 << 20


@frozen(kw_only=True)
class SealedContent:
    """The content of a sealed item. `thinking` is empty if the item shows it in clear; `summary` belongs to a
    compaction.
    """

    signature: str = ""
    thinking: str = ""
    summary: str | None = None
    size: int = field(default=0, eq=False)  # the bytes that were decompressed to read it


def seal(content: SealedContent) -> str:
    """`content` as an opaque text."""
    content_json: dict[str, Json] = {
        "s": content.signature or None,
        "t": content.thinking or None,
        "c": content.summary,
    }
    packed = zlib.compress(
        dump_json({name: value for name, value in content_json.items() if value is not None}), 1
    )
    return _OURS + urlsafe_b64encode(packed).decode().rstrip("=")


def unseal(opaque: str, *, most: int = MAX_UNSEALED_BYTES) -> SealedContent | None:
    """The content of an opaque text. None if it is not this node's, is damaged, or has more than `most`
    bytes.
    """
    if not opaque.startswith(_OURS):
        return None
    text = opaque.removeprefix(_OURS)
    try:
        packed = zlib.decompressobj()
        data = b"" if most <= 0 else packed.decompress(urlsafe_b64decode(text + "=" * (-len(text) % 4)), most)
        content = read_json(data) if packed.eof else None
    except (NotBase64, ValueError, zlib.error, Refused):
        return None
    if not isinstance(content, dict):
        return None
    summary = content.get("c")
    return SealedContent(
        signature=_text(content.get("s")),
        thinking=_text(content.get("t")),
        summary=summary if isinstance(summary, str) else None,
        size=len(data),
    )


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


# ── stored answers ────────────────────────────────────────────────────────────

_ANSWER: Final = "resp_"
_HEADS_NAME: Final = "openai_responses.heads"
# The number of inputs with which the next one may begin. There is one per agent, and with sub-agents two or
# three send requests at once.
_MAX_HEADS: Final = 16
_DIGEST_BYTES: Final = 16
_ITEM_ID: Final = re.compile(r"[a-z]+_([0-9a-f]+)_\d+(?:_[0-9a-f]{16})?")
_REFERENCE_DIGITS: Final = re.compile(
    rb"[0-9a-f]{16}"
)  # matches the decoded content of an answer's signature


def response_id(call_id: str) -> str:
    """The id of the response to a call. Item ids (`item_id`) contain the same digits, so that an item
    identifies its response.
    """
    return _ANSWER + call_id


def item_id(prefix: str, call_id: str, index: int, signature: str = "") -> str:
    """The id of an item: [A-Za-z0-9_], at most 64 characters.

    `signature` is the answer's. It proves the turn when the item is echoed; nothing else does for a text
    without thinking or calls.
    """
    return "_".join((prefix, call_id, str(index), *_reference(signature)))


def _reference(signature: str) -> list[str]:
    try:
        reference = b64decode(signature, validate=True)
    except (NotBase64, ValueError):
        return []
    return [reference.decode()] if _REFERENCE_DIGITS.fullmatch(reference) else []


def previous(memory: Memory, name: str) -> list[JsonObject]:
    """The conversation up to the end of an answer: the answer's input and its output."""
    # The session's other dialects keep values under other names.
    kept = memory.recall(name) if name.startswith(_ANSWER) else None
    if not isinstance(kept, dict):
        raise _unknown(name)
    return _whole_input(memory, kept, name) + _items(kept["output"])


def referenced(memory: Memory, name: str, path: str) -> JsonObject | None:
    """The item of an earlier answer that an `item_reference` names. None for the item of another server."""
    found = _ITEM_ID.fullmatch(name)
    if found is None:
        return None
    kept = memory.recall(response_id(found[1]))
    for item in _items(kept["output"]) if isinstance(kept, dict) else ():
        if item.get("id") == name:
            return item
    raise Refused(f"item_reference {name!r} is not known here (any more): send the item itself", path=path)


@frozen(kw_only=True)
class StoredInput:
    """An input as it is stored: `base` is the answer with whose input it begins, `added` the rest as JSON
    text.
    """

    base: str | None
    added: str
    length: int
    digest: str

    def as_json(self) -> JsonObject:
        return {"base": self.base, "added": self.added, "length": self.length, "digest": self.digest}


def item_digest(item: JsonObject) -> bytes:
    """The identity of an item of an input: a digest of 16 bytes over all of it."""
    return blake2b(dump_json(item), digest_size=_DIGEST_BYTES).digest()


def input_to_store(memory: Memory, items: list[JsonObject], digests: Iterable[bytes]) -> StoredInput:
    """The part that an input adds to earlier ones. `digests` are those of its items."""
    heads = {(head["length"], head["digest"]): head["name"] for head in _stored_heads(memory)}
    lengths = {length for length, _ in heads}
    digest = blake2b(digest_size=_DIGEST_BYTES)
    begins: list[tuple[int, str]] = []
    for index, each in enumerate(digests, 1):
        digest.update(each)
        name = heads.get((index, digest.hexdigest())) if index in lengths else None
        if isinstance(name, str):
            begins.append((index, name))
    whole = (begin for begin in reversed(begins) if _is_whole(memory, begin[1]))
    begun, base = next(whole, (0, None))
    return StoredInput(
        base=base, added=compact(cast(Json, items[begun:])), length=len(items), digest=digest.hexdigest()
    )


def keep(memory: Memory, name: str, kept: JsonObject, output: list[Json]) -> None:
    """Keep an answer: what its input added, and its output."""
    memory.keep(name, {"base": kept["base"], "input": kept["added"], "output": compact(output)})
    head: JsonObject = {"name": name, "length": kept["length"], "digest": kept["digest"]}
    memory.keep(_HEADS_NAME, cast(Json, [*_stored_heads(memory), head][-_MAX_HEADS:]))


def _whole_input(memory: Memory, kept: JsonObject, name: str) -> list[JsonObject]:
    """The whole input of an answer, joined from the inputs of the answers that it extends."""
    added = [_items(kept["input"])]
    while isinstance(base := kept["base"], str):
        found = memory.recall(base)
        if not isinstance(found, dict):
            raise _unknown(name)
        kept = found
        added.append(_items(kept["input"]))
    return _joined(reversed(added))


def _is_whole(memory: Memory, name: str) -> bool:
    """Whether every answer that this answer's input extends is still stored."""
    base: Json = name
    while isinstance(base, str):
        found = memory.recall(base)
        if not isinstance(found, dict):
            return False
        base = found["base"]
    return True


def _joined(parts: Iterable[list[JsonObject]]) -> list[JsonObject]:
    return [item for part in parts for item in part]


def _items(text: Json) -> list[JsonObject]:
    found = read_json(text.encode()) if isinstance(text, str) else []
    return cast(list[JsonObject], found)


def _stored_heads(memory: Memory) -> list[JsonObject]:
    return cast(list[JsonObject], memory.recall(_HEADS_NAME) or [])


def _unknown(name: str) -> Refused:
    sentence = (
        f"previous_response_id {name!r} is not known here (any more): leave it out and send the whole input"
    )
    return Refused(sentence, path="$.previous_response_id")
