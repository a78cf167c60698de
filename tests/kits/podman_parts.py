"""Real Podman for tests: one store for all of them (the machine's own of polarnode, so images are built
once), a node's runtimes for each test.

Where Podman can not start containers the tests that need it are skipped with doctor's own words.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from polarnode.containers.client import ListedContainer
from polarnode.containers.container import LABEL_NODE
from polarnode.containers.images import ensure_images
from polarnode.containers.probe import default_state_dir, probe, store_at
from polarnode.containers.recipes import PodmanTools, RuntimesSettings
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.containers.user_namespace import Limits
from polarnode.core.task import RuntimeSpec

# `best_effort` where the suites run without root: tests/live/test_rootless.py
LIMITS: Limits = "best_effort" if os.environ.get("POLARNODE_LIMITS") == "best_effort" else "enforced"
kept_limits = pytest.mark.skipif(
    LIMITS != "enforced",
    reason="without root this machine bounds neither memory nor processes nor what namespaces share",
)
SMALL = RuntimeSpec(memory_mb=256, pids=64)
# of containers in tests: nothing here takes minutes, and what a killed test leaves is gone after these
LIFETIME_S = 900.0


def settings(node_id: str = "test", warm: int = 2) -> RuntimesSettings:
    """A node of the machine's own store. Nodes of tests that run beside this one share it and sweep it too, so
    what a killed node left is gone once another is up, but who removed it, nobody can count on.
    """
    return RuntimesSettings(state_dir=default_state_dir(), node_id=node_id, warm=warm, limits=LIMITS)


def tools(log: Path) -> PodmanTools:
    return PodmanTools(
        podman=Path(shutil.which("podman") or ""), store=store_at(default_state_dir()), log=log
    )


async def containers_of_node(runtimes: NodeRuntimes, node_id: str) -> list[ListedContainer]:
    """The containers that a node has in the store."""
    return list(await runtimes._pool.starter.client.list_labelled(f"{LABEL_NODE}={node_id}"))


@contextmanager
def other_node(source: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A node that is a program of its own, beside these kits, with the line that it prints once it is up. It
    is killed at the end.
    """
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


async def cancel_at_sign(runtime: PodmanRuntime, sign: str, program: Callable[[], Awaitable[object]]) -> bool:
    """Cancel a program once a file says that it is where it should be; whether it was still running."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at, runtime, sign, scope)
            await program()
            nursery.cancel_scope.cancel()
    return scope.cancelled_caught


async def _cancel_at(runtime: PodmanRuntime, sign: str, scope: trio.CancelScope) -> None:
    while await runtime.read(sign) is None:  # noqa: ASYNC110 (a container has no events)
        await trio.sleep(0.05)
    scope.cancel()


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Podman that starts containers, with the base image in its store."""
    findings = trio.run(probe, default_state_dir(), LIMITS)
    if not findings.ok:
        pytest.skip(f"Podman can not start containers here: {findings.faults()}")

    async def ensure() -> None:
        await ensure_images(
            settings(), ["base"], log=tmp_path_factory.mktemp("images") / "build.log", report=print
        )

    trio.run(ensure)


@pytest.fixture
async def runtimes(podman: None) -> AsyncIterator[NodeRuntimes]:
    async with open_runtimes(settings()) as opened:
        yield opened


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(300):
        while not holds():  # noqa: ASYNC110 (what it waits for has no event)
            await trio.sleep(0.01)
