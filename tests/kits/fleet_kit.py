"""Hollow nodes as processes that a test kills, stops and starts again, and what a reader of a fleet got."""

import json
import os
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from postgres_kit import running_cluster

KIT = Path(__file__).parent


PORTS = range(20_000, 32_000)  # below those that connections to elsewhere get


def free_port() -> int:
    """A port that a node has again after its death: no connection takes it meanwhile."""
    while True:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@define(eq=False, kw_only=True)
class HollowProcess:
    """A process with one hollow node, on a port and a folder of its own."""

    folder: Path
    port: int = field(factory=free_port)
    token: str | None = None
    settings: dict[str, Any] = field(factory=dict)
    process: trio.Process | None = None
    journal: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        argv = [sys.executable, str(KIT / "hollow_node.py"), "--folder", str(self.folder)]
        argv += ["--ports", str(self.port), "--settings", json.dumps(self.settings)]
        argv += [] if self.token is None else ["--token", self.token]
        self.process = await trio.lowlevel.open_process(
            argv, stdin=-1, stdout=-1, cwd=KIT, start_new_session=True
        )
        assert self.process.stdout is not None
        line = b""
        with trio.fail_after(150):  # a statement of its start that hangs ends after 60 s, and is made again
            while not line.endswith(b"\n"):
                more = await self.process.stdout.receive_some()
                assert more, f"the node of {self.folder} did not start"
                line += more
        self.journal = json.loads(line)["journal"]

    async def kill(self) -> None:
        """End it as a machine that loses power."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            self.process = None

    def stop(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


@asynccontextmanager
async def hollow_nodes(folder: Path, count: int, **more: Any) -> AsyncIterator[list[HollowProcess]]:
    """So many hollow nodes that serve; whatever became of them, their processes end with the block."""
    nodes = [HollowProcess(folder=folder / f"node-{number}", **more) for number in range(count)]
    try:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.start)
        yield nodes
    finally:
        with trio.CancelScope(shield=True):
            for node in nodes:
                if node.process is not None:
                    with suppress(ProcessLookupError):
                        node.go_on()
                await node.kill()


def open_fleet_in_thread(thread: Any, folder: Path, *, nodes: int, token: str | None = None) -> str:
    """The address of the first of so many hollow nodes that share a PostgreSQL, for as long as a thread of
    `client_kit.here` is open.
    """
    cluster = thread.stack.enter_context(running_cluster())
    # slots for so few sessions that one node alone does not take all of a test's
    settings = {"log": cluster.database(), "run_limit": 4, "ready_limit": 1}
    processes = thread.open(hollow_nodes(folder, nodes, token=token, settings=settings))
    return str(processes[0].url)


def hollow_task(
    *, samples: int = 4, seconds: float = 1.0, kilobytes: float = 2.0, kills: bool = False, **more: Any
) -> dict[str, Any]:
    """A task whose sessions take so many seconds and make so many kilobytes of events, or kill their node."""
    return {
        "instruction": "x",
        "harness": {
            "name": "shell",
            "command": ["hollow", str(seconds), "kill" if kills else str(kilobytes)],
        },
        "num_samples": samples,
        "evaluator": {"import_path": "session_kit:READS"},
        **more,
    }


@define(eq=False)
class Reader:
    """What a reader got, by key: the events that a trainer would train on."""

    events: dict[str, Any] = field(factory=dict)
    repeated: int = 0

    def add(self, kind: str, key: str, data: Any) -> None:
        if key in self.events:
            self.repeated += 1
            if kind == "group":
                before = [each["session_id"] for each in self.events[key]["sessions"]]
                assert before == [each["session_id"] for each in data["sessions"]], f"{key} names others"
        self.events[key] = data

    def check(self, tasks: dict[str, int]) -> None:
        """Every task's group came, each of its places is filled once, and its sessions were delivered."""
        held: dict[tuple[str, int], str] = {}
        for key, each in self.events.items():
            if key.startswith("trajectory:"):
                place = (each["task_id"], each["sample_index"])
                assert held.setdefault(place, each["session_id"]) == each["session_id"], f"{place} is doubled"
        for task_id, samples in tasks.items():
            group = self.events.get(f"group:{task_id}")
            assert group is not None, f"the group of {task_id} did not come"
            places = Counter(each["sample_index"] for each in group["sessions"])
            assert places == Counter(range(samples)), f"{task_id}: {places}"
            for each in group["sessions"]:
                assert f"trajectory:{each['session_id']}" in self.events, f"{each} was not delivered"
