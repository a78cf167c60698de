"""The model plane over real sockets, spoken to by the official SDKs; and, where time matters, by hand in
virtual time.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import process_time, thread_time
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import trio
import trio.testing
from attrs import define, field
from fakes_engine import ScriptedEngine
from plane_kit import (
    CONTEXT,
    AsgiClient,
    HandEngine,
    Stage,
    answers,
    new_session,
    prompts,
    served,
    spelled,
    stage,
)
from tokens_kit import model

from polarnode.core.conversation import Sampling
from polarnode.core.errors import EngineError
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.gateway import model_requests
from polarnode.gateway.call import MAX_INLINE_CHARS, MAX_OUTBOX_COMMANDS, KeepAlivePacing
from polarnode.http.connections import Head

VOCAB = model().tokenizer.vocab_size
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CALLING = 'Let me see.|<tool_call>|\n{"name": "look", "arguments": {"path": "a.txt"}}\n|</tool_call>'


def scripted(*texts: str, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(reply=answers(*texts), vocab_size=VOCAB, context_length=CONTEXT, **settings)


async def in_thread(ask: Callable[[], Any]) -> Any:
    """The SDKs know asyncio or nothing, so they are asked in a thread of their own."""
    return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)


def chat(base: str, *, key: str = "key-s1", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=retries, timeout=60)


def messages(base: str, *, key: str = "key-s1", retries: int = 0) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base, api_key=key, max_retries=retries, timeout=60)


async def ask_chat(base: str, use: Callable[[openai.OpenAI], Any], **settings: Any) -> Any:
    """What a chat client gets, in a thread."""

    def ask() -> Any:
        with chat(base, **settings) as client:
            return use(client)

    return await in_thread(ask)


async def ask_messages(base: str, use: Callable[[anthropic.Anthropic], Any], **settings: Any) -> Any:
    """What an Anthropic client gets, in a thread."""

    def ask() -> Any:
        with messages(base, **settings) as client:
            return use(client)

    return await in_thread(ask)


def say_hi(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def greet(client: anthropic.Anthropic) -> Any:
    return client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])


def count(client: anthropic.Anthropic) -> Any:
    return client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hi"}])


def chat_body(*, stream: bool = False, text: str = "hi", **said: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream, **said}
    ).encode()


# ── the SDKs ──────────────────────────────────────────────────────────────────


async def test_openai_whole_and_streamed_agree() -> None:
    here = stage(scripted("Hello there."))

    def ask(base: str) -> tuple[Any, list[Any]]:
        with chat(base) as client:
            whole = client.chat.completions.create(model="gpt-x", messages=[HI])
            options = {"include_usage": True}
            return whole, list(
                client.chat.completions.create(
                    model="gpt-x", messages=[HI], stream=True, stream_options=options
                )
            )

    async with served(here.app) as base:
        whole, chunks = await in_thread(lambda: ask(base))
    assert whole.model == "gpt-x"
    assert whole.choices[0].message.content == "Hello there."
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there."
    )
    assert (
        chunks[-1].usage.completion_tokens
        == whole.usage.completion_tokens
        == len(spelled("Hello there.")) + 1
    )
    assert [turn.state for turn in here.turns] == ["complete", "complete"]


async def test_anthropic_whole_and_streamed_agree() -> None:
    here = stage(scripted("<think>|\nHm.\n|</think>|\n\nHello there."))

    def ask(base: str) -> tuple[Any, Any]:
        with messages(base) as client:
            whole = client.messages.create(model="claude-x", max_tokens=100, messages=[HI])
            with client.messages.stream(model="claude-x", max_tokens=100, messages=[HI]) as stream:
                return whole, stream.get_final_message()

    async with served(here.app) as base:
        whole, streamed = await in_thread(lambda: ask(base))
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Hm."
        assert message.content[0].signature == here.s1.lineages.references.signature(
            here.turns[whole is not message].index
        )
        assert message.content[1].text == "Hello there."
        assert (message.stop_reason, message.model) == ("end_turn", "claude-x")
    assert here.turns[0].usage.thinking_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_result_extends_turn_exactly(stream: bool) -> None:
    """A tool call and its result extend the turn token for token."""
    engine = scripted(CALLING, "It says hello.")
    here = stage(engine)
    tools: Any = [{"name": "look", "description": "Read a file.", "input_schema": TOOL}]

    def ask(client: anthropic.Anthropic, said: list[Any]) -> Any:
        if not stream:
            return client.messages.create(model="m", max_tokens=100, messages=said, tools=tools)
        with client.messages.stream(model="m", max_tokens=100, messages=said, tools=tools) as streamed:
            return streamed.get_final_message()

    def run(base: str) -> tuple[Any, Any]:
        with messages(base) as client:
            first = ask(client, [HI])
            result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "hello"}
            echoed = {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in first.content],
            }
            return first, ask(client, [HI, echoed, {"role": "user", "content": [result]}])

    async with served(here.app) as base:
        first, second = await in_thread(lambda: run(base))
    assert (first.stop_reason, first.content[-1].name, first.content[-1].input) == (
        "tool_use",
        "look",
        {"path": "a.txt"},
    )
    assert second.content[0].text == "It says hello."
    assert [(turn.kind, turn.reason, turn.parent) for turn in here.turns] == [
        ("root", "first", None),
        ("extend", "appended", 0),
    ]
    before, after = prompts(engine.orders)
    assert after[: len(before) + len(here.turns[0].sampled)] == before + list(here.turns[0].sampled)
    assert list(here.turns[1].prompt_delta) == after[len(before) + len(here.turns[0].sampled) :]


async def test_token_count_exact_and_unrecorded() -> None:
    """Tokens are counted exactly, and nothing is recorded."""
    engine = scripted("x")
    here = stage(engine)

    def ask(base: str) -> Any:
        with messages(base) as client:
            counted = client.messages.count_tokens(model="m", messages=[HI], system="Be brief.")
            client.messages.create(model="m", max_tokens=9, messages=[HI], system="Be brief.")
            return counted

    async with served(here.app) as base:
        counted = await in_thread(lambda: ask(base))
    assert counted.input_tokens == len(engine.orders[0].prompt)
    assert len(here.turns) == 1


async def test_model_lists_show_the_model() -> None:
    here = stage(scripted("x"))
    async with served(here.app) as base:
        listed = await ask_chat(base, lambda client: [entry.id for entry in client.models.list()])
        asked = await ask_messages(base, lambda client: client.models.retrieve("claude-x"))
    assert (listed, asked.id) == (["tiny"], "claude-x")


# ── refusals ──────────────────────────────────────────────────────────────────


async def test_malformed_request_names_field_path() -> None:
    """A malformed request is refused with the field's path."""
    here = stage(scripted("x"))
    bad: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    async with served(here.app) as base:
        with pytest.raises(openai.BadRequestError) as chat_error:
            await ask_chat(base, lambda client: client.chat.completions.create(model="m", messages=bad))
        with pytest.raises(anthropic.BadRequestError) as messages_error:
            await ask_messages(
                base,
                lambda client: client.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "robot", "content": "x"}]
                ),
            )
    assert chat_error.value.param == "messages[0].content[0]"
    assert "messages[0] has an unknown 'role'" in str(messages_error.value)
    assert here.s1.budget.counters.refusals == {"bad_request": 2}
    assert here.s1.lineages.turns == ()


async def test_deeply_nested_tools_are_refused() -> None:
    """Tools nested without end are refused before a plan."""
    here = stage(scripted("x"))
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "deep", "parameters": deep}}
    asgi = AsgiClient()
    await asgi.request(here.app, CHAT, chat_body(tools=[tool]))
    assert (asgi.status, json.loads(asgi.body)["error"]["param"]) == (400, "tools")
    assert here.s1.budget.counters.refusals == {"bad_request": 1}
    assert here.s1.calls.count == 0


async def test_long_context_refused_without_turn() -> None:
    """A long context is refused in both dialects and leaves no turn."""
    here = stage(scripted("x"), context=40)
    long: Any = [{"role": "user", "content": "word " * 60}]
    async with served(here.app) as base:
        for stream in (False, True):
            with pytest.raises(
                openai.BadRequestError, match="maximum context length is 40 tokens"
            ) as chat_error:
                await ask_chat(
                    base,
                    lambda client, stream=stream: client.chat.completions.create(
                        model="m", messages=long, stream=stream
                    ),
                )
            assert chat_error.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 40 maximum"):
            await ask_messages(
                base, lambda client: client.messages.create(model="m", max_tokens=9, messages=long)
            )
    assert here.s1.budget.counters.refusals == {"context_too_long": 3}
    assert here.turns == []


async def test_engine_smaller_than_configured_context() -> None:
    """An engine that holds less than we were told is a long context too."""
    engine = scripted("x")
    engine.context_length = 8
    here = stage(engine)
    async with served(here.app) as base:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 8 tokens"):
            await ask_chat(base, say_hi)
    assert here.turns == []


async def test_spent_turns_end_the_session() -> None:
    spent: list[bool] = []
    here = stage(scripted("x"), max_turns=1)
    here.s1.budget.on_spent = lambda: spent.append(True)

    def ask(client: openai.OpenAI) -> None:
        for _ in range(2):
            say_hi(client)

    async with served(here.app) as base:
        with pytest.raises(openai.BadRequestError, match="budget of 1 turns"):
            await ask_chat(base, ask, retries=3)
    assert (len(here.turns), spent, here.s1.budget.spent_clock) == (1, [True], "turns")


# over the bytes of a body; over the letters of the context; over the tokens of the context
@pytest.mark.parametrize("letters", [400_000, 20_000, 5_000])
async def test_long_request_is_too_long(monkeypatch: pytest.MonkeyPatch, letters: int) -> None:
    """A long request is answered as a long context in both dialects."""
    monkeypatch.setattr(model_requests, "MAX_IMAGES_BYTES", 50_000)
    here = stage(scripted("x"), context=1000)
    long: Any = [{"role": "user", "content": "xy" * (letters // 2)}]
    async with served(here.app) as base:
        with pytest.raises(openai.BadRequestError, match="context length is 1000") as chat_error:
            await ask_chat(base, lambda client: client.chat.completions.create(model="m", messages=long))
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1000"):
            await ask_messages(
                base, lambda client: client.messages.create(model="m", max_tokens=9, messages=long)
            )
        async with httpx2.AsyncClient(base_url=base) as client:
            listed = await client.request("GET", "/v1/models", content=b" " * letters)
    assert chat_error.value.code == "context_length_exceeded"
    assert listed.status_code == (413 if letters == 400_000 else 200)
    assert not here.turns


# ── keys and doors ────────────────────────────────────────────────────────────


async def test_key_opens_only_its_own_port() -> None:
    """A key opens its own door and no other."""
    here = stage(scripted("x"))
    here.plane.sessions.add(new_session("s2"))
    async with served(here.app) as endpoint, served(here.plane.app_for(None)) as anywhere:
        for key in ("key-s2", "guess"):
            with pytest.raises(openai.AuthenticationError):
                await ask_chat(endpoint, say_hi, key=key)
            with pytest.raises(anthropic.AuthenticationError):
                await ask_messages(endpoint, count, key=key)
        await ask_chat(endpoint, say_hi)
        await ask_chat(anywhere, say_hi, key="key-s2")
    assert len(here.turns) == 1


async def test_session_in_path_is_its_key() -> None:
    here = stage(scripted("x"))
    async with served(here.app) as base:
        await ask_chat(f"{base}/sessions/key-s1", say_hi, key="none")
        await ask_chat(f"{base}/sessions/anything", say_hi)
    assert len(here.turns) == 2


@pytest.mark.parametrize("removed", [False, True])
async def test_ended_session_is_410_to_key(removed: bool) -> None:
    here = stage(scripted("x"))
    await here.s1.close()
    if removed:
        here.plane.sessions.remove(here.s1)
    async with served(here.app) as base:
        for ask, use in ((ask_chat, say_hi), (ask_messages, greet), (ask_messages, count)):
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as error:
                await ask(base, use)
            assert error.value.status_code == 410
    async with served(here.plane.app_for("other")) as base:
        with pytest.raises(openai.APIStatusError) as error:
            await ask_chat(base, say_hi)
        assert error.value.status_code == 401


async def test_probes_answered_in_json_without_key() -> None:
    """Probes get fast answers in JSON and need no key."""
    here = stage(scripted("x"))

    def ask(base: str) -> dict[str, Any]:
        with httpx2.Client(base_url=base) as client:
            found = {
                path: client.get(path)
                for path in ("/api/v1/models", "/api/tags", "/props", "/version", "/v1/models", "/")
            }
            found["POST /api/show"] = client.post("/api/show", json={})
            found["HEAD /"] = client.head("/")
            found["GET chat"] = client.get(CHAT)
            found["wrong key"] = client.get("/v1/models", headers={"authorization": "Bearer guess"})
            return found

    async with served(here.app) as base:
        found = await in_thread(lambda: ask(base))
    assert [reply.status_code for reply in found.values()] == [
        404,
        404,
        404,
        404,
        200,
        200,
        404,
        200,
        405,
        401,
    ]
    assert all(reply.json() for name, reply in found.items() if name != "HEAD /")


async def test_websocket_upgrade_is_refused() -> None:
    here = stage(scripted("x"))
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with served(here.app) as base:
        reply = await in_thread(lambda: httpx2.get(f"{base}/v1/responses", headers=headers))
    assert reply.status_code == 426
    assert "WebSockets are not served" in reply.json()["error"]["message"]


# ── streams are true streams ──────────────────────────────────────────────────


async def test_first_words_sent_before_last_sampled() -> None:
    """The first words arrive before the last are sampled."""
    engine = HandEngine()
    here = stage(engine)
    words: list[str] = []
    seen = trio.Event()

    def ask(client: openai.OpenAI) -> None:
        for chunk in client.chat.completions.create(model="m", messages=[HI], stream=True):
            words.append(chunk.choices[0].delta.content or "")
            if words[-1]:
                trio.from_thread.run_sync(seen.set)

    async with served(here.app) as base, trio.open_nursery() as nursery:
        nursery.start_soon(ask_chat, base, ask)
        engine.give("Once upon")
        with trio.fail_after(30):
            await seen.wait()
        assert "".join(words) == "Once upon"
        assert here.turns == []
        engine.give(" a time.", "<|im_end|>", finish="stop")
    assert "".join(words) == "Once upon a time."
    assert len(here.turns) == 1


async def test_twenty_minute_answer_is_kept_alive(autojump_clock: trio.testing.MockClock) -> None:
    engine = HandEngine()
    here = stage(engine)
    asgi = AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi.request, here.app, CHAT, chat_body(stream=True))
        await trio.sleep(1200)
        assert asgi.status == 200
        alive = [message["body"] for message in asgi.sent[1:]]
        assert 119 <= len(alive) <= 122
        assert all(body.startswith(b"data: {") for body in alive)  # never an SSE comment
        engine.give("Done.", "<|im_end|>", finish="stop")
    assert asgi.body.endswith(b"data: [DONE]\n\n")
    assert asgi.whole
    assert here.turns[0].ended_s == 1200


async def test_unstreamed_answer_sends_no_keepalive(autojump_clock: trio.testing.MockClock) -> None:
    engine = HandEngine()
    here = stage(engine)
    asgi = AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi.request, here.app, CHAT, chat_body())
        await trio.sleep(290)
        assert asgi.sent == []
        engine.give("Done.", "<|im_end|>", finish="stop")
    assert json.loads(asgi.body)["choices"][0]["message"]["content"] == "Done."


async def test_stalled_reader_holds_up_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Neither the end of its session, which must record what was sampled, nor its own record."""
    engine = HandEngine()
    here = stage(engine)
    stuck = trio.Event()

    class DeafClient(AsgiClient):
        async def write(self, head: Head | None, data: bytes, *, end: bool) -> bool:
            if self.sent:
                with trio.CancelScope(shield=True):  # as Hypercorn sends
                    await stuck.wait()
            return await super().write(head, data, end=end)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(DeafClient().request, here.app, CHAT, chat_body(stream=True))
        for _ in range(MAX_OUTBOX_COMMANDS + 5):
            engine.give("word ")
        await trio.sleep(5)
        started = trio.current_time()
        await here.s1.close()
        assert trio.current_time() == started
        assert [turn.state for turn in here.turns] == ["partial"]
        assert engine.running == 0
        stuck.set()


# ── failures ──────────────────────────────────────────────────────────────────


async def test_sdk_retries_early_engine_failure() -> None:
    """An engine that fails at first is asked again by the SDK."""
    engine = HandEngine()
    here = stage(engine)
    engine.fail(EngineError("the host died"))
    engine.give("Hello.", "<|im_end|>", finish="stop")
    async with served(here.app) as base:
        reply = await ask_chat(base, say_hi, retries=2)
    assert reply.choices[0].message.content == "Hello."
    assert [(turn.state, turn.kind) for turn in here.turns] == [("failed", "root"), ("complete", "retry")]
    assert here.turns[0].lineage == here.turns[1].lineage


async def test_failed_stream_lacks_terminal_chunk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stream that fails is cut without its terminal chunk."""
    engine = HandEngine()
    here = stage(engine)
    engine.give("Half a ")
    engine.fail(EngineError("the host died"))
    request = b"POST %b HTTP/1.1\r\nHost: node\r\nAuthorization: Bearer key-s1\r\nContent-Length: %d\r\n\r\n"
    body = chat_body(stream=True)
    async with served(here.app) as base:
        stream = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
        async with stream:
            await stream.send_all(request % (CHAT.encode(), len(body)) + body)
            data = b""
            with trio.fail_after(10):
                while more := await stream.receive_some():
                    data += more
    assert b"Half a" in data
    assert b"transfer-encoding: chunked" in data.lower()
    assert not data.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in data
    assert [turn.state for turn in here.turns] == ["failed"]
    # it is recorded as a turn: a log would only repeat it
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_failed_stream_is_sdk_error() -> None:
    engine = HandEngine()
    here = stage(engine)

    def read_chat(client: openai.OpenAI) -> None:
        for _ in client.chat.completions.create(model="m", messages=[HI], stream=True):
            pass

    def read_messages(client: anthropic.Anthropic) -> None:
        with client.messages.stream(model="m", max_tokens=99, messages=[HI]) as stream:
            stream.get_final_message()

    async with served(here.app) as base:
        for ask, read in ((ask_chat, read_chat), (ask_messages, read_messages)):
            engine.give("Half a ")
            engine.fail(EngineError("the host died"))
            with pytest.raises(Exception, match=r"incomplete chunked read|engine failed") as error:
                await ask(base, read)
            assert type(error.value).__name__ in (
                "RemoteProtocolError",
                "APIStatusError",
                "InternalServerError",
                "APIError",
            )
    assert [turn.state for turn in here.turns] == ["failed", "failed"]


async def test_end_without_reason_is_engine_failure(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A sample that ends without a reason is the engine's failure."""

    @define(eq=False)
    class Mute(HandEngine):
        async def __anext__(self) -> Any:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration

    here = stage(Mute())
    asgi = AsgiClient()
    await asgi.request(here.app, CHAT, chat_body())
    assert asgi.status == 500
    assert [turn.state for turn in here.turns] == ["failed"]


async def test_session_close_cuts_streams(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A session that closes cuts its streams and answers its waiting calls."""
    engine = HandEngine()
    here = stage(engine)
    streamed, whole = AsgiClient(), AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(streamed.request, here.app, CHAT, chat_body(stream=True))
        await engine.asked.wait()
        engine.give("Half a ")
        await trio.sleep(0.1)
        nursery.start_soon(whole.request, here.app, CHAT, chat_body(text="other"))
        await trio.sleep(0.1)
        assert here.s1.calls.count == 2
        await here.s1.close()
        assert (here.s1.calls.count, engine.running) == (0, 0)
    assert [(turn.state, turn.finish_reason) for turn in sorted(here.turns, key=lambda turn: turn.index)] == [
        ("partial", "abort")
    ] * 2
    assert streamed.status == 200
    assert not streamed.whole
    assert (whole.status, whole.whole) == (410, True)


async def test_cut_turn_recorded_before_abort_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A cut turn is recorded before the engine is waited for."""

    @define(eq=False)
    class SlowToAbort(HandEngine):
        @asynccontextmanager
        async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
            async with HandEngine.generate(self, order) as chunks:
                try:
                    yield chunks
                finally:
                    with trio.move_on_after(3, shield=True):
                        await trio.sleep_forever()

    engine = SlowToAbort()
    here = stage(engine)
    asgi = AsgiClient()
    engine.give("Half a ")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi.request, here.app, CHAT, chat_body(stream=True))
        await trio.sleep(0.5)
        asgi.leave()
        await trio.sleep(0.5)
        assert [turn.state for turn in here.turns] == ["partial"]
        assert engine.running == 1
    assert (engine.running, trio.current_time()) == (0, 3.5)


# ── what reaches the engine ───────────────────────────────────────────────────


async def test_task_sampling_reaches_engine() -> None:
    engine = scripted("a long answer", "a long answer")
    here = stage(engine, sampling=Sampling(temperature=0.25, max_tokens=2))
    async with served(here.app) as base:
        reply = await ask_chat(
            base,
            lambda client: client.chat.completions.create(
                model="m", messages=[HI], temperature=2, top_p=0.5, max_tokens=999
            ),
        )
    assert reply.choices[0].finish_reason == "length"
    assert engine.orders[0].sampling == Sampling(temperature=0.25, top_p=0.5, max_tokens=2)
    assert engine.orders[0].affinity == "s1"
    assert here.turns[0].asked == Sampling(temperature=2, top_p=0.5, max_tokens=999)


async def test_stop_string_aborts_engine(autojump_clock: trio.testing.MockClock) -> None:
    engine = HandEngine()
    here = stage(engine)
    asgi = AsgiClient()
    engine.give("one STOP two")
    await asgi.request(here.app, CHAT, chat_body(stop=["STOP"]))
    assert json.loads(asgi.body)["choices"][0]["message"]["content"].strip() == "one"
    assert (engine.running, here.turns[0].finish_reason, here.turns[0].state) == (
        0,
        "stop_string",
        "complete",
    )
    assert len(here.turns[0].sampled) < len(engine.given)


async def test_long_request_leaves_loop_free() -> None:
    """Reading and rendering a megabyte is not the loop's work: its longest step takes less than half of it,
    in CPU time, whatever else runs here.
    """
    here = stage(scripted("x"), context=10_000_000)
    here.plane.model.engine.context_length = 10_000_000
    text = "some words, again and again. " * 30_000
    steps = _Steps()
    asgi = AsgiClient()
    trio.lowlevel.add_instrument(steps)
    started = process_time()
    await asgi.request(here.app, CHAT, chat_body(text=text))
    took = process_time() - started
    trio.lowlevel.remove_instrument(steps)
    assert asgi.status == 200
    assert len(text) > MAX_INLINE_CHARS
    assert steps.longest < took / 2


@define(eq=False)
class _Steps(trio.abc.Instrument):
    longest: float = 0.0
    _began: float = field(default=0.0)

    def now(self) -> float:
        return thread_time()

    def before_task_step(self, task: Any) -> None:
        self._began = self.now()

    def after_task_step(self, task: Any) -> None:
        if self._began:  # not the step that put us here
            self.longest = max(self.longest, self.now() - self._began)


async def test_cancelled_node_records_partial_turn(autojump_clock: trio.testing.MockClock) -> None:
    engine = HandEngine()
    here: Stage = stage(engine, pacing=KeepAlivePacing(opening_s=0.5, quiet_s=1.0))
    asgi = AsgiClient()
    engine.give("Half a ")
    with trio.move_on_after(3):
        await asgi.request(here.app, CHAT, chat_body(stream=True))
    assert [(turn.state, list(turn.sampled)) for turn in here.turns] == [("partial", spelled("Half a "))]
    assert (engine.running, here.s1.calls.count) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_closed_socket_ends_its_call(stream: bool) -> None:
    """The connection calls when its client has left; the call is recorded, and its connection serves no more."""
    engine = HandEngine()
    here = stage(engine)
    asked = chat_body(stream=stream)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-s1\r\ncontent-length: {len(asked)}\r\n\r\n"
    async with served(here.app) as base:
        host, _, port = base.removeprefix("http://").partition(":")
        with trio.fail_after(30):
            client = await trio.open_tcp_stream(host, int(port))
            # in three parts, of which the last ends the body
            for part in (head.encode(), asked[:10], asked[10:]):
                await client.send_all(part)
                await trio.testing.wait_all_tasks_blocked(0.01)
            await engine.asked.wait()
            engine.give("Half a ")
            await engine.took.wait()
            await client.aclose()
            await engine.left.wait()
    assert [(turn.state, list(turn.sampled)) for turn in here.turns] == [("partial", spelled("Half a "))]


async def test_disconnect_while_body_was_read() -> None:
    """A client that left while its body was read is never generated for."""
    engine = HandEngine()
    here = stage(engine)
    gone = AsgiClient()
    gone.departure.note()
    with trio.fail_after(30):
        await gone.request(here.app, CHAT, chat_body())
    assert (engine.orders, here.turns, gone.sent, gone.departure.then) == ([], [], [], None)
