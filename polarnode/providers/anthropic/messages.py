"""Anthropic Messages: its messages into ours, which are flat.

The rules: the order of a user message's blocks is kept, a tool result becoming a message of its own; assistant messages in a row are one
turn, as this API defines (an echoed answer may come back split), while user and system messages stay one to one, so that a history that is
only appended to reads as one that is only appended to. `is_error` adds nothing: harnesses say in the result's text what went wrong.
"""

from collections.abc import Iterable, Iterator
from typing import assert_never

from polarnode.conversation import Message, ToolCall
from polarnode.providers.anthropic.ids import inward
from polarnode.providers.anthropic.shapes import (
    AssistantBlock,
    AssistantMessage,
    MessageShape,
    NotTextBlock,
    RedactedThinkingBlock,
    ResultContent,
    SystemContent,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    UserMessage,
)
from polarnode.providers.shapes import compact, not_text, paragraphs

# A line Claude Code puts before its system prompt, with a nonce in it on every request: rendered, it would break each prompt's prefix at once.
VOLATILE = "x-anthropic-billing-header:"


def messages(system: SystemContent, shapes: Iterable[MessageShape]) -> tuple[Message, ...]:
    """The whole conversation: the system prompt first, when there is one."""
    head = paragraphs(_without_volatile(text) for text in _texts(system))
    found = [Message(role="system", text=head)] if head else []
    for shape in shapes:
        for message in _message(shape):
            if message.role == "assistant" and found and found[-1].role == "assistant":
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
    return tuple(found)


def volatile(system: SystemContent) -> bool:
    """Whether the system prompt has a line that is left out."""
    return any(_without_volatile(text) != text for text in _texts(system))


def referenced(shapes: Iterable[MessageShape]) -> frozenset[str]:
    """The names of deferred tools that a tool result has loaded."""
    results = (block for shape in shapes for block in _blocks(shape) if isinstance(block, ToolResultBlock))
    parts = (part for result in results if not isinstance(result.content, str) for part in result.content or ())
    return frozenset(part.tool_name for part in parts if isinstance(part, ToolReferenceBlock))


def _blocks(shape: MessageShape) -> tuple[UserBlock, ...]:
    return shape.content if isinstance(shape, UserMessage) and not isinstance(shape.content, str) else ()


def _message(shape: MessageShape) -> Iterator[Message]:
    match shape:
        case SystemMessage():
            yield Message(role="system", text=paragraphs(_texts(shape.content)))
        case UserMessage():
            yield from _user(shape.content)
        case AssistantMessage():
            yield _assistant((TextBlock("text", shape.content),) if isinstance(shape.content, str) else shape.content)
        case _:
            assert_never(shape)


def _without_volatile(text: str) -> str:
    if VOLATILE not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(VOLATILE))


def _texts(content: SystemContent) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        yield from (block.text for block in content or ())


# ── user: texts and tool results in order ─────────────────────────────────────


def _user(content: str | tuple[UserBlock, ...]) -> Iterator[Message]:
    if isinstance(content, str):
        content = (TextBlock("text", content),)
    if not content:
        yield Message(role="user")  # one to one, even for nothing
    texts: list[str] = []
    for block in content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                yield from _told(texts)
                texts = []
                yield Message(role="tool", text=_result(block.content), call_id=inward(block.tool_use_id))
            case NotTextBlock():
                raise not_text(block.type)
            case _:
                assert_never(block)
    yield from _told(texts)


def _told(texts: list[str]) -> Iterator[Message]:
    if texts:
        yield Message(role="user", text=paragraphs(texts))


def _result(content: ResultContent) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return paragraphs(_result_text(part) for part in content)


def _result_text(part: TextBlock | ToolReferenceBlock | NotTextBlock) -> str:
    match part:
        case TextBlock():
            return part.text
        case ToolReferenceBlock():
            return f"Tool loaded: {part.tool_name}"
        case NotTextBlock():
            raise not_text(part.type)
        case _:
            assert_never(part)


# ── assistant: our own answer, come back ──────────────────────────────────────


def _assistant(blocks: tuple[AssistantBlock, ...]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    refs: list[str] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
                refs.append(block.signature or "")
            case RedactedThinkingBlock():
                refs.append(block.data)
            case ToolUseBlock():
                calls.append(ToolCall(id=inward(block.id), name=block.name, arguments=compact(block.input)))
                refs.append(inward(block.id))
            case NotTextBlock():
                raise not_text(block.type)
            case _:
                assert_never(block)
    # Joined as `Answer.text` and `Answer.thinking` join the parts we sent.
    return Message(role="assistant", text="".join(texts), calls=tuple(calls), thinking="".join(thoughts), refs=tuple(filter(None, refs)))


def _joined(first: Message, then: Message) -> Message:
    return Message(
        role="assistant",
        text=first.text + then.text,
        calls=first.calls + then.calls,
        thinking=first.thinking + then.thinking,
        refs=first.refs + then.refs,
    )
