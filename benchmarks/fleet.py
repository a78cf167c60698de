"""Chaos: a fleet of hollow nodes under load while nodes and fronts are killed and stopped at random.

    python benchmarks/fleet.py [--nodes 8] [--fronts 2] [--minutes 60] [--seed 1] [--json FILE]

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
PATIENCE_S = 0.5  # with a front before another one is asked: one of two waits for its term
END_S = 120.0  # for the last tasks, when nothing is killed any more


@define(eq=False, kw_only=True)
class FrontProcess:
    """A front that is killed, stopped and started again, and what its reader got."""

    folder: Path
    nodes: str
    port: int = field(factory=free_port)
    process: trio.Process | None = None
    reader: Reader = field(factory=Reader)
    impaired: bool = False

    def client(self, patience_s: float) -> AsyncPolarnodeClient:
        return AsyncPolarnodeClient(f"http://127.0.0.1:{self.port}", patience_s=patience_s, ack_every_s=0.2)

    async def start(self) -> None:
        argv = [sys.executable, "-m", "polarnode.cli", "fleet", "--nodes", self.nodes]
        argv += ["--port", str(self.port), "--state-dir", str(self.folder)]
        with self.folder.with_suffix(".out").open("ab") as log:
            self.process = await trio.lowlevel.open_process(
                argv, stdout=log, stderr=log, start_new_session=True
            )

    def send(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()


@define(eq=False, kw_only=True)
class Chaos:
    """One run."""

    nodes: list[HollowProcess]
    fronts: list[FrontProcess]
    random: random.Random
    tasks: dict[str, int] = field(factory=dict)
    counts: dict[str, int] = field(factory=dict)
    impaired: set[int] = field(factory=set)
    over: bool = False

    # ── load ──────────────────────────────────────────────────────────────────

    async def submit(self) -> None:
        number = 0
        while not self.over:
            if len(self.tasks) - self.ended() >= OPEN:
                await trio.sleep(0.05)
                continue
            number += 1
            samples = self.random.choice((1, 2, 4))
            spec = hollow_task(samples=samples, seconds=self.random.uniform(0.2, 4.0), task_id=f"t{number}")
            times = 0  # it is sent again when it was taken, to another front too: it stays one task
            while not self.over and times < 2:
                client = self.random.choice(self.fronts).client(PATIENCE_S)
                try:
                    await client.submit(spec)
                    times += 1
                except PolarnodeError as error:
                    self.count(f"submit: {type(error).__name__} {getattr(error, 'status', '')}")
                finally:
                    await client.aclose()  # noqa: ASYNC102 - bounded there
            if times:
                self.tasks[f"t{number}"] = samples

    def ended(self) -> int:
        return sum(
            all(f"group:{task_id}" in front.reader.events for front in self.fronts) for task_id in self.tasks
        )

    async def read(self, front: FrontProcess) -> None:
        while True:
            client = front.client(END_S)
            try:
                async for event in client.trajectories(consumer=f"reader of {front.port}", ack=True):
                    front.reader.add(event.kind, event.key, event.data)
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
            sound = [front for front in self.fronts if not front.impaired]
            if self.random.random() < 0.15 and sound:
                front = self.random.choice(sound)
                front.impaired = True
                act = self.kill_front if self.random.random() < 0.6 else self.hang_front
                nursery.start_soon(act, front)
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

    async def kill_front(self, front: FrontProcess) -> None:
        self.count("front killed")
        await front.kill()
        await trio.sleep(self.random.uniform(0.0, 2.0))
        await front.start()
        front.impaired = False

    async def hang_front(self, front: FrontProcess) -> None:
        self.count("front stopped")
        front.send(signal.SIGSTOP)
        await trio.sleep(self.random.uniform(0.5, 20.0))
        front.send(signal.SIGCONT)
        front.impaired = False

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


async def run(nodes: int, minutes: float, seed: int, fronts: int = 2) -> dict[str, Any]:
    """One run; raises AssertionError where a place was lost or doubled."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-chaos-"))  # kept where something goes wrong
    print(f"journals and logs in {folder}", file=sys.stderr)
    async with hollow_nodes(folder, nodes) as processes:
        urls = ",".join(node.url for node in processes)
        chaos = Chaos(
            nodes=processes,
            fronts=[FrontProcess(folder=folder / f"front-{number}", nodes=urls) for number in range(fronts)],
            random=random.Random(seed),
        )
        try:
            for front in chaos.fronts:
                await front.start()
            await _disturbed(chaos, minutes)
        finally:
            with trio.CancelScope(shield=True):
                for front in chaos.fronts:
                    await front.kill()
        for front in chaos.fronts:
            front.reader.check(chaos.tasks)
    shutil.rmtree(folder)
    return {
        "nodes": nodes,
        "fronts": fronts,
        "seed": seed,
        "tasks": len(chaos.tasks),
        "places": sum(chaos.tasks.values()),
        "lost": 0,
        "doubled": 0,
        "came_again": sum(front.reader.repeated for front in chaos.fronts),
        "counts": dict(sorted(chaos.counts.items())),
    }


async def _disturbed(chaos: Chaos, minutes: float) -> None:
    async with trio.open_nursery() as nursery:
        for front in chaos.fronts:
            nursery.start_soon(chaos.read, front)
        async with trio.open_nursery() as load:
            load.start_soon(chaos.submit)
            load.start_soon(chaos.disturb, load)
            await trio.sleep(60 * minutes)
            chaos.over = True
        with trio.move_on_after(END_S):
            while chaos.ended() < len(chaos.tasks):  # noqa: ASYNC110
                await trio.sleep(0.2)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=8)
    options.add_argument("--fronts", type=int, default=2)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    found = trio.run(run, given.nodes, given.minutes, given.seed, given.fronts)
    print(json.dumps(found, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
