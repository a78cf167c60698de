"""A listener in a network namespace: only inside reaches it, and it is gone once closed. A bare namespace
stands for a container.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import trio

from polarnode.containers import inside
from polarnode.containers.inside import (
    EGRESS_PORT,
    ENDPOINT_HOST,
    ENDPOINT_PORT,
    open_listener,
    open_model_endpoint,
)
from polarnode.core.errors import RuntimeFault

ASK = f"""
import socket
with socket.create_connection(({ENDPOINT_HOST!r}, {ENDPOINT_PORT}), 20) as asking:
    asking.sendall(b'ping')
    print(asking.recv(100).decode())
"""


@pytest.fixture
def namespace() -> Iterator[int]:
    """A process in a network namespace of its own, in which even `lo` is down."""
    process = subprocess.Popen(["unshare", "--net", "sleep", "1000"])
    mine = os.stat("/proc/self/ns/net").st_ino
    try:
        while process.poll() is None and os.stat(f"/proc/{process.pid}/ns/net").st_ino == mine:
            """It is still on its way into its namespace."""
        if process.poll() is not None:
            pytest.skip("this user may not make network namespaces")
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def ask_inside(pid: int) -> str:
    """What a client in the namespace is answered."""
    argv = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", sys.executable, "-c", ASK]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


async def answer_once(listener: socket.socket) -> None:
    served = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with await served.accept() as stream:
        assert await stream.receive_some(100) == b"ping"
        await stream.send_all(b"pong")


async def test_client_inside_reaches_node(namespace: int) -> None:
    listener = await open_model_endpoint(namespace)
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await trio.to_thread.run_sync(ask_inside, namespace))

    with listener:
        assert not listener.getblocking()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_once, listener)
            nursery.start_soon(ask)
    assert answers == ["pong"]


async def test_host_port_is_not_opened(namespace: int) -> None:
    with await open_model_endpoint(namespace) as first:
        assert first.getsockname() == (ENDPOINT_HOST, ENDPOINT_PORT)
        inode = os.fstat(first.fileno()).st_ino
        assert f" {inode} " not in await trio.Path("/proc/self/net/tcp").read_text()
        inside = await trio.Path(f"/proc/{namespace}/net/tcp").read_text()
        assert f" {inode} " in inside


async def test_closed_endpoint_refuses_connections(namespace: int) -> None:
    (await open_model_endpoint(namespace)).close()
    assert await trio.to_thread.run_sync(ask_inside, namespace) == ""
    with await open_model_endpoint(namespace) as again:
        assert again.fileno() > 0


async def test_no_thread_stays_in_namespace(namespace: int) -> None:
    mine = os.stat("/proc/self/ns/net").st_ino
    with await open_model_endpoint(namespace):
        for _ in range(20):
            seen = await trio.to_thread.run_sync(
                lambda: os.stat(f"/proc/self/task/{threading.get_native_id()}/ns/net").st_ino
            )
            assert seen == mine
    assert all(
        os.stat(f"/proc/self/task/{task}/ns/net").st_ino == mine for task in os.listdir("/proc/self/task")
    )


async def test_slow_reader_is_cut(namespace: int) -> None:
    with await open_model_endpoint(namespace) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == inside.UNREAD_MS


async def test_missing_or_own_namespace_is_refused(namespace: int) -> None:
    os.kill(namespace, signal.SIGKILL)
    with pytest.raises(RuntimeFault, match="shares this machine's network"):
        await open_model_endpoint(os.getpid())
    with pytest.raises(RuntimeFault, match="the model endpoint could not be opened"):
        await open_model_endpoint(2**22 + 1)


async def test_taken_port_is_refused(namespace: int) -> None:
    with await open_model_endpoint(namespace), pytest.raises(RuntimeFault, match="in use"):
        await open_model_endpoint(namespace)


# ── another beside it ─────────────────────────────────────────────────────────


@pytest.fixture
def network(namespace: int) -> Iterator[int]:
    """The namespace, open."""
    opened = os.open(f"/proc/{namespace}/ns/net", os.O_RDONLY)
    yield opened
    os.close(opened)


async def test_second_endpoint_in_same_namespace(namespace: int, network: int) -> None:
    with await open_model_endpoint(namespace), await open_listener(network, EGRESS_PORT) as other:
        assert other.getsockname() == (ENDPOINT_HOST, EGRESS_PORT)
        assert not other.getblocking()
        inside = await trio.Path(f"/proc/{namespace}/net/tcp").read_text()
        assert f" {os.fstat(other.fileno()).st_ino} " in inside
        with pytest.raises(RuntimeFault, match="in use"):
            await open_listener(network, ENDPOINT_PORT)


async def test_endpoint_opens_after_process_ended(namespace: int, network: int) -> None:
    """The id of a container's first process may be somebody else's by then."""
    os.kill(namespace, signal.SIGKILL)
    with await open_listener(network, EGRESS_PORT) as other:
        assert f" {os.fstat(other.fileno()).st_ino} " not in await trio.Path("/proc/self/net/tcp").read_text()


async def test_listener_in_own_namespace_is_refused() -> None:
    ours = os.open("/proc/self/ns/net", os.O_RDONLY)
    with pytest.raises(RuntimeFault, match="shares this machine's network"):
        await open_listener(ours, EGRESS_PORT)
    os.close(ours)


async def test_opening_leaves_no_descriptor(network: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        (await open_listener(network, EGRESS_PORT)).close()
    assert set(os.listdir("/proc/self/fd")) == before
