"""What a task wants kept of a session, as one tar that the node writes while it walks the container's files from outside.

The container's own programs have no part in it: they may be the agent's by now. Rule for whoever edits it: plain files, folders and links
(never followed) go in, nothing else; the tar has a bound in bytes and in entries; and what is left out is said.
"""

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import trio
from attrs import define, field, frozen

from polarnode.conversation import Json
from polarnode.errors import RuntimeFault
from polarnode.shell.podman.files import Rooted, opened_below, opened_child, reason_of
from polarnode.shell.podman.tree import FILE_FLAGS, FOLDER_FLAGS, Entry, entry_of, walk

BYTES_LIMIT = 256 << 20  # of content: a patch, logs, a small build; ten thousand sessions of it are a disk's worth already
ENTRIES_LIMIT = 100_000  # 512 bytes and 50 microseconds each: 50 MB and 5 s
SAID_LIMIT = 50  # things left out that are named; the others are counted
READ = 1 << 20  # bytes at a time
ENDING = ".artifacts.tar"


@frozen(kw_only=True)
class Collected:
    """What was kept: the tar, how many files and bytes of content are in it, and what is not, with the reason."""

    path: Path
    files: int
    bytes: int
    left_out: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Json]:
        """As a trajectory's metrics tell it."""
        return {"path": str(self.path), "files": self.files, "bytes": self.bytes, "left_out": list(self.left_out)}


def artifacts_path(folder: Path, session_id: str) -> Path:
    """Where a session's artifacts are kept in the node's folder of sessions."""
    return folder / f"{session_id}{ENDING}"


def collect(files: Rooted, *, paths: Sequence[str], workdir: str, to: Path) -> Collected:
    """Write the tar; half of one is never left. RuntimeFault where it can not be written. Runs in a thread, and ends when that is cancelled."""
    to.parent.mkdir(parents=True, exist_ok=True)
    half = to.with_name(f"{to.name}.half")
    try:
        with half.open("wb") as sink:
            archive = _Archive(sink, files.shift)
            for path in paths:
                archive.add(files.root, path, workdir)
            archive.finish()
        half.replace(to)
    except OSError as error:
        raise RuntimeFault(f"the session's artifacts could not be kept: {error}") from error
    finally:
        half.unlink(missing_ok=True)
    return Collected(path=to, files=archive.files, bytes=archive.size, left_out=archive.said())


@define(eq=False)
class _Archive:
    """A tar as it is written. `shift` is what the container's ids are moved by on this machine."""

    sink: BinaryIO
    shift: int
    files: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    entries: int = field(default=0, init=False)
    _names: set[bytes] = field(factory=set, init=False)
    _left_out: list[str] = field(factory=list, init=False)
    _unsaid: int = field(default=0, init=False)

    def add(self, root: int, path: str, workdir: str) -> None:
        """Add what stands under a path, relative to the workdir or absolute."""
        named = "/".join(part for part in path.split("/") if part not in ("", ".")) or "."
        whole = f"/{named}" if path.startswith("/") else f"{workdir}/{named}"
        folder, _, name = whole.rpartition("/")
        try:
            with opened_below(root, folder or "/", FOLDER_FLAGS) as above:
                self._walk(entry_of(above, os.fsencode(name), os.fsencode(named)))
        except OSError as error:
            self._leave_out(os.fsencode(path), reason_of(error))

    def finish(self) -> None:
        """Two empty blocks are a tar's end."""
        self.sink.write(bytes(2 * tarfile.BLOCKSIZE))

    def said(self) -> tuple[str, ...]:
        """What was left out."""
        return (*self._left_out, *([f"and {self._unsaid} more"] if self._unsaid else []))

    def _walk(self, top: Entry) -> None:
        for entry in walk(top, self._leave_out):
            trio.from_thread.check_cancelled()
            if entry.path in self._names:
                continue  # named twice by the task
            if self.entries >= ENTRIES_LIMIT:
                return self._leave_out(entry.path, f"the artifacts have more than {ENTRIES_LIMIT} files and folders: this and what follows it")
            self._names.add(entry.path)
            self._put(entry)
        return None

    def _put(self, entry: Entry) -> None:
        if entry.is_folder:
            self._head(entry, tarfile.DIRTYPE)
        elif entry.is_link:
            self._head(entry, tarfile.SYMTYPE, link=entry.leads_to())
        elif entry.is_file:
            self._file(entry)
        else:
            self._leave_out(entry.path, "it is neither a file nor a folder nor a link")

    def _file(self, entry: Entry) -> None:
        """Its size is what reading it gives, holes and all; one that shrinks meanwhile is filled up."""
        size = entry.told.st_size
        if self.size + size > BYTES_LIMIT:
            return self._leave_out(entry.path, f"with its {size} bytes the artifacts would be larger than {BYTES_LIMIT}")
        try:
            with opened_child(entry.above, entry.name, FILE_FLAGS) as opened:
                self._head(entry, tarfile.REGTYPE, size=size)
                self._copy(opened, size)
        except OSError as error:
            return self._leave_out(entry.path, reason_of(error))
        self.files += 1
        self.size += size
        return None

    def _copy(self, opened: int, size: int) -> None:
        left = size
        while left and (piece := os.read(opened, min(READ, left))):
            trio.from_thread.check_cancelled()
            self.sink.write(piece)
            left -= len(piece)
        for _ in range(left // READ):
            self.sink.write(bytes(READ))
        self.sink.write(bytes(left % READ + -size % tarfile.BLOCKSIZE))

    def _head(self, entry: Entry, kind: bytes, *, size: int = 0, link: bytes = b"") -> None:
        """GNU's format: names of any bytes and any length, sizes beyond 8 GiB, read by every tar."""
        told = tarfile.TarInfo(os.fsdecode(entry.path))
        told.type, told.size, told.linkname = kind, size, os.fsdecode(link)
        told.mode, told.mtime = entry.told.st_mode & 0o777, int(entry.told.st_mtime)
        told.uid, told.gid = max(0, entry.told.st_uid - self.shift), max(0, entry.told.st_gid - self.shift)
        self.sink.write(told.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        self.entries += 1

    def _leave_out(self, path: bytes, reason: str) -> None:
        if len(self._left_out) < SAID_LIMIT:
            self._left_out.append(f"{path.decode('utf-8', 'replace')}: {reason}")
        else:
            self._unsaid += 1
