"""All engine hosts as one engine: `open_engines` starts and ends them, `Engines` sends each call where its prefix is.

Rule for whoever edits it: the hosts are a service and outlive their users, so their tasks run in a shielded scope that this module cancels
after the body; what they do on their way out is bounded in `host.py`.
"""

import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import trio
from attrs import define, field, frozen

from polarnode.engine_host.protocol import Continue, Done, Pause, PauseMode, Ready, ToHost, UpdateWeights
from polarnode.errors import EngineError
from polarnode.ports import Chunk, GenerateOrder
from polarnode.shell.engine.calls import check_order, to_generate
from polarnode.shell.engine.host import HOST_PROGRAM, Host, Loaded
from polarnode.shell.engine.routing import Router
from polarnode.shell.engine.scratch import sweep
from polarnode.shell.engine.settings import EngineSettings, check, gpu_groups
from polarnode.shell.engine.statistics import EngineStatistics

WAIT_FOR_HOST = (
    300.0  # seconds a call waits while every host restarts: a 70 GB model loads in two to four minutes, and the proxy keeps harnesses warm
)
SIMULATED_PROGRAM = (*HOST_PROGRAM[:-1], "polarnode.engine_host.simulated")
PORTS = range(22_000, 30_000)  # below Linux's ephemeral range, where an outgoing connection could take a port between our look and its use


@frozen(kw_only=True)
class HostUpdate:
    """What one host said to new weights; `seconds` includes the pause."""

    index: int
    ok: bool
    message: str
    seconds: float


@frozen(kw_only=True)
class WeightUpdate:
    """What all hosts said. A host that could not load keeps serving the weights it had, and its tokens say so."""

    version: str
    hosts: tuple[HostUpdate, ...]

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.hosts)


@define(eq=False)
class Engines:
    """Satisfies `ports.Engine`. Made by `open_engines` only."""

    _hosts: tuple[Host, ...] = ()
    _router: Router = field(factory=Router)
    _changed: trio.Event = field(factory=trio.Event)
    _paused: PauseMode | None = None
    _kind: Literal["sglang", "simulated"] = "sglang"

    @property
    def vocab_size(self) -> int:
        """Ids the model takes are 0 to this less one."""
        return self._first().vocab_size

    @property
    def context_length(self) -> int:
        """Tokens one request may hold, prompt and sample together: the model's context or the KV cache of the smallest host."""
        return min(host.ready.capacity for host in self._hosts if host.ready is not None)

    @property
    def routes(self) -> bool:
        """Whether the experts that read each token can be told."""
        return self._first().experts is not None

    def statistics(self) -> EngineStatistics:
        hosts = tuple(host.statistics() for host in self._hosts)
        serving = [each for each in hosts if each.state == "ready"] or list(hosts)
        return EngineStatistics(
            hosts=hosts,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            weight_version=serving[0].weight_version,
            paused=self._paused,
            kind=self._kind,
        )

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Sample. Leaving the block in any way ends the generation in the engine.

        Raises ContextTooLong for a prompt that leaves no room, EngineError for ids outside the vocabulary and when no host serves within
        WAIT_FOR_HOST; iterating raises EngineError as soon as the host that serves this call dies.
        """
        check_order(order, vocab_size=self.vocab_size, context_length=self.context_length, routes=self.routes)
        host = await self._choose(order.affinity)
        call = host.begin(to_generate(order, context_length=self.context_length))
        try:
            yield call
        finally:
            host.end(call)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling everywhere: freeze requests with their cache, send them back to the queue, or abort them. New ones wait for `resume`."""
        self._remember_pause(mode)
        _insist(await self._ask_all(lambda call: Pause(call=call, mode=mode)), "pause")

    async def resume(self) -> None:
        self._remember_pause(None)
        _insist(await self._ask_all(lambda call: Continue(call=call)), "resume")

    async def update_weights_from_disk(self, path: Path, version: str, mode: PauseMode = "in_place") -> WeightUpdate:
        """Serve the checkpoint under `path` from now on, as `version`; requests in flight are treated as by a pause of `mode`.

        Hosts that restart later load it again before they serve, so it must stay where it is. Raises EngineError when no host serves.
        """
        if not path.is_absolute():
            raise EngineError(f"{path}: name the checkpoint by an absolute path, the hosts work in folders of their own", retryable=False)
        wanted = Loaded(str(path), version)
        started = trio.current_time()
        answers = await self._ask_all(lambda call: UpdateWeights(call=call, path=wanted.path, version=version, mode=mode))
        if not answers:
            raise EngineError("no engine host serves at present: update the weights again once one does")
        for host in self._hosts:
            if host.index not in answers or answers[host.index].ok:
                host.loaded = wanted
        seconds = trio.current_time() - started
        return WeightUpdate(
            version=version,
            hosts=tuple(HostUpdate(index=index, ok=said.ok, message=said.message, seconds=seconds) for index, said in answers.items()),
        )

    # ── inside ────────────────────────────────────────────────────────────────

    def note_change(self) -> None:
        """A host's state changed: wake whoever waits for one."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_started(self) -> None:
        """Until every host serves. Raises EngineError with the first failure's remedy."""
        while any(host.state != "ready" for host in self._hosts):
            for host in self._hosts:
                if host.state == "failed":
                    raise EngineError(f"engine host {host.index} did not start: {host.last_error}", retryable=False)
            await self._changed.wait()

    async def _choose(self, affinity: str) -> Host:
        with trio.move_on_after(WAIT_FOR_HOST):
            while not (loads := {host.index: host.in_flight for host in self._hosts if host.state == "ready"}):
                if all(host.state == "failed" for host in self._hosts):
                    raise EngineError(f"every engine host keeps dying and was given up: {self._hosts[0].last_error}", retryable=False)
                await self._changed.wait()
            return self._hosts[self._router.choose(affinity, loads)]
        raise EngineError(f"no engine host served within {WAIT_FOR_HOST:.0f} s: {self._hosts[0].last_error}")

    async def _ask_all(self, make: Callable[[int], ToHost]) -> dict[int, Done]:
        """The answers of all hosts that serve. Leaving early drops the answers; the hosts still do as told."""
        answers: dict[int, Done] = {}

        async def ask(host: Host) -> None:
            answers[host.index] = await host.ask(make)

        async with trio.open_nursery() as nursery:
            for host in self._hosts:
                if host.state == "ready":
                    nursery.start_soon(ask, host)
        return answers

    def _remember_pause(self, mode: PauseMode | None) -> None:
        self._paused = mode
        for host in self._hosts:
            host.paused = mode

    def _first(self) -> Ready:
        return next(host.ready for host in self._hosts if host.ready is not None)


@asynccontextmanager
async def open_engines(settings: EngineSettings) -> AsyncIterator[Engines]:
    """Start every host of `settings`, give them once all serve, end them after the block: no process, semaphore or file is left.

    Raises EngineError naming the setting to change, the log, and its last meaningful line. A host that dies later is restarted alone.
    """
    async with open_hosts(settings, program=HOST_PROGRAM if settings.simulated is None else SIMULATED_PROGRAM) as engines:
        yield engines


@asynccontextmanager
async def open_hosts(settings: EngineSettings, *, program: tuple[str, ...]) -> AsyncIterator[Engines]:
    """`open_engines` with any program that speaks `engine_host/protocol.py`."""
    check(settings)
    sweep()
    engines = Engines(kind="sglang" if settings.simulated is None else "simulated")
    ports = _Ports()
    engines._hosts = tuple(
        Host(index=index, gpus=gpus, settings=settings, ports=ports.take, environment=os.environ, on_change=engines.note_change, program=program)
        for index, gpus in enumerate(gpu_groups(settings))
    )
    ours: list[BaseException] = []
    try:
        async with trio.open_nursery() as nursery:
            service = trio.CancelScope(shield=True)  # bounded by the body: cancelled right after it, whatever happened there
            nursery.start_soon(_serve, engines._hosts, service)
            try:
                await engines.wait_started()
                yield engines
            except BaseException as error:
                ours.append(error)
                raise
            finally:
                service.cancel()
    except BaseExceptionGroup as group:
        if list(group.exceptions) == ours:  # the body's own error and no bug beside it: callers need not know there is a nursery
            raise ours[0] from ours[0].__cause__
        raise


async def _serve(hosts: tuple[Host, ...], service: trio.CancelScope) -> None:
    with service:
        async with trio.open_nursery() as nursery:
            for host in hosts:
                nursery.start_soon(host.run)


@define(eq=False)
class _Ports:
    """Ports for torch's rendezvous, each given once: hosts that start together must not race for one."""

    _given: set[int] = field(factory=set)

    def take(self) -> int:
        for port in random.sample(PORTS, len(PORTS)):
            if port not in self._given and _is_free(port):
                self._given.add(port)
                return port
        raise EngineError(f"no free port from {PORTS.start} to {PORTS.stop}: end what holds them")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _insist(answers: dict[int, Done], what: str) -> None:
    for index, answer in answers.items():
        if not answer.ok:
            raise EngineError(f"engine host {index} could not {what}: {answer.message}")
