"""A root that is read-only while a harness runs: what can be written, that nobody inside can undo it, and
that nothing of it stays anywhere.
"""

import errno
import importlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve
from podman_parts import LIFETIME_S, SMALL, settings, until

from polarnode.containers import sealing
from polarnode.containers.client import call
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.containers.sealing import mounts_of, run_in_mounts, sealing_obstacle
from polarnode.core.errors import Refused, RuntimeFault

PROBE = importlib.import_module("polarnode.containers.probe")  # the package has a function of that name

WRITES = """
for place in /work /tmp /var/tmp "$HOME" /opt/cache /dev/shm /etc /usr/local /var/lib /run /opt /root; do
    if touch $place/x-$1 2>/dev/null; then echo $place; fi
done
"""
ROOT = evolve(SMALL, user="root", workdir="/testbed")


async def written(runtime: PodmanRuntime, mark: str, **more: str) -> set[str]:
    """The places a program of the container can write to."""
    return set((await runtime.run(["sh", "-c", WRITES, "sh", mark], **more)).stdout.decode().split())


def host_mounts() -> set[str]:
    return {
        mount.place
        for mount in mounts_of(os.getpid())
        if "shm" not in mount.place and "overlay" not in mount.place
    }


# ── what can be written ───────────────────────────────────────────────────────


@pytest.mark.podman
async def test_root_writes_only_to_workspace(runtimes: NodeRuntimes) -> None:
    """Images of tasks often run as root; without a seal it may overwrite its own tools."""
    spec = evolve(ROOT, writable=("/opt/cache", "/not/there", "/testbed/deep"))
    async with runtimes.open(spec, session_id="seal", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["mkdir", "-p", "/opt/cache", "/testbed/deep"])
        unsealed = {"/opt/cache", "/etc", "/usr/local", "/var/lib", "/run", "/opt", "/root"}
        assert unsealed <= await written(runtime, "before")
        await runtime.seal(spec)
        open_now = await written(runtime, "sealed")
        assert open_now & unsealed == {"/opt/cache", "/root"}
        ended = await runtime.run(
            [
                "sh",
                "-c",
                (
                    "touch deep/er; echo hi > /etc/hosts; rm -rf /usr/bin/python3; ls /usr/bin/python3; chmod"
                    " 777 /etc"
                ),
            ]
        )
        assert ended.stdout == b"/usr/bin/python3\n"
        assert ended.stderr.count(b"Read-only file system") == 3
        assert await runtime.read("/testbed/deep/er") == b""
        await runtime.unseal()
        assert unsealed <= await written(runtime, "after")
        left = (await runtime.run(["cat", "/proc/self/mountinfo"])).stdout.decode()
        assert " /testbed " not in left, "what was mounted for the seal is gone again"


@pytest.mark.podman
async def test_agent_has_home_and_temporary_folders(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="seal", lifetime_s=LIFETIME_S) as runtime:
        await runtime.put({"/work/before": b"1"})
        await runtime.seal(SMALL)
        await runtime.seal(SMALL)
        assert await written(runtime, "agent") >= {"/work", "/tmp", "/var/tmp", "/home/agent"}
        assert await runtime.read("/work/before") == b"1"
        with pytest.raises(
            RuntimeFault,
            match="writing /etc/x: it is read-only, as all but the writable places is while a harness runs",
        ):
            await runtime.put({"/etc/x": b""})
        await runtime.put({"/work/during": b"2"})
        assert (await runtime.run(["cat", "before", "during"])).stdout == b"12"
        await runtime.unseal()
        await runtime.unseal()
        await runtime.put({"/etc/x": b""})


@pytest.mark.podman
async def test_task_may_disable_sealing(runtimes: NodeRuntimes) -> None:
    for spec in (evolve(ROOT, read_only=False), evolve(ROOT, writable=("/",))):
        async with runtimes.open(spec, session_id="open", lifetime_s=LIFETIME_S) as runtime:
            await runtime.seal(spec)
            assert "/etc" in await written(runtime, "open")
            await runtime.unseal()


# ── nobody inside can undo it ─────────────────────────────────────────────────

UNDO = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(what, result):
    print(what, "DONE" if result == 0 else errno_name())
def errno_name():
    import errno
    return errno.errorcode[ctypes.get_errno()]
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
def all_of_it(where):
    tried(where + " remount", libc.mount(None, b"/", None, MS_REMOUNT | MS_BIND, None))
    tried(where + " remount plainly", libc.mount(None, b"/", None, MS_REMOUNT, None))
    tried(where + " mount_setattr", libc.syscall(442, -100, b"/", 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32))
    tried(where + " another view", libc.mount(b"/", b"/tmp", None, MS_BIND | MS_REC, None))
    try:
        open("/tmp/etc/x", "w"); print(where, "WROTE")
    except OSError as error:
        print(where, "another view cannot be written", error.strerror)
    try:
        open("/etc/x", "w"); print(where, "WROTE")
    except OSError as error:
        print(where, "the root cannot be written", error.strerror)
all_of_it("here")
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
uid = os.getuid()
tried("a namespace", libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
all_of_it("in a namespace")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        open(f"/proc/{pid}/root/etc/x", "w"); print(pid, "WROTE")
    except OSError:
        pass
print("tried")
"""


@pytest.mark.podman
@pytest.mark.parametrize("user", ["agent", "root"])
async def test_seal_cannot_be_undone_inside(runtimes: NodeRuntimes, user: str) -> None:
    spec = evolve(SMALL, user=user)
    async with runtimes.open(spec, session_id="undo", lifetime_s=LIFETIME_S) as runtime:
        await runtime.put({"/tmp/undo.py": UNDO.encode()})
        await runtime.seal(spec)
        ended = await runtime.run(["python3", "/tmp/undo.py"])
        printed = ended.stdout.decode()
        assert printed.endswith("tried\n"), ended.stderr
        assert "WROTE" not in printed
        assert "remount DONE" not in printed
        assert "mount_setattr DONE" not in printed
        assert printed.count("the root cannot be written Read-only file system") == 2
        await runtime.unseal()
        assert await runtime.read("/etc/x") is None


# ── what is in the way ────────────────────────────────────────────────────────


@pytest.mark.podman
async def test_writing_program_is_named(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(ROOT, session_id="busy", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["sh", "-c", "exec 3> /srv/served.log; sleep 1000 & disown 2>/dev/null; true"])
        with pytest.raises(
            Refused,
            match=r"\(/srv/served.log\), which forbids a read-only root: end it, or set read_only = false",
        ) as refused:
            await runtime.seal(ROOT)
        assert refused.value.path == "$.runtime.read_only"
        assert "/etc" in await written(runtime, "whole"), "nothing is half sealed"
        assert " /testbed " not in (await runtime.run(["cat", "/proc/self/mountinfo"])).stdout.decode()
        await runtime.end_processes()
        await runtime.seal(ROOT)
        assert "/etc" not in await written(runtime, "sealed")


def test_forbidden_mounts_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mounts(place: bytes, flags: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", "mount")

    assert sealing_obstacle() is None or os.geteuid() != 0
    before = host_mounts()
    monkeypatch.setattr(sealing, "_mount", no_mounts)
    assert "Operation not permitted" in str(sealing_obstacle())
    assert host_mounts() == before
    finding = PROBE._sealing_finding(sealing_obstacle())
    assert "no root can be made read-only here" in finding.what
    assert "read_only = false" in finding.remedy


@pytest.mark.podman
async def test_failed_seal_leaves_nothing(runtimes: NodeRuntimes, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mounts(place: str, flags: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", "mount")

    async with runtimes.open(ROOT, session_id="forbidden", lifetime_s=LIFETIME_S) as runtime:
        with monkeypatch.context() as patched:
            patched.setattr(sealing, "_remount", no_mounts)
            with pytest.raises(RuntimeFault, match="set read_only = false in the task"):
                await runtime.seal(ROOT)
        assert " /testbed " not in (await runtime.run(["cat", "/proc/self/mountinfo"])).stdout.decode()
        await runtime.seal(ROOT)
        assert "/etc" not in await written(runtime, "sealed")


# ── it leaves nothing, anywhere ───────────────────────────────────────────────


def threads_mounts() -> set[int]:
    """The mount namespaces our threads are in."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            found.add(os.stat(f"/proc/self/task/{task}/ns/mnt").st_ino)
    return found


@pytest.mark.podman
async def test_node_threads_keep_own_mounts(runtimes: NodeRuntimes) -> None:
    mine = os.stat("/proc/self/ns/mnt").st_ino
    before = host_mounts()
    async with runtimes.open(SMALL, session_id="threads", lifetime_s=LIFETIME_S) as runtime:
        inside = await trio.to_thread.run_sync(
            partial(run_in_mounts, runtime._inside, partial(os.path.exists, "/dev/polarnode-init"))
        )
        assert inside
        for _ in range(3):
            await runtime.seal(SMALL)
            await runtime.unseal()
        # a thread that was joined is in the kernel's list for a moment yet
        await until(lambda: threads_mounts() == {mine})
        assert host_mounts() == before
    assert host_mounts() == before


@pytest.mark.podman
async def test_sealed_container_is_copied_and_removed(runtimes: NodeRuntimes) -> None:
    """A commit takes the layer: what was written to the workspace under a seal is in it."""
    name = "localhost/polarnode-test-sealed:" + os.urandom(4).hex()
    before = host_mounts()
    async with runtimes.open(SMALL, session_id="commit", lifetime_s=LIFETIME_S) as runtime:
        await runtime.seal(SMALL)
        await runtime.run(["sh", "-c", "mkdir deep; echo kept > deep/er; echo home > ~/x"])
        api = runtimes._pool.starter.service.socket
        (
            await call(
                api,
                "POST",
                f"/commit?container={runtime.id}&pause=false&repo={name.rpartition(':')[0]}&tag={name.rpartition(':')[2]}",
            )
        ).json()
    try:
        async with runtimes.open(
            evolve(SMALL, image=name), session_id="copy", lifetime_s=LIFETIME_S
        ) as copied:
            assert await copied.read("/work/deep/er") == b"kept\n"
            assert await copied.read("/home/agent/x") == b"home\n"
    finally:
        with trio.CancelScope(deadline=trio.current_time() + 60, shield=True):
            (await call(api, "DELETE", f"/images/{name}")).json()
    assert host_mounts() == before


NODE = """
import sys, trio
sys.path.insert(0, {tests!r})
from podman_parts import LIFETIME_S, SMALL, settings
from polarnode.containers.runtimes import open_runtimes
async def main():
    async with open_runtimes(settings("test-killed")) as runtimes, runtimes.open(SMALL, session_id="killed", lifetime_s=LIFETIME_S) as runtime:
        await runtime.seal(SMALL)
        print(runtime.id, runtime._inside.pid, flush=True)
        await runtime.run(["sleep", "1000"])
trio.run(main)
"""


@pytest.mark.podman
def test_killed_node_leaves_no_mount(podman: None) -> None:
    before = host_mounts()
    with subprocess.Popen(
        [sys.executable, "-c", NODE.format(tests=str(Path(__file__).parents[1] / "kits"))],
        stdout=subprocess.PIPE,
        text=True,
    ) as node:
        assert node.stdout is not None
        _, pid = node.stdout.readline().split()
        node.send_signal(signal.SIGKILL)
    assert host_mounts() == before

    async def next_node() -> None:
        async with open_runtimes(settings("test-after")):
            assert pid not in os.listdir("/proc"), "it sweeps what the killed one left, sealed or not"

    trio.run(next_node)
    assert host_mounts() == before
