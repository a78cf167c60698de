"""Responses: which tools the model is shown, and under which name."""

from typing import Any

import pytest

from polarnode.core.conversation import Tool
from polarnode.core.errors import Refused
from polarnode.providers.openai_responses.tools import ToolReader, describe_tools, full_name, tool_choice

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"z": {}, "a": {}}}


def shown(*tools: dict[str, Any]) -> ToolReader:
    box = ToolReader()
    box.read(tools, "$.tools")
    return box


def test_function_is_shown_unchanged() -> None:
    box = shown(
        {"type": "function", "name": "go", "description": None, "strict": True, "parameters": SCHEMA},
        {"type": "function", "name": "stop"},
    )
    assert box.tools == [Tool(name="go", parameters=SCHEMA), Tool(name="stop")]
    assert list(box.tools[0].parameters["properties"]) == ["z", "a"]  # type: ignore[arg-type]
    assert (box.ignored, box.notes) == ([], [])


def test_freeform_tool_is_function() -> None:
    """A freeform tool is a function of one string."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    box = shown(
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
        {"type": "custom", "name": "say", "format": {"type": "text"}},
    )
    patch, say = box.tools
    assert patch.description == "Patches.\n\nThe input must follow this lark grammar:\nstart: x"
    assert (patch.parameters["required"], patch.spelling) == (["input"], {"kind": "custom"})
    assert say.description == ""
    assert box.notes == [
        "tools[0]: the grammar of 'apply_patch' is shown to the model, and nothing enforces it"
    ]


def test_namespace_shows_its_members() -> None:
    members = [
        {"type": "function", "name": "spawn", "description": "Spawns."},
        {"type": "custom", "name": "exec"},
        {"type": "web_search"},
    ]
    box = shown(
        {"type": "function", "name": "go"},
        {"type": "namespace", "name": "agents", "description": "About agents.", "tools": members},
    )
    assert [tool.name for tool in box.tools] == ["go", "agents.spawn", "agents.exec"]
    assert box.tools[1].description == "agents: About agents.\n\nSpawns."
    assert box.tools[1].spelling == {"kind": "function", "name": "spawn", "namespace": "agents"}
    assert box.tools[2].spelling == {"kind": "custom", "name": "exec", "namespace": "agents"}
    assert box.ignored == ["$.tools[1].tools[2]"]


def test_default_namespace_is_hidden() -> None:
    (tool,) = shown(
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
    ).tools
    assert (tool.name, tool.spelling) == (
        "exec",
        {"kind": "custom", "name": "exec", "namespace": "functions"},
    )
    assert [full_name("exec", space) for space in (None, "", "functions", "a")] == [
        "exec",
        "exec",
        "exec",
        "a.exec",
    ]


def test_nested_namespace_is_dropped() -> None:
    assert shown(
        {"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": []}]}
    ).ignored == ["$.tools[0].tools[0]"]


@pytest.mark.parametrize(
    ("tool", "name", "required"),
    [
        ({"type": "local_shell"}, "local_shell", ["command"]),
        ({"type": "shell"}, "shell", ["commands"]),
        ({"type": "shell", "environment": {"type": "local"}}, "shell", ["commands"]),
        ({"type": "apply_patch"}, "apply_patch", ["type", "path"]),
        ({"type": "tool_search", "execution": "client"}, "tool_search", ["query"]),
    ],
)
def test_client_tool_is_function(tool: dict[str, Any], name: str, required: list[str]) -> None:
    """A tool that the client runs is a function."""
    (found,) = shown(tool).tools
    assert (found.name, found.parameters["required"], found.spelling["kind"]) == (name, required, name)
    assert found.description


def test_search_tool_keeps_client_words() -> None:
    (found,) = shown(
        {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": SCHEMA}
    ).tools
    assert (found.description, found.parameters) == ("Finds.", SCHEMA)


def test_hosted_tools_are_named() -> None:
    """Tools that run elsewhere are dropped and named."""
    hosted = [
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "computer_use_preview",
        "tool_search",
    ]
    box = shown(
        *({"type": kind} for kind in hosted),
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"name": "x"},
    )
    assert (box.tools, box.ignored) == ([], [f"$.tools[{index}]" for index in range(10)])


def test_deferred_tool_waits_for_search() -> None:
    """A deferred tool waits for a search that can find it."""
    late = {"type": "function", "name": "late", "defer_loading": True}
    assert [tool.name for tool in shown(late, {"type": "tool_search", "execution": "server"}).tools] == [
        "late"
    ]
    box = shown(late, {"type": "tool_search", "execution": "client"})
    assert ([tool.name for tool in box.tools], box.ignored) == (["tool_search"], ["$.tools[0]"])


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        ({"type": "function"}, "$.tools[0].name"),
        ({"type": "function", "name": "go", "parameters": []}, "$.tools[0].parameters"),
        ({"type": "custom", "name": "go", "format": {}}, "$.tools[0].format.type"),
        ({"type": "namespace", "name": "go"}, "$.tools[0].tools"),
        ({"type": "namespace", "name": "go", "tools": [{"type": "custom"}]}, "$.tools[0].tools[0].name"),
    ],
)
def test_malformed_tool_refused_with_path(tool: dict[str, Any], path: str) -> None:
    with pytest.raises(Refused) as caught:
        shown(tool)
    assert caught.value.path == path


def test_tools_described_one_per_line() -> None:
    lines = describe_tools((Tool(name="a", description="ü", parameters=SCHEMA), Tool(name="b"))).split("\n")
    assert (
        lines[0]
        == '{"type":"function","function":{"name":"a","description":"ü","parameters":{"type":"object","properties":{"z":{},"a":{}}}}}'
    )
    assert len(lines) == 2


TOOLS = (Tool(name="go"), Tool(name="agents.spawn"), Tool(name="local_shell"))


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "go"}, "go"),
        ({"type": "custom", "name": "go"}, "go"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents.spawn"),
        ({"type": "function", "name": "agents.spawn"}, "agents.spawn"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "web_search_preview"}, "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "required"),
        ({"type": "allowed_tools", "tools": []}, "auto"),
    ],
)
def test_tool_choice_words_and_notes(said: Any, word: str) -> None:
    found, notes = tool_choice(said, TOOLS)
    assert found == word
    assert bool(notes) == (isinstance(said, dict) and said["type"] in ("allowed_tools", "web_search_preview"))


@pytest.mark.parametrize(
    "said",
    [
        "any",
        {"type": "function", "name": "x"},
        {"type": "mcp", "name": "x"},
        {"type": "allowed_tools", "mode": "all"},
        {},
    ],
)
def test_unsupported_tool_choice_is_refused(said: Any) -> None:
    with pytest.raises(Refused) as caught:
        tool_choice(said, TOOLS)
    assert (caught.value.path or "").startswith("$.tool_choice")
