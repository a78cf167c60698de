"""Chat Completions: tools, and calls of them, both ways.

A custom (freeform) tool is shown to the model as a function of one string, `input`; by its `spelling` the
writer answers a call of it as custom, and the reader makes the same of an echoed one. A tool of any other
type runs on a server of its own: the model cannot call it, and its path is reported.
"""

from typing import Literal, TypeVar, assert_never

from attrs import field, frozen

from polarnode.core.conversation import Json, Tool, ToolCall
from polarnode.core.errors import Refused
from polarnode.providers import openai
from polarnode.providers.shapes import compact

T = TypeVar("T")


@frozen
class FunctionCall:
    """`arguments` is JSON text, kept verbatim; some clients send the object itself, or nothing for no
    arguments.
    """

    name: str
    arguments: str | dict[str, Json] | None = None


@frozen
class CustomCall:
    name: str
    input: str = ""


def _one_of_both(shape: "ToolCallShape", _: object, value: CustomCall | None) -> None:
    if value is None and shape.function is None:
        raise Refused("function is missing: a tool call has one, or a custom", path="$.function")


@frozen
class ToolCallShape:
    """One class for all types, as many clients omit the type. Pi sends no id for a call that had none
    (harnesses.md 12, `noid`).
    """

    id: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = field(default=None, validator=_one_of_both)


@frozen
class FunctionShape:
    """`strict` is for engines that can hold a call to its schema; it is reported as not used."""

    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


@frozen
class GrammarShape:
    definition: str
    syntax: str | None = None


@frozen
class FormatShape:
    type: str | None = None
    grammar: GrammarShape | None = None


@frozen
class CustomShape:
    name: str
    description: str | None = None
    format: FormatShape | None = None


@frozen
class ToolShape:
    type: str
    function: FunctionShape | None = None
    custom: CustomShape | None = None


@frozen
class FunctionNameShape:
    name: str


@frozen
class FunctionChoice:
    type: Literal["function"]
    function: FunctionNameShape


@frozen
class CustomChoice:
    type: Literal["custom"]
    custom: FunctionNameShape


@frozen
class AllowedTools:
    mode: Literal["auto", "required"] = "auto"


@frozen
class AllowedChoice:
    """A subset of the tools. Only its mode is used: all tools are rendered, and a prompt cannot enforce the
    subset.
    """

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["auto", "none", "required"] | FunctionChoice | CustomChoice | AllowedChoice | None


@frozen(kw_only=True)
class ToolList:
    """The tools shown to the model, the paths of what was not used, and notes for readers of the turn."""

    tools: tuple[Tool, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def read_tools(shapes: tuple[ToolShape, ...]) -> ToolList:
    tools, ignored, notes = [], [], []
    for index, shape in enumerate(shapes):
        path = f"$.tools[{index}]"
        if shape.type == "function":
            function = _there(shape.function, f"{path}.function")
            ignored += [f"{path}.function.strict"] if function.strict else []
            tools.append(
                Tool(
                    name=function.name,
                    description=function.description or "",
                    parameters=function.parameters or {},
                )
            )
        elif shape.type == "custom":
            custom = _there(shape.custom, f"{path}.custom")
            notes += (
                [f"the grammar of tool {custom.name!r} is shown to the model, and nothing enforces it"]
                if _rule(custom)
                else []
            )
            tools.append(openai.tool(custom.name, custom.description, _rule(custom)))
        else:
            ignored.append(path)
    return ToolList(tools=tuple(tools), ignored=tuple(ignored), notes=tuple(notes))


def _there(shape: T | None, path: str) -> T:
    if shape is None:
        raise Refused(f"{path.removeprefix('$.')} is missing: it is required", path=path)
    return shape


def _rule(shape: CustomShape) -> str:
    grammar = shape.format.grammar if shape.format is not None else None
    return openai.rule_of(grammar.definition, grammar.syntax or "grammar") if grammar is not None else ""


def read_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> str:
    """The tool choice in the terms of `Conversation`."""
    match choice:
        case None:
            return "auto"
        case str() as word:
            return word
        case AllowedChoice():
            return choice.allowed_tools.mode
        case FunctionChoice():
            return _known(choice.function.name, tools, "$.tool_choice.function.name")
        case CustomChoice():
            return _known(choice.custom.name, tools, "$.tool_choice.custom.name")
        case _:
            assert_never(choice)


def _known(name: str, tools: tuple[Tool, ...], path: str) -> str:
    if all(tool.name != name for tool in tools):
        raise Refused(f"tool_choice names {name!r}, which is not among the tools: add it", path=path)
    return name


# ── calls ─────────────────────────────────────────────────────────────────────


def read_call(shape: ToolCallShape) -> ToolCall:
    """Read an echoed call; a custom call as the model made it."""
    if shape.function is None:
        made = shape.custom or CustomCall(name="")  # the shape requires one of the two
        return ToolCall(id=shape.id or "", name=made.name, arguments=openai.arguments_of(made.input))
    arguments = shape.function.arguments
    return ToolCall(
        id=shape.id or "",
        name=shape.function.name,
        arguments=arguments if isinstance(arguments, str) else compact(arguments or {}),
    )


def call_json(call: ToolCall, tools: tuple[Tool, ...]) -> dict[str, Json]:
    """A call in the format of its tool's kind. A custom call that is not an object with an `input` is sent
    unchanged.
    """
    spelled = next((tool.spelling for tool in tools if tool.name == call.name), {})
    if spelled != openai.CUSTOM:
        return {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
    return {
        "id": call.id,
        "type": "custom",
        "custom": {"name": call.name, "input": openai.text_of(call.arguments)},
    }
