"""Stage limits: never more inside than the limit, the urgent first, nothing lost to cancellation."""

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from polarnode.shell.gates import Gate


async def test_no_more_inside_than_the_limit(autojump_clock: trio.abc.Clock) -> None:
    gate, inside, most = Gate(limit=3), 0, 0

    async def visit() -> None:
        nonlocal inside, most
        async with gate.slot(priority=50):
            inside += 1
            most = max(most, inside)
            await trio.sleep(1)
            inside -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(visit)
    assert (most, inside) == (3, 0)
    assert (gate.statistics().inside, gate.statistics().waiting) == (0, 0)


async def test_the_urgent_enter_first_then_the_oldest(autojump_clock: trio.abc.Clock) -> None:
    gate, entered = Gate(limit=1), []

    async def visit(name: str, priority: int) -> None:
        async with gate.slot(priority=priority):
            entered.append(name)

    async with trio.open_nursery() as nursery, gate.slot(priority=0):
        for name, priority in (("low", 10), ("first", 50), ("second", 50), ("high", 90)):
            nursery.start_soon(visit, name, priority)
            await trio.testing.wait_all_tasks_blocked()
    assert entered == ["high", "first", "second", "low"]


async def test_a_waiter_that_gives_up_leaves_no_hole(autojump_clock: trio.abc.Clock) -> None:
    gate = Gate(limit=1)
    async with gate.slot(priority=50):
        with trio.move_on_after(1) as scope:
            async with gate.slot(priority=50):
                raise AssertionError("entered a full stage")
        assert scope.cancelled_caught
    with trio.fail_after(1):
        async with gate.slot(priority=50):
            pass


async def test_a_place_handed_over_in_the_tick_of_cancellation_is_not_lost() -> None:
    gate, scope = Gate(limit=1), trio.CancelScope()

    async def waiter() -> None:
        with scope:
            async with gate.slot(priority=50):
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        async with gate.slot(priority=50):
            nursery.start_soon(waiter)
            await trio.testing.wait_all_tasks_blocked()
        scope.cancel()  # the place was handed to the waiter just now, and it has not run yet
    assert (gate.statistics().inside, gate.statistics().waiting) == (0, 0)


@given(visits=st.lists(st.tuples(st.integers(0, 100), st.floats(0.1, 3), st.floats(0.1, 5)), max_size=12), limit=st.integers(1, 4))
def test_whatever_is_cancelled_the_stage_ends_empty(visits: list[tuple[int, float, float]], limit: int) -> None:
    gate = Gate(limit=limit)

    async def visit(priority: int, stay: float, patience: float) -> None:
        with trio.move_on_after(patience):
            async with gate.slot(priority=priority):
                assert gate.statistics().inside <= limit
                await trio.sleep(stay)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for each in visits:
                nursery.start_soon(visit, *each)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (gate.statistics().inside, gate.statistics().waiting) == (0, 0)
