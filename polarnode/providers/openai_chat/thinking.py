"""Chat Completions: whether to think, in the words of the several servers clients were written for.

The rule for whoever adds a word: the first that says something wins, from the most to the least literal; an effort other than none leaves
it to the template, which knows no efforts.
"""

from collections.abc import Iterator

from polarnode.errors import Refused
from polarnode.providers.openai_chat.shapes import ChatRequest

_TEMPLATE = ("enable_thinking", "thinking")  # Qwen's and GLM's word, and DeepSeek's
_TYPES = {"enabled": True, "disabled": False}


def thinking(request: ChatRequest) -> bool | None:
    """Whether the client wants thinking; None where it does not say."""
    return next((said for said in _said(request) if said is not None), None)


def unused(request: ChatRequest) -> Iterator[str]:
    """The paths of what was said of thinking and of the template, and not used."""
    if request.reasoning_effort not in (None, "none"):
        yield "$.reasoning_effort"
    if request.reasoning is not None and request.reasoning.effort not in (None, "none"):
        yield "$.reasoning.effort"
    yield from (f"$.chat_template_kwargs.{name}" for name in request.chat_template_kwargs or {} if name not in _TEMPLATE)


def _said(request: ChatRequest) -> Iterator[bool | None]:
    yield request.enable_thinking
    for name in _TEMPLATE:
        yield _flag(request, name)
    yield _TYPES.get(request.thinking.type or "") if request.thinking is not None else None
    if request.reasoning is not None:
        yield request.reasoning.enabled
        yield False if request.reasoning.effort == "none" else None
    yield False if request.reasoning_effort == "none" else None


def _flag(request: ChatRequest, name: str) -> bool | None:
    said = (request.chat_template_kwargs or {}).get(name)
    if said is None or isinstance(said, bool):
        return said
    path = f"$.chat_template_kwargs.{name}"
    raise Refused(f"{path[2:]} must be true or false or null, not {said!r}", path=path)
