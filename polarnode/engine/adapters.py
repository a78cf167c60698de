"""Adapters: named low-rank changes of the base weights (LoRA), replaced while the engine samples.

An adapter has a name, which tasks write, and versions, by which tokens are named. `put` loads a new version
beside the one before: calls in progress end by the version they began with, later ones sample by the new one,
and nothing is paused. A version is in the engine while a session needs its name or a call samples by it. A
version that nobody needs is unloaded, and loaded again by the next call. Every host holds what `kept` names,
and a host that restarts loads that before it serves. No weights of the base are touched.

The folders are the caller's, who keeps the folder of a current version in place and unchanged.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from polarnode.core.errors import Conflict, EngineError, Refused
from polarnode.core.weights import AdapterState, HostReport
from polarnode.engine.checkpoints import AdapterLimits, BadCheckpoint, Manifest, check_adapter, manifest
from polarnode.engine.host import Host
from polarnode.engine.protocol import Done
from polarnode.engine.settings import EngineSettings
from polarnode.engine.update import ALIVE_STATES

# Seconds to load an adapter on every host: one of 2 GB from a network disk takes half a minute. This holds
# back only the calls that wait for it.
LOAD_TIMEOUT_S = 180.0
MOST = 256  # names at once; the files of each stay on the node's disk, and a run has one or a few
VERSIONS = 4096  # versions of a name that are remembered, as many as of the base

_log = logging.getLogger(__name__)


@define(eq=False)
class _NamedAdapter:
    """One name. `versions` are oldest first; the last is current and its files are in `folder`."""

    name: str
    folder: Path
    versions: list[str]
    sessions: int = 0  # sessions that need it
    # It was put, and neither sampled by nor needed since: it stays loaded for what comes next.
    untouched: bool = True
    loads: int = 0
    seconds: float = 0.0  # seconds that its last load took on the slowest host


@define(eq=False)
class EngineAdapters:
    """The adapters of an engine, made with `Engines` as its `adapters`. There is one load or unload at a
    time. Sampling never waits for them, except the calls of an adapter that is being loaded.
    """

    _settings: EngineSettings | None = None
    # Versions of the base, which an adapter's versions may not repeat.
    _taken: Callable[[], Collection[str]] = tuple
    _updating: Callable[[], bool] = bool  # whether the base is being updated
    kept: dict[str, Path] = field(factory=dict, init=False)  # versions that every host holds, and their files
    # Names whose last version could not be served again after a restart, and why.
    lost: dict[str, str] = field(factory=dict, init=False)
    hosts: tuple[Host, ...] = field(default=(), init=False)  # the adapters of each were made with `kept`
    _adapters: dict[str, _NamedAdapter] = field(factory=dict, init=False)
    # Calls by version; those that wait for a host count too.
    _calls: Counter[str] = field(factory=Counter, init=False)
    _lock: trio.Lock = field(factory=trio.Lock, init=False)
    # The version that is loaded while the lock is held.
    _loading: str | None = field(default=None, init=False)
    _woken: trio.Event = field(factory=trio.Event, init=False)
    _model: Manifest | None = field(default=None, init=False)

    # ── what trainers do ──────────────────────────────────────────────────────

    async def put(
        self,
        name: str,
        version: str,
        folder: Path,
        *,
        loaded: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> tuple[HostReport, ...]:
        """Sample by the adapter under `folder` (PEFT's adapter_config.json and adapter_model.safetensors) for
        every call of `name` that begins from now on. Returns how long each host took to load it. `loaded` is
        awaited when every host holds it and no call samples by it yet.

        Raises Refused, before anything is loaded, for an adapter that the engine could not sample by exactly.
        Raises Conflict if the engine takes no adapters, for a version that exists, and during an update of
        the base. Raises EngineError when no host serves or one died. After any of them the version before is
        current on all hosts.
        """
        self.require_enabled()
        await trio.to_thread.run_sync(self._check, folder)
        async with self._lock:
            self._require_new(name, version)
            try:
                seconds = await self._load(version, folder)
                await loaded()
                self.lost.pop(name, None)
                adapter = self._adapters.setdefault(name, _NamedAdapter(name, folder, []))
                adapter.folder, adapter.versions = folder, [*adapter.versions[1 - VERSIONS :], version]
                self._count(adapter, seconds)
            finally:
                self._loading = None
                self.wake()
        return tuple(HostReport(index=index, seconds=each) for index, each in sorted(seconds.items()))

    def drop(self, name: str) -> None:
        """Forget an adapter. Calls in progress end by it. Raises Conflict while sessions need it, and Refused
        for an unknown name.
        """
        if self.lost.pop(name, None) is not None:
            return
        adapter = self._found(name)
        _require(
            not adapter.sessions,
            f"{adapter.sessions} sessions sample by adapter {name!r}: cancel their tasks or wait for their"
            " end, then delete it",
        )
        del self._adapters[name]
        self.wake()

    def require_enabled(self) -> None:
        """Raise Conflict if this engine takes no adapters."""
        settings = self._settings
        _require(
            settings is not None and settings.external is None,
            "the engine is external (--engine), and adapters are for the node's own: leave `adapter` out, or"
            " start the node with --gpus or --cpu and the setting lora_rank",
        )
        _require(
            settings is not None and settings.lora_rank > 0,
            "this node takes no adapters: start it with the setting lora_rank, the largest rank that is sent,"
            " such as lora_rank = 32",
        )

    def require_none(self) -> None:
        """Raise Conflict while there are adapters, because their versions belong to this base."""
        _require(
            not self._adapters,
            f"the base weights stay as they are while adapters exist ({', '.join(self._adapters)}): delete"
            " them first, by DELETE /v1/adapters/NAME",
        )
        _require(
            not self.kept,
            f"calls sample by adapters yet, or one is being loaded ({', '.join(self.kept)}): update the base"
            " weights once they have ended",
        )

    # ── what sessions do ──────────────────────────────────────────────────────

    def refusal(self, name: str) -> str | None:
        """Why no session can sample by `name`, as a sentence. None when it can."""
        try:
            self.require_enabled()
            self._found(name)
        except (Conflict, Refused) as refused:
            return str(refused)
        return None

    def need(self, name: str) -> None:
        """A session samples by `name` from now on. The adapter stays loaded until `release` was called as
        often. Raises Refused for an unknown name.
        """
        adapter = self._found(name)
        adapter.sessions, adapter.untouched = adapter.sessions + 1, False

    def release(self, name: str) -> None:
        """A session that needed `name` is over. After the last one the adapter is unloaded."""
        adapter = self._adapters[name]  # an adapter that is needed is not dropped
        adapter.sessions -= 1
        self.wake()

    @asynccontextmanager
    async def leased(self, name: str) -> AsyncIterator[str]:
        """The version that a call of `name` samples by: the current one, which stays loaded while the block
        lasts. It is empty for an empty name, which is the base.
        """
        if not name:
            yield ""
            return
        version = await self._loaded(name)
        self._calls[version] += 1
        try:
            yield version
        finally:
            self._calls[version] -= 1
            if not self._calls[version]:
                del self._calls[version]
            self.wake()

    def versions(self, name: str) -> tuple[str, ...]:
        """The versions of `name` since the node started, oldest first; the last is current. An unknown name
        has none.
        """
        return tuple(self._adapters[name].versions) if name in self._adapters else ()

    def status(self) -> tuple[AdapterState, ...]:
        served = (
            AdapterState(
                name=each.name,
                version=each.versions[-1],
                loaded=each.versions[-1] in self.kept,
                sessions=each.sessions,
                calls=sum(self._in_progress(version) for version in each.versions),
                loads=each.loads,
                seconds=each.seconds,
                versions=tuple(each.versions),
            )
            for each in self._adapters.values()
        )
        lost = (AdapterState(name=name, version="", warning=why) for name, why in self.lost.items())
        return (*served, *lost)

    # ── the engine's side ─────────────────────────────────────────────────────

    def wake(self) -> None:
        """Look for what nobody needs. This is called when a call or a session is over."""
        self._woken.set()

    async def tidy(self) -> None:
        """Unload what nobody needs, until cancelled. An unload may take as long as generation is paused, and
        nothing waits for it.
        """
        async with trio.open_nursery() as nursery:
            while True:
                await self._woken.wait()
                self._woken = trio.Event()
                for version in {*self.kept, *(each for host in self.hosts for each in host.adapters.loaded)}:
                    if not self._is_wanted(version):
                        nursery.start_soon(self._unload_everywhere, version)

    async def _loaded(self, name: str) -> str:
        """The current version, once the engine has it."""
        while True:
            adapter = self._adapters.get(name)
            if adapter is None:
                raise EngineError(self.refusal(name) or "", retryable=False)
            version = adapter.versions[-1]
            adapter.untouched = False
            if version in self.kept and not self._lacking(version):
                return version
            async with self._lock:
                # Others may have loaded it, or put another version, while this waited.
                if self._adapters.get(name) is adapter and version == adapter.versions[-1]:
                    if version not in self.kept or self._lacking(version):
                        try:
                            self._count(adapter, await self._load(version, adapter.folder))
                        except Refused as refused:  # its files were good when it was put
                            raise EngineError(str(refused), retryable=False) from None
                        finally:
                            self._loading = None
                    return version

    async def _load(self, version: str, folder: Path) -> dict[int, float]:
        """Load a version on every host that runs, and return the seconds of each. If one fails, none keeps
        it, unless a session needs it.
        """
        seconds: dict[int, float] = {}
        failed: dict[int, str] = {}

        async def ask(host: Host) -> None:
            began, done = (
                trio.current_time(),
                Done(call=0, ok=False, message=f"no answer in {LOAD_TIMEOUT_S:.0f} s"),
            )
            with trio.move_on_after(LOAD_TIMEOUT_S) as patience:
                done = await host.adapters.load(version, folder)
            if patience.cancelled_caught:
                host.process.restart_with_reason(done.message)  # what this host holds is not known
            if done.ok:
                seconds[host.index] = trio.current_time() - began
            else:
                failed[host.index] = done.message

        with trio.CancelScope(shield=True):  # bounded by LOAD_TIMEOUT_S; what the hosts hold must be known
            self._loading, self.kept[version] = version, folder
            while (lacking := self._lacking(version)) and not failed:
                async with trio.open_nursery() as nursery:
                    for host in lacking:
                        nursery.start_soon(ask, host)
            if not failed:
                return seconds
            self._loading = None
            await self._unload_everywhere(version)
        text = "; ".join(f"engine host {index}: {message}" for index, message in failed.items())
        sentence = f"adapter version {version!r} was not loaded, and none before it was touched: {text}"
        if all(host.state in ALIVE_STATES for host in self.hosts if host.index in failed):
            raise Refused(sentence, path="$.source")
        raise EngineError(sentence)

    async def _unload_everywhere(self, version: str) -> None:
        """Unload a version everywhere, unless it is wanted again meanwhile."""
        if self._is_wanted(version):
            return
        self.kept.pop(version, None)
        async with trio.open_nursery() as nursery:
            for host in self.hosts:
                if version in host.adapters.loaded:
                    nursery.start_soon(self._unload_from, host, version)

    async def _unload_from(self, host: Host, version: str) -> None:
        if self._is_wanted(version) or version not in host.adapters.loaded:
            return
        done = await host.adapters.unload(version)
        if not done.ok and host.state in ALIVE_STATES and version not in host.adapters.loaded:
            _log.error("engine host %d keeps adapter version %s: %s", host.index, version, done.message)

    def _lacking(self, version: str) -> list[Host]:
        return [
            host for host in self.hosts if host.state in ALIVE_STATES and version not in host.adapters.loaded
        ]

    def _is_wanted(self, version: str) -> bool:
        """Whether a session, a call or a load needs a version in the engine."""
        return (
            self._in_progress(version) > 0
            or version == self._loading
            or any(
                version == each.versions[-1] and (each.sessions > 0 or each.untouched)
                for each in self._adapters.values()
            )
        )

    def _in_progress(self, version: str) -> int:
        """The number of calls that sample by a version, or will. A call whose consumer left counts until the
        engine has sent its last message about it.
        """
        return max(self._calls[version], sum(host.calls.samples_by(version) for host in self.hosts))

    def _count(self, adapter: _NamedAdapter, seconds: dict[int, float]) -> None:
        adapter.loads += bool(seconds)
        adapter.seconds = max(seconds.values(), default=adapter.seconds)

    # ── checks ────────────────────────────────────────────────────────────────

    def _check(self, folder: Path) -> None:
        """Raise Refused for an adapter that the engine could not sample by exactly. Reads all of its
        tensors.
        """
        assert self._settings is not None
        if self._model is None:
            self._model = manifest(self._settings.model_path)
        limits = AdapterLimits(rank=self._settings.lora_rank, modules=self._settings.lora_modules)
        try:
            check_adapter(folder, self._model, limits)
        except (BadCheckpoint, OSError) as error:
            raise Refused(f"the adapter cannot be served: {error}", path="$.source") from None

    def _require_new(self, name: str, version: str) -> None:
        owner = next((each.name for each in self._adapters.values() if version in each.versions), None)
        whose = "the base weights" if owner is None else f"adapter {owner!r}"
        _require(
            owner is None and version not in self._taken() and not self._in_progress(version),
            f"version {version!r} is one of {whose}: give each adapter's version a name of its own",
        )
        _require(
            name in self._adapters or len(self._adapters) < MOST,
            f"there are {MOST} adapters: delete one that no run uses, by DELETE /v1/adapters/NAME",
        )
        _require(
            not self._updating(),
            "the base weights are being updated: send the adapter once they are served",
        )
        if not any(host.state in ALIVE_STATES for host in self.hosts):
            raise EngineError("no engine host serves at present: send the adapter again once one does")

    def _found(self, name: str) -> _NamedAdapter:
        if (adapter := self._adapters.get(name)) is None:
            known = f", or name one of {', '.join(self._adapters)}" if self._adapters else ""
            unknown = f"there is no adapter {name!r}: send it first, by POST /v1/adapters{known}"
            raise Refused(self.lost.get(name, unknown), path="$.adapter")
        return adapter


def _require(holds: bool, sentence: str) -> None:
    """Raise Conflict with the sentence unless the condition holds."""
    if not holds:
        raise Conflict(sentence)
