"""Several nodes on this machine that share a log, as child processes that are kept running."""

import logging
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

import trio

from polarnode.core.errors import ConfigError
from polarnode.support.bounded import open_private
from polarnode.support.locks import take_lock

logger = logging.getLogger(__name__)

NODE_COMMAND: Final = ("-m", "polarnode.cli")
ORPHAN_S: Final = 5.0  # a node without work ends so long after the process that started it was killed
RESTART_DELAY_S: Final = 1.0  # between the end of a node and its next start
STOP_TIMEOUT_S: Final = 30.0  # a node has so long to end its sessions and save them


@asynccontextmanager
async def local_nodes(
    count: int, folder: Path, options: tuple[str, ...], environment: Mapping[str, str], *, prefix: str
) -> AsyncIterator[dict[str, str]]:
    """Run `count` nodes on free ports of loopback, for as long as the block. Yields their addresses by name.
    Each has a folder of its own below `folder`. `environment` holds the log's DSN, which no command line
    shows.
    """
    urls: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        await trio.Path(folder).mkdir(parents=True, exist_ok=True)
        lifeline = await trio.Path(folder / "lifeline").absolute()
        held = take_lock(Path(lifeline))
        if held is None:
            raise ConfigError(f"another command has nodes in {folder}: end it, or give --state-dir")
        stack.enter_context(held)
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for number in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            name = f"{prefix}-{number}"
            urls[name] = f"http://127.0.0.1:{port}"
            argv = (
                *(sys.executable, *NODE_COMMAND, "--port", str(port)),
                *("--state-dir", str(folder / name), *options),
            )
            mine = {
                "POLARNODE_NODE_ID": name,
                "POLARNODE_NODE_URL": urls[name],  # all nodes are on this machine, wherever the log is
                "POLARNODE_LIFELINE": str(lifeline),
                "POLARNODE_ORPHAN_S": f"{ORPHAN_S:g}",
            }
            nursery.start_soon(_keep_node, argv, {**environment, **mine}, folder / f"{name}.log")
        yield urls


async def _keep_node(argv: tuple[str, ...], environment: Mapping[str, str], path: Path) -> None:
    """Run a node, and run it again when it ends."""
    while True:
        with _open_log(path) as log:
            process = await trio.lowlevel.open_process(
                argv, stdout=log, stderr=log, env=dict(environment), start_new_session=True
            )
        try:
            code = await process.wait()
            logger.warning("a node of this machine ended with code %s and is started again", code)
        finally:
            process.terminate()
            with trio.move_on_after(STOP_TIMEOUT_S, shield=True):
                await process.wait()
        await trio.sleep(RESTART_DELAY_S)


def _open_log(path: Path) -> BinaryIO:
    return cast(BinaryIO, open(path, "ab", opener=open_private))
