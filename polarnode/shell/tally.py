"""What a node's sessions did since it started: numbers that only grow, for whoever watches the node from outside.

The rule for whoever edits it: counting is an increment in a dictionary, on the path of every turn, and nothing else; and every label has a
fixed set of values, because each combination is kept for ever. What is not in its set is counted as `other`.
"""

from collections import Counter
from copy import copy
from typing import Final, get_args

from attrs import define, field, fields

from polarnode.groups import EARLY_STOP, STALE, Member
from polarnode.merge import notes
from polarnode.merge.naming import REASONS
from polarnode.providers.dialect import Fault
from polarnode.records import Outcome, Status, Trajectory, Turn, TurnRole

OTHER: Final = "other"
# Why built-in builders leave turns out, and whose fault it is where there are no traces; builders of one's own say what they like.
LEFT_OUT: Final = frozenset(
    (
        *("failed", "empty", "superseded", "partial", "length", *get_args(TurnRole)),
        *("node", "client", "config", "model", "engine", "runtime", "harness", "evaluator", "journal", "laws", *get_args(Status)),
    )
)


@define(eq=False)
class Tally:
    """Counts by their labels. One a node; a session counts into its node's."""

    turns: "Counter[tuple[str, str, str, str, str]]" = field(factory=Counter)  # provider, kind, reason, role, state
    sampled_tokens: "Counter[str]" = field(factory=Counter)  # by role
    prompt_tokens: "Counter[str]" = field(factory=Counter)  # reused: the extended turn had them; new
    notes: "Counter[str]" = field(factory=Counter)  # by the word they begin with
    malformed_calls: int = 0
    refusals: "Counter[str]" = field(factory=Counter)  # by the fault's kind
    sessions: "Counter[str]" = field(factory=Counter)  # ended, by status; not those that lost their place
    replaced: "Counter[str]" = field(factory=Counter)  # sessions that lost their place to a fresh one, by whose fault
    traces: int = 0
    trainable_tokens: int = 0
    left_out_turns: "Counter[str]" = field(factory=Counter)  # by reason
    left_out_tokens: "Counter[str]" = field(factory=Counter)
    groups: "Counter[str]" = field(factory=Counter)  # over, by state
    stopped_early: int = 0  # sessions that were ended, or not begun, because their group had enough
    stale: "Counter[str]" = field(factory=Counter)  # sessions further behind than their task wants, by what it does with them

    def copied(self) -> "Tally":
        """These numbers as they are now, for a reader in another thread."""
        return Tally(**{each.name: copy(getattr(self, each.name)) for each in fields(Tally)})

    def turn(self, turn: Turn) -> None:
        """A turn was kept."""
        reason = turn.reason if turn.reason in REASONS else OTHER
        self.turns[turn.provider, turn.kind, reason, turn.role, turn.state] += 1
        self.sampled_tokens[turn.role] += len(turn.sampled)
        self.prompt_tokens["new"] += len(turn.prompt_delta)
        self.prompt_tokens["reused"] += turn.prompt_length - len(turn.prompt_delta)
        self.malformed_calls += 0 if turn.answer is None else turn.answer.malformed_calls
        if turn.notes:
            self.notes.update(notes.counted(turn.notes))

    def refused(self, fault: Fault) -> None:
        """A call was not answered."""
        self.refusals[fault.kind] += 1

    def lost(self, outcome: Outcome) -> None:
        """A session lost its place to a fresh one. Its rows are nobody's data, and are not counted."""
        self.replaced[outcome.boundary or OTHER] += 1

    def place(self, member: Member) -> None:
        """A place of a group is over."""
        self.stopped_early += member.why == EARLY_STOP
        if member.stale and (member.usable or str(member.why).startswith(STALE)):  # not one that is unusable for another reason
            self.stale["mark" if member.usable else "drop"] += 1

    def published(self, trajectory: Trajectory) -> None:
        """A session is over."""
        self.sessions[trajectory.outcome.status] += 1
        self.traces += len(trajectory.traces)
        self.trainable_tokens += trajectory.trainable_tokens
        sampled = {turn.index: len(turn.sampled) for turn in trajectory.turns}
        for left in trajectory.left_out:
            reason = left.reason if left.reason in LEFT_OUT else OTHER
            self.left_out_turns[reason] += 1
            self.left_out_tokens[reason] += sampled.get(left.turn, 0)
