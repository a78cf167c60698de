"""Which sessions an engine's prefix cache is for: the start gate and the valve of one engine host.

Pure: it is given calls and times, and waits for nothing. Agents come back with a growing prefix. Once more of
them run than the cache holds, an LRU cache drops exactly what is needed next, and throughput falls abruptly
to 0.4 of what it was (docs/measurements.md). So a session begins only while what all sessions will become
fits the cache, and it waits before its start, not in its middle. If sessions grow beyond that, idle ones are
displaced. The next call of a displaced session goes on while few tokens are read again, or else it is held
for HOLD_S at most.

Nothing of this is configured: sizes are learned from sessions that ended, and the margin from how many calls
were late and what was read again (`residency_feedback`).
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy
from attrs import define, field, frozen

from polarnode.engine.residency_feedback import BudgetFeedback, RereadAllowance
from polarnode.engine.session_sizes import LONGER, Running, SessionSizes

LEAVE_SHARE: Final = 0.98  # part of the budget; above it idle sessions are displaced
# Part of the budget; below it a displaced session comes back. If this were the same as LEAVE, sessions would
# rotate.
RETURN_SHARE: Final = 0.92
# Seconds that a call is held at most. Harnesses wait 300 s for an answer that is not streamed, and the time
# in the engine's own queue comes on top. An unbounded hold gains less than 1 %.
HOLD_S: Final = 50.0
CALL_GROWTH_TOKENS: Final = 600  # tokens that a call may add: the sample of a turn and the result of its tool
AWAY_S: Final = 10.0  # idle seconds after which a session is likelier to stay away than to call
# What a session counts for if it is away for longer than it takes to read the cache: some such sessions come
# back at once.
LENT_WEIGHT: Final = 0.5
# The guess of how many tokens a session ends with before any ended: a part of the cache, and at most so many.
# A guess that is too high leaves the cache half empty until then. One that is too low lets sessions begin
# that cannot all be held off later: in the first hour an eighth has 3 % more tokens a second in the base
# shape, and p99 57 s in the long one.
GUESS_DIVISOR: Final = 6
GUESS: Final = 64_000
KINDS: Final = 32  # kinds whose sizes are remembered: several times the harnesses of a node
RECALLED_LOOKS: Final = (
    16  # How many looks the recalled size of sub-agents counts for: eight minutes of them.
)
# Points of growth at which expectations are computed, up to the end of the largest session.
GROWTH_POINTS: Final = 16
# Seconds without a call after which a session is forgotten: those of the longest tool observed.
LEASE_S: Final = 1800.0
LOOK_S: Final = 30.0  # seconds between corrections
# The largest allowance, as a part of the capacity: it lets some displaced sessions return at once, after
# hours without any.
MAX_ALLOWANCE_SHARE: Final = 0.3
# Standard deviations by which a forecast is above the mean. There are none while places are lent, because
# late calls cost less then. With 1, and a margin of 0.92, the long shape loses 7 %; with none, and one of
# 0.75, shapes whose sessions differ less lose 1 %.
FORECAST_DEVIATIONS: Final = 0.5
# Seconds that a forecast stays valid: computing one takes some 0.1 ms, and one session more or less changes
# its waiting by seconds.
FORECAST_INTERVAL_S: Final = 1.0


@frozen
class HeldCall:
    """A call that waits for its session's place. `id` is that of its request."""

    id: str
    session: str
    chain: str
    since: float


@define(eq=False)
class _Chain:
    """One conversation: the main agent's, or a sub-agent's. `shared` are the tokens that its first call found
    already read by others, and `kept` those that a next call finds if they stayed in the cache. `over` is set
    if the conversation is not expected to call again, so that its tokens need no place.
    """

    kept: int = 0
    shared: int | None = None
    calls: int = 0  # calls in the engine
    turns: int = 0
    over: bool = False

    @property
    def own(self) -> int:
        return 0 if self.over else max(0, self.kept - (self.shared or 0))


@define(eq=False)
class _Session:
    """`own` are the tokens of its conversations that no other session has. `lasting` are those of them
    without the tokens of its sub-agents, which come and go, and `most` is the largest value that `lasting`
    ever had.
    """

    name: str
    kind: str
    group: str
    idle_since: float
    resident: bool = True
    own: int = 0
    lasting: int = 0
    most: int = 0
    chains: dict[str, _Chain] = field(factory=dict)
    leaving: bool = False  # it is displaced when its call ends
    planned: bool = False  # the node decided what its next call reads again
    cold: bool = False  # its next call finds nothing, because the weights changed
    charged: int = 0  # tokens that its return took from the allowance

    @property
    def shared(self) -> int | None:
        """The shared tokens of its first conversation. None before that was read."""
        return next((chain.shared for chain in self.chains.values()), None)

    @property
    def calls(self) -> int:
        return sum(chain.calls for chain in self.chains.values())

    def enter(self, chain: str) -> list[str]:
        """A call of a conversation begins. Where the main conversation goes on, the sub-agents that it waited
        for have ended, and the names of their conversations are returned. A sub-agent in the background
        counts again with its next call.
        """
        found = self.chains.setdefault(chain, _Chain())
        found.calls += 1
        found.turns += 1
        found.over = False
        gone: list[str] = []
        main, *later = self._chains_from_main()
        if found is self.chains[main]:
            gone = [name for name in later if not self.chains[name].calls and not self.chains[name].over]
            for name in gone:
                self.chains[name].over = True
        self.note()
        return gone

    def note(self) -> None:
        self.own = sum(chain.own for chain in self.chains.values())
        self.lasting = self.own - sum(self.chains[name].own for name in self._chains_from_main()[1:])
        self.most = max(self.most, self.lasting)

    def _chains_from_main(self) -> list[str]:
        """Its conversations from the main one on. The main one is the oldest that called twice, because a
        harness may first ask for a title, which is one call.
        """
        names = list(self.chains)
        return names[next((at for at, name in enumerate(names) if self.chains[name].turns > 1), 0) :]


@frozen(kw_only=True)
class LearnedSizes:
    """What a host that starts again need not learn again: the most tokens that ended sessions of each kind
    had, the latest last, the tokens that sub-agents add to a session of the kind, and the margin.
    """

    margin: float
    ends: Mapping[str, tuple[int, ...]]
    passing: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class ResidencyStatistics:
    """One host's budget and sessions now, in tokens, sessions, calls and seconds. Prompt tokens are counted
    since the host began. `tokens` are those of resident sessions. `margin` is the part of `capacity` that may
    be expected of all sessions for another one to begin.
    """

    capacity: int
    budget: int
    margin: float
    lends: bool
    tokens: int
    busy: int
    idle: int
    displaced: int
    held: int
    oldest_held_s: float
    prompt_tokens: int
    reread_planned: int
    reread_unplanned: int


@define(eq=False)
class ResidencyPolicy:
    """The sessions of one engine host. `capacity` is the number of tokens of its cache, and `longest` the
    most of one request.
    """

    capacity: int
    longest: int = GUESS
    feedback: BudgetFeedback = field(factory=BudgetFeedback, init=False)
    _allowance: RereadAllowance = field(factory=RereadAllowance, init=False)
    _sessions: "OrderedDict[str, _Session]" = field(factory=OrderedDict, init=False)  # oldest first
    _held: "OrderedDict[str, HeldCall]" = field(factory=OrderedDict, init=False)
    _sizes: dict[str, SessionSizes] = field(factory=dict, init=False)  # by kind
    _forgotten: list[tuple[str, str]] = field(factory=list, init=False)
    _known: int | None = field(default=0, init=False)  # `_tokens`, as they were counted last
    # By kind and group, what `_expected` returned since something changed.
    _forecasts: dict[tuple[str, str], tuple[float, float]] = field(factory=dict, init=False)

    @property
    def budget(self) -> int:
        """The tokens that resident sessions may have."""
        return int(self.capacity * self.feedback.scale)

    @property
    def room(self) -> int:
        """The tokens of the budget that resident sessions do not have."""
        return self.budget - self._tokens()

    # ── sessions ──────────────────────────────────────────────────────────────

    def may_begin(self, kind: str, now: float, *, group: str = "") -> bool:
        """Whether another session of `group` may begin. It always may where no session is here."""
        if not self._sessions:
            return True
        part = self._forecast_peak(kind, group, now) / self.budget
        fits = not self._held and part <= self.feedback.allowed
        self.feedback.asked(part, fits=fits)
        return fits

    def begin(self, session: str, kind: str, now: float, *, group: str = "", resident: bool = True) -> None:
        """A session begins. Sessions of one `kind` grow alike, such as those of one harness; those of one
        `group` begin with the same prompt. A session that is not `resident` begins like a displaced one.
        """
        if session not in self._sessions:
            self._sessions[session] = _Session(
                session, kind, group or session, now, resident=resident, planned=not resident
            )
            self._forecasts.clear()

    def over(self, session: str) -> list[HeldCall]:
        """A session ended, however that was. Returns those of its calls that were held."""
        found = self._sessions.pop(session, None)
        if found is None:
            return []
        self._changed()
        self._forget(found)
        if found.most:  # a session that never called says nothing about the others
            self._sizes_of(found.kind).add(found.most, found.group)
            self.feedback.ended += 1
            self._sizes[found.kind] = self._sizes.pop(found.kind)  # kinds are ordered by their latest end
        left = [call for call in self._held.values() if call.session == session]
        for call in left:
            del self._held[call.id]
        return left

    def lost(self) -> list[HeldCall]:
        """The cache is gone with its engine. Returns all held calls. Sessions come back with their next call,
        wherever that goes.
        """
        held = list(self._held.values())
        self._sessions.clear()
        self._held.clear()
        self._known = 0
        self._forecasts.clear()
        return held

    def cold(self) -> None:
        """The weights changed: what every session reads next is planned."""
        for found in self._sessions.values():
            found.planned = found.cold = True

    def has(self, session: str) -> bool:
        """Whether a session began and is not over, resident or displaced."""
        return session in self._sessions

    def has_group(self, group: str) -> bool:
        """Whether a session of a group is here."""
        return any(found.group == group for found in self._sessions.values())

    # ── calls ─────────────────────────────────────────────────────────────────

    def ask(self, call: str, session: str, chain: str, now: float, *, tokens: int = 0) -> bool:
        """Whether `call`, with a prompt of so many `tokens`, goes to the engine now. If not, it is held until
        `look` returns it. A second call of a session at the same time, and a sub-agent's, are never held,
        because somebody with a place waits for them. A session that has not begun here begins like a
        displaced one.
        """
        found = self._sessions.get(session)
        if found is None:
            self.begin(session, "", now, resident=False)
            found = self._sessions[session]
        if not found.resident and not found.chains:
            found.own = tokens  # until its first prompt is read, all of it
        self.feedback.calls += 1
        if not found.resident and not found.calls and (self._held or not self._bring_back(found, now)):
            self._held[call] = HeldCall(call, session, chain, now)
            return False
        found.planned = found.planned or self._is_lent(found, now)
        self._enter(found, chain)
        return True

    def withdraw(self, call: str) -> None:
        """Whoever waited for a held call has left."""
        self._held.pop(call, None)

    def read(self, session: str, chain: str, *, prompt: int, cached: int, seconds: float) -> None:
        """The engine read the prompt of a call, `seconds` after it was sent. `cached` tokens of the prompt
        were in the cache.
        """
        self.feedback.read(prompt, prompt - cached, seconds)
        self._allowance.earn(prompt, lends=self.feedback.lends, most=MAX_ALLOWANCE_SHARE * self.capacity)
        found = self._sessions.get(session)
        known = None if found is None else found.chains.get(chain)
        if found is None or known is None:
            return
        if known.shared is None:
            known.shared = cached
            self._changed()
        else:
            again = max(0, min(known.kept, prompt) - cached)
            # With more in the cache than fits, what is read again follows from what was let in.
            planned = found.planned or self._tokens() > LEAVE_SHARE * self.budget
            self.feedback.note_reread(again, planned=planned, cold=found.cold)
            if not found.cold:
                self._allowance.settle(found.charged, again, most=MAX_ALLOWANCE_SHARE * self.capacity)
                self.feedback.note_wait(seconds)
            found.charged = 0
        found.planned = found.cold = False

    def ended(self, session: str, chain: str, *, tokens: int | None, now: float) -> None:
        """A call ended with so many tokens, prompt and sample; None for a call that the engine did not read.
        The number replaces the one before, because a history may have become shorter.
        """
        found = self._sessions.get(session)
        known = None if found is None else found.chains.get(chain)
        if found is None or known is None or not known.calls:
            return
        known.calls -= 1
        if tokens is not None:
            known.kept = tokens
            found.note()
            self._changed()
        if not found.calls:
            found.idle_since = now
            if found.leaving:
                self._displace_session(found)

    # ── decisions ─────────────────────────────────────────────────────────────

    def look(self, now: float) -> list[HeldCall]:
        """Displace what is too much, and return the held calls that go now, those of the oldest session
        first.
        """
        if now >= self.feedback.looked + LOOK_S:
            self._correct(now)
        self._displace_excess(now)
        return self._take_returning(now) if self._held else []

    def next_decision(self, now: float) -> float:
        """The time when `look` has to be called at the latest."""
        held = min((call.since + HOLD_S for call in self._held.values()), default=now + LOOK_S)
        return max(now, min(held, self.feedback.looked + LOOK_S))

    def forgotten(self) -> list[tuple[str, str]]:
        """The conversations, by session and chain, that ended or were displaced since the last call of this
        method. An engine that can do so evicts their prefixes first.
        """
        found, self._forgotten = self._forgotten, []
        return found

    def statistics(self, now: float) -> ResidencyStatistics:
        residents = [found for found in self._sessions.values() if found.resident]
        busy = sum(found.calls > 0 for found in residents)
        totals = self.feedback.totals
        return ResidencyStatistics(
            capacity=self.capacity,
            budget=self.budget,
            margin=round(self.feedback.allowed, 3),
            lends=self.feedback.lends,
            tokens=self._tokens(),
            busy=busy,
            idle=len(residents) - busy,
            displaced=len(self._sessions) - len(residents),
            held=len(self._held),
            oldest_held_s=round(max((now - call.since for call in self._held.values()), default=0.0), 1),
            prompt_tokens=totals.prompt,
            reread_planned=totals.planned,
            reread_unplanned=totals.unplanned,
        )

    # ── what is kept over a restart ───────────────────────────────────────────

    def learned(self) -> LearnedSizes:
        """What was learned of the KINDS kinds whose sessions ended last."""
        ends = {kind: sizes.ends for kind, sizes in self._sizes.items() if sizes.ends}
        ends = dict(list(ends.items())[-KINDS:])
        passing = {kind: round(self._sizes[kind].passing) for kind in ends}
        return LearnedSizes(margin=self.feedback.margin, ends=ends, passing=passing)

    def recall(self, learned: LearnedSizes) -> None:
        """Begin with what was learned before. Sizes that no session of this engine can have are left out."""
        self.feedback.recall(learned.margin)
        for kind, ends in list(learned.ends.items())[-KINDS:]:
            for tokens in ends:
                if 0 < tokens <= self.capacity:
                    self._sizes_of(kind).add(tokens)
            if 0 < learned.passing.get(kind, 0) <= self.capacity:
                self._sizes_of(kind).passes(learned.passing[kind], looks=RECALLED_LOOKS)

    # ── tokens ────────────────────────────────────────────────────────────────

    def _tokens(self) -> int:
        """The tokens that resident sessions have in the cache. They are counted again when a session
        changed.
        """
        if self._known is None:
            self._known = self._count()
        return self._known

    def _count(self) -> int:
        """Each session's own tokens, and what sessions share once. The first session of a group reads for
        itself what the others then find.
        """
        groups: dict[str, list[_Session]] = {}
        for found in self._sessions.values():
            if found.resident and found.shared is not None:
                groups.setdefault(found.group, []).append(found)
        common = min((found.shared or 0 for each in groups.values() for found in each), default=0)
        tokens = common
        for members in groups.values():
            most = max(found.shared or 0 for found in members)
            tokens += most - common
            tokens += sum(max(0, found.own - (most - (found.shared or 0))) for found in members)
        return tokens

    def _changed(self) -> None:
        self._known = None
        self._forecasts.clear()

    def _forecast_peak(self, kind: str, group: str, now: float) -> float:
        """What `_expected` returns. It is computed again when something changed and, while places are lent,
        each second, because time alone changes what is lent.
        """
        at, found = self._forecasts.get((kind, group), (now, -1.0))
        if found < 0.0 or (self.feedback.lends and now - at >= FORECAST_INTERVAL_S):
            found = self._expected(kind, group, now)
            self._forecasts[kind, group] = now, found
        return found

    def _expected(self, kind: str, group: str, now: float) -> float:
        """The most tokens that are expected at one time if a session of `kind` and `group` begins now, and
        none after it. All sessions grow alike. Sub-agents count as they are on average, because those that
        run now are over before a session that begins has grown.
        """
        running: dict[str, list[Running]] = {kind: [(0, 1.0, group)]}
        shared = self._tokens()
        for found in self._sessions.values():
            shared -= found.own if found.resident else 0
            # Displaced ones count too, because they come back before any begins.
            weight = LENT_WEIGHT if self._is_lent(found, now) else 1.0
            running.setdefault(found.kind, []).append((found.lasting, weight, found.group))
        sizes = {each: self._sizes_of(each) for each in running}
        largest = max(LONGER * tokens for each in running.values() for tokens, _, _ in each)
        growth = numpy.linspace(0.0, max(largest, *(each.largest for each in sizes.values())), GROWTH_POINTS)
        parts = [sizes[each].expected(those, growth) for each, those in running.items()]
        deviation = numpy.sqrt(sum(variance for _, variance in parts))
        above = 0.0 if self.feedback.lends else FORECAST_DEVIATIONS
        return float(numpy.max(sum(mean for mean, _ in parts) + above * deviation)) + shared

    def _sizes_of(self, kind: str) -> SessionSizes:
        guess = min(GUESS, self.longest, self.capacity // GUESS_DIVISOR)
        return self._sizes.setdefault(kind, SessionSizes(guess))

    def _fits(self, found: _Session) -> bool:
        tokens = self._tokens()
        return not tokens or tokens + found.own + CALL_GROWTH_TOKENS <= RETURN_SHARE * self.budget

    def _is_away(self, found: _Session, now: float) -> bool:
        """Whether a session is idle for longer than it takes to read the whole cache."""
        read_s = self.feedback.seconds_to_read(self.capacity)
        return read_s is not None and not found.calls and now - found.idle_since >= read_s

    def _is_lent(self, found: _Session, now: float) -> bool:
        return self.feedback.lends and self._is_away(found, now)

    # ── places ────────────────────────────────────────────────────────────────

    def _displace_excess(self, now: float) -> None:
        """Displace idle sessions until the others fit, those whose tools take long first. Of these the
        smallest that is enough goes: reading it again costs least, and each further session is one more that
        waits. Where idle sessions are not enough, busy ones are displaced when their calls end. One session
        always stays.
        """
        most, tokens = LEAVE_SHARE * self.budget, self._tokens()
        if tokens <= most:
            return
        staying = [found for found in self._sessions.values() if found.resident and not found.leaving]
        ranks: dict[tuple[bool, bool], list[_Session]] = {}
        for found in sorted(staying, key=lambda found: found.own):
            ranks.setdefault((found.calls > 0, now - found.idle_since < AWAY_S), []).append(found)
        for rank in sorted(ranks):
            smallest_first = ranks[rank]
            while smallest_first and len(staying) > 1 and tokens > most:
                enough = (each for each in smallest_first if each.own >= tokens - most)
                found = next(enough, smallest_first[-1])
                smallest_first.remove(found)
                staying.remove(found)
                tokens -= found.own
                if found.calls:
                    found.leaving = True
                else:
                    self._displace_session(found)

    def _take_returning(self, now: float) -> list[HeldCall]:
        calls: dict[str, list[HeldCall]] = {}
        for call in self._held.values():
            calls.setdefault(call.session, []).append(call)
        going: list[HeldCall] = []
        for session in [name for name in self._sessions if name in calls]:
            found, held = self._sessions[session], calls[session]
            if now - held[0].since >= HOLD_S:
                self._restore_place(found)
                self.feedback.expired += len(held)
            elif not self._bring_back(found, now):
                continue
            for call in held:
                del self._held[call.id]
                self._enter(found, call.chain)
                self.feedback.note_wait(now - call.since)
            going += held
        return going

    def _bring_back(self, found: _Session, now: float) -> bool:
        """Give a displaced session its place again where it fits. The place of a session that is away may be
        lent to it.
        """
        if not self._fits(found):
            for each in list(self._sessions.values()):
                if each.resident and self._is_lent(each, now) and not self._fits(found):
                    self._displace_session(each)
        if not self._fits(found) and not self._spend_allowance(found):
            return False
        self._restore_place(found)
        return True

    def _spend_allowance(self, found: _Session) -> bool:
        """Take from the allowance what the session's return makes the engine evict. Returns False where the
        allowance is too small.
        """
        over = self._tokens() + found.own + CALL_GROWTH_TOKENS - LEAVE_SHARE * self.budget
        charge = int(min(max(over, 0.0), found.own))
        if not self._allowance.spend(charge):
            return False
        found.charged += charge
        return True

    def _enter(self, found: _Session, chain: str) -> None:
        before = found.own
        self._forgotten += [(found.name, each) for each in found.enter(chain)]
        if found.own != before:
            self._changed()

    def _restore_place(self, found: _Session) -> None:
        found.resident, found.leaving = True, False
        self._changed()

    def _displace_session(self, found: _Session) -> None:
        found.resident, found.leaving, found.planned = False, False, True
        self._changed()
        self._forget(found)

    def _forget(self, found: _Session) -> None:
        self._forgotten += [(found.name, name) for name, chain in found.chains.items() if not chain.over]

    def _correct(self, now: float) -> None:
        for name in [name for name, found in self._sessions.items() if now - found.idle_since >= LEASE_S]:
            if not self._sessions[name].calls and not any(
                call.session == name for call in self._held.values()
            ):
                self.over(name)
        for kind, sizes in self._sizes.items():
            those = [
                found.own - found.lasting
                for found in self._sessions.values()
                if found.kind == kind and found.resident
            ]
            if those:
                sizes.passes(sum(those) / len(those))
        away = sum(found.own for found in self._sessions.values() if self._is_away(found, now))
        total = sum(found.own for found in self._sessions.values())
        self.feedback.look(now, away=away / total if total else None)
        self._forecasts.clear()
