"""Sockets of the node inside a runtime: listeners made by the node in the container's own network namespace.

A container has no network but its loopback, and these are all that listens there: the model plane's door, and
beside it, where a task may reach names of the world, the proxy's. The accepting socket tells which session
calls. Rule for whoever edits it: setns changes one thread for good, so it runs in a thread that is thrown
away, never in one of Trio's, which are lent to others.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from functools import partial

import trio

from polarnode.containers.inside import CLONE_NEWNET, enter, thrown_away
from polarnode.core.errors import RuntimeFault

DOOR_HOST = "127.0.0.1"
DOOR_PORT = 8080  # any would do: nobody else is in there
EGRESS_PORT = 3128  # any other would do: this one is known as a proxy's
# waiting connections; a harness opens one, its sub-agents a few each, and a fork bomb of clients is refused
BACKLOG = 128
# a client inside that reads nothing for so long is cut: Hypercorn shields its sends without a deadline
UNREAD_MS = 30_000

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


async def open_door(pid: int) -> socket.socket:
    """A non-blocking socket that listens at DOOR_HOST:DOOR_PORT in the network namespace of process `pid` (13
    ms on a loaded machine).

    The caller closes it; it keeps the namespace alive until then. Raises RuntimeFault when the namespace can
    not be entered.
    """
    return await trio.to_thread.run_sync(_made_in, partial(_namespace_of_process, pid), DOOR_PORT)


async def open_listener(network: int, port: int) -> socket.socket:
    """Another listener, at `port`, in a network namespace that is open as a descriptor, which stays the
    caller's.
    """
    return await trio.to_thread.run_sync(_made_in, partial(os.dup, network), port)


def _made_in(open_namespace: Callable[[], int], port: int) -> socket.socket:
    try:
        return thrown_away(lambda: _entered(open_namespace(), port))
    except OSError as error:
        raise RuntimeFault(f"no door could be made in a container: {error}") from error


def _namespace_of_process(pid: int) -> int:
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _entered(namespace: int, port: int) -> socket.socket:
    try:
        if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
            raise OSError(0, "it shares this machine's network")
        enter(namespace, CLONE_NEWNET)
    finally:
        os.close(namespace)
    return _listen(port)


def _listen(port: int) -> socket.socket:
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _raise_loopback(door)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)  # accepted sockets inherit it
        door.bind((DOOR_HOST, port))
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
