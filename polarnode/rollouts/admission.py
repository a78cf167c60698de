"""Whether a task can run here, asked before any of its sessions exists: everything it names is found and
tried dry.

The rule for whoever edits it: what a task can get wrong is refused at submission, with the field's path, and
not hours later in a session's outcome. Parts named by import path are other people's code: whatever they
raise is a refusal, never an error of the node.

Whether a node has room for a task: asked before it is taken, so that what is taken is never lost for want of
memory or disk.

Pure. The rule for whoever edits it: a refusal here passes with time, and says what will make it pass; what no
waiting mends is 400 or 507.
"""

from collections.abc import Collection
from typing import Final

from attrs import frozen

from polarnode.containers.container import check_volumes
from polarnode.containers.egress.rules import check_egress
from polarnode.core.errors import Refused, boundary
from polarnode.core.ports import Endpoint, Launch
from polarnode.core.task import TaskSpec
from polarnode.evaluators import registry as evaluators
from polarnode.evaluators.contract import Evaluator
from polarnode.harnesses import registry as harnesses
from polarnode.harnesses.harness import Harness
from polarnode.journal.values import JournalStatistics
from polarnode.merge.builders import build
from polarnode.rollouts.services import harness_order

# ── admission ────────────────────────────────────────────────────────────

# What a launch is tried with: the shape of a real endpoint, nobody's key.
DRY_URL, DRY_KEY, DRY_HOME = "http://127.0.0.1:8080", "sk-polarnode-dry", "/home/agent"


@frozen(kw_only=True)
class Admitted:
    """The parts a task named, found and fit for its settings."""

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
) -> Admitted:
    """What the task named. Refused, with the field's path, when it can not be had or does not take its
    settings.

    `judges` are the names of the node's, `volumes` the folders below which tasks may mount, `egress` the
    hosts they may reach, each None where it is not known yet; `unrouted` is why this node's engine tells no
    routed experts, None when it does.
    """
    if spec.carry.routed_experts and unrouted is not None:
        raise Refused(f"carry.routed_experts can not be had here: {unrouted}", path="$.carry.routed_experts")
    if volumes is not None:
        check_volumes(spec.runtime.volumes, volumes)
    if egress is not None:
        check_egress(spec.runtime.egress, egress)
    with boundary(Refused, "the harness can not be launched with these settings"):
        harness = harnesses.find(spec.harness, allowed_imports=allowed_imports)
        _try_launch(harness, spec, model, context_length)
    with boundary(Refused, "the evaluator can not work with this config"):
        evaluator = evaluators.find(spec.evaluator, allowed_imports=allowed_imports, judges=judges)
    # a session that never called its model is built too
    build(spec.builder, (), allowed_imports=allowed_imports)
    return Admitted(harness=harness, evaluator=evaluator)


def _try_launch(harness: Harness, spec: TaskSpec, model: str, context_length: int) -> None:
    endpoint = Endpoint(base_url=DRY_URL, key=DRY_KEY, context_length=context_length, model=model)
    launch: object = harness.launch(
        harness_order(spec, endpoint, workdir=spec.runtime.workdir, home=DRY_HOME)
    )
    if not isinstance(launch, Launch):
        raise Refused(
            f"the launch of harness {harness.name} gave {type(launch).__name__}: return a"
            " polarnode.core.ports.Launch",
            path="$.harness",
        )


# ── room ────────────────────────────────────────────────────────────

# a session ends every second or so on a busy node; a trainer that comes back sooner only asks more often
RETRY_AFTER_S: Final = 5.0
# in memory: four commits of the journal's; more is a disk that does not keep up
BACKLOG_BYTES: Final = 64 << 20
# for the journal: the sessions of a full node write some hundred MB yet; below half of it the answer is 507
DISK_FREE_BYTES: Final = 512 << 20
# of all that is kept: beyond it trajectories that nobody has acknowledged would soon be forgotten
FULL: Final = 0.95


def no_room(journal: JournalStatistics, *, pending: int, more: int, limit: int) -> str | None:
    """Why a task of `more` sessions can not be taken now, beside `pending` ones of at most `limit`; None when
    it can.
    """
    if pending + more > limit:
        return (
            f"{pending} sessions wait or run, and with {more} more they would be over pending_limit"
            f" ({limit}): submit again when some have ended"
        )
    if journal.backlog_bytes > BACKLOG_BYTES:
        return (
            f"{journal.backlog_bytes >> 20} MiB wait for the journal's disk: submit again when it has"
            " caught up"
        )
    # what was pruned is written again first
    if (free := journal.disk_free + journal.free_bytes) < DISK_FREE_BYTES:
        return f"the journal's disk has {free >> 20} MiB left: free some, or move state_dir to a larger one"
    # who acknowledges nothing ever wants the latest
    if journal.positions and journal.unacknowledged_bytes > FULL * journal.most_bytes:
        kept = f"{journal.unacknowledged_bytes >> 20} of {journal.most_bytes >> 20} MiB"
        return (
            f"trajectories of {kept} are kept that no consumer has acknowledged: read and acknowledge some,"
            " delete a consumer that is gone, or raise keep_mb"
        )
    return None
