"""The node's own Podman service: `podman system service` on a socket only root can open, for as long as the node lives.

It dies with the node even when the node is killed: its shell keeps a watcher on a pipe that only the node holds open, and the watcher ends
the whole process group when the pipe closes. (PR_SET_PDEATHSIG would watch the thread that started it, and Trio starts programs from
threads that retire.) Containers do not hang on the service: one that dies is started again, and calls meanwhile fail as RuntimeFault.
"""

import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import trio
from attrs import define, field

from polarnode.errors import RuntimeFault
from polarnode.shell.podman.store import Store

START_S = 60.0  # seconds until the socket answers: 0.1 s quiet, 1-3 s on a loaded machine, more where a reboot left a store to refresh
END_S = 5.0  # seconds it has for the end; it holds nothing that a kill would lose
POLL = 0.02  # seconds between looks for the socket while it starts
RESTART_PAUSES = (0.1, 0.5, 2.0, 5.0, 10.0)  # seconds before a restart, growing, so that one that can not start does not eat the machine

# Standard input is the lifeline. A background job gets its own from /dev/null unless told, and no shell but bash dups two-digit descriptors.
WATCHED = '(read -r _; kill -KILL 0) <&3 & exec "$@" </dev/null 3<&-'

LOGS_KEPT_S = 7 * 86400.0  # of nodes that were killed, for who wants to know why: a week, and none that says nothing

_log = logging.getLogger(__name__)


def sweep(store: Store) -> None:
    """Remove the sockets of nodes that were killed, and of their services' logs the empty and the old. A file begins with its node's process id."""
    for path in (*store.sockets.glob("*.sock"), *store.log_dir.glob("*.log")):
        pid = path.stem.partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and not _tells_something(path):
            path.unlink(missing_ok=True)


def _tells_something(path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:  # another node that starts swept it
        return False
    return path.suffix == ".log" and found.st_size > 0 and time.time() - found.st_mtime < LOGS_KEPT_S


@define(eq=False)
class Service:
    """A running service. `restarts` counts how often it had to be started again."""

    podman: Path
    store: Store
    socket: Path
    restarts: int = field(default=0, init=False)
    _process: trio.Process | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """The service's process now, for statistics and tests."""
        return self._process.pid if self._process else None

    async def run(self, ready: trio.Event) -> None:
        """Keep it running until cancelled; reports when the socket first answers. Raises RuntimeFault when it does not come up at first."""
        sweep(self.store)
        async with self._started():
            ready.set()
            await self._wait_ended()
        while True:
            await trio.sleep(RESTART_PAUSES[min(self.restarts, len(RESTART_PAUSES) - 1)])
            self.restarts += 1
            _log.warning("the podman service ended and is started again, for the %d. time", self.restarts)
            with suppress(RuntimeFault):  # told by the log; the next one may come up
                async with self._started():
                    await self._wait_ended()

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        alive, lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            with (self.store.log_dir / f"{self.socket.stem}.log").open("ab") as log:
                await self._start(alive, log)
            await self._wait_answering()
            yield
        finally:
            os.close(alive)
            with trio.move_on_after(3 * END_S, shield=True):  # more than its own deadlines
                await self._end()
            os.close(lifeline)

    async def _start(self, alive: int, log: BinaryIO) -> None:
        self.socket.unlink(missing_ok=True)
        service = [str(self.podman), "--log-level", "error", "system", "service", "--time", "0", f"unix://{self.socket}"]
        argv = ["sh", "-c", f"exec 3<&0; {WATCHED}", "sh", *service]
        env = self.store.environment()
        # conmon 2.1 leaves a file `oom` in the folder it was started from whenever a container meets its memory limit
        self._process = await trio.lowlevel.open_process(
            argv, stdin=alive, stdout=log, stderr=log, env=env, cwd=self.store.run_dir, start_new_session=True
        )

    async def _wait_answering(self) -> None:
        with trio.move_on_after(START_S):
            while not await self._answers():
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeFault(f"the podman service ended at its start: {self._last_words()}")
                await trio.sleep(POLL)
            return
        raise RuntimeFault(f"the podman service did not answer within {START_S:.0f} s: {self._last_words()}")

    async def _answers(self) -> bool:
        try:
            async with await trio.open_unix_socket(str(self.socket)):
                return True
        except OSError:
            return False

    async def _wait_ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for order in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, order)
            with trio.move_on_after(END_S):
                await process.wait()
        if process.returncode is None:
            _log.error("the podman service %d outlived SIGKILL", process.pid)
        self.socket.unlink(missing_ok=True)

    def _last_words(self) -> str:
        log = self.store.log_dir / f"{self.socket.stem}.log"
        return log.read_text(errors="replace")[-500:].strip() if log.exists() else "it said nothing"
