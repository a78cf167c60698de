"""The node: everything put together."""

from polarnode.node.node import Node
from polarnode.node.opening import open_node, rare_collections, serve_control_plane
from polarnode.node.settings import simulated_marks

__all__ = ["Node", "open_node", "rare_collections", "serve_control_plane", "simulated_marks"]
