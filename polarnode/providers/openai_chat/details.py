"""Chat Completions: OpenRouter's `reasoning_details`, the one opaque field of this API that a client gives back.

It names the turn an answer was, which a turn without tool calls has no other way to say. The rule for whoever edits it: written only for
clients that speak OpenRouter's dialect (they ask with `reasoning` or `include_reasoning`), because to the others it is an unknown field;
never twice in an answer, and never for several choices, which are several turns.
"""

from collections.abc import Iterator
from typing import Final

from polarnode.conversation import Json
from polarnode.providers.contract import Call
from polarnode.providers.openai_chat.shapes import ChatRequest

DETAILS: Final = "reasoning_details"


def asked(request: ChatRequest) -> bool:
    """Whether the client speaks OpenRouter's dialect, and has one answer to name."""
    return (request.reasoning is not None or request.include_reasoning is True) and (request.n or 1) == 1


def details(call: Call) -> dict[str, Json]:
    """What is laid over the message, or over a delta: nothing for who did not ask."""
    if not call.request.extras.get(DETAILS):
        return {}
    return {DETAILS: [{"type": "reasoning.encrypted", "data": call.signature, "id": None, "format": "unknown", "index": 0}]}


def detail_refs(echoed: Json) -> Iterator[str]:
    """The opaque fields in what a client gives back, its own additions among them."""
    for detail in echoed if isinstance(echoed, list) else ():
        if isinstance(detail, dict):
            yield from (found for name in ("id", "data", "signature") if isinstance(found := detail.get(name), str) and found)
