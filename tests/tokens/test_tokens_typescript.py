"""Tools as Kimi K2.5's own code declares them, against `renderers`, which has that code's text; and that its
template is given them.
"""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from family_fixtures import FAMILIES, template_text, write_family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderers.kimi_k25 import _encode_tools_typescript

from polarnode.core.conversation import Conversation, Message, Tool
from polarnode.tokens.families import family_of
from polarnode.tokens.template import Template
from polarnode.tokens.tokenizer import load_tokenizer
from polarnode.tokens.typescript import typescript

WORDS = st.sampled_from(("", "a", "two\nlines", "é 日", "x\n\ny"))
NAMES = st.sampled_from(("a", "b", "path", "zeta", "_x"))
DEFAULTS = st.sampled_from((None, 1, 1.5, "x", [], {"a": 1}))


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "description": WORDS,
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2),
            "additionalProperties": st.booleans() | inner,
        },
    )


LEAVES = (
    st.fixed_dictionaries(
        {"type": st.sampled_from(("string", "integer", "number", "boolean", "null"))},
        optional={"description": WORDS, "default": DEFAULTS, "minLength": st.just(1), "maximum": st.just(9), "minimum": st.just(0), "pattern": st.just("^a")},
    )
    | st.fixed_dictionaries({"enum": st.lists(st.sampled_from(("x", "y", 2)), min_size=1, max_size=3)}, optional={"description": WORDS})
    | st.fixed_dictionaries({"type": st.lists(st.sampled_from(("string", "null", "array", "object")), min_size=1, max_size=3)})
    | st.sampled_from(({}, True, {"$ref": "#"}, {"$ref": "#/$defs/Point", "description": "p"}, {"$ref": "#/x"}, {"title": "no type"}))
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={"items": inner, "minItems": st.just(1), "description": WORDS},
        )
        | st.fixed_dictionaries(
            {"anyOf": st.lists(inner, min_size=1, max_size=2)}, optional={"description": WORDS}
        )
    ),
    max_leaves=5,
)
POINT = {"Point": {"type": "object", "description": "of two", "properties": {"x": {"type": "integer"}}}}
FUNCTIONS = st.builds(
    lambda name, description, parameters, defs: {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": parameters | ({"$defs": POINT} if defs else {}),
        },
    },
    NAMES,
    WORDS,
    objects(SCHEMAS) | st.just({}),
    st.booleans(),
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(tools=st.lists(FUNCTIONS, min_size=1, max_size=2))
def test_tools_are_written_as_renderers_does(tools: list[Any]) -> None:
    try:
        expected = _encode_tools_typescript(tools)
    except Exception:  # as the checkpoint's code takes any failure for a schema without words
        expected = None
    assert typescript(tools) == expected


@pytest.mark.parametrize(
    ("kind", "values"),
    [("integer", ["x"]), ("string", [1]), (["a", "b"], ["x"]), (["string", "null", "integer"], ["x"])],
)
def test_mistyped_enum_has_no_words(kind: Any, values: list[Any]) -> None:
    """The checkpoint's code refuses it, which `renderers` does not; and it writes Python's None."""
    schema = {"type": "object", "properties": {"a": {"type": kind, "enum": values}}}
    assert typescript([{"type": "function", "function": {"name": "f", "parameters": schema}}]) is None
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [None]}, "b": {"type": "boolean", "default": True}},
    }
    written = str(typescript([{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    assert "a?: None,\n  // Default: True\n  b?: boolean" in written


def test_kimi_template_gets_typescript(tmp_path: Path) -> None:
    text = template_text("kimi_k2_5")
    changed = text.replace(
        "(tools | tojson(separators=(',', ':')))", "(tools_ts_str if tools_ts_str else tools | tojson)"
    )
    assert changed != text
    write_family(tmp_path / "model", evolve(FAMILIES["kimi_k2_5"]), changed)
    tokenizer = load_tokenizer(tmp_path / "model")
    template = Template(tokenizer, family_of(tokenizer))
    ask = (Message(role="user", text="q"),)

    def shown(*tools: Tool) -> str:
        root = template.root(Conversation(messages=ask, tools=tools))
        return b"".join(map(tokenizer.token_bytes, root)).decode()

    schema: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"]}  # fmt: skip
    look = Tool(name="look", description="Look\nat <|im_end|> it.", parameters=schema)
    assert (
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n// Look\n// at <|im_end|> it.\n"
        "type look = (_: {\n  path: string,\n  n?: number\n}) => any;\n}\n<|im_end|>"
    ) in shown(look)
    odd = Tool(name="odd", description="", parameters={"type": "object", "properties": {"a": {"title": "A"}}})
    assert '"name": "odd"' in shown(odd)
    assert "tool_declare" not in shown()
