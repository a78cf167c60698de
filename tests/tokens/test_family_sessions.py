"""Whole sessions in every model family, through everything of the node that decides: the four APIs' readers
and writers, lineages, template, exchange, parser, builders and laws. Only the engine is the test's: it speaks
the family's own language in tokens no encoder would choose.

Goal on every one of them: one row, every sampled token trained once, no token encoded again. Whoever adds a
family adds how it writes calls to `CALLS` if no other writes them so.
"""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from attrs import field, frozen
from echo_kit import drops_thinking
from family_fixtures import family_folder
from hypothesis import given
from hypothesis import strategies as st
from sample_kit import byte_by_byte, examples
from talk_kit import Ask, CallInProgress, Desk
from tokens_kit import Model
from wire_kit import WIRES, Entry, Wire

from polarnode.core.arrays import ids
from polarnode.merge.builders import prefix_merging
from polarnode.merge.invariants import check
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.template import load_model

Arguments = dict[str, Any]
Meant = list[tuple[str, Arguments]]


@cache
def model(name: str) -> Model:
    """A family's small model, audited as a node would."""
    loaded = load_model(family_folder(name))
    return Model(loaded.tokenizer, loaded.family, loaded.template, None)


# ── what the model says, as its family writes it ──────────────────────────────


def _xml(name: str, arguments: Arguments) -> str:
    inside = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def _invoke(name: str, arguments: Arguments) -> str:
    inside = "".join(
        f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{inside}</invoke>'


def _arg(name: str, arguments: Arguments) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


def _braces(name: str, arguments: Arguments) -> str:
    told = ",".join(
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{json.dumps(value)}"
        for key, value in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{told}}}<tool_call|>"


def _section(inside: str) -> str:
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _kimi(called: Meant) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{_json(told)}<|tool_call_end|>"
        for at, (name, told) in enumerate(called)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


CALLS: dict[CallSyntax, Callable[[Meant], str]] = {
    "json": lambda called: "\n".join(
        f"<tool_call>\n{_json({'name': name, 'arguments': told})}\n</tool_call>" for name, told in called
    ),
    "bare_json": lambda called: "; ".join(_json({"name": name, "parameters": told}) for name, told in called),
    "function_xml": lambda called: "\n".join(_xml(name, told) for name, told in called),
    "invoke_xml": lambda called: (
        "<minimax:tool_call>\n"
        + "".join(f"{_invoke(name, told)}\n" for name, told in called)
        + "</minimax:tool_call>"
    ),
    "arg_xml": lambda called: "\n".join(_arg(name, told) for name, told in called),
    "fenced": lambda called: _section(
        "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(told)}\n```<｜tool▁call▁end｜>"
            for name, told in called
        )
    ),
    "separated": lambda called: _section(
        "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(told)}<｜tool▁call▁end｜>"
            for name, told in called
        )
    ),
    "numbered": _kimi,
    "braces": lambda called: "".join(_braces(name, told) for name, told in called),
    "harmony": lambda called: (
        f"<|channel|>commentary to=functions.{called[0][0]}"
        f" <|constrain|>json<|message|>{_json(called[0][1])}<|call|>"
    ),
}
# After calls these families' models ask for the results in their own way; the others end as after any answer.
CALLED = {"glm4": "<|observation|>", "gemma4": "<|tool_response>", "gptoss": ""}


@frozen(kw_only=True)
class Said:
    """One sample as text: what its family writes, and the calls it means."""

    text: str
    meant: Meant
    cut: bool = False


@frozen
class Speaker:
    """A model of one family that says what a test means it to."""

    of: Model

    @property
    def calls(self) -> bool:
        """Whether it can call and be told results."""
        return self.of.family.call_syntax != "none" and "tool" not in self.of.template.limits.sentences

    @property
    def tools(self) -> tuple[str, ...]:
        """What its clients may list; some templates show no tools, and their models are told of them in
        words.
        """
        return ("look",) if self.calls and "tools" not in self.of.template.limits.sentences else ()

    @property
    def most_calls(self) -> int:
        return 1 if "several results" in self.of.family.refuses else 3

    def says(self, text: str, *, thought: str, opened: bool, meant: Meant, end: str | None) -> Said:
        """`opened`: the prompt has begun the thought. `end` None: it is cut."""
        if self.of.family.harmony is not None:
            return self._harmony(text, thought=thought, meant=meant, end=end)
        called = CALLS[self.of.family.call_syntax](meant) if meant else ""
        apart = self.of.family.call_syntax == "bare_json" and bool(called)  # such a call is the whole answer
        before = "" if apart else self._thought(thought, opened=opened) + text
        close = "" if end is None else CALLED.get(self.of.family.name, end) if called else end
        return Said(text=before + called + close, meant=meant, cut=end is None)

    def _thought(self, thought: str, *, opened: bool) -> str:
        family, marks = self.of.family, {number: text for text, number in self.of.tokenizer.control.items()}
        if family.think_close is None or family.think_open is None or not (thought or opened):
            return ""
        return f"{'' if opened else marks[family.think_open] + family.think_label}{thought}{marks[family.think_close]}"

    def _harmony(self, text: str, *, thought: str, meant: Meant, end: str | None) -> Said:
        before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        if meant:
            return Said(text=before + CALLS["harmony"](meant), meant=meant)
        return Said(text=f"{before}<|channel|>final<|message|>{text}{end or ''}", meant=[], cut=end is None)

    def sampled(self, said: Said, spell: "Callable[[str, Model], array[int]]") -> "array[int]":
        """Its tokens: each control string is one, and what stands between is spelled in any way."""
        control = self.of.tokenizer.control
        pieces = re.split(
            "(" + "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) + ")",
            said.text,
        )
        return sum(
            (
                ids([control[piece]]) if piece in control else spell(piece, self.of)
                for piece in pieces
                if piece
            ),
            ids(),
        )

    def stops(self) -> list[str]:
        """Every way in which a turn without calls may end."""
        marks = {number: text for text, number in self.of.tokenizer.control.items()}
        return [marks[token] for token in self.of.family.stop_ids if marks[token] != "<|call|>"]


def _canonical(text: str, of: Model) -> "array[int]":
    return ids(of.tokenizer.encode_plain(text))


def _letters(text: str, of: Model) -> "array[int]":
    return sum((_canonical(letter, of) for letter in text), ids())


SPELLINGS = st.sampled_from((_canonical, _letters, byte_by_byte))
TEXTS = st.sampled_from(("It is done.", "\u00fc\U0001f642 1 < 2", "two\n\nparts", 'so: {"a": 1}'))
THOUGHTS = st.sampled_from(("", "\nHm, well.\n", "\u65e5\u672c"))
VALUES = st.fixed_dictionaries(
    {
        "path": st.sampled_from(("a.txt", "b c", "\u00e9\u65e5", "1 < 2", "3")),
        "n": st.sampled_from((1, 2.5, -3)),
    }
)
CALLING = st.lists(VALUES.map(lambda told: ("look", told)), min_size=1, max_size=3)
KINDS = ("calls", "says", "cut", "calls", "stops", "calls")


@frozen
class Session:
    """A client and its conversation."""

    wire: Wire
    desk: Desk
    speaker: Speaker
    history: list[Entry]
    client: list[str] = field(factory=list)  # what it wrote, which must stay text
    asked: list[str] = field(factory=list)  # so much of it as stood in the last request

    def asks(self, *, stream: bool) -> CallInProgress:
        asked = self.wire.ask(self.history, tools=self.speaker.tools, stream=stream)
        body = drops_thinking(self.wire, json.loads(json.dumps(asked.body)))
        self.asked[:] = self.client
        return self.desk.begin(Ask(path=asked.path, body=body))

    def hears(self, asking: CallInProgress, said: Said, told: Sequence[str], *, stream: bool) -> None:
        """What its harness keeps of an answer, and what it says to it."""
        entries = self.wire.answered(asking.sent, stream)
        calls = self.wire.calls(entries)
        assert [name for _, name in calls] == [name for name, _ in said.meant]
        self.history.extend(entries)
        texts = list(told[: len(calls)]) or [told[0]]
        self.client.extend(texts)
        self.history.extend(self.wire.results(calls, texts) if calls else self.wire.said("user", texts[0]))


def turn(session: Session, kind: str, data: st.DataObject, place: int) -> None:
    """One request, its sample and its answer."""
    stream = data.draw(st.booleans(), label="stream")
    asking, speaker = session.asks(stream=stream), session.speaker
    assert asking.orders, asking.refused
    meant = (
        data.draw(CALLING, label="calls")[: speaker.most_calls] if kind == "calls" and speaker.calls else []
    )
    end = (
        None
        if kind == "cut"
        else (
            data.draw(st.sampled_from(speaker.stops()), label="end")
            if kind == "stops"
            else speaker.stops()[0]
        )
    )
    opened = speaker.of.template.opens_thinking(asking.prompt)
    said = speaker.says(data.draw(TEXTS), thought=data.draw(THOUGHTS), opened=opened, meant=meant, end=end)
    sample = speaker.sampled(said, data.draw(SPELLINGS, label="spelled"))
    half = data.draw(st.integers(0, len(sample)), label="first chunk")
    asking.give(sample[:half])
    asking.give(sample[half:], "length" if said.cut else "stop")
    (answer,) = asking.answers
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == meant
    session.hears(
        asking, said, [hostile(speaker.of, data, f"{place}{count}") for count in range(3)], stream=stream
    )


def hostile(of: Model, data: st.DataObject, name: str) -> str:
    """A client's text that holds a control string."""
    marks = sorted(text for text in of.tokenizer.control if '"' not in text)
    return f"Q{name}{data.draw(st.sampled_from(marks), label='hostile')}Z{name}"


# ── what must hold ────────────────────────────────────────────────────────────


def holds(session: Session) -> None:
    """One row, every sampled token in it once, and each prompt the one before it with its sample and what is
    new.
    """
    desk, turns = session.desk, session.desk.turns
    for before, after in pairwise(turns):
        whole = desk.prompts[before.index] + before.sampled
        assert desk.prompts[after.index][: len(whole)] == whole
        assert after.parent == before.index
    counts = check(turns, prefix_merging(turns, {}))
    assert (counts.traces, counts.left_out) == (1, 0)
    assert counts.trainable == counts.sampled == sum(len(turn.sampled) for turn in turns)
    stays_text(session, desk.prompts[turns[-1].index])


def stays_text(session: Session, prompt: "array[int]") -> None:
    """With every control token as a sign that no client wrote, all that a client wrote is still there."""
    marks = set(session.speaker.of.tokenizer.control.values())
    shown = b"".join(
        b"\x00" if token in marks else session.speaker.of.tokenizer.token_bytes(token) for token in prompt
    ).decode(errors="replace")
    assert not [text for text in session.asked if text not in shown], shown


@examples(4)
@given(wire=st.sampled_from(WIRES), data=st.data())
def test_a_whole_session_is_one_row(family_name: str, wire: Wire, data: st.DataObject) -> None:
    speaker = Speaker(model(family_name))
    session = Session(wire, Desk(model=speaker.of), speaker, wire.said("user", "Go."))
    for place, kind in enumerate(KINDS):
        turn(session, kind, data, place)
    holds(session)
