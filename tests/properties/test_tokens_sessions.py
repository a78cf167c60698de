"""Concurrency over the real pure parts: clients of several APIs share one session, and everything that can
happen to their calls happens in any order. After every step the laws hold, every prompt is its parent's ids
and what is new, and what a crash would leave plans the same.

The oracle knows nothing of keys: it compares what requests say, message by message.
"""

import json
from collections.abc import Sequence
from typing import Any

from attrs import define, evolve, field
from echo_kit import ECHOES
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from merge_toys import of_turns
from sample_kit import examples, letter_by_letter
from talk_kit import SECRET, Ask, CallInProgress, Desk
from test_merge_properties import folded, spoken
from tokens_kit import CALL, CALLED, CLOSE, END, OPEN, Watched, model
from wire_kit import ANTHROPIC, CHAT, GOOGLE, RESPONSES, Entry, Wire, chat_choices

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message
from polarnode.core.trajectory import Turn
from polarnode.merge.builders import per_request, prefix_merging, prompt_ids
from polarnode.merge.invariants import check
from polarnode.merge.ledger import chain
from polarnode.merge.lineage import Lineages

WORDS = st.sampled_from(("ok", "look", "<|im_end|>"))
SUMMARY = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools"


@define(eq=False)
class Line:
    """One conversation as its client keeps it."""

    wire: Wire
    history: list[Entry]
    tools: tuple[str, ...] = ("look",)
    headers: dict[str, str] = field(factory=dict)
    last: Ask | None = None
    choices: int = 1

    def ask(self, *, stream: bool, echo: Any) -> Ask:
        # A Messages request that ends with the model's own message asks for the rest of it, which
        # tests/gateway/test_prefill.py plays.
        if self.wire is ANTHROPIC and self.wire.ours(self.history[-1]):
            self.history += self.wire.said("user", "on")
        more: dict[str, Any] = {"n": self.choices} if self.choices > 1 else {}
        asked = self.wire.ask(self.history, tools=self.tools, stream=stream, **more)
        body = json.loads(json.dumps(asked.body))
        return Ask(
            path=asked.path, body=body if echo is None else echo(self.wire, body), headers=self.headers
        )


@define(eq=False)
class Flight:
    """A call under way, what each choice will say, and how much of it the engine gave."""

    line: Line
    ask: Ask
    asking: CallInProgress
    length: int  # of the history it was asked with: what came to it meanwhile is another branch's
    samples: list[Any]
    given: list[int]


class Clients(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.watched = Watched(model().tokenizer)
        self.desk = Desk(tokenizer=self.watched, on_commit=self.committed)
        self.lines = [self.line(CHAT), self.line(ANTHROPIC)]
        self.flights: list[Flight] = []
        self.said: dict[int, tuple[Conversation, Message]] = {}
        self.asked: dict[int, Conversation] = {}
        self.cut: list[tuple[Line, Ask, int]] = []
        self.marks: dict[int, str] = {}
        self.version = self.samples = 0

    def line(self, wire: Wire, head: str = "Be brief.", **more: Any) -> Line:
        return Line(wire, [*wire.said("system", head), *wire.said("user", "Go.")], **more)

    # ── calls ─────────────────────────────────────────────────────────────────

    @rule(data=st.data(), stream=st.booleans(), echo=st.none() | st.sampled_from(ECHOES))
    @precondition(lambda self: len(self.flights) < 4)
    def asks(self, data: st.DataObject, stream: bool, echo: Any) -> None:
        line = data.draw(st.sampled_from(self.lines), label="line")
        line.last = line.ask(stream=stream, echo=echo)
        self.begin(line, line.last, data)

    @rule(data=st.data())
    @precondition(lambda self: any(line.last for line in self.lines) and len(self.flights) < 4)
    def asks_the_same_again(self, data: st.DataObject) -> None:
        """While it is answered, or after: a twin."""
        line = data.draw(st.sampled_from([line for line in self.lines if line.last]))
        assert line.last is not None
        self.begin(line, line.last, data)

    @rule(data=st.data(), resumed=st.booleans())
    @precondition(lambda self: self.cut and len(self.flights) < 4)
    def asks_again_after_a_cut(self, data: st.DataObject, resumed: bool) -> None:
        line, ask, index = self.cut.pop(data.draw(st.integers(0, len(self.cut) - 1)))
        self.begin(line, ask, data, resume=index if resumed else None)

    @rule(data=st.data(), size=st.integers(1, 12))
    @precondition(lambda self: self.flights)
    def samples_some(self, data: st.DataObject, size: int) -> None:
        self.give(data.draw(st.sampled_from(self.flights)), size)

    @rule(data=st.data())
    @precondition(lambda self: self.flights)
    def samples_the_rest(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.flights)))

    @rule(data=st.data(), stream=st.booleans(), keeps=st.booleans())
    def talks(self, data: st.DataObject, stream: bool, keeps: bool) -> None:
        """A whole turn, and what its client says to it."""
        line = data.draw(st.sampled_from(self.lines))
        line.last = line.ask(stream=stream, echo=None)
        flight = self.begin(line, line.last, data)
        self.finish(flight)
        if keeps:
            line.history += line.wire.said("user", "on")

    @rule()
    def weights_are_new(self) -> None:
        self.version += 1

    @rule(data=st.data(), how=st.sampled_from(("leaves", "leaves", "abort", "fails")))
    @precondition(lambda self: self.flights)
    def ends_early(self, data: st.DataObject, how: str) -> None:
        flight = data.draw(st.sampled_from(self.flights))
        match how:
            case "leaves":
                flight.asking.leave()
            case "abort":
                flight.asking.give((), "abort", version=str(self.version))
            case "fails":
                flight.asking.fail()
        self.land(flight)

    @rule()
    @precondition(lambda self: self.flights)
    def the_session_ends_and_is_taken_up_again(self) -> None:
        for flight in list(self.flights):
            flight.asking.end_session()
            self.land(flight)
        self.restore()

    @rule()
    def the_node_is_killed(self) -> None:
        """What was under way is lost, with its numbers; all that was recorded is there."""
        self.flights.clear()
        self.restore()

    # ── conversations ─────────────────────────────────────────────────────────

    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.lines))
        upto = data.draw(st.integers(2, len(line.history)))
        self.lines.append(evolve(line, history=line.history[:upto], last=None))

    @rule(data=st.data())
    def rewrites_what_it_said(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.lines))
        place = data.draw(st.integers(0, len(line.history) - 1))
        if not line.wire.ours(line.history[place]):
            line.history[place : place + 1] = line.wire.said("user", "in other words")

    @rule(data=st.data())
    def rewrites_what_we_said(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.lines))
        places = [place for place, entry in enumerate(line.history) if line.wire.ours(entry)]
        if places:
            place = data.draw(st.sampled_from(places))
            line.history[place] = json.loads(json.dumps(line.history[place]).replace('"ok', '"okay'))

    @rule(wire=st.sampled_from((CHAT, ANTHROPIC, RESPONSES, GOOGLE)), choices=st.sampled_from((1, 1, 2)))
    @precondition(lambda self: len(self.lines) < 8)
    def another_begins(self, wire: Wire, choices: int) -> None:
        self.lines.append(self.line(wire, choices=choices if wire is CHAT else 1))

    @rule(marked=st.booleans(), tools=st.sampled_from((("look",), ("look", "bash"), ())))
    @precondition(lambda self: len(self.lines) < 8)
    def a_sub_agent_begins(self, marked: bool, tools: tuple[str, ...]) -> None:
        headers = {"x-session-id": "s1", "x-parent-session-id": "s0"} if marked else {}
        self.lines.append(self.line(ANTHROPIC, "You help.", tools=tools, headers=headers))

    @rule(data=st.data())
    def compacts(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.lines))
        asking = evolve(line, history=[*line.history, *line.wire.said("user", SUMMARY)], choices=1)
        self.finish(self.begin(asking, asking.ask(stream=False, echo=None), data))
        line.history = [
            line.history[0],
            *line.wire.said("user", "This session is being continued from a previous conversation: ok"),
        ]

    # ── what must hold of each request ────────────────────────────────────────

    def begin(self, line: Line, ask: Ask, data: st.DataObject, *, resume: int | None = None) -> Flight:
        known = len(self.watched.encoded)
        asking = self.desk.begin(ask, resume=resume)
        conversation = asking.request.conversation
        for plan in asking.plans:
            self.asked[plan.index] = conversation
        self.is_parent_and_new(asking)
        self.is_sound(asking, conversation)
        self.encodes_nothing_sampled(asking, self.watched.encoded[known:])
        samples = [self.sample(plan.index, data) for plan in asking.plans]
        flight = Flight(line, ask, asking, len(line.history), samples, [0] * len(samples))
        self.flights.append(flight)
        return flight

    def is_parent_and_new(self, asking: CallInProgress) -> None:
        plan, prompt = asking.plan, asking.prompt
        assert all(order.prompt == prompt for order in asking.orders.values())
        if plan.parent is None:
            # which transformers makes a control token
            if not any("<|im_end|>" in message.text for message in asking.request.conversation.messages):
                assert list(prompt) == list(model().expected(asking.request.conversation))
            return
        parent = self.desk.turn(plan.parent)
        before = self.desk.prompts[plan.parent] + parent.sampled
        assert prompt[: len(before)] == before
        if not plan.new and parent.sampled[-1] not in model().family.turn_ends:
            assert prompt == before
            return
        close = (
            ids()
            if parent.sampled[-1] in model().family.turn_ends
            else prompt[len(before) : prompt.index(model().family.turn_end, len(before)) + 1]
        )
        assert len(close) <= 2
        rest = self.desk.text(prompt[len(before) + len(close) :])
        assert rest.startswith("\n")
        assert rest.endswith("<|im_start|>assistant\n")
        assert [message.text in rest for message in plan.new] == [True] * len(plan.new)

    def is_sound(self, asking: CallInProgress, conversation: Conversation) -> None:
        plan = asking.plan
        if plan.reason == "resumed":
            return
        tools, messages = conversation.tools, conversation.messages
        assert (plan.parent is None) == (plan.matched == 0)
        if plan.parent is not None:
            known, answer = self.said[plan.parent]
            assert known.tools == tools
            assert folded([*known.messages, answer]) == folded(messages[: plan.matched])
        fitting = [
            len(known.messages) + 1
            for known, answer in self.said.values()
            if known.tools == tools
            and list(map(spoken, [*known.messages, answer]))
            == list(map(spoken, messages[: len(known.messages) + 1]))
        ]
        assert plan.matched >= max(fitting, default=0)

    def encodes_nothing_sampled(self, asking: CallInProgress, encoded: Sequence[str]) -> None:
        """Not one word of the turns it extends, but where its client shows an answer of them once more."""
        ended = {turn.index: turn for turn in self.desk.turns}
        shown = [message.text + message.thinking for message in asking.plan.new]
        for turn in chain(ended, asking.plan.parent):
            mark = self.marks.get(turn.index)
            assert (
                mark is None
                or any(mark in text for text in shown)
                or not any(mark in piece for piece in encoded)
            )

    def sample(self, index: int, data: st.DataObject) -> Any:
        """A thought that no other sample has, words that others may have, a call or none; whole, or of no
        end.
        """
        self.samples += 1
        self.marks[index] = f"mark{self.samples}."
        spelled, said = model().spelled, data.draw(WORDS, label="says")
        call = (
            spelled(CALL, '\n{"name": "look", "arguments": {"path": "a", "n": 1.0}}\n', CALLED)
            if data.draw(st.booleans(), label="calls")
            else ids()
        )
        end = spelled(END) if data.draw(st.sampled_from((True, True, False)), label="ends") else ids()
        return spelled(OPEN, self.marks[index], CLOSE) + letter_by_letter(said, model()) + call + end

    # ── what the engine does ──────────────────────────────────────────────────

    def give(self, flight: Flight, size: int) -> None:
        for choice, sample in enumerate(flight.samples):
            start = flight.given[choice]
            if not flight.asking.exchange.over:
                # the last token comes with its reason
                flight.given[choice] = min(len(sample) - 1, start + size)
                flight.asking.give(
                    sample[start : flight.given[choice]], choice=choice, version=str(self.version)
                )

    def finish(self, flight: Flight) -> None:
        for choice, sample in enumerate(flight.samples):
            reason = "stop" if sample[-1] in model().family.stop_ids else "length"
            flight.asking.give(
                sample[flight.given[choice] :], reason, choice=choice, version=str(self.version)
            )
        self.land(flight)

    def land(self, flight: Flight) -> None:
        """A call is over: what its client makes of it."""
        self.flights.remove(flight)
        assert flight.asking.over
        line, asking = flight.line, flight.asking
        if asking.ended:
            for answer, sample in zip(asking.answers, flight.samples, strict=True):
                assert asking.plan.reason == "resumed" or answer.finish_reason in (
                    "length",
                    "stop",
                    "tool_calls",
                ), sample
            stream = bool(flight.ask.body.get("stream")) or "stream" in flight.ask.path
            if len(line.history) == flight.length:
                entries = (
                    chat_choices(asking.sent, stream)[-1:]
                    if line.wire is CHAT
                    else line.wire.answered(asking.sent, stream)
                )
                calls = line.wire.calls(entries)
                line.history += [*entries, *line.wire.results(calls, ["result"] * len(calls))]
        elif (
            len(asking.plans) == 1
            and (turn := self.desk.turns[-1]).index == asking.plan.index
            and turn.state == "partial"
            and turn.sampled
        ):
            self.cut.append((line, flight.ask, turn.index))

    def committed(self, turn: Turn) -> None:
        if turn.state != "failed" and turn.answer is not None:
            self.said[turn.index] = (self.asked[turn.index], turn.answer.as_message())
        assert (
            self.desk.prompts[turn.index][turn.prompt_length - len(turn.prompt_delta) :] == turn.prompt_delta
        )

    def restore(self) -> None:
        self.desk.lineages = Lineages.restore(
            session_id=self.desk.session_id, secret=SECRET, turns=self.desk.turns
        )

    # ── what must hold of the session at all times ────────────────────────────

    @invariant()
    def every_sampled_token_is_trained_once(self) -> None:
        turns = self.desk.turns
        for built in (
            prefix_merging(turns, {"train_auxiliary": True}),
            prefix_merging(turns, {}),
            per_request(turns, {}),
        ):
            counts = check(turns, built)
            out = {left.turn: left.reason for left in built.left_out}
            assert all(out.values())
            assert sum(sum(trace.loss_mask) for trace in built.traces) == counts.trainable
            assert counts.trainable == sum(len(turn.sampled) for turn in turns if turn.index not in out)
        superseded = {left.turn for left in prefix_merging(turns, {"train_auxiliary": True}).left_out}
        assert all(turn.state != "complete" for turn in turns if turn.index in superseded)

    @invariant()
    def prompts_are_rebuilt_exactly(self) -> None:
        for turn in self.desk.turns[-3:]:
            assert prompt_ids(self.desk.turns, turn.index) == self.desk.prompts[turn.index]
            assert list(turn.logprobs) == sorted(turn.logprobs, key=lambda _: 0)
            assert [span.start for span in turn.version_spans[1:]] == [
                span.end for span in turn.version_spans[:-1]
            ]

    @invariant()
    def restored_lineages_plan_the_same(self) -> None:
        if self.flights or not self.desk.turns:
            return
        mine = self.desk.lineages
        again = Lineages.restore(session_id=self.desk.session_id, secret=SECRET, turns=self.desk.turns)
        for line in self.lines[-2:]:
            request = self.desk.read(line.ask(stream=False, echo=None))
            one, other = (each.plan(request.conversation, hints=request.hints) for each in (mine, again))
            assert evolve(one, index=0, lineage=0, notes=of_turns(one.notes)) == evolve(
                other, index=0, lineage=0, notes=of_turns(other.notes)
            )
            assert mine.history(one) == again.history(other)
            mine.abandon_plan(one)
            again.abandon_plan(other)

    def teardown(self) -> None:
        assert len({turn.index for turn in getattr(self, "desk", Desk()).turns}) == len(
            getattr(self, "desk", Desk()).turns
        )


TestClients = Clients.TestCase
TestClients.settings = examples(40, stateful_step_count=25)
