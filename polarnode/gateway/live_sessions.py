"""Sessions that may call the model: their keys, their budgets, their undelivered responses, and how their
calls end when they end.

Invariants. A turn is recorded in `LiveSession.commit` and nowhere else, synchronously, because a checkpoint
between "sampled" and "recorded" is where turns get lost. A key belongs to one session for ever: after the
session its key is refused as ended, not as unknown. Every table here has a limit, with the reason beside it.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from hmac import compare_digest
from typing import Final, Literal

import trio
from attrs import Factory, define, field, frozen

from polarnode.core.conversation import Conversation, Json, Message, ModelRequest, Sampling
from polarnode.core.errors import Busy, ForkError
from polarnode.core.repeats import equal_turns
from polarnode.core.task import Budgets, CarrySpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.earlier_requests import EarlierRequests
from polarnode.gateway.exchange import MAX_FREE_REPEATS, SESSION_OVER_FAULT, CutCall, UndeliveredResponse
from polarnode.gateway.fork_inheritance import ForkInheritance
from polarnode.merge.attach import RESUMED, Plan
from polarnode.merge.fingerprint import Path
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import SessionExtras
from polarnode.providers.contract import Fault
from polarnode.support.bounded import remember
from polarnode.support.metrics import NodeCounters

logger = logging.getLogger(__name__)

# ── retries ────────────────────────────────────────────────────────────

# The seconds that a call waits for an earlier call with the same body to end. On a loopback socket the end is
# noticed within milliseconds. A legitimate duplicate waits this long once.
MAX_TWIN_WAIT_S: Final = 0.25
# The number of responses kept, one per parallel call whose client left (up to ten concurrent agents were
# observed). Each is the text of one turn, and is requested again within minutes.
MAX_UNDELIVERED: Final = 64


@define(eq=False)
class Attempt:
    """One request for a body, until its response is sent. `earlier` has the end events of the calls with the
    same body that were in progress when it came.

    `response` is what its client gets if it sends the request again: first what this attempt took over from
    one that ended undelivered, then what it produced itself; None once that is delivered.
    """

    earlier: tuple[trio.Event, ...]
    _undelivered: dict[str, UndeliveredResponse | CutCall]
    _name: str
    response: UndeliveredResponse | CutCall | None = field(default=None, init=False)

    def take_over(self) -> UndeliveredResponse | CutCall | None:
        """Take over what an ended attempt with this body did not deliver: a whole response, or a call that
        was cut. No other attempt finds it while this one is in progress.
        """
        self.response = self._undelivered.pop(self._name, None)
        return self.response

    def keep(self, response: UndeliveredResponse | CutCall) -> None:
        """Keep a response, or a call that was cut, until it is delivered."""
        self.response = response

    def delivered(self) -> None:
        """Drop the response: the client has received it."""
        self.response = None


@define(eq=False)
class Retries:
    """The responses of a session that did not reach their client, so that a repeated request is not sampled
    twice. A name combines the provider, the agent and the request's key.

    Every harness sends the same request again after a time-out or a broken connection, on a new connection
    and sometimes before the end of the old one is noticed. A response is undelivered until its last bytes are
    handed to the socket of a connected client. The same request after that is a new one, because harnesses
    also repeat a request after an answer they cannot use. The same request beside one that is still being
    answered is a new one too, because harnesses also sample in parallel. So an attempt's response is its own
    until the attempt ends, and exactly one later attempt takes it over.
    """

    _undelivered: dict[str, UndeliveredResponse | CutCall] = field(factory=dict, init=False)
    _in_progress: dict[str, list[trio.Event]] = field(factory=dict, init=False)

    @contextmanager
    def attempt(self, name: str) -> Iterator[Attempt]:
        """Mark a call as in progress until its response is sent. What it has not delivered by then is kept
        for the next attempt; beyond MAX_UNDELIVERED the oldest is dropped.
        """
        ended, twins = trio.Event(), self._in_progress.setdefault(name, [])
        attempt = Attempt(tuple(twins), self._undelivered, name)
        twins.append(ended)
        try:
            yield attempt
        finally:
            if attempt.response is not None:
                remember(self._undelivered, name, attempt.response, most=MAX_UNDELIVERED)
            twins.remove(ended)
            if not twins:
                self._in_progress.pop(name, None)
            ended.set()


async def wait_ended(earlier: tuple[trio.Event, ...]) -> None:
    """Wait for earlier calls to end, for MAX_TWIN_WAIT_S at most, because a connected client may legitimately
    send the same body twice.
    """
    with trio.move_on_after(MAX_TWIN_WAIT_S):
        for ended in earlier:
            await ended.wait()


# ── calls in progress ─────────────────────────────────────────────────────────

# The seconds that calls have to record what they sampled. They do so at once, unless the event loop itself is
# blocked.
CLOSING_S: Final = 5.0
# The limit on the prompt tokens of a session's calls in progress: 32 prompts of 128k tokens, more than the
# ten agents observed at once. A token takes 4 bytes as an id and about as many again as text.
MAX_PROMPT_TOKENS: Final = 4 << 20
# Where the context is longer, this many whole contexts are the limit.
MAX_PROMPT_CONTEXTS: Final = 16
# The seconds after which a refused call may find room: the shortest time that `Retry-After` can name.
BUSY_S: Final = 1


@define(eq=False)
class _CallShare:
    """What one call in progress takes of its session. `prompt_tokens` is 0 until its prompt is rendered."""

    samples: int
    charged: bool
    prompt_tokens: int = 0


@define(eq=False)
class CallsInProgress:
    """A session's calls in progress. Each runs in a scope that is cancelled when the session closes."""

    closed: bool = field(default=False, init=False)
    _shares: dict[trio.CancelScope, _CallShare] = field(factory=dict, init=False)
    _call_ended: trio.Event = field(factory=trio.Event, init=False)

    @property
    def count(self) -> int:
        """The number of calls."""
        return len(self._shares)

    @property
    def samples(self) -> int:
        """The number of samples that the calls asked for."""
        return sum(share.samples for share in self._shares.values())

    @property
    def charged_samples(self) -> int:
        """The number of those samples that will count against the budget of turns."""
        return sum(share.samples for share in self._shares.values() if share.charged)

    @contextmanager
    def enter(self, scope: trio.CancelScope, *, samples: int = 1, charged: bool = True) -> Iterator[None]:
        """Run one call of `samples` samples in `scope`. It is `charged` unless it repeats a request whose
        client did not get an answer.
        """
        self._shares[scope] = _CallShare(samples, charged)
        if self.closed:
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            self._shares.pop(scope, None)
            self._call_ended.set()
            self._call_ended = trio.Event()

    def reserve_prompt(self, scope: trio.CancelScope, tokens: int, *, context_length: int) -> None:
        """Count the prompt of a call until the call ends. Raises Busy if the prompts together would take more
        than their share of memory; a single prompt is always accepted.
        """
        held = sum(share.prompt_tokens for share in self._shares.values())
        most = max(MAX_PROMPT_TOKENS, MAX_PROMPT_CONTEXTS * context_length)
        if held and held + tokens > most:
            raise Busy(
                f"the prompts of this session's calls in progress have {held} of {most} tokens: send it"
                " again",
                retry_after=BUSY_S,
            )
        self._shares[scope].prompt_tokens = tokens

    async def close(self) -> int:
        """Let new calls end at once, and end those in progress; each records what it has sampled. Idempotent.
        Returns after CLOSING_S at most, with the number of calls that did not end.
        """
        self.closed = True
        for scope in self._shares:
            scope.cancel()
        with trio.move_on_after(CLOSING_S, shield=True):
            while self._shares:
                await self._call_ended.wait()
        return len(self._shares)


# ── budgets ─────────────────────────────────────────────────────────

# The limit on a session's samples in progress, waiting ones included: twice the connections of its endpoint,
# so that calls of one sample are never refused. A waiting sample costs some 20 KB beside its prompt.
SAMPLES: Final = 512

_TOO_MANY_SAMPLES: Final = Fault(
    kind="overloaded",
    message=f"this session has {SAMPLES} samples in progress, the most at once: wait for some of them",
    retry_after_s=BUSY_S,
)


@define(eq=False)
class SessionCounters:
    """What a session has used. `turns` counts every recorded turn, including `failed`, `partial`, `resumed`
    and inherited ones.

    `failed` are the turns that the engine failed, not those that it refused. `replayed` counts responses that
    were sent again, `prewarmed` requests for no generation; neither is a turn. `charged` counts the turns
    that count against the budget. The turns that the engine failed do not, and neither do the turns of a
    client that left and asks again.
    """

    turns: int = 0
    charged: int = 0
    failed: int = 0
    partial: int = 0
    resumed: int = 0
    waited_s: float = 0.0  # seconds until the engine took them, summed over all samples
    replayed: int = 0
    prewarmed: int = 0
    sampled_tokens: int = 0
    inherited_tokens: int = 0  # those that a fork's parent sampled
    last_turn: float | None = None  # when the last turn was recorded, on its owner's clock
    refusals: Counter[str] = field(factory=Counter)  # by the kind of fault

    def count_turn(self, turn: Turn, *, charged: bool, inherited: bool) -> None:
        """Count a turn, however it ended. `charged`: it counts against the budget of turns, unless the engine
        failed it.
        """
        failed = turn.state == "failed" and not turn.refused
        self.turns += 1
        self.charged += charged and not failed
        self.failed += failed
        self.partial += turn.state == "partial"
        self.resumed += turn.reason == RESUMED
        if inherited:
            self.inherited_tokens += len(turn.sampled)
        else:
            self.sampled_tokens += len(turn.sampled)

    def metrics(self) -> dict[str, Json]:
        """The counters as a trajectory has them among its metrics."""
        refusals: dict[str, Json] = dict(self.refusals)
        return {
            "turns": self.turns,
            "failed_turns": self.failed,
            "partial_turns": self.partial,
            "resumed_turns": self.resumed,
            "replayed": self.replayed,
            "prewarmed": self.prewarmed,
            "sampled_tokens": self.sampled_tokens,
            "waited_s": round(self.waited_s, 3),
            "refusals": refusals,
        }


SpentClock = Literal["turns", "tokens", "repeats"]  # the budgets because of which a call is refused


@define(eq=False)
class SessionBudget:
    """What a session may use, and what it has used, its calls in progress included.

    `on_spent` is called once, when the first call is refused because the budget of turns, tokens or repeats
    is spent; `spent_clock` then names that budget. It is also called when a session whose harness was resumed
    is refused.
    """

    limits: Budgets
    calls: CallsInProgress = field(factory=CallsInProgress, kw_only=True)
    counters: SessionCounters = field(factory=SessionCounters, kw_only=True)
    tally: NodeCounters = field(factory=NodeCounters, kw_only=True)  # the node's counters, over all sessions
    on_spent: Callable[[], None] = field(default=lambda: None, kw_only=True)
    spent_clock: SpentClock | None = field(default=None, init=False)

    @property
    def token_room(self) -> int | None:
        """The tokens that may still be sampled; None without a budget. Calls in progress do not count until
        they are recorded. What a fork inherited counts, because the fork continues the parent's state.
        """
        most, used = self.limits.max_tokens, self.counters
        return None if most is None else max(0, most - used.sampled_tokens - used.inherited_tokens)

    def refusal(self, messages: Sequence[Message], *, samples: int, charged: bool) -> Fault | None:
        """Why a new call about `messages` is refused: a budget has no room for its samples, or too many
        samples are in progress. None when it is accepted. A call that is not `charged` needs no room in the
        budget of turns.
        """
        clock: SpentClock | None = (
            self._spent_for(messages, samples) if charged else "tokens" if self.token_room == 0 else None
        )
        if clock is None:
            return None if self.calls.samples + samples <= SAMPLES else _TOO_MANY_SAMPLES
        limit = {
            "turns": f"{self.limits.max_turns} turns",
            "tokens": f"{self.limits.max_tokens} tokens",
            "repeats": f"{self.limits.max_repeats} equal turns in a row",
        }[clock]
        return Fault(
            kind="budget_spent",
            message=f"this session has spent its budget of {limit}: stop, and end with what there is",
        )

    def count_refusal(self, fault: Fault, messages: Sequence[Message] = (), *, samples: int = 1) -> None:
        """Count a refused call about `messages`."""
        self.counters.refusals[fault.kind] += 1
        self.tally.refused(fault)
        if fault.kind == "budget_spent" and self.spent_clock is None:
            self.spent_clock = self._spent_for(messages, samples)
            self.on_spent()

    def count_wait(self, seconds: float) -> None:
        """Count the time until the engine took a sample."""
        self.counters.waited_s += seconds
        self.tally.waited(seconds)

    def _spent_for(self, messages: Sequence[Message], samples: int) -> SpentClock | None:
        """The budget that has no room for `samples` more samples about `messages`; None if all have."""
        limits, charged = self.limits, self.counters.charged
        if limits.max_turns is not None and (
            charged + self.calls.charged_samples + samples > limits.max_turns
        ):
            return "turns"
        if self.token_room == 0:
            return "tokens"
        # When one conversation loops, the whole run ends, not only the sub-agent that looped. Turns that came
        # with the first request are not this session's.
        most = limits.max_repeats
        if most is None or charged < most:
            return None
        if self.spent_clock == "repeats" or equal_turns(messages, most) >= most:
            return "repeats"
        return None


# ── sessions ─────────────────────────────────────────────────────────


@define(eq=False)
class LiveSession:
    """One session as the model plane sees it. `key` is unguessable and supplied by the caller; `record`
    writes a turn to the journal synchronously.

    `before_generation` is awaited for each call once its prompt is rendered, before the engine is asked; the
    harness waits meanwhile. It raises nothing of its own.
    """

    session_id: str
    key: str = field(repr=False)
    lineages: Lineages
    sampling: Sampling
    budget: SessionBudget
    record: Callable[[Turn], None]
    before_generation: Callable[[Plan, ModelRequest], Awaitable[None]] | None = field(
        default=None, kw_only=True
    )
    # the name of the adapter that samples; empty for the base model
    adapter: str = field(default="", kw_only=True)
    # Whether the client is told that a cut answer ended with its calls, because its harness runs no call of a
    # cut answer.
    calls_first: bool = field(default=False, kw_only=True)
    carrier: SessionExtras = field(factory=lambda: SessionExtras(CarrySpec(), limit=0), kw_only=True)
    calls: CallsInProgress = field(
        default=Factory(lambda self: self.budget.calls, takes_self=True), init=False
    )
    inherited: ForkInheritance = field(factory=ForkInheritance, init=False)
    retries: Retries = field(factory=Retries, init=False)
    earlier: EarlierRequests = field(factory=EarlierRequests, init=False)
    # The limiter of its threads that read or render long requests. There is one, so that another session
    # always finds a free thread.
    threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1), init=False)

    def refusal(
        self, messages: Sequence[Message] = (), *, samples: int = 1, charged: bool = True
    ) -> Fault | None:
        """Why a new call about `messages` is refused: the session is over, its harness resumed with another
        request than the recorded one, or its budget refuses the call. None when it is accepted.
        """
        if self.calls.closed:
            return SESSION_OVER_FAULT
        resumed = self.inherited.resumed
        if resumed is not None and resumed.refused is not None:
            return Fault.of(resumed.refused)
        return self.budget.refusal(messages, samples=samples, charged=charged)

    def check_resumed(self, plan: Plan, conversation: Conversation) -> None:
        """Raise ForkError, and have the session ended, if a resumed session begins otherwise than its fork
        says.
        """
        if self.inherited.resumed is not None:
            try:
                self.inherited.resumed.check(plan, conversation)
            except ForkError:
                self.budget.on_spent()
                raise

    def commit(self, turn: Turn, *, charged: bool = True) -> None:
        """Record a turn, however it ended: first in the lineages, where the next call finds it, then in the
        journal. `charged`: the turn counts against the budget of turns.
        """
        self.lineages.commit(turn)
        if turn.index >= self.inherited.turns:
            self.budget.tally.turn(turn)
        self._record(turn, charged=charged)

    def begin_with(self, turns: Sequence[Turn], lineages: Lineages, *, inherited: int) -> None:
        """Begin with another session's `turns` as this session's. They are recorded now, and the next call
        extends them. Turns with an index below `inherited` are trained in another session. `lineages` has
        been restored from the turns.
        """
        self.lineages, self.inherited.turns = lineages, inherited
        # Maps a request to how often it was repeated, because its client left, without a further token. As
        # when the turns ran, all these repeats are one turn of the budget.
        owed: dict[tuple[str, str, str], int] = {}
        for turn in turns:
            name = (turn.provider, Path.read(turn.before_key).agent, turn.request_key)
            again = turn.reason == RESUMED or name in owed
            self._record(turn, charged=not again or owed.get(name, 0) >= MAX_FREE_REPEATS)
            if turn.state == "partial" and turn.request_key:
                owed[name] = owed[name] + 1 if name in owed and not turn.sampled else 0
            elif turn.state == "complete" or turn.refused:
                owed.pop(name, None)

    def _record(self, turn: Turn, *, charged: bool) -> None:
        self.carrier.add(turn)
        self.budget.counters.count_turn(turn, charged=charged, inherited=turn.index < self.inherited.turns)
        self.record(turn)

    async def close(self) -> None:
        """Refuse new calls and end those in progress; each records what it has sampled. Idempotent. Returns
        after CLOSING_S at most.
        """
        lost = await self.calls.close()
        if lost:
            logger.error(
                "session %s: %d calls did not end in %s s, and their turns are lost",
                self.session_id,
                lost,
                CLOSING_S,
            )

    def metrics(self) -> dict[str, Json]:
        """The counters of its calls, for the trajectory's metrics."""
        return {**self.budget.counters.metrics(), **self.carrier.metrics()}


# ── keys ─────────────────────────────────────────────────────────

# The number of keys of ended sessions that are still answered with 410, at about 200 bytes each. A harness
# that outlives its session calls again within minutes.
MAX_ENDED_KEYS: Final = 10_000


@frozen(kw_only=True)
class LiveStatistics:
    """`live` sessions with `in_flight` calls, and the number of `ended` keys still answered."""

    live: int
    in_flight: int
    ended: int


@define(eq=False)
class LiveSessions:
    """The keys of live sessions, and the last MAX_ENDED_KEYS keys of ended ones."""

    _live: dict[str, LiveSession] = field(factory=dict, init=False)
    _by_id: dict[str, LiveSession] = field(factory=dict, init=False)
    _ended: dict[str, str] = field(factory=dict, init=False)  # maps a key to its session id, the oldest first

    def add(self, session: LiveSession) -> None:
        """Accept a session's key."""
        self._live[session.key] = session
        self._by_id[session.session_id] = session

    def remove(self, session: LiveSession) -> None:
        """Reject the session's key from now on, and remember it as ended. Does nothing for a session that was
        never added.
        """
        if self._live.pop(session.key, None) is None:
            return
        self._by_id.pop(session.session_id, None)
        remember(self._ended, session.key, session.session_id, most=MAX_ENDED_KEYS)

    def by_key(self, key: str) -> LiveSession | None:
        """The live session of a key. This is a single dictionary look-up, so that its duration reveals
        nothing about the keys.
        """
        return self._live.get(key)

    def find_at_endpoint(self, session_id: str | None, keys: Sequence[str]) -> LiveSession | None:
        """The live session that these keys open at the endpoint of `session_id`; None means an endpoint for
        every session. A copy of a frozen harness has its parent's key, which opens only the copy's own
        endpoint.
        """
        for session in filter(None, map(self.by_key, keys)):
            if session_id in (None, session.session_id):
                return session
        own = None if session_id is None else self._by_id.get(session_id)
        parent = None if own is None else own.inherited.parent_key
        return own if parent is not None and any(compare_digest(key, parent) for key in keys) else None

    def ended_session_id(self, key: str) -> str | None:
        """The id of the ended session that had this key."""
        return self._ended.get(key)

    def statistics(self) -> LiveStatistics:
        """Counts over all sessions."""
        in_flight = sum(session.calls.count for session in self._live.values())
        return LiveStatistics(live=len(self._live), in_flight=in_flight, ended=len(self._ended))
