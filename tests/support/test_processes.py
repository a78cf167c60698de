"""A process and everything it started end with their block, in every way a block can end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from polarnode.support import concurrency
from polarnode.support.concurrency import group_members, open_process_group

SHELL = "/bin/sh"


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - a test looks from outside
            await trio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_output_file_and_exact_environment(tmp_path: Path) -> None:
    """Output goes to the file, and the environment is the one given."""
    with (tmp_path / "log").open("wb") as log:
        async with open_process_group(
            [SHELL, "-c", "echo $A $HOME; echo b >&2; pwd"], env={"A": "a"}, cwd=tmp_path, stdout=log
        ) as process:
            assert await process.wait() == 0
    assert (tmp_path / "log").read_text().split() == ["a", "b", str(tmp_path)]


async def test_sleeping_process_is_terminated() -> None:
    async with open_process_group(["sleep", "1000"]) as process:
        assert group_members(process.pid) == [process.pid]
    assert process.returncode == -signal.SIGTERM


async def test_grandchildren_are_ended_too(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; wait"
    async with open_process_group([SHELL, "-c", script]) as process:
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert len(group_members(process.pid)) == 2
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_background_children_end_after_success(tmp_path: Path) -> None:
    """Background children of a process that ended well end too."""
    script = f"sleep 1000 & echo $! > {tmp_path}/pid"
    async with open_process_group([SHELL, "-c", script]) as process:
        assert await process.wait() == 0
        grandchild = int((tmp_path / "pid").read_text())
        assert alive(grandchild)
    assert not alive(grandchild)


async def test_process_ignoring_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "TERM_GRACE", 0.3)
    code = (
        f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(tmp_path / 'up')!r},"
        " 'w'); time.sleep(1000)"
    )
    async with open_process_group([sys.executable, "-c", code]) as process:
        await until((tmp_path / "up").exists)
    assert process.returncode == -signal.SIGKILL


async def test_cancellation_and_errors_end_group() -> None:
    with trio.move_on_after(0.2) as scope:
        async with open_process_group(["sleep", "1000"]) as cancelled:
            await trio.sleep_forever()
    assert scope.cancelled_caught
    with pytest.raises(ValueError, match="body"):
        async with open_process_group(["sleep", "1000"]) as failed:
            raise ValueError("body")
    assert group_members(cancelled.pid) == group_members(failed.pid) == []


async def test_only_named_descriptors_are_inherited() -> None:
    read, write = os.pipe()
    async with open_process_group(
        [SHELL, "-c", f"echo x > /proc/self/fd/{write}"], pass_fds=(write,)
    ) as process:
        os.close(write)
        assert await process.wait() == 0
        assert os.read(read, 10) == b"x\n"
        assert os.read(read, 10) == b""  # and nobody else holds it
    os.close(read)


async def test_missing_program_is_oserror() -> None:
    with pytest.raises(FileNotFoundError):
        async with open_process_group(["/nowhere/program"]):
            pass


def test_zombies_are_not_counted() -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert group_members(child.pid) == []
    child.wait()
