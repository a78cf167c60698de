"""Files of weights and adapters that a node takes from another node of its log.

Nodes that do not see the trainer's folder copy its files from a node that holds them, into a folder of their
own, where they find them again after a restart. Invariants: a copy is whole before it is used, and it has the
fingerprint or the digest that the log names, so that nothing else is served under a version. A break costs
the bytes of one request, because a file goes on where it ended.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import quote

import trio
from attrs import frozen

from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.json import structure
from polarnode.core.errors import Conflict, DiskFull, Refused
from polarnode.engine.checkpoints import fingerprint
from polarnode.engine.weight_values import Served
from polarnode.http.link import Link
from polarnode.journal.log.port import LogWeights, MembershipPort, NodeRow

logger = logging.getLogger(__name__)

TRIES: Final = 5  # requests for a file that bring nothing, after which another node is better
FILES: Final = "/v1/weights/files"  # the route where a node gives the files of its versions


@frozen(kw_only=True)
class WeightFile:
    """One file of a version. `time_ns` is when it was changed, which goes into its fingerprint."""

    name: str
    size: int
    time_ns: int


@frozen(kw_only=True)
class WeightFileList:
    """The files that a node holds of a version, of the base or of an adapter."""

    version: str
    files: tuple[WeightFile, ...]


def list_files(folder: Path) -> tuple[WeightFile, ...]:
    """The files of a folder. Reads the disk."""
    found = sorted(each for each in folder.iterdir() if each.is_file())
    return tuple(
        WeightFile(name=each.name, size=each.stat().st_size, time_ns=each.stat().st_mtime_ns)
        for each in found
    )


@frozen(kw_only=True)
class Copies:
    """Takes files from the nodes of `log`, with the token that they share. `folder` is this node's own, for
    versions of the base. `reserve` is how many bytes of the disk are kept free, because the journal is on it
    too.
    """

    log: MembershipPort
    folder: Path
    token: str | None = None
    reserve: int = 0

    async def copy_base(self, row: LogWeights, served: Served) -> Path | None:
        """A folder with the files of a version of the base. None if no node gave them."""
        own = (self.folder / sha256(row.version.encode()).hexdigest()[:16]).absolute()
        part = own.with_suffix(".part")
        await trio.Path(part).mkdir(parents=True, exist_ok=True)
        if not await self.copy(row, part):
            return None
        if await trio.to_thread.run_sync(fingerprint, part) != served.files:
            logger.error("the copy of weights %s is not what the log names: it is thrown away", row.version)
            await trio.to_thread.run_sync(shutil.rmtree, part)
            return None
        if await trio.Path(own).exists():  # a damaged copy of the version
            await trio.to_thread.run_sync(shutil.rmtree, own)
        await trio.Path(part).rename(own)
        return own

    async def copy(self, row: LogWeights, folder: Path) -> bool:
        """Copy the files of a version into `folder`. Returns whether it has them now, because some holder
        gave them.
        """
        for node in await self.log.nodes():
            if node.incarnation not in row.holders or not node.facts.url:
                continue
            try:
                await self._copy_from(node, row.version, folder)
            except (Unreachable, ClientError, Conflict, DiskFull, Refused, OSError) as error:
                logger.warning(
                    "weights %s were not copied from node %s: %s", row.version, node.facts.name, error
                )
                continue
            return True
        return False

    async def _copy_from(self, node: NodeRow, version: str, folder: Path) -> None:
        link = Link(url=node.facts.url, token=self.token, certificate=node.facts.certificate)
        at = f"{FILES}?version={quote(version, safe='')}"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(link.close)
            found = structure(await link.call("GET", at), WeightFileList)
            for each in found.files:
                if not each.name or "/" in each.name or each.name in (".", ".."):
                    raise Refused(f"the node names a file {each.name!r}")
            await trio.to_thread.run_sync(self._require_room, found.files, folder)
            for each in found.files:
                await _fetch(link, f"{at}&name={quote(each.name, safe='')}", each, folder / each.name)
            named = {each.name for each in found.files}
            for other in await trio.Path(folder).iterdir():
                if other.name not in named:  # left by another node that had other files
                    await other.unlink()

    def _require_room(self, files: Sequence[WeightFile], folder: Path) -> None:
        """Raise DiskFull if the rest of the files does not fit. Reads the disk."""
        there = sum(each.stat().st_size for each in folder.iterdir())
        missing, free = sum(each.size for each in files) - there, shutil.disk_usage(folder).free
        if free - missing < self.reserve:
            raise DiskFull(
                f"{missing >> 20} MiB of files do not fit: {free >> 20} MiB are free at {folder}, of which"
                f" {self.reserve >> 20} MiB stay free for the journal"
            )

    def keep_only(self, version: str) -> None:
        """Remove the copies of other versions, because a restart needs only the last. Changes the disk."""
        kept = sha256(version.encode()).hexdigest()[:16]
        for each in self.folder.glob("*"):
            if each.name != kept and each.is_dir():
                shutil.rmtree(each, ignore_errors=True)


async def _fetch(link: Link, at: str, wanted: WeightFile, path: Path) -> None:
    """Append to a file until it is whole."""
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
        raise Conflict(f"the node's {wanted.name} has another size than it was")
    os.utime(path, ns=(wanted.time_ns, wanted.time_ns))
