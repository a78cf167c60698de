"""The inputs of a session: its order, and the services of its node.

Keep `harness_order` the only function that makes a harness's order, so that a task runs as it was admitted.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from socket import socket
from typing import Protocol

import trio
from attrs import evolve, field, frozen

from polarnode.containers.egress.proxy import NodeEgress
from polarnode.containers.recipes import on_top_image
from polarnode.containers.runtimes import AbsentRuntimes, NodeRuntimes
from polarnode.core.codec.json import child
from polarnode.core.errors import Refused
from polarnode.core.labels import all_labels, first_unmet_label, format_labels
from polarnode.core.ports import Endpoint, HarnessOrder, Judge
from polarnode.core.task import CarrySpec, ForkSpec, RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Turn
from polarnode.engine.adapters import EngineAdapters
from polarnode.engine.scoring import ScoringEngines
from polarnode.evaluators.contract import Evaluator
from polarnode.harnesses.harness import Harness
from polarnode.journal.forks import EarlierAttempt, ForkParent
from polarnode.journal.log.port import QueriesPort
from polarnode.merge.lineage import DropsThinking
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.freezer import ContainerFreezer
from polarnode.support.concurrency import PrioritySemaphore
from polarnode.support.metrics import NodeCounters
from polarnode.support.waiting_line import EntryCohort


@frozen(kw_only=True)
class SessionOrder:
    """One session of a task: its identity, task and parts. `cohort` is its group, whose sessions pass each
    stage together.
    """

    identity: Identity
    spec: TaskSpec
    harness: Harness
    evaluator: Evaluator
    cohort: EntryCohort = field(factory=EntryCohort, eq=False)

    @property
    def runtime(self) -> RuntimeSpec:
        """The task's runtime, its image filled in."""
        return runtime_of(self.spec, self.harness)

    @property
    def fresh(self) -> bool:
        """Whether its evaluator works in a fresh runtime."""
        return self.spec.evaluator.fresh_runtime or self.evaluator.fresh

    @property
    def containers(self) -> int:
        """How many containers the session needs."""
        return 2 if self.fresh else 1


def runtime_of(task: TaskSpec, harness: Harness) -> RuntimeSpec:
    """A task's runtime. The harness's own image is filled in if the task names none, or layered on the task's
    image if the task requests that.
    """
    spec = task.runtime
    if spec.image == "agent":
        return evolve(spec, image=harness.image)
    return evolve(spec, image=on_top_image(harness.image, spec.image)) if spec.add_harness else spec


def harness_order(spec: TaskSpec, endpoint: Endpoint, *, workdir: str, home: str) -> HarnessOrder:
    """The part of a task that its harness reads."""
    return HarnessOrder(
        instruction=spec.instruction,
        endpoint=endpoint,
        workdir=workdir,
        home=home,
        model_name=spec.harness.model_name,
        settings=spec.harness.settings,
        env={**spec.runtime.env, **spec.harness.env},
        command=spec.harness.command,
        mcp_servers=spec.harness.mcp_servers,
        skills=spec.harness.skills,
    )


@frozen(kw_only=True)
class StageSlots:
    """The stage limits that every session passes."""

    live: PrioritySemaphore
    init: PrioritySemaphore
    run: PrioritySemaphore
    post: PrioritySemaphore


class SessionJournal(Protocol):
    """The synchronous writes of a live session to the journal of its node."""

    def record_session(self, identity: Identity) -> None: ...

    def record_turn(self, turn: Turn) -> None: ...


class CachePlaces(Protocol):
    """The places that sessions have in the caches of the engines."""

    def begin_session(
        self, session: str, kind: str, group: str, credit: Callable[[float], None], *, waits: bool = True
    ) -> str | None:
        """Give a session its place. Returns None, or the reason that there is no place. `credit` moves the
        session's deadline by seconds: by more than 0 when its calls begin to be held, and back or by 0 when
        none is held any more. A session that does not wait begins without a place, and its calls are held
        instead.
        """

    def end_session(self, session: str) -> None:
        """Give a session's place back. Does nothing if the session has none."""


class NoCachePlaces:
    """For engines whose caches nobody counts."""

    def begin_session(
        self, session: str, kind: str, group: str, credit: Callable[[float], None], *, waits: bool = True
    ) -> str | None:
        return None

    def end_session(self, session: str) -> None:
        pass


class SnapshotCopies(Protocol):
    """Copies of snapshots, from which other nodes can go on."""

    def put(self, session_id: str, turn: int) -> None:
        """Copy a snapshot that was just taken. This never waits."""

    async def remove(self, session_id: str, turn: int) -> None:
        """Remove a copy."""

    async def fetch(self, session_id: str) -> None:
        """Fetch the snapshots of a session that this node does not have."""

    async def turns(self, fork: ForkSpec) -> tuple[Turn, ...] | None:
        """The turns before a snapshot that came from another node; None if there is no such snapshot."""

    async def sweep(self, log: QueriesPort) -> None:
        """Remove the copies whose sessions the log has pruned."""


class NoCopies:
    """For a node whose snapshots are on its own disk alone."""

    def put(self, session_id: str, turn: int) -> None:
        pass

    async def remove(self, session_id: str, turn: int) -> None:
        await trio.lowlevel.checkpoint()

    async def fetch(self, session_id: str) -> None:
        await trio.lowlevel.checkpoint()

    async def turns(self, fork: ForkSpec) -> tuple[Turn, ...] | None:
        await trio.lowlevel.checkpoint()
        return None

    async def sweep(self, log: QueriesPort) -> None:
        await trio.lowlevel.checkpoint()


@frozen(kw_only=True)
class NodeIdentity:
    """The node and model named in every trajectory, and the operator's labels."""

    node: str
    model: str
    labels: Mapping[str, str] = field(factory=dict)


async def no_parent(_: ForkSpec) -> ForkParent | None:
    """For a node whose journal has no session to fork."""
    await trio.lowlevel.checkpoint()
    return None


async def no_attempts(_: Identity) -> tuple[EarlierAttempt, ...]:
    """For a node whose journal has no session that was lost."""
    await trio.lowlevel.checkpoint()
    return ()


def no_versions(_: str) -> tuple[str, ...]:
    """For a node whose engine has no versions."""
    return ()


async def anywhere(_: ForkSpec) -> None:
    """For a node that shares no log: what a fork needs is at this node or nowhere."""
    await trio.lowlevel.checkpoint()


@frozen(kw_only=True)
class NodeServices:
    """The services of a node for sessions of all drivers."""

    identity: NodeIdentity
    journal: SessionJournal
    runtimes: NodeRuntimes | AbsentRuntimes
    stages: StageSlots
    # It serves the model endpoint of a session on its socket.
    serve_endpoint: Callable[[str, socket], AbstractAsyncContextManager[object]]
    context_length: int
    log_dir: Path
    ensure_image: Callable[[str], Awaitable[None]]
    drops_thinking: DropsThinking  # whether the model's template leaves out earlier thinking
    judge: Callable[[str], Judge]  # finds a judge of the node's config by name, or raises EvaluatorError
    tally: NodeCounters = field(factory=NodeCounters)
    judges: frozenset[str] = frozenset()  # the names of the judges
    allowed_imports: tuple[str, ...] = ()
    carried_limit: int = 0  # bytes a session may carry beside ids and logprobs
    unrouted: str | None = None  # why tasks cannot have their routed experts; None if they can
    volumes: tuple[str, ...] = ()  # folders of this machine below which tasks may mount
    egress: NodeEgress = field(factory=NodeEgress)  # hosts tasks may reach
    # It lists the versions that were served of the base or of an adapter, the oldest first and the current
    # last.
    order: Callable[[str], Sequence[str]] = no_versions
    # It maps each adapter to the version that this node serves; "" is the base.
    serving: Callable[[], Mapping[str, str]] = dict
    adapters: EngineAdapters = field(factory=EngineAdapters)
    places: CachePlaces = field(factory=NoCachePlaces)
    freezer: ContainerFreezer = field(factory=ContainerFreezer)
    # It limits the snapshots at once, which take the disk and the interpreter from each other and from every
    # other session.
    snapshot_limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(2))
    copies: SnapshotCopies = field(factory=NoCopies)
    scoring: ScoringEngines = field(factory=ScoringEngines)  # the engines that tasks may name as teachers
    fork_parent: Callable[[ForkSpec], Awaitable[ForkParent | None]] = no_parent  # finds the parent of a fork
    earlier_attempts: Callable[[Identity], Awaitable[Sequence[EarlierAttempt]]] = no_attempts
    # It raises ForkElsewhere for a fork that must begin at another node.
    insist_here: Callable[[ForkSpec], Awaitable[None]] = anywhere

    def versions_of(self, adapter: str) -> Sequence[str]:
        """The versions that a session's tokens may have: an adapter's own, or the base's."""
        return self.order(adapter)

    def check_labels(self, requires: Mapping[str, str]) -> None:
        """Raise Refused for a task that requires a label which this node does not have."""
        here = self.identity
        labels = all_labels(here.labels, node=here.node, model=here.model)
        if (name := first_unmet_label(requires, labels)) is not None:
            path = child("$.requires", name)
            raise Refused(
                f"{path.removeprefix('$.')} is {requires[name]!r}, and this node has"
                f" {format_labels(labels)}: leave it out, or send the task to a node that has it",
                path=path,
            )

    def check_adapter(self, name: str) -> None:
        """Raise Refused for an adapter by which no session can sample."""
        if name and (why := self.adapters.refusal(name)) is not None:
            raise Refused(why, path="$.adapter")

    def check_teacher(self, carry: CarrySpec) -> None:
        """Raise Refused for a teacher that this node does not have."""
        if carry.teacher:
            self.scoring.insist(carry.teacher, "$.carry.teacher")
