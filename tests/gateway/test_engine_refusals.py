"""What the engine refuses is the client's mistake: a 400 in every API, once, which costs a turn."""

import json
from typing import Any

import pytest
import trio.testing
from plane_kit import AsgiClient, HandEngine, Stage, served, stage
from test_model_plane import HI, ask_chat

from polarnode.core.errors import EngineRefusal
from polarnode.harnesses.harness import lost_its_engine

WHY = 'the engine refused the request: Failed to compile json grammar: Unsupported type "lake"'
LAKE = {"type": "lake"}
ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LAKE}},
        },
        "response_format",
    ),
    "sglang": (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "guided_regex": "("},
        "guided_regex",
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m",
            "input": "hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": LAKE}},
        },
        "text.format.schema",
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "output_config": {"format": {"type": "json_schema", "schema": LAKE}},
        },
        "output_config.format.schema",
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": LAKE},
        },
        "generationConfig.responseJsonSchema",
    ),
}


async def ask(here: Stage, path: str, body: dict[str, Any]) -> AsgiClient:
    asgi = AsgiClient()
    await asgi.request(here.app, path, json.dumps(body).encode())
    return asgi


def streamed(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if "models" in path:
        return path.replace("generateContent", "streamGenerateContent"), body
    return path, {**body, "stream": True}


@pytest.fixture
def engine() -> HandEngine:
    return HandEngine()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ASKED)
async def test_refusal_names_field_once(engine: HandEngine, api: str, stream: bool) -> None:
    path, body, field = ASKED[api]
    here = stage(engine, max_turns=2)
    for _ in range(2):
        engine.fail(EngineRefusal(WHY))
        asgi = await ask(here, *(streamed(path, body) if stream else (path, body)))
        assert asgi.status == 400
        assert b"retry-after" not in dict(asgi.sent[0]["headers"])
        said = asgi.body.decode()
        assert "Unsupported type" in said
        assert field in said
        assert "RetryInfo" not in said
    # it costs a turn, and is no failure of the engine
    assert "budget" in (await ask(here, path, body)).body.decode()
    assert [(turn.state, turn.refused, len(turn.sampled)) for turn in here.turns] == [("failed", True, 0)] * 2
    assert here.turns[0].notes[-1].startswith(f"refused: {WHY}")
    assert not lost_its_engine(here.turns)
    assert here.s1.metrics()["failed_turns"] == 0
    assert here.s1.metrics()["refusals"] == {"bad_request": 2, "budget_spent": 1}


@pytest.mark.parametrize("api", ASKED)
async def test_refusal_within_opened_stream(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, api: str
) -> None:
    """A grammar compiles for seconds, and keep-alives are sent meanwhile. No harness repeats on an error that
    a stream reports; on one that breaks all of them do.
    """
    here = stage(engine)
    path, body, _ = ASKED[api]
    asgi = AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi.request, here.app, *_wire(*streamed(path, body)))
        await trio.sleep(5)
        engine.fail(EngineRefusal(WHY))
    assert asgi.status == 200
    said = asgi.body.decode()
    assert "Unsupported type" in said
    if api != "google":  # an array has its error as an element, and then breaks
        assert asgi.whole
    assert [turn.refused for turn in here.turns] == [True]


def _wire(path: str, body: dict[str, Any]) -> tuple[str, bytes]:
    return path, json.dumps(body).encode()


async def test_refusal_in_mid_answer_keeps_sample(engine: HandEngine) -> None:
    """A refusal in the middle of an answer keeps the sample."""
    here = stage(engine)
    path, body, _ = ASKED["sglang"]
    engine.give("ab")
    engine.fail(EngineRefusal("the constraint leaves nothing to sample"))
    asgi = await ask(here, path, body)
    assert asgi.status == 400
    assert [(turn.state, turn.refused, bool(turn.sampled)) for turn in here.turns] == [("failed", True, True)]


async def test_refused_choices_cost_one_call(engine: HandEngine) -> None:
    here = stage(engine, max_turns=2)
    path, body, _ = ASKED["chat"]
    engine.fail(EngineRefusal(WHY))
    asgi = await ask(here, path, {**body, "n": 2})
    assert asgi.status == 400
    assert "budget" in (await ask(here, path, body)).body.decode()
    assert not lost_its_engine(here.turns)


async def test_sdk_does_not_repeat_refusal(engine: HandEngine) -> None:
    here = stage(engine)
    engine.fail(EngineRefusal(WHY))
    engine.give("Hello.", "<|im_end|>", finish="stop")

    def read(client: Any) -> Any:
        return client.chat.completions.create(model="m", messages=[HI], extra_body={"regex": "("})

    async with served(here.app) as base:
        with pytest.raises(Exception, match="Unsupported type") as caught:
            await ask_chat(base, read, retries=2)
    assert type(caught.value).__name__ == "BadRequestError"
    assert len(engine.orders) == 1
