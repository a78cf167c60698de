"""Anthropic Messages: its messages into ours, which are flat.

The rules: the order of a user message's blocks is kept, a tool result becoming a message of its own; assistant messages in a row are one
turn, as this API defines (an echoed answer may come back split), while user and system messages stay one to one, so that a history that is
only appended to reads as one that is only appended to. `is_error` adds nothing: harnesses say in the result's text what went wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from polarnode.conversation import Message, ToolCall
from polarnode.providers.anthropic.blocks import NO_TOOLS, result_text, textual
from polarnode.providers.anthropic.ids import inward
from polarnode.providers.anthropic.shapes import (
    AssistantBlock,
    AssistantMessage,
    DocumentBlock,
    MessageShape,
    NotTextBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerBlock,
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
from polarnode.providers.volatile import without_lines


def messages(system: SystemContent, shapes: Iterable[MessageShape], later: Mapping[str, str] = NO_TOOLS) -> tuple[Message, ...]:
    """The whole conversation: the system prompt first, when there is one. `later` are the deferred tools, as they are told where referred to."""
    head = paragraphs(without_lines(text) for text in _texts(system))
    found = [Message(role="system", text=head)] if head else []
    for shape in shapes:
        for message in _message(shape, later):
            if message.role == "assistant" and found and found[-1].role == "assistant":
                found[-1] = found[-1].joined(message)
            else:
                found.append(message)
    return tuple(found)


def volatile(system: SystemContent) -> bool:
    """Whether the system prompt has a line that is left out."""
    return any(without_lines(text) != text for text in _texts(system))


def referenced(shapes: Iterable[MessageShape]) -> frozenset[str]:
    """The names of deferred tools that a tool result has loaded."""
    blocks = [block for shape in shapes if isinstance(shape, UserMessage) and isinstance(shape.content, tuple) for block in shape.content]
    results = [part for block in blocks if isinstance(block, ToolResultBlock) and isinstance(block.content, tuple) for part in block.content]
    return frozenset(block.tool_name for block in (*blocks, *results) if isinstance(block, ToolReferenceBlock))


def foreign(shapes: Iterable[MessageShape]) -> Iterator[str]:
    """The paths of blocks that another server's own tools left behind."""
    for place, shape in enumerate(shapes):
        for index, block in enumerate(shape.content if isinstance(shape.content, tuple) else ()):
            if isinstance(block, ServerBlock):
                yield f"$.messages[{place}].content[{index}]"


def _message(shape: MessageShape, later: Mapping[str, str]) -> Iterator[Message]:
    match shape:
        case SystemMessage():
            yield Message(role="system", text=paragraphs(_texts(shape.content)))
        case UserMessage():
            yield from _user(shape.content, later)
        case AssistantMessage():
            yield _assistant((TextBlock("text", shape.content),) if isinstance(shape.content, str) else shape.content or ())
        case _:
            assert_never(shape)


def _texts(content: SystemContent) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        yield from (block.text for block in content or ())


# ── user: texts and tool results in order ─────────────────────────────────────


def _user(content: str | tuple[UserBlock, ...] | None, later: Mapping[str, str]) -> Iterator[Message]:
    if isinstance(content, str):
        content = (TextBlock("text", content),)
    if not content:
        yield Message(role="user")  # one to one, even for nothing
    texts: list[str] = []
    for block in content or ():
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock():
                texts.append(textual(block))
            case ToolReferenceBlock():
                texts.append(result_text((block,), later))
            case ToolResultBlock():
                yield from _told(texts)
                texts = []
                yield Message(role="tool", text=result_text(block.content, later), call_id=inward(block.tool_use_id or "") or None)
            case NotTextBlock():
                raise not_text(block.type)
            case ServerBlock():
                pass  # named among what is not used
            case _:
                assert_never(block)
    yield from _told(texts)


def _told(texts: list[str]) -> Iterator[Message]:
    if texts:
        yield Message(role="user", text=paragraphs(texts))


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
                calls.append(_call(block))
                refs.append(calls[-1].id)
            case NotTextBlock():
                raise not_text(block.type)
            case ServerBlock():
                pass  # named among what is not used
            case _:
                assert_never(block)
    # Joined as `Answer.text` and `Answer.thinking` join the parts we sent.
    return Message(role="assistant", text="".join(texts), calls=tuple(calls), thinking="".join(thoughts), refs=tuple(filter(None, refs)))


def _call(block: ToolUseBlock) -> ToolCall:
    said = {} if block.input is None else block.input
    return ToolCall(id=inward(block.id or ""), name=block.name, arguments=said if isinstance(said, str) else compact(said))
