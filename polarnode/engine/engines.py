"""All engine hosts as one engine: `open_engines` starts and ends them, `Engines` routes each call to a host.

The hosts are a service and outlive their users: their tasks run in a shielded scope that is cancelled after
the body of `open_engines`. What they do on their way out is bounded in `host_process.py`.
"""

import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import trio
from attrs import define, field

from polarnode.core.errors import Conflict, EngineError, Refused
from polarnode.core.ports import Chunk, GenerateOrder, RowScores, ScoreOrder
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.core.weights import PauseMode, UpdateMode
from polarnode.engine.adapters import EngineAdapters
from polarnode.engine.calls import Call, check_order
from polarnode.engine.host import Host, HostAdapters, Loaded
from polarnode.engine.host_process import HostProcess
from polarnode.engine.host_resources import sweep
from polarnode.engine.protocol import Continue, Done, LoadDisk, Pause, Ready
from polarnode.engine.residents import MoveDeadline
from polarnode.engine.routing import EngineKind, EngineStatistics, Router, followed
from polarnode.engine.scoring import ATTEMPTS, check_score
from polarnode.engine.settings import EngineSettings, ExternalEngine, check, gpu_groups
from polarnode.engine.update import ALIVE_STATES, MessageMaker, Update

# Seconds that a call waits while every host restarts: a 70 GB model loads in two to four minutes, and
# keep-alives hold the harness's connection open meanwhile.
HOST_WAIT_S = 300.0
NO_ENGINE = "this node has no engine (--engine none): ask a node that has one"
VERSIONS = 4096  # weight versions remembered; no trainer uses samples that are this many updates old
HOST_PROGRAM = (sys.executable, "-P", "-m", "polarnode.engine.embedded")
SIMULATED_PROGRAM = (*HOST_PROGRAM[:-1], "polarnode.engine.simulated")
EXTERNAL_PROGRAM = (*HOST_PROGRAM[:-1], "polarnode.engine.external")
# The ports lie below Linux's ephemeral range, where an outgoing connection could take a port between our look
# and its use.
PORTS = range(22_000, 30_000)


@define(eq=False)
class Engines:
    """Satisfies `ports.Engine`. Only `open_engines` makes it."""

    _hosts: tuple[Host, ...] = ()
    _router: Router = field(factory=Router)
    _changed: trio.Event = field(factory=trio.Event)
    _paused: PauseMode | None = None
    _kind: EngineKind = "sglang"
    _external: ExternalEngine | None = None
    _versions: list[str] = field(factory=list)
    _update: Update | None = None
    _ports: set[int] = field(factory=set)
    adapters: EngineAdapters = field(factory=EngineAdapters)

    @property
    def ports(self) -> Collection[int]:
        """Ports of this machine that its hosts listen at. The collection grows as they are taken."""
        return self._ports

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to this number minus one."""
        return self._first().vocab_size if self._external is None else self._external.vocab_size

    @property
    def context_length(self) -> int:
        """Tokens that one request may hold, prompt and sample together: the model's context or the KV cache
        of the smallest host.
        """
        found = (host.ready.capacity for host in self._hosts if host.ready is not None)
        return min(found) if self._external is None else min(found, default=self._external.context_length)

    @property
    def versions(self) -> tuple[str, ...]:
        """The weights that were served since the node started, oldest first; the last is served now. The
        version is unknown where no server of an external engine has answered.
        """
        return tuple(self._versions) or (UNKNOWN_VERSION,)

    @property
    def routes(self) -> bool:
        """Whether the engine reports the routed experts of each token."""
        return (self._external or self._first()).experts is not None

    @property
    def drafts(self) -> str:
        """The algorithm by which a host drafts tokens; empty where none does."""
        return next((host.ready.drafts for host in self._hosts if host.ready and host.ready.drafts), "")

    def statistics(self) -> EngineStatistics:
        hosts = tuple(host.statistics() for host in self._hosts)
        return EngineStatistics(
            hosts=hosts,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            weight_version=self.versions[-1],
            paused=self._paused,
            kind=self._kind,
        )

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Sample. Entering the block waits for the session's turn (`routing.FairQueue`), and for the adapter
        where the engine has not loaded it. Leaving the block in any way ends the generation in the engine.

        Raises ContextTooLong for a prompt that leaves no room. Raises EngineError for ids outside the
        vocabulary, for an unknown adapter, and when no host serves within HOST_WAIT_S. Iterating raises
        EngineError as soon as the host that serves this call dies.
        """
        check_order(
            order,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            routes=self.routes,
            drafts=self.drafts,
        )
        async with self.adapters.leased(order.adapter) as version:
            call: Call | None = None
            while call is None:  # a host that dies before it has taken the call is replaced by another one
                host = await self._choose(
                    order.affinity, lambda host: host.calls.queue.before(order.affinity)
                )
                call = await host.calls.begin(order, context_length=self.context_length, adapter=version)
            try:
                yield call
            finally:
                host.calls.end(call)

    # ── sessions ──────────────────────────────────────────────────────────────

    def begin_session(
        self, session: str, kind: str, group: str, credit: MoveDeadline, *, waits: bool = True
    ) -> str | None:
        """Give a session its place in the cache of an engine. Returns why there is none, or None if it has
        one. A host that has a session of its group is best, then the host with the most room. `kind` groups
        sessions that grow alike. `credit` moves the session's deadline while its calls are held. A session
        that does not wait begins on the best host without a place: its calls are held as those of a displaced
        session.

        Every session may begin if no host serves, or if the capacity of some host is unknown.
        """
        ready = [host for host in self._hosts if host.state == "ready"]
        if not ready or any(host.residents.machine is None for host in ready):
            return None
        now = trio.current_time()
        ranked = sorted(ready, key=lambda host: host.residents.rank(group))
        for host in ranked:
            if host.residents.may_begin(kind, group, now):
                host.residents.begin(session, kind, group, credit)
                return None
        if not waits:
            ranked[0].residents.begin(session, kind, group, credit, resident=False)
            return None
        return "engine: its cache has no room for what another session would become"

    def end_session(self, session: str) -> None:
        """Give back a session's place, on whichever host it has one. Nothing happens if it has none."""
        for host in self._hosts:
            host.residents.over(session)

    async def score(self, order: ScoreOrder) -> RowScores:
        """Score a row (`scoring.ScoreTurns`). Leaving early ends it in the engine.

        Raises Refused for a row that the engine cannot read. Raises EngineError when no host serves within
        HOST_WAIT_S, and after ATTEMPTS at a row.
        """
        check_score(order, vocab_size=self.vocab_size, context_length=self.context_length)
        failures = 0
        async with self.adapters.leased(order.adapter) as version:
            while True:
                host = await self._choose("", lambda host: host.scoring.turns.waiting)
                try:
                    if (scores := await host.scoring.score(order, version)) is not None:
                        return scores
                except EngineError as error:
                    failures += 1
                    if not error.retryable or failures == ATTEMPTS:
                        raise

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling everywhere. The mode says what happens to requests: they are frozen with their cache,
        sent back to the queue, or aborted. New ones wait for `resume`.
        """
        self._remember_pause(mode)
        _require(await self._send_all(lambda call, _: Pause(call=call, mode=mode)), "pause")

    async def resume(self) -> None:
        self._remember_pause(None)
        _require(await self._send_all(lambda call, _: Continue(call=call)), "resume")

    @asynccontextmanager
    async def updating(self, mode: UpdateMode) -> AsyncIterator[Update]:
        """Change the weights of all hosts: load, check and commit within the block. If it is left without a
        commit, the old weights are served again.

        New calls wait meanwhile. Raises Refused for weights that a host would not take, and EngineError when
        a host died or for a second update at once. Raises Conflict while there are adapters.
        """
        self.adapters.require_none()
        if self._update is not None:
            raise EngineError("the weights are being updated: one update at a time")
        update = self._update = Update(everyone=self._hosts, mode=mode, before=self._paused)
        self._hold(True)
        try:
            await update.begin(
                lambda: not any(host.in_flight for host in update.hosts), lambda: self._changed
            )
            yield update
        finally:
            with trio.CancelScope(shield=True):  # bounded: each of the two steps by STEP_S
                if not update.committed:
                    await update.roll_back()
            self._update = None
            self._hold(False)
            self.note_change()

    async def update_weights_from_disk(
        self, path: Path, version: str, mode: UpdateMode = "in_place", *, files: str = ""
    ) -> Update:
        """Serve the checkpoint under `path` from now on, as `version`. Hosts that restart later load it again
        before they serve.
        """
        if not path.is_absolute():
            raise Refused(
                f"{path}: name the checkpoint by an absolute path, the hosts work in folders of their own",
                path="$.source.path",
            )
        async with self.updating(mode) as update:
            await update.load(lambda call, _: LoadDisk(call=call, path=str(path)))
            await update.check()
            await self.commit(update, Loaded(version=version, path=str(path), files=files))
        return update

    async def commit(self, update: Update, loaded: Loaded) -> None:
        """Make the weights that `update` loaded and checked the node's weights."""
        self._versions = [*self._versions[1 - VERSIONS :], loaded.version]
        with trio.CancelScope(shield=True):  # bounded by STEP_S; a commit may not stop half-way
            await update.commit(loaded)
        for host in self._hosts:
            host.residents.cold()

    @property
    def is_own(self) -> bool:
        """Whether the node itself changes the weights. Those of an external engine are its owner's to
        change.
        """
        return self._external is None

    def require_own(self) -> None:
        """Raise Conflict if the weights and the memory are those of an external engine, which its owner
        changes, or if there is no engine.
        """
        if self._kind == "none":
            raise Conflict(NO_ENGINE)
        if self._external is not None:
            raise Conflict(
                "the engine is external (--engine): update its weights and lend its memory at its own"
                f" servers, {', '.join(self._external.urls)}, and name each update with weight_version"
            )

    async def order(self, make: MessageMaker) -> None:
        """Send an order to every host. Raises EngineError, which names the hosts that failed. This is for
        orders that are no update: process groups that receive weights, and memory.
        """
        hosts = [host for host in self._hosts if host.state in ALIVE_STATES]
        answers = await self._send_all(make, hosts)
        if failed := "; ".join(
            f"engine host {index}: {answer.message}" for index, answer in answers.items() if not answer.ok
        ):
            raise EngineError(failed, retryable=False)

    @property
    def ranks(self) -> int:
        """GPUs of each host; 1 on a CPU, 0 without any host."""
        return self._hosts[0].ranks if self._hosts else 0

    @property
    def restarts(self) -> tuple[int, ...]:
        """How often each host was restarted."""
        return tuple(host.restarts for host in self._hosts)

    def note_change(self) -> None:
        """Wake the tasks that wait for a host, and send the calls that wait at one. A host calls this when
        its state changes.
        """
        if self._external is not None:
            serving = [host.version for host in self._hosts if host.state == "ready"]
            self._versions = followed(self._versions, serving)
        self.adapters.wake()
        self._changed.set()
        self._changed = trio.Event()
        for host in self._hosts:
            host.calls.admit()

    async def wait_started(self) -> None:
        """Wait until every host serves; for an external engine, until each server was reached or is waited
        for. Raises EngineError with the remedy of the first failure.
        """
        while any(host.state not in ALIVE_STATES and not host.is_awaited for host in self._hosts):
            for host in self._hosts:
                if host.state == "failed" or (host.waiting is not None and host.waiting.unfit):
                    raise EngineError(
                        f"engine host {host.index} did not start: {host.last_error}", retryable=False
                    )
            await self._changed.wait()

    async def _choose(self, affinity: str, load: Callable[[Host], int]) -> Host:
        """The host that serves a call, once there is one."""
        loads = self._loads(load)
        if not loads:  # a scope for each call would cost it 20 us
            loads = await self._wait_for_loads(load)
        resident = next((host.index for host in self._hosts if host.residents.has(affinity)), None)
        return self._hosts[self._router.choose(affinity, loads, resident)]

    def _loads(self, load: Callable[[Host], int]) -> dict[int, int]:
        """The load of each host that serves. It is empty while weights are updated."""
        if self._update is not None:
            return {}
        return {host.index: load(host) for host in self._hosts if host.state == "ready"}

    async def _wait_for_loads(self, load: Callable[[Host], int]) -> dict[int, int]:
        with trio.move_on_after(HOST_WAIT_S) as patience:
            while not (loads := self._loads(load)):
                if not self._hosts:
                    raise EngineError(NO_ENGINE, retryable=False)
                if all(host.state == "failed" for host in self._hosts):
                    raise EngineError(
                        f"every engine host keeps dying and was given up: {self._hosts[0].last_error}",
                        retryable=False,
                    )
                # An update has a bound of its own, so its time does not count against the hosts.
                patience.deadline = (
                    inf
                    if self._update is not None
                    else min(patience.deadline, trio.current_time() + HOST_WAIT_S)
                )
                await self._changed.wait()
            return loads
        raise EngineError(f"no engine host served within {HOST_WAIT_S:.0f} s: {self._hosts[0].last_error}")

    async def _wait_settled(self) -> None:
        while self._update is not None:
            await self._changed.wait()

    async def _send_all(self, make: MessageMaker, hosts: Iterable[Host] | None = None) -> dict[int, Done]:
        """The answers of all serving hosts. Leaving early drops the answers, but the hosts still carry out
        the order.
        """
        answers: dict[int, Done] = {}

        async def ask(host: Host) -> None:
            answers[host.index] = await host.process.ask(lambda call: make(call, host.index))

        async with trio.open_nursery() as nursery:
            for host in (
                [host for host in self._hosts if host.state in ALIVE_STATES] if hosts is None else hosts
            ):
                nursery.start_soon(ask, host)
        return answers

    def _hold(self, held: bool) -> None:
        for host in self._hosts:
            host.held = held

    def _remember_pause(self, mode: PauseMode | None) -> None:
        self._paused = mode
        for host in self._hosts:
            host.paused = mode

    def _first(self) -> Ready:
        return next(host.ready for host in self._hosts if host.ready is not None)


@asynccontextmanager
async def open_engines(settings: EngineSettings, *, loaded: Loaded | None = None) -> AsyncIterator[Engines]:
    """Start every host of `settings`, yield them once all serve, and end them after the block without leaving
    a process, semaphore or file.

    The weights `loaded` are served in place of those that the hosts start with. Raises EngineError that names
    the setting to change, the log, and the log's last meaningful line. A host that dies later is restarted
    alone.
    """
    program = HOST_PROGRAM
    if settings.simulated is not None:
        program = SIMULATED_PROGRAM
    elif settings.external is not None:
        program = EXTERNAL_PROGRAM
    async with open_hosts(settings, program=program, loaded=loaded) as engines:
        yield engines


@asynccontextmanager
async def open_hosts(
    settings: EngineSettings, *, program: tuple[str, ...], loaded: Loaded | None = None
) -> AsyncIterator[Engines]:
    """`open_engines` with any program that speaks `engine/protocol.py`."""
    check(settings)
    sweep()
    if settings.external is not None:
        kind: EngineKind = "external" if settings.external.urls else "none"
        engines = Engines(kind=kind, external=settings.external)
    else:
        engines = Engines(
            kind="sglang" if settings.simulated is None else "simulated",
            versions=[loaded.version if loaded else settings.weight_version],
        )
    engines.adapters = EngineAdapters(settings, lambda: engines.versions, lambda: engines._update is not None)
    ports = _PortPool(engines._ports)
    hosts: list[Host] = []
    for index, gpus in enumerate(gpu_groups(settings)):
        process = HostProcess(
            index=index,
            gpus=gpus,
            settings=settings,
            ports=ports.take,
            environment=os.environ,
            program=program,
        )
        hosts.append(
            Host(
                index=index,
                process=process,
                adapters=HostAdapters(index=index, kept=engines.adapters.kept, ask=process.ask),
                settings=settings,
                on_change=engines.note_change,
                settled=engines._wait_settled,
                loaded=loaded,
            )
        )
    engines._hosts = tuple(hosts)
    engines.adapters.hosts = engines._hosts
    ours: list[BaseException] = []
    try:
        async with trio.open_nursery() as nursery:
            # Bounded by the body: the scope is cancelled right after it, on success or failure.
            service = trio.CancelScope(shield=True)
            nursery.start_soon(_serve, engines, service)
            try:
                await engines.wait_started()
                yield engines
            except BaseException as error:
                ours.append(error)
                raise
            finally:
                service.cancel()
    except BaseExceptionGroup as group:
        # This is the body's own error with no bug beside it: callers need not know that there is a nursery.
        if list(group.exceptions) == ours:
            raise ours[0] from ours[0].__cause__
        raise


async def _serve(engines: Engines, service: trio.CancelScope) -> None:
    with service:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engines.adapters.tidy)
            for host in engines._hosts:
                nursery.start_soon(host.run)
                nursery.start_soon(host.residents.run)
                nursery.start_soon(host.residents.keep)


@define(eq=False)
class _PortPool:
    """Ports for torch's rendezvous, each used once, because hosts that start together must not race for
    one.
    """

    _taken: set[int]

    def take(self) -> int:
        for port in random.sample(PORTS, len(PORTS)):
            if port not in self._taken and _is_free(port):
                self._taken.add(port)
                return port
        raise EngineError(f"no free port from {PORTS.start} to {PORTS.stop}: end the programs that hold them")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _require(answers: dict[int, Done], what: str) -> None:
    for index, answer in answers.items():
        if not answer.ok:
            raise EngineError(f"engine host {index} could not {what}: {answer.message}")
