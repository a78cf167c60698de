"""The models of a fleet: the nodes that serve one are a pool, with weights and adapters of its own.

Invariant: what is sent for one model reaches no node of another. Where nodes serve several, a request names
the one that it means (`?model=NAME`); else it is refused with their names.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import trio
from attrs import define, field
from quart import Response, request

from polarnode.fleet.front import Front
from polarnode.fleet.members import FleetMember
from polarnode.fleet.placement import one_model
from polarnode.fleet.weights import CATCH_UP_S, FleetWeights
from polarnode.http.asgi import RouteRow

POOLS: Final = 64  # models whose weights are remembered: as many as a fleet has nodes

Handlers = dict[tuple[str, str], Callable[..., Any]]
MakeRows = Callable[[FleetWeights], Iterable[RouteRow]]


@define(eq=False, kw_only=True)
class WeightPools:
    """The weights of each model. Run `keep` beside it."""

    front: Front
    _pools: dict[str, FleetWeights] = field(factory=dict, init=False)

    def of(self, asked: str | None) -> FleetWeights:
        """The pool that a request means. Raises Refused for none, or one of several that it does not name."""
        reports = self.front.roster.reports()
        complete = len(reports) == len(self.front.roster.members)
        return self._pool(one_model(asked, reports, complete=complete) or "")

    def _pool(self, model: str) -> FleetWeights:
        if model not in self._pools:
            served = {each.model for each in self.front.roster.reports()}
            for left in [each for each in self._pools if each not in served]:
                if len(self._pools) >= POOLS:
                    del self._pools[left]
            self._pools[model] = FleetWeights(front=self.front, model=model)
        return self._pools[model]

    def hold(self, held: bool) -> None:
        """Generation of all nodes was held, or goes on: nodes that join do the same."""
        for model in {each.model for each in self.front.roster.reports()}:
            self._pool(model).paused = {"mode": "in_place"} if held else None

    async def bring(self, member: FleetMember) -> bool:
        """Whether a node may take tasks now, as its pool has it."""
        return member.report is not None and await self._pool(member.report.model).bring(member)

    async def keep(self) -> None:
        """Bring stale nodes up to date, until cancelled."""
        while True:
            await trio.sleep(CATCH_UP_S)
            async with trio.open_nursery() as nursery:
                for pool in [*self._pools.values()]:
                    nursery.start_soon(pool.catch_up)

    def rows(self, make: MakeRows) -> Iterator[RouteRow]:
        """The rows that `make` has for each pool's weights, each asked of the pool that its request means."""
        made: dict[str | None, tuple[FleetWeights, Handlers]] = {}  # they keep what a trainer began

        async def answer(method: str, path: str, **names: Any) -> Response:
            pool = self.of(request.args.get("model"))
            if pool.model not in made or made[pool.model][0] is not pool:
                made[pool.model] = (pool, {(verb, place): handler for verb, place, handler in make(pool)})
            found: Response = await made[pool.model][1][method, path](**names)
            return found

        for method, path, _ in make(FleetWeights(front=self.front)):
            yield method, path, partial(answer, method, path)
