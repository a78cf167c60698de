"""How a session begins as a fork by resume, from a snapshot of its parent with the harness's own verb; or by
freeze, with the processes that the snapshot has.

A task is refused when it is submitted if no session of it could begin so, and each session looks again when
it begins, because a snapshot or an image may be gone by then. What a harness then asks first is compared with
the snapshot in `gateway/resumed_session.py`.
"""

import trio
from attrs import evolve, frozen

from polarnode import harnesses
from polarnode.containers.frozen import check_machine
from polarnode.core.errors import ForkError, Refused, RuntimeFault
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.snapshots import FrozenImage, Snapshot
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.live_sessions import LiveSession
from polarnode.gateway.resumed_session import ResumedSession
from polarnode.harnesses.harness import Harness
from polarnode.journal.forks import ForkParent
from polarnode.merge.attach import References
from polarnode.providers.volatile import RESUME_MARKER
from polarnode.rollouts.forks import begin_resumed, check_fork
from polarnode.rollouts.services import NodeServices, SessionOrder, runtime_of
from polarnode.rollouts.snapshots import check_image, read_snapshot


@frozen(kw_only=True)
class Resumption:
    """How a fork's container and harness begin. `answered`: whether the harness was ever answered; before
    that some keep no conversation, and there is nothing to go on with but the instruction. `frozen`: the
    harness is a copy, and is not started.
    """

    snapshot: Snapshot
    harness: Harness
    answered: bool
    frozen: FrozenImage | None = None

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
    frozen: FrozenImage | None = None  # of a harness that is not resumed, but a copy

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
            how="resuming" if self.frozen is None else "freezing",
        )
        live.parent_key = None if self.frozen is None else self.frozen.key
        answered = any(turn.role == "main" and turn.state == "complete" for turn in self.turns)
        return Resumption(snapshot=snapshot, harness=order.harness, answered=answered, frozen=self.frozen)


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
    await services.copies.fetch(fork.session)
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


async def find_frozen(services: NodeServices, spec: TaskSpec, fork: ForkSpec, parent: ForkParent) -> Snapshot:
    """The snapshot whose processes a task's sessions go on from. Raises Refused, with the field's path, where
    none could.
    """
    check_freezing(services, "$.fork.by")
    if parent.spec is not None and parent.spec.runtime != spec.runtime:
        raise Refused(
            f"runtime must be that of fork.session {fork.session!r} with by=freeze: its processes go on in"
            " such a container",
            path="$.runtime",
        )
    try:
        snapshot = await trio.to_thread.run_sync(read_snapshot, services.log_dir, fork.session, fork.turn)
        why = await _not_frozen(services, snapshot)
    except ForkError as error:
        raise Refused(str(error), path="$.fork.turn") from error
    if why is not None:
        raise Refused(
            f"session {fork.session} cannot be forked by freezing at turn {fork.turn}: {why}",
            path="$.fork.turn",
        )
    return snapshot


async def _not_frozen(services: NodeServices, snapshot: Snapshot) -> str | None:
    """Why no copy can be made of a snapshot's processes. Raises ForkError where they are of another
    kernel.
    """
    if snapshot.frozen is None:
        return snapshot.not_frozen or "its task did not ask for snapshot_at.freeze"
    check_machine(snapshot.frozen)
    if not await services.runtimes.has_image(snapshot.frozen.image_id):
        return f"the image of its container is gone ({snapshot.frozen.image_id[:19]})"
    return None


def check_freezing(services: NodeServices, path: str) -> None:
    """Raise Refused, at the field's path, where this machine cannot freeze sessions."""
    obstacle = services.runtimes.freezing_obstacle
    if obstacle is not None:
        raise Refused(f"this node cannot freeze sessions: {obstacle}", path=path)


async def find_state(order: SessionOrder, services: NodeServices, fork: ForkSpec) -> State:
    """The state that a session is resumed from. Raises ForkError where it is there no more, or never was."""
    by_freeze = fork.by == "freeze"
    try:
        parent = check_fork(order.spec, fork, await services.fork_parent(fork))
        if by_freeze:
            snapshot = await find_frozen(services, order.spec, fork, parent)
        else:
            snapshot = await find_snapshot(services, order.spec, fork, order.harness)
    except Refused as refused:
        raise ForkError(str(refused)) from refused
    frozen = snapshot.frozen if by_freeze else None
    return State(order=order, snapshot=snapshot, turns=parent.turns, frozen=frozen)


async def begin_resume(
    order: SessionOrder, services: NodeServices, live: LiveSession, fork: ForkSpec
) -> Resumption:
    """Give a fork its parent's turns, and say what its harness must ask first. Raises ForkError where the
    parent cannot be gone on from any more.
    """
    found = await find_state(order, services, fork)
    return found.begin(services, live, inherited=max((turn.index + 1 for turn in found.turns), default=0))
