"""OpenAI's own SDK on the Responses API, sync and async: what it sends we read, what we write it understands.
Only its transport is ours.
"""

import json
from typing import Any

import httpx
import openai
import pytest
import trio
import trio.testing
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from providers_kit import OPENAI_ERRORS
from pydantic import BaseModel

from polarnode.core.conversation import (
    Alternative,
    Answer,
    Delta,
    ModelRequest,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.core.errors import Refused
from polarnode.gateway.earlier_requests import SessionMemory
from polarnode.providers.contract import (
    JSON_TYPE,
    STREAM_TYPE,
    Fault,
    FaultKind,
    FinalBytes,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
)
from polarnode.providers.dialect import Route, missed, route, session_keys

GO = ToolCall(id="call_ab0", name="go", arguments='{"to": "Köln", "days": 2}')
STAY = ToolCall(id="call_ab1", name="stay", arguments="{}")
ANSWER = Answer(
    parts=(ThinkingPart("Where to?\n"), TextPart("Off to 🚀."), GO, STAY), finish_reason="tool_calls"
)
SAID = Answer(parts=(TextPart("Done."),), finish_reason="stop")
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=2)
TOOL: Any = {
    "type": "function",
    "name": "go",
    "strict": False,
    "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
}


def pieces(answer: Answer) -> list[Delta]:
    """An answer as it would come: texts in two halves, calls whole."""
    found: list[Delta] = []
    for part in answer.parts:
        match part:
            case TextPart(text):
                found += [TextDelta(text[:3], answer.logprobs), TextDelta(text[3:])]
            case ThinkingPart(text):
                found += [ThinkingDelta(text[:3]), ThinkingDelta(text[3:])]
            case ToolCall():
                found.append(part)
    return found


class Node:
    """A node in one class: it gives the answers it was told, one after the other (the last for ever), and
    remembers them.
    """

    def __init__(self, *answers: Answer, faults: tuple[Fault, ...] = (), breaks: Fault | None = None) -> None:
        self.answers = list(answers or (ANSWER,))
        self.faults = list(faults)
        self.breaks = breaks
        self.memory = SessionMemory()
        self.requests: list[ModelRequest] = []
        self.keys: list[tuple[str, ...]] = []

    def sync(self, **options: Any) -> openai.OpenAI:
        transport = httpx.MockTransport(self._handle)
        settings: dict[str, Any] = {
            "api_key": "key",
            "base_url": "http://node/sessions/abc/v1",
            "max_retries": 0,
        } | options
        return openai.OpenAI(http_client=httpx.Client(transport=transport), **settings)

    def parallel(self, **options: Any) -> openai.AsyncOpenAI:
        async def handle(request: httpx.Request) -> httpx.Response:
            await trio.lowlevel.checkpoint()
            return self._handle(request)

        settings: dict[str, Any] = {
            "api_key": "key",
            "base_url": "http://node/sessions/abc/v1",
            "max_retries": 0,
        } | options
        return openai.AsyncOpenAI(
            http_client=httpx.AsyncClient(transport=httpx.MockTransport(handle)), **settings
        )

    def _handle(self, request: httpx.Request) -> httpx.Response:
        reply = self._answer(request.method, request.url.path, request.headers, request.content)
        return httpx.Response(reply.status, headers=list(reply.headers), content=reply.body)

    def _answer(self, method: str, path: str, headers: Any, body: bytes) -> Reply:
        self.keys.append(session_keys(path, headers))
        found = route(method, path, headers)
        if found is None:
            return missed(method, path, headers)
        if self.faults:
            return found.dialect.error(self.faults.pop(0))
        try:
            request = found.dialect.read(
                body, RequestEnvelope(headers=headers, operation=found.operation, memory=self.memory)
            )
        except Refused as error:
            return found.dialect.error(Fault.of(error))
        return self._serve(found, request)

    def _serve(self, found: Route, request: ModelRequest) -> Reply:
        self.requests.append(request)
        call = ModelCallInfo(
            request=request, id=f"{len(self.requests):032x}", created=1700000000, signature="c2ln"
        )
        if found.operation == "count_tokens":
            return _ok(found.dialect.count(12) or b"")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        body = (
            self._stream(found, call, answer)
            if request.stream
            else found.dialect.whole(call, [answer], USAGE)
        )
        found.dialect.remember(call, answer, self.memory)
        return (
            Reply(status=200, headers=(("content-type", STREAM_TYPE),), body=body)
            if request.stream
            else _ok(body)
        )

    def _stream(self, found: Route, call: ModelCallInfo, answer: Answer) -> bytes:
        stream = found.dialect.stream(call)
        sent = stream.keep_alive() + stream.start(prompt_tokens=10, cached_tokens=8)
        for delta in pieces(answer):
            sent += stream.delta(delta) + stream.keep_alive()
        if self.breaks is None:
            return sent + stream.end([answer], USAGE)
        said = stream.failed(self.breaks)
        return sent + (said.data if isinstance(said, FinalBytes) else said or b"")


def _ok(body: bytes) -> Reply:
    return Reply(status=200, headers=(("content-type", JSON_TYPE),), body=body)


def plain(items: Any) -> list[Any]:
    """Items without what the SDK itself adds."""
    return [
        item.model_dump(
            exclude_none=True, exclude={"parsed_arguments": True, "content": {"__all__": {"parsed"}}}
        )
        for item in items
    ]


# ── whole and streamed ────────────────────────────────────────────────────────


def test_whole_answer() -> None:
    node = Node()
    found = node.sync().responses.create(
        model="asked-for",
        input="hi",
        instructions="You code.",
        tools=[TOOL],
        temperature=0.5,
        max_output_tokens=99,
    )
    assert (found.id, found.object, found.status, found.model, found.output_text) == (
        f"resp_{1:032x}",
        "response",
        "completed",
        "asked-for",
        "Off to 🚀.",
    )
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in found.output if isinstance(item, ResponseFunctionToolCall)]
    assert [(call.call_id, call.name, json.loads(call.arguments)) for call in calls] == [
        ("call_ab0", "go", {"to": "Köln", "days": 2}),
        ("call_ab1", "stay", {}),
    ]
    assert isinstance(found.output[0], ResponseReasoningItem)
    assert found.output[0].summary[0].text == "Where to?\n"
    assert found.usage is not None
    assert (
        found.usage.total_tokens,
        found.usage.input_tokens_details.cached_tokens,
        found.usage.output_tokens_details.reasoning_tokens,
    ) == (
        14,
        8,
        2,
    )
    assert (
        found.instructions,
        found.temperature,
        found.max_output_tokens,
        found.tool_choice,
        found.parallel_tool_calls,
    ) == (
        "You code.",
        0.5,
        99,
        "auto",
        True,
    )
    assert [tool.type for tool in found.tools] == ["function"]
    assert node.keys == [("abc", "key")]


def test_streamed_accumulator() -> None:
    """A streamed answer is read through the SDK's own accumulator."""
    with Node().sync().responses.stream(model="asked-for", input="hi", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert {
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
    } <= set(kinds)
    assert kinds[-1] == "response.completed"
    assert found.output_text == "Off to 🚀."
    assert plain(found.output) == plain(
        Node().sync().responses.create(model="asked-for", input="hi", tools=[TOOL]).output
    )
    assert found.usage is not None
    assert found.usage.total_tokens == 14


def test_streamed_events_are_numbered() -> None:
    """Streamed events are numbered and say what they belong to."""
    events = list(Node().sync().responses.create(model="m", input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    places = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert places == [0, 1, 2, 3]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thinking = "".join(
        event.delta for event in events if event.type == "response.reasoning_summary_text.delta"
    )
    assert (text, thinking) == ("Off to 🚀.", "Where to?\n")


async def test_async_sdk_reads_same() -> None:
    whole = await Node().parallel().responses.create(model="m", input="hi", tools=[TOOL])
    async with Node().parallel().responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
        found = await stream.get_final_response()
    assert plain(found.output) == plain(whole.output)
    assert [
        event.type
        async for event in await Node().parallel().responses.create(model="m", input="hi", stream=True)
    ][-1] == "response.completed"


class Trip(BaseModel):
    to: str
    days: int


def test_parse_returns_the_schema() -> None:
    """The SDK's `parse` gives what the schema asks for."""
    node = Node(Answer(parts=(TextPart('{"to": "Köln", "days": 2}'),), finish_reason="stop"))
    found = node.sync().responses.parse(model="m", input="hi", text_format=Trip)
    assert found.output_parsed == Trip(to="Köln", days=2)
    constraint = node.requests[0].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    assert json.loads(constraint.text)["required"] == ["to", "days"]
    with node.sync().responses.stream(model="m", input="hi", text_format=Trip) as stream:
        assert stream.get_final_response().output_parsed == Trip(to="Köln", days=2)


def test_parsed_arguments_of_tools() -> None:
    tool = openai.pydantic_function_tool(Trip, name="go")
    found = Node().sync().responses.parse(model="m", input="hi", tools=[tool])
    calls = [item for item in found.output if item.type == "function_call"]
    assert calls[0].parsed_arguments == Trip(to="Köln", days=2)


def test_logprobs_shown_on_request() -> None:
    token = TokenLogprob(
        data=b"Done.", logprob=-0.5, top=(Alternative(data=b"\xf0\x9f", logprob=float("-inf")),)
    )
    node = Node(Answer(parts=SAID.parts, finish_reason="stop", logprobs=(token,)))
    found = node.sync().responses.create(
        model="m", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
    )
    (item,) = found.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert item.content[0].logprobs is not None
    (said,) = item.content[0].logprobs
    assert (said.token, said.bytes, said.logprob, said.top_logprobs[0].logprob) == (
        "Done.",
        list(b"Done."),
        -0.5,
        -9999.0,
    )
    assert node.requests[0].logprobs == 1
    with node.sync().responses.stream(
        model="m", input="hi", include=["message.output_text.logprobs"]
    ) as stream:
        shown = [
            each for event in stream if event.type == "response.output_text.delta" for each in event.logprobs
        ]
        assert plain(stream.get_final_response().output)[0]["content"] == [item.content[0].model_dump()]
    assert [(each.token, each.logprob) for each in shown] == [("Done.", -0.5)]


# ── conversations ─────────────────────────────────────────────────────────────


def results(found: Any) -> Any:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        for item in found.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_conversation_round_trip(include: Any) -> None:
    """The SDK's own items, given back with results, read as what was answered."""
    node = Node()
    client = node.sync()
    found: Any = client.responses.create(model="m", input="hi", store=False, include=include)
    client.responses.create(
        model="m", input=[{"role": "user", "content": "hi"}, *found.output, *results(found)], store=False
    )
    first, second = (request.conversation.messages for request in node.requests)
    assert second[0] == first[0]
    assert (second[1].text, second[1].thinking, second[1].calls) == (
        ANSWER.text,
        ANSWER.thinking,
        ANSWER.calls,
    )
    assert {"c2ln", "call_ab0", "call_ab1"} <= set(second[1].refs)
    assert [(message.role, message.call_id) for message in second[2:]] == [
        ("tool", "call_ab0"),
        ("tool", "call_ab1"),
    ]


def test_previous_response_is_extended() -> None:
    node = Node(ANSWER, SAID)
    client = node.sync()
    first = client.responses.create(model="m", input="hi", instructions="Be brief.")
    second = client.responses.create(model="m", input=results(first), previous_response_id=first.id)
    third = client.responses.create(
        model="m", input="And now?", previous_response_id=second.id, instructions="Be long."
    )
    assert third.previous_response_id == second.id
    assert [message.text for message in node.requests[-1].conversation.messages] == [
        "Be long.",
        "hi",
        "Off to 🚀.",
        "done",
        "done",
        "Done.",
        "And now?",
    ]
    assert node.requests[1].conversation.messages[0].text == "hi"  # instructions are not carried over
    assert node.requests[-1].conversation.messages[2].thinking == ANSWER.thinking


def test_unstored_response_is_unknown() -> None:
    client = Node().sync()
    first = client.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.BadRequestError, match="send the whole input") as caught:
        client.responses.create(model="m", input="more", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_item_references_are_resolved() -> None:
    """As the AI SDK does wherever `store` is not false."""
    node = Node()
    client = node.sync()
    first = client.responses.create(model="m", input="hi")
    refs: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    client.responses.create(model="m", input=[{"role": "user", "content": "hi"}, *refs, *results(first)])
    echoed = node.requests[-1].conversation.messages[1]
    assert (echoed.text, echoed.thinking, echoed.calls) == (ANSWER.text, ANSWER.thinking, ANSWER.calls)


def test_custom_tool_round_trip() -> None:
    patch = ToolCall(id="call_ab0", name="apply_patch", arguments='{"input": "*** Begin\\n+ü\\n"}')
    node = Node(Answer(parts=(patch,), finish_reason="tool_calls"), SAID)
    client = node.sync()
    tool: Any = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Patches.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    }
    with client.responses.stream(model="m", input="hi", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert "response.custom_tool_call_input.done" in kinds
    item: Any = found.output[0]
    assert item.type == "custom_tool_call"
    assert (item.name, item.input, item.call_id) == ("apply_patch", "*** Begin\n+ü\n", "call_ab0")
    output: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    client.responses.create(model="m", input=[{"role": "user", "content": "hi"}, item, output], tools=[tool])
    (_, echoed, told) = node.requests[-1].conversation.messages
    assert (json.loads(echoed.calls[0].arguments), told.text) == (json.loads(patch.arguments), "ok")


def test_input_tokens_are_counted() -> None:
    assert Node().sync().responses.input_tokens.count(model="m", input="hi").input_tokens == 12


# ── what goes wrong ───────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "error"), OPENAI_ERRORS)
def test_sdk_raises_own_error(kind: FaultKind, error: type[openai.APIStatusError]) -> None:
    node = Node(faults=(Fault(kind=kind, message="One sentence.", path="$.a", prompt_tokens=9, limit=8),))
    with pytest.raises(error) as caught:
        node.sync().responses.create(model="m", input="hi")
    assert caught.value.body
    if kind == "context_too_long":
        assert caught.value.code == "context_length_exceeded"


async def test_sdk_obeys_retry_after(autojump_clock: trio.testing.MockClock) -> None:
    busy = Fault(kind="overloaded", message="One sentence.", retry_after_s=7)
    node = Node(faults=(busy, busy))
    found = await node.parallel(max_retries=2).responses.create(model="m", input="hi")
    assert found.output_text == "Off to 🚀."
    assert trio.current_time() >= 14


def test_unreadable_input_named_with_path() -> None:
    with pytest.raises(openai.BadRequestError, match="text only") as caught:
        Node().sync().responses.create(
            model="m",
            input=[
                {"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}
            ],
        )
    assert caught.value.param == "input[0].content[0]"


def test_final_stream_failure() -> None:
    """A stream that must not be tried again says so."""
    node = Node(breaks=Fault(kind="context_too_long", message="Too long.", prompt_tokens=9, limit=8))
    events = list(node.sync().responses.create(model="m", input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.status, last.response.error.code) == ("failed", "context_length_exceeded")
    assert "maximum context length is 8 tokens" in last.response.error.message


def test_cut_answer_is_incomplete() -> None:
    node = Node(Answer(parts=(TextPart("Half a"),), finish_reason="length"))
    found = node.sync().responses.create(model="m", input="hi", max_output_tokens=2)
    assert found.incomplete_details is not None
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(node.sync().responses.create(model="m", input="hi", stream=True))
    assert events[-1].type == "response.incomplete"
