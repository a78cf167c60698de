"""Captures on the control plane: open one, look at it, end it into a trajectory.

The rule for whoever edits it: these routes decide nothing; who may have which place and what stands is the room of captures' to say.
"""

from collections.abc import Iterator

import trio
from attrs import frozen
from quart import Response, request

from polarnode.conversation import Json
from polarnode.records import Trajectory
from polarnode.shell.captures import Captures
from polarnode.web.control_plane.errors import NotFound, json_response
from polarnode.web.control_plane.query import read_query
from polarnode.web.handlers import RouteRow, body_json_or
from polarnode.wire import plain, read_capture, read_capture_end


@frozen(kw_only=True)
class CaptureRoutes:
    """The handlers, with what they ask."""

    captures: Captures

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the control plane's table."""
        yield from (
            ("POST", "/v1/capture", self.begin),
            ("GET", "/v1/capture", self.list),
            ("GET", "/v1/capture/<session_id>", self.look),
            ("DELETE", "/v1/capture/<session_id>", self.end),
        )

    async def begin(self) -> Response:
        """201 when the capture is in the journal; 200 for one that was opened before and is open."""
        read_query(request.args)
        opened = await self.captures.begin(read_capture(await body_json_or({})))
        return json_response(plain(opened), 201 if opened.created else 200)

    async def list(self) -> Response:
        """Those that are open. Their keys are not told."""
        read_query(request.args)
        await trio.lowlevel.checkpoint()
        return json_response({"captures": [plain(status) for status in self.captures.list()], "limit": self.captures.house.limit})

    async def look(self, session_id: str) -> Response:
        """One that is open, or what became of it."""
        read_query(request.args)
        status = self.captures.status(session_id)
        if status is not None:
            return json_response({**plain(status), "outcome": None})
        return self._ended(session_id, await self.captures.trajectory(session_id))

    async def end(self, session_id: str) -> Response:
        """The answer when the trajectory is on disk."""
        read_query(request.args)
        return self._ended(session_id, await self.captures.end(session_id, read_capture_end(await body_json_or({}))))

    def _ended(self, session_id: str, found: Trajectory | None) -> Response:
        if found is None:
            raise NotFound(f"no capture {session_id!r} is in this node's journal: those that are open are at GET /v1/capture")
        return json_response(ended_json(found))


def ended_json(found: Trajectory) -> dict[str, Json]:
    """What became of a capture, without its tokens."""
    return {
        "session_id": found.session_id,
        "task_id": found.task_id,
        "group_id": found.group_id,
        "sample_index": found.sample_index,
        "outcome": plain(found.outcome),
        "reward": found.reward,
        "turns": len(found.turns),
        "traces": len(found.traces),
        "sampled_tokens": found.sampled_tokens,
        "trainable_tokens": found.trainable_tokens,
    }
