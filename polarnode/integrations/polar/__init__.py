"""The node under Polar's own routes and JSON, for bridges that exist: Polar's rollout server and gateway in
one, on the control plane's socket.

It stands on the port `Service` and keeps nothing that the journal does not. A field that Polar documents has
Polar's meaning here, or docs/polar.md says what differs and why.
"""

from polarnode.api.app import Extension
from polarnode.api.service import Service
from polarnode.integrations.polar.answers import answered, callback_formats
from polarnode.integrations.polar.completions import EventRoutes
from polarnode.integrations.polar.gateway import NodeRoutes, SessionRoutes
from polarnode.integrations.polar.operations import OPERATIONS
from polarnode.integrations.polar.tasks import TaskRoutes

__all__ = ["callback_formats", "polar_extension"]


def polar_extension(service: Service) -> Extension:
    """All of Polar's routes. Its bridges send the control plane's token in a header of their own."""
    tasks = TaskRoutes(service)
    routes = (
        tasks,
        SessionRoutes(service=service, tasks=tasks),
        NodeRoutes(service=service),
        EventRoutes(service=service),
    )
    return Extension(
        rows=tuple(
            (method, path, answered(handler)) for each in routes for method, path, handler in each.rows()
        ),
        operations=OPERATIONS,
        token_headers=("X-Polar-Control-Token",),
    )
