"""The route by which a node gives the files of the versions that it holds to the other nodes of its log."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import trio
from attrs import frozen
from quart import Response, request

from polarnode.api.service import NotFound, json_response
from polarnode.core.codec.json import plain
from polarnode.core.errors import Refused
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.weight_copies import FILES, WeightFileList, list_files
from polarnode.engine.weights import Weights
from polarnode.http.asgi import RouteRow

PIECE: Final = 1 << 20  # bytes read at once
RANGE: Final = re.compile(r"bytes=(\d{1,15})-")


@frozen
class WeightFileRoutes:
    """The handlers."""

    weights: Weights
    adapters: AdapterStore

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", FILES, self.give)

    async def give(self) -> Response:
        """The list of a version's files, or one of them from the byte that `Range` names."""
        version, name = request.args.get("version", ""), request.args.get("name")
        folder = await self.weights.folder_of(version) or await self.adapters.folder_of(version)
        if folder is None:
            raise NotFound(f"this node has no files of version {version!r}")
        files = await trio.to_thread.run_sync(list_files, folder)
        if name is None:
            return json_response(plain(WeightFileList(version=version, files=files)))
        size = next((each.size for each in files if each.name == name), None)
        if size is None:
            raise NotFound(f"version {version!r} has no file {name!r}")
        found = RANGE.fullmatch(request.headers.get("Range", "bytes=0-"))
        if found is None:
            raise Refused("Range must be bytes=FIRST-")
        headers = {"Content-Length": str(max(size - int(found[1]), 0))}
        pieces = _read(folder / name, int(found[1]))
        return Response(pieces, 206, headers, content_type="application/octet-stream")


async def _read(path: Path, first: int) -> AsyncIterator[bytes]:
    async with await trio.open_file(path, "rb") as file:
        await file.seek(first)
        while piece := await file.read(PIECE):
            yield piece  # noqa: ASYNC119 - Quart closes it, however the peer leaves
