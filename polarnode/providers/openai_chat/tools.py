"""Chat Completions: tools and their calls, in both directions.

A custom (freeform) tool is shown to the model as a function of one string, `input`. By the tool's `spelling`
the writer answers its call as a custom call, and the reader turns an echoed custom call back into that
function call. A tool of any other type runs on another server: the model cannot call it, and its path is
reported.
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
    """`arguments` is JSON text, kept verbatim. Some clients send the object itself, or nothing if there are
    no arguments.
    """

    name: str
    arguments: str | dict[str, Json] | None = None


@frozen
class CustomCall:
    name: str
    input: str = ""


def _require_function_or_custom(shape: "ToolCallShape", _: object, value: CustomCall | None) -> None:
    if value is None and shape.function is None:
        raise Refused("function is missing: a tool call has one, or a custom", path="$.function")


@frozen
class ToolCallShape:
    """One class for all types, because many clients omit the type. Pi sends no id for a call that
    had none.
    """

    id: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = field(default=None, validator=_require_function_or_custom)


@frozen
class FunctionShape:
    """`strict` is for engines that can enforce the schema of a call. It is reported as not used."""

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
    """A subset of the tools. Only its mode is used, because all tools are rendered and a prompt cannot
    enforce the subset.
    """

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["auto", "none", "required"] | FunctionChoice | CustomChoice | AllowedChoice | None


@frozen(kw_only=True)
class ToolList:
    """The tools shown to the model, the paths of what is not used, and notes for readers of the turn."""

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
    return openai.grammar_text(grammar.definition, grammar.syntax or "grammar") if grammar is not None else ""


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
    """Read an echoed call. A custom call becomes the function call that the model made."""
    if shape.function is None:
        made = shape.custom or CustomCall(name="")  # The shape requires one of the two.
        return ToolCall(id=shape.id or "", name=made.name, arguments=openai.arguments_of(made.input))
    arguments = shape.function.arguments
    return ToolCall(
        id=shape.id or "",
        name=shape.function.name,
        arguments=arguments if isinstance(arguments, str) else compact(arguments or {}),
    )


def call_json(call: ToolCall, tools: tuple[Tool, ...]) -> dict[str, Json]:
    """A call in the format of its tool's kind. Arguments of a custom call that are no object with an `input`
    are sent unchanged.
    """
    spelled = next((tool.spelling for tool in tools if tool.name == call.name), {})
    if spelled != openai.CUSTOM_SPELLING:
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
