"""The launcher for Ray. It keeps a driver, which keeps an actor and so a node on each machine of a Ray
cluster.

Ray only starts nodes, and nothing else depends on it. The nodes find each other in their log, and go on
without Ray and without this process. However the driver ends, it is started again, with back-off.
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
from polarnode.support.bounded import open_private

logger = logging.getLogger(__name__)

DRIVER: Final = ("-m", "polarnode.fleet.ray_hosts")
PAUSES: Final = Backoff(first_s=1.0, longest_s=30.0)  # between starts of the driver, which cost 1 s of a core
# A driver that writes no line for this long hangs and is replaced: lines are BEAT_S apart. Ray raises after
# 60 s without its head.
SILENT_S: Final = 180.0
MAX_LINE_BYTES: Final = 1 << 20  # bytes: 64 machines make 10 kB
MAX_LOG_BYTES: Final = 4 << 20  # with more, the driver's log begins anew at the next start
END_TIMEOUT_S: Final = 5.0  # longest wait for the driver to end after its input was closed


def check_ray() -> None:
    """Raise ConfigError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs the package ray: pip install 'polarnode[ray]'")


@define(eq=False, kw_only=True)
class RayNodes:
    """The nodes of a Ray cluster. Created by `ray_nodes`."""

    order: RayOrder
    folder: Path  # for the driver's log
    urls: dict[str, str] = field(factory=dict)  # the addresses of the nodes that serve, by machine
    problems: dict[str, str] = field(factory=dict)
    driver_starts: int = 0  # how often the driver was started
    driver: trio.Process | None = None
    first_answer: trio.Event = field(factory=trio.Event)  # set when Ray answered, or the driver ended without
    error: str | None = None

    async def keep_driver(self) -> None:
        """Keep a driver running, until cancelled."""
        failures = 0
        while True:
            before = trio.current_time()
            await self._run_driver()
            self.first_answer.set()
            failures = 0 if trio.current_time() - before > SILENT_S else failures + 1
            pause = PAUSES.delay(failures)
            logger.warning(
                "the Ray driver ended (%s): nodes go on, and it is started again in %g s",
                self.error or "see ray-driver.log",
                pause,
            )
            await trio.sleep(pause)

    async def _run_driver(self) -> None:
        """Run the driver once, until it ends."""
        async with self.open_driver() as process:
            self.driver, self.error, self.driver_starts = process, None, self.driver_starts + 1
            async with aclosing(read_news(process)) as lines:
                async for news in lines:
                    if news.error is not None:
                        self.error = news.error
                        return
                    self._take_news(news)
                    self.first_answer.set()

    def _open_log(self) -> BinaryIO:
        path = self.folder / "ray-driver.log"
        again = path.exists() and path.stat().st_size > MAX_LOG_BYTES
        return open(path, "wb" if again else "ab", opener=open_private)

    @asynccontextmanager
    async def open_driver(self) -> AsyncIterator[trio.Process]:
        """Run a driver that has the order, for as long as the block."""
        with self._open_log() as log:
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
                await _end_driver(process)

    def _take_news(self, news: RayNews) -> None:
        for name, problem in news.problems.items():
            if self.problems.get(name) != problem:
                logger.warning("machine %s of the Ray cluster: %s", name, problem)
        if news.nodes != self.urls:
            logger.info("nodes of the Ray cluster: %s", news.nodes)
        self.problems, self.urls = dict(news.problems), dict(news.nodes)
        self.order = evolve(self.order, marked=self.order.marked or news.marked)


async def read_news(process: trio.Process) -> AsyncGenerator[RayNews, None]:
    """The news that a driver writes, until it ends, is silent for SILENT_S, or writes a line that is no
    news.
    """
    assert process.stdout is not None
    data = b""
    while True:
        with trio.move_on_after(SILENT_S) as patience:
            piece = await process.stdout.receive_some()
        if patience.cancelled_caught or not piece or len(data) > MAX_LINE_BYTES:
            return
        *whole, data = (data + piece).split(b"\n")
        for line in whole:
            try:
                news = structure(read_json(line), RayNews)
            except Refused as error:
                logger.warning("the Ray driver wrote what is no news: %s", error)
                return
            yield news


async def _end_driver(process: trio.Process) -> None:
    """End a driver by closing its input, and kill it if it does not end."""
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.aclose()
    with trio.move_on_after(END_TIMEOUT_S):
        await process.wait()
    process.kill()
    await process.wait()
    await process.stdout.aclose()


@asynccontextmanager
async def ray_nodes(order: RayOrder, folder: Path) -> AsyncIterator[RayNodes]:
    """Keep the nodes of a Ray cluster for as long as the block. They go on after it. Raises ConfigError where
    there is no Ray cluster.
    """
    check_ray()
    nodes = RayNodes(order=order, folder=folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(nodes.keep_driver)
        await nodes.first_answer.wait()
        if nodes.error is not None:
            raise ConfigError(f"--ray: {nodes.error}")
        yield nodes
        nursery.cancel_scope.cancel()


async def stop_nodes(order: RayOrder, folder: Path) -> int:
    """End the nodes that actors of a Ray cluster keep, and the actors. Returns the number of actors."""
    check_ray()
    nodes = RayNodes(order=evolve(order, stop=True), folder=folder)
    async with nodes.open_driver() as process, aclosing(read_news(process)) as lines:
        async for news in lines:
            if news.error is not None:
                raise ConfigError(f"--ray: {news.error}")
            if news.stopped is not None:
                return news.stopped
    raise ConfigError(f"the Ray driver ended without an answer: see {folder / 'ray-driver.log'}")
