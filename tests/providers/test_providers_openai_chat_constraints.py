"""Chat Completions: what an answer must match, in OpenAI's, SGLang's and vLLM's words."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Constraint
from polarnode.core.errors import Refused
from polarnode.providers.openai_chat.read import constraint
from polarnode.providers.openai_chat.shapes import ChatRequest
from polarnode.providers.shapes import read_body

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "ö"}}, "required": ["z"]}
TEXT = '{"type":"object","properties":{"z":{"type":"string"},"a":{"const":"ö"}},"required":["z"]}'
OBJECT = Constraint(kind="json_schema", text='{"type":"object"}')


def held(**said: Any) -> Constraint | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | said
    return constraint(read_body(json.dumps(body).encode(), ChatRequest)[0])


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Constraint(kind="json_schema", text=TEXT),
        ),
        ({"guided_json": SCHEMA}, Constraint(kind="json_schema", text=TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Constraint(kind="json_schema", text=TEXT)),
        ({"json_schema": json.dumps(SCHEMA)}, Constraint(kind="json_schema", text=TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint(kind="json_schema", text=TEXT)),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"regex": "a+"}, Constraint(kind="regex", text="a+")),
        ({"guided_regex": "a+"}, Constraint(kind="regex", text="a+")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(kind="regex", text="a+")),
        ({"ebnf": "root ::= x"}, Constraint(kind="ebnf", text="root ::= x")),
        ({"guided_grammar": "root ::= x"}, Constraint(kind="ebnf", text="root ::= x")),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Constraint(kind="ebnf", text="root ::= x")),
        ({"guided_choice": ["yes", 'n"o']}, Constraint(kind="ebnf", text='root ::= "yes" | "n\\"o"')),
        ({"structured_outputs": {"choice": ["ja"]}}, Constraint(kind="ebnf", text='root ::= "ja"')),
    ],
)
def test_constraints_in_every_spelling(said: dict[str, Any], found: Constraint | None) -> None:
    assert held(**said) == found


@pytest.mark.parametrize(
    ("said", "path", "sentence"),
    [
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "$.regex",
            "response_format and regex both say what the answer must match: send one",
        ),
        ({"guided_json": "{"}, "$.guided_json", "guided_json is no JSON schema: the body is not JSON"),
        ({"json_schema": "3"}, "$.json_schema", "json_schema is no JSON schema: send an object"),
        ({"regex": ""}, "$.regex", "regex is empty: leave it out, or say what the answer must match"),
        (
            {"structured_outputs": {"grammar": ""}},
            "$.structured_outputs.grammar",
            "structured_outputs.grammar is empty",
        ),
        (
            {"guided_choice": []},
            "$.guided_choice",
            "guided_choice must hold at least one word, and none that is empty",
        ),
        (
            {"structured_outputs": {"choice": [""]}},
            "$.structured_outputs.choice",
            "structured_outputs.choice must hold at least one word",
        ),
    ],
)
def test_unsupported_constraint_refused_with_path(said: dict[str, Any], path: str, sentence: str) -> None:
    """A constraint that cannot be enforced is refused with its path."""
    with pytest.raises(Refused) as caught:
        held(**said)
    assert caught.value.path == path
    assert str(caught.value).startswith(sentence)


def test_endless_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"not": schema}
    with pytest.raises(Refused, match="nested too deeply"):
        held(guided_json=schema)
