"""Both clients behind one face, and nodes for them: in a thread, in a child that can be killed, and servers
that say whatever a test likes.

A test is a plain function: the asynchronous client runs under Trio or asyncio in a thread of its own, and is
called like the synchronous one. So the same assertions hold for all three. Run as a program this is the
child.
"""

import inspect
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio.from_thread
import attrs
import trio
from control_plane_parts import Plane, open_plane
from journal_samples import make_trajectory
from journal_writes import publish_end

from polarnode.client import AsyncPolarnodeClient, PolarnodeClient
from polarnode.client.awaiting_http import AsyncEvents
from polarnode.groups import Group
from polarnode.journal.journal import Journal

KINDS = ("sync", "trio", "asyncio")
TASK = "t"

# ── clients ───────────────────────────────────────────────────────────────────


@attrs.define(eq=False)
class BlockingIteration:
    """An asynchronous iteration, from outside its loop."""

    events: AsyncEvents[Any]
    portal: Any

    def __iter__(self) -> "BlockingIteration":
        return self

    def __next__(self) -> Any:
        try:
            value = self.portal.call(self.events.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        if isinstance(value, Group):
            return attrs.evolve(value, acknowledge=lambda: self.portal.call(_await_call, value.ack))
        return value

    def __enter__(self) -> "BlockingIteration":
        self.portal.call(self.events.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.portal.call(self.events.aclose)


async def _await_call(call: Callable[[], Any]) -> Any:
    return await call()


@attrs.define(eq=False)
class BlockingFace:
    """An AsyncPolarnodeClient, from outside its loop, with the face of a PolarnodeClient."""

    client: AsyncPolarnodeClient
    portal: Any

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **said: Any) -> Any:
            made = getattr(self.client, name)(*args, **said)
            if isinstance(made, AsyncEvents):
                return BlockingIteration(made, self.portal)
            if inspect.iscoroutine(made):
                return self.portal.call(lambda: made)
            return self.portal.wrap_async_context_manager(made)

        return call


@contextmanager
def open_client(kind: str, url: str, **said: Any) -> Iterator[Any]:
    """A client of one of the KINDS, with the face of PolarnodeClient."""
    if kind == "sync":
        yield PolarnodeClient(url, **said)
        return
    with anyio.from_thread.start_blocking_portal(kind) as portal:
        made = portal.call(lambda: _made(url, said))
        with portal.wrap_async_context_manager(made):
            yield BlockingFace(made, portal)


async def _made(url: str, said: dict[str, Any]) -> AsyncPolarnodeClient:
    return AsyncPolarnodeClient(url, **said)


# ── a node in a thread ────────────────────────────────────────────────────────


@attrs.define(eq=False)
class Here:
    """What an `open_…` of Trio opens, in a thread of its own; `do` runs something in there."""

    portal: Any
    stack: ExitStack

    def open(self, opening: "AbstractAsyncContextManager[Any]") -> Any:
        return self.stack.enter_context(self.portal.wrap_async_context_manager(opening))

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        return self.portal.call(work, *args)


@contextmanager
def here() -> Iterator[Here]:
    with anyio.from_thread.start_blocking_portal("trio") as portal, ExitStack() as stack:
        yield Here(portal, stack)


@attrs.define(eq=False)
class Node:
    """A control plane in a thread."""

    here: Here
    plane: Plane

    @property
    def url(self) -> str:
        return self.plane.url

    def publish(self, *session_ids: str, task_id: str = TASK, **more: Any) -> None:
        """Sessions of a task that are over, in this order."""
        self.here.do(self._publish, session_ids, task_id, more)

    async def _publish(self, session_ids: Sequence[str], task_id: str, more: dict[str, Any]) -> None:
        for session_id in session_ids:
            publish(self.plane.journal, session_id, task_id=task_id, **more)
        await self.plane.journal.writer.flush()

    def position(self, consumer: str) -> int:
        return self.plane.journal.consumers.position(consumer)


@contextmanager
def open_node(path: Path, *, connections: int | None = None) -> Iterator[Node]:
    with here() as opened:
        yield Node(opened, opened.open(open_plane(path, connections=connections)))


def publish(journal: Journal, session_id: str, *, task_id: str = TASK, **more: Any) -> None:
    trajectory = make_trajectory(session_id, task_id=task_id, **({"turns": 2} | more))
    for turn in trajectory.turns:
        journal.writer.record_turn(turn)
    publish_end(journal, trajectory)


# ── a node in a child ─────────────────────────────────────────────────────────


@attrs.define(eq=False)
class Child:
    """A node's process, on one port through all its lives."""

    path: Path
    port: int
    process: "subprocess.Popen[str] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, sessions: int = 0, pause_s: float = 0.0) -> None:
        argv = [sys.executable, __file__, str(self.path), str(self.port), str(sessions), str(pause_s)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.url

    def kill(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()
        self.process = None


async def serve(path: Path, port: int, sessions: int, pause_s: float) -> None:
    """Serve, and publish sessions of the task until there are so many: one every `pause_s` while it serves,
    or, without a pause, all before. Whatever a life before published stands.
    """
    async with open_plane(path, port=port) as plane:
        if not pause_s:
            await _publish_all(plane.journal, sessions, pause_s)
        print(plane.url, flush=True)
        if pause_s:
            await _publish_all(plane.journal, sessions, pause_s)
        await trio.sleep_forever()


async def _publish_all(journal: Journal, sessions: int, pause_s: float) -> None:
    for number in range(sessions):
        publish(journal, f"s{number}", sample_index=number)
        await journal.writer.flush()
        await trio.sleep(pause_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── servers that say what a test likes ────────────────────────────────────────

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextmanager
def answering(answer: Callable[[bytes, int], bytes | None]) -> Iterator[str]:
    """A server that gives each connection what `answer` makes of its request and its number, and hangs up; at
    None it hears no more.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_all() -> None:
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                said = answer(_request(connection), number)
                if said is None:
                    return
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                # until the client has read it all: closing at once may reset what is under way
                while connection.recv(65536):
                    pass
            number += 1

    server = threading.Thread(target=serve_all)
    server.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join(30)


def _request(connection: socket.socket) -> bytes:
    """A request without a body, or the head of one."""
    whole = b""
    while b"\r\n\r\n" not in whole and (data := connection.recv(65536)):
        whole += data
    return whole


def chunked(*parts: bytes, end: bool = False) -> bytes:
    return (
        HEAD
        + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
        + (b"0\r\n\r\n" if end else b"")
    )


def event(seq: int) -> bytes:
    return b'event: task\nid: %d\ndata: {"seq":%d,"key":"task:%d","task":{"n":%d}}\n\n' % (seq, seq, seq, seq)


def last_id(request: bytes) -> int:
    """Where a request wants to go on; 0 for the beginning."""
    found = [line for line in request.split(b"\r\n") if line.lower().startswith(b"last-event-id:")]
    return int(found[0].split(b":")[1]) if found else 0


if __name__ == "__main__":
    trio.run(serve, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
