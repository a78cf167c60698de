"""Tools that take plain text: what OpenAI's APIs call custom, and the model knows as a function of one string, `input`.

The rule for whoever edits it: the text is put in and taken out here and nowhere else, so that a call comes back as the one that was made. A
grammar is shown to the model and enforced by nothing; whoever reads one says so in a note.
"""

from collections.abc import Mapping
from typing import Final

import orjson

from polarnode.conversation import Json, Tool
from polarnode.providers.shapes import compact, strict_json

CUSTOM: Final[Mapping[str, Json]] = {"kind": "custom"}  # the spelling by which a writer knows such a tool

_INPUT: Final[Json] = {"type": "string", "description": "The whole input, as it is, without any wrapping."}
_PARAMETERS: Final[Mapping[str, Json]] = {"type": "object", "properties": {"input": _INPUT}, "required": ["input"]}


def tool(name: str, description: str | None, rule: str) -> Tool:
    """The tool as the model is shown it; `rule` is what `rule_of` says of its grammar, or empty."""
    return Tool(name=name, description="\n\n".join(filter(None, (description, rule))), parameters=_PARAMETERS, spelling=CUSTOM)


def rule_of(definition: str, syntax: str) -> str:
    """A grammar, as the model reads it."""
    return f"The input must follow this {syntax} grammar:\n{definition}"


def arguments_of(text: str) -> str:
    """A call's text as the arguments of the function it is."""
    return compact({"input": text})


def text_of(arguments: str) -> str:
    """The text of a call; arguments that are no object with an `input` are handed on as they are."""
    said = object_of(arguments)
    text = None if said is None else said.get("input")
    return text if isinstance(text, str) else arguments


def object_of(arguments: str) -> dict[str, Json] | None:
    """A call's arguments taken apart; None where they are no object, or hold what can not be written again (half a character, 65 bits)."""
    try:
        said = strict_json(arguments or "{}")
        orjson.dumps(said)
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return None
    return said if isinstance(said, dict) else None
