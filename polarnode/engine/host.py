"""One engine host for the lifetime of the node: run its process, serve calls by it, and restart it when it
dies.

`Host.run` is the life of a host. What a host does for others has a class each: its process and the messages
(`host_process.HostProcess`), generation (`host_calls.HostCalls`), scoring (`scoring.HostScoring`), and
adapters (`HostAdapters`).

When the process dies, its calls and questions end immediately and synchronously, before anything is awaited,
so that no task waits for a process that is gone. A host that comes back serves the node's weights or nothing.
Weights that cannot be loaded again (tensors of a trainer, a folder that was overwritten) are waited for,
never guessed.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.core.weights import PauseMode
from polarnode.engine.checkpoints import fingerprint
from polarnode.engine.host_calls import HostCalls
from polarnode.engine.host_process import HostProcess
from polarnode.engine.protocol import (
    CommitUpdate,
    Done,
    Failed,
    Forget,
    FrameError,
    Load,
    LoadAdapter,
    LoadDisk,
    Message,
    Pause,
    Piece,
    Ready,
    RoutedRows,
    RowLogprobs,
    ToHost,
    UnloadAdapter,
    Waiting,
)
from polarnode.engine.residents import ResidencyGate
from polarnode.engine.routing import HostDeaths, HostState, HostStatistics
from polarnode.engine.scoring import HostScoring, ScoreTurns
from polarnode.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

# Tries of a first start that failed by chance, such as when a port was taken meanwhile. Any other failure is
# reported at once.
MAX_FIRST_STARTS = 3

AskHost = Callable[[Callable[[int], ToHost]], Awaitable[Done]]  # as `HostProcess.ask`


@frozen(kw_only=True)
class Loaded:
    """The weights that a host should serve if they are not those it starts with. If `path` is None, a trainer
    sent them, and they are on no disk.
    """

    version: str
    path: str | None = None
    files: str = ""  # the folder's fingerprint when it was loaded


class StaleWeights(EngineError):
    """A host that cannot load the node's weights and waits for the next version."""


async def load_target(target: Callable[[], Loaded | None], ask: AskHost) -> Loaded | None:
    """Load the target weights until they are the ones loaded, because the target may change meanwhile.

    Raises StaleWeights when they are gone, and EngineError when they do not load.
    """
    done: Loaded | None = None
    while (weights := target()) is not done and weights is not None:
        path = await trio.to_thread.run_sync(_existing_path, weights)
        version = weights.version
        load = await ask(lambda call, path=path: LoadDisk(call=call, path=path))  # type: ignore[misc]
        if load.ok:
            load = await ask(
                lambda call, version=version: CommitUpdate(call=call, version=version)  # type: ignore[misc]
            )
        if not load.ok:
            raise EngineError(f"weights {version} under {path} cannot be loaded again: {load.message}")
        done = weights
    return done


def _existing_path(weights: Loaded) -> str:
    if weights.path is None:
        raise StaleWeights(
            f"weights {weights.version} were sent by a trainer and this host has lost them: it serves again"
            " with the next update"
        )
    if weights.files and fingerprint(Path(weights.path)) != weights.files:
        raise StaleWeights(
            f"weights {weights.version} are no longer under {weights.path}, whose files have changed:"
            " this host serves again with the next update"
        )
    return weights.path


@define(eq=False)
class HostAdapters:
    """The versions of adapters that one host holds. `kept` are those that it must hold to serve, and their
    files.
    """

    index: int
    _kept: Mapping[str, Path]
    _ask: AskHost
    loaded: set[str] = field(factory=set, init=False)

    async def load(self, version: str, folder: Path) -> Done:
        """Load a version. `loaded` has it from then on."""
        done = await self._ask(lambda call: LoadAdapter(call=call, name=version, path=str(folder)))
        if done.ok:
            self.loaded.add(version)
        return done

    async def unload(self, version: str) -> Done:
        """Unload a version once the engine samples nothing by it. If it is loaded again meanwhile, it
        stays.
        """
        self.loaded.discard(version)
        return await self._ask(lambda call: UnloadAdapter(call=call, name=version))

    async def load_kept(self) -> None:
        """Load what the other hosts hold. An adapter whose files are gone fails only its own calls."""
        tried: set[str] = set()
        while missing := self._kept.keys() - self.loaded - tried:
            version = min(missing)
            tried.add(version)
            done = await self.load(version, self._kept[version])
            if not done.ok:
                logger.error("engine host %d lacks adapter version %s: %s", self.index, version, done.message)


@define(eq=False)
class Host:
    """The node's side of one engine host. `on_change` is called whenever `state` may have changed, and when a
    call of an adapter is over. `settled` returns when no weights change.
    """

    index: int
    process: HostProcess
    adapters: HostAdapters
    _settings: EngineSettings
    _on_change: Callable[[], None]
    _settled: Callable[[], Awaitable[None]]
    state: HostState = "starting"
    ready: Ready | None = None
    loaded: Loaded | None = None
    paused: PauseMode | None = field(default=None, init=False)
    held: bool = field(default=False, init=False)  # the weights change, so no call is sent
    last_error: str | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    waiting: Waiting | None = field(default=None, init=False)  # the last report that it waits for its server
    load_report: Load | None = field(default=None, init=False)  # the last one of its process
    residents: ResidencyGate = field(init=False)
    calls: HostCalls = field(init=False)
    scoring: HostScoring = field(init=False)
    _deaths: HostDeaths = field(init=False)

    def __attrs_post_init__(self) -> None:
        post, settings = self.process.post, self._settings
        self.residents = ResidencyGate(
            self.index, lambda name: post(Forget(session=name)), settings.sizes_path(self.index)
        )
        self.calls = HostCalls(
            self.residents, post=post, serving=lambda: self.serving, on_change=self._on_change
        )
        turns = ScoreTurns(samples=lambda: bool(self.calls.in_flight or self.calls.queue.waiting))
        self.scoring = HostScoring(turns, post=post, serving=lambda: self.serving, on_change=self._on_change)
        self._deaths = HostDeaths(gives_up=settings.external is None)

    async def run(self) -> None:
        """Keep a process running until cancelled, or until the host is given up. It raises nothing but
        bugs.
        """
        while True:
            # 1. A process starts, without adapters. Its messages are handled until it ends, and when it is
            # ready, `_bring_up` makes it serve.
            self.adapters.loaded = set()
            reason = await self.process.run(self._handle)
            # 2. It is gone: its calls end, and those that were never sent to it find another host.
            self._end_calls(reason)
            # 3. Start another one, unless hosts keep dying, or the first start failed for good, so that a
            # setting must be changed. A port that was merely taken meanwhile does not count.
            delay = self._deaths.note(trio.current_time())
            by_chance = self.process.diagnose_log().chance and self.restarts + 1 < MAX_FIRST_STARTS
            is_hopeless = self._settings.external is None and self.ready is None and not by_chance
            if delay is None or is_hopeless:
                self._change("failed")
                return
            await trio.sleep(delay)
            self.restarts += 1
            self._change("starting")

    def _handle(self, message: Message, nursery: trio.Nursery) -> None:
        """Give a message of the process to what it is about."""
        match message:
            case Piece() | RoutedRows():
                self.calls.take(message)
            case RowLogprobs():
                self.scoring.take(message)
            case Failed(rid=rid):
                sentence = f"the engine refused the request: {message.message}"
                error = EngineError(sentence, retryable=message.retryable)
                self.calls.fail(rid, EngineRefusal(sentence) if message.refused else error)
                self.scoring.fail(rid, error)
            case Load():
                self.load_report = message
                # The weights of an external engine are named by its owner.
                renamed = self.state == "ready" and message.weight_version != self.version
                if self._settings.external is not None and renamed:
                    self.serve(message.weight_version)
                if self.paused is None and not self.held:  # otherwise its queue means nothing
                    self.calls.note_load(message)
            case Ready():
                nursery.start_soon(self._bring_up, message)
            case Waiting():
                # The server of an external engine is not there, or does not fit.
                self.last_error, self.waiting = message.message, message
                logger.warning("engine host %d waits for its server: %s", self.index, message.message)
                self._on_change()
            case _:
                raise FrameError(f"the host may not send {type(message).__name__}")

    async def _bring_up(self, ready: Ready) -> None:
        """Bring a process that is ready to the weights, the pause and the adapters of the one that it
        replaces, and let it serve.
        """
        await self._settled()
        try:
            loaded = await load_target(lambda: self.loaded, self.process.ask)
        except StaleWeights as stale:
            self.last_error, self.ready, self.process.has_served = str(stale), ready, True
            logger.error("engine host %d: %s", self.index, stale)
            self._change("stale")
            return
        except EngineError as error:
            self.process.restart_with_reason(str(error))
            return
        ready = ready if loaded is None else evolve(ready, weight_version=loaded.version)
        self.calls.queue.tokens = ready.max_total_tokens
        if self._settings.has_residency:
            self.residents.open(ready.max_total_tokens + ready.host_tokens, ready.capacity)
        if (mode := self.paused) is not None:
            await self.process.ask(lambda call: Pause(call=call, mode=mode))
        await self.adapters.load_kept()
        self.ready, self.process.has_served, self.waiting = ready, True, None
        self._change("ready")

    def serve(self, version: str) -> None:
        """The host reported that it serves these weights now. A process that has died since then is followed
        by one that loads them before it serves.
        """
        if self.ready is not None and self.state in ("ready", "stale"):
            self.ready = evolve(self.ready, weight_version=version)
            self._change("ready")

    def _end_calls(self, reason: str) -> None:
        """End every call of a process that is gone, synchronously."""
        self.last_error, self.load_report = reason, None
        sentence = f"engine host {self.index} died: {reason}"
        self.calls.end_all(sentence)
        self.scoring.fail_all(sentence)
        logger.error("engine host %d died: %s", self.index, reason)
        self._change("dead")

    def _change(self, state: HostState) -> None:
        if state != self.state:
            logger.info("engine host %d is %s, with weights %s", self.index, state, self.version)
        self.state = state
        self._on_change()

    @property
    def serving(self) -> Ready | None:
        """What the engine reported of itself, while calls may be sent to it."""
        return self.ready if self.state == "ready" and not self.held else None

    @property
    def version(self) -> str:
        """The version that the host was brought to. The version in its load reports is older."""
        if self.ready is None:
            return self._settings.weight_version if self._settings.external is None else UNKNOWN_VERSION
        return self.ready.weight_version

    @property
    def in_flight(self) -> int:
        """The number of its calls and of the rows that it scores."""
        return self.calls.in_flight + self.scoring.in_flight

    @property
    def is_awaited(self) -> bool:
        """Whether the host waits for the server of an external engine. A server that is unfit is there, so it
        does not count.
        """
        return self.waiting is not None and not self.waiting.unfit

    @property
    def ranks(self) -> int:
        """The number of its GPUs; 1 on a CPU."""
        return max(1, len(self.process.gpus))

    def statistics(self) -> HostStatistics:
        load = self.load_report or Load(running=0, waiting=0, token_usage=0.0, weight_version=self.version)
        return HostStatistics(
            index=self.index,
            state=self.state,
            pid=self.process.pid,
            gpus=self.process.gpus,
            in_flight=self.in_flight,
            running=load.running,
            waiting=load.waiting,
            token_usage=load.token_usage,
            restarts=self.restarts,
            weight_version=self.version,
            last_error=self.last_error,
            queued=self.calls.queue.waiting,
            queued_sessions=self.calls.queue.waiting_sessions,
            residency=self.residents.statistics,
            url=None if self._settings.external is None else self._settings.external.urls[self.index],
            **self.calls.drafts,
        )
