"""Real containers frozen: nothing in them runs, nothing of them is lost, and whatever ends them works."""

import socket
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from podman_parts import LIFETIME_S, SMALL, cancel_at_sign, kept_limits, other_node, settings

from polarnode.containers.freezing import ContainerFreeze
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.errors import RuntimeFault

pytestmark = pytest.mark.podman

# writes how far it is, twenty times a second, and what it was sent over the connection it holds
COUNTS = """
import socket, sys, time
held = socket.create_connection(("127.0.0.1", 8080))
held.setblocking(False)
heard = b""
for step in range(100000):
    try:
        heard += held.recv(100)
    except BlockingIOError:
        pass
    with open("/work/step", "w") as out:
        out.write(f"{step} {heard.decode()}")
    if heard.endswith(b"end"):
        sys.exit(7)
    time.sleep(0.05)
"""
WATCHES = [
    "sh",
    "-c",
    "trap 'echo left > /work/left; exit 0' TERM; touch /work/up; while :; do sleep 0.1; done",
]


async def step(runtime: PodmanRuntime) -> int:
    text = (await runtime.read("/work/step") or b"").decode()
    return int(text.split()[0]) if text else 0


async def comes_to(runtime: PodmanRuntime, least: int) -> None:
    with trio.fail_after(60):
        while await step(runtime) < least:  # noqa: ASYNC110 (a container has no events)
            await trio.sleep(0.02)


@kept_limits
async def test_frozen_program_continues_with_input(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    """A frozen program stands still, and goes on with what it was sent."""
    async with runtimes.open(SMALL, session_id="frozen", lifetime_s=LIFETIME_S) as runtime:
        await runtime.put({"/work/counts.py": COUNTS.encode()})
        python = (await runtime.run(["sh", "-c", "command -v python3 || true"])).stdout.decode().strip()
        assert python, "the base image has Python"
        codes: list[int] = []

        async def harness() -> None:
            codes.append(
                await runtime.run_logged(
                    [python, "/work/counts.py"], env={}, log=tmp_path / "log", limit=1000
                )
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness)
            connection = await accepted(runtime.endpoint)
            await comes_to(runtime, 3)
            await runtime.freeze()
            await runtime.freeze()  # once more is nothing
            assert runtime.frozen
            assert runtime.alive
            assert runtimes.statistics().frozen == 1
            before = await step(runtime)
            connection.send(b"held")
            await runtime.put({"/work/given": b"while it was frozen"})
            assert await runtime.read("/work/given") == b"while it was frozen"
            await trio.sleep(0.5)
            assert await step(runtime) == before
            await runtime.thaw()
            await runtime.thaw()
            assert not runtime.frozen
            assert runtimes.statistics().frozen == 0
            await comes_to(runtime, before + 3)
            await runtime.freeze()
            connection.send(b"end")
            await runtime.thaw()
        assert codes == [7]
        assert (await runtime.read("/work/step") or b"").endswith(b"heldend")
        connection.close()


async def accepted(endpoint: socket.socket) -> socket.socket:
    with trio.fail_after(60):
        while True:
            with suppress(BlockingIOError):
                return endpoint.accept()[0]
            await trio.sleep(0.02)


async def test_running_program_thaws_container(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="exec", lifetime_s=LIFETIME_S) as runtime:
        await runtime.freeze()
        assert (await runtime.run(["echo", "up"])).stdout == b"up\n"
        assert not runtime.frozen


async def test_cancelled_frozen_program_gets_signal(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    async with runtimes.open(SMALL, session_id="cancel", lifetime_s=LIFETIME_S) as runtime:

        async def harness() -> None:
            await runtime.run_logged(WATCHES, env={}, log=tmp_path / "log", limit=1000)

        async def freezes() -> None:
            while await runtime.read("/work/up") is None:  # noqa: ASYNC110 (a container has no events)
                await trio.sleep(0.02)
            await runtime.freeze()
            await runtime.put({"/work/frozen": b""})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(freezes)
            assert await cancel_at_sign(runtime, "/work/frozen", harness)
        assert await runtime.read("/work/left") == b"left\n", "it had its time after TERM"
        await runtime.freeze()
        assert not runtime.frozen, "what is being ended is not frozen again"


async def test_frozen_programs_can_be_ended(runtimes: NodeRuntimes) -> None:
    """Frozen programs are ended by the session and by the disk watch."""
    for end in ("session", "disk"):
        async with runtimes.open(SMALL, session_id=end, lifetime_s=LIFETIME_S) as runtime:
            await runtime.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 &"])
            await runtime.freeze()
            assert await runtime.busy()
            await (runtime.end_processes() if end == "session" else runtime._watched.end())
            assert not await runtime.busy()
            assert (await runtime.run(["true"])).exit_code == 0


async def test_frozen_container_is_removed(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="closed", lifetime_s=LIFETIME_S) as runtime:
        await runtime.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 &"])
        await runtime.freeze()
    assert runtimes.statistics().frozen == 0
    with pytest.raises(RuntimeFault, match=r"podman pause: .*no such container"):
        await runtimes._pool.starter.client.pause(runtime.id)


NODE = """
import trio
from podman_parts import LIFETIME_S, SMALL, settings
from polarnode.containers.runtimes import open_runtimes

async def main():
    async with open_runtimes(settings("frozen-victim", warm=0)) as runtimes:
        async with runtimes.open(SMALL, session_id="frozen-1", lifetime_s=LIFETIME_S) as runtime:
            await runtime.run(["sh", "-c", "sleep 454545 >/dev/null 2>&1 &"])
            await runtime.freeze()
            print("frozen", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


async def test_next_node_removes_frozen_leftovers(podman: None) -> None:
    with other_node(NODE) as (_, line):
        assert line == "frozen\n"
    assert len(sleeping()) == 1, "a frozen program outlives its node"
    async with open_runtimes(settings("frozen-successor", warm=0)):
        with trio.fail_after(30):
            while sleeping():  # noqa: ASYNC110 (another process)
                await trio.sleep(0.05)


def sleeping() -> list[str]:
    """The victim's programs that run on this machine."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdigit() and (each / "cmdline").read_bytes() == b"sleep\x00454545\x00":
                found.append(each.name)
    return found


async def test_without_freezer_podman_is_unasked(runtimes: NodeRuntimes) -> None:
    freeze = ContainerFreeze(
        container="none", client=runtimes._pool.starter.client, frozen=set(), possible=False
    )
    await freeze.freeze()
    assert not freeze.on
