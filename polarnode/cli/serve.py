"""SIGINT and SIGTERM as an ordinary request to stop: the first ends sessions with what they have, the second
leaves at once.

`polarnode --gpus 0-7`: open a node, serve its control plane, and stop in order when asked.
"""

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import trio
from attrs import define, field
from rich.console import Console

from polarnode.cli.output import open_console
from polarnode.core.errors import ConfigError, boundary
from polarnode.http.server import Address, listening_socket
from polarnode.node.config import NodeConfig
from polarnode.node.node import Node
from polarnode.node.opening import open_node, serve_control_plane

# ── signals ────────────────────────────────────────────────────────────


@define(eq=False)
class Stop:
    """What the first signal does: `act`, which is to give up while nothing runs yet, and to end sessions once
    they do.
    """

    act: Callable[[], None]
    asked: bool = field(default=False, init=False)

    def __call__(self) -> None:
        self.asked = True
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


# ── serve ────────────────────────────────────────────────────────────


def serve(config: NodeConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    with boundary(ConfigError, f"--state-dir {config.state_dir} can not be written"):
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    # a port that is taken is said now, not after the engine has started
    listening_socket(Address(host=config.host, port=config.port)).close()
    log = Path(config.state_dir) / "node.log"
    logging.basicConfig(
        filename=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    trio.run(_serve, config, open_console())
    return 0


async def _serve(config: NodeConfig, console: Console) -> None:
    async with trio.open_nursery() as nursery:
        stop = Stop(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        async with (
            open_node(config, say=lambda text: console.print(f"· {text}", style="dim")) as node,
            serve_control_plane(node) as address,
        ):
            url = f"http://{address.host}:{address.port}"
            console.print(f"serving on {url} · model {node.model.name} · state in {config.state_dir}")
            if config.engine == "simulated":
                console.print(
                    "· the engine is simulated: every answer is random, nothing here is a model's",
                    style="bold yellow",
                )
            console.print(
                f"· submit to it with: polarnode submit task.toml --url {url}; Ctrl-C stops", style="dim"
            )
            await _asked(stop)
            await _end(node, console)
        nursery.cancel_scope.cancel()


async def _asked(stop: Stop) -> None:
    """Return at the first signal. One that came while the node started has already cancelled all this."""
    asked = trio.Event()
    stop.act = asked.set
    await asked.wait()


async def _end(node: Node, console: Console) -> None:
    console.print("· stopping: sessions end with what they have; once more to leave at once", style="dim")
    await node.stop(cancel=True)
