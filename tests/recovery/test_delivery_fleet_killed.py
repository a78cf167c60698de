"""Two nodes, their front and a reader are killed with SIGKILL at random moments: the reader of
docs/delivery.md, word for word, learns every group whole and every place once.

POLARNODE_DELIVERY_SEED gives a run again, POLARNODE_DELIVERY_FLEET_ROUNDS another length.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio
from attrs import define, field
from fleet_kit import free_port, hollow_nodes, hollow_task

from polarnode.client.asynchronous import AsyncPolarnodeClient

ROUNDS = int(os.environ.get("POLARNODE_DELIVERY_FLEET_ROUNDS", "6"))
SEED = int(os.environ.get("POLARNODE_DELIVERY_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SAMPLES = 2
READER = Path(__file__).with_name("delivery_program.py")
HERE = {"cwd": Path(__file__).parent, "start_new_session": True}


@define(eq=False, kw_only=True)
class Killed:
    """A process that is killed and started again."""

    argv: tuple[str, ...]
    folder: Path
    line: str = ""  # what it reads
    process: trio.Process | None = field(default=None)

    async def start(self) -> None:
        with (self.folder / "programs.log").open("ab") as log:
            self.process = await trio.lowlevel.open_process(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "POLARNODE_TOKEN": "secret"},
                **HERE,  # type: ignore[arg-type]
            )
        assert self.process.stdin is not None
        await self.process.stdin.send_all(self.line.encode())

    async def kill(self) -> None:
        """With the processes that it began."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            self.process = None


@asynccontextmanager
async def running(*programs: Killed) -> AsyncIterator[None]:
    try:
        for each in programs:
            await each.start()
        yield
    finally:
        with trio.CancelScope(shield=True):
            for each in programs:
                await each.kill()


async def submit_some(url: str, submitted: list[str], enough: trio.Event) -> None:
    """Submit tasks until it is enough, each until it is taken."""
    async with AsyncPolarnodeClient(url, token="secret", patience_s=120) as client:
        while not enough.is_set():
            task_id = f"task-{len(submitted)}"
            await client.submit(hollow_task(samples=SAMPLES, seconds=0.1, task_id=task_id))
            submitted.append(task_id)
            with trio.move_on_after(0.3):
                await enough.wait()


async def until_learned(learned: Path, tasks: list[str]) -> None:
    wanted = {f"task:{task_id}" for task_id in tasks}
    while not wanted <= set(await _lines(learned)):  # noqa: ASYNC110 - another process writes it
        await trio.sleep(0.2)


async def _lines(path: Path) -> list[str]:
    try:
        return (await trio.Path(path).read_text()).splitlines()
    except FileNotFoundError:
        return []


async def test_a_fleet_s_reader_learns_every_place_once(tmp_path: Path) -> None:
    print(f"POLARNODE_DELIVERY_SEED={SEED}")
    chance, port = random.Random(SEED), free_port()
    url = f"http://127.0.0.1:{port}"
    told = {"folder": str(tmp_path), "url": url, "consumer": "one"}
    reader = Killed(
        argv=(sys.executable, str(READER)), folder=tmp_path, line=json.dumps(["reader", told]) + "\n"
    )
    async with hollow_nodes(tmp_path, 2, token="secret") as nodes:
        argv = (sys.executable, "-m", "polarnode.cli", "fleet", "--port", str(port))
        argv += ("--state-dir", str(tmp_path / "front"), "--nodes", ",".join(node.url for node in nodes))
        front = Killed(argv=argv, folder=tmp_path)
        submitted: list[str] = []
        async with running(front, reader), trio.open_nursery() as nursery:
            enough = trio.Event()
            nursery.start_soon(submit_some, url, submitted, enough)
            with trio.fail_after(60):
                while len(submitted) < 3:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            for _ in range(ROUNDS):
                await trio.sleep(chance.uniform(0.0, 2.0))
                victim = chance.choice((*nodes, front, reader, reader))
                await victim.kill()
                await trio.sleep(chance.choice((0.0, 1.0)))
                await victim.start()
            enough.set()
            with trio.fail_after(90):
                while nursery.child_tasks:  # noqa: ASYNC110 - the last one is taken
                    await trio.sleep(0.1)
                await until_learned(tmp_path / "one.learned", submitted)
    learned = set(await _lines(tmp_path / "one.learned"))
    groups = [json.loads(line) for line in await _lines(tmp_path / "one.groups")]
    for task_id in submitted:
        said = {json.dumps(found) for key, found in groups if key == f"group:{task_id}"}
        assert len(said) == 1, f"the group of {task_id} came as {said}"
        members = json.loads(said.pop())
        assert Counter(place for place, _ in members) == Counter(range(SAMPLES))
        for _, session_id in members:
            assert f"trajectory:{session_id}" in learned, f"{task_id} names {session_id}, which did not come"
    print(f"{len(submitted)} tasks, {len(await _lines(tmp_path / 'one.came'))} deliveries")
