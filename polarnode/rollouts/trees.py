"""How the forks of a tree begin: each waits until the session in its root's place is over, and takes its
state from it.

A fork of a tree is a session as any other from the start: it is cancelled, ended with its group, and begun
again after a restart as those that wait for a slot. It has no state of its own to lose while it waits: which
state it takes follows from the root's turns alone, so that one that is tried again takes the same.
"""

from typing import Literal

import trio
from attrs import evolve

from polarnode.core.codec.limits import COUNT
from polarnode.core.errors import Refused
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import Outcome
from polarnode.groups.fork_policy import ForkPlace, fork_turns
from polarnode.groups.group import NOT_FORKED, Facts, member_of
from polarnode.harnesses.harness import Harness
from polarnode.merge.trajectory import asked_fork
from polarnode.rollouts.resuming import check_resumes
from polarnode.rollouts.services import NodeServices, SessionOrder
from polarnode.rollouts.snapshots import list_snapshots


def tree_way(spec: TaskSpec, harness: Harness) -> Literal["resume", "replay"]:
    """How the forks of a task with `group.fork` begin, which its spec alone decides. Raises Refused where
    they are to be resumed, and cannot.
    """
    policy = spec.group.fork
    asked = None if policy is None else policy.by
    try:
        check_resumes(spec, harness)
        if not spec.snapshot_at.wanted:
            raise Refused("forks are resumed from snapshots: set snapshot_at, or fork with by=replay")
    except Refused as refused:
        if asked == "resume":
            raise Refused(str(refused), path="$.group.fork.by") from refused
        return "replay"
    return asked or "resume"


async def with_state(
    order: SessionOrder, services: NodeServices, place: ForkPlace, root: Facts | None
) -> SessionOrder | Outcome:
    """The order of a fork of a tree with the state that it begins in, or its outcome where there is none.
    `root`: the facts of the session that held the root's place, None where its end could not be written.
    Raises ForkElsewhere where the state is at another node.
    """
    found = await _state(order, services, place, root)
    if isinstance(found, str):
        return Outcome(status="cancelled", reason=f"{NOT_FORKED}: {found}")
    spec = evolve(order.spec, fork=found)
    return evolve(order, spec=spec, identity=evolve(order.identity, forked_from=asked_fork(spec)))


async def _state(
    order: SessionOrder, services: NodeServices, place: ForkPlace, root: Facts | None
) -> ForkSpec | str:
    """The state, or why there is none."""
    if root is None:
        return f"the end of its root, place {place.root}, could not be written"
    member = member_of(order.spec.group, root)
    if not member.usable:
        return f"its root, session {root.session_id}, is not usable ({member.why})"
    by = tree_way(order.spec, order.harness)
    whole = ForkSpec(session=root.session_id, turn=COUNT, by=by)
    await services.insist_here(whole)
    parent = await services.fork_parent(whole)
    if parent is None:
        return f"its root, session {root.session_id}, is not in the log"
    among = None
    if by == "resume":
        listed = await trio.to_thread.run_sync(list_snapshots, services.log_dir, root.session_id)
        among = {each.turn for each in listed.snapshots if each.resumable}
    turns = fork_turns(place.policy, parent.turns, among)
    if not turns:
        where = "a snapshot to resume from" if by == "resume" else "one of its main agent"
        return f"its root, session {root.session_id}, has no turn of group.fork.at with {where}"
    return ForkSpec(session=root.session_id, turn=turns[place.number], by=by)
