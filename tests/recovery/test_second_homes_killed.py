"""Nodes that are processes of their own, killed with SIGKILL at random moments: a task's home, then its
second home, both of which come back. Whoever reads all journals sees each place filled once.
"""

import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from homes_kit import task

from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.json import structure
from polarnode.core.fleet import (
    Adoption,
    AdoptOrder,
    CopyOrder,
    CopyRow,
    CopyRows,
    Epoch,
    Moved,
    Peer,
    ResumeOrder,
    TaskCopy,
    TermOrder,
)
from polarnode.fleet.link import Link
from polarnode.journal.check import check_journal

pytestmark = pytest.mark.trio

PROGRAM = Path(__file__).parents[1] / "kits" / "hollow_node.py"
ROUNDS = 2
TASKS = 3
PLACES = 4


@define(eq=False)
class Process:
    """A node in a process of its own."""

    folder: Path
    name: str
    nursery: trio.Nursery
    process: trio.Process | None = None
    link: Any = None
    journal: str = ""
    port: int = field(default=0)

    async def start(self) -> None:
        command = [sys.executable, str(PROGRAM), "--folder", str(self.folder / self.name)]
        run = partial(
            trio.run_process,
            [*command, "--ports", str(self.port)],
            stdin=-1,
            stdout=-1,
            check=False,
        )
        self.process = await self.nursery.start(run)
        assert self.process.stdout is not None
        line = b""
        with trio.fail_after(60):
            while b"\n" not in line:
                piece = await self.process.stdout.receive_some()
                assert piece, f"node {self.name} did not start"
                line += piece
        said = json.loads(line)
        self.port, self.journal = int(said["url"].rpartition(":")[2]), said["journal"]
        self.link = Link(url=said["url"], token=None)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()
        await self.link.close()

    async def call(self, method: str, path: str, value: object = None) -> Any:
        return await self.link.call(method, path, value=value)

    async def rows(self) -> dict[str, CopyRow]:
        found = structure(await self.call("GET", "/v1/fleet/tasks"), CopyRows)
        return {row.task_id: row for row in found.tasks}

    async def events(self) -> list[tuple[str, str, Any]]:
        """Kind, key and data of its events, those of attempts too."""
        kinds = "kinds=trajectory,group,task,attempt"
        answer = await self.link.ask("GET", f"/v1/trajectories/stream?follow=false&{kinds}")
        found = []
        for block in answer.body.decode().split("\n\n"):
            lines = dict(line.partition(": ")[::2] for line in block.splitlines() if ": " in line)
            if "data" in lines:
                body = json.loads(lines["data"])
                found.append((lines["event"], body["key"], body))
        return found


@asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[dict[str, Process]]:
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nodes = {name: Process(folder, name, nursery) for name in "abc"}
        async with trio.open_nursery() as starting:
            for each in nodes.values():
                starting.start_soon(each.start)
        try:
            yield nodes
        finally:
            with trio.move_on_after(10, shield=True):
                for each in nodes.values():
                    await each.kill()


async def take_office(nodes: dict[str, Process], term: int, *names: str) -> None:
    peers = tuple(Peer(journal=each.journal, url=each.link.url) for each in nodes.values())
    for name in names:
        await nodes[name].call("POST", "/v1/fleet/term", TermOrder(term=term, front="test", peers=peers))


async def submit(nodes: dict[str, Process], term: int, task_id: str) -> None:
    """As a front does it: what home did not answer may be there all the same."""
    copy = TaskCopy(
        task_id=task_id,
        epoch=Epoch(term, 0),
        home=nodes["a"].journal,
        second=nodes["b"].journal,
        spec=task(0.3, places=PLACES),
        submitted=1000.0,
    )
    await nodes["b"].call("POST", "/v1/fleet/tasks", CopyOrder(term=term, role="second", copy=copy))
    with suppress(Unreachable, ClientError):
        await nodes["a"].call("POST", "/v1/fleet/tasks", CopyOrder(term=term, role="home", copy=copy))


async def adopt(nodes: dict[str, Process], term: int, number: int, name: str, second: str) -> set[str]:
    """Every task that the node keeps as second home."""
    rows = await nodes[name].rows()
    tasks = tuple(
        Adoption(task_id=each, epoch=Epoch(term, number), second=nodes[second].journal if second else "")
        for each, row in rows.items()
        if row.role == "second" and row.epoch < Epoch(term, number)
    )
    await nodes[name].call("POST", "/v1/fleet/adopt", AdoptOrder(term=term, tasks=tasks))
    return {each.task_id for each in tasks}


async def come_back(nodes: dict[str, Process], term: int, name: str, owner: str) -> None:
    """The node's tasks whose rows have a later epoch at `owner` moved there; the others are its own."""
    await nodes[name].start()
    alive = [each for each, node in nodes.items() if node.process and node.process.returncode is None]
    await take_office(nodes, term, *alive)
    theirs, rows = await nodes[owner].rows(), (await nodes[name].rows()).values()
    mine = [row for row in rows if row.role == "home"]
    lost = [row for row in mine if row.task_id in theirs and theirs[row.task_id].epoch > row.epoch]
    moved = tuple(
        Moved(task_id=row.task_id, epoch=theirs[row.task_id].epoch, home=nodes[owner].journal) for row in lost
    )
    own = tuple(row.task_id for row in mine if row not in lost)
    await nodes[name].call("POST", "/v1/fleet/resume", ResumeOrder(term=term, own=own, moved=moved))


async def check_read(nodes: dict[str, Process], tasks: set[str]) -> None:
    """Until every group has ended: each place is filled once, whoever delivers it."""
    groups: dict[str, Any] = {}
    with trio.fail_after(60):
        while set(groups) != tasks:
            await trio.sleep(0.3)
            given: dict[str, set[str]] = {}
            bodies: dict[str, str] = {}
            for node in nodes.values():
                for kind, key, body in await node.events():
                    data = body.get(kind)
                    if kind == "trajectory":
                        given.setdefault(data["task_id"], set()).add(data["session_id"])
                    if kind == "group":
                        groups[data["task_id"]] = data
                    if kind != "attempt":
                        text = json.dumps(data)
                        assert bodies.setdefault(key, text) == text, f"two bodies of {key}"
    for task_id, group in groups.items():
        members = [each["session_id"] for each in group["sessions"]]
        assert len(members) == PLACES
        assert given[task_id] == set(members), f"{task_id}: a place is lost or doubled"


@pytest.mark.parametrize("seed", [1, 2])
async def test_home_and_then_second_home_are_killed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    async with processes(tmp_path) as nodes:
        tasks: set[str] = set()
        for term in range(1, ROUNDS + 1):
            await take_office(nodes, term, *nodes)
            async with trio.open_nursery() as nursery:
                for number in range(TASKS):
                    name = f"t{term}-{number}"
                    nursery.start_soon(submit, nodes, term, name)
                await trio.sleep(draw.uniform(0.02, 1.2))
                await nodes["a"].kill()
            tasks |= await adopt(nodes, term, 1, "b", "c")
            await trio.sleep(draw.uniform(0.0, 0.4))
            if draw.random() < 0.5:
                await nodes["b"].kill()
                await come_back(nodes, term, "b", "c")
            await come_back(nodes, term, "a", "b")
            await check_read(nodes, tasks)
        for node in nodes.values():
            await node.kill()
            path = tmp_path / node.name / node.name / "journal.sqlite"
            if not path.exists():
                path = next((tmp_path / node.name).rglob("journal.sqlite"))
            report = await trio.to_thread.run_sync(check_journal, path)
            assert report.ok, (node.name, report.faults)
