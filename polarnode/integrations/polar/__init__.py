"""The node under Polar's own routes and JSON, for bridges that exist: its rollout server and its gateway in
one, on the control plane's socket.

The rule for whoever edits it: a field that Polar documents is there with Polar's meaning, or docs/polar.md
says what differs and why; nothing here keeps anything that the journal does not.
"""

from collections.abc import Iterator

from attrs import frozen

from polarnode.http.asgi import RouteRow
from polarnode.integrations.polar.answers import PolarHouse, answered
from polarnode.integrations.polar.completions import EventRoutes
from polarnode.integrations.polar.gateway import NodeRoutes, SessionRoutes
from polarnode.integrations.polar.tasks import TaskRoutes

__all__ = ["PolarFace", "PolarHouse"]


@frozen(kw_only=True)
class PolarFace:
    """All of Polar's routes."""

    house: PolarHouse

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the control plane's table."""
        tasks = TaskRoutes(self.house)
        rooms = (
            tasks,
            SessionRoutes(house=self.house, tasks=tasks),
            NodeRoutes(house=self.house),
            EventRoutes(house=self.house),
        )
        for room in rooms:
            for method, path, handler in room.rows():
                yield method, path, answered(handler)
