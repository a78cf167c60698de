"""Run a program in a container: feed it, split its output into stdout and stderr, end it when cancelled.

`FrameSplitter` and `OutputTail` are pure: they cut Podman's stream into pieces and keep the last of them. A
frame is the stream's number, three zero bytes, the length as four bytes (big-endian), and that many bytes.
`ExecRunner` uses a raw stream to the service, because a thread cannot be cancelled and an exec may run for
an hour. Invariants: an exec is over when an inspect says so, never because its stream ended, since the
service may have died while the program runs on. Starting an exec cannot be cancelled, so that none starts
after its caller has left. Closing the stream ends no program, so signals end what a caller leaves behind.
"""

import math
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Literal

import trio
from attrs import define, field, frozen

from polarnode.containers.client import HijackedStream, call, hijack_stream
from polarnode.containers.freezing import ContainerFreeze
from polarnode.containers.inside import ContainerHandle
from polarnode.containers.service import PodmanService
from polarnode.core.backoff import Backoff
from polarnode.core.conversation import Json
from polarnode.core.errors import RuntimeFault
from polarnode.core.ports import LOST

# ── the stream ────────────────────────────────────────────────────────────────

HEADER = 8
STDOUT_NUMBER, STDERR_NUMBER = 1, 2
Channel = Literal["stdout", "stderr"]


@define(eq=False)
class FrameSplitter:
    """Splits the stream's bytes into pieces of stdout and stderr. Pieces of a frame are yielded as they come,
    so its length does not bound memory.
    """

    _header: bytearray = field(factory=bytearray, init=False)
    _left: int = field(default=0, init=False)
    _channel: Channel = field(default="stdout", init=False)

    def feed(self, data: bytes) -> Iterator[tuple[Channel, bytes]]:
        """The pieces in these bytes, in order."""
        view = memoryview(data)
        while view:
            if self._left:
                piece, view = view[: self._left], view[self._left :]
                self._left -= len(piece)
                yield self._channel, bytes(piece)
            else:
                missing = HEADER - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                self._read_header()

    def _read_header(self) -> None:
        if len(self._header) < HEADER:
            return
        number = self._header[0]
        if number not in (STDOUT_NUMBER, STDERR_NUMBER):
            raise RuntimeFault(f"podman: an exec's stream has a frame of kind {number}")
        self._channel = "stdout" if number == STDOUT_NUMBER else "stderr"
        self._left = int.from_bytes(self._header[4:], "big")
        self._header.clear()


@define(eq=False)
class OutputTail:
    """Keeps the last `limit` bytes of what was written."""

    limit: int
    dropped: int = field(default=0, init=False)
    _pieces: "deque[bytes]" = field(factory=deque, init=False)
    _kept: int = field(default=0, init=False)

    def write(self, piece: bytes) -> None:
        """Append a piece and drop what is now too old."""
        self._pieces.append(piece)
        self._kept += len(piece)
        while self._kept - len(self._pieces[0]) >= self.limit:
            self._drop(len(self._pieces.popleft()))

    def _drop(self, count: int) -> None:
        self._kept -= count
        self.dropped += count

    def value(self) -> bytes:
        """The end of everything written, at most `limit` bytes; `dropped` counts the other bytes."""
        whole = b"".join(self._pieces)
        surplus = max(0, len(whole) - self.limit)
        self._pieces = deque([whole[surplus:]])
        self._drop(surplus)
        return self._pieces[0]


# ── running ───────────────────────────────────────────────────────────────────

START_S = 90.0  # seconds an exec may take to start: 70 ms quiet, 3 s seen with 32 at once on two cores
TERM_GRACE = 3.0  # seconds a program has between TERM and KILL: time to write its last file
# The pauses between polls whether an exec has ended. The first ones are short, because it usually ends
# together with its stream; they grow for a stream that was torn.
POLL_PAUSES = Backoff(first_s=0.01, longest_s=1.0)
# Seconds that the service may take to notice that a program ended. It takes milliseconds, and seconds on a
# machine that swaps.
UNNOTICED_S = 15.0
UNREACHABLE_S = 60.0  # seconds that the service may be away while an exec ends; it is restarted within a few

SERVICE_DIED = "the podman service died while a program ran in a container: what it wrote is not whole"
MONITOR_PROGRAM = b"conmon"  # the program that starts an exec's program, and waits for it

# Podman's own complaint about conmon's socket, which is a frame by itself.
PODMANS_OWN = re.compile(rb"Error: (read|write) unixpacket @->\S*[^\n]*\r?\n?")

OutputSink = Callable[[Channel, bytes], None]


@frozen(kw_only=True)
class ExecOrder:
    """What to run, and as which user. `env` is merged over the image's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: str
    workdir: str
    stdin: bytes = b""


@define(eq=False)
class ExecRunner:
    """Runs programs in one container. `limiter` is the node's own over calls to Podman, held only while an
    exec starts.
    """

    service: PodmanService
    container: str
    inside: ContainerHandle
    limiter: trio.CapacityLimiter
    freeze: ContainerFreeze

    async def run(self, order: ExecOrder, sink: OutputSink, *, alone: bool = False) -> int:
        """Run a program to its end and return its exit code (127: no such program, 137: killed, LOST: the
        program lost its own). `sink` gets the output as it comes. On cancellation the program's process group
        gets TERM, then KILL; with `alone` everything else in the container is ended too, as it is when the
        exit code is lost. Raises RuntimeFault if the program's monitor was killed. It is also raised if the
        service died meanwhile, whatever the exit code is, because part of the output is missing.
        """
        exec_id: str | None = None
        try:
            async with AsyncExitStack() as stack:
                exec_id, stream = await self._start(order, stack)
                restarts = self.service.restarts
                await _pump(stream, order.stdin, sink)
            exit_code = await self._wait_ended(exec_id)
            if self.service.restarts != restarts:
                # A torn stream looks like one that has ended: the end of the output, or of the input, may be
                # missing.
                raise RuntimeFault(SERVICE_DIED)
            if exit_code == LOST and await trio.to_thread.run_sync(_monitor_lives, exec_id):
                # The monitor still waits to clean up, so it was not killed: the program itself made it lose
                # the exit code.
                await self._end(exec_id, alone)
            elif exit_code == LOST:
                raise RuntimeFault(
                    "the monitor of a program in a container (conmon) was killed: its exit code is lost"
                )
            return exit_code
        except BaseException:
            # Usually this is a cancellation. In any case the program must not outlive this call.
            with trio.move_on_after(UNREACHABLE_S, shield=True):
                await self._end(exec_id, alone)
            raise

    async def _start(self, order: ExecOrder, stack: AsyncExitStack) -> tuple[str, HijackedStream]:
        async with self.limiter:
            with trio.move_on_after(START_S, shield=True):
                exec_id = await self._create_exec(order)
                return exec_id, await stack.enter_async_context(
                    hijack_stream(
                        self.service.socket, f"/exec/{exec_id}/start", {"Detach": False, "Tty": False}
                    )
                )
        raise RuntimeFault(f"a program did not start in a container within {START_S:.0f} s")

    async def _create_exec(self, order: ExecOrder) -> str:
        body: dict[str, Json] = {
            "Cmd": list(order.argv),
            "Env": [f"{name}={value}" for name, value in order.env.items()],
            "User": order.user,
            "WorkingDir": order.workdir,
            "AttachStdin": bool(order.stdin),
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Privileged": False,
        }
        return str(
            (await call(self.service.socket, "POST", f"/containers/{self.container}/exec", body)).json()["Id"]
        )

    async def _wait_ended(self, exec_id: str) -> int:
        """Wait for the end and return the exit code; LOST if the program's monitor wrote none, or found none.
        Raises RuntimeFault if the service died meanwhile and did not learn the exit code.
        """
        pauses, doubtful = POLL_PAUSES.delays(), math.inf
        while True:
            state = await self._inspect_exec(exec_id)
            if not state["Running"] or not self.inside.alive():
                return state["ExitCode"]
            if not state["Pid"] or self.inside.holds(state["Pid"]):
                doubtful = math.inf
            elif doubtful == math.inf:
                doubtful = trio.current_time() + UNNOTICED_S
            elif trio.current_time() > doubtful:
                raise RuntimeFault(SERVICE_DIED)
            await trio.sleep(next(pauses))

    async def _inspect_exec(self, exec_id: str) -> Mapping[str, int]:
        """Return the service's record of an exec. If the service is being restarted, wait for it."""
        until = trio.current_time() + UNREACHABLE_S
        while True:
            try:
                reply = await call(self.service.socket, "GET", f"/exec/{exec_id}/json")
            except RuntimeFault:
                if trio.current_time() > until:
                    raise
                await trio.sleep(POLL_PAUSES.longest_s)
            else:
                state: Mapping[str, int] = reply.json()
                return state

    async def _end(self, exec_id: str | None, alone: bool) -> None:
        """TERM, a grace period, KILL. Never raises: the teardown of the container ends what remains."""
        try:
            await self.freeze.thaw_for_good()  # frozen programs take no signal
            state = await self._inspect_exec(exec_id) if exec_id is not None else {}
            if exec_id is not None and state["Running"] and state["Pid"]:
                self.inside.signal_group(state["Pid"], signal.SIGTERM)
                with trio.move_on_after(TERM_GRACE):
                    await self._wait_ended(exec_id)
                self.inside.signal_group(state["Pid"], signal.SIGKILL)
            # A program whose exit code is lost runs on, and Podman has forgotten its process id.
            if alone or (not state.get("Running") and state.get("ExitCode") == LOST):
                await self.inside.kill_all()
        except RuntimeFault:
            return  # the container is gone, or is about to be


def _monitor_lives(exec_id: str) -> bool:
    """Whether the monitor of an exec lives. Unless it was killed, it lives for EXEC_KEPT_S (`service.py`)
    more than its program.
    """
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it ended while we looked
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            if os.path.basename(words[0]) == MONITOR_PROGRAM and exec_id.encode() in words:
                return True
    return False


async def _pump(stream: HijackedStream, stdin: bytes, sink: OutputSink) -> None:
    """Feed and read concurrently, because a program may answer before it has read everything, or never read
    it.

    If a program ended while another one holds its output, Podman writes a last line of its own. That line
    belongs to no program and is dropped.
    """
    held: list[bytes] = []  # a piece that looks like Podman's line, until more comes
    async with trio.open_nursery() as nursery:
        if stdin:
            nursery.start_soon(_feed_stdin, stream, stdin)
        frames = FrameSplitter()
        while data := await stream.receive():
            for channel, piece in frames.feed(data):
                while held:
                    sink("stderr", held.pop())
                if channel == "stderr" and PODMANS_OWN.fullmatch(piece):
                    held.append(piece)
                else:
                    sink(channel, piece)
        nursery.cancel_scope.cancel()


async def _feed_stdin(stream: HijackedStream, stdin: bytes) -> None:
    try:
        await stream.stream.send_all(stdin)
        await stream.stream.send_eof()
    except trio.BrokenResourceError:
        return  # it ended without reading everything
