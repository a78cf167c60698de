"""Recovery: sessions that ran when an earlier run of this node ended get a trajectory.

Invariant: the journal alone decides what was left, and each session is settled in one entry, so that a node
that is killed while it recovers goes on where it was.
"""

from collections.abc import Callable
from functools import partial

from attrs import evolve

from polarnode.core.errors import Refused
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.groups.group import EARLY_STOP, lost_to_the_machine
from polarnode.journal.journal import Journal
from polarnode.journal.values import UnfinishedSession
from polarnode.merge.trajectory import Result, assemble
from polarnode.rollouts.lifecycle import retries_left
from polarnode.rollouts.scheduler import Scheduler

Report = Callable[[str], None]


async def recover(journal: Journal, scheduler: Scheduler, report: Report) -> None:
    """Each session that ran becomes a trajectory of what was captured, and where retries are left another
    attempt begins.

    Not in a group that has enough: the node died before it had ended them all.
    """
    unfinished = await journal.unfinished()
    for task_id, spec in {
        each.identity.task_id: each.spec for each in unfinished if each.spec is not None
    }.items():
        scheduler.registry.groups.begin(task_id, spec, await journal.places_over(task_id))
    again = sum([await _recovered(journal, scheduler, session) for session in unfinished])
    await journal.flushed()
    if unfinished:
        report(
            f"{len(unfinished)} sessions of an earlier life were interrupted; their turns are kept, and"
            f" {again} of them are tried again"
        )


async def _recovered(journal: Journal, scheduler: Scheduler, session: UnfinishedSession) -> bool:
    """Whether another attempt began. Its traces are built in a thread, because attempts begun before it run
    already.
    """
    lost = await journal.read(partial(_trajectory, session, scheduler.services.allowed_imports))
    # read only now, because siblings end meanwhile
    if lost.outcome.status == "interrupted" and scheduler.registry.groups.has_enough(
        session.identity.task_id
    ):
        lost = evolve(
            lost, outcome=Outcome(status="cancelled", reason=f"{EARLY_STOP}, and {lost.outcome.reason}")
        )
    if (
        session.spec is not None
        and lost_to_the_machine(lost.outcome)
        and retries_left(session.identity, session.spec.budgets)
    ):
        try:
            order = scheduler.order_of(session.spec, session.identity)
        except Refused as refused:
            lost = evolve(
                lost,
                outcome=evolve(
                    lost.outcome, reason=f"{lost.outcome.reason}; it cannot be tried again here: {refused}"
                ),
            )
        else:
            scheduler.replace(lost, order)
            return True
    scheduler.recovered(lost)
    return False


def _trajectory(session: UnfinishedSession, allowed_imports: tuple[str, ...]) -> Trajectory:
    return assemble(
        session.identity,
        _spec(session),
        session.turns,
        Result(outcome=_outcome(session)),
        allowed_imports=allowed_imports,
    )


def _spec(session: UnfinishedSession) -> TaskSpec:
    """The task of an interrupted session; a capture has none, and is built as any other."""
    return session.spec or TaskSpec(instruction="", harness=HarnessSpec(name=session.identity.harness))


def _outcome(session: UnfinishedSession) -> Outcome:
    reason = f"the node ended while the session ran; {len(session.turns)} turns were captured"
    if session.cancelled:
        return Outcome(status="cancelled", reason=f"cancelled, and {reason}")
    return Outcome(status="interrupted", boundary="node", reason=reason)
