"""A request is known again by what it asks, not by its bytes."""

from typing import Any

import pytest
from attrs import evolve

from polarnode.core.conversation import (
    Constraint,
    Conversation,
    Message,
    ModelRequest,
    Sampling,
    Tool,
    ToolCall,
)
from polarnode.gateway.model_requests import request_key

CALL = ToolCall(id="1", name="look", arguments="{}")
MESSAGES = (
    Message(role="user", text="hi"),
    Message(role="assistant", text="So.", calls=(CALL,)),
    Message(role="tool", text="\ud800", call_id="1"),
)
TOOLS = (Tool(name="look", parameters={"type": "object"}),)
ASKED = ModelRequest(
    provider="openai_chat",
    model="m",
    conversation=Conversation(messages=MESSAGES, tools=TOOLS),
    sampling=Sampling(max_tokens=99),
)


def key(request: ModelRequest) -> str:
    return request_key(request, "generate")


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": True},
        {"include_usage": False},
        {"extras": {"metadata": {"try": 1}}},
        {"ignored": ("$.user",), "notes": ("n",)},
        {"hints": {"session": "2"}},
    ],
)
def test_delivery_fields_keep_the_key(changes: dict[str, Any]) -> None:
    assert key(evolve(ASKED, **changes)) == key(ASKED)


def test_asked_content_is_a_difference() -> None:
    said = ASKED.conversation
    others = [
        evolve(ASKED, conversation=evolve(said, **changes))
        for changes in (
            {"messages": MESSAGES[:2]},
            {"messages": (evolve(MESSAGES[0], text="hi!"), *MESSAGES[1:])},
            {"messages": (MESSAGES[0], evolve(MESSAGES[1], thinking="T"), MESSAGES[2])},
            {"messages": (MESSAGES[0], evolve(MESSAGES[1], text="S", thinking="o."), MESSAGES[2])},
            {"messages": (MESSAGES[0], evolve(MESSAGES[1], refs=("r",)), MESSAGES[2])},
            {"messages": (MESSAGES[0], evolve(MESSAGES[1], calls=()), MESSAGES[2])},
            {"tools": ()},
            {"tools": (evolve(TOOLS[0], parameters={"maximum": 2**70}),)},
            {"tool_choice": "none"},
            {"thinking": False},
            {"prefilled": True},
        )
    ]
    others += [
        evolve(ASKED, **changes)
        for changes in (
            {"model": "n"},
            {"sampling": Sampling(max_tokens=98)},
            {"sampling": Sampling(max_tokens=99, temperature=0.5)},
            {"constraint": Constraint(kind="regex", text="a")},
            {"choices": 2},
            {"logprobs": 0},
            {"one_call": True},
            {"generate": False},
        )
    ]
    keys = [key(ASKED), request_key(ASKED, "compact"), *map(key, others)]
    assert len(set(keys)) == len(keys)


def test_lowered_fallback_limit_keeps_key() -> None:
    limits = (64_000, 128_000, 63_999)
    first, second, third = (key(evolve(ASKED, sampling=Sampling(max_tokens=limit))) for limit in limits)
    assert first == second != third
