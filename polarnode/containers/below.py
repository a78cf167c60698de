"""A program that runs as a child of a container's first process, not of Podman, so that it can be frozen.

A program that `podman exec` starts has its parent outside the container, so CRIU does not find it, and its
streams end in another program. Here a shell is started and left alone, so that the container's first process
becomes its parent. The shell reads from a file and writes to a named pipe, both in the container's own /dev;
the node has the other end of the pipe. The shell notes its process id, runs the program, and notes the exit
code.

Invariants: the pipe is open on the node's side before anything writes to it; the shell is known by its
process id inside the container (its number), which a restored copy has too.
"""

import os
import signal
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from attrs import define, field

from polarnode.containers.client import READ
from polarnode.containers.exec import (
    POLL_PAUSES,
    TERM_GRACE,
    UNREACHABLE_S,
    ExecOrder,
    ExecRunner,
    OutputSink,
)
from polarnode.containers.freezing import ContainerFreeze
from polarnode.containers.inside import ContainerHandle, in_own_thread, libc
from polarnode.core.errors import ForkError, HarnessError, RuntimeFault

INPUT, OUTPUT, NOTES = "dev/polarnode-in", "dev/polarnode-out", "dev/polarnode-notes"
SCRIPT = f'exec </{INPUT} >/{OUTPUT} 2>&1; echo $$ >/{NOTES}; "$@"; echo $? >>/{NOTES}'
NOTE_WAIT_S = 20.0  # seconds until the shell notes its number: milliseconds after the exec that starts it
MAX_NOTES_BYTES = 64  # two numbers
MAX_EXIT_CODE = 255  # the highest exit code of a program; another program may have written the note
KILLED = 137  # the exit code if the shell noted none, because it was killed


@define(eq=False, kw_only=True)
class DetachedProgram:
    """Starts and follows one program in one container. `shift`: the offset of its user ids."""

    inside: ContainerHandle
    execs: ExecRunner
    freeze: ContainerFreeze
    shift: int
    _pipe: int | None = field(default=None, init=False)  # open from before the program begins to its end

    async def start(self, order: ExecOrder) -> int:
        """Start the program and return the number of its shell in the container. Raises RuntimeFault if it
        does not begin, HarnessError if the program removes the notes by which the node follows it.
        """
        await trio.to_thread.run_sync(self._prepare, order.stdin)
        self._pipe = self._opened()
        argv = ("setsid", "sh", "-c", SCRIPT, "sh", *order.argv)
        output = bytearray()
        started = ExecOrder(argv=argv, env=order.env, user=order.user, workdir=order.workdir)
        code = await self.execs.run(started, lambda _, piece: output.extend(piece), alone=True)
        if code:
            words = bytes(output).decode(errors="replace").strip()
            raise RuntimeFault(
                f"no program can be started below the first process (setsid, sh): {words or code}"
            )
        with trio.move_on_after(NOTE_WAIT_S):
            pauses = POLL_PAUSES.delays()
            while not (notes := self._notes()):  # noqa: ASYNC110 (a file in there has no events)
                await trio.sleep(next(pauses))
            return notes[0]
        if await trio.to_thread.run_sync(self.inside.members):
            raise HarnessError("it took away what the node follows it by, in /dev")
        raise RuntimeFault(f"a program below the first process did not begin in {NOTE_WAIT_S:.0f} s")

    def close(self) -> None:
        """Close the node's end of the pipe."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    async def follow(self, number: int, sink: OutputSink, *, begin: Callable[[], None] = lambda: None) -> int:
        """Wait for the end of the program whose shell has this number; `sink` gets its output. `begin` is
        called once the output can be read. On cancellation the program's process group gets TERM, then KILL,
        and everything else in the container is ended too.
        """
        leader = self._find_leader(number)
        if self._pipe is None:  # this is a copy, and its original may have done anything to the pipe
            self._pipe = self._opened()
        output = self._pipe
        try:
            begin()
            if leader is not None:
                await self._ended(leader, output, sink)
            _drain_pipe(output, sink)
        except BaseException:
            with trio.move_on_after(UNREACHABLE_S, shield=True):
                await self._end(leader)
            raise
        finally:
            self.close()
        notes = self._notes() if self.inside.alive() else []
        return notes[1] if len(notes) > 1 and notes[1] <= MAX_EXIT_CODE else KILLED

    async def _ended(self, leader: int, output: int, sink: OutputSink) -> None:
        try:
            opened = os.pidfd_open(leader)
        except ProcessLookupError:
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, output, sink)
                await trio.lowlevel.wait_readable(opened)
                nursery.cancel_scope.cancel()
        finally:
            os.close(opened)

    async def _end(self, leader: int | None) -> None:
        try:
            await self.freeze.thaw_for_good()
            if leader is not None:
                self.inside.signal_group(leader, signal.SIGTERM)
                with trio.move_on_after(TERM_GRACE):
                    pauses = POLL_PAUSES.delays()
                    while self.inside.holds(leader):  # noqa: ASYNC110 (short, and its end is near)
                        await trio.sleep(next(pauses))
                self.inside.signal_group(leader, signal.SIGKILL)
            await self.inside.kill_all()
        except RuntimeFault:
            return  # the container is gone, or is about to be

    def _find_leader(self, number: int) -> int | None:
        """The shell's id on this machine; None once it has ended."""
        return next((pid for pid in self.inside.members() if number_of(pid) == number), None)

    def _prepare(self, stdin: bytes) -> None:
        """Make the files, as the owner of the container's /dev: no other user may write in a file system that
        belongs to its user namespace.
        """

        def make() -> None:
            libc.setfsgid(self.shift)
            libc.setfsuid(self.shift)
            root = self.inside.root
            for name, mode, content in ((INPUT, 0o644, stdin), (NOTES, 0o622, b"")):
                made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root)
                with open(made, "wb") as file:
                    file.write(content)
                    os.fchmod(made, mode)
            os.mkfifo(OUTPUT, 0o600, dir_fd=root)
            # The mode is set through a descriptor, because a `chmod` by path would follow a link.
            pipe = os.open(OUTPUT, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            try:
                os.fchmod(pipe, 0o622)
            finally:
                os.close(pipe)

        try:
            in_own_thread(make)
        except OSError as error:
            raise RuntimeFault(f"a container's /dev cannot be written to: {error}") from error

    def _opened(self) -> int:
        """Open the pipe in both directions, so that reading never ends and writing never fails. Raises
        ForkError if the pipe is gone, because another attempt would find the same.
        """
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            opened = os.open(OUTPUT, flags, dir_fd=self.inside.root)
        except OSError as error:
            raise ForkError(f"a container's output cannot be read: {error}") from error
        if not stat.S_ISFIFO(os.fstat(opened).st_mode):
            os.close(opened)
            raise ForkError("a container's output cannot be read: it is no pipe any more")
        return opened

    def _notes(self) -> list[int]:
        """The numbers that the shell has noted: its process id, and the program's exit code."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            opened = os.open(NOTES, flags, dir_fd=self.inside.root)
        except OSError:
            return []
        with open(opened, "rb") as file:
            # The agent may have put anything there.
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                return []
            lines = file.read(MAX_NOTES_BYTES).split(b"\n")[:-1]
        return [int(line) for line in lines if line.isdigit()]


def number_of(pid: int) -> int | None:
    """A process's id in its own container; None once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    line = next((each for each in status.splitlines() if each.startswith("NSpid:")), "")
    return int(line.split()[-1]) if line else None


async def _pump(output: int, sink: OutputSink) -> None:
    while True:
        await trio.lowlevel.wait_readable(output)
        _drain_pipe(output, sink)


def _drain_pipe(output: int, sink: OutputSink) -> None:
    """Pass on what is in the pipe now."""
    for piece in iter(partial(_read, output), b""):
        sink("stdout", piece)


def _read(output: int) -> bytes:
    try:
        return os.read(output, READ)
    except BlockingIOError:
        return b""
