"""The captures of a node: their own sessions and keys, and the one socket of this machine where harnesses find the model.

The rule for whoever edits it: these sessions are in a table of their own, apart from those of containers, and their socket is on a loopback
address whatever the node's own is.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from polarnode.config import NodeConfig
from polarnode.errors import ConfigError
from polarnode.groups import stamped
from polarnode.shell.captures import CaptureHouse, Captures
from polarnode.shell.journal import Journal
from polarnode.shell.live import LiveSessions
from polarnode.shell.scheduler import Scheduler
from polarnode.web.capture_door import CaptureDoor
from polarnode.web.model import Model
from polarnode.web.model_plane import ModelPlane
from polarnode.web.recordings import Recordings
from polarnode.web.server import Address, listening_socket, open_server

LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def open_captures(
    config: NodeConfig, journal: Journal, scheduler: Scheduler, model: Model, recordings: Recordings | None
) -> AsyncIterator[Captures]:
    """The captures of a node. Those that are open when this is left are so by force: the node's next start finds them."""
    lives = LiveSessions()
    door = CaptureDoor(ModelPlane(sessions=lives, model=model, recordings=recordings))
    try:
        listener = listening_socket(Address(host=LOOPBACK, port=config.capture_port))
    except ConfigError as error:
        raise ConfigError(f"capture_port {config.capture_port} can not be had: choose another, or 0 for any that is free") from error
    async with open_server(door, listener) as address, trio.open_nursery() as nursery:
        house = _house(config, journal, scheduler, model, base_url=f"http://{address.host}:{address.port}")
        yield Captures(nursery=nursery, lives=lives, record=journal, house=house)
        nursery.cancel_scope.cancel()


def _house(config: NodeConfig, journal: Journal, scheduler: Scheduler, model: Model, *, base_url: str) -> CaptureHouse:
    return CaptureHouse(
        base_url=base_url,
        node=scheduler.who.node,
        model=scheduler.who.model,
        context_length=model.context_length,
        publish=lambda found: journal.publish(stamped(found, scheduler.house.versions())),
        limit=config.capture_limit,
        drops_thinking=scheduler.house.drops_thinking,
        tally=scheduler.tally,
        allowed_imports=scheduler.house.allowed_imports,
        carried_limit=scheduler.house.carried_limit,
        unrouted=scheduler.house.unrouted,
    )
