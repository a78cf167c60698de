"""Google's official SDK against our bytes, sync and async: what it sends we read, what we write it
understands, its automatic calls included.

Two transports: one in memory under its own httpx2 clients, and a real socket for what it does by itself
(aiohttp, where that is installed).
"""

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
from google import genai
from google.genai import errors, types
from test_providers_streams import cut

from polarnode.core.conversation import (
    Alternative,
    Answer,
    Message,
    ModelRequest,
    TextDelta,
    TextPart,
    ThinkingPart,
    TokenLogprob,
    ToolCall,
    Usage,
)
from polarnode.providers.contract import (
    JSON_TYPE,
    Fault,
    FaultKind,
    FinalBytes,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
    ServedModel,
    StreamWriter,
)
from polarnode.providers.dialect import Route, missed, route, session_keys

GO = ToolCall(id="call_ab0", name="go", arguments='{"to": "Köln", "days": 2}')
STAY = ToolCall(id="call_ab1", name="stay", arguments="{}")
CALLS = Answer(
    parts=(ThinkingPart("Where to?\n"), TextPart("Off to 🚀."), GO, STAY), finish_reason="tool_calls"
)
FINAL = Answer(parts=(ThinkingPart("There."), TextPart("We have arrived.")), finish_reason="stop")
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8, thinking_tokens=2)
SERVED = ServedModel(id="tiny", context_length=4096, created=1700000000)
THOUGHTS = types.ThinkingConfig(include_thoughts=True)


class Node:
    """A node in one class: it reads what the SDK sends, calls two functions, and after their results it is
    done.
    """

    def __init__(
        self, *, fault: Fault | None = None, breaks: bool = False, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        self.fault = fault
        self.breaks = breaks
        self.logprobs = logprobs
        self.requests: list[ModelRequest] = []
        self.paths: list[str] = []
        self.keys: list[tuple[str, ...]] = []

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> Reply:
        self.paths.append(target)
        self.keys.append(session_keys(target, headers))
        found = route(method, target, headers)
        if found is None:
            return missed(method, target, headers)
        if self.fault is not None and not self.breaks:
            return found.dialect.error(self.fault)
        return self._serve(found, target, headers, body)

    def _serve(self, found: Route, target: str, headers: Any, body: bytes) -> Reply:
        dialect = found.dialect
        if found.operation == "models":
            return _ok(dialect.models(SERVED))
        if found.operation == "model":
            return _ok(dialect.model(SERVED, name=found.model or ""))
        query = target.partition("?")[2]
        request = dialect.read(
            body,
            RequestEnvelope(
                headers=headers,
                model=found.model,
                stream=found.stream,
                operation=found.operation,
                query=query,
            ),
        )
        self.requests.append(request)
        if found.operation == "count_tokens":
            return _ok(dialect.count(12) or b"")
        call = ModelCallInfo(request=request, id="0f1e", created=1700000000, signature="c2ln")
        answer = FINAL if request.conversation.messages[-1].role == "tool" else CALLS
        answers = [answer] * request.choices
        if self.logprobs:
            answers = [
                Answer(parts=each.parts, finish_reason=each.finish_reason, logprobs=self.logprobs)
                for each in answers
            ]
        if request.stream:
            stream = dialect.stream(call)
            return Reply(
                status=200,
                headers=(("content-type", stream.content_type),),
                body=self._streamed(stream, answers),
            )
        return _ok(dialect.whole(call, answers, USAGE))

    def _streamed(self, stream: StreamWriter, answers: list[Answer]) -> bytes:
        sent = stream.keep_alive() + stream.start(prompt_tokens=10, cached_tokens=8)
        for choice, answer in enumerate(answers):
            for delta in cut(answer, 4):
                sent += stream.delta(delta, choice=choice) + stream.keep_alive()
            if self.logprobs:
                sent += stream.delta(TextDelta("", self.logprobs), choice=choice)
        if self.breaks and self.fault is not None:
            said = stream.failed(self.fault)
            return sent + (said.data if isinstance(said, FinalBytes) else said or b"")
        return sent + stream.end(answers, USAGE)


def _ok(body: bytes) -> Reply:
    return Reply(status=200, headers=(("content-type", JSON_TYPE),), body=body)


def client_of(node: Node, **options: Any) -> genai.Client:
    def handle(request: httpx2.Request) -> httpx2.Response:
        reply = node.answer(request.method, request.url.raw_path.decode(), request.headers, request.content)
        return httpx2.Response(reply.status, headers=list(reply.headers), content=reply.body)

    transport = httpx2.MockTransport(handle)
    http = types.HttpOptions(
        base_url="http://node/sessions/abc",
        httpx_client=httpx2.Client(transport=transport),
        httpx_async_client=httpx2.AsyncClient(transport=transport),
        retry_options=types.HttpRetryOptions(attempts=1),
    )
    return genai.Client(api_key="key", http_options=http, **options)


def under_asyncio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The SDK's async side is asyncio's alone: it hands functions to asyncio's threads."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def go(to: str, days: int = 1) -> str:
    """Go somewhere."""
    return f"went to {to} for {days}\nand it was good"


def stay() -> dict[str, Any]:
    """Stay here."""
    return {"stayed": True}


DECLARED = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="go",
            description="Go somewhere.",
            parameters=types.Schema(
                type=types.Type.OBJECT,
                properties={
                    "to": types.Schema(type=types.Type.STRING),
                    "days": types.Schema(type=types.Type.INTEGER, nullable=True),
                },
                required=["to"],
            ),
        ),
        types.FunctionDeclaration(name="stay", parameters_json_schema={"type": "object", "properties": {}}),
    ]
)
CONFIG = types.GenerateContentConfig(
    system_instruction="You code.",
    temperature=0.5,
    top_p=0.9,
    top_k=20,
    max_output_tokens=99,
    stop_sequences=["END"],
    seed=3,
    tools=[DECLARED],
    thinking_config=THOUGHTS,
    safety_settings=[
        types.SafetySetting(
            category=types.HarmCategory.HARM_CATEGORY_HARASSMENT,
            threshold=types.HarmBlockThreshold.BLOCK_NONE,
        )
    ],
)


def check_whole(found: types.GenerateContentResponse) -> None:
    assert (found.model_version, found.response_id) == ("asked-for", "0f1e")
    assert found.candidates is not None
    (candidate,) = found.candidates
    assert candidate.finish_reason == types.FinishReason.STOP
    assert candidate.content is not None
    assert candidate.content.parts is not None
    thought, text, *calls = candidate.content.parts
    assert (thought.text, thought.thought, thought.thought_signature) == ("Where to?\n", True, b"sig")
    assert (text.text, text.thought, found.text) == ("Off to 🚀.", None, "Off to 🚀.")
    assert all(part.thought_signature == b"sig" for part in calls)
    assert [(call.id, call.name, call.args) for call in found.function_calls or ()] == [
        ("call_ab0", "go", {"to": "Köln", "days": 2}),
        ("call_ab1", "stay", {}),
    ]
    usage = found.usage_metadata
    assert usage is not None
    assert (
        usage.prompt_token_count,
        usage.candidates_token_count,
        usage.thoughts_token_count,
        usage.total_token_count,
    ) == (10, 2, 2, 14)
    assert usage.cached_content_token_count == 8


def check_asked(request: ModelRequest) -> None:
    assert request.model == "asked-for"
    assert request.conversation.messages == (
        Message(role="system", text="You code."),
        Message(role="user", text="hi"),
    )
    sampling = request.sampling
    assert (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.max_tokens,
        sampling.stop,
        sampling.seed,
    ) == (
        0.5,
        0.9,
        20,
        99,
        ("END",),
        3,
    )
    first, second = request.conversation.tools
    assert (first.name, first.description) == ("go", "Go somewhere.")
    assert first.parameters["properties"] == {"to": {"type": "string"}, "days": {"type": ["integer", "null"]}}
    assert second.parameters == {"type": "object", "properties": {}}
    assert request.ignored == ("$.safetySettings",)


# ── one question ──────────────────────────────────────────────────────────────


def test_google_whole_answer() -> None:
    node = Node()
    check_whole(client_of(node).models.generate_content(model="asked-for", contents="hi", config=CONFIG))
    check_asked(node.requests[0])
    assert node.paths == ["/sessions/abc/v1/models/asked-for:generateContent"]
    assert node.keys == [("abc", "key")]


@under_asyncio
async def test_google_whole_answer_async() -> None:
    node = Node()
    check_whole(
        await client_of(node).aio.models.generate_content(model="asked-for", contents="hi", config=CONFIG)
    )
    check_asked(node.requests[0])


def check_streamed(chunks: list[types.GenerateContentResponse]) -> None:
    parts = [
        part
        for chunk in chunks
        for candidate in chunk.candidates or ()
        for part in (candidate.content and candidate.content.parts) or ()
    ]
    assert "".join(part.text or "" for part in parts if part.thought) == "Where to?\n"
    assert "".join(part.text or "" for part in parts if not part.thought) == "Off to 🚀."
    assert [(part.function_call.id, part.function_call.args) for part in parts if part.function_call] == [
        ("call_ab0", {"to": "Köln", "days": 2}),
        ("call_ab1", {}),
    ]
    finishes = [candidate.finish_reason for chunk in chunks for candidate in chunk.candidates or ()]
    assert finishes == [None] * (len(chunks) - 1) + [types.FinishReason.STOP]
    usage = chunks[-1].usage_metadata
    assert usage is not None
    assert (usage.prompt_token_count, usage.total_token_count) == (10, 14)


def test_google_streamed() -> None:
    node = Node()
    check_streamed(
        list(client_of(node).models.generate_content_stream(model="asked-for", contents="hi", config=CONFIG))
    )
    check_asked(node.requests[0])
    assert node.requests[0].stream
    assert node.paths == ["/sessions/abc/v1/models/asked-for:streamGenerateContent?alt=sse"]


@under_asyncio
async def test_google_streamed_async() -> None:
    node = Node()
    stream = await client_of(node).aio.models.generate_content_stream(
        model="asked-for", contents="hi", config=CONFIG
    )
    check_streamed([chunk async for chunk in stream])
    check_asked(node.requests[0])


def test_thoughts_are_not_shown_unasked() -> None:
    config = types.GenerateContentConfig(tools=[DECLARED])
    found = client_of(Node()).models.generate_content(model="m", contents="hi", config=config)
    parts = [
        part
        for candidate in found.candidates or ()
        for part in (candidate.content and candidate.content.parts) or ()
    ]
    assert not any(part.thought for part in parts)
    assert found.usage_metadata is not None
    assert found.usage_metadata.thoughts_token_count == 2


def test_vertex_paths_are_same_api() -> None:
    node = Node()
    client = client_of(node, vertexai=True)
    found = client.models.generate_content(model="asked-for", contents="hi", config=CONFIG)
    check_whole(found)
    assert found.create_time is not None
    assert found.create_time.timestamp() == 1700000000
    check_asked(node.requests[0])
    check_streamed(
        list(client.models.generate_content_stream(model="asked-for", contents="hi", config=CONFIG))
    )
    assert client.models.count_tokens(model="asked-for", contents="hi").total_tokens == 12
    assert node.paths[0] == "/sessions/abc/v1beta1/publishers/google/models/asked-for:generateContent"
    assert [model.name for model in client.models.list()] == ["models/tiny"]


def test_slash_in_model_name() -> None:
    node = Node()
    client_of(node).models.generate_content(model="models/org/some:7b", contents="hi")
    assert node.requests[0].model == "org/some:7b"


# ── conversations ─────────────────────────────────────────────────────────────


def check_rounds(node: Node) -> None:
    """Each request extends the one before, and our own answer comes back as we gave it."""
    for before, after in zip(node.requests, node.requests[1:], strict=False):
        assert (
            after.conversation.messages[: len(before.conversation.messages)] == before.conversation.messages
        )
    second = node.requests[1].conversation.messages
    echoed = next(message for message in second if message.role == "assistant")
    assert (echoed.text, echoed.thinking) == (CALLS.text, CALLS.thinking)
    assert [(call.id, call.name, json.loads(call.arguments)) for call in echoed.calls] == [
        ("call_ab0", "go", {"to": "Köln", "days": 2}),
        ("call_ab1", "stay", {}),
    ]
    assert {"c2ln", "call_ab0", "call_ab1"} == set(echoed.refs)
    results = [message for message in second if message.role == "tool"]
    assert [(message.call_id, message.text) for message in results] == [
        ("call_ab0", "went to Köln for 2\nand it was good"),
        ("call_ab1", '{"stayed":true}'),
    ]


AUTOMATIC = types.GenerateContentConfig(tools=[go, stay], thinking_config=THOUGHTS)


def test_automatic_calls() -> None:
    node = Node()
    found = client_of(node).models.generate_content(model="m", contents="hi", config=AUTOMATIC)
    assert found.text == "We have arrived."
    assert len(node.requests) == 2
    check_rounds(node)
    tool = node.requests[0].conversation.tools[0]
    assert (tool.name, tool.description) == ("go", "Go somewhere.")
    properties: Any = tool.parameters["properties"]
    assert (properties["to"]["type"], properties["days"]["type"]) == ("string", "integer")


@under_asyncio
async def test_automatic_calls_async() -> None:
    node = Node()
    found = await client_of(node).aio.models.generate_content(model="m", contents="hi", config=AUTOMATIC)
    assert found.text == "We have arrived."
    check_rounds(node)


def test_automatic_calls_streamed() -> None:
    node = Node()
    chunks = list(client_of(node).models.generate_content_stream(model="m", contents="hi", config=AUTOMATIC))
    assert "".join(chunk.text or "" for chunk in chunks).endswith("We have arrived.")
    check_rounds(node)


@under_asyncio
async def test_automatic_calls_streamed_async() -> None:
    node = Node()
    stream = await client_of(node).aio.models.generate_content_stream(
        model="m", contents="hi", config=AUTOMATIC
    )
    assert [chunk async for chunk in stream][-1].candidates is not None
    check_rounds(node)


def test_chat_keeps_history() -> None:
    node = Node()
    chat = client_of(node).chats.create(model="m", config=AUTOMATIC)
    assert chat.send_message("hi").text == "We have arrived."
    chat.send_message("and now?")
    check_rounds(node)
    assert [message.role for message in node.requests[2].conversation.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]


def test_streamed_chat_keeps_history() -> None:
    """A streamed chat keeps its history over signs of life."""
    node = Node()
    chat = client_of(node).chats.create(model="m", config=AUTOMATIC)
    for text in ("hi", "and now?"):
        list(chat.send_message_stream(text))
    check_rounds(node)
    last = node.requests[2].conversation.messages
    assert [message.role for message in last] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert (last[4].text, last[4].thinking) == (FINAL.text, FINAL.thinking)


@under_asyncio
async def test_streamed_chat_history_async() -> None:
    node = Node()
    chat = client_of(node).aio.chats.create(model="m", config=AUTOMATIC)
    for text in ("hi", "and now?"):
        async for _ in await chat.send_message_stream(text):
            pass
    check_rounds(node)
    assert len(node.requests[2].conversation.messages) == 6


def test_results_without_ids_match_names() -> None:
    """A history without ids is matched by name."""
    node = Node()
    said = [
        types.UserContent("hi"),
        types.ModelContent(
            [
                types.Part.from_function_call(name="stay", args={}),
                types.Part.from_function_call(name="go", args={"to": "x"}),
            ]
        ),
        types.UserContent(
            [
                types.Part.from_function_response(name="go", response={"result": "went"}),
                types.Part.from_function_response(name="stay", response={"error": "no"}),
            ]
        ),
    ]
    client_of(node).models.generate_content(model="m", contents=said)
    (_, calls, went, stayed) = node.requests[0].conversation.messages
    assert [call.id for call in calls.calls] == [stayed.call_id, went.call_id]
    assert (went.text, stayed.text) == ("went", '{"error":"no"}')


# ── what else may be asked ────────────────────────────────────────────────────


def test_forced_function_reaches_request() -> None:
    node = Node()
    calling = types.FunctionCallingConfig(
        mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["go"]
    )
    config = types.GenerateContentConfig(
        tools=[DECLARED], tool_config=types.ToolConfig(function_calling_config=calling)
    )
    client_of(node).models.generate_content(model="m", contents="hi", config=config)
    assert node.requests[0].conversation.tool_choice == "go"


@pytest.mark.parametrize("field", ["response_schema", "response_json_schema"])
def test_schema_for_the_answer(field: str) -> None:
    node = Node()
    schema: Any = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    config = types.GenerateContentConfig(response_mime_type="application/json", **{field: schema})
    client_of(node).models.generate_content(model="m", contents="hi", config=config)
    constraint = node.requests[0].constraint
    assert constraint is not None
    assert json.loads(constraint.text) == schema


def test_candidates_with_logprobs() -> None:
    logprobs = (TokenLogprob(data=b"Off", logprob=-0.5, top=(Alternative(data=b"Off", logprob=-0.5),)),)
    node = Node(logprobs=logprobs)
    config = types.GenerateContentConfig(
        candidate_count=2, response_logprobs=True, logprobs=1, automatic_function_calling={"disable": True}
    )
    whole = client_of(node).models.generate_content(model="m", contents="hi", config=config)
    assert (node.requests[0].choices, node.requests[0].logprobs) == (2, 1)
    for candidate in whole.candidates or ():
        assert candidate.logprobs_result is not None
        assert [
            (token.token, token.log_probability)
            for token in candidate.logprobs_result.chosen_candidates or ()
        ] == [("Off", -0.5)]
        assert [
            [other.token for other in top.candidates or ()]
            for top in candidate.logprobs_result.top_candidates or ()
        ] == [["Off"]]
    assert [candidate.index for candidate in whole.candidates or ()] == [0, 1]
    chunks = list(client_of(node).models.generate_content_stream(model="m", contents="hi", config=config))
    said = dict.fromkeys((0, 1), "")
    for candidate in (candidate for chunk in chunks for candidate in chunk.candidates or ()):
        said[candidate.index or 0] += "".join(
            part.text or "" for part in (candidate.content and candidate.content.parts) or ()
        )
    assert said == {0: "Off to 🚀.", 1: "Off to 🚀."}


@pytest.mark.parametrize("named", ["tiny", "models/tiny", "org/any"])
def test_model_list_and_token_count(named: str) -> None:
    client = client_of(Node())
    assert [(model.name, model.input_token_limit) for model in client.models.list()] == [
        ("models/tiny", 4096)
    ]
    assert client.models.get(model=named).display_name == named.removeprefix("models/")
    assert client.models.count_tokens(model=named, contents=["hi", "there"]).total_tokens == 12


@under_asyncio
async def test_model_list_and_token_count_async() -> None:
    client = client_of(Node()).aio
    assert [model.name async for model in await client.models.list()] == ["models/tiny"]
    assert (await client.models.get(model="any")).name == "models/any"
    assert (await client.models.count_tokens(model="any", contents="hi")).total_tokens == 12


# ── errors ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("bad_request", errors.ClientError, "INVALID_ARGUMENT"),
        ("unauthorized", errors.ClientError, "UNAUTHENTICATED"),
        ("not_found", errors.ClientError, "NOT_FOUND"),
        ("context_too_long", errors.ClientError, "INVALID_ARGUMENT"),
        ("budget_spent", errors.ClientError, "FAILED_PRECONDITION"),
        ("session_over", errors.ClientError, "NOT_FOUND"),
        ("overloaded", errors.ClientError, "RESOURCE_EXHAUSTED"),
        ("engine_failed", errors.ServerError, "INTERNAL"),
        ("cancelled", errors.ServerError, "UNAVAILABLE"),
        ("too_large", errors.ClientError, "INVALID_ARGUMENT"),
    ],
)
def test_google_raises_own_error(kind: FaultKind, error: type[errors.APIError], status: str) -> None:
    client = client_of(
        Node(fault=Fault(kind=kind, message="One sentence.", path="$.a", prompt_tokens=9, limit=8))
    )
    with pytest.raises(error) as caught:
        client.models.generate_content(model="m", contents="hi")
    assert caught.value.status == status
    with pytest.raises(error):
        list(client.models.generate_content_stream(model="m", contents="hi"))


@under_asyncio
async def test_google_raises_own_error_async() -> None:
    client = client_of(Node(fault=Fault(kind="context_too_long", message="m", prompt_tokens=9, limit=8))).aio
    with pytest.raises(errors.ClientError, match=r"The input token count \(9\) exceeds"):
        await client.models.generate_content(model="m", contents="hi")


def test_google_sdk_retries() -> None:
    """Google's SDK tries again by itself."""
    node = Node(fault=Fault(kind="overloaded", message="m"))
    retry = types.HttpOptions(
        retry_options=types.HttpRetryOptions(attempts=3, initial_delay=0.001, max_delay=0.002, jitter=0.0)
    )
    with pytest.raises(errors.ClientError):
        client_of(node).models.generate_content(
            model="m", contents="hi", config=types.GenerateContentConfig(http_options=retry)
        )
    assert len(node.paths) == 3


def test_broken_stream_reaches_client() -> None:
    client = client_of(Node(fault=Fault(kind="engine_failed", message="The engine died."), breaks=True))
    with pytest.raises(errors.ServerError, match="The engine died"):
        list(client.models.generate_content_stream(model="m", contents="hi"))


def test_unserved_method_is_404() -> None:
    with pytest.raises(errors.ClientError) as caught:
        client_of(Node()).models.embed_content(model="m", contents="hi")
    assert caught.value.code == 404


# ── over a socket, by the SDK's own means ─────────────────────────────────────


@contextmanager
def served(node: Node) -> Iterator[str]:
    """The node on a loopback socket, its streams in chunks."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = node.answer(self.command, self.path, headers, body)
            self.send_response(reply.status)
            for name, value in reply.headers:
                self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for at in range(0, len(reply.body), 50):  # cut anywhere, as networks do
                piece = reply.body[at : at + 50]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/sessions/abc"
        finally:
            server.shutdown()
            thread.join()


def over(node: Node, use: Callable[[genai.Client], Any]) -> None:
    with (
        served(node) as url,
        genai.Client(api_key="key", http_options=types.HttpOptions(base_url=url)) as client,
    ):
        use(client)


def test_google_sdk_over_socket() -> None:
    def use(client: genai.Client) -> None:
        check_whole(client.models.generate_content(model="asked-for", contents="hi", config=CONFIG))
        check_streamed(
            list(client.models.generate_content_stream(model="asked-for", contents="hi", config=CONFIG))
        )
        with pytest.raises(errors.ClientError):
            client.models.embed_content(model="m", contents="hi")

    over(Node(), use)


# the SDK's own, and aiohttp's
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
def test_google_sdk_over_socket_async() -> None:
    async def ask(client: genai.Client) -> None:
        async with client.aio as aio:
            check_whole(await aio.models.generate_content(model="asked-for", contents="hi", config=CONFIG))
            stream = await aio.models.generate_content_stream(model="asked-for", contents="hi", config=CONFIG)
            check_streamed([chunk async for chunk in stream])

    over(Node(), lambda client: asyncio.run(ask(client)))


def test_stream_without_sse_is_array() -> None:
    """What the API does without `alt=sse`, and clients in other languages read element by element."""
    node = Node()
    with served(node) as url:
        reply = httpx2.post(
            f"{url}/v1beta/models/asked-for:streamGenerateContent?key=k",
            json={"contents": [{"parts": [{"text": "hi"}]}]},
        )
    assert reply.headers["content-type"] == "application/json"
    elements = [types.GenerateContentResponse.model_validate(element) for element in reply.json()]
    assert "".join(element.text or "" for element in elements) == "Off to 🚀."
    assert node.keys == [("abc", "k")]
