"""Two spellings of a field's name, and what nobody reads."""

import pytest

from polarnode.core.conversation import Json
from polarnode.providers.google.shapes import Content, GenerateRequest, camel, respelled


@pytest.mark.parametrize(
    ("name", "camels"),
    [
        ("contents", "contents"),
        ("system_instruction", "systemInstruction"),
        ("top_p", "topP"),
        ("response_json_schema", "responseJsonSchema"),
    ],
)
def test_field_names_get_one_spelling(name: str, camels: str) -> None:
    assert camel(name) == camels == camel(camels)


def test_arguments_keep_their_own_names() -> None:
    """The arguments of calls keep their own names."""
    said: Json = {
        "parts": [{"function_call": {"name": "go", "args": {"file_path": 1, "a": {"b_c": 2}}}}],
        "role": "model",
    }
    found, unknown = respelled(said, Content)
    assert found == {
        "parts": [{"functionCall": {"name": "go", "args": {"file_path": 1, "a": {"b_c": 2}}}}],
        "role": "model",
    }
    assert unknown == ()


def test_unknown_fields_named_once() -> None:
    """Unknown fields are named once for a whole history."""
    part: Json = {"text": "x", "flavour": 1}
    said: Json = {
        "contents": [{"parts": [part, part]}, {"parts": [part]}],
        "tools": [{"functionDeclarations": []}, {"google_search": {}}],
        "safetySettings": [],
        "generationConfig": {"speechConfig": {}, "topK": 1, "mediaResolution": None},
    }
    found, unknown = respelled(said, GenerateRequest)
    assert unknown == (
        "$.contents[*].parts[*].flavour",
        "$.tools[1].googleSearch",
        "$.safetySettings",
        "$.generationConfig.speechConfig",
    )
    assert isinstance(found, dict)
    assert found["generationConfig"] == {"topK": 1}


def test_first_of_two_spellings_counts() -> None:
    assert respelled({"systemInstruction": "a", "system_instruction": "b"}, GenerateRequest)[0] == {
        "systemInstruction": "a"
    }


@pytest.mark.parametrize("value", [None, 1, "x", [], ["x", 1]])
def test_non_object_passes_unchanged(value: Json) -> None:
    """A value that is no object is left to the shape to refuse."""
    assert respelled(value, GenerateRequest) == (value, ())
