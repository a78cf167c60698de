"""Admission of tasks: the parts that a task names are resolved and checked, the node's capacity is checked,
and the task is submitted to the log.

Pure, except for `TaskSubmission`. Keep refusals early: an invalid task is refused at submission, with the
field's path, and not hours later in a session's outcome. Parts named by import path are user code: whatever
they raise becomes a refusal, never an error of the node. `Busy` is a lack of capacity that passes, and its
message names the remedy; `DiskFull` needs the operator.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from attrs import field, frozen

from polarnode import harnesses
from polarnode.containers.container import check_volumes
from polarnode.containers.egress.rules import check_egress
from polarnode.core.codec.json import child
from polarnode.core.errors import Busy, DiskFull, JournalDamaged, Refused, boundary
from polarnode.core.labels import choose_model, first_unmet_label, format_labels
from polarnode.core.ports import Endpoint, Launch
from polarnode.core.task import CaptureSpec, CarrySpec, EvaluatorSpec, TaskSpec
from polarnode.engine.adapters import EngineAdapters
from polarnode.engine.scoring import ScoringEngines
from polarnode.evaluators import registry as evaluators
from polarnode.evaluators.contract import Evaluator
from polarnode.harnesses.harness import Harness
from polarnode.journal.log.port import LOG_RETRY_S, Log
from polarnode.journal.values import (
    TASK_BACKLOG_BYTES,
    TASK_DISK_FREE_BYTES,
    TASK_UNACKNOWLEDGED_SHARE,
    JournalStatistics,
)
from polarnode.merge.builders import build
from polarnode.rollouts.forks import tree_way
from polarnode.rollouts.lifecycle import SessionRegistry
from polarnode.rollouts.services import NodeIdentity, harness_order
from polarnode.support.ids import new_id

# ── the parts of a task ───────────────────────────────────────────────────────

# The endpoint for the trial launch: shaped like a real one, with a key that belongs to no session.
TRIAL_URL, TRIAL_KEY, TRIAL_HOME = "http://127.0.0.1:8080", "sk-polarnode-dry", "/home/agent"


@frozen(kw_only=True)
class AdmittedTask:
    """The parts that a task names, resolved and checked against its settings."""

    harness: Harness
    evaluator: Evaluator


def admitted(
    spec: TaskSpec,
    *,
    model: str,
    context_length: int,
    allowed_imports: tuple[str, ...],
    unrouted: str | None = None,
    judges: Collection[str] | None = None,
    volumes: tuple[str, ...] | None = (),
    egress: tuple[str, ...] | None = (),
) -> AdmittedTask:
    """Resolve the parts that a task names. Raises Refused, with the field's path, when one is not available
    or does not accept its settings.

    `judges` are the names of the node's judges, `volumes` the folders below which tasks may mount, and
    `egress` the hosts that tasks may reach; None means that they are not known yet. `unrouted` says why this
    node's engine reports no routed experts; None when it does.
    """
    _check_routed_experts(spec.carry, unrouted)
    if volumes is not None:
        check_volumes(spec.runtime.volumes, volumes)
    if egress is not None:
        check_egress(spec.runtime.egress, egress)
    with boundary(Refused, "the harness cannot be launched with these settings"):
        harness = harnesses.find(spec.harness, allowed_imports=allowed_imports)
        _try_launch(harness, spec, model, context_length)
    evaluator = find_evaluator(spec.evaluator, allowed_imports=allowed_imports, judges=judges)
    # A trajectory is built even for a session without a model call.
    build(spec.builder, (), allowed_imports=allowed_imports)
    return AdmittedTask(harness=harness, evaluator=evaluator)


def _check_routed_experts(carry: CarrySpec, unrouted: str | None) -> None:
    if carry.routed_experts and unrouted is not None:
        raise Refused(
            f"carry.routed_experts is not available here: {unrouted}", path="$.carry.routed_experts"
        )


def find_evaluator(
    spec: EvaluatorSpec, *, allowed_imports: tuple[str, ...], judges: Collection[str] | None
) -> Evaluator:
    """Resolve an evaluator. Raises Refused if it is not available or does not accept its config."""
    with boundary(Refused, "the evaluator cannot work with this config"):
        return evaluators.find(spec, allowed_imports=allowed_imports, judges=judges)


def _try_launch(harness: Harness, spec: TaskSpec, model: str, context_length: int) -> None:
    endpoint = Endpoint(base_url=TRIAL_URL, key=TRIAL_KEY, context_length=context_length, model=model)
    launch: object = harness.launch(
        harness_order(spec, endpoint, workdir=spec.runtime.workdir, home=TRIAL_HOME)
    )
    if not isinstance(launch, Launch):
        raise Refused(
            f"the launch of harness {harness.name} gave {type(launch).__name__}: return a"
            " polarnode.core.ports.Launch",
            path="$.harness",
        )
    # A setting may have become an argument. With a NUL in it the harness would fail to start, hours later.
    if any("\0" in text for text in (*launch.argv, *launch.env, *launch.env.values(), *launch.files)):
        raise Refused(
            "harness.settings put a NUL character into a program's argument, variable or path: remove it",
            path="$.harness.settings",
        )


# ── what a node has for tasks ─────────────────────────────────────────────────


@frozen(kw_only=True)
class TaskAdmission:
    """What a node has that tasks may ask for. A task that asks for something else is refused."""

    identity: NodeIdentity
    context_length: int
    allowed_imports: tuple[str, ...] = ()
    judges: frozenset[str] = frozenset()  # the names of the judges
    unrouted: str | None = None  # why tasks cannot have their routed experts; None if they can
    volumes: tuple[str, ...] = ()  # folders of this machine below which tasks may mount
    egress: tuple[str, ...] = ()  # hosts tasks may reach
    adapters: EngineAdapters = field(factory=EngineAdapters)
    scoring: ScoringEngines = field(factory=ScoringEngines)  # the engines that tasks may name as teachers

    def admit(self, spec: TaskSpec) -> AdmittedTask:
        """Resolve the parts that a task names. Raises Refused, with the field's path, when this node does not
        have one or it does not accept its settings.
        """
        self._check_requirements(spec.requires, spec.adapter, spec.carry)
        found = admitted(
            spec,
            model=self.identity.model,
            context_length=self.context_length,
            allowed_imports=self.allowed_imports,
            unrouted=self.unrouted,
            judges=self.judges,
            volumes=self.volumes,
            egress=self.egress,
        )
        if spec.group.fork is not None:
            tree_way(spec, found.harness)  # This refuses a task whose forks cannot be resumed.
        return found

    def check_capture_spec(self, spec: CaptureSpec) -> None:
        """Raise Refused when a capture asks for something that this node does not have."""
        _check_routed_experts(spec.carry, self.unrouted)
        self._check_requirements(spec.requires, spec.adapter, spec.carry)
        build(spec.builder, (), allowed_imports=self.allowed_imports)

    def unmet_label(self, requires: Mapping[str, str]) -> str | None:
        """The name of a label that a task requires and this node does not have; None if it has all."""
        return first_unmet_label(requires, self.identity.all_labels)

    def _check_requirements(self, requires: Mapping[str, str], adapter: str, carry: CarrySpec) -> None:
        if (name := self.unmet_label(requires)) is not None:
            path = child("$.requires", name)
            raise Refused(
                f"{path.removeprefix('$.')} is {requires[name]!r}, and this node has"
                f" {format_labels(self.identity.all_labels)}: leave it out, or send the task to a node that"
                " has it",
                path=path,
            )
        if adapter and (why := self.adapters.refusal(adapter)) is not None:
            raise Refused(why, path="$.adapter")
        if carry.teacher:
            self.scoring.require_engine(carry.teacher, "$.carry.teacher")


# ── backpressure ──────────────────────────────────────────────────────────────

# On a busy node a session ends about every second, so an earlier retry would only add requests.
RETRY_AFTER_S: Final = 5.0


def require_writable(journal: JournalStatistics, then: str) -> None:
    """Raise JournalDamaged if the journal's file is damaged, and DiskFull if the journal accepts no more. The
    message says what is wrong with its disk, and what to do `then`.
    """
    if journal.damage is not None:
        raise JournalDamaged(journal.damage)
    if journal.refuses_tasks:
        why = journal.warning or "the journal's disk is full: make room"
        raise DiskFull(f"{why}; when that is over, {then}")


def check_task(journal: JournalStatistics, *, pending: int, more: int, limit: int) -> None:
    """Raise DiskFull or Busy when a task of `more` sessions cannot be accepted now. `pending` sessions wait
    or run already, and `limit` is the most.
    """
    require_writable(journal, "submit again; sessions under way are kept in memory meanwhile")
    if (reason := backpressure(journal, pending=pending, more=more, limit=limit)) is not None:
        raise Busy(reason, retry_after=RETRY_AFTER_S)


def check_capture(journal: JournalStatistics, *, count: int, limit: int) -> None:
    """Raise DiskFull or Busy when no capture can be opened now. `count` captures are open already, and
    `limit` is the most.
    """
    require_writable(journal, "ask again; captures that are open are kept in memory meanwhile")
    if count >= limit:
        raise Busy(
            f"{count} captures are open, as many as this node holds (capture_limit): end some",
            retry_after=RETRY_AFTER_S,
        )


def backpressure(journal: JournalStatistics, *, pending: int, more: int, limit: int) -> str | None:
    """Why a task of `more` sessions cannot be accepted now, when `pending` sessions wait or run already and
    `limit` is the most; None when it can. The thresholds are in `journal.values`.
    """
    if pending + more > limit:
        return (
            f"{pending} sessions wait or run, and with {more} more they would be over pending_limit"
            f" ({limit}): submit again when some have ended"
        )
    if journal.backlog_bytes > TASK_BACKLOG_BYTES:
        return (
            f"{journal.backlog_bytes >> 20} MiB wait for the journal's disk: submit again when it has"
            " caught up"
        )
    if (full := full_disk(journal)) is not None:
        return full
    # Without consumers no reader needs the oldest events.
    if journal.positions and journal.unacknowledged_bytes > TASK_UNACKNOWLEDGED_SHARE * journal.most_bytes:
        kept = f"{journal.unacknowledged_bytes >> 20} of {journal.most_bytes >> 20} MiB"
        return (
            f"trajectories of {kept} are kept that no consumer has acknowledged: read and acknowledge some,"
            " delete a consumer that is gone, or raise keep_mb"
        )
    return None


def full_disk(journal: JournalStatistics) -> str | None:
    """Why the journal's disk is too full for a task; None when it is not."""
    # Pages of pruned events are reused before the file grows.
    if (free := journal.disk_free + journal.free_bytes) >= TASK_DISK_FREE_BYTES:
        return None
    return f"the journal's disk has {free >> 20} MiB left: free some, or move state_dir to a larger one"


# ── submission ────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TaskSubmission:
    """Submits tasks to the log of a node. A node that shares its log also accepts tasks that only another
    node can run. `runs_tasks` says whether this node begins sessions of tasks at all.
    """

    log: Log
    admission: TaskAdmission
    registry: SessionRegistry
    now: Callable[[], float]  # seconds since the epoch
    runs_tasks: bool

    async def submit(
        self,
        spec: TaskSpec,
        *,
        idempotency_key: str | None = None,
        callback_kinds: Sequence[str] = (),
    ) -> tuple[str, tuple[str, ...]]:
        """Accept a task and return (task_id, session_ids) once the log has it. Raises Refused, and Busy if
        only nodes that are away could run it.
        """
        here = not self.log.shared or (self.runs_tasks and self.admission.unmet_label(spec.requires) is None)
        model = await self._check_nodes(spec, here=here) if self.log.shared else ""
        if here:
            self.registry.require_not_stopping("tasks")
            self.admission.admit(spec)
        task_id = spec.task_id or f"task-{new_id()}"
        record = await self.log.submit(
            spec,
            task_id=task_id,
            session_ids=tuple(new_id() for _ in range(spec.num_samples)),
            idempotency_key=idempotency_key,
            callback_kinds=tuple(callback_kinds),
            submitted=self.now(),
            model=model,
        )
        return record.task_id, tuple(session.session_id for session in record.sessions)

    async def _check_nodes(self, spec: TaskSpec, *, here: bool) -> str:
        """Return the model that the task is for. Nodes of another model, which may join later, leave the
        task.

        Raises Refused for a task that nodes of several models could run, or that no node of the log could
        run; the log remembers nodes for a day. Raises Busy if the nodes that could run it are away. `here`
        says that this node could run it. The node that begins the task checks everything else that it needs.
        """
        rows = await self.log.nodes()
        able = [row for row in rows if first_unmet_label(spec.requires, row.facts.labels) is None]
        model = choose_model(spec.requires, (row.facts.labels for row in able if "" in row.serving))
        if here or able or self.admission.unmet_label(spec.requires) is None:
            return model
        away = sorted(
            row.facts.name
            for row in await self.log.nodes(every=True)
            if row.state in ("lost", "left") and first_unmet_label(spec.requires, row.facts.labels) is None
        )
        if away:
            raise Busy(
                f"only nodes that are away have the labels that requires names: {', '.join(away)}",
                retry_after=LOG_RETRY_S,
            )
        there = "; ".join(f"{row.facts.name} has {format_labels(row.facts.labels)}" for row in rows)
        raise Refused(
            f"no node of this log has the labels that requires names: {there}; correct requires, or start a"
            " node that has them",
            path="$.requires",
        )
