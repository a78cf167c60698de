"""Changes of live sessions as a stream of server-sent events, for whoever looks at a node.

The sessions are looked at from time to time, and all readers share one look. A reader is sent what differs
from what it was sent last, so a slow one costs no memory, and a session is sent once in LOOK_S at most.
Nothing is numbered or kept: a reader that comes again is sent all that is live. What began and ended between
two looks is not seen here; trajectories have their own stream, which misses nothing.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from math import inf
from typing import Final

import trio
from attrs import define, evolve, field, frozen
from quart import Response, request

from polarnode.api.exports import KEEP_ALIVE_S
from polarnode.api.query import read_query
from polarnode.api.service import Service
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.status import CaptureStatus, LiveSessionStatus, SessionChanges
from polarnode.http.asgi import GREETING, KEEP_ALIVE, RouteRow, event_response

LOOK_S: Final = 0.5  # between two looks: a person sees no difference from less
SHARE: Final = 20  # a look may take a twentieth of the time: one at 20,000 sessions holds the loop for 0.1 s
AT_ONCE: Final = 500  # sessions of an event, 150 kB: more of them would hold the loop for longer than a look

Found = Mapping[str, LiveSessionStatus]


# ── changes ───────────────────────────────────────────────────────────────────


@define(eq=False)
class SeenSessions:
    """What one reader was sent last, by session; None before the first time."""

    _sent: Found | None = field(default=None, init=False)

    def changes(self, live: Found, ended: Found) -> list[LiveSessionStatus]:
        """What differs now: sessions that began, that went on, and that are `ended` or live no more."""
        before = self._sent or {}
        self._sent = live
        went_on = [each for name, each in live.items() if name not in before or _moved(before[name], each)]
        gone = [
            ended.get(name) or evolve(each, phase="ended")
            for name, each in before.items()
            if name not in live
        ]
        return went_on + gone

    @property
    def begun(self) -> bool:
        """Whether the reader was sent anything."""
        return self._sent is not None


def _moved(before: LiveSessionStatus, now: LiveSessionStatus) -> bool:
    """Whether more than time passed."""
    return (before.phase, before.turns, before.sampled_tokens) != (now.phase, now.turns, now.sampled_tokens)


def pieces(node: str, sessions: Sequence[LiveSessionStatus], *, whole: bool) -> Iterator[SessionChanges]:
    """Changes as events, `whole` in the first one alone. One without sessions is sent where it is `whole`."""
    for place in range(0, max(len(sessions), int(whole)), AT_ONCE):
        shown = tuple(sessions[place : place + AT_ONCE])
        yield SessionChanges(node=node, sessions=shown, whole=whole and place == 0)


def changes_event(changes: SessionChanges) -> bytes:
    return b"event: sessions\ndata: " + dump_json(plain(changes)) + b"\n\n"


# ── the stream ────────────────────────────────────────────────────────────────


@define(eq=False)
class SessionWatch:
    """A node's sessions at the last look: those that are live, and those that ended recently."""

    service: Service
    live: Found = field(factory=dict, init=False)
    ended: Found = field(factory=dict, init=False)
    next_s: float = field(default=-inf, init=False)  # when the next look is due

    def look(self) -> None:
        """Look again where it is due."""
        began = trio.current_time()
        if began < self.next_s:
            return
        every = [*self.service.sessions(), *map(_of_capture, self.service.captures.list())]
        self.live = {each.session_id: each for each in every if each.outcome is None}
        self.ended = {each.session_id: each for each in every if each.outcome is not None}
        now = trio.current_time()
        self.next_s = now + max(LOOK_S, SHARE * (now - began))


def _of_capture(capture: CaptureStatus) -> LiveSessionStatus:
    return LiveSessionStatus(
        session_id=capture.session_id,
        task_id=capture.task_id,
        harness="capture",
        phase="run",
        turns=capture.turns,
        sampled_tokens=capture.sampled_tokens,
        sample_index=capture.sample_index,
    )


@frozen
class LiveSessionRoutes:
    """The handler."""

    service: Service
    watch: SessionWatch = field(init=False)

    @watch.default
    def _make_watch(self) -> SessionWatch:
        return SessionWatch(self.service)

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", "/v1/sessions/live", self.stream)

    async def stream(self) -> Response:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        follow = read_query(request.args, "follow").follow
        return event_response(self._events(follow=follow))

    async def _events(self, *, follow: bool) -> AsyncIterator[bytes]:
        yield GREETING
        seen, written = SeenSessions(), trio.current_time()
        while True:
            self.watch.look()
            whole, due = not seen.begun, self.watch.next_s
            found = seen.changes(self.watch.live, self.watch.ended)
            for changes in pieces(self.service.node_id, found, whole=whole):
                yield changes_event(changes)
                written = trio.current_time()
            if not follow:
                return
            if trio.current_time() - written >= KEEP_ALIVE_S:
                yield KEEP_ALIVE
                written = trio.current_time()
            await trio.sleep_until(due)
