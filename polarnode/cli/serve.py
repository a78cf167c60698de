"""`polarnode --gpus 0-7`: open a node, serve its control plane, and stop in order when asked."""

import logging
from pathlib import Path

import trio
from rich.console import Console

from polarnode.cli.printing import open_console
from polarnode.cli.signals import Stop, stop_on_signals
from polarnode.config import NodeConfig
from polarnode.errors import ConfigError, boundary
from polarnode.node import Node, open_node, serve_control_plane
from polarnode.web.server import Address, listening_socket


def serve(config: NodeConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    with boundary(ConfigError, f"--state-dir {config.state_dir} can not be written"):
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    listening_socket(Address(host=config.host, port=config.port)).close()  # a port that is taken is said now, not after the engine has started
    log = Path(config.state_dir) / "node.log"
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    trio.run(_serve, config, open_console())
    return 0


async def _serve(config: NodeConfig, console: Console) -> None:
    async with trio.open_nursery() as nursery:
        stop = Stop(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        async with open_node(config, say=lambda text: console.print(f"· {text}", style="dim")) as node, serve_control_plane(node) as address:
            url = f"http://{address.host}:{address.port}"
            console.print(f"serving on {url} · model {node.model.name} · state in {config.state_dir}")
            if config.engine == "simulated":
                console.print("· the engine is simulated: every answer is random, nothing here is a model's", style="bold yellow")
            console.print(f"· submit to it with: polarnode submit task.toml --url {url}; Ctrl-C stops", style="dim")
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
