"""The one door of all captures: a socket of the machine itself, where each key finds its own session and no other.

The rule for whoever edits it: its plane knows captures alone, so that no key of a container's session opens anything here; and a request goes
through a door of its own capture, so that one capture's bodies never take another's room.
"""

from typing import Final

from attrs import define, field
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope

from polarnode.providers.dialect import session_keys
from polarnode.shell.recent import remember
from polarnode.web.model_plane import ModelPlane
from polarnode.web.stream import header_map

NOBODY: Final = ""  # no session's id: whoever has no key may look at what anybody may, and is refused the rest
DOORS: Final = 1_000  # kept: more captures than a node has open; one that is forgotten is made anew


@define(eq=False)
class CaptureDoor:
    """An ASGI app in front of a model plane whose sessions are captures."""

    plane: ModelPlane
    _doors: dict[str, ASGIFramework] = field(factory=dict, init=False)

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await self._door(self._whose(scope))(scope, receive, send)

    def _whose(self, scope: Scope) -> str:
        """The capture whose key a request carries, also one that is over, which its own door says."""
        if scope["type"] != "http":
            return NOBODY
        query = scope["query_string"].decode("latin1")
        keys = session_keys(f"{scope['path']}?{query}", header_map(scope["headers"]))
        live = next(filter(None, map(self.plane.sessions.by_key, keys)), None)
        if live is not None:
            return live.session_id
        return next(filter(None, map(self.plane.sessions.ended_by_key, keys)), NOBODY)

    def _door(self, session_id: str) -> ASGIFramework:
        door = self._doors.get(session_id) or self.plane.app_for(session_id)
        remember(self._doors, session_id, door, most=DOORS)
        return door
