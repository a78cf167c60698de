"""Which host serves a call and when, whether a dead host is restarted, and the statistics of all hosts. Pure:
times are values.

A session's prompts extend one another, so the host that holds its prefix is worth far more than an even load.
`Router` chooses the host of a call when it arrives, and the `FairQueue` of that host decides when the engine
gets it. A gate that holds back whole sessions belongs before both. The statistics are frozen values, served
at `/v1/status`.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Generic, Literal, TypeVar

from attrs import define, field, frozen

from polarnode.core.backoff import Backoff
from polarnode.engine.residency import ResidencyStatistics

# How many more calls a session's host may have than the least loaded one: reading 20-30 thousand tokens again
# costs about as much as so many calls.
HOME_SLACK_CALLS = 16
REMEMBERED = 65_536  # sessions: some 10 MB, and a hundred times what one machine runs at once
MAX_DEATHS = 5  # deaths within WINDOW: then the cause is not chance, and a restart only hides it
WINDOW = 600.0  # seconds
# Pauses before the second restart of a window and those after it. The first restart is at once.
RESTART_PAUSES = Backoff(first_s=1.0, longest_s=WINDOW)

# The same pauses for an external engine, whose host only waits for its server.
RECONNECT_PAUSES = Backoff(first_s=1.0, longest_s=10.0)


@define(eq=False)
class Router:
    """A session stays with its host while that is ready and not overloaded. Other calls go to the host with
    the fewest calls.
    """

    _homes: "OrderedDict[str, int]" = field(factory=OrderedDict, init=False)

    def choose(self, affinity: str, loads: Mapping[int, int], resident: int | None = None) -> int:
        """Choose one of the hosts of `loads`, which maps each ready host to the calls that a new one has
        before it and is never empty. An empty affinity belongs to no session. `resident` is the host whose
        cache has the session's place, which the session keeps whatever the loads are.
        """
        least = min(loads, key=lambda index: (loads[index], index))
        home = self._homes.get(affinity) if resident is None else resident
        free_to_move = (
            resident is None
            and home is not None
            and home in loads
            and loads[home] > loads[least] + HOME_SLACK_CALLS
        )
        if home is None or home not in loads or free_to_move:
            home = least
        if affinity:
            self._homes[affinity] = home
            self._homes.move_to_end(affinity)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return home


# ── fair queue ────────────────────────────────────────────────────────────

Waiting = TypeVar("Waiting")

# Requests that an engine runs at once, until it reports its own number. This is below the number of any GPU.
DEFAULT_RUNNING = 256
# An engine keeps one part in so many of its places for sessions below their fair share. A flood of calls
# leaves these free, so that a call of another session begins at once and does not wait for one of the flood's
# to end.
SPARE_DIVISOR = 8
# Seconds that a session counts as present after its last call. Most tools return sooner.
PRESENT_S = 60.0
# Requests in the engine's own queue, added to a part of those that it runs: what it starts before its next
# report, 0.25 s later.
MIN_ENGINE_QUEUE, ENGINE_QUEUE_DIVISOR = 16, 4
# Tokens that a request is expected to sample if it may sample more. The turns of agents have about 256.
SAMPLED = 512


@define(eq=False)
class _Session(Generic[Waiting]):
    """`served` is in tokens, `seen` is when the session's last call ended, and `taken` is the number of its
    last call that was taken. Waiting calls are numbered by arrival.
    """

    waiting: "deque[tuple[int, int, Waiting]]" = field(factory=deque)
    running: int = 0
    served: int = 0
    taken: int = 0
    seen: float = 0.0


@define(eq=False)
class FairQueue(Generic[Waiting]):
    """The calls that wait for one engine host, and the number it may have at once. The caller adds a call,
    takes the next ones while there are any, and reports the end of each call that it took.

    The session with the fewest calls in the engine is next. Of several such sessions it is the one that was
    served the fewest tokens (prompt tokens that were not cached, and sampled ones). A session that pauses
    saves nothing up. So a call waits for its session's own calls before it, and for about one of each other
    session.

    A place is never left free where a call waits, with one exception: the last eighth of the places (SPARED)
    is for sessions below an even share. A session that is alone takes every place.

    `tokens` is the size of the engine's KV cache. While all requests fit it, the engine runs as many as it
    reports. Beyond that, requests would wait in the engine, where the first comer is first, so only as many
    are sent as keep its own queue short.
    """

    tokens: int = 0
    _active: "dict[str, _Session[Waiting]]" = field(factory=dict, init=False)
    _idle: "OrderedDict[str, _Session[Waiting]]" = field(factory=OrderedDict, init=False)
    _waiting: "dict[str, _Session[Waiting]]" = field(factory=dict, init=False)  # sessions with waiting calls
    _arrivals: int = field(default=0, init=False)
    _taken: int = field(default=0, init=False)
    _running: int = field(default=0, init=False)
    _held_tokens: int = field(default=0, init=False)  # tokens of the calls in the engine
    _served: int = field(default=0, init=False)  # tokens of the session that was taken last, at that time
    _most: int = field(default=DEFAULT_RUNNING, init=False)
    _window: int = field(default=MIN_ENGINE_QUEUE, init=False)

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return sum(len(session.waiting) for session in self._waiting.values())

    @property
    def waiting_sessions(self) -> int:
        """The number of sessions whose calls wait."""
        return len(self._waiting)

    def before(self, name: str) -> int:
        """About how many calls a new one of this session has before it, those in the engine included."""
        own = self._waiting.get(name)
        return self._running + len(self._waiting) + (0 if own is None else len(own.waiting) - 1)

    def add(self, name: str, call: Waiting, *, tokens: int) -> None:
        """Add a waiting call of the session `name`. `tokens` is what it needs of the KV cache."""
        session = self._active.get(name)
        if session is None:
            session = self._idle.pop(name) if name in self._idle else _Session()
            self._active[name] = session
        self._arrivals += 1
        session.waiting.append((self._arrivals, tokens, call))
        self._waiting[name] = session

    def withdraw(self, name: str, call: Waiting, now: float) -> None:
        """Remove a waiting call. Nothing happens for one that was taken."""
        session = self._waiting.get(name)
        if session is not None:
            session.waiting = deque(each for each in session.waiting if each[2] is not call)
            self._rest(name, session, now)

    def take(self, now: float) -> Waiting | None:
        """The call that the engine gets next. None if the engine takes no more, or none waits."""
        limit = self._limit()
        free = limit - self._running
        if not self._waiting or free <= 0:
            return None
        name = min(self._waiting, key=self._turn)
        session = self._waiting[name]
        if free <= limit // SPARE_DIVISOR and session.running >= max(1, limit // self._present(now)):
            return None
        _, tokens, call = session.waiting.popleft()
        self._served = session.served = max(self._served, session.served)
        self._taken += 1
        session.taken = self._taken
        self._running += 1
        self._held_tokens += tokens
        session.running += 1
        self._rest(name, session, now)
        return call

    def ended(self, name: str, *, tokens: int, served: int, now: float) -> None:
        """A call that was taken is over. `tokens` are as they were added, and `served` is what the engine did
        for it.
        """
        session = self._active[name]
        self._running -= 1
        self._held_tokens -= tokens
        session.running -= 1
        session.served += served
        self._rest(name, session, now)

    def empty(self, now: float) -> "list[Waiting]":
        """Take out every waiting call, because the host died."""
        found = sorted((each for one in self._waiting.values() for each in one.waiting), key=_arrival_number)
        for name, session in list(self._waiting.items()):
            session.waiting.clear()
            self._rest(name, session, now)
        return [call for _, _, call in found]

    def report(self, *, running: int, waiting: int, most: int) -> None:
        """Note what the engine reports of itself. `most` is what it runs at once, 0 where it does not report
        that.
        """
        self._most = most or self._most
        part = running // ENGINE_QUEUE_DIVISOR
        room = running + MIN_ENGINE_QUEUE + part
        if waiting > room - running:
            self._window = room
        else:  # with an empty queue the engine may run more than now
            self._window = max(self._window, room if waiting else room + part)

    def _limit(self) -> int:
        return self._most if self._held_tokens < self.tokens else min(self._most, self._window)

    def _present(self, now: float) -> int:
        """The number of sessions that have calls here, or had one within PRESENT_S."""
        while self._idle and next(iter(self._idle.values())).seen < now - PRESENT_S:
            self._idle.popitem(last=False)
        return len(self._active) + len(self._idle)

    def _rest(self, name: str, session: "_Session[Waiting]", now: float) -> None:
        if session.waiting:
            return
        self._waiting.pop(name, None)
        if not session.running:
            del self._active[name]
            session.seen = now
            self._idle[name] = session
            self._present(now)  # this drops the sessions that have left

    def _turn(self, name: str) -> tuple[int, int, int, int]:
        session = self._waiting[name]
        served = max(self._served, session.served)
        return session.running, served, session.taken, session.waiting[0][0]


def _arrival_number(each: "tuple[int, int, Waiting]") -> int:
    return each[0]


# ── hosts ────────────────────────────────────────────────────────────


@define(eq=False)
class HostDeaths:
    """When a host died, within the last WINDOW seconds. The host of an external engine is never given up,
    because its server may be away for hours.
    """

    gives_up: bool = True
    _times: "deque[float]" = field(factory=deque, init=False)

    def note(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None to give up. `now` is in seconds of any steady
        clock.
        """
        self._times.append(now)
        while now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= MAX_DEATHS and self.gives_up:
            return None
        pauses = RESTART_PAUSES if self.gives_up else RECONNECT_PAUSES
        return 0.0 if len(self._times) == 1 else pauses.delay(len(self._times) - 2)


# `stale`: the host waits for weights; `dead`: it is about to be restarted; `failed`: it was given up.
EngineKind = Literal["sglang", "simulated", "external", "none"]
HostState = Literal["starting", "ready", "stale", "dead", "failed"]


@frozen(kw_only=True)
class HostStatistics:
    """One engine host. `in_flight` counts our calls, aborting ones included. `running` and `waiting` are the
    scheduler's own counts, at most 0.25 s old. `queued` calls, of `queued_sessions` sessions, wait in the
    node for their turn. `url` is the server of an external engine. `residency` describes the sessions that
    its cache is for; it is None where the policy is off or the cache's size is unknown. `drafted` tokens, the
    `accepted` of them and the steps that `verified` them are counted since the node started.
    """

    index: int
    state: HostState
    pid: int | None
    gpus: tuple[int, ...]
    in_flight: int
    running: int
    waiting: int
    token_usage: float
    restarts: int
    weight_version: str
    last_error: str | None
    queued: int = 0
    queued_sessions: int = 0
    url: str | None = None
    residency: ResidencyStatistics | None = None
    drafted: int = 0
    accepted: int = 0
    verified: int = 0


@frozen(kw_only=True)
class EngineStatistics:
    """All hosts. `context_length` is the most tokens that one request may hold, and `weight_version` is the
    node's. The answers of a `simulated` engine are random.
    """

    hosts: tuple[HostStatistics, ...]
    vocab_size: int
    context_length: int
    weight_version: str
    paused: str | None
    kind: EngineKind = "sglang"


# ── versions ────────────────────────────────────────────────────────────


def followed(history: Sequence[str], serving: Sequence[str]) -> list[str]:
    """The history of an external engine's versions, oldest first, extended by those that its servers serve
    now. The servers are updated one by one, so an old version is new again only where all of them serve it.
    """
    found = list(history)
    for version in serving:
        again = bool(found) and version != found[-1] and set(serving) == {version}
        if version not in found or again:
            found.append(version)
    return found
