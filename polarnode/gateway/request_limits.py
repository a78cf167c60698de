"""What one request may cost the node, given the context of its model: bytes, parts and letters.

A request is refused before the work that its size would cause: its bytes while they arrive, its parts before
they are parsed, its letters before they are rendered. What is refused here could not fit the context, so the
refusal is that of a prompt that is too long, on which harnesses compact. Pure, and free for a request of the
usual size: one comparison each.
"""

from typing import Final

import orjson
from attrs import field, frozen

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Constraint, Conversation, Json, Message
from polarnode.core.errors import ContextTooLong, Refused

# Characters of text for each token of the context. English has 4 to 5, source code 3, deep indentation 8; a
# text that needs more is made of long runs of one character.
CHARS_PER_TOKEN: Final = 16
# The usual length of a token, in characters or bytes, for the size named in a refusal.
TYPICAL_TOKEN: Final = 4
# Images in tool results, which this node replaces by a sentence: three of 5 MB, the largest that Anthropic's
# API takes.
IMAGES_BYTES: Final = 16 << 20
BODY_BYTES: Final = 64 << 20  # for any context
# Marks of JSON (quotes, commas, opening brackets), in texts or between values. Parsing holds the event loop,
# for 0.1 s with so many; a message has about seven.
MARKS: Final = 1_000_000
MARKS_PER_TOKEN: Final = 2  # of a longer context; texts of minified JSON have one and a half
_MARKS: Final = (b'"', b",", b"{", b"[")
# Of a schema, regular expression or grammar. xgrammar compiles a list of 8,000 words in 40 ms, but optional
# members in cubic time: 600 in 0.3 s, 1,200 in 2.7 s, and all sessions wait for one compiler.
CONSTRAINT_CHARS: Final = 64_000
CONSTRAINT_MEMBERS: Final = 500
# Bodies of one session that are read at once, in the longest one's size; and of all sessions together. What a
# body takes of the node's share begins after its first bytes: a request of the usual size is never refused
# because of another session.
SESSION_BODIES: Final = 2
NODE_BODIES: Final = 8


@frozen
class RequestLimits:
    """The limits of one request to a model of `context_length` tokens."""

    context_length: int
    body_bytes: int = field(init=False)
    chars: int = field(init=False)  # of all texts of a conversation

    def __attrs_post_init__(self) -> None:
        chars = CHARS_PER_TOKEN * self.context_length
        object.__setattr__(self, "chars", chars)
        object.__setattr__(self, "body_bytes", min(BODY_BYTES, chars + IMAGES_BYTES))

    def check_body(self, body: bytes) -> None:
        """Raise ContextTooLong for more parts than a parser may be given."""
        most = max(MARKS, MARKS_PER_TOKEN * self.context_length)
        if len(body) > most and marks_of(body) > most:
            raise self.too_long(len(body))

    def check_conversation(self, conversation: Conversation, *, body_bytes: int) -> None:
        """Raise ContextTooLong for more messages or letters than any prompt of this context has. O(messages),
        for a body of `body_bytes` in which they could be.
        """
        if body_bytes <= self.chars:  # a message takes 16 bytes and more, a letter at least one
            return
        chars = sum(map(_chars, conversation.messages))
        for tool in conversation.tools:
            chars += len(tool.name) + len(tool.description) + len(orjson.dumps(tool.parameters))
        if chars > self.chars or len(conversation.messages) > self.context_length:
            raise self.too_long(chars)

    def too_long(self, size: int) -> ContextTooLong:
        """The refusal of `size` characters or bytes. Its number of tokens is an estimate."""
        tokens = max(size // TYPICAL_TOKEN, self.context_length + 1)
        return ContextTooLong(prompt_tokens=tokens, limit=self.context_length)


def marks_of(body: bytes) -> int:
    """How many marks of JSON stand in a body, at C's speed."""
    return sum(map(body.count, _MARKS))


def check_constraint(constraint: Constraint) -> None:
    """Raise Refused for a constraint that an engine would compile for longer than it answers."""
    if len(constraint.text) > CONSTRAINT_CHARS:
        raise Refused(
            f"what the answer must match has {len(constraint.text)} characters: send at most"
            f" {CONSTRAINT_CHARS}"
        )
    waiting: list[Json] = [read_json(constraint.text.encode())] if constraint.kind == "json_schema" else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and len(value) > CONSTRAINT_MEMBERS:
            raise Refused(
                f"the JSON schema of the answer has an object of {len(value)} members: give each at most"
                f" {CONSTRAINT_MEMBERS}"
            )
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _chars(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.calls)
    return len(message.text) + len(message.thinking) + calls
