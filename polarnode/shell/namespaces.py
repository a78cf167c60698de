"""Work in a namespace of a container, done by the node: in a thread of its own, which is thrown away with what it entered.

Rule for whoever edits it: setns changes one thread for good, so what is done here never runs in one of Trio's.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from polarnode.errors import PolarnodeError, RuntimeFault

Answer = TypeVar("Answer")

CLONE_FS, CLONE_NEWNS, CLONE_NEWNET = 0x0000_0200, 0x0002_0000, 0x4000_0000

libc = ctypes.CDLL(None, use_errno=True)


def thrown_away(work: Callable[[], Answer]) -> Answer:
    """Do something in a thread that ends with it. OSErrors and errors of ours come out as they are."""
    done: list[Answer] = []
    failed: list[OSError | PolarnodeError] = []

    def run() -> None:
        try:
            done.append(work())
        except (OSError, PolarnodeError) as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    if not done:
        raise RuntimeFault("a thread in a container's namespace died")
    return done[0]


def enter(namespace: int, kind: int) -> None:
    """Enter a namespace that is open as a descriptor, with the thread that calls. `kind` is one of CLONE_NEW…"""
    checked(libc.setns(namespace, kind), "setns")


def checked(result: int, what: str) -> None:
    """OSError where a call of the C library's failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
