"""Google: its schema language (a cut of OpenAPI 3.0 with types in capitals) into JSON Schema, which templates show and engines enforce.

The rule for whoever edits it: the client's key order is kept, because a prompt is made of it, and the same schema always becomes the same
text. What is JSON Schema already passes through unchanged. Both languages stand in every field, whatever its name: many clients write JSON
Schema into `parameters`, and Gemini CLI's router writes types in capitals into `responseJsonSchema`.
"""

from collections.abc import Mapping
from typing import Final

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.providers.google.names import camel

_TYPES: Final = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ONE: Final = frozenset({"items", "additionalProperties", "not"})
_WHOLE: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_OWN: Final = frozenset({"nullable", "propertyOrdering"})  # Google's alone: read here, and no JSON Schema
_KNOWN: Final = _LISTS | _MAPS | _ONE | _WHOLE | _OWN
_NAMES: Final = {"defs": "$defs", "ref": "$ref"}  # proto has no `$`
_NULLS: Final = frozenset({"default", "const", "example"})  # where null is a value; elsewhere it is proto's "not said"


def json_schema(schema: Mapping[str, Json], path: str) -> dict[str, Json]:
    """The schema as JSON Schema; Refused at `path` when it is nested too deeply to be read."""
    try:
        return _schema(schema)
    except RecursionError:
        raise Refused("the schema is nested too deeply: flatten it", path=path) from None


def _schema(schema: Mapping[str, Json]) -> dict[str, Json]:
    named = {_name(name): value for name, value in schema.items()}
    found = {name: _keyword(name, value) for name, value in named.items() if name not in _OWN and (value is not None or name in _NULLS)}
    if found.get("type") == "type_unspecified":
        del found["type"]
    return _or_null(found) if named.get("nullable") is True else found


def _name(name: str) -> str:
    """Keywords in one spelling; a name that is none of ours is left alone."""
    spelled = camel(name)
    return _NAMES.get(name) or (spelled if spelled in _KNOWN else name)


def _keyword(name: str, value: Json) -> Json:
    if name == "type":
        return [_type(each) for each in value] if isinstance(value, list) else _type(value)
    if name in _MAPS and isinstance(value, dict):
        return {key: _inner(each) for key, each in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [_inner(each) for each in value]
    if name in _WHOLE and isinstance(value, str) and value.isdecimal():
        return int(value)  # proto writes 64-bit numbers as strings
    return _inner(value) if name in _ONE else value


def _inner(value: Json) -> Json:
    return _schema(value) if isinstance(value, dict) else value


def _type(value: Json) -> Json:
    return value.lower() if isinstance(value, str) and (value.upper() in _TYPES or value == "TYPE_UNSPECIFIED") else value


def _or_null(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema, or null: said with the type where there is one, else as one more alternative."""
    kinds, alternatives, words = schema.get("type"), schema.get("anyOf"), schema.get("enum")
    if isinstance(kinds, str) and kinds != "null":
        schema["type"] = [kinds, "null"]
        if isinstance(words, list) and None not in words:
            schema["enum"] = [*words, None]
    elif isinstance(alternatives, list):
        schema["anyOf"] = [*alternatives, {"type": "null"}]
    return schema
