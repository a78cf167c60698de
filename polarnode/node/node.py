"""A node that runs: what the control plane asks of it."""

from functools import partial

import trio
from attrs import define, evolve, field

from polarnode.config import NodeConfig
from polarnode.conversation import Json
from polarnode.node.room import RETRY_AFTER_S, no_room
from polarnode.shell.callbacks import Callbacks
from polarnode.shell.captures import Captures
from polarnode.shell.engine import Engines
from polarnode.shell.journal import Journal
from polarnode.shell.judges import Judges
from polarnode.shell.lag import LoopLag
from polarnode.shell.podman import Images, Runtimes
from polarnode.shell.scheduler import Scheduler
from polarnode.shell.weights import EngineControl, Weights
from polarnode.tasks import TaskSpec
from polarnode.tokens.model import LoadedModel
from polarnode.web.control_plane import Busy, Conflict, DiskFull, Submitted
from polarnode.web.control_plane.metrics import Figures
from polarnode.wire import plain

WRITTEN_S = 5.0  # seconds for a cancel to be on disk before it is answered: a full disk, which is waited out, must not hold the answer up


@define(eq=False)
class Node:
    """A node that runs. Satisfies the control plane's `Service`."""

    config: NodeConfig
    journal: Journal
    engines: Engines
    runtimes: Runtimes
    images: Images
    model: LoadedModel
    scheduler: Scheduler
    judges: Judges
    lag: LoopLag
    captures: Captures
    callbacks: Callbacks
    weights: Weights
    engine_control: EngineControl
    _submitting: trio.Lock = field(factory=trio.Lock, init=False)  # two submissions of one key at once must be one task

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        """Take a task, or answer again what was answered to the same one. Raises Refused, Conflict, Busy or DiskFull."""
        async with self._submitting:
            known = await self._known(spec, idempotency_key)
            return known if known is not None else await self._taken(spec, idempotency_key)

    async def _taken(self, spec: TaskSpec, idempotency_key: str | None) -> Submitted:
        if self.journal.refuses_tasks:
            raise DiskFull("the journal's disk is full: free some, then submit again; sessions under way are kept in memory meanwhile")
        pending = self.scheduler.statistics().live
        full = no_room(self.journal.statistics(), pending=pending, more=spec.num_samples, limit=self.config.pending_limit)
        if full is not None:
            raise Busy(full, retry_after=RETRY_AFTER_S)
        task_id, session_ids = self.scheduler.submit(spec, idempotency_key=idempotency_key)
        await self.journal.flushed()
        return Submitted(task_id=task_id, session_ids=session_ids)

    async def _known(self, spec: TaskSpec, idempotency_key: str | None) -> Submitted | None:
        record = await self.journal.task_of_key(idempotency_key) if idempotency_key else None
        record = record or (await self.journal.task(spec.task_id) if spec.task_id else None)
        if record is None:
            return None
        if evolve(record.spec, task_id=None) != evolve(spec, task_id=None):
            raise Conflict(f"task {record.task_id} was submitted before with another body: give this one its own task_id and Idempotency-Key")
        ids = tuple(session.session_id for session in record.sessions)
        return Submitted(task_id=record.task_id, session_ids=ids, created=False)

    async def cancel(self, task_id: str) -> bool:
        """End a task's sessions with what they have; when this returns no death of the node brings one back, unless its disk is full."""
        cancelled = self.scheduler.cancel(task_id) or await self.captures.cancel(task_id)
        with trio.move_on_after(WRITTEN_S):
            await self.journal.flushed()
        return cancelled

    def cancel_all(self) -> None:
        """End every session with what it has."""
        self.scheduler.cancel_all()
        self.captures.cancel_all()

    async def stop(self, *, cancel: bool) -> None:
        """Refuse new tasks and wait for the sessions; `cancel` ends them with what they have."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self.captures.stop, cancel=cancel))
            await self.scheduler.stop(cancel=cancel)

    def status(self) -> dict[str, Json]:
        """The node at a glance."""
        return {
            "node": self.config.node_id,
            "model": {"name": self.model.name, "family": self.model.family.name, "context_length": self.engines.context_length},
            "scheduler": plain(self.scheduler.statistics()),
            "sessions": [plain(status) for status in self.scheduler.sessions() if status.outcome is None],
            "captures": {"limit": self.captures.house.limit, "open": [plain(status) for status in self.captures.list()]},
            "engine": plain(self.engines.statistics()),
            "weights": plain(self.weights.status()),
            "callbacks": plain(self.callbacks.statistics()),
            "runtimes": plain(self.runtimes.statistics()),
            "judges": plain(self.judges.statistics()),
            "loop": plain(self.lag.statistics()),
        }

    def figures(self) -> Figures:
        """The node's numbers, for GET /metrics."""
        scheduler, journal = self.scheduler.statistics(), self.journal.statistics()
        return Figures(
            tally=self.scheduler.tally.copied(),
            engine=self.engines.statistics(),
            stages=scheduler.stages,
            runtimes=self.runtimes.statistics(),
            live=scheduler.live,
            captures=len(self.captures.list()),
            callbacks=self.callbacks.statistics(),
            journal_bytes=journal.stored_bytes,
            journal_backlog=journal.backlog_bytes,
            lag=self.lag.statistics(),
            weights=self.weights.status(),
        )

    def ready(self) -> bool:
        """Whether tasks are taken and some engine host answers."""
        return not self.scheduler.stopping and any(host.state == "ready" for host in self.engines.statistics().hosts)
