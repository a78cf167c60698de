"""The files of the version that a node serves, for nodes that do not see the trainer's folder.

A node gives the files of its served version by ranges, and takes them from a peer into a folder of its own,
from where it serves them and finds them again after a restart. Invariants: a copy is whole before it is
loaded: the peer's files are the same after the last byte as before the first; a break costs the bytes of one
request, because a file goes on where it ended.
"""

import re
import shutil
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import quote

import trio
from attrs import frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.service import NotFound, json_response
from polarnode.client.values import Unreachable
from polarnode.core.codec.json import plain, structure
from polarnode.core.errors import Busy, Conflict, Refused
from polarnode.core.weights import UpdateMode, WeightsReport
from polarnode.engine.checkpoints import TENSORS, fingerprint
from polarnode.engine.weight_values import DiskSource, UpdateOrder
from polarnode.engine.weights import Weights
from polarnode.http.asgi import RouteRow, body_json
from polarnode.http.link import Link

PIECE: Final = 1 << 20  # bytes read at once
TRIES: Final = 5  # requests for a file that bring nothing, before another peer is better
RANGE: Final = re.compile(r"bytes=(\d{1,15})-")


@frozen(kw_only=True)
class WeightFile:
    name: str
    size: int


@frozen(kw_only=True)
class WeightFileList:
    """The files of a served version. `digest` changes when a file does."""

    version: str
    digest: str
    files: tuple[WeightFile, ...]


@frozen(kw_only=True)
class PullOrder:
    """Body of POST /v1/fleet/weights: serve a version from the files of a peer that serves it."""

    version: str
    url: str
    certificate: str = ""
    mode: UpdateMode = "in_place"


@frozen
class WeightFiles:
    """The handlers. Copies are kept below `state`."""

    weights: Weights
    state: Path
    token: str | None

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("GET", "/v1/fleet/weights", self.list_files),
            ("GET", "/v1/fleet/weights/<version>/<name>", self.file),
            ("POST", "/v1/fleet/weights", self.pull),
            ("GET", "/v1/fleet/adapters/<name>", self.adapter),
            ("GET", "/v1/fleet/adapters/<name>/<version>", self.adapter_file),
        )

    # ── giving ────────────────────────────────────────────────────────────────

    async def list_files(self) -> Response:
        read_query(request.args)
        path, digest = await self._served()
        files = await trio.to_thread.run_sync(_files, path)
        found = WeightFileList(version=self.weights.status().version, digest=digest, files=files)
        return json_response(plain(found))

    async def file(self, version: str, name: str) -> Response:
        """A file from the byte that `Range` names."""
        path, _ = await self._served()
        files = {each.name: each.size for each in await trio.to_thread.run_sync(_files, path)}
        if version != self.weights.status().version or name not in files:
            raise NotFound(f"no file {name!r} of version {version!r} is served here")
        found = RANGE.fullmatch(request.headers.get("Range", "bytes=0-"))
        if found is None:
            raise Refused("Range must be bytes=FIRST-")
        headers = {"Content-Length": str(max(files[name] - int(found[1]), 0))}
        pieces = _read(path / name, int(found[1]))
        return Response(pieces, 206, headers, content_type="application/octet-stream")

    async def adapter(self, name: str) -> Response:
        """The version of an adapter that is served now, and the bytes of its file."""
        read_query(request.args)
        version, path = self._adapter(name)
        return json_response({"version": version, "size": (await trio.Path(path).stat()).st_size})

    async def adapter_file(self, name: str, version: str) -> Response:
        """Its file, as PUT /v1/adapters/… takes it if it came that way."""
        read_query(request.args)
        served, path = self._adapter(name)
        if served != version:
            raise NotFound(f"adapter {name!r} is served here as {served!r}, not {version!r}")
        headers = {"Content-Length": str((await trio.Path(path).stat()).st_size)}
        return Response(_read(path, 0), 200, headers, content_type="application/octet-stream")

    def _adapter(self, name: str) -> tuple[str, Path]:
        """The version of an adapter that is served, and its file in this node's folder."""
        adapters = self.weights.engines.adapters
        versions = adapters.versions(name) if name in {each.name for each in adapters.status()} else ()
        path = self.state / "adapters" / name / (versions[-1] if versions else "") / TENSORS
        if not versions or not path.is_file():
            raise NotFound(f"no adapter {name!r} is served here: look at GET /v1/adapters")
        return versions[-1], path

    async def _served(self) -> tuple[Path, str]:
        """The folder of the served version, and its fingerprint."""
        last = next(iter(await self.weights.history()), None)
        if last is None or last.version != self.weights.status().version or last.source["kind"] != "disk":
            raise Conflict("the weights that are served here are on no disk")
        path = Path(last.source["path"])
        if await trio.to_thread.run_sync(fingerprint, path) != last.files:
            raise Conflict(f"the files under {path} are not those that were loaded")
        return path, last.files

    # ── taking ────────────────────────────────────────────────────────────────

    async def pull(self) -> Response:
        read_query(request.args)
        report = await self._pull(structure(await body_json(), PullOrder, forbid_extra=True))
        return json_response(plain(report), 201 if report.created else 200)

    async def _pull(self, order: PullOrder) -> WeightsReport:
        own = (self.state / "weights" / sha256(order.version.encode()).hexdigest()[:16]).absolute()
        if not own.exists():
            link = Link(url=order.url, token=self.token, certificate=order.certificate)
            try:
                await self._copied(link, order.version, own)
            except Unreachable as error:
                raise Busy(f"the peer went away: {error}", retry_after=2.0) from error
            finally:
                await link.close()  # noqa: ASYNC102 - bounded and shielded there
        source = DiskSource(path=str(own))
        report = await self.weights.update(UpdateOrder(version=order.version, source=source, mode=order.mode))
        await trio.to_thread.run_sync(_keep_only, own)
        return report

    async def _copied(self, link: Link, version: str, own: Path) -> None:
        part = own.with_suffix(".part")
        await trio.Path(part).mkdir(parents=True, exist_ok=True)
        before = structure(await link.call("GET", "/v1/fleet/weights"), WeightFileList)
        if before.version != version:
            raise Conflict(f"the peer serves {before.version!r}, not {version!r}")
        for each in before.files:
            if not each.name or "/" in each.name or each.name in (".", ".."):
                raise Refused(f"the peer names a file {each.name!r}")
            await _fetch(link, version, each, part / each.name)
        if structure(await link.call("GET", "/v1/fleet/weights"), WeightFileList) != before:
            await trio.to_thread.run_sync(shutil.rmtree, part)
            raise Conflict("the peer's files changed while they were read")
        await trio.Path(part).rename(own)


def _files(path: Path) -> tuple[WeightFile, ...]:
    files = sorted(each for each in path.iterdir() if each.is_file())
    return tuple(WeightFile(name=each.name, size=each.stat().st_size) for each in files)


async def _read(path: Path, first: int) -> AsyncIterator[bytes]:
    async with await trio.open_file(path, "rb") as file:
        await file.seek(first)
        while piece := await file.read(PIECE):
            yield piece  # noqa: ASYNC119 - Quart closes it, however the peer leaves


async def _fetch(link: Link, version: str, wanted: WeightFile, path: Path) -> None:
    """Append to a file until it is whole."""
    at = f"/v1/fleet/weights/{quote(version, safe='')}/{quote(wanted.name, safe='')}"
    tries, size = 0, 0
    async with await trio.open_file(path, "ab") as file:
        size = (await trio.Path(path).stat()).st_size
        while size < wanted.size:
            began = size
            try:
                async with link.stream(at, headers={"Range": f"bytes={size}-"}) as pieces:
                    async for piece in pieces:
                        size += await file.write(piece)
            except Unreachable:
                tries = 0 if size > began else tries + 1
                if tries >= TRIES:
                    raise
                await trio.sleep(tries)
    if size != wanted.size:
        await trio.Path(path).unlink()
        raise Conflict(f"the peer's {wanted.name} has another size than it was")


def _keep_only(own: Path) -> None:
    """Remove the copies of other versions: a restart needs the last alone."""
    for each in own.parent.iterdir():
        if each != own and each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
