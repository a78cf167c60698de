"""The token contract in the four wire formats, through the real readers, lineages, template, exchange and
writers.

* A prompt starts with the prompt and the sample of the turn it extends, whatever was sampled.
* Sampled text never reaches the encoder.
* What harnesses do to an answer on its way back changes no prompt.
* A message that a client changed attaches above the change, and the changed text is shown.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from echo_kit import ECHOES, Echo
from hypothesis import given
from hypothesis import strategies as st
from sample_kit import TEXTS, called, examples, samples
from talk_kit import CallInProgress, Desk, logprobs_of
from tokens_kit import CLOSE, END, OPEN, Watched, model
from wire_kit import WIRES, Entry, Wire

from polarnode.core.arrays import ids
from polarnode.merge.builders import per_request, prefix_merging
from polarnode.merge.invariants import check

wires = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)


class Talk:
    """One conversation of one client: what it holds, and the call it made last."""

    def __init__(self, desk: Desk, wire: Wire) -> None:
        self.desk, self.wire = desk, wire
        self.history: list[Entry] = [*wire.said("system", "Be brief."), *wire.said("user", "Go.")]
        self.calls: list[tuple[str, str]] = []

    def say(self, sample: Sequence[int], *, stream: bool, pieces: Sequence[int] = ()) -> CallInProgress:
        """A turn, and its answer in the history."""
        asking = self.desk.say(self.wire.ask(self.history, stream=stream), sample, pieces=pieces)
        assert asking.ended
        answer = self.wire.answered(asking.sent, stream)
        self.calls = self.wire.calls(answer)
        self.history += answer
        return asking

    def go_on(self, text: str) -> None:
        """What the client adds: results of the calls, or what a person says."""
        self.history += (
            self.wire.results(self.calls, [text] * len(self.calls))
            if self.calls
            else self.wire.said("user", text)
        )
        self.calls = []


TURNS = st.lists(
    st.tuples(samples(), TEXTS, st.booleans(), st.lists(st.integers(1, 9), max_size=4)),
    min_size=2,
    max_size=4,
)


def told(wire: Wire, asking: CallInProgress) -> bool:
    """Whether a client can show an answer again: Responses has no item for one in which nothing was said."""
    return wire.name != "openai_responses" or any(
        answer.text or answer.calls or answer.thinking for answer in asking.answers
    )


def held(desk: Desk) -> None:
    """The laws, on the rows of both builders."""
    for build in (prefix_merging, per_request):
        counts = check(desk.turns, build(desk.turns, {}))
        assert counts.trainable == counts.sampled


@wires
@examples(40)
@given(turns=TURNS)
def test_prompt_starts_with_extended_turn(wire: Wire, turns: Any) -> None:
    """A prompt starts with the turn it extends."""
    desk = Desk()
    talk, before, shown, added = Talk(desk, wire), ids(), False, "Go."
    for sample, text, stream, pieces in turns:
        asking = talk.say(sample, stream=stream, pieces=pieces)
        turn = desk.turns[-1]
        assert added in desk.text(asking.prompt[len(before) :] if shown else asking.prompt)
        if shown:
            assert asking.prompt[: len(before)] == before
            assert turn.kind == "extend"
            assert desk.controls(turn.prompt_delta) == desk.controls(asking.prompt[len(before) :])
        assert list(turn.sampled) == list(sample)
        assert turn.logprobs == logprobs_of(sample, 0, turn.index)
        before, shown, added = asking.prompt + sample, told(wire, asking), text
        talk.go_on(text)
    held(desk)


@wires
@examples(25)
@given(turns=TURNS)
def test_sampled_text_never_encoded(wire: Wire, turns: Any) -> None:
    """Every sample says a word nobody else says, in thought, text and call; the tokenizer is asked to encode
    it nowhere.
    """
    watched = Watched(model().tokenizer)
    desk = Desk(tokenizer=watched)
    talk = Talk(desk, wire)
    marked = model().spelled(
        OPEN,
        "qzxjk",
        CLOSE,
        "qzxjk ",
        "<tool_call>",
        '{"name": "look", "arguments": {"path": "qzxjk"}}',
        "</tool_call>",
    )
    for sample, text, stream, pieces in turns:
        talk.say(marked + sample, stream=stream, pieces=pieces)
        assert "qzxjk" in desk.text(desk.turns[-1].sampled)
        talk.go_on(text)
    assert watched.encoded
    assert not [piece for piece in watched.encoded if "qzxjk" in piece]
    assert all("qzxjk" not in desk.text(turn.prompt_delta) for turn in desk.turns)
    held(desk)


FULL = st.tuples(
    st.sampled_from((" I look.  ", "Look", "\ttwo words\n")), called(model(), st.just("look")), st.booleans()
)


def full_sample(said: Any) -> Any:
    """A thought, a text and a call: something of all that a harness may change."""
    text, call, twice = said
    return (
        model().spelled(OPEN, "\nHm, well.\n", CLOSE, "\n\n", text)
        + call * (1 + twice)
        + model().spelled(END)
    )


@wires
@pytest.mark.parametrize("echo", ECHOES, ids=lambda echo: echo.__name__)
@examples(5)
@given(turns=st.lists(FULL, min_size=1, max_size=2), stream=st.booleans(), text=TEXTS)
def test_benign_echo_changes_no_prompt(wire: Wire, echo: Echo, turns: Any, stream: bool, text: str) -> None:
    """A benign echo changes no prompt."""
    desk = Desk()
    talk = Talk(desk, wire)
    for said in turns:
        talk.say(full_sample(said), stream=stream)
        talk.go_on(text)
    ask = wire.ask(talk.history, stream=stream)
    changed = echo(wire, json.loads(json.dumps(ask.body)))
    mutated, found = desk.peek(wire_ask(ask, changed))  # first, so that nothing of it is remembered
    verbatim, prompt = desk.peek(ask)
    assert verbatim.parent == len(turns) - 1
    assert (mutated.parent, mutated.matched, mutated.kind) == (verbatim.parent, verbatim.matched, "extend")
    assert mutated.notes == verbatim.notes  # nothing was edited: it is the same message
    assert found == prompt


def wire_ask(ask: Any, body: Any) -> Any:
    return type(ask)(path=ask.path, body=body, headers=ask.headers)


def test_p3_every_echo_changes_some_body() -> None:
    """An echo that changes no API's body would prove nothing."""
    call = model().spelled(
        "<tool_call>", '{"name": "look", "arguments": {"path": "a", "n": 1}}', "</tool_call>"
    )
    bodies = []
    for wire in WIRES:
        talk = Talk(Desk(), wire)
        for sample in (full_sample((" I look.  ", call, True)), call + model().spelled(END)):
            talk.say(sample, stream=False)
            talk.go_on("x")
        bodies.append((wire, json.dumps(wire.ask(talk.history).body)))
    silent = [
        echo.__name__
        for echo in ECHOES
        if all(json.dumps(echo(wire, json.loads(body))) == body for wire, body in bodies)
    ]
    assert silent == []
    assert len(ECHOES) >= 11


def client_texts(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a body holds words of its client: the system's, the user's, the tools' results."""
    if isinstance(value, list):
        return [found for place, item in enumerate(value) for found in client_texts(item, (*path, place))]
    if not isinstance(value, dict):
        return []
    if value.get("role") in ("assistant", "model") or value.get("type") in ("reasoning", "function_call"):
        return []
    found = []
    for name, item in value.items():
        if (isinstance(item, str) and name in ("text", "output")) or (
            name == "content" and isinstance(item, str)
        ):
            found.append((*path, name))
        else:
            found += client_texts(item, (*path, name))
    return found


def put(value: Any, path: tuple[Any, ...], text: str) -> None:
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = text


@wires
@examples(30)
@given(turns=st.lists(FULL, min_size=1, max_size=3), text=TEXTS, data=st.data())
def test_changed_message_attaches_above_itself(
    wire: Wire, turns: Any, text: str, data: st.DataObject
) -> None:
    """A changed client message attaches above itself and is shown."""
    desk = Desk()
    talk = Talk(desk, wire)
    for said in turns:
        talk.say(full_sample(said), stream=False)
        talk.go_on(text)
    ask = wire.ask(talk.history)
    body = json.loads(json.dumps(ask.body))
    put(body, data.draw(st.sampled_from(client_texts(body))), "another word: xyzzy")
    before, after = desk.read(ask).conversation.messages, desk.read(wire_ask(ask, body)).conversation.messages
    place = next(at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    plan, prompt = desk.peek(wire_ask(ask, body))
    assert plan.matched <= place
    parent = ids() if plan.parent is None else desk.prompts[plan.parent] + desk.turn(plan.parent).sampled
    assert prompt[: len(parent)] == parent
    assert "another word: xyzzy" in desk.text(prompt[len(parent) :])
    answered = [at for at, message in enumerate(before) if message.role == "assistant" and at < place]
    assert plan.matched == (answered[-1] + 1 if answered else 0)  # as deep as can be, too
