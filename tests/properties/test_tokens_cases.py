"""The token contract where histories meet, where texts are hostile, against one render of the whole
conversation, over all leaves, and where samples end badly or begin with what the template wrote. The parts are
the real ones, as in `test_tokens_contract`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from sample_kit import byte_by_byte, examples, letter_by_letter, samples
from talk_kit import Ask, Desk, logprobs_of
from tokens_kit import CALL, CALLED, CLOSE, END, HOSTILE, OPEN, hostile, model
from wire_kit import CHAT, RESPONSES, WIRES, Entry, Wire, chat_choices

from polarnode.core.arrays import ids
from polarnode.merge.builders import per_request, prefix_merging
from polarnode.merge.invariants import check

wires = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
LOOK = '\n{"name": "look", "arguments": {"path": "a"}}\n'


def sp(*pieces: str) -> Any:
    return model().spelled(*pieces)


def opening(wire: Wire, text: str = "Go.") -> list[Entry]:
    return [*wire.said("system", "Be brief."), *wire.said("user", text)]


def answered(desk: Desk, wire: Wire, history: Sequence[Entry], sample: Any, **how: Any) -> list[Entry]:
    """A history with the answer to it."""
    asking = desk.say(wire.ask(history, **how), sample)
    assert asking.ended
    return [*history, *wire.answered(asking.sent, False)]


# ── twins ───────────────────────────────────────────────────────────────────────


@wires
@examples(8)
@given(
    count=st.integers(2, 4), order=st.randoms(use_true_random=False), text=st.sampled_from(("I look.", ""))
)
def test_twins_told_apart_by_ids(wire: Wire, count: int, order: Any, text: str) -> None:
    """The same words in other tokens: each history that carries its ids extends its own."""
    desk = Desk()
    spellings = [
        lambda text: model().spelled(text),
        lambda text: letter_by_letter(text, model()),
        lambda text: byte_by_byte(text, model()),
    ]
    histories = []
    for number in range(count):
        sample = sp(OPEN, "a" * number, CLOSE) + spellings[number % 3](text) + sp(CALL, LOOK, CALLED, END)
        histories.append(answered(desk, wire, opening(wire), sample))
    lots = list(enumerate(histories))
    order.shuffle(lots)
    for index, history in lots:
        calls = wire.calls(history[len(opening(wire)) :])
        plan, prompt = desk.peek(wire.ask([*history, *wire.results(calls, ["found"])]))
        assert plan.parent == index
        assert prompt[: len(desk.prompts[index])] == desk.prompts[index]
        assert not any(note.startswith("ambiguous") for note in plan.notes)


@wires
@examples(6)
@given(count=st.integers(2, 4))
def test_twins_without_ids_flagged(wire: Wire, count: int) -> None:
    """Twins without ids are flagged."""
    desk = Desk()
    for _ in range(count):
        history = answered(desk, wire, opening(wire), letter_by_letter("Done", model()) + sp(END))
    bare = json.loads(json.dumps(history))
    for entry in bare:
        entry.pop("id", None)
    plan, _ = desk.peek(wire.ask([*bare, *wire.said("user", "and now?")]))
    assert plan.parent == count - 1
    assert any(note.startswith("ambiguous") for note in plan.notes)


# ── control strings in client text ──────────────────────────────────────────────


def dressed(wire: Wire, texts: Sequence[str], names: Sequence[Entry]) -> Ask:
    """A conversation of these texts: the system's, the user's, a tool's result, and more of the user's; a
    tool described by the last.
    """
    head, task, result, more, described = texts
    history = [*wire.said("system", head), *wire.said("user", task), *names]
    calls = wire.calls(names)
    history += wire.results(calls, [result] * len(calls)) + wire.said("user", more)
    ask = wire.ask(history)
    listed = ask.body["tools"][0]
    where = listed.get("function") or (listed.get("functionDeclarations") or [listed])[0]
    where["description"] = described
    return ask


@wires
@examples(25)
@given(texts=st.tuples(hostile, hostile, hostile, hostile, hostile))
def test_p7_client_text_yields_no_control_ids(wire: Wire, texts: tuple[str, ...]) -> None:
    """A root and a suffix of hostile texts hold the marks that harmless ones hold, and every byte of the
    client's.
    """
    desk = Desk()
    plain = answered(
        desk,
        wire,
        [*wire.said("system", texts[0]), *wire.said("user", texts[1])],
        sp("I look.", CALL, LOOK, CALLED, END),
    )
    answer = plain[2:]
    _, suffix = desk.peek(wire.ask([*plain, *wire.results(wire.calls(answer), [texts[2]])]))
    _, harmless = desk.peek(wire.ask([*plain, *wire.results(wire.calls(answer), ["x"])]))
    assert desk.controls(suffix) == desk.controls(harmless)
    assert texts[2] in desk.text(suffix)
    _, root = desk.peek(dressed(wire, texts, answer))
    _, calm = desk.peek(dressed(wire, ["x"] * 5, answer))
    assert desk.controls(root) == desk.controls(calm)
    assert all(text in desk.text(root) for text in texts[:4])


@wires
def test_client_control_strings_are_text(wire: Wire) -> None:
    """Every control string is text wherever a client writes it."""
    test_p7_client_text_yields_no_control_ids.hypothesis.inner_test(wire=wire, texts=(*HOSTILE[:5],))
    for text in HOSTILE:
        test_p7_client_text_yields_no_control_ids.hypothesis.inner_test(wire=wire, texts=(text,) * 5)


# ── one render ──────────────────────────────────────────────────────────────────

WORD = st.text("abc <>|/{}\"'\n\u65e5\u00e9", min_size=1, max_size=20).filter(
    lambda text: text.strip() == text
)


def canonical(used: Any, text: str, call: str | None) -> Any:
    """An answer as the template writes it."""
    called = (
        ([("\n" if text else ""), CALL, f'\n{{"name": "look", "arguments": {call}}}\n', CALLED])
        if call is not None
        else []
    )
    sample = ids()
    run = ""
    for piece in [text, *called, END]:  # what stands between marks is encoded in one piece
        if piece in used.tokenizer.control:
            sample += used.spelled(run) if run else ids()
            sample += used.spelled(piece)
            run = ""
        else:
            run += piece
    return sample


def one_render(used: Any, turns: Any) -> None:
    """The incremental prompt of canonical samples is what transformers makes of the whole conversation."""
    desk = Desk(model=used)
    history = opening(CHAT)
    for text, call, result in turns:
        arguments = None if call is None else json.dumps({"path": call}, ensure_ascii=False)
        answer = answered(desk, CHAT, history, canonical(used, text, arguments))
        calls = CHAT.calls(answer[len(history) :])
        history = [*answer, *(CHAT.results(calls, [result]) if calls else CHAT.said("user", result))]
    ask = CHAT.ask(history)
    plan, prompt = desk.peek(ask)
    assert plan.parent == len(turns) - 1
    assert list(prompt) == list(used.expected(desk.read(ask).conversation))


CANONICAL = st.lists(st.tuples(WORD, st.none() | WORD, WORD), min_size=1, max_size=4)


@examples(40)
@given(turns=CANONICAL)
def test_canonical_tokens_equal_one_render(turns: Any) -> None:
    """Canonical tokens make the prompt of one render."""
    one_render(model(), turns)


@examples(15)
@given(turns=CANONICAL)
def test_p8_with_the_real_qwen3(qwen3: Any, turns: Any) -> None:
    one_render(qwen3, turns)


@pytest.fixture(scope="module")
def qwen3(qwen3_folder: Path) -> Any:
    return model(qwen3_folder)


@examples(15)
@given(data=st.data())
def test_p1_with_the_real_qwen3(qwen3: Any, data: st.DataObject) -> None:
    """Qwen's tokenizer normalises (NFC): what is sampled is kept as it was all the same."""
    wire = data.draw(st.sampled_from(WIRES))
    desk, history, before = Desk(model=qwen3), opening(wire), ids()
    for sample in data.draw(st.lists(samples(qwen3), min_size=2, max_size=3)):
        asking = desk.say(wire.ask(history), byte_by_byte("e\u0301\uf900 ", qwen3) + sample)
        assert asking.prompt[: len(before)] == before
        before = asking.prompt + desk.turns[-1].sampled
        answer = wire.answered(asking.sent, False)
        calls = wire.calls(answer)
        history += answer + (wire.results(calls, ["r"] * len(calls)) if calls else wire.said("user", "on"))
    assert [turn.kind for turn in desk.turns[1:]] == ["extend"] * (len(desk.turns) - 1)


# ── masks over all leaves ───────────────────────────────────────────────────────


@wires
@examples(20)
@given(
    plot=st.lists(
        st.tuples(st.integers(0, 5), samples(), st.sampled_from(("on", "off", ""))), min_size=1, max_size=8
    )
)
def test_masks_cover_sampled_tokens_once(wire: Wire, plot: Any) -> None:
    """A tree of histories: each turn goes on from any earlier one. However it is cut into rows, each token is
    trained once.
    """
    desk = Desk()
    histories = [opening(wire)]
    for place, sample, text in plot:
        before = histories[place % len(histories)]
        after = answered(desk, wire, before, sample)
        calls = wire.calls(after[len(before) :])
        histories.append(
            [*after, *(wire.results(calls, [text] * len(calls)) if calls else wire.said("user", text))]
        )
    total = sum(len(turn.sampled) for turn in desk.turns)
    for build in (prefix_merging, per_request):
        built = build(desk.turns, {})
        assert check(desk.turns, built).trainable == total - sum(
            len(desk.turn(left.turn).sampled) for left in built.left_out
        )
        assert sum(sum(trace.loss_mask) for trace in built.traces) == total
    leaves = {turn.index for turn in desk.turns if turn.sampled} - {
        step for turn in desk.turns if turn.sampled for step in ancestors(desk, turn.parent)
    }
    assert len(prefix_merging(desk.turns, {}).traces) == len(leaves)


def ancestors(desk: Desk, index: int | None) -> set[int]:
    found: set[int] = set()
    while index is not None:
        found.add(index)
        index = desk.turn(index).parent
    return found


# ── how samples end and begin ───────────────────────────────────────────────────

END_ID = (END,)
# What was sampled, whether it is cut, and what must close it before anything new: marks of the family.
CUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a whole turn": (("One.", END), ()),
    "text that is cut": (("One and",), END_ID),
    "nothing at all but its end": ((END,), ()),
    "a thought that is cut": ((OPEN, "\nHm, so"), (CLOSE, END)),
    "a thought that ends and nothing more": ((OPEN, "\nHm.\n", CLOSE), END_ID),
    "a call that is cut": (("I look.", CALL, '\n{"name": "lo'), END_ID),
    "a whole call without its end": (("I look.", CALL, LOOK, CALLED), END_ID),
    "a call that can not be read": ((CALL, "not json", CALLED, END), ()),
    "a thought that ends the turn": ((OPEN, "\nHm.", END), ()),
    "another stop id": (("One.", "<|endoftext|>"), END_ID),
    "marks inside a thought": ((OPEN, "a", CALL, LOOK, CALLED, "b", CLOSE, "Done", END), ()),
}


@wires
@pytest.mark.parametrize(("sample", "close"), CUTS.values(), ids=CUTS.keys())
def test_any_sample_end_kept_and_closed(wire: Wire, sample: tuple[str, ...], close: tuple[str, ...]) -> None:
    """However a sample ends it is kept and closed by the rule."""
    desk = Desk()
    history = opening(wire)
    asking = desk.say(wire.ask(history), sp(*sample))
    answer = wire.answered(asking.sent, False)
    if not answer:
        pytest.skip("this API shows nothing of such an answer, so its client can not go on from it")
    calls = wire.calls(answer)
    more = wire.results(calls, ["r"] * len(calls)) if calls else wire.said("user", "go on")
    after = desk.say(wire.ask([*history, *answer, *more]), sp("Two.", END))
    turn, expected = desk.turns[-1], sp(*close)
    assert after.prompt[: turn.prompt_length - len(turn.prompt_delta)] == asking.prompt + sp(*sample)
    assert turn.prompt_delta[: turn.close_length] == expected
    assert turn.close_length == len(expected)
    (row,) = prefix_merging(desk.turns, {}).traces
    assert check(desk.turns, prefix_merging(desk.turns, {})).trainable == len(sp(*sample)) + len(
        sp("Two.", END)
    )
    start = row.turn_spans[0].end
    assert row.loss_mask[start : start + turn.prompt_length - len(asking.prompt) - len(sp(*sample))] == bytes(
        len(turn.prompt_delta)
    )


@wires
@pytest.mark.parametrize(
    "sample",
    [("One and",), (OPEN, "\nHm, so"), ("I look.", CALL, '\n{"name": "lo')],
    ids=["text", "thought", "call"],
)
def test_trailing_answer_resumes_exactly(wire: Wire, sample: tuple[str, ...]) -> None:
    """The prefill: a cut answer that comes back last is gone on with, not closed and not encoded."""
    desk = Desk()
    asking = desk.say(wire.ask(opening(wire)), sp(*sample))
    history = [*opening(wire), *wire.answered(asking.sent, False)]
    after = desk.say(wire.ask(history), sp(" on", END))
    turn = desk.turns[-1]
    assert (turn.kind, list(turn.prompt_delta), turn.parent) == ("continue", [], 0)
    assert after.prompt == asking.prompt + sp(*sample)
    assert check(desk.turns, prefix_merging(desk.turns, {})).traces == 1


@pytest.mark.parametrize("thinking", [False, True])
def test_p10_opened_thought_is_prompt(thinking: bool, tmp_path: Path) -> None:
    """A thought that the template opened is prompt, and read as thought."""
    from tokens_kit import variant

    written = (
        "{%- if enable_thinking is defined and enable_thinking is false %}\n        {{-"
        " '<think>\\n\\n</think>\\n\\n' }}"
    )
    opened = "{%- if enable_thinking is not defined or enable_thinking %}\n        {{- '<think>\\n' }}"
    used = model(variant(tmp_path, template=lambda text: text.replace(written, opened)))
    desk = Desk(model=used)
    more = {"chat_template_kwargs": {"enable_thinking": thinking}}
    asking = desk.say(
        CHAT.ask(opening(CHAT), **more),
        used.spelled("Hm.", CLOSE, "\n\nDone", END) if thinking else used.spelled("Done", END),
    )
    (answer,) = asking.answers
    assert (answer.thinking, answer.text) == ("Hm." if thinking else "", "Done")
    assert (used.spelled(OPEN)[0] in asking.prompt[-3:]) is thinking
    trace = prefix_merging(desk.turns, {}).traces[0]
    assert trace.loss_mask[: len(asking.prompt)] == bytes(len(asking.prompt))


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_shown_text_only(stream: bool) -> None:
    """A stop string cuts what is shown and not what was sampled."""
    desk = Desk()
    asking = desk.begin(CHAT.ask(opening(CHAT), stream=stream, stop=["STOP"]))
    asking.give(sp("One STOP two"))
    assert asking.over
    turn = desk.turns[0]
    sampled = desk.text(turn.sampled)
    assert sampled.startswith("One STOP")
    assert turn.answer is not None
    assert turn.answer.text == "One "
    answer = CHAT.answered(asking.sent, stream)
    _, prompt = desk.peek(CHAT.ask([*opening(CHAT), *answer, *CHAT.said("user", "on")]))
    assert prompt[: len(asking.prompt) + len(turn.sampled)] == asking.prompt + turn.sampled


@wires
@pytest.mark.parametrize("repaired", ["invalid", "look_"])
def test_p10_repaired_call_kept_by_id(wire: Wire, repaired: str) -> None:
    """opencode renames a call it can not make; the id proves whose it is, and the edit is told."""
    desk = Desk()
    history = answered(desk, wire, opening(wire), sp("I look.", CALL, LOOK, CALLED, END))
    mended = json.loads(json.dumps(history).replace('"name": "look"', f'"name": "{repaired}"'))
    calls = wire.calls(mended[len(opening(wire)) :])
    assert calls[0][1] == repaired
    plan, prompt = desk.peek(wire.ask([*mended, *wire.results(calls, ["no such tool"])]))
    assert plan.parent == 0
    assert prompt[: len(desk.prompts[0])] == desk.prompts[0]
    assert any(note.startswith("edited") for note in plan.notes)


@wires
def test_reference_yields_to_changed_message(wire: Wire) -> None:
    """The ids prove the answer; the question it answered is another one now."""
    desk = Desk()
    history = answered(desk, wire, opening(wire), sp("I look.", CALL, LOOK, CALLED, END))
    changed = [*opening(wire, "Go elsewhere."), *history[2:]]
    plan, prompt = desk.peek(wire.ask([*changed, *wire.results(wire.calls(history[2:]), ["r"])]))
    assert plan.parent is None
    assert "Go elsewhere." in desk.text(prompt)


@wires
def test_rewritten_answer_loses_its_tokens(wire: Wire) -> None:
    """The id of the call is there, but the text beside it is another: what the model would be shown was never
    sampled.
    """
    desk = Desk()
    history = answered(desk, wire, opening(wire), sp("I look.", CALL, LOOK, CALLED, END))
    changed = json.loads(json.dumps(history).replace("I look.", "I will not look."))
    plan, prompt = desk.peek(
        wire.ask([*changed, *wire.results(wire.calls(changed[len(opening(wire)) :]), ["r"])])
    )
    assert plan.parent is None
    assert "I will not look." in desk.text(prompt)
    assert any(note.startswith("rewritten") for note in plan.notes)


@pytest.mark.parametrize("stop", [None, "STOP"])
def test_engine_logprobs_recorded_unchanged(stop: str | None) -> None:
    """Ids, logprobs and weight versions, over chunks and new weights; cut behind the same token where a stop
    string cuts.
    """
    desk = Desk()
    asking = desk.begin(CHAT.ask(opening(CHAT), **({} if stop is None else {"stop": [stop]})))
    asking.give(sp("One "), version="v1")
    asking.give(sp("and two "), version="v2")
    asking.give(sp("STOP and more", END), "stop", version="v3")
    (turn,) = desk.turns
    given = sp("One ", "and two ", "STOP and more", END)
    length = len(turn.sampled)
    assert turn.sampled == given[:length]
    assert length == len(given) if stop is None else desk.text(turn.sampled).rstrip().endswith("STOP")
    assert turn.logprobs == logprobs_of(given, 0, 0)[:length]
    first, second = len(sp("One ")), len(sp("One ", "and two "))
    assert [(span.version, span.start, span.end) for span in turn.version_spans] == [
        ("v1", 0, first),
        ("v2", first, second),
        ("v3", second, length),
    ]
    assert check(desk.turns, prefix_merging(desk.turns, {})).trainable == length


def test_choices_are_trained_siblings() -> None:
    """Choices of one call are siblings and each is trained."""
    desk = Desk()
    asking = desk.begin(CHAT.ask(opening(CHAT), n=3))
    for choice in range(3):
        asking.give(letter_by_letter(f"Answer {choice % 2}", model()) + sp(END), "stop", choice=choice)
    messages = chat_choices(asking.sent, False)
    assert [message["content"] for message in messages] == ["Answer 0", "Answer 1", "Answer 0"]
    built = prefix_merging(desk.turns, {})
    assert check(desk.turns, built).traces == 3
    assert built.left_out == ()
    plan, _ = desk.peek(CHAT.ask([*opening(CHAT), messages[1], *CHAT.said("user", "on")]))
    assert plan.parent == 1


def test_p10_wordless_response_only_branches() -> None:
    """Responses has no item for an answer without a word: the next request is of another path, and both are
    trained.
    """
    desk = Desk()
    asking = desk.say(RESPONSES.ask(opening(RESPONSES)), sp(END))
    assert RESPONSES.answered(asking.sent, False) == []
    desk.say(RESPONSES.ask([*opening(RESPONSES), *RESPONSES.said("user", "well?")]), sp("Here.", END))
    assert [turn.kind for turn in desk.turns] == ["root", "root"]
    assert check(desk.turns, prefix_merging(desk.turns, {})).traces == 2


# ── sound paths ─────────────────────────────────────────────────────────────────


@wires
@examples(15)
@given(
    plot=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(("A", "B", "")), st.sampled_from(("x", "y"))),
        min_size=2,
        max_size=8,
    )
)
def test_parent_conditioned_on_request_prefix(wire: Wire, plot: Any) -> None:
    """Few words, so that paths meet often: the parent's prompt and sample are the render of the request's own
    messages, letter by letter.
    """
    desk = Desk()
    histories = [opening(wire)]
    for place, said, text in plot:
        before = histories[place % len(histories)]
        after = answered(desk, wire, before, sp(said, END)) if said else before
        histories.append([*after, *wire.said("user", text)])
    for history in histories:
        ask = wire.ask(history)
        conversation = desk.read(ask).conversation
        plan, prompt = desk.peek(ask)
        assert list(prompt) == list(model().expected(conversation))
        if plan.parent is not None:
            upto = evolve(conversation, messages=conversation.messages[: plan.matched])
            known = desk.prompts[plan.parent] + desk.turn(plan.parent).sampled
            assert desk.text(model().expected(upto)).startswith(desk.text(known))


@wires
def test_other_tools_make_another_root(wire: Wire) -> None:
    """Tools are rendered at the head of a prompt: what was sampled under others is no beginning of
    this one.
    """
    desk = Desk()
    history = [*answered(desk, wire, opening(wire), sp("I look.", END)), *wire.said("user", "on")]
    for tools in ((), ("bash",), ("look", "bash")):
        plan, prompt = desk.peek(wire.ask(history, tools=tools))
        assert (plan.parent, plan.kind) == (None, "root")
        assert all(f'"name": "{tool}"' in desk.text(prompt) for tool in tools)
    assert desk.peek(wire.ask(history))[0].parent == 0


def test_only_unextended_cut_answer_resumes() -> None:
    """Only a cut answer that nothing went on from is gone on with."""
    desk, ask = Desk(), CHAT.ask(opening(CHAT))
    cut = desk.begin(ask)
    cut.give(sp("Half "))
    cut.leave()
    again = desk.begin(ask, resume=0)
    assert (again.plan.reason, list(again.prompt)) == ("resumed", list(cut.prompt) + list(sp("Half ")))
    assert desk.lineages.resume(0, total=2) is None  # it is being gone on with
    again.give(sp("an answer.", END), "stop")
    assert again.answers[0].text == "Half an answer."
    assert [desk.lineages.resume(index, total=2) for index in (0, 1)] == [None, None]


def test_choices_cut_together_all_trained() -> None:
    """Another choice of the same call asked nothing again: it supersedes none."""
    desk = Desk()
    asking = desk.begin(CHAT.ask(opening(CHAT), n=2))
    for choice in range(2):
        asking.give(sp(f"Half {choice}"), choice=choice)
    asking.leave()
    built = prefix_merging(desk.turns, {})
    assert [turn.state for turn in desk.turns] == ["partial", "partial"]
    assert (built.left_out, len(built.traces)) == ((), 2)
