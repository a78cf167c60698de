"""How an attempt goes on where the machine lost the one before it: from its last snapshot, with its turns.

The turns before the snapshot become this session's own: they are trained here, because a lost session holds
no place in its group and no reader gets it as one. So every token is trained once, and of what was sampled
only the turns after the snapshot are sampled again. Which state an attempt goes on from follows from the
journal and the files alone, so a node that is killed meanwhile finds the same one.

Invariant: an attempt that cannot go on begins from the start, as without snapshots, and costs no retry.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio
from attrs import evolve, frozen

from polarnode.core.errors import ForkError, JournalError
from polarnode.core.task import ForkSpec
from polarnode.core.trajectory import ContinuedFrom, Outcome
from polarnode.gateway.live_sessions import LiveSession
from polarnode.groups.group import lost_to_the_machine
from polarnode.journal.forks import EarlierAttempt
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.resuming import Resumption, State, find_state
from polarnode.rollouts.services import NodeServices, SessionOrder
from polarnode.rollouts.snapshots import list_snapshots, share

logger = logging.getLogger(__name__)

# seconds to look for a state: a journal that waits for room on its disk holds no session up
LOOKING_S: Final = 30.0


@frozen(kw_only=True)
class Continuation:
    """A state that an attempt goes on from. `identity`: its own, which names it."""

    state: State
    identity: Identity

    async def begin(self, services: NodeServices, live: LiveSession) -> Resumption:
        """Give the session the turns and the snapshot. Its identity is in the journal already."""
        fork, snapshot = self.identity.forked_from, self.state.snapshot
        found = self.state.begin(services, live, inherited=0 if fork is None else fork.got)
        if snapshot.session_id != self.identity.session_id:
            make_own = partial(share, services.log_dir, snapshot, self.identity.session_id)
            try:
                found = evolve(found, snapshot=await trio.to_thread.run_sync(make_own))
            except OSError as error:
                logger.warning("session %s has no snapshot of its beginning: %s", live.session_id, error)
                return found
            services.copies.put(self.identity.session_id, snapshot.turn)
        return found


async def find_continuation(order: SessionOrder, services: NodeServices) -> Continuation | None:
    """Where an attempt goes on; None where it begins from the start. What prevents it is logged."""
    spec, able = order.spec.snapshot_at, order.harness.resume is not None
    if not (order.identity.attempt and able and spec.wanted and spec.resume_lost):
        return None
    session_id = order.identity.session_id
    earlier: Sequence[EarlierAttempt] | None = None
    try:
        with trio.move_on_after(LOOKING_S):
            earlier = await services.earlier_attempts(order.identity)
    except JournalError as error:
        logger.warning("session %s: %s", session_id, error)
    found = None if earlier is None else await _looked(order, services, earlier)
    if found is None:
        logger.info("session %s begins from the start: there is no state to go on with", session_id)
        return None
    whose = found.identity.continued_from
    if whose is not None:
        logger.info("session %s goes on with turn %d of %s", session_id, whose.turn, whose.session_id)
    return found


async def _looked(
    order: SessionOrder, services: NodeServices, earlier: Sequence[EarlierAttempt]
) -> Continuation | None:
    """The last state on the way to a place's last attempt."""
    for attempt in earlier:
        lost = attempt.outcome  # None: with its node, which had its place until it was silent
        if lost is not None and not lost_to_the_machine(lost):
            return None
        went_on = attempt.identity.continued_from is not None
        if went_on and not attempt.got_on and lost is not None and lost.status == "error":
            return None  # that state may be what ended it
        found = await _continued(order, services, attempt)
        if found is not None or (attempt.got_on and not went_on):
            return found  # it began from the start: what came before it is another way
    return None


async def _continued(
    order: SessionOrder, services: NodeServices, attempt: EarlierAttempt
) -> Continuation | None:
    """The last state of an attempt from which a harness can be resumed."""
    name, fork = attempt.identity.session_id, attempt.identity.forked_from
    await services.copies.fetch(name)
    kept = await trio.to_thread.run_sync(list_snapshots, services.log_dir, name)
    # a fork whose parent's answers were still being given again has no state of its own
    turns = [each.turn for each in kept.snapshots if fork is None or each.turn >= fork.got]
    for turn in reversed(turns):
        try:
            state = await find_state(order, services, ForkSpec(session=name, turn=turn))
        except ForkError as error:
            logger.warning("session %s does not go on: %s", order.identity.session_id, error)
            continue
        went_on = ContinuedFrom(session_id=name, turn=turn, run_s=state.snapshot.run_s)
        return Continuation(
            state=state, identity=evolve(order.identity, continued_from=went_on, forked_from=fork)
        )
    return None


def went_wrong(identity: Identity, live: LiveSession, outcome: Outcome) -> bool:
    """Whether a session ended that could not be continued: another attempt begins from the start."""
    if identity.continued_from is None or live.resumed is None or live.resumed.begun:
        return False
    refused = outcome.status == "error" and outcome.boundary == ForkError.boundary
    return refused or lost_to_the_machine(outcome)
