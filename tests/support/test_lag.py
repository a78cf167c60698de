"""The loop's lateness is measured: none where nothing holds it, and what a step holds it for."""

import time

import trio

from polarnode.support.metrics import KEPT, TICK_S, LagStatistics, LoopLag, open_loop_lag


def test_quantiles_of_latest_measurements() -> None:
    lag = LoopLag()
    assert lag.statistics() == LagStatistics()
    for number in range(100):
        lag.note(number / 100)
    assert lag.statistics() == LagStatistics(p50=0.5, p99=0.99, max=0.99)
    for _ in range(KEPT):
        lag.note(0.25)
    assert lag.statistics() == LagStatistics(p50=0.25, p99=0.25, max=0.25)


async def test_blocking_step_is_measured() -> None:
    async with open_loop_lag() as lag:
        await trio.sleep(2 * TICK_S)
        time.sleep(0.3)  # noqa: ASYNC251  the very fault that is looked for
        await trio.sleep(2 * TICK_S)
        assert lag.statistics().max > 0.2


async def test_idle_loop_has_no_lag(autojump_clock: trio.testing.MockClock) -> None:
    async with open_loop_lag() as lag:
        await trio.sleep(10)
        assert lag.statistics() == LagStatistics(p50=0.0, p99=0.0, max=0.0)
