"""A node's own measurements: how late its event loop is, its descriptor limit, and its counters.

`LoopLag` measures how much too late a sleeping task wakes up. Every session waits for each step of the loop,
so this one number tells whether the node is overloaded. It costs a wake-up each TICK_S and a few kilobytes.

`NodeCounters` counts what sessions did since the node started. Invariants: counting is nothing but an
increment in a dictionary, because it is on the path of every turn. Every label has a fixed set of values,
because each combination is kept forever; a value outside its set is counted as `other`.
"""

import resource
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from typing import Final, get_args

import trio
from attrs import define, field, fields, frozen

from polarnode.core.trajectory import Outcome, Status, Trajectory, Turn, TurnRole, left_out_by_reason
from polarnode.groups.group import EARLY_STOP_REASON, STALE_REASON, Member
from polarnode.merge import figures
from polarnode.merge.turn_kinds import REASONS
from polarnode.providers.contract import Fault

# ── event loop lag ────────────────────────────────────────────────────────────

# With 20 samples a second a step of 50 ms is always seen, and sampling takes 0.1 % of a core.
TICK_S: Final = 0.05
KEPT: Final = 1200  # samples, one minute; a longer window would hide the current state


@frozen(kw_only=True)
class LagStatistics:
    """How late the loop was within the last minute, in seconds: median, 99th percentile and maximum."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@define(eq=False)
class LoopLag:
    """The latest measurements of how late the loop was, in a ring."""

    _late: "array[float]" = field(factory=lambda: array("d"))
    _next: int = 0

    def note(self, seconds: float) -> None:
        """Record how late the loop was, in seconds."""
        if len(self._late) < KEPT:
            self._late.append(seconds)
        else:
            self._late[self._next] = seconds
            self._next = (self._next + 1) % KEPT

    def statistics(self) -> LagStatistics:
        """The statistics of the last minute; zeros before the first measurement."""
        late = sorted(self._late)
        if not late:
            return LagStatistics()
        return LagStatistics(
            p50=late[len(late) // 2], p99=late[min(len(late) - 1, len(late) * 99 // 100)], max=late[-1]
        )


@asynccontextmanager
async def open_loop_lag() -> AsyncIterator[LoopLag]:
    """Measure how late the loop is for as long as the block runs."""
    lag = LoopLag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_look, lag)
        yield lag
        nursery.cancel_scope.cancel()


async def _look(lag: LoopLag) -> None:
    while True:
        meant = trio.current_time() + TICK_S
        await trio.sleep_until(meant)
        lag.note(max(0.0, trio.current_time() - meant))


# ── descriptors ───────────────────────────────────────────────────────────────


def lift_descriptor_limit() -> int:
    """Raise the soft limit on open files to the hard limit, for this process and its children, and return it.

    The usual soft limit of 1,024 is for programs that use select(). A node's container takes seven
    descriptors, its model endpoint up to 256 connections, its proxy 64 times two; without descriptors a node
    can neither accept a connection nor start a container, for any session.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# ── counters ──────────────────────────────────────────────────────────────────

OTHER: Final = "other"
# Upper bounds in seconds. They range from an answer at once, through the interval of keep-alives, to the time
# that clients wait for a whole answer.
WAIT_BOUNDS_S: Final = (0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0)
# Upper bounds in seconds for turns and sessions: from the time to a first token up to hours.
DURATION_BOUNDS_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
# The reasons for which built-in builders leave turns out, and whose fault it is if there are no traces. The
# builder of a plug-in may give any reason.
LEFT_OUT: Final = frozenset(
    (
        *("failed", "empty", "superseded", "partial", "length", "oversize", *get_args(TurnRole)),
        *(
            "node",
            "client",
            "config",
            "model",
            "engine",
            "runtime",
            "harness",
            "fork",
            "evaluator",
            "journal",
            "laws",
            *get_args(Status),
        ),
    )
)


@define
class DurationHistogram:
    """A histogram of durations in seconds, and their sum. The key of a count is the index in DURATIONS of the
    first bound that is not exceeded.
    """

    counts: "Counter[int]" = field(factory=Counter)
    total: float = 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.total += seconds

    def __copy__(self) -> "DurationHistogram":
        return DurationHistogram(copy(self.counts), self.total)


@define(eq=False)
class NodeCounters:
    """The counters of one node, by label; all its sessions count here."""

    # The key is (provider, kind, reason, role, state).
    turns: "Counter[tuple[str, str, str, str, str]]" = field(factory=Counter)
    sampled_tokens: "Counter[str]" = field(factory=Counter)  # by role
    # Prompt tokens are "reused" if the extended turn had them, else "new".
    prompt_tokens: "Counter[str]" = field(factory=Counter)
    notes: "Counter[str]" = field(factory=Counter)  # by their first word
    malformed_calls: int = 0
    refusals: "Counter[str]" = field(factory=Counter)  # by the fault's kind
    # A histogram of the seconds until the engine took a sample, and their sum. The key of a count is the
    # index in WAITS of the first bound that is not exceeded.
    waits: "Counter[int]" = field(factory=Counter)
    waited_s: float = 0.0
    # Sessions that ended, by status, without those in `replaced`.
    sessions: "Counter[str]" = field(factory=Counter)
    # Sessions that lost their place to a fresh session, by whose fault it was.
    replaced: "Counter[str]" = field(factory=Counter)
    turn_s: DurationHistogram = field(factory=DurationHistogram)
    first_token_s: DurationHistogram = field(
        factory=DurationHistogram
    )  # from a turn's request to its first token
    session_s: DurationHistogram = field(
        factory=DurationHistogram
    )  # of a whole session, without its wait for a run slot
    ready_s: DurationHistogram = field(factory=DurationHistogram)  # the wait for a run slot
    traces: int = 0
    trainable_tokens: int = 0
    left_out_turns: "Counter[str]" = field(factory=Counter)  # by reason
    left_out_tokens: "Counter[str]" = field(factory=Counter)
    groups: "Counter[str]" = field(factory=Counter)  # groups that are over, by state
    stopped_early: int = 0  # sessions ended, or never begun, because their group had enough
    # Sessions whose weights are older than their task wants, by what the task does with them.
    stale: "Counter[str]" = field(factory=Counter)
    snapshots: int = 0  # snapshots taken, including those removed since
    snapshot_bytes: int = 0  # bytes of their content
    snapshot_s: float = 0.0  # seconds that calls were held for snapshots, including those that were not taken

    def copied(self) -> "NodeCounters":
        """The current numbers, for a reader in another thread."""
        return NodeCounters(**{each.name: copy(getattr(self, each.name)) for each in fields(NodeCounters)})

    def turn(self, turn: Turn) -> None:
        """Count a recorded turn."""
        reason = turn.reason if turn.reason in REASONS else OTHER
        self.turns[turn.provider, turn.kind, reason, turn.role, turn.state] += 1
        self.turn_s.note(turn.ended_s)
        if turn.first_token_s is not None:
            self.first_token_s.note(turn.first_token_s)
        self.sampled_tokens[turn.role] += len(turn.sampled)
        self.prompt_tokens["new"] += len(turn.prompt_delta)
        self.prompt_tokens["reused"] += turn.prompt_length - len(turn.prompt_delta)
        self.malformed_calls += 0 if turn.answer is None else turn.answer.malformed_calls
        if turn.notes:
            self.notes.update(figures.counted(turn.notes))

    def refused(self, fault: Fault) -> None:
        """Count a refused call."""
        self.refusals[fault.kind] += 1

    def waited(self, seconds: float) -> None:
        """Count the time until the engine took a sample."""
        self.waits[bisect_left(WAIT_BOUNDS_S, seconds)] += 1
        self.waited_s += seconds

    def lost(self, outcome: Outcome) -> None:
        """Count a session that lost its place to a fresh one. Its rows are neither published nor counted."""
        self.replaced[outcome.boundary or OTHER] += 1

    def place(self, member: Member) -> None:
        """Count a finished place of a group."""
        self.stopped_early += member.why == EARLY_STOP_REASON
        # A session that is unusable for another reason is not counted.
        if member.stale and (member.usable or str(member.why).startswith(STALE_REASON)):
            self.stale["mark" if member.usable else "drop"] += 1

    def snapshot(self, size: int) -> None:
        """Count a snapshot of a session, of `size` bytes."""
        self.snapshots += 1
        self.snapshot_bytes += size

    def published(self, trajectory: Trajectory) -> None:
        """Count a finished session."""
        self.sessions[trajectory.outcome.status] += 1
        timing = trajectory.timing
        self.session_s.note(timing.init_s + timing.run_s + timing.post_s)
        self.ready_s.note(timing.ready_s)
        self.traces += len(trajectory.traces)
        self.trainable_tokens += trajectory.trainable_tokens
        turns, tokens = left_out_by_reason(trajectory)
        for reason in turns:
            known = reason if reason in LEFT_OUT else OTHER
            self.left_out_turns[known] += turns[reason]
            self.left_out_tokens[known] += tokens[reason]
