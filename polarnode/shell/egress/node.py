"""What a node lets its tasks reach, and how it opens a session's proxy: the one thing of this package a session is given."""

from contextlib import AbstractAsyncContextManager

from attrs import field, frozen

from polarnode.shell.egress.dialing import World
from polarnode.shell.egress.rules import rules_of
from polarnode.shell.egress.serving import Egress, open_egress


@frozen(kw_only=True)
class NodeEgress:
    """`names` and `networks` are the node's settings `egress` and `egress_networks`. Without names no task reaches anything."""

    names: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    world: World = field(factory=World)

    def __attrs_post_init__(self) -> None:
        rules_of(self.names, self.networks)  # a network that is none is said when the node starts

    def open(self, network: int, asked: tuple[str, ...]) -> AbstractAsyncContextManager[Egress]:
        """The proxy in a container's network namespace (a descriptor), for what its task asked for; checked before. Raises RuntimeFault."""
        return open_egress(network, rules_of(asked, self.networks), self.world)
