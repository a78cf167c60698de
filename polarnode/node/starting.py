"""What a node answers before it serves. Its socket is bound first, because an engine takes minutes to start.

`/healthz` is answered with 200, and `/readyz` with 503, the reason and the seconds so far. Everything else is
503 of the type `starting`, for which every client waits as it does for a node that is not there yet. No token
is asked for, because the answers say nothing else.
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

# Seconds after which a client asks again. The delay is short beside the start of an engine.
RETRY_AFTER_S = 2.0
# A browser or a probe opens a few connections. A client that waits with hundreds gets its answers later.
MAX_CONNECTIONS = 64


@define(eq=False)
class StartingNode:
    """The socket of a node that does not serve yet. `reason` gives a sentence that says what it waits for."""

    listener: socket.socket
    certificate: Certificate | None
    reason: Callable[[], str]
    _handed_over: trio.Event = field(factory=trio.Event, init=False)

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until `hand_over`. The listener stays open, so connections that come then wait in its
        queue.
        """
        async with open_server(
            self._respond, self.listener.dup(), connections=MAX_CONNECTIONS, certificate=self.certificate
        ):
            task_status.started()
            await self._handed_over.wait()

    def hand_over(self) -> socket.socket:
        """Give the listener to the node, which answers from now on."""
        self._handed_over.set()
        return self.listener

    async def _respond(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":  # Hypercorn closes a WebSocket that nobody accepts
            return
        alive = scope["path"] == "/healthz"
        body: dict[str, Json] = {"ok": True} if alive else self._unready_body(scope["path"])
        headers = [
            (b"content-type", b"application/json"),
            (b"connection", b"close"),
            (b"retry-after", str(math.ceil(RETRY_AFTER_S)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200 if alive else 503, "headers": headers})
        await send({"type": "http.response.body", "body": dump_json(body), "more_body": False})

    def _unready_body(self, path: str) -> dict[str, Json]:
        if path == "/readyz":
            return {"ready": False, "reason": self.reason()}
        return {"error": {"type": STARTING, "message": self.reason()}}
