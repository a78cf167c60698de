"""Google's dialect in the real model plane, spoken to by the official SDK over a socket: tokens are kept,
whatever shape they are said in.
"""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import trio
from fakes_engine import ScriptedEngine
from google import genai
from google.genai import errors, types
from plane_kit import CONTEXT, HandEngine, answers, prompts, served, stage
from tokens_kit import model

from polarnode.core.errors import EngineError

VOCAB = model().tokenizer.vocab_size
CALLING = (
    '<think>|\nHm.\n|</think>|\n\nLet me see.|<tool_call>|\n{"name": "look", "arguments": {"path":'
    ' "a.txt"}}\n|</tool_call>'
)
LOOK = types.FunctionDeclaration(
    name="look",
    description="Read a file.",
    parameters_json_schema={"type": "object", "properties": {"path": {}}},
)


def scripted(*texts: str) -> ScriptedEngine:
    return ScriptedEngine(reply=answers(*texts), vocab_size=VOCAB, context_length=CONTEXT)


async def ask(base: str, use: Callable[[genai.Client], Any], *, key: str = "key-s1") -> Any:
    """What the SDK gets, in a thread, because it knows asyncio or nothing."""

    def run() -> Any:
        with genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base)) as client:
            return use(client)

    return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


def config(**said: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True), **said)


async def test_whole_and_streamed_agree() -> None:
    here = stage(scripted("<think>|\nHm.\n|</think>|\n\nHello there."))

    def use(client: genai.Client) -> tuple[Any, list[Any]]:
        whole = client.models.generate_content(model="gemini-x", contents="hi", config=config())
        return whole, list(
            client.models.generate_content_stream(model="gemini-x", contents="hi there", config=config())
        )

    async with served(here.app) as base:
        whole, chunks = await ask(base, use)
    assert (whole.model_version, whole.text) == ("gemini-x", "Hello there.")
    assert "".join(chunk.text or "" for chunk in chunks) == "Hello there."
    thoughts = [
        "".join(part.text for chunk in said for part in chunk.candidates[0].content.parts if part.thought)
        for said in ([whole], chunks)
    ]
    assert thoughts == ["Hm.", "Hm."]
    assert chunks[-1].usage_metadata.candidates_token_count == whole.usage_metadata.candidates_token_count
    assert whole.usage_metadata.thoughts_token_count > 0
    assert [turn.provider for turn in here.turns] == ["google", "google"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_result_extends_turn_exactly(stream: bool) -> None:
    """A tool call and its result extend the turn token for token."""
    engine = scripted(CALLING, "It says hello.")
    here = stage(engine)
    said = config(tools=[types.Tool(function_declarations=[LOOK])])

    def use(client: genai.Client) -> None:
        chat = client.chats.create(model="m", config=said)
        result = types.Part.from_function_response(name="look", response={"output": "hello"})
        for message in ("hi", result):
            _ = list(chat.send_message_stream(message)) if stream else chat.send_message(message)

    async with served(here.app) as base:
        await ask(base, use)
    assert [(turn.kind, turn.reason, turn.parent) for turn in here.turns] == [
        ("root", "first", None),
        ("extend", "appended", 0),
    ]
    before, after = prompts(engine.orders)
    assert after[: len(before) + len(here.turns[0].sampled)] == before + list(here.turns[0].sampled)
    assert not any(
        note.startswith(("edited", "foreign", "rewritten")) for turn in here.turns for note in turn.notes
    )


async def test_token_count_and_model_list() -> None:
    """Tokens are counted exactly, and models are listed."""
    engine = scripted("x")
    here = stage(engine)

    def use(client: genai.Client) -> tuple[Any, list[Any]]:
        counted = client.models.count_tokens(model="m", contents="hi")
        client.models.generate_content(model="m", contents="hi")
        return counted.total_tokens, [entry.name for entry in client.models.list()]

    async with served(here.app) as base:
        counted, listed = await ask(base, use)
    assert counted == len(engine.orders[0].prompt)
    assert len(listed) == 1
    assert len(here.turns) == 1


async def test_long_context_in_google_words() -> None:
    """A long context is refused in Google's words."""
    here = stage(scripted("x"))

    async with served(here.app) as base:
        with pytest.raises(errors.ClientError, match="exceeds the maximum number of tokens allowed"):
            await ask(
                base, lambda client: client.models.generate_content(model="m", contents="hi " * 2 * CONTEXT)
            )
    assert here.turns == []


async def test_wrong_key_in_google_words() -> None:
    """A wrong key is told so in Google's words."""
    here = stage(scripted("x"))

    async with served(here.app) as base:
        with pytest.raises(errors.ClientError) as caught:
            await ask(
                base, lambda client: client.models.generate_content(model="m", contents="hi"), key="of-nobody"
            )
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")


async def test_failed_stream_last_words() -> None:
    """A stream that fails ends in Google's own last words."""
    engine = HandEngine()
    here = stage(engine)
    engine.give("Half a ")
    engine.fail(EngineError("the host died"))
    request = (
        b"POST /v1beta/models/m:streamGenerateContent?alt=sse HTTP/1.1\r\nHost: node\r\nx-goog-api-key:"
        b" key-s1\r\nContent-Length: %d\r\n\r\n"
    )
    body = b'{"contents":[{"parts":[{"text":"hi"}]}]}'
    async with served(here.app) as base:
        stream = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
        async with stream:
            await stream.send_all(request % len(body) + body)
            data = b""
            with trio.fail_after(30):
                while not data.endswith(b"0\r\n\r\n"):
                    data += await stream.receive_some()
    assert b"Half a" in data
    assert b"finishReason" not in data
    # a piece of its own: Google's SDK for JavaScript knows it by that
    assert b'\r\n{"error":{"code":500,' in data
    assert [turn.state for turn in here.turns] == ["failed"]


async def test_sdk_raises_stream_error() -> None:
    """The SDK raises what broke its stream."""
    engine = HandEngine()
    here = stage(engine)
    engine.give("Half a ")
    engine.fail(EngineError("the host died"))

    async with served(here.app) as base:
        with pytest.raises(errors.ServerError, match="the host died"):
            await ask(
                base, lambda client: list(client.models.generate_content_stream(model="m", contents="hi"))
            )
    assert [turn.state for turn in here.turns] == ["failed"]


async def test_query_key_and_array_stream() -> None:
    """A key in the query opens, and a stream without SSE is an array."""
    here = stage(scripted("Hello there."))
    body = {"contents": {"parts": {"text": "hi"}}}

    async with served(here.app) as base, httpx2.AsyncClient() as client:
        found = await client.post(f"{base}/v1beta/models/m:streamGenerateContent?key=key-s1", json=body)
        closed = await client.post(f"{base}/v1beta/models/m:streamGenerateContent?key=other", json=body)
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert (
        "".join(part["text"] for chunk in found.json() for part in chunk["candidates"][0]["content"]["parts"])
        == "Hello there."
    )
    assert (closed.status_code, closed.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
