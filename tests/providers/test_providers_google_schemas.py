"""Google's schema language into JSON Schema."""

import json

import pytest

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.providers.google.read import json_schema


def converted(schema: dict[str, Json]) -> dict[str, Json]:
    return json_schema(schema, "$.here")


def test_lower_case_types_keep_key_order() -> None:
    """Types are lower-case, and keys stay in their order."""
    said: dict[str, Json] = {
        "type": "OBJECT",
        "required": ["path"],
        "properties": {
            "path": {"type": "STRING", "description": "where"},
            "lines": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1", "max_items": 9},
            "type": {"type": "BOOLEAN"},
        },
        "propertyOrdering": ["path", "lines", "type"],
    }
    meant = {
        "type": "object",
        "required": ["path"],
        "properties": {
            "path": {"type": "string", "description": "where"},
            "lines": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 9},
            "type": {"type": "boolean"},
        },
    }
    assert json.dumps(converted(said)) == json.dumps(meant)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "STRING", "nullable": False}, {"type": "string"}),
        (
            {"type": "STRING", "format": "enum", "enum": ["a"], "nullable": True},
            {"type": ["string", "null"], "format": "enum", "enum": ["a", None]},
        ),
        (
            {"any_of": [{"type": "STRING"}, {"type": "NUMBER"}]},
            {"anyOf": [{"type": "string"}, {"type": "number"}]},
        ),
        (
            {"anyOf": [{"type": "STRING"}], "nullable": True},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        ({"nullable": True}, {}),
        ({"type": "NULL", "nullable": True}, {"type": "null"}),
        ({"type": "TYPE_UNSPECIFIED", "title": "x"}, {"title": "x"}),
        ({"type": ["STRING", "NULL"]}, {"type": ["string", "null"]}),
        (
            {"type": "OBJECT", "additional_properties": {"type": "STRING"}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ),
        (
            {"ref": "#/$defs/A", "defs": {"A": {"type": "STRING"}}},
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string"}}},
        ),
        (
            {"type": "STRING", "default": "STRING", "enum": ["STRING", "OBJECT"]},
            {"type": "string", "default": "STRING", "enum": ["STRING", "OBJECT"]},
        ),
        ({"type": "STRING", "description": None}, {"type": "string"}),
        ({"type": "string", "x-own": 1}, {"type": "string", "x-own": 1}),
        ({}, {}),
    ],
)
def test_each_schema_word_is_translated(said: dict[str, Json], meant: dict[str, Json]) -> None:
    assert converted(said) == meant


def test_json_schema_passes_unchanged() -> None:
    said: dict[str, Json] = {
        "$schema": "s",
        "type": "object",
        "x_own_word": {"max_items": 1},
        "properties": {
            "a_b": {"type": ["string", "null"], "minLength": 1, "default": None},
            "n": {"const": None},
            "any_of": {"oneOf": [{"const": 1}, {"not": {"type": "null"}}]},
        },
        "additionalProperties": False,
    }
    assert json.dumps(converted(said)) == json.dumps(said)


def test_endless_schema_is_refused() -> None:
    deep: dict[str, Json] = {"type": "STRING"}
    for _ in range(5000):
        deep = {"type": "ARRAY", "items": deep}
    with pytest.raises(Refused, match="too deeply") as caught:
        converted(deep)
    assert caught.value.path == "$.here"
