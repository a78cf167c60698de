"""Recordings of the requests that came to a model endpoint and of the responses it sent, in a folder for each
session.

A request is written verbatim, except for its key, and its response as it was sent. The node never reads
either again. Invariant: a failed write is only logged, because a full disk must not end the recorded
sessions.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, cast

import orjson
import trio
from attrs import define, field
from hypercorn.typing import HTTPScope

from polarnode.core.codec.limits import exceeds_values
from polarnode.core.conversation import Json
from polarnode.http.asgi import header_map
from polarnode.http.connections import ClientDeparture, Head, ResponseWriter
from polarnode.providers.dialect import session_keys

logger = logging.getLogger(__name__)

# This replaces the key wherever it occurs, so that a target with the key in its path keeps its shape.
KEY_MASK: Final = "key-of-this-session"


@define(eq=False)
class Recordings:
    """Writes the requests of each session to a folder of its own, as `01-request.json` and so on, in the
    order in which their bodies arrived, each with its `01-response.txt`.
    """

    folder: Path
    _count: Counter[str] = field(factory=Counter, init=False)

    async def keep(
        self, session_id: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> Path:
        """Write one request. Returns the file for its response."""
        self._count[session_id] += 1
        number = f"{self._count[session_id]:02}"
        file = self.folder / session_id / f"{number}-request.json"
        content = list(headers)
        await _written(file, lambda: recorded(method, target, content, body))
        return file.with_name(f"{number}-response.txt")


@define(eq=False)
class ResponseCopy:
    """A writer that keeps a copy of the response it writes, as HTTP/1.1 without its framing.

    The copy stays in memory until the response has ended. An answer of 32k tokens is some 10 MB as a stream.
    """

    recordings: Recordings
    writer: ResponseWriter
    # where the copy is written; set once its request is written
    file: Path | None = field(default=None, init=False)
    content: bytearray = field(factory=bytearray, init=False)

    @property
    def departure(self) -> ClientDeparture:
        return self.writer.departure

    async def write(self, head: Head | None, data: bytes, *, end: bool) -> bool:
        taken = await self.writer.write(head, data, end=end)
        if head is not None:
            self.content += f"HTTP/1.1 {head[0]}\r\n".encode()  # 529 has no phrase
            for name, value in head[1]:
                self.content += name + b": " + value + b"\r\n"
            self.content += b"\r\n"
        self.content += data
        return taken

    async def keep_request(self, session_id: str, scope: HTTPScope, body: bytes) -> None:
        """Write the request that this response answers."""
        query = scope["query_string"].decode("latin1")
        target = f"{scope['path']}?{query}" if query else scope["path"]
        self.file = await self.recordings.keep(session_id, scope["method"], target, scope["headers"], body)

    async def save(self) -> None:
        """Write the response, even one that was cut, but not an empty one. This takes milliseconds."""
        if self.file is not None and self.content:
            await _written(self.file, lambda: self.content)


def recorded(method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A request file's content: headers in wire order, a JSON body verbatim, any other body as text. JSON
    with so many values that it was refused unread is written as text too.
    """
    keys = session_keys(target, header_map(headers))
    pairs: list[Json] = [
        [name.decode("latin1"), _mask_keys(value.decode("latin1"), keys)] for name, value in headers
    ]
    entry: dict[str, Json] = {
        "method": method,
        "target": _mask_keys(target, keys),
        "headers": pairs,
        "body": _body(body),
    }
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def _mask_keys(text: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        text = text.replace(key, KEY_MASK)
    return text


def _body(body: bytes) -> Json:
    if not body:
        return None
    if exceeds_values(body):
        return body.decode(errors="replace")
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
    return cast(Json, orjson.Fragment(body))


async def _written(file: Path, content: Callable[[], bytes | bytearray]) -> None:
    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content())

    try:
        await trio.to_thread.run_sync(write)
    except OSError as error:
        logger.error("%s was not recorded: %s", file, error)
