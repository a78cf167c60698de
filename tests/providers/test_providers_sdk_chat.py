"""The official SDKs through the whole plane, at their fullest: several answers, logprobs, answers parsed to a
schema, custom tools; and both of them asynchronous, whole and streamed. asyncio is theirs: each runs its own
loop in a thread.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
import trio
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, HandEngine, Stage, answers, served, stage
from pydantic import BaseModel
from tokens_kit import model

from polarnode.core.conversation import Constraint
from polarnode.core.errors import EngineError

HI: Any = {"role": "user", "content": "hi"}
LOOK: Any = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CALLING = 'Let me see.|<tool_call>|\n{"name": "look", "arguments": {"path": "a.txt"}}\n|</tool_call>'
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}
TOOL: Any = {"name": "look", "input_schema": LOOK}


class Weather(BaseModel):
    city: str
    degrees: int


def scripted(*texts: str) -> ScriptedEngine:
    return ScriptedEngine(
        reply=answers(*texts), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT
    )


async def with_chat(here: Stage, use: Callable[[openai.OpenAI], Any], *, retries: int = 0) -> Any:
    """What a synchronous client gets, in a thread."""

    def ask(base: str) -> Any:
        with openai.OpenAI(
            base_url=f"{base}/v1", api_key="key-s1", max_retries=retries, timeout=60
        ) as client:
            return use(client)

    async with served(here.app) as base:
        return await trio.to_thread.run_sync(ask, base, abandon_on_cancel=True)


async def in_a_loop(here: Stage, use: Callable[[str], Awaitable[Any]]) -> Any:
    """What an asynchronous client gets, in a loop of its own, in a thread."""

    async def ask(base: str) -> Any:
        return await use(base)

    async with served(here.app) as base:
        return await trio.to_thread.run_sync(lambda: asyncio.run(ask(base)), abandon_on_cancel=True)


def async_chat(base: str, *, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="key-s1", max_retries=retries, timeout=60)


def async_messages(base: str, *, retries: int = 0) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=base, api_key="key-s1", max_retries=retries, timeout=60)


# ── chat, at its fullest ──────────────────────────────────────────────────────


async def test_choices_with_logprobs() -> None:
    """The SDK reads several answers with logprobs, whole and streamed."""
    here = stage(scripted("One €."))
    asked: dict[str, Any] = {"model": "m", "messages": [HI], "n": 2, "logprobs": True, "top_logprobs": 3}
    whole = await with_chat(here, lambda client: client.chat.completions.create(**asked))
    chunks = await with_chat(here, lambda client: list(client.chat.completions.create(**asked, stream=True)))
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [
        (0, "One €."),
        (1, "One €."),
    ]
    for choice in whole.choices:
        tokens = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == "One €."
        assert {token.logprob for token in tokens} == {-0.5}
        streamed = [
            token
            for chunk in chunks
            for part in chunk.choices
            if part.index == choice.index and part.logprobs
            for token in part.logprobs.content
        ]
        assert [token.model_dump() for token in streamed] == [token.model_dump() for token in tokens]
    assert len(here.turns) == 4


async def test_answer_parsed_to_schema() -> None:
    """An answer is parsed to the schema that it was asked for."""
    engine = scripted('{"city": "Köln", "degrees": 21}')
    parsed = await with_chat(
        stage(engine),
        lambda client: client.chat.completions.parse(model="m", messages=[HI], response_format=Weather),
    )
    assert parsed.choices[0].message.parsed == Weather(city="Köln", degrees=21)
    (order,) = engine.orders
    assert isinstance(order.constraint, Constraint)
    assert (order.constraint.kind, set(json.loads(order.constraint.text)["required"])) == (
        "json_schema",
        {"city", "degrees"},
    )


async def test_custom_tool_round_trip() -> None:
    """A custom tool is called and answered as one."""
    here = stage(
        scripted(
            '<tool_call>|\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n|</tool_call>', "Done."
        )
    )
    tools: Any = [
        {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": {"type": "text"}}}
    ]

    def use(client: openai.OpenAI) -> Any:
        first: Any = client.chat.completions.create(model="m", messages=[HI], tools=tools).choices[0].message
        (call,) = first.tool_calls
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
        return call, client.chat.completions.create(model="m", messages=[HI, first, result], tools=tools)

    call, second = await with_chat(here, use)
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", "*** Begin")
    assert second.choices[0].message.content == "Done."
    assert [(turn.kind, turn.reason) for turn in here.turns] == [("root", "first"), ("extend", "appended")]


async def test_parallel_calls_off_is_one_call() -> None:
    here = stage(scripted(f"{CALLING}|\n|<tool_call>|\n{{}}\n|</tool_call>"))
    whole = await with_chat(
        here,
        lambda client: client.chat.completions.create(
            model="m", messages=[HI], tools=[CHAT_TOOL], parallel_tool_calls=False
        ),
    )
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["look"]


async def test_bad_field_error_names_it() -> None:
    here = stage(scripted("x"))
    with pytest.raises(openai.BadRequestError) as caught:
        await with_chat(here, lambda client: client.chat.completions.create(model="m", messages=[HI], n=99))
    assert caught.value.param == "n"
    assert here.turns == []


# ── asynchronous ──────────────────────────────────────────────────────────────


async def test_async_chat_client() -> None:
    """The asynchronous Chat client reads whole answers, streams and calls of tools."""
    here = stage(scripted("Hello there.", "Hello there.", CALLING))

    async def use(base: str) -> Any:
        async with async_chat(base) as client:
            whole = await client.chat.completions.create(model="m", messages=[HI])
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(model="m", messages=[HI], stream=True)
            ]
            async with client.chat.completions.stream(model="m", messages=[HI], tools=[CHAT_TOOL]) as stream:
                return whole, chunks, await stream.get_final_completion()

    whole, chunks, called = await in_a_loop(here, use)
    assert (
        whole.choices[0].message.content
        == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == "Hello there."
    )
    (call,) = called.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"path": "a.txt"})


async def test_async_anthropic_client() -> None:
    """The asynchronous Anthropic client reads whole answers, streams, counts and calls of tools."""
    engine = scripted("<think>|\nHm.\n|</think>|\n\nHello there.", CALLING)
    here = stage(engine)

    async def use(base: str) -> Any:
        async with async_messages(base) as client:
            counted = await client.messages.count_tokens(model="m", messages=[HI])
            whole = await client.messages.create(model="m", max_tokens=99, messages=[HI])
            async with client.messages.stream(
                model="m", max_tokens=99, messages=[HI], tools=[TOOL]
            ) as stream:
                return counted, whole, await stream.get_final_message()

    counted, whole, called = await in_a_loop(here, use)
    assert counted.input_tokens == len(engine.orders[0].prompt) == whole.usage.input_tokens
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.usage.cache_creation.ephemeral_5m_input_tokens == 0
    assert (called.stop_reason, called.content[-1].input) == ("tool_use", {"path": "a.txt"})


async def test_async_clients_raise_own_errors() -> None:
    here = stage(scripted("x"))

    async def use(base: str) -> None:
        async with async_chat(base) as chat, async_messages(base) as messages:
            with pytest.raises(openai.BadRequestError, match="at least one"):
                await chat.chat.completions.create(model="m", messages=[])
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                await messages.messages.create(
                    model="m", max_tokens=9, messages=[HI], extra_body={"temperature": 7}
                )
            with pytest.raises(anthropic.NotFoundError):
                await messages.messages.batches.list()

    await in_a_loop(here, use)
    assert here.turns == []


@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_sdk_waits_for_retry_after(name: str) -> None:
    """An engine that fails once is asked again when Retry-After says so."""
    engine = HandEngine()
    here = stage(engine)
    engine.fail(EngineError("restarting"))
    engine.give("Hello.", "<|im_end|>", finish="stop")

    async def use(base: str) -> Any:
        if name == "chat":
            async with async_chat(base, retries=1) as chat:
                return (
                    (await chat.chat.completions.create(model="m", messages=[HI])).choices[0].message.content
                )
        async with async_messages(base, retries=1) as messages:
            return (await messages.messages.create(model="m", max_tokens=99, messages=[HI])).content[0].text

    began = trio.current_time()
    assert await in_a_loop(here, use) == "Hello."
    # the header's two whole seconds; the SDKs' own first wait is half of one
    assert trio.current_time() - began >= 2.0
    assert [turn.state for turn in here.turns] == ["failed", "complete"]
