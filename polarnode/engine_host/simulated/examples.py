"""Tool calls and values made up from their JSON schemas. Pure: a schema and a source of chance in, a value out.

Rule for whoever edits it: a harness obeys what is made here, so commands only look, and a tool that runs commands is preferred to one that
asks a person, starts other agents or writes files.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

COMMANDS = ("ls", "pwd", "ls -la", "date", "head -n 5 *", "wc -c *", "uname -a", "env | wc -l")
TAKES_COMMANDS = ("command", "cmd", "script")
DEPTH = 4  # of made-up values: deeper ones are empty
WORDS = ("lake", "river", "stone", "cloud", "amber", "north")


def tool_call(tools: Sequence[Mapping[str, Any]], chance: Random) -> dict[str, Any]:
    """A call of one of the functions a prompt lists, as `{"name": …, "arguments": {…}}`."""
    runners = [tool for tool in tools if any(name in TAKES_COMMANDS for name in _properties(tool.get("parameters")))]
    tool = chance.choice(runners or list(tools))
    schema = tool.get("parameters") or {}
    wanted = [*schema.get("required", ()), *(name for name in _properties(schema) if name in TAKES_COMMANDS)]
    known = _properties(schema)
    return {"name": tool["name"], "arguments": {name: _named(name, known.get(name), chance) for name in dict.fromkeys(wanted)}}


def value(schema: Any, chance: Random, depth: int = 0) -> Any:
    """Something of a schema's type; what is beyond types, enums and properties is not looked at."""
    if not isinstance(schema, Mapping):
        return chance.choice(WORDS)
    for field in ("enum", "anyOf", "oneOf"):
        if schema.get(field):
            picked = chance.choice(schema[field])
            return picked if field == "enum" else value(picked, chance, depth)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return _of_type(kind[0] if isinstance(kind, list) else kind, schema, chance, depth)


def _of_type(kind: str, schema: Mapping[str, Any], chance: Random, depth: int) -> Any:
    match kind:
        case "object":
            known = _properties(schema)
            return {name: value(known.get(name), chance, depth + 1) for name in schema.get("required", known)} if depth < DEPTH else {}
        case "array":
            return [value(schema.get("items"), chance, depth + 1) for _ in range(max(1, schema.get("minItems", 1)))] if depth < DEPTH else []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
        case _:
            return chance.choice(WORDS)[: schema.get("maxLength")]


def _named(name: str, schema: Any, chance: Random) -> Any:
    """A value for an argument whose name says what it means."""
    if name not in TAKES_COMMANDS:
        return value(schema, chance)
    command = chance.choice(COMMANDS)
    return ["bash", "-lc", command] if isinstance(schema, Mapping) and schema.get("type") == "array" else command


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}
