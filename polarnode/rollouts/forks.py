"""How a session begins with the turns of another one: as a fork of it, or as the attempt after it.

A fork by replay gets its parent's recorded answers again. A fork by resume begins with a snapshot of its
parent, from which the harness goes on with its own verb, and a fork by freeze with the processes in the
snapshot. In a tree of forks each fork waits until the session in its root's place is over. An attempt whose
predecessor was lost with its machine goes on from that attempt's last snapshot.

A task is checked against its parent when it is submitted, and each of its sessions checks again when it
begins, with the same sentences: meanwhile the parent may have been pruned, a snapshot or an image may be
gone, or another node may run the task. What a harness then asks first is compared with the snapshot in
`gateway/fork_inheritance.py`. What a session has inherited at its end is in its identity, which the journal
has from its beginning.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

import trio
from attrs import evolve, field, frozen

from polarnode import harnesses
from polarnode.containers.frozen import check_machine
from polarnode.containers.runtimes import AbsentRuntimes, NodeRuntimes
from polarnode.core.codec.limits import COUNT
from polarnode.core.errors import ForkError, JournalError, PolarnodeError, Refused, RuntimeFault
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.snapshots import FrozenImage, Snapshot
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import ContinuedFrom, Outcome, Turn
from polarnode.gateway.fork_inheritance import ResumedSession
from polarnode.gateway.live_sessions import LiveSession
from polarnode.groups.fork_policy import ForkPlace, fork_turns
from polarnode.groups.group import NOT_FORKED_REASON, SessionFacts, lost_to_the_machine, make_member
from polarnode.harnesses.harness import Harness
from polarnode.journal.forks import EarlierAttempt, ForkParent, fork_parent
from polarnode.journal.log.port import Log, LogUnavailable
from polarnode.journal.reader import JournalReader
from polarnode.journal.writer import JournalWriter
from polarnode.merge.attach import References
from polarnode.merge.lineage import DropsThinking, Lineages
from polarnode.merge.trajectory import Identity, requested_fork
from polarnode.providers.volatile import RESUME_MARKER
from polarnode.rollouts.services import SessionOrder, runtime_of
from polarnode.rollouts.snapshots import (
    NoCopies,
    NodeSnapshots,
    SnapshotCopies,
    check_image,
    list_snapshots,
    read_snapshot,
    share,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# ── at which node a fork begins ─────────────────────────────────────────────

# The turns of a session that is over are in the log, so a fork by replay begins at any node. The turns of one
# that still runs, and every snapshot, are on the disk of the session's own node, and a fork that needs them
# begins there. Another node that has its place gives it back, as long as that node is alive.

AWAY_S: Final = 1.0  # seconds before the log is asked again


class ForkElsewhere(PolarnodeError):
    """A fork needs something that is at another node, and that node is alive."""

    boundary = "node"


class ForkParents(Protocol):
    """Where sessions find the parents of forks, and the attempts before them."""

    async def parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session from which a fork goes on."""

    async def earlier_attempts(self, place: Identity) -> Sequence[EarlierAttempt]:
        """The sessions that had a session's place before it."""

    async def require_here(self, fork: ForkSpec) -> None:
        """Raise ForkElsewhere for a fork that must begin at another node."""


class NoParents:
    """For a node whose log has no session that another could go on from."""

    async def parent(self, fork: ForkSpec) -> ForkParent | None:
        await trio.lowlevel.checkpoint()
        return None

    async def earlier_attempts(self, place: Identity) -> Sequence[EarlierAttempt]:
        await trio.lowlevel.checkpoint()
        return ()

    async def require_here(self, fork: ForkSpec) -> None:
        await trio.lowlevel.checkpoint()


@frozen(kw_only=True)
class ForkNodes:
    """What the log and this node know of the parents of forks: the `ForkParents` of a node. A `patient` one
    waits while the log is away. Sessions use such a one, because the log's absence must not end a session.
    """

    log: Log
    journal_writer: JournalWriter
    journal_reader: JournalReader
    node: str
    snapshots: Path  # the folder of this node's snapshots
    copies: SnapshotCopies = field(factory=NoCopies)  # the snapshots that other nodes left
    patient: bool = True

    async def parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session from which a fork goes on, with what is known of it here."""
        found = await self._asked(lambda: self.log.fork_parent(fork))
        if found is None or found.count:
            return found
        # It runs here, or its end is on its way to the log.
        await self.journal_writer.flush()
        own = await self.journal_reader.query(fork_parent, fork.session, fork.turn)
        if own is not None:
            return evolve(own, spec=found.spec)
        turns = await self.copies.turns(fork)
        return found if turns is None else evolve(found, turns=turns, count=len(turns))

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        """The sessions that had a session's place before it."""
        return await self._asked(lambda: self.log.earlier_attempts(place))

    async def elsewhere(self, fork: ForkSpec) -> str | None:
        """The other node where a fork must begin; None if it may begin here."""
        if not self.log.shared:
            return None
        session = await self._asked(lambda: self.log.session(fork.session))
        if session is None or (fork.by == "replay" and session.outcome is not None):
            return None
        row = await self._asked(lambda: self.log.node_of(fork.session))
        if row is None or row.facts.name == self.node or await self._has_snapshot(fork):
            return None
        alive = {each.facts.name for each in await self._asked(self.log.nodes)}
        return row.facts.name if row.facts.name in alive else None

    async def _has_snapshot(self, fork: ForkSpec) -> bool:
        if fork.by == "replay":
            return False
        if fork.by == "resume":
            await self.copies.fetch(fork.session)
        listed = await trio.to_thread.run_sync(list_snapshots, self.snapshots, fork.session)
        return bool(listed.snapshots)

    async def require_here(self, fork: ForkSpec) -> None:
        """Raise ForkElsewhere for a fork that must begin at another node."""
        node = await self.elsewhere(fork)
        if node is not None:
            raise ForkElsewhere(f"it begins at node {node}, which has session {fork.session}")

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except LogUnavailable:
                if not self.patient:
                    raise
                await trio.sleep(AWAY_S)


# ── the parent, and forks by replay ─────────────────────────────────────────


def check_fork(spec: TaskSpec, fork: ForkSpec, parent: ForkParent | None) -> ForkParent:
    """The parent of a task's forks. Raises Refused, with the field's path, if they cannot go on from it."""
    whose = f"fork.session {fork.session!r}"
    if parent is None:
        raise Refused(f"{whose} is not in the log: it is unknown here, or was pruned", path="$.fork.session")
    if parent.spec is None or not parent.spec.instruction:
        raise Refused(
            f"{whose} has no task that it can be forked by: it is a capture, or its task's row is damaged",
            path="$.fork.session",
        )
    if parent.spec.harness != spec.harness:
        raise Refused(
            f"harness must be that of {whose}, with the same settings: copy it from the parent's task",
            path="$.harness",
        )
    if parent.spec.instruction != spec.instruction:
        raise Refused(
            f"instruction must be that of {whose}, word for word: copy it from the parent's task",
            path="$.instruction",
        )
    # The state before a turn that was never recorded has a snapshot, but no answer to give again.
    if fork.turn >= parent.count + (fork.by != "replay"):
        there = f"0 to {parent.count - 1}" if parent.count else "none yet"
        raise Refused(
            f"fork.turn is {fork.turn}, and the turns of session {fork.session!r} are {there}",
            path="$.fork.turn",
        )
    if parent.damaged:
        first = parent.damaged[0]
        raise Refused(
            f"{first.part} of session {fork.session!r} is damaged ({first.reason}): fork it before that turn",
            path="$.fork.turn",
        )
    return parent


def begin_replay(
    live: LiveSession, spec: TaskSpec, parent: ForkParent | None, on_end: Callable[[int, str | None], None]
) -> None:
    """Give a session that begins the answers of its parent. Raises ForkError if the session cannot go on from
    the parent any more. `ForkInheritance.replay` calls `on_end`.
    """
    if spec.fork is None:
        return
    try:
        found = check_fork(spec, spec.fork, parent)
    except Refused as refused:
        raise ForkError(str(refused)) from refused
    compared = found.turns if found.next is None else (*found.turns, found.next)
    live.inherited.replay(compared, spec.fork.turn, live.lineages.references, on_end)


def begin_with_parent(
    live: LiveSession,
    turns: Sequence[Turn],
    references: References,
    drops_thinking: DropsThinking | None,
    inherited: int,
) -> None:
    """Give a session its parent's turns, and the references that the parent's harness has in its history.
    Turns with an index below `inherited` are trained in another session.
    """
    own = [evolve(turn, session_id=live.session_id) for turn in turns]
    lineages = Lineages.restore(
        session_id=live.session_id,
        secret=b"",  # Every reference is the parent's.
        turns=own,
        drops_thinking=drops_thinking,
        references=references,
    )
    for turn in own:  # Turns that the parent inherited by replay have references of another session.
        for call in () if turn.answer is None else turn.answer.calls:
            lineages.references.adopt(turn.index, call.id)
    live.begin_with(own, lineages, inherited=inherited)


# ── forks by resume and by freeze ───────────────────────────────────────────


@frozen(kw_only=True)
class Resumption:
    """How a fork's container and harness begin. `answered` says whether the harness was ever answered. Before
    that some harnesses keep no conversation, and can only begin with the instruction. `frozen` is set if the
    harness is a copy, which is not started.
    """

    snapshot: Snapshot
    harness: Harness
    answered: bool
    frozen: FrozenImage | None = None

    def launch(self, order: HarnessOrder) -> Launch:
        """How to start the harness. Its instruction is the resume marker, which the gateway takes out
        again.
        """
        if self.harness.resume is None or not self.answered:
            return self.harness.launch(order)
        return self.harness.resume(evolve(order, instruction=RESUME_MARKER))


@frozen(kw_only=True)
class State:
    """A state that a session can be resumed from: a snapshot, and the turns before it."""

    order: SessionOrder
    snapshot: Snapshot
    turns: tuple[Turn, ...]
    frozen: FrozenImage | None = None  # set for a harness that is a copy and is not resumed

    def begin(self, live: LiveSession, drops_thinking: DropsThinking, *, inherited: int) -> Resumption:
        """Give a session these turns, and say what its harness must ask first. `drops_thinking` is the model
        template's. Turns with an index below `inherited` are trained in another session.
        """
        snapshot, order = self.snapshot, self.order
        signed = References(snapshot.references.session_id, bytes.fromhex(snapshot.references.secret))
        drops = drops_thinking if order.spec.thinking == "template" else None
        begin_with_parent(live, self.turns, signed, drops, inherited)
        live.inherited.resumed = ResumedSession(
            parent=snapshot.session_id,
            turn=snapshot.turn,
            before_key=snapshot.before_key,
            conversation=snapshot.conversation,
            how="resuming" if self.frozen is None else "freezing",
        )
        live.inherited.parent_key = None if self.frozen is None else self.frozen.key
        answered = any(turn.role == "main" and turn.state == "complete" for turn in self.turns)
        return Resumption(snapshot=snapshot, harness=order.harness, answered=answered, frozen=self.frozen)


def check_resumes(spec: TaskSpec, harness: Harness) -> None:
    """Raise Refused, with the field's path, if no session of a task could be resumed."""
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


async def find_snapshot(
    snapshots: NodeSnapshots, spec: TaskSpec, fork: ForkSpec, harness: Harness
) -> Snapshot:
    """The snapshot from which a task's sessions are resumed. Raises Refused, with the field's path, if no
    harness could go on from it.
    """
    check_resumes(spec, harness)
    await snapshots.copies.fetch(fork.session)
    try:
        snapshot = await trio.to_thread.run_sync(read_snapshot, snapshots.folder, fork.session, fork.turn)
        await check_image(snapshots.runtimes, runtime_of(spec, harness), snapshot)
    except (ForkError, RuntimeFault) as error:
        raise Refused(str(error), path="$.fork.turn") from error
    if snapshot.obstacles:
        raise Refused(
            f"session {fork.session} cannot be resumed at turn {fork.turn}: {'; '.join(snapshot.obstacles)}",
            path="$.fork.turn",
        )
    return snapshot


async def find_frozen(
    snapshots: NodeSnapshots, spec: TaskSpec, fork: ForkSpec, parent: ForkParent
) -> Snapshot:
    """The snapshot with whose processes a task's sessions go on. Raises Refused, with the field's path, if
    none could.
    """
    check_freezing(snapshots.runtimes, "$.fork.by")
    if parent.spec is not None and parent.spec.runtime != spec.runtime:
        raise Refused(
            f"runtime must be that of fork.session {fork.session!r} with by=freeze: its processes go on in"
            " such a container",
            path="$.runtime",
        )
    try:
        snapshot = await trio.to_thread.run_sync(read_snapshot, snapshots.folder, fork.session, fork.turn)
        why = await _not_frozen(snapshots.runtimes, snapshot)
    except ForkError as error:
        raise Refused(str(error), path="$.fork.turn") from error
    if why is not None:
        raise Refused(
            f"session {fork.session} cannot be forked by freezing at turn {fork.turn}: {why}",
            path="$.fork.turn",
        )
    return snapshot


async def _not_frozen(runtimes: NodeRuntimes | AbsentRuntimes, snapshot: Snapshot) -> str | None:
    """Why no copy can be made of a snapshot's processes; None if one can. Raises ForkError if the processes
    are of another kernel.
    """
    if snapshot.frozen is None:
        return snapshot.not_frozen or "its task did not ask for snapshot_at.freeze"
    check_machine(snapshot.frozen)
    if not await runtimes.has_image(snapshot.frozen.image_id):
        return f"the image of its container is gone ({snapshot.frozen.image_id[:19]})"
    return None


def check_freezing(runtimes: NodeRuntimes | AbsentRuntimes, path: str) -> None:
    """Raise Refused, with the field's path, if this machine cannot freeze sessions."""
    obstacle = runtimes.freezing_obstacle
    if obstacle is not None:
        raise Refused(f"this node cannot freeze sessions: {obstacle}", path=path)


async def find_state(
    order: SessionOrder, snapshots: NodeSnapshots, parents: ForkParents, fork: ForkSpec
) -> State:
    """The state from which a session is resumed. Raises ForkError if it is gone, or never existed."""
    by_freeze = fork.by == "freeze"
    try:
        parent = check_fork(order.spec, fork, await parents.parent(fork))
        if by_freeze:
            snapshot = await find_frozen(snapshots, order.spec, fork, parent)
        else:
            snapshot = await find_snapshot(snapshots, order.spec, fork, order.harness)
    except Refused as refused:
        raise ForkError(str(refused)) from refused
    frozen = snapshot.frozen if by_freeze else None
    return State(order=order, snapshot=snapshot, turns=parent.turns, frozen=frozen)


# ── forks of a tree ─────────────────────────────────────────────────────────

# A fork of a tree is a session like any other from the start: it is cancelled, ended with its group, and
# begun again after a restart like those that wait for a slot. It has no state of its own to lose while it
# waits. Which state it takes follows from the root's turns alone, so one that is tried again takes the same.


def tree_way(spec: TaskSpec, harness: Harness) -> Literal["resume", "replay"]:
    """How the forks of a task with `group.fork` begin, which the task's spec alone decides. Raises Refused if
    they are to be resumed and cannot be.
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
    order: SessionOrder,
    snapshots: NodeSnapshots,
    parents: ForkParents,
    place: ForkPlace,
    root: SessionFacts | None,
) -> SessionOrder | Outcome:
    """The order of a tree's fork with the state in which it begins, or its outcome if there is no state.
    `root` are the facts of the session that held the root's place, or None if its end could not be written.
    Raises ForkElsewhere if the state is at another node.
    """
    found = await _state(order, snapshots, parents, place, root)
    if isinstance(found, str):
        return Outcome(status="cancelled", reason=f"{NOT_FORKED_REASON}: {found}")
    spec = evolve(order.spec, fork=found)
    return evolve(order, spec=spec, identity=evolve(order.identity, forked_from=requested_fork(spec)))


async def _state(
    order: SessionOrder,
    snapshots: NodeSnapshots,
    parents: ForkParents,
    place: ForkPlace,
    root: SessionFacts | None,
) -> ForkSpec | str:
    """The state, or why there is none."""
    if root is None:
        return f"the end of its root, place {place.root}, could not be written"
    member = make_member(order.spec.group, root)
    if not member.usable:
        return f"its root, session {root.session_id}, is not usable ({member.why})"
    by = tree_way(order.spec, order.harness)
    whole = ForkSpec(session=root.session_id, turn=COUNT, by=by)
    await parents.require_here(whole)
    parent = await parents.parent(whole)
    if parent is None:
        return f"its root, session {root.session_id}, is not in the log"
    among = None
    if by == "resume":
        listed = await trio.to_thread.run_sync(list_snapshots, snapshots.folder, root.session_id)
        among = {each.turn for each in listed.snapshots if each.resumable}
    turns = fork_turns(place.policy, parent.turns, among)
    if not turns:
        where = "a snapshot to resume from" if by == "resume" else "one of its main agent"
        return f"its root, session {root.session_id}, has no turn of group.fork.at with {where}"
    return ForkSpec(session=root.session_id, turn=turns[place.number], by=by)


# ── the attempt after a lost one ────────────────────────────────────────────

# The turns before the snapshot become this session's own: they are trained here, because a lost session holds
# no place in its group and no reader gets it as one. So every token is trained once, and only the turns after
# the snapshot are sampled again. Which state an attempt goes on from follows from the journal and the files
# alone, so a node that is killed meanwhile finds the same one. An attempt that cannot go on begins from the
# start, as without snapshots, and costs no retry.

# The seconds to look for a state. A journal that waits for room on its disk must not hold up a session.
LOOKING_S: Final = 30.0


@frozen(kw_only=True)
class Continuation:
    """A state from which an attempt goes on. `identity` is the attempt's own, and names the state."""

    state: State
    identity: Identity

    async def begin(
        self, live: LiveSession, drops_thinking: DropsThinking, snapshots: NodeSnapshots
    ) -> Resumption:
        """Give the session the turns and the snapshot. Its identity is in the journal already."""
        fork, snapshot = self.identity.forked_from, self.state.snapshot
        found = self.state.begin(live, drops_thinking, inherited=0 if fork is None else fork.got)
        if snapshot.session_id != self.identity.session_id:
            make_own = partial(share, snapshots.folder, snapshot, self.identity.session_id)
            try:
                found = evolve(found, snapshot=await trio.to_thread.run_sync(make_own))
            except OSError as error:
                logger.warning("session %s has no snapshot of its beginning: %s", live.session_id, error)
                return found
            snapshots.copies.put(self.identity.session_id, snapshot.turn)
        return found


async def find_continuation(
    order: SessionOrder, snapshots: NodeSnapshots, parents: ForkParents
) -> Continuation | None:
    """Find the state from which an attempt goes on; None if it begins from the start. The reason is
    logged.
    """
    spec, able = order.spec.snapshot_at, order.harness.resume is not None
    if not (order.identity.attempt and able and spec.wanted and spec.resume_lost):
        return None
    session_id = order.identity.session_id
    earlier: Sequence[EarlierAttempt] | None = None
    try:
        with trio.move_on_after(LOOKING_S):
            earlier = await parents.earlier_attempts(order.identity)
    except JournalError as error:
        logger.warning("session %s: %s", session_id, error)
    found = None if earlier is None else await _looked(order, snapshots, parents, earlier)
    if found is None:
        logger.info("session %s begins from the start: there is no state to go on with", session_id)
        return None
    whose = found.identity.continued_from
    if whose is not None:
        logger.info("session %s goes on with turn %d of %s", session_id, whose.turn, whose.session_id)
    return found


async def _looked(
    order: SessionOrder,
    snapshots: NodeSnapshots,
    parents: ForkParents,
    earlier: Sequence[EarlierAttempt],
) -> Continuation | None:
    """The last state of the attempts that led to the last one of a place."""
    for attempt in earlier:
        lost = attempt.outcome  # None: its node held the place until it fell silent
        if lost is not None and not lost_to_the_machine(lost):
            return None
        went_on = attempt.identity.continued_from is not None
        if went_on and not attempt.made_progress and lost is not None and lost.status == "error":
            return None  # That state may be the reason why it ended.
        found = await _continued(order, snapshots, parents, attempt)
        if found is not None or (attempt.made_progress and not went_on):
            return found  # It began from the start, so earlier attempts did not lead to it.
    return None


async def _continued(
    order: SessionOrder, snapshots: NodeSnapshots, parents: ForkParents, attempt: EarlierAttempt
) -> Continuation | None:
    """The last state of an attempt from which a harness can be resumed."""
    name, fork = attempt.identity.session_id, attempt.identity.forked_from
    await snapshots.copies.fetch(name)
    kept = await trio.to_thread.run_sync(list_snapshots, snapshots.folder, name)
    # A fork that was still given its parent's answers has no state of its own.
    turns = [each.turn for each in kept.snapshots if fork is None or each.turn >= fork.got]
    for turn in reversed(turns):
        try:
            state = await find_state(order, snapshots, parents, ForkSpec(session=name, turn=turn))
        except ForkError as error:
            logger.warning("session %s does not go on: %s", order.identity.session_id, error)
            continue
        went_on = ContinuedFrom(session_id=name, turn=turn, run_s=state.snapshot.run_s)
        return Continuation(
            state=state, identity=evolve(order.identity, continued_from=went_on, forked_from=fork)
        )
    return None


def went_wrong(identity: Identity, live: LiveSession, outcome: Outcome) -> bool:
    """Whether a session ended because it could not go on from its state. The next attempt then begins from
    the start.
    """
    resumed = live.inherited.resumed
    if identity.continued_from is None or resumed is None or resumed.begun:
        return False
    refused = outcome.status == "error" and outcome.boundary == ForkError.boundary
    return refused or lost_to_the_machine(outcome)
