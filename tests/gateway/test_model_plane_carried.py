"""Sessions that carry, through the model plane: what a harness does to its conversation leaves no position of
a row without its experts.
"""

import json
from pathlib import Path
from typing import Any

import trio
from fakes_engine import ScriptedEngine, routes
from plane_kit import CONTEXT, AsgiClient, Stage, answers, stage
from tokens_kit import model

from polarnode.core.task import CarrySpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.endpoint import ModelPlane
from polarnode.merge.ledger import chain
from polarnode.merge.token_extras import CUT, SIZE_LIMIT_REASON, SessionExtras, note, row_extras
from polarnode.node.config import NodeConfig
from polarnode.node.settings import no_experts_reason

LAYERS = 2
CHAT = "/v1/chat/completions"
BOTH = CarrySpec(top_logprobs=3, routed_experts=True)


def carrying(engine: ScriptedEngine, spec: CarrySpec = BOTH, *, limit: int = 1 << 20) -> Stage:
    made = stage(engine)
    made.s1.carrier = SessionExtras(spec, limit=limit)
    return made


def mixture(*texts: str, **said: Any) -> ScriptedEngine:
    return ScriptedEngine(
        **{
            "reply": answers(*texts),
            "vocab_size": model().tokenizer.vocab_size,
            "context_length": CONTEXT,
            "layers": LAYERS,
            **said,
        }
    )


async def talk(made: Stage, *texts: str, asgi: AsgiClient | None = None) -> str:
    """A chat request: the user's texts with the answers they got between them, where they are told."""
    said = [
        {"role": "user" if place % 2 == 0 else "assistant", "content": text}
        for place, text in enumerate(texts)
    ]
    asgi = asgi or AsgiClient()
    await asgi.request(made.app, CHAT, json.dumps({"model": "m", "messages": said}).encode())
    answer: str = json.loads(asgi.body)["choices"][0]["message"]["content"] if asgi.sent else ""
    return answer


def line(turns: list[Turn], last: int) -> list[Turn]:
    return chain({turn.index: turn for turn in turns}, last)


def check_whole(turns: list[Turn], last: int) -> None:
    """The row that ends with a turn has all that was asked for."""
    row = line(turns, last)
    end = row[-1].prompt_length + len(row[-1].sampled)
    found = row_extras(row, {turn.index for turn in row})
    assert found.missing_extras == ()
    assert found.routed == routes(0, end - 1, LAYERS)
    assert found.top is not None
    assert (found.top.k, found.top.rows) == (3, sum(len(turn.sampled) for turn in row))
    assert list(found.top.ids[::3]) == [token for turn in row for token in turn.sampled]


async def test_conversation_asks_only_new_experts() -> None:
    """A conversation asks only for the experts of new positions."""
    engine = mixture("one", "two two", "three")
    made = carrying(engine)
    first = await talk(made, "hi")
    second = await talk(made, "hi", first, "go on")
    await talk(made, "hi", first, "go on", second, "more")
    ends = [turn.prompt_length + len(turn.sampled) for turn in made.turns]
    assert [order.routed_from for order in engine.orders] == [0, ends[0] - 1, ends[1] - 1]
    assert [order.top_logprobs for order in engine.orders] == [3, 3, 3]
    check_whole(made.turns, 2)
    stored = sum(len(turn.routed.data) for turn in made.turns if turn.routed is not None)
    assert stored == (ends[2] - 1) * LAYERS  # each position once
    assert made.s1.metrics()["carried_bytes"] == stored + sum(
        8 * 3 * len(turn.sampled) for turn in made.turns
    )
    assert made.s1.metrics()["uncarried_turns"] == 0


async def test_rewrite_restarts_branch_starts_at_fork() -> None:
    """A rewritten history begins anew, and a branch begins at its fork."""
    engine = mixture("one", "two", "three", "four")
    made = carrying(engine)
    first = await talk(made, "hi")
    await talk(made, "hi", first, "go on")
    await talk(made, "hi", first, "or not")
    await talk(made, "hello", first, "go on")
    fork = made.turns[0].prompt_length + len(made.turns[0].sampled) - 1
    assert [order.routed_from for order in engine.orders] == [0, fork, fork, 0]
    for last in (1, 2, 3):
        check_whole(made.turns, last)


async def test_next_turn_fills_cut_experts(autojump_clock: trio.abc.Clock) -> None:
    """The next turn fetches the experts that a cut turn lacks."""
    engine = mixture("one and a long answer that is cut", "the end", "after it", hold=trio.Event())
    made, asgi = carrying(engine), AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk_streamed, made.plane, asgi)
        await trio.sleep(1)
        asgi.leave()
    cut = made.turns[0]
    assert (cut.state, cut.routed) == ("partial", None)
    assert cut.notes[-1] == note("routed_experts", CUT)
    assert row_extras([cut], {0}).missing_extras == (f"routed_experts: turn 0 has none: {CUT}",)
    assert engine.hold is not None
    engine.hold.set()
    assert cut.answer is not None
    await talk(made, "hi", cut.answer.text, "go on")
    assert made.turns[1].parent == 0
    assert engine.orders[1].routed_from == 0
    check_whole(made.turns, 1)
    assert made.s1.metrics()["uncarried_turns"] == 1


async def talk_streamed(plane: ModelPlane, asgi: AsgiClient) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    await asgi.request(plane.app_for("s1"), CHAT, json.dumps(body).encode())


async def test_session_over_limit_notes_missing_extras() -> None:
    """A session over its limit goes on, and its notes name the missing extras."""
    engine = mixture("one", "two", "three")
    made = carrying(engine, limit=400)
    first = await talk(made, "hi")
    spent = made.s1.metrics()["carried_bytes"]
    assert isinstance(spent, int)
    assert 0 < spent <= 400
    made.s1.carrier.limit = spent + 40  # room for a beginning of a turn: it is asked for, and does not fit
    second = await talk(made, "hi", first, "go on")
    assert engine.orders[1].routed_from is not None
    assert (made.turns[1].top, made.turns[1].routed) == (None, None)
    assert made.turns[1].notes[-2:] == (
        note("top_logprobs", SIZE_LIMIT_REASON),
        note("routed_experts", SIZE_LIMIT_REASON),
    )
    made.s1.carrier.limit = spent
    await talk(made, "hi", first, "go on", second, "more")
    assert (engine.orders[2].routed_from, engine.orders[2].top_logprobs) == (None, 0)
    assert made.turns[2].notes[-2:] == made.turns[1].notes[-2:]
    assert (made.s1.metrics()["carried_bytes"], made.s1.metrics()["uncarried_turns"]) == (spent, 2)
    assert row_extras(line(made.turns, 2), {0, 1, 2}).missing_extras == (
        f"top_logprobs: turn 2 has none: {SIZE_LIMIT_REASON}",
        f"routed_experts: turn 2 has none: {SIZE_LIMIT_REASON}",
    )


async def test_session_without_extras_asks_none() -> None:
    engine = mixture("one")
    made = carrying(engine, CarrySpec())
    await talk(made, "hi")
    assert (engine.orders[0].routed_from, engine.orders[0].top_logprobs) == (None, 0)
    assert (made.turns[0].top, made.turns[0].routed, made.turns[0].notes) == (None, None, ())
    assert "carried_bytes" not in made.s1.metrics()


def test_node_says_why_experts_missing(tmp_path: Path) -> None:
    simulated = no_experts_reason(NodeConfig(engine="simulated", gpus=(0,)), model())
    assert (
        simulated
        == "the simulated engine's answers are random, and no experts read them; leave it out, or start a"
        " real engine"
    )
    assert (
        no_experts_reason(NodeConfig(cpu=True), model())
        == "the model tiny is dense: it has no experts; leave it out"
    )
    (tmp_path / "config.json").write_text('{"num_experts": 128}')
    assert no_experts_reason(NodeConfig(cpu=True, model=str(tmp_path)), model()).endswith(
        "start the node with --routed-experts"
    )
