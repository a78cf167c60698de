"""The watcher: once a second it reads the machine and the engine, and sets the stages' limits accordingly.

Rule for whoever edits it: it only obeys `decision.py`; what it does must be understood from `GET /v1/status` alone.
"""

import logging
from collections.abc import Callable

import trio
from attrs import define, evolve, field

from polarnode.shell.engine.statistics import EngineStatistics
from polarnode.shell.orders import Stages
from polarnode.shell.pressure.decision import Bounds, Readings, Standing, State, begin, decide
from polarnode.shell.pressure.readings import Machine

LOOK_S = 1.0  # seconds between looks: a session takes about as long to begin, and a look costs 0.2 ms

logger = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class PressureWatch:
    """Adjusts the gates of one node. `read` is the machine now, `hold` is told whether anything may be started for later."""

    stages: Stages
    bounds: Bounds
    ready_limit: int
    engines: Callable[[], EngineStatistics]
    read: Callable[[], Machine]
    hold: Callable[[bool], None]
    state: State = field(init=False)

    @state.default
    def _begin(self) -> State:
        return begin(self.bounds)

    async def run(self, ready: trio.Event) -> None:
        """Look and adjust until cancelled."""
        while True:
            await self.look()
            ready.set()
            await trio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look."""
        machine = await trio.to_thread.run_sync(self.read)
        before, self.state = self.state, decide(self.state, _readings(machine, self.engines()), _standing(self.stages), self.bounds)
        self._say(before)
        stages, state = self.stages, self.state
        stages.init.adjust(state.init, state.init_held)
        stages.run.adjust(state.run, state.run_held)
        stages.live.adjust(state.run + self.ready_limit)
        stages.post.adjust(state.post, state.post_held)
        if before.short != state.short:
            self.hold(state.short)

    def _say(self, before: State) -> None:
        if self.state.short and not before.short:
            logger.warning("no session is begun for now: %s", self.state.init_held)
        if before.short and not self.state.short:
            logger.info("sessions are begun again")


def _readings(machine: Machine, engine: EngineStatistics) -> Readings:
    ready = [host for host in engine.hosts if host.state == "ready"]
    told = Readings(memory_mb=machine.memory_mb, disk_mb=machine.disk_mb, cpu=machine.cpu, serving=bool(ready) and engine.paused is None)
    return evolve(told, running=sum(host.running for host in ready), waiting=sum(host.waiting for host in ready))


def _standing(stages: Stages) -> Standing:
    """Those that have begun: whoever waits for INIT has not."""
    init, run, post = stages.init.statistics(), stages.run.statistics(), stages.post.statistics()
    return Standing(at_work=init.inside + run.waiting + run.inside + post.waiting + post.inside, running=run.inside)
