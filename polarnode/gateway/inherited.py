"""The answers that a fork takes from its parent: what the parent's turns answered is given again while the
fork asks what the parent asked.

Synchronous, without a clock. An answer is given again only where the request is the one of the parent's turn:
the same number, the same path, the same prompt to the token, and no other call in progress. At the first
request for which that does not hold, or at the turn at which the fork is to begin, this ends for good, and
the engine samples from then on. The request of that turn is compared too, because the agent's earlier actions
may have had other results. Invariant: the turns given again are those with an index below `got`, without a
gap.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from attrs import define, field

from polarnode.core.conversation import Message
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn
from polarnode.merge.attach import Plan
from polarnode.merge.fingerprint import Path

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
