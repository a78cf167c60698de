"""Rules for what a container may reach, by requested names and by the addresses of these names, and for where
callbacks may go.

The rules are pure functions. They answer two separate questions: may this name be reached (by the task's
list), and may this address be connected to (by the node's networks). The second question is asked about the
very address that is then used, so a name that changes its address between two look-ups gains nothing.
Invariant: a name that is not understood is refused, because such lists are bypassed by spellings that two
programs read differently.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.errors import ConfigError, Refused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PORTS = frozenset({80, 443})  # the web's ports: packages come through them; mail, databases and shells do not
NAME_LENGTH = 253  # the most characters of a name of the DNS
NAME = re.compile(
    r"([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
)  # the last label begins with a letter: see `name_fault`
SHOWN = 8  # a refusal shows at most this many names of the task's list
ANY = "*"

# All public IPv6 addresses are in here. Addresses outside are local to a site or a link, or for tests.
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_NETWORKS = (  # networks that Python's own table takes for public
    # Azure answers each of its machines there, with data that only the machine should know.
    ipaddress.ip_network("168.63.129.16/32"),
    ipaddress.ip_network("192.0.0.0/24"),  # reserved for protocols; Oracle's cloud has its metadata in it
    ipaddress.ip_network("192.88.99.0/24"),  # relays of a retired translation, as 2002::/16 is
    ipaddress.ip_network("3fff::/20"),  # documentation, of 2024
)
# A network with only IPv6 sees IPv4 addresses in here: the address is in the last 32 bits.
TRANSLATED_V6 = ipaddress.IPv6Network("64:ff9b::/96")
LOCAL_V6 = ipaddress.IPv6Network("fc00::/7")
# Clouds give a machine its credentials at these addresses, outside the link-local networks.
METADATA = (
    ipaddress.ip_network("100.100.100.200/32"),  # Alibaba
    ipaddress.ip_network("168.63.129.16/32"),  # Azure
    ipaddress.ip_network("192.0.0.192/32"),  # Oracle
    ipaddress.ip_network("fd00:ec2::254/128"),  # Amazon
    ipaddress.ip_network("fd20:ce::254/128"),  # Google
)
# Loopback and private networks, where trainers and Polar's bridges listen. The operator has to allow a public
# receiver, because an event holds whole trajectories, and everyone who may submit a task chooses its URL.
CALLBACK_NETWORKS: Final = (
    *("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    *("100.64.0.0/10", "fc00::/7"),
)
THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")  # Linux connects 0.0.0.0 to itself


@frozen(kw_only=True)
class EgressRules:
    """One session's rules. `names` are as `spelled`, each a name, `*.below.one` or `*`; `networks` have the
    addresses that are allowed besides the public ones.
    """

    names: tuple[str, ...]
    networks: tuple[Network, ...] = ()
    ports: frozenset[int] = PORTS

    def refusal(self, host: str, port: int) -> str | None:
        """Why this host and port must not be reached, as a sentence with its remedy; None if the name may be
        looked up.
        """
        fault = name_fault(host)
        if fault is not None:
            return fault
        if port not in self.ports:
            allowed = " and ".join(map(str, sorted(self.ports)))
            return f"port {port} of {spelled(host)} is not reached from here: only ports {allowed} are"
        if any(pattern_covers(pattern, spelled(host)) for pattern in self.names):
            return None
        return (
            f"{spelled(host)} is not on this task's list ({self._shown()}): add it to runtime.egress, where"
            " the node's own setting egress allows it"
        )

    def _shown(self) -> str:
        rest = len(self.names) - SHOWN
        return ", ".join(self.names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

    def address_refusal(self, text: str) -> str | None:
        """Why this address must not be connected to; None when it may be."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return f"{text!r} is no address"
        if self._in_networks(address) or is_public(address):
            return None
        return f"{text} is not a public address: the node's setting egress_networks may allow its network"

    def in_networks(self, text: str) -> bool:
        """Whether the node's operator allowed this address by its network, whatever kind of address it is."""
        return self._in_networks(ipaddress.ip_address(text))

    def _in_networks(self, address: Address) -> bool:
        return within(address, self.networks) or within(meant(address), self.networks)


def egress_rules(names: Iterable[str], networks: Iterable[str]) -> EgressRules:
    """The rules for a task's names on a node with these networks. Raises ConfigError for an invalid
    network.
    """
    return EgressRules(names=tuple(map(spelled, names)), networks=tuple(map(read_network, networks)))


def read_network(text: str, setting: str = "egress_networks") -> Network:
    """A network of the node's settings. Raises ConfigError where it is invalid."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{setting}: {text!r} is no network ({error}): write it as 10.1.0.0/16 or fd00::/8"
        ) from error


def check_egress(requested: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise Refused, with its path, for the first requested name that the node does not allow."""
    for index, name in enumerate(requested):
        if not any(pattern_covers(spelled(pattern), spelled(name)) for pattern in allowed):
            remedy = "leave it out, or have it added to the node's setting egress"
            raise Refused(
                f"this node does not let tasks reach {name}: {remedy}", path=f"$.runtime.egress[{index}]"
            )


def spelled(host: str) -> str:
    """The one spelling of a name: lower case, without a dot at the end."""
    return host.lower().removesuffix(".")


def pattern_covers(pattern: str, name: str) -> bool:
    """Whether a pattern allows a name, or everything that another pattern allows. `*.a.b` allows the names
    below `a.b`, at any depth, but not `a.b` itself.
    """
    if pattern in (ANY, name):
        return True
    return pattern.startswith("*.") and name != pattern[2:] and name.endswith(pattern[1:])


def name_fault(host: str) -> str | None:
    """Why a host is not a name; None when it is. Addresses are not, in any of their spellings: 127.1,
    0x7f000001 and 2130706433 are all one machine to a resolver.
    """
    name = spelled(host)
    if len(name) <= NAME_LENGTH and NAME.fullmatch(name):
        return None
    return (
        f"{host[:NAME_LENGTH]!r} is no host's name: ask by name, not by address, and write names of other"
        " alphabets as xn--..."
    )


def is_public(address: Address) -> bool:
    """Whether an address is a public unicast address: not this machine, its networks, a cloud's metadata,
    multicast or documentation.
    """
    means = meant(address)
    if means.is_multicast or means.is_reserved or not means.is_global or within(means, NOT_PUBLIC_NETWORKS):
        return False
    return means.version == 4 or (means in GLOBAL_V6 and means.sixtofour is None and means.teredo is None)


def never_connected(address: Address) -> bool:
    """Whether the node itself never connects there, whatever its settings are. That holds for link-local
    addresses, a cloud's metadata, multicast, unspecified and reserved addresses, and for IPv6 addresses that
    tunnel to an address which is not seen here or translate one which is not public.
    """
    means = meant(address)
    # A translator sends it to a network of its own. The prefix is for public addresses only (RFC 6052, 3.1).
    if address in TRANSLATED_V6 and not means.is_global:
        return True
    if means.is_loopback:
        return False
    if means.is_link_local or means.is_multicast or means.is_unspecified or within(means, METADATA):
        return True
    if isinstance(means, ipaddress.IPv4Address):
        return means.is_reserved or within(means, (THIS_NETWORK,))
    tunnels = means.sixtofour is not None or means.teredo is not None
    return tunnels or not within(means, (GLOBAL_V6, LOCAL_V6))


def within(address: Address, networks: Iterable[Network]) -> bool:
    """Whether some network holds the address."""
    return any(address.version == network.version and address in network for network in networks)


def meant(address: Address) -> Address:
    """The IPv4 address inside an IPv6 address that only wraps it; any other address unchanged."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in TRANSLATED_V6:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address
