"""The inputs of a session: its order, the identity of its node, and the ports and stages that it passes.

Keep `harness_order` the only function that makes a harness's order, so that a task runs as it was admitted.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import evolve, field, frozen

from polarnode.containers.recipes import on_top_image
from polarnode.core.labels import all_labels
from polarnode.core.ports import Endpoint, HarnessOrder
from polarnode.core.task import RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Turn
from polarnode.evaluators.contract import Evaluator
from polarnode.harnesses.harness import Harness
from polarnode.journal.log.port import Claim
from polarnode.merge.trajectory import Identity, requested_fork
from polarnode.support.concurrency import PrioritySemaphore
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


@frozen(kw_only=True)
class NodeIdentity:
    """The node and model named in every trajectory, and the operator's labels."""

    node: str
    model: str
    labels: Mapping[str, str] = field(factory=dict)

    @property
    def all_labels(self) -> dict[str, str]:
        """The operator's labels, with the two that every node has."""
        return all_labels(self.labels, node=self.node, model=self.model)

    def session_identity(
        self, claim: Claim, harness: str | None = None, version: str | None = None
    ) -> Identity:
        """The identity of a claim's session. `harness` is the harness that runs it, if that differs from the
        one that its task names.
        """
        return Identity(
            session_id=claim.session_id,
            task_id=claim.task_id,
            group_id=claim.spec.group_id or claim.task_id,
            sample_index=claim.sample_index,
            harness=harness or claim.spec.harness.name,
            harness_version=version,
            model=self.model,
            node=self.node,
            attempt=claim.attempt,
            forked_from=requested_fork(claim.spec),
        )
