"""Chaos: hollow nodes that share a PostgreSQL, under load, while nodes, readers and PostgreSQL are disturbed.

    python benchmarks/fleet.py [--nodes 8] [--minutes 10] [--seed 1] [--standby synchronous] [--json FILE]
    python benchmarks/fleet.py --outage 600 [--nodes 2]

Every task must end with one session in each place, whatever happened: counts what was lost, doubled, and came
to a reader under another position. Nodes are the real control plane, journal and scheduler on containers in
memory (tests/kits/hollow_node.py); PostgreSQL is the distribution's, in a folder of its own. Some tasks kill
the node that runs them. Trainers submit, cancel and read at any node.

With `--standby` the server is lost for good after half of the time, and its standby is promoted. An asynchronous one
may lack what was accepted in its last moments: a task that nobody had begun is then lost, its readers are told a
gap, and the count says so.

With `--outage` PostgreSQL is down for so many seconds while sessions run and end, and nothing else happens: none
may be lost, or run again.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
import trio
from attrs import define, field

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kits"))

from fleet_kit import HollowProcess, Reader, hollow_nodes, hollow_task
from postgres_kit import Cluster, running_cluster

from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.core.errors import PolarnodeError

OPEN: Final = 24  # tasks at once: some on every node
PATIENCE_S: Final = 2.0  # of a trainer with a node, before it asks another
END_S: Final = 180.0  # for the last tasks, when nothing is disturbed any more
LEASE_S: Final = 4.0
LAG_S: Final = 10.0  # an asynchronous standby is never so far behind here
READERS: Final = ("one", "two")
RETRIES: Final = 2  # of a task: more losses of one place than that end it with an error, and are in the count


@define(eq=False, kw_only=True)
class Chaos:
    """One run. `killers`: tasks whose sessions kill their node."""

    cluster: Cluster
    dsn: str
    nodes: list[HollowProcess]
    random: random.Random
    readers: dict[str, Reader] = field(factory=lambda: {name: Reader() for name in READERS})
    tasks: dict[str, int] = field(factory=dict)
    cancelled: set[str] = field(factory=set)
    counts: Counter[str] = field(factory=Counter)
    impaired: set[int] = field(factory=set)
    reading: dict[str, trio.CancelScope] = field(factory=dict)
    standby: Cluster | None = None
    promoted: float | None = None  # when
    accepted: dict[str, float] = field(factory=dict)  # when a task was
    gaps: int = 0
    changing: trio.Lock = field(factory=trio.Lock)  # one thing at a time happens to the server
    over: bool = False

    def client(self, patience_s: float = PATIENCE_S) -> AsyncPolarnodeClient:
        """A client of any node."""
        return AsyncPolarnodeClient(
            self.random.choice(self.nodes).url, patience_s=patience_s, ack_every_s=0.2
        )

    # ── load ──────────────────────────────────────────────────────────────────

    async def submit(self) -> None:
        number = 0
        while not self.over:
            if len(self.tasks) - self.ended() >= OPEN:
                await trio.sleep(0.05)
                continue
            number += 1
            task_id, samples = f"t{number}", self.random.choice((1, 2, 4))
            early = {"group": {"early_stop_min": 2}} if samples == 4 and self.random.random() < 0.3 else {}
            spec = hollow_task(
                samples=samples,
                seconds=self.random.uniform(0.2, 4.0),
                kills=self.random.random() < 0.02,
                task_id=task_id,
                budgets={"retries": RETRIES},
                **early,
            )
            if await self._taken(spec):
                self.tasks[task_id], self.accepted[task_id] = samples, trio.current_time()
                if self.random.random() < 0.03:
                    await self._cancel(task_id)

    async def _taken(self, spec: dict[str, Any]) -> bool:
        """Whether a task was taken. It is sent twice, to another node too: it stays one task."""
        times = 0
        while times < 2 and not (self.over and not times):
            async with self.client() as client:
                try:
                    await client.submit(spec)
                    times += 1
                except PolarnodeError as error:
                    self.counts[f"submit: {type(error).__name__} {getattr(error, 'status', '')}"] += 1
                    await trio.sleep(0.05)
        return times > 0

    async def _cancel(self, task_id: str) -> None:
        async with self.client() as client:
            with suppress(PolarnodeError):
                await client.cancel(task_id)
                self.cancelled.add(task_id)
                self.counts["task cancelled"] += 1

    def ended(self) -> int:
        return sum(
            all(f"group:{task_id}" in reader.events for reader in self.readers.values())
            for task_id in self.tasks
        )

    async def read(self, name: str) -> None:
        """Read as one consumer, at one node until that fails or the reader is killed, then at another."""
        while True:
            with trio.CancelScope() as scope:
                self.reading[name] = scope
                async with self.client(END_S if self.over else PATIENCE_S) as client:
                    try:
                        async for event in client.trajectories(consumer=name, ack=True):
                            if event.kind == "gap":
                                self.gaps += 1
                                continue
                            self.readers[name].add(event.kind, event.key, event.data)
                            self.counts[f"event: {event.kind}"] += 1
                    except PolarnodeError as error:
                        self.counts[f"stream: {type(error).__name__}"] += 1
                        await trio.sleep(0.2)

    # ── what happens ──────────────────────────────────────────────────────────

    async def disturb(self, nursery: trio.Nursery) -> None:
        acts: dict[Callable[[], Awaitable[None]], float] = {
            self.kill: 10,
            self.hang: 6,
            self.kill_reader: 4,
            self.crash: 2,
            self.freeze: 1,
        }
        while not self.over:
            await trio.sleep(self.random.uniform(0.5, 4.0))
            (act,) = self.random.choices(tuple(acts), tuple(acts.values()))
            if act in (self.crash, self.freeze):
                await act()
            else:
                nursery.start_soon(act)

    def _victim(self) -> int | None:
        """A node to be disturbed: a third of them at most, at once."""
        able = [number for number in range(len(self.nodes)) if number not in self.impaired]
        if len(self.impaired) >= max(1, len(self.nodes) // 3) or not able:
            return None
        number = self.random.choice(able)
        self.impaired.add(number)
        return number

    async def kill(self) -> None:
        if (number := self._victim()) is None:
            return
        self.counts["disturbed: node killed"] += 1
        await self.nodes[number].kill()
        await trio.sleep(self.random.choice((0.0, self.random.uniform(0, 2 * LEASE_S))))
        await self.nodes[number].start()
        self.impaired.discard(number)

    async def hang(self) -> None:
        if (number := self._victim()) is None:
            return
        self.counts["disturbed: node stopped"] += 1
        node = self.nodes[number]
        with suppress(ProcessLookupError, AssertionError):
            node.stop()
            await trio.sleep(self.random.uniform(0.5, 3 * LEASE_S))
            node.go_on()
            await trio.sleep(2.0)  # what it does behind the fence
        self.impaired.discard(number)

    async def kill_reader(self) -> None:
        self.counts["disturbed: reader killed"] += 1
        self.reading[self.random.choice(READERS)].cancel()
        await trio.lowlevel.checkpoint()

    async def crash(self) -> None:
        async with self.changing:
            self.counts["disturbed: PostgreSQL crashed"] += 1
            await trio.to_thread.run_sync(self.cluster.crash)
            await trio.sleep(self.random.uniform(0, 6))
            await trio.to_thread.run_sync(self.cluster.start)

    async def freeze(self) -> None:
        async with self.changing:
            self.counts["disturbed: PostgreSQL stopped"] += 1
            with self.cluster.frozen():
                await trio.sleep(self.random.uniform(0.5, 6))

    async def promote(self, seconds: float) -> None:
        """Lose the server after so many seconds, for good; its standby takes over."""
        await trio.sleep(seconds)
        async with self.changing:
            assert self.standby is not None
            self.promoted = trio.current_time()
            await trio.to_thread.run_sync(self.cluster.crash)
            await trio.to_thread.run_sync(self.standby.promote)
            self.cluster, self.standby = self.standby, None
            self.counts["disturbed: standby promoted"] += 1

    async def revive(self) -> None:
        """Start again the nodes that a task killed."""
        while True:
            await trio.sleep(0.5)
            for number, node in enumerate(self.nodes):
                if number not in self.impaired and node.process and node.process.poll() is not None:
                    self.impaired.add(number)
                    self.counts["disturbed: node killed by its task"] += 1
                    await node.kill()
                    await node.start()
                    self.impaired.discard(number)

    # ── what came of it ───────────────────────────────────────────────────────

    def check(self) -> None:
        """Every reader got every place once, and no place is open or held any more."""
        with psycopg.connect(self.dsn, options="-c search_path=polarnode") as db:
            known = {task_id for (task_id,) in db.execute("SELECT task_id FROM tasks")}
            for task_id in self.tasks.keys() - known:  # the promoted standby never had it
                assert self.gaps, f"{task_id} is gone, and no reader was told"
                assert self.promoted is not None
                assert self.promoted - self.accepted[task_id] < LAG_S, f"{task_id} was lost"
                del self.tasks[task_id]
                self.counts["task lost with its server"] += 1
            for reader in self.readers.values():
                reader.check(self.tasks)
            (held,) = db.execute("SELECT count(*) FROM places WHERE state <> 'over'").fetchone() or (0,)
            rows = db.execute("SELECT task_id, place, count(*) FROM places GROUP BY 1, 2 HAVING count(*) > 1")
            assert not held, f"{held} places are open or held"
            assert not rows.fetchall()


async def run(nodes: int, minutes: float, seed: int, standby: str | None = None) -> dict[str, Any]:
    """One run; raises AssertionError where a place was lost or doubled."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-chaos-"))  # kept where something goes wrong
    print(f"journals and logs in {folder}", file=sys.stderr)
    with running_cluster() as cluster, ExitStack() as stack:
        dsn, other = cluster.database(), None
        if standby is not None:
            other = stack.enter_context(cluster.standby(synchronous=standby == "synchronous"))
            dsn = cluster.dsn_with(other, dsn.rpartition("=")[2])
        async with hollow_nodes(folder, nodes, settings={"log": dsn}) as processes:
            chaos = Chaos(
                cluster=cluster, dsn=dsn, nodes=processes, random=random.Random(seed), standby=other
            )
            await _disturbed(chaos, minutes)
        chaos.check()
    shutil.rmtree(folder)
    return {
        "nodes": nodes,
        "seed": seed,
        "minutes": minutes,
        "tasks": len(chaos.tasks),
        "places": sum(chaos.tasks.values()),
        "lost": 0,
        "doubled": 0,
        "gaps": chaos.gaps,
        "came_again": sum(reader.repeated for reader in chaos.readers.values()),
        "counts": dict(sorted(chaos.counts.items())),
    }


async def run_outage(nodes: int, seconds: float) -> dict[str, Any]:
    """PostgreSQL is down while sessions run. Raises AssertionError where one was lost or run again."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-outage-"))  # kept where something goes wrong
    print(f"journals and logs in {folder}", file=sys.stderr)
    chance, reader, tasks = random.Random(1), Reader(), dict[str, int]()
    with running_cluster() as cluster:
        async with (
            hollow_nodes(folder, nodes, settings={"log": cluster.database()}) as processes,
            AsyncPolarnodeClient(processes[0].url, patience_s=seconds + END_S) as client,
        ):
            for number in range(8 * nodes):
                lasts = chance.uniform(5.0, seconds * 1.2)
                await client.submit(hollow_task(samples=2, seconds=lasts, task_id=f"t{number}"))
                tasks[f"t{number}"] = 2
            await trio.sleep(3.0)
            await trio.to_thread.run_sync(cluster.crash)
            await trio.sleep(seconds)
            await trio.to_thread.run_sync(cluster.start)
            began = trio.current_time()
            with trio.fail_after(0.3 * seconds + END_S):
                async for event in client.trajectories(consumer="r", ack=True):
                    reader.add(event.kind, event.key, event.data)
                    if sum(key.startswith("group:") for key in reader.events) == len(tasks):
                        break
            reader.check(tasks)
            trajectories = [each for key, each in reader.events.items() if key.startswith("trajectory:")]
            assert {each["attempt"] for each in trajectories} == {0}, "a session was run again"
            assert {each["outcome"]["status"] for each in trajectories} == {"completed"}
    shutil.rmtree(folder)
    return {
        "nodes": nodes,
        "away_s": seconds,
        "sessions": len(trajectories),
        "lost": 0,
        "run_again": 0,
        "all_read_s": round(trio.current_time() - began, 1),
    }


async def _disturbed(chaos: Chaos, minutes: float) -> None:
    async with trio.open_nursery() as nursery:
        for name in READERS:
            nursery.start_soon(chaos.read, name)
        nursery.start_soon(chaos.revive)
        async with trio.open_nursery() as load:
            load.start_soon(chaos.submit)
            load.start_soon(chaos.disturb, load)
            if chaos.standby is not None:
                load.start_soon(chaos.promote, 30 * minutes)
            await trio.sleep(60 * minutes)
            chaos.over = True
        with trio.move_on_after(END_S):
            while chaos.ended() < len(chaos.tasks):  # noqa: ASYNC110
                await trio.sleep(0.2)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=8)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--standby", choices=("synchronous", "asynchronous"))
    options.add_argument("--outage", type=float, help="seconds for which PostgreSQL is down")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    if given.outage is not None:
        found = trio.run(run_outage, given.nodes, given.outage)
    else:
        found = trio.run(run, given.nodes, given.minutes, given.seed, given.standby)
    print(json.dumps(found, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
