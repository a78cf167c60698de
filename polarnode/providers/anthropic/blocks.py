"""Anthropic Messages: blocks of content as the text a model is shown.

The rule: the same block is the same text wherever it stands and whatever else the request holds, but for a tool that is referred to: what it
is, is said at that place, once its request has it, because the list at the head must stay as it was.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, assert_never

from polarnode.conversation import Tool
from polarnode.providers.anthropic.shapes import (
    ContentSource,
    DocumentBlock,
    NotTextBlock,
    OtherSource,
    ResultContent,
    SearchResultBlock,
    TextBlock,
    TextSource,
    TextualBlock,
    ToolReferenceBlock,
    UnseenBlock,
)
from polarnode.providers.shapes import compact, not_text, paragraphs, unseen

NO_TOOLS: Final[Mapping[str, str]] = MappingProxyType({})


def told(tool: Tool) -> str:
    """A tool as text, as most chat templates write it at the head."""
    return compact({"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}})


def textual(block: TextualBlock) -> str:
    """A text; a document or a search result with its title before it."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return paragraphs((block.title, block.source, *(part.text for part in block.content)))
        case DocumentBlock():
            return paragraphs((block.title or "", block.context or "", *_source(block)))
        case _:
            assert_never(block)


def result_text(content: ResultContent, later: Mapping[str, str]) -> str:
    """What a tool gave back."""
    if content is None or isinstance(content, str):
        return content or ""
    return paragraphs(_result_part(part, later) for part in content)


def _result_part(part: TextualBlock | ToolReferenceBlock | UnseenBlock, later: Mapping[str, str]) -> str:
    match part:
        case ToolReferenceBlock(tool_name=name):
            return paragraphs((f"Tool loaded: {name}", later.get(name, "")))
        case UnseenBlock(type=kind):
            return unseen(kind)
        case _:
            return textual(part)


def _source(block: DocumentBlock) -> Iterator[str]:
    match block.source:
        case TextSource(data=data):
            yield data
        case ContentSource(content=content):
            for part in (TextBlock("text", content),) if isinstance(content, str) else content:
                if isinstance(part, NotTextBlock):
                    raise not_text(part.type)
                yield part.text
        case OtherSource():
            raise not_text("document")
        case _:
            assert_never(block.source)
