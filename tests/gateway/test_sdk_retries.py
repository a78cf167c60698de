"""The official SDKs asking again by themselves, over real sockets: a time-out, a failed engine, an ended
generation, a stream that was left.
"""

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
import trio
from attrs import frozen
from google import genai
from google.genai import types
from plane_kit import HandEngine, Stage, served, spelled, stage

from polarnode.core.errors import EngineError
from polarnode.core.task import BuilderSpec
from polarnode.merge.builders import build
from polarnode.merge.invariants import check

# of the client that gives up: long enough for a busy machine to have the half answer out, short enough to
# wait for
PATIENCE_S = 2.5
HI: Any = {"role": "user", "content": "hi"}
HALF, REST = "Half a ", "loaf."


@frozen(kw_only=True)
class Client:
    """One SDK: ask for a whole answer, or for a stream and give its texts as they come. `retries` are its
    own.
    """

    whole: Callable[[str, int, float], str]
    texts: Callable[[str], Any]


def _chat(base: str, retries: int = 0, patience: float = 60) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="key-s1", max_retries=retries, timeout=patience)


def chat_whole(base: str, retries: int, patience: float) -> str:
    with _chat(base, retries, patience) as client:
        return client.chat.completions.create(model="m", messages=[HI]).choices[0].message.content or ""


def chat_texts(base: str) -> Any:
    with (
        _chat(base) as client,
        client.chat.completions.create(model="m", messages=[HI], stream=True) as stream,
    ):
        for chunk in stream:
            yield from (choice.delta.content for choice in chunk.choices if choice.delta.content)


def responses_whole(base: str, retries: int, patience: float) -> str:
    with _chat(base, retries, patience) as client:
        return client.responses.create(model="m", input="hi").output_text


def responses_texts(base: str) -> Any:
    with _chat(base) as client, client.responses.create(model="m", input="hi", stream=True) as stream:
        yield from (event.delta for event in stream if event.type == "response.output_text.delta")


def messages_whole(base: str, retries: int, patience: float) -> str:
    with anthropic.Anthropic(
        base_url=base, api_key="key-s1", max_retries=retries, timeout=patience
    ) as client:
        return "".join(
            block.text
            for block in client.messages.create(model="m", max_tokens=99, messages=[HI]).content
            if block.type == "text"
        )


def messages_texts(base: str) -> Any:
    with (
        anthropic.Anthropic(base_url=base, api_key="key-s1", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=99, messages=[HI]) as stream,
    ):
        yield from stream.text_stream


def _google(base: str, retries: int = 0) -> genai.Client:
    options = types.HttpOptions(
        base_url=base, retry_options=types.HttpRetryOptions(attempts=retries + 1, initial_delay=0.1)
    )
    return genai.Client(api_key="key-s1", http_options=options)


def google_whole(base: str, retries: int, patience: float) -> str:
    with _google(base, retries) as client:
        return client.models.generate_content(model="m", contents="hi").text or ""


def google_texts(base: str) -> Any:
    with _google(base) as client:
        yield from (
            chunk.text
            for chunk in client.models.generate_content_stream(model="m", contents="hi")
            if chunk.text
        )


CLIENTS = {
    "openai-chat": Client(whole=chat_whole, texts=chat_texts),
    "openai-responses": Client(whole=responses_whole, texts=responses_texts),
    "anthropic": Client(whole=messages_whole, texts=messages_texts),
    "google": Client(whole=google_whole, texts=google_texts),
}
# Google's SDK does not ask again after a time-out of its own.
IMPATIENT = [name for name in CLIENTS if name != "google"]


async def in_thread(ask: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)


def held(here: Stage) -> None:
    """The laws, on all that was recorded."""
    counts = check(here.turns, build(BuilderSpec(name="prefix_merging"), here.turns))
    assert counts.trainable == sum(len(turn.sampled) for turn in here.turns if turn.state != "failed")


@pytest.mark.parametrize("name", IMPATIENT)
async def test_timed_out_client_gets_begun_answer(name: str) -> None:
    """A client that times out and asks again gets the answer that was begun."""
    engine = HandEngine()
    here = stage(engine)

    async def give() -> None:
        engine.give(HALF)
        await engine.left.wait()
        engine.give(REST, "<|im_end|>", finish="stop")

    async with served(here.app) as base, trio.open_nursery() as nursery:
        nursery.start_soon(give)
        with trio.fail_after(60):
            text = await in_thread(lambda: CLIENTS[name].whole(base, 2, PATIENCE_S))
    assert text == HALF + REST
    assert [(turn.state, turn.kind, list(turn.sampled)) for turn in here.turns] == [
        ("partial", "root", spelled(HALF)),
        ("complete", "continue", spelled(REST, "<|im_end|>")),
    ]
    held(here)


@pytest.mark.parametrize("name", CLIENTS)
async def test_abandoned_stream_resumes_for_retry(name: str) -> None:
    """A stream that a client left resumes for its next identical request."""
    engine = HandEngine()
    here = stage(engine)

    def leave(base: str) -> str:
        texts = CLIENTS[name].texts(base)
        first = next(texts)
        texts.close()
        return str(first)

    async with served(here.app) as base:
        engine.give(HALF)
        with trio.fail_after(60):
            first = await in_thread(lambda: leave(base))
            await engine.left.wait()
        engine.give(REST, "<|im_end|>", finish="stop")
        again = await in_thread(lambda: list(CLIENTS[name].texts(base)))
    assert HALF.startswith(first)
    assert "".join(again) == HALF + REST
    assert [turn.reason for turn in here.turns] == ["first", "resumed"]
    held(here)


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("ending", ["error", "abort"])
async def test_unstarted_generation_is_asked_again(name: str, ending: str) -> None:
    """A generation that never began is asked for again."""
    engine = HandEngine()
    here = stage(engine)
    if ending == "error":
        engine.fail(EngineError("the host died"))
    else:
        engine.give(finish="abort")
    engine.give("Hello.", "<|im_end|>", finish="stop")
    async with served(here.app) as base:
        with trio.fail_after(60):
            assert await in_thread(lambda: CLIENTS[name].whole(base, 2, 60)) == "Hello."
    assert [(turn.state, turn.kind) for turn in here.turns] == [("failed", "root"), ("complete", "retry")]
    held(here)


@pytest.mark.parametrize("name", CLIENTS)
async def test_same_question_after_answer_is_new(name: str) -> None:
    """Asking the same again after an answer is a new sample."""
    engine = HandEngine()
    here = stage(engine)
    texts = []
    async with served(here.app) as base:
        for said in ("One.", "Two."):
            engine.give(said, "<|im_end|>", finish="stop")
            texts.append(await in_thread(lambda: CLIENTS[name].whole(base, 0, 60)))
        for said in ("Three.", "Four."):
            engine.give(said, "<|im_end|>", finish="stop")
            texts.append(await in_thread(lambda: "".join(CLIENTS[name].texts(base))))
    assert texts == ["One.", "Two.", "Three.", "Four."]
    assert len(here.turns) == 4
    assert (here.s1.metrics()["replayed"], here.s1.metrics()["resumed_turns"]) == (0, 0)
    held(here)
