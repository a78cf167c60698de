"""Admission of tasks: the parts that a task names are resolved and checked, and the node's capacity is
checked.

Pure. Keep refusals early: an invalid task is refused at submission, with the field's path, and not hours
later in a session's outcome. Parts named by import path are user code: whatever they raise becomes a refusal,
never an error of the node. `Busy` is a lack of capacity that passes, and its message names the remedy;
`DiskFull` needs the operator.
"""

from collections.abc import Collection
from typing import Final

from attrs import frozen

from polarnode import harnesses
from polarnode.containers.container import check_volumes
from polarnode.containers.egress.rules import check_egress
from polarnode.core.errors import Busy, DiskFull, JournalDamaged, Refused, boundary
from polarnode.core.ports import Endpoint, Launch
from polarnode.core.task import TaskSpec
from polarnode.evaluators import registry as evaluators
from polarnode.evaluators.contract import Evaluator
from polarnode.harnesses.harness import Harness
from polarnode.journal.values import (
    TASK_BACKLOG_BYTES,
    TASK_DISK_FREE_BYTES,
    TASK_UNACKNOWLEDGED_SHARE,
    JournalStatistics,
)
from polarnode.merge.builders import build
from polarnode.rollouts.services import harness_order

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
    if spec.carry.routed_experts and unrouted is not None:
        raise Refused(
            f"carry.routed_experts is not available here: {unrouted}", path="$.carry.routed_experts"
        )
    if volumes is not None:
        check_volumes(spec.runtime.volumes, volumes)
    if egress is not None:
        check_egress(spec.runtime.egress, egress)
    with boundary(Refused, "the harness cannot be launched with these settings"):
        harness = harnesses.find(spec.harness, allowed_imports=allowed_imports)
        _try_launch(harness, spec, model, context_length)
    with boundary(Refused, "the evaluator cannot work with this config"):
        evaluator = evaluators.find(spec.evaluator, allowed_imports=allowed_imports, judges=judges)
    # A trajectory is built even for a session without a model call.
    build(spec.builder, (), allowed_imports=allowed_imports)
    return AdmittedTask(harness=harness, evaluator=evaluator)


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
