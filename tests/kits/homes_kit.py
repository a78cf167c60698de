"""Hollow nodes of one process over real HTTP, and what a front would send them: what `polarnode.node.peers`,
`polarnode.api.fleet_routes`, `polarnode.rollouts.second_homes` and `polarnode.journal.copies` do together.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from hollow_node import open_hollow

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
    Role,
    TaskCopy,
    TermOrder,
)
from polarnode.core.task import Budgets, HarnessSpec, TaskSpec
from polarnode.fleet.link import Link
from polarnode.journal.values import Filters
from polarnode.node.config import NodeConfig


@define(eq=False, kw_only=True)
class Hollow:
    """A node that can be killed: what it has not written is lost, its journal stays."""

    folder: Path
    name: str
    nursery: trio.Nursery
    node: Any = None
    link: Any = None
    port: int = 0
    _scope: trio.CancelScope | None = None
    _ended: trio.Event = field(factory=trio.Event)

    @property
    def journal(self) -> str:
        return str(self.node.journal.id)

    @property
    def lives(self) -> bool:
        return not self._ended.is_set()

    async def start(self) -> None:
        self._ended, serves = trio.Event(), trio.Event()
        self.nursery.start_soon(self._serve, serves)
        await serves.wait()

    async def _serve(self, serves: trio.Event) -> None:
        config = NodeConfig(
            engine="simulated",
            port=self.port,
            node_id=self.name,
            state_dir=str(self.folder / self.name),
            podman_dir=str(self.folder / "podman"),
            memory_reserve_mb=1,
            disk_reserve_mb=1,
        )
        with trio.CancelScope() as self._scope:
            async with open_hollow(config) as (self.node, address):
                self.port = address.port
                self.link = Link(url=f"http://{address.host}:{address.port}", token=None)
                serves.set()
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.move_on_after(2, shield=True):
                        await self.link.close()
        self._ended.set()

    async def kill(self) -> None:
        """End the node by force: nothing of it runs on, sessions have no end."""
        assert self._scope is not None
        self._scope.cancel()
        await self._ended.wait()

    async def call(self, method: str, path: str, value: object = None) -> Any:
        return await self.link.call(method, path, value=value)

    async def row(self, task_id: str) -> CopyRow | None:
        rows = structure(await self.call("GET", f"/v1/fleet/tasks?task_id={task_id}"), CopyRows)
        return next(iter(rows.tasks), None)

    async def events(self, *kinds: str) -> list[tuple[str, bytes]]:
        """Keys and bytes of its events."""
        chosen: Any = kinds or ("trajectory", "group", "task", "attempt")
        page = await self.node.journal.events(0, filters=Filters(kinds=chosen), limit=1000)
        return [(each.key, each.body) for each in page.events]

    async def keys(self, *kinds: str) -> list[str]:
        return [key for key, _ in await self.events(*kinds)]


@define(eq=False, kw_only=True)
class Fleet:
    """Nodes, and the one that plays their front."""

    nodes: Mapping[str, Hollow]
    term: int = 0

    def __getitem__(self, name: str) -> Hollow:
        return self.nodes[name]

    async def take_office(self, *names: str, front: str = "front") -> None:
        """A new term, at these nodes or all."""
        self.term += 1
        for name in names or self.nodes:
            await self.name_peers(name, front=front)

    async def name_peers(self, name: str, *, front: str = "front") -> None:
        peers = [Peer(journal=each.journal, url=each.link.url) for each in self.nodes.values()]
        order = TermOrder(term=self.term, front=front, peers=tuple(peers))
        await self[name].call("POST", "/v1/fleet/term", order)

    async def submit(self, home: str, second: str, spec: TaskSpec, task_id: str = "t1") -> None:
        copy = TaskCopy(
            task_id=task_id,
            epoch=Epoch(self.term, 0),
            home=self[home].journal,
            second=self[second].journal,
            spec=spec,
            submitted=1000.0,
        )
        for name, role in ((second, "second"), (home, "home")):
            await self.copy(name, copy, role)  # type: ignore[arg-type]

    async def copy(self, name: str, copy: TaskCopy, role: Role) -> None:
        order = CopyOrder(term=self.term, role=role, copy=copy)
        await self[name].call("POST", "/v1/fleet/tasks", order)

    async def adopt(self, name: str, second: str, number: int = 1, task_id: str = "t1") -> CopyRow:
        return await self._moved("/v1/fleet/adopt", name, second, number, task_id)

    async def replace_second(self, name: str, second: str, number: int = 1, task_id: str = "t1") -> CopyRow:
        return await self._moved("/v1/fleet/seconds", name, second, number, task_id)

    async def _moved(self, path: str, name: str, second: str, number: int, task_id: str) -> CopyRow:
        adoption = Adoption(
            task_id=task_id,
            epoch=Epoch(self.term, number),
            second=self[second].journal if second else "",
        )
        await self[name].call("POST", path, AdoptOrder(term=self.term, tasks=(adoption,)))
        row = await self[name].row(task_id)
        assert row is not None
        return row

    async def resume(
        self, name: str, own: Iterable[str] = (), moved: Mapping[str, tuple[str, int]] | None = None
    ) -> None:
        order = ResumeOrder(
            term=self.term,
            own=tuple(own),
            moved=tuple(
                Moved(task_id=task, epoch=Epoch(self.term, number), home=self[home].journal)
                for task, (home, number) in (moved or {}).items()
            ),
        )
        await self[name].call("POST", "/v1/fleet/resume", order)

    async def read(self) -> dict[str, set[bytes]]:
        """What a reader of all journals sees: by key, every body that it was given."""
        found: dict[str, set[bytes]] = {}
        for hollow in self.nodes.values():
            if not hollow.lives:
                continue
            for key, body in await hollow.events("trajectory", "group", "task"):
                found.setdefault(key, set()).add(body)
        return found

    async def check_group(self, places: int, task_id: str = "t1") -> list[str]:
        """Every place is filled once, the group ended once, and each body is the same wherever it comes from.
        Gives the sessions by place.
        """
        found = await self.read()
        assert all(len(bodies) == 1 for bodies in found.values()), "one key, two bodies"
        (body,) = found[f"group:{task_id}"]
        assert f"task:{task_id}" in found
        members = json.loads(body)["sessions"]
        sessions = [each["session_id"] for each in members]
        assert [each["sample_index"] for each in members] == list(range(places))
        given = {key for key in found if key.startswith("trajectory:")}
        assert given == {f"trajectory:{each}" for each in sessions}, "a place lost or doubled"
        return sessions


async def until(test: Any, seconds: float = 20.0) -> None:
    """Until the async test holds."""
    with trio.fail_after(seconds):
        while not await test():  # noqa: ASYNC110
            await trio.sleep(0.05)


@asynccontextmanager
async def three(folder: Path, names: str = "abc") -> AsyncIterator[Fleet]:
    """Nodes that serve, in the first term."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nodes = {name: Hollow(folder=folder, name=name, nursery=nursery) for name in names}
        for hollow in nodes.values():
            await hollow.start()
        found = Fleet(nodes=nodes)
        await found.take_office()
        yield found
        nursery.cancel_scope.cancel()


def task(seconds: float = 0.0, places: int = 2, **more: Any) -> TaskSpec:
    return TaskSpec(
        instruction="do it",
        harness=HarnessSpec(name="shell", command=("hollow", str(seconds), "2")),
        num_samples=places,
        budgets=Budgets(**more.pop("budgets", {})),
        **more,
    )
