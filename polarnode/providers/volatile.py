"""Remove text that the model must not read: text that a harness puts into one request and removes from the
next, and the resume marker with which the node makes a harness continue. It is removed before matching and
rendering, so that histories only grow.

Only text is removed that a harness marks as its own and that concerns the moment of the request, never a word
of a user or a result that the model waits for. The reader reports what it removes in the request's `ignored`.
"""

import re
from collections.abc import Iterator
from typing import Final

from attrs import evolve

from polarnode.core.conversation import Message
from polarnode.providers.shapes import paragraphs

# Claude Code puts this line before its system prompt, with a new nonce in every request. If it were rendered,
# it would change the prefix of every prompt.
_BILLING_PREFIX: Final = "x-anthropic-billing-header:"

# OpenClaw reports its running processes and helpers between these lines. They stand after the conversation,
# in a separate user message or at the end of the last one, and before what a user writes meanwhile.
_MARK: Final = "OPENCLAW_INTERNAL_CONTEXT"
_MARK_LINES: Final = re.compile(rf"^[ \t]*<<<(BEGIN|END)_{_MARK}>>>[ \t]*$", re.MULTILINE)

# Contexts that the model must answer are kept: the result of a helper, or an event in place of a prompt.
_RESULT: Final = "[Internal task completion event]"
_RUNTIME_EVENT: Final = "Continue the OpenClaw runtime event."

# No harness continues a conversation without a message. The node gives it this one, and removes it from every
# request of that session. The number ensures that nobody writes this text by chance.
RESUME_MARKER: Final = "polarnode-resume-8e1f6b0c2d: the node takes this message out before the model reads."

# Claude Code adds this as an answer of the model where a conversation ended with a tool's result.
_PLACEHOLDER_ANSWER: Final = Message(role="assistant", text="No response requested.")
# After the message with which it continues, Claude Code adds a system message on what has changed since the
# conversation began.
_UPDATE: Final = "# Environment update\n"


def without_billing_line(text: str) -> str:
    """A system prompt without Claude Code's billing line."""
    if _BILLING_PREFIX not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(_BILLING_PREFIX))


def without_volatile(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], bool]:
    """The messages without OpenClaw's volatile context, and whether there was any.

    OpenClaw's system prompt explains the marks. Without that explanation a message may merely quote them, so
    only a last message with no other content is removed.
    """
    if not any(_MARK in message.text for message in messages if message.role == "user"):
        return messages, False
    kept = (
        tuple(_rest(messages))
        if any(_MARK in message.text for message in messages if message.role == "system")
        else _without_last_context(messages)
    )
    user_texts = [message.text for message in kept if message.role == "user"]
    if kept == messages or not user_texts or user_texts[-1].startswith(_RUNTIME_EVENT):
        return messages, False
    return kept, True


def _without_last_context(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return messages if _without_volatile_parts(messages[-1]) is not None else messages[:-1]


def _rest(messages: tuple[Message, ...]) -> Iterator[Message]:
    for message in messages:
        kept_message = _without_volatile_parts(message)
        if kept_message is not None:
            yield kept_message


def _without_volatile_parts(message: Message) -> Message | None:
    """The message without its contexts. None if nothing else remains."""
    if message.role != "user" or _MARK not in message.text or _RESULT in message.text:
        return message
    rest = _outside(message.text)
    if rest == message.text:
        return message
    return evolve(message, text=rest) if rest.strip() else None


def _outside(text: str) -> str:
    """The text before, between and after the contexts. Contexts may nest. A context without an end
    is none.
    """
    pieces: list[str] = []
    done, start, depth = 0, 0, 0
    for line in _MARK_LINES.finditer(text):
        if line[1] == "BEGIN":
            start = line.start() if depth == 0 else start
            depth += 1
        elif depth == 1:
            pieces.append(text[done:start])
            done, depth = line.end(), 0
        else:
            depth = max(depth - 1, 0)
    return (
        paragraphs(piece.removeprefix("\n").removesuffix("\n") for piece in (*pieces, text[done:]))
        if done
        else text
    )


# ── the marker of a resumed conversation ──────────────────────────────────────


def without_marker(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages without the resume marker, and without what a harness put before and after it.

    The parts of a message are on lines of their own, so the other parts remain as they are. A request in
    which no other user text remains (one that asks for a title of the marker) is unchanged.
    """
    if not any(message.role == "user" and RESUME_MARKER in message.text for message in messages):
        return messages
    kept: list[Message] = []
    marked = False  # whether the message before was the marker
    for message in messages:
        rest = _without_update(message) if marked else message
        if rest is not message:
            marked = False
        else:
            # A resumed session that is resumed again at the same turn has two markers beside each other.
            rest = _without_marker_line(message)
            marked = rest is not message
        if marked and kept and kept[-1] == _PLACEHOLDER_ANSWER:
            kept.pop()
        if rest is not None:
            kept.append(rest)
    return tuple(kept) if any(message.role == "user" for message in kept) else messages


def _without_update(message: Message) -> Message | None:
    """The message without Claude Code's update on its environment. None if nothing else remains."""
    if message.role != "system" or not message.text.startswith(_UPDATE):
        return message
    _, _, rest = message.text.partition("\n\n")
    return evolve(message, text=rest) if rest else None


def _without_marker_line(message: Message) -> Message | None:
    """The message without the marker: the message itself if it has none, None if nothing else remains."""
    if message.role != "user" or RESUME_MARKER not in message.text:
        return message
    lines = message.text.split("\n")
    others = [line for line in lines if line != RESUME_MARKER]
    if len(others) == len(lines):
        return message  # The marker is only quoted within a line.
    # Nobody wrote what remains between two markers of one message.
    return evolve(message, text="\n".join(others)) if any(map(str.strip, others)) else None
