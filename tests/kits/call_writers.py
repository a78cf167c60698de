"""Calls as each family's template writes them, to read with our parser and with other people's."""

import json
from collections.abc import Callable
from typing import Any

from syntax_kit import DEEPSEEK, KIMI

from polarnode.core.conversation import Tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "where": {"type": "object"},
        "kinds": {"type": "array"},
        "may": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/Point"},
    },
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TOOLS = (
    Tool(name="look", parameters=SCHEMA),
    Tool(name="stop", parameters={"type": "object", "properties": {}}),
    Tool(name="a.look"),
)
Calls = list[tuple[str, dict[str, Any]]]
RIGHT: tuple[dict[str, Any], ...] = (
    {"text": "a b", "count": 3},
    {"count": -1, "share": 1.5, "text": 'say "hi" \\ {x} caf\u00e9 \U0001f642'},
    {"text": "two\nlines\tand more"},
    {"deep": True, "text": "x"},
    {"deep": False},
    {"where": {"x": {"y": [1, "b", {}]}, "z": "w"}, "kinds": ["a", 1, True]},
    {"kinds": [], "where": {}},
    {"text": "<b>no tag of ours</b> ```"},
)


def dumped(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma_value(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma_value, value)) + "]"
        case _:
            return json.dumps(value)


def marked(text: str, opening: str, closing: str) -> str:
    return f"{opening}{text}{closing}"


def functions(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        values = "".join(
            f"<parameter={key}>\n{dumped(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        written.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(written)


def write_invokes(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        values = "".join(
            f'<parameter name="{key}">{dumped(value)}</parameter>\n' for key, value in arguments.items()
        )
        written.append(f'<invoke name="{name}">\n{values}</invoke>\n')
    return marked("".join(written), "<minimax:tool_call>\n", "</minimax:tool_call>")


def write_keys_and_values(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{dumped(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}\n{values}</tool_call>")
    return "\n".join(written)


def section(calls: Calls, marks: tuple[str, ...], call: Callable[[int, str, str], str]) -> str:
    written = [
        marked(call(place, name, json.dumps(arguments, ensure_ascii=False)), marks[4], marks[5])
        for place, (name, arguments) in enumerate(calls)
    ]
    return marked("".join(written), marks[6], marks[7])


CALL_WRITERS: dict[str, Callable[[Calls], str]] = {
    "json": lambda calls: "\n".join(
        marked(
            json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False),
            "<tool_call>\n",
            "\n</tool_call>",
        )
        for name, arguments in calls
    ),
    "bare_json": lambda calls: ";".join(
        json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False) for name, arguments in calls
    ),
    "function_xml": functions,
    "invoke_xml": write_invokes,
    "arg_xml": write_keys_and_values,
    "fenced": lambda calls: section(
        calls, DEEPSEEK, lambda _, name, text: f"function{DEEPSEEK[8]}{name}\n```json\n{text}\n```"
    ),
    "separated": lambda calls: section(calls, DEEPSEEK, lambda _, name, text: f"{name}{DEEPSEEK[8]}{text}"),
    "numbered": lambda calls: section(
        calls, KIMI, lambda place, name, text: f"functions.{name}:{place}{KIMI[8]}{text}"
    ),
    "braces": lambda calls: "".join(
        f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    ),
    "harmony": lambda calls: (
        "<|end|>".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{name}"
            f" <|constrain|>json<|message|>{json.dumps(arguments, ensure_ascii=False)}"
            for name, arguments in calls
        )
        + "<|call|>"
    ),
}


def cases() -> list[Calls]:
    return [[("look", arguments)] for arguments in RIGHT] + [
        [("look", RIGHT[0]), ("stop", {}), ("look", RIGHT[1])]
    ]
