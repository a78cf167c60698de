"""One request of a client in a container: parsed, dialled, and forwarded or tunnelled.

Parsing is pure: it takes events of h11 and returns a value. The proxy never forwards bytes that it did not
parse. A request is read as a whole or refused, and what goes out is rewritten from what was parsed, so that
no two programs can take it for different requests. A header is dropped unless it is end to end. Forwarding
ends when both ends have ended. Its caller decides how long that may take, and learns of all bytes that pass
through `moved`. A peer's mistake ends its own connection and is no error of the node. Invariant of dialling:
the container looks up nothing; the node resolves names, and connects only to an address that passed the
rules, never to a name.
"""

import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import h11
import trio
from attrs import define, field, frozen
from trio.abc import HalfCloseableStream

from polarnode.containers.egress.rules import EgressRules, spelled

# ── parsing a request ─────────────────────────────────────────────────────────

HTTP_PORT = 80
CONNECT_TARGET = re.compile(r"([^\s:@/?#\[\]]+):(\d{1,5})")
ABSOLUTE_TARGET = re.compile(r"http://([^/?#]*)([^#]*)", re.IGNORECASE)
AUTHORITY_PATTERN = re.compile(r"([^\s:@/?#\[\]]+)(?::(\d{1,5}))?")

# A connection's own headers (RFC 9110, 7.6.1), the proxy's, and what the proxy answers itself.
HOP_HEADERS = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer"
    b" transfer-encoding upgrade expect host".split()
)

Headers = tuple[tuple[bytes, bytes], ...]


@frozen(kw_only=True)
class ProxyDenial:
    """A response of the proxy itself. `host` is the requested name as it was written."""

    status: int
    text: str
    host: str = ""


@frozen(kw_only=True)
class TunnelRequest:
    """A CONNECT request. Bytes are passed both ways unchanged, because the proxy cannot read what TLS
    carries.
    """

    host: str
    port: int


@frozen(kw_only=True)
class Forward:
    """A plain request, with the request that its server gets."""

    host: str
    port: int
    request: h11.Request


ParsedRequest = TunnelRequest | Forward | ProxyDenial


def read(request: h11.Request, rules: EgressRules) -> ParsedRequest:
    """Parse a request, and deny it where the rules do not allow its target."""
    parsed = _parse_tunnel(request) if request.method == b"CONNECT" else _parse_forward(request)
    if isinstance(parsed, ProxyDenial):
        return parsed
    refusal = rules.refusal(parsed.host, parsed.port)
    return parsed if refusal is None else ProxyDenial(status=403, text=refusal, host=parsed.host)


def _parse_tunnel(request: h11.Request) -> TunnelRequest | ProxyDenial:
    target = request.target.decode("ascii")
    found = CONNECT_TARGET.fullmatch(target)
    if found is None:
        return _malformed_denial(
            f"{target[:300]!r} cannot be connected to: ask for NAME:PORT, by name and not by address",
            status=403,
        )
    if _framing_headers(request):
        return _malformed_denial("a CONNECT has no body")
    return TunnelRequest(host=spelled(found[1]), port=int(found[2]))


def _parse_forward(request: h11.Request) -> Forward | ProxyDenial:
    target = request.target.decode("ascii")
    found = ABSOLUTE_TARGET.fullmatch(target)
    if found is None:
        return _malformed_denial(
            "this is a proxy: ask it for http://NAME/PATH, or to CONNECT for anything else, not for"
            f" {target[:300]!r}"
        )
    authority = AUTHORITY_PATTERN.fullmatch(found[1])
    if authority is None:
        return _malformed_denial(
            f"{found[1][:300]!r} cannot be connected to: ask for NAME or NAME:PORT, by name and not by"
            " address",
            status=403,
        )
    host, port = spelled(authority[1]), int(authority[2] or HTTP_PORT)
    fault = _host_fault(request, host, port)
    if fault is not None:
        return _malformed_denial(fault)
    if len(_framing_headers(request)) > 1:  # two lengths of one body can be read as two requests
        return _malformed_denial("a body has either a Content-Length or a Transfer-Encoding, not both")
    return Forward(host=host, port=port, request=_rewrite_request(request, host, port, found[2]))


def _host_fault(request: h11.Request, host: str, port: int) -> str | None:
    """Why a Host header does not match the target: a server that routes by it would serve another site than
    the allowed one.
    """
    for value in _values(request, b"host"):
        text = value.decode("latin1")
        found = AUTHORITY_PATTERN.fullmatch(text)
        if found is None or (spelled(found[1]), int(found[2] or HTTP_PORT)) != (host, port):
            return (
                f"the header Host, {text[:300]!r}, is not the host of the request's target: make them the"
                " same"
            )
    return None


def _framing_headers(request: h11.Request) -> list[bytes]:
    return [name for name, _ in request.headers if name in (b"content-length", b"transfer-encoding")]


def _rewrite_request(request: h11.Request, host: str, port: int, rest: str) -> h11.Request:
    """The request as its server gets it, on a connection that is closed afterwards."""
    authority = host if port == HTTP_PORT else f"{host}:{port}"
    chunked = (
        [(b"Transfer-Encoding", b"chunked")] if b"transfer-encoding" in _framing_headers(request) else []
    )
    headers = [(b"Host", authority.encode()), *end_to_end(request), *chunked, (b"Connection", b"close")]
    path = rest if rest.startswith("/") else f"/{rest}"
    return h11.Request(method=request.method, target=path.encode(), headers=headers)


def end_to_end(message: h11.Request | h11.Response) -> Headers:
    """A message's headers without those of its connection, and without those that Connection names.
    Content-Length is kept.
    """
    named = {
        name.strip().lower() for value in _values(message, b"connection") for name in value.split(b",")
    } - {b"content-length"}
    dropped = HOP_HEADERS | named
    # The names are spelled as they came.
    return tuple((name, value) for name, value in message.headers.raw_items() if name.lower() not in dropped)


def _values(message: h11.Request | h11.Response, header: bytes) -> list[bytes]:
    return [value for name, value in message.headers if name == header]


def _malformed_denial(text: str, *, status: int = 400) -> ProxyDenial:
    return ProxyDenial(status=status, text=text)


# ── forwarding ────────────────────────────────────────────────────────────────

READ_BYTES = 64 << 10  # bytes of one read; a download needs some hundred of them a second
# The most bytes of the head of a request or an answer. Package indexes set a few headers, not kilobytes of
# them.
HEAD_BYTES = 32 << 10

CountBytes = Callable[[int, int], None]  # called with bytes sent to the server, and bytes received from it
GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


@define(eq=False)
class Side:
    """One end of HTTP on a stream."""

    stream: HalfCloseableStream
    http: h11.Connection
    begun: bool = field(default=False, init=False)  # an answer of ours has begun, so no other can be given

    async def next(self) -> object:
        """Return the next event of h11. Raises h11's RemoteProtocolError and the errors of streams."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self.http.our_role is h11.SERVER and self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.http.receive_data(bytes(await self.stream.receive_some(READ_BYTES)))

    async def send(self, event: h11.Event) -> None:
        self.begun = self.begun or isinstance(event, h11.Response)
        await self.stream.send_all(self.http.send(event) or b"")

    def start_next_cycle(self) -> bool:
        """Get ready for another request, if request and response were complete and both sides keep the
        connection. Return whether it is ready.
        """
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        self.begun = False
        return True


def container_side(stream: HalfCloseableStream) -> Side:
    return Side(stream, h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES))


async def forward_request(
    client: Side, world: HalfCloseableStream, request: h11.Request, moved: CountBytes
) -> None:
    """Forward a plain request to its server and the response back, each rewritten. An error before the
    response is raised; a later one cuts the response.
    """
    server = Side(world, h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES))
    await server.send(request)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_body, client, server, moved)
        await _answer(client, server, moved)
        # If the answer came before the request was complete, the rest of the request is not read.
        nursery.cancel_scope.cancel()


async def _send_body(client: Side, server: Side, moved: CountBytes) -> None:
    """Forward the request's body as it comes. A server that does not read it may still answer; a client that
    breaks off has left.
    """
    try:
        while True:
            event = await client.next()
            if isinstance(event, h11.Data):
                moved(len(event.data), 0)
                await server.send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await server.send(h11.EndOfMessage())
                return
            else:
                return
    except (*GONE, h11.RemoteProtocolError, h11.LocalProtocolError):
        return


async def _answer(client: Side, server: Side, moved: CountBytes) -> None:
    while True:
        event = await server.next()
        if isinstance(event, h11.Response):
            answer = h11.Response(
                status_code=event.status_code, reason=event.reason, headers=list(end_to_end(event))
            )
            await client.send(answer)
        elif isinstance(event, h11.Data):
            moved(0, len(event.data))
            await client.send(h11.Data(data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await client.send(h11.EndOfMessage())
            return
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the server closed the connection without an answer")


async def tunnel(client: Side, world: HalfCloseableStream, moved: CountBytes) -> None:
    """Forward bytes both ways until both directions have ended."""
    await client.next()  # the end of a request without a body
    await client.send(h11.Response(status_code=200, reason=b"Connection established", headers=[]))
    early = client.http.trailing_data[0]
    if early:
        moved(len(early), 0)
        await world.send_all(early)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            _forward_bytes, client.stream, world, lambda count: moved(count, 0), nursery.cancel_scope
        )
        nursery.start_soon(
            _forward_bytes, world, client.stream, lambda count: moved(0, count), nursery.cancel_scope
        )


async def _forward_bytes(
    source: HalfCloseableStream,
    target: HalfCloseableStream,
    moved: Callable[[int], None],
    both: trio.CancelScope,
) -> None:
    """Forward one direction to its end; the other may last longer. A connection that breaks ends both."""
    try:
        while data := await source.receive_some(READ_BYTES):
            moved(len(data))
            await target.send_all(data)
        await target.send_eof()
    except GONE:
        both.cancel()


# ── dialling ──────────────────────────────────────────────────────────────────

MAX_LOOKUPS = 64  # concurrent lookups of all sessions; each is a thread that waits
RESOLVE_S = 10.0  # a resolver asks each of its servers for 5 s, and most have two
CONNECT_S = 10.0  # seconds for one address: a lost SYN is sent again after 1, 3 and 7 s
MAX_ADDRESSES = 4  # addresses that are tried of one name: enough to avoid one that is down

_log = logging.getLogger(__name__)


@frozen
class Resolver:
    """This machine's resolver, in threads of its own limit: a slow name server must not take the threads of
    everything else.
    """

    limiter: trio.CapacityLimiter

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Look up a name's addresses, in the order in which to try them."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        found = await trio.to_thread.run_sync(look_up, limiter=self.limiter, abandon_on_cancel=True)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def connect(address: str, port: int) -> HalfCloseableStream:
    """Connect to an address; no name is looked up."""
    sock = trio.socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        await sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def is_own(address: str) -> bool:
    """Whether an address is this machine's own: services may trust connections from it. No packet is sent."""
    family, nobodys = (socket.AF_INET6, "2001:db8::1") if ":" in address else (socket.AF_INET, "192.0.2.1")
    # If this machine lets programs bind any address (ip_nonlocal_bind), a successful bind proves nothing.
    if _can_be_bound(nobodys, family):
        return _is_its_own_source(address, family)
    return _can_be_bound(address, family)


def _can_be_bound(address: str, family: socket.AddressFamily) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
        trying.bind((address, 0))
        return True
    return False


def _is_its_own_source(address: str, family: socket.AddressFamily) -> bool:
    """Whether packets to this address leave from it: true of an own address, except where an interface has
    several.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
        trying.connect((address, 9))
        return bool(trying.getsockname()[0] == address)
    return False


@frozen(kw_only=True)
class World:
    """Name lookups and outgoing connections, one instance per node; tests replace it."""

    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = field(
        factory=lambda: Resolver(trio.CapacityLimiter(MAX_LOOKUPS))
    )
    connect: Callable[[str, int], Awaitable[HalfCloseableStream]] = connect
    is_own: Callable[[str], bool] = is_own


async def dial_name(
    host: str, port: int, rules: EgressRules, world: World
) -> HalfCloseableStream | ProxyDenial:
    """Connect to an allowed name, or deny with the reason."""
    addresses = await _addresses(host, port, world)
    if isinstance(addresses, ProxyDenial):
        return addresses
    reasons = {address: _refusal(address, rules, world) for address in addresses}
    allowed = [address for address, reason in reasons.items() if reason is None]
    if not allowed:
        reason = next(iter(reasons.values()), None) or "it has no address"
        return ProxyDenial(status=403, text=f"{host} is not connected to: {reason}", host=host)
    for address in allowed[:MAX_ADDRESSES]:
        stream = await _connected(address, port, world)
        if stream is not None:
            return stream
    return ProxyDenial(
        status=504,
        text=(
            f"{host} port {port} does not answer; {len(allowed[:MAX_ADDRESSES])} of its addresses were tried"
        ),
        host=host,
    )


async def _addresses(host: str, port: int, world: World) -> Sequence[str] | ProxyDenial:
    with trio.move_on_after(RESOLVE_S):
        try:
            return await world.resolve(host, port)
        except OSError as error:  # socket.gaierror is one
            return ProxyDenial(
                status=502, text=f"{host} could not be looked up: {error.strerror or error}", host=host
            )
        except UnicodeError:
            return ProxyDenial(
                status=502, text=f"{host} could not be looked up: it is no name of the DNS", host=host
            )
    return ProxyDenial(status=504, text=f"{host} could not be looked up within {RESOLVE_S:g} s", host=host)


def _refusal(address: str, rules: EgressRules, world: World) -> str | None:
    reason = rules.address_refusal(address)
    if reason is None and not rules.in_networks(address) and world.is_own(address):
        return f"{address} is the node's own machine: the node's setting egress_networks may allow it"
    return reason


async def _connected(address: str, port: int, world: World) -> HalfCloseableStream | None:
    with trio.move_on_after(CONNECT_S):
        try:
            return await world.connect(address, port)
        except OSError as error:
            _log.info("egress: %s port %d: %s", address, port, error)
    return None
