"""Egress: how a container reaches the names its task was allowed, and nothing else.

`NodeEgress` is what a node allows and opens for a session, `Egress` a session's proxy while it is open. The rules of `rules.py` and the
reading of `asking.py` are pure; `dialing.py` alone meets the world.
"""

from polarnode.shell.egress.dialing import World
from polarnode.shell.egress.node import NodeEgress
from polarnode.shell.egress.rules import EgressRules, check_egress, read_network, rules_of
from polarnode.shell.egress.serving import Egress, open_egress, serve_egress

__all__ = ["Egress", "EgressRules", "NodeEgress", "World", "check_egress", "open_egress", "read_network", "rules_of", "serve_egress"]
