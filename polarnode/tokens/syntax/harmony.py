"""The messages of gpt-oss. A header names the recipient and the channel, and so decides what the message is.

`<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{...}<|call|>`. The
first `<|start|>assistant` belongs to the prompt, and the recipient may precede the channel. Invariant: a
header is read whole or not at all, and a header that cannot be read is shown.
"""

from collections.abc import Sequence
from typing import Final, Literal

from attrs import frozen

from polarnode.core.conversation import Tool
from polarnode.tokens.tool_calls import SPACE, CallBody, Cursor, ReadCall, read_object

START, CHANNEL_MARK, MESSAGE_MARK, CONSTRAIN_MARK = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ASSISTANT_ROLE: Final = "assistant"
_CHANNELS: Final = ("analysis", "commentary", "final")
_RECIPIENT_PREFIX: Final = "to="
# The limit in letters on an unfinished header. OpenAI's longest name is 64, and a growing header is read
# again each time.
_LONGEST: Final = 500
_USER_RECIPIENTS: Final = frozenset(("user", "assistant"))  # recipients that are no tools
_MESSAGE_BEGINNINGS: Final = tuple(
    f"{start}{CHANNEL_MARK}{channel}{MESSAGE_MARK}"
    for start in ("", START + _ASSISTANT_ROLE)
    for channel in _CHANNELS
)


@frozen
class Header:
    """What a message is, and the tool that it calls. `final`: the header has a recipient on the final
    channel, so the message is for the user unless it can be read as a call.
    """

    mode: Literal["text", "thinking", "call"]
    name: str | None = None
    final: bool = False


def read_header(body: CallBody) -> Header | None:
    """The header with which a text begins, including its `message` mark. None if it cannot be read."""
    cursor = Cursor(body)
    return _header(cursor)


def read_harmony(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call in a header and its message. None if it is malformed. An empty message means no arguments."""
    cursor = Cursor(body)
    header = _header(cursor)
    if header is None or header.name is None:
        return None
    # The model is shown a tool without parameters as `() => any`, and may send an empty message.
    arguments = cursor.rest.strip(SPACE) or "{}"
    return None if read_object(arguments) is None else (ReadCall(header.name, arguments),)


def may_be_header(body: CallBody) -> bool:
    """Whether a text may still become a header: before its channel it may hold only the role and the
    recipient.
    """
    text, started = body.text, body.has(START, 0)
    if len(text) > _LONGEST or body.find(CHANNEL_MARK, 0) >= 0:
        return len(text) <= _LONGEST
    if started and not text.startswith(START + _ASSISTANT_ROLE):
        return (START + _ASSISTANT_ROLE).startswith(text)
    words = (text.removeprefix(START + _ASSISTANT_ROLE) if started else text).strip(SPACE)
    return words.startswith(_RECIPIENT_PREFIX) or _RECIPIENT_PREFIX.startswith(words)


def is_message_start(text: str) -> bool:
    """Whether a header that was cut is only the beginning of a message to the user."""
    return any(beginning.startswith(text) for beginning in _MESSAGE_BEGINNINGS)


def names_recipient(text: str) -> bool:
    """Whether a header names a recipient."""
    return _RECIPIENT_PREFIX in text


def _header(cursor: Cursor) -> Header | None:
    body, text = cursor.body, cursor.until(MESSAGE_MARK)
    if text is None or (body.has(START, 0) and not text.startswith(START + _ASSISTANT_ROLE)):
        return None
    constrained, channel_at = (_place(body, tag, len(text)) for tag in (CONSTRAIN_MARK, CHANNEL_MARK))
    head = text[: min(constrained, channel_at)].removeprefix(START + _ASSISTANT_ROLE).split()
    channel, *words = text[channel_at + len(CHANNEL_MARK) : constrained].split() or ("",)
    kind = text[constrained + len(CONSTRAIN_MARK) :].split()
    to = [word for word in (*head, *words) if word.startswith(_RECIPIENT_PREFIX)]
    kinds = [*(word for word in words if word not in to), *kind]
    if (
        channel not in ("", *_CHANNELS)
        or len(to) > 1
        or len(kinds) > 1
        or any(word not in to for word in head)
        or constrained < channel_at < len(text)
    ):
        return None
    return _message(to[0].removeprefix(_RECIPIENT_PREFIX) if to else "user", channel)


def _message(recipient: str, channel: str) -> Header | None:
    if recipient in _USER_RECIPIENTS:
        return Header("thinking" if channel == "analysis" else "text")
    name = recipient.removeprefix("functions.")
    return Header("call", name, channel == "final") if name else None


def _place(body: CallBody, tag: str, end: int) -> int:
    """The position of a tag in a header; the header's end if it is absent."""
    at = body.find(tag, 0)
    return at if 0 <= at < end else end
