"""Anthropic Messages: a request into a conversation, its tools and how to sample.

The rule: no field we do not know is ever a reason to refuse, because Claude Code answers a 400 by changing its prompt.
"""

from collections.abc import Iterator, Mapping
from typing import assert_never

from attrs import field, frozen

from polarnode.conversation import Constraint, Conversation, Json, ModelRequest, Sampling, Tool
from polarnode.errors import Refused
from polarnode.providers.anthropic.blocks import told
from polarnode.providers.anthropic.messages import foreign, messages, referenced, volatile
from polarnode.providers.anthropic.shapes import AnyChoice, FormatShape, MessagesRequest, NamedChoice, ThinkingShape, ToolShape
from polarnode.providers.shapes import compact, read_body
from polarnode.providers.volatile import without_volatile

_HINTS = {"session": "x-claude-code-session-id", "agent": "x-claude-code-agent-id", "parent": "x-claude-code-parent-agent-id"}


def read(body: bytes, *, headers: Mapping[str, str], model: str | None, counting: bool) -> ModelRequest:
    """A Messages body, or (`counting`) a count_tokens body. Refused with the path of the field."""
    request, unknown = read_body(body, MessagesRequest)
    if request.max_tokens is None and not counting:
        raise Refused("max_tokens is missing: it is required", path="$.max_tokens")
    listed = _tools(request)
    said, dropped = without_volatile(messages(request.system, request.messages, {tool.name: told(tool) for tool in listed.later}))
    conversation = Conversation(
        messages=said,
        tools=listed.tools,
        tool_choice=_tool_choice(request, listed),
        thinking=_thinking(request.thinking),
    )
    return ModelRequest(
        provider="anthropic",
        model=model or request.model,
        conversation=conversation,
        sampling=_sampling(request),
        stream=bool(request.stream),
        hints=_hints(headers),
        constraint=_constraint(request),
        one_call=bool(request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        ignored=(*unknown, *_unused(request), *listed.ignored, *(("$.messages[-1]",) if dropped else ())),
        notes=tuple(_remarks(request)),
        extras=_extras(request),
    )


# ── tools ─────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class _Listed:
    """The tools at the head; those that are told where a result refers to them; and the paths of those the model never sees."""

    tools: tuple[Tool, ...]
    later: tuple[Tool, ...]
    ignored: tuple[str, ...] = field(factory=tuple)


def _tools(request: MessagesRequest) -> _Listed:
    """A deferred tool is never in the head's list, loaded or not: that list would change in the middle of a conversation."""
    loaded = referenced(request.messages)
    tools: list[Tool] = []
    later: list[Tool] = []
    ignored: list[str] = []
    for index, shape in enumerate(request.tools or ()):
        path = f"$.tools[{index}]"
        if _hosted(shape) or (shape.defer_loading and shape.name not in loaded):
            ignored.append(path)
        else:
            (later if shape.defer_loading else tools).append(_tool(shape, path))
    return _Listed(tools=tuple(tools), later=tuple(later), ignored=tuple(ignored))


def _hosted(shape: ToolShape) -> bool:
    return shape.type not in (None, "custom") and shape.input_schema is None


def _tool(shape: ToolShape, path: str) -> Tool:
    for name in ("name", "input_schema"):
        if getattr(shape, name) is None:
            raise Refused(f"{path[2:]}.{name} is missing: it is required", path=f"{path}.{name}")
    return Tool(name=shape.name or "", description=shape.description or "", parameters=shape.input_schema or {})


def _tool_choice(request: MessagesRequest, listed: _Listed) -> str:
    match request.tool_choice:
        case None:
            return "auto"
        case AnyChoice(type=word):
            return "required" if word == "any" else word
        case NamedChoice(name=name):
            if all(tool.name != name for tool in (*listed.tools, *listed.later)):
                raise Refused(f"tool_choice names {name!r}, which is not among the tools: add it", path="$.tool_choice.name")
            return name
        case _:
            assert_never(request.tool_choice)


# ── settings ──────────────────────────────────────────────────────────────────


def _thinking(shape: ThinkingShape | None) -> bool | None:
    return None if shape is None or shape.type == "adaptive" else shape.type == "enabled"


def _sampling(request: MessagesRequest) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,  # 0 and -1 both mean "all tokens"
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or (),
    )


def _constraint(request: MessagesRequest) -> Constraint | None:
    asked: FormatShape | None = (request.output_config.format if request.output_config else None) or request.output_format
    return None if asked is None else Constraint(kind="json_schema", text=compact(asked.schema))


def _unused(request: MessagesRequest) -> Iterator[str]:
    """What was read, or could be, and changes nothing."""
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        yield "$.thinking.budget_tokens"
    if request.output_config is not None and request.output_config.effort is not None:
        yield "$.output_config.effort"
    if volatile(request.system):
        yield "$.system"
    yield from foreign(request.messages)


def _remarks(request: MessagesRequest) -> Iterator[str]:
    if request.mcp_servers:
        yield "mcp_servers were given: this node connects to none, so the model does not see their tools"
    if any(foreign(request.messages)):
        yield "the history holds tools that another server ran: their blocks are left out"


def _extras(request: MessagesRequest) -> dict[str, Json]:
    """Whether the client wants to see no thinking, only its signatures."""
    return {"thinking": "omitted"} if request.thinking is not None and request.thinking.display == "omitted" else {}


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """Who asks. Claude Code's main agent has no agent id; opencode gives a sub-agent its own session id and its parent's, in every API."""
    found = {name: headers.get(header) or "" for name, header in _HINTS.items()}
    if any(found.values()):
        return found | ({"kind": "subagent"} if found["agent"] else {})
    session = headers.get("x-session-id") or headers.get("x-litellm-session-id") or ""
    parent = headers.get("x-parent-session-id") or ""
    if not session and not parent:
        return {}
    return {"session": session, "agent": session if parent else "", "parent": parent} | ({"kind": "subagent"} if parent else {})
