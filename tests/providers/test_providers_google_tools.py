"""Google's functions, and which of them the model is to call."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Tool
from polarnode.core.errors import Refused
from polarnode.providers.google import shapes
from polarnode.providers.google.read import tool_choice, tools

KNOWN = (Tool(name="f"), Tool(name="g"))


def declared(**fields: Any) -> Tool:
    (found,) = tools((shapes.ToolShape(functionDeclarations=(shapes.Declaration(name="f", **fields),)),))
    return found


def test_functions_keep_order_across_tools() -> None:
    """The functions of all tools stand in their order."""
    one = shapes.ToolShape(functionDeclarations=(shapes.Declaration(name="a"), shapes.Declaration(name="b")))
    found = tools(
        (one, shapes.ToolShape(), shapes.ToolShape(functionDeclarations=(shapes.Declaration(name="c"),)))
    )
    assert [tool.name for tool in found] == ["a", "b", "c"]


def test_only_google_schemas_are_translated() -> None:
    """JSON Schema is kept letter by letter, and Google's language is translated."""
    written = {"type": "object", "properties": {"b": {"type": ["string", "null"]}, "a": {"$ref": "#/x"}}}
    assert json.dumps(declared(parametersJsonSchema=written).parameters) == json.dumps(written)
    assert declared(parameters={"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}).parameters == {
        "type": "object",
        "properties": {"a": {"type": "string"}},
    }
    assert declared().parameters == {}
    assert declared(description="d").description == "d"


def test_unreadable_schema_is_named() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(Refused) as caught:
        declared(parameters=deep)
    assert caught.value.path == "$.tools[0].functionDeclarations[0].parameters"


@pytest.mark.parametrize(
    ("mode", "names", "choice", "noted"),
    [
        (None, None, "auto", False),
        ("AUTO", None, "auto", False),
        ("MODE_UNSPECIFIED", None, "auto", False),
        ("NONE", None, "none", False),
        ("none", None, "none", False),
        ("ANY", None, "required", False),
        ("ANY", (), "required", False),
        ("ANY", ("g",), "g", False),
        ("ANY", ("f", "g"), "required", True),
        ("VALIDATED", None, "auto", False),
        ("VALIDATED", ("f",), "auto", True),
    ],
)
def test_forced_call_by_mode_and_names(
    mode: str | None, names: tuple[str, ...] | None, choice: str, noted: bool
) -> None:
    config = shapes.ToolConfig(shapes.FunctionCallingConfig(mode=mode, allowedFunctionNames=names))
    found, notes = tool_choice(config, KNOWN)
    assert (found, bool(notes)) == (choice, noted)
    assert all(", ".join(names or ()) in note for note in notes)


@pytest.mark.parametrize("config", [None, shapes.ToolConfig()])
def test_default_tool_choice_is_auto(config: shapes.ToolConfig | None) -> None:
    assert tool_choice(config, ()) == ("auto", ())


def test_undeclared_function_cannot_be_forced() -> None:
    config = shapes.ToolConfig(shapes.FunctionCallingConfig(mode="ANY", allowedFunctionNames=("f", "h")))
    with pytest.raises(Refused, match="'h'") as caught:
        tool_choice(config, KNOWN)
    assert caught.value.path == "$.toolConfig.functionCallingConfig.allowedFunctionNames[1]"
