"""A node with a simulated engine as a program of its own, what its harnesses were told, and the one question
of these tests: is all accounted for?

The rules for whoever edits it. What a harness was told is read from its own ledger, never from the node.
Whoever looks at the machine looks only for what is the test's own: its node's name, its temporary folder, its
mark. Nothing here says how long something may take.
"""

import errno
import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any
from uuid import uuid4

import httpx
import trio
from attrs import define, field, frozen

from polarnode.containers.container import LABEL_SESSION
from polarnode.containers.probe import default_state_dir, store_at
from polarnode.core.conversation import TextPart
from polarnode.core.trajectory import Built, Trajectory
from polarnode.journal import queries
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.values import EventFilters
from polarnode.merge.invariants import check

sys.path.append(str(Path(__file__).parents[1] / "live"))  # a node as a program is told there

from live_kit import (
    PATIENCE_S,
    PROGRAM,
    TOKEN,
    ServingNode,
    descendants,
    free_port,
    podman,
    serving,
    short_temporary,
    start,
    stat,
    until,
)

__all__ = [
    "PATIENCE_S",
    "PROGRAM",
    "TOKEN",
    "ServingNode",
    "descendants",
    "free_port",
    "podman",
    "short_temporary",
    "stat",
    "until",
]

HARNESS = Path(__file__).with_name("ledger.py")
# seconds: an ended exec is kept for 60, so that its exit code can be asked for, and its conmon with it
ENDED_S = 90.0
EVERY = ("trajectory", "group", "task", "attempt")
# Answers of a few words, so that sessions are short and kills fall everywhere in them; two containers warm,
# few at once for two cores.
SETTINGS = """
engine = "simulated"
warm = 1
init_limit = 2
run_limit = 6
[simulated]
tokens_per_s = 200.0
first_token_s = 0.02
answer_tokens = 24
chunk_tokens = 8
"""
# No containers kept warm, and answers without a pause: for what is asked once.
AT_ONCE = """
engine = "simulated"
warm = 0
[simulated]
tokens_per_s = 0
first_token_s = 0
prefill_tokens_per_s = 0
answer_tokens = 12
"""


@frozen(kw_only=True)
class Place:
    """Where a node lives over all its lives: its folders, its port and its name; `mark` is in every harness's
    command line.
    """

    state_dir: Path
    temporary: Path
    port: int
    node_id: str
    mark: str
    program: tuple[str, ...]

    def start(self) -> ServingNode:
        """Start a life, without waiting until it serves."""
        return start(
            self.state_dir, self.temporary, node_id=self.node_id, port=self.port, program=self.program
        )

    @contextmanager
    def serving(self) -> Iterator[ServingNode]:
        """A life that serves; asked to stop at the end of the block, if it is not over by then."""
        with serving(
            self.state_dir, self.temporary, node_id=self.node_id, port=self.port, program=self.program
        ) as node:
            yield node

    def task(
        self,
        *,
        retries: int = 2,
        num_samples: int = 1,
        budgets: "dict[str, Any] | None" = None,
        **harness: Any,
    ) -> "dict[str, Any]":
        """A task of `ledger.py`."""
        return {
            "instruction": "Go on.",
            "num_samples": num_samples,
            "harness": {
                "name": "shell",
                "command": ["python3", "/work/ledger.py", json.dumps({"mark": self.mark} | harness)],
            },
            "runtime": {"files": [{"path": "ledger.py", "text": HARNESS.read_text()}]},
            "budgets": {"retries": retries} | (budgets or {}),
        }


def fill(folder: Path) -> Path:
    """Take all the room there is: by writing, for the node writes too, and a room that was measured first is
    no longer there.
    """
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 20))
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return ballast
                raise


def place_at(folder: Path, temporary: Path, *, settings: str = SETTINGS) -> Place:
    """A place of a node, new."""
    config = folder / "node.toml"
    config.write_text(settings)
    name = f"recovery-{uuid4().hex[:8]}"
    program = (*PROGRAM, "--config", str(config))
    return Place(
        state_dir=folder / "state",
        temporary=temporary,
        port=free_port(),
        node_id=name,
        mark=f"mark-{name}",
        program=program,
    )


# ── what harnesses were told ──────────────────────────────────────────────────


@define(eq=False)
class Ledger:
    """What one run of a harness was told, in order; `whole` when it was over before its node was."""

    key: str
    old: list[int]
    texts: list[str]
    whole: bool


def read_ledger(text: str, *, whole: bool) -> Ledger | None:
    """None for one that had not begun. A last line that was cut is dropped."""
    lines = [
        json.loads(line)
        for line in text.splitlines(keepends=True)
        if line.endswith("\n") and line.startswith("{")
    ]
    if not lines:
        return None
    return Ledger(
        key=lines[0]["key"], old=lines[0]["old"], texts=[line["text"] for line in lines[1:]], whole=whole
    )


def ledgers_in_containers(containers: "Iterable[dict[str, Any]]") -> list[Ledger]:
    """Of containers whose node is dead: they run on until somebody sweeps them."""
    found = []
    for each in containers:
        path = Path(f"/proc/{each['Pid']}/root/work/ledger.jsonl")
        try:
            text = path.read_text()
        except OSError:  # a warm one, or one that ended
            continue
        if (ledger := read_ledger(text, whole=False)) is not None:
            found.append(ledger)
    return found


def ledgers_in_logs(state_dir: Path) -> list[Ledger]:
    """Of all sessions, as far as their node could keep their output."""
    read = (
        read_ledger(path.read_text(errors="replace"), whole=False)
        for path in sorted((state_dir / "sessions").glob("*.log"))
    )
    return [ledger for ledger in read if ledger is not None]


# ── is all accounted for? ─────────────────────────────────────────────────────


@define(eq=False)
class Account:
    """A journal as it is when its node is over."""

    trajectories: "dict[str, Trajectory]"  # by session
    tasks: "dict[str, list[Trajectory]]"  # the final ones, by task
    events: "list[tuple[int, str]]"

    def texts(self) -> "Counter[str]":
        """Every answer that a turn holds."""
        return Counter(text for each in self.trajectories.values() for text in texts_of(each))

    def statuses(self) -> "Counter[str]":
        return Counter(each.outcome.status for each in self.trajectories.values())


def texts_of(trajectory: Trajectory) -> list[str]:
    """What the complete turns of a session said, in order."""
    answers = [
        turn.answer for turn in trajectory.turns if turn.state == "complete" and turn.answer is not None
    ]
    return ["".join(part.text for part in answer.parts if isinstance(part, TextPart)) for answer in answers]


def account(state_dir: Path) -> Account:
    """Read a journal whose node is over, and hold it to what must be true of any."""
    path = state_dir / "journal.sqlite"
    check_tables(path)
    found = trio.run(_account, path)
    for trajectory in found.trajectories.values():
        check(trajectory.turns, Built(traces=trajectory.traces, left_out=trajectory.left_out))
    check_places(found)
    return found


def check_tables(path: Path) -> None:
    """Every turn belongs to a session, and every session to one trajectory and one event."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM sessions WHERE outcome IS NULL").fetchone() == (0,), (
            "a session never ended"
        )
        sessions = {row[0] for row in db.execute("SELECT session_id FROM sessions")}
        assert {row[0] for row in db.execute("SELECT session_id FROM trajectories")} == sessions
        told = Counter(
            row[0]
            for row in db.execute("SELECT session_id FROM events WHERE kind IN ('trajectory', 'attempt')")
        )
        assert told == dict.fromkeys(sessions, 1)
        assert {row[0] for row in db.execute("SELECT DISTINCT session_id FROM turns")} <= sessions, (
            "a turn of nobody"
        )


def check_places(found: Account) -> None:
    """Every place of every task has one final session, and those before it are a line to it."""
    for trajectories in found.tasks.values():
        assert sorted(each.sample_index for each in trajectories) == list(range(len(trajectories)))
    lines = {each.session_id: each for each in found.trajectories.values()}
    final = {each.session_id for trajectories in found.tasks.values() for each in trajectories}
    for each in lines.values():
        assert (each.retried_as is None) == (each.session_id in final)
        if each.retried_as is not None:
            after = lines[each.retried_as]
            assert (after.attempt, after.task_id, after.sample_index) == (
                each.attempt + 1,
                each.task_id,
                each.sample_index,
            )
    seqs = [seq for seq, _ in found.events]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len({key for _, key in found.events}) == len(seqs), "something was told twice"


async def _account(path: Path) -> Account:
    async with open_journal(path, now=time.time) as journal:
        assert await journal.reader.query(queries.unfinished_sessions) == ()
        events = [event async for event in _events(journal)]
        sessions = [key.partition(":")[2] for _, key in events if key.startswith(("trajectory:", "attempt:"))]
        trajectories = {
            one: found
            for one in sessions
            if (found := await journal.reader.query(queries.trajectory, one)) is not None
        }
        tasks = {}
        for task in await journal.reader.query(queries.tasks, limit=1000):
            assert task.finished
            assert len(task.sessions) == task.spec.num_samples
            tasks[task.task_id] = [trajectories[one.session_id] for one in task.sessions]
    return Account(trajectories, tasks, events)


async def _events(journal: Journal) -> "Any":
    seen = 0
    while (page := await journal.reader.events(seen, filters=EventFilters(kinds=EVERY))).events:  # type: ignore[arg-type]
        for event in page.events:
            yield event.seq, event.key
        seen = page.seen


# ── what is left on the machine ───────────────────────────────────────────────


@define(eq=False)
class Traces:
    """What a node's lives had on this machine, gathered while they lived."""

    place: Place
    processes: "dict[int, str]" = field(factory=dict)  # process id to start time
    containers: "dict[str, dict[str, Any]]" = field(factory=dict)
    folders: set[str] = field(factory=set)  # merged roots

    def note_processes(self, node: ServingNode) -> None:
        for pid in descendants(node.process.pid):
            if fields := stat(pid):
                self.processes[pid] = fields[19]

    def note_containers(self) -> "list[dict[str, Any]]":
        """Its containers now; their mounts are noted too."""
        now = json.loads(
            podman(
                "ps", "--all", "--filter", f"label=polarnode.node={self.place.node_id}", "--format", "json"
            )
        )
        self.containers |= {each["Id"]: each for each in now}
        return list(now)

    def note_mounts(self, ids: "list[str]") -> None:
        for one in ids:
            with suppress(CalledProcessError):  # another node's sweeper may be quicker
                self.folders |= {
                    each
                    for each in podman("inspect", "--format", "{{.GraphDriver.Data.MergedDir}}", one).split()
                    if each.startswith("/")
                }

    def check_nothing_left(self) -> None:
        """Nothing of any of its lives."""
        assert self.note_containers() == []
        deadline = time.monotonic() + ENDED_S
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert running == [], f"a process outlives its node: {running}"
        mounted = {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()}
        assert not mounted & self.folders
        assert not [point for point in mounted if any(one in point for one in self.containers)]
        store = store_at(default_state_dir())
        assert not [
            path
            for path in store.sockets.glob("*.sock")
            if not Path("/proc", path.name.partition("-")[0]).exists()
        ], "a stale socket"
        assert [
            path.name for path in self.place.temporary.iterdir() if not path.name.startswith("torchinductor_")
        ] == []

    def running(self) -> "list[tuple[int, str]]":
        """Processes that were its, that have its containers' ids or its mark in their command line, or its
        temporary folder in their environment.
        """
        signs = [self.place.mark.encode(), *(one.encode() for one in self.containers)]
        found = [
            (pid, "its own")
            for pid, started in self.processes.items()
            if stat(pid)[:1] not in ([], ["Z"], ["X"]) and stat(pid)[19:20] == [started]
        ]
        for entry in filter(str.isdigit, os.listdir("/proc")):
            command, environment = _read(entry, "cmdline"), _read(entry, "environ")
            if int(entry) != os.getpid() and (
                any(sign in command for sign in signs)
                or f"TMPDIR={self.place.temporary}\0".encode() in environment
            ):
                found.append((int(entry), command.decode(errors="replace")[:200]))
        return found


def _read(entry: str, name: str) -> bytes:
    try:
        return Path("/proc", entry, name).read_bytes()
    except OSError:
        return b""


def session_of(container: "dict[str, Any]") -> str:
    return str(container["Labels"].get(LABEL_SESSION))


def call(node: ServingNode, method: str, path: str, body: Any = None) -> Any:
    """A route of the control plane, with the token."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.request(
        method, f"http://127.0.0.1:{node.port}{path}", headers=headers, json=body, timeout=60
    )
    return answer.raise_for_status().json()


def captured(node: ServingNode, session_id: str) -> Trajectory:
    """A session's trajectory, whose rows keep the invariants."""
    found = node.client.trajectory(session_id, turns="full")
    check(found.turns, Built(traces=found.traces, left_out=found.left_out))
    return found
