"""A fork by replay, through the whole plane: it is answered from its parent's record while it asks what the
parent asked, and by the engine from then on.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, AsgiClient, Stage, answers, new_session, stage
from tokens_kit import model

from polarnode.core.arrays import TopLogprobs, ids
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.fork_inheritance import recorded_chunk
from polarnode.merge.builders import build
from polarnode.merge.invariants import check

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
LOOK = {"name": "look", "description": "Read a file."}
SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    CHAT: {"tools": [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]},
    MESSAGES: {"max_tokens": 99, "tools": [{**LOOK, "input_schema": SCHEMA}]},
}
ROUNDS = 4
Ended = list[tuple[int, str | None]]


def call(path: str) -> str:
    return f'Let me see.|<tool_call>|\n{{"name": "look", "arguments": {{"path": "{path}"}}}}\n|</tool_call>'


def scripted(*texts: str, **more: Any) -> ScriptedEngine:
    size = model().tokenizer.vocab_size
    return ScriptedEngine(reply=answers(*texts), vocab_size=size, context_length=CONTEXT, **more)


def followed(path: str, answer: Any, result: str) -> list[Any]:
    """What a harness appends after an answer with a call."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": made["id"], "content": result} for made in message["tool_calls"]
        ]
        return [message, *results]
    results = [
        {"type": "tool_result", "tool_use_id": part["id"], "content": result}
        for part in answer["content"]
        if part["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]


async def run(here: Stage, session: str, path: str, results: Sequence[str]) -> list[Any]:
    """A harness with a pure tool: one call after another, with these results. Returns the answers."""
    history: list[Any] = [{"role": "user", "content": "Look around."}]
    found: list[Any] = []
    for result in results:
        asgi, body = AsgiClient(), {"model": "m", "messages": history, **TOOLS[path]}
        await asgi.request(here.plane.app_for(session), path, json.dumps(body).encode(), key=f"key-{session}")
        assert asgi.status == 200, asgi.body
        found.append(json.loads(asgi.body))
        history += followed(path, found[-1], result)
    return found


def forked(
    here: Stage, parent: Sequence[Turn], turn: int, name: str = "s2", **budgets: Any
) -> tuple[list[Turn], Ended]:
    """A session that replays `parent`; its turns as its journal gets them, and how the replay ended."""
    turns: list[Turn] = []
    ended: Ended = []
    session = new_session(name, turns=turns, **budgets)
    recorded = [each for each in parent if each.index <= turn]
    references = session.lineages.references
    session.inherited.replay(recorded, turn, references, lambda *end: ended.append(end))
    here.plane.sessions.add(session)
    return turns, ended


def same(one: Turn, other: Turn) -> bool:
    """Whether a turn was given again, to the token."""
    names = ("prompt_delta", "prompt_length", "sampled", "logprobs", "version_spans", "used", "parent", "message_key", "before_key", "answer")  # fmt: skip
    return all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("turn", [0, 1, 3])
async def test_fork_inherits_answers_until_its_turn(path: str, turn: int) -> None:
    """A fork is given its parent's answers up to its turn."""
    engine = scripted(*(call(f"{number}.txt") for number in range(ROUNDS)), call("anew.txt"))
    here, results = stage(engine), [f"result {number}" for number in range(ROUNDS)]
    answered = await run(here, "s1", path, results)
    turns, ended = forked(here, here.turns, turn)
    engine.weight_version = "new"
    again = await run(here, "s2", path, results[: turn + 1])
    assert len(engine.orders) == ROUNDS + 1  # the engine was asked for turn `turn` alone
    assert ended == [(turn, None)]
    assert [same(one, other) for one, other in zip(turns, here.turns, strict=False)] == [True] * turn + [
        False
    ]
    assert [each.session_id for each in turns] == ["s2"] * (turn + 1)
    assert turns[turn].prompt_length == here.turns[turn].prompt_length
    assert [span.version for span in turns[turn].version_spans] == ["new"]
    # the ids of its calls are the parent's: harnesses write them down
    ids_of = [json.dumps(each.get("choices", each.get("content"))) for each in again]
    assert ids_of[:turn] == [json.dumps(each.get("choices", each.get("content"))) for each in answered[:turn]]
    built = build(BuilderSpec(), turns, inherited=turn)
    counts = check(turns, built, inherited=turn)
    assert counts.trainable == counts.sampled == len(turns[turn].sampled)


async def test_fork_of_fork_inherits_from_both() -> None:
    engine = scripted(*(call(f"{number}.txt") for number in range(9)))
    here = stage(engine)
    await run(here, "s1", CHAT, "abcd")
    child, _ = forked(here, here.turns, 1)
    await run(here, "s2", CHAT, "axy")
    grandchild, ended = forked(here, child, 2, "s3")
    await run(here, "s3", CHAT, "axz")
    assert ended == [(2, None)]
    assert same(grandchild[0], here.turns[0])
    assert same(grandchild[1], child[1])
    assert not same(grandchild[1], here.turns[1])


async def test_first_difference_ends_inheritance() -> None:
    """From the first difference on, the engine samples every answer."""
    engine = scripted(*(call(f"{number}.txt") for number in range(9)))
    here = stage(engine)
    await run(here, "s1", CHAT, ["one", "made at 10:31:07", "three", "four"])
    turns, ended = forked(here, here.turns, 3)
    await run(here, "s2", CHAT, ["one", "made at 10:44:59", "three", "four"])
    assert ended == [
        (2, "turn 2: message 4 (tool) has 'made at 10:44:59', and 'made at 10:31:07' in the record")
    ]
    assert [same(*pair) for pair in zip(turns, here.turns, strict=True)] == [True, True, False, False]


async def test_difference_just_before_turn_is_reported() -> None:
    engine = scripted(*(call(f"{number}.txt") for number in range(9)))
    here = stage(engine)
    await run(here, "s1", CHAT, ["one", "the output", "three"])
    turns, ended = forked(here, here.turns, 2)
    await run(here, "s2", CHAT, ["one", "(empty)", "three"])
    assert ended == [(2, "turn 2: message 4 (tool) has '(empty)', and 'the output' in the record")]
    assert [same(*pair) for pair in zip(turns, here.turns, strict=True)] == [True, True, False]


async def test_missing_parent_turn_is_not_compared() -> None:
    """A turn that the parent has not made yet is not compared."""
    here = stage(scripted(*(call(f"{number}.txt") for number in range(9))))
    await run(here, "s1", CHAT, "a")
    _, ended = forked(here, here.turns, 1)
    await run(here, "s2", CHAT, "zy")
    assert ended == [(1, None)]


async def test_other_tools_end_inheritance() -> None:
    here = stage(scripted(call("a.txt")))
    await run(here, "s1", CHAT, "ab")
    _, ended = forked(here, here.turns, 1)
    asgi = AsgiClient()
    body = {"model": "m", "messages": [{"role": "user", "content": "Look around."}]}
    await asgi.request(here.plane.app_for("s2"), CHAT, json.dumps(body).encode(), key="key-s2")
    assert ended == [(0, "turn 0: its tools or its thinking flag are others than in the record")]


async def test_other_prompt_tokens_are_difference() -> None:
    """Another prompt for the same messages is a difference."""
    here = stage(scripted(call("a.txt")))
    await run(here, "s1", CHAT, "ab")
    first = here.turns[0]
    foreign = evolve(first, prompt_delta=ids([*first.prompt_delta[:-1], first.prompt_delta[-1] + 1]))
    _, ended = forked(here, [foreign], 1)
    await run(here, "s2", CHAT, "a")
    assert ended == [
        (0, "turn 0: the messages are the same, and the prompt has other tokens than in the record")
    ]


async def test_cut_answers_are_not_inherited() -> None:
    here = stage(scripted(call("a.txt")))
    await run(here, "s1", CHAT, "ab")
    _, ended = forked(here, [evolve(here.turns[0], state="partial")], 2)
    await run(here, "s2", CHAT, "a")
    assert ended == [(0, "turn 0 of the record has no whole answer: it is partial")]


@pytest.mark.parametrize("number", [2, 3])
async def test_parallel_choices_are_sampled(number: int) -> None:
    here = stage(scripted(call("a.txt")))
    await run(here, "s1", CHAT, "ab")
    turns, ended = forked(here, here.turns, 2)
    asgi, body = (
        AsgiClient(),
        {"model": "m", "messages": [{"role": "user", "content": "Look around."}], **TOOLS[CHAT]},
    )
    said = json.dumps({**body, "n": number}).encode()
    await asgi.request(here.plane.app_for("s2"), CHAT, said, key="key-s2")
    assert ended == [(0, "turn 0 was asked for while another call was in progress")]
    assert len(turns) == number


async def test_budgets_count_inherited_figures_do_not() -> None:
    """Budgets count what is inherited, and figures do not."""
    engine = scripted(*(call(f"{number}.txt") for number in range(9)))
    here = stage(engine)
    await run(here, "s1", CHAT, "abc")
    turns, _ = forked(here, here.turns, 2, max_turns=3)
    await run(here, "s2", CHAT, "abc")
    session = here.plane.sessions.by_key("key-s2")
    assert session is not None
    own = len(turns[2].sampled)
    assert (session.budget.counters.turns, session.budget.counters.sampled_tokens) == (3, own)
    assert session.budget.counters.inherited_tokens == sum(len(turn.sampled) for turn in here.turns[:2])
    assert session.budget.tally.sampled_tokens.total() == own
    fault = session.refusal()
    assert fault is not None
    assert "3 turns" in fault.message
    assert new_session("s9", max_tokens=10).budget.token_room == 10


async def test_streamed_answer_is_inherited() -> None:
    here = stage(scripted("Done and done."))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    for name in ("s1", "s2"):
        asgi = AsgiClient()
        await asgi.request(here.plane.app_for(name), CHAT, json.dumps(body).encode(), key=f"key-{name}")
        assert asgi.whole
        assert b"Done and done." in asgi.body
        if name == "s1":
            turns, _ = forked(here, here.turns, 1)
    assert same(turns[0], here.turns[0])


async def test_recorded_answer_becomes_a_chunk() -> None:
    """A recorded answer becomes a chunk with the extras that the call asks for."""
    engine = scripted("One.")
    here = stage(engine)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    await AsgiClient().request(here.app, CHAT, json.dumps(body).encode())
    [turn], [order] = here.turns, engine.orders
    top = TopLogprobs(k=1, ids=turn.sampled, logprobs=turn.logprobs)
    given = recorded_chunk(evolve(turn, finish_reason="length", top=top), evolve(order, top_logprobs=1))
    assert (given.ids, given.logprobs, given.version_spans) == (
        turn.sampled,
        turn.logprobs,
        turn.version_spans,
    )
    assert (given.finish_reason, given.top_logprobs) == ("length", top)
    more = recorded_chunk(evolve(turn, finish_reason="tool_calls", top=top), evolve(order, top_logprobs=2))
    assert (more.finish_reason, more.top_logprobs) == ("stop", None)
