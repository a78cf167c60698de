"""How a session begins as a fork by resume: from a snapshot of its parent, with the harness's own verb.

A task is refused when it is submitted if no session of it could begin so, and each session looks again when
it begins, because a snapshot or an image may be gone by then. What a harness then asks first is compared with
the snapshot in `gateway/resumed_session.py`.
"""

import trio
from attrs import evolve, frozen

from polarnode import harnesses
from polarnode.core.errors import ForkError, Refused, RuntimeFault
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.snapshots import Snapshot
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.live_sessions import LiveSession
from polarnode.gateway.resumed_session import ResumedSession
from polarnode.harnesses.harness import Harness
from polarnode.merge.attach import References
from polarnode.providers.volatile import RESUME_MARKER
from polarnode.rollouts.forks import begin_resumed, check_fork
from polarnode.rollouts.services import NodeServices, SessionOrder, runtime_of
from polarnode.rollouts.snapshots import check_image, read_snapshot


@frozen(kw_only=True)
class Resumption:
    """How a fork's container and harness begin. `answered`: whether the harness was ever answered; before
    that some keep no conversation, and there is nothing to go on with but the instruction.
    """

    snapshot: Snapshot
    harness: Harness
    answered: bool

    def launch(self, order: HarnessOrder) -> Launch:
        """How to start the harness. Its instruction is the marker, which is taken out again."""
        if self.harness.resume is None or not self.answered:
            return self.harness.launch(order)
        return self.harness.resume(evolve(order, instruction=RESUME_MARKER))


@frozen(kw_only=True)
class State:
    """A state that a session can be resumed from: a snapshot, and the turns before it."""

    order: SessionOrder
    snapshot: Snapshot
    turns: tuple[Turn, ...]

    def begin(self, services: NodeServices, live: LiveSession, *, inherited: int) -> Resumption:
        """Give a session these turns, those below `inherited` as another session's, and say what its harness
        must ask first.
        """
        snapshot, order = self.snapshot, self.order
        signed = References(snapshot.references.session_id, bytes.fromhex(snapshot.references.secret))
        drops = services.drops_thinking if order.spec.thinking == "template" else None
        begin_resumed(live, self.turns, signed, drops, inherited)
        live.resumed = ResumedSession(
            parent=snapshot.session_id,
            turn=snapshot.turn,
            before_key=snapshot.before_key,
            conversation=snapshot.conversation,
        )
        answered = any(turn.role == "main" and turn.state == "complete" for turn in self.turns)
        return Resumption(snapshot=snapshot, harness=order.harness, answered=answered)


def check_resumes(spec: TaskSpec, harness: Harness) -> None:
    """Raise Refused, with the field's path, where no session of a task could be resumed."""
    if harness.resume is None:
        able = ", ".join(sorted(each.name for each in harnesses.HARNESSES.values() if each.resume))
        raise Refused(
            f"{harness.name} cannot go on with a conversation: fork it with by=replay, or use one of {able}",
            path="$.fork.by",
        )
    servers = [name for name, each in spec.harness.mcp_servers.items() if each.command is not None]
    if servers:
        raise Refused(
            f"MCP servers in the container have a memory that no copy has ({', '.join(servers)}): fork with"
            " by=replay",
            path="$.harness.mcp_servers",
        )


async def find_snapshot(services: NodeServices, spec: TaskSpec, fork: ForkSpec, harness: Harness) -> Snapshot:
    """The snapshot that a task's sessions are resumed from. Raises Refused, with the field's path, where no
    harness could go on from it.
    """
    check_resumes(spec, harness)
    try:
        snapshot = await trio.to_thread.run_sync(read_snapshot, services.log_dir, fork.session, fork.turn)
        await check_image(services, runtime_of(spec, harness), snapshot)
    except (ForkError, RuntimeFault) as error:
        raise Refused(str(error), path="$.fork.turn") from error
    if snapshot.obstacles:
        raise Refused(
            f"session {fork.session} cannot be resumed at turn {fork.turn}: {'; '.join(snapshot.obstacles)}",
            path="$.fork.turn",
        )
    return snapshot


async def find_state(order: SessionOrder, services: NodeServices, fork: ForkSpec) -> State:
    """The state that a session is resumed from. Raises ForkError where it is there no more, or never was."""
    try:
        parent = check_fork(order.spec, fork, await services.fork_parent(fork))
        snapshot = await find_snapshot(services, order.spec, fork, order.harness)
    except Refused as refused:
        raise ForkError(str(refused)) from refused
    return State(order=order, snapshot=snapshot, turns=parent.turns)


async def begin_resume(
    order: SessionOrder, services: NodeServices, live: LiveSession, fork: ForkSpec
) -> Resumption:
    """Give a fork its parent's turns, and say what its harness must ask first. Raises ForkError where the
    parent cannot be gone on from any more.
    """
    found = await find_state(order, services, fork)
    return found.begin(services, live, inherited=max((turn.index + 1 for turn in found.turns), default=0))
