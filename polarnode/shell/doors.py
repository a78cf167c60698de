"""The model plane's socket inside a runtime: a listener made by the node in the container's own network namespace.

A container has no network but its loopback, and this is the only thing that listens there. The accepting socket tells which session calls.
Rule for whoever edits it: setns changes one thread for good, so it runs in a thread that is thrown away, never in one of Trio's, which are
lent to others.
"""

import ctypes
import fcntl
import os
import socket
import struct
import threading

import trio

from polarnode.errors import RuntimeFault

DOOR_HOST = "127.0.0.1"
DOOR_PORT = 8080  # any would do: nobody else is in there
BACKLOG = 128  # waiting connections; a harness opens one, its sub-agents a few each, and a fork bomb of clients is refused
UNREAD_MS = 30_000  # a client inside that reads nothing for so long is cut: Hypercorn shields its sends without a deadline

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1

_libc = ctypes.CDLL(None, use_errno=True)


async def open_door(pid: int) -> socket.socket:
    """A non-blocking socket that listens at DOOR_HOST:DOOR_PORT in the network namespace of process `pid` (13 ms on a loaded machine).

    The caller closes it; it keeps the namespace alive until then. Raises RuntimeFault when the namespace can not be entered.
    """
    return await trio.to_thread.run_sync(_in_throwaway_thread, pid)


def _in_throwaway_thread(pid: int) -> socket.socket:
    made: list[socket.socket | OSError] = []
    thread = threading.Thread(target=_make, args=(pid, made), name="door")
    thread.start()
    thread.join()
    if not made or isinstance(made[0], OSError):
        raise RuntimeFault(f"no door could be made in a container: {made[0] if made else 'its thread died'}")
    return made[0]


def _make(pid: int, made: list[socket.socket | OSError]) -> None:
    try:
        _enter(pid)
        made.append(_listen())
    except OSError as error:
        made.append(error)


def _enter(pid: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
            raise OSError(0, "it shares this machine's network")
        if _libc.setns(namespace, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(namespace)


def _listen() -> socket.socket:
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _raise_loopback(door)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)  # accepted sockets inherit it
        door.bind((DOOR_HOST, DOOR_PORT))
        door.listen(BACKLOG)
        door.setblocking(False)
    except OSError:
        door.close()
        raise
    return door


def _raise_loopback(door: socket.socket) -> None:
    """Bring `lo` up where the container runtime has not."""
    asked = struct.pack("16sH14x", b"lo", 0)
    flags = struct.unpack("16sH14x", fcntl.ioctl(door, SIOCGIFFLAGS, asked))[1]
    if not flags & IFF_UP:
        fcntl.ioctl(door, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
