"""A part that was read before is the same value as one that is read, and nothing else is taken for it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.codec.json import structure
from polarnode.core.errors import Refused
from polarnode.providers.anthropic.shapes import MessagesRequest
from polarnode.providers.openai_chat.shapes import ChatRequest
from polarnode.providers.openai_responses.shapes import ResponsesRequest
from polarnode.providers.read_parts import _MAX_REQUESTS, PartsCache
from polarnode.providers.shapes import read_body

USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Any = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def read(parts: PartsCache, value: Any, shape: type[Any] = ChatRequest) -> Any:
    return parts.structure(value, shape)


messages = st.lists(
    st.one_of(
        st.sampled_from([USER, SAID, RESULT]),
        st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=3)),
        st.builds(lambda text: {"role": "system", "content": text}, st.text(max_size=3)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, min_size=1, max_size=6))
def test_request_reads_as_first(requests: list[list[Any]]) -> None:
    """A request is read as if it were the first."""
    parts = PartsCache()
    for each in requests:
        value = body(*each)
        assert read(parts, json.loads(json.dumps(value))) == structure(value, ChatRequest)


def test_known_parts_are_not_reread() -> None:
    parts = PartsCache()
    first = read(parts, body(USER, SAID))
    second = read(parts, body(USER, SAID, RESULT))
    assert second.messages[:2] == first.messages
    assert all(one is other for one, other in zip(first.messages, second.messages, strict=False))
    third = read(parts, body({**USER, "content": "Hi"}, SAID, RESULT))
    assert third.messages[0] is not first.messages[0]
    assert third.messages[1] is first.messages[1]


def test_other_shape_or_list_is_reread() -> None:
    """A part of another shape or list is read."""
    parts = PartsCache()
    chat = read(parts, body(USER))
    messages = read(parts, body(USER, max_tokens=3), MessagesRequest)
    assert type(messages.messages[0]) is not type(chat.messages[0])
    assert type(messages.messages[0]).__module__.endswith("anthropic.shapes")


def test_plain_json_parts_stay() -> None:
    parts = PartsCache()
    value = {"model": "m", "input": [USER, SAID]}
    for _ in range(2):
        assert read(parts, value, ResponsesRequest).input == (USER, SAID)


def test_interleaved_agents_are_remembered() -> None:
    """Interleaved agents are all remembered, and the oldest is forgotten."""
    parts = PartsCache()
    agents = [{"role": "user", "content": f"agent {number}"} for number in range(_MAX_REQUESTS + 1)]
    first = [read(parts, body(each)).messages[0] for each in agents]
    again = [read(parts, body(each, SAID)).messages[0] for each in reversed(agents)]
    assert [one is other for one, other in zip(first, reversed(again), strict=True)] == [False] + [
        True
    ] * _MAX_REQUESTS


def test_part_conversion_is_cached_by_identity() -> None:
    """A part that is the same object is converted once; an equal one is converted anew."""
    parts, made = PartsCache(), []

    def text(shape: Any) -> list[str]:
        made.append(shape)
        return [repr(shape)]

    first = read(parts, body(USER, SAID)).messages
    texts = parts.convert(first, text)
    second = read(parts, body(USER, SAID, RESULT)).messages
    again = parts.convert(second, text)
    assert again == [[repr(shape)] for shape in second]
    assert all(one is other for one, other in zip(texts, again, strict=False))
    assert made == list(second)
    assert parts.convert(second, lambda shape: shape) == list(second)  # each function has its own
    copies = [structure(value, ChatRequest) for value in (body(USER), body(USER))]
    equal = [shape for copy in copies for shape in copy.messages]
    assert len({id(text) for text in parts.convert(equal, text)}) == 2  # equal is not the same


def test_list_conversion_is_cached() -> None:
    """The same list is converted once and gives the same value."""
    parts = PartsCache()
    first, second = (read(parts, body(USER, SAID)).messages for _ in range(2))
    made = parts.convert_list(first, list)
    assert parts.convert_list(second, list) is made
    assert parts.convert_list(first[:1], list) == [first[0]]
    assert parts.convert_list(reversed(first), list) == list(reversed(first))
    assert parts.convert_list(first, list) is made


@pytest.mark.parametrize("wrong", [{"role": "user", "content": 3}, {"role": "nobody"}, "text", None, [], 3])
def test_refusal_names_field_keeps_nothing(wrong: Any) -> None:
    """A refusal names the same field, and nothing of it is kept."""
    parts = PartsCache()
    read(parts, body(USER))
    with pytest.raises(Refused) as expected:
        structure(body(USER, wrong), ChatRequest)
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            read(parts, body(USER, wrong))
        assert (refused.value.path, str(refused.value)) == (expected.value.path, str(expected.value))


def test_too_deep_body_is_read_whole() -> None:
    """A body too deep to be written is read whole."""
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    parts = PartsCache()
    value = body(USER, {**SAID, "extra": deep})
    assert read(parts, value) == structure(value, ChatRequest)


def test_session_bodies_share_read_parts() -> None:
    parts = PartsCache()
    first, unknown = read_body(json.dumps(body(USER, odd=1)).encode(), ChatRequest, parts)
    second, _ = read_body(json.dumps(body(USER, SAID)).encode(), ChatRequest, parts)
    assert unknown == ("$.odd",)
    assert second.messages[0] is first.messages[0]
