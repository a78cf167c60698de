"""Programs in a container: however one ends, is ended, floods or is fed, its exit code is its own and nothing
of it stays.
"""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import trio
from attrs import evolve
from podman_parts import LIFETIME_S, SMALL, cancel_at_sign, kept_limits

from polarnode.containers.exec import SERVICE_DIED
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core.errors import RuntimeFault
from polarnode.core.ports import LOST

pytestmark = pytest.mark.podman

CODES = [
    (["true"], 0),
    (["sh", "-c", "exit 255"], 255),
    (["no-such-program"], 127),
    ([""], 127),
    (["/work/not-executable"], 126),
    (["/work"], 126),
    (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
    (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL),
    (["sh", "-c", "kill -SEGV $$"], 128 + signal.SIGSEGV),
]


async def running(runtime: PodmanRuntime) -> list[str]:
    """What runs in a container besides its first process and who looks."""
    printed = (await runtime.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout.decode().split()
    for own in ("polarnode-init", "sh", "cat"):
        if own in printed:
            printed.remove(own)
    return printed


async def test_exit_codes_are_of_program(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="codes", lifetime_s=LIFETIME_S) as runtime:
        await runtime.put({"/work/not-executable": b"#!/bin/sh\n"})
        for argv, code in CODES:
            ended = await runtime.run(argv)
            assert ended.exit_code == code, (argv, ended)
            assert bool(ended.stderr) == (code in (126, 127)), "what could not be started says why"
        assert (await runtime.run(["true"], workdir="/not/there")).exit_code == 127
        assert (await runtime.run(["true"], env={"LONG": "x" * 200_000})).exit_code != 0


async def test_large_stdin_is_fed_at_speed(runtimes: NodeRuntimes) -> None:
    """A hundred megabytes go in as fast as they are read."""
    data = os.urandom(1 << 20) * 100
    async with runtimes.open(SMALL, session_id="stdin", lifetime_s=LIFETIME_S) as runtime:
        slowly = "head -c 1000 >/dev/null; sleep 1; wc -c"
        assert int((await runtime.run(["sh", "-c", slowly], stdin=data)).stdout) == len(data) - 1000
        assert (await runtime.run(["sh", "-c", "exec 0<&-; exit 4"], stdin=data)).exit_code == 4, (
            "it may hang up on us"
        )


async def test_output_flood_is_stopped(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    log = tmp_path / "flood.log"
    async with runtimes.open(SMALL, session_id="flood", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["true"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with trio.move_on_after(4) as scope:
            await runtime.run_logged(
                ["sh", "-c", "yes & yes >&2 & yes 'a longer line of nothing but words'"],
                env={},
                log=log,
                limit=100_000,
            )
        assert scope.cancelled_caught
        assert log.stat().st_size < 101_000
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        assert grown < 100, f"{grown} MB"
        assert await running(runtime) == []


async def test_deadline_sends_term_before_kill(runtimes: NodeRuntimes) -> None:
    """`run` ends the program it started; what that left behind is ended by `end_processes`."""
    stubborn = (
        "trap 'echo asked >> /work/asked' TERM; (setsid sh -c 'touch /work/up; exec sleep 1000' &); while :;"
        " do sleep 0.1; done"
    )
    async with runtimes.open(SMALL, session_id="deadline", lifetime_s=LIFETIME_S) as runtime:
        assert await cancel_at_sign(runtime, "/work/up", lambda: runtime.run(["sh", "-c", stubborn]))
        assert await runtime.read("/work/asked") == b"asked\n"
        assert await running(runtime) == ["sleep"]
        await runtime.end_processes()
        assert await running(runtime) == []


async def test_nested_daemons_end_too(runtimes: NodeRuntimes) -> None:
    daemon = (
        "import os, time\nfor _ in range(20):\n    if os.fork():\n        os._exit(0)\n   "
        " os.setsid()\ntime.sleep(1000)"
    )
    async with runtimes.open(SMALL, session_id="daemons", lifetime_s=LIFETIME_S) as runtime:
        assert (await runtime.run(["python3", "-c", daemon])).exit_code == 0
        assert await running(runtime) == ["python3"]
        await runtime.end_processes()
        assert await running(runtime) == []


@pytest.mark.parametrize("fed", [b"", bytes(40 << 20)], ids=["reading", "being fed"])
async def test_service_dies_during_program(runtimes: NodeRuntimes, fed: bytes) -> None:
    """Whoever waits hears of it, whatever the exit code: the output has no end, and neither may what was
    fed. The program is ended with the rest, and the container goes on.
    """
    async with runtimes.open(SMALL, session_id="dies", lifetime_s=LIFETIME_S) as runtime:

        async def program() -> None:
            with pytest.raises(RuntimeFault, match=SERVICE_DIED):
                await runtime.run(["sh", "-c", "echo begun > begun; sleep 5; wc -c"], stdin=fed)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(program)
            while await runtime.read("/work/begun") is None:  # noqa: ASYNC110 (a container has no events)
                await trio.sleep(0.1)
            service = runtimes._service.pid
            assert service is not None
            os.killpg(service, signal.SIGKILL)
        await runtime.end_processes()
        assert await running(runtime) == []


@kept_limits
async def test_memory_exhaustion_is_reported(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="oom", lifetime_s=LIFETIME_S) as runtime:
        assert runtime.oom_kills() == 0
        assert (await runtime.run(["python3", "-c", "x = bytearray(400 << 20)"])).exit_code == 137
        assert runtime.oom_kills() == 1
        assert (await runtime.run(["sh", "-c", "kill -9 $$"])).exit_code == 137
        assert runtime.oom_kills() == 1, "a kill is not the kernel's"
    assert runtime.oom_kills() == 0, "asked too late, there is nothing to tell"


def monitor_of(pid: int) -> int:
    """The conmon of a program or of a container, by its process id."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    parent = next(int(line.split()[1]) for line in status if line.startswith("PPid:"))
    assert Path(f"/proc/{parent}/comm").read_text().strip() == "conmon"
    return parent


async def test_killed_monitor_is_machine_fault(runtimes: NodeRuntimes) -> None:
    """Its exit code is lost, so nothing is held against it; it is ended, and the container goes on."""
    async with runtimes.open(SMALL, session_id="monitor", lifetime_s=LIFETIME_S) as runtime:
        faults: list[RuntimeFault] = []

        async def program() -> None:
            try:
                await runtime.run(["sh", "-c", "echo up > up; exec sleep 1000"])
            except RuntimeFault as fault:
                faults.append(fault)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(program)
            while await runtime.read("/work/up") is None:  # noqa: ASYNC110 (a container has no events)
                await trio.sleep(0.05)
            (sleeper,) = runtime._inside.members()
            os.kill(monitor_of(sleeper), signal.SIGKILL)
        assert "exit code is lost" in str(faults[0])
        assert not await runtime.busy(), "the program does not outlive its run"
        assert (await runtime.run(["sh", "-c", "exit 7"])).exit_code == 7


TRACED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(0, 0, 0, 0), ctypes.get_errno(), flush=True)
os.execv("/bin/sh", ["sh", "-c", "sleep 1000 & exit 7"])
"""


async def test_no_program_asks_for_tracing(runtimes: NodeRuntimes) -> None:
    """Where it could, its monitor would take its first stop for its end."""
    async with runtimes.open(SMALL, session_id="traced", lifetime_s=LIFETIME_S) as runtime:
        ended = await runtime.run(["python3", "-c", TRACED])
        assert (ended.exit_code, ended.stdout) == (7, f"-1 {errno.EPERM}\n".encode())


async def test_traced_program_loses_exit_code(runtimes: NodeRuntimes) -> None:
    """Where the task lets it, that is the program's own doing, and no fault of the machine."""
    spec = evolve(SMALL, ptrace=True)
    async with runtimes.open(spec, session_id="traced", lifetime_s=LIFETIME_S) as runtime:
        ended = await runtime.run(["python3", "-c", TRACED])
        assert (ended.exit_code, ended.stdout) == (LOST, b"0 0\n")
        assert not await runtime.busy(), "the program does not outlive its run"
        assert (await runtime.run(["sh", "-c", "exit 7"])).exit_code == 7


async def test_container_survives_its_killed_monitor(
    runtimes: NodeRuntimes,
) -> None:
    async with runtimes.open(SMALL, session_id="monitor", lifetime_s=LIFETIME_S) as runtime:
        first = runtime._inside.pid
        os.kill(monitor_of(first), signal.SIGKILL)
        assert (await runtime.run(["sh", "-c", "exit 7"])).exit_code == 7
        assert runtime.alive
    with pytest.raises(ProcessLookupError):  # it is removed all the same
        os.kill(first, 0)
