"""SIGINT and SIGTERM as an ordinary request to stop: the first ends sessions with what they have, the second leaves at once."""

import signal
from collections.abc import Callable

import trio


async def stop_on_signals(stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Call `stop` at the first signal; raise KeyboardInterrupt at the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        stop()
        await anext(signals)
        raise KeyboardInterrupt
