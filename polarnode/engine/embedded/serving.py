"""What an engine host does while its engine serves: it obeys the node's messages and sends back what is
sampled.

Every request of the node gets exactly one end (a last `Piece`, or `Failed`), and every control call one
`Done`. All chunks that are ready leave in one frame. Orders for the whole engine are handled in `control.py`.
"""

import asyncio
import multiprocessing
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NoReturn

from attrs import define, field

from polarnode.engine.embedded.control import (
    CONSTRAINTS,
    Control,
    DraftTotals,
    Order,
    piece,
    request,
    routed,
    score_arguments,
    scored,
)
from polarnode.engine.protocol import (
    Abort,
    ExpertShape,
    Failed,
    Forget,
    FrameDecoder,
    Generate,
    HostFatal,
    Load,
    Message,
    Piece,
    ScoreTokens,
    Shutdown,
    ToNode,
    encode_frames,
)

# Seconds between looks at the scheduler's load, each a shared-memory read of some 20 us. Routing needs no
# finer figure.
LOAD_INTERVAL_S = 0.25
READ_SIZE = 1 << 16
LAST_WORDS = 2.0  # seconds to hand a last sentence to a node that may not be reading
# Seconds for schedulers to give their GPU memory back by themselves: SGLang's own figure for the same wait.
SCHEDULER_EXIT_S = 15.0


@define(eq=False)
class Serving:
    """One started engine and one connection to the node."""

    _engine: Any
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _decoder: FrameDecoder
    _control: Control
    _experts: ExpertShape | None = None
    _outbox: list[ToNode] = field(factory=list)
    _wake: asyncio.Event = field(factory=asyncio.Event)
    _calls: "dict[str, asyncio.Task[None]]" = field(factory=dict)
    _tasks: "set[asyncio.Task[None]]" = field(factory=set)

    async def run(self) -> None:
        """Serve until the node says Shutdown or closes the connection. Raises EngineDied when a process of
        the engine ends first.
        """
        self._control.resumed.set()
        died = self._watch_children()
        self._start(self._send())
        self._start(self._watch_load())
        obeying = self._start(self._obey())
        obeying.add_done_callback(lambda _: died.cancel())
        await asyncio.wait({died})
        if not died.cancelled():
            await self._send_last(died.result())
        obeying.result()
        await self._shut_down()

    def send(self, message: ToNode) -> None:
        """Queue a message. The queue is bounded by the requested tokens: the node takes frames as fast as the
        engine makes them, or the engine's work waits here.
        """
        self._outbox.append(message)
        self._wake.set()

    # ── the connection ────────────────────────────────────────────────────────

    async def _obey(self) -> None:
        while data := await self._reader.read(READ_SIZE):
            for message in self._decoder.feed(data):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Generate() | ScoreTokens():
                self._calls[message.rid] = self._start(self._generate(message))
            case Abort(rid=rid):
                if rid in self._calls:
                    # Before it was sent the request is dropped, and after it SGLang aborts it by its id.
                    self._calls[rid].cancel()
            case Forget(session=session):
                self._start(self._control.forget(session))
            case _:
                if not isinstance(message, Order):
                    raise ValueError(f"the node may not send {type(message).__name__} here")
                self._start(self._answer(message))

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._outbox = self._outbox, []
            for frame in encode_frames(messages):
                self._writer.write(frame)
            await self._writer.drain()

    def _start(self, work: "Coroutine[Any, Any, None]") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # asyncio itself keeps no strong reference to a task
        task.add_done_callback(self._tasks.discard)
        return task

    # ── generation ────────────────────────────────────────────────────────────

    async def _generate(self, order: Generate | ScoreTokens) -> None:
        try:
            # This is a loop, because generation may be held again before this task runs.
            while not self._control.resumed.is_set():
                # The request waits here, not in SGLang, so that the salt is that of the weights that will
                # read the prompt.
                await self._control.resumed.wait()
            await (self._stream(order) if isinstance(order, Generate) else self._score(order))
        except asyncio.CancelledError:
            self.send(
                Piece(rid=order.rid, ids=b"", logprobs=b"", version=self._control.version, finish="abort")
                if isinstance(order, Generate)
                else Failed(rid=order.rid, message="the row was given up", retryable=True)
            )
            raise
        except ValueError as error:
            # An adapter that SGLang lost is not the fault of who asks for it.
            refused = not order.adapter or order.adapter in self._control.adapters
            self.send(Failed(rid=order.rid, message=str(error), retryable=False, refused=refused))
        except Exception as error:  # an isolation edge: one request's fault must not end its siblings
            self.send(Failed(rid=order.rid, message=f"{type(error).__name__}: {error}", retryable=True))
        finally:
            self._calls.pop(order.rid, None)

    async def _stream(self, order: Generate) -> None:
        if (lacking := self._lacking(order)) is not None:
            self.send(Failed(rid=order.rid, message=lacking, retryable=False))
            return
        # Cached keys and values of other weights must not be found, so the version is their salt.
        arguments = request(order, sessions=self._control.sessions)
        chunks = await self._engine.async_generate(**arguments, cache_salt=self._control.version)
        length, constrained = len(order.prompt) // 4, not CONSTRAINTS.isdisjoint(order.sampling)
        drafts = DraftTotals()
        async for chunk in chunks:
            sampled, meta = chunk["output_ids"], chunk["meta_info"]
            length += len(sampled)
            last = piece(
                order.rid,
                sampled,
                meta,
                top_logprobs=order.top_logprobs,
                constrained=constrained,
                adapter=order.adapter,
            )
            if isinstance(last, Piece):
                last = drafts.grown(last, meta)
            for message in self._with_experts(order, last, length, meta):
                self.send(message)

    def _lacking(self, order: Generate) -> str | None:
        """What an order needs and the engine was not started with."""
        if order.processor is not None and not self._engine.server_args.enable_custom_logit_processor:
            return (
                "this engine takes no logit processor: start the node with"
                " --engine-arg enable_custom_logit_processor=true"
            )
        if order.routed_from is not None and self._experts is None:
            return (
                "this engine does not remember which experts read a token: start the node with"
                " --routed-experts"
            )
        return None

    async def _score(self, order: ScoreTokens) -> None:
        version, meta = self._control.version, {}
        async for chunk in await self._engine.async_generate(**score_arguments(order), cache_salt=version):
            meta = chunk["meta_info"]
        if version != self._control.version:  # either version may have read a part of the row
            message = "the weights changed while the row was scored"
            self.send(Failed(rid=order.rid, message=message, retryable=True))
        else:
            self.send(scored(order, meta, version))

    def _with_experts(
        self, order: Generate, last: Piece | Failed, length: int, meta: Mapping[str, Any]
    ) -> Sequence[ToNode]:
        """A piece, and before the last one the experts that were requested. An aborted request has none."""
        if (
            order.routed_from is None
            or self._experts is None
            or not isinstance(last, Piece)
            or last.finish in (None, "abort")
        ):
            return (last,)
        rows = routed(order, self._experts, length, meta)
        return (rows,) if isinstance(rows, Failed) else (*rows, last)

    # ── control ───────────────────────────────────────────────────────────────

    async def _answer(self, order: Order) -> None:
        self.send(await self._control.answer(order))

    async def _watch_load(self) -> None:
        last: Load | None = None
        while True:
            snapshots = await self._engine.tokenizer_manager.get_loads()
            load = Load(
                running=sum(each.num_running_reqs for each in snapshots),
                waiting=sum(each.num_waiting_reqs for each in snapshots),
                token_usage=max((each.token_usage for each in snapshots), default=0.0),
                weight_version=self._control.version,
                max_running=sum(each.max_running_requests for each in snapshots),
            )
            if load != last:
                self.send(load)
                last = load
            await asyncio.sleep(LOAD_INTERVAL_S)

    # ── the end ───────────────────────────────────────────────────────────────

    def _watch_children(self) -> "asyncio.Future[str]":
        """A future that resolves with a sentence when a process of the engine ends. SGLang's own watchdog
        checks only once a second.
        """
        loop = asyncio.get_running_loop()
        died: asyncio.Future[str] = loop.create_future()

        def report(name: str) -> None:
            if not died.done():
                died.set_result(f"the engine's process {name} died")

        for child in multiprocessing.active_children():
            loop.add_reader(child.sentinel, report, child.name)
        return died

    async def _send_last(self, sentence: str) -> NoReturn:
        for frame in encode_frames([*self._outbox, HostFatal(message=sentence)]):
            self._writer.write(frame)
        await asyncio.wait_for(self._writer.drain(), LAST_WORDS)
        raise EngineDied(sentence)

    async def _shut_down(self) -> None:
        """Ask the schedulers to release what they hold and wait for them, because killed ones may keep GPU
        memory. `Engine.shutdown` kills the rest.
        """
        from sglang.srt.managers.io_struct import ShutdownReq

        children = multiprocessing.active_children()
        for child in children:
            asyncio.get_running_loop().remove_reader(child.sentinel)
        manager = self._engine.tokenizer_manager
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()  # the watchdog takes any exit for a crash
        manager._dispatch_to_scheduler(ShutdownReq())
        await asyncio.to_thread(_wait_for_schedulers)
        self._engine.shutdown()


class EngineDied(Exception):
    """A process of the engine ended by itself. The host must end too, because SGLang cannot serve without
    it.
    """


def _wait_for_schedulers() -> None:
    import psutil  # type: ignore[import-untyped]
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    psutil.wait_procs(collect_scheduler_processes(), SCHEDULER_EXIT_S)
