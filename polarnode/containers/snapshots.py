"""Take a snapshot of the writable files of a running container as one tar, and put it into a fresh container.

The tar has everything below the writable places, whether the session changed it or not. So files that the
session removed are absent in the tar, and are absent again after a restore. Owners, modes (setuid bits too),
symbolic and hard links, empty folders and modification times to the nanosecond are kept; pipes, sockets,
devices and mounts are left out and reported; extended attributes and access times are not kept. The tar has
GNU's format, which every tar reads; its last member holds the fractions of seconds, because that format has
no field for them.

Invariants: the source is hostile and is walked as such; nothing runs in the target; an archive is checked to
be whole before it is used, so that a cut one puts nothing into a container.
"""

import errno
import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import trio
from attrs import define, field, frozen

from polarnode.containers.file_faults import REASONS, reason_of
from polarnode.containers.files import (
    ENTRIES_LIMIT,
    FILE_FLAGS,
    FOLDER_FLAGS,
    NAMED_LIMIT,
    NOT_A_FILE,
    Account,
    ContainerFiles,
    TarWriter,
    TreeEntry,
    entries,
    open_below,
    open_child,
    remove,
    walk,
)
from polarnode.containers.user_namespace import IDS
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.support.bounded import written_whole

TIMES = "polarnode-times"  # the last member; the others begin with a writable place, which is a folder
MOUNTED_REASON = REASONS[errno.EXDEV]
PIECE = 8 << 20  # the most bytes that are copied at a time


@frozen(kw_only=True)
class SnapshotFiles:
    """The files of a snapshot: their number, their bytes of content, what was left out, each with its reason,
    and which files changed while they were read.
    """

    places: tuple[str, ...]
    files: int
    bytes: int
    left_out: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def missed(self) -> tuple[str, ...]:
        """What was left out and is a loss. Pipes and sockets are none, because their other ends are gone, and
        mounts are none, because a fresh container has its own.
        """
        return tuple(each for each in self.left_out if not each.endswith((NOT_A_FILE, MOUNTED_REASON)))


# ── taking ────────────────────────────────────────────────────────────────────


def check_size(files: ContainerFiles, places: Sequence[str], limit: int) -> None:
    """Raise Refused if the content below the places is larger than `limit` bytes. No file is read."""
    size = 0
    for place in places:
        with open_below(files.root, place, FOLDER_FLAGS) as top:
            for entry in (found for below in entries(top, b"") for found in walk(below, _ignore_skipped)):
                trio.from_thread.check_cancelled()
                size += entry.lstat.st_size if entry.is_file else 0
                if size > limit:
                    raise _too_large(limit)


def _too_large(limit: int) -> Refused:
    return Refused(
        f"the session's writable places hold more than {limit >> 20} MiB: raise max_mb, or write less there",
        path="$.snapshot_at.max_mb",
    )


def _ignore_skipped(path: bytes, reason: str) -> None:
    """Ignore an entry that cannot be read, because it is reported when it is archived."""


def archive(files: ContainerFiles, *, places: Sequence[str], to: Path, limit: int) -> SnapshotFiles:
    """Write the tar of everything below `places`, which are real paths of folders, none inside another. An
    incomplete tar is never left. Raises Refused if the content is larger than `limit` bytes, RuntimeFault if
    the tar cannot be written. It runs in a thread, and stops when its caller is cancelled.
    """
    try:
        with written_whole(to) as sink:
            made = _SnapshotArchive(writer=TarWriter(sink, files.shift), limit=limit)
            for place in places:
                made.add(files.root, place)
            made.finish()
    except OSError as error:
        raise RuntimeFault(f"the snapshot {to.name} could not be written: {reason_of(error)}") from error
    return SnapshotFiles(
        places=tuple(places),
        files=made.files,
        bytes=made.size,
        left_out=tuple(made.left_out),
        changed=tuple(made.changed),
    )


@define(eq=False, kw_only=True)
class _SnapshotArchive:
    """A snapshot's tar while it is written."""

    writer: TarWriter
    limit: int
    files: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    left_out: list[str] = field(factory=list, init=False)
    changed: list[str] = field(factory=list, init=False)
    _fractions: "array[int]" = field(factory=lambda: array("I"), init=False)
    _first_names: dict[tuple[int, int], bytes] = field(factory=dict, init=False)

    def add(self, root: int, place: str) -> None:
        with open_below(root, place, FOLDER_FLAGS) as top:
            path = os.fsencode(place.strip("/"))
            self._head(TreeEntry(above=root, name=path, path=path, lstat=os.fstat(top)), tarfile.DIRTYPE)
            for below in entries(top, path):
                for entry in walk(below, self._leave_out):
                    trio.from_thread.check_cancelled()
                    self._put(entry)

    def finish(self) -> None:
        """Write the fractions of seconds, and the tar's end."""
        info = tarfile.TarInfo(TIMES)
        info.size = self._fractions.itemsize * len(self._fractions)
        self.writer.sink.write(info.tobuf(tarfile.GNU_FORMAT))
        self.writer.sink.write(self._fractions.tobytes() + bytes(-info.size % tarfile.BLOCKSIZE))
        self.writer.finish()

    def _put(self, entry: TreeEntry) -> None:
        if len(self._fractions) >= ENTRIES_LIMIT:
            raise Refused(
                f"the session has more than {ENTRIES_LIMIT} files and folders in its writable places",
                path="$.snapshot_at",
            )
        if entry.is_folder:
            self._head(entry, tarfile.DIRTYPE)
        elif entry.is_link:
            self._head(entry, tarfile.SYMTYPE, link=entry.leads_to())
        elif entry.is_file:
            self._file(entry)
        else:
            self._leave_out(entry.path, NOT_A_FILE)

    def _file(self, entry: TreeEntry) -> None:
        found = entry.lstat
        if found.st_nlink > 1:
            first = self._first_names.setdefault((found.st_dev, found.st_ino), entry.path)
            if first != entry.path:
                return self._head(entry, tarfile.LNKTYPE, link=first)
        self.size += found.st_size
        if self.size > self.limit:
            raise _too_large(self.limit)
        try:
            with open_child(entry.above, entry.name, FILE_FLAGS) as opened:
                self._head(entry, tarfile.REGTYPE, size=found.st_size)
                self.writer.copy(opened, found.st_size)
                after = os.fstat(opened)
        except OSError as error:
            self._first_names.pop((found.st_dev, found.st_ino), None)
            self.size -= found.st_size
            return self._leave_out(entry.path, reason_of(error))
        self.files += 1
        if (after.st_size, after.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
            self._name(self.changed, entry.path)
        return None

    def _head(self, entry: TreeEntry, kind: bytes, *, size: int = 0, link: bytes = b"") -> None:
        self.writer.head(entry, kind, size=size, link=link, bits=0o7777)
        self._fractions.append(entry.lstat.st_mtime_ns % 1_000_000_000)

    def _leave_out(self, path: bytes, reason: str) -> None:
        self._name(self.left_out, path, f": {reason}")

    @staticmethod
    def _name(to: list[str], path: bytes, reason: str = "") -> None:
        if len(to) < NAMED_LIMIT:
            to.append(f"{path.decode('utf-8', 'replace')}{reason}")


# ── restoring ─────────────────────────────────────────────────────────────────


def restore(tar: Path, files: ContainerFiles, places: Sequence[str]) -> int:
    """Make the places of a container, in which nothing runs, equal to a snapshot's; return the bytes written.
    Raises RuntimeFault if the archive is not whole or something cannot be written. It runs in a thread.
    """
    try:
        with tarfile.open(tar, errorlevel=2, encoding="utf-8", errors="surrogateescape") as opened:
            members = _whole(opened)
            for place in places:
                _clear(files, place)
            with open(tar, "rb", buffering=0) as content:
                return _PlaceRestorer(files=files, content=content.fileno()).put(members)
    except (OSError, tarfile.TarError) as error:
        why = reason_of(error) if isinstance(error, OSError) else str(error)
        raise RuntimeFault(f"the snapshot {tar.name} could not be restored: {why}") from error


def _whole(opened: tarfile.TarFile) -> list[tuple[tarfile.TarInfo, int]]:
    """The members of a snapshot's tar, each with its modification time in nanoseconds."""
    members = opened.getmembers()
    last = members.pop() if members else None
    found = opened.extractfile(last) if last is not None and last.name == TIMES else None
    fractions = array("I")
    if found is not None:
        fractions.frombytes(found.read())
    if last is None or len(fractions) != len(members) or not members:
        raise tarfile.TarError("it is not whole")
    return [
        (member, int(member.mtime) * 1_000_000_000 + fraction)
        for member, fraction in zip(members, fractions, strict=True)
    ]


def _clear(files: ContainerFiles, place: str) -> None:
    """Empty a place, except for what is mounted there. Make the place if the image lacks it."""
    with suppress(FileNotFoundError):
        with open_below(files.root, place, FOLDER_FLAGS) as top:
            for name in os.listdir(top):
                remove(top, os.fsencode(name))
        return
    files.make_folder(place, Account(uid=0, gid=0, home="/"))


@define(eq=False, kw_only=True)
class _PlaceRestorer:
    """A container while a snapshot's files are put into it. `content` is the tar, open."""

    files: ContainerFiles
    content: int
    size: int = field(default=0, init=False)
    _folders: list[tuple[tarfile.TarInfo, int]] = field(factory=list, init=False)
    _above: tuple[str, int] | None = field(default=None, init=False)  # the folder that was used last, open

    def put(self, members: Sequence[tuple[tarfile.TarInfo, int]]) -> int:
        try:
            for member, at_ns in members:
                trio.from_thread.check_cancelled()
                folder, _, name = member.name.rpartition("/")
                self._put(self._open(folder), name, member, at_ns)
            for member, at_ns in reversed(self._folders):  # nothing more is written in them
                with open_below(self.files.root, f"/{member.name}", FOLDER_FLAGS) as made:
                    self._set_attributes(made, member, at_ns)
        finally:
            self._leave()
        return self.size

    def _open(self, folder: str) -> int:
        if self._above is None or self._above[0] != folder:
            self._leave()
            with open_below(self.files.root, f"/{folder}", FOLDER_FLAGS) as opened:
                self._above = (folder, os.dup(opened))
        return self._above[1]

    def _leave(self) -> None:
        if self._above is not None:
            os.close(self._above[1])
            self._above = None

    def _put(self, above: int, name: str, member: tarfile.TarInfo, at_ns: int) -> None:
        if member.isdir():
            with suppress(FileExistsError):  # a place, or what holds a mount
                os.mkdir(name, 0o700, dir_fd=above)
            self._folders.append((member, at_ns))
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=above)
            os.chown(name, *self._ids(member), dir_fd=above, follow_symlinks=False)
            os.utime(name, ns=(at_ns, at_ns), dir_fd=above, follow_symlinks=False)
        elif member.islnk():
            folder, _, first = member.linkname.rpartition("/")
            with open_below(self.files.root, f"/{folder}", FOLDER_FLAGS) as there:
                os.link(first, name, src_dir_fd=there, dst_dir_fd=above, follow_symlinks=False)
        elif member.isreg():
            with _made(above, name) as made:
                self._copy(made, member)
                self._set_attributes(made, member, at_ns)
        else:
            raise tarfile.TarError(f"{member.name} is of a kind that no snapshot has")

    def _copy(self, made: int, member: tarfile.TarInfo) -> None:
        place, end = member.offset_data, member.offset_data + member.size
        while place < end:
            sent = os.sendfile(made, self.content, place, min(PIECE, end - place))
            if not sent:
                raise tarfile.TarError("it is not whole")
            place += sent
        self.size += member.size

    def _set_attributes(self, made: int, member: tarfile.TarInfo, at_ns: int) -> None:
        """Set owner, mode and time, in this order: a change of owner takes bits of the mode away."""
        os.fchown(made, *self._ids(member))
        os.fchmod(made, member.mode & 0o7777)
        os.utime(made, ns=(at_ns, at_ns))

    def _ids(self, member: tarfile.TarInfo) -> tuple[int, int]:
        uid, gid = (number if number < IDS else IDS - 2 for number in (member.uid, member.gid))
        return self.files.shift + uid, self.files.shift + gid


@contextmanager
def _made(above: int, name: str) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    made = os.open(name, flags, 0o600, dir_fd=above)
    try:
        yield made
    finally:
        os.close(made)
