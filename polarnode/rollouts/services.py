"""What a session is handed: its order, and the services of its node.

Keep `harness_order` the only maker of a harness's order, so that a task runs with what it was admitted with.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from socket import socket
from typing import Protocol

from attrs import evolve, field, frozen

from polarnode.containers.egress.proxy import NodeEgress
from polarnode.containers.recipes import on_top
from polarnode.containers.runtimes import Runtimes
from polarnode.core.ports import Endpoint, HarnessOrder, Judge
from polarnode.core.task import RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.evaluators.contract import Evaluator
from polarnode.harnesses.harness import Harness
from polarnode.merge.lineage import DropsThinking
from polarnode.merge.trajectory import Identity
from polarnode.support.metrics import NodeCounters
from polarnode.support.semaphore import PrioritySemaphore


@frozen(kw_only=True)
class SessionOrder:
    """One session of a task: who it is and what it is to do."""

    identity: Identity
    spec: TaskSpec
    harness: Harness
    evaluator: Evaluator

    @property
    def runtime(self) -> RuntimeSpec:
        """The task's runtime, with the harness's own image where the task left the choice, or on top of the
        task's where it asks for that.
        """
        spec = self.spec.runtime
        if spec.image == "agent":
            return evolve(spec, image=self.harness.image)
        return evolve(spec, image=on_top(self.harness.image, spec.image)) if spec.add_harness else spec

    @property
    def fresh(self) -> bool:
        """Whether its evaluator judges in a runtime of its own."""
        return self.spec.evaluator.fresh_runtime or self.evaluator.fresh

    @property
    def containers(self) -> int:
        """How many it will take."""
        return 2 if self.fresh else 1


def harness_order(spec: TaskSpec, endpoint: Endpoint, *, workdir: str, home: str) -> HarnessOrder:
    """A task as its harness module reads it."""
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
class Stages:
    """The stage limits every session passes."""

    live: PrioritySemaphore
    init: PrioritySemaphore
    run: PrioritySemaphore
    post: PrioritySemaphore


class SessionJournal(Protocol):
    """What sessions write down, at once: the synchronous side of the journal."""

    def task_submitted(
        self, spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], idempotency_key: str | None
    ) -> None: ...

    def session_started(self, identity: Identity) -> None: ...

    def turn(self, turn: Turn) -> None: ...

    def publish(self, trajectory: Trajectory) -> None: ...

    def replaced(self, trajectory: Trajectory, successor: Identity) -> None: ...

    def task_cancelled(self, task_id: str) -> None: ...


@frozen(kw_only=True)
class NodeIdentity:
    """The node and the model that every trajectory names."""

    node: str
    model: str


@frozen(kw_only=True)
class NodeServices:
    """What a node offers its sessions, whoever drives them."""

    identity: NodeIdentity
    journal: SessionJournal
    runtimes: Runtimes
    stages: Stages
    # serves the model endpoint of a session on its socket
    serve_endpoint: Callable[[str, socket], AbstractAsyncContextManager[object]]
    context_length: int
    log_dir: Path
    ensure_image: Callable[[str], Awaitable[None]]
    drops_thinking: DropsThinking  # the model's template
    judge: Callable[[str], Judge]  # the judge of a name of the node's config; EvaluatorError for any other
    tally: NodeCounters = field(factory=NodeCounters)
    judges: frozenset[str] = frozenset()  # their names
    allowed_imports: tuple[str, ...] = ()
    carried_limit: int = 0  # bytes a session may carry beside ids and logprobs
    unrouted: str | None = None  # why no task can have its routed experts; None when it can
    volumes: tuple[str, ...] = ()  # folders of this machine below which tasks may mount
    egress: NodeEgress = field(factory=NodeEgress)  # hosts tasks may reach
    # the weights that were served, oldest first, the last is served now
    versions: Callable[[], Sequence[str]] = tuple
