"""The first SIGINT or SIGTERM asks a command to stop; the second ends it at once."""

import os
import signal
import threading
from collections.abc import Callable

import trio
from attrs import define, field

FORCED_END_S = 2.0  # seconds to close files; engines end by themselves when their node has ended
INTERRUPTED = 130  # the exit code of a program that was interrupted


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
    """Call `stop` at the first signal; raise KeyboardInterrupt at the second. If something does not end
    within FORCED_END_S after that (an update of weights, a disk that hangs), the process is ended.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        stop()
        await anext(signals)
        end = threading.Timer(FORCED_END_S, _end_process, (trio.lowlevel.current_trio_token(),))
        end.daemon = True  # a process that ends by itself does not wait for the timer
        end.start()
        raise KeyboardInterrupt


def _end_process(run: trio.lowlevel.TrioToken) -> None:
    try:
        run.run_sync_soon(int)  # raises if the run has ended
    except trio.RunFinishedError:
        return
    os._exit(INTERRUPTED)


async def requested(stop: StopRequest) -> None:
    """Wait for the first signal. A signal during the start has already cancelled this task."""
    signalled = trio.Event()
    stop.act = signalled.set
    await signalled.wait()
