"""The Responses API in the real model plane, spoken to by the official SDK over a socket: tokens are kept,
whatever shape they are said in.
"""

import json
from typing import Any

import httpx
import openai
import pytest
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, HandEngine, answers, prompts, served, stage
from tokens_kit import model

from polarnode.core.errors import EngineError

VOCAB = model().tokenizer.vocab_size
THINKING = "<think>|\nHm.\n|</think>|\n\n"
CALLING = (
    THINKING + 'Let me see.|<tool_call>|\n{"name": "look", "arguments": {"path": "a.txt"}}\n|</tool_call>'
)
PATCHING = '<tool_call>|\n{"name": "files.patch", "arguments": {"input": "+x"}}\n|</tool_call>'
LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {}}},
}
FILES: Any = {
    "type": "namespace",
    "name": "files",
    "description": "Of files.",
    "tools": [{"type": "custom", "name": "patch"}],
}


def scripted(*texts: str) -> ScriptedEngine:
    return ScriptedEngine(reply=answers(*texts), vocab_size=VOCAB, context_length=CONTEXT)


def client(base: str, *, key: str = "key-s1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=f"{base}/v1", max_retries=0)


async def said(base: str, *, stream: bool, **asked: Any) -> Any:
    """A response, whole or put together by the SDK from its events."""
    async with client(base) as sdk:
        if not stream:
            return await sdk.responses.create(model="m", **asked)
        async with sdk.responses.stream(model="m", **asked) as events:
            return await events.get_final_response()


def kept_its_tokens(here: Any, engine: ScriptedEngine) -> None:
    """The second turn extends the first token for token, and nobody had to excuse anything."""
    assert [(turn.kind, turn.reason, turn.parent) for turn in here.turns] == [
        ("root", "first", None),
        ("extend", "appended", 0),
    ]
    before, after = prompts(engine.orders)
    assert after[: len(before) + len(here.turns[0].sampled)] == before + list(here.turns[0].sampled)
    assert not any(
        note.startswith(("edited", "foreign", "rewritten")) for turn in here.turns for note in turn.notes
    )


async def test_whole_and_streamed_agree() -> None:
    here = stage(scripted(THINKING + "Hello there."))
    async with served(here.app) as base:
        whole = await said(base, stream=False, input="hi")
        streamed = await said(base, stream=True, input="hi there")
    for found in (whole, streamed):
        assert (found.model, found.status, found.output_text, found.output[0].summary[0].text) == (
            "m",
            "completed",
            "Hello there.",
            "Hm.",
        )
        assert found.usage.output_tokens_details.reasoning_tokens > 0
    assert [turn.provider for turn in here.turns] == ["openai_responses", "openai_responses"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
async def test_tool_result_extends_turn_exactly(stream: bool, include: list[str]) -> None:
    """A tool call and its result extend the turn token for token."""
    engine = scripted(CALLING, "It says hello.")
    here = stage(engine)
    asked: dict[str, Any] = {"stream": stream, "tools": [LOOK], "store": False, "include": include}
    async with served(here.app) as base:
        first = await said(base, input="hi", **asked)
        call = next(item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "hello"}
        items = [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        await said(base, input=[{"role": "user", "content": "hi"}, *items, result], **asked)
    kept_its_tokens(here, engine)
    assert json.loads(call.arguments) == {"path": "a.txt"}


async def test_freeform_call_extends_turn() -> None:
    """A freeform call in a namespace and its result extend the turn token for token."""
    engine = scripted(PATCHING, "Done.")
    here = stage(engine)
    async with served(here.app) as base:
        first = await said(base, stream=False, input="hi", tools=[FILES])
        (call,) = first.output
        assert (call.type, call.name, call.input, call.namespace) == (
            "custom_tool_call",
            "patch",
            "+x",
            "files",
        )
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        await said(
            base,
            stream=False,
            input=[{"role": "user", "content": "hi"}, call.model_dump(), result],
            tools=[FILES],
        )
    kept_its_tokens(here, engine)


async def test_unfit_call_keeps_tokens() -> None:
    """A freeform call has one input; what the model gave beside it does not come back, and its own ids prove
    whose call it is.
    """
    engine = scripted(
        '<tool_call>|\n{"name": "files.patch", "arguments": {"input": "+x", "why": "so"}}\n|</tool_call>',
        "Done.",
    )
    here = stage(engine)
    async with served(here.app) as base:
        (call,) = (await said(base, stream=False, input="hi", tools=[FILES])).output
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        await said(
            base,
            stream=False,
            input=[{"role": "user", "content": "hi"}, call.model_dump(), result],
            tools=[FILES],
        )
    assert [(turn.kind, turn.parent) for turn in here.turns] == [("root", None), ("extend", 0)]
    before, after = prompts(engine.orders)
    assert after[: len(before) + len(here.turns[0].sampled)] == before + list(here.turns[0].sampled)
    assert [note for note in here.turns[1].notes if note.startswith("edited")] != []


@pytest.mark.parametrize("stream", [False, True])
async def test_previous_response_is_extended(stream: bool) -> None:
    engine = scripted(CALLING, "It says hello.")
    here = stage(engine)
    async with served(here.app) as base:
        first = await said(base, stream=stream, input="hi", tools=[LOOK], instructions="Be brief.")
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "hello"}
        asked: Any = {"tools": [LOOK], "instructions": "Be brief.", "previous_response_id": first.id}
        second = await said(base, stream=stream, input=[result], **asked)
        assert second.output_text == "It says hello."
        with pytest.raises(openai.BadRequestError, match="send the whole input"):
            await said(base, stream=stream, input="x", previous_response_id="resp_0")
    kept_its_tokens(here, engine)


async def test_compaction_and_continuation() -> None:
    """A conversation is compacted, and the next request builds on the compaction."""
    engine = scripted("Hello.", "We said hello.", "Go on.")
    here = stage(engine)
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    async with served(here.app) as base, client(base) as sdk:
        talk += [
            item.model_dump() for item in (await said(base, stream=True, input=talk, store=False)).output
        ]
        trigger: Any = [*talk, {"type": "compaction_trigger"}]
        events = [
            event
            async for event in await sdk.responses.create(model="m", input=trigger, stream=True, store=False)
        ]
        (item,) = [event.item for event in events if event.type == "response.output_item.done"]
        again: Any = [talk[0], {"type": "compaction", "encrypted_content": item.encrypted_content}]  # type: ignore[union-attr]
        await said(base, stream=True, input=again, store=False)
    assert [(turn.kind, turn.role) for turn in here.turns] == [
        ("root", "main"),
        ("extend", "compaction"),
        ("root", "main"),
    ]
    assert here.turns[2].reason == "compaction"
    assert b"We said hello." in b"".join(map(model().tokenizer.token_bytes, here.turns[2].prompt_delta))


async def test_prewarm_samples_nothing() -> None:
    """A client that only warms its connection samples nothing."""
    engine = scripted("x")
    here = stage(engine)
    async with served(here.app) as base, client(base) as sdk:
        found = await sdk.responses.create(model="m", input=[], extra_body={"generate": False})
        events = [
            event.type
            async for event in await sdk.responses.create(
                model="m", input=[], stream=True, extra_body={"generate": False}
            )
        ]
    assert (found.status, found.output) == ("completed", [])
    assert events == ["response.created", "response.in_progress", "response.completed"]
    assert (engine.orders, here.turns) == ([], [])


async def test_tokens_are_counted_exactly() -> None:
    engine = scripted("x")
    here = stage(engine)
    async with served(here.app) as base, client(base) as sdk:
        counted = await sdk.responses.input_tokens.count(model="m", input="hi", instructions="Be brief.")
        await sdk.responses.create(model="m", input="hi", instructions="Be brief.")
    assert counted.input_tokens == len(engine.orders[0].prompt)
    assert len(here.turns) == 1


async def test_long_context_words() -> None:
    """A long context is refused in OpenAI's words."""
    here = stage(scripted("x"))
    async with served(here.app) as base:
        with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
            await said(base, stream=False, input="hi " * 2 * CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    assert here.turns == []


@pytest.mark.parametrize(
    ("body", "param"), [({}, "model"), ({"model": "m", "input": [{"role": "robot"}]}, "input[0].role")]
)
async def test_malformed_request_is_400_with_path(body: dict[str, Any], param: str) -> None:
    here = stage(scripted("x"))
    async with served(here.app) as base, client(base) as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.post("/responses", cast_to=object, body=body)
    assert caught.value.param == param


async def test_wrong_key_is_refused() -> None:
    here = stage(scripted("x"))
    async with served(here.app) as base, client(base, key="of-nobody") as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.responses.create(model="m", input="hi")


async def test_failed_stream_is_broken() -> None:
    """The SDK sees no end; Codex and every other harness on this API then asks again."""
    engine = HandEngine()
    here = stage(engine)
    engine.give("Half a ")
    engine.fail(EngineError("the host died"))
    kinds: list[str] = []
    async with served(here.app) as base, client(base) as sdk:
        try:
            async for event in await sdk.responses.create(model="m", input="hi", stream=True):
                kinds.append(event.type)  # noqa: PERF401 - what came before it broke is what counts
        except httpx.RemoteProtocolError as error:
            kinds.append(str(error))
    assert "incomplete chunked read" in kinds.pop()
    assert "response.output_text.delta" in kinds
    assert not {"response.completed", "response.failed", "response.incomplete"} & set(kinds)
    assert [turn.state for turn in here.turns] == ["failed"]
