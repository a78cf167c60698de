"""A session's share of the node's threads: one session never takes all, also with threads it abandoned."""

import gc
import threading
import weakref

import pytest
import trio
import trio.testing

from polarnode.core.errors import Refused
from polarnode.support.bounded import trim_memory
from polarnode.support.concurrency import ThreadShare


async def test_session_leaves_others_a_thread() -> None:
    node = trio.CapacityLimiter(2)
    one = ThreadShare(trio.CapacityLimiter(1), node)
    other = ThreadShare(trio.CapacityLimiter(1), node)
    release = threading.Event()
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one.run, release.wait)
            await trio.testing.wait_all_tasks_blocked()
            assert await other.run(lambda: 7) == 7
            nursery.cancel_scope.cancel()  # the thread that was begun is abandoned and still runs
        with trio.move_on_after(0.01) as waited:
            await one.run(lambda: None)
        assert waited.cancelled_caught, "its place is taken until it ends"
        assert await other.run(lambda: 8) == 8
    finally:
        release.set()
    await one.run(lambda: None)
    assert node.borrowed_tokens == 0


class Large:
    """A request."""


async def test_refusal_holds_no_refused_memory() -> None:
    """A refusal does not hold what it refused."""
    share = ThreadShare(trio.CapacityLimiter(1), trio.CapacityLimiter(1))
    kept: list[weakref.ref[Large]] = []

    def refuse() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        try:
            raise ValueError(f"{large} is too large")
        except ValueError as error:
            raise Refused("send less", path="$.x") from error

    gc.disable()
    try:
        with pytest.raises(Refused, match="send less") as refused:
            await share.run(refuse)
        assert refused.value.path == "$.x"
        assert kept[0]() is None
    finally:
        gc.enable()


async def test_free_memory_is_returned() -> None:
    await trim_memory()
