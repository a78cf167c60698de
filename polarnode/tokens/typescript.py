"""Tools as TypeScript, as the prompts of Kimi K2.5 and K2.6 declare them.

The checkpoint's own code writes this text and hands it to the chat template as `tools_ts_str`. That code is
not run here. If it fails at a schema, its prompts show the tools as JSON, and so do this node's: `typescript`
is then None. `tests/tokens/test_tokens_typescript.py` compares the text with PrimeIntellect's `renderers`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import define, field, frozen

TYPESCRIPT_VARIABLE: Final = "tools_ts_str"  # the template's variable for this text
_INDENT: Final = "  "
_TYPE_WORDS: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_LIMIT_KEYWORDS: Final = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def typescript(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declarations of tools. None if one of them cannot be expressed."""
    try:
        functions = [_function(tool["function"]) for tool in tools if tool.get("function")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not functions:
        return None
    return "\n".join(("# Tools\n", "## functions", "namespace functions {", *functions, "}\n"))


@define
class _SchemaReferences:
    """The definitions to which a function's schemas refer. `itself`: a schema refers to the parameters as a
    whole.
    """

    definitions: dict[str, Any] = field(factory=dict)
    itself: bool = False


@frozen
class _TypeText:
    """A schema. `write` gives its text at an indentation. `limits` are shown as comments."""

    write: Callable[[str], str]
    description: str = ""
    limits: Mapping[str, Any] = field(factory=dict)

    def comments(self, indent: str) -> str:
        found = _comment_text(self.description, indent) + "\n" if self.description else ""
        if self.limits:
            told = ", ".join(f"{name}: {self.limits[name]}" for name in sorted(self.limits))
            found += f"{indent}// {told}\n"
        return found


def _comment_text(text: str, indent: str = "") -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _function(function: Mapping[str, Any]) -> str:
    known = _SchemaReferences()
    parameters = function.get("parameters") or {}
    members = _members(parameters, known)
    whole = _object(parameters, known, members)
    written, itself = [], known.itself
    if itself:
        inside = ",\n".join(write(_INDENT) for _, _, write in members)
        written.append(f"interface parameters {{\n{inside}\n}}" if inside else "interface parameters {}")
    for name, schema in list(known.definitions.items()):
        text = _parsed(schema, known).write("")
        description = schema.get("description", "")
        before = _comment_text(description) + "\n" if description else ""
        written.append(f"{before}interface {name} {text}")
    if description := function.get("description"):
        written.append(_comment_text(description))
    taken = "parameters" if itself else whole.write("")
    return "\n".join((*written, f"type {function.get('name', 'function')} = (_: {taken}) => any;"))


def _parsed(schema: Any, known: _SchemaReferences) -> _TypeText:
    if isinstance(schema, bool):
        return _TypeText(lambda _: "any" if schema else "null")
    description = schema.get("description", "")
    if "$ref" in schema:
        name = _reference(schema["$ref"], known)
        return _TypeText(lambda _: name, description)
    if "anyOf" in schema:
        branches = [_parsed(branch, known) for branch in schema["anyOf"]]
        return _TypeText(lambda indent: " | ".join(each.write(indent) for each in branches), description)
    if "enum" in schema:
        words = " | ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in _values(schema))
        return _TypeText(lambda _: words, description)
    if "type" not in schema:
        if schema:
            raise ValueError(f"no type of {schema}")
        return _TypeText(lambda _: "any")
    return _parse_typed(schema, known)


def _parse_typed(schema: Mapping[str, Any], known: _SchemaReferences) -> _TypeText:
    kind, description = schema["type"], schema.get("description", "")
    if isinstance(kind, list):
        union = " | ".join(_TYPE_WORDS[each] for each in kind)
        return _TypeText(lambda _: union, description)
    if kind == "object":
        return _object(schema, known, _members(schema, known))
    limits = {name: schema[name] for name in _LIMIT_KEYWORDS.get(kind, ()) if name in schema}
    if kind == "array":
        item = _parsed(schema["items"], known) if schema.get("items") else _TypeText(lambda _: "any")
        return _TypeText(lambda indent: _array(item, indent), description, limits)
    if not isinstance(kind, str):
        raise TypeError(f"{kind} is no type")
    return _TypeText(lambda _: "number" if kind == "integer" else kind, description, limits)


def _array(item: _TypeText, indent: str) -> str:
    inner = indent + _INDENT
    comments = item.comments(inner)
    if not comments:
        return f"Array<{item.write(indent)}>"
    return f"Array<\n{comments}{inner}{item.write(inner)}\n{indent}>"


# a member's name, whether it may be left out, and the function that writes it
_MemberText = tuple[str, bool, Callable[[str], str]]


def _members(schema: Mapping[str, Any], known: _SchemaReferences) -> list[_MemberText]:
    if not schema:
        return []
    known.definitions |= schema.get("$defs") or {}
    required = schema.get("required", [])
    return [
        (name, name not in required, _member(name, part, known, optional=name not in required))
        for name, part in schema.get("properties", {}).items()
    ]


def _member(name: str, schema: Any, known: _SchemaReferences, *, optional: bool) -> Callable[[str], str]:
    kind = _parsed(schema, known)
    default = schema.get("default") if isinstance(schema, dict) else None
    plain = isinstance(default, int | float)
    told = repr(default) if plain else json.dumps(default, ensure_ascii=False)

    def write(indent: str) -> str:
        comments = kind.comments(indent) + ("" if default is None else f"{indent}// Default: {told}\n")
        return f"{comments}{indent}{name}{'?' if optional else ''}: {kind.write(indent)}"

    return write


def _object(schema: Mapping[str, Any], known: _SchemaReferences, members: list[_MemberText]) -> _TypeText:
    others = schema.get("additionalProperties")
    more = _parsed(others, known) if isinstance(others, dict) else None
    if more is None and others not in (None, True, False):
        raise ValueError(f"additionalProperties cannot be {others}")

    def write(indent: str) -> str:
        inner = indent + _INDENT
        parts = [text(inner) for _, _, text in sorted(members, key=lambda each: (each[1], each[0]))]
        if others is not None:
            rest = more.write(inner) if more is not None else "any" if others else "never"
            parts.append(f"{inner}[k: string]: {rest}")
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}" if parts else "{}"

    return _TypeText(write, schema.get("description", "") if schema else "")


def _reference(target: str, known: _SchemaReferences) -> str:
    if target == "#":
        known.itself = True
        return "parameters"
    name = target.rpartition("/")[2]
    if not target.startswith("#/$defs/") or name not in known.definitions:
        raise ValueError(f"{target} refers to nothing")
    return name


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """The values of an enum. Raises ValueError for values of another type than the schema says."""
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [each for each in kind if each != "null"] or kind
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind) or not kind:
            raise ValueError(f"an enum of {kind}")
        kind = others[0] if len(kind) == 2 else kind[0]
    expected = _KINDS.get(kind) if isinstance(kind, str) else None
    values = list(schema["enum"])
    if expected is not None and any(each is not None and not isinstance(each, expected) for each in values):
        raise ValueError(f"an enum of other values than {kind}")
    return values
