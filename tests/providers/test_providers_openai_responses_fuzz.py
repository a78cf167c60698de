"""Responses: a body of any shape is read or refused with a path, and whatever was read can be answered,
remembered and read again.
"""

import json
from typing import Any

from attrs import fields
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import (
    Answer,
    Json,
    ModelRequest,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCall,
    Usage,
)
from polarnode.core.errors import Refused
from polarnode.gateway.earlier_requests import SessionMemory
from polarnode.providers.contract import ModelCallInfo, RequestEnvelope
from polarnode.providers.openai_responses import OPENAI_RESPONSES
from polarnode.providers.openai_responses.history import MAX_UNSEALED_BYTES, SealedContent, seal
from polarnode.providers.openai_responses.shapes import ResponsesRequest
from polarnode.providers.openai_responses.tools import _READERS as _TOOL_READERS
from polarnode.providers.openai_responses.transcript import _READERS, Transcript, read_known_item
from polarnode.providers.read_parts import PartsCache

words = st.sampled_from(
    [
        "",
        "x",
        "go",
        "user",
        "assistant",
        "client",
        "{}",
        '{"input":"ü"}',
        '{"command":["ls"]}',
        "{",
        "call_1",
        "pn1_",
        "resp_1",
        "rs_1f_0",
    ]
)
junk: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats(-2, 2, width=16) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=3,
)
parts = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["input_text", "output_text", "refusal", "input_image", "encrypted_content", "new"]
        )
    },
    optional={"text": words | junk, "refusal": words, "encrypted_content": words},
)
tools = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from([*_TOOL_READERS, "web_search", "new"]) | junk},
        optional={
            "name": words,
            "description": words,
            "parameters": st.just({"type": "object"}),
            "execution": st.just("client") | junk,
            "format": st.just({"type": "grammar", "definition": "x"}),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("namespace"), "name": words, "tools": st.lists(inner, max_size=2)}
    ),
    max_leaves=3,
)
items = st.fixed_dictionaries(
    {
        "type": st.sampled_from([*_READERS, "item_reference", "compaction_trigger", "web_search_call", "new"])
        | junk
    },
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": words | st.lists(parts, max_size=2),
        "summary": st.lists(parts, max_size=2),
        "encrypted_content": words,
        "id": words,
        "call_id": words,
        "name": words,
        "namespace": words,
        "arguments": words | st.just({}),
        "input": words,
        "action": st.dictionaries(words, junk, max_size=2),
        "operation": st.dictionaries(words, junk, max_size=2),
        "output": words | st.lists(parts, max_size=2) | junk,
        "tools": st.lists(tools, max_size=2),
        "execution": st.sampled_from(["client", "server"]),
    },
)
said: Any = words | st.lists(items, max_size=4) | junk
known: dict[str, Any] = {
    "tools": st.lists(tools, max_size=3),
    "tool_choice": st.sampled_from(["auto", "none", "required"])
    | st.fixed_dictionaries({"type": words, "name": words}),
    "text": st.just({"format": {"type": "json_object"}}),
    "include": st.just(["reasoning.encrypted_content", "message.output_text.logprobs"]),
    "instructions": words,
    "stream": st.booleans(),
    "store": st.booleans(),
}
others = [field.alias for field in fields(ResponsesRequest)]
# mostly none, or nothing would be read
odd: Any = st.just({}) | st.just({}) | st.dictionaries(st.sampled_from(others), junk, max_size=1)
bodies: Any = st.builds(
    dict.__or__, st.fixed_dictionaries({"model": st.just("m"), "input": said}, optional=known), odd
)
operations = st.sampled_from(["generate", "generate", "compact", "count_tokens"])


def read(body: Json, operation: Any, memory: SessionMemory) -> ModelRequest | None:
    refused: Refused
    try:
        return OPENAI_RESPONSES.read(
            json.dumps(body).encode(), RequestEnvelope(operation=operation, memory=memory)
        )
    except Refused as error:
        refused = error
    assert str(refused)
    assert refused.path is not None or not isinstance(body, dict)
    return None


@settings(max_examples=500)
@given(bodies | bodies | bodies | junk, operations, st.lists(words, max_size=3), st.data())
def test_any_body_answered_or_refused(
    body: Json, operation: Any, arguments: list[str], data: st.DataObject
) -> None:
    """Any body is read or refused and what is read is answered."""
    memory = SessionMemory()
    request = read(body, operation, memory)
    if request is None:
        return
    names = [tool.name for tool in request.conversation.tools] + ["unknown"]
    calls: list[Part] = [
        ToolCall(id=f"call_{index}", name=data.draw(st.sampled_from(names)), arguments=text)
        for index, text in enumerate(arguments)
    ]
    answer = Answer(parts=(ThinkingPart("hm"), TextPart("x"), *calls), finish_reason="stop")
    call = ModelCallInfo(request=request, id="1f", created=1, signature="c2ln")
    whole = json.loads(OPENAI_RESPONSES.whole(call, [answer], Usage()))
    stream = OPENAI_RESPONSES.stream(call)
    sent = (
        stream.start(prompt_tokens=1, cached_tokens=0)
        + stream.delta(ThinkingDelta("hm"))
        + stream.delta(TextDelta("x"))
    )
    sent += b"".join(stream.delta(part) for part in calls if isinstance(part, ToolCall)) + stream.end(
        [answer], Usage()
    )
    last = json.loads(sent.decode().split("\n\n")[-2].split("data: ")[1])
    if operation != "compact":
        assert last["response"] == whole
    OPENAI_RESPONSES.remember(call, answer, memory)
    again = {"model": "m", "input": [*whole["output"], {"role": "user", "content": "on"}]}
    echoed = read(again, "generate", memory)
    assert echoed is not None
    assert echoed.conversation.messages[-1].text == "on"
    if "keeps" in request.extras:
        built = read({"model": "m", "previous_response_id": "resp_1f"}, "generate", memory)
        assert built is not None
        assert built.conversation.messages[-1].role in ("assistant", "user")


def read_beside(body: Json, operation: Any, known: PartsCache) -> ModelRequest | tuple[str, str | None]:
    envelope = RequestEnvelope(operation=operation, memory=SessionMemory(), parts=known)
    try:
        return OPENAI_RESPONSES.read(json.dumps(body).encode(), envelope)
    except Refused as error:
        return str(error), error.path


# two of half the room fit only where the first is shorter
SEALED = [
    {"type": "reasoning", "encrypted_content": seal(SealedContent(thinking="t" * size))}
    for size in (0, 1, MAX_UNSEALED_BYTES // 2 - 100, MAX_UNSEALED_BYTES // 2)
]
histories: Any = st.lists(items | items | items | items | st.sampled_from(SEALED), min_size=1, max_size=4)


def found_in(sent: list[Any], *, alone: bool) -> Any:
    transcript = Transcript()
    try:
        for index, item in enumerate(sent):
            transcript.take(item, f"$.input[{index}]", read_known_item(item) if alone else None)
    except Refused as error:
        return str(error), error.path
    transcript.close()
    head = transcript.head
    return (
        [transcript.messages, transcript.later, transcript.ignored, transcript.notes],
        [head.tools, head.ignored, head.notes],
    )


@settings(max_examples=100, deadline=None)
@given(histories)
def test_item_reads_alike_alone(sent: list[Any]) -> None:
    """An item that is read alone is as one in its place."""
    assert found_in(sent, alone=True) == found_in(sent, alone=False)


def test_sealed_items_share_one_bound() -> None:
    """Sealed items have room together, whether they are known or not."""
    for sent in ([SEALED[3], SEALED[3], SEALED[1]], [SEALED[2], SEALED[2], SEALED[3], SEALED[1]]):
        assert found_in(sent, alone=True) == found_in(sent, alone=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(histories, bodies, st.booleans()), min_size=2, max_size=4), operations)
def test_bodies_read_alike_with_cache(
    requests: list[tuple[list[Any], dict[str, Any], bool]], operation: Any
) -> None:
    """A session s bodies are read as if each were its first."""
    known, sent = PartsCache(), list[Any]()
    for added, body, grows in requests:
        sent = [*sent, *added] if grows else [*added, *sent[1:]]
        asked = body | {"input": sent}
        assert read_beside(asked, operation, known) == read_beside(asked, operation, PartsCache())
