"""The launcher `ray`: keeps a driver, which keeps an actor and so a node on each machine of a Ray cluster.

Ray starts nodes; nothing else depends on it. The nodes find each other in their log, and go on without Ray
and without this process. The driver is started again with back-off however it ends.
"""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import trio
from attrs import asdict, define, evolve, field

from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import dump_json, read_json, structure
from polarnode.core.errors import ConfigError, Refused
from polarnode.fleet.ray_machines import RayNews, RayOrder
from polarnode.support.bounded import private_opener

logger = logging.getLogger(__name__)

DRIVER: Final = ("-m", "polarnode.fleet.ray_hosts")
PAUSES: Final = Backoff(first_s=1.0, longest_s=30.0)  # between starts of the driver: 1 s of a core each
# without a line, BEAT_S apart: it hangs, and is replaced. A Ray without its head raises after 60 s
SILENT_S: Final = 180.0
LONGEST_LINE: Final = 1 << 20  # bytes: 64 machines make 10 kB
LOG_BYTES: Final = 4 << 20  # of the driver's log, before it begins again
END_S: Final = 5.0  # for the driver to end with its input


def check_ray() -> None:
    """Raises ConfigError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs the package ray: pip install 'polarnode[ray]'")


@define(eq=False, kw_only=True)
class RayNodes:
    """The nodes of a Ray cluster. Created by `ray_nodes`."""

    order: RayOrder
    folder: Path  # for the driver's log
    urls: dict[str, str] = field(factory=dict)  # by machine, of the nodes that serve
    problems: dict[str, str] = field(factory=dict)
    starts: int = 0  # of the driver
    driver: trio.Process | None = None
    answered: trio.Event = field(factory=trio.Event)  # Ray has, or the driver ended without
    error: str | None = None

    async def keep(self) -> None:
        """Keep a driver, until cancelled."""
        failures = 0
        while True:
            before = trio.current_time()
            await self._driven()
            self.answered.set()
            failures = 0 if trio.current_time() - before > SILENT_S else failures + 1
            pause = PAUSES.delay(failures)
            logger.warning(
                "the Ray driver ended (%s): nodes go on, and it is started again in %g s",
                self.error or "see ray-driver.log",
                pause,
            )
            await trio.sleep(pause)

    async def _driven(self) -> None:
        """One life of the driver."""
        async with self.process() as process:
            self.driver, self.error, self.starts = process, None, self.starts + 1
            async with aclosing(lines_of(process)) as lines:
                async for news in lines:
                    if news.error is not None:
                        self.error = news.error
                        return
                    self._take(news)
                    self.answered.set()

    def _log(self) -> BinaryIO:
        path = self.folder / "ray-driver.log"
        again = path.exists() and path.stat().st_size > LOG_BYTES
        return open(path, "wb" if again else "ab", opener=private_opener)

    @asynccontextmanager
    async def process(self) -> AsyncIterator[trio.Process]:
        """A driver that has the order, for as long as the block."""
        with self._log() as log:
            process = await trio.lowlevel.open_process(
                (sys.executable, *DRIVER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            assert process.stdin is not None
            with suppress(trio.BrokenResourceError):
                await process.stdin.send_all(dump_json(asdict(self.order)) + b"\n")
            yield process
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)

    def _take(self, news: RayNews) -> None:
        for name, problem in news.problems.items():
            if self.problems.get(name) != problem:
                logger.warning("machine %s of the Ray cluster: %s", name, problem)
        if news.nodes != self.urls:
            logger.info("nodes of the Ray cluster: %s", news.nodes)
        self.problems, self.urls = dict(news.problems), dict(news.nodes)
        self.order = evolve(self.order, marked=self.order.marked or news.marked)


async def lines_of(process: trio.Process) -> AsyncGenerator[RayNews, None]:
    """What a driver writes, until it ends or is silent for SILENT_S. A line that is none ends it too."""
    assert process.stdout is not None
    data = b""
    while True:
        with trio.move_on_after(SILENT_S) as patience:
            piece = await process.stdout.receive_some()
        if patience.cancelled_caught or not piece or len(data) > LONGEST_LINE:
            return
        *whole, data = (data + piece).split(b"\n")
        for line in whole:
            try:
                news = structure(read_json(line), RayNews)
            except Refused as error:
                logger.warning("the Ray driver wrote what is no news: %s", error)
                return
            yield news


async def _end(process: trio.Process) -> None:
    """End a driver: it ends with its input, or is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.aclose()
    with trio.move_on_after(END_S):
        await process.wait()
    process.kill()
    await process.wait()
    await process.stdout.aclose()


@asynccontextmanager
async def ray_nodes(order: RayOrder, folder: Path) -> AsyncIterator[RayNodes]:
    """The nodes of a Ray cluster, kept for as long as the block; they go on after it. Raises ConfigError
    where there is no Ray cluster.
    """
    check_ray()
    nodes = RayNodes(order=order, folder=folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(nodes.keep)
        await nodes.answered.wait()
        if nodes.error is not None:
            raise ConfigError(f"--ray: {nodes.error}")
        yield nodes
        nursery.cancel_scope.cancel()


async def stop_nodes(order: RayOrder, folder: Path) -> int:
    """End the nodes that actors of a Ray cluster have, and the actors. Gives how many there were."""
    check_ray()
    nodes = RayNodes(order=evolve(order, stop=True), folder=folder)
    async with nodes.process() as process, aclosing(lines_of(process)) as lines:
        async for news in lines:
            if news.error is not None:
                raise ConfigError(f"--ray: {news.error}")
            if news.stopped is not None:
                return news.stopped
    raise ConfigError(f"the Ray driver ended without an answer: see {folder / 'ray-driver.log'}")
