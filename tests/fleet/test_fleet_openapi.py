"""The OpenAPI document of a front: what a client that is made from it sends to a fleet."""

from typing import Any

from polarnode.fleet.openapi import STREAM, fleet_operations

from polarnode.api.app import EVERY, document


def parameters(operations: Any, method: str, path: str) -> dict[str, Any]:
    paths: Any = document([(method, path)], operations, token=False)["paths"]
    (found,) = paths.values()
    return {each["name"]: each["schema"] for each in found[method.lower()]["parameters"]}


def test_positions_of_a_fleet_are_text_and_those_of_a_node_numbers() -> None:
    fleet = {**EVERY, **fleet_operations()}
    for name in ("after", "Last-Event-ID"):
        assert parameters(fleet, *STREAM)[name] == {"type": "string"}
    node = parameters(EVERY, *STREAM)
    assert node["after"]["type"] == "integer"
    assert "pattern" in node["Last-Event-ID"]
    assert parameters(fleet, *STREAM).keys() == node.keys()


def test_requests_of_one_model_name_it_at_a_fleet_alone() -> None:
    fleet = {**EVERY, **fleet_operations()}
    for where in (
        ("POST", "/v1/weights"),
        ("POST", "/v1/engine/pause"),
        ("PUT", "/v1/adapters/<name>/versions/<version>"),
        ("POST", "/v1/score"),
    ):
        assert parameters(fleet, *where)["model"] == {"type": "string"}
        assert "model" not in parameters(EVERY, *where)
    assert "model" not in parameters(fleet, "GET", "/v1/tasks")
    found: Any = document([("POST", "/v1/fleet/drain")], fleet, token=False)
    assert "FleetDrain" in str(found["paths"])
