"""What a node answers before it serves: its socket is bound first, and clients wait for it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from quart_trio import QuartTrio

from polarnode.client import AsyncPolarnodeClient, PolarnodeClient, Unreachable
from polarnode.client.values import NodeStarts
from polarnode.http.link import Link, NotListening
from polarnode.http.server import Address, listening_socket, open_server
from polarnode.node.starting import StartingNode

REASON = "the engine starts, 40 s so far"


@asynccontextmanager
async def starting() -> AsyncIterator[tuple[StartingNode, str]]:
    with listening_socket(Address(host="127.0.0.1", port=0)) as listener:
        node = StartingNode(listener, None, lambda: REASON)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.serve)
            yield node, f"http://127.0.0.1:{listener.getsockname()[1]}"
            node.hand_over()


async def answered(url: str) -> tuple[int, dict[str, Any]]:
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    path = "/" + url.removeprefix("http://").partition("/")[2]
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        said = b"".join([piece async for piece in stream])
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])


async def test_probes_of_a_starting_node() -> None:
    async with starting() as (_, url):
        assert await answered(f"{url}/healthz") == (200, {"ok": True})
        assert await answered(f"{url}/readyz") == (503, {"ready": False, "reason": REASON})
        status, body = await answered(f"{url}/v1/tasks")
        assert (status, body) == (503, {"error": {"type": "starting", "message": REASON}})


async def test_clients_see_starting_node_as_absent() -> None:
    """A starting node is not there yet, for whoever only waits for an absent one."""
    async with starting() as (_, url):
        blocking = PolarnodeClient(url, patience_s=0.0)
        with pytest.raises(NodeStarts, match=REASON):
            await trio.to_thread.run_sync(blocking.status)
        with pytest.raises(Unreachable, match=REASON):
            async with AsyncPolarnodeClient(url, patience_s=0.0) as client:
                await client.submit({"instruction": "x", "harness": "pi"})
        link = Link(url=url, token=None)
        with pytest.raises(NotListening, match=REASON):
            await link.call("GET", "/v1/fleet/report")
        with pytest.raises(NotListening, match=REASON):
            async with link.stream("/v1/trajectories/stream"):
                pass
        await link.close()


async def test_submit_waits_for_the_node() -> None:
    app = QuartTrio("node")

    @app.post("/v1/tasks")
    async def tasks() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"task_id": "t", "session_ids": ["s"]}

    async with starting() as (node, url), AsyncPolarnodeClient(url, patience_s=60.0) as client:
        async with trio.open_nursery() as nursery:
            found: list[Any] = []

            async def submit() -> None:
                found.append(await client.submit({"instruction": "x", "harness": "pi"}))

            nursery.start_soon(submit)
            await trio.sleep(0.3)
            assert not found
            async with open_server(app, node.hand_over()):
                with trio.fail_after(30):
                    while not found:  # noqa: ASYNC110 (seen from outside)
                        await trio.sleep(0.05)
        assert found[0].task_id == "t"


async def test_command_waits_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from polarnode.cli.remote import RemoteNode

    app = QuartTrio("node")

    @app.get("/v1/status")
    async def status() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"node": "n"}

    async with starting() as (node, url):
        done = trio.Event()

        async def wait() -> None:
            await trio.to_thread.run_sync(RemoteNode(url=url, token=None).wait_started)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.5)
            assert not done.is_set()
            async with open_server(app, node.hand_over()):
                with trio.fail_after(30):
                    await done.wait()
    assert capsys.readouterr().err == f"· waiting: the node is not ready yet: {REASON}\n"
    with pytest.raises(Unreachable, match="is the node running"):
        await trio.to_thread.run_sync(RemoteNode(url=url, token=None).wait_started)
