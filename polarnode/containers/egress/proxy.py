"""The egress proxy of one session: a listener in its container that serves a limited number of connections.

It runs beside the session and ends with it. `NodeEgress` opens it. Invariants: a connection is untrusted, so
everything about it has a limit with a reason; a failure in one connection affects no other; and a refused
client gets the reason and a remedy, because the reader is a model that will try again. Connections and bytes
are counted for the trajectory. Names come from the container, which may invent any number of them, so only
`MAX_COUNTED_NAMES` names of each kind are counted separately.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from socket import socket
from typing import assert_never

import h11
import trio
from attrs import define, field, frozen
from trio.abc import HalfCloseableStream

from polarnode.containers.egress.requests import (
    GONE,
    READ_BYTES,
    Forward,
    ProxyDenial,
    Side,
    TunnelRequest,
    World,
    container_side,
    dial_name,
    forward_request,
    read,
    tunnel,
)
from polarnode.containers.egress.rules import EgressRules, egress_rules, name_fault, spelled
from polarnode.containers.inside import EGRESS_PORT, ENDPOINT_HOST, open_listener
from polarnode.core.conversation import Json
from polarnode.support.concurrency import open_background

# ── counts ────────────────────────────────────────────────────────────────────

MAX_COUNTED_NAMES = 64  # names of each kind: an installation needs a handful of hosts, an attack invents them
OTHERS = "(others)"
NO_NAME = "(no name)"


@define(eq=False)
class EgressCounts:
    """Counts of one session: connections by name, and the bytes `sent` and `received` through them."""

    allowed: Counter[str] = field(factory=Counter, init=False)
    refused: Counter[str] = field(factory=Counter, init=False)
    failed: Counter[str] = field(factory=Counter, init=False)  # allowed, but not reached
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    def count(self, kind: Counter[str], host: str) -> None:
        """Count one connection of a kind."""
        name = spelled(host) if name_fault(host) is None else NO_NAME
        kind[name if name in kind or len(kind) < MAX_COUNTED_NAMES else OTHERS] += 1

    def metrics(self) -> Mapping[str, Json]:
        """The JSON of a trajectory's metrics."""
        return {
            "allowed": dict(self.allowed),
            "refused": dict(self.refused),
            "failed": dict(self.failed),
            "sent_bytes": self.sent,
            "received_bytes": self.received,
        }


# ── serving ───────────────────────────────────────────────────────────────────

# The most open connections. uv, the greediest known installer, opens 50. A further connection waits in the
# kernel until another one ends.
CONNECTIONS = 64
MAX_LOOKUPS = 4  # concurrent lookups of names; each is a thread of the node that waits for a name server
HEAD_S = 30.0  # seconds for a whole request head; a client that sends it byte by byte only holds one slot
# Seconds without a byte in either direction. A server that builds an archive on request thinks for a minute.
IDLE_S = 120.0
LINGER_S = 2.0  # seconds for a refused client to read the reason
NO_ROOM_S = 0.5  # seconds until the next accept if the node has no descriptor left

# These bypass the proxy: the model endpoint, and servers that the harness starts itself.
LOOPBACK = "localhost,127.0.0.1,::1"

_log = logging.getLogger(__name__)


@define(eq=False)
class EgressProxy:
    """A session's open proxy. `env` is what programs in the container need to use it."""

    url: str
    _figures: EgressCounts = field(factory=EgressCounts, init=False)

    @property
    def env(self) -> Mapping[str, str]:
        """The variables in lower and upper case: curl reads http_proxy in lower case only, others the upper
        case. Node reads any only with NODE_USE_ENV_PROXY.
        """
        spelled = {"http_proxy": self.url, "https_proxy": self.url, "no_proxy": LOOPBACK}
        return {
            **spelled,
            **{name.upper(): value for name, value in spelled.items()},
            "NODE_USE_ENV_PROXY": "1",
        }

    def figures(self) -> Mapping[str, Json]:
        """What went through so far, for the trajectory's metrics."""
        return self._figures.metrics()


@asynccontextmanager
async def open_egress(network: int, rules: EgressRules, world: World) -> AsyncIterator[EgressProxy]:
    """Open the proxy of the container whose network namespace this is (a descriptor), at EGRESS_PORT. Raises
    RuntimeFault when it cannot be opened. At the end of the block, open connections are cut.
    """
    listener = await open_listener(network, EGRESS_PORT)
    async with serve_egress(listener, rules, world) as egress:
        yield egress


@asynccontextmanager
async def serve_egress(listener: socket, rules: EgressRules, world: World) -> AsyncIterator[EgressProxy]:
    """Serve the proxy on a listening socket, which is closed at the end."""
    egress = EgressProxy(f"http://{ENDPOINT_HOST}:{listener.getsockname()[1]}")
    served = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    serving = _ProxyServer(listener=served, rules=rules, world=world, figures=egress._figures)
    async with open_background(serving.run):
        yield egress


@define(eq=False, kw_only=True)
class _ProxyServer:
    listener: trio.SocketListener
    rules: EgressRules
    world: World
    figures: EgressCounts
    _places: trio.Semaphore = field(factory=partial(trio.Semaphore, CONNECTIONS), init=False)
    _lookups: trio.CapacityLimiter = field(factory=partial(trio.CapacityLimiter, MAX_LOOKUPS), init=False)

    async def run(self, ready: trio.Event) -> None:
        """Serve until cancelled. Closing the listener and all connections awaits nothing that could block."""
        with self.listener.socket:
            async with trio.open_nursery() as connections:
                ready.set()
                while True:
                    await self._places.acquire()
                    await self._accept_one(connections)

    async def _accept_one(self, connections: trio.Nursery) -> None:
        try:
            stream = await self.listener.accept()
        except OSError as error:
            self._places.release()
            _log.warning("egress: no connection can be taken: %s", error)
            await trio.sleep(NO_ROOM_S)
        else:
            connections.start_soon(self._connection, stream)

    async def _connection(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end. Errors are caught here, so that a bug in one connection affects
        neither another connection nor the session.
        """
        try:
            with stream.socket, trio.CancelScope() as clock:
                await self._requests(container_side(stream), clock)
        except* (*GONE, h11.RemoteProtocolError, h11.LocalProtocolError):
            pass  # a peer that left or does not speak HTTP is not an error of ours
        except* Exception:
            _log.exception("egress: a connection met a bug")
        finally:
            self._places.release()

    async def _requests(self, client: Side, clock: trio.CancelScope) -> None:
        """Serve the requests of one connection, one after the other, until one of them ends it."""
        goes_on = True
        while goes_on:
            clock.deadline = trio.current_time() + HEAD_S
            request = await self._head(client)
            goes_on = isinstance(request, h11.Request) and await self._request(client, request, clock)

    async def _head(self, client: Side) -> object:
        try:
            return await client.next()
        except h11.RemoteProtocolError as error:
            self.figures.count(self.figures.refused, "")
            await self._send_denial(
                client,
                ProxyDenial(status=error.error_status_hint, text=f"this is no request of HTTP: {error}"),
            )
            return None

    async def _request(self, client: Side, request: h11.Request, clock: trio.CancelScope) -> bool:
        """Serve a request. Return whether the connection can take another one."""
        clock.deadline = trio.current_time() + IDLE_S
        parsed = read(request, self.rules)
        stream = parsed if isinstance(parsed, ProxyDenial) else await self._dial_target(parsed)
        if not isinstance(parsed, ProxyDenial) and not isinstance(stream, ProxyDenial):
            return await self._allowed(client, parsed, stream, clock)
        if isinstance(stream, ProxyDenial):
            self.figures.count(
                self.figures.failed if stream.status > 500 else self.figures.refused, stream.host
            )
            await self._send_denial(client, stream)
        return False

    async def _dial_target(self, parsed: TunnelRequest | Forward) -> HalfCloseableStream | ProxyDenial:
        async with self._lookups:
            return await dial_name(parsed.host, parsed.port, self.rules, self.world)

    async def _allowed(
        self,
        client: Side,
        parsed: TunnelRequest | Forward,
        stream: HalfCloseableStream,
        clock: trio.CancelScope,
    ) -> bool:
        self.figures.count(self.figures.allowed, parsed.host)
        try:
            match parsed:
                case TunnelRequest():
                    await tunnel(client, stream, self._moved(clock))
                    return False
                case Forward():
                    await self._forward_request(client, stream, parsed, clock)
                    return client.start_next_cycle() or await _leave(client)
                case _:
                    assert_never(parsed)
        finally:
            with trio.move_on_after(LINGER_S, shield=True):
                await trio.aclose_forcefully(stream)

    async def _forward_request(
        self, client: Side, stream: HalfCloseableStream, parsed: Forward, clock: trio.CancelScope
    ) -> None:
        try:
            await forward_request(client, stream, parsed.request, self._moved(clock))
        except* (*GONE, h11.RemoteProtocolError) as broken:
            if client.begun:
                raise  # a cut answer must be recognisable as cut
            _log.info("egress: %s port %d gave no answer: %s", parsed.host, parsed.port, broken.exceptions)
            await self._send_denial(
                client,
                ProxyDenial(
                    status=502,
                    text=f"{parsed.host} port {parsed.port} gave no answer of HTTP",
                    host=parsed.host,
                ),
            )

    def _moved(self, clock: trio.CancelScope) -> Callable[[int, int], None]:
        def moved(sent: int, received: int) -> None:
            self.figures.sent += sent
            self.figures.received += received
            clock.deadline = trio.current_time() + IDLE_S

        return moved

    async def _send_denial(self, client: Side, denial: ProxyDenial) -> None:
        """Send the reason as text, and end the connection so that it is read."""
        body = f"polarnode: {denial.text}\n".encode()
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        with suppress(*GONE, h11.LocalProtocolError):
            await client.send(
                h11.Response(
                    status_code=denial.status, headers=headers, reason=HTTPStatus(denial.status).phrase
                )
            )
            await client.send(h11.Data(data=body))
            await _leave(client)


async def _leave(client: Side) -> bool:
    """End a connection whose peer may still be sending. What it sends is read and dropped, because closing a
    socket that has unread bytes discards the response.
    """
    with trio.move_on_after(LINGER_S):
        await client.stream.send_eof()
        while await client.stream.receive_some(READ_BYTES):
            pass
    return False


# ── on the node ───────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class NodeEgress:
    """The egress of a node. `names` and `networks` are its settings `egress` and `egress_networks`. Without
    names no task reaches anything.
    """

    names: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    world: World = field(factory=World)

    def __attrs_post_init__(self) -> None:
        egress_rules(self.names, self.networks)  # an invalid network fails the start of the node

    def open(self, network: int, names: tuple[str, ...]) -> AbstractAsyncContextManager[EgressProxy]:
        """Open the proxy in a container's network namespace (a descriptor), for the names that its task
        requested, which were checked before. Raises RuntimeFault.
        """
        return open_egress(network, egress_rules(names, self.networks), self.world)
