"""Figures of a node over the last hours, kept in memory, so that the page can draw curves as soon as it is
opened.

Nothing here outlives the process; Prometheus keeps figures for longer.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.metrics import Figures
from polarnode.api.query import read_query
from polarnode.api.service import json_response
from polarnode.core.codec.json import plain
from polarnode.core.status import TimeSeries
from polarnode.http.asgi import RouteRow

EVERY_S: Final = 10.0  # a curve over minutes is smooth, and a sample costs some 0.1 ms
KEPT: Final = 2160  # samples, which are six hours and some 0.5 MB

Values = dict[str, float | None]


@frozen
class _SampleTotals:
    """The values that only grow, at one sample; rates are differences of them."""

    at: float
    tokens: int
    turns: int
    ended: int
    prompt: int
    reread: int


def _read_totals(figures: Figures, at: float) -> _SampleTotals:
    residencies = [host.residency for host in figures.engine.hosts if host.residency is not None]
    return _SampleTotals(
        at=at,
        tokens=figures.tally.sampled_tokens.total(),
        turns=figures.tally.turns.total(),
        ended=figures.tally.sessions.total(),
        prompt=sum(each.prompt_tokens for each in residencies),
        reread=sum(each.reread_planned + each.reread_unplanned for each in residencies),
    )


def sample(figures: Figures, now: _SampleTotals, before: _SampleTotals) -> Values:
    """The values of one moment. Rates are per second since the sample before; at the first sample, which is
    its own predecessor, they are None. `reread_share` is None if no prompt was read, or if no cache is
    counted.
    """
    run, hosts = figures.stages.get("run"), figures.engine.hosts
    seconds, read = now.at - before.at, now.prompt - before.prompt

    def rate(name: str) -> float | None:
        grown: int = getattr(now, name) - getattr(before, name)
        return round(grown / seconds, 3) if seconds > 0 and grown >= 0 else None

    return {
        "live": figures.live,
        "running": 0 if run is None else run.inside,
        "waiting": 0 if run is None else run.waiting,
        "calls_running": sum(host.running for host in hosts),
        "calls_waiting": sum(host.waiting + host.queued for host in hosts),
        "token_usage": max((host.token_usage for host in hosts), default=0.0),
        "sampled_tokens_per_s": rate("tokens"),
        "turns_per_s": rate("turns"),
        "sessions_ended_per_s": rate("ended"),
        "reread_share": round((now.reread - before.reread) / read, 4) if read > 0 else None,
        "loop_late_s": figures.lag.p99,
    }


@define(eq=False, kw_only=True)
class History:
    """The samples of one node, and their route. `now` gives seconds since the epoch."""

    figures: Callable[[], Figures]
    now: Callable[[], float]
    _samples: "deque[tuple[float, Values]]" = field(factory=lambda: deque(maxlen=KEPT), init=False)
    _before: _SampleTotals | None = field(default=None, init=False)

    async def run(self, ready: trio.Event) -> None:
        """Sample until cancelled."""
        while True:
            self.look()
            ready.set()
            await trio.sleep(EVERY_S)

    def look(self) -> None:
        """Take one sample."""
        figures = self.figures()
        totals = _read_totals(figures, self.now())
        self._samples.append((totals.at, sample(figures, totals, self._before or totals)))
        self._before = totals

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", "/v1/timeseries", self.answer)

    async def answer(self) -> Response:
        # This function is async although it waits for nothing, because Quart would run a plain function in a
        # thread.
        await trio.lowlevel.checkpoint()
        since = read_query(request.args, "since").since
        kept = [each for each in self._samples if since is None or each[0] > since]
        names = self._samples[-1][1] if self._samples else ()
        series = TimeSeries(
            every_s=EVERY_S,
            at=tuple(at for at, _ in kept),
            values={name: tuple(values[name] for _, values in kept) for name in names},
        )
        return json_response(plain(series))
