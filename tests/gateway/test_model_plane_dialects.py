"""What a model endpoint owes to harnesses that do not know it and only the whole plane can show, in each
dialect: headers before the first token, silence filled with data, calls in one piece, ends that are told.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import trio
import trio.testing
from attrs import define
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, AsgiClient, HandEngine, Stage, answers, served, spelled, stage
from tokens_kit import model

from polarnode.core.errors import EngineError
from polarnode.harnesses import harness, mini_swe_agent, openhands_sdk, shell
from polarnode.harnesses.harness import exit_outcome

CALL = (
    "Let me see.",
    "<tool_call>",
    '\n{"name": "look", ',
    '"arguments": {"path": ',
    '"a.txt"}}\n',
    "</tool_call>",
)
LOOK: Any = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@define(eq=False, kw_only=True)
class Api:
    """How a dialect's harness asks, whole and streamed."""

    name: str
    path: str
    streamed: str
    body: Callable[..., dict[str, Any]]
    tools: Any
    ends: bytes

    def asks(self, *, stream: bool, text: str = "hi", **more: Any) -> tuple[str, bytes]:
        said = self.body(text) | ({"stream": stream} if self.name != "google" else {}) | more
        return self.streamed if stream else self.path, json.dumps(said).encode()


def _chat(text: str) -> dict[str, Any]:
    return {
        "model": "any-name",
        "messages": [{"role": "user", "content": text}],
        "stream_options": {"include_usage": True},
    }


FUNCTION: Any = {"name": "look", "description": "Reads.", "parameters": LOOK}
APIS = (
    Api(
        name="openai_chat",
        path="/v1/chat/completions",
        streamed="/v1/chat/completions",
        body=_chat,
        tools=[{"type": "function", "function": FUNCTION}],
        ends=b"data: [DONE]\n\n",
    ),
    Api(
        name="anthropic",
        path="/v1/messages",
        streamed="/v1/messages",
        body=lambda text: {
            "model": "any-name",
            "max_tokens": 90,
            "messages": [{"role": "user", "content": text}],
        },
        tools=[{"name": "look", "input_schema": LOOK}],
        ends=b'data: {"type":"message_stop"}\n\n',
    ),
    Api(
        name="openai_responses",
        path="/v1/responses",
        streamed="/v1/responses",
        body=lambda text: {"model": "any-name", "input": text},
        tools=[{"type": "function"} | FUNCTION],
        ends=b'"type":"response.completed"',
    ),
    Api(
        name="google",
        path="/v1beta/models/any-name:generateContent",
        streamed="/v1beta/models/any-name:streamGenerateContent",
        body=lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        tools=[{"functionDeclarations": [{"name": "look", "parametersJsonSchema": LOOK}]}],
        ends=b'"finishReason":"STOP"',
    ),
)
every_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)


@define(eq=False)
class Client(AsgiClient):
    """A harness's side."""

    async def ask(self, here: Stage, asked: tuple[str, bytes]) -> "Client":
        await self.request(here.app, *asked)
        return self


def scripted(*texts: str, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(
        reply=answers(*texts), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT, **settings
    )


def parts(api: Api, body: bytes) -> list[Any]:
    """The JSON values of a stream."""
    if body.lstrip().startswith(b"["):
        return list(json.loads(body))
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


# ── waiting ───────────────────────────────────────────────────────────────────


@every_api
async def test_headers_before_first_token(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    engine, client = HandEngine(), Client()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, stage(engine), api.asks(stream=True))
        await trio.sleep(5)  # Gemini CLI, the least patient, waits 60
        assert (client.status, engine.given) == (200, [])
        nursery.cancel_scope.cancel()


@every_api
async def test_silence_filled_with_data(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    """Silence is filled with data, and never with comments."""
    engine, client = HandEngine(), Client()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, stage(engine), api.asks(stream=True))
        await trio.sleep(5)
        for _ in range(26):  # 400 s, what the harnesses were measured with
            before = len(client.sent)
            await trio.sleep(15)
            assert len(client.sent) > before
        engine.give("Done.", "<|im_end|>", finish="stop")
    assert client.whole
    assert not any(line.startswith(b":") for line in client.body.split(b"\n"))
    assert b"Done." in client.body


@every_api
async def test_whole_answer_waits_silently(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    engine, client = HandEngine(), Client()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, stage(engine), api.asks(stream=False))
        await trio.sleep(1_200)
        assert client.sent == []
        engine.give("Done.", "<|im_end|>", finish="stop")
    assert (client.status, client.whole) == (200, True)
    assert b"Done." in client.body


def test_unstreamed_harnesses_wait_longer() -> None:
    """The harnesses that never stream are told to wait longer."""
    assert min(mini_swe_agent.CALL_S, openhands_sdk.CALL_S) >= 1_800


# ── leaving and dying ─────────────────────────────────────────────────────────


@every_api
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_and_retry(autojump_clock: trio.testing.MockClock, api: Api, stream: bool) -> None:
    """A client that leaves ends the sampling, and one that asks again gets the rest."""
    engine = HandEngine()
    here = stage(engine)
    first, asked = Client(), api.asks(stream=stream)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.ask, here, asked)
        engine.give("Half a ")
        await trio.sleep(1)
        first.leave()
    assert (engine.running, [turn.state for turn in here.turns]) == (0, ["partial"])
    engine.give("loaf.", "<|im_end|>", finish="stop")
    second = await Client().ask(here, asked)
    assert second.whole
    # nothing is sampled, or recorded, twice
    assert list(here.turns[1].sampled) == spelled("loaf.", "<|im_end|>")


@every_api
async def test_dead_engine_stream_unended(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    engine, client = HandEngine(), Client()
    here = stage(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, here, api.asks(stream=True))
        engine.give("Half a ")
        await trio.sleep(1)
        engine.fail(EngineError("out of memory"))
    assert api.ends not in client.body
    # its clients know a failure by Google's own last words, and by no broken connection
    assert not client.whole or api.name == "google"
    assert [turn.state for turn in here.turns] == ["failed"]


# ── what is said ──────────────────────────────────────────────────────────────


@every_api
async def test_call_arrives_in_one_piece(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    """A call sampled token by token arrives in one piece."""
    here = stage(scripted("|".join(CALL), chunk=1))
    client = await Client().ask(here, api.asks(stream=True, tools=api.tools))
    sent = [message["body"] for message in client.sent[1:] if b"a.txt" in message["body"]]
    begun = [
        message["body"]
        for message in client.sent[1:]
        if b'"look"' in message["body"] and b"response.created" not in message["body"]
    ]
    assert sent[0] in begun
    assert not any(b"<tool_call>" in message["body"] for message in client.sent[1:])


@every_api
async def test_call_ends_like_api(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    """An answer with a call ends as its API ends one."""
    here = stage(scripted("|".join(CALL)))
    client = await Client().ask(here, api.asks(stream=True, tools=api.tools))
    assert client.whole
    assert api.ends in client.body
    words = {
        "openai_chat": b'"finish_reason":"tool_calls"',
        "anthropic": b'"stop_reason":"tool_use"',
        "openai_responses": b"output_item.done",
    }
    assert words.get(api.name, b'"functionCall"') in client.body


@every_api
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_matches_tokens(autojump_clock: trio.testing.MockClock, api: Api, stream: bool) -> None:
    """The usage is the tokens that were read and sampled."""
    here = stage(scripted("Hello there."))
    client = await Client().ask(here, api.asks(stream=stream))
    last = parts(api, client.body)[-1] if stream else json.loads(client.body)
    (turn,) = here.turns
    said = _usage(api, parts(api, client.body), last)
    assert said == (turn.prompt_length, len(turn.sampled))


def _usage(api: Api, values: list[Any], last: Any) -> tuple[int, int]:
    if api.name == "anthropic":
        usage = last.get("usage") or values[-2]["usage"]  # message_delta stands before message_stop
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    if api.name == "google":
        usage = last["usageMetadata"]
        return usage["promptTokenCount"], usage["candidatesTokenCount"]
    usage = last.get("usage") or last["response"]["usage"]
    names = (
        ("prompt_tokens", "completion_tokens")
        if api.name == "openai_chat"
        else ("input_tokens", "output_tokens")
    )
    return usage[names[0]], usage[names[1]]


@every_api
@pytest.mark.parametrize("stream", [False, True])
async def test_any_name_is_echoed(autojump_clock: trio.testing.MockClock, api: Api, stream: bool) -> None:
    client = await Client().ask(stage(scripted("Hello.")), api.asks(stream=stream))
    assert client.status == 200
    assert b'"any-name"' in client.body


# ── who asks ──────────────────────────────────────────────────────────────────


@every_api
async def test_title_call_is_marked(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    """A call for a title beside others is marked."""
    here = stage(scripted("Hello."))
    await Client().ask(here, api.asks(stream=True, tools=api.tools))
    await Client().ask(here, api.asks(stream=True, text="Write a title for this conversation."))
    asks = "Summarize the user's primary intent or goal in this conversation in ONE sentence (max 80 characters)."
    await Client().ask(here, api.asks(stream=True, text=asks))
    assert [turn.role for turn in here.turns] == ["main", "main", "auxiliary"]


@every_api
async def test_parallel_calls_run_together(autojump_clock: trio.testing.MockClock, api: Api) -> None:
    release = trio.Event()
    engine = scripted("Hello there, and more.", hold=release, chunk=1)
    here = stage(engine)
    async with trio.open_nursery() as nursery:
        for text in ("one", "two", "three"):
            nursery.start_soon(Client().ask, here, api.asks(stream=True, text=text))
        await trio.sleep(1)
        assert (len(engine.orders), here.s1.calls.count) == (3, 3)
        release.set()
    assert len({turn.lineage for turn in here.turns}) == 3


@pytest.mark.parametrize("prefix", ["", "/v1", "/sessions/key-s1/v1"])
async def test_websocket_upgrade_is_426(prefix: str) -> None:
    """A WebSocket is told 426, so that Codex asks over HTTP at once."""
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with served(stage(scripted("x")).app) as base:
        reply = await trio.to_thread.run_sync(
            lambda: httpx2.get(f"{base}{prefix}/responses", headers=headers)
        )
    assert reply.status_code == 426


def test_idle_exit_not_believed() -> None:
    """An exit code of nothing done is not believed."""
    liar = harness.Harness(
        name="liar", version="1", image="base", launch=shell.launch, exit_code_honest=False
    )
    assert exit_outcome(liar, 0, ()).status == "failed"
