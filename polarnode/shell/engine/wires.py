"""What ties a node to one life of an engine host: a socket pair for frames, a lifeline pipe, and a log file. Opened and closed together.

Rule for whoever edits it: nobody but the node may hold the lifeline's write end. Descriptors are made non-inheritable (PEP 446), and only the
host's own two are passed on; when the node dies, however it dies, the kernel closes the write end and the host ends itself.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from attrs import define

from polarnode.shell.engine.diagnosis import TAIL


@define(eq=False)
class Wires:
    """`ours` is non-blocking and ours; `host` and `lifeline` are the host's until `close_theirs`, `_held` is the lifeline's write end."""

    ours: socket.socket
    _host: socket.socket
    _lifeline: int
    _held: int

    def theirs(self) -> tuple[int, ...]:
        return (self._host.fileno(), self._lifeline)

    def arguments(self) -> list[str]:
        return ["--fd", str(self._host.fileno()), "--lifeline-fd", str(self._lifeline)]

    def close_theirs(self) -> None:
        """Once the host runs: while we hold its end of the socket, its death would not close it."""
        self._host.close()
        self._lifeline = _close(self._lifeline)

    def cut(self) -> None:
        """Tell the host, whatever it is doing, to end its session now."""
        self._held = _close(self._held)

    def close(self) -> None:
        self.cut()
        self.close_theirs()
        self.ours.close()


@contextmanager
def open_wires() -> Iterator[Wires]:
    """Fresh wires for one life; all of our ends are closed with the block."""
    ours, host = socket.socketpair()
    ours.setblocking(False)
    lifeline, held = os.pipe()
    with closing(Wires(ours, host, lifeline, held)) as wires:
        yield wires


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """A fresh log, for the host to write; the one before is kept as `.log.1`, so that a crash can still be read after the restart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.replace(path.with_suffix(".log.1"))
    with path.open("wb") as log:
        yield log


def log_tail(path: Path) -> str:
    """The last TAIL bytes of a log, as text; empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def _close(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1
