"""Which sessions an engine's cache is for: values, times that are given, and laws for any order of events."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polarnode.engine.residency import (
    GUESS_DIVISOR,
    HOLD_S,
    KINDS,
    LEASE_S,
    LEAVE_SHARE,
    LOOK_S,
    LearnedSizes,
    ResidencyPolicy,
)
from polarnode.engine.residency_feedback import (
    ENOUGH,
    MARGIN_FALL,
    MAX_LENT_MARGIN,
    MIN_MARGIN,
    SHRINK,
    START,
    BudgetFeedback,
    RereadAllowance,
)
from polarnode.engine.session_sizes import ENDS

MAIN = "main"


def turn(
    found: ResidencyPolicy, session: str, tokens: int, now: float, *, cached: int = 0, s: float = 1.0
) -> None:
    """One call, which goes at once."""
    assert found.ask(session, session, MAIN, now)
    found.read(session, MAIN, prompt=tokens, cached=cached, seconds=s)
    found.ended(session, MAIN, tokens=tokens, now=now)


def filled(*tokens: int, capacity: int = 100_000, s: float = 1.0) -> ResidencyPolicy:
    """Sessions s0, s1 … that are idle with so many tokens, which the engine read in `s` seconds each."""
    found = ResidencyPolicy(capacity=capacity)
    for number, each in enumerate(tokens):
        found.begin(f"s{number}", "pi", 0.0)
        turn(found, f"s{number}", each, 0.0, s=s)
    return found


def test_sessions_begin_while_expected_sizes_fit() -> None:
    found, guessed = ResidencyPolicy(capacity=100_000), int(START * GUESS_DIVISOR)
    for number in range(guessed):
        assert found.may_begin("pi", 0.0)
        found.begin(f"s{number}", "pi", 0.0)
    assert not found.may_begin("pi", 0.0)
    found.over("s0")
    assert found.may_begin("pi", 1.0)
    assert ResidencyPolicy(capacity=1).may_begin("pi", 0.0), "one session always runs"


def test_unqueued_session_begins_as_displaced() -> None:
    found = filled(96_000)
    found.begin("capture", "capture", 1.0, resident=False)
    assert found.statistics(1.0).displaced == 1
    assert not found.ask("call", "capture", MAIN, 1.0, tokens=5_000)
    found.over("s0")
    assert [call.id for call in found.look(2.0)] == ["call"]
    found.read("capture", MAIN, prompt=5_000, cached=0, seconds=1.0)
    found.ended("capture", MAIN, tokens=5_100, now=3.0)
    found.over("capture")
    assert found._sizes_of("capture").largest >= 5_100, "its size was learned as any other's"


def ended(found: ResidencyPolicy, kind: str, *sizes: int) -> None:
    for number, tokens in enumerate(sizes):
        name = f"{kind}{number}"
        found.begin(name, kind, 0.0)
        turn(found, name, 0, 0.0)
        turn(found, name, tokens, 1.0)
        found.over(name)


def begun(found: ResidencyPolicy, kind: str) -> int:
    """How many sessions may begin."""
    names = [f"{kind}-new{number}" for number in range(100)]
    for number, name in enumerate(names):
        if not found.may_begin(kind, 10.0):
            return number
        found.begin(name, kind, 10.0)
    return len(names)


def test_expected_growth_follows_same_kind() -> None:
    """Sessions of a kind are expected to grow as those before."""
    small, large, mixed = (ResidencyPolicy(capacity=200_000) for _ in range(3))
    ended(small, "pi", *[5_000] * 64)
    ended(large, "pi", *[50_000] * 64)
    ended(mixed, "pi", *[5_000, 50_000] * 32)
    found = begun(small, "pi"), begun(mixed, "pi"), begun(large, "pi")
    assert found[0] == 30, "150,000 of the budget, in sessions of 5,000"
    assert found[2] == 3
    assert found[2] < found[1] < 2 * found[2] + 1, "half of them grow to 50,000, and are let in as such"


def test_restarted_host_has_learned_sizes() -> None:
    before, guessing = ResidencyPolicy(capacity=200_000), ResidencyPolicy(capacity=200_000)
    ended(before, "pi", *[50_000] * 64)
    before.feedback.margin = 0.85
    after = ResidencyPolicy(capacity=200_000)
    after.recall(before.learned())
    assert after.learned() == before.learned()
    assert begun(after, "pi") == 3, "0.85 of 200,000 for sessions of 50,000"
    assert begun(guessing, "pi") > 3, "a guess is smaller"


def test_recalled_sizes_are_bounded() -> None:
    many = {f"kind{number}": (5_000,) * 100 for number in range(KINDS + 3)}
    found = ResidencyPolicy(capacity=100_000)
    found.recall(LearnedSizes(margin=9.0, ends={**many, "huge": (10**9, -5, 40_000)}))
    learned = found.learned()
    assert len(learned.ends) == KINDS
    assert learned.ends["huge"] == (40_000,), "no session of this engine can have the others"
    assert {len(ends) for kind, ends in learned.ends.items() if kind != "huge"} == {ENDS}
    assert learned.margin == MAX_LENT_MARGIN


def test_recently_ended_kinds_are_kept() -> None:
    found = ResidencyPolicy(capacity=100_000)
    for number in range(KINDS + 1):
        ended(found, f"kind{number}", 5_000)
    ended(found, "kind0", 6_000)
    kept = found.learned().ends
    assert kept["kind0"] == (5_000, 6_000)
    assert "kind1" not in kept


def test_running_session_bounds_expected_size() -> None:
    """The first to end are the short ones."""
    found = ResidencyPolicy(capacity=1_000_000)
    for number in range(8):
        found.begin(f"s{number}", "pi", 0.0)
        turn(found, f"s{number}", 0, 0.0)
        turn(found, f"s{number}", 60_000, 1.0)
    ended(found, "pi", *[1_000] * 8)
    assert begun(found, "pi") < 60


def test_smallest_displaced_and_oldest_returns_first() -> None:
    """Sessions are displaced smallest first, and come back oldest first."""
    found = filled(40_000, 30_000, 10_000, 25_000)
    assert found.look(1.0) == []
    assert found.statistics(1.0).displaced == 1, "105,000 of 98,000: the smallest is enough"
    assert not found.ask("s2", "s2", MAIN, 2.0)
    assert found.look(3.0) == [], "95,000 and its own are above the mark of return"
    found.over("s3")
    (call,) = found.look(5.0)
    assert (call.session, call.since) == ("s2", 2.0)
    assert found.statistics(5.0).held == 0


def test_smallest_sufficient_session_is_displaced() -> None:
    """The smallest that is enough is displaced, or else the largest first."""
    found = filled(40_000, 5_000, 8_000, 55_000)
    found.look(1.0)
    assert displaced(found) == ["s0"], "108,000 of 98,000: one is enough, in place of two that wait"
    found = filled(30_000, 35_000, 45_000, 40_000)
    found.look(1.0)
    assert displaced(found) == ["s0", "s2"], (
        "150,000 of 98,000: the largest, then the smallest that is enough"
    )


def displaced(found: ResidencyPolicy) -> list[str]:
    return sorted(session for session, _ in found.forgotten())


def test_busy_session_is_displaced_after_call() -> None:
    found = filled(60_000)
    found.begin("s1", "pi", 0.0)
    turn(found, "s1", 50_000, 0.0)
    assert found.ask("s0", "s0", MAIN, 1.0)
    assert found.ask("s1", "s1", MAIN, 1.0)
    found.look(1.0)
    assert found.statistics(1.0).displaced == 0
    found.ended("s1", MAIN, tokens=50_500, now=2.0)
    assert found.statistics(2.0).displaced == 1


def test_held_call_goes_at_time_limit() -> None:
    found = filled(90_000, 20_000)
    found.look(0.0)
    assert not found.ask("s1", "s1", MAIN, 10.0)
    assert found.look(10.0 + HOLD_S - 0.1) == []
    assert found.next_decision(10.0) <= 10.0 + HOLD_S
    assert [call.session for call in found.look(10.0 + HOLD_S)] == ["s1"]


def test_sub_agent_of_placed_session_passes() -> None:
    found = filled(50_000, 60_000)
    assert found.ask("s1", "s1", MAIN, 1.0)
    found.look(1.0)
    assert found.ask("s1 again", "s1", "child", 1.0), "its parent waits for it"
    assert found.statistics(1.0).displaced == 1
    assert not found.ask("s0", "s0", MAIN, 1.0)


def test_unknown_session_comes_as_displaced() -> None:
    found = filled(94_000)
    assert not found.ask("other", "other", MAIN, 0.0, tokens=5_000)
    assert found.look(0.0) == [], "the one that is here is not larger than the budget"
    found.over("s0")
    assert [call.session for call in found.look(1.0)] == ["other"]
    assert found.ask("third", "third", MAIN, 1.0, tokens=5_000)


def test_lost_cache_releases_held_calls() -> None:
    found = filled(94_000)
    assert not found.ask("other", "other", MAIN, 0.0, tokens=5_000)
    assert [call.session for call in found.lost()] == ["other"]
    figures = found.statistics(0.0)
    assert (figures.held, figures.busy, figures.idle, figures.tokens) == (0, 0, 0, 0)


def test_rereads_shrink_budget_unless_decided() -> None:
    """Tokens that were read again shrink the budget, unless that was decided."""
    found = filled(30_000, s=600.0)
    found.look(LOOK_S)
    turn(found, "s0", 30_500, LOOK_S + 1, cached=0)
    found.look(2 * LOOK_S)
    assert found.feedback.scale == SHRINK
    assert found.statistics(0.0).reread_unplanned == 30_000
    found = filled(30_000, s=600.0)
    found.look(LOOK_S)
    found.cold()  # new weights
    turn(found, "s0", 30_500, LOOK_S + 1, cached=0)
    found.look(2 * LOOK_S)
    assert found.feedback.scale == 1.0
    assert found.statistics(0.0).reread_planned == 30_000


def test_margin_stays_until_sizes_known() -> None:
    found = filled(30_000, capacity=40_000)
    for number in range(1, 10):
        found.may_begin("pi", number * LOOK_S)
        turn(found, "s0", 30_000, number * LOOK_S, s=60.0)
        found.look(number * LOOK_S)
    assert found.feedback.margin == START


def test_margin_grows_only_when_needed() -> None:
    """More may begin only while somebody waits and few calls are late."""
    found = filled(39_000, capacity=40_000, s=600.0)
    found.feedback.ended, found.feedback.margin = ENOUGH, MIN_MARGIN
    for number in range(1, 4):
        turn(found, "s0", 39_000 + number, 0.0, cached=39_000 + number - 1)
        found.look(number * LOOK_S)
    assert found.feedback.margin == MIN_MARGIN
    assert not found.may_begin("pi", 3 * LOOK_S)
    turn(found, "s0", 39_010, 3 * LOOK_S, cached=39_003)
    found.look(4 * LOOK_S)
    assert found.feedback.margin > MIN_MARGIN


def test_margin_shrinks_with_held_calls() -> None:
    found = filled(60_000, 50_000)
    found.feedback.ended = ENOUGH
    for number in range(1, 60):
        now = number * LOOK_S
        found.look(now)
        if not found.ask("s1", "s1", MAIN, now):
            found.look(now + HOLD_S)
        found.read("s1", MAIN, prompt=50_000, cached=0, seconds=5.0)
        found.ended("s1", MAIN, tokens=50_000, now=now)
    assert found.feedback.margin == MIN_MARGIN
    assert found.feedback.scale == 1.0, "nothing was read again that was not decided"


def test_margin_falls_while_nothing_fits() -> None:
    """The margin falls by a tenth while no margin would let a session begin."""
    found = filled(60_000, 50_000, s=600.0)
    found.feedback.ended = ENOUGH
    for number in range(1, 20):
        now = number * LOOK_S
        found.look(now)
        if not found.ask("s1", "s1", MAIN, now):
            assert not found.may_begin("pi", now), "somebody waits all the time"
            found.look(now + HOLD_S)
        assert not found.may_begin("pi", now + HOLD_S)
        found.read("s1", MAIN, prompt=50_000, cached=0, seconds=600.0)
        found.ended("s1", MAIN, tokens=50_000, now=now)
    assert found.feedback.margin == pytest.approx(MARGIN_FALL * START)


def test_idle_places_are_lent() -> None:
    found = filled(20_000, 20_000, 20_000, 20_000)  # read in a second each: all of the cache in five
    assert not found.may_begin("pi", 20.0), "idle once is no habit"
    for number in range(1, 20):
        found.look(number * LOOK_S)
    assert found.feedback.lends
    assert found.may_begin("pi", 19 * LOOK_S)
    for number in range(4):
        assert found.ask(f"s{number}", f"s{number}", MAIN, 20 * LOOK_S)
    assert not found.may_begin("pi", 20 * LOOK_S), "a busy one is not idle"
    found.read("s0", MAIN, prompt=20_000, cached=0, seconds=1.0)
    assert found.statistics(0.0).reread_planned == 20_000


def test_returning_session_takes_lent_place() -> None:
    found = filled(40_000, 40_000, 40_000)
    for number in range(1, 20):
        found.look(number * LOOK_S)
    now = 20 * LOOK_S
    assert found.statistics(now).displaced == 1
    assert found.ask("s0", "s0", MAIN, now)
    assert found.statistics(now).displaced == 1, "another one that is away made room"


def test_silent_session_is_forgotten() -> None:
    found = filled(40_000)
    found.look(LEASE_S + LOOK_S)
    assert not found.has("s0")


def test_sub_agent_counts_until_session_continues() -> None:
    found = filled(30_000)
    for child in ("a", "b"):
        assert found.ask(child, "s0", child, 1.0)
        found.read("s0", child, prompt=10_000, cached=2_000, seconds=1.0)
        found.ended("s0", child, tokens=10_000, now=2.0)
    assert found.statistics(2.0).tokens == 30_000 + 2 * 8_000
    turn(found, "s0", 31_000, 3.0, cached=30_000)
    assert found.statistics(3.0).tokens == 31_000
    assert found.ask("a", "s0", "a", 4.0), "one in the background calls again"
    assert found.statistics(4.0).tokens == 31_000 + 8_000
    found.ended("s0", "a", tokens=None, now=5.0)
    found.over("s0")
    assert found.learned().ends["pi"] == (31_000,), "the most that it ever had without them"


def with_sub_agents() -> ResidencyPolicy:
    """Of two sessions with 20,000 tokens of their own, one waits for two sub-agents with 8,000 each."""
    found = filled(20_000, 20_000, capacity=200_000)
    for child in ("a", "b"):
        assert found.ask(child, "s0", child, 1.0)
        found.read("s0", child, prompt=8_000, cached=0, seconds=1.0)
        found.ended("s0", child, tokens=8_000, now=2.0)
    return found


def test_sub_agents_count_by_average() -> None:
    found, before = with_sub_agents(), filled(20_000, 20_000, capacity=200_000)
    assert found._expected("pi", "", 3.0) == before._expected("pi", "", 3.0), "these are over soon"
    found.look(LOOK_S)
    # of 4 guesses of 25,000, two sessions reach their end from 20,000, and one that begins grows as they do
    assert found._expected("pi", "", 40.0) == before._expected("pi", "", 40.0) + 3 * 8_000
    after = ResidencyPolicy(capacity=200_000)
    found.over("s1")
    after.recall(found.learned())
    assert after._sizes_of("pi").passing == 8_000
    after.recall(LearnedSizes(margin=0.8, ends={"pi": (5,), "codex": (5,)}, passing={"codex": 200_001}))
    assert after._sizes_of("codex").passing == 0, "no engine of this size can have that"


def test_finished_conversations_may_be_evicted() -> None:
    """The engine is told which conversations may go first."""
    found = with_sub_agents()
    assert not found.forgotten()
    assert found.ask("c", "s0", "c", 3.0)
    turn(found, "s0", 21_000, 3.0, cached=20_000)
    assert found.forgotten() == [("s0", "a"), ("s0", "b")], "c is in the engine, and may be in the background"
    turn(found, "s0", 22_000, 4.0, cached=21_000)
    assert not found.forgotten(), "once is enough"
    found.over("s0")
    assert found.forgotten() == [("s0", MAIN), ("s0", "c")]


def test_title_request_is_no_session() -> None:
    found = ResidencyPolicy(capacity=100_000)
    found.begin("s0", "pi", 0.0)
    for number, (chain, tokens) in enumerate([("title", 500), (MAIN, 10_000), (MAIN, 11_000), ("a", 8_000)]):
        assert found.ask("call", "s0", chain, float(number))
        found.read("s0", chain, prompt=tokens, cached=0, seconds=1.0)
        found.ended("s0", chain, tokens=tokens, now=float(number))
    assert found.statistics(9.0).tokens == 500 + 11_000 + 8_000
    turn(found, "s0", 12_000, 9.0, cached=11_000)
    assert found.statistics(9.0).tokens == 500 + 12_000
    assert found.forgotten() == [("s0", "a")]


def test_displaced_session_continues_within_allowance() -> None:
    found = filled(50_000, 40_000, 12_000)
    found.look(1.0)
    assert found.statistics(1.0).displaced == 1
    found._allowance.tokens = 4_599.0
    assert not found.ask("s2", "s2", MAIN, 2.0), "90,000, 12,000 and a turn's 600 are 4,600 above the mark"
    found._allowance.tokens = 4_600.0
    assert [call.id for call in found.look(3.0)] == ["s2"]
    found.read("s2", MAIN, prompt=12_500, cached=11_000, seconds=1.0)
    assert found._allowance.tokens == pytest.approx(4_600.0 - 1_000 + 0.012 * 12_500), "what was read again"


def test_allowance_is_bounded() -> None:
    allowance = RereadAllowance()
    allowance.earn(1_000_000, lends=False, most=5_000.0)
    assert allowance.tokens == 5_000.0
    allowance.settle(0, 1_000_000, most=5_000.0)
    assert allowance.tokens == -5_000.0
    assert not allowance.spend(0), "it is in debt"


def test_new_weights_correct_nothing() -> None:
    found = filled(30_000, capacity=40_000)
    found.feedback.ended, found.feedback.margin = ENOUGH, MIN_MARGIN
    allowance = found._allowance.tokens
    for number in range(1, 10):
        found.cold()
        found.may_begin("pi", number * LOOK_S)
        turn(found, "s0", 30_000, number * LOOK_S, s=60.0)
        found.look(number * LOOK_S)
    assert found.feedback.margin > MIN_MARGIN, "nothing was late or read again but for the weights"
    assert found.feedback.scale == 1.0
    assert found._allowance.tokens > allowance
    assert found.statistics(0.0).reread_planned == 9 * 30_000


def test_engine_speed_comes_from_long_reads() -> None:
    feedback = BudgetFeedback()
    feedback.read(100, 100, 3.0)
    assert feedback.seconds_to_read(1_000) is None
    for _ in range(50):
        feedback.read(20_000, 10_000, 2.0)
    assert feedback.seconds_to_read(50_000) == pytest.approx(10.0)


class AnyOrder(RuleBasedStateMachine):
    """Sessions that begin, call, fork sub-agents and end in any order; time passes, and `look` is called when it
    is due.
    """

    sessions = st.sampled_from([f"s{number}" for number in range(8)])
    chains = st.sampled_from([MAIN, "child"])

    @initialize(capacity=st.integers(1_000, 200_000))
    def open(self, capacity: int) -> None:
        self.found = ResidencyPolicy(capacity=capacity)
        self.now = 0.0
        self.begun: set[str] = set()
        self.running: dict[tuple[str, str], int] = {}
        self.held: dict[tuple[str, str], float] = {}

    @rule(session=sessions)
    def begin(self, session: str) -> None:
        if session not in self.begun and self.found.may_begin("pi", self.now):
            self.found.begin(session, "pi", self.now)
            self.begun.add(session)

    @rule(session=sessions, chain=chains)
    def ask(self, session: str, chain: str) -> None:
        if (session, chain) in self.running or (session, chain) in self.held:
            return
        self.begun.add(session)
        if self.found.ask(f"{session}/{chain}", session, chain, self.now, tokens=1_000):
            self.running[session, chain] = 1
        else:
            assert not any(each == session for each, _ in self.running), "its other call has a place"
            self.held[session, chain] = self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 80_000), cached=st.integers(0, 80_000))
    def end(self, data: Any, tokens: int, cached: int) -> None:
        session, chain = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[session, chain]
        self.found.read(session, chain, prompt=tokens, cached=min(tokens, cached), seconds=1.0)
        self.found.ended(session, chain, tokens=tokens, now=self.now)

    @rule(session=sessions)
    def over(self, session: str) -> None:
        given = {(call.session, call.chain) for call in self.found.over(session)}
        assert given == {each for each in self.held if each[0] == session}
        for table in (self.running, self.held):
            for each in [each for each in table if each[0] == session]:
                del table[each]
        self.begun.discard(session)

    @rule()
    def update(self) -> None:
        self.found.cold()

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            for call in self.found.look(self.now):
                assert self.held.pop((call.session, call.chain)) == call.since
                self.running[call.session, call.chain] = 1
            due = self.found.next_decision(self.now)
            if due > until:
                break
            self.now = max(due, self.now + 1e-6)
        self.now = until

    @invariant()
    def nobody_is_held_beyond_the_bound(self) -> None:
        for since in self.held.values():
            assert self.now - since <= HOLD_S + 40.0 + 1e-3
        figures = self.found.statistics(self.now)
        assert figures.held == len(self.held)
        assert figures.busy + figures.idle + figures.displaced <= len(self.begun)
        assert 0.3 * figures.capacity - 1 <= figures.budget <= figures.capacity

    @invariant()
    def what_is_idle_fits_after_a_look(self) -> None:
        self.found._displace_excess(self.now)
        figures = self.found.statistics(self.now)
        staying = figures.busy + figures.idle
        assert (
            figures.tokens <= LEAVE_SHARE * figures.budget
            or figures.idle <= 1
            or staying <= 1
            or figures.busy
        )


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
