"""A last message of the assistant: the answer goes on with it in one turn, or the request is refused."""

import json
from threading import current_thread, main_thread
from typing import Any

import pytest
import tokens_kit as kit
import trio.testing
from attrs import evolve
from family_fixtures import family_folder
from plane_kit import HandEngine, spelled, stage
from test_model_plane_retries import CHAT, MESSAGES, ask, cut

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message, ToolCall
from polarnode.gateway.call import MAX_INLINE_CHARS, Model
from polarnode.merge.builders import prefix_merging

USER = {"role": "user", "content": "Count."}
PREFILL = {"role": "assistant", "content": "1, 2,"}


def body(path: str, *messages: dict[str, Any], **said: Any) -> bytes:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": messages} | said
    if path == CHAT and messages[-1]["role"] == "assistant":
        asked["continue_final_message"] = True
    return json.dumps(asked).encode()


def end(*messages: dict[str, Any]) -> list[int]:
    """The ids of these texts without a boundary between them."""
    return spelled(*(message["content"] for message in messages))


@pytest.fixture
def engine() -> HandEngine:
    return HandEngine()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_prefill_is_one_row(engine: HandEngine, path: str, stream: bool) -> None:
    """The client shows the prefill and the answer as one message, and its next request extends that turn."""
    here = stage(engine)
    engine.give(" 3", "<|im_end|>", finish="stop")
    answer = await ask(here, path, body(path, USER, PREFILL, stream=stream))
    assert answer.status == 200
    assert b" 3" in answer.body
    assert b"1, 2" not in answer.body
    assert list(engine.orders[0].prompt)[-len(end(PREFILL)) :] == end(PREFILL)
    engine.give("4", "<|im_end|>", finish="stop")
    joined = {"role": "assistant", "content": "1, 2, 3"}
    assert (await ask(here, path, body(path, USER, joined, USER))).status == 200
    first, second = here.turns
    assert (first.prefill, first.kind, second.parent, second.kind) == ("1, 2,", "root", 0, "extend")
    assert first.notes[-1].startswith("prefilled:")
    (row,) = prefix_merging(here.turns, {}).traces
    assert sum(row.loss_mask) == len(first.sampled) + len(second.sampled)


async def test_prefill_after_own_turn(engine: HandEngine) -> None:
    here = stage(engine)
    engine.give("One.", "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, body(MESSAGES, USER))
    one = {"role": "assistant", "content": "One."}
    engine.give(" 3", "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, body(MESSAGES, USER, one, USER, PREFILL))
    assert (here.turns[1].parent, here.turns[1].kind) == (0, "extend")
    prompt = list(engine.orders[1].prompt)
    assert prompt[: here.turns[0].end] == [*engine.orders[0].prompt, *here.turns[0].sampled]
    assert prompt[-len(end(PREFILL)) :] == end(PREFILL)


async def test_ended_answer_as_prefill(engine: HandEngine) -> None:
    """An answer of ours that had ended is text to go on with: its turn is neither closed nor opened again."""
    here = stage(engine)
    engine.give("1, 2,", "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, body(MESSAGES, USER))
    engine.give(" 3", "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, body(MESSAGES, USER, PREFILL))
    prompts = [list(order.prompt) for order in engine.orders]
    opened = prompts[1][len(prompts[0]) :]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert opened[-len(end(PREFILL)) :] == end(PREFILL)
    assert spelled("<|im_end|>")[0] not in opened


async def test_cut_answer_resumes_by_ids(engine: HandEngine) -> None:
    here = stage(engine)
    engine.give("1, 2,", finish="length")
    await ask(here, MESSAGES, body(MESSAGES, USER))
    engine.give(" 3", "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, body(MESSAGES, USER, PREFILL))
    first, second = here.turns
    assert (second.parent, second.kind, second.prefill) == (0, "continue", "")
    assert list(engine.orders[1].prompt) == [*engine.orders[0].prompt, *first.sampled]


async def test_dropped_prefill_answer_resumes(
    autojump_clock: trio.testing.MockClock, engine: HandEngine
) -> None:
    here = stage(engine, max_turns=2)
    asked = body(MESSAGES, USER, PREFILL)
    await cut(here, engine, asked, " 3,", path=MESSAGES)
    engine.give(" 4", "<|im_end|>", finish="stop")
    assert b" 3, 4" in (await ask(here, MESSAGES, asked)).body
    assert list(engine.orders[1].prompt) == [*engine.orders[0].prompt, *here.turns[0].sampled]
    engine.give("5", "<|im_end|>", finish="stop")
    whole = {"role": "assistant", "content": "1, 2, 3, 4"}
    await ask(here, MESSAGES, body(MESSAGES, USER, whole, USER))
    assert here.turns[2].parent == 1


async def test_token_count_includes_prefill(engine: HandEngine) -> None:
    here = stage(engine)
    counted = await ask(here, f"{MESSAGES}/count_tokens", body(MESSAGES, USER, PREFILL))
    engine.give(" 3", "<|im_end|>", finish="stop")
    await ask(here, MESSAGES, body(MESSAGES, USER, PREFILL))
    assert json.loads(counted.body)["input_tokens"] == len(engine.orders[0].prompt)


async def test_empty_prefill_is_ignored(engine: HandEngine) -> None:
    here = stage(engine)
    for messages in ((USER,), (USER, {"role": "assistant", "content": ""})):
        engine.give("One.", "<|im_end|>", finish="stop")
        await ask(here, MESSAGES, body(MESSAGES, *messages))
    assert engine.orders[0].prompt == engine.orders[1].prompt


async def test_empty_prefill_after_results() -> None:
    """The results are shown under the names of the calls that they answer, as without the empty message."""
    loaded = kit.model(family_folder("kimi_k2"))
    prompts = Model(
        engine=HandEngine(),
        template=loaded.template,
        tokenizer=loaded.tokenizer,
        family=loaded.family,
        context_length=4096,
        id="tiny",
        now=lambda: 0.0,
    )
    call = ToolCall(id="c", name="look", arguments="{}")
    result = Message(role="tool", text="R", call_id="c")
    asked = Conversation(
        messages=(Message(role="user", text="U"), Message(role="assistant", calls=(call,)), result)
    )
    opened = evolve(asked, messages=(*asked.messages, Message(role="assistant")), prefilled=True)
    sampled = ids([loaded.template.stop_ids[0]])
    deltas = [
        (await prompts.prompt(each, (result,), sampled, threads=trio.CapacityLimiter(1))).delta
        for each in (asked, opened)
    ]
    assert deltas[0] == deltas[1]


async def test_long_prompt_rendered_in_thread(engine: HandEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefill is rendered, and long arguments are looked at for notes, beside the event loop."""
    here = stage(engine, context=100_000)
    beside: list[bool] = []

    def noted(*args: Any) -> tuple[str, ...]:
        beside.append(current_thread() is not main_thread())
        return ()

    monkeypatch.setattr("polarnode.tokens.template.argument_notes", noted)
    said = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": "b" * MAX_INLINE_CHARS}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
    for messages in (
        (USER, {"role": "assistant", "content": "1, 2," * MAX_INLINE_CHARS}),
        (USER, {"role": "assistant", "content": [said]}, {"role": "user", "content": [result]}),
    ):
        engine.give("3", "<|im_end|>", finish="stop")
        assert (await ask(here, MESSAGES, body(MESSAGES, *messages))).status == 200
    assert beside == [True, True]


CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("path", "messages", "said", "why"),
    [
        (MESSAGES, (USER, {"role": "assistant", "content": [CALL]}), {}, "calls a tool"),
        (
            MESSAGES,
            (
                USER,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]},
            ),
            {},
            "has a thought",
        ),
        (
            MESSAGES,
            (USER, PREFILL),
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "while thinking is on",
        ),
        (CHAT, (USER,), {"continue_final_message": True}, "continue_final_message needs"),
    ],
)
async def test_unsupported_prefill_is_refused(
    engine: HandEngine, path: str, messages: tuple[dict[str, Any], ...], said: dict[str, Any], why: str
) -> None:
    here = stage(engine)
    answer = await ask(here, path, body(path, *messages, **said))
    assert answer.status == 400
    assert why in answer.body.decode()
    assert engine.orders == []
