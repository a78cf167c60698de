"""Calls written as tags: names and parameters between tags, values as bare text.

Every tag is closed by its own closing tag, and only blanks stand between tags. The templates escape nothing,
so a value may itself hold such tags. A closing tag ends a value only before the next opening tag or the end
of the call. An opening tag inside a value needs a closing tag there, or else the tag before it was left
unclosed.

- `arg_xml` (GLM 4.5, 4.6): the name, then <arg_key> and <arg_value> in turns. The tags are control tokens of
  GLM's tokenizers, so a tag that a value spells is text.
- `function_xml` (Qwen3-Coder, Qwen3.5, Qwen3.6): <function=name>, each parameter between <parameter=key> and
  </parameter>. The template writes one newline on either side of a value; only that one is dropped.
- `invoke_xml` (MiniMax M2): one pair of marks around any number of <invoke name="...">, each parameter in
  <parameter name="...">. A value is all of the text between its tags.
- `braces` (Gemma 4): call:name{key:value}, strings between quote tokens, everything else as in JSON. A string
  ends at the next quote that was sampled as a control token. Arguments are written as JSON again, in the
  model's order and with its own numbers.

A parameter that its tool's JSON Schema calls a string stays verbatim. Any other value is strict JSON in the
model's own spelling. Text that does not fit its schema remains a string: the call was made, and the harness
answers a wrong argument.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from re import Pattern
from typing import Final

from attrs import field, frozen

from polarnode.core.conversation import Json, Tool
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.tool_calls import SPACE, CallBody, Cursor, ReadCall, read_value

_TYPE_ALIASES: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
# Qwen3-Coder's own template writes booleans and null like this.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_MAX_SCHEMA_DEPTH: Final = (
    32  # nested branches of a schema: no tool has so many, and Python's stack must hold them
)


def arguments_json(
    pairs: Iterable[tuple[str, str]], name: str, tools: Sequence[Tool], *, untyped: bool
) -> str | None:
    """The arguments object of a call, with its parameters in the order in which they were written. None if
    one is written twice.

    `untyped`: if the type of a parameter is not known, its value is read as JSON when it is valid JSON,
    because the model's template writes it as JSON.
    """
    schemas = _ParameterSchemas(next((tool.parameters for tool in tools if tool.name == name), {}))
    found: dict[str, str] = {}
    for key, text in pairs:
        if key in found:
            return None
        found[key] = _typed_value(text, schemas.kinds(key), untyped)
    return "{" + ", ".join(f"{_json_string(key)}: {value}" for key, value in found.items()) + "}"


def _typed_value(text: str, kinds: Sequence[str], untyped: bool) -> str:
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
    return _json_string(text) if found == "string" else text.strip(SPACE)


def _fits(text: str, kind: str) -> str | None:
    text = text.strip(SPACE)
    text = _PYTHON_WORDS.get(text, text)
    found = _kind(text)
    if found == kind or (kind == "number" and found == "integer") or (kind == "integer" and found == "whole"):
        return text
    return text if kind == "number" and found == "whole" else None


def _kind(text: str) -> str:
    """The JSON type of a text: "whole" for a number such as 1.0, "string" for a string and for anything that
    is not JSON.
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


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _ParameterSchemas:
    """The parameters of a tool, looked up one by one. References are followed within the tool's own schema,
    each once per look-up.
    """

    def __init__(self, root: Mapping[str, Json]) -> None:
        self._root = root
        self._properties = self._properties_of(dict(root), 0, set())

    def kinds(self, key: str) -> tuple[str, ...]:
        """The kinds of value that a parameter may have, in the order of the schema; empty if unknown."""
        schema = self._properties.get(key, self._root.get("additionalProperties"))
        return tuple(dict.fromkeys(self._kinds(schema, 0, set())))

    def _properties_of(self, schema: Json, depth: int, seen: set[str]) -> dict[str, Json]:
        """The properties of a schema, or those of its branches if it has none itself."""
        found = self._resolved(schema, seen)
        properties = found.get("properties")
        if isinstance(properties, dict):
            return properties
        merged: dict[str, Json] = {}
        for branch in self._branches(found, depth):
            merged = self._properties_of(branch, depth + 1, seen) | merged
        return merged

    def _kinds(self, schema: Json, depth: int, seen: set[str]) -> list[str]:
        found = self._resolved(schema, seen)
        declared = found.get("type")
        values = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(declared, str | list):
            return [
                _normal_type(kind)
                for kind in ([declared] if isinstance(declared, str) else declared)
                if isinstance(kind, str)
            ]
        if isinstance(values, list):
            return [_kind_of(value).replace("whole", "number") for value in values]
        if branches := self._branches(found, depth):
            return [kind for branch in branches for kind in self._kinds(branch, depth + 1, seen)]
        return ["object"] if "properties" in found else ["array"] if "items" in found else []

    def _branches(self, schema: Mapping[str, Json], depth: int) -> list[Json]:
        lists = (
            [schema.get(word) for word in ("anyOf", "oneOf", "allOf")] if depth < _MAX_SCHEMA_DEPTH else []
        )
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


def _normal_type(kind: str) -> str:
    return _TYPE_ALIASES.get(kind.lower(), kind.lower())


# ── shared by tag syntaxes ────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SyntaxTags:
    """The tags of a syntax. Each consists of the text before a name, the text that ends the name, and the
    closing tag. `value` extracts the value from the text between tags.
    """

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: Callable[[str], str]
    call_opened: Pattern[str] = field(init=False)
    parameter_opened: Pattern[str] = field(init=False)

    @call_opened.default
    def _call_opened(self) -> Pattern[str]:
        return _opened(self.call)

    @parameter_opened.default
    def _parameter_opened(self) -> Pattern[str]:
        return _opened(self.parameter)


def _opened(tag: tuple[str, str, str]) -> Pattern[str]:
    """The pattern of a whole opening tag with any name. A name that no tool can have makes the call
    malformed.
    """
    return re.compile(re.escape(tag[0]) + r'[^<>"\n]*' + re.escape(tag[1]))


def read_tagged(body: CallBody, tools: Sequence[Tool], tags: SyntaxTags) -> tuple[ReadCall, ...] | None:
    """All calls of a body, at least one. None if anything in it is malformed."""
    cursor, calls = Cursor(body), []
    cursor.skip()
    while not cursor.over:
        call = _call(cursor, tools, tags)
        if call is None:
            return None
        calls.append(call)
        cursor.skip()
    return tuple(calls) or None


def _call(cursor: Cursor, tools: Sequence[Tool], tags: SyntaxTags) -> ReadCall | None:
    opening, ending, closing = tags.call
    name = cursor.until(ending) if cursor.take(opening) else None
    if name is None or not is_name(name):
        return None
    pairs = []
    cursor.skip()
    while not cursor.take(closing):
        pair = _read_parameter(cursor, tags)
        if pair is None:
            return None
        pairs.append(pair)
        cursor.skip()
    # As in SGLang's detectors, a value is text unless the schema has a type.
    arguments = arguments_json(pairs, name, tools, untyped=False)
    return None if arguments is None else ReadCall(name, arguments)


def _read_parameter(cursor: Cursor, tags: SyntaxTags) -> tuple[str, str] | None:
    opening, ending, closing = tags.parameter
    key = cursor.until(ending) if cursor.take(opening) else None
    if key is None or not is_name(key):
        return None
    text = _value_text(
        cursor,
        closing,
        opened=lambda start, end: len(tags.parameter_opened.findall(cursor.body.text, start, end)),
        ends=lambda at: _ends_parameter(cursor.body, at, tags),
    )
    return None if text is None else (key, tags.value(text))


def _ends_parameter(body: CallBody, at: int, tags: SyntaxTags) -> bool:
    """Whether a parameter can end here, before the next one or the end of the call."""
    cursor = Cursor(body, at)
    cursor.skip()
    if tags.parameter_opened.match(body.text, cursor.at):
        return True
    if not cursor.take(tags.call[2]):
        return False
    cursor.skip()
    return cursor.over or tags.call_opened.match(body.text, cursor.at) is not None


def _value_text(
    cursor: Cursor, closing: str, *, opened: Callable[[int, int], int], ends: Callable[[int], bool]
) -> str | None:
    """The text up to the tag that closes a value; moves after the tag. None if no tag closes it.

    `opened` counts the opening tags between two places, each of which has a closing tag of its own. `ends`
    says whether a closing tag can be the value's, by what follows it.
    """
    body, start, at, depth = cursor.body, cursor.at, cursor.at, 0
    while (end := body.find(closing, at)) >= 0:
        depth += opened(at, end)
        at = end + len(closing)
        if depth:
            depth -= 1
        elif ends(at):
            cursor.at = at
            return body.text[start:end]
    return None


def is_name(text: str) -> bool:
    """Whether a text can be the name of a tool or parameter: not empty, no surrounding blanks, no
    tag in it.
    """
    return bool(text) and text == text.strip() and not any(letter in text for letter in '<>"\n')


# ── arg xml ───────────────────────────────────────────────────────────────────────────────────────


def read_arg_xml(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between the marks of a call. None if it is malformed."""
    first = body.find("<arg_key>", 0)
    cursor = Cursor(body, len(body.text) if first < 0 else first)
    name = body.text[: cursor.at].strip(SPACE)
    if not is_name(name):
        return None
    pairs = []
    while not cursor.over:
        pair = _pair(cursor)
        if pair is None:
            return None
        pairs.append(pair)
        cursor.skip()
    # The template writes values that are not strings as JSON, and SGLang reads them as JSON.
    arguments = arguments_json(pairs, name, tools, untyped=True)
    return None if arguments is None else (ReadCall(name, arguments),)


def _pair(cursor: Cursor) -> tuple[str, str] | None:
    body = cursor.body
    key = cursor.until("</arg_key>") if cursor.take("<arg_key>") else None
    cursor.skip()
    if key is None or not is_name(key.strip(SPACE)) or not cursor.take("<arg_value>"):
        return None
    value = _value_text(
        cursor,
        "</arg_value>",
        opened=lambda start, end: _count(body, "<arg_value>", start, end),
        ends=lambda at: _ends_pair(body, at),
    )
    return None if value is None else (key.strip(SPACE), value)


def _ends_pair(body: CallBody, at: int) -> bool:
    """Whether a pair can end here, before the next one or at the end of the call."""
    cursor = Cursor(body, at)
    cursor.skip()
    return cursor.over or body.has("<arg_key>", cursor.at)


def _count(body: CallBody, tag: str, start: int, end: int) -> int:
    count = 0
    while (start := body.find(tag, start, end)) >= 0:
        count, start = count + 1, start + len(tag)
    return count


# ── function xml ──────────────────────────────────────────────────────────────────────────────────

_FUNCTION_TAGS: Final = SyntaxTags(
    call=("<function=", ">", "</function>"),
    parameter=("<parameter=", ">", "</parameter>"),
    value=lambda text: text.removeprefix("\n").removesuffix("\n"),
)


def read_function_xml(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls between the marks of a call. None if they are malformed."""
    return read_tagged(body, tools, _FUNCTION_TAGS)


# ── invoke xml ────────────────────────────────────────────────────────────────────────────────────

_INVOKE_TAGS: Final = SyntaxTags(
    call=('<invoke name="', '">', "</invoke>"),
    parameter=('<parameter name="', '">', "</parameter>"),
    value=str,
)


def read_invoke_xml(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The calls between the marks of a section. None if they are malformed."""
    return read_tagged(body, tools, _INVOKE_TAGS)


# ── where a call may end ──────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class ValueTags:
    """The tags of a syntax that show cheaply where a call may be whole: the tag with which it ends, and those
    around a value.
    """

    last: str
    opened: Pattern[str]
    closing: str


VALUE_TAGS: Final[Mapping[CallSyntax, ValueTags]] = {
    "function_xml": ValueTags(
        last="</function>", opened=_FUNCTION_TAGS.parameter_opened, closing="</parameter>"
    ),
    "invoke_xml": ValueTags(last="</invoke>", opened=_INVOKE_TAGS.parameter_opened, closing="</parameter>"),
    "arg_xml": ValueTags(last="</arg_value>", opened=re.compile("<arg_value>"), closing="</arg_value>"),
}


# ── braces ────────────────────────────────────────────────────────────────────────────────────────

QUOTE_MARK: Final = '<|"|>'
# Gemma 4's first templates write Python's None for null.
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "None": "null"}
# The levels of nesting accepted: far more than any tool needs, and far fewer than Python's stack allows.
_DEEP: Final = 100


def read_braces(body: CallBody, tools: Sequence[Tool]) -> tuple[ReadCall, ...] | None:
    """The call between the marks of a call. None if it is malformed."""
    cursor = Cursor(body)
    cursor.skip()
    name = cursor.until("{") if cursor.take("call:") else None
    if name is None or not is_name(name):
        return None
    try:
        arguments = _object(cursor, 0)
    except ValueError:
        return None
    cursor.skip()
    return (ReadCall(name, arguments),) if cursor.over else None


def _value(cursor: Cursor, depth: int) -> str:
    if depth > _DEEP:
        raise ValueError("nested too deeply")
    if cursor.take(QUOTE_MARK):
        return _string(cursor)
    if cursor.take("{"):
        return _object(cursor, depth)
    if cursor.take("["):
        return _list(cursor, depth)
    return _word(cursor)


def _object(cursor: Cursor, depth: int) -> str:
    """The object after an opening brace, up to its closing brace."""
    found: dict[str, str] = {}

    def member() -> None:
        key = _key(cursor)
        if key in found:
            raise ValueError("a key is written twice")
        cursor.skip()
        found[key] = _value(cursor, depth + 1)

    _members(cursor, "}", member)
    return "{" + ", ".join(f"{key}: {value}" for key, value in found.items()) + "}"


def _list(cursor: Cursor, depth: int) -> str:
    found: list[str] = []
    _members(cursor, "]", lambda: found.append(_value(cursor, depth + 1)))
    return "[" + ", ".join(found) + "]"


def _members(cursor: Cursor, closing: str, member: Callable[[], None]) -> None:
    """Members with commas between them, up to the closing bracket."""
    cursor.skip()
    if cursor.take(closing):
        return
    while True:
        member()
        cursor.skip()
        if cursor.take(closing):
            return
        if not cursor.take(","):
            raise ValueError("members without a comma between them")
        cursor.skip()


def _key(cursor: Cursor) -> str:
    if cursor.take(QUOTE_MARK):
        key = _string(cursor)
        if not cursor.take(":"):
            raise ValueError("a key without a value")
        return key
    name = cursor.until(":")
    if name is None or not is_name(name) or any(letter in name for letter in "{}[],"):
        raise ValueError("a key without a value")
    return json.dumps(name, ensure_ascii=False)


def _string(cursor: Cursor) -> str:
    text = cursor.until(QUOTE_MARK)
    if text is None:
        raise ValueError("a string without an end")
    return json.dumps(text, ensure_ascii=False)


def _word(cursor: Cursor) -> str:
    """A number or one of JSON's words."""
    word = ""
    while cursor.next and cursor.next not in ",]} \t\r\n":
        word += cursor.next
        cursor.at += 1
    if word in _WORDS:
        return _WORDS[word]
    if not isinstance(read_value(word), int | float):
        raise ValueError("a string without quotes")
    return word
