"""Make a folder of one container equal to that of another, from outside, in constant memory.

No program of either container takes part: programs of the source may be the agent's, which must not decide
what is unpacked beside a judge, and the target may have no tar. Ids, modes, times, links, hard links and
holes are preserved. Files that both containers still share with their image are skipped, so only changes are
copied. Invariant: the source is hostile and is walked as such; the target is ours and nothing runs in it.
"""

import errno
import os
import stat
from contextlib import ExitStack, suppress

import trio
from attrs import define, evolve, field

from polarnode.containers.file_faults import reason_of
from polarnode.containers.files import (
    DEEPEST,
    FILE_FLAGS,
    FOLDER_FLAGS,
    ContainerFiles,
    TreeEntry,
    entries,
    open_below,
    open_child,
    remove,
)
from polarnode.containers.user_namespace import IDS
from polarnode.core.errors import EvaluatorError

# The most entries of a copy. A monorepo with its packages has a tenth of that. As many take a minute or two.
ENTRIES_LIMIT = 2_000_000
# The most remembered files with several names, which take some 50 MB. Beyond that, each name becomes a file.
NAMES_LIMIT = 200_000
PIECE = 8 << 20  # bytes between two checks whether the budget is over


@define(eq=False, kw_only=True)
class Copy:
    """One copy of a folder. `copied` and `size` count the entries and the bytes that had to be written."""

    source: ContainerFiles
    target: ContainerFiles
    limit: int
    looked: int = field(default=0, init=False)
    copied: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    _first_names: dict[tuple[int, int], bytes] = field(factory=dict, init=False)  # of files that have several
    _top: int = field(default=-1, init=False)

    def run(self, source: str, target: str) -> None:
        """Make the target folder equal to the source. Raises EvaluatorError if that is impossible. It runs in
        a thread, and stops when its caller is cancelled.
        """
        try:
            with (
                open_below(self.source.root, source, FOLDER_FLAGS) as left,
                open_below(self.target.root, target, FOLDER_FLAGS) as right,
            ):
                if os.path.sameopenfile(left, right):
                    return  # a volume that both containers see: copying it onto itself would empty it
                self._top = right
                self._folder(left, right, b"", 0)
                self._set_attributes(right, os.fstat(left))
        except OSError as error:
            name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
            raise EvaluatorError(
                f"the workspace could not be copied to a fresh runtime: {name}{reason_of(error)}"
            ) from error

    def _folder(self, left: int, right: int, path: bytes, depth: int) -> None:
        surplus = set(map(os.fsencode, os.listdir(right)))
        for entry in entries(left, path):
            self._count()
            if self._made(entry, right, depth):
                surplus.discard(entry.name)
        for name in surplus:
            remove(right, name)

    def _made(self, entry: TreeEntry, right: int, depth: int) -> bool:
        """Make an entry equal in the target. Return whether the target then has something of this name."""
        if entry.is_folder:
            return self._make_folder(entry, right, depth)
        if not (entry.is_file or entry.is_link):
            return False  # a device, a pipe or a socket: its other end is gone
        if not self._same(entry, right):
            with ExitStack() as stack:
                left = _entered(stack, entry, os.O_PATH | os.O_NOFOLLOW if entry.is_link else FILE_FLAGS)
                if left is not None:
                    remove(right, entry.name)
                    self._write(entry, left, right)
        return True  # mounts are volumes or Podman's own, and the target has its own

    def _make_folder(self, entry: TreeEntry, right: int, depth: int) -> bool:
        if depth >= DEEPEST:
            raise EvaluatorError(
                f"the workspace is more than {DEEPEST} folders deep: evaluate it where it is, without"
                " fresh_runtime"
            )
        with ExitStack() as stack:
            left = _entered(stack, entry, FOLDER_FLAGS)
            if left is not None and not _is_folder(right, entry.name):
                remove(right, entry.name)
                os.mkdir(entry.name, 0o700, dir_fd=right)
            below = None if left is None else _entered(stack, evolve(entry, above=right), FOLDER_FLAGS)
            if left is not None and below is not None:
                self._folder(left, below, entry.path, depth + 1)
                self._set_attributes(below, entry.lstat)
        return True

    def _same(self, entry: TreeEntry, right: int) -> bool:
        """Whether the target still has the same file of the common image. A write would have changed the
        file's ctime, which cannot be set back.
        """
        try:
            there = os.stat(entry.name, dir_fd=right, follow_symlinks=False)
        except FileNotFoundError:
            return False
        same = _file_fingerprint(there, self.target.shift) == _file_fingerprint(
            entry.lstat, self.source.shift
        )
        if same and there.st_nlink > 1:
            self._first_name(entry)
        return same

    def _write(self, entry: TreeEntry, left: int, right: int) -> None:
        self.copied += 1
        if entry.is_link:
            os.symlink(entry.leads_to(), entry.name, dir_fd=right)
            os.chown(entry.name, *self._ids(entry.lstat), dir_fd=right, follow_symlinks=False)
        elif not self._link_to_copied(entry, right):
            self._copy_file(left, right, entry)

    def _link_to_copied(self, entry: TreeEntry, right: int) -> bool:
        """Make a hard link if the entry is another name of a file that is already copied; whether it was."""
        if entry.lstat.st_nlink < 2:
            return False
        first = self._first_name(entry)
        if first == entry.path:
            return False
        with suppress(OSError):  # the path is too long: the entry becomes a separate file
            os.link(first, entry.name, src_dir_fd=self._top, dst_dir_fd=right, follow_symlinks=False)
            return True
        return False

    def _first_name(self, entry: TreeEntry) -> bytes:
        """The first name that was seen of a file with several names; its own name if too many files have
        several.
        """
        key = (entry.lstat.st_dev, entry.lstat.st_ino)
        return (
            self._first_names.setdefault(key, entry.path)
            if len(self._first_names) < NAMES_LIMIT
            else self._first_names.get(key, entry.path)
        )

    def _copy_file(self, left: int, right: int, entry: TreeEntry) -> None:
        made = os.open(
            entry.name,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=right,
        )
        try:
            self._copy_data(left, made, os.fstat(left).st_size)
            self._set_attributes(made, entry.lstat)
        finally:
            os.close(made)

    def _copy_data(self, left: int, made: int, size: int) -> None:
        """Copy the data, without the holes."""
        os.ftruncate(made, size)
        place = 0
        while place < size:
            try:
                place = os.lseek(left, place, os.SEEK_DATA)
            except OSError:  # no data after it
                return
            end = os.lseek(left, place, os.SEEK_HOLE)
            place = self._copy_piece(left, made, place, min(end, size))

    def _copy_piece(self, left: int, made: int, place: int, end: int) -> int:
        os.lseek(made, place, os.SEEK_SET)
        while place < end:
            trio.from_thread.check_cancelled()
            sent = os.sendfile(made, left, place, min(PIECE, end - place))
            if not sent:
                break  # it shrank
            place += sent
            self.size += sent
            if self.size > self.limit:
                raise EvaluatorError(
                    f"what the session changed in its workspace is larger than {self.limit >> 20} MB:"
                    " evaluate it where it is, without fresh_runtime"
                )
        return max(place, end)

    def _set_attributes(self, made: int, original: os.stat_result) -> None:
        """Set owner, mode and times, in this order: a change of owner takes bits of the mode away. Values
        that are already right are not set.
        """
        there, ids = os.fstat(made), self._ids(original)
        if (there.st_uid, there.st_gid, there.st_mode, there.st_mtime_ns) == (
            *ids,
            original.st_mode,
            original.st_mtime_ns,
        ):
            return
        os.fchown(made, *ids)
        os.fchmod(made, stat.S_IMODE(original.st_mode))
        os.utime(made, ns=(original.st_atime_ns, original.st_mtime_ns))

    def _ids(self, original: os.stat_result) -> tuple[int, int]:
        return self._id(original.st_uid), self._id(original.st_gid)

    def _id(self, number: int) -> int:
        inside = number - self.source.shift
        # Ids outside the container's range become `nobody`, 65534.
        return self.target.shift + (inside if 0 <= inside < IDS else IDS - 2)

    def _count(self) -> None:
        trio.from_thread.check_cancelled()
        self.looked += 1
        if self.looked > ENTRIES_LIMIT:
            raise EvaluatorError(
                f"the workspace has more than {ENTRIES_LIMIT} files: evaluate it where it is, without"
                " fresh_runtime"
            )


def _file_fingerprint(found: os.stat_result, shift: int) -> tuple[int, ...]:
    return (
        found.st_ino,
        found.st_size,
        found.st_mode,
        found.st_uid - shift,
        found.st_gid - shift,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def _is_folder(above: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _entered(stack: ExitStack, entry: TreeEntry, flags: int) -> int | None:
    """Open an entry until the stack closes; None if another file system is mounted on it."""
    try:
        return stack.enter_context(open_child(entry.above, entry.name, flags))
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return None
