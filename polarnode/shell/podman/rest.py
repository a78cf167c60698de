"""HTTP/1.1 to the Podman service on a Trio stream: short calls, and the hijacked stream of an exec.

Only what `exec.py` needs: podman-py can not do an exec that is fed, bounded and cancelled, and its threads can not be cancelled at all.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import trio
from attrs import define, field, frozen

from polarnode.conversation import Json
from polarnode.errors import RuntimeFault, boundary

READ = 64 * 1024  # bytes at a time: conmon writes frames of at most 8 KiB, several fit
BODY_LIMIT = 4 << 20  # bytes of an answer: an inspect is 10 KB
API = "/v4.0.0/libpod"  # the service takes any version in the path, 4 and 5 alike


@frozen(kw_only=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON, or RuntimeFault with the service's own message when it refused."""
        try:
            told = json.loads(self.body or b"{}")
        except ValueError:
            told = {"message": self.body.decode(errors="replace")}
        if self.status >= 400:
            raise RuntimeFault(f"podman: {told.get('message') or told.get('cause') or self.status}")
        return told


@define(eq=False)
class Hijacked:
    """A stream that has left HTTP behind: bytes both ways, beginning with what came along with the answer."""

    stream: trio.SocketStream
    _early: bytes = field(default=b"")

    async def receive(self) -> bytes:
        """Some bytes, empty at the end; a torn connection is an end like any other, since neither says that the program ended."""
        if self._early:
            early, self._early = self._early, b""
            return early
        try:
            return bytes(await self.stream.receive_some(READ))
        except trio.BrokenResourceError:
            return b""


async def call(socket: Path, method: str, path: str, body: Mapping[str, Json] | None = None) -> Reply:
    """One request on a connection of its own. Raises RuntimeFault when the service can not be reached or talks nonsense."""
    with boundary(RuntimeFault, "the podman service does not answer"):
        async with await trio.open_unix_socket(str(socket)) as stream:
            connection = h11.Connection(h11.CLIENT)
            await _send(stream, connection, method, path, body, {"Connection": "close"})
            return await _reply(stream, connection)


@asynccontextmanager
async def hijack(socket: Path, path: str, body: Mapping[str, Json]) -> AsyncIterator[Hijacked]:
    """POST and take the connection over. Raises RuntimeFault with the service's message when it refuses."""
    with boundary(RuntimeFault, "the podman service does not answer"):
        stream = await trio.open_unix_socket(str(socket))
    try:
        with boundary(RuntimeFault, "the podman service broke off"):
            connection = h11.Connection(h11.CLIENT)
            await _send(stream, connection, "POST", path, body, {"Connection": "Upgrade", "Upgrade": "tcp"})
            hijacked = await _taken_over(stream, connection)
        yield hijacked
    finally:
        await trio.aclose_forcefully(stream)


async def _send(
    stream: trio.SocketStream, connection: h11.Connection, method: str, path: str, body: Mapping[str, Json] | None, extra: Mapping[str, str]
) -> None:
    content = json.dumps(body).encode() if body is not None else b""
    headers = {"Host": "podman", "Content-Type": "application/json", "Content-Length": str(len(content)), **extra}
    told = connection.send(h11.Request(method=method, target=API + path, headers=list(headers.items()))) or b""
    told += connection.send(h11.Data(data=content)) or b""
    await stream.send_all(told + (connection.send(h11.EndOfMessage()) or b""))


async def _event(stream: trio.SocketStream, connection: h11.Connection) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(bytes(await stream.receive_some(READ)))
    return event


async def _reply(stream: trio.SocketStream, connection: h11.Connection) -> Reply:
    head = await _event(stream, connection)
    return await _rest(stream, connection, head.status_code)


async def _rest(stream: trio.SocketStream, connection: h11.Connection, status: int) -> Reply:
    body = bytearray()
    while isinstance(event := await _event(stream, connection), h11.Data):
        body += event.data
        if len(body) > BODY_LIMIT:
            raise RuntimeFault(f"podman: an answer of more than {BODY_LIMIT} bytes")
    return Reply(status=status, body=bytes(body))


async def _taken_over(stream: trio.SocketStream, connection: h11.Connection) -> Hijacked:
    head = await _event(stream, connection)
    if isinstance(head, h11.InformationalResponse) and head.status_code == 101:
        return Hijacked(stream, connection.trailing_data[0])
    (await _rest(stream, connection, head.status_code)).json()
    raise RuntimeFault(f"podman: an exec was answered with {head.status_code} and no stream")
