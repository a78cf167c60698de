"""Orphans: what a killed node leaves is gone when the next one has started; what a living node has is never
touched.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
from podman_parts import LIFETIME_S, SMALL, containers_of_node, other_node, settings

from polarnode.containers.container import (
    LABEL_OWNER,
    LABEL_SESSION,
    Owner,
    current_owner,
    read_owner,
)
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes

pytestmark = pytest.mark.podman

NODE = """
import sys, trio
from podman_parts import LIFETIME_S, SMALL, settings
from polarnode.containers.runtimes import open_runtimes

async def main():
    async with open_runtimes(settings("victim")) as runtimes:
        runtimes.prewarm(SMALL, 1)
        async with runtimes.open(SMALL, session_id="victim-1", lifetime_s=LIFETIME_S) as runtime:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.run, ["sleep", "424242"])
                while runtimes.statistics().warm < 1:
                    await trio.sleep(0.05)
                print("up", runtimes._service.pid, flush=True)
                await trio.sleep_forever()

trio.run(main)
"""


@contextmanager
def node() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another node in a process of its own, with a session and a warm runtime; and its service's
    process id.
    """
    with other_node(NODE) as (process, line):
        up, service = line.split()
        assert up == "up"
        yield process, int(service)


def running(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sleepers() -> int:
    """How many of the victim's programs run on this machine."""
    return sum(
        b"424242" in _command(pid) and b"sleep" in _command(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit()
    )


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_next_node_removes_killed_leftovers(podman: None) -> None:
    with node() as (process, service):
        async with open_runtimes(settings("bystander")) as bystander:
            theirs = await containers_of_node(bystander, "victim")
            assert len(theirs) == 2
            assert {each.labels[LABEL_SESSION] for each in theirs} == {"victim-1", "warm"}
            assert await bystander.sweep() == 0, "a living node's containers are not ours to remove"
            assert len(await containers_of_node(bystander, "victim")) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        with trio.fail_after(60):
            while running(service):  # noqa: ASYNC110 (another process)
                await trio.sleep(0.05)
    assert sleepers() == 1, "a killed node cannot end its containers: this is what the sweeper is for"
    async with open_runtimes(settings("successor")) as successor:
        assert await containers_of_node(successor, "victim") == []
    assert sleepers() == 0


async def test_sweep_finishes_interrupted_removal(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="kept", lifetime_s=LIFETIME_S) as kept:
        async with runtimes.open(SMALL, session_id="lost", lifetime_s=LIFETIME_S) as lost:
            runtimes._pool.starter.alive.discard(lost.id)
            assert await runtimes.sweep() == 0, "it may only just be on its way out: the first sweep suspects"
            assert await runtimes.sweep() == 1
            assert not lost.alive
        assert kept.alive
        assert runtimes.statistics().swept == 1


WATCHES = (
    "import subprocess, time; child = subprocess.Popen(['sleep', '434343']); print(child.pid, flush=True);"
    " time.sleep(434343)"
)


@contextmanager
def as_conmon(
    folder: Path, storage: Path, container: str, unit: str | None = None
) -> Iterator[tuple[int, int]]:
    """A process that looks like the conmon of a container, and its child: what is left of a container whose
    node was killed between two steps.
    """
    script = folder / f"{unit or container}.py"
    script.write_text(WATCHES)
    bundle = storage / "overlay-containers" / container / "userdata"
    words = ["/usr/bin/conmon", str(script), "-c", container, "-u", unit or container, "-b", str(bundle)]
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}  # which it finds by its name otherwise
    process = subprocess.Popen(
        words, executable=sys.executable, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process.pid, child
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_only_forgotten_containers_are_ended(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    storage = runtimes._service.store.storage
    async with runtimes.open(SMALL, session_id="known", lifetime_s=LIFETIME_S) as known:
        assert (await known.run(["true"])).exit_code == 0, "its exec has a conmon too"
        (container,) = (
            each.id for each in await containers_of_node(runtimes, "test") if known.id in each.names
        )
        with (
            as_conmon(tmp_path, storage, secrets.token_hex(32)) as forgotten,
            as_conmon(tmp_path, storage, container, secrets.token_hex(32)) as of_an_exec,
            as_conmon(tmp_path, tmp_path, secrets.token_hex(32)) as of_another_store,
        ):
            await runtimes.sweep()
            with trio.fail_after(60):
                while any(map(running, forgotten)):  # noqa: ASYNC110 (other processes)
                    await trio.sleep(0.05)
            assert all(map(running, (*of_an_exec, *of_another_store)))
        assert known.alive
        assert (await known.run(["echo", "still"])).stdout == b"still\n"


async def test_labels_name_their_owner(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="s-17", lifetime_s=LIFETIME_S) as runtime:
        # others of that name may share the store
        (found,) = [
            each for each in await containers_of_node(runtimes, "test") if each.names == (runtime.id,)
        ]
        assert found.labels[LABEL_SESSION] == "s-17"
        assert read_owner(found.labels[LABEL_OWNER]) == current_owner()


def test_owner_process_is_recognised() -> None:
    mine = current_owner()
    assert mine.is_alive()
    assert read_owner(mine.label()) == mine
    assert not Owner(pid=mine.pid, started=mine.started + 1, boot=mine.boot).is_alive(), "the same id, later"
    assert not Owner(pid=mine.pid, started=mine.started, boot="another").is_alive(), (
        "the same id, before the machine was started anew"
    )
    assert not Owner(pid=2**22 + 1, started=1, boot=mine.boot).is_alive()
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = Owner(
        pid=child.pid,
        started=int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]),
        boot=mine.boot,
    )
    assert not zombie.is_alive(), "a dead node whose parent has not looked yet is dead"
    child.wait()


@pytest.mark.parametrize("label", ["", "x", "1", "1.2x", "a.b.c", ".."])
def test_invalid_label_owns_nothing(label: str) -> None:
    assert read_owner(label) is None
