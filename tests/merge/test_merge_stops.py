"""A stop string that a client puts back after the text it was cut from: the answer is ours all the same."""

import json
from typing import Any

import pytest
from attrs import evolve
from merge_toys import Session, ask, said, system, told, user
from talk_kit import Desk
from tokens_kit import CLOSE, OPEN, model
from wire_kit import WIRES, Wire

from polarnode.core.conversation import Message, Sampling
from polarnode.core.trajectory import Turn
from polarnode.merge.builders import prefix_merging
from polarnode.merge.figures import counted
from polarnode.merge.fingerprint import Path
from polarnode.merge.ledger import STOPS
from polarnode.merge.lineage import Lineages

STOP = "</code>"
TEXT = "I look.\n<code>\nprint(1)\n"


def stopped(
    session: Session, request: Any, text: str = TEXT, stop: str = STOP, calls: Any = (), thinking: str = ""
) -> tuple[Turn, Message]:
    """A turn that ended at a stop string, and the answer as its client is given it."""
    pending = session.begin(request)
    answer = session.answer(pending.plan, text, calls, thinking, "stop_string")
    answer = evolve(answer, stop_string=stop)
    return session.end(pending, answer), answer.as_message()


def next_after(session: Session, *messages: Message) -> Any:
    return session.lineages.plan(ask(system(), user(), *messages, user("1")))


@pytest.mark.parametrize(
    "shown",
    [
        TEXT,
        TEXT + STOP,
        TEXT + STOP + "\n",
        f"  {TEXT}{STOP} \n\n",
        TEXT.strip() + STOP,
        f"{TEXT.strip()}\n\n{STOP}",
    ],
)
def test_echo_with_stop_string_extends(shown: str) -> None:
    session = Session()
    stopped(session, ask(system(), user()))
    session.say(ask(system(), user(), said(shown), user("1")), "done")
    second = session.turns[1]
    assert (second.kind, second.parent, second.notes) == ("extend", 0, ())
    assert len(prefix_merging(session.turns, {}).traces) == 1


@pytest.mark.parametrize(
    "shown",
    [f"{TEXT}</answer>", f"{TEXT}x{STOP}", f"{TEXT}{STOP}{STOP}", f"I see.{STOP}", STOP, f"{TEXT}{STOP}."],
)
def test_changed_text_is_rewritten(shown: str) -> None:
    session = Session()
    stopped(session, ask(system(), user()))
    plan = next_after(session, said(shown))
    assert (plan.parent, plan.reason) == (None, "rewrite")
    assert plan.notes == ("rewritten: message 2 differs from turn 0's answer in text",)


def test_stop_string_after_unstopped_answer() -> None:
    session = Session()
    session.say(ask(system(), user()), "text")
    assert next_after(session, said(f"text{STOP}")).parent is None


def test_many_stopped_turns_are_one_row() -> None:
    session, history = Session(), [system(), user()]
    for number in range(6):
        _, answer = stopped(session, ask(*history), f"step {number}\n", STOP if number % 2 else "</search>")
        end = STOP if number % 2 else "</search>"
        history += [evolve(answer, text=answer.text + end), user(f"result {number}")]
    assert [turn.parent for turn in session.turns] == [None, 0, 1, 2, 3, 4]
    assert len(prefix_merging(session.turns, {}).traces) == 1
    restored = Lineages.restore(
        session_id="s-1", secret=b"merge toys, thirty-two bytes ok.", turns=session.turns
    )
    assert restored.plan(ask(*history)).parent == 5
    # a client that shows it now with the stop string and now without
    plain = [evolve(message, text=message.text.replace(STOP, "")) for message in history]
    assert session.lineages.plan(ask(*plain)).parent == 5


def test_stop_string_with_calls_and_thoughts() -> None:
    session = Session()
    calls = [("bash", '{"command": "ls", "x": 1}')]
    _, answer = stopped(session, ask(system(), user()), calls=calls, thinking="hm")
    shown = evolve(answer, text=answer.text + STOP, thinking="")
    result = told(answer.calls[0], "a")
    assert session.lineages.plan(ask(system(), user(), shown, result)).parent == 0
    rewritten = tuple(evolve(call, arguments='{"command": "ls -l"}') for call in shown.calls)
    edited = session.lineages.plan(ask(system(), user(), evolve(shown, calls=rewritten), result))
    assert (edited.parent, counted(edited.notes)) == (0, {"edited": 1})


def test_stop_string_after_a_thought() -> None:
    session = Session()
    stopped(session, ask(system(), user()), "", STOP, thinking="so")
    assert next_after(session, said(STOP)).parent == 0


def test_stop_strings_tell_twins_apart() -> None:
    session = Session()
    stopped(session, ask(system(), user()), "kiwi", "</search>")
    stopped(session, ask(system(), user()), "kiwi", "</answer>")
    session.say(ask(system(), user()), "kiwi")
    assert next_after(session, said("kiwi</search>")).parent == 0
    assert next_after(session, said("kiwi</answer>")).parent == 1
    assert next_after(session, said("kiwi")).parent == 2


def test_stop_strings_per_path_are_bounded() -> None:
    """Each is looked for in a message of any length, and a client may send another with every request."""
    session = Session()
    for number in range(1, STOPS + 10):
        turn, _ = stopped(session, ask(system(), user()), "kiwi", "b" * number)
    found = list(session.lineages._ledger.strip_stops(Path.read(turn.before_key).key, said("b" * 999)))
    assert [len(stop) for stop, _ in found] == list(range(10, STOPS + 10))
    assert next_after(session, said("kiwi" + "b" * (STOPS + 9))).parent == turn.index


@pytest.mark.parametrize("prefilled", [False, True])
def test_stopped_answer_with_stop_resumes(prefilled: bool) -> None:
    session = Session()
    stopped(session, ask(system(), user()), "<search>kiwi", "</search>")
    shown = said("<search>kiwi</search>")
    asked = evolve(ask(system(), user(), shown), prefilled=prefilled)
    second, _ = stopped(session, asked, " <answer>fruit", "</answer>")
    assert (second.kind, second.parent) == ("continue", 0)
    for whole in ("<search>kiwi</search> <answer>fruit</answer>", "<search>kiwi</search> <answer>fruit"):
        assert next_after(session, said(whole)).parent == 1


def test_prefill_without_stop_string_restarts() -> None:
    session = Session()
    stopped(session, ask(system(), user()), "<search>kiwi", "</search>")
    asked = evolve(ask(system(), user(), said("<search>kiwi")), prefilled=True)
    plan = session.lineages.plan(asked)
    assert (plan.parent, plan.prefill) == (None, "<search>kiwi"), "the client took away what was sampled"


def test_stop_string_after_lost_question() -> None:
    session = Session()
    stopped(session, ask(system(), user("do it"), user("what is new now?")))
    plan = session.lineages.plan(ask(system(), user("do it"), said(TEXT + STOP), user("1")))
    assert (plan.kind, plan.reason, plan.parent) == ("branch", "volatile", None)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("thought", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_in_every_api(wire: Wire, thought: bool, stream: bool) -> None:
    """The text of an answer is given without its stop string, and comes back with it."""
    desk = Desk(sampling=Sampling(stop=(STOP,)))
    history = [*wire.said("system", "Be brief."), *wire.said("user", "Go.")]
    thinking = (OPEN, "\nHm.\n", CLOSE, "\n\n") if thought else ()
    for number in range(3):
        sample = model().spelled(*thinking, f"Step {number}\n", STOP, "\n")
        asking = desk.say(wire.ask(history, stream=stream), sample)
        answer = wire.answered(asking.sent, stream)
        assert STOP not in json.dumps(answer)
        end = json.dumps(f"\n{STOP}\n" if number % 2 else STOP)[1:-1]
        shown = json.dumps(answer).replace(f"Step {number}", f"Step {number}{end}")
        assert STOP in shown
        history = [*history, *json.loads(shown), *wire.said("user", f"Result {number}.")]
    assert [turn.finish_reason for turn in desk.turns] == ["stop_string"] * 3
    assert [turn.parent for turn in desk.turns] == [None, 0, 1]
    assert len(prefix_merging(desk.turns, {}).traces) == 1
