"""Files of a container: read, written, walked and archived from outside through its root, in threads.

This is two orders of magnitude faster than an exec and needs nothing of the image. The content is hostile: a
program inside may put a link anywhere at any time, and the node opens these files with its own rights.
Invariants: every path is opened by openat2 with RESOLVE_IN_ROOT and RESOLVE_NO_SYMLINKS; a walk opens every
folder from the one above it, by a single name, follows no link, enters no other file system, and needs at
most two descriptors a level and a page of names. Artifacts are one tar of plain files, folders and links,
limited in bytes and entries; everything that is left out is reported.
"""

import ctypes
import errno
import os
import re
import stat
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import trio
from attrs import define, field, frozen

from polarnode.containers.file_faults import explained, fault, reason_of
from polarnode.core.conversation import Json
from polarnode.core.errors import ContentFault, RuntimeFault
from polarnode.support.bounded import written_whole

# ── files ─────────────────────────────────────────────────────────────────────

SYS_OPENAT2 = 437  # the same number on every architecture
RESOLVE_FLAGS = 0x10 | 0x04 | 0x02  # IN_ROOT, NO_SYMLINKS, NO_MAGICLINKS (linux/openat2.h)
RESOLVE_LINKS_FLAGS = 0x10 | 0x02  # links are followed as they lead inside
RESOLVE_CHILD_FLAGS = 0x08 | 0x04 | 0x02 | 0x01  # BENEATH, NO_SYMLINKS, NO_MAGICLINKS, NO_XDEV
MAX_PASSWD_BYTES = 1 << 20  # bytes of an image's /etc/passwd, and of /etc/hosts
FOLDER_MODE = 0o755

_libc = ctypes.CDLL(None, use_errno=True)


@frozen(kw_only=True)
class Account:
    """A user of the image, by its ids inside the container."""

    uid: int
    gid: int
    home: str


@frozen(kw_only=True)
class ContainerFiles:
    """A container's files. `root` is an open descriptor of its root; `shift` is the offset of its user ids on
    this machine.
    """

    root: int
    shift: int

    def write(self, path: str, content: bytes, owner: Account, mode: int, *, at_s: int | None = None) -> None:
        """Write a whole file and make the folders above it. A link in the way raises ContentFault; an
        existing file is replaced. `at_s`: the modification time of the file and of new folders, in seconds
        since 1970; existing folders then keep their time.
        """
        parts = _parts(path)
        with explained(f"writing {path}"):
            folder = self._folders(parts[:-1], owner, at_s)
            try:
                with _time_kept(folder, keep=at_s is not None):
                    self._write_in(folder, parts[-1], content, owner, mode, at_s)
            finally:
                os.close(folder)

    def prepare_root(self, at_s: int) -> None:
        """Make `/` itself writable for its owner, as in any other runtime, and set its time to `at_s`. The
        root of an overlay has the mode 0555, which root without capabilities cannot pass over.
        """
        top = f"/proc/self/fd/{self.root}"
        with explained("giving / its mode"):
            os.chmod(top, FOLDER_MODE)
            os.utime(top, (at_s, at_s))

    def make_folder(self, path: str, owner: Account, *, at_s: int | None = None) -> None:
        """Make a folder and those above it; an existing folder stays as it is. `at_s` is as in `write`."""
        with explained(f"making {path}"):
            os.close(self._folders(_parts(path), owner, at_s))

    def open_to_owner(self, path: str, owner: Account) -> None:
        """Let a folder's owner enter it and write in it. The folder is made if it is missing, or if something
        that is no folder and no link has its name.
        """
        *above, name = _parts(path)
        with explained(f"making {path}"):
            folder = self._folders(above, owner, None)
            try:
                with suppress(FileNotFoundError):
                    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                    if not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
                        os.unlink(name, dir_fd=folder)
                opened = self._folder(folder, name, owner, None)
            finally:
                os.close(folder)
            try:
                mode = stat.S_IMODE(os.fstat(opened).st_mode)
                if mode & stat.S_IRWXU != stat.S_IRWXU:  # otherwise it is left alone: it may be a volume
                    os.fchmod(opened, mode | stat.S_IRWXU)
            finally:
                os.close(opened)

    def forget_host(self, name: str) -> None:
        """Remove a name from /etc/hosts, following links inside the container; do nothing if there is no
        file.
        """
        with (
            explained("writing /etc/hosts"),
            suppress(FileNotFoundError),
            open_below(self.root, "/etc/hosts", os.O_RDWR, links=True) as opened,
        ):
            before = _read(opened, MAX_PASSWD_BYTES).decode(errors="surrogateescape")
            after = re.sub(rf"[ \t]+{re.escape(name)}(?=\s|$)", "", before)
            if after != before:
                os.ftruncate(opened, 0)
                os.pwrite(opened, after.encode(errors="surrogateescape"), 0)

    def read(self, path: str, limit: int) -> bytes | None:
        """Read the first `limit` bytes of a plain file; None if there is none, or a link or a device
        instead.
        """
        try:
            opened = _open_in(self.root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                return None
            raise fault(f"reading {path}", error) from error
        try:
            with explained(f"reading {path}"):
                return _read(opened, limit) if stat.S_ISREG(os.fstat(opened).st_mode) else None
        finally:
            os.close(opened)

    def account(self, user: str) -> Account:
        """Look up a user by name, or by number as `1000` or `1000:1000`. Raises ContentFault for a name the
        image does not have.
        """
        lines = (self.read("/etc/passwd", MAX_PASSWD_BYTES) or b"").decode(errors="replace").splitlines()
        rows = [
            row
            for row in (line.split(":") for line in lines)
            if len(row) >= 6 and row[2].isdigit() and row[3].isdigit()
        ]
        name, _, group = user.partition(":")
        for row in rows:
            if name in (row[0], row[2]):
                return Account(
                    uid=int(row[2]), gid=int(group) if group.isdigit() else int(row[3]), home=row[5] or "/"
                )
        if name.isdigit():
            return Account(uid=int(name), gid=int(group) if group.isdigit() else 0, home="/")
        raise ContentFault(
            f"the image has no user {user}: name one of {', '.join(row[0] for row in rows) or 'none'}, or a"
            " number"
        )

    def account_obstacle(self) -> str | None:
        """Why Podman must not start a program now; None if nothing is wrong. Podman itself reads the
        container's user files from outside, and a pipe in their place would block its service for good.
        """
        for path in ("/etc/passwd", "/etc/group"):
            try:
                with open_below(self.root, path, os.O_PATH, links=True) as opened:
                    found = os.fstat(opened)
            except OSError:
                continue  # Podman finds as little
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_PASSWD_BYTES:
                return (
                    f"{path} of the container is no plain file of at most {MAX_PASSWD_BYTES >> 20} MiB any"
                    " more"
                )
        return None

    def _write_in(
        self, folder: int, name: str, content: bytes, owner: Account, mode: int, at_s: int | None
    ) -> None:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise ContentFault(f"{name} is there already and is no plain file")
            # The file is removed and never written into, because it may be a second name of another file.
            os.unlink(name, dir_fd=folder)
        opened = _open_in(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(opened, "wb") as file:
            os.fchown(opened, self.shift + owner.uid, self.shift + owner.gid)
            os.fchmod(opened, mode)
            file.write(content)
            if at_s is not None:
                file.flush()
                os.utime(opened, (at_s, at_s))

    def _folders(self, parts: list[str], owner: Account, at_s: int | None) -> int:
        """Open a folder by its parts, and make the missing ones. Returns a descriptor."""
        current = os.dup(self.root)
        for part in parts:
            try:
                below = self._folder(current, part, owner, at_s)
            finally:
                os.close(current)
            current = below
        return current

    def _folder(self, above: int, name: str, owner: Account, at_s: int | None) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return _open_in(above, name, flags)
        except FileNotFoundError:
            with _time_kept(above, keep=at_s is not None):
                os.mkdir(name, FOLDER_MODE, dir_fd=above)
        opened = _open_in(above, name, flags)
        os.fchown(opened, self.shift + owner.uid, self.shift + owner.gid)
        if at_s is not None:
            os.utime(opened, (at_s, at_s))
        return opened


@contextmanager
def _time_kept(folder: int, *, keep: bool) -> Iterator[None]:
    """Give an open folder back the modification time that it has now."""
    before = os.fstat(folder)
    yield
    if keep:
        # The root may be open only as a path (O_PATH), and such a descriptor does not take a utime.
        os.utime(f"/proc/self/fd/{folder}", ns=(before.st_atime_ns, before.st_mtime_ns))


def _read(opened: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    # One call reads at most 2 GiB, and less if a signal comes.
    while limit > 0 and (piece := os.read(opened, limit)):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or not parts:
        raise RuntimeFault(f"{path!r} is no path in a container: give an absolute one without ..")
    return parts


@contextmanager
def open_below(root: int, path: str, flags: int, *, links: bool = False) -> Iterator[int]:
    """Open something in a container. Links on the way are refused, or with `links` followed within the
    container. Raises OSError if it cannot be opened.
    """
    opened = _open_in(root, path, flags, resolve=RESOLVE_LINKS_FLAGS if links else RESOLVE_FLAGS)
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def open_child(folder: int, name: bytes, flags: int) -> Iterator[int]:
    """Open something in an open folder that is no link and no mount. Raises OSError if it cannot be
    opened.
    """
    opened = _open_in(folder, name, flags, resolve=RESOLVE_CHILD_FLAGS)
    try:
        yield opened
    finally:
        os.close(opened)


def _open_in(
    folder: int, path: str | bytes, flags: int, mode: int = 0, *, resolve: int = RESOLVE_FLAGS
) -> int:
    """openat2(2). The kernel resolves the path as if `folder` were the root, and refuses links unless
    `resolve` allows them.
    """
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, resolve)
    opened: int = _libc.syscall(
        SYS_OPENAT2,
        folder,
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_char_p(how),
        ctypes.c_size_t(len(how)),
    )
    if opened < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return opened


# ── walking a tree ────────────────────────────────────────────────────────────

# The deepest nesting of folders. Package managers made at most 60, and each level takes two descriptors.
DEEPEST = 200
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY
FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY

Skipped = Callable[[bytes, str], None]  # called with each path left out, and why


@frozen(kw_only=True)
class TreeEntry:
    """An entry of a folder that is open as `above`. `path` is relative to the start of the walk."""

    above: int
    name: bytes
    path: bytes
    lstat: os.stat_result

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.lstat.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.lstat.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.lstat.st_mode)

    def leads_to(self) -> bytes:
        """The target of a link."""
        return os.readlink(self.name, dir_fd=self.above)


def entry_of(above: int, name: bytes, path: bytes) -> TreeEntry:
    """The entry of a name. Raises OSError where there is none."""
    return TreeEntry(
        above=above, name=name, path=path, lstat=os.stat(name, dir_fd=above, follow_symlinks=False)
    )


def walk(entry: TreeEntry, skipped: Skipped, depth: int = 0) -> Iterator[TreeEntry]:
    """Yield the entry and everything below it, folders before their contents. `skipped` gets what is left
    out, and why.
    """
    yield entry
    if not entry.is_folder:
        return
    if depth >= DEEPEST:
        return skipped(entry.path, f"it is more than {DEEPEST} folders deep")
    try:
        with open_child(entry.above, entry.name, FOLDER_FLAGS) as opened:
            for below in entries(opened, entry.path):
                yield from walk(below, skipped, depth + 1)
    except OSError as error:
        skipped(entry.path, reason_of(error))


def remove(above: int, name: bytes, depth: int = 0) -> None:
    """Remove the entry of this name and everything below it. Mounts stay, with the folders that contain them.

    The kernel would not protect a mount: removing its mount point from another namespace removes the mount.
    Raises OSError if something cannot be removed.
    """
    if depth > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"it is more than {DEEPEST} folders deep", name)
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
        with open_child(
            above, name, FOLDER_FLAGS if stat.S_ISDIR(found.st_mode) else os.O_PATH | os.O_NOFOLLOW
        ) as opened:
            if not stat.S_ISDIR(found.st_mode):
                return os.unlink(name, dir_fd=above)
            for below in os.listdir(opened):
                remove(opened, os.fsencode(below), depth + 1)
        os.rmdir(name, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EXDEV, errno.ENOTEMPTY):
            raise


def entries(opened: int, path: bytes) -> Iterator[TreeEntry]:
    """Yield the contents of an open folder, without entries that disappear meanwhile."""
    with os.scandir(opened) as listing:
        for found in listing:
            name = os.fsencode(found.name)
            try:
                below = entry_of(opened, name, os.path.join(path, name))
            except FileNotFoundError:
                continue
            yield below


# ── artifacts ─────────────────────────────────────────────────────────────────

# The most bytes of content: enough for a patch, logs or a small build. Ten thousand sessions of this size
# fill a disk.
BYTES_LIMIT = 256 << 20
ENTRIES_LIMIT = 100_000  # 512 bytes and 50 microseconds each: 50 MB and 5 s
NAMED_LIMIT = 50  # things left out that are named; the others are counted
READ = 1 << 20  # bytes at a time
ARTIFACTS_SUFFIX, WORKSPACE_SUFFIX = ".artifacts.tar", ".workspace.tar"
WORKDIR = "."  # the whole workdir, as a path to keep
NOT_A_FILE = "it is neither a file nor a folder nor a link"


@frozen(kw_only=True)
class CollectedFiles:
    """The kept files of a session: the tar, the number of files and bytes of content in it, and what was left
    out, each with its reason.
    """

    path: Path
    files: int
    bytes: int
    left_out: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Json]:
        """The JSON of a trajectory's metrics."""
        return {
            "path": str(self.path),
            "files": self.files,
            "bytes": self.bytes,
            "left_out": list(self.left_out),
        }


def artifacts_path(folder: Path, session_id: str) -> Path:
    """The path of a session's artifacts in the node's folder of sessions."""
    return folder / f"{session_id}{ARTIFACTS_SUFFIX}"


def workspace_path(folder: Path, session_id: str) -> Path:
    """The path of a session's workspace in the node's folder of sessions."""
    return folder / f"{session_id}{WORKSPACE_SUFFIX}"


def is_kept_whole(metrics: Json) -> bool:
    """Whether everything was kept, according to the metrics of the kept files. Pipes and sockets do not count
    as lost, because their other ends are gone.
    """
    if not isinstance(metrics, dict) or not isinstance(left_out := metrics.get("left_out"), list):
        return False
    return all(str(each).endswith(NOT_A_FILE) for each in left_out)


def unpack_workdir(kept: Path, to: Path) -> None:
    """Unpack the workdir of a tar that `collect` wrote into an empty folder of this machine, with the ids
    that it had in its container. Raises RuntimeFault if that is impossible.
    """

    def checked(entry: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
        tarfile.tar_filter(entry, folder)  # raises for a path that leads out of the folder
        return entry

    try:
        with tarfile.open(kept, errorlevel=2) as archive:
            ours = [each for each in archive if each.name == WORKDIR or each.name.startswith(f"{WORKDIR}/")]
            archive.extractall(to, ours, numeric_owner=True, filter=checked)
    except (OSError, tarfile.TarError) as error:
        raise RuntimeFault(f"{kept.name} cannot be unpacked: {error}") from error


def collect(files: ContainerFiles, *, paths: Sequence[str], workdir: str, to: Path) -> CollectedFiles:
    """Write the tar of artifacts; an incomplete one is never left. Raises RuntimeFault if it cannot be
    written. It runs in a thread, and stops when its caller is cancelled.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_whole(to) as sink:
            archive = _ArtifactArchive(TarWriter(sink, files.shift))
            for path in paths:
                archive.add(files.root, path, workdir)
            archive.writer.finish()
    except OSError as error:
        raise RuntimeFault(f"the session's artifacts could not be kept: {error}") from error
    return CollectedFiles(path=to, files=archive.files, bytes=archive.size, left_out=archive.left_out())


@define(eq=False)
class TarWriter:
    """Writes entries of a container as a tar. `shift` is the offset of the container's ids on this
    machine.
    """

    sink: BinaryIO
    shift: int

    def head(
        self, entry: TreeEntry, kind: bytes, *, size: int = 0, link: bytes = b"", bits: int = 0o777
    ) -> None:
        """Write the header of an entry in GNU's format, which has names of any bytes and length and sizes
        beyond 8 GiB, and which every tar reads. `bits`: the bits of the mode that are kept.
        """
        info, found = tarfile.TarInfo(os.fsdecode(entry.path)), entry.lstat
        info.type, info.size, info.linkname = kind, size, os.fsdecode(link)
        info.mode, info.mtime = found.st_mode & bits, found.st_mtime_ns // 1_000_000_000
        info.uid, info.gid = max(0, found.st_uid - self.shift), max(0, found.st_gid - self.shift)
        self.sink.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def copy(self, opened: int, size: int) -> None:
        """Copy the content of an open file of this size. A file that shrinks meanwhile is padded."""
        left = size
        while left and (piece := os.read(opened, min(READ, left))):
            trio.from_thread.check_cancelled()
            self.sink.write(piece)
            left -= len(piece)
        for _ in range(left // READ):
            self.sink.write(bytes(READ))
        self.sink.write(bytes(left % READ + -size % tarfile.BLOCKSIZE))

    def finish(self) -> None:
        """Write the two empty blocks of a tar's end."""
        self.sink.write(bytes(2 * tarfile.BLOCKSIZE))


@define(eq=False)
class _ArtifactArchive:
    """The tar of artifacts while it is written."""

    writer: TarWriter
    files: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    entries: int = field(default=0, init=False)
    _names: set[bytes] = field(factory=set, init=False)
    _left_out: list[str] = field(factory=list, init=False)
    _unnamed: int = field(default=0, init=False)

    def add(self, root: int, path: str, workdir: str) -> None:
        """Add what is under a path, relative to the workdir or absolute."""
        named = "/".join(part for part in path.split("/") if part not in ("", ".")) or "."
        whole = f"/{named}" if path.startswith("/") else f"{workdir}/{named}"
        folder, _, name = whole.rpartition("/")
        try:
            with open_below(root, folder or "/", FOLDER_FLAGS) as above:
                self._walk(entry_of(above, os.fsencode(name), os.fsencode(named)))
        except OSError as error:
            self._leave_out(os.fsencode(path), reason_of(error))

    def left_out(self) -> tuple[str, ...]:
        """What was left out."""
        return (*self._left_out, *([f"and {self._unnamed} more"] if self._unnamed else []))

    def _walk(self, top: TreeEntry) -> None:
        for entry in walk(top, self._leave_out):
            trio.from_thread.check_cancelled()
            if entry.path in self._names:
                continue  # named twice by the task
            if self.entries >= ENTRIES_LIMIT:
                return self._leave_out(
                    entry.path,
                    f"the artifacts have more than {ENTRIES_LIMIT} files and folders: this and what"
                    " follows it",
                )
            self._names.add(entry.path)
            self._put(entry)
        return None

    def _put(self, entry: TreeEntry) -> None:
        if entry.is_folder:
            self._head(entry, tarfile.DIRTYPE)
        elif entry.is_link:
            self._head(entry, tarfile.SYMTYPE, link=entry.leads_to())
        elif entry.is_file:
            self._file(entry)
        else:
            self._leave_out(entry.path, NOT_A_FILE)

    def _file(self, entry: TreeEntry) -> None:
        """Add a file. Its size includes holes; a file that shrinks meanwhile is padded."""
        size = entry.lstat.st_size
        if self.size + size > BYTES_LIMIT:
            return self._leave_out(
                entry.path, f"with its {size} bytes the artifacts would be larger than {BYTES_LIMIT}"
            )
        try:
            with open_child(entry.above, entry.name, FILE_FLAGS) as opened:
                self._head(entry, tarfile.REGTYPE, size=size)
                self.writer.copy(opened, size)
        except OSError as error:
            return self._leave_out(entry.path, reason_of(error))
        self.files += 1
        self.size += size
        return None

    def _head(self, entry: TreeEntry, kind: bytes, *, size: int = 0, link: bytes = b"") -> None:
        self.writer.head(entry, kind, size=size, link=link)
        self.entries += 1

    def _leave_out(self, path: bytes, reason: str) -> None:
        if len(self._left_out) < NAMED_LIMIT:
            self._left_out.append(f"{path.decode('utf-8', 'replace')}: {reason}")
        else:
            self._unnamed += 1
