"""Polar's face of a node: what its routes ask, handed over.

The rule for whoever edits it: the face gets what the node's own routes have, and nothing besides.
"""

from polarnode.node.node import Node
from polarnode.web.polar_api import PolarFace, PolarHouse


def polar_face(node: Node) -> PolarFace:
    """The node under Polar's routes."""
    house = PolarHouse(
        service=node,
        journal=node.journal,
        generation=node.weights,
        captures=node.captures,
        sessions=node.scheduler.sessions,
        end_session=node.scheduler.cancel_session,
        node_id=node.config.node_id,
        model=node.model.name,
        volumes=node.config.volumes,
    )
    return PolarFace(house=house)
