"""A tree of somebody hostile, walked from outside: every folder is opened from the one above it, by the kernel's rules against links.

Rule for whoever edits it: nothing in here is opened by a path of more than one name, no link is followed, no other file system is entered, and
no folder, however wide or deep, costs more than two descriptors a level and a page of names.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator

from attrs import frozen

from polarnode.shell.podman.files import opened_child, reason_of

DEEPEST = 200  # folders in one another: the deepest that package managers made was 60, and each takes two descriptors
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY
FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY

Skipped = Callable[[bytes, str], None]  # told what was left out, and why


@frozen(kw_only=True)
class Entry:
    """Something in a folder that is open as `above`. `path` is relative to where the walk began, `told` its lstat."""

    above: int
    name: bytes
    path: bytes
    told: os.stat_result

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.told.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.told.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.told.st_mode)

    def leads_to(self) -> bytes:
        """Where a link leads."""
        return os.readlink(self.name, dir_fd=self.above)


def entry_of(above: int, name: bytes, path: bytes) -> Entry:
    """What stands under a name. OSError where nothing does."""
    return Entry(above=above, name=name, path=path, told=os.stat(name, dir_fd=above, follow_symlinks=False))


def walk(entry: Entry, skipped: Skipped, depth: int = 0) -> Iterator[Entry]:
    """The entry and everything below it, folders before what is in them."""
    yield entry
    if not entry.is_folder:
        return
    if depth >= DEEPEST:
        return skipped(entry.path, f"it is more than {DEEPEST} folders deep")
    try:
        with opened_child(entry.above, entry.name, FOLDER_FLAGS) as opened:
            for below in entries(opened, entry.path):
                yield from walk(below, skipped, depth + 1)
    except OSError as error:
        skipped(entry.path, reason_of(error))


def remove(above: int, name: bytes, depth: int = 0) -> None:
    """Remove whatever stands under a name, and what is below it. What is mounted stays, with the folders it is in: it is not ours to empty.

    The kernel would not save it: who removes a place of mounts from another namespace takes them away. OSError where something can not go.
    """
    if depth > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"it is more than {DEEPEST} folders deep", name)
    try:
        told = os.stat(name, dir_fd=above, follow_symlinks=False)
        with opened_child(above, name, FOLDER_FLAGS if stat.S_ISDIR(told.st_mode) else os.O_PATH | os.O_NOFOLLOW) as opened:
            if not stat.S_ISDIR(told.st_mode):
                return os.unlink(name, dir_fd=above)
            for below in os.listdir(opened):
                remove(opened, os.fsencode(below), depth + 1)
        os.rmdir(name, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EXDEV, errno.ENOTEMPTY):
            raise


def entries(opened: int, path: bytes) -> Iterator[Entry]:
    """What is in an open folder. What goes away meanwhile is not in it."""
    with os.scandir(opened) as listing:
        for found in listing:
            name = os.fsencode(found.name)
            try:
                below = entry_of(opened, name, os.path.join(path, name))
            except FileNotFoundError:
                continue
            yield below
