"""Files of a container, written and read from outside through its root, as root, in threads.

Faster than an exec by two orders, and it needs nothing of the image. Rule for whoever edits it: every path is opened by openat2 with
RESOLVE_IN_ROOT and RESOLVE_NO_SYMLINKS, because whoever is inside may put a link anywhere at any time, and these files are opened with the
node's rights.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from attrs import frozen

from polarnode.errors import RuntimeFault

SYS_OPENAT2 = 437  # the same number on every architecture
RESOLVE = 0x10 | 0x04 | 0x02  # IN_ROOT, NO_SYMLINKS, NO_MAGICLINKS (linux/openat2.h)
IN_ROOT_ALONE = 0x10 | 0x02  # links are followed as they lead inside
OF_FOLDER = 0x08 | 0x04 | 0x02 | 0x01  # BENEATH, NO_SYMLINKS, NO_MAGICLINKS, NO_XDEV
REASONS = {
    errno.ELOOP: "a link is in the way",
    errno.EROFS: "it is read-only, as all but the writable places is while a harness runs",
    errno.EXDEV: "another file system is mounted there",
}
PASSWD_LIMIT = 1 << 20  # bytes of an image's /etc/passwd
FOLDER_MODE = 0o755

_libc = ctypes.CDLL(None, use_errno=True)


@frozen(kw_only=True)
class Account:
    """A user of the image, by its ids inside the container."""

    uid: int
    gid: int
    home: str


@frozen(kw_only=True)
class Rooted:
    """A container's files. `root` is an open descriptor of its root; `shift` is what its ids are moved by on this machine."""

    root: int
    shift: int

    def write(self, path: str, content: bytes, owner: Account, mode: int) -> None:
        """Write a whole file, making the folders above it. A link in the way is a RuntimeFault, a file is replaced."""
        parts = _parts(path)
        with _explained(f"writing {path}"):
            folder = self._folders(parts[:-1], owner)
            try:
                self._write_in(folder, parts[-1], content, owner, mode)
            finally:
                os.close(folder)

    def own_top(self) -> None:
        """Let its owner write to `/` itself, as in any other runtime: an overlay's own has the mode 0555, and root without capabilities keeps to it."""
        with _explained("giving / its mode"):
            os.chmod(f"/proc/self/fd/{self.root}", FOLDER_MODE)

    def make_folder(self, path: str, owner: Account) -> None:
        """Make a folder and those above it; one that is there stays as it is."""
        with _explained(f"making {path}"):
            os.close(self._folders(_parts(path), owner))

    def read(self, path: str, limit: int) -> bytes | None:
        """The first `limit` bytes of a plain file; None where there is none, also where a link or a device stands."""
        try:
            opened = _open_in(self.root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                return None
            raise RuntimeFault(f"reading {path}: {error.strerror}") from error
        try:
            with _explained(f"reading {path}"):
                return _read(opened, limit) if stat.S_ISREG(os.fstat(opened).st_mode) else None
        finally:
            os.close(opened)

    def account(self, user: str) -> Account:
        """A user by name, or by number as `1000` or `1000:1000`. Raises RuntimeFault for a name the image does not know."""
        lines = (self.read("/etc/passwd", PASSWD_LIMIT) or b"").decode(errors="replace").splitlines()
        rows = [row for row in (line.split(":") for line in lines) if len(row) >= 6 and row[2].isdigit() and row[3].isdigit()]
        name, _, group = user.partition(":")
        for row in rows:
            if name in (row[0], row[2]):
                return Account(uid=int(row[2]), gid=int(group) if group.isdigit() else int(row[3]), home=row[5] or "/")
        if name.isdigit():
            return Account(uid=int(name), gid=int(group) if group.isdigit() else 0, home="/")
        raise RuntimeFault(f"the image has no user {user}: name one of {', '.join(row[0] for row in rows) or 'none'}, or a number")

    def _write_in(self, folder: int, name: str, content: bytes, owner: Account, mode: int) -> None:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise RuntimeFault(f"{name} is there already and is no plain file")
            os.unlink(name, dir_fd=folder)  # never written into: it may be a second name of a file that is not theirs
        opened = _open_in(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(opened, "wb") as file:
            os.fchown(opened, self.shift + owner.uid, self.shift + owner.gid)
            os.fchmod(opened, mode)
            file.write(content)

    def _folders(self, parts: list[str], owner: Account) -> int:
        """An open descriptor of the folder, made where it is missing."""
        current = os.dup(self.root)
        for part in parts:
            try:
                below = self._folder(current, part, owner)
            finally:
                os.close(current)
            current = below
        return current

    def _folder(self, above: int, name: str, owner: Account) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return _open_in(above, name, flags)
        except FileNotFoundError:
            os.mkdir(name, FOLDER_MODE, dir_fd=above)
        opened = _open_in(above, name, flags)
        os.fchown(opened, self.shift + owner.uid, self.shift + owner.gid)
        return opened


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """An OSError inside becomes a RuntimeFault that says what was tried."""
    try:
        yield
    except OSError as error:
        raise RuntimeFault(f"{what}: {reason_of(error)}") from error


def reason_of(error: OSError) -> str:
    """Why something in a container could not be opened, read or written."""
    return REASONS.get(error.errno or 0, error.strerror or str(error))


def _read(opened: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    while limit > 0 and (piece := os.read(opened, limit)):  # one call gives at most 2 GiB, and less where a signal comes
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or not parts:
        raise RuntimeFault(f"{path!r} is no path in a container: give an absolute one without ..")
    return parts


@contextmanager
def opened_below(root: int, path: str, flags: int, *, links: bool = False) -> Iterator[int]:
    """Something of a container; `links` on the way are refused, or followed as they lead in there. OSError where it can not be opened."""
    opened = _open_in(root, path, flags, resolve=IN_ROOT_ALONE if links else RESOLVE)
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def opened_child(folder: int, name: bytes, flags: int) -> Iterator[int]:
    """Something in an open folder: no link, and nothing that is mounted there. OSError where it can not be opened."""
    opened = _open_in(folder, name, flags, resolve=OF_FOLDER)
    try:
        yield opened
    finally:
        os.close(opened)


def _open_in(folder: int, path: str | bytes, flags: int, mode: int = 0, *, resolve: int = RESOLVE) -> int:
    """openat2(2). The kernel resolves the path as if `folder` were the root, and refuses links unless told otherwise."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, resolve)
    opened: int = _libc.syscall(SYS_OPENAT2, folder, ctypes.c_char_p(os.fsencode(path)), ctypes.c_char_p(how), ctypes.c_size_t(len(how)))
    if opened < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return opened
