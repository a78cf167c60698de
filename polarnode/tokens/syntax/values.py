"""Parameter values that a model wrote as bare text, as JSON of the type that the tool's JSON Schema names.

A string stays verbatim; any other value is strict JSON in the model's own spelling. Text that does not fit
its schema stays a string: the call was made, and it is the harness that answers a wrong argument.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from polarnode.core.conversation import Json, Tool
from polarnode.tokens.tool_calls import SPACE, read_value

_ALIASES: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
# Qwen3-Coder's own template writes these for booleans
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_DEEP: Final = 32  # nested branches of a schema: no tool has so many, and Python's stack must hold them


def arguments_json(
    pairs: Iterable[tuple[str, str]], name: str, tools: Sequence[Tool], *, untyped: bool
) -> str | None:
    """The arguments object of a call, in the order its parameters were written; None if one is written twice.

    `untyped`: whether a value whose parameter has no known type is read as JSON if it is valid JSON, as the
    model's template writes it.
    """
    schemas = _Schemas(next((tool.parameters for tool in tools if tool.name == name), {}))
    found: dict[str, str] = {}
    for key, text in pairs:
        if key in found:
            return None
        found[key] = _value(text, schemas.kinds(key), untyped)
    return "{" + ", ".join(f"{_string(key)}: {value}" for key, value in found.items()) + "}"


def _value(text: str, kinds: Sequence[str], untyped: bool) -> str:
    """The text as the first kind that fits. `null` is tried first, because no schema expects that word as a
    string.
    """
    if "null" in kinds and (null := _fits(text, "null")):
        return null
    for kind in kinds:
        if kind == "string":
            break
        if (fitting := _fits(text, kind)) is not None:
            return fitting
    found = _kind(text) if untyped and not kinds else "string"
    return _string(text) if found == "string" else text.strip(SPACE)


def _fits(text: str, kind: str) -> str | None:
    text = text.strip(SPACE)
    text = _PYTHON.get(text, text)
    found = _kind(text)
    if found == kind or (kind == "number" and found == "integer") or (kind == "integer" and found == "whole"):
        return text
    return text if kind == "number" and found == "whole" else None


def _kind(text: str) -> str:
    """The JSON type of a text; "whole" for a number such as 1.0, "string" for a string and for what is
    no JSON.
    """
    try:
        value = read_value(text)
    except ValueError:
        return "string"
    return _kind_of(value)


def _kind_of(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "whole" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Schemas:
    """A tool's parameters, looked up one by one. References are followed within the tool's own schema,
    each once for each look-up.
    """

    def __init__(self, root: Mapping[str, Json]) -> None:
        self._root = root
        self._properties = self._of(dict(root), 0, set())

    def kinds(self, key: str) -> tuple[str, ...]:
        """The kinds of value that a parameter may have, in the schema's order; empty if unknown."""
        schema = self._properties.get(key, self._root.get("additionalProperties"))
        return tuple(dict.fromkeys(self._kinds(schema, 0, set())))

    def _of(self, schema: Json, depth: int, seen: set[str]) -> dict[str, Json]:
        """The properties of a schema, or those of its branches where it has none itself."""
        found = self._resolved(schema, seen)
        properties = found.get("properties")
        if isinstance(properties, dict):
            return properties
        merged: dict[str, Json] = {}
        for branch in self._branches(found, depth):
            merged = self._of(branch, depth + 1, seen) | merged
        return merged

    def _kinds(self, schema: Json, depth: int, seen: set[str]) -> list[str]:
        found = self._resolved(schema, seen)
        declared = found.get("type")
        values = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(declared, str | list):
            return [
                _normal(kind)
                for kind in ([declared] if isinstance(declared, str) else declared)
                if isinstance(kind, str)
            ]
        if isinstance(values, list):
            return [_kind_of(value).replace("whole", "number") for value in values]
        if branches := self._branches(found, depth):
            return [kind for branch in branches for kind in self._kinds(branch, depth + 1, seen)]
        return ["object"] if "properties" in found else ["array"] if "items" in found else []

    def _branches(self, schema: Mapping[str, Json], depth: int) -> list[Json]:
        lists = [schema.get(word) for word in ("anyOf", "oneOf", "allOf")] if depth < _DEEP else []
        return [branch for branches in lists if isinstance(branches, list) for branch in branches]

    def _resolved(self, schema: Json, seen: set[str]) -> Mapping[str, Json]:
        while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
            if reference in seen:
                return {}
            seen.add(reference)
            schema = self._at(reference)
        return schema if isinstance(schema, Mapping) else {}

    def _at(self, reference: str) -> Json:
        found: Json = dict(self._root)
        for word in reference.removeprefix("#/").split("/"):
            found = found.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _normal(kind: str) -> str:
    return _ALIASES.get(kind.lower(), kind.lower())
