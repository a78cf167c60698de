"""Which JSON the Google dialect takes, and which it refuses with which path."""

import json
from base64 import b64encode, urlsafe_b64encode
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import ModelRequest
from polarnode.core.errors import Refused
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.google import GOOGLE
from polarnode.providers.google.shapes import Blob

HI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


def read(**fields: Any) -> ModelRequest:
    return GOOGLE.read(json.dumps(HI | fields).encode(), RequestEnvelope(model="m"))


def refused(**fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        read(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"contents": []}, "$.contents"),
        ({"contents": None}, "$.contents"),
        ({"contents": "hi"}, "$.contents"),
        ({"contents": [{"parts": "hi"}]}, "$.contents[0].parts"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "$.contents[0].parts[0].text"),
        ({"contents": [{"role": "robot", "parts": [{"text": "x"}]}]}, "$.contents[0].role"),
        (
            {"contents": [{"parts": [{"functionCall": {"args": {}}}]}]},
            "$.contents[0].parts[0].functionCall.name",
        ),
        (
            {"contents": [{"parts": [{"functionCall": {"name": "f", "args": []}}]}]},
            "$.contents[0].parts[0].functionCall.args",
        ),
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}]}]},
            "$.contents[0].parts[0].inlineData.mimeType",
        ),
        (
            {"contents": [{"parts": [{"inline_data": {"mime_type": "text/plain", "data": "/w=="}}]}]},
            "$.contents[0].parts[0].inlineData.data",
        ),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "gs://a"}}]}]}, "$.contents[0].parts[0].fileData"),
        ({"cachedContent": "cachedContents/a"}, "$.cachedContent"),
        (
            {"tools": [{"functionDeclarations": [{"description": "x"}]}]},
            "$.tools[0].functionDeclarations[0].name",
        ),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": []}]}]},
            "$.tools[0].functionDeclarations[0].parameters",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}},
            "$.toolConfig.functionCallingConfig.mode",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}}},
            "$.toolConfig.functionCallingConfig.allowedFunctionNames[0]",
        ),
        ({"generationConfig": {"temperature": 3}}, "$.generationConfig.temperature"),
        ({"generationConfig": {"topP": -1}}, "$.generationConfig.topP"),
        ({"generationConfig": {"presencePenalty": 2.5}}, "$.generationConfig.presencePenalty"),
        ({"generationConfig": {"frequencyPenalty": -2.5}}, "$.generationConfig.frequencyPenalty"),
        ({"generationConfig": {"topK": 1.5}}, "$.generationConfig.topK"),
        ({"generationConfig": {"max_output_tokens": -1}}, "$.generationConfig.maxOutputTokens"),
        ({"generationConfig": {"stopSequences": [""]}}, "$.generationConfig.stopSequences"),
        ({"generationConfig": {"candidateCount": 9}}, "$.generationConfig.candidateCount"),
        ({"generationConfig": {"logprobs": 21}}, "$.generationConfig.logprobs"),
        ({"generationConfig": {"responseMimeType": "audio/wav"}}, "$.generationConfig.responseMimeType"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "$.generationConfig.responseSchema"),
        ({"generationConfig": []}, "$.generationConfig"),
    ],
)
def test_unsupported_field_refused_with_path(fields: dict[str, Any], path: str) -> None:
    """A field that cannot be served is refused with its path."""
    error = refused(**fields)
    assert error.path == path
    assert str(error)


def test_body_without_contents_names_them() -> None:
    with pytest.raises(Refused, match=r"^contents is missing") as caught:
        GOOGLE.read(b"{}", RequestEnvelope())
    assert caught.value.path == "$.contents"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"x"', b"{", b'{"contents": [NaN]}'])
def test_malformed_body_is_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        GOOGLE.read(body, RequestEnvelope())


def test_unknown_fields_are_named() -> None:
    """Unknown fields are taken and named."""
    found = read(
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
        tools=[{"googleSearch": {}}, {"codeExecution": {}, "urlContext": {}}],
        generationConfig={"responseModalities": ["TEXT"]},
    )
    assert found.ignored == (
        "$.safetySettings",
        "$.labels",
        "$.tools[0].googleSearch",
        "$.tools[1].codeExecution",
        "$.tools[1].urlContext",
        "$.generationConfig.responseModalities",
    )
    assert found.conversation.tools == ()


def test_snake_case_reads_the_same() -> None:
    camel = read(
        systemInstruction={"parts": [{"text": "s"}]},
        generationConfig={"topP": 0.5, "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0}},
        tools=[{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    )
    snake = read(
        system_instruction={"parts": [{"text": "s"}]},
        generation_config={"top_p": 0.5, "thinking_config": {"include_thoughts": True, "thinking_budget": 0}},
        tools=[{"function_declarations": [{"name": "f", "parameters_json_schema": {"type": "object"}}]}],
        tool_config={"function_calling_config": {"mode": "any", "allowed_function_names": ["f"]}},
    )
    assert camel == snake
    assert camel.ignored == ()


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode, lambda data: b64encode(data).rstrip(b"=")])
def test_text_blob_in_any_encoding(encode: Any) -> None:
    assert (
        Blob(mimeType="text/markdown; charset=utf-8", data=encode("# Käse ÿþ>>>".encode()).decode()).text()
        == "# Käse ÿþ>>>"
    )
    assert Blob(mimeType="application/json", data=encode(b"{}").decode()).text() == "{}"


# ── anything at all ───────────────────────────────────────────────────────────

words = st.sampled_from(
    ["", "user", "model", "x", "OBJECT", "ANY", "text/plain", "application/json", "AA==", "*"]
)
NAMES = """
contents parts role text thought thoughtSignature functionCall functionResponse name id args response inlineData mimeType data fileData
executableCode code system_instruction tools functionDeclarations parameters parametersJsonSchema type properties items nullable enum anyOf
toolConfig functionCallingConfig mode allowedFunctionNames generationConfig temperature topK thinkingConfig thinkingBudget responseSchema
responseMimeType generateContentRequest cachedContent model
"""
names = st.sampled_from(NAMES.split())
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=25,
)
part = st.dictionaries(names, values, max_size=2) | st.fixed_dictionaries({"text": words})
content = st.fixed_dictionaries({"parts": st.lists(part, max_size=3)}, optional={"role": words})
bodies = values | st.fixed_dictionaries(
    {"contents": st.lists(content, max_size=3)},
    optional=dict.fromkeys(("tools", "toolConfig", "generationConfig"), values),
)


@settings(max_examples=400)
@given(bodies, st.sampled_from(["generate", "count_tokens"]))
def test_any_body_is_read_or_refused(body: Any, operation: Any) -> None:
    with suppress(Refused):
        found = GOOGLE.read(json.dumps(body).encode(), RequestEnvelope(model="m", operation=operation))
        assert all(isinstance(message.text, str) for message in found.conversation.messages)


def test_deep_nesting_is_named() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = {"a": deep}
    assert (
        refused(contents=[{"role": "model", "parts": [{"functionCall": {"name": "f", "args": deep}}]}]).path
        == "$.contents[0]"
    )
    assert (
        refused(generationConfig={"responseJsonSchema": deep}).path == "$.generationConfig.responseJsonSchema"
    )
