"""What the OpenAPI document of a front has otherwise than a node's: positions are opaque text, requests of
one model of several name it, and the fleet's own routes.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, frozen

from polarnode.api.app import EVERY
from polarnode.api.openapi_shapes import Operation, Where
from polarnode.core.codec.schema import Schema

STREAM: Final[Where] = ("GET", "/v1/trajectories/stream")
SCORE: Final[Where] = ("POST", "/v1/score")
OF_A_MODEL: Final = ("/v1/weights", "/v1/engine", "/v1/adapters")  # how paths of one model's nodes begin
_POSITION: Final[Schema] = {"type": "string"}
_AFTER: Final[Schema] = {
    "description": "Begin after this position: the text of the stream's `id:` line.",
    "schema": _POSITION,
}


@frozen(kw_only=True)
class FleetDrain:
    """Body of the front's POST /v1/fleet/drain: a node by its name or address."""

    node: str
    draining: bool


def fleet_operations() -> Mapping[Where, Operation]:
    """The operations of a front that differ from a node's, or that no node has."""
    stream = EVERY[STREAM]
    own = dict[Where, Operation]()
    own[STREAM] = evolve(
        stream,
        query=tuple(name for name in stream.query if name != "after"),
        headers=(),
        own={**stream.own, "after": _AFTER},
        own_headers={"Last-Event-ID": _POSITION},
    )
    for where, operation in EVERY.items():
        if where[1].startswith(OF_A_MODEL) or where == SCORE:
            own[where] = evolve(operation, query=(*operation.query, "model"))
    answer = dict[str, Any]
    own["GET", "/v1/fleet/nodes"] = Operation(summary="The nodes of the fleet.", answer=answer)
    own["POST", "/v1/fleet/drain"] = Operation(
        summary="Let a node take no new tasks, or take some again.",
        body=FleetDrain,
        answer=answer,
        errors=(429, 503),
    )
    return own
