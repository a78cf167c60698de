"""Which sessions an engine's prefix cache is for: the start gate and the valve of one engine host.

Pure: given calls and times, it waits for nothing. Agents come back with a growing prefix. Once more of them
run than the cache holds, an LRU cache drops exactly what is needed next: throughput falls to 0.4 of what it
was, at a cliff (docs/measurements.md). So a session begins only while what all sessions will become fits
the cache, and waits before its start, not in its middle. What grows beyond that is displaced while it is
idle, and its next call goes while few tokens are read again, or else is held for HOLD_S at most.

Nothing of it is configured: sizes are learned from sessions that ended, and the margin from how many calls
were late and what was read again (`residency_feedback`).
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy
from attrs import define, field, frozen

from polarnode.engine.residency_feedback import Allowance, Feedback
from polarnode.engine.session_sizes import LONGER, Running, SessionSizes

LEAVE: Final = 0.98  # of the budget: above it idle sessions are displaced
# of the budget: below it a displaced one comes back; at one mark with LEAVE they would rotate
RETURN: Final = 0.92
# seconds that a call is held at most: harnesses wait 300 s for an answer that is not streamed, and the
# engine's own queue comes on top; an unbounded hold gains less than 1 %
HOLD_S: Final = 50.0
GROWTH: Final = 600  # tokens that a call may add: a turn's sample and its tool's result
AWAY_S: Final = 10.0  # idle seconds after which a session is likelier to stay away than to call
# what a session counts for that is away for longer than it takes to read the cache: some come back at once
LENT: Final = 0.5
# Tokens that a session ends with before any ended: a part of the cache, and at most so many. One too high
# leaves the cache half empty until then, one too low lets sessions begin that cannot all be held off later:
# in the first hour an eighth has 3 % more tokens a second in the base shape, and p99 57 s in the long one.
GUESS_PART: Final = 6
GUESS: Final = 64_000
KINDS: Final = 32  # of which sizes are remembered: the harnesses of a node, several times
RECALLED: Final = 16  # looks that what was recalled of sub-agents counts for: eight minutes
POINTS: Final = 16  # of growth at which expectations are computed, up to the largest session's end
# seconds without a call after which a session is forgotten: the longest tool observed
LEASE_S: Final = 1800.0
LOOK_S: Final = 30.0  # between corrections
# of the capacity, the largest allowance: some displaced sessions at once, after hours without any
ALLOWED_PART: Final = 0.3
# Standard deviations that a forecast is above the mean; none while places are lent, where late calls cost
# less. With 1, and a margin of 0.92, the long shape loses 7 %; with none, and one of 0.75, shapes whose
# sessions differ less lose 1 %.
DEVIATIONS: Final = 0.5
FORECAST_S: Final = 1.0  # a forecast is some 0.1 ms, and a session more or less is seconds of its waiting


@frozen
class HeldCall:
    """A call that waits for its session's place. `id` is its request's."""

    id: str
    session: str
    chain: str
    since: float


@define(eq=False)
class _Chain:
    """One conversation: the main agent's, or a sub-agent's. `shared`: tokens that its first call found read
    by others; `kept`: that a next call finds, if they stayed in the cache. `over`: it is not expected to
    call again, so its tokens need no place.
    """

    kept: int = 0
    shared: int | None = None
    calls: int = 0  # in the engine
    turns: int = 0
    over: bool = False

    @property
    def own(self) -> int:
        return 0 if self.over else max(0, self.kept - (self.shared or 0))


@define(eq=False)
class _Session:
    """`own`: tokens of its conversations that no other session has, and of those `lasting`: without its
    sub-agents', which come and go; `most`: that these ever were.
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
    leaving: bool = False  # displaced when its call ends
    planned: bool = False  # what its next call reads again was decided here
    cold: bool = False  # its next call finds nothing, because the weights changed
    charged: int = 0  # tokens that its return took of the allowance

    @property
    def shared(self) -> int | None:
        """Of its first conversation; None before that was read."""
        return next((chain.shared for chain in self.chains.values()), None)

    @property
    def calls(self) -> int:
        return sum(chain.calls for chain in self.chains.values())

    def enter(self, chain: str) -> list[str]:
        """A call of a conversation begins. Where the main one goes on, those that it waited for, its
        sub-agents, have ended: they are given. One in the background counts again with its next call.
        """
        found = self.chains.setdefault(chain, _Chain())
        found.calls += 1
        found.turns += 1
        found.over = False
        gone: list[str] = []
        main, *later = self._from_main()
        if found is self.chains[main]:
            gone = [name for name in later if not self.chains[name].calls and not self.chains[name].over]
            for name in gone:
                self.chains[name].over = True
        self.note()
        return gone

    def note(self) -> None:
        self.own = sum(chain.own for chain in self.chains.values())
        self.lasting = self.own - sum(self.chains[name].own for name in self._from_main()[1:])
        self.most = max(self.most, self.lasting)

    def _from_main(self) -> list[str]:
        """Its conversations from the main one on: the oldest that called twice, for a harness may ask for a
        title first, which is one call.
        """
        names = list(self.chains)
        return names[next((at for at, name in enumerate(names) if self.chains[name].turns > 1), 0) :]


@frozen(kw_only=True)
class Learned:
    """The most tokens that ended sessions of each kind had, the latest last, those that sub-agents add to a
    session of it, and the margin: what a host that starts again need not learn again.
    """

    margin: float
    ends: Mapping[str, tuple[int, ...]]
    passing: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class ResidencyStatistics:
    """One host's budget and sessions now, in tokens, sessions, calls and seconds; prompt tokens since the
    host began. `tokens` are those of resident sessions; `margin` is the part of `capacity` that may be
    expected of all for a session to begin.
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
class Residency:
    """The sessions of one engine host. `capacity`: tokens of its cache; `longest`: of one request."""

    capacity: int
    longest: int = GUESS
    feedback: Feedback = field(factory=Feedback, init=False)
    _allowance: Allowance = field(factory=Allowance, init=False)
    _sessions: "OrderedDict[str, _Session]" = field(factory=OrderedDict, init=False)  # oldest first
    _held: "OrderedDict[str, HeldCall]" = field(factory=OrderedDict, init=False)
    _sizes: dict[str, SessionSizes] = field(factory=dict, init=False)  # by kind
    _forgotten: list[tuple[str, str]] = field(factory=list, init=False)
    _known: int | None = field(default=0, init=False)  # `_tokens`, as it was counted last
    # by kind and group, what `_expected` gave since something changed
    _forecasts: dict[tuple[str, str], tuple[float, float]] = field(factory=dict, init=False)

    @property
    def budget(self) -> int:
        """Tokens that resident sessions may have."""
        return int(self.capacity * self.feedback.scale)

    @property
    def room(self) -> int:
        """Tokens of the budget that resident sessions have not."""
        return self.budget - self._tokens()

    # ── sessions ──────────────────────────────────────────────────────────────

    def may_begin(self, kind: str, now: float, *, group: str = "") -> bool:
        """Whether another session, of `group`, may begin. One always may where none is here."""
        if not self._sessions:
            return True
        part = self._forecast(kind, group, now) / self.budget
        fits = not self._held and part <= self.feedback.allowed
        self.feedback.asked(part, fits=fits)
        return fits

    def begin(self, session: str, kind: str, now: float, *, group: str = "", resident: bool = True) -> None:
        """A session begins. `kind`: sessions of one kind grow alike, such as those of one harness; those of
        one `group` begin with the same prompt. One that is not `resident` comes as a displaced one does.
        """
        if session not in self._sessions:
            self._sessions[session] = _Session(
                session, kind, group or session, now, resident=resident, planned=not resident
            )
            self._forecasts.clear()

    def over(self, session: str) -> list[HeldCall]:
        """A session ended, however; gives the calls of it that were held."""
        found = self._sessions.pop(session, None)
        if found is None:
            return []
        self._changed()
        self._forget(found)
        if found.most:  # one that never called tells nothing of the others
            self._sizes_of(found.kind).add(found.most, found.group)
            self.feedback.ended += 1
            self._sizes[found.kind] = self._sizes.pop(found.kind)  # kinds stand by their latest end
        left = [call for call in self._held.values() if call.session == session]
        for call in left:
            del self._held[call.id]
        return left

    def lost(self) -> list[HeldCall]:
        """The cache is gone with its engine; gives all held calls. Sessions come back with their next call,
        wherever that goes.
        """
        held = list(self._held.values())
        self._sessions.clear()
        self._held.clear()
        self._known = 0
        self._forecasts.clear()
        return held

    def cold(self) -> None:
        """The weights changed: every session's next read is planned."""
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
        """Whether `call`, with a prompt of so many `tokens`, goes to the engine now; else it is held until
        `look` gives it. A session's second call at once, and a sub-agent's, are never held: somebody with a
        place waits for them. A session that has not begun here comes as a displaced one does.
        """
        found = self._sessions.get(session)
        if found is None:
            self.begin(session, "", now, resident=False)
            found = self._sessions[session]
        if not found.resident and not found.chains:
            found.own = tokens  # until it is read, all of its first prompt
        self.feedback.calls += 1
        if not found.resident and not found.calls and (self._held or not self._comes_back(found, now)):
            self._held[call] = HeldCall(call, session, chain, now)
            return False
        found.planned = found.planned or self._is_lent(found, now)
        self._enter(found, chain)
        return True

    def withdraw(self, call: str) -> None:
        """Whoever waited for a held call has left."""
        self._held.pop(call, None)

    def read(self, session: str, chain: str, *, prompt: int, cached: int, seconds: float) -> None:
        """The engine read the prompt of a call, `seconds` after it got it; `cached` tokens of it were
        there.
        """
        self.feedback.read(prompt, prompt - cached, seconds)
        self._allowance.earn(prompt, lends=self.feedback.lends, most=ALLOWED_PART * self.capacity)
        found = self._sessions.get(session)
        known = None if found is None else found.chains.get(chain)
        if found is None or known is None:
            return
        if known.shared is None:
            known.shared = cached
            self._changed()
        else:
            again = max(0, min(known.kept, prompt) - cached)
            # with more in the cache than fits, what is read again follows from what was let in
            planned = found.planned or self._tokens() > LEAVE * self.budget
            self.feedback.read_again(again, planned=planned, cold=found.cold)
            if not found.cold:
                self._allowance.settle(found.charged, again, most=ALLOWED_PART * self.capacity)
                self.feedback.waited_for(seconds)
            found.charged = 0
        found.planned = found.cold = False

    def ended(self, session: str, chain: str, *, tokens: int | None, now: float) -> None:
        """A call ended with so many tokens, prompt and sample; None for one that the engine did not read.
        They are set, never added: a history may have become shorter.
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
                self._displace(found)

    # ── decisions ─────────────────────────────────────────────────────────────

    def look(self, now: float) -> list[HeldCall]:
        """Displace what is too much, and give the held calls that go now, oldest session first."""
        if now >= self.feedback.looked + LOOK_S:
            self._correct(now)
        self._valve(now)
        return self._returning(now) if self._held else []

    def next_look(self, now: float) -> float:
        """When `look` has to be called at the latest."""
        held = min((call.since + HOLD_S for call in self._held.values()), default=now + LOOK_S)
        return max(now, min(held, self.feedback.looked + LOOK_S))

    def forgotten(self) -> list[tuple[str, str]]:
        """Conversations, by session and chain, that ended or were displaced since this was asked: an engine
        that can evicts their prefixes first.
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

    def learned(self) -> Learned:
        """Of the KINDS kinds whose sessions ended last."""
        ends = {kind: sizes.ends for kind, sizes in self._sizes.items() if sizes.ends}
        ends = dict(list(ends.items())[-KINDS:])
        passing = {kind: round(self._sizes[kind].passing) for kind in ends}
        return Learned(margin=self.feedback.margin, ends=ends, passing=passing)

    def recall(self, learned: Learned) -> None:
        """Begin with what was learned before. Sizes that no session of this engine can have are left out."""
        self.feedback.recall(learned.margin)
        for kind, ends in list(learned.ends.items())[-KINDS:]:
            for tokens in ends:
                if 0 < tokens <= self.capacity:
                    self._sizes_of(kind).add(tokens)
            if 0 < learned.passing.get(kind, 0) <= self.capacity:
                self._sizes_of(kind).passes(learned.passing[kind], looks=RECALLED)

    # ── tokens ────────────────────────────────────────────────────────────────

    def _tokens(self) -> int:
        """What the resident sessions have in the cache, counted again when one changed."""
        if self._known is None:
            self._known = self._count()
        return self._known

    def _count(self) -> int:
        """Each session's own tokens, and what they share once. The first of a group reads for itself what the
        others then find.
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

    def _forecast(self, kind: str, group: str, now: float) -> float:
        """What `_expected` gives, asked again when something changed; while places are lent, which time alone
        changes, each second.
        """
        at, found = self._forecasts.get((kind, group), (now, -1.0))
        if found < 0.0 or (self.feedback.lends and now - at >= FORECAST_S):
            found = self._expected(kind, group, now)
            self._forecasts[kind, group] = now, found
        return found

    def _expected(self, kind: str, group: str, now: float) -> float:
        """The most tokens that are expected at one time if a session of `kind` and `group` begins now, and
        none after it. All grow alike. Sub-agents count as they are on average: those that run now are over
        before a session that begins has grown.
        """
        running: dict[str, list[Running]] = {kind: [(0, 1.0, group)]}
        shared = self._tokens()
        for found in self._sessions.values():
            shared -= found.own if found.resident else 0
            # displaced ones too: they come back before any begins
            weight = LENT if self._is_lent(found, now) else 1.0
            running.setdefault(found.kind, []).append((found.lasting, weight, found.group))
        sizes = {each: self._sizes_of(each) for each in running}
        largest = max(LONGER * tokens for each in running.values() for tokens, _, _ in each)
        growth = numpy.linspace(0.0, max(largest, *(each.largest for each in sizes.values())), POINTS)
        parts = [sizes[each].expected(those, growth) for each, those in running.items()]
        deviation = numpy.sqrt(sum(variance for _, variance in parts))
        above = 0.0 if self.feedback.lends else DEVIATIONS
        return float(numpy.max(sum(mean for mean, _ in parts) + above * deviation)) + shared

    def _sizes_of(self, kind: str) -> SessionSizes:
        guess = min(GUESS, self.longest, self.capacity // GUESS_PART)
        return self._sizes.setdefault(kind, SessionSizes(guess))

    def _fits(self, found: _Session) -> bool:
        tokens = self._tokens()
        return not tokens or tokens + found.own + GROWTH <= RETURN * self.budget

    def _is_away(self, found: _Session, now: float) -> bool:
        """Whether it is idle for longer than it takes to read the whole cache."""
        read_s = self.feedback.seconds_to_read(self.capacity)
        return read_s is not None and not found.calls and now - found.idle_since >= read_s

    def _is_lent(self, found: _Session, now: float) -> bool:
        return self.feedback.lends and self._is_away(found, now)

    # ── places ────────────────────────────────────────────────────────────────

    def _valve(self, now: float) -> None:
        """Displace idle sessions until the others fit, those whose tools take long first. Of these the
        smallest that is enough: reading it again costs least, and each one more is one more that waits. Where
        that is not enough, busy ones at their calls' end. One stays.
        """
        most, tokens = LEAVE * self.budget, self._tokens()
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
                    self._displace(found)

    def _returning(self, now: float) -> list[HeldCall]:
        calls: dict[str, list[HeldCall]] = {}
        for call in self._held.values():
            calls.setdefault(call.session, []).append(call)
        going: list[HeldCall] = []
        for session in [name for name in self._sessions if name in calls]:
            found, held = self._sessions[session], calls[session]
            if now - held[0].since >= HOLD_S:
                self._return(found)
                self.feedback.expired += len(held)
            elif not self._comes_back(found, now):
                continue
            for call in held:
                del self._held[call.id]
                self._enter(found, call.chain)
                self.feedback.waited_for(now - call.since)
            going += held
        return going

    def _comes_back(self, found: _Session, now: float) -> bool:
        """Give a displaced session its place again where it fits, also that of one whose place is lent."""
        if not self._fits(found):
            for each in list(self._sessions.values()):
                if each.resident and self._is_lent(each, now) and not self._fits(found):
                    self._displace(each)
        if not self._fits(found) and not self._affords(found):
            return False
        self._return(found)
        return True

    def _affords(self, found: _Session) -> bool:
        """Take of the allowance what its return makes the engine evict; False where it has not that much."""
        over = self._tokens() + found.own + GROWTH - LEAVE * self.budget
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

    def _return(self, found: _Session) -> None:
        found.resident, found.leaving = True, False
        self._changed()

    def _displace(self, found: _Session) -> None:
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
