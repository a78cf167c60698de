"""A running container seen from the machine: its first process, namespaces, root and control group.

`ContainerHandle` is opened between init and start and kept open, so that a reused process id cannot mislead
the node. All processes are ended from outside, by one signal to the whole namespace. That needs no program
in the image, no free process id in the container, and no capability of the container. Invariant: never act
on a bare process id without checking which namespace it is in.

Both versions of cgroups are supported: the memory controller is in a tree of its own (v1, hybrid) or in the
one tree (v2). Work in a container's namespace runs in a thread of its own that ends with it: setns changes a
thread for good, so it never runs in one of Trio's.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from attrs import define, field, frozen

from polarnode.core.errors import PolarnodeError, RuntimeFault, boundary

# ── the first process ─────────────────────────────────────────────────────────

KILL_ALL_SCRIPT = "kill -KILL -1"  # to all processes but the namespace's first and the sender
# Seconds that the kernel may take for killed processes. One in uninterruptible I/O takes as long as its disk.
KILL_S = 20.0
PF_EXITING = 0x4  # one of the flags in /proc/PID/stat (linux/sched.h)
NEVER_OOM_SCORE = -1000  # the oom_score_adj of a process that is never ended for its memory
POLL = 0.02  # seconds between checks while a container is being cleared


@define(eq=False)
class ContainerHandle:
    """The open descriptors of a container's first process. All are closed by `close`."""

    pid: int
    pidfd: int
    namespace: int
    mounts: int
    root: int
    network: int
    _closed: bool = field(default=False, init=False)

    def alive(self) -> bool:
        """Whether the first process still runs. A process that is exiting does not count, because the kernel
        ends all the others before it is done with the first.
        """
        # This is not `select`, which takes no descriptor over 1023: a node with many sessions has such ones.
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        return not ended.poll(0) and not _is_exiting(self.pid)

    def spare(self) -> None:
        """Exempt the first process from those that the kernel ends for their memory. Without root that is not
        permitted, and then the kernel may end the container.
        """
        with suppress(OSError):
            Path(f"/proc/{self.pid}/oom_score_adj").write_text(f"{NEVER_OOM_SCORE}\n")

    def members(self) -> list[int]:
        """The process ids, on this machine, of the container's processes, without the first one and without
        zombies; none once this is closed.
        """
        return [] if self._closed else _members(self.namespace, self.pid)

    def processes(self) -> "frozenset[Process]":
        """The same processes as values that differ from later processes with the same id."""
        found = map(_process, self.members())
        return frozenset(each for each in found if each is not None)

    def holds(self, pid: int) -> bool:
        """Whether a process of this machine runs in the container."""
        return _namespace(pid) == os.fstat(self.namespace).st_ino and not _is_zombie(pid)

    def signal_group(self, leader: int, order: signal.Signals) -> None:
        """Signal the process group that an exec's program leads. A leader that is gone, or no longer in this
        container, is skipped.
        """
        if _namespace(leader) != os.fstat(self.namespace).st_ino:
            return
        with suppress(ProcessLookupError):
            if os.getpgid(leader) == leader:
                os.killpg(leader, order)
            else:
                os.kill(leader, order)

    async def kill_all(self) -> None:
        """End every process but the first. Raises RuntimeFault when some outlive it for long. Does nothing
        once closed.
        """
        if self._closed:
            return
        # The descriptor is duplicated, because this may be closed meanwhile, and the number reused for
        # another container.
        namespace = os.dup(self.namespace)
        try:
            await _kill_all(namespace, self.pid)
        finally:
            os.close(namespace)

    def close(self) -> None:
        """Close all descriptors; the container can then be unmounted."""
        self._closed = True
        for descriptor in (self.pidfd, self.namespace, self.mounts, self.root, self.network):
            os.close(descriptor)


@frozen(kw_only=True)
class Process:
    """A process: its id on this machine, its start time in ticks since the boot, its name, and the program
    that it was started as. A process can change the last two, so they do not distinguish processes.
    """

    pid: int
    started: int
    comm: str = field(eq=False)
    program: str = field(eq=False)


NAME_CHARS = 100  # the most characters of a program's name: enough for a path


def _process(pid: int) -> Process | None:
    """A process by its id; None once it has ended."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return None
    comm = head.partition("(")[2]
    return Process(
        pid=pid,
        started=int(rest.split()[19]),
        comm=printable(comm),
        program=printable(os.fsdecode(program)),
    )


def printable(name: str) -> str:
    """A name as it may appear in a sentence or a log."""
    return "".join(each if each.isprintable() else "?" for each in name[:NAME_CHARS])


def open_handle(pid: int) -> ContainerHandle:
    """Open a container's first process by the id Podman just reported. Raises RuntimeFault when it is already
    gone.
    """
    opened: list[int] = []
    try:
        opened.append(os.pidfd_open(pid))
        opened.append(os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        opened.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        for descriptor in opened:
            os.close(descriptor)
        raise RuntimeFault(f"a container's first process cannot be looked at: {error}") from error
    return ContainerHandle(pid, *opened)


async def _kill_all(namespace: int, first: int) -> None:
    with trio.move_on_after(KILL_S):
        while await trio.to_thread.run_sync(_members, namespace, first):
            await _kill_once(namespace)
            await trio.sleep(POLL)
        return
    raise RuntimeFault(
        f"processes {_members(namespace, first)} of a container outlived SIGKILL for {KILL_S:.0f} s"
    )


async def _kill_once(namespace: int) -> None:
    argv = ["nsenter", f"--pid=/proc/self/fd/{namespace}", "--", "sh", "-c", KILL_ALL_SCRIPT]
    with boundary(RuntimeFault, "a container's processes could not be ended"):
        await trio.run_process(
            argv,
            pass_fds=(namespace,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def _members(namespace: int, first: int) -> list[int]:
    mine = os.fstat(namespace).st_ino
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if pid != first and _namespace(pid) == mine and not _is_zombie(pid)
    ]


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None  # it ended while we looked


def _is_exiting(pid: int) -> bool:
    try:
        flags = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & PF_EXITING)


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended. One whose main thread alone has ended looks similar, but is no zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return True
    return words[0] in "ZX" and int(words[17]) <= 1


# ── what a user namespace may take ────────────────────────────────────────────

# The kernel counts these for the creator of the namespace, root, over all containers and this machine's own
# programs, so without a limit one session could take all of them. The keys are files of /proc/sys/user, which
# differ by namespace.
USER_LIMITS = {
    "max_inotify_instances": 16,  # a harness has about two, an editor with language servers ten
    # One for each folder of a large tree. 64 sessions make 2^20, the kernel's default on large machines.
    "max_inotify_watches": 16384,
    # None, as under Docker's profile: in its own user namespace a program reaches far more of the kernel.
    "max_user_namespaces": 0,
    "max_fanotify_groups": 0,  # for programs without rights since Linux 5.13; harnesses do not use it
}
LIMITING_S = 20.0  # seconds to write them: 5 ms quiet


async def limit_user_namespace(inside: ContainerHandle) -> None:
    """Write USER_LIMITS in the user namespace of a container, before anything runs in it. Raises RuntimeFault
    if it has no user namespace of its own, or if a limit cannot be written.

    A process of its own writes them, because a process with threads cannot enter a user namespace.
    """
    with boundary(RuntimeFault, "a container's user namespace could not be bounded"):
        namespace = os.open(f"/proc/{inside.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/user").st_ino or not inside.alive():
                raise RuntimeFault("a container has no user namespace of its own, or has ended")
            with trio.fail_after(LIMITING_S):
                await _write_limits(namespace)
        finally:
            os.close(namespace)


async def _write_limits(namespace: int) -> None:
    # A kernel that lacks a file also lacks the feature that the file limits.
    writes = [f"if [ -e {name} ]; then echo {most} > {name}; fi" for name, most in USER_LIMITS.items()]
    script = "\n".join(("set -e", "cd /proc/sys/user", *writes))
    done = await trio.run_process(
        ["nsenter", f"--user=/proc/self/fd/{namespace}", "--", "sh", "-c", script],
        pass_fds=(namespace,),
        stdin=subprocess.DEVNULL,
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(done.stderr.decode(errors="replace").strip())


# ── threads in a namespace ────────────────────────────────────────────────────

Answer = TypeVar("Answer")

CLONE_FS, CLONE_NEWNS, CLONE_NEWNET = 0x0000_0200, 0x0002_0000, 0x4000_0000

libc = ctypes.CDLL(None, use_errno=True)


def in_own_thread(work: Callable[[], Answer]) -> Answer:
    """Run something in a thread of its own, which ends afterwards. OSErrors and our own errors are raised
    unchanged.
    """
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
    """Enter a namespace that is open as a descriptor, with the calling thread. `kind` is one of CLONE_NEW…"""
    checked(libc.setns(namespace, kind), "setns")


def checked(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


# ── listening sockets in a container ──────────────────────────────────────────

ENDPOINT_HOST = "127.0.0.1"
ENDPOINT_PORT = 8080  # any would do: nothing else listens in there
EGRESS_PORT = 3128  # any other would do: this one is commonly a proxy's
# The most waiting connections. A harness opens one, its sub-agents a few each; a fork bomb of clients is
# refused.
ACCEPT_BACKLOG = 128
# A client inside that reads nothing for this long is cut off, because Hypercorn shields its sends without a
# deadline.
UNREAD_MS = 30_000

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


async def open_model_endpoint(pid: int) -> socket.socket:
    """Listen at ENDPOINT_HOST:ENDPOINT_PORT in the network namespace of process `pid`, without blocking.

    Takes 13 ms on a loaded machine. The caller closes the socket, which keeps the namespace alive until then.
    Raises RuntimeFault when the namespace cannot be entered.
    """
    return await trio.to_thread.run_sync(
        _listen_in, partial(os.open, f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC), ENDPOINT_PORT
    )


async def open_listener(network: int, port: int) -> socket.socket:
    """Listen at `port` in a network namespace that is open as a descriptor, which the caller keeps."""
    return await trio.to_thread.run_sync(_listen_in, partial(os.dup, network), port)


def _listen_in(open_namespace: Callable[[], int], port: int) -> socket.socket:
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
    return _bind_listener(port)


def _bind_listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _raise_loopback(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS
        )  # accepted sockets inherit it
        listener.bind((ENDPOINT_HOST, port))
        listener.listen(ACCEPT_BACKLOG)
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
