"""Token identity over whole sessions: whatever clients do, a prompt is its parent's ids and what is new, and
every sampled token is trained once.

The oracle knows nothing of keys: it compares what was said, message by message, the way the contract words
it.
"""

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import hypothesis.strategies as st
from attrs import define, evolve, field, frozen
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from merge_toys import BASH, SECRET, Pending, Session, ask, full, of_turns, said, suffix, system, told, user

from polarnode.core.conversation import Conversation, Message, Tool
from polarnode.core.trajectory import TurnState
from polarnode.merge.attach import Plan, attach
from polarnode.merge.builders import per_request, prefix_merging, prompt_ids
from polarnode.merge.fingerprint import FingerprintCache
from polarnode.merge.invariants import check
from polarnode.merge.lineage import Lineages

TEXTS = st.sampled_from(["ok", "done", "let me look", " padded ", ""])  # few, so that twins are common
CALLS = st.lists(
    st.sampled_from(
        [
            ("bash", '{"command": "ls", "n": 1.0}'),
            ("bash", '{"n": 1, "command": "ls"}'),
            ("read", ""),
            ("bash", "not json"),
        ]
    ),
    max_size=2,
)
TOOLS: list[tuple[Tool, ...]] = [(BASH,), (BASH, evolve(BASH, name="read")), ()]


def spoken(message: Message) -> object:
    """What a message says, for comparing as the contract does."""
    if message.role != "assistant":
        return message.role, message.text
    return (
        "assistant",
        message.text.strip(),
        tuple((call.name, meaning(call.arguments)) for call in message.calls),
    )


def meaning(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}", parse_int=float), sort_keys=True)
    except ValueError:
        return arguments


def rearranged(text: str) -> str:
    try:
        return json.dumps(
            json.loads(text or "{}", parse_float=lambda literal: int(float(literal))),
            sort_keys=True,
            separators=(",", ":"),
        )
    except ValueError:
        return text


def echoed(change: Callable[[Message], Message]) -> Callable[[Message], Message]:
    return lambda message: change(message) if message.role == "assistant" else message


ECHOES: list[Callable[[Message], Message]] = [
    echoed(lambda message: evolve(message, text=message.text.strip())),
    echoed(lambda message: evolve(message, text=f"\n{message.text} ")),
    echoed(lambda message: evolve(message, thinking="", refs=())),
    echoed(
        lambda message: evolve(
            message, calls=tuple(evolve(call, arguments=rearranged(call.arguments)) for call in message.calls)
        )
    ),
    echoed(
        lambda message: evolve(
            message, calls=tuple(evolve(call, id=call.id.replace("_", "")) for call in message.calls)
        )
    ),
    echoed(
        lambda message: evolve(
            message,
            calls=tuple(evolve(call, id=call.id.replace("call_", "toolu_")) for call in message.calls),
        )
    ),
]


@define(eq=False)
class Line:
    """One conversation as its client keeps it."""

    messages: list[Message]
    tools: tuple[Tool, ...] = (BASH,)
    agent: str = ""

    def conversation(self) -> Conversation:
        return ask(*self.messages, tools=self.tools)

    def fork(self, messages: list[Message]) -> "Line":
        return Line(messages, self.tools, self.agent)


@frozen(kw_only=True)
class Said:
    """What was said up to and with a turn's answer."""

    tools: tuple[Tool, ...]
    path: tuple[Message, ...]

    def is_shown_by(self, tools: tuple[Tool, ...], messages: Sequence[Message]) -> bool:
        return self.tools == tools and list(map(spoken, self.path)) == list(map(spoken, messages))

    def is_told_by(self, tools: tuple[Tool, ...], messages: Sequence[Message]) -> bool:
        """The same, but an answer that went on after a cut may be shown in one piece or in several."""
        return self.tools == tools and folded(self.path) == folded(messages)


def folded(messages: Sequence[Message]) -> list[object]:
    told: list[object] = []
    for role, run in groupby(messages, key=lambda message: message.role):
        if role != "assistant":
            told += map(spoken, run)
            continue
        shown = list(run)
        calls = [(call.name, meaning(call.arguments)) for message in shown for call in message.calls]
        told.append(("".join("".join(message.text.split()) for message in shown), calls))
    return told


@define(eq=False)
class Flight:
    pending: Pending
    line: Line
    asked: list[Message] = field(factory=list)


class Sessions(RuleBasedStateMachine):
    """Clients of one session: several lines of talk, each echoing, forking, rewriting, leaving; requests
    overlap at will.
    """

    @initialize()
    def start(self) -> None:
        self.session = Session()
        self.lines = [Line([system(), user()])]
        self.flights: list[Flight] = []
        self.said: dict[int, Said] = {}

    def line(self, data: st.DataObject) -> Line:
        return data.draw(st.sampled_from(self.lines), label="line")

    # ── what clients do ──────────────────────────────────────────────────

    @rule(
        data=st.data(),
        text=TEXTS,
        calls=CALLS,
        state=st.sampled_from(["complete", "complete", "complete", "partial", "failed"]),
    )
    def asks(self, data: st.DataObject, text: str, calls: list[tuple[str, str]], state: TurnState) -> None:
        flight = self.begin(self.line(data))
        self.finish(flight, text, calls, state, keeps=data.draw(st.booleans()))

    @rule(data=st.data(), text=TEXTS)
    def is_cut_by_length(self, data: st.DataObject, text: str) -> None:
        flight = self.begin(self.line(data))
        self.finish(
            flight, text, [], "complete", keeps=True, merges=data.draw(st.booleans()), finish="length"
        )

    @rule(data=st.data())
    @precondition(lambda self: len(self.flights) < 4)
    def asks_and_waits(self, data: st.DataObject) -> None:
        self.flights.append(self.begin(self.line(data)))

    @rule(
        data=st.data(),
        text=TEXTS,
        calls=CALLS,
        state=st.sampled_from(["complete", "complete", "partial", "failed"]),
    )
    @precondition(lambda self: self.flights)
    def is_answered(
        self, data: st.DataObject, text: str, calls: list[tuple[str, str]], state: TurnState
    ) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.finish(flight, text, calls, state, keeps=data.draw(st.booleans()))

    @rule(data=st.data())
    @precondition(lambda self: self.flights)
    def is_refused(self, data: st.DataObject) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.session.lineages.abandon_plan(flight.pending.plan)

    @rule(data=st.data(), text=st.sampled_from(["go on", "no", "more"]))
    def says_more(self, data: st.DataObject, text: str) -> None:
        self.line(data).messages.append(user(text))

    @rule(data=st.data(), text=TEXTS, calls=CALLS, replaced=st.booleans())
    def says_what_it_takes_back(
        self, data: st.DataObject, text: str, calls: list[tuple[str, str]], replaced: bool
    ) -> None:
        line = self.line(data)
        place = len(line.messages)
        once = line.fork([*line.messages, user("of the moment")])
        self.finish(self.begin(once), text, calls, "complete", keeps=True)
        once.messages[place : place + 1] = [user("in other words")] if replaced else []
        self.lines.append(once)

    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        line = self.line(data)
        self.lines.append(line.fork(line.messages[: data.draw(st.integers(1, len(line.messages)))]))

    @rule(data=st.data())
    def edits_its_own_message(self, data: st.DataObject) -> None:
        line = self.line(data)
        place = data.draw(st.integers(0, len(line.messages) - 1))
        if line.messages[place].role != "assistant":
            line.messages[place] = evolve(line.messages[place], text=line.messages[place].text + " edited")

    @rule(data=st.data())
    def rewrites_our_message(self, data: st.DataObject) -> None:
        line = self.line(data)
        place = data.draw(st.integers(0, len(line.messages) - 1))
        if line.messages[place].role == "assistant":
            line.messages[place] = said("rewritten " + line.messages[place].text)

    @rule(data=st.data(), echo=st.sampled_from(ECHOES))
    def echoes_otherwise(self, data: st.DataObject, echo: Callable[[Message], Message]) -> None:
        line = self.line(data)
        line.messages = [echo(message) for message in line.messages]

    @rule(
        name=st.sampled_from(["", "a1", "a2"]),
        tools=st.sampled_from(TOOLS),
        text=st.sampled_from(["be good", "help"]),
    )
    def starts_another(self, name: str, tools: tuple[Tool, ...], text: str) -> None:
        self.lines.append(Line([system(text), user()], tools, name))

    @rule(data=st.data())
    def compacts(self, data: st.DataObject) -> None:
        line = self.line(data)
        asking = line.fork([*line.messages, user("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools")])
        flight = self.begin(asking)
        assert flight.pending.plan.role == "compaction"
        self.finish(flight, "the summary", [], "complete", keeps=True)
        line.messages = [
            line.messages[0],
            user("This session is being continued from a previous conversation: the summary"),
        ]

    # ── what must hold of every request ──────────────────────────────────

    def begin(self, line: Line) -> Flight:
        self.memory_changes_nothing(line)
        flight = Flight(
            self.session.begin(line.conversation(), hints={"agent": line.agent}), line, list(line.messages)
        )
        self.prompt_is_the_parents_ids_and_what_is_new(flight)
        self.match_is_sound_and_deepest(flight.pending.plan, line.conversation())
        self.benign_echoes_change_nothing(flight)
        self.a_changed_client_message_attaches_above_itself(flight)
        return flight

    def memory_changes_nothing(self, line: Line) -> None:
        lineages = self.session.lineages
        found = [
            attach(
                line.conversation(),
                line.agent,
                ledger=lineages._ledger,
                references=lineages.references,
                memo=memo,
            )
            for memo in (lineages._memo, FingerprintCache())
        ]
        assert evolve(found[0], notes=of_turns(found[0].notes)) == evolve(
            found[1], notes=of_turns(found[1].notes)
        )

    def prompt_is_the_parents_ids_and_what_is_new(self, flight: Flight) -> None:
        plan, prompt = flight.pending.plan, flight.pending.prompt
        if plan.parent is None:
            assert list(prompt) == full(flight.line.conversation())
            return
        parent = next(turn for turn in self.session.turns if turn.index == plan.parent)
        before = self.session.prompts[plan.parent] + parent.sampled
        assert prompt[: len(before)] == before
        assert list(prompt[len(before) :]) == self.session.close(plan) + suffix(flight.asked[plan.matched :])

    def match_is_sound_and_deepest(self, plan: Plan, conversation: Conversation) -> None:
        tools, messages = conversation.tools, conversation.messages
        assert plan.new == messages[plan.matched :]
        assert (plan.parent is None) == (plan.matched == 0)
        if plan.parent is not None:
            assert self.said[plan.parent].is_told_by(tools, messages[: plan.matched])
        fitting = [
            known for known in self.said.values() if known.is_shown_by(tools, messages[: len(known.path)])
        ]
        assert plan.matched >= max((len(known.path) for known in fitting), default=0)

    def benign_echoes_change_nothing(self, flight: Flight) -> None:
        plan = flight.pending.plan
        for echo in ECHOES:
            other = self.probe(flight, [echo(message) for message in flight.asked])
            assert (other.parent, other.matched, other.before_key) == (
                plan.parent,
                plan.matched,
                plan.before_key,
            )

    def a_changed_client_message_attaches_above_itself(self, flight: Flight) -> None:
        for place, message in enumerate(flight.asked):
            if message.role != "assistant":
                changed = [
                    *flight.asked[:place],
                    evolve(message, text=message.text + "!"),
                    *flight.asked[place + 1 :],
                ]
                assert self.probe(flight, changed).matched <= place

    def probe(self, flight: Flight, messages: list[Message]) -> Plan:
        plan = self.session.lineages.plan(
            flight.line.fork(messages).conversation(), hints={"agent": flight.line.agent}
        )
        self.session.lineages.abandon_plan(plan)
        return plan

    def finish(
        self,
        flight: Flight,
        text: str,
        calls: list[tuple[str, str]],
        state: TurnState,
        *,
        keeps: bool,
        merges: bool = False,
        finish: Any = None,
    ) -> None:
        answer = self.session.answer(
            flight.pending.plan, text, calls, finish=finish or ("stop" if state == "complete" else "abort")
        )
        turn = self.session.end(flight.pending, answer, state=state)
        shown = answer.as_message()
        if state == "failed":
            return
        self.said[turn.index] = Said(tools=flight.line.tools, path=(*flight.asked, shown))
        if keeps or state == "complete":
            whole = self.merged(flight, shown) if merges else [*flight.asked, shown]
            flight.line.messages = [*whole, *(told(call, f"result of {call.name}") for call in shown.calls)]

    def merged(self, flight: Flight, shown: Message) -> list[Message]:
        """The history with an answer that went on after a cut shown in one piece."""
        if flight.pending.plan.new or flight.pending.plan.parent is None:
            return [*flight.asked, shown]
        half = flight.asked[-1]
        return [*flight.asked[:-1], evolve(half, text=half.text + shown.text, calls=half.calls + shown.calls)]

    # ── what must hold of the session at all times ───────────────────────

    @invariant()
    def every_sampled_token_is_trained_once(self) -> None:
        turns = self.session.turns
        for built in (
            prefix_merging(turns, {}),
            prefix_merging(turns, {"train_auxiliary": True}),
            per_request(turns, {}),
        ):
            counts = check(turns, built)
            out = {left.turn for left in built.left_out}
            due = sum(len(turn.sampled) for turn in turns if turn.index not in out)
            assert sum(sum(trace.loss_mask) for trace in built.traces) == counts.trainable == due

    @invariant()
    def prompts_are_rebuilt_exactly(self) -> None:
        for turn in self.session.turns[-3:]:
            assert prompt_ids(self.session.turns, turn.index) == self.session.prompts[turn.index]

    @invariant()
    def restored_lineages_plan_the_same(self) -> None:
        if self.flights:
            return
        again = Lineages.restore(session_id=self.session.session_id, secret=SECRET, turns=self.session.turns)
        for line in self.lines[-3:]:
            mine, theirs = (
                lineages.plan(line.conversation(), hints={"agent": line.agent})
                for lineages in (self.session.lineages, again)
            )
            assert evolve(mine, index=0, lineage=0, notes=of_turns(mine.notes)) == evolve(
                theirs, index=0, lineage=0, notes=of_turns(theirs.notes)
            )
            assert self.session.lineages.history(mine) == again.history(theirs)
            self.session.lineages.abandon_plan(mine)
            again.abandon_plan(theirs)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
