"""Evaluates finished sessions again, without inference, for example because a judge was down or a test was
wrong.

An evaluator that reads turns alone needs only the log. For one that works in the session's workspace, the
workspace is made again: a prepared container with the workdir that was kept. Invariants: a later reward is an
event of its own and changes nothing that was published; a session that was cut off gets no reward, as it got
none at first; each result of an evaluation is reported once, in its status and in an event, so that nobody
waits for ever. Another node takes over the evaluations of a node that is lost.
"""

import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from posixpath import normpath

import trio
from attrs import define, evolve, field

from polarnode import harnesses
from polarnode.containers.files import (
    WORKDIR,
    WORKSPACE_SUFFIX,
    artifacts_path,
    is_kept_whole,
    workspace_path,
)
from polarnode.containers.frozen import remove_image
from polarnode.containers.runtime import RESTORING_PREFIX, PodmanRuntime
from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.codec.tasks import MAX_EVALUATED
from polarnode.core.errors import (
    Busy,
    Conflict,
    JournalDamaged,
    PolarnodeError,
    Refused,
    RuntimeFault,
    Unreadable,
)
from polarnode.core.ports import Judge
from polarnode.core.status import EvaluationStatus, RewardEvent
from polarnode.core.task import CAPTURE_HARNESS, EvaluationSpec, EvaluatorSpec, HarnessSpec, RuntimeSpec
from polarnode.core.trajectory import Outcome, Status, Trajectory
from polarnode.evaluators.contract import Evaluator, KeptWork
from polarnode.journal.health import JournalHealth
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Log, LogUnavailable
from polarnode.merge.trajectory import Identity, Result
from polarnode.rollouts.admission import TaskAdmission, find_evaluator, require_writable
from polarnode.rollouts.evaluation import evaluated, fault_outcome, open_with_retry
from polarnode.rollouts.services import SessionOrder, StageSlots
from polarnode.rollouts.session_containers import LAST, Containers, Gone, NodeContainers
from polarnode.rollouts.snapshots import FROZEN, SNAPSHOT_INFIX, SnapshotCopies
from polarnode.support.ids import new_id

logger = logging.getLogger(__name__)

# The limit on evaluations that are not finished. Each holds its request in memory, of at most 64 MiB.
MAX_OPEN_EVALUATIONS = 64
RETRY_S = 10.0  # seconds; one session of an evaluation takes a few
# The seconds between two looks for kept workspaces whose sessions the log has pruned. Retention is in hours.
SWEEP_S = 3600.0
# The seconds between two looks for evaluations of nodes that are lost. A lease is as long.
TAKE_OVER_INTERVAL_S = 4.0
AWAY_S = 1.0  # seconds before the log is asked again; only those who wait for a reward wait for it
UNKNOWN = "it is not in the log: it never was, or retention has pruned it"
SPENT = ("run", "turns", "tokens", "repeats")  # the clocks of a run

Pending = tuple[EvaluationStatus, str]
Queue = tuple[trio.MemorySendChannel[Pending], trio.MemoryReceiveChannel[Pending]]


@define(eq=False, kw_only=True)
class Evaluations:
    """Evaluates finished sessions again, without inference. Each result is an event beside the session's
    trajectory, which stays as it was.

    Accepted evaluations are in the log, and go on after a restart or at another node. Rollouts come first: a
    worker takes a slot in a stage when no session waits for it. `workers` sessions are evaluated at once.
    `incarnation` returns the node's current one.
    """

    admission: TaskAdmission
    stages: StageSlots
    containers: NodeContainers
    judge: Callable[[str], Judge]  # finds a judge of the node's config by name, or raises EvaluatorError
    copies: SnapshotCopies  # of snapshots, for other nodes
    journal_health: JournalHealth  # of this node's own journal
    now: Callable[[], float]  # seconds since the epoch
    log: Log
    incarnation: Callable[[], int]
    workers: int
    _accepting: trio.Lock = field(factory=trio.Lock, init=False)  # Requests with one key get one evaluation.
    _left: Counter[str] = field(factory=Counter, init=False)  # sessions not settled, by evaluation
    _settled: int = field(default=0, init=False)  # sessions, since the node's start
    _queue: Queue = field(factory=lambda: trio.open_memory_channel[Pending](math.inf), init=False)

    async def accept(self, spec: EvaluationSpec, *, idempotency_key: str | None) -> EvaluationStatus:
        """Accept an evaluation, or repeat the answer to an identical earlier one. Raises Refused, Conflict,
        Busy or DiskFull.
        """
        async with self._accepting:
            key = idempotency_key or None
            found = await self.log.evaluation(None, key) if key else None
            if found is None:
                found = await self._taken(spec, key)
            else:
                found = evolve(found, created=False)
            if found.spec != spec:
                raise Conflict(
                    f"evaluation {found.evaluation_id} was requested before with another body: give this one"
                    " its own Idempotency-Key"
                )
            return found

    async def _taken(self, spec: EvaluationSpec, idempotency_key: str | None) -> EvaluationStatus:
        require_writable(self.journal_health.statistics(), "send the evaluation again")
        if len(self._left) >= MAX_OPEN_EVALUATIONS:
            raise Busy(
                f"{MAX_OPEN_EVALUATIONS} evaluations are not finished: send it later", retry_after=RETRY_S
            )
        if spec.evaluator is not None:
            self._evaluator(spec.evaluator)
        sessions = await self._standing(spec)
        evaluation_id = f"evaluation-{new_id()}"
        accepted = await self.log.submit_evaluation(
            spec,
            sessions,
            evaluation_id=evaluation_id,
            idempotency_key=idempotency_key,
            incarnation=self.incarnation(),
            now=self.now(),
        )
        if accepted.evaluation_id != evaluation_id:  # Another node was first with this key.
            return evolve(accepted, created=False)
        self._enqueue_sessions(accepted)
        return accepted

    async def _standing(self, spec: EvaluationSpec) -> dict[str, str | None]:
        """Say for each session why it cannot be evaluated; None where it can. Raises Refused if none can."""
        ids = tuple(dict.fromkeys(spec.sessions)) or await self.log.placed_sessions(
            spec.task_id, spec.group_id
        )
        name = spec.task_id or spec.group_id or ""
        path = "$.sessions" if spec.sessions else "$.group_id" if spec.task_id is None else "$.task_id"
        if not 0 < len(ids) <= MAX_EVALUATED:
            raise Refused(f"{name} has {len(ids)} sessions in the log: name 1 to {MAX_EVALUATED}", path=path)
        over = await self.log.session_ends(ids)
        why = {True: None, False: "it is not over: send it when its trajectory has come", None: UNKNOWN}
        found = {each: why[over.get(each)] for each in ids}
        if None not in found.values():
            raise Refused(f"no session can be evaluated; {ids[0]}: {found[ids[0]]}", path=path)
        return found

    def _evaluator(self, spec: EvaluatorSpec) -> Evaluator:
        here = self.admission
        return find_evaluator(spec, allowed_imports=here.allowed_imports, judges=here.judges)

    async def status(self, evaluation_id: str) -> EvaluationStatus | None:
        """The progress of an evaluation; None for an unknown one."""
        return await self.log.evaluation(evaluation_id)

    def statistics(self) -> dict[str, int]:
        """How many evaluations are not finished, and how many sessions they have left."""
        return {"open": len(self._left), "sessions": self._left.total()}

    # ── the work ──────────────────────────────────────────────────────────────

    async def run(self, ready: trio.Event) -> None:
        """Evaluate what is pending, and what is accepted, until cancelled."""
        pending = partial(self.log.pending_evaluations, self.incarnation())
        for record in await retry_until_answered(pending, meanwhile="the node waits to start"):
            self._enqueue_sessions(record)
        # An earlier run of the node, which was killed, may have left some.
        for each in self.containers.folder.glob(f"{RESTORING_PREFIX}*"):
            await trio.to_thread.run_sync(partial(shutil.rmtree, each, ignore_errors=True))
        ready.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep)
            if self.log.shared:
                nursery.start_soon(self._take_over)
            for _ in range(self.workers):
                nursery.start_soon(self._work)

    def _enqueue_sessions(self, record: EvaluationStatus) -> None:
        for each in record.sessions:
            if each.state == "pending":
                self._left[record.evaluation_id] += 1
                self._queue[0].send_nowait((record, each.session_id))

    async def _take_over(self) -> None:
        """Take over the evaluations that lost nodes had accepted. This node is one of them if it was lost and
        joined again.
        """
        while True:
            await trio.sleep(TAKE_OVER_INTERVAL_S)
            before = self._settled
            with suppress(LogUnavailable):
                found = await self.log.pending_evaluations(self.incarnation())
                if before != self._settled:
                    continue  # The rows may still call a session pending that was just settled.
                for record in found:
                    if record.evaluation_id not in self._left:
                        self._enqueue_sessions(record)

    async def _work(self) -> None:
        async for record, session_id in self._queue[1]:
            # A damaged journal is reported by the status, and the node goes on.
            with suppress(JournalDamaged):
                await self._settle(record, session_id)
            self._settled += 1
            self._left[record.evaluation_id] -= 1
            self._left += Counter()  # This drops the counts of 0.

    async def _settle(self, record: EvaluationStatus, session_id: str) -> None:
        """Evaluate one session, and write the result, however long the log is away."""
        given: RewardEvent | str | None = None
        while True:
            try:
                if given is None:
                    given = await self._given(record, session_id)
                if isinstance(given, str):
                    await self.log.refuse_evaluation(record.evaluation_id, session_id, given)
                else:
                    await self.log.write_reward(given)
                return
            except LogUnavailable as away:
                logger.warning("the evaluation of session %s waits: %s", session_id, away)
                await trio.sleep(AWAY_S)

    async def _given(self, record: EvaluationStatus, session_id: str) -> RewardEvent | str:
        """The reward that a session is given, or why it gets none. Raises LogAway if the log is away."""
        try:
            return await self._reward(record, session_id)
        except LogUnavailable:
            raise
        except Exception as error:
            # This is the isolation boundary: a bug in one session never stops the others, or the node.
            logger.exception("the evaluation of session %s met a bug", session_id)
            return f"a bug of the node, see its log: {type(error).__name__}: {error}"

    async def _reward(self, record: EvaluationStatus, session_id: str) -> RewardEvent | str:
        trajectory = await self.log.trajectory(session_id)
        if record.spec is None or trajectory is None:
            return UNKNOWN if trajectory is None else "the evaluation's row is damaged: send it again"
        given = RewardEvent(
            session_id=session_id,
            task_id=trajectory.task_id,
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            reward=None,
            first_reward=trajectory.reward,
            evaluation_id=record.evaluation_id,
            reason=record.spec.reason,
        )
        try:
            order = await self._order(record.spec, trajectory)
            spec = order.spec.evaluator
            digest = sha256(dump_json(plain(spec))).hexdigest()[:16]
            given = evolve(given, evaluator=order.evaluator.name, evaluator_digest=digest)
            result = await self._result(order, trajectory)
        except LogUnavailable:
            raise
        except PolarnodeError as error:
            result = Result(outcome=fault_outcome(error))
        return evolve(_with_result(given, result), given=self.now())

    async def _order(self, spec: EvaluationSpec, trajectory: Trajectory) -> SessionOrder:
        """Make the session's order again. Raises Refused or Unreadable where that is impossible."""
        task = await self.log.task(trajectory.task_id)
        if trajectory.damaged or task is None or task.damaged is not None:
            part = trajectory.damaged[0].part if trajectory.damaged else "task"
            raise Unreadable(f"the session is damaged in the log ({part}): what it did is not known whole")
        captured = task.spec.harness.name == CAPTURE_HARNESS
        harness = HarnessSpec(command=("true",)) if captured else task.spec.harness
        evaluator = spec.evaluator or task.spec.evaluator
        return SessionOrder(
            identity=Identity(
                session_id=trajectory.session_id,
                task_id=trajectory.task_id,
                group_id=trajectory.group_id,
                sample_index=trajectory.sample_index,
                harness=trajectory.harness,
                harness_version=trajectory.harness_version,
                model=trajectory.model,
                node=trajectory.node,
                attempt=trajectory.attempt,
            ),
            spec=evolve(task.spec, evaluator=evaluator),
            harness=harnesses.find(harness, allowed_imports=self.admission.allowed_imports),
            evaluator=self._evaluator(evaluator),
        )

    async def _result(self, order: SessionOrder, trajectory: Trajectory) -> Result:
        outcome, spec = _run_outcome(trajectory), order.spec.runtime
        tar = _kept(self.containers.folder, trajectory, spec)
        # What was kept of the session stays as it is.
        order = evolve(
            order, spec=evolve(order.spec, runtime=evolve(spec, artifacts=(), keep_workspace=False))
        )
        containers = Containers(order, self.containers)
        async with AsyncExitStack() as stack:
            runtime: PodmanRuntime | Gone = Gone(
                why=_gone_reason(trajectory, self.admission.identity.node), workdir=order.runtime.workdir
            )
            if tar is not None or order.fresh:
                await self.containers.ensure_image(order.runtime.image)
            if tar is not None:
                async with self.stages.init.slot(priority=LAST):
                    with trio.move_on_after(order.spec.budgets.init_s) as init:
                        runtime = opened = await open_with_retry(containers, stack)
                        await opened.restore_workdir(tar)
                if init.cancelled_caught:
                    raise RuntimeFault(f"its container was not ready after {order.spec.budgets.init_s:g} s")
            kept = KeptWork(
                folder=None if tar is None else order.runtime.workdir, patch=_kept_patch(trajectory)
            )
            async with self.stages.post.slot(priority=LAST):
                return await evaluated(containers, self.judge, runtime, outcome, trajectory.turns, kept=kept)

    async def _sweep(self) -> None:
        """Remove kept workspaces and snapshots whose sessions the log has pruned."""
        while True:
            try:
                for each in await trio.to_thread.run_sync(old_kept_files, self.containers.folder):
                    if await self.log.session(each.name.partition(".")[0]) is None:
                        if each.suffix == FROZEN:
                            await remove_image(each)
                        else:
                            await trio.Path(each).unlink(missing_ok=True)
                await self.copies.sweep(self.log)
            except (OSError, PolarnodeError) as error:
                logger.warning("kept files of sessions are looked through again in an hour: %s", error)
            await trio.sleep(SWEEP_S)


def old_kept_files(folder: Path) -> list[Path]:
    """The kept files that are old enough to be removed. A younger file may belong to a session whose rows are
    not on the journal's disk yet.
    """
    before = time.time() - SWEEP_S
    found = (path for kind in (WORKSPACE_SUFFIX, f"{SNAPSHOT_INFIX}*") for path in folder.glob(f"*{kind}"))
    return [each for each in found if each.stat().st_mtime < before]


def _with_result(given: RewardEvent, result: Result) -> RewardEvent:
    verdict, outcome = result.verdict, result.outcome
    if verdict is None:
        return evolve(given, error=outcome.reason or outcome.status, boundary=outcome.boundary)
    return evolve(
        given,
        reward=verdict.reward,
        metrics=verdict.metrics,
        lineage_rewards={str(lineage): reward for lineage, reward in verdict.lineage_rewards.items()},
        turn_rewards={str(turn): reward for turn, reward in verdict.turn_rewards.items()},
    )


def _run_outcome(trajectory: Trajectory) -> Outcome:
    """How the session's run ended. Raises Refused if it was cut off, because such a session has no reward."""
    outcome, ran = trajectory.outcome, trajectory.metrics.get("run_outcome")
    if ran is not None:
        return structure(ran, Outcome)
    if outcome.boundary == "evaluator":  # Older journals did not keep the run's own outcome.
        status: Status = (
            "timeout" if outcome.clock in SPENT else "failed" if outcome.exit_code else "completed"
        )
        return Outcome(status=status, clock=outcome.clock, exit_code=outcome.exit_code)
    if outcome.status not in ("completed", "failed", "timeout") or outcome.clock == "init":
        how = outcome.status if outcome.reason is None else f"{outcome.status} ({outcome.reason})"
        raise Refused(
            f"the session ended as {how} before it could be evaluated: what it left is not its work"
        )
    return outcome


def _kept(folder: Path, trajectory: Trajectory, spec: RuntimeSpec) -> Path | None:
    """The tar with the session's whole workdir: a kept workspace, or artifacts that contain it."""
    found = [("workspace", workspace_path)]
    if any(normpath(path) == WORKDIR for path in spec.artifacts):
        found.append(("artifacts", artifacts_path))
    for name, path in found:
        tar = path(folder, trajectory.session_id)
        if is_kept_whole(trajectory.metrics.get(name)) and tar.is_file():
            return tar
    return None


def _gone_reason(trajectory: Trajectory, here: str) -> str:
    kept = trajectory.metrics.get("workspace")
    if is_kept_whole(kept) and trajectory.node != here:
        return (
            f"the session's workspace is on the disk of node {trajectory.node}, and this evaluator works in"
            " it: send the evaluation to that node"
        )
    how = "" if kept is None else f" whole ({dump_json(kept).decode()[:500]})"
    return (
        f"the session's workspace was not kept{how}, and this evaluator works in it: set"
        " runtime.keep_workspace in tasks that are to be evaluated again"
    )


def _kept_patch(trajectory: Trajectory) -> bytes | None:
    """The agent's patch, if the metrics of its first evaluation show all of it."""
    evaluation = trajectory.metrics.get("evaluation")
    shown = evaluation.get("patch") if isinstance(evaluation, dict) else None
    text = shown.get("text") if isinstance(shown, dict) else None
    whole = isinstance(text, str) and isinstance(shown, dict) and len(text.encode()) == shown.get("bytes")
    return text.encode() if isinstance(text, str) and whole else None
