"""A whole node as a program of its own, and the ways to look at it from outside: its API, its process groups,
its containers.

The rules for whoever edits it. Nothing waits by sleeping for a time: what is waited for is polled, for up to
PATIENCE_S, because CI is many times slower than a desk. Every process is ended by its own id. The Podman
store is the machine's own of polarnode and shared with other nodes, so containers are told apart by the
node's name.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from attrs import define, field

from polarnode.client import PolarnodeClient, Unreachable
from polarnode.containers.container import LABEL_NODE
from polarnode.containers.probe import default_state_dir, store_at
from polarnode.core.trajectory import Trajectory
from polarnode.support.concurrency import group_members

# seconds anything here may take before it is a failure: a hundred times what it takes on a quiet machine
PATIENCE_S = 600.0
POLL_S = 0.05
AGENT = Path(__file__).with_name("agent.py")
PROGRAM = (sys.executable, "-c", "from polarnode.cli import main; main()")
HERE = Path(__file__).parent
STEERED = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent / 'kits')]}; from steering import run; run()",
)  # its engine says a script
TOKEN = "live-control-plane-token"
MARK = "POLARNODE_LIVE_MARK"  # a variable of the node's own that no harness may see
Found = TypeVar("Found")


def until(look: Callable[[], Found], what: str, *, within: float = PATIENCE_S) -> Found:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within:.0f} s: {what}"
        time.sleep(POLL_S)
    return found


# ── a node ────────────────────────────────────────────────────────────────────


@define(eq=False, kw_only=True)
class ServingNode:
    """A node that serves, in a process of its own. `state_dir` outlives it; `temporary` is its TMPDIR."""

    process: "subprocess.Popen[bytes]"
    client: PolarnodeClient
    port: int
    node_id: str
    state_dir: Path
    temporary: Path

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def host(self) -> dict[str, Any]:
        """The engine host, as the node sees it."""
        return dict(self.status()["engine"]["hosts"][0])

    def session(self, session_id: str) -> dict[str, Any] | None:
        """A live session's row in the status; None when it is over."""
        return next((row for row in self.status()["sessions"] if row["session_id"] == session_id), None)

    def log(self, session_id: str) -> str:
        """What a harness said so far."""
        path = self.state_dir / "sessions" / f"{session_id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self) -> str:
        return (self.state_dir / "said.txt").read_text(errors="replace")

    def submit(self, **task: Any) -> list[str]:
        """Session ids of a task given as JSON."""
        return list(self.client.submit(task).session_ids)

    def agent(
        self, *, evaluator: dict[str, Any] | None = None, budgets: dict[str, Any] | None = None, **more: Any
    ) -> str:
        """Submit one session of agent.py; its session id."""
        env, sampling = more.pop("env", {}), more.pop("sampling", {"temperature": 1.0})
        task: dict[str, Any] = {
            "instruction": "Say a word.",
            "harness": {
                "name": "shell",
                "command": ["python3", "/work/agent.py", json.dumps(more)],
                "env": env,
            },
            "runtime": {"files": [{"path": "agent.py", "text": AGENT.read_text()}]},
            "sampling": sampling,
        }
        task |= {"evaluator": evaluator} if evaluator else {}
        task |= {"budgets": budgets} if budgets else {}
        return self.submit(**task)[0]

    def captured(self, session_id: str) -> "dict[int, tuple[str, list[int]]]":
        """The turns of a session that are on disk: state and sampled ids by index."""
        return {
            turn["index"]: (turn["state"], list(turn["sampled"]))
            for turn in self.client.session(session_id)["turns"]
        }

    def under_way(self, *session_ids: str, turns: int) -> None:
        """Wait until each of these sessions has so many turns on disk. They must not end before."""
        for session_id in session_ids:
            until(lambda one=session_id: self._turns(one) >= turns, f"session {session_id} has {turns} turns")  # type: ignore[misc]

    def _turns(self, session_id: str) -> int:
        record = self.client.session(session_id)["session"]
        assert record["outcome"] is None, (
            f"session {session_id} ended: {record['outcome']}; {self.log(session_id)[-2000:]}"
        )
        return int(record["turns"])

    def task_of(self, session_id: str) -> str:
        return str(self.client.session(session_id)["session"]["task_id"])

    def finished(self, session_id: str) -> Trajectory:
        """A session's trajectory with its turns, once it is over."""
        until(
            lambda: self.client.session(session_id)["session"]["outcome"],
            f"session {session_id} ends; its log: {self.log(session_id)[-2000:]}",
        )
        return self.client.trajectory(session_id, turns="full")

    def forced(self, session_id: str) -> list[dict[str, Any]]:
        """What a steered engine was made to say in a session, a line an order."""
        path = self.state_dir / "forced.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return [line for line in lines if line["session"] == session_id]

    def containers(self) -> list[dict[str, Any]]:
        return containers(self.node_id)


def containers(node_id: str) -> list[dict[str, Any]]:
    """Every container of a node, running or not, as Podman's own program lists them."""
    return list(
        json.loads(podman("ps", "--all", "--filter", f"label={LABEL_NODE}={node_id}", "--format", "json"))
    )


def podman(*arguments: str) -> str:
    """Podman's own program on the store the nodes use."""
    environment = store_at(default_state_dir()).environment()
    return subprocess.run(
        ["podman", *arguments], env=environment, check=True, capture_output=True, text=True
    ).stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def short_temporary() -> Iterator[Path]:
    """A temporary folder with a short name: sockets live in there."""
    folder = Path(tempfile.mkdtemp(prefix="pn"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(
    state_dir: Path,
    temporary: Path,
    *,
    node_id: str | None = None,
    port: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[ServingNode]:
    """A node that is ready; ended at the end of the block, if it is not over by then. `program` may bring
    arguments of its own.
    """
    node = start(
        state_dir,
        temporary,
        node_id=node_id or f"live-{uuid4().hex[:8]}",
        port=port or free_port(),
        program=program,
    )
    try:
        until(lambda: _ready(node), f"the node is ready; it said: {node.said()[-2000:]}")
        yield node
    finally:
        end(node)


def start(
    state_dir: Path, temporary: Path, *, node_id: str, port: int, program: Sequence[str] = PROGRAM
) -> ServingNode:
    """Start a node, without waiting until it serves."""
    state_dir.mkdir(parents=True, exist_ok=True)
    own = {"POLARNODE_TOKEN": TOKEN, "POLARNODE_NODE_ID": node_id, MARK: "seen", "TMPDIR": str(temporary)}
    with (state_dir / "said.txt").open("ab") as said:
        process = subprocess.Popen(
            [*program, "--cpu", "--port", str(port), "--state-dir", str(state_dir)],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    client = PolarnodeClient(f"http://127.0.0.1:{port}", token=TOKEN, patience_s=PATIENCE_S)
    return ServingNode(
        process=process, client=client, port=port, node_id=node_id, state_dir=state_dir, temporary=temporary
    )


def _ready(node: ServingNode) -> bool:
    assert node.process.poll() is None, (
        f"the node ended with {node.process.returncode}: {node.said()[-3000:]}"
    )
    with suppress(Unreachable):
        return any(host["state"] == "ready" for host in node.status()["engine"]["hosts"])
    return False


def end(node: ServingNode) -> None:
    """Ask a node to stop, insist after a while, and never leave it."""
    if node.process.poll() is None:
        node.process.send_signal(signal.SIGTERM)
        try:
            node.process.wait(PATIENCE_S / 4)
        except subprocess.TimeoutExpired:
            node.process.kill()
    node.process.wait()


def keep_row(row: dict[str, Any]) -> None:
    """A line for the table of docs/harnesses.md, where POLARNODE_MATRIX_OUT names a file for it."""
    path = os.environ.get("POLARNODE_MATRIX_OUT")
    if path is not None:
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def meaning_folder() -> Path | None:
    """Where `make meaning` wants the trajectories and the requests of steered sessions."""
    named = os.environ.get("POLARNODE_MEANING_OUT")
    return None if named is None else Path(named)


# ── what runs on this machine ─────────────────────────────────────────────────


@define(eq=False)
class Belongings:
    """What a node had on this machine when somebody looked: process groups of its engine hosts, all that
    descends from it, containers.
    """

    engine_groups: list[int]
    # process id to start time: an id alone may be given to somebody else
    descendants: "dict[int, str]" = field(repr=False)
    containers: list[str]

    def engines(self) -> list[int]:
        """Processes of its engine hosts that still run."""
        return [pid for group in self.engine_groups for pid in group_members(group)]

    def processes(self) -> list[int]:
        """All that was below it and still runs: engines, the Podman service, programs that set up
        containers.
        """
        return [
            pid
            for pid, started in self.descendants.items()
            if stat(pid)[:1] not in ([], ["Z"], ["X"]) and stat(pid)[19:20] == [started]
        ]


def belongings(node: ServingNode) -> Belongings:
    groups = [host["pid"] for host in node.status()["engine"]["hosts"]]
    below = {pid: stat(pid)[19] for pid in descendants(node.process.pid) if stat(pid)}
    return Belongings(groups, below, [each["Id"] for each in node.containers()])


def stat(pid: int) -> list[str]:
    """The fields of a process after its name: state first, parent second, start time twentieth. Empty when it
    is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Every process below one, whatever its group."""
    parents: dict[int, list[int]] = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := stat(each):
            parents.setdefault(int(fields[1]), []).append(each)
    found, open_ends = [], [pid]
    while open_ends:
        children = parents.get(open_ends.pop(), [])
        found += children
        open_ends += children
    return found


def running(text: str) -> list[int]:
    """Processes of this machine, in containers or not, with `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and int(entry.name) != os.getpid()
                and text in (entry / "cmdline").read_text(errors="replace")
            ):
                found.append(int(entry.name))
    return found


def container_of(pid: int, node_id: str) -> str:
    """The id of the container a process of this machine runs in."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    for each in containers(node_id):
        first = int(podman("inspect", "--format", "{{.State.Pid}}", each["Id"]))
        if first and os.readlink(f"/proc/{first}/ns/pid") == namespace:
            return str(each["Id"])
    raise AssertionError(f"process {pid} runs in no container of {node_id}")
