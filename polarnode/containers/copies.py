"""Copies of prepared containers, as images in the store that all nodes of the machine share.

A copy is one layer on the task's image, made by Podman's commit. Two faults of commit are corrected in the
layer before it gets its name: in a user namespace Podman (4.3 at least) writes the ids of this machine
instead of the container's, and times lose what is below a second. Invariant: a layer is touched only between
its commit and its name, while nobody can have mounted it.
"""

import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import trio
from attrs import define, frozen

from polarnode.containers.client import call
from polarnode.containers.container import IDS, LABEL_OWNER, Owner, read_owner
from polarnode.containers.prepared import Workspace
from polarnode.containers.runtime import PodmanRuntime
from polarnode.core.errors import Refused, RuntimeFault, boundary

REPOSITORY = "localhost/polarnode-prepared"
LABEL_PREPARED = "polarnode.prepared"  # on a copy: when it was made, seconds since 1970
# seconds a copy may take: 0.1 s for a small one, 0.6 s for 4,000 files of 100 MB; a longer one is hardly
# worth it
COMMIT_S = 120.0
# seconds between prunings: nodes rarely die, and what they leave is bounded
PRUNE_EVERY_S, PRUNE_AGAIN_S = 600.0, 20.0
ORPHAN_S = 3600.0  # seconds a dead node's copy is kept: the node may be started again and use it

_log = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class PodmanCopies:
    """`prepared.Copies` on Podman. `limiter` is the node's own over calls to Podman; `owner` is the label of
    every copy; `most` copies of dead nodes are kept.
    """

    api: Path
    limiter: trio.CapacityLimiter
    owner: Owner
    most: int

    async def find(self, workspace: Workspace) -> str | None:
        """The image of an existing copy; None where there is none."""
        name = f"{REPOSITORY}:{await self._digest(workspace)}"
        return name if await self.exists(name) else None

    async def make(self, workspace: Workspace, runtime: PodmanRuntime) -> str:
        """Copy a prepared container. Its files are preserved exactly, its processes cannot be: Refused while
        any runs.
        """
        if await runtime.busy():
            raise Refused("one of its steps left a process running, and a copy holds only files")
        name = f"{REPOSITORY}:{await self._digest(workspace)}"
        with trio.move_on_after(COMMIT_S):
            await self._commit(runtime, name)
            return name
        raise RuntimeFault(f"a copy of a container was not made within {COMMIT_S:.0f} s")

    async def exists(self, image: str) -> bool:
        """Whether the image exists."""
        async with self.limiter:
            return (await call(self.api, "GET", f"/images/{image}/exists")).status == 204

    async def remove(self, image: str) -> bool:
        """Remove a copy; False while a container uses it. One that is gone counts as removed."""
        async with self.limiter:
            reply = await call(self.api, "DELETE", f"/images/{image}")
        if reply.status == 409:
            return False
        if reply.status != 404:
            reply.json()
        return True

    async def run(self, ready: trio.Event) -> None:
        """Prune at once and then regularly, until cancelled. Nothing waits for it."""
        ready.set()
        while True:
            pause = PRUNE_EVERY_S
            try:
                await self.prune(self.most)
            except RuntimeFault as fault:
                # a listing of images fails whenever another node removes one of them meanwhile
                _log.info(
                    "dead nodes' prepared images are looked for again in %.0f s: %s", PRUNE_AGAIN_S, fault
                )
                pause = PRUNE_AGAIN_S
            await trio.sleep(pause)

    async def prune(self, most: int) -> int:
        """Remove the copies of dead nodes that are too old or beyond `most`; return the number removed.
        Copies of living nodes are not touched.
        """
        orphans = sorted(
            (each for each in await self._listed() if not each.owned()),
            key=lambda each: each.made_at,
            reverse=True,
        )
        old = [
            each
            for index, each in enumerate(orphans)
            if index >= most or each.made_at < time.time() - ORPHAN_S
        ]
        return sum([await self._pruned(each.name) for each in old])

    async def _pruned(self, name: str) -> bool:
        try:
            return await self.remove(name)
        except RuntimeFault as fault:
            _log.warning("the prepared image %s of a dead node could not be removed: %s", name, fault)
            return False

    async def _listed(self) -> "Sequence[_Listed]":
        query = urlencode({"filters": json.dumps({"label": [LABEL_PREPARED]})})
        async with self.limiter:
            images = (await call(self.api, "GET", f"/images/json?{query}")).json()
        return [
            _listed(each)
            for each in images
            if any(name.startswith(f"{REPOSITORY}:") for name in each.get("RepoTags") or ())
        ]

    async def _digest(self, workspace: Workspace) -> str:
        async with self.limiter:
            inspected = (await call(self.api, "GET", f"/images/{workspace.image}/json")).json()
        return await trio.to_thread.run_sync(workspace.digest, str(inspected["Id"]))

    async def _commit(self, runtime: PodmanRuntime, name: str) -> None:
        """Commit under a temporary name, correct the layer, and only then tag it with the name others look
        for.
        """
        unfinished = f"making-{secrets.token_hex(8)}"
        parameters = {
            "container": runtime.id,
            "pause": "false",
            "repo": REPOSITORY,
            "tag": unfinished,
            "changes": [
                f"LABEL {LABEL_PREPARED}={time.time():.0f}",
                f"LABEL {LABEL_OWNER}={self.owner.label()}",
            ],
        }
        async with self.limiter:
            try:
                (await call(self.api, "POST", f"/commit?{urlencode(parameters, doseq=True)}")).json()
                layer = await self._upper(f"/images/{REPOSITORY}:{unfinished}/json")
                source = await self._upper(f"/containers/{runtime.id}/json")
                with boundary(RuntimeFault, "the layer of a copy could not be mended"):
                    await trio.to_thread.run_sync(mend, layer, source, runtime.shift)
                to = urlencode({"repo": REPOSITORY, "tag": name.rpartition(":")[2]})
                (await call(self.api, "POST", f"/images/{REPOSITORY}:{unfinished}/tag?{to}")).json()
            finally:
                with trio.move_on_after(COMMIT_S, shield=True):
                    await self._drop(unfinished)

    async def _upper(self, path: str) -> Path:
        """The folder of an image's or a container's own layer."""
        inspected: Mapping[str, Any] = (await call(self.api, "GET", path)).json()
        upper = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        if not isinstance(upper, str):
            raise Refused("this store keeps layers in no folder of their own (its driver is not overlay)")
        return Path(upper)

    async def _drop(self, unfinished: str) -> None:
        try:
            await call(self.api, "DELETE", f"/images/{REPOSITORY}:{unfinished}")
        except RuntimeFault as fault:
            _log.warning("the unfinished copy %s is left to be pruned: %s", unfinished, fault)


@frozen(kw_only=True)
class _Listed:
    name: str
    owner: Owner | None
    made_at: float

    def owned(self) -> bool:
        return self.owner is not None and self.owner.is_alive()


def _listed(image: Mapping[str, Any]) -> _Listed:
    labels = image.get("Labels") or {}
    made = str(labels.get(LABEL_PREPARED, ""))
    owner = read_owner(str(labels.get(LABEL_OWNER, "")))
    return _Listed(
        name=str(image["RepoTags"][0]), owner=owner, made_at=float(made) if made.isdigit() else 0.0
    )


def mend(layer: Path, source: Path, shift: int) -> None:
    """Give a layer's files the ids they have in the container, and the times they had in `source`, the layer
    they were copied from. An id in the container's range on this machine is moved down; any other is kept, so
    that what a newer Podman wrote correctly stays correct.
    """
    for path in _below(layer):
        found = path.lstat()
        _own(path, found, shift)
        _time(path, source / path.relative_to(layer))


def _below(folder: Path) -> Iterator[Path]:
    """Everything in a folder, contents first (so that a folder's time is set after its files'), and the
    folder itself.
    """
    for top, folders, files in os.walk(folder, topdown=False, followlinks=False):
        yield from (Path(top) / name for name in files)
        yield from (Path(top) / name for name in folders if (Path(top) / name).is_symlink())
        yield Path(top)


def _own(path: Path, found: os.stat_result, shift: int) -> None:
    uid, gid = (
        moved - shift if shift <= moved < shift + IDS else moved for moved in (found.st_uid, found.st_gid)
    )
    if (uid, gid) == (found.st_uid, found.st_gid):
        return
    os.chown(path, uid, gid, follow_symlinks=False)
    if stat.S_ISREG(found.st_mode) and found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        os.chmod(path, stat.S_IMODE(found.st_mode))  # a change of owner took them


def _time(path: Path, original: Path) -> None:
    try:
        found = original.lstat()
    except OSError:
        return  # a folder the layer needs, and the container's does not
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
