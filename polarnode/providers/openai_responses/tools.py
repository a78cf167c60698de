"""Responses: the tools shown to the model, and the spelling of its calls.

Every tool that the client can run is shown as a function under one name (`namespace.name`), with a `spelling`
from which the writer restores the tool's kind. Tools that run on the API's own servers are dropped, and their
path is reported. A tool that appears in the middle of a conversation is described as text at that place
(`describe_tools`), so that nothing before it changes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from attrs import define, evolve, field

from polarnode.core.codec.json import structure
from polarnode.core.conversation import Json, Tool
from polarnode.core.errors import Refused
from polarnode.providers import openai
from polarnode.providers.openai_responses.shapes import (
    CustomTool,
    FormatShape,
    FunctionTool,
    JsonObject,
    NamespaceTool,
    SearchTool,
    ShellTool,
)
from polarnode.providers.shapes import compact

T = TypeVar("T")

# OpenAI's name for no namespace. Members of it are shown by their plain names.
DEFAULT_NAMESPACE: Final = "functions"

_TEXT: Final[Json] = {"type": "string"}
_WHOLE: Final[Json] = {"type": "integer"}
_LOCAL_SHELL_TOOL: Final = Tool(
    name="local_shell",
    description="Runs a command on the user's machine and returns its output.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": _TEXT, "description": "The program and its arguments."},
            "working_directory": _TEXT,
            "timeout_ms": _WHOLE,
            "env": {"type": "object", "additionalProperties": _TEXT},
        },
        "required": ["command"],
    },
    spelling={"kind": "local_shell"},
)
_SHELL_TOOL: Final = Tool(
    name="shell",
    description="Runs shell commands on the user's machine, in order, and returns the output of each.",
    parameters={
        "type": "object",
        "properties": {
            "commands": {"type": "array", "items": _TEXT},
            "timeout_ms": _WHOLE,
            "max_output_length": _WHOLE,
        },
        "required": ["commands"],
    },
    spelling={"kind": "shell"},
)
_APPLY_PATCH_TOOL: Final = Tool(
    name="apply_patch",
    description="Creates, changes or deletes one file. The diff is in V4A format; deleting takes none.",
    parameters={
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT,
            "diff": _TEXT,
        },
        "required": ["type", "path"],
    },
    spelling={"kind": "apply_patch"},
)
_SEARCH_TOOL: Final = Tool(
    name="tool_search",
    description="Looks for further tools. Those it finds can be called from then on.",
    parameters={"type": "object", "properties": {"query": _TEXT}, "required": ["query"]},
    spelling={"kind": "tool_search"},
)


def full_name(name: str, namespace: str | None) -> str:
    """The one name by which the model knows a tool."""
    return name if namespace in (None, "", DEFAULT_NAMESPACE) else f"{namespace}.{name}"


def structure_at(value: Json, shape: type[T], path: str) -> T:
    """`value` as a `shape`. Raises Refused with a path from the root of the body."""
    try:
        return structure(value, shape)
    except Refused as error:
        raise Refused(f"{path.removeprefix('$.')}: {error}", path=path + (error.path or "$")[1:]) from None


@define(eq=False)
class ToolReader:
    """The content of lists of tools: the tools shown to the model, the paths of the others, and notes for
    readers of the turn.
    """

    tools: list[Tool] = field(factory=list)
    ignored: list[str] = field(factory=list)
    notes: list[str] = field(factory=list)

    def read(self, shapes: Iterable[Json], path: str) -> None:
        """Read more tools, from the list at `path`."""
        listed = [structure_at(shape, JsonObject, f"{path}[{index}]") for index, shape in enumerate(shapes)]
        searched = any(
            shape.get("type") == "tool_search" and shape.get("execution") == "client" for shape in listed
        )
        for index, shape in enumerate(listed):
            if searched and shape.get("defer_loading") is True:
                self.ignored.append(f"{path}[{index}]")  # This tool is shown once a search has found it.
            else:
                self._take(shape, f"{path}[{index}]", None)

    def _take(self, shape: JsonObject, path: str, namespace: str | None) -> None:
        read = _READERS.get(str(shape.get("type")))
        if shape.get("type") == "namespace" and namespace is None:
            self._namespace(structure_at(shape, NamespaceTool, path), path)
        elif read is None:
            self.ignored.append(path)
        else:
            tool = read(self, shape, path)
            if tool is None:
                self.ignored.append(path)
            else:
                self.tools.append(_within(tool, namespace))

    def _namespace(self, shape: NamespaceTool, path: str) -> None:
        """Read the members of a namespace. The namespace's own description is put before that of its first
        member, because there is no other place for it.
        """
        first = len(self.tools)
        for index, member in enumerate(shape.tools):
            place = f"{path}.tools[{index}]"
            self._take(structure_at(member, JsonObject, place), place, shape.name)
        if shape.description and len(self.tools) > first:
            tool = self.tools[first]
            self.tools[first] = evolve(
                tool, description=f"{shape.name}: {shape.description}\n\n{tool.description}"
            )

    def function(self, shape: JsonObject, path: str) -> Tool:
        found = structure_at(shape, FunctionTool, path)
        return Tool(name=found.name, description=found.description or "", parameters=found.parameters or {})

    def custom(self, shape: JsonObject, path: str) -> Tool:
        """A freeform tool. It takes one string, whose grammar is shown to the model."""
        found = structure_at(shape, CustomTool, path)
        rule = _rule(found.format)
        if rule:
            self.notes.append(
                f"{path.removeprefix('$.')}: the grammar of {found.name!r} is shown to the model, and nothing"
                " enforces it"
            )
        return openai.tool(found.name, found.description, rule)

    def search(self, shape: JsonObject, path: str) -> Tool | None:
        found = structure_at(shape, SearchTool, path)
        if found.execution != "client":
            return None
        return evolve(
            _SEARCH_TOOL,
            description=found.description or _SEARCH_TOOL.description,
            parameters=found.parameters or _SEARCH_TOOL.parameters,
        )

    def shell(self, shape: JsonObject, path: str) -> Tool | None:
        environment = structure_at(shape, ShellTool, path).environment
        local = environment is None or (isinstance(environment, dict) and environment.get("type") == "local")
        return _SHELL_TOOL if local else None

    def read_local_shell(self, shape: JsonObject, path: str) -> Tool:
        return _LOCAL_SHELL_TOOL

    def read_apply_patch(self, shape: JsonObject, path: str) -> Tool:
        return _APPLY_PATCH_TOOL


_READERS: Final[dict[str, Callable[[ToolReader, JsonObject, str], Tool | None]]] = {
    "function": ToolReader.function,
    "custom": ToolReader.custom,
    "tool_search": ToolReader.search,
    "shell": ToolReader.shell,
    "local_shell": ToolReader.read_local_shell,
    "apply_patch": ToolReader.read_apply_patch,
}


def _within(tool: Tool, namespace: str | None) -> Tool:
    """The tool under its full name. Its spelling keeps its namespace and its own name."""
    if namespace is None:
        return tool
    spelling = {"kind": "function", **tool.spelling, "name": tool.name, "namespace": namespace}
    return evolve(tool, name=full_name(tool.name, namespace), spelling=spelling)


def _rule(shape: FormatShape | None) -> str:
    if shape is None or not shape.definition:
        return ""
    return openai.grammar_text(shape.definition, shape.syntax or shape.type)


def describe_tools(tools: Iterable[Tool]) -> str:
    """Tools as text, one per line, in the form that most chat templates use in the system prompt."""
    return "\n".join(_line(tool) for tool in tools)


def _line(tool: Tool) -> str:
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


# ── tool choice ─────────────────────────────────────────────────


def tool_choice(choice: str | JsonObject | None, tools: Iterable[Tool]) -> tuple[str, list[str]]:
    """The tool choice in the terms of `Conversation`, and notes on what is not enforced."""
    if choice is None:
        return "auto", []
    if isinstance(choice, str):
        return _word(choice, "$.tool_choice"), []
    if choice.get("type") == "allowed_tools":
        note = (
            "tool_choice allows some of the tools: the model is shown all of them, and nothing keeps it from"
            " the others"
        )
        return _word(choice.get("mode", "auto"), "$.tool_choice.mode"), [note]
    names = list(_named(choice))
    found = next((tool.name for tool in tools if tool.name in names), None)
    if found is None and "name" not in choice and isinstance(choice.get("type"), str):
        return "auto", [
            f"tool_choice asks for {names[0]!r}, which runs on other servers: the model is left to choose"
        ]
    if found is None:
        raise Refused(
            f"tool_choice names {names[0]!r}, which is not among the tools the model can call: add it",
            path="$.tool_choice",
        )
    return found, []


def _word(word: Json, path: str) -> str:
    if word not in ("auto", "none", "required"):
        raise Refused(
            f"{path.removeprefix('$.')} must be 'auto', 'none', 'required' or a tool, not {word!r}", path=path
        )
    return str(word)


def _named(choice: JsonObject) -> Iterator[str]:
    """The names that a choice may mean: the tool's own name or, for tools without one, their type."""
    name, namespace = choice.get("name"), choice.get("namespace")
    if isinstance(name, str):
        yield full_name(name, namespace if isinstance(namespace, str) else None)
        yield name
    else:
        yield str(choice.get("type"))
