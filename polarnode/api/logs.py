"""The logs of a node and of its sessions, read piece by piece from the files that the node writes.

Invariants: an answer is bounded, however much a harness printed, and the next answer continues where it
ended. A name is looked up among the files that exist, so that no path comes from a request.
"""

import codecs
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import trio
from attrs import frozen
from quart import Response, request

from polarnode.api.query import Query, read_query
from polarnode.api.service import NodeService, NotFound, json_response
from polarnode.core.codec.json import plain
from polarnode.core.errors import Refused, Unreadable
from polarnode.core.status import LogFile, LogPiece, Logs
from polarnode.http.asgi import RouteRow

MAX_PIECE_BYTES: Final = 256 << 10  # bytes of an answer: some thousand lines, read and sent in milliseconds
TEACHER: Final = "teacher-"  # the folder of a teacher's engines in the state folder begins so


@frozen(kw_only=True)
class LogRoutes:
    """The handlers. `state`: the node's state folder. `ring`: the size in bytes from which on the log of a
    running session is overwritten from its middle.
    """

    service: NodeService
    state: Path
    sessions_dir: Path
    ring: int

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("GET", "/v1/sessions/<session_id>/log", self.of_session),
            ("GET", "/v1/logs", self.list),
            ("GET", "/v1/logs/<path:name>", self.look),
        )

    async def of_session(self, session_id: str) -> Response:
        """The output of a session's harness; empty before the harness runs."""
        query = _read_range_query()
        found = await self.service.log.session(session_id)
        if found is None:
            raise NotFound(f"no session {session_id!r} is in the log: its task lists its sessions")
        path, over = self.sessions_dir / f"{found.session_id}.log", found.outcome is not None
        read = partial(read_piece, path, query, name=found.session_id, ended=over, ring=self.ring)
        piece = await trio.to_thread.run_sync(read)
        if piece is None and over:
            raise NotFound(
                f"session {session_id!r} has no log: its harness did not start, or is run by its caller"
            )
        return json_response(plain(piece or LogPiece(name=found.session_id)))

    async def list(self) -> Response:
        read_query(request.args)
        files = await trio.to_thread.run_sync(list_log_files, self.state)
        logs = tuple(LogFile(name=name, size=path.stat().st_size) for name, path in files.items())
        return json_response(plain(Logs(logs=logs)))

    async def look(self, name: str) -> Response:
        query = _read_range_query()
        files = await trio.to_thread.run_sync(list_log_files, self.state)
        read = partial(read_piece, files.get(name, Path()), query, name=name)
        piece = None if name not in files else await trio.to_thread.run_sync(read)
        if piece is None:
            raise NotFound(f"no log is called {name!r}: there are {', '.join(files) or 'none'}")
        return json_response(plain(piece))


def _read_range_query() -> Query:
    query = read_query(request.args, "offset", "tail")
    if query.offset is not None and query.tail is not None:
        raise Refused("tail cannot go with offset: send one of them", path="?tail")
    return query


def list_log_files(state: Path) -> dict[str, Path]:
    """The logs in a state folder by their names: `node`, `images`, `engine-0`, `teacher-NAME/engine-0`."""
    found = {path.stem: path for path in sorted(state.glob("*.log"))}
    found.update(
        (f"{path.parent.name}/{path.stem}", path) for path in sorted(state.glob(f"{TEACHER}*/*.log"))
    )
    first = {name: found.pop(name) for name in ("node",) if name in found}
    return {**first, **found}


def read_piece(
    path: Path, query: Query, *, name: str, ended: bool = False, ring: int | None = None
) -> LogPiece | None:
    """A piece of a file from `offset` on, or its last `tail` lines; None if there is no file. An offset
    beyond the file's end, as after a rotation, counts as 0. Raises Unreadable.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = query.offset or 0
            start = (
                max(0, size - MAX_PIECE_BYTES) if query.tail is not None else start if start <= size else 0
            )
            file.seek(start)
            data = file.read(MAX_PIECE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"log {name} cannot be read: {error.strerror}") from error
    if query.tail is not None:
        kept = b"".join(data.splitlines(keepends=True)[-query.tail :])
        start, data = start + len(data) - len(kept), kept
    # A character that is cut by the end of the piece belongs to the next piece, unless nothing follows.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=ended and start + len(data) >= size)
    read = len(data) - len(decoder.getstate()[0])
    wrapped = ring is not None and not ended and size >= ring
    return LogPiece(
        name=name, text=text, offset=start, next_offset=start + read, size=size, ended=ended, wrapped=wrapped
    )
