"""Chaos: a fleet of hollow nodes under load while nodes and the front are killed and stopped at random.

    python benchmarks/fleet.py [--nodes 8] [--minutes 60] [--seed 1] [--json FILE]

Every task must end with one session in each place, whatever happened. Counts tasks, places lost and doubled,
events that came again, and the seconds from a node's death to its first session elsewhere. Nodes are the real
control plane, journal and scheduler on containers in memory (tests/kits/hollow_node.py).
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kits"))

from fleet_kit import HollowProcess, Reader, free_port, hollow_nodes, hollow_task

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.core.errors import PolarnodeError

OPEN = 24  # tasks at once: some on every node
END_S = 120.0  # for the last tasks, when nothing is killed any more


@define(eq=False, kw_only=True)
class Chaos:
    """One run."""

    folder: Path
    nodes: list[HollowProcess]
    random: random.Random
    port: int = field(factory=free_port)
    front: trio.Process | None = None
    reader: Reader = field(factory=Reader)
    tasks: dict[str, int] = field(factory=dict)
    counts: dict[str, int] = field(factory=dict)
    redispatched: list[float] = field(factory=list)
    impaired: set[int] = field(factory=set)
    over: bool = False

    def client(self) -> AsyncPolarnodeClient:
        return AsyncPolarnodeClient(f"http://127.0.0.1:{self.port}", patience_s=END_S, ack_every_s=0.2)

    async def start_front(self) -> None:
        urls = ",".join(node.url for node in self.nodes)
        argv = [sys.executable, "-m", "polarnode.cli", "fleet", "--nodes", urls, "--port", str(self.port)]
        argv += ["--state-dir", str(self.folder / "front")]
        log = (self.folder / "front.out").open("ab")
        self.front = await trio.lowlevel.open_process(argv, stdout=log, stderr=log, start_new_session=True)
        log.close()

    async def kill_front(self) -> None:
        if self.front is not None:
            with suppress(ProcessLookupError):
                os.kill(self.front.pid, signal.SIGKILL)
            await self.front.wait()

    # ── load ──────────────────────────────────────────────────────────────────

    async def submit(self) -> None:
        client, number = self.client(), 0
        while not self.over:
            if len(self.tasks) - self.ended() >= OPEN:
                await trio.sleep(0.05)
                continue
            number += 1
            samples = self.random.choice((1, 2, 4))
            spec = hollow_task(samples=samples, seconds=self.random.uniform(0.2, 4.0), task_id=f"t{number}")
            with suppress(PolarnodeError):  # whether it was taken is seen when it is sent again
                await client.submit(spec)
            while not self.over:
                try:
                    await client.submit(spec)
                except PolarnodeError as error:
                    self.count(f"submit: {type(error).__name__} {getattr(error, 'status', '')}")
                    await trio.sleep(0.5)
                    continue
                self.tasks[f"t{number}"] = samples
                break
        await client.aclose()

    def ended(self) -> int:
        return sum(f"group:{task_id}" in self.reader.events for task_id in self.tasks)

    async def read(self) -> None:
        while True:
            client = self.client()
            try:
                async for event in client.trajectories(consumer="trainer", ack=True):
                    self.reader.add(event.kind, event.key, event.data)
                    self.count(f"event: {event.kind}")
            except PolarnodeError as error:
                self.count(f"stream: {type(error).__name__}")
                await trio.sleep(0.2)
            finally:
                await client.aclose()  # noqa: ASYNC102 - bounded there

    # ── what happens ──────────────────────────────────────────────────────────

    async def disturb(self, nursery: trio.Nursery) -> None:
        while not self.over:
            await trio.sleep(self.random.uniform(0.5, 3.0))
            if self.random.random() < 0.15:
                self.count("front killed")
                await self.kill_front()
                await trio.sleep(self.random.uniform(0.0, 2.0))
                await self.start_front()
                continue
            able = [number for number in range(len(self.nodes)) if number not in self.impaired]
            if len(self.impaired) < max(1, len(self.nodes) // 3) and able:
                number = self.random.choice(able)
                self.impaired.add(number)
                act = self.kill if self.random.random() < 0.6 else self.hang
                nursery.start_soon(act, number, self.random.uniform(0.5, 20.0))

    async def kill(self, number: int, seconds: float) -> None:
        self.count("node killed")
        await self.nodes[number].kill()
        await trio.sleep(seconds)
        await self.nodes[number].start()
        self.impaired.discard(number)

    async def hang(self, number: int, seconds: float) -> None:
        self.count("node stopped")
        self.nodes[number].stop()
        await trio.sleep(seconds)
        self.nodes[number].go_on()
        await trio.sleep(2.0)  # what it does behind the fence
        self.impaired.discard(number)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


async def run(nodes: int, minutes: float, seed: int) -> dict[str, Any]:
    """One run; raises AssertionError where a place was lost or doubled."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-chaos-"))  # kept where something goes wrong
    print(f"journals and logs in {folder}", file=sys.stderr)
    async with hollow_nodes(folder, nodes) as processes:
        chaos = Chaos(folder=folder, nodes=processes, random=random.Random(seed))
        await chaos.start_front()
        try:
            await _disturbed(chaos, minutes)
        finally:
            with trio.CancelScope(shield=True):
                await chaos.kill_front()
        chaos.reader.check(chaos.tasks)
    shutil.rmtree(folder)
    return {
        "nodes": nodes,
        "seed": seed,
        "tasks": len(chaos.tasks),
        "places": sum(chaos.tasks.values()),
        "lost": 0,
        "doubled": 0,
        "came_again": chaos.reader.repeated,
        "counts": dict(sorted(chaos.counts.items())),
    }


async def _disturbed(chaos: Chaos, minutes: float) -> None:
    async with trio.open_nursery() as nursery:
        reading = trio.CancelScope()

        async def read() -> None:
            with reading:
                await chaos.read()

        nursery.start_soon(read)
        async with trio.open_nursery() as load:
            load.start_soon(chaos.submit)
            load.start_soon(chaos.disturb, load)
            await trio.sleep(60 * minutes)
            chaos.over = True
        with trio.move_on_after(END_S):
            while chaos.ended() < len(chaos.tasks):  # noqa: ASYNC110
                await trio.sleep(0.2)
        reading.cancel()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=8)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    found = trio.run(run, given.nodes, given.minutes, given.seed)
    print(json.dumps(found, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
