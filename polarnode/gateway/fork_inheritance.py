"""What a fork has from its parent, and how long.

A fork by replay is given its parent's answers again while it asks what the parent asked. An answer is given
again only where the request is the one of the parent's turn: the same number, the same path, the same prompt
to the token, and no other call in progress. At the first request for which that does not hold, or at the turn
at which the fork is to begin, this ends for good, and the engine samples from then on. The request of that
turn is compared too, because the agent's earlier actions may have had other results. Invariant: the turns
given again are those with an index below `got`, without a gap.

A fork by resume or by freeze begins with its parent's turns. Its harness rebuilds its conversation from its
own files, or is a copy of the parent's processes, and its first request must be its parent's request at the
turn from which the session goes on. The node removes the resume marker that it had to give the harness, and
compares the rest with the parent's request by its path key. With equal keys the prompt is the parent's, token
for token. Any other request is refused with the first difference, before anything is sampled. Calls of other
roles (a title, a sub-agent) pass, because a resumed harness may make one first. But a session whose main
agent never sent the recorded request is no fork either; `fault` says so at its end.

Everything here is synchronous and without a clock.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal

from attrs import define, evolve, field

from polarnode.core.conversation import Conversation, Message, ModelRequest
from polarnode.core.errors import ForkError
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn
from polarnode.gateway.recorded_difference import first_difference
from polarnode.merge.attach import Plan, References
from polarnode.merge.fingerprint import Path
from polarnode.providers.volatile import without_marker

# ── forks by replay ────────────────────────────────────────────────────────────

# The characters of a message that a sentence shows: a path, a date or a number, and what is around it.
SHOWN = 80
CHARS_BEFORE = 20  # How many of them precede the first that differs.


@define(eq=False)
class InheritedAnswers:
    """The answers of a parent's turns below `turn`; `turns` has turn `turn` as well, where it is recorded.
    `on_end` is called once, before anything else is sampled, with the number of answers given again and the
    first difference in words (None: the fork is in the parent's state).
    """

    turns: dict[int, Turn]
    turn: int
    on_end: Callable[[int, str | None], None]
    got: int = field(default=0, init=False)
    over: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.turns = {index: turn for index, turn in self.turns.items() if index <= self.turn}

    def take(self, plan: Plan, order: GenerateOrder, *, alone: bool) -> Turn | None:
        """The parent's turn whose answer this request is given. None where the engine samples, for this
        request and every later one.
        """
        if self.over:
            return None
        differs = self._difference(plan, order, alone=alone)
        if self.got < self.turn and differs is None:
            self.got = plan.index + 1
            return self.turns.pop(plan.index)
        self.over = True
        self.turns.clear()
        self.on_end(self.got, differs)
        return None

    def _difference(self, plan: Plan, order: GenerateOrder, *, alone: bool) -> str | None:
        """Why a request is not answered from the record, or None."""
        place, recorded = f"turn {plan.index}", self.turns.get(plan.index)
        if plan.index != self.got or not alone:
            return f"turn {self.got} was asked for while another call was in progress"
        if recorded is None:
            return f"the record has no {place}" if self.got < self.turn else None
        if recorded.state != "complete" and self.got < self.turn:
            return f"{place} of the record has no whole answer: it is {recorded.state}"
        if Path.read(plan.before_key).key != Path.read(recorded.before_key).key:
            return f"{place}: {_words(plan, recorded)}"
        if plan.parent != recorded.parent:
            return f"{place} extends turn {plan.parent}, and turn {recorded.parent} in the record"
        if len(order.prompt) != recorded.prompt_length or order.prompt[recorded.begin :] != (
            recorded.prompt_delta
        ):
            return f"{place}: the messages are the same, and the prompt has other tokens than in the record"
        return None


def _words(plan: Plan, recorded: Turn) -> str:
    """Describe the first message in which a request differs from the record."""
    new = () if recorded.new_messages is None else recorded.new_messages.messages
    first = recorded.matched or 0
    if plan.matched != first:
        return f"it goes on from message {plan.matched}, and from message {first} in the record"
    for place, (found, known) in enumerate(zip_longest(plan.new, new), first):
        if found is None or known is None:
            side = "is missing" if found is None else "is not in the record"
            return f"message {place} ({(found or known).role}) {side}"
        if _text(found) != _text(known) or found.role != known.role:
            found_words, known_words = _texts_around(_text(found), _text(known))
            return f"message {place} ({found.role}) has {found_words!r}, and {known_words!r} in the record"
    return "its tools or its thinking flag are others than in the record"


def _text(message: Message) -> str:
    calls: Sequence[str] = [f"{call.name} {call.arguments}" for call in message.calls]
    return "\n".join((message.text, *calls))


def _texts_around(one: str, other: str) -> tuple[str, str]:
    """Both texts around the first character that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))
    start = max(0, at - CHARS_BEFORE)
    return one[start : start + SHOWN], other[start : start + SHOWN]


def recorded_chunk(turn: Turn, order: GenerateOrder) -> Chunk:
    """A recorded answer as an engine would return it whole. It has top logprobs if the record has as many as
    the call asks for.
    """
    top = turn.top if turn.top is not None and turn.top.k >= order.top_logprobs else None
    return Chunk(
        ids=turn.sampled,
        logprobs=turn.logprobs,
        # Other ends (a stop string, the one call that was asked for) are found again when the answer is
        # parsed.
        finish_reason="length" if turn.finish_reason == "length" else "stop",
        version_spans=turn.version_spans,
        cached_tokens=turn.usage.cached_tokens,
        top_logprobs=top,
        routed=turn.routed,
    )


# ── forks by resume and by freeze ───────────────────────────────────────────


@define(eq=False, kw_only=True)
class ResumedSession:
    """The state from which a session goes on: its parent's turn `turn`, with the `before_key` and the
    conversation of that turn's request. `how` is the way of the fork, as a word in a sentence.
    """

    parent: str
    turn: int
    before_key: str
    conversation: Conversation
    how: Literal["resuming", "freezing"] = "resuming"
    begun: bool = field(default=False, init=False)  # whether the recorded request was made again
    refused: ForkError | None = field(default=None, init=False)

    def strip_marker(self, request: ModelRequest) -> ModelRequest:
        """The request without the resume marker, and without what its harness put around it."""
        conversation = request.conversation
        kept = without_marker(conversation.messages)
        if kept is conversation.messages:
            return request
        return evolve(request, conversation=evolve(conversation, messages=kept))

    def check(self, plan: Plan, conversation: Conversation) -> None:
        """Raise ForkError if the main agent's first request is not the recorded one. Later requests are not
        compared.
        """
        if self.begun or plan.role != "main":
            return
        if Path.read(plan.before_key).key == Path.read(self.before_key).key:
            self.begun = True
            return
        found = first_difference(self.conversation, conversation)
        why = found or "its answers are not those of the session that it goes on from"
        self.refused = ForkError(
            f"turn {self.turn} of session {self.parent} cannot be forked by {self.how}: the resumed request"
            f" is not the recorded one: {why}"
        )
        raise self.refused

    def fault(self) -> ForkError | None:
        """Why the session is no fork, once its harness has ended. None if it is one."""
        if self.begun or self.refused is not None:
            return self.refused
        return ForkError(
            f"turn {self.turn} of session {self.parent} cannot be forked by {self.how}: the resumed harness"
            " ended without asking for it again"
        )


# ── what a session has of it ───────────────────────────────────────────


@define(eq=False)
class ForkInheritance:
    """What a session has from its parent; empty in a session that is no fork.

    Turns with an index below `turns` are the parent's. They count against the session's budgets, and they are
    trained in the parent. `answers` are given again until the session asks for something else, and None after
    that. `resumed` is set if the session's harness is resumed. `parent_key` is the key that a harness holds
    in its memory if it is a copy of its parent's processes.
    """

    turns: int = 0
    answers: InheritedAnswers | None = None
    resumed: ResumedSession | None = None
    parent_key: str | None = field(default=None, repr=False)

    def replay(
        self,
        recorded: Sequence[Turn],
        turn: int,
        references: References,
        on_end: Callable[[int, str | None], None],
    ) -> None:
        """Answer the first calls with the answers of the parent's `recorded` turns below `turn`, as long as
        the calls are the same. Turn `turn` itself, if it is among them, is only compared. The calls in the
        answers get the parent's ids, which `references` learn. `on_end` is called before the first call that
        is sampled anew, with the number of turns inherited and the first difference in words.
        """

        def ended(got: int, differs: str | None) -> None:
            self.turns, self.answers = got, None
            on_end(got, differs)

        for each in recorded:
            for call in () if each.answer is None or each.index >= turn else each.answer.calls:
                references.adopt(each.index, call.id)
        self.turns = turn
        self.answers = InheritedAnswers({each.index: each for each in recorded}, turn, ended)
