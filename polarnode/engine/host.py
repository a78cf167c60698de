"""One engine host for the lifetime of the node: start its child process, exchange messages with it, restart
it.

Every message is sent through `post`, which never waits, so that an abort can be sent from any cleanup. When
the process dies, its calls and questions end immediately and synchronously (`_on_exit`), before anything is
awaited, so that no task waits for a process that is gone. A host that comes back serves the node's weights or
nothing. Weights that cannot be loaded again (tensors of a trainer, a folder that was overwritten) are waited
for, never guessed.
"""

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.core.ports import GenerateOrder, RowScores, ScoreOrder
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.core.weights import PauseMode
from polarnode.engine.calls import Call, to_generate
from polarnode.engine.checkpoints import fingerprint
from polarnode.engine.diagnosis import Diagnosis, diagnose
from polarnode.engine.drafts import COUNTED
from polarnode.engine.host_resources import HostWires, log_tail, open_log, open_scratch, open_wires
from polarnode.engine.protocol import (
    Abort,
    CommitUpdate,
    Done,
    Failed,
    Forget,
    FrameDecoder,
    FrameError,
    HostFatal,
    Load,
    LoadAdapter,
    LoadDisk,
    Message,
    Pause,
    Piece,
    Ready,
    RoutedRows,
    RowLogprobs,
    ScoreTokens,
    Shutdown,
    Start,
    ToHost,
    UnloadAdapter,
    Waiting,
    encode,
    encode_frames,
)
from polarnode.engine.questions import PendingReplies
from polarnode.engine.residents import ResidencyGate
from polarnode.engine.routing import SAMPLED, FairQueue, HostDeaths, HostState, HostStatistics
from polarnode.engine.scoring import ScoreCall, ScoreTurns
from polarnode.engine.settings import EngineSettings, engine_arguments, host_environment
from polarnode.support.concurrency import open_process_group

logger = logging.getLogger(__name__)


@define(eq=False)
class _WaitingOrder:
    """A generation that waits for its turn. When `decided` is set, `call` is set too, or it stays None
    because the host died.
    """

    order: GenerateOrder
    context_length: int
    adapter: str
    call: Call | None = None
    decided: trio.Event = field(factory=trio.Event)


Ask = Callable[[Callable[[int], ToHost]], Awaitable[Done]]


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


async def load_target(target: Callable[[], Loaded | None], ask: Ask) -> Loaded | None:
    """Load the target weights until they are the ones loaded, because the target may change meanwhile.

    Raises Stale when they are gone, and EngineError when they do not load.
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


HOST_PROGRAM = (sys.executable, "-P", "-m", "polarnode.engine.embedded")
READ_SIZE = 1 << 18  # bytes: a frame of a thousand chunks in one system call
# Seconds for an engine to give its GPU memory back: its schedulers take up to 15, and its process tree takes
# some more.
SHUTDOWN_GRACE = 25.0
# Seconds for a host that was cut off to end its children. After that its process group is killed.
LIFELINE_GRACE = 5.0
# Tries of a first start that failed by chance, such as when a port was taken meanwhile. Any other failure is
# reported at once.
MAX_FIRST_STARTS = 3

_log = logging.getLogger(__name__)


@define(eq=False)
class Host:
    """The node's side of one engine host. `on_change` is called whenever `state` may have changed, and when a
    call of an adapter is over. `settled` returns when no weights change. `kept` are the versions of adapters
    that the host must hold to serve, and `adapters` those that it holds.
    """

    index: int
    gpus: tuple[int, ...]
    _settings: EngineSettings
    _ports: Callable[[], int]
    _environment: Mapping[str, str]
    _on_change: Callable[[], None]
    _settled: Callable[[], Awaitable[None]]
    _program: tuple[str, ...]
    _kept: Mapping[str, Path] = field(factory=dict)
    adapters: set[str] = field(factory=set)
    state: HostState = "starting"
    ready: Ready | None = None
    loaded: Loaded | None = None
    paused: PauseMode | None = None
    held: bool = False  # the weights change, so no call is sent
    last_error: str | None = None
    restarts: int = 0
    waiting: Waiting | None = None  # the last report that it waits for its server
    drafts: Counter[str] = field(factory=Counter)  # sums of the drafts that `Piece` counts
    _pid: int | None = None
    _load: Load | None = None
    scoring: ScoreTurns = field(init=False)
    _calls: dict[str, Call] = field(factory=dict)
    _scores: dict[str, ScoreCall] = field(factory=dict)
    _queue: "FairQueue[_WaitingOrder]" = field(factory=FairQueue)
    residents: ResidencyGate = field(init=False)
    _questions: PendingReplies = field(factory=PendingReplies)
    _outbox: list[Message] = field(factory=list)
    _wake: trio.Event = field(factory=trio.Event)
    _fatal_message: str | None = None
    _served: bool = False  # whether this process came as far as serving
    _process_scope: trio.CancelScope = field(factory=trio.CancelScope)
    _deaths: HostDeaths = field(init=False)

    @_deaths.default
    def _make_deaths(self) -> HostDeaths:
        return HostDeaths(gives_up=self._settings.external is None)

    @residents.default
    def _make_residents(self) -> ResidencyGate:
        return ResidencyGate(
            self.index,
            lambda name: self.post(Forget(session=name)),
            self._settings.sizes_path(self.index),
        )

    @scoring.default
    def _make_scoring(self) -> ScoreTurns:
        return ScoreTurns(samples=lambda: bool(self._calls or self._queue.waiting))

    @property
    def in_flight(self) -> int:
        """The number of its calls and of the rows that it scores."""
        return len(self._calls) + len(self._scores)

    @property
    def is_awaited(self) -> bool:
        """Whether the host waits for the server of an external engine. A server that is unfit is there, so it
        does not count.
        """
        return self.waiting is not None and not self.waiting.unfit

    @property
    def ranks(self) -> int:
        """The number of its GPUs; 1 on a CPU."""
        return max(1, len(self.gpus))

    def statistics(self) -> HostStatistics:
        load = self._load or Load(running=0, waiting=0, token_usage=0.0, weight_version=self.version)
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
            weight_version=self.version,
            last_error=self.last_error,
            queued=self._queue.waiting,
            queued_sessions=self._queue.waiting_sessions,
            residency=self.residents.statistics,
            url=None if self._settings.external is None else self._settings.external.urls[self.index],
            **self.drafts,
        )

    def before(self, session: str) -> int:
        """About how many calls a new one of this session has before it on this host."""
        return self._queue.before(session)

    async def begin(self, order: GenerateOrder, *, context_length: int, adapter: str = "") -> Call | None:
        """Send a generation when its session has its place in the cache and it is its turn. Returns None if
        the host died meanwhile. `adapter` is the version that samples.
        """
        if order.request_id in self._calls:
            raise EngineError(
                f"request id {order.request_id} is in use: every generation needs its own", retryable=False
            )
        if not await self.residents.enter(order):
            return None
        waiting, session = _WaitingOrder(order, context_length, adapter), order.affinity
        self._queue.add(session, waiting, tokens=_expected(order))
        self.admit()
        try:
            if not waiting.decided.is_set():
                await waiting.decided.wait()
        except trio.Cancelled:
            self._queue.withdraw(session, waiting, trio.current_time())
            if waiting.call is None:
                self.residents.left(order)
            else:
                self.end(waiting.call)
            raise
        return waiting.call

    def admit(self) -> None:
        """Send the calls whose turn it is."""
        while self.state == "ready" and not self.held:
            waiting = self._queue.take(trio.current_time())
            if waiting is None:
                return
            order = waiting.order
            waiting.call = self._calls[order.request_id] = Call(
                rid=order.request_id,
                vocab_size=None if self.ready is None else self.ready.vocab_size,
                top_logprobs=order.top_logprobs,
                session=order.affinity,
                chain=order.chain,
                sent=trio.current_time(),
                prompt_tokens=len(order.prompt),
                expected=_expected(order),
                adapter=waiting.adapter,
                whole=order.whole,
            )
            self.post(to_generate(order, context_length=waiting.context_length, adapter=waiting.adapter))
            waiting.decided.set()

    def end(self, call: Call) -> None:
        """The consumer left. The call stays counted until the host has sent its last message about it."""
        call.close()
        if not call.over and self._calls.get(call.rid) is call:
            self.post(Abort(rid=call.rid))

    async def score(self, order: ScoreOrder, adapter: str) -> RowScores | None:
        """Score a row when its turn has come, by a version of an adapter. Returns None if the host died
        before, or if its weights change. Raises EngineError when it dies meanwhile, or refuses the row.
        """
        async with self.scoring.turn():
            if self.state != "ready" or self.held:
                return None
            rid = order.request_id
            call = self._scores[rid] = ScoreCall(len(order.row) - order.start)
            self.post(ScoreTokens(rid=rid, row=order.row.tobytes(), start=order.start, adapter=adapter))
            try:
                return await call.result()
            finally:
                if not call.over:
                    self.post(Abort(rid=rid))

    async def ask(self, make: Callable[[int], ToHost]) -> Done:
        """Send a control message and wait for its answer. If the host dies meanwhile, the answer is a
        failure. Leaving early only drops the answer.
        """
        return await self._questions.ask(make, self.post) or Done(
            call=0, ok=False, message=self.last_error or "the engine host died"
        )

    async def load_adapter(self, version: str, folder: Path) -> Done:
        """Load a version of an adapter. `adapters` has it from then on."""
        done = await self.ask(lambda call: LoadAdapter(call=call, name=version, path=str(folder)))
        if done.ok:
            self.adapters.add(version)
        return done

    async def unload_adapter(self, version: str) -> Done:
        """Unload a version once the engine samples nothing by it. If it is loaded again meanwhile, it
        stays.
        """
        self.adapters.discard(version)
        return await self.ask(lambda call: UnloadAdapter(call=call, name=version))

    def samples_by(self, version: str) -> int:
        """The number of calls in the engine that sample by a version of an adapter."""
        return sum(call.adapter == version for call in self._calls.values())

    def restart_with_reason(self, reason: str) -> None:
        """End this process because its state is wrong. It is started again."""
        self._fatal_message = reason
        self._process_scope.cancel()

    def serve(self, version: str) -> None:
        """The host reported that it serves these weights now."""
        if self.ready is not None:
            self.ready = evolve(self.ready, weight_version=version)
            self._change("ready")

    def post(self, message: ToHost) -> None:
        """Queue a message. The queue is bounded by two messages for each call in flight, and the calls are
        bounded by the sessions that the node runs.
        """
        self._outbox.append(message)
        self._wake.set()

    # ── the process ───────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Keep a process running until cancelled, or until the host is given up. It raises nothing but
        bugs.
        """
        while True:
            self._on_exit(await self._run_process())
            delay = self._deaths.note(trio.current_time())
            if delay is None or self._is_hopeless():
                self._change("failed")
                return
            await trio.sleep(delay)
            self.restarts += 1
            self._change("starting")

    def _is_hopeless(self) -> bool:
        """Whether the first start failed for good, so that a setting must be changed. A port that was merely
        taken meanwhile does not count.
        """
        if self._settings.external is not None:
            return False
        by_chance = self._diagnose_log().chance and self.restarts + 1 < MAX_FIRST_STARTS
        return self.ready is None and not by_chance

    async def _run_process(self) -> str:
        """Run one process from start to end, and return the reason of its exit."""
        self._fatal_message, self._served, self._outbox, self.adapters = None, False, [], set()
        try:
            with (
                open_scratch() as scratch,
                open_log(self._settings.log_path(self.index)) as log,
                open_wires() as wires,
            ):
                command = [*self._program, "--tag", scratch.tag, *wires.arguments()]
                env = host_environment(
                    self._settings, gpus=self.gpus, scratch=scratch.path, base=self._environment
                )
                async with open_process_group(
                    command, env=env, cwd=scratch.path, stdout=log, pass_fds=wires.theirs()
                ) as process:
                    self._pid = process.pid
                    wires.close_host_ends()
                    await self._converse(process, wires)
        except (OSError, EngineError) as error:
            return f"the engine host could not be started: {error}"
        return self._reason(process.returncode)

    async def _converse(self, process: trio.Process, wires: HostWires) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(wires.ours))
        self.post(
            Start(arguments=engine_arguments(self._settings, nccl_port=self._ports(), index=self.index))
        )
        try:
            async with trio.open_nursery() as nursery:
                self._process_scope = nursery.cancel_scope
                nursery.start_soon(self._send, stream)
                await self._receive(stream, nursery)
                nursery.cancel_scope.cancel()
        finally:
            serving = self.state in ("ready", "stale") and self._fatal_message is None
            with trio.move_on_after(SHUTDOWN_GRACE if serving else LIFELINE_GRACE, shield=True):
                if serving:
                    await _shut_down(stream)
                else:
                    wires.cut()  # the host is not listening
                await process.wait()  # `open_process_group` kills what is left after that

    async def _send(self, stream: trio.SocketStream) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            messages, self._outbox = self._outbox, []
            for frame in encode_frames(messages):
                try:
                    await stream.send_all(frame)
                except trio.BrokenResourceError:
                    return  # the reader sees the end too, and ends this process

    async def _receive(self, stream: trio.SocketStream, nursery: trio.Nursery) -> None:
        """Receive until the host is gone. Its end of the socket closes with it in any case."""
        decoder = FrameDecoder()
        while True:
            try:
                data = await stream.receive_some(READ_SIZE)
                for message in decoder.feed(data):
                    self._handle(message, nursery)
            except (trio.BrokenResourceError, FrameError) as error:
                self._fatal_message = self._fatal_message or f"{type(error).__name__}: {error}"
                return
            if not data:
                return

    def _handle(self, message: Message, nursery: trio.Nursery) -> None:
        match message:
            case Piece(rid=rid) | RoutedRows(rid=rid):
                if isinstance(message, Piece) and message.verified:
                    self.drafts.update({name: getattr(message, name) for name in COUNTED})
                if (call := self._calls.get(rid)) is not None:
                    if call.take(message):
                        self.residents.read(call)
                    if call.over and (isinstance(message, RoutedRows) or message.finish is None):
                        # The call failed on this message, and the host goes on sampling.
                        self.post(Abort(rid=rid))
                    if call.over:
                        self._over(rid)
            case RowLogprobs(rid=rid):
                if (row := self._score_over(rid)) is not None:
                    row.take(message)
            case Failed(rid=rid, message=text, retryable=retryable):
                sentence = f"the engine refused the request: {text}"
                error = EngineError(sentence, retryable=retryable)
                if rid in self._calls:
                    self._over(rid).fail(EngineRefusal(sentence) if message.refused else error)
                elif (row := self._score_over(rid)) is not None:
                    row.fail(error)
            case Done():
                self._questions.answer(message)
            case Load():
                self._note_load(message)
            case Ready():
                nursery.start_soon(self._on_ready, message)
            case Waiting():
                self._note_waiting(message)
            case HostFatal(message=text):
                self._fatal_message = text
            case _:
                raise FrameError(f"the host may not send {type(message).__name__}")

    def _over(self, rid: str) -> Call:
        call = self._leave(rid)
        if call.adapter or not self._calls:
            # An update may wait for it, and the version of an adapter may not be needed any more.
            self._on_change()
        self.admit()
        return call

    def _score_over(self, rid: str) -> ScoreCall | None:
        call = self._scores.pop(rid, None)
        if not self.in_flight:
            self._on_change()  # an update may wait for it
        return call

    def _leave(self, rid: str) -> Call:
        call = self._calls.pop(rid)
        self._queue.ended(call.session, tokens=call.expected, served=call.served, now=trio.current_time())
        self.residents.ended(call)
        return call

    def _note_load(self, load: Load) -> None:
        self._load = load
        # The weights of an external engine are named by its owner.
        renamed = self.state == "ready" and load.weight_version != self.version
        if self._settings.external is not None and renamed:
            self.serve(load.weight_version)
        if self.paused is None and not self.held:  # otherwise its queue means nothing
            self._queue.report(running=load.running, waiting=load.waiting, most=load.max_running)
            self.admit()

    def _note_waiting(self, waiting: Waiting) -> None:
        """Record that the server of an external engine is not there, or does not fit."""
        self.last_error, self.waiting = waiting.message, waiting
        _log.warning("engine host %d waits for its server: %s", self.index, waiting.message)
        self._on_change()

    async def _on_ready(self, ready: Ready) -> None:
        """Bring a restarted host to the weights and the pause of the one it replaces."""
        await self._settled()
        try:
            loaded = await load_target(lambda: self.loaded, self.ask)
        except StaleWeights as stale:
            self.last_error, self.ready, self._served = str(stale), ready, True
            _log.error("engine host %d: %s", self.index, stale)
            self._change("stale")
            return
        except EngineError as error:
            self.restart_with_reason(str(error))
            return
        ready = ready if loaded is None else evolve(ready, weight_version=loaded.version)
        self._queue.tokens = ready.max_total_tokens
        if self._settings.has_residency:
            self.residents.open(ready.max_total_tokens + ready.host_tokens, ready.capacity)
        if (mode := self.paused) is not None:
            await self.ask(lambda call: Pause(call=call, mode=mode))
        await self._load_kept_adapters()
        self.ready, self._served, self.waiting = ready, True, None
        self._change("ready")

    async def _load_kept_adapters(self) -> None:
        """Load the adapters that the other hosts hold. An adapter whose files are gone fails only its own
        calls.
        """
        tried: set[str] = set()
        while missing := self._kept.keys() - self.adapters - tried:
            version = min(missing)
            tried.add(version)
            done = await self.load_adapter(version, self._kept[version])
            if not done.ok:
                _log.error("engine host %d lacks adapter version %s: %s", self.index, version, done.message)

    def _on_exit(self, reason: str) -> None:
        """End every call and every question of this process, synchronously. Calls that were never sent to it
        find another host.
        """
        self.last_error, self._pid, self._load = reason, None, None
        for rid in list(self._calls):
            self._leave(rid).fail(EngineError(f"engine host {self.index} died: {reason}"))
        for row in self._scores.values():
            row.fail(EngineError(f"engine host {self.index} died: {reason}"))
        self._scores.clear()
        self.residents.lost()
        for waiting in self._queue.empty(trio.current_time()):
            waiting.decided.set()
        self._questions.end()
        _log.error("engine host %d died: %s", self.index, reason)
        self._change("dead")

    def _reason(self, returncode: int | None) -> str:
        found = self._diagnose_log()
        if not self._served:
            return f"{found.line}; {found.advice} (log: {self._settings.log_path(self.index)})"
        reason = self._fatal_message or f"exit status {returncode}"
        return f"{reason} (log: {self._settings.log_path(self.index)})"

    def _diagnose_log(self) -> Diagnosis:
        log = log_tail(self._settings.log_path(self.index))
        return diagnose(log, self._fatal_message, cpu=self._settings.device == "cpu")

    def _change(self, state: HostState) -> None:
        if state != self.state:
            logger.info("engine host %d is %s, with weights %s", self.index, state, self.version)
        self.state = state
        self._on_change()

    @property
    def version(self) -> str:
        """The version that the host was brought to. The version in its load reports is older."""
        if self.ready is None:
            return self._settings.weight_version if self._settings.external is None else UNKNOWN_VERSION
        return self.ready.weight_version


def _expected(order: GenerateOrder) -> int:
    """The number of KV cache tokens that a request is expected to need."""
    return len(order.prompt) + min(order.sampling.max_tokens or SAMPLED, SAMPLED)


async def _shut_down(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it may be dying already
        await stream.send_all(encode(Shutdown()))
