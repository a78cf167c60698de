"""Prepared workspaces: a task's files and steps are done once, and its other sessions start from a copy.

One session prepares while the others wait. Its container is copied, and the session keeps the original. If
the steps fail, the other sessions try for themselves, concurrently. Invariants: no session is worse off than
without copies, so if a workspace cannot be copied, that costs a line in the log and every session prepares
its own; and two workspaces are equal only if everything that a step could see is equal, the image's id
included.

Copies are images in the store that all nodes of the machine share. A copy is one layer on the task's image,
made by Podman's commit. Two faults of commit are corrected in the layer before it gets its name: in a user
namespace Podman (4.3 at least) writes the ids of this machine instead of the container's, and times lose
their fractions of a second. Invariant: a layer is changed only between its commit and its naming, while
nothing can have mounted it.
"""

import hashlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlencode

import trio
from attrs import define, field, frozen

from polarnode.containers.client import LABEL_FILES_TIME, call
from polarnode.containers.container import LABEL_OWNER, Owner, read_owner
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.user_namespace import IDS
from polarnode.core import codec
from polarnode.core.errors import Refused, RuntimeFault, boundary
from polarnode.core.task import FileSpec, PrepareStep, RuntimeSpec, VolumeSpec
from polarnode.support.bounded import remember

# Without a step, a workspace of this many files is worth a copy. A file is written in 1 ms, a copy is made in
# 0.1-0.6 s.
MIN_COPIED_FILES = 100
SEEN = 2000  # remembered workspaces that were requested before, a number each
MAX_UNCOPIED = 500  # remembered workspaces that are not to be copied
# After this many failed copies a workspace is not tried again. One failure may be a full disk or a service
# that was restarted.
TRIES = 2

_log = logging.getLogger(__name__)


@frozen(kw_only=True, cache_hash=True)
class Workspace:
    """Everything that the result of a workspace's steps may depend on. `image` is Podman's name of the image;
    the image's id is part of the copy's name.
    """

    image: str
    workdir: str
    user: str
    files: tuple[FileSpec, ...]
    prepare: tuple[PrepareStep, ...]
    env: tuple[tuple[str, str], ...]
    egress: tuple[str, ...]
    volumes: tuple[VolumeSpec, ...]

    def digest(self, image_id: str) -> str:
        """The name of the copy of this workspace on the image with that id."""
        return hashlib.sha256(image_id.encode() + codec.dump_json(codec.plain(self))).hexdigest()[:24]


def workspace_of(spec: RuntimeSpec, image: str) -> Workspace | None:
    """The workspace that a task needs prepared; None if there is nothing to prepare or the task prepares in
    each session.
    """
    if not spec.reuse_prepared or not (spec.prepare or len(spec.files) >= MIN_COPIED_FILES):
        return None
    return Workspace(
        image=image,
        workdir=spec.workdir,
        user=spec.user,
        files=spec.files,
        prepare=spec.prepare,
        env=tuple(sorted(spec.env.items())),
        egress=spec.egress,
        volumes=spec.volumes,
    )


class Closable(Protocol):
    """A runtime, as far as this module uses it."""

    async def close(self) -> None: ...


Kind = TypeVar("Kind", bound=Closable)
CopiedKind = TypeVar("CopiedKind", bound=Closable, contravariant=True)
# Starts a runtime from an image of that name; None means the task's own image.
Start = Callable[[str | None], Awaitable[Kind]]
Prepare = Callable[[Kind], Awaitable[None]]


class Copies(Protocol[CopiedKind]):
    """Stores copies. Every method may raise RuntimeFault."""

    async def find(self, workspace: Workspace) -> str | None:
        """The image of an existing copy, which another node or an earlier run made; None if there is none."""

    async def make(self, workspace: Workspace, runtime: CopiedKind) -> str:
        """Copy a prepared runtime in which nothing runs, and return the image's name. Raises Refused, with
        the reason, if a copy could not be faithful.
        """

    async def exists(self, image: str) -> bool: ...

    async def remove(self, image: str) -> bool:
        """Remove a copy; False while it is in use."""


@define(eq=False)
class _CopyState:
    image: str | None = None
    making: trio.Event | None = None  # set when the preparing session has finished or failed


@define(eq=False, kw_only=True)
class Workspaces(Generic[Kind]):
    """The copies of one node, the least recently used first. `on_change` is called after each one made, found
    or lost.
    """

    copies: Copies[Kind]
    most: int
    on_change: Callable[[], None] = lambda: None
    made: int = field(default=0, init=False)
    reused: int = field(default=0, init=False)
    _states: dict[Workspace, _CopyState] = field(factory=dict, init=False)
    _uncopied: dict[Workspace, None] = field(factory=dict, init=False)
    _failed: dict[Workspace, int] = field(factory=dict, init=False)
    # A step failed or hung. Until one session succeeds, all try concurrently.
    _doubted: dict[Workspace, None] = field(factory=dict, init=False)
    _seen: dict[int, None] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    @property
    def kept(self) -> int:
        """The number of copies this node has."""
        return sum(state.image is not None for state in self._states.values())

    def pays(self, workspace: Workspace | None, *, shared: bool) -> bool:
        """Whether it is worth copying. `shared` says that more than one runtime will need it; a workspace
        that was requested before may also be requested again.
        """
        if workspace is None or workspace in self._uncopied:
            return False
        seen = hash(workspace) in self._seen
        remember(self._seen, hash(workspace), None, most=SEEN)
        return shared or seen or workspace in self._states

    def expected(self, workspace: Workspace, count: int) -> tuple[str | None, int]:
        """The image that sessions will start from (None: the task's own), and how many of `count` will. While
        no copy exists, only the session that prepares needs the task's own image.
        """
        state = self._states.get(workspace)
        if workspace in self._uncopied or workspace in self._doubted:
            return None, count
        if state is None or state.making is not None:
            return None, min(1, count) if state is None else 0
        return state.image, count

    def busy(self, workspace: Workspace | None) -> bool:
        """Whether it is being prepared now."""
        state = self._states.get(workspace) if workspace else None
        return state is not None and state.making is not None

    async def wait_settled(self, workspace: Workspace | None) -> None:
        """Wait until it is no longer being prepared, with any result."""
        while workspace is not None and self.busy(workspace):
            making = self._states[workspace].making
            if making is not None:
                await making.wait()

    async def obtain(self, workspace: Workspace, start: "Start[Kind]", prepare: "Prepare[Kind]") -> Kind:
        """Return a runtime with the workspace in it. Raises Refused when a step fails and RuntimeFault when
        no runtime starts.
        """
        while workspace not in self._uncopied and workspace not in self._doubted:
            state = self._states.setdefault(workspace, _CopyState())
            if state.making is not None:
                await state.making.wait()
            elif state.image is None:
                return await self._first(workspace, state, start, prepare)
            else:
                runtime = await self._again(workspace, state.image, start)
                if runtime is not None:
                    return runtime
        own = await _own(start, prepare)
        self._doubted.pop(workspace, None)
        return own

    async def run(self, ready: trio.Event) -> None:
        """Remove the least recently used copies beyond `most` as others are added, until cancelled."""
        ready.set()
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self._evict()

    async def _again(self, workspace: Workspace, image: str, start: "Start[Kind]") -> Kind | None:
        """A runtime from the copy; None when the copy is gone."""
        self._states[workspace] = self._states.pop(workspace)  # the most recently used is last
        failed: RuntimeFault | None = None
        try:
            runtime = await start(image)
        except RuntimeFault as fault:
            failed = fault
        if failed is None:
            self.reused += 1
            return runtime
        if await self.copies.exists(image):
            raise failed
        self._forget(workspace, image)
        return None

    async def _first(
        self, workspace: Workspace, state: _CopyState, start: "Start[Kind]", prepare: "Prepare[Kind]"
    ) -> Kind:
        making = state.making = trio.Event()
        self.on_change()
        try:
            return await self._found(state, workspace, start) or await self._made(
                workspace, state, start, prepare
            )
        except (Refused, trio.Cancelled):
            remember(self._doubted, workspace, None, most=MAX_UNCOPIED)
            raise
        finally:
            state.making = None
            making.set()
            if state.image is None and self._states.get(workspace) is state:
                del self._states[workspace]
            self._change()

    async def _found(self, state: _CopyState, workspace: Workspace, start: "Start[Kind]") -> Kind | None:
        """A runtime from another node's copy, or one of an earlier run; None where there is none."""
        try:
            state.image = await self.copies.find(workspace)
        except RuntimeFault as fault:
            _log.warning(
                "the copies of the workspace of %s could not be searched, it is prepared here: %s",
                workspace.image,
                fault,
            )
        if state.image is None:
            return None
        runtime = await start(state.image)
        self.reused += 1
        return runtime

    async def _made(
        self, workspace: Workspace, state: _CopyState, start: "Start[Kind]", prepare: "Prepare[Kind]"
    ) -> Kind:
        async with AsyncExitStack() as undo:
            runtime = await _own(start, prepare)
            undo.push_async_callback(runtime.close)
            try:
                state.image = await self.copies.make(workspace, runtime)
                self.made += 1
            except Refused as why:
                self._give_up(workspace, str(why))
            except RuntimeFault as fault:
                self._failure(workspace, fault)
            undo.pop_all()
        return runtime

    def _give_up(self, workspace: Workspace, why: str) -> None:
        _log.info("the workspace of %s is prepared in every session: %s", workspace.image, why)
        remember(self._uncopied, workspace, None, most=MAX_UNCOPIED)

    def _failure(self, workspace: Workspace, fault: RuntimeFault) -> None:
        remember(self._failed, workspace, self._failed.get(workspace, 0) + 1, most=MAX_UNCOPIED)
        if self._failed[workspace] >= TRIES:
            self._give_up(workspace, str(fault))
        else:
            _log.warning(
                "the workspace of %s could not be copied, this session has its own: %s",
                workspace.image,
                fault,
            )

    async def _evict(self) -> None:
        """Remove the least recently used copies beyond `most` that are not in use."""
        surplus = self.kept - self.most
        for workspace, state in list(self._states.items()):
            if surplus <= 0:
                return
            image = state.image
            if image is None or state.making is not None:
                continue
            try:
                removed = await self.copies.remove(image)
            except RuntimeFault as fault:
                _log.warning("the prepared image %s could not be removed: %s", image, fault)
                continue
            if removed:
                self._forget(workspace, image)
                surplus -= 1

    def _forget(self, workspace: Workspace, image: str) -> None:
        state = self._states.get(workspace)
        if state is not None and state.image == image:
            del self._states[workspace]
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self.on_change()


async def _own(start: "Start[Kind]", prepare: "Prepare[Kind]") -> Kind:
    """A runtime of the task's own image, prepared; closed again when that fails."""
    async with AsyncExitStack() as undo:
        runtime = await start(None)
        undo.push_async_callback(runtime.close)
        await prepare(runtime)
        undo.pop_all()
    return runtime


# ── copies in Podman's store ────────────────────────────────────────────────────────────────────────

COPY_REPOSITORY = "localhost/polarnode-prepared"
LABEL_PREPARED = "polarnode.prepared"  # on a copy: when it was made, seconds since 1970
# Seconds that a copy may take. A small one takes 0.1 s, one of 4,000 files with 100 MB takes 0.6 s. A longer
# one is hardly worth it.
COMMIT_S = 120.0
# Seconds between prunings, and after a pruning that failed. Nodes rarely die, and what they leave is bounded.
PRUNE_EVERY_S, PRUNE_AGAIN_S = 600.0, 20.0
ORPHAN_S = 3600.0  # seconds that a dead node's copy is kept: the node may be started again and use it


@define(eq=False, kw_only=True)
class PodmanCopies:
    """`Copies` on Podman. `limiter` is the node's own over calls to Podman; `owner` is the label of
    every copy; `most` copies of dead nodes are kept.
    """

    api: Path
    limiter: trio.CapacityLimiter
    owner: Owner
    most: int

    async def find(self, workspace: Workspace) -> str | None:
        """The image of an existing copy; None where there is none."""
        name = f"{COPY_REPOSITORY}:{await self._digest(workspace)}"
        return name if await self.exists(name) else None

    async def make(self, workspace: Workspace, runtime: PodmanRuntime) -> str:
        """Copy a prepared container. A copy preserves files exactly but no processes, so Refused is raised
        while any process runs.
        """
        if await runtime.busy():
            raise Refused("one of its steps left a process running, and a copy holds only files")
        name = f"{COPY_REPOSITORY}:{await self._digest(workspace)}"
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
                # A listing of images fails whenever another node removes one of them meanwhile.
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
        return sum([await self._prune_copy(each.name) for each in old])

    async def _prune_copy(self, name: str) -> bool:
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
            if any(name.startswith(f"{COPY_REPOSITORY}:") for name in each.get("RepoTags") or ())
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
            "repo": COPY_REPOSITORY,
            "tag": unfinished,
            "changes": [
                f"LABEL {LABEL_PREPARED}={time.time():.0f}",
                f"LABEL {LABEL_OWNER}={self.owner.label()}",
                f"LABEL {LABEL_FILES_TIME}={runtime.files_time}",
            ],
        }
        async with self.limiter:
            try:
                (await call(self.api, "POST", f"/commit?{urlencode(parameters, doseq=True)}")).json()
                layer = await self._layer_folder(f"/images/{COPY_REPOSITORY}:{unfinished}/json")
                source = await self._layer_folder(f"/containers/{runtime.id}/json")
                with boundary(RuntimeFault, "the layer of a copy could not be mended"):
                    await trio.to_thread.run_sync(mend, layer, source, runtime.shift)
                to = urlencode({"repo": COPY_REPOSITORY, "tag": name.rpartition(":")[2]})
                (await call(self.api, "POST", f"/images/{COPY_REPOSITORY}:{unfinished}/tag?{to}")).json()
            finally:
                with trio.move_on_after(COMMIT_S, shield=True):
                    await self._drop(unfinished)

    async def _layer_folder(self, path: str) -> Path:
        """The folder of an image's or a container's own layer."""
        inspected: Mapping[str, Any] = (await call(self.api, "GET", path)).json()
        upper = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        if not isinstance(upper, str):
            raise Refused("this store keeps layers in no folder of their own (its driver is not overlay)")
        return Path(upper)

    async def _drop(self, unfinished: str) -> None:
        try:
            await call(self.api, "DELETE", f"/images/{COPY_REPOSITORY}:{unfinished}")
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
    """Give a layer's files the ids that they have in the container, and the times that they had in `source`,
    the layer from which they were copied. An id in the container's range on this machine is moved down; any
    other id is kept, so that what a newer Podman wrote correctly stays correct.
    """
    for path in _below(layer):
        found = path.lstat()
        _shift(path, found, shift)
        _restore_time(path, source / path.relative_to(layer))


def _below(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder and the folder itself. Contents come first, so that a folder's time is set
    after those of its files.
    """
    for top, folders, files in os.walk(folder, topdown=False, followlinks=False):
        yield from (Path(top) / name for name in files)
        yield from (Path(top) / name for name in folders if (Path(top) / name).is_symlink())
        yield Path(top)


def _shift(path: Path, found: os.stat_result, shift: int) -> None:
    uid, gid = (
        moved - shift if shift <= moved < shift + IDS else moved for moved in (found.st_uid, found.st_gid)
    )
    if (uid, gid) == (found.st_uid, found.st_gid):
        return
    os.chown(path, uid, gid, follow_symlinks=False)
    if stat.S_ISREG(found.st_mode) and found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        os.chmod(path, stat.S_IMODE(found.st_mode))  # the change of owner removed these bits


def _restore_time(path: Path, original: Path) -> None:
    try:
        found = original.lstat()
    except OSError:
        return  # the layer needs this folder, and the container's layer does not have it
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
