"""SIGINT and SIGTERM as an ordinary request to stop: the first ends sessions with what they have, the second leaves at once."""

import signal
from collections.abc import Callable

import trio
from attrs import define, field


@define(eq=False)
class Stop:
    """What the first signal does: `act`, which is to give up while nothing runs yet, and to end sessions once they do."""

    act: Callable[[], None]
    asked: bool = field(default=False, init=False)

    def __call__(self) -> None:
        self.asked = True
        self.act()


async def stop_on_signals(stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Call `stop` at the first signal; raise KeyboardInterrupt at the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        stop()
        await anext(signals)
        raise KeyboardInterrupt
