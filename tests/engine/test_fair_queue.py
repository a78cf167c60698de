"""The order in which sessions get the engine: laws of any run, and the promise to a sibling of a flood.

`Played` is an engine in virtual time: it runs `places` calls at once, each for as long as the test says.
"""

import heapq
from collections import Counter
from collections.abc import Callable

import pytest
from attrs import define, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.engine.routing import (
    DEFAULT_RUNNING,
    ENGINE_QUEUE_DIVISOR,
    MIN_ENGINE_QUEUE,
    PRESENT_S,
    SPARE_DIVISOR,
    FairQueue,
)

ROOMY = 1 << 40  # tokens of a cache that is never full


@frozen(eq=False)
class One:
    """A call: whose, when it comes, and for how long the engine samples it."""

    session: str
    at: float
    takes: float = 1.0
    tokens: int = 100


@define(eq=False)
class Played:
    """A run of calls through a queue; `began` and `ended` are when the engine took and finished each."""

    places: int
    tokens: int = ROOMY
    began: dict[One, float] = field(factory=dict)
    ended: dict[One, float] = field(factory=dict)
    most_of: Counter[str] = field(factory=Counter)  # calls of a session in the engine at once

    def run(self, calls: list[One], check: Callable[["Played", FairQueue[One]], None] | None = None) -> None:
        queue: FairQueue[One] = FairQueue(self.tokens)
        queue.report(running=0, waiting=0, most=self.places)
        events = [(call.at, number, call) for number, call in enumerate(calls)]
        heapq.heapify(events)
        running: Counter[str] = Counter()
        numbers = len(calls)
        while events:
            now, _, call = heapq.heappop(events)
            if call in self.began:
                self.ended[call] = now
                running[call.session] -= 1
                queue.ended(call.session, tokens=call.tokens, served=call.tokens, now=now)
            else:
                queue.add(call.session, call, tokens=call.tokens)
            while (taken := queue.take(now)) is not None:
                self.began[taken] = now
                running[taken.session] += 1
                self.most_of[taken.session] = max(self.most_of[taken.session], running[taken.session])
                numbers += 1
                heapq.heappush(events, (now + taken.takes, numbers, taken))
            assert running.total() <= self.places
            if check is not None:
                check(self, queue)

    def wait(self, call: One) -> float:
        return self.began[call] - call.at


CALLS = st.lists(
    st.builds(
        One,
        session=st.sampled_from("abcd"),
        at=st.floats(0, 20).map(lambda at: round(at, 2)),
        takes=st.floats(0.1, 5).map(lambda takes: round(takes, 2)),
        tokens=st.integers(1, 5000),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(calls=CALLS, places=st.integers(1, 40))
def test_every_call_taken_exactly_once(calls: list[One], places: int) -> None:
    """Every call is taken once and all ends empty."""
    played = Played(places)
    last: list[FairQueue[One]] = []
    played.run(calls, lambda _, queue: last.append(queue))
    assert set(played.began) == set(played.ended) == set(calls)
    if last:
        assert (last[-1].waiting, last[-1].waiting_sessions, last[-1].before("x")) == (0, 0, 0)


@settings(max_examples=100)
@given(calls=CALLS, places=st.integers(1, 40))
def test_no_free_place_while_calls_wait(calls: list[One], places: int) -> None:
    """No place is left free where a call waits but the spared ones."""

    def check(played: Played, queue: FairQueue[One]) -> None:
        running = len(played.began) - len(played.ended)
        assert not queue.waiting or places - running <= places // SPARE_DIVISOR

    Played(places).run(calls, check)


@settings(max_examples=50)
@given(takes=st.lists(st.floats(0.1, 5), min_size=1, max_size=80), places=st.integers(1, 40))
def test_lone_session_gets_every_place(takes: list[float], places: int) -> None:
    """Alone a session gets every place at once and in its order."""
    calls = [One("a", 0.0, each) for each in takes]
    played = Played(places)
    played.run(calls)
    assert played.most_of["a"] == min(places, len(calls))
    assert [played.began[call] for call in calls] == sorted(played.began.values())


@settings(max_examples=100)
@given(calls=CALLS, places=st.integers(1, 12), others=st.integers(0, 30))
def test_idle_session_waits_one_call_each(calls: list[One], places: int, others: int) -> None:
    """It has the fewest, so nobody who has one goes before it; of the rest each goes at most once."""
    late = One("late", 10.0)
    floods = [One(each.session, min(each.at, 9.0), each.takes, each.tokens) for each in calls]
    played = Played(places)
    played.run([*floods, *(One("a", 10.0) for _ in range(others)), late])
    before = [
        call for call, at in played.began.items() if late.at < at < played.began[late] and call is not late
    ]
    assert len(before) <= 4


def test_flood_delays_no_sibling_session() -> None:
    """The attack: 800 samples of one session, of a second each, before 32 places."""
    flood = [One("flood", 0.0) for _ in range(800)]
    sibling = [One("sibling", 0.5 + 1.7 * turn) for turn in range(10)]
    played = Played(32)
    played.run([*flood, *sibling])
    # the first comes into an engine that the flood filled while it was alone
    assert played.wait(sibling[0]) <= 1.0
    assert max(played.wait(call) for call in sibling[1:]) == 0
    assert played.most_of["flood"] == 32
    whole = max(played.ended.values())
    assert whole <= 800 / 28 + 2, "the flood is not slower than without the spared places by more than them"


def test_long_flood_calls_delay_no_others() -> None:
    """Long calls of a flood do not hold up short ones."""
    flood = [One("flood", 0.1 * number, takes=60.0) for number in range(300)]
    sibling = [One("sibling", float(at), takes=0.5) for at in range(120)]
    played = Played(64)
    played.run([*sibling, *flood])
    assert max(played.wait(call) for call in sibling) == 0


def test_ten_agents_wait_for_nothing() -> None:
    """Ten agents of one session beside others wait for nothing on an idle engine."""
    calls = [One("ten", 0.0) for _ in range(10)] + [One(f"s{number}", 0.0) for number in range(4)]
    played = Played(16)
    played.run(calls)
    assert max(map(played.wait, calls)) == 0


def test_two_greedy_sessions_share_equally() -> None:
    many, few = [One("many", 0.0) for _ in range(400)], [One("few", 3.5) for _ in range(60)]
    played = Played(16)
    played.run([*many, *few])
    # from when the few came, half of the places are theirs: 60 calls on 8 places
    assert max(played.ended[call] for call in few) <= 3.5 + 1 + 60 / 7


def test_least_served_session_is_next() -> None:
    queue: FairQueue[str] = FairQueue(ROOMY)
    queue.report(running=0, waiting=0, most=1)
    for session, served in (("heavy", 9000), ("light", 100)):
        queue.add(session, "first", tokens=1)
        assert queue.take(0.0) == "first"
        queue.ended(session, tokens=1, served=served, now=0.0)
    queue.add("x", "x", tokens=1)
    assert queue.take(0.0) == "x"
    queue.add("heavy", "of heavy", tokens=1)
    queue.add("light", "of light", tokens=1)
    queue.ended("x", tokens=1, served=1, now=0.0)
    assert queue.take(0.0) == "of light"


def test_paused_session_saves_nothing_up() -> None:
    """It returns with what the others were served meanwhile, not with a claim to all of that."""
    queue: FairQueue[str] = FairQueue(ROOMY)
    queue.report(running=0, waiting=0, most=1)
    queue.add("paused", "early", tokens=1)
    queue.take(0.0)
    queue.ended("paused", tokens=1, served=10, now=0.0)
    for turn in range(5):
        queue.add("busy", f"busy {turn}", tokens=1)
    queue.take(1.0)
    order = []
    for turn in range(4):
        queue.add("paused", f"paused {turn}", tokens=1)
    for _ in range(6):
        queue.ended(("busy", "paused")[bool(order) and order[-1] == "paused"], tokens=1, served=100, now=2.0)
        order.append(str(queue.take(2.0)).split()[0])
    assert order.count("paused") <= 4
    assert "busy" in order[:3]


def test_cancelled_call_is_not_taken() -> None:
    queue: FairQueue[str] = FairQueue(ROOMY)
    queue.report(running=0, waiting=0, most=1)
    for call in ("one", "two", "three"):
        queue.add("a", call, tokens=1)
    assert queue.take(0.0) == "one"
    queue.withdraw("a", "two", 0.0)
    queue.withdraw("a", "one", 0.0)  # taken: ended, not withdrawn
    queue.withdraw("nobody", "four", 0.0)
    queue.ended("a", tokens=1, served=1, now=0.0)
    assert (queue.take(0.0), queue.take(0.0)) == ("three", None)


def test_dead_host_returns_waiting_calls() -> None:
    """A host that died gives back what waits, in the order of arrival."""
    queue: FairQueue[str] = FairQueue(ROOMY)
    queue.report(running=0, waiting=0, most=1)
    for number, session in enumerate("abab"):
        queue.add(session, str(number), tokens=1)
    assert queue.take(0.0) == "0"
    assert queue.empty(0.0) == ["1", "2", "3"]
    assert (queue.waiting, queue.waiting_sessions) == (0, 0)
    queue.ended("a", tokens=1, served=0, now=0.0)
    queue.add("b", "again", tokens=1)
    assert queue.take(0.0) == "again"


def test_calls_ahead_count_per_session() -> None:
    """Before a call are those of its own session and one of each other."""
    queue: FairQueue[str] = FairQueue(ROOMY)
    queue.report(running=0, waiting=0, most=4)
    for number in range(20):
        queue.add("flood", str(number), tokens=1)
    while queue.take(0.0) is not None:
        pass
    assert (queue.before("flood"), queue.before("sibling")) == (4 + 16, 4 + 1)


def test_spared_places_return_after_others_leave() -> None:
    queue: FairQueue[int] = FairQueue(ROOMY)
    queue.report(running=0, waiting=0, most=16)
    queue.add("other", 0, tokens=1)
    queue.take(0.0)
    queue.ended("other", tokens=1, served=1, now=0.0)
    for number in range(20):
        queue.add("flood", number, tokens=1)
    taken = [queue.take(1.0) for _ in range(20)]
    assert sum(each is not None for each in taken) == 14
    assert queue.take(PRESENT_S) is None
    assert [queue.take(PRESENT_S + 1) is not None for _ in range(3)] == [True, True, False]


# ── an engine that has no room for more ───────────────────────────────────────


def test_default_limit_before_first_report() -> None:
    """Before an engine reports its number of requests a default limit holds."""
    queue: FairQueue[int] = FairQueue(ROOMY)
    for number in range(2 * DEFAULT_RUNNING):
        queue.add("a", number, tokens=1)
    queue.report(running=0, waiting=0, most=0)
    assert sum(queue.take(0.0) is not None for _ in range(2 * DEFAULT_RUNNING)) == DEFAULT_RUNNING


@pytest.mark.parametrize("size", [1000, 30_000])
def test_full_cache_queues_calls_here(size: int) -> None:
    """An engine of 100,000 tokens that would run 2,000 requests: what it can not hold waits here, and a
    sibling's call has few before it.
    """
    fits, queue = 100_000 // size, FairQueue[int](100_000)
    for number in range(1000):
        queue.add("flood", number, tokens=size)
    sent = 0
    for _ in range(50):
        running = min(sent, fits)
        queue.report(running=running, waiting=sent - running, most=2000)
        while queue.take(0.0) is not None:
            sent += 1
        assert sent - min(sent, fits) <= MIN_ENGINE_QUEUE + 2 * (fits // ENGINE_QUEUE_DIVISOR), (
            "the engine's queue is short"
        )
    assert sent > fits, "the engine is full"
    queue.add("sibling", -1, tokens=size)
    while (taken := queue.take(0.0)) is None:
        queue.ended("flood", tokens=size, served=size, now=0.0)
        sent -= 1
    assert taken == -1
    assert sent >= fits, "it begins before the engine has room to spare"


def test_long_engine_queue_stops_sending() -> None:
    """A queue of the engine that is too long stops sending, and a short one resumes it."""
    queue: FairQueue[int] = FairQueue(10)
    for number in range(2000):
        queue.add("a", number, tokens=10)

    def taken() -> int:
        return sum(queue.take(0.0) is not None for _ in range(2000))

    assert taken() == MIN_ENGINE_QUEUE
    queue.report(running=MIN_ENGINE_QUEUE, waiting=0, most=4096)
    grown = taken()
    assert grown == MIN_ENGINE_QUEUE + 2 * (MIN_ENGINE_QUEUE // ENGINE_QUEUE_DIVISOR)
    queue.report(running=4, waiting=MIN_ENGINE_QUEUE + grown - 4, most=4096)
    assert taken() == 0
    for _ in range(MIN_ENGINE_QUEUE + grown - 4 - MIN_ENGINE_QUEUE - 1):
        queue.ended("a", tokens=10, served=10, now=0.0)
    assert taken() == 0, "the engine's own queue is as long as it may be"
    queue.ended("a", tokens=10, served=10, now=0.0)
    queue.ended("a", tokens=10, served=10, now=0.0)
    assert taken() > 0
