"""A process and everything it started, as one unit that ends with its block.

A killed process leaves its grandchildren, and a process that ends well may leave background children; both
are ended here by their process group. Invariants: output goes to files, never to pipes (a grandchild that
keeps a pipe open would hold up its reader); teardown is bounded, shielded, and never raises. A program that
makes a session of its own leaves the group: what must not escape belongs in a container.
"""

import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import trio

TERM_GRACE = 5.0  # seconds between TERM and KILL: what polarnode starts has nothing to save by itself
# seconds for the kernel to be done with killed processes: a GPU context of many GB takes some of them
KILL_GRACE = 10.0
POLL = 0.05  # seconds between checks of a group, only while one is being ended

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_process_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: BinaryIO | None = None,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[trio.Process]:
    """Start a program as the leader of its own session; at the end of the block, TERM then KILL whatever
    remains of its group.

    `stdout` receives stdout and stderr (None: neither is kept). `env` is the whole environment (None: that of
    this process). Raises OSError when the program cannot be started. The process may be awaited inside the
    block; its end does not end the block.
    """
    sink = stdout if stdout is not None else subprocess.DEVNULL
    process = await trio.lowlevel.open_process(
        list(argv),
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with trio.move_on_after(TERM_GRACE + 2 * KILL_GRACE, shield=True):
            await _end(process)


def group_members(group: int) -> list[int]:
    """The ids of the processes of a group that still run, without zombies."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _group_of(entry) == group
    ]


def _group_of(entry: Path) -> int | None:
    try:
        after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None  # it ended during the check
    state, _, group = after_name[:3]
    return None if state in "ZX" else int(group)


async def _end(process: trio.Process) -> None:
    """TERM, wait, KILL, wait. The leader is reaped last, so that its id, the group's name, is not reused
    meanwhile.
    """
    for order, grace in ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, KILL_GRACE)):
        if not _signal(process.pid, order):
            break
        with trio.move_on_after(grace):
            await _wait_gone(process)
    with trio.move_on_after(KILL_GRACE):
        await process.wait()
    if remaining := group_members(process.pid):
        _log.error("processes %s outlived SIGKILL", remaining)


def _signal(group: int, order: signal.Signals) -> bool:
    """Signal the group; whether there was any process to signal."""
    if not group_members(group):
        return False
    with suppress(ProcessLookupError):
        os.killpg(group, order)
    return True


async def _wait_gone(process: trio.Process) -> None:
    # The kernel reports the end of our child, but of its children to nobody: they are polled.
    while group_members(process.pid):  # noqa: ASYNC110
        await trio.sleep(POLL)
