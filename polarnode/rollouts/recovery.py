"""Recovery: a node that starts settles the places that its earlier runs held.

Each session of an earlier run is published as a trajectory of the turns that its journal has, and another
attempt begins if retries are left. Each place is settled by one call of the log, so a node that is killed
meanwhile finds the rest at its next start.
"""

from collections.abc import Callable
from functools import partial

from attrs import evolve

from polarnode.core.errors import Refused
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.groups.group import EARLY_STOP_REASON, lost_to_the_machine, stamp_staleness
from polarnode.journal import queries
from polarnode.journal.journal import Journal
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import Claim, NodeFacts
from polarnode.journal.reader import JournalReader
from polarnode.journal.values import UnfinishedSession
from polarnode.merge.token_extras import unscored
from polarnode.merge.trajectory import Result, assemble
from polarnode.rollouts.lifecycle import has_retries_left
from polarnode.rollouts.scheduler import Scheduler

Report = Callable[[str], None]


async def recover(journal: Journal, scheduler: Scheduler, facts: NodeFacts, report: Report) -> None:
    """Join the log, and settle the places that earlier runs of this node held. Each session is published as a
    trajectory of the turns that were captured, and another attempt begins if retries are left.

    If the journal is damaged, nothing is settled, because what it lacks would be lost for good.
    """
    if journal.health.damage is not None:
        report(f"{journal.health.damage}; sessions of an earlier run stay as they are until then")
        return
    results, claims = scheduler.registry.results, scheduler.claims
    imports = scheduler.admission.allowed_imports
    inherited = {claim.session_id: claim for claim in await claims.membership.join(facts)}
    claims.settling.update(inherited)
    over = await results.restore(inherited)
    left = await journal.reader.query(queries.unfinished_sessions)
    unfinished = {session.identity.session_id: session for session in left}
    again = 0
    for session_id in over:
        unfinished.pop(session_id, None)
        claim = inherited.pop(session_id, None)
        if claim is not None and results.claim_of(session_id) is not None:
            results.hold(claim)  # Its result is on its way, and this incarnation now holds its place.
        elif claim is not None:
            await retry_until_answered(partial(scheduler.log.put_back, claim, counts=False))
    for claim in inherited.values():
        session = unfinished.pop(claim.session_id, None) or _without_turns(claim, scheduler)
        if scheduler.log.shared:  # A shared log has the task.
            session = evolve(session, spec=claim.spec)
        again += await _recovered(journal.reader, scheduler, claim, session)
    claims.settling.clear()
    # Another session has the place of each of these, so what it left is an attempt. Sessions that had not
    # begun wait in the log's queue.
    for session in (each for each in unfinished.values() if each.began):
        if scheduler.log.shared:
            task = await retry_until_answered(partial(scheduler.log.task, session.identity.task_id))
            session = evolve(session, spec=None if task is None else task.spec)
        results.publish(await journal.reader.run_in_thread(partial(_trajectory, session, imports)))
    await results.delivered()
    if inherited:
        report(
            f"{len(inherited)} sessions of an earlier run were interrupted; their turns are kept, and"
            f" {again} of them are tried again"
        )


async def _recovered(
    reader: JournalReader, scheduler: Scheduler, claim: Claim, session: UnfinishedSession
) -> bool:
    """Settle one place. Returns True if another attempt was started. The traces are built in a thread,
    because attempts that were started earlier are already running.
    """
    registry, admission = scheduler.registry, scheduler.admission
    registry.results.hold(claim)
    lost = await reader.run_in_thread(partial(_trajectory, session, admission.allowed_imports))
    # The log is asked this late because siblings end meanwhile.
    incarnation = scheduler.claims.membership.incarnation
    stopped = await retry_until_answered(partial(scheduler.log.sessions_to_stop, incarnation))
    ending = stopped.get(claim.session_id, claim.ending)
    if ending == "early stop" and lost.outcome.status == "interrupted":
        lost = evolve(
            lost,
            outcome=Outcome(status="cancelled", reason=f"{EARLY_STOP_REASON}, and {lost.outcome.reason}"),
        )
    may_retry = ending is None and has_retries_left(claim.retries, claim.spec.budgets)
    if session.spec is not None and lost_to_the_machine(lost.outcome) and may_retry:
        try:
            registry.require_not_stopping("tasks")
            admission.admit(claim.spec)
        except Refused as refused:
            reason = f"{lost.outcome.reason}; it cannot be tried again here: {refused}"
            lost = evolve(lost, outcome=evolve(lost.outcome, reason=reason))
        else:
            return await scheduler.replace(lost, counts=True)
    adapter = "" if session.spec is None else session.spec.adapter
    registry.publish(stamp_staleness(lost, registry.served_versions(adapter)))
    return False


def _without_turns(claim: Claim, scheduler: Scheduler) -> UnfinishedSession:
    """A session without turns, for a claim of which this node's journal has nothing. The journal is then not
    the one with which the claim was made.
    """
    identity = scheduler.admission.identity.session_identity(claim)
    return UnfinishedSession(
        identity=identity, spec=claim.spec, turns=(), cancelled=claim.ending == "cancelled"
    )


def _trajectory(session: UnfinishedSession, allowed_imports: tuple[str, ...]) -> Trajectory:
    # A capture is built like any other session.
    spec = session.spec or TaskSpec(instruction="", harness=HarnessSpec(name=session.identity.harness))
    reason = f"the node ended while the session ran; {len(session.turns)} turns were captured"
    outcome = Outcome(status="interrupted", boundary="node", reason=reason)
    if session.cancelled:
        outcome = Outcome(status="cancelled", reason=f"cancelled, and {reason}")
    found = assemble(
        session.identity,
        spec,
        session.turns,
        Result(outcome=outcome),
        allowed_imports=allowed_imports,
        damaged=session.damaged,
    )
    # It is not scored now, because the node is starting and may have hundreds of such sessions.
    why = "the node ended before its teacher had scored it; POST /v1/score takes its rows"
    return unscored(found, why) if spec.carry.teacher else found
