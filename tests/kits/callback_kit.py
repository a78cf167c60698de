"""A receiver of callbacks on this machine, which does what it is told to: takes, refuses, hangs, sends
elsewhere, is gone.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio
from attrs import define, field

RECEIVER_MANNERS = ("take", "encode", "refuse", "not ok", "hang", "redirect", "cut")


@define(eq=False)
class CallbackReceiver:
    """`manner` is what becomes of the next POSTs, `after` how many are refused first; `got` their keys and
    bodies, as far as they were taken.
    """

    url: str = ""
    manner: str = "take"
    refusals: int = 0
    got: list[tuple[str, Any]] = field(factory=list)
    heads: list[dict[str, str]] = field(factory=list)
    asked: int = 0
    came: trio.Event = field(factory=trio.Event)

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.got]

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.keys)

    async def until(self, number: int) -> None:
        """Until so many different events were taken."""
        with trio.fail_after(120):
            while len(set(self.keys)) < number:
                await self.came.wait()

    async def wait_asked(self, number: int) -> None:
        with trio.fail_after(120):
            while self.asked < number:
                await self.came.wait()

    def note(self) -> None:
        came, self.came = self.came, trio.Event()
        came.set()


@asynccontextmanager
async def open_receiver(
    *, port: int = 0, path: str = "/done", receiver: CallbackReceiver | None = None
) -> AsyncIterator[CallbackReceiver]:
    found = receiver or CallbackReceiver()
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
        found.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}{path}"

        async def serve(stream: trio.SocketStream) -> None:
            async with stream:
                try:
                    await _answered(found, stream)
                except (trio.BrokenResourceError, h11.RemoteProtocolError):
                    return  # the node left

        await nursery.start(trio.serve_listeners, serve, [listener])
        yield found
        nursery.cancel_scope.cancel()


async def _answered(receiver: CallbackReceiver, stream: trio.SocketStream) -> None:
    wire = h11.Connection(h11.SERVER)
    head, body = await _request(wire, stream)
    receiver.asked += 1
    receiver.note()
    manner = receiver.manner
    if receiver.refusals:
        receiver.refusals -= 1
        manner = "refuse"
    if manner == "hang":
        await trio.sleep_forever()
    if manner == "cut":
        return
    if manner in ("take", "encode"):
        receiver.heads.append(head)
        receiver.got.append((head["idempotency-key"], json.loads(body)))
        receiver.note()
    status, more = {
        "take": (200, []),
        "encode": (200, [("content-encoding", "gzip, gzip")]),  # which the body is not
        "refuse": (503, []),
        "not ok": (200, []),  # as the listener of Polar's bridge answers a body that its classes refuse
        "redirect": (307, [("location", "http://127.0.0.1:9/")]),
    }[manner]
    answer = b'{"ok": false, "reason": "invalid payload"}' if manner == "not ok" else b'{"ok": true}'
    headers = [("content-length", str(len(answer))), ("connection", "close"), *more]
    said = wire.send(h11.Response(status_code=status, headers=headers)) or b""
    await stream.send_all(
        said + (wire.send(h11.Data(data=answer)) or b"") + (wire.send(h11.EndOfMessage()) or b"")
    )


async def _request(wire: h11.Connection, stream: trio.SocketStream) -> tuple[dict[str, str], bytes]:
    head: dict[str, str] = {}
    body = b""
    while True:
        event = wire.next_event()
        match event:
            case h11.Request():
                head = {name.decode(): value.decode() for name, value in event.headers} | {
                    ":target": event.target.decode()
                }
            case h11.Data():
                body += event.data
            case h11.EndOfMessage():
                return head, body
            case _:
                wire.receive_data(await stream.receive_some())
