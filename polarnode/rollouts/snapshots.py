"""Snapshots of a running session: taken while a call waits, bounded, kept beside its artifacts, and restored
for a fork.

While a harness waits for its only model call it does nothing, so its workspace, its home and its own record
of the session are one consistent state. `SessionSnapshots.hold` is the session's
`LiveSession.before_generation`. If a snapshot cannot be taken, the reason is counted in the session's
metrics, and the call goes on. The time that the call was held is credited to the run.

`open_restored` restores a snapshot: it opens a fresh container of the task with the snapshot's files in it.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Final, Protocol

import trio
from attrs import define, evolve, field, frozen

from polarnode.containers.frozen import CONFIG, remove_folder, remove_image
from polarnode.containers.inside import Process
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import AbsentRuntimes, NodeRuntimes
from polarnode.containers.snapshots import SnapshotFiles
from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.conversation import Json, ModelRequest
from polarnode.core.errors import ForkError, PolarnodeError, Refused, RuntimeFault
from polarnode.core.snapshots import (
    FrozenImage,
    LivingProcess,
    ReferenceKey,
    Snapshot,
    SnapshotList,
    SnapshotStatus,
    asked_for,
    has_pending_rules,
    passes,
    status_of,
)
from polarnode.core.task import ForkSpec, RuntimeSpec
from polarnode.core.trajectory import Turn
from polarnode.gateway.live_sessions import LiveSession
from polarnode.journal.log.port import QueriesPort
from polarnode.merge.attach import RESUMED, Plan
from polarnode.rollouts.services import SessionOrder
from polarnode.rollouts.session_containers import Containers
from polarnode.support.bounded import written_whole
from polarnode.support.metrics import NodeCounters

logger = logging.getLogger(__name__)

# The seconds that a call may be held. 256 MiB take three on two busy cores, and the shortest silence after
# which a harness was seen to give up is twenty.
HELD_S: Final = 10.0
CLOSING_S: Final = 5.0  # seconds to remove what no rule kept; it takes milliseconds, unless the disk hangs
NAMED: Final = 20  # processes that a snapshot names, enough to see what they are
SNAPSHOT_INFIX: Final = ".snapshot-"  # part of the name of each file of a snapshot
FROZEN: Final = ".frozen"  # the end of the name of the folder with its processes
# The limit on the memory and the layer of a frozen session, as a multiple of the `max_mb` of its files.
# Harnesses take 60 to 350 MiB beside the files.
FROZEN_SIZE_FACTOR: Final = 4


# ── files ─────────────────────────────────────────────────────────────────────


def archive_path(folder: Path, session_id: str, turn: int) -> Path:
    """The tar of a session's snapshot in the node's folder of sessions."""
    return folder / f"{session_id}{SNAPSHOT_INFIX}{turn}.tar"


def beside(archive: Path) -> Path:
    """The description beside the tar. It is written last, and without it there is no snapshot."""
    return archive.with_suffix(".json")


def read_snapshot(folder: Path, session_id: str, turn: int) -> Snapshot:
    """Read a snapshot that is to be restored. Raises ForkError if it is gone or damaged."""
    archive = archive_path(folder, session_id, turn)
    try:
        found = _read(beside(archive))
    except FileNotFoundError:
        found = None
    except (OSError, PolarnodeError) as error:
        raise ForkError(
            f"the snapshot of session {session_id} at turn {turn} cannot be read: {error}"
        ) from None
    if found is None or not archive.is_file():
        turns = ", ".join(str(each.turn) for each in list_snapshots(folder, session_id).snapshots)
        raise ForkError(
            f"there is no snapshot of session {session_id} at turn {turn}"
            f" ({f'there are some at {turns}' if turns else 'its task asked for none in snapshot_at'})"
        )
    return found


def _read(path: Path) -> Snapshot:
    return structure(read_json(path.read_bytes()), Snapshot)


def list_snapshots(folder: Path, session_id: str) -> SnapshotList:
    """The snapshots of a session, by turn."""
    found = sorted(_listed(folder, session_id), key=lambda each: each.turn)
    return SnapshotList(session_id=session_id, snapshots=tuple(found))


def _listed(folder: Path, session_id: str) -> Iterator[SnapshotStatus]:
    for path in folder.glob(f"{escape(session_id)}{SNAPSHOT_INFIX}*.json"):
        number = path.name.removeprefix(f"{session_id}{SNAPSHOT_INFIX}").removesuffix(".json")
        if not number.isdigit():
            continue
        with suppress(FileNotFoundError):  # It may be removed meanwhile.
            try:
                status = status_of(_read(path))
            except PolarnodeError as error:
                status = SnapshotStatus(
                    turn=int(number),
                    taken=path.stat().st_mtime,
                    files=0,
                    bytes=0,
                    seconds=0.0,
                    resumable=False,
                    why_not=f"{path.name} cannot be read: {error}",
                )
            gone = not path.with_suffix(".tar").is_file()
            yield evolve(status, resumable=False, why_not="its archive is gone") if gone else status


def write(snapshot: Snapshot, to: Path) -> None:
    """Write the description of a snapshot, which completes it, to its path `beside` the archive."""
    with written_whole(to) as file:
        file.write(dump_json(plain(snapshot)))


def turns_path(archive: Path) -> Path:
    """The file with the turns before a snapshot that came from another node's storage."""
    return archive.with_suffix(".turns")


def frozen_path(archive: Path) -> Path:
    """The folder of the snapshot's processes, if the task asks for them."""
    return archive.with_suffix(FROZEN)


def remove(archive: Path) -> None:
    """Remove a snapshot, its description first."""
    beside(archive).unlink(missing_ok=True)
    archive.unlink(missing_ok=True)
    turns_path(archive).unlink(missing_ok=True)
    remove_folder(frozen_path(archive))


def share(folder: Path, snapshot: Snapshot, session_id: str) -> Snapshot:
    """Make a snapshot belong to another session too, which keeps it when the first session's is removed.
    Raises OSError.
    """
    theirs = archive_path(folder, snapshot.session_id, snapshot.turn)
    archive = archive_path(folder, session_id, snapshot.turn)
    own = evolve(snapshot, session_id=session_id, frozen=None)  # Its processes are not shared.
    archive.unlink(missing_ok=True)
    os.link(theirs, archive)
    write(own, beside(archive))
    return own


# ── a node's snapshots ────────────────────────────────────────────────────────


class SnapshotCopies(Protocol):
    """Copies of snapshots, from which other nodes can go on."""

    def put(self, session_id: str, turn: int) -> None:
        """Copy a snapshot that was just taken. This never waits."""

    async def remove(self, session_id: str, turn: int) -> None:
        """Remove a copy."""

    async def fetch(self, session_id: str) -> None:
        """Fetch the snapshots of a session that this node does not have."""

    async def turns(self, fork: ForkSpec) -> tuple[Turn, ...] | None:
        """The turns before a snapshot that came from another node; None if there is no such snapshot."""

    async def sweep(self, log: QueriesPort) -> None:
        """Remove the copies whose sessions the log has pruned."""


class NoCopies:
    """For a node whose snapshots are on its own disk alone."""

    def put(self, session_id: str, turn: int) -> None:
        pass

    async def remove(self, session_id: str, turn: int) -> None:
        await trio.lowlevel.checkpoint()

    async def fetch(self, session_id: str) -> None:
        await trio.lowlevel.checkpoint()

    async def turns(self, fork: ForkSpec) -> tuple[Turn, ...] | None:
        await trio.lowlevel.checkpoint()
        return None

    async def sweep(self, log: QueriesPort) -> None:
        await trio.lowlevel.checkpoint()


@frozen(kw_only=True)
class NodeSnapshots:
    """Where the snapshots of a node are: their files in `folder`, and `copies` for other nodes. The snapshots
    that are taken are counted in `tally`.
    """

    folder: Path
    runtimes: NodeRuntimes | AbsentRuntimes
    copies: SnapshotCopies = field(factory=NoCopies)
    tally: NodeCounters = field(factory=NodeCounters)
    # It limits the snapshots at once, which take the disk and the interpreter from each other and from every
    # other session.
    limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(2))


# ── taking ────────────────────────────────────────────────────────────────────


@define(eq=False, kw_only=True)
class SessionSnapshots:
    """The snapshots of one session. `credit` moves the end of its run by seconds, and `spent` returns the
    seconds of its run so far. `image_id` is that of its container's image. `begun_with` is the snapshot that
    it has from the session from which it goes on.
    """

    order: SessionOrder
    node: NodeSnapshots
    live: LiveSession
    runtime: PodmanRuntime
    image_id: str
    credit: Callable[[float], None]
    spent: Callable[[], float]
    begun_with: Snapshot | None
    taken: int = field(default=0, init=False)
    held_s: float = field(default=0.0, init=False)
    not_taken: "Counter[str]" = field(factory=Counter, init=False)  # by reason
    removed: "Counter[str]" = field(factory=Counter, init=False)  # by reason
    number: int | None = field(default=None, init=False)  # the harness's number, if it can be frozen
    frozen: int = field(default=0, init=False)  # how many have the processes too
    _kept: dict[int, int] = field(init=False)  # maps turns to bytes, the oldest first
    _undecided_turns: set[int] = field(factory=set, init=False)
    _last: int = field(init=False)  # the turn of the last snapshot that no later turn decides about
    _too_large: bool = field(default=False, init=False)
    _initial_processes: frozenset[Process] | None = field(default=None, init=False)

    @_kept.default
    def _make_kept(self) -> dict[int, int]:
        return {} if self.begun_with is None else {self.begun_with.turn: self.begun_with.bytes}

    @_last.default
    def _make_last(self) -> int:
        """Count from a fork's first own turn, whose snapshot is the parent's."""
        return len(self.live.lineages.turns)

    async def hold(self, plan: Plan, request: ModelRequest) -> None:
        """Take a snapshot before the engine is asked, if a rule asks for one. This never fails the call."""
        try:
            await self._hold(plan, request)
        except (OSError, RuntimeFault) as error:
            logger.warning("session %s, turn %d: no snapshot: %s", self.live.session_id, plan.index, error)
            self.not_taken["fault"] += 1

    async def _hold(self, plan: Plan, request: ModelRequest) -> None:
        if self._initial_processes is None:
            self._initial_processes = await self.runtime.processes()
        await self._decide_kept()
        spec, turn = self.order.spec.snapshot_at, plan.index
        certain = asked_for(spec, turn, last=self._last)
        if not certain and not (spec.is_provisional and has_pending_rules(spec, self.live.lineages.turns)):
            return
        if turn in self._kept:
            return
        why = self._call_obstacle(plan)
        if why is None:
            why = await self._held(plan, request)
        if why is not None:
            self.not_taken[why] += 1
        elif certain:
            self._last = turn
        else:
            self._undecided_turns.add(turn)
        await self._evict()

    async def close(self) -> dict[str, Json]:
        """Decide about the last snapshots, once every turn is recorded. Returns the session's metrics of its
        snapshots.
        """
        with trio.move_on_after(CLOSING_S, shield=True):
            await self._decide_kept(over=True)
        turns: list[Json] = [*sorted(self._kept)]
        not_taken: dict[str, Json] = {**self.not_taken}
        removed: dict[str, Json] = {**self.removed}
        return {
            "turns": turns,
            "bytes": sum(self._kept.values()),
            "taken": self.taken,
            **({"frozen": self.frozen} if self.order.spec.snapshot_at.freeze else {}),
            "held_s": round(self.held_s, 3),
            "not_taken": not_taken,
            "removed": removed,
        }

    def _call_obstacle(self, plan: Plan) -> str | None:
        """Why no snapshot can be taken at this call; None if one can."""
        if plan.role != "main":
            return "role"
        if self.live.calls.count > 1:
            return "parallel"
        if plan.reason == RESUMED:  # The state before this turn is the state before the turn that it resumes.
            return "resumed"
        space = os.statvfs(self.node.folder)
        spec = self.order.spec.snapshot_at
        most = spec.max_mb * (1 + FROZEN_SIZE_FACTOR * spec.freeze)
        needed = (most + self.node.runtimes.settings.disk_reserve_mb) << 20
        return "disk" if space.f_bavail * space.f_frsize < needed else None

    async def _held(self, plan: Plan, request: ModelRequest) -> str | None:
        """Take a snapshot within HELD_S. Returns None, or the reason that there is none."""
        began, spent, before = trio.current_time(), self.spent(), self._calls()
        self.credit(HELD_S)
        try:
            with trio.move_on_after(HELD_S):
                return await self._taken(plan, request, began, spent, before)
            return "slow"
        except Refused:
            self._too_large = True
            return "large"
        finally:
            spent = trio.current_time() - began
            self.credit(spent - HELD_S)
            self.held_s += spent
            self.node.tally.snapshot_s += spent

    async def _taken(
        self, plan: Plan, request: ModelRequest, began: float, spent: float, before: tuple[int, ...]
    ) -> str | None:
        archive = archive_path(self.node.folder, self.live.session_id, plan.index)
        limit = self.order.spec.snapshot_at.max_mb << 20
        await trio.sleep(self.order.harness.settles_s)
        async with self.node.limiter:
            processes = await self.runtime.processes()
            files = await self.runtime.snapshot(self.order.runtime, archive, limit, measured=self._too_large)
            frozen, not_frozen = await self._freeze_processes(archive)
            try:
                processes |= await self.runtime.processes()
                if self.live.calls.count > 1 or self._calls() != before:
                    return "parallel"
                snapshot = self._make_snapshot(
                    plan, request, files, processes - (self._initial_processes or frozenset())
                )
                held = round(trio.current_time() - began, 3)
                snapshot = evolve(
                    snapshot, seconds=held, run_s=round(spent, 3), frozen=frozen, not_frozen=not_frozen
                )
                await trio.to_thread.run_sync(write, snapshot, beside(archive))
            finally:
                if not beside(archive).exists():
                    archive.unlink(missing_ok=True)
                    with trio.move_on_after(CLOSING_S, shield=True):
                        await remove_image(frozen_path(archive))
        self.taken += 1
        self.frozen += frozen is not None
        self._too_large = False
        self.node.copies.put(self.live.session_id, plan.index)
        self._kept[plan.index] = size = snapshot.stored_bytes
        self.node.tally.snapshot(size)
        return None

    async def _freeze_processes(self, archive: Path) -> tuple[FrozenImage | None, str | None]:
        """Freeze the processes, if the task asks for that. Returns them, or why there are none; the files are
        kept without them.
        """
        spec = self.order.spec.snapshot_at
        if not spec.freeze:
            return None, None
        if self.number is None:
            return None, "its harness was only being started"
        limit = FROZEN_SIZE_FACTOR * spec.max_mb << 20
        try:
            image = await self.runtime.write_frozen(
                self.order.runtime, frozen_path(archive), number=self.number, limit=limit
            )
        except (Refused, RuntimeFault) as error:
            logger.warning("session %s: not frozen: %s", self.live.session_id, error)
            return None, str(error)
        return evolve(image, key=self.live.inherited.parent_key or self.live.key), None

    def _calls(self) -> tuple[int, ...]:
        """Counts of which one changes with every call that comes and ends."""
        counters = self.live.budget.counters
        return counters.turns, counters.replayed, counters.prewarmed, counters.refusals.total()

    def _make_snapshot(
        self, plan: Plan, request: ModelRequest, files: SnapshotFiles, since: frozenset[Process]
    ) -> Snapshot:
        living = [LivingProcess(pid=each.pid, comm=each.comm, program=each.program) for each in since]
        living.sort(key=lambda each: each.pid)
        references = self.live.lineages.references
        return Snapshot(
            session_id=self.live.session_id,
            turn=plan.index,
            taken=time.time(),
            before_key=plan.before_key,
            conversation=request.conversation,
            references=ReferenceKey(session_id=references.session_id, secret=references.secret_hex),
            image=self.order.runtime.image,
            image_id=self.image_id,
            places=files.places,
            files=files.files,
            bytes=files.bytes,
            seconds=0.0,
            processes=tuple(living[:NAMED]),
            left_out=files.left_out,
            obstacles=tuple(_resume_obstacles(self.order, files, living)),
        )

    # ── which are kept ──────────────────────────────────────────────────

    async def _decide_kept(self, *, over: bool = False) -> None:
        """Remove the snapshots whose turns have ended and pass no rule."""
        turns = self.live.lineages.turns if self._undecided_turns else ()
        ended = {turn.index for turn in turns}
        for index in sorted(self._undecided_turns):
            if index in ended or over:
                self._undecided_turns.discard(index)
                if not passes(self.order.spec.snapshot_at, turns, index):
                    await self._remove(index, "rule")

    async def _evict(self) -> None:
        """Remove the oldest snapshots beyond `keep` whose turns the task does not name."""
        spec = self.order.spec.snapshot_at
        free = [turn for turn in self._kept if turn not in spec.turns]
        for turn in free[: max(0, len(self._kept) - spec.keep)]:
            self._undecided_turns.discard(turn)
            await self._remove(turn, "keep")

    async def _remove(self, turn: int, why: str) -> None:
        if self._kept.pop(turn, None) is not None:
            self.removed[why] += 1
            path = archive_path(self.node.folder, self.live.session_id, turn)
            await trio.to_thread.run_sync(remove, path)
            await self.node.copies.remove(self.live.session_id, turn)


async def open_snapshots(
    order: SessionOrder,
    node: NodeSnapshots,
    live: LiveSession,
    runtime: PodmanRuntime,
    credit: Callable[[float], None],
    spent: Callable[[], float],
    begun_with: Snapshot | None = None,
) -> SessionSnapshots:
    """Take snapshots of a session from now on. Raises RuntimeFault if its image cannot be inspected."""
    snapshots = SessionSnapshots(
        order=order,
        node=node,
        live=live,
        runtime=runtime,
        image_id=await node.runtimes.image_id(order.runtime),
        credit=credit,
        spent=spent,
        begun_with=begun_with,
    )
    live.before_generation = snapshots.hold
    return snapshots


def _resume_obstacles(
    order: SessionOrder, files: SnapshotFiles, living: Sequence[LivingProcess]
) -> Iterator[str]:
    """The reasons why no harness may be resumed from a snapshot."""
    if living:
        named = ", ".join(each.named() for each in living[:NAMED])
        yield f"processes lived that were not there at the first call, and no copy has them: {named}"
    servers = [name for name, each in order.spec.harness.mcp_servers.items() if each.command is not None]
    if servers:
        yield f"its MCP servers run in the container, and no copy has their memory: {', '.join(servers)}"
    if files.changed:
        yield f"files changed while they were copied: {', '.join(files.changed)}"
    if missed := files.missed():
        yield f"files could not be copied: {', '.join(missed)}"


# ── restoring ─────────────────────────────────────────────────────────────────


async def check_image(runtimes: NodeRuntimes | AbsentRuntimes, spec: RuntimeSpec, snapshot: Snapshot) -> None:
    """Raise ForkError if a task's containers are made of another image than the snapshot's, and RuntimeFault
    if that image is gone.
    """
    image_id = await runtimes.image_id(spec)
    if image_id != snapshot.image_id:
        raise ForkError(
            f"the snapshot of session {snapshot.session_id} at turn {snapshot.turn} is of image"
            f" {snapshot.image} ({snapshot.image_id[:19]}), and {spec.image} is {image_id[:19]} now: a fork"
            " needs the same image"
        )


@asynccontextmanager
async def open_restored(containers: Containers, snapshot: Snapshot) -> AsyncIterator[PodmanRuntime]:
    """Open a fresh container of a task with its workspace prepared, and restore the files of a snapshot in
    its writable places exactly. Raises ForkError if the archive is gone or the task's image is not the
    snapshot's, and RuntimeFault as `Containers.open` does and if the archive is damaged.

    This is for the container of the harness alone, because an evaluator's fresh one never has what a session
    left.
    """
    node = containers.node
    archive = archive_path(node.folder, snapshot.session_id, snapshot.turn)
    await check_image(node.runtimes, containers.order.runtime, snapshot)
    if not await trio.Path(archive).is_file():
        raise ForkError(f"the archive of session {snapshot.session_id} at turn {snapshot.turn} is gone")
    async with containers.open() as runtime:
        await runtime.restore_snapshot(archive, snapshot.places)
        yield runtime


@asynccontextmanager
async def open_frozen(containers: Containers, snapshot: Snapshot) -> AsyncIterator[PodmanRuntime]:
    """Open a copy of a frozen session's container, with its processes stopped. Raises ForkError if the
    snapshot has no processes or they are gone, and RuntimeFault if they cannot be restored.
    """
    node, order = containers.node, containers.order
    folder = frozen_path(archive_path(node.folder, snapshot.session_id, snapshot.turn))
    if snapshot.frozen is None or not await trio.Path(folder / CONFIG).is_file():
        raise ForkError(
            f"the frozen processes of session {snapshot.session_id} at turn {snapshot.turn} are gone"
        )
    async with node.runtimes.open_frozen(
        order.runtime,
        snapshot.frozen,
        folder,
        session_id=order.identity.session_id,
        lifetime_s=containers.lifetime_s(),
    ) as runtime:
        yield runtime
