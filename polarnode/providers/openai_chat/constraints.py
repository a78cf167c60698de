"""Chat Completions: what an answer must match, as OpenAI, SGLang and vLLM (old and new) let a client say it.

The rule for whoever adds a spelling: a row of `_said`, with the path a client would look for.
"""

import json
from collections.abc import Iterator

from polarnode.conversation import Constraint, Json
from polarnode.errors import Refused
from polarnode.providers.openai_chat.shapes import ChatRequest, ResponseFormat
from polarnode.providers.shapes import compact
from polarnode.wire import read_json

_ANY_OBJECT = Constraint(kind="json_schema", text='{"type":"object"}')


def constraint(request: ChatRequest) -> Constraint | None:
    """What is asked of the answer; Refused when it is more than one thing."""
    found = dict(_said(request))
    if len(found) > 1:
        first, second, *_ = found
        raise Refused(f"{first[2:]} and {second[2:]} both say what the answer must match: send one", path=second)
    return next(iter(found.values()), None)


def _said(request: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    if request.response_format is not None and request.response_format.type != "text":
        yield "$.response_format", _formatted(request.response_format)
    yield from _schemas(request)
    yield from _grammars(request)


def _schemas(request: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    new = request.structured_outputs
    if new is not None and new.json_object:
        yield "$.structured_outputs.json_object", _ANY_OBJECT
    said = {
        "$.json_schema": request.json_schema,
        "$.guided_json": request.guided_json,
        "$.structured_outputs.json": new.json if new is not None else None,
    }
    for path, schema in said.items():
        if schema is not None:
            yield path, Constraint(kind="json_schema", text=_schema_text(schema, path))


def _grammars(request: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    new = request.structured_outputs
    regexes = {"$.regex": request.regex, "$.guided_regex": request.guided_regex, "$.structured_outputs.regex": new.regex if new else None}
    grammars = {"$.ebnf": request.ebnf, "$.guided_grammar": request.guided_grammar, "$.structured_outputs.grammar": new.grammar if new else None}
    choices = {"$.guided_choice": request.guided_choice, "$.structured_outputs.choice": new.choice if new else None}
    yield from ((path, Constraint(kind="regex", text=_some(text, path))) for path, text in regexes.items() if text is not None)
    yield from ((path, Constraint(kind="ebnf", text=_some(text, path))) for path, text in grammars.items() if text is not None)
    yield from ((path, Constraint(kind="ebnf", text=_one_of(words, path))) for path, words in choices.items() if words is not None)


def _formatted(shape: ResponseFormat) -> Constraint:
    schema = shape.json_schema.schema if shape.type == "json_schema" and shape.json_schema is not None else None
    return _ANY_OBJECT if schema is None else Constraint(kind="json_schema", text=compact(schema))


def _schema_text(said: dict[str, Json] | str, path: str) -> str:
    """A schema, or the JSON text of one."""
    try:
        schema = read_json(said.encode(errors="replace")) if isinstance(said, str) else said
    except Refused as error:
        raise Refused(f"{path[2:]} is no JSON schema: {error}", path=path) from None
    if not isinstance(schema, dict | bool):
        raise Refused(f"{path[2:]} is no JSON schema: send an object", path=path)
    return compact(schema)


def _some(text: str, path: str) -> str:
    if not text:
        raise Refused(f"{path[2:]} is empty: leave it out, or say what the answer must match", path=path)
    return text


def _one_of(words: tuple[str, ...], path: str) -> str:
    if not words or "" in words:
        raise Refused(f"{path[2:]} must hold at least one word, and none that is empty", path=path)
    return "root ::= " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
