"""From an allowed name to a connection: looked up by the node, its addresses checked, and the very address that was checked connected to.

The container looks up nothing. Rule for whoever edits it: no name is given to anything that connects, only an address that passed.
"""

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import trio
from attrs import field, frozen
from trio.abc import HalfCloseableStream

from polarnode.shell.egress.asking import Denial
from polarnode.shell.egress.rules import EgressRules

LOOKUPS = 64  # at once, of all sessions: each is a thread that waits
RESOLVE_S = 10.0  # a resolver asks its servers for 5 s each, and most have two
CONNECT_S = 10.0  # for one address: a lost SYN is sent again after 1, 3 and 7 s
ADDRESSES = 4  # tried of one name: the first two of each family are enough to get round one that is down

_log = logging.getLogger(__name__)


@frozen
class Resolver:
    """This machine's resolver, in threads of its own number: a slow name server must not take those everything else waits for."""

    limiter: trio.CapacityLimiter

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """A name's addresses in the order to try them."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        found = await trio.to_thread.run_sync(look_up, limiter=self.limiter, abandon_on_cancel=True)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def connect(address: str, port: int) -> HalfCloseableStream:
    """A connection to an address. It is no name, so nothing is looked up."""
    sock = trio.socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        await sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def is_own(address: str) -> bool:
    """Whether an address is this machine's: its own doors may trust who comes from it. No packet is sent to find out."""
    family, nobodys = (socket.AF_INET6, "2001:db8::1") if ":" in address else (socket.AF_INET, "192.0.2.1")
    if _can_be_bound(nobodys, family):  # this machine lets programs take any address (ip_nonlocal_bind), so that says nothing
        return _is_its_own_source(address, family)
    return _can_be_bound(address, family)


def _can_be_bound(address: str, family: socket.AddressFamily) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
        trying.bind((address, 0))
        return True
    return False


def _is_its_own_source(address: str, family: socket.AddressFamily) -> bool:
    """What leaves for one's own address leaves from it, but where an interface has several."""
    with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
        trying.connect((address, 9))
        return bool(trying.getsockname()[0] == address)
    return False


@frozen(kw_only=True)
class World:
    """What is outside. One a node; tests have others."""

    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = field(factory=lambda: Resolver(trio.CapacityLimiter(LOOKUPS)))
    connect: Callable[[str, int], Awaitable[HalfCloseableStream]] = connect
    is_own: Callable[[str], bool] = is_own


async def dial(host: str, port: int, rules: EgressRules, world: World) -> HalfCloseableStream | Denial:
    """A connection to an allowed name, or why there is none."""
    addresses = await _addresses(host, port, world)
    if isinstance(addresses, Denial):
        return addresses
    reasons = {address: _refusal(address, rules, world) for address in addresses}
    allowed = [address for address, reason in reasons.items() if reason is None]
    if not allowed:
        reason = next(iter(reasons.values()), None) or "it has no address"
        return Denial(status=403, text=f"{host} is not connected to: {reason}", host=host)
    for address in allowed[:ADDRESSES]:
        stream = await _connected(address, port, world)
        if stream is not None:
            return stream
    return Denial(status=504, text=f"{host} port {port} does not answer; {len(allowed[:ADDRESSES])} of its addresses were tried", host=host)


async def _addresses(host: str, port: int, world: World) -> Sequence[str] | Denial:
    with trio.move_on_after(RESOLVE_S):
        try:
            return await world.resolve(host, port)
        except OSError as error:  # socket.gaierror is one
            return Denial(status=502, text=f"{host} could not be looked up: {error.strerror or error}", host=host)
        except UnicodeError:
            return Denial(status=502, text=f"{host} could not be looked up: it is no name of the DNS", host=host)
    return Denial(status=504, text=f"{host} could not be looked up within {RESOLVE_S:g} s", host=host)


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
