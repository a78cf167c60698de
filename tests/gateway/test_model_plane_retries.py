"""A client that asks again: what it never got is gone on with or given again; what it got is sampled anew. By
hand, in virtual time.
"""

import json
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing
from plane_kit import AsgiClient, HandEngine, Stage, new_session, prompts, spelled, stage

from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.gateway.exchange import MAX_FREE_REPEATS
from polarnode.gateway.live_sessions import MAX_TWIN_WAIT_S

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = [CHAT, MESSAGES, RESPONSES, "/v1beta/models/m:generateContent"]
CALLING = ("<tool_call>", '\n{"name": "look", "arguments": {"path": "a.txt"}}\n', "</tool_call>")
LOOK = {"type": "object", "properties": {"path": {"type": "string"}}}


def body(path: str = CHAT, text: str = "hi", *, stream: bool = False, **said: Any) -> bytes:
    """A request of an API in its own words."""
    if path == RESPONSES:
        asked: dict[str, Any] = {"model": "m", "input": text, "stream": stream}
    elif "models" in path:
        asked = {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    else:
        asked = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "stream": stream,
            "max_tokens": 99,
        }
    return json.dumps(asked | said).encode()


async def ask(here: Stage, path: str, asked: bytes, *, leave_at: int | None = None) -> AsgiClient:
    asgi = AsgiClient(leave_at=leave_at)
    await asgi.request(here.app, path, asked)
    return asgi


async def cut(here: Stage, engine: HandEngine, asked: bytes, *pieces: str, path: str = CHAT) -> AsgiClient:
    """A call whose client leaves when the engine has given these pieces."""
    asgi = AsgiClient()
    engine.channel = trio.open_memory_channel[Any](100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi.request, here.app, path, asked)
        for piece in pieces:
            engine.give(piece)
        await trio.sleep(1)
        asgi.leave()
    return asgi


@pytest.fixture
def engine() -> HandEngine:
    return HandEngine()


# ── gone on with ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
async def test_same_body_resumes_token_for_token(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, path: str
) -> None:
    """The same body resumes token for token in every dialect."""
    here = stage(engine)
    await cut(here, engine, body(path), "Half a ", path=path)
    engine.give("loaf.", "<|im_end|>", finish="stop")
    again = await ask(here, path, body(path))
    assert b"Half a loaf." in again.body
    first, second = here.turns
    assert (first.state, second.state, second.kind, second.reason, second.parent) == (
        "partial",
        "complete",
        "continue",
        "resumed",
        0,
    )
    assert list(second.sampled) == spelled("loaf.", "<|im_end|>")
    before, after = prompts(engine.orders)
    assert after == before + list(first.sampled)
    assert here.s1.metrics()["resumed_turns"] == 1


async def test_resumed_stream_repeats_first_part(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """A resumed stream begins with the text that was sent before."""
    here = stage(engine)
    gone = await cut(here, engine, body(stream=True), "Half a ")
    assert b"Half a" in gone.body
    engine.give("loaf.", "<|im_end|>", finish="stop")
    again = await ask(here, CHAT, body(stream=True))
    texts = [
        json.loads(line[6:])["choices"][0]["delta"].get("content")
        for line in again.body.decode().split("\n\n")
        if line.startswith("data: {")
    ]
    assert "".join(filter(None, texts)) == "Half a loaf."
    assert again.whole


async def test_unresumable_body_is_sampled_anew(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """Another body, or one whose parts cannot go on, is sampled anew."""
    here = stage(engine)
    for place, said in enumerate(
        ({"logprobs": True}, {"n": 1, "response_format": {"type": "json_object"}}, {"n": 2})
    ):
        first, second = body(text=f"q{place}", **said), body(text=f"q{place}", **said)
        await cut(here, engine, first, "Half")
        engine.channel = trio.open_memory_channel[Any](100)
        for _ in range(2):
            engine.give("Whole.", "<|im_end|>", finish="stop")
        assert (await ask(here, CHAT, second)).status == 200
    assert "resumed" not in {turn.reason for turn in here.turns}
    await cut(here, engine, body(text="one"), "Half")
    engine.channel = trio.open_memory_channel[Any](100)
    engine.give("Whole.", "<|im_end|>", finish="stop")
    await ask(here, CHAT, body(text="one", temperature=0.5))
    assert (here.turns[-1].reason, here.turns[-1].kind) == ("same_path", "retry")


async def test_failed_resume_is_retried_in_place(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """An engine that fails in a resumed answer is asked again from the same place."""
    here = stage(engine)
    await cut(here, engine, body(), "Half a ")
    engine.fail(EngineError("the host died"))
    assert (await ask(here, CHAT, body())).status == 500
    engine.give("loaf.", "<|im_end|>", finish="stop")
    assert b"Half a loaf." in (await ask(here, CHAT, body())).body
    assert [(turn.state, turn.parent) for turn in here.turns] == [
        ("partial", None),
        ("failed", 0),
        ("complete", 0),
    ]


async def test_next_request_extends_resumed_turn(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    here = stage(engine)
    await cut(here, engine, body(), "Half a ")
    engine.give("loaf.", "<|im_end|>", finish="stop")
    await ask(here, CHAT, body())
    engine.give("Yes.", "<|im_end|>", finish="stop")
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Half a loaf."},
        {"role": "user", "content": "Really?"},
    ]
    await ask(here, CHAT, body(messages=said))
    assert [(turn.kind, turn.parent, turn.lineage) for turn in here.turns] == [
        ("root", None, 0),
        ("continue", 0, 0),
        ("extend", 1, 0),
    ]
    before, after = prompts(engine.orders)[1:]
    assert after[: len(before)] == before


@pytest.mark.parametrize("stream", [True, False])
async def test_aborted_answer_resumes_on_retry(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, stream: bool
) -> None:
    """An answer that the engine aborted resumes when its client asks again."""
    here = stage(engine)
    engine.give("Half a ", finish="abort")
    cancelled = await ask(here, CHAT, body(stream=stream))
    assert cancelled.status == 503
    engine.give("loaf.", "<|im_end|>", finish="stop")
    again = await ask(here, CHAT, body(stream=stream))
    assert again.whole
    assert [(turn.state, turn.kind, turn.reason) for turn in here.turns] == [
        ("partial", "root", "first"),
        ("complete", "continue", "resumed"),
    ]
    assert here.turns[1].answer is not None
    assert here.turns[1].answer.text == "Half a loaf."


# ── given again ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_undelivered_answer_sent_without_engine(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, path: str, stream: bool
) -> None:
    """A whole answer that was not delivered is given again without the engine."""
    here = stage(engine)
    if stream:
        path = path.replace("generateContent", "streamGenerateContent")
    asked = body(path, stream=stream)
    engine.give("Hello there.", "<|im_end|>", finish="stop")
    gone = await ask(here, path, asked, leave_at=1)
    assert not gone.whole
    for _ in range(2):  # and again, when that one is lost too
        again = await ask(here, path, asked, leave_at=1)
    again = await ask(here, path, asked)
    assert again.whole
    assert b"Hello there." in again.body
    assert (len(here.turns), len(engine.orders)) == (1, 1)
    assert (here.s1.metrics()["replayed"], here.s1.metrics()["turns"]) == (3, 1)
    engine.give("Anew.", "<|im_end|>", finish="stop")
    # it was delivered: asked again, it is sampled again
    assert b"Anew." in (await ask(here, path, asked)).body
    assert [turn.kind for turn in here.turns] == ["root", "retry"]


async def test_resent_calls_keep_their_ids(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    here = stage(engine)
    tools = [{"name": "look", "description": "Read.", "input_schema": LOOK}]
    asked = body(MESSAGES, tools=tools)
    engine.give("So.", *CALLING, "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, asked, leave_at=1)
    again = json.loads((await ask(here, MESSAGES, asked)).body)
    assert [block["type"] for block in again["content"]] == ["text", "tool_use"]
    ours = here.s1.lineages.references.find_turn(again["content"][1]["id"])
    assert ours == here.turns[0].index


async def test_every_choice_is_resent(autojump_clock: trio.testing.MockClock, engine: HandEngine) -> None:
    here = stage(engine)
    for text in ("One.", "Two."):
        engine.give(text, "<|im_end|>", finish="stop")
    await ask(here, CHAT, body(n=2), leave_at=1)
    again = json.loads((await ask(here, CHAT, body(n=2))).body)
    assert sorted(choice["message"]["content"] for choice in again["choices"]) == ["One.", "Two."]
    assert (len(here.turns), len(engine.orders)) == (2, 2)


async def test_spent_budget_still_resends_answer(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """A spent budget does not keep an answer from its client."""
    here = stage(engine, max_turns=1)
    engine.give("Hello.", "<|im_end|>", finish="stop")
    await ask(here, CHAT, body(), leave_at=1)
    assert b"Hello." in (await ask(here, CHAT, body())).body
    assert (await ask(here, CHAT, body())).status == 400
    await here.s1.close()
    assert (await ask(here, CHAT, body())).status == 410


async def test_bytes_after_last_words_are_optional(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """Many clients close when they have read the end of the stream, before the end of its chunks."""
    here = stage(engine)
    engine.give("Hello.", "<|im_end|>", finish="stop")
    asked = body(stream=True)
    gone = await ask(here, CHAT, asked, leave_at=2)
    assert gone.body.endswith(b"data: [DONE]\n\n")
    assert not gone.whole
    engine.give("Anew.", "<|im_end|>", finish="stop")
    await ask(here, CHAT, asked)
    assert len(here.turns) == 2


# ── twins ─────────────────────────────────────────────────────────────────────


async def test_two_live_clients_get_two_answers(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """Two clients that are both there get an answer each."""
    here = stage(engine)
    first, second = AsgiClient(), AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.request, here.app, CHAT, body())
        await trio.sleep(0.01)
        nursery.start_soon(second.request, here.app, CHAT, body())
        await trio.sleep(MAX_TWIN_WAIT_S - 0.05)
        assert len(engine.orders) == 1
        await trio.sleep(0.1)
        assert len(engine.orders) == 2
        for text in ("One.", "Two."):
            engine.give(text, "<|im_end|>", finish="stop")
    assert {json.loads(asgi.body)["choices"][0]["message"]["content"] for asgi in (first, second)} == {
        "One.",
        "Two.",
    }
    assert [turn.state for turn in here.turns] == ["complete", "complete"]


async def test_answer_in_delivery_is_not_shared(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """A harness that samples one prompt in parallel: an answer that its client has not yet read is not a lost
    one.
    """
    here = stage(engine)
    first, second = AsgiClient(reading=trio.Event()), AsgiClient()
    engine.give("One.", "<|im_end|>", finish="stop")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.request, here.app, CHAT, body())
        await trio.sleep(1)
        assert (len(here.turns), first.sent) == (1, [])
        nursery.start_soon(second.request, here.app, CHAT, body())
        await trio.sleep(1)
        engine.give("Two.", "<|im_end|>", finish="stop")
        await trio.sleep(1)
        assert second.whole
        first.reading.set()
    assert [json.loads(asgi.body)["choices"][0]["message"]["content"] for asgi in (first, second)] == [
        "One.",
        "Two.",
    ]
    assert here.s1.metrics()["replayed"] == 0


async def test_retry_before_disconnect_is_seen(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """A client that asks again before its disconnect was noticed resumes."""
    here = stage(engine)
    first, second = AsgiClient(), AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.request, here.app, CHAT, body())
        engine.give("Half a ")
        await trio.sleep(1)
        nursery.start_soon(second.request, here.app, CHAT, body())
        await trio.sleep(MAX_TWIN_WAIT_S / 2)
        first.leave()
        await trio.lowlevel.checkpoint()
        await engine.left.wait()
        engine.give("loaf.", "<|im_end|>", finish="stop")
    assert json.loads(second.body)["choices"][0]["message"]["content"] == "Half a loaf."
    assert [turn.reason for turn in here.turns] == ["first", "resumed"]


async def test_disconnect_while_waiting_for_twin(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """A client that leaves while it waits for its twin asked nothing."""
    here = stage(engine)
    first, second = AsgiClient(), AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.request, here.app, CHAT, body())
        await trio.sleep(0.01)
        nursery.start_soon(second.request, here.app, CHAT, body())
        await trio.sleep(0.1)
        second.leave()
        await trio.sleep(1)
        engine.give("One.", "<|im_end|>", finish="stop")
    assert len(here.turns) == 1
    assert second.sent == []


async def test_other_api_is_another_request(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """The same bytes to another API are another question."""
    here = stage(engine)
    await cut(here, engine, body(MESSAGES), "Half a ", path=MESSAGES)
    engine.channel = trio.open_memory_channel[Any](100)
    engine.give("Anew.", "<|im_end|>", finish="stop")
    assert b"Half" not in (await ask(here, CHAT, body(MESSAGES))).body


# ── what it costs ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_repeated_drops_cost_one_turn(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, path: str, stream: bool
) -> None:
    """The budget has one turn, and its answer comes at the fifth attempt: twice the client left before a
    token came, once before the first turn had any.
    """
    here = stage(engine, max_turns=1)
    if "models" in path:
        path, asked = (path.replace("generate", "streamGenerate") if stream else path), body(path)
    else:
        asked = body(path, stream=stream)
    await cut(here, engine, asked, path=path)
    await cut(here, engine, asked, "Half ", path=path)
    await cut(here, engine, asked, path=path)
    await cut(here, engine, asked, "a ", path=path)
    engine.give("loaf.", "<|im_end|>", finish="stop")
    answer = await ask(here, path, asked)
    assert answer.status == 200
    assert b"loaf." in answer.body
    assert [turn.parent for turn in here.turns] == [None, None, 1, 1, 3]
    assert [turn.reason for turn in here.turns[2:]] == ["resumed"] * 3
    assert here.s1.budget.counters.charged == 1
    assert b"budget" in (await ask(here, path, asked)).body


@pytest.mark.parametrize(
    ("said", "turns"), [({}, 1 + MAX_FREE_REPEATS + 1), ({"n": 2}, 2 * (1 + MAX_FREE_REPEATS))]
)
async def test_endless_drops_spend_budget(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, said: dict[str, Any], turns: int
) -> None:
    """A client that leaves again and again, and never gets any further, does not ask for ever."""
    here = stage(engine, max_turns=2)
    for _ in range(MAX_FREE_REPEATS + 9):
        await cut(here, engine, body(**said))
    assert len(here.turns) == turns
    assert here.s1.budget.spent_clock == "turns"


async def test_next_turn_after_drop_fits_budget(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    here = stage(engine, max_turns=2)
    await cut(here, engine, body(), "Half a ")
    for text in ("loaf.", "Whole."):
        engine.give(text, "<|im_end|>", finish="stop")
        assert (await ask(here, CHAT, body(text="hi" if text == "loaf." else "more"))).status == 200
    assert (await ask(here, CHAT, body(text="again"))).status == 400


@pytest.mark.parametrize("said", [{"n": 2}, {"logprobs": True}, {"guided_regex": "a"}])
async def test_resampled_call_costs_one_turn(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, said: dict[str, Any]
) -> None:
    """Such a call cannot go on from its tokens, and its client was owed an answer all the same."""
    samples = said.get("n", 1)
    here = stage(engine, max_turns=samples)
    await cut(here, engine, body(**said), "Half a ")
    for _ in range(samples):
        engine.give("Whole.", "<|im_end|>", finish="stop")
    assert b"Whole." in (await ask(here, CHAT, body(**said))).body
    assert (await ask(here, CHAT, body(**said))).status == 400


async def test_answer_after_drop_is_one_turn(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    here = stage(engine, max_turns=1)
    await cut(here, engine, body(), "Half a ")
    engine.give("loaf.", "<|im_end|>", finish="stop")
    await ask(here, CHAT, body(), leave_at=1)
    assert b"Half a loaf." in (await ask(here, CHAT, body())).body
    assert len(here.turns) == 2
    assert (await ask(here, CHAT, body())).status == 400


async def test_dropped_answer_spends_its_tokens(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """What was sampled is spent, and what goes on has what is left; with nothing left it is the answer."""
    here = stage(engine, max_tokens=12, max_turns=1)
    await cut(here, engine, body(), "Half a ")
    half = len(here.turns[0].sampled)
    engine.give("loaf.", "<|im_end|>", finish="stop")
    assert b"Half a loaf." in (await ask(here, CHAT, body())).body
    assert engine.orders[-1].sampling.max_tokens == 12 - half
    spent = stage(engine, max_tokens=half, max_turns=1)
    await cut(spent, engine, body(), "Half a ")
    assert b'"finish_reason":"length"' in (await ask(spent, CHAT, body())).body
    assert b"budget of" in (await ask(spent, CHAT, body())).body


async def test_refusal_after_drop_is_paid_again(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    here = stage(engine, max_turns=1)
    asked = body(guided_regex="(")
    await cut(here, engine, asked)
    engine.fail(EngineRefusal("no grammar"))
    assert b"no grammar" in (await ask(here, CHAT, asked)).body
    assert b"budget" in (await ask(here, CHAT, asked)).body


async def test_drop_beside_waiting_call(autojump_clock: trio.testing.MockClock, engine: HandEngine) -> None:
    """While an answer goes on, the other calls have the room that they had before."""
    here = stage(engine, max_turns=2)
    await cut(here, engine, body(), "Half a ")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, here, CHAT, body())
        await engine.asked.wait()
        assert here.s1.refusal() is None
        assert here.s1.refusal(samples=2) is not None
        engine.give("loaf.", "<|im_end|>", finish="stop")


# ── in another form ───────────────────────────────────────────────────────────

DELIVERY = {
    CHAT: {"stream_options": {"include_usage": True}, "user": "u", "metadata": {"try": "1"}, "store": True},
    MESSAGES: {"metadata": {"user_id": "u"}, "service_tier": "auto"},
    RESPONSES: {"stream_options": {"include_obfuscation": False}, "metadata": {"try": "1"}, "user": "u"},
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_retry_in_other_form_resumes(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, path: str, first: bool
) -> None:
    """A stream that broke is asked for whole and the other way round, with other fields of delivery, in
    another order: the cut answer goes on, at the last turn of the budget.
    """
    here = stage(engine, max_turns=1)
    forms = {}
    for stream in (True, False):
        there = path.replace("generate", "streamGenerate") if stream and "models" in path else path
        said = json.loads(body(path, stream=stream, **(DELIVERY.get(path, {}) if stream else {})))
        forms[stream] = there, json.dumps(said if stream else dict(reversed(said.items()))).encode()
    there, asked = forms[first]
    await cut(here, engine, asked, "Half a ", path=there)
    engine.give("loaf.", "<|im_end|>", finish="stop")
    there, asked = forms[not first]
    again = await ask(here, there, asked, leave_at=1)  # and lost once more: it is given again as before
    assert not again.whole
    there, asked = forms[first]
    again = await ask(here, there, asked)
    assert again.whole
    assert b"loaf." in again.body
    assert again.body.startswith(b"{") is not first
    one, two = here.turns
    assert (two.kind, two.reason, two.parent) == ("continue", "resumed", 0)
    before, after = prompts(engine.orders)
    assert after == before + list(one.sampled)
    assert (here.s1.budget.counters.charged, here.s1.metrics()["replayed"]) == (1, 1)
    # it was delivered: the next one is another turn
    assert "budget of 1 turns" in (await ask(here, there, asked)).body.decode()


async def test_retry_with_lowered_token_limit(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """Claude Code asks for at most 64,000 tokens where it falls back from a stream."""
    here = stage(engine, max_turns=1)
    await cut(here, engine, body(MESSAGES, stream=True, max_tokens=128_000), "Half a ", path=MESSAGES)
    engine.give("loaf.", "<|im_end|>", finish="stop")
    again = await ask(here, MESSAGES, body(MESSAGES, max_tokens=64_000))
    assert b"Half a loaf." in again.body


# ── at the end of the budget of tokens ────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_drop_exactly_at_the_budget(
    autojump_clock: trio.testing.MockClock, engine: HandEngine, path: str, stream: bool
) -> None:
    """The client leaves when the last token of the budget came, and not its end: the answer is whole, and is
    given again.
    """
    here = stage(engine, max_tokens=len(spelled("Half a ")))
    there = path.replace("generate", "streamGenerate") if stream and "models" in path else path
    await cut(here, engine, body(path, stream=stream), "Half a ", path=there)
    again = await ask(here, there, body(path, stream=stream))
    assert again.whole
    assert again.status == 200
    assert b"Half a" in again.body
    said = {CHAT: b'"length"', MESSAGES: b'"max_tokens"', RESPONSES: b'"incomplete"'}
    assert said.get(path, b'"MAX_TOKENS"') in again.body
    (turn,) = here.turns
    assert (turn.state, turn.finish_reason, here.s1.budget.token_room) == ("complete", "length", 0)
    assert (here.s1.metrics()["partial_turns"], len(engine.orders)) == (0, 1)
    assert b"budget of" in (await ask(here, there, body(path, "other", stream=stream))).body


async def test_abort_exactly_at_the_limit(autojump_clock: trio.testing.MockClock, engine: HandEngine) -> None:
    here = stage(engine)
    engine.give("Half a ", finish="abort")
    answer = await ask(here, CHAT, body(max_tokens=len(spelled("Half a "))))
    assert (answer.status, json.loads(answer.body)["choices"][0]["finish_reason"]) == (200, "length")
    assert [(turn.state, turn.finish_reason) for turn in here.turns] == [("complete", "length")]


async def test_budget_spent_by_other_call(autojump_clock: trio.testing.MockClock, engine: HandEngine) -> None:
    """What was sampled is the answer, cut, when a call beside it took the rest of the budget."""
    here = stage(engine, max_tokens=len(spelled("Half a ", "Whole.")))
    await cut(here, engine, body(MESSAGES), "Half a ", path=MESSAGES)
    engine.give("Whole.", finish="length")
    assert (await ask(here, MESSAGES, body(MESSAGES, "other"))).status == 200
    again = json.loads((await ask(here, MESSAGES, body(MESSAGES))).body)
    assert (again["content"][0]["text"], again["stop_reason"]) == ("Half a ", "max_tokens")
    assert (len(here.turns), len(engine.orders)) == (2, 2)
    assert "budget of" in (await ask(here, MESSAGES, body(MESSAGES))).body.decode()


async def test_restored_session_keeps_spent_budget(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    """What was asked again, gone on with or from the beginning, is one turn of it, as it was when it ran."""
    here = stage(engine)
    held = {"response_format": {"type": "json_object"}}  # a cut constraint can not go on
    for text, said in (("a", {}), ("b", held), ("c", {})):
        for _ in range(2):
            await cut(here, engine, body(text=text, **said), "{")
        engine.channel = trio.open_memory_channel[Any](100)
        engine.fail(EngineError("the host died"))
        assert (await ask(here, CHAT, body(text=text, **said))).status == 500
        for _ in range(2):  # the second is another turn: the first was delivered
            engine.channel = trio.open_memory_channel[Any](100)
            engine.give("}", "<|im_end|>", finish="stop")
            assert (await ask(here, CHAT, body(text=text, **said))).status == 200
    ran, restored = here.s1.budget.counters, new_session("again")
    assert ran.charged == 6
    restored.begin_with(here.turns, here.s1.lineages, inherited=0)
    assert (restored.budget.counters.charged, restored.budget.counters.turns) == (ran.charged, ran.turns)
