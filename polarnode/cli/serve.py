"""`polarnode --gpus 0-7`: open a node, serve its control plane, and stop in order when asked."""

import logging
from pathlib import Path

import trio
from rich.console import Console

from polarnode.cli.signals import stop_on_signals
from polarnode.config import NodeConfig
from polarnode.node import open_node, serve_control_plane

console = Console(highlight=False)


def serve(config: NodeConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    log = Path(config.state_dir) / "node.log"
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    trio.run(_serve, config)
    return 0


async def _serve(config: NodeConfig) -> None:
    async with (
        open_node(config, say=lambda text: console.print(f"· {text}", style="dim")) as node,
        serve_control_plane(node) as address,
        trio.open_nursery() as nursery,
    ):
        asked = trio.Event()
        await nursery.start(stop_on_signals, asked.set)
        console.print(f"serving on http://{address.host}:{address.port} · model {node.model.name} · state in {config.state_dir}")
        await asked.wait()
        console.print("· stopping: sessions end with what they have; once more to leave at once", style="dim")
        await node.stop(cancel=True)
        nursery.cancel_scope.cancel()
