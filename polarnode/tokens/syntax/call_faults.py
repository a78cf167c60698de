"""The reason why a call could not be read, in a few words for the turn's notes. No code depends on it."""

import json
import re
from collections import Counter
from typing import Final

from polarnode.tokens.families import CallSyntax
from polarnode.tokens.tool_calls import CallBody, read_value

_NAMES: Final = {"bare_json": "name and parameters", "json": "name and arguments"}
_SYNTAX_TAGS: Final = {
    "function_xml": ("<function=", r"<parameter=([^<>\n]*)>", "</parameter>", "</function>"),
    "invoke_xml": ('<invoke name="', r'<parameter name="([^<>\n]*)">', "</parameter>", "</invoke>"),
    "arg_xml": ("", r"<arg_key>([^<>\n]*)</arg_key>", "</arg_value>", ""),
}
NO_CLOSING_TAG: Final = "it has no closing tag"


def fault_of(body: CallBody, syntax: CallSyntax) -> str:
    """The first thing that is wrong in a body that its reader refused."""
    if syntax in _SYNTAX_TAGS:
        return _describe_tag_fault(body.text, *_SYNTAX_TAGS[syntax])
    if syntax == "braces":
        return "it is no call:name{...} with values of this syntax"
    text = body.text
    if syntax in ("fenced", "separated", "numbered"):
        head, found, text = text.partition(body.separator)
        if not found:
            return "it has no separator between its name and its arguments"
        if syntax == "numbered" and _describe_json_fault(text) is None:
            return f"{head.strip()[:60]!r} is no id of the form functions.name:number"
    if syntax == "fenced":
        fence = re.fullmatch(r"[^\n]*\n```json\n(.*)\n```\s*", text, re.DOTALL)
        if fence is None:
            return "its arguments are in no json fence"
        text = fence[1]
    if syntax == "harmony":
        text = text.rpartition("<|message|>")[2]
    return _describe_json_fault(text) or f"it is no object of exactly {_NAMES.get(syntax, 'its arguments')}"


def _describe_json_fault(text: str) -> str | None:
    try:
        value = read_value(text)
    except json.JSONDecodeError as error:
        return f"it is no JSON: {error.msg} at character {error.pos} of {len(text)}"
    except ValueError as error:
        return f"it is no strict JSON: {error}"
    return None if isinstance(value, dict) else "it is no JSON object"


def _describe_tag_fault(text: str, opening: str, key: str, closing: str, ending: str) -> str:
    if opening and not text.lstrip().startswith(opening):
        return f"it does not begin with {opening}"
    if ending and not text.rstrip().endswith(ending):
        return f"it does not end with {ending}"
    keys = re.findall(key, text)
    if text.count(closing) < len(keys):
        return f"a value has no {closing}"
    if twice := next((name for name, times in Counter(keys).items() if times > 1), None):
        return f"{twice.strip()[:60]!r} is written twice"
    return "its tags and values do not fit together"
