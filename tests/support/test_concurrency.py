"""Stage limits: never more inside than the limit, the urgent first, nothing lost to cancellation."""

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from polarnode.support.concurrency import PrioritySemaphore


async def test_entries_never_exceed_the_limit(autojump_clock: trio.abc.Clock) -> None:
    semaphore, inside, most = PrioritySemaphore(limit=3), 0, 0

    async def visit() -> None:
        nonlocal inside, most
        async with semaphore.slot(priority=50):
            inside += 1
            most = max(most, inside)
            await trio.sleep(1)
            inside -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(visit)
    assert (most, inside) == (3, 0)
    assert (semaphore.statistics().inside, semaphore.statistics().waiting) == (0, 0)


async def test_urgent_enter_first_then_oldest(autojump_clock: trio.abc.Clock) -> None:
    semaphore, entered = PrioritySemaphore(limit=1), []

    async def visit(name: str, priority: int) -> None:
        async with semaphore.slot(priority=priority):
            entered.append(name)

    async with trio.open_nursery() as nursery, semaphore.slot(priority=0):
        for name, priority in (("low", 10), ("first", 50), ("second", 50), ("high", 90)):
            nursery.start_soon(visit, name, priority)
            await trio.testing.wait_all_tasks_blocked()
    assert entered == ["high", "first", "second", "low"]


async def test_cancelled_waiter_leaves_no_hole(autojump_clock: trio.abc.Clock) -> None:
    semaphore = PrioritySemaphore(limit=1)
    async with semaphore.slot(priority=50):
        with trio.move_on_after(1) as scope:
            async with semaphore.slot(priority=50):
                raise AssertionError("entered a full stage")
        assert scope.cancelled_caught
    with trio.fail_after(1):
        async with semaphore.slot(priority=50):
            pass


async def test_place_survives_cancellation_at_handover() -> None:
    """A place handed over in the tick of cancellation is not lost."""
    semaphore, scope = PrioritySemaphore(limit=1), trio.CancelScope()

    async def waiter() -> None:
        with scope:
            async with semaphore.slot(priority=50):
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        async with semaphore.slot(priority=50):
            nursery.start_soon(waiter)
            await trio.testing.wait_all_tasks_blocked()
        scope.cancel()  # the place was handed to the waiter just now, and it has not run yet
    assert (semaphore.statistics().inside, semaphore.statistics().waiting) == (0, 0)


@given(
    visits=st.lists(st.tuples(st.integers(0, 100), st.floats(0.1, 3), st.floats(0.1, 5)), max_size=12),
    limit=st.integers(1, 4),
)
def test_whatever_is_cancelled_the_stage_ends_empty(
    visits: list[tuple[int, float, float]], limit: int
) -> None:
    semaphore = PrioritySemaphore(limit=limit)

    async def visit(priority: int, stay: float, patience: float) -> None:
        with trio.move_on_after(patience):
            async with semaphore.slot(priority=priority):
                assert semaphore.statistics().inside <= limit
                await trio.sleep(stay)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for each in visits:
                nursery.start_soon(visit, *each)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (semaphore.statistics().inside, semaphore.statistics().waiting) == (0, 0)


async def test_changed_limit_wakes_or_waits(
    autojump_clock: trio.abc.Clock,
) -> None:
    """A higher limit wakes the waiting, and a lower one lets those inside finish."""
    semaphore, entered = PrioritySemaphore(limit=3), list[int]()

    async def visit(number: int) -> None:
        async with semaphore.slot(priority=50):
            entered.append(number)
            await trio.sleep(10)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(visit, number)
            await trio.testing.wait_all_tasks_blocked()
        semaphore.adjust(1, "engine: it is full")
        assert (semaphore.statistics().inside, semaphore.statistics().held_back) == (3, "engine: it is full")
        await trio.sleep(15)
        assert (len(entered), semaphore.statistics().inside) == (4, 1)
        semaphore.adjust(0)
        await trio.sleep(10)
        assert (len(entered), semaphore.statistics().inside, semaphore.statistics().held_back) == (4, 0, None)
        semaphore.adjust(2)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(entered) == [0, 1, 2, 3, 4, 5], "the oldest of those that wait"
        semaphore.adjust(9)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(entered) == list(range(8))
    assert (semaphore.statistics().inside, semaphore.statistics().waiting) == (0, 0)


@given(
    visits=st.lists(st.tuples(st.integers(-1, 100), st.floats(0.1, 3), st.floats(0.1, 5)), max_size=12),
    limits=st.lists(st.tuples(st.floats(0.1, 2), st.integers(0, 4)), max_size=6),
)
def test_stage_ends_empty_for_any_limits(
    visits: list[tuple[int, float, float]], limits: list[tuple[float, int]]
) -> None:
    """Whatever the limits do the stage ends empty."""
    semaphore, most = PrioritySemaphore(limit=2), [2]

    async def visit(priority: int, stay: float, patience: float) -> None:
        with trio.move_on_after(patience):
            async with semaphore.slot(priority=priority):
                assert semaphore.statistics().inside <= max(most)
                await trio.sleep(stay)

    async def change() -> None:
        for after, limit in limits:
            await trio.sleep(after)
            most.append(limit)
            semaphore.adjust(limit)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            for each in visits:
                nursery.start_soon(visit, *each)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (semaphore.statistics().inside, semaphore.statistics().waiting) == (0, 0)


class Cake:
    """A place of which there are few."""

    def __init__(self, left: list[int]) -> None:
        self.left = left

    def take(self) -> str | None:
        if not self.left:
            return "no cake"
        self.left.pop()
        return None

    def give_back(self) -> None:
        self.left.append(1)


async def test_first_waiter_blocks_the_others(
    autojump_clock: trio.abc.Clock,
) -> None:
    """The first in line waits for its place, and nobody passes it."""
    semaphore, left, entered = PrioritySemaphore(limit=9), [1], list[str]()

    async def visit(name: str, place: Cake | None) -> None:
        async with semaphore.slot(priority=50, place=place):
            entered.append(name)
            await trio.sleep(10)

    async with trio.open_nursery() as nursery:
        for name, place in (("a", Cake(left)), ("b", Cake(left)), ("plain", None)):
            nursery.start_soon(visit, name, place)
            await trio.testing.wait_all_tasks_blocked()
        assert entered == ["a"]
        assert semaphore.is_refused
        assert semaphore.statistics().held_back == "no cake"
        await trio.sleep(10.5)
        assert sorted(entered) == ["a", "b", "plain"], "a gave its place back as it left"
        assert not semaphore.is_refused
    assert left == [1]


async def test_adjust_finds_a_returned_place(autojump_clock: trio.abc.Clock) -> None:
    semaphore, left = PrioritySemaphore(limit=9), list[int]()

    async def visit() -> None:
        async with semaphore.slot(priority=50, place=Cake(left)):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit)
        await trio.testing.wait_all_tasks_blocked()
        left.append(1)
        semaphore.adjust(9)
    assert left == [1]


async def test_cancelled_waiter_returns_its_place(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Whoever gives up gives its place back and lets others by."""
    semaphore, left = PrioritySemaphore(limit=9), list[int]()
    with trio.move_on_after(1):
        async with semaphore.slot(priority=50, place=Cake(left)):
            raise AssertionError("entered without a place")
    assert not semaphore.is_refused
    left.append(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        async with semaphore.slot(priority=50, place=Cake(left)):
            raise AssertionError("entered though cancelled")
    assert left == [1]
    assert semaphore.statistics().inside == 0
