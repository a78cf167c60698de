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
from sys import getsizeof
from typing import Final, Literal

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.conversation import Conversation, Json, Message, ModelRequest, Sampling
from polarnode.core.errors import Busy, ForkError
from polarnode.core.ports import GenerateOrder
from polarnode.core.repeats import equal_turns
from polarnode.core.task import Budgets, CarrySpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.call_events import MAX_FREE_REPEATS, CutCall, UndeliveredResponse
from polarnode.gateway.inherited import InheritedAnswers
from polarnode.gateway.known_histories import KnownHistories
from polarnode.gateway.machine import SESSION_OVER_FAULT
from polarnode.gateway.resumed_session import ResumedSession
from polarnode.merge.attach import RESUMED, Plan
from polarnode.merge.fingerprint import Path
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import SessionExtras
from polarnode.providers.contract import Fault
from polarnode.providers.read_parts import PartsCache
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
        for the next attempt; beyond UNDELIVERED the oldest is dropped.
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


# ── sessions ─────────────────────────────────────────────────────────

# The seconds that calls have to record what they sampled. They do so at once, unless the event loop itself is
# blocked.
CLOSING_S: Final = 5.0
# The number of answers that a session may refer to by name, more than the longest session observed (1,000
# turns). Each is kept as a difference.
REMEMBERED: Final = 2_000
# The limit on their size: the text of eight conversations of 1M tokens, or two requests with three images of
# 5 MB each.
MAX_REMEMBERED_BYTES: Final = 32 << 20
# The limit on a session's samples in progress, waiting ones included: twice the connections of its endpoint,
# so that calls of one sample are never refused. A waiting sample costs some 20 KB beside its prompt.
SAMPLES: Final = 512
# The limit on the prompt tokens of a session's calls in progress: 32 prompts of 128k tokens, more than the
# ten agents observed at once. A token takes 4 bytes as an id and about as many again as text.
MAX_PROMPT_TOKENS: Final = 4 << 20
# Where the context is longer, this many whole contexts are the limit.
MAX_PROMPT_CONTEXTS: Final = 16
# The seconds after which a refused call may find room: the shortest time that `Retry-After` can name.
BUSY_S: Final = 1
# The number of keys of ended sessions that are still answered with 410, at about 200 bytes each. A harness
# that outlives its session calls again within minutes.
MAX_ENDED_KEYS: Final = 10_000


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


@define(eq=False)
class SessionMemory:
    """What a session's dialects keep for later requests: the last REMEMBERED values, with
    MAX_REMEMBERED_BYTES together at most. The last two are kept whatever their size: an answer, and the index
    in which the next request looks for it.
    """

    _kept: dict[str, Json] = field(factory=dict, init=False)
    _sizes: dict[str, int] = field(factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def recall(self, name: str) -> Json | None:
        """The value kept under a name. None if it was never kept or has been dropped."""
        return self._kept.get(name)

    def keep(self, name: str, value: Json) -> None:
        """Keep a value. Beyond REMEMBERED and MAX_REMEMBERED_BYTES the oldest are dropped."""
        self._drop(name)
        self._kept[name], self._sizes[name] = value, _size(value)
        self._bytes += self._sizes[name]
        while len(self._kept) > REMEMBERED or (self._bytes > MAX_REMEMBERED_BYTES and len(self._kept) > 2):
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        self._kept.pop(name, None)
        self._bytes -= self._sizes.pop(name, 0)


def _size(value: Json) -> int:
    """The bytes of memory that a value's texts take, which are nearly all of it. The recursion is bounded,
    because dialects build these values, three levels deep.
    """
    match value:
        case dict():
            return sum(map(_size, value.values()))
        case list():
            return sum(map(_size, value))
        case _:
            return getsizeof(value)


SpentClock = Literal["turns", "tokens", "repeats"]  # the budgets because of which a call is refused


@define(eq=False)
class LiveSession:
    """One session as the model plane sees it. `key` is unguessable and supplied by the caller; `record`
    writes a turn to the journal synchronously.

    `on_spent` is called once, when the first call is refused because the budget of turns, tokens or repeats
    is spent; `spent_clock` then names that budget. It is also called when a session whose harness was resumed
    is refused (`resumed`). `on_held` is awaited for each call once its prompt is rendered, before the engine
    is asked; the harness waits meanwhile. It raises nothing of its own.
    """

    session_id: str
    key: str = field(repr=False)
    lineages: Lineages
    sampling: Sampling
    budgets: Budgets
    record: Callable[[Turn], None]
    on_spent: Callable[[], None] = field(default=lambda: None, kw_only=True)
    on_held: Callable[[Plan, ModelRequest], Awaitable[None]] | None = field(default=None, kw_only=True)
    # the name of the adapter that samples; empty for the base model
    adapter: str = field(default="", kw_only=True)
    # Whether the client is told that a cut answer ended with its calls, because its harness runs no call of a
    # cut answer.
    calls_first: bool = field(default=False, kw_only=True)
    # set for a session whose harness is resumed
    resumed: ResumedSession | None = field(default=None, kw_only=True)
    # The key that a harness holds in its memory where the harness is a copy of its parent's processes. It is
    # accepted at the session's own endpoint only.
    parent_key: str | None = field(default=None, kw_only=True, repr=False)
    carrier: SessionExtras = field(factory=lambda: SessionExtras(CarrySpec(), limit=0), kw_only=True)
    tally: NodeCounters = field(factory=NodeCounters, kw_only=True)  # the node's counters, over all sessions
    counters: SessionCounters = field(factory=SessionCounters, kw_only=True)
    memory: SessionMemory = field(factory=SessionMemory, init=False)
    retries: Retries = field(factory=Retries, init=False)
    parts: PartsCache = field(factory=PartsCache, init=False)
    histories: KnownHistories = field(factory=KnownHistories, init=False)
    inherited: int = field(default=0, init=False)  # Turns with a lower index come from a fork's parent.
    # The answers of a fork's parent, which are given again.
    _answers: InheritedAnswers | None = field(default=None, init=False)
    over: bool = field(default=False, init=False)
    # whether its requests took memory that is worth giving back
    large: bool = field(default=False, init=False)
    spent_clock: SpentClock | None = field(default=None, init=False)
    # The limiter of its threads that read or render long requests. There is one, so that another session
    # always finds a free thread.
    threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1), init=False)
    # maps each call in progress to the number of samples requested
    _calls: dict[trio.CancelScope, int] = field(factory=dict, init=False)
    # the calls among them that repeat a request whose client did not get an answer
    _uncharged: dict[trio.CancelScope, int] = field(factory=dict, init=False)
    # maps each call to the tokens of its prompt, once that is rendered
    _prompts: dict[trio.CancelScope, int] = field(factory=dict, init=False)
    _call_ended: trio.Event = field(factory=trio.Event, init=False)

    @property
    def in_flight(self) -> int:
        """The number of calls in progress."""
        return len(self._calls)

    @property
    def token_room(self) -> int | None:
        """The tokens that may still be sampled; None without a budget. Calls in progress do not count until
        they are recorded. What a fork inherited counts, because the fork continues the parent's state.
        """
        most, used = self.budgets.max_tokens, self.counters
        return None if most is None else max(0, most - used.sampled_tokens - used.inherited_tokens)

    def refusal(
        self, messages: Sequence[Message] = (), *, samples: int = 1, charged: bool = True
    ) -> Fault | None:
        """Why a new call about `messages` is refused: the session is over, a budget has no room for its
        samples, or too many samples are in progress. None when it is accepted. A call that is not `charged`
        repeats a request whose client did not get an answer, and needs no room in the budget of turns.
        """
        if self.over:
            return SESSION_OVER_FAULT
        if self.resumed is not None and self.resumed.refused is not None:
            return Fault.of(self.resumed.refused)
        clock = (
            self._spent_budget(messages, samples) if charged else "tokens" if self.token_room == 0 else None
        )
        if clock is None:
            return None if sum(self._calls.values()) + samples <= SAMPLES else _TOO_MANY_SAMPLES
        budgets = self.budgets
        limit = {
            "turns": f"{budgets.max_turns} turns",
            "tokens": f"{budgets.max_tokens} tokens",
            "repeats": f"{budgets.max_repeats} equal turns in a row",
        }[clock]
        return Fault(
            kind="budget_spent",
            message=f"this session has spent its budget of {limit}: stop, and end with what there is",
        )

    def refused(self, fault: Fault, messages: Sequence[Message] = (), *, samples: int = 1) -> None:
        """Count a refused call about `messages`."""
        self.counters.refusals[fault.kind] += 1
        self.tally.refused(fault)
        if fault.kind == "budget_spent" and self.spent_clock is None:
            self.spent_clock = self._spent_budget(messages, samples)
            self.on_spent()

    def check_resumed(self, plan: Plan, conversation: Conversation) -> None:
        """Raise ForkError, and have the session ended, if a resumed session begins otherwise than its fork
        says.
        """
        if self.resumed is not None:
            try:
                self.resumed.check(plan, conversation)
            except ForkError:
                self.on_spent()
                raise

    @contextmanager
    def call(self, scope: trio.CancelScope, *, samples: int = 1, charged: bool = True) -> Iterator[None]:
        """Register one call of `samples` samples as in progress, in `scope`, which is cancelled when the
        session closes. `charged`: the samples count against the budget of turns.
        """
        self._calls[scope] = samples
        if not charged:
            self._uncharged[scope] = samples
        if self.over:
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            self._calls.pop(scope, None)
            self._uncharged.pop(scope, None)
            self._prompts.pop(scope, None)
            self._call_ended.set()
            self._call_ended = trio.Event()

    def reserve_prompt(self, scope: trio.CancelScope, tokens: int, *, context_length: int) -> None:
        """Count the prompt of a call in progress until the call ends. Raises Busy if the session's prompts
        would take more than their share of memory; a single prompt is always accepted.
        """
        held, most = sum(self._prompts.values()), max(MAX_PROMPT_TOKENS, MAX_PROMPT_CONTEXTS * context_length)
        if held and held + tokens > most:
            raise Busy(
                f"the prompts of this session's calls in progress have {held} of {most} tokens: send it"
                " again",
                retry_after=BUSY_S,
            )
        self._prompts[scope] = tokens

    def waited(self, seconds: float) -> None:
        """Count the time until the engine took a sample."""
        self.counters.waited_s += seconds
        self.tally.waited(seconds)

    def commit(self, turn: Turn, *, charged: bool = True) -> None:
        """Record a turn, however it ended: first in the lineages, where the next call finds it, then in the
        journal. `charged`: the turn counts against the budget of turns.
        """
        self.lineages.commit(turn)
        if turn.index >= self.inherited:
            self.tally.turn(turn)
        self._note(turn, charged=charged)

    def _note(self, turn: Turn, *, charged: bool) -> None:
        failed = turn.state == "failed" and not turn.refused
        self.carrier.add(turn)
        self.counters.turns += 1
        self.counters.charged += charged and not failed
        self.counters.failed += failed
        self.counters.partial += turn.state == "partial"
        self.counters.resumed += turn.reason == RESUMED
        if turn.index < self.inherited:
            self.counters.inherited_tokens += len(turn.sampled)
        else:
            self.counters.sampled_tokens += len(turn.sampled)
        self.record(turn)

    def inherit_answers(
        self, turns: Sequence[Turn], turn: int, on_end: Callable[[int, str | None], None]
    ) -> None:
        """Answer the first calls with the recorded answers of a parent's `turns` below `turn`, as long as the
        calls are the same. Turn `turn` itself, if it is among them, is only compared. `on_end` is called
        before the first call that is sampled anew, with the number of turns inherited and the first
        difference in words.
        """

        def ended(got: int, differs: str | None) -> None:
            self.inherited, self._answers = got, None
            on_end(got, differs)

        for each in turns:
            for call in () if each.answer is None or each.index >= turn else each.answer.calls:
                self.lineages.references.adopt(each.index, call.id)
        self.inherited = turn
        self._answers = InheritedAnswers({each.index: each for each in turns}, turn, ended)

    def begin_with(self, turns: Sequence[Turn], lineages: Lineages, *, inherited: int) -> None:
        """Begin with another session's `turns` as this session's. They are recorded now, and the next call
        extends them. Turns with an index below `inherited` are trained in another session. `lineages` has
        been restored from the turns.
        """
        self.lineages, self.inherited = lineages, inherited
        # Maps a request to how often it was repeated, because its client left, without a further token. As
        # when the turns ran, all these repeats are one turn of the budget.
        owed: dict[tuple[str, str, str], int] = {}
        for turn in turns:
            name = (turn.provider, Path.read(turn.before_key).agent, turn.request_key)
            again = turn.reason == RESUMED or name in owed
            self._note(turn, charged=not again or owed.get(name, 0) >= MAX_FREE_REPEATS)
            if turn.state == "partial" and turn.request_key:
                owed[name] = owed[name] + 1 if name in owed and not turn.sampled else 0
            elif turn.state == "complete" or turn.refused:
                owed.pop(name, None)

    def cut_answer(self, index: int, name: str, *, created: int) -> UndeliveredResponse | None:
        """The answer to a repeated request whose cut turn cannot go on, because other calls took the last
        tokens of the budget. It is what the cut turn sampled, under the response id `name`, and it ends
        there.
        """
        turn = next((turn for turn in self.lineages.turns if turn.index == index), None)
        if turn is None or turn.answer is None:
            return None
        return UndeliveredResponse(
            id=name,
            created=created,
            signature=self.lineages.references.signature(index),
            answers=(evolve(turn.answer, finish_reason="length"),),
            usage=turn.usage,
        )

    def inherited_answer(self, plan: Plan, order: GenerateOrder) -> Turn | None:
        """The turn of a fork's parent whose answer this call gets. None where the engine samples."""
        if self._answers is None:
            return None
        return self._answers.take(plan, order, alone=sum(self._calls.values()) == 1)

    async def close(self) -> None:
        """Refuse new calls and end those in progress; each records what it has sampled. Idempotent. Returns
        after CLOSING_S at most.
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
        """The counters of its calls, for the trajectory's metrics."""
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
            "waited_s": round(counters.waited_s, 3),
            "refusals": refusals,
            **self.carrier.metrics(),
        }

    def _spent_budget(self, messages: Sequence[Message], samples: int) -> SpentClock | None:
        """The budget that has no room for `samples` more; None if all have."""
        turns = self.counters.charged + sum(self._calls.values()) - sum(self._uncharged.values())
        if self.budgets.max_turns is not None and turns + samples > self.budgets.max_turns:
            return "turns"
        if self.token_room == 0:
            return "tokens"
        return "repeats" if self._is_looping(messages) else None

    def _is_looping(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation loops, or one looped before and its call was refused. Then the whole run
        ends, not only the sub-agent that looped. Turns that came with the first request are not this
        session's.
        """
        most = self.budgets.max_repeats
        if most is None or self.counters.charged < most:
            return False
        return self.spent_clock == "repeats" or equal_turns(messages, most) >= most


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
        parent = None if own is None else own.parent_key
        return own if parent is not None and any(compare_digest(key, parent) for key in keys) else None

    def ended_session_id(self, key: str) -> str | None:
        """The id of the ended session that had this key."""
        return self._ended.get(key)

    def statistics(self) -> LiveStatistics:
        """Counts over all sessions."""
        in_flight = sum(session.in_flight for session in self._live.values())
        return LiveStatistics(live=len(self._live), in_flight=in_flight, ended=len(self._ended))
