"""A Google request as a whole: sampling, constraints, who asks, and what the path says."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Constraint, Message, ModelRequest, Sampling
from polarnode.core.errors import Refused
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.google import GOOGLE
from polarnode.providers.google.read import RAN_CODE_NOTE
from polarnode.providers.google.read import read as read_google

HI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


def read(envelope: RequestEnvelope | None = None, **fields: Any) -> ModelRequest:
    return read_google(json.dumps(HI | fields).encode(), envelope or RequestEnvelope(model="m"))


def configured(**fields: Any) -> ModelRequest:
    return read(generationConfig=fields)


def test_small_request_asks_nothing_else() -> None:
    assert read() == ModelRequest(
        provider="google",
        model="m",
        conversation=read().conversation,
        sampling=Sampling(),
        extras={"thoughts": False, "sse": False},
    )
    assert read().conversation.messages == (Message(role="user", text="hi"),)


def test_model_from_path_or_body() -> None:
    """The name stands in the path, and for counting in the body."""
    assert read(RequestEnvelope(model="org/any")).model == "org/any"
    assert read(RequestEnvelope(), model="models/tiny").model == "tiny"
    assert read(RequestEnvelope(model="a"), model="b").model == "a"


@pytest.mark.parametrize(
    ("stream", "query", "sse"),
    [(True, "alt=sse", True), (True, "", False), (False, "alt=sse&key=k", True), (None, "alt=json", False)],
)
def test_stream_from_path_and_query(stream: bool | None, query: str, sse: bool) -> None:
    """The path says whether to stream, and the query how."""
    found = read(RequestEnvelope(model="m", stream=stream, query=query))
    assert (found.stream, found.extras["sse"]) == (bool(stream), sse)


def test_sampling_settings_are_read() -> None:
    found = configured(
        temperature=1,
        topP=0.95,
        topK=64,
        maxOutputTokens=100,
        stopSequences=["END"],
        seed=7,
        presencePenalty=0.5,
        frequencyPenalty=-0.5,
    )
    assert found.sampling == Sampling(
        temperature=1,
        top_p=0.95,
        top_k=64,
        max_tokens=100,
        stop=("END",),
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"topK": 0}, Sampling()),
        ({"topK": -1}, Sampling()),
        ({"topK": 1}, Sampling(top_k=1)),
        ({"topK": 40.0}, Sampling(top_k=40)),
        ({"topP": 0}, Sampling(top_k=1)),
        ({"topP": 0, "topK": 5}, Sampling(top_k=1)),
        ({"maxOutputTokens": 0}, Sampling()),
        ({"stopSequences": []}, Sampling()),
        ({"temperature": 0}, Sampling(temperature=0)),
        ({"presencePenalty": 2, "frequencyPenalty": -2}, Sampling(presence_penalty=2, frequency_penalty=-2)),
    ],
)
def test_special_values_of_sampling_numbers(fields: dict[str, Any], sampling: Sampling) -> None:
    assert configured(**fields).sampling == sampling


@pytest.mark.parametrize(
    ("config", "thinking", "shown"),
    [
        (None, None, False),
        ({}, None, False),
        ({"includeThoughts": True}, None, True),
        ({"includeThoughts": False, "thinkingBudget": 0}, False, False),
        ({"thinkingBudget": -1}, None, False),
        ({"thinkingBudget": 8192, "includeThoughts": True}, True, True),
        ({"thinkingBudget": 1}, True, False),
        ({"thinkingLevel": "HIGH"}, None, False),
    ],
)
def test_thinking_and_its_visibility(config: Any, thinking: bool | None, shown: bool) -> None:
    """Two settings say whether to think, and whether to show it."""
    found = configured(thinkingConfig=config)
    assert (found.conversation.thinking, found.extras["thoughts"]) == (thinking, shown)


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, Constraint(kind="json_schema", text="{}")),
        (
            {
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT", "properties": {"b": {"type": "STRING"}, "a": {}}},
            },
            Constraint(
                kind="json_schema", text='{"type":"object","properties":{"b":{"type":"string"},"a":{}}}'
            ),
        ),
        (
            {
                "responseMimeType": "application/json",
                "responseJsonSchema": {"type": "object", "properties": {"TYPE": {"const": "OBJECT"}}},
            },
            Constraint(kind="json_schema", text='{"type":"object","properties":{"TYPE":{"const":"OBJECT"}}}'),
        ),
        (  # Gemini CLI's router: Google's language under JSON Schema's name
            {
                "responseMimeType": "application/json",
                "responseJsonSchema": {"type": "OBJECT", "properties": {"score": {"type": "INTEGER"}}},
            },
            Constraint(
                kind="json_schema", text='{"type":"object","properties":{"score":{"type":"integer"}}}'
            ),
        ),
        ({"responseSchema": {"type": "ARRAY"}}, Constraint(kind="json_schema", text='{"type":"array"}')),
        (
            {
                "responseMimeType": "text/x.enum",
                "responseSchema": {"type": "STRING", "enum": ["a", "b.c", "d e", "(f)"]},
            },
            Constraint(kind="regex", text=r"a|b\.c|d e|\(f\)"),
        ),
    ],
)
def test_constraints_of_the_answer(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert configured(**fields).constraint == constraint


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"responseLogprobs": False, "logprobs": 3}, None),
        ({"responseLogprobs": True}, 0),
        ({"responseLogprobs": True, "logprobs": 3}, 3),
    ],
)
def test_logprobs_settings_are_read(fields: dict[str, Any], logprobs: int | None) -> None:
    assert configured(**fields).logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "choices"),
    [({}, 1), ({"candidateCount": 0}, 1), ({"candidateCount": 1}, 1), ({"candidateCount": 8}, 8)],
)
def test_candidate_count_sets_choices(fields: dict[str, Any], choices: int) -> None:
    assert configured(**fields).choices == choices


def test_opencode_headers_name_agent() -> None:
    """The headers of OpenCode say who asks."""
    assert read(RequestEnvelope(headers={"x-session-id": "c"})).hints == {
        "session": "c",
        "agent": "",
        "parent": "",
    }
    assert read(RequestEnvelope(headers={"x-session-id": "c", "x-parent-session-id": "p"})).hints == {
        "session": "c",
        "agent": "c",
        "parent": "p",
    }
    assert read(RequestEnvelope(headers={"x-goog-api-key": "k"})).hints == {}


def test_code_run_elsewhere_is_noted() -> None:
    said = {"role": "model", "parts": [{"executableCode": {"language": "PYTHON", "code": "1"}}]}
    assert read(contents=[*HI["contents"], said]).notes == (RAN_CODE_NOTE,)


def test_subset_of_functions_is_noted() -> None:
    found = read(
        tools=[{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f", "g"]}},
    )
    assert found.conversation.tool_choice == "required"
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    "body",
    [
        HI | {"systemInstruction": {"parts": [{"text": "s"}]}},
        {
            "generateContentRequest": HI
            | {"model": "models/m", "systemInstruction": {"parts": [{"text": "s"}]}}
        },
        {
            "generate_content_request": HI
            | {"model": "models/m", "system_instruction": {"parts": {"text": "s"}}}
        },
    ],
)
def test_counting_takes_request_or_fields(body: dict[str, Any]) -> None:
    found = GOOGLE.read(json.dumps(body).encode(), RequestEnvelope(model="m", operation="count_tokens"))
    assert [message.text for message in found.conversation.messages] == ["s", "hi"]
    assert found.ignored == ()


def test_single_content_without_list() -> None:
    assert (
        read(contents={"parts": {"text": "x"}}, tools={"functionDeclarations": [{"name": "f"}]})
        .conversation.messages[0]
        .text
        == "x"
    )


def test_deeply_nested_arguments_are_refused() -> None:
    deep = b'{"a":' * 400 + b"1" + b"}" * 400
    body = b'{"contents":[{"role":"model","parts":[{"functionCall":{"name":"f","args":' + deep + b"}}]}]}"
    with pytest.raises(Refused, match="too deeply"):
        GOOGLE.read(body, RequestEnvelope())


def test_openclaw_last_message_dropped() -> None:
    """OpenClaw's message about the moment is dropped."""
    moment = {
        "role": "user",
        "parts": [
            {"text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\ntick\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"}
        ],
    }
    found = read(contents=[*HI["contents"], moment])
    assert [message.text for message in found.conversation.messages] == ["hi"]
    assert found.ignored == ("$.contents[-1]",)
