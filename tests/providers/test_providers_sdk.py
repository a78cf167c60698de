"""The official SDKs against our bytes: what they send we read, what we write they understand. No server: only
their transport is ours.
"""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from providers_kit import OPENAI_ERRORS

from polarnode.core.conversation import (
    Answer,
    Delta,
    ModelRequest,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import (
    JSON_TYPE,
    STREAM_TYPE,
    Fault,
    FaultKind,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
    ServedModel,
)
from polarnode.providers.dialect import Route, missed, route, session_keys

GO = ToolCall(id="call_ab0", name="go", arguments='{"to": "Köln", "days": 2}')
STAY = ToolCall(id="call_ab1", name="stay", arguments="{}")
ANSWER = Answer(
    parts=(ThinkingPart("Where to?\n"), TextPart("Off to 🚀."), GO, STAY), finish_reason="tool_calls"
)
DELTAS: tuple[Delta, ...] = (
    ThinkingDelta("Where "),
    ThinkingDelta("to?\n"),
    TextDelta("Off "),
    TextDelta("to 🚀."),
    GO,
    STAY,
)
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=2)
SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)


class Node:
    """A node in one function: it reads what an SDK sends and answers ANSWER, or the fault it was given,
    before or inside the stream.
    """

    def __init__(self, *, fault: Fault | None = None, breaks: bool = False) -> None:
        self.fault = fault
        self.breaks = breaks
        self.requests: list[ModelRequest] = []
        self.keys: list[tuple[str, ...]] = []

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Reply:
        self.keys.append(session_keys(path, headers))
        found = route(method, path, headers)
        if found is None:
            return missed(method, path, headers)
        if self.fault is not None and not self.breaks:
            return found.dialect.error(self.fault)
        return self._serve(found, headers, body)

    def _serve(self, found: Route, headers: Any, body: bytes) -> Reply:
        dialect = found.dialect
        if found.operation == "models":
            return _ok(dialect.models(SERVED))
        if found.operation == "model":
            return _ok(dialect.model(SERVED, name=found.model or ""))
        request = dialect.read(
            body, RequestEnvelope(headers=headers, model=found.model, operation=found.operation)
        )
        self.requests.append(request)
        call = ModelCallInfo(request=request, id="0f1e", created=1700000000, signature="c2ln")
        if found.operation == "count_tokens":
            return _ok(dialect.count(12) or b"")
        return (
            Reply(status=200, headers=(("content-type", STREAM_TYPE),), body=self._stream(found, call))
            if request.stream
            else _ok(dialect.whole(call, [ANSWER], USAGE))
        )

    def _stream(self, found: Route, call: ModelCallInfo) -> bytes:
        stream = found.dialect.stream(call)
        sent = stream.keep_alive() + stream.start(prompt_tokens=10, cached_tokens=8)
        for delta in DELTAS:
            sent += stream.delta(delta) + stream.keep_alive()
        if self.breaks and self.fault is not None:
            return sent + (stream.failed(self.fault) or b"")
        return sent + stream.end([ANSWER], USAGE)


def _ok(body: bytes) -> Reply:
    return Reply(status=200, headers=(("content-type", JSON_TYPE),), body=body)


def openai_client(node: Node) -> openai.OpenAI:
    def handle(request: httpx.Request) -> httpx.Response:
        reply = node.answer(request.method, request.url.path, request.headers, request.content)
        return httpx.Response(reply.status, headers=list(reply.headers), content=reply.body)

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(
        api_key="key", base_url="http://node/sessions/abc/v1", max_retries=0, http_client=client
    )


def anthropic_client(node: Node) -> anthropic.Anthropic:
    def handle(request: httpx2.Request) -> httpx2.Response:
        reply = node.answer(request.method, request.url.path, request.headers, request.content)
        return httpx2.Response(reply.status, headers=list(reply.headers), content=reply.body)

    client = httpx2.Client(transport=httpx2.MockTransport(handle))
    return anthropic.Anthropic(
        api_key="key", base_url="http://node/sessions/abc", max_retries=0, http_client=client
    )


CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "go", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}},
}
TOOL: Any = {"name": "go", "input_schema": {"type": "object", "properties": {"to": {"type": "string"}}}}
HI: Any = [{"role": "user", "content": "hi"}]


# ── OpenAI ────────────────────────────────────────────────────────────────────


def test_openai_whole_answer() -> None:
    node = Node()
    found = openai_client(node).chat.completions.create(
        model="asked-for", messages=HI, tools=[CHAT_TOOL], temperature=0.5, stop=["END"]
    )
    (choice,) = found.choices
    assert (found.model, choice.finish_reason, choice.message.content) == (
        "asked-for",
        "tool_calls",
        "Off to 🚀.",
    )
    assert choice.message.model_extra == {"reasoning_content": "Where to?\n"}
    assert choice.message.tool_calls is not None
    assert [
        json.loads(call.function.arguments) for call in choice.message.tool_calls if call.type == "function"
    ] == [{"to": "Köln", "days": 2}, {}]
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert (found.usage.total_tokens, found.usage.prompt_tokens_details.cached_tokens) == (14, 8)
    assert node.keys == [("abc", "key")]
    assert (node.requests[0].sampling.temperature, node.requests[0].sampling.stop) == (0.5, ("END",))


def test_openai_streamed_accumulator() -> None:
    """An OpenAI answer is streamed through the SDK's own accumulator."""
    with openai_client(Node()).chat.completions.stream(
        model="asked-for", messages=HI, tools=[CHAT_TOOL], stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion()
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    message = found.choices[0].message
    assert (message.content, found.choices[0].finish_reason) == ("Off to 🚀.", "tool_calls")
    assert [(call.id, call.function.name) for call in message.tool_calls or ()] == [
        ("call_ab0", "go"),
        ("call_ab1", "stay"),
    ]
    assert found.usage is not None
    assert found.usage.completion_tokens == 4


def test_openai_no_unasked_usage() -> None:
    """OpenAI's SDK is streamed no usage unasked."""
    chunks = list(openai_client(Node()).chat.completions.create(model="m", messages=HI, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_openai_conversation_round_trip() -> None:
    """The SDK's own message, given back with a result, reads as what was answered."""
    node = Node()
    client = openai_client(node)
    answer: Any = client.chat.completions.create(model="m", messages=HI).choices[0].message
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in answer.tool_calls
    ]
    client.chat.completions.create(model="m", messages=[*HI, answer, *results])
    (_, echoed, *tools) = node.requests[-1].conversation.messages
    assert echoed == ANSWER.as_message(refs=("call_ab0", "call_ab1"))
    assert [message.call_id for message in tools] == ["call_ab0", "call_ab1"]


@pytest.mark.parametrize(("kind", "error"), OPENAI_ERRORS)
def test_openai_raises_own_error(kind: FaultKind, error: type[openai.APIStatusError]) -> None:
    node = Node(fault=Fault(kind=kind, message="One sentence.", path="$.a", prompt_tokens=9, limit=8))
    with pytest.raises(error) as caught:
        openai_client(node).chat.completions.create(model="m", messages=HI)
    assert caught.value.body
    if kind == "context_too_long":
        assert caught.value.code == "context_length_exceeded"


def test_openai_models_and_missing_path() -> None:
    client = openai_client(Node())
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("org/any").id == "org/any"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")


# ── Anthropic ─────────────────────────────────────────────────────────────────


def test_anthropic_whole_answer() -> None:
    node = Node()
    found = anthropic_client(node).messages.create(
        model="asked-for", messages=HI, max_tokens=9, tools=[TOOL], system="You code."
    )
    assert (found.model, found.stop_reason, [block.type for block in found.content]) == (
        "asked-for",
        "tool_use",
        ["thinking", "text", "tool_use", "tool_use"],
    )
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens, found.usage.output_tokens) == (
        2,
        8,
        4,
    )
    assert [block.input for block in found.content if block.type == "tool_use"] == [
        {"to": "Köln", "days": 2},
        {},
    ]
    assert node.keys == [("abc", "key")]
    assert node.requests[0].conversation.messages[0].text == "You code."


def test_anthropic_streamed_accumulator() -> None:
    """An Anthropic answer is streamed through the SDK's own accumulator."""
    with anthropic_client(Node()).messages.stream(
        model="asked-for", messages=HI, max_tokens=9, tools=[TOOL]
    ) as stream:
        text = "".join(stream.text_stream)
        found = stream.get_final_message()
    whole = anthropic_client(Node()).messages.create(
        model="asked-for", messages=HI, max_tokens=9, tools=[TOOL]
    )
    assert text == "Off to 🚀."
    assert [block.model_dump(exclude_none=True) for block in found.content] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    assert (found.stop_reason, found.usage.output_tokens, found.usage.input_tokens) == ("tool_use", 4, 2)
    assert [block.id for block in found.content if block.type == "tool_use"] == ["toolu_ab0", "toolu_ab1"]


def test_anthropic_conversation_round_trip() -> None:
    node = Node()
    client = anthropic_client(node)
    answer: Any = client.messages.create(model="m", messages=HI, max_tokens=9).content
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        for block in answer
        if block.type == "tool_use"
    ]
    client.messages.create(
        model="m",
        messages=[*HI, {"role": "assistant", "content": answer}, {"role": "user", "content": results}],
        max_tokens=9,
    )
    (_, echoed, *tools) = node.requests[-1].conversation.messages
    assert (echoed.text, echoed.thinking, echoed.refs) == (
        ANSWER.text,
        ANSWER.thinking,
        ("c2ln", "call_ab0", "call_ab1"),
    )
    assert [(call.id, json.loads(call.arguments)) for call in echoed.calls] == [
        ("call_ab0", {"to": "Köln", "days": 2}),
        ("call_ab1", {}),
    ]
    assert [message.call_id for message in tools] == ["call_ab0", "call_ab1"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("bad_request", anthropic.BadRequestError),
        ("unauthorized", anthropic.AuthenticationError),
        ("not_found", anthropic.NotFoundError),
        ("context_too_long", anthropic.BadRequestError),
        ("budget_spent", anthropic.BadRequestError),
        ("session_over", anthropic.APIStatusError),
        ("overloaded", anthropic.InternalServerError),
        ("engine_failed", anthropic.InternalServerError),
        ("too_large", anthropic.APIStatusError),
    ],
)
def test_anthropic_raises_own_error(kind: FaultKind, error: type[anthropic.APIStatusError]) -> None:
    node = Node(fault=Fault(kind=kind, message="One sentence.", path="$.a", prompt_tokens=9, limit=8))
    with pytest.raises(error) as caught:
        anthropic_client(node).messages.create(model="m", messages=HI, max_tokens=9)
    body: Any = caught.value.body
    assert body["type"] == "error"


def test_error_event_reaches_anthropic() -> None:
    """An error event reaches the Anthropic client."""
    node = Node(fault=Fault(kind="engine_failed", message="The engine died."), breaks=True)
    with (
        pytest.raises(anthropic.APIStatusError, match="The engine died"),
        anthropic_client(node).messages.stream(model="m", messages=HI, max_tokens=9) as stream,
    ):
        stream.get_final_message()


def test_anthropic_counts_and_model_list() -> None:
    client = anthropic_client(Node())
    assert client.messages.count_tokens(model="m", messages=HI).input_tokens == 12
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("any").display_name == "any"


@pytest.mark.parametrize("client", [openai_client, anthropic_client])
def test_unknown_path_is_404(client: Callable[[Node], Any]) -> None:
    with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
        client(Node()).get("/v1/nothing", cast_to=object)
