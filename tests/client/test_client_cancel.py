"""Waits of the asynchronous client that are cancelled, under Trio and asyncio: nothing is lost, nothing is
left open, and a capture still ends.
"""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from captures_kit import open_capture_node
from client_kit import Node, here, open_node
from fakes_engine import ScriptedEngine
from journal_samples import make_spec
from plane_kit import CONTEXT, answers

from polarnode.client import AsyncPolarnodeClient


@pytest.fixture(params=["trio", "asyncio"])
def run(request: Any) -> Callable[[Callable[[], Awaitable[None]]], None]:
    return lambda work: anyio.run(work, backend=request.param)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with open_node(tmp_path / "journal.sqlite") as opened:
        yield opened


def client_of(node: Node) -> AsyncPolarnodeClient:
    return AsyncPolarnodeClient(node.url, token="secret", ack_every_s=0.0)


def test_cancelled_wait_loses_nothing(run: Any, node: Node) -> None:
    """Cancelled while it reads, again and again; what comes meanwhile is given next."""

    async def main() -> None:
        async with client_of(node) as client, client.trajectories(consumer="c", ack=True) as events:
            found = []
            for number in range(6):
                await anyio.to_thread.run_sync(node.publish, f"s{number}")
                for seconds in (0.0, 0.001, 0.01, 60.0):
                    with anyio.move_on_after(seconds):
                        found.append(await anext(events))
                        break
                with anyio.move_on_after(0.02):
                    found.append(await anext(events))
            assert [event.key for event in found] == [f"trajectory:s{number}" for number in range(6)]

    run(main)


def test_cancelled_group_wait_stays_whole(run: Any, node: Node) -> None:
    async def main() -> None:
        async with client_of(node) as client:
            await client.submit(make_spec(task_id="t", num_samples=2))
            groups = client.groups(consumer="c", ack=True, kept_bytes=0)
            await anyio.to_thread.run_sync(node.publish, "t-0", "t-1")
            group = None
            for seconds in (0.0, 0.002, 0.004, 0.008, 0.016, 60.0):
                with anyio.move_on_after(seconds):
                    group = await anext(groups)
                    break
            assert group is not None
            assert [each.session_id for each in group.trajectories] == ["t-0", "t-1"]
            await groups.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(groups)

    run(main)
    assert node.position("c") == 0, "it was being worked on"


def test_early_exit_closes_connection(run: Any, node: Node) -> None:
    node.publish("s0", "s1")

    async def main() -> None:
        async with client_of(node) as client:
            async with client.trajectories(consumer="c") as events:
                async for _ in events:
                    break
            while (await client.consumers())[0].connected:  # noqa: ASYNC110 - the node hears of it when it hears of it
                await anyio.sleep(0.05)
            async for event in client.trajectories(consumer="c"):  # not closed: the client's own end does it
                assert event.seq == 1
                break

    run(main)


def test_cancelled_capture_ends_as_cancelled(run: Any, tmp_path: Path) -> None:
    with here() as node:
        engine = ScriptedEngine(reply=answers("Bread."), vocab_size=4096, context_length=CONTEXT)
        desk = node.open(open_capture_node(tmp_path, engine))
        ended: list[Any] = []

        async def main() -> None:
            async with AsyncPolarnodeClient(desk.caller.url, token="secret") as client:
                with anyio.CancelScope() as scope:
                    async with client.capture() as session:
                        ended.append(session)
                        scope.cancel()
                        await anyio.sleep_forever()

        run(main)
        [session] = ended
        assert session.result.outcome.status == "cancelled"
