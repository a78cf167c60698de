"""A real container as a session uses it: programs, files, limits, and an end that leaves nothing."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from attrs import evolve
from fakes_runtime import CONTRACT
from podman_parts import LIFETIME_S, SMALL, cancel_at_sign, kept_limits

from polarnode.containers.container import LABEL_OWNER, current_owner
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core.errors import RuntimeFault
from polarnode.core.task import RuntimeSpec

pytestmark = pytest.mark.podman


@pytest.mark.parametrize("assertions", CONTRACT, ids=lambda each: each.__name__.removeprefix("contract_"))
async def test_container_keeps_runtime_contract(runtimes: NodeRuntimes, assertions) -> None:  # type: ignore[no-untyped-def]
    async with runtimes.open(SMALL, session_id="contract", lifetime_s=LIFETIME_S) as runtime:
        await assertions(runtime)


async def test_user_and_folder_of_session(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="who", lifetime_s=LIFETIME_S) as runtime:
        printed = (
            await runtime.run(
                [
                    "sh",
                    "-c",
                    "id -u; pwd; cat /proc/self/status; cat /proc/self/uid_map; cat /proc/1/comm; env",
                ]
            )
        ).stdout.decode()
        lines = printed.splitlines()
        assert lines[:2] == ["1000", "/work"]
        assert runtime.home == "/home/agent"
        assert "NoNewPrivs:\t1" in printed
        assert "Seccomp:\t2" in printed
        for kind in ("Eff", "Prm", "Bnd"):
            assert f"Cap{kind}:\t0000000000000000" in printed
        if runtimes.findings.user_namespaces:
            ids = next(line.split() for line in lines if line.endswith("65536"))
            assert int(ids[1]) >= 0x7000_0000, "root in there is nobody here"
        as_root = (
            await runtime.run(["sh", "-c", "id -u; grep CapEff /proc/self/status"], user="root")
        ).stdout.decode()
        assert as_root == "0\nCapEff:\t0000000000000000\n"


async def test_container_ending_at_start(runtimes: NodeRuntimes, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: int) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/1234/cgroup")

    async def unbounded(*_: object) -> None:  # it looks at the group before
        await trio.lowlevel.checkpoint()

    starter = runtimes._pool.starter
    with monkeypatch.context() as patch:
        for name in ("freezer_file", "control_group_of"):
            patch.setattr(f"polarnode.containers.starting.{name}", gone)
        patch.setattr(type(starter), "bounded", unbounded)
        with pytest.raises(RuntimeFault, match="a container ended as it started"):
            async with runtimes.open(SMALL, session_id="gone", lifetime_s=LIFETIME_S):
                pytest.fail("opened")
    assert await runtimes.sweep() == 0, "nothing of it is left"
    assert not starter.alive


async def test_node_environment_stays_outside(
    runtimes: NodeRuntimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_SECRET", "do-not-leak")
    monkeypatch.setenv("HTTP_PROXY", "http://do-not-leak")
    async with runtimes.open(SMALL, session_id="env", lifetime_s=LIFETIME_S) as runtime:
        printed = (await runtime.run(["env"])).stdout.decode()
        assert "do-not-leak" not in printed
        assert {line.partition("=")[0] for line in printed.splitlines()} <= {
            "PATH",
            "HOME",
            "LANG",
            "HOSTNAME",
            "TERM",
            "container",
            "PWD",
        }


async def test_files_belong_to_given_user(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="files", lifetime_s=LIFETIME_S) as runtime:
        await runtime.put({"/work/deep/er/run.sh": b"#!/bin/sh\necho ran\n"}, mode=0o755)
        await runtime.put({"/srv/tests/hidden": b"x"}, user="root", mode=0o600)
        printed = (
            await runtime.run(
                ["stat", "-c", "%u:%g %a %n", "/work/deep", "/work/deep/er/run.sh", "/srv/tests/hidden"]
            )
        ).stdout.decode()
        assert printed.splitlines() == [
            "1000:1000 755 /work/deep",
            "1000:1000 755 /work/deep/er/run.sh",
            "0:0 600 /srv/tests/hidden",
        ]
        assert (await runtime.run(["/work/deep/er/run.sh"])).stdout == b"ran\n"
        assert (await runtime.run(["cat", "/srv/tests/hidden"])).exit_code != 0, (
            "what is root's is closed to the agent"
        )
        assert await runtime.read("/srv/tests/hidden") == b"x"
        with pytest.raises(RuntimeFault, match="no user nobody-here"):
            await runtime.put({"/work/x": b""}, user="nobody-here")


async def test_links_reach_no_host_file(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the machine's")
    async with runtimes.open(SMALL, session_id="links", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(
            [
                "sh",
                "-c",
                (
                    f"ln -s {secret} direct; ln -s {tmp_path} folder; ln -s /proc/1/root/etc magic; mkfifo"
                    " pipe; ln -s / up"
                ),
            ]
        )
        for path in (
            "/work/direct",
            "/work/folder/secret",
            "/work/magic/passwd",
            "/work/pipe",
            f"/work/up{secret}",
            "/dev/zero",
            "/work",
        ):
            assert await runtime.read(path) is None, path
        for path in ("/work/direct", "/work/folder/new", "/work/up/work/new", "/work/pipe"):
            with pytest.raises(RuntimeFault):
                await runtime.put({path: b"written"})
    assert secret.read_text() == "the machine's"
    assert os.listdir(tmp_path) == ["secret"]


async def test_large_output_keeps_its_end(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="large", lifetime_s=LIFETIME_S) as runtime:
        ended = await runtime.run(["sh", "-c", "head -c 50000000 /dev/zero; echo the end; echo short >&2"])
        assert ended.truncated
        assert ended.stdout.endswith(b"\0the end\n")
        assert len(ended.stdout) == 32 << 20
        assert ended.stderr == b"short\n"
        ended = await runtime.run(["sh", "-c", "echo 123456"], keep=5)
        assert (ended.stdout, ended.truncated) == (b"3456\n", True)


async def test_large_stdin_round_trips(runtimes: NodeRuntimes) -> None:
    data = bytes(range(256)) * 20_000
    async with runtimes.open(SMALL, session_id="stdin", lifetime_s=LIFETIME_S) as runtime:
        assert (await runtime.run(["cat"], stdin=data)).stdout == data
        assert (await runtime.run(["true"], stdin=data)).exit_code == 0, (
            "a program need not read what it is given"
        )


async def test_daemon_holding_stdout_blocks_nobody(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="daemon", lifetime_s=LIFETIME_S) as runtime:
        with trio.fail_after(60):
            ended = await runtime.run(["sh", "-c", "sleep 1000 & setsid sleep 1000 & echo started"])
        assert (ended.exit_code, ended.stdout) == (0, b"started\n")


HEADLESS = """
import ctypes, os, threading, time
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=lambda: time.sleep(1000)).start()
    for each in range(3): os.close(each)
    ctypes.CDLL(None).syscall(60, 0)
time.sleep(0.5)
"""


async def test_threads_without_main_thread_end(runtimes: NodeRuntimes) -> None:
    """A process whose main thread has ended is listed as a zombie, and runs."""
    async with runtimes.open(SMALL, session_id="headless", lifetime_s=LIFETIME_S) as runtime:
        assert (await runtime.run(["python3", "-c", HEADLESS])).exit_code == 0
        assert await runtime.busy()
        await runtime.end_processes()
        assert not await runtime.busy()
        threads = "cat /proc/[0-9]*/status | grep -c 'State:.*Z'"
        assert (await runtime.run(["sh", "-c", threads])).stdout == b"0\n"


@pytest.mark.parametrize(
    "spoil",
    ["rm -rf /work/w", "chmod 000 /work/w", "mv /work/w /work/v", "rm -rf /work/w; echo 1 > /work/w"],
)
async def test_spoilt_workdir_is_recreated(runtimes: NodeRuntimes, spoil: str) -> None:
    """So that a test starts in it, and says what it says of nothing."""
    spec = evolve(SMALL, workdir="/work/w")
    async with runtimes.open(spec, session_id="spoilt", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["sh", "-c", f"echo 1 > out; cd /; {spoil}"])
        await runtime.unseal()
        assert (await runtime.run(["sh", "-c", "pwd; touch mine"])).stdout == b"/work/w\n"


@kept_limits
async def test_exhausted_memory_ends_no_container(runtimes: NodeRuntimes) -> None:
    """Files in memory stay when all programs are ended; then its first process would be the kernel's prey."""
    spec = evolve(SMALL, memory_mb=48)
    async with runtimes.open(spec, session_id="prey", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["sh", "-c", "head -c 60M /dev/zero > /dev/shm/x"])
        await runtime.end_processes()
        assert runtime.alive
        assert (await runtime.run(["sh", "-c", "exit 7"])).exit_code in (125, 137), "no room"


STUBBORN = """
trap '' TERM
(trap '' TERM; sleep 1000) &
setsid sh -c "trap '' TERM; sleep 1000" &
setsid sh -c "setsid sh -c 'nohup sleep 1000 >/dev/null 2>&1 &'" &
python3 -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
' &
echo up
sleep 1; touch /work/up
sleep 1000
"""


async def test_ending_leaves_no_hidden_process(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    log = tmp_path / "harness.log"
    async with runtimes.open(SMALL, session_id="stubborn", lifetime_s=LIFETIME_S) as runtime:
        assert await cancel_at_sign(
            runtime,
            "/work/up",
            lambda: runtime.run_logged(["sh", "-c", STUBBORN], env={}, log=log, limit=1000),
        )
        assert log.read_bytes() == b"up\n"
        left = (await runtime.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout.decode().split()
        assert left == ["polarnode-init", "sh"]


async def test_harness_may_handle_term(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    polite = "trap 'echo bye > /work/bye; exit 0' TERM; touch /work/up; while :; do sleep 0.1; done"
    async with runtimes.open(SMALL, session_id="polite", lifetime_s=LIFETIME_S) as runtime:
        assert await cancel_at_sign(
            runtime,
            "/work/up",
            lambda: runtime.run_logged(["sh", "-c", polite], env={}, log=tmp_path / "log", limit=1000),
        )
        assert await runtime.read("/work/bye") == b"bye\n"


async def test_harness_stdin_and_bounded_log(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    log = tmp_path / "harness.log"
    async with runtimes.open(SMALL, session_id="log", lifetime_s=LIFETIME_S) as runtime:
        code = await runtime.run_logged(
            ["sh", "-c", "echo first; cat; seq 100000; echo $WORD >&2; exit 5"],
            env={"WORD": "last"},
            log=log,
            limit=10_000,
            stdin=b"fed\n",
        )
    assert code == 5
    text = log.read_text()
    assert text.startswith("first\nfed\n1\n2\n")
    assert text.endswith("\n100000\nlast\n") or text.rstrip().endswith("100000")
    assert len(text) < 10_100
    assert "bytes left out" in text


async def test_fork_bomb_is_contained(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="bomb", lifetime_s=LIFETIME_S) as runtime:
        with trio.move_on_after(5):
            await runtime.run(
                ["python3", "-c", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"]
            )
        with trio.fail_after(120):
            await runtime.end_processes()
        assert (await runtime.run(["echo", "alive"])).stdout == b"alive\n"


@kept_limits
async def test_container_survives_memory_limit(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="memory", lifetime_s=LIFETIME_S) as runtime:
        ended = await runtime.run(["python3", "-c", "x = bytearray(400 << 20); print(len(x))"])
        assert ended.exit_code == 137
        assert (await runtime.run(["echo", "alive"])).stdout == b"alive\n"


async def test_container_ends_after_lifetime(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="switch", lifetime_s=4.0) as runtime:
        with trio.fail_after(120):
            with pytest.raises(RuntimeFault, match="ended"):
                await runtime.run(["sleep", "1000"])
        with pytest.raises(RuntimeFault, match="ended"):
            await runtime.run(["true"])
        assert not runtime.alive


async def test_agent_cannot_end_own_container(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="suicide", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["sh", "-c", "kill -9 -1; kill -9 1"])
        await runtime.run(["sh", "-c", "kill -9 -1; kill -9 1"], user="root")
        assert runtime.alive
        assert (await runtime.run(["echo", "alive"])).stdout == b"alive\n"


async def test_two_runtimes_are_isolated(runtimes: NodeRuntimes) -> None:
    async with (
        runtimes.open(SMALL, session_id="one", lifetime_s=LIFETIME_S) as one,
        runtimes.open(SMALL, session_id="two", lifetime_s=LIFETIME_S) as two,
    ):
        await one.put({"/work/mine": b"x"})
        assert await two.read("/work/mine") is None
        assert one.id != two.id
        ids = [int((await each.run(["cat", "/proc/self/uid_map"])).stdout.split()[1]) for each in (one, two)]
        assert not runtimes.findings.user_namespaces or ids[0] != ids[1]


async def test_workdir_created_and_user_found(runtimes: NodeRuntimes) -> None:
    spec = RuntimeSpec(memory_mb=256, pids=64, workdir="/testbed/repo", user="root")
    async with runtimes.open(spec, session_id="root", lifetime_s=LIFETIME_S) as runtime:
        assert runtime.home == "/root"
        ended = await runtime.run(["sh", "-c", "touch here && pwd && id -u && echo $HOME"])
        assert ended.stdout.decode().split() == ["/testbed/repo", "0", "/root"]


async def test_failed_start_leaves_nothing(runtimes: NodeRuntimes) -> None:
    for spec, printed in (
        (RuntimeSpec(image="localhost/none/such"), "no such image|not known"),
        (RuntimeSpec(user="ghost"), "no user ghost"),
    ):
        with pytest.raises(RuntimeFault, match=printed):
            async with runtimes.open(spec, session_id="never", lifetime_s=LIFETIME_S):
                pass
    assert runtimes.statistics().failed == 2
    assert await _containers(runtimes) == []


async def test_cancelled_session_leaves_nothing(runtimes: NodeRuntimes) -> None:
    for patience in (0.0, 0.02, 0.1, 0.5):
        with trio.move_on_after(patience):
            async with runtimes.open(SMALL, session_id="cancelled", lifetime_s=LIFETIME_S) as runtime:
                await runtime.run(["sleep", "1000"])
    assert await _containers(runtimes) == []
    assert runtimes.statistics().live == 0


async def test_failing_session_keeps_its_error(runtimes: NodeRuntimes) -> None:
    """A failing session leaves nothing, and keeps its error."""
    seen: list[PodmanRuntime] = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 (the block is the point)
        async with runtimes.open(SMALL, session_id="failing", lifetime_s=LIFETIME_S) as runtime:
            seen.append(runtime)
            raise ZeroDivisionError
    assert not seen[0].alive
    await seen[0].close()
    assert await _containers(runtimes) == []


async def _containers(runtimes: NodeRuntimes) -> list[str]:
    """Names of the containers this test's node has, by asking Podman."""
    listed = await runtimes._pool.starter.client.list_labelled(f"{LABEL_OWNER}={current_owner().label()}")
    return [each.names[0] for each in listed]


async def test_removal_during_clearing_is_harmless(runtimes: NodeRuntimes) -> None:
    """The watch over the disk ends programs of a container that its session may just remove: its descriptors
    are somebody else's then.
    """
    sleeper = ["sh", "-c", "sleep 1000 > /dev/null 2>&1 &"]
    async with runtimes.open(SMALL, session_id="neighbour", lifetime_s=LIFETIME_S) as neighbour:
        await neighbour.run(sleeper)
        async with runtimes.open(SMALL, session_id="goes", lifetime_s=LIFETIME_S) as runtime:
            await runtime.run(sleeper)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.end_processes)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(runtime.close)
        await runtime.end_processes()
        assert await neighbour.busy()
