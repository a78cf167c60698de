"""Polar's stream of what sessions do: `hello`, `session.state_changed`, `ping`.

The rule for whoever edits it: it is for dashboards, which may miss what was between two looks; what must not be missed is in the stream of
trajectories. No scope and no nursery around a `yield`.
"""

from collections.abc import AsyncIterator, Iterator, Mapping

import trio
from attrs import frozen
from quart import Response

from polarnode.conversation import Json
from polarnode.shell.glances import SessionStatus
from polarnode.trainers.polar import PHASES, outcome_word
from polarnode.web.handlers import RouteRow
from polarnode.web.polar_api.house import PolarHouse
from polarnode.wire import dump_json

LOOK_S = 1.0  # between two looks: a table of at most a few hundred sessions
PING_S = 15.0  # as Polar's own


@frozen(kw_only=True)
class EventRoutes:
    """The handler, with what it asks."""

    house: PolarHouse

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", "/events", self.events)

    async def events(self) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(self._stream(), 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, content_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        known: dict[str, str] = {session_id: PHASES[status.phase] for session_id, status in self.house.live().items()}
        yield _sse("hello", {"node_id": self.house.node_id, "sessions": len(known)})
        spoken = trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            live = self.house.live()
            for piece in (*self._moved(known, live), *await self._ended(known, live)):
                yield piece
                spoken = trio.current_time()
            if trio.current_time() >= spoken + PING_S:
                yield _sse("ping", {"node_id": self.house.node_id})
                spoken = trio.current_time()

    def _moved(self, known: dict[str, str], live: Mapping[str, SessionStatus]) -> list[bytes]:
        """Of sessions that began, or are in another phase now."""
        moved: list[bytes] = []
        for session_id, status in live.items():
            word = PHASES[status.phase]
            if known.get(session_id) != word:
                moved.append(self._changed(session_id, status.task_id, word))
                known[session_id] = word
        return moved

    async def _ended(self, known: dict[str, str], live: Mapping[str, SessionStatus]) -> list[bytes]:
        """Of sessions that are over, as the journal has them."""
        ended: list[bytes] = []
        for session_id in [each for each in known if each not in live]:
            found = await self.house.journal.session(session_id)
            del known[session_id]
            if found is not None:
                ended.append(self._changed(session_id, found.task_id, outcome_word(found.outcome, "ended")))
        return ended

    def _changed(self, session_id: str, task_id: str, word: str) -> bytes:
        return _sse("session.state_changed", {"session_id": session_id, "task_id": task_id, "status": word, "node_id": self.house.node_id})


def _sse(kind: str, body: dict[str, Json]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_json({"type": kind, **body}))
