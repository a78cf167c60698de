"""What a node answers before it serves: its socket is bound first, because an engine takes minutes to start.

`/healthz` is 200 and `/readyz` 503 with the reason and the seconds so far. Everything else is 503 of the type
`starting`, which every client takes for a node that is not there yet: it waits. No token is asked for, since
the answers say nothing but that.
"""

import math
import socket
from collections.abc import Callable

import trio
from attrs import define, field
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json
from polarnode.core.status import STARTING
from polarnode.http.server import Certificate, open_server

# seconds after which a client asks again: it shall not be late by more than an engine's start is long
RETRY_S = 2.0
# a browser or a probe opens a few; who waits with hundreds is told later
CONNECTIONS = 64


@define(eq=False)
class StartingNode:
    """A node's socket until it serves. `reason` is one sentence that says what it waits for."""

    listener: socket.socket
    certificate: Certificate | None
    reason: Callable[[], str]
    _over: trio.Event = field(factory=trio.Event, init=False)

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until `hand_over`. The listener stays open: connections that come meanwhile wait in its
        queue.
        """
        async with open_server(
            self._answer, self.listener.dup(), connections=CONNECTIONS, certificate=self.certificate
        ):
            task_status.started()
            await self._over.wait()

    def hand_over(self) -> socket.socket:
        """The listener, for the node, which answers by itself from now on."""
        self._over.set()
        return self.listener

    async def _answer(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":  # Hypercorn closes a WebSocket that nobody accepts
            return
        alive = scope["path"] == "/healthz"
        body: dict[str, Json] = {"ok": True} if alive else self._unready(scope["path"])
        headers = [
            (b"content-type", b"application/json"),
            (b"connection", b"close"),
            (b"retry-after", str(math.ceil(RETRY_S)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200 if alive else 503, "headers": headers})
        await send({"type": "http.response.body", "body": dump_json(body), "more_body": False})

    def _unready(self, path: str) -> dict[str, Json]:
        if path == "/readyz":
            return {"ready": False, "reason": self.reason()}
        return {"error": {"type": STARTING, "message": self.reason()}}
