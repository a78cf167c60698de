"""Anthropic Messages: a request into a conversation, its tools and how to sample.

The rule: no field we do not know is ever a reason to refuse, because Claude Code answers a 400 by changing its prompt.
"""

from collections.abc import Mapping
from typing import assert_never

from polarnode.conversation import Conversation, ModelRequest, Sampling, Tool
from polarnode.errors import Refused
from polarnode.providers.anthropic.messages import messages, referenced, volatile
from polarnode.providers.anthropic.shapes import AnyChoice, MessagesRequest, NamedChoice, ThinkingShape, ToolShape
from polarnode.providers.shapes import read_body

_HINTS = {"session": "x-claude-code-session-id", "agent": "x-claude-code-agent-id", "parent": "x-claude-code-parent-agent-id"}


def read(body: bytes, *, headers: Mapping[str, str], model: str | None, counting: bool) -> ModelRequest:
    """A Messages body, or (`counting`) a count_tokens body. Refused with the path of the field."""
    request, unknown = read_body(body, MessagesRequest)
    if request.max_tokens is None and not counting:
        raise Refused("max_tokens is missing: it is required", path="$.max_tokens")
    tools, dropped = _tools(request)
    conversation = Conversation(
        messages=messages(request.system, request.messages),
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        thinking=_thinking(request.thinking),
    )
    return ModelRequest(
        provider="anthropic",
        model=model or request.model,
        conversation=conversation,
        sampling=_sampling(request),
        stream=bool(request.stream),
        hints=_hints(headers),
        ignored=unknown + dropped + (("$.system",) if volatile(request.system) else ()),
    )


def _tools(request: MessagesRequest) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools the model is shown, and the paths of those it can not call: hosted ones, and deferred ones nobody has loaded yet."""
    loaded = referenced(request.messages)
    tools, dropped = [], []
    for index, shape in enumerate(request.tools or ()):
        path = f"$.tools[{index}]"
        if _hosted(shape) or (shape.defer_loading and shape.name not in loaded):
            dropped.append(path)
        else:
            tools.append(_tool(shape, path))
    return tuple(tools), tuple(dropped)


def _hosted(shape: ToolShape) -> bool:
    return shape.type not in (None, "custom") and shape.input_schema is None


def _tool(shape: ToolShape, path: str) -> Tool:
    for name in ("name", "input_schema"):
        if getattr(shape, name) is None:
            raise Refused(f"{path[2:]}.{name} is missing: it is required", path=f"{path}.{name}")
    return Tool(name=shape.name or "", description=shape.description or "", parameters=shape.input_schema or {})


def _tool_choice(request: MessagesRequest, tools: tuple[Tool, ...]) -> str:
    match request.tool_choice:
        case None:
            return "auto"
        case AnyChoice(word):
            return "required" if word == "any" else word
        case NamedChoice(name=name):
            if all(tool.name != name for tool in tools):
                raise Refused(f"tool_choice names {name!r}, which is not among the tools: add it", path="$.tool_choice.name")
            return name
        case _:
            assert_never(request.tool_choice)


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


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """Who asks, by Claude Code's headers; the main agent has no agent id. Nothing for other clients."""
    found = {name: headers.get(header) or "" for name, header in _HINTS.items()}
    return found if any(found.values()) else {}
