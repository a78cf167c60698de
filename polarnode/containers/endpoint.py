"""The node's listening sockets inside a runtime, made in the container's own network namespace.

A container has no network but its loopback. All that listens there is the session's model endpoint and, where
the task may reach outside names, the egress proxy. The accepting socket tells which session calls. Invariant:
setns changes a thread for good, so it runs in a thread of its own that ends with it, never in one of Trio's,
which are reused.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from functools import partial

import trio

from polarnode.containers.inside import CLONE_NEWNET, enter, in_own_thread
from polarnode.core.errors import RuntimeFault

ENDPOINT_HOST = "127.0.0.1"
ENDPOINT_PORT = 8080  # any would do: nothing else listens in there
EGRESS_PORT = 3128  # any other would do: this one is commonly a proxy's
# waiting connections; a harness opens one, its sub-agents a few each, and a fork bomb of clients is refused
BACKLOG = 128
# a client inside that reads nothing for so long is cut: Hypercorn shields its sends without a deadline
UNREAD_MS = 30_000

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


async def open_model_endpoint(pid: int) -> socket.socket:
    """Listen at ENDPOINT_HOST:ENDPOINT_PORT in the network namespace of process `pid`, without blocking.

    Takes 13 ms on a loaded machine. The caller closes the socket, which keeps the namespace alive until then.
    Raises RuntimeFault when the namespace cannot be entered.
    """
    return await trio.to_thread.run_sync(
        _made_in, partial(os.open, f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC), ENDPOINT_PORT
    )


async def open_listener(network: int, port: int) -> socket.socket:
    """Listen at `port` in a network namespace that is open as a descriptor, which the caller keeps."""
    return await trio.to_thread.run_sync(_made_in, partial(os.dup, network), port)


def _made_in(open_namespace: Callable[[], int], port: int) -> socket.socket:
    try:
        return in_own_thread(lambda: _entered(open_namespace(), port))
    except OSError as error:
        raise RuntimeFault(f"the model endpoint could not be opened in a container: {error}") from error


def _entered(namespace: int, port: int) -> socket.socket:
    try:
        if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
            raise OSError(0, "it shares this machine's network")
        enter(namespace, CLONE_NEWNET)
    finally:
        os.close(namespace)
    return _listen(port)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _raise_loopback(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS
        )  # accepted sockets inherit it
        listener.bind((ENDPOINT_HOST, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _raise_loopback(listener: socket.socket) -> None:
    """Bring `lo` up where the container runtime has not."""
    request = struct.pack("16sH14x", b"lo", 0)
    flags = struct.unpack("16sH14x", fcntl.ioctl(listener, SIOCGIFFLAGS, request))[1]
    if not flags & IFF_UP:
        fcntl.ioctl(listener, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
