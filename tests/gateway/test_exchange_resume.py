"""An answer that goes on where its client left: the machine, the lineages, the laws and the journal of such
turns.
"""

from typing import Any

import pytest
from attrs import evolve
from exchange_kit import CALL, CALLED, CHAT, END, HI, LINES, ExchangeScene, chunk, rendered, sampled, says
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.arrays import ids
from polarnode.core.codec.packing import pack_turn, unpack_turn
from polarnode.core.conversation import Conversation, Message
from polarnode.core.errors import EngineError
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.exchange import (
    ClientLeft,
    CutCall,
    EndStream,
    EngineFailed,
    KeepResponse,
    RecordTurn,
    Send,
    StartGeneration,
)
from polarnode.gateway.sample import PromptRendered
from polarnode.merge.attach import Plan
from polarnode.merge.builders import build, prompt_ids
from polarnode.merge.invariants import check
from polarnode.merge.lineage import Lineages
from polarnode.providers.contract import Reply

GO = [CALL, *b'{"name": "go", "arguments": {}}', CALLED]
BUILDERS = [BuilderSpec(name="prefix_merging"), BuilderSpec(name="per_request")]


def cut(scene: ExchangeScene, *pieces: Any, at: float = 12.0) -> Turn:
    """The scene's call, whose client leaves after these pieces."""
    scene.exchange.receive(prompted(scene))
    for piece in pieces:
        scene.exchange.receive(piece)
    return scene.turn(scene.exchange.receive(ClientLeft(at=at)))


def prompted(scene: ExchangeScene) -> PromptRendered:
    """The prompt of the scene's call, as the plane renders it."""
    plan = scene.plans[0]
    if plan.parent is None:
        return rendered()
    new = ids([ord("\n")] * len(plan.new))
    return PromptRendered(prompt=scene.lineages.history(plan) + new, delta=new)


def again(scene: ExchangeScene) -> Plan:
    """The same request once more, as the plane plans it."""
    scene.begin(CutCall(scene.lineages.turns[-1].index))
    return scene.plan


# ── the machine ───────────────────────────────────────────────────────────────


def test_resumed_answer_whole_turn_new() -> None:
    """The answer shown is the whole one, and the turn holds what is new."""
    scene = ExchangeScene(LINES, max_tokens=20)
    first = cut(scene, chunk("Hel"))
    plan = again(scene)
    assert (plan.kind, plan.reason, plan.parent, plan.lineage, plan.new) == (
        "continue",
        "resumed",
        0,
        first.lineage,
        (),
    )
    assert (plan.before_key, plan.request_key) == (first.before_key, first.request_key)
    generate = scene.play((prompted(scene), [StartGeneration]))[-1]
    assert isinstance(generate, StartGeneration)
    assert bytes(list(generate.order.prompt)) == b"hiHel"
    assert generate.order.sampling.max_tokens == 17
    commands = scene.play(
        (chunk("lo", cached=5), [says("start 2 2\n0: Hello\n")]),
        (
            chunk("!", "stop", end=True, start=2),
            [RecordTurn, KeepResponse, says("0: !\nend stop 2+7\n"), EndStream],
        ),
    )
    turn = scene.turn(commands)
    assert bytes(list(turn.sampled[:-1])) == b"lo!"
    assert (list(turn.prompt_delta), turn.prompt_length, turn.close_length) == ([], 5, 0)
    assert turn.answer is not None
    assert turn.answer.text == "Hello!"
    assert turn.message_key == plan.after(turn.answer)
    assert (turn.usage.prompt_tokens, turn.usage.completion_tokens, turn.used.max_tokens) == (2, 7, 17)
    assert turn.notes[0].startswith("resumed: turn 0's client left")


def test_call_cut_midway_is_read_whole() -> None:
    """A call cut in the middle is read whole, under the new turn's id."""
    scene = ExchangeScene(LINES, stream=False)
    cut(scene, sampled(GO[:10]))
    again(scene)
    commands = scene.play(
        (prompted(scene), [StartGeneration]),
        (sampled([*GO[10:], END], "stop"), [RecordTurn, KeepResponse, Reply]),
    )
    turn = scene.turn(commands)
    assert turn.answer is not None
    assert [(call.id, call.name) for call in turn.answer.calls] == [("call_1_0", "go")]
    assert turn.answer.malformed_calls == 0


def test_half_sampled_stop_string_is_found() -> None:
    scene = ExchangeScene(LINES, stop=("STOP",), stream=False)
    cut(scene, chunk("one ST"))
    again(scene)
    commands = scene.play(
        (prompted(scene), [StartGeneration]),
        (chunk("OP!"), [RecordTurn, KeepResponse, Reply]),
    )
    turn = scene.turn(commands)
    assert turn.answer is not None
    assert (turn.answer.text, turn.finish_reason, bytes(list(turn.sampled))) == ("one ", "stop_string", b"OP")


def test_repeated_disconnects_resume_each_time() -> None:
    """A client that leaves again and again resumes each time."""
    scene = ExchangeScene(LINES)
    cut(scene, chunk("a"))
    for step, piece in enumerate("bcd", start=1):
        assert again(scene).parent == step - 1
        cut(scene, chunk(piece))
    again(scene)
    scene.play((prompted(scene), [StartGeneration]))
    turn = scene.turn(
        scene.play((chunk("e", "stop", end=True), [RecordTurn, KeepResponse, says("0: abcde\n"), EndStream]))
    )
    assert turn.answer is not None
    assert turn.answer.text == "abcde"
    assert {each.lineage for each in scene.lineages.turns} == {0}


def test_failed_resume_keeps_first_turn() -> None:
    """An engine that fails or a client that leaves at once leaves the first turn to go on from."""
    scene = ExchangeScene(LINES)
    first = cut(scene, chunk("a"))
    again(scene)
    scene.play((prompted(scene), [StartGeneration]))
    failed = scene.turn(scene.play((EngineFailed(error=EngineError("gone"), at=13.0), [RecordTurn, Reply])))
    assert (failed.state, failed.answer) == ("failed", None)
    for _ in range(2):
        scene.begin(CutCall(first.index))
        assert (scene.plan.reason, scene.plan.parent) == ("resumed", first.index)
        assert scene.plan.lineage == first.lineage
        empty = cut(scene)
        assert (empty.state, empty.answer, len(empty.sampled)) == ("partial", None, 0)


# ── the lineages ──────────────────────────────────────────────────────────────


def test_unresumable_call_is_sampled_anew() -> None:
    empty = ExchangeScene()
    assert empty.lineages.resume(cut(empty).index, total=1) is None
    spent = ExchangeScene(max_tokens=3)
    assert spent.lineages.resume(cut(spent, chunk("abc")).index, total=1) is None
    whole = ExchangeScene()
    whole.to_generation()
    turn = whole.turn(whole.play((chunk("a", "stop", end=True), [RecordTurn, KeepResponse, Send, EndStream])))
    assert whole.lineages.resume(turn.index, total=1) is None


def test_turn_with_successor_is_not_resumed() -> None:
    """A turn that another turn extends or continues is not resumed."""
    scene = ExchangeScene()
    first = cut(scene, chunk("a"))
    more = Conversation(
        messages=(*HI.messages, Message(role="assistant", text="a"), Message(role="user", text="go on"))
    )
    plan = scene.lineages.plan(more)
    assert plan.parent == first.index
    assert scene.lineages.resume(first.index, total=1) is None
    scene.lineages.abandon_plan(plan)
    assert scene.lineages.resume(first.index, total=1) is not None
    assert scene.lineages.resume(first.index, total=1) is None  # now it is under way


def test_next_request_extends_resumed_turn() -> None:
    scene = ExchangeScene(LINES)
    cut(scene, chunk("Hel"))
    again(scene)
    scene.play((prompted(scene), [StartGeneration]))
    turn = scene.turn(
        scene.play((chunk("lo", "stop", end=True), [RecordTurn, KeepResponse, Send, EndStream]))
    )
    more = Conversation(
        messages=(*HI.messages, Message(role="assistant", text="Hello"), Message(role="user", text="go on"))
    )
    plan = scene.lineages.plan(more)
    assert (plan.parent, plan.kind, plan.matched, plan.lineage, plan.notes) == (
        turn.index,
        "extend",
        2,
        0,
        (),
    )
    assert bytes(list(scene.lineages.history(plan))[:-1]) == b"hiHello"


@pytest.mark.parametrize("key", ["body", "other"])
def test_body_repeated_after_answer_is_new(key: str) -> None:
    """A body that comes again after its whole answer is a new sample."""
    scene = ExchangeScene(LINES)
    cut(scene, chunk("Hel"))
    again(scene)
    scene.play((prompted(scene), [StartGeneration]))
    scene.turn(scene.play((chunk("lo", "stop", end=True), [RecordTurn, KeepResponse, Send, EndStream])))
    plan = scene.lineages.plan(HI, request_key=key)
    assert (plan.kind, plan.parent) == ("retry" if key == "body" else "root", None)
    assert plan.lineage == 1  # what was resumed keeps its own line


def test_looking_up_history_reserves_nothing() -> None:
    scene = ExchangeScene()
    scene.to_generation()
    scene.turn(scene.play((chunk("yes", "stop", end=True), [RecordTurn, KeepResponse, Send, EndStream])))
    more = Conversation(
        messages=(*HI.messages, Message(role="assistant", text="yes"), Message(role="user", text="go on"))
    )
    for _ in range(2):
        history, new, _ = scene.lineages.look(more)
        assert history is not None
        assert (bytes(list(history)[:-1]), [message.text for message in new]) == (b"hiyes", ["go on"])
    assert scene.lineages.look(evolve(HI, thinking=True)) == (None, HI.messages, "")
    assert scene.lineages.plan(more).index == 1


# ── the laws, whatever happens ────────────────────────────────────────────────

STEPS = st.lists(
    st.tuples(st.sampled_from(("leave", "end", "fail", "abort")), st.integers(0, 4), st.booleans()),
    min_size=1,
    max_size=8,
)


def run(steps: list[tuple[str, int, bool]]) -> Lineages:
    """Calls of one body one after the other, each ending as its step says after some tokens; some go on with
    what was said, as a harness does.
    """
    scene = ExchangeScene(LINES, stream=False, context_length=1000)
    said, texts, word = HI, [], 0
    for how, count, follows in steps:
        scene.exchange.receive(prompted(scene))
        text = "".join(chr(ord("a") + (word + step) % 26) for step in range(count))
        word += count
        if count:
            scene.exchange.receive(chunk(text))
        last = {
            "leave": ClientLeft(at=20.0),
            "end": sampled([END], "stop", start=count),
            "fail": EngineFailed(error=EngineError("gone"), at=20.0),
            "abort": sampled([], "abort", start=count),
        }[how]
        turn = scene.turn(scene.exchange.receive(last))
        texts.append(text)
        if follows and turn.answer is not None and turn.state != "failed":
            said = Conversation(
                messages=(*said.messages, turn.answer.as_message(), Message(role="user", text="on"))
            )
            scene.begin(conversation=said, key=f"body{len(said.messages)}")
        else:
            scene.begin(CutCall(turn.index), conversation=said, key=f"body{len(said.messages)}")
    return scene.lineages


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, builder=st.sampled_from(BUILDERS))
def test_sampled_tokens_trainable_once(steps: list[tuple[str, int, bool]], builder: BuilderSpec) -> None:
    """Every sampled token is trainable once resumed or not."""
    turns = run(steps).turns
    built = build(builder, turns)
    counts = check(turns, built)
    left_out = {left.turn: left.reason for left in built.left_out}
    assert set(left_out.values()) <= {"failed", "empty", "superseded"}
    kept = [turn for turn in turns if turn.index not in left_out]
    assert counts.trainable == sum(len(turn.sampled) for turn in kept)
    resumed = {
        turn.parent for turn in turns if turn.reason == "resumed" and turn.state != "failed" and turn.sampled
    }
    assert not resumed & left_out.keys()  # what was gone on with is trained
    for turn in turns:
        if turn.reason == "resumed" and turn.answer is not None:
            assert turn.answer.text.encode() == spoken_by(turns, turn)


def spoken_by(turns: tuple[Turn, ...], turn: Turn) -> bytes:
    """The text of an answer in all the samples it is made of."""
    by_index = {each.index: each for each in turns}
    parts = [turn]
    while parts[-1].reason == "resumed" and parts[-1].parent is not None:
        parts.append(by_index[parts[-1].parent])
    return b"".join(bytes(token for token in part.sampled if token < END) for part in reversed(parts))


@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_session_rebuilds_from_its_turns(steps: list[tuple[str, int, bool]]) -> None:
    """The session can be rebuilt and its turns written."""
    lineages = run(steps)
    turns = tuple(unpack_turn(pack_turn(turn)) for turn in lineages.turns)
    assert turns == lineages.turns
    restored = Lineages.restore(session_id="s", secret=b"secret", turns=turns)
    for turn in turns:
        assert list(prompt_ids(turns, turn.index)) == list(prompt_ids(lineages.turns, turn.index))
        if turn.answer is None or turn.state == "failed":
            continue
        plan = restored.resume(turn.index, total=1)
        if plan is not None:
            assert list(restored.resumed_prefix(plan))[-len(turn.sampled) :] == list(turn.sampled)
            restored.abandon_plan(plan)


def test_stream_opens_at_first_new_token() -> None:
    """Because its start counts the cached tokens, which only the engine knows; until then there are signs of
    life.
    """
    scene = ExchangeScene(CHAT)
    cut(scene, chunk("Hel"))
    again(scene)
    scene.play((prompted(scene), [StartGeneration]))
    scene.play(
        (
            EngineFailed(error=EngineError("gone"), at=13.0),
            [RecordTurn, lambda command: isinstance(command, Reply) and command.status == 500],
        )
    )
