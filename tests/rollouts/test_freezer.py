"""Containers are frozen while memory is short and their session's calls are held, and at no other time."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from fakes_runtime import MemoryRuntime
from trio.testing import MockClock

from polarnode.rollouts.freezer import AGAIN_S, ContainerFreezer
from polarnode.support.concurrency import open_background


@asynccontextmanager
async def running() -> AsyncIterator[ContainerFreezer]:
    freezer = ContainerFreezer()
    async with open_background(freezer.run):
        yield freezer


def container(**attributes: int) -> MemoryRuntime:
    """One that nobody connects to."""
    runtime = MemoryRuntime(**attributes)  # type: ignore[arg-type]
    runtime.endpoint.close()
    return runtime


async def test_held_session_freezes_when_memory_short(autojump_clock: MockClock) -> None:
    held, other = container(), container()
    async with running() as freezer:
        with freezer.follow("held", held), freezer.follow("other", other):
            freezer.held("held", True)
            await trio.sleep(1)
            assert not held.frozen, "memory suffices"
            freezer.memory_short(True)
            await trio.sleep(1)
            assert (held.frozen, other.frozen) == (True, False)
            freezer.held("held", False)
            await trio.sleep(1)
            assert not held.frozen, "its call goes on"
            freezer.held("other", True)
            await trio.sleep(1)
            assert other.frozen
            freezer.memory_short(False)
            await trio.sleep(1)
            assert not other.frozen, "memory suffices again"
        assert (held.freezes, other.freezes) == (1, 1)


async def test_finished_session_is_not_frozen(autojump_clock: MockClock) -> None:
    runtime = container()
    async with running() as freezer:
        freezer.memory_short(True)
        with freezer.follow("one", runtime):
            freezer.held("one", True)
        await trio.sleep(1)
        freezer.held("one", True)
        await trio.sleep(1)
        with freezer.follow("one", runtime):
            await trio.sleep(1)
    assert runtime.freezes == 0


async def test_refused_freeze_is_tried_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = container(refuses=2)
    async with running() as freezer:
        with freezer.follow("one", runtime), caplog.at_level(logging.WARNING):
            freezer.memory_short(True)
            freezer.held("one", True)
            await trio.sleep(AGAIN_S + 1)
            assert not runtime.frozen
            await trio.sleep(AGAIN_S)
            assert runtime.frozen
            runtime.refuses = 1
            freezer.held("one", False)
            await trio.sleep(1)
            assert runtime.frozen
            await trio.sleep(AGAIN_S)
            assert not runtime.frozen
    assert [record.message for record in caplog.records] == [
        "the container of session one cannot be frozen: podman: no",
        "the container of session one cannot be frozen: podman: no",
        "the container of session one cannot be thawed: podman: no",
    ]


async def test_ignored_freeze_backs_off(autojump_clock: MockClock) -> None:
    """A container that ignores the freezer is not asked all the time."""

    class Ending(MemoryRuntime):
        async def freeze(self) -> None:
            self.freezes += 1
            await trio.lowlevel.checkpoint()

    runtime = Ending()
    runtime.endpoint.close()
    async with running() as freezer:
        with freezer.follow("one", runtime):
            freezer.memory_short(True)
            freezer.held("one", True)
            await trio.sleep(2.5 * AGAIN_S)
    assert runtime.freezes == 3


async def test_freeze_follows_changed_decision(autojump_clock: MockClock) -> None:
    """A change of mind while Podman works is followed."""

    class Slow(MemoryRuntime):
        async def freeze(self) -> None:
            await trio.sleep(3)
            await super().freeze()

    runtime = Slow()
    runtime.endpoint.close()
    async with running() as freezer:
        with freezer.follow("one", runtime):
            freezer.memory_short(True)
            freezer.held("one", True)
            await trio.sleep(1)
            freezer.held("one", False)
            await trio.sleep(3)
            assert (runtime.frozen, runtime.freezes) == (False, 1)
