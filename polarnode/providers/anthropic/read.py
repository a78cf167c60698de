"""Anthropic Messages: read a request as a conversation with its tools and its sampling.

The order of a user message's blocks is kept, and a tool result becomes a message of its own. Consecutive
assistant messages are one turn, as this API defines, because an echoed answer may come back split. User and
system messages stay one to one, so that an append-only history stays append-only. The same block becomes the
same text wherever it stands. A deferred tool is described where a result refers to it, because the tool list
at the head must not change. `is_error` adds nothing: harnesses report the error in the result's text.

An unknown field is never a reason to refuse, because Claude Code answers a 400 by changing its prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final, assert_never

from attrs import field, frozen

from polarnode.core.conversation import (
    Constraint,
    Conversation,
    Json,
    Message,
    ModelRequest,
    Sampling,
    Tool,
    ToolCall,
)
from polarnode.core.errors import Refused
from polarnode.providers.anthropic.shapes import (
    AnyChoice,
    AssistantBlock,
    AssistantMessage,
    ContentSource,
    DocumentBlock,
    FormatShape,
    MessageShape,
    MessagesRequest,
    NamedChoice,
    NotTextBlock,
    RedactedThinkingBlock,
    ResultContent,
    ResultPart,
    SearchResultBlock,
    ServerBlock,
    SystemContent,
    SystemMessage,
    TextBlock,
    TextSource,
    TextualBlock,
    ThinkingBlock,
    ThinkingConfigShape,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolShape,
    ToolUseBlock,
    UnseenBlock,
    UserBlock,
    UserMessage,
)
from polarnode.providers.anthropic.write import to_node_id
from polarnode.providers.read_parts import PartsCache
from polarnode.providers.shapes import (
    compact,
    join_answers,
    non_text_error,
    paragraphs,
    read_body,
    replace_media,
    unseen,
)
from polarnode.providers.volatile import without_billing_line, without_volatile

# ── blocks ────────────────────────────────────────────────────────────

NO_DESCRIPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


def describe_tool(tool: Tool) -> str:
    """A tool as text, in the form that most chat templates use in the system prompt."""
    return compact(
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
    )


def block_text(block: TextualBlock) -> str:
    """The text of a block. A document or a search result has its title before it."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return paragraphs((block.title, block.source, *(part.text for part in block.content)))
        case DocumentBlock():
            return _document_text(block, told)
        case _:
            assert_never(block)


def result_text(content: ResultContent, later: Mapping[str, str]) -> str:
    """A tool's result as text."""
    if content is None or isinstance(content, str):
        return replace_media(content or "")
    return paragraphs(_result_part_text(part, later) for part in content)


def _result_part_text(part: ResultPart, later: Mapping[str, str]) -> str:
    match part:
        case DocumentBlock():
            return _document_text(part, described)
        case TextBlock(text=text):
            return replace_media(text)
        case UnseenBlock(type=kind):
            return unseen(kind)
        case ToolReferenceBlock(tool_name=name):
            return paragraphs((f"Tool loaded: {name}", later.get(name, "")))
        case _:
            return block_text(part)


def _document_text(block: DocumentBlock, shown: Callable[[TextBlock | None, str], str]) -> str:
    """A document with its title before it. `shown` returns the text for each of its parts: it gets a text
    block, or None and the kind of a part that is not text.
    """
    source = block.source
    parts: tuple[TextBlock | UnseenBlock, ...] = ()
    match source:
        case TextSource(data=text) | ContentSource(content=str() as text):
            parts = (TextBlock("text", text),)
        case ContentSource(content=tuple() as parts):
            pass
        case _:
            return paragraphs((block.title or "", block.context or "", shown(None, "document")))
    texts = (shown(part, "") if isinstance(part, TextBlock) else shown(None, part.type) for part in parts)
    return paragraphs((block.title or "", block.context or "", *texts))


def told(text: TextBlock | None, kind: str) -> str:
    """The text of a part of a user's message. Raises Refused for a part that is not text."""
    if text is None:
        raise non_text_error(kind)
    return text.text


def described(text: TextBlock | None, kind: str) -> str:
    """The text of a part of a tool's result, or of a part beside one. Media are replaced by a placeholder."""
    return unseen(kind) if text is None else replace_media(text.text)


# ── messages ────────────────────────────────────────────────────────────


def messages(
    system: SystemContent,
    shapes: Iterable[MessageShape],
    later: Mapping[str, str] = NO_DESCRIPTIONS,
    parts: PartsCache | None = None,
) -> tuple[Message, ...]:
    """The whole conversation, the system prompt first if there is one. `later` maps deferred tools to their
    descriptions, which are shown where a result refers to the tool. `parts` caches the parts of the session's
    earlier requests.
    """
    head = paragraphs(without_billing_line(text) for text in _texts(system))
    found = (Message(role="system", text=head),) if head else ()
    each = (
        (tuple(_message(shape, later)) for shape in shapes)
        if later
        else (parts or PartsCache()).convert(shapes, _alone)
    )
    return tuple(join_answers(chain(found, *each)))


def volatile(system: SystemContent) -> bool:
    """Whether the system prompt has a line that is removed."""
    return any(without_billing_line(text) != text for text in _texts(system))


def referenced(shapes: Iterable[MessageShape]) -> frozenset[str]:
    """The names of deferred tools that a tool result has loaded."""
    blocks = [
        block
        for shape in shapes
        if isinstance(shape, UserMessage) and isinstance(shape.content, tuple)
        for block in shape.content
    ]
    results = [
        part
        for block in blocks
        if isinstance(block, ToolResultBlock) and isinstance(block.content, tuple)
        for part in block.content
    ]
    return frozenset(
        block.tool_name for block in (*blocks, *results) if isinstance(block, ToolReferenceBlock)
    )


def foreign(shapes: Iterable[MessageShape], parts: PartsCache | None = None) -> Iterator[str]:
    """The paths of blocks that the own tools of another server left."""
    for place, found in enumerate((parts or PartsCache()).convert(shapes, _foreign_blocks)):
        for index in found:
            yield f"$.messages[{place}].content[{index}]"


def _foreign_blocks(shape: MessageShape) -> tuple[int, ...]:
    content = shape.content if isinstance(shape.content, tuple) else ()
    return tuple(index for index, block in enumerate(content) if isinstance(block, ServerBlock))


def _alone(shape: MessageShape) -> tuple[Message, ...]:
    """The messages of a shape in a request without deferred tools."""
    return tuple(_message(shape, NO_DESCRIPTIONS))


def _message(shape: MessageShape, later: Mapping[str, str]) -> Iterator[Message]:
    match shape:
        case SystemMessage():
            yield Message(role="system", text=paragraphs(_texts(shape.content)))
        case UserMessage():
            yield from _user(shape.content, later)
        case AssistantMessage():
            yield _assistant_message(
                (TextBlock("text", shape.content),) if isinstance(shape.content, str) else shape.content or ()
            )
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
        yield Message(role="user")  # There is one message per entry, even for an empty one.
    texts: list[str] = []
    # A part that is not text is described if the message has a tool result, and refused if it has none.
    shown = described if any(isinstance(block, ToolResultBlock) for block in content or ()) else told
    for block in content or ():
        match block:
            case TextBlock() | SearchResultBlock():
                texts.append(block_text(block))
            case DocumentBlock():
                texts.append(_document_text(block, shown))
            case UnseenBlock():
                texts.append(shown(None, block.type))
            case ToolReferenceBlock():
                texts.append(result_text((block,), later))
            case ToolResultBlock():
                yield from _pending_user_message(texts)
                texts = []
                yield Message(
                    role="tool",
                    text=result_text(block.content, later),
                    call_id=to_node_id(block.tool_use_id or "") or None,
                )
            case ServerBlock():
                pass  # These blocks are reported among the unused paths.
            case _:
                assert_never(block)
    yield from _pending_user_message(texts)


def _pending_user_message(texts: list[str]) -> Iterator[Message]:
    if texts:
        yield Message(role="user", text=paragraphs(texts))


# ── assistant: this node's own answer, echoed ──────────────────────────────────────


def _assistant_message(blocks: tuple[AssistantBlock, ...]) -> Message:
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
                raise non_text_error(block.type)
            case ServerBlock():
                pass  # These blocks are reported among the unused paths.
            case _:
                assert_never(block)
    # The parts are joined as in `Answer.text` and `Answer.thinking`.
    return Message(
        role="assistant",
        text="".join(texts),
        calls=tuple(calls),
        thinking="".join(thoughts),
        refs=tuple(filter(None, refs)),
    )


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = {} if block.input is None else block.input
    return ToolCall(
        id=to_node_id(block.id or ""),
        name=block.name,
        arguments=arguments if isinstance(arguments, str) else compact(arguments),
    )


# ── read ────────────────────────────────────────────────────────────

_HINTS = {
    "session": "x-claude-code-session-id",
    "agent": "x-claude-code-agent-id",
    "parent": "x-claude-code-parent-agent-id",
}


def read(
    body: bytes,
    *,
    headers: Mapping[str, str],
    model: str | None,
    counting: bool,
    parts: PartsCache | None = None,
) -> ModelRequest:
    """Read a Messages body, or the body of a count_tokens request (`counting`). Raises Refused with the path
    of the field.
    """
    parts = parts or PartsCache()
    request, unknown = read_body(body, MessagesRequest, parts)
    if request.max_tokens is None and not counting:
        raise Refused("max_tokens is missing: it is required", path="$.max_tokens")
    listed = _tools(request, parts)
    later = {tool.name: describe_tool(tool) for tool in listed.later}
    kept, dropped = without_volatile(messages(request.system, request.messages, later, parts))
    others = tuple(foreign(request.messages, parts))
    unread = (*_unused(request), *others, *listed.ignored)
    conversation = Conversation(
        messages=kept,
        tools=listed.tools,
        tool_choice=_tool_choice(request, listed),
        thinking=_thinking(request.thinking),
        prefilled=bool(kept) and kept[-1].role == "assistant",
    )
    return ModelRequest(
        provider="anthropic",
        model=model or request.model,
        conversation=conversation,
        sampling=_sampling(request),
        stream=bool(request.stream),
        hints=_hints(headers),
        constraint=_read_constraint(request),
        one_call=bool(request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        ignored=(*unknown, *unread, *(("$.messages[-1]",) if dropped else ())),
        notes=tuple(_request_notes(request, others)),
        extras=_writer_extras(request),
    )


# ── tools ─────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class _Listed:
    """The tools in the prompt's head, those that are described where a result refers to them, and the paths
    of those that the model never sees.
    """

    tools: tuple[Tool, ...]
    later: tuple[Tool, ...]
    ignored: tuple[str, ...] = field(factory=tuple)


def _tools(request: MessagesRequest, parts: PartsCache) -> _Listed:
    """Read the tools. A deferred tool is never in the list at the head, loaded or not, because that list
    would change in the middle of a conversation.
    """
    shapes = request.tools or ()
    if any(shape.defer_loading for shape in shapes):
        return _listed(shapes, referenced(request.messages))
    return parts.convert_list(shapes, _listed)


def _listed(shapes: tuple[ToolShape, ...], loaded: frozenset[str] = frozenset()) -> _Listed:
    """Divide a list of tools. `loaded` names the deferred tools to which a result refers."""
    tools: list[Tool] = []
    later: list[Tool] = []
    ignored: list[str] = []
    for index, shape in enumerate(shapes):
        path = f"$.tools[{index}]"
        if _is_hosted(shape) or (shape.defer_loading and shape.name not in loaded):
            ignored.append(path)
        else:
            (later if shape.defer_loading else tools).append(_tool(shape, path))
    return _Listed(tools=tuple(tools), later=tuple(later), ignored=tuple(ignored))


def _is_hosted(shape: ToolShape) -> bool:
    return shape.type not in (None, "custom") and shape.input_schema is None


def _tool(shape: ToolShape, path: str) -> Tool:
    for name in ("name", "input_schema"):
        if getattr(shape, name) is None:
            raise Refused(f"{path[2:]}.{name} is missing: it is required", path=f"{path}.{name}")
    return Tool(
        name=shape.name or "", description=shape.description or "", parameters=shape.input_schema or {}
    )


def _tool_choice(request: MessagesRequest, listed: _Listed) -> str:
    match request.tool_choice:
        case None:
            return "auto"
        case AnyChoice(type=word):
            return "required" if word == "any" else word
        case NamedChoice(name=name):
            if all(tool.name != name for tool in (*listed.tools, *listed.later)):
                raise Refused(
                    f"tool_choice names {name!r}, which is not among the tools: add it",
                    path="$.tool_choice.name",
                )
            return name
        case _:
            assert_never(request.tool_choice)


# ── settings ──────────────────────────────────────────────────────────────────


def _thinking(shape: ThinkingConfigShape | None) -> bool | None:
    return None if shape is None or shape.type == "adaptive" else shape.type == "enabled"


def _sampling(request: MessagesRequest) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        # 0 and -1 both mean all tokens
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or (),
    )


def _read_constraint(request: MessagesRequest) -> Constraint | None:
    shape: FormatShape | None = request.output_config.format if request.output_config else None
    path = "$.output_format.schema" if shape is None else "$.output_config.format.schema"
    shape = shape or request.output_format
    return None if shape is None else Constraint(kind="json_schema", text=compact(shape.schema), path=path)


def _unused(request: MessagesRequest) -> Iterator[str]:
    """The paths of fields that were read, or could be, but have no effect."""
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        yield "$.thinking.budget_tokens"
    if request.output_config is not None and request.output_config.effort is not None:
        yield "$.output_config.effort"
    if volatile(request.system):
        yield "$.system"


def _request_notes(request: MessagesRequest, others: tuple[str, ...]) -> Iterator[str]:
    if request.mcp_servers:
        yield "mcp_servers were given: this node connects to none, so the model does not see their tools"
    if others:
        yield "the history holds tools that another server ran: their blocks are left out"


def _writer_extras(request: MessagesRequest) -> dict[str, Json]:
    """Whether the client wants only the signatures of thinking and not its text."""
    return (
        {"thinking": "omitted"}
        if request.thinking is not None and request.thinking.display == "omitted"
        else {}
    )


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """The agent that sent the request. Claude Code's main agent has no agent id; opencode sends a sub-agent's
    session id and its parent's, in every API.
    """
    found = {name: headers.get(header) or "" for name, header in _HINTS.items()}
    if any(found.values()):
        return found | ({"kind": "subagent"} if found["agent"] else {})
    session = headers.get("x-session-id") or headers.get("x-litellm-session-id") or ""
    parent = headers.get("x-parent-session-id") or ""
    if not session and not parent:
        return {}
    return {"session": session, "agent": session if parent else "", "parent": parent} | (
        {"kind": "subagent"} if parent else {}
    )
