"""Copies of snapshots between the nodes of a fleet, so that a session whose node died goes on at another.

A session's home sends its last snapshot to the second home of its task: the files, and the turns before it,
which no other journal has. The second home keeps one for each place, and gives it to the session that takes
the place there. A copy is never needed for a place to be filled: one that is late, cut or gone costs the
turns that are sampled again. So everything here is bounded, sent in pieces behind all else, and given up
where it does not fit.
"""

import logging
import os
import shutil
import time
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import IO, Any, Final, Protocol

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.errors import Conflict, DiskFull, ForkError, PolarnodeError, Refused
from polarnode.core.fleet import Epoch, Peer, place_path
from polarnode.core.snapshots import Snapshot
from polarnode.core.trajectory import Turn
from polarnode.journal import copies
from polarnode.journal.journal import Journal
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.services import InstalledSnapshot
from polarnode.rollouts.snapshots import archive_path, beside, write
from polarnode.support.bounded import private_folder, private_opener, written_whole

logger = logging.getLogger(__name__)

PIECE: Final = 4 << 20  # bytes of a request: some milliseconds of the loop, and little to send again
# sent at most: a quarter of a gigabit network, and of a disk that journals share
BYTES_A_S: Final = 32 << 20
LOOK_S: Final = 0.5  # between looks whether a task has another second home, while sessions have snapshots
PAUSE_S: Final = 2.0  # after a second home that did not answer
SWEEP_S: Final = 30.0  # between looks for copies that nobody needs: nobody waits for it
CUT_S: Final = 600.0  # after its last piece a copy that is not whole is given up
# bytes of one at most: a snapshot has 1 GiB of content at most, and 100,000 headers of a tar
MOST: Final = 3 << 30
_LENGTH: Final = Struct(">I")
_HEAD_MOST: Final = 1 << 20  # bytes: ids and sizes


@frozen(kw_only=True)
class _Head:
    """What begins a copy. The snapshot as JSON, the turns and the archive follow; `checksum` is of the first
    two.
    """

    identity: Identity
    turn: int
    snapshot_bytes: int
    turns_bytes: int
    archive_bytes: int
    checksum: int


@frozen(kw_only=True)
class _Due:
    identity: Identity
    turn: int


class SentTo(Protocol):
    """What a node's part in its fleet knows of others."""

    def second_of(self, task_id: str) -> tuple[Epoch, Peer] | None:
        """The second home of a task of this home; None where it has none, or is not known."""

    @property
    def ask(self) -> Callable[..., Awaitable[tuple[int, Any] | None]]:
        """One request to a node: its status and JSON; None without a whole answer."""


@define(eq=False, kw_only=True)
class KeptSnapshots:
    """The copies that a node sends, and those that it keeps in `folder`. `sessions` has its own snapshots;
    `reserve` bytes of the disk stay free.
    """

    folder: Path
    sessions: Path
    reserve: int
    journal: Journal
    _latest: dict[tuple[str, int], _Due] = field(factory=dict, init=False)  # by place
    _news: trio.Event = field(factory=trio.Event, init=False)

    # ── what sessions say ─────────────────────────────────────────────────────

    def taken(self, identity: Identity, turn: int) -> None:
        """A session has a snapshot. Before the first turn there is nothing to save."""
        if turn:
            self._latest[identity.task_id, identity.sample_index] = _Due(identity=identity, turn=turn)
            self._news.set()

    def over(self, identity: Identity) -> None:
        """A session has ended."""
        place = (identity.task_id, identity.sample_index)
        due = self._latest.get(place)
        if due is not None and due.identity.session_id == identity.session_id:
            del self._latest[place]

    # ── sending ───────────────────────────────────────────────────────────────

    async def run(self, homes: SentTo, ready: trio.Event) -> None:
        """Send snapshots, and remove copies that nobody needs."""
        with suppress(OSError):
            private_folder(self.folder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep)
            ready.set()
            sent: dict[tuple[str, int], tuple[_Due, str, Epoch]] = {}
            while True:
                await self._news.wait()
                if not self._latest:
                    self._news = trio.Event()
                    sent.clear()
                    continue
                for place, due in tuple(self._latest.items()):
                    second = homes.second_of(place[0])
                    if second is None or sent.get(place) == (due, second[1].journal, second[0]):
                        continue
                    if await self._send(due, *second, homes):
                        sent[place] = (due, second[1].journal, second[0])
                    else:
                        await trio.sleep(PAUSE_S)
                await trio.sleep(LOOK_S)

    async def _send(self, due: _Due, epoch: Epoch, peer: Peer, homes: SentTo) -> bool:
        """Send one; False where that must be tried again."""
        session_id = due.identity.session_id
        try:
            await self.journal.flushed()
            turns = [turn for turn in await self.journal.turns(session_id) if turn.index < due.turn]
            before, archive = await trio.to_thread.run_sync(self._open, due, turns)
            with archive:
                refused = await self._sent(due, epoch, before, archive, partial(homes.ask, peer, "PUT"))
        except (OSError, PolarnodeError) as error:  # removed meanwhile, for the most part
            logger.info("the snapshot of session %s at turn %d is not sent: %s", session_id, due.turn, error)
            return True
        if refused:
            logger.warning("%s refused the snapshot of session %s: %s", peer.url, session_id, refused)
        return refused is not None

    async def _sent(
        self, due: _Due, epoch: Epoch, before: bytes, archive: IO[bytes], ask: Callable[..., Awaitable[Any]]
    ) -> str | None:
        """Why the rest was refused, "" where all was taken; None without an answer."""
        began, offset, who = trio.current_time(), 0, due.identity
        size = len(before) + os.fstat(archive.fileno()).st_size
        while offset < size:
            piece = before[offset : offset + PIECE] or await trio.to_thread.run_sync(archive.read, PIECE)
            at = {"session": who.session_id, "turn": due.turn, "offset": offset, "size": size}
            answer = await ask(
                place_path(who.task_id, who.sample_index, epoch, of="/snapshot", **at), body=piece
            )
            if answer is None or answer[0] >= 300:
                return None if answer is None else str(answer[1])
            offset += len(piece)
            await trio.sleep(max(0.0, began + offset / BYTES_A_S - trio.current_time()))
        return ""

    def _open(self, due: _Due, turns: list[Turn]) -> tuple[bytes, IO[bytes]]:
        """What comes before the archive, and the archive. Runs in a thread."""
        archive = archive_path(self.sessions, due.identity.session_id, due.turn)
        snapshot, packed = beside(archive).read_bytes(), copies.pack_turns(turns)
        file = archive.open("rb")
        head = dump_json(
            plain(
                _Head(
                    identity=due.identity,
                    turn=due.turn,
                    snapshot_bytes=len(snapshot),
                    turns_bytes=len(packed),
                    archive_bytes=os.fstat(file.fileno()).st_size,
                    checksum=zlib.crc32(packed, zlib.crc32(snapshot)),
                )
            )
        )
        return _LENGTH.pack(len(head)) + head + snapshot + packed, file

    # ── keeping ───────────────────────────────────────────────────────────────

    async def receive(
        self, task_id: str, place: int, name: str, epoch: Epoch, *, offset: int, size: int, piece: bytes
    ) -> None:
        """Take the next piece of a copy of `size` bytes; `name` is of the copy. Raises Conflict where the
        place is not kept here with this epoch or another piece is due, DiskFull where there is no room.
        """
        if not await self.journal.query(copies.keeps_place, task_id, place, epoch):
            raise Conflict(f"place {place} of task {task_id} is not open here with epoch {epoch}")
        if not 0 < len(piece) <= size - offset or size > MOST or offset < 0:
            raise Refused(f"a copy has at most {MOST} bytes, and each piece some of them", path="?size")
        path = self._path(task_id, place)
        await trio.to_thread.run_sync(self._write, path, name, offset, size, piece)

    def _path(self, task_id: str, place: int) -> Path:
        return self.folder / f"{_digest(task_id)}-{place}.copy"

    def _write(self, to: Path, name: str, offset: int, size: int, piece: bytes) -> None:
        part = to.with_name(f"{to.stem}.{_digest(name)}.part")
        space = os.statvfs(self.folder)
        if space.f_bavail * space.f_frsize < self.reserve + size - offset:
            raise DiskFull(f"this node's disk has no room for a copy of {size >> 20} MiB")
        have = part.stat().st_size if offset and part.exists() else 0
        if have != offset:
            raise Conflict(f"the copy has {have} bytes here: begin it again")
        with open(part, "ab" if offset else "wb", opener=private_opener) as file:
            file.write(piece)
        if offset + len(piece) == size:
            part.replace(to)

    async def install(self, task_id: str, place: int, session_id: str) -> InstalledSnapshot | None:
        """Make the copy of a place a snapshot of a session of this node; None where there is none. Raises
        ForkError for a damaged one.
        """
        path = self._path(task_id, place)
        return await trio.to_thread.run_sync(partial(self._install, path, session_id))

    def _install(self, path: Path, session_id: str) -> InstalledSnapshot | None:
        try:
            with path.open("rb") as file:
                head = _read_head(file)
                snapshot, packed = file.read(head.snapshot_bytes), file.read(head.turns_bytes)
                if zlib.crc32(packed, zlib.crc32(snapshot)) != head.checksum:
                    raise ForkError("its checksum is another")
                to = archive_path(self.sessions, session_id, head.turn)
                with written_whole(to) as archive:
                    shutil.copyfileobj(file, archive, PIECE)
                if to.stat().st_size != head.archive_bytes:
                    to.unlink()
                    raise ForkError("its archive is cut off")
            found = structure(read_json(snapshot), Snapshot)
            own = evolve(found, session_id=session_id, frozen=None)  # its processes are not copied
            write(own, beside(to))
            return InstalledSnapshot(
                identity=head.identity, turn=head.turn, run_s=own.run_s, turns=copies.read_turns(packed)
            )
        except FileNotFoundError:
            return None
        except (OSError, PolarnodeError) as error:
            raise ForkError(f"the copy of a snapshot in {path.name} cannot be used: {error}") from error

    # ── removing ──────────────────────────────────────────────────────────────

    async def _sweep(self) -> None:
        while True:
            try:
                for path, head in await trio.to_thread.run_sync(self._kept):
                    whose = () if head is None else (head.identity.task_id, head.identity.sample_index)
                    if not whose or not await self.journal.query(copies.keeps_place, *whose):
                        await trio.Path(path).unlink(missing_ok=True)
            except (OSError, PolarnodeError) as error:
                logger.warning("copies of snapshots are looked through again: %s", error)
            await trio.sleep(SWEEP_S)

    def _kept(self) -> list[tuple[Path, _Head | None]]:
        """The copies, and what each is of; those that were cut without it."""
        found: list[tuple[Path, _Head | None]] = []
        for path in self.folder.glob("*.copy"):
            try:
                with path.open("rb") as file:
                    found.append((path, _read_head(file)))
            except (OSError, PolarnodeError):
                found.append((path, None))
        before = time.time() - CUT_S
        found += [(path, None) for path in self.folder.glob("*.part") if path.stat().st_mtime < before]
        return found


def _digest(text: str) -> str:
    """A name for a file: ids may have any characters."""
    return sha256(text.encode()).hexdigest()[:32]


def _read_head(file: IO[bytes]) -> _Head:
    try:
        (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
    except StructError as error:
        raise ForkError("it is cut off") from error
    if size > _HEAD_MOST:
        raise ForkError("it is no copy of a snapshot")
    return structure(read_json(file.read(size)), _Head)
