"""Anthropic Messages: what a block is as text, and which blocks are none."""

import json
from typing import Any

import pytest

from polarnode.core.codec import structure
from polarnode.core.conversation import Message, Tool
from polarnode.core.errors import Refused
from polarnode.providers.anthropic.read import block_text, describe_tool, read, result_text
from polarnode.providers.anthropic.shapes import DocumentBlock, ResultContent, TextualBlock
from polarnode.providers.shapes import unseen


def block(value: dict[str, Any]) -> TextualBlock:
    return structure(value, TextualBlock)  # type: ignore[arg-type]


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "citations": {"enabled": True}, **more}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"type": "text", "text": "a", "citations": None}, "a"),
        (document({"type": "text", "media_type": "text/plain", "data": "Body."}), "Body."),
        (
            document({"type": "text", "data": "Body."}, title="Title", context="From the wiki."),
            "Title\nFrom the wiki.\nBody.",
        ),
        (document({"type": "content", "content": "Body."}, title=None), "Body."),
        (
            document(
                {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ),
            "a\nb",
        ),
        (
            {
                "type": "search_result",
                "source": "https://x",
                "title": "T",
                "content": [{"type": "text", "text": "a"}],
            },
            "T\nhttps://x\na",
        ),
    ],
)
def test_text_blocks_become_text(value: dict[str, Any], text: str) -> None:
    assert block_text(block(value)) == text
    assert result_text(structure([value], ResultContent), {}) == text  # type: ignore[arg-type]
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [value, {"type": "text", "text": "Sum up."}]}],
    }
    request = read(json.dumps(body).encode(), headers={}, model=None, counting=False)
    assert request.conversation.messages == (Message(role="user", text=f"{text}\nSum up."),)


@pytest.mark.parametrize(
    ("content", "path", "sentence"),
    [
        (
            document({"type": "base64", "media_type": "application/pdf", "data": "x"}),
            ".source.type",
            "send the document as text, not as base64",
        ),
        (
            document({"type": "url", "url": "https://x"}),
            ".source.type",
            "send the document as text, not as url",
        ),
        (
            document({"type": "content", "content": [{"type": "image", "source": {}}]}),
            ".source.content[0]",
            "remove the image part",
        ),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_unseen_block_refused_with_path(
    content: dict[str, Any], path: str, sentence: str, inside: bool
) -> None:
    """What a tool's result has is described there."""
    if inside:
        described = unseen("document" if path == ".source.type" else "image")
        assert result_text(structure([content], ResultContent), {}) == described  # type: ignore[arg-type]
        return
    with pytest.raises(Refused, match=sentence) as caught:
        read(
            json.dumps(
                {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [content]}]}
            ).encode(),
            headers={},
            model=None,
            counting=False,
        )
    assert caught.value.path == "$.messages[0].content[0]" + path


def test_document_without_text_is_refused() -> None:
    """Its message refuses it with the path; this is the second check, in case a change loosens the first."""
    for source in ({"type": "url"}, {"type": "content", "content": [{"type": "image"}]}):
        shape = structure(document(source), DocumentBlock)
        with pytest.raises(Refused, match="reads text only"):
            block_text(shape)


def test_tool_description_is_stable() -> None:
    tool = Tool(
        name="later", description="Läter.", parameters={"type": "object", "properties": {"z": {}, "a": {}}}
    )
    line = '{"type":"function","function":{"name":"later","description":"Läter.","parameters":{"type":"object","properties":{"z":{},"a":{}}}}}'
    assert describe_tool(tool) == line
