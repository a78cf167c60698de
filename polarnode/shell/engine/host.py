"""One engine host, for as long as the node lives: started, spoken to, mourned, started again.

Rule for whoever edits it: a host's calls end with it, at once and synchronously (`_bury`), before anything is awaited; all that is sent goes
through `post`, which never waits, so that an abort can be sent from any cleanup.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count

import trio
from attrs import define, evolve, field, frozen

from polarnode.engine_host.protocol import (
    Abort,
    Done,
    Failed,
    Fatal,
    FrameDecoder,
    FrameError,
    Generate,
    Load,
    Message,
    Pause,
    PauseMode,
    Piece,
    Ready,
    Routed,
    Shutdown,
    Start,
    ToHost,
    UpdateWeights,
    encode,
    encode_all,
)
from polarnode.errors import EngineError
from polarnode.shell.engine.calls import Call
from polarnode.shell.engine.diagnosis import Diagnosis, diagnose
from polarnode.shell.engine.routing import Deaths
from polarnode.shell.engine.scratch import Scratch, open_scratch
from polarnode.shell.engine.settings import EngineSettings, engine_arguments, host_environment
from polarnode.shell.engine.statistics import HostState, HostStatistics
from polarnode.shell.engine.wires import Wires, log_tail, open_log, open_wires
from polarnode.shell.processes import open_process_group

HOST_PROGRAM = (sys.executable, "-P", "-m", "polarnode.engine_host")
READ_SIZE = 1 << 18  # bytes: a frame of a thousand chunks in one system call
SHUTDOWN_GRACE = 25.0  # seconds for an engine to give its GPU memory back: its schedulers take up to 15, its process tree some more
LIFELINE_GRACE = 5.0  # seconds for a host that was cut off to end its children; after that its group is killed
FIRST_STARTS = 3  # tries of a first start that failed by chance (a port taken meanwhile); anything else is told at once

_log = logging.getLogger(__name__)


@frozen
class Loaded:
    """The weights a host should serve when they are not those it starts with."""

    path: str
    version: str


@define(eq=False)
class _Answer:
    event: trio.Event = field(factory=trio.Event)
    done: Done | None = None


@define(eq=False)
class Host:
    """The node's side of one engine host. `on_change` is called whenever `state` may have changed."""

    index: int
    gpus: tuple[int, ...]
    _settings: EngineSettings
    _ports: Callable[[], int]
    _environment: Mapping[str, str]
    _on_change: Callable[[], None]
    _program: tuple[str, ...]
    state: HostState = "starting"
    ready: Ready | None = None
    loaded: Loaded | None = None
    paused: PauseMode | None = None
    last_error: str | None = None
    restarts: int = 0
    _pid: int | None = None
    _load: Load | None = None
    _calls: dict[str, Call] = field(factory=dict)
    _answers: dict[int, _Answer] = field(factory=dict)
    _numbers: "count[int]" = field(factory=count)
    _outbox: list[Message] = field(factory=list)
    _wake: trio.Event = field(factory=trio.Event)
    _last_words: str | None = None
    _served: bool = False  # this life came as far as serving
    _deaths: Deaths = field(factory=Deaths)

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def statistics(self) -> HostStatistics:
        load = self._load or Load(running=0, waiting=0, token_usage=0.0, weight_version=self._version())
        return HostStatistics(
            index=self.index,
            state=self.state,
            pid=self._pid,
            gpus=self.gpus,
            in_flight=self.in_flight,
            running=load.running,
            waiting=load.waiting,
            token_usage=load.token_usage,
            restarts=self.restarts,
            weight_version=self._version(),
            last_error=self.last_error,
        )

    def begin(self, order: Generate) -> Call:
        """Send a generation; only while ready."""
        if order.rid in self._calls:
            raise EngineError(f"request id {order.rid} is in use: every generation needs its own", retryable=False)
        call = self._calls[order.rid] = Call(rid=order.rid)
        self.post(order)
        return call

    def end(self, call: Call) -> None:
        """The consumer left. The call stays counted until the host has said its last of it."""
        call.close()
        if not call.over and self._calls.get(call.rid) is call:
            self.post(Abort(rid=call.rid))

    async def ask(self, make: Callable[[int], ToHost]) -> Done:
        """Send a control message and wait for its answer. A host that dies meanwhile answers so; leaving early only drops the answer."""
        number = next(self._numbers)
        answer = self._answers[number] = _Answer()
        self.post(make(number))
        try:
            await answer.event.wait()
        finally:
            self._answers.pop(number, None)
        return answer.done or Done(call=number, ok=False, message=self.last_error or "the engine host died")

    def post(self, message: ToHost) -> None:
        """Queue a message. Bounded by two for each call in flight, and those are bounded by the sessions the node runs."""
        self._outbox.append(message)
        self._wake.set()

    # ── its lives ─────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keep a host alive until cancelled, or until it is given up. Raises nothing but bugs."""
        while True:
            self._bury(await self._live())
            delay = self._deaths.note(trio.current_time())
            if delay is None or self._hopeless():
                self._change("failed")
                return
            await trio.sleep(delay)
            self.restarts += 1
            self._change("starting")

    def _hopeless(self) -> bool:
        """A first start that fails is a setting to change, not a host to restart; but for a port that was taken meanwhile."""
        by_chance = self._diagnosis().chance and self.restarts + 1 < FIRST_STARTS
        return self.ready is None and not by_chance

    async def _live(self) -> str:
        """One life, from start to end; returns the sentence on its grave."""
        self._last_words, self._served, self._outbox = None, False, []
        try:
            with open_scratch() as scratch, open_log(self._settings.log_path(self.index)) as log, open_wires() as wires:
                command = [*self._program, "--tag", scratch.tag, *wires.arguments()]
                async with open_process_group(
                    command, env=self._host_environment(scratch), cwd=scratch.path, stdout=log, pass_fds=wires.theirs()
                ) as process:
                    self._pid = process.pid
                    wires.close_theirs()
                    await self._converse(process, wires)
        except (OSError, EngineError) as error:
            return f"the engine host could not be started: {error}"
        return self._reason(process.returncode)

    async def _converse(self, process: trio.Process, wires: Wires) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(wires.ours))
        self.post(Start(arguments=engine_arguments(self._settings, nccl_port=self._ports())))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, stream)
                await self._receive(stream, nursery)
                nursery.cancel_scope.cancel()
        finally:
            asked = self.state == "ready" and self._last_words is None
            with trio.move_on_after(SHUTDOWN_GRACE if asked else LIFELINE_GRACE, shield=True):
                if asked:
                    await _ask_to_end(stream)
                else:
                    wires.cut()  # it is not listening
                await process.wait()  # what is left after that, `open_process_group` kills

    async def _send(self, stream: trio.SocketStream) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            messages, self._outbox = self._outbox, []
            for frame in encode_all(messages):
                try:
                    await stream.send_all(frame)
                except trio.BrokenResourceError:
                    return  # the reader sees the end too, and ends this life

    async def _receive(self, stream: trio.SocketStream, nursery: trio.Nursery) -> None:
        """Until the host is gone: its end of the socket closes with it, whatever ended it."""
        decoder = FrameDecoder()
        while True:
            try:
                data = await stream.receive_some(READ_SIZE)
                messages = decoder.feed(data)
            except (trio.BrokenResourceError, FrameError) as error:
                self._last_words = self._last_words or f"{type(error).__name__}: {error}"
                return
            if not data:
                return
            for message in messages:
                self._handle(message, nursery)

    def _handle(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case Piece(rid=rid) | Routed(rid=rid):
                if (call := self._calls.get(rid)) is not None:
                    call.take(message)
                    if call.over:
                        del self._calls[rid]
            case Failed(rid=rid, message=text, retryable=retryable):
                if rid in self._calls:
                    self._calls.pop(rid).fail(EngineError(f"the engine refused the request: {text}", retryable=retryable))
            case Done(call=number):
                if number in self._answers:
                    self._answers[number].done = message
                    self._answers[number].event.set()
            case Load():
                self._load = message
            case Ready():
                nursery.start_soon(self._welcome, message, nursery)
            case Fatal(message=text):
                self._last_words = text
            case _:
                raise FrameError(f"the host may not say {type(message).__name__}")

    async def _welcome(self, ready: Ready, nursery: trio.Nursery) -> None:
        """A host that came back must first hold the weights and the pause of the one it replaces."""
        if (loaded := self.loaded) is not None:
            order = await self.ask(lambda call: UpdateWeights(call=call, path=loaded.path, version=loaded.version, mode="abort"))
            if not order.ok:
                self._last_words = f"weights {loaded.version} under {loaded.path} can not be loaded again: {order.message}"
                nursery.cancel_scope.cancel()
                return
            ready = evolve(ready, weight_version=loaded.version)
        if (mode := self.paused) is not None:
            await self.ask(lambda call: Pause(call=call, mode=mode))
        self.ready, self._served = ready, True
        self._change("ready")

    # ── its end ───────────────────────────────────────────────────────────────

    def _bury(self, reason: str) -> None:
        """End every call and every question of this life, synchronously."""
        self.last_error, self._pid, self._load = reason, None, None
        while self._calls:
            self._calls.popitem()[1].fail(EngineError(f"engine host {self.index} died: {reason}"))
        for answer in self._answers.values():
            answer.event.set()
        _log.error("engine host %d died: %s", self.index, reason)
        self._change("dead")

    def _reason(self, returncode: int | None) -> str:
        found = self._diagnosis()
        if not self._served:
            return f"{found.line}; {found.advice} (log: {self._settings.log_path(self.index)})"
        return f"{self._last_words or f'exit status {returncode}'} (log: {self._settings.log_path(self.index)})"

    def _diagnosis(self) -> Diagnosis:
        return diagnose(log_tail(self._settings.log_path(self.index)), self._last_words)

    def _change(self, state: HostState) -> None:
        self.state = state
        self._on_change()

    def _version(self) -> str:
        if self._load is not None:
            return self._load.weight_version
        return self.ready.weight_version if self.ready is not None else self._settings.weight_version

    def _host_environment(self, scratch: Scratch) -> dict[str, str]:
        return host_environment(self._settings, gpus=self.gpus, scratch=scratch.path, base=self._environment)


async def _ask_to_end(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it may be dying already
        await stream.send_all(encode(Shutdown()))
