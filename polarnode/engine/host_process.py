"""The child process of one engine host: start it, exchange messages with it, and let it end.

Every message is sent through `post`, which never waits, so that an abort can be sent from any cleanup. When
the process ends, the control messages that wait for an answer are answered at once, before anything is
awaited, so that no task waits for a process that is gone.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count

import trio
from attrs import define, field

from polarnode.core.errors import EngineError
from polarnode.engine.diagnosis import Diagnosis, diagnose
from polarnode.engine.host_resources import HostWires, log_tail, open_log, open_scratch, open_wires
from polarnode.engine.protocol import (
    Done,
    FrameDecoder,
    FrameError,
    HostFatal,
    Message,
    Shutdown,
    Start,
    ToHost,
    encode,
    encode_frames,
)
from polarnode.engine.settings import EngineSettings, engine_arguments, host_environment
from polarnode.support.concurrency import open_process_group

READ_SIZE = 1 << 18  # bytes: a frame of a thousand chunks in one system call
# Seconds for an engine to give its GPU memory back: its schedulers take up to 15, and its process tree takes
# some more.
SHUTDOWN_GRACE = 25.0
# Seconds for a host that was cut off to end its children. After that its process group is killed.
LIFELINE_GRACE = 5.0

HandleMessage = Callable[[Message, trio.Nursery], None]


@define(eq=False)
class _PendingReply:
    answered: trio.Event = field(factory=trio.Event)
    done: Done | None = None


@define(eq=False)
class PendingReplies:
    """Control messages of one host that wait for an answer, over all restarts of its process."""

    _open: dict[int, _PendingReply] = field(factory=dict)
    _numbers: "count[int]" = field(factory=count)

    async def ask(self, make: Callable[[int], ToHost], post: Callable[[ToHost], None]) -> Done:
        """Post a question and wait for its answer. Leaving early only drops the answer."""
        number = next(self._numbers)
        question = self._open[number] = _PendingReply()
        post(make(number))
        try:
            await question.answered.wait()
        finally:
            self._open.pop(number, None)
        assert question.done is not None
        return question.done

    def answer(self, done: Done) -> None:
        """Deliver an answer. It is dropped if its question is no longer waiting."""
        if (question := self._open.get(done.call)) is not None:
            question.done = done
            question.answered.set()

    def fail(self, reason: str) -> None:
        """Answer every open question with a failure, because the process ended."""
        for question in self._open.values():
            if question.done is None:
                question.done = Done(call=0, ok=False, message=reason)
                question.answered.set()


@define(eq=False)
class HostProcess:
    """The process of one engine host. It is started again by another `run` when it has ended.

    `program` is its command, and `ports` gives it a free port that no other host has.
    """

    index: int
    gpus: tuple[int, ...]
    _settings: EngineSettings
    _ports: Callable[[], int]
    _environment: Mapping[str, str]
    _program: tuple[str, ...]
    pid: int | None = field(default=None, init=False)
    has_served: bool = field(default=False, init=False)  # whether this process came as far as serving
    _failure: str | None = field(default=None, init=False)  # why it ends, if it or the node says so
    _replies: PendingReplies = field(factory=PendingReplies, init=False)
    _outbox: list[Message] = field(factory=list, init=False)
    _wake: trio.Event = field(factory=trio.Event, init=False)
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    async def run(self, handle: HandleMessage) -> str:
        """Run one process from start to end, and return the reason of its end.

        `handle` gets each message that is not about the process itself. Tasks that it starts in the nursery
        end with the process.
        """
        self._failure, self.has_served, self._outbox = None, False, []
        log_path = self._settings.log_path(self.index)
        try:
            with open_scratch() as scratch, open_log(log_path) as log, open_wires() as wires:
                command = [*self._program, "--tag", scratch.tag, *wires.arguments()]
                env = host_environment(
                    self._settings, gpus=self.gpus, scratch=scratch.path, base=self._environment
                )
                async with open_process_group(
                    command, env=env, cwd=scratch.path, stdout=log, pass_fds=wires.theirs()
                ) as process:
                    self.pid = process.pid
                    wires.close_host_ends()
                    await self._converse(process, wires, handle)
        except (OSError, EngineError) as error:
            reason = f"the engine host could not be started: {error}"
        else:
            if self.has_served:
                reason = f"{self._failure or f'exit status {process.returncode}'} (log: {log_path})"
            else:
                found = self.diagnose_log()
                reason = f"{found.line}; {found.advice} (log: {log_path})"
        self.pid = None
        self._replies.fail(reason)
        return reason

    async def _converse(self, process: trio.Process, wires: HostWires, handle: HandleMessage) -> None:
        """Tell the process what to serve, exchange messages with it until it is gone or must end, and let it
        end.
        """
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(wires.ours))
        self.post(
            Start(arguments=engine_arguments(self._settings, nccl_port=self._ports(), index=self.index))
        )
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._send, stream)
                await self._receive(stream, handle, nursery)
                nursery.cancel_scope.cancel()
        finally:
            listens = self.has_served and self._failure is None
            with trio.move_on_after(SHUTDOWN_GRACE if listens else LIFELINE_GRACE, shield=True):
                if listens:
                    # It may be dying already.
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        await stream.send_all(encode(Shutdown()))
                else:
                    wires.cut()
                await process.wait()  # `open_process_group` kills what is left after that

    def post(self, message: ToHost) -> None:
        """Queue a message. The queue is bounded by two messages for each call in flight, and the calls are
        bounded by the sessions that the node runs.
        """
        self._outbox.append(message)
        self._wake.set()

    async def ask(self, make: Callable[[int], ToHost]) -> Done:
        """Send a control message and wait for its answer. If the process ends meanwhile, the answer is a
        failure. Leaving early only drops the answer.
        """
        return await self._replies.ask(make, self.post)

    def restart_with_reason(self, reason: str) -> None:
        """End this process because its state is wrong. The host starts it again."""
        self._failure = reason
        self._scope.cancel()

    def diagnose_log(self) -> Diagnosis:
        """What the log of the last process says about its end."""
        log = log_tail(self._settings.log_path(self.index))
        return diagnose(log, self._failure, cpu=self._settings.device == "cpu")

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

    async def _receive(
        self,
        stream: trio.SocketStream,
        handle: HandleMessage,
        nursery: trio.Nursery,
    ) -> None:
        """Receive until the host is gone. Its end of the socket closes with it in any case."""
        decoder = FrameDecoder()
        while True:
            try:
                data = await stream.receive_some(READ_SIZE)
                for message in decoder.feed(data):
                    match message:
                        case Done():
                            self._replies.answer(message)
                        case HostFatal():
                            self._failure = message.message
                        case _:
                            handle(message, nursery)
            except (trio.BrokenResourceError, FrameError) as error:
                self._failure = self._failure or f"{type(error).__name__}: {error}"
                return
            if not data:
                return
