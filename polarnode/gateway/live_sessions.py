"""Sessions that may call the model: their keys, their budgets, their undelivered responses, and how their
calls end with them.

Invariants. A turn is recorded in `LiveSession.commit` and nowhere else, synchronously, because a checkpoint
between "sampled" and "recorded" is where turns get lost. A key means one session for ever: when that is over,
its key is answered so instead of becoming unknown. Every table here has a limit, with the reason beside it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio
from attrs import define, field, frozen

from polarnode.core.conversation import Json, Sampling
from polarnode.core.task import Budgets, CarrySpec
from polarnode.core.trajectory import Clock, Turn
from polarnode.gateway.call_events import UndeliveredResponse
from polarnode.gateway.machine import SESSION_OVER
from polarnode.merge.attach import RESUMED
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import SessionExtras
from polarnode.providers.contract import Fault
from polarnode.support.bounded import remember
from polarnode.support.metrics import NodeCounters

logger = logging.getLogger(__name__)

# ── retries ────────────────────────────────────────────────────────────

# for the end of an earlier call to be seen; on a loopback socket it takes milliseconds, and honest twins wait
# this long once
TWIN_S: Final = 0.25
# responses: one a parallel call whose client left (ten agents at once were seen), each a turn's own text, and
# requested again in minutes
UNDELIVERED: Final = 64


@define(eq=False)
class Retries:
    """What a session keeps of responses that did not reach their client, so that the same body sent again is
    no second sample. `name` is the provider, the agent and the body's digest.

    Every harness sends the identical body again after a time-out or a cut connection, on a new connection and
    sometimes before the old one's end was seen. A response is undelivered until its last bytes were handed to
    the socket of a connected client; the same body after that is a new request, because harnesses also ask
    again after an answer they cannot use.
    """

    _undelivered: dict[str, UndeliveredResponse | int] = field(factory=dict, init=False)
    _in_progress: dict[str, list[trio.Event]] = field(factory=dict, init=False)

    @contextmanager
    def in_progress(self, name: str) -> Iterator[tuple[trio.Event, ...]]:
        """Around a call until its response is sent. Yields the ends of earlier calls of the same body."""
        ended, twins = trio.Event(), self._in_progress.setdefault(name, [])
        earlier = tuple(twins)
        twins.append(ended)
        try:
            yield earlier
        finally:
            twins.remove(ended)
            if not twins:
                self._in_progress.pop(name, None)
            ended.set()

    def keep(self, name: str, response: UndeliveredResponse | int) -> None:
        """Keep a response, or the number of a cut turn, until it is delivered. The oldest is forgotten beyond
        UNDELIVERED.
        """
        remember(self._undelivered, name, response, most=UNDELIVERED)

    def undelivered(self, name: str) -> UndeliveredResponse | int | None:
        """What a client of this body did not get: a whole response, or the number of a cut turn."""
        return self._undelivered.get(name)

    def delivered(self, name: str) -> None:
        """Forget a response: its client has it."""
        self._undelivered.pop(name, None)


async def wait_ended(earlier: tuple[trio.Event, ...]) -> None:
    """Wait for earlier calls to end, TWIN_S at most: a connected client may well ask twice."""
    with trio.move_on_after(TWIN_S):
        for ended in earlier:
            await ended.wait()


# ── sessions ─────────────────────────────────────────────────────────

# for calls to record what they have: they do it at once, unless the loop itself is stuck
CLOSING_S: Final = 5.0
# answers a session may refer to by name: longer than any session seen (1,000 turns), each kept as what it
# adds
REMEMBERED: Final = 2_000
# keys of ended sessions still answered 410: about 200 bytes each; a harness that outlives its session asks
# within minutes
KEPT_KEYS: Final = 10_000


@define(eq=False)
class Counters:
    """What a session has spent. `turns` counts every recorded turn, `failed`, `partial` and `resumed` ones
    included.

    `replayed` responses were sent again, `prewarmed` requests asked for no generation: neither is a turn.
    """

    turns: int = 0
    failed: int = 0
    partial: int = 0
    resumed: int = 0
    replayed: int = 0
    prewarmed: int = 0
    sampled_tokens: int = 0
    refusals: Counter[str] = field(factory=Counter)  # by the fault's kind


@define(eq=False)
class SessionMemory:
    """What a session's dialects keep for later requests, the last REMEMBERED values."""

    _kept: dict[str, Json] = field(factory=dict, init=False)

    def recall(self, name: str) -> Json | None:
        """The value of a name; None when it was never kept, or is forgotten."""
        return self._kept.get(name)

    def keep(self, name: str, value: Json) -> None:
        """Keep a value, and forget the oldest beyond REMEMBERED."""
        remember(self._kept, name, value, most=REMEMBERED)


@define(eq=False)
class LiveSession:
    """One session as the model plane sees it. `key` is unguessable and given by the caller; `record` writes a
    turn into the journal, at once.

    `on_spent` is called once, when the first call is refused because a budget of turns or tokens is spent;
    `spent_clock` then names that budget.
    """

    session_id: str
    key: str = field(repr=False)
    lineages: Lineages
    sampling: Sampling
    budgets: Budgets
    record: Callable[[Turn], None]
    on_spent: Callable[[], None] = field(default=lambda: None, kw_only=True)
    carrier: SessionExtras = field(factory=lambda: SessionExtras(CarrySpec(), limit=0), kw_only=True)
    tally: NodeCounters = field(factory=NodeCounters, kw_only=True)  # the node's: what all its sessions did
    counters: Counters = field(factory=Counters, init=False)
    memory: SessionMemory = field(factory=SessionMemory, init=False)
    retries: Retries = field(factory=Retries, init=False)
    over: bool = field(default=False, init=False)
    spent_clock: Clock | None = field(default=None, init=False)
    _calls: dict[trio.CancelScope, int] = field(factory=dict, init=False)  # with the samples each requests
    _call_ended: trio.Event = field(factory=trio.Event, init=False)

    @property
    def in_flight(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    @property
    def token_room(self) -> int | None:
        """Tokens that may still be sampled; None without a budget. Calls in progress do not count until they
        are recorded.
        """
        return (
            None
            if self.budgets.max_tokens is None
            else max(0, self.budgets.max_tokens - self.counters.sampled_tokens)
        )

    def refusal(self, *, samples: int = 1) -> Fault | None:
        """Why a new call is not taken: the session is over, or a budget has no room for its samples. None
        when it is taken.
        """
        if self.over:
            return SESSION_OVER
        clock = self._spent(samples)
        if clock is None:
            return None
        limit = self.budgets.max_turns if clock == "turns" else self.budgets.max_tokens
        return Fault(
            kind="budget_spent",
            message=f"this session has spent its budget of {limit} {clock}: stop, and end with what there is",
        )

    def refused(self, fault: Fault, *, samples: int = 1) -> None:
        """Count a call that was not answered."""
        self.counters.refusals[fault.kind] += 1
        self.tally.refused(fault)
        if fault.kind == "budget_spent" and self.spent_clock is None:
            self.spent_clock = self._spent(samples)
            self.on_spent()

    @contextmanager
    def call(self, scope: trio.CancelScope, *, samples: int = 1) -> Iterator[None]:
        """Around one call of so many samples, in `scope`, which is cancelled when the session closes."""
        self._calls[scope] = samples
        if self.over:
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            self._calls.pop(scope, None)
            self._call_ended.set()
            self._call_ended = trio.Event()

    def commit(self, turn: Turn) -> None:
        """Record a turn, however it ended: first in the lineages, where the next call finds it, then in the
        journal.
        """
        self.lineages.commit(turn)
        self.carrier.add(turn)
        self.counters.turns += 1
        self.counters.failed += turn.state == "failed"
        self.counters.partial += turn.state == "partial"
        self.counters.resumed += turn.reason == RESUMED
        self.counters.sampled_tokens += len(turn.sampled)
        self.tally.turn(turn)
        self.record(turn)

    async def close(self) -> None:
        """Take no new calls and end those in progress; each records what it has. Idempotent. Returns after
        CLOSING_S at most.
        """
        self.over = True
        for scope in self._calls:
            scope.cancel()
        with trio.move_on_after(CLOSING_S, shield=True):
            while self._calls:
                await self._call_ended.wait()
        if self._calls:
            logger.error(
                "session %s: %d calls did not end in %s s, and their turns are lost",
                self.session_id,
                len(self._calls),
                CLOSING_S,
            )

    def metrics(self) -> dict[str, Json]:
        """The figures of its calls for the trajectory's metrics."""
        counters = self.counters
        refusals: dict[str, Json] = dict(counters.refusals)
        return {
            "turns": counters.turns,
            "failed_turns": counters.failed,
            "partial_turns": counters.partial,
            "resumed_turns": counters.resumed,
            "replayed": counters.replayed,
            "prewarmed": counters.prewarmed,
            "sampled_tokens": counters.sampled_tokens,
            "refusals": refusals,
            **self.carrier.metrics(),
        }

    def _spent(self, samples: int) -> Clock | None:
        """The budget without room for so many more samples. Turns that the engine failed are not charged."""
        turns = self.counters.turns - self.counters.failed + sum(self._calls.values())
        if self.budgets.max_turns is not None and turns + samples > self.budgets.max_turns:
            return "turns"
        return "tokens" if self.token_room == 0 else None


@frozen(kw_only=True)
class LiveStatistics:
    """`live` sessions with `in_flight` calls; `ended` keys are still answered."""

    live: int
    in_flight: int
    ended: int


@define(eq=False)
class LiveSessions:
    """The keys of live sessions, and the last KEPT_KEYS of those that ended."""

    _live: dict[str, LiveSession] = field(factory=dict, init=False)
    _ended: dict[str, str] = field(factory=dict, init=False)  # key to session id, oldest first

    def add(self, session: LiveSession) -> None:
        """Accept a session's key."""
        self._live[session.key] = session

    def remove(self, session: LiveSession) -> None:
        """Reject its key from now on, and remember that it had one. Nothing for a session that was never
        added.
        """
        if self._live.pop(session.key, None) is None:
            return
        remember(self._ended, session.key, session.session_id, most=KEPT_KEYS)

    def by_key(self, key: str) -> LiveSession | None:
        """The live session of a key. One look-up in a table, whose time tells a guesser nothing."""
        return self._live.get(key)

    def ended_by_key(self, key: str) -> str | None:
        """The id of the session that had this key and is over."""
        return self._ended.get(key)

    def statistics(self) -> LiveStatistics:
        """Counts of all sessions."""
        in_flight = sum(session.in_flight for session in self._live.values())
        return LiveStatistics(live=len(self._live), in_flight=in_flight, ended=len(self._ended))
