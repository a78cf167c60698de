"""Snapshots in a storage that outlives their node: a folder that all nodes mount, or anything that fsspec
reaches.

A snapshot is copied there in the background when it is taken, with the turns before it, which no other node
has while the session runs. When its node is lost, the next attempt, at another node, goes on from the copy.
The archive is copied first, then the turns, and the description last, because the description is what makes a
snapshot one. Processes of a frozen harness stay at their node.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, Final

import trio
from attrs import define, evolve, field

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.packing import unpack_turn
from polarnode.core.errors import ConfigError, PolarnodeError
from polarnode.core.snapshots import Snapshot
from polarnode.core.task import ForkSpec
from polarnode.core.trajectory import Turn
from polarnode.journal.held import packed_turns
from polarnode.journal.log.port import QueriesPort
from polarnode.journal.reader import JournalReader
from polarnode.journal.writer import JournalWriter
from polarnode.rollouts.snapshots import (
    SNAPSHOT_INFIX,
    archive_path,
    beside,
    list_snapshots,
    turns_path,
    write,
)
from polarnode.support.bounded import written_whole

logger = logging.getLogger(__name__)

AT_ONCE: Final = 2  # copies at once, because they take the network from weights and results
WAITING: Final = 1_000  # copies that may wait; beyond that the storage is too slow, and copies are left out
AGAIN_S: Final = 5.0  # seconds before a failed copy is tried once more
_LENGTH_PREFIX: Final = Struct(">I")  # the length that precedes each turn


@define(eq=False, kw_only=True)
class SnapshotStore:
    """The shared storage at `url`, and the node's own `folder` of snapshots. Created by
    `open_snapshot_store`.
    """

    url: str
    folder: Path
    journal_writer: JournalWriter
    journal_reader: JournalReader
    _fs: Any
    _root: str
    _send: trio.MemorySendChannel[tuple[str, int]] = field(init=False)
    _receive: trio.MemoryReceiveChannel[tuple[str, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[tuple[str, int]](WAITING)

    # ── copies of this node's sessions ────────────────────────────────────────

    def put(self, session_id: str, turn: int) -> None:
        """Copy a snapshot that was just taken, in the background. This never waits."""
        try:
            self._send.send_nowait((session_id, turn))
        except trio.WouldBlock:
            logger.warning(
                "session %s, turn %d: %s is too slow, the snapshot is here alone", session_id, turn, self.url
            )

    async def run(self, ready: trio.Event) -> None:
        """Copy snapshots as they come, until cancelled."""
        ready.set()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(self._copy_queued)

    async def _copy_queued(self) -> None:
        async for session_id, turn in self._receive:
            for pause in (AGAIN_S, None):
                try:
                    await self._copy(session_id, turn)
                    break
                except FileNotFoundError:
                    break  # It was removed meanwhile, because a later one is kept in its place.
                except Exception as error:  # A storage's library may raise anything; the session goes on.
                    logger.warning(
                        "session %s, turn %d: not copied to %s: %s", session_id, turn, self.url, error
                    )
                    if pause is not None:
                        await trio.sleep(pause)

    async def _copy(self, session_id: str, turn: int) -> None:
        await self.journal_writer.flush()
        turns = await self.journal_reader.query(packed_turns, session_id, before=turn)
        packed = b"".join(_LENGTH_PREFIX.pack(len(each)) + each for each in turns)
        await trio.to_thread.run_sync(self._copy_now, archive_path(self.folder, session_id, turn), packed)

    def _copy_now(self, archive: Path, turns: bytes) -> None:
        snapshot = structure(read_json(beside(archive).read_bytes()), Snapshot)
        snapshot = evolve(snapshot, frozen=None, not_frozen="its processes are at the node that took it")
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.put_file(str(archive), self._at(archive.name))
        self._fs.pipe_file(self._at(turns_path(archive).name), turns)
        self._fs.pipe_file(self._at(beside(archive).name), dump_json(plain(snapshot)))

    async def remove(self, session_id: str, turn: int) -> None:
        """Remove the copy of a snapshot that its session does not keep any more."""
        await self._run_logged(partial(self._remove_now, archive_path(self.folder, session_id, turn)))

    def _remove_now(self, archive: Path) -> None:
        for each in (beside(archive), archive, turns_path(archive)):
            if self._fs.exists(self._at(each.name)):
                self._fs.rm_file(self._at(each.name))

    # ── what other nodes left ─────────────────────────────────────────────────

    async def fetch(self, session_id: str) -> None:
        """Fetch the snapshots of a session that this node does not have into its own folder. A failure is
        only logged, and the caller that looks for a snapshot then reports that there is none.
        """
        await self._run_logged(partial(self._fetch_now, session_id))

    def _fetch_now(self, session_id: str) -> None:
        here = {each.turn for each in list_snapshots(self.folder, session_id).snapshots}
        start = f"{session_id}{SNAPSHOT_INFIX}"
        for name in self._names():
            number = name.removeprefix(start).removesuffix(".json")
            if not (name.startswith(start) and name.endswith(".json") and number.isdigit()):
                continue
            if int(number) in here:
                continue
            archive = archive_path(self.folder, session_id, int(number))
            snapshot = structure(read_json(self._fs.cat_file(self._at(name))), Snapshot)
            part = archive.with_suffix(".part")
            self._fs.get_file(self._at(archive.name), str(part))
            part.rename(archive)
            with written_whole(turns_path(archive)) as file:
                file.write(self._fs.cat_file(self._at(turns_path(archive).name)))
            write(snapshot, beside(archive))

    async def turns(self, fork: ForkSpec) -> tuple[Turn, ...] | None:
        """The turns before a snapshot that came from another node; None if there is no such snapshot."""
        path = turns_path(archive_path(self.folder, fork.session, fork.turn))
        return await trio.to_thread.run_sync(_read_turns, path)

    # ── what may go ───────────────────────────────────────────────────────────

    async def sweep(self, log: QueriesPort) -> None:
        """Remove the copies whose sessions the log has pruned."""
        names = await trio.to_thread.run_sync(self._names)
        sessions = {name.partition(".")[0] for name in names if SNAPSHOT_INFIX in name}
        gone = {each for each in sessions if await log.session(each) is None}
        for name in names:
            if name.partition(".")[0] in gone:
                await trio.to_thread.run_sync(self._fs.rm_file, self._at(name))

    def _names(self) -> list[str]:
        if not self._fs.exists(self._root):
            return []
        return [each.rpartition("/")[2] for each in self._fs.ls(self._root, detail=False, refresh=True)]

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    async def _run_logged(self, act: Any) -> None:
        try:
            await trio.to_thread.run_sync(act)
        except Exception as error:  # as in `_copy_queued`
            logger.warning("snapshots of %s: %s", self.url, error)


def open_snapshot_store(
    url: str, *, folder: Path, journal_writer: JournalWriter, journal_reader: JournalReader
) -> SnapshotStore:
    """Open the storage that a setting names. Raises ConfigError if no library of this environment reaches
    it.
    """
    # fsspec comes with `polarnode[node]`. Its import takes half a second, which nodes without a storage save.
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"snapshots: {url} cannot be reached: {error}") from error
    return SnapshotStore(
        url=url, folder=folder, journal_writer=journal_writer, journal_reader=journal_reader, fs=fs, root=root
    )


def _read_turns(path: Path) -> tuple[Turn, ...] | None:
    try:
        return tuple(map(unpack_turn, _parts(path.read_bytes())))
    except (OSError, PolarnodeError):
        return None


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH_PREFIX.unpack_from(data, at)
        at += _LENGTH_PREFIX.size
        yield data[at : at + length]
        at += length
