"""A node that lives for one command: opened, given work, stopped as whoever typed it wants."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from rich.console import Console

from polarnode.cli.signals import Stop, stop_on_signals
from polarnode.config import NodeConfig
from polarnode.node import Node, open_node

Made = TypeVar("Made")


async def on_own_node(config: NodeConfig, console: Console, work: Callable[[Node, Stop], Awaitable[Made]]) -> Made | None:
    """What the work gives, done on a node of its own. None when it was stopped before the node was there."""
    made: Made | None = None
    async with trio.open_nursery() as nursery:
        stop = Stop(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        async with open_node(config, say=lambda text: console.print(f"· {text}", style="dim")) as node:
            made = await work(node, stop)
        nursery.cancel_scope.cancel()
    return made
