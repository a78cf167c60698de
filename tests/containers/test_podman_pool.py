"""The warm pool: started runtimes are handed out once, replaced, and let go; what is asked for is kept, and
no more.
"""

import pytest
import trio
from podman_parts import LIFETIME_S, SMALL, settings

from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.task import RuntimeSpec

pytestmark = pytest.mark.podman


async def wait_warm(runtimes: NodeRuntimes, count: int) -> None:
    with trio.fail_after(120):
        while runtimes.statistics().warm != count:  # noqa: ASYNC110 (seen from outside)
            await trio.sleep(0.05)


async def test_unfinished_image_is_awaited(podman: None) -> None:
    """Nothing is tried before the image is there, and nothing of that is counted as failed."""
    async with open_runtimes(settings(warm=1)) as runtimes:
        client, there = runtimes._pool.starter.client, False
        has_image = type(client).has_image
        asked: list[str] = []

        async def looked(image: str) -> bool:
            asked.append(image)
            return there and await has_image(client, image)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(client), "has_image", lambda _, image: looked(image))
            patch.setattr("polarnode.containers.pool.RETRY_S", 0.05)
            runtimes.prewarm(SMALL, 1)
            with trio.fail_after(60):
                while len(asked) < 3:  # noqa: ASYNC110 (seen from outside)
                    await trio.sleep(0.01)
            found = runtimes.statistics()
            assert (found.failed, found.started, found.warm) == (0, 0, 0)
            there = True
            await wait_warm(runtimes, 1)
            assert runtimes.statistics().failed == 0


async def test_warm_container_is_given_once(podman: None) -> None:
    """A warm container is given once, and replaced."""
    async with open_runtimes(settings(warm=2)) as runtimes:
        runtimes.prewarm(SMALL, 5)
        await wait_warm(runtimes, 1)
        async with runtimes.open(SMALL, session_id="first", lifetime_s=LIFETIME_S) as first:
            assert runtimes.statistics().served_warm == 1
            await first.put({"/work/used": b"x"})
            await wait_warm(runtimes, 1)
        async with runtimes.open(SMALL, session_id="second", lifetime_s=LIFETIME_S) as second:
            assert second.id != first.id, "a used runtime is never used again"
            assert await second.read("/work/used") is None
            assert (await second.run(["echo", "ready"])).stdout == b"ready\n"
        assert runtimes.statistics().served_warm == 2


async def test_pool_grows_with_demand(podman: None) -> None:
    """More are kept where they are taken faster than they start."""
    async with open_runtimes(settings(warm=3)) as runtimes:
        # a very busy machine, so that what starts take here makes no difference
        runtimes._pool._starts.took(300.0)
        runtimes.prewarm(SMALL, 10)
        await wait_warm(runtimes, 1)
        async with (
            runtimes.open(SMALL, session_id="one", lifetime_s=LIFETIME_S),
            runtimes.open(SMALL, session_id="two", lifetime_s=LIFETIME_S),
        ):
            await wait_warm(runtimes, 3)


async def test_session_takes_starting_container(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.prewarm(SMALL, 1)
        with trio.fail_after(120):
            while not any(shelf.starting for shelf in runtimes._pool._warm_by_shape.values()):  # noqa: ASYNC110 (seen from outside)
                await trio.sleep(0.001)
        async with runtimes.open(SMALL, session_id="first", lifetime_s=LIFETIME_S) as runtime:
            runtimes.prewarm(SMALL, 0)
            assert (await runtime.run(["true"])).exit_code == 0
            assert (runtimes.statistics().served_warm, runtimes.statistics().live) == (1, 1)


async def test_short_machine_starts_nothing_ahead(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.hold(True)
        runtimes.prewarm(SMALL, 1)
        await trio.sleep(0.5)
        assert runtimes.statistics().started == 0
        async with runtimes.open(SMALL, session_id="at once", lifetime_s=LIFETIME_S):
            assert runtimes.statistics().warm == 0
        runtimes.hold(False)
        await wait_warm(runtimes, 1)


async def test_warm_container_endpoint_is_ready(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.prewarm(SMALL, 1)
        await wait_warm(runtimes, 1)
        async with runtimes.open(SMALL, session_id="door", lifetime_s=LIFETIME_S) as runtime:
            ended = await runtime.run(
                [
                    "python3",
                    "-c",
                    "import socket; socket.create_connection(('127.0.0.1', 8080), 20); print('in')",
                ]
            )
            assert ended.stdout == b"in\n"


async def test_other_shape_gets_fresh_container(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.prewarm(SMALL, 1)
        await wait_warm(runtimes, 1)
        other = RuntimeSpec(memory_mb=300, pids=64)
        async with runtimes.open(other, session_id="other", lifetime_s=LIFETIME_S) as runtime:
            assert runtime.alive
        assert runtimes.statistics().served_warm == 0
        assert runtimes.statistics().warm == 1


async def test_files_and_environment_keep_shape(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.prewarm(RuntimeSpec(memory_mb=256, pids=64, env={"A": "b"}, image="agent"), 1)
        await wait_warm(runtimes, 1)
        async with runtimes.open(
            RuntimeSpec(memory_mb=256, pids=64, image="base"), session_id="same", lifetime_s=LIFETIME_S
        ):
            assert runtimes.statistics().served_warm == 1, "`agent` is another name of `base`"


async def test_expiring_container_is_not_given(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.prewarm(SMALL, 1)
        await wait_warm(runtimes, 1)
        async with runtimes.open(SMALL, session_id="long", lifetime_s=10 * 86400.0) as runtime:
            assert runtime.expires - trio.current_time() > 9 * 86400
            assert runtimes.statistics().served_warm == 0


async def test_dead_container_is_not_given(podman: None) -> None:
    async with open_runtimes(settings(warm=1)) as runtimes:
        runtimes.prewarm(SMALL, 1)
        await wait_warm(runtimes, 1)
        (ready,) = next(iter(runtimes._pool._warm_by_shape.values())).ready
        await runtimes._pool.starter.client.remove(ready.id)
        async with runtimes.open(SMALL, session_id="fresh", lifetime_s=LIFETIME_S) as runtime:
            assert runtime.id != ready.id
            assert (await runtime.run(["true"])).exit_code == 0


async def test_unwanted_containers_are_removed(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        runtimes.prewarm(SMALL, 2)
        await wait_warm(runtimes, 1)
        runtimes.prewarm(SMALL, 0)
        await wait_warm(runtimes, 0)
        assert await runtimes.sweep() == 0, "and nothing of it is left"


async def test_unstartable_shape_stops_no_others(podman: None) -> None:
    async with open_runtimes(settings(warm=1)) as runtimes:
        runtimes.prewarm(RuntimeSpec(image="localhost/none/such"), 1)
        runtimes.prewarm(SMALL, 1)
        await wait_warm(runtimes, 1)
        assert runtimes.statistics().failed == 0, "an image that is not there is not tried"
