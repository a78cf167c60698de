"""Text that the model must not read: what a harness puts into a request and removes from the next, and the
marker by which the node has a harness go on. Dropped before matching and rendering, so that histories only
grow.

Only text that is marked as written by a harness about the moment of the request is dropped, never a word of a
user or a result that the model waits for. The reader reports what it drops in the request's `ignored`.
"""

import re
from collections.abc import Iterator
from typing import Final

from attrs import evolve

from polarnode.core.conversation import Message
from polarnode.providers.shapes import paragraphs

# Claude Code puts this line before its system prompt, with a new nonce in every request. Rendered, it would
# change the prefix of every prompt.
_BILLING: Final = "x-anthropic-billing-header:"

# OpenClaw reports its running processes and helpers between these lines: after the conversation, in a
# separate user message or at the end of the last one, and before what a user writes meanwhile.
_MARK: Final = "OPENCLAW_INTERNAL_CONTEXT"
_LINES: Final = re.compile(rf"^[ \t]*<<<(BEGIN|END)_{_MARK}>>>[ \t]*$", re.MULTILINE)

# Contexts that the model must answer are kept: a helper's result, or an event in place of a prompt.
_RESULT: Final = "[Internal task completion event]"
_EVENT: Final = "Continue the OpenClaw runtime event."

# No harness continues a conversation without a message. The node gives it this one, and takes it out of every
# request of that session. The number keeps it from being anybody's own words.
RESUME_MARKER: Final = "polarnode-resume-8e1f6b0c2d: the node takes this message out before the model reads."

# Claude Code puts this into the model's mouth where a conversation ended with a tool's result.
_PLACEHOLDER: Final = Message(role="assistant", text="No response requested.")
# And after the message that it goes on with it tells what is otherwise than when the conversation began.
_UPDATE: Final = "# Environment update\n"


def without_lines(text: str) -> str:
    """A system prompt without Claude Code's billing line."""
    if _BILLING not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(_BILLING))


def without_volatile(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], bool]:
    """The messages without OpenClaw's volatile context, and whether there was any.

    OpenClaw's system prompt explains the marks. Without that explanation a message may merely quote them, so
    that only a last message with no other content is dropped.
    """
    if not any(_MARK in message.text for message in messages if message.role == "user"):
        return messages, False
    kept = (
        tuple(_rest(messages))
        if any(_MARK in message.text for message in messages if message.role == "system")
        else _but_the_last(messages)
    )
    user_texts = [message.text for message in kept if message.role == "user"]
    if kept == messages or not user_texts or user_texts[-1].startswith(_EVENT):
        return messages, False
    return kept, True


def _but_the_last(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return messages if _without_volatile_parts(messages[-1]) is not None else messages[:-1]


def _rest(messages: tuple[Message, ...]) -> Iterator[Message]:
    for message in messages:
        kept_message = _without_volatile_parts(message)
        if kept_message is not None:
            yield kept_message


def _without_volatile_parts(message: Message) -> Message | None:
    """The message without its contexts; None when nothing else remains."""
    if message.role != "user" or _MARK not in message.text or _RESULT in message.text:
        return message
    rest = _outside(message.text)
    if rest == message.text:
        return message
    return evolve(message, text=rest) if rest.strip() else None


def _outside(text: str) -> str:
    """The lines before, between and after the contexts. Contexts may nest; one without an end is not a
    context.
    """
    pieces: list[str] = []
    done, start, depth = 0, 0, 0
    for line in _LINES.finditer(text):
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
    """The messages without each user's text that is the marker, and without what a harness put before and
    after it.

    Parts of one message stand on lines of their own, so the others stay as they are. A request in which no
    other user speaks (a title for the marker) stays whole.
    """
    if not any(message.role == "user" and RESUME_MARKER in message.text for message in messages):
        return messages
    kept: list[Message] = []
    marked = False  # the message before was the marker
    for message in messages:
        rest = _without_update(message) if marked else message
        if rest is not message:
            marked = False
        else:
            # a resumed session that is resumed again at the same turn has two markers beside each other
            rest = _unmarked(message)
            marked = rest is not message
        if marked and kept and kept[-1] == _PLACEHOLDER:
            kept.pop()
        if rest is not None:
            kept.append(rest)
    return tuple(kept) if any(message.role == "user" for message in kept) else messages


def _without_update(message: Message) -> Message | None:
    """The message without what Claude Code tells of its environment; None where nothing else remains."""
    if message.role != "system" or not message.text.startswith(_UPDATE):
        return message
    _, _, rest = message.text.partition("\n\n")
    return evolve(message, text=rest) if rest else None


def _unmarked(message: Message) -> Message | None:
    """The message itself where the marker is none of its parts; None where nothing else remains."""
    if message.role != "user" or RESUME_MARKER not in message.text:
        return message
    lines = message.text.split("\n")
    others = [line for line in lines if line != RESUME_MARKER]
    if len(others) == len(lines):
        return message  # quoted within a line
    # what is left between two markers of one message is no text of anybody's
    return evolve(message, text="\n".join(others)) if any(map(str.strip, others)) else None
