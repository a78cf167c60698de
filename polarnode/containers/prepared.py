"""Prepared workspaces: a task's files and steps are done once, and its other sessions start from a copy.

One session prepares while the others wait; its container is copied (`copies.py`) and it keeps the original.
Where the steps fail, the others try for themselves, side by side. Invariants: nobody is worse off than
without this, so whatever keeps a workspace from being copied costs a line in the log and every session
prepares its own; and two workspaces are equal only if everything a step could see is equal, the image's id
included.
"""

import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Generic, Protocol, TypeVar

import trio
from attrs import define, field, frozen

from polarnode.core import codec
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import FileSpec, PrepareStep, RuntimeSpec, VolumeSpec
from polarnode.support.bounded import remember

# files without a step that are worth a copy: a file is written in 1 ms, a copy made in 0.1-0.6 s
MANY_FILES = 100
SEEN = 2000  # workspaces remembered as requested before: a number each
UNCOPIED = 500  # workspaces remembered as not to be copied
# copies that may fail before a workspace is not tried again: once is a full disk or a service that was
# restarted
TRIES = 2

_log = logging.getLogger(__name__)


@frozen(kw_only=True, cache_hash=True)
class Workspace:
    """Everything that the result of its steps may depend on. `image` is Podman's name of it; its id is part
    of the copy's name.
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
        """The name of what is prepared from this on that very image."""
        return hashlib.sha256(image_id.encode() + codec.dump_json(codec.plain(self))).hexdigest()[:24]


def workspace_of(spec: RuntimeSpec, image: str) -> Workspace | None:
    """The workspace that a task needs prepared; None if there is nothing to prepare or the task prepares in
    each session.
    """
    if not spec.reuse_prepared or not (spec.prepare or len(spec.files) >= MANY_FILES):
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
Copied = TypeVar("Copied", bound=Closable, contravariant=True)
# a runtime from an image of that name, None for the task's own
Start = Callable[[str | None], Awaitable[Kind]]
Prepare = Callable[[Kind], Awaitable[None]]


class Copies(Protocol[Copied]):
    """Stores copies. Every method may raise RuntimeFault."""

    async def find(self, workspace: Workspace) -> str | None:
        """The image of an existing copy: another node's, or one of an earlier run; None where
        there is none.
        """
        ...

    async def make(self, workspace: Workspace, runtime: Copied) -> str:
        """Copy a prepared runtime in which nothing runs, and return the image's name. Refused, with the
        reason, where it cannot be faithful.
        """
        ...

    async def exists(self, image: str) -> bool: ...

    async def remove(self, image: str) -> bool:
        """Remove a copy; False while it is in use."""
        ...


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
    # a step failed or hung: until one succeeds all try side by side
    _doubted: dict[Workspace, None] = field(factory=dict, init=False)
    _seen: dict[int, None] = field(factory=dict, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    @property
    def kept(self) -> int:
        """The number of copies this node has."""
        return sum(state.image is not None for state in self._states.values())

    def pays(self, workspace: Workspace | None, *, shared: bool) -> bool:
        """Whether to copy it: `shared` says that more than one runtime will need it, and one requested before
        may be requested again.
        """
        if workspace is None or workspace in self._uncopied:
            return False
        seen = hash(workspace) in self._seen
        remember(self._seen, hash(workspace), None, most=SEEN)
        return shared or seen or workspace in self._states

    def expected(self, workspace: Workspace, count: int) -> tuple[str | None, int]:
        """What that many sessions will start from: a copy, or the task's own image, which only the session
        that prepares needs.
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
        """A runtime with the workspace in it. Raises Refused when a step fails and RuntimeFault when no
        runtime starts.
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
        """Remove the least recently used beyond `most` as others are added, until cancelled."""
        ready.set()
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self._evict()

    async def _again(self, workspace: Workspace, image: str, start: "Start[Kind]") -> Kind | None:
        """A runtime from the copy; None when the copy is gone."""
        self._states[workspace] = self._states.pop(workspace)  # the lately used are last
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
            remember(self._doubted, workspace, None, most=UNCOPIED)
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
        remember(self._uncopied, workspace, None, most=UNCOPIED)

    def _failure(self, workspace: Workspace, fault: RuntimeFault) -> None:
        remember(self._failed, workspace, self._failed.get(workspace, 0) + 1, most=UNCOPIED)
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
