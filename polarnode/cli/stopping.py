"""The first SIGINT or SIGTERM asks a command to stop; the second ends it at once."""

import signal
from collections.abc import Callable

import trio
from attrs import define, field


@define(eq=False)
class StopRequest:
    """A request to stop. The first signal calls `act`: it cancels the start while nothing runs, and ends the
    sessions once they run.
    """

    act: Callable[[], None]
    requested: bool = field(default=False, init=False)

    def __call__(self) -> None:
        self.requested = True
        self.act()


async def stop_on_signals(
    stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` at the first signal; raise KeyboardInterrupt at the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        stop()
        await anext(signals)
        raise KeyboardInterrupt


async def requested(stop: StopRequest) -> None:
    """Wait for the first signal. A signal during the start has already cancelled this task."""
    signalled = trio.Event()
    stop.act = signalled.set
    await signalled.wait()
