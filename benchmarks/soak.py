"""Run hundreds of sessions through a whole node and report what memory, descriptors and containers remain.

    python benchmarks/soak.py [--sessions 500] [--at-once 64] [--turns 4] [--think 1.0] [--tokens 256] [--nice
    0] [--profile FILE]

The node is `polarnode` in its own process, with real Podman and the simulated engine. Each session is a
program in a container that calls the model for some turns and pauses between them. Measurements come from
/proc and from the node's status; the machine's load is printed with them. `--profile` runs py-spy on the node.

Exit code 1 if a session did not complete, or something remained.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import linear_regression, median

import trio
from attrs import define, field, frozen

from polarnode.client import PolarnodeClient
from polarnode.containers.probe import default_state_dir, store_at
from polarnode.core.trajectory import Trajectory
from polarnode.journal import queries
from polarnode.journal.journal import open_journal

AGENT = """
import json, os, random, sys, time, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
turns, think = int(sys.argv[1]), float(sys.argv[2])
tools = [{"type": "function", "function": {"name": "bash", "description": "run a command",
          "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]
messages = [{"role": "system", "content": "You are an agent. " * 200}, {"role": "user", "content": os.environ["POLARNODE_INSTRUCTION"]}]
for turn in range(turns):
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    asked = urllib.request.Request(base + "/chat/completions", body, {"content-type": "application/json", "authorization": "Bearer " + key})
    answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages.append(answer)
    for call in answer.get("tool_calls") or ():
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a line of output\\n" * 100})
    if not answer.get("tool_calls"):
        messages.append({"role": "user", "content": "go on"})
    time.sleep(random.uniform(0, 2 * think))
open("out", "w").write("done")
"""
EVERY_S = 2.0  # between looks at the node
WARM = 0.3  # of the sessions: what memory was for after them is what may not grow any more
SETTLE_S = 10.0  # after the last session, for what is still being removed
GROUP = 4  # sessions a task


@frozen(kw_only=True)
class Look:
    """The node's process at one moment. `rss` in bytes; `p50`, `p99` and `worst` are the loop's lateness
    within the minute before, in seconds.
    """

    at: float
    ended: int
    live: int
    rss: int
    descriptors: int
    threads: int
    processes: int
    p50: float
    p99: float
    worst: float


@define(eq=False)
class Node:
    """A node that serves, and what was seen of it."""

    process: "subprocess.Popen[bytes]"
    client: PolarnodeClient
    state: Path
    looks: list[Look] = field(factory=list)
    seen: dict[int, str] = field(factory=dict)  # every process that was ever below it, with its start time

    def look(self) -> Look:
        """One look, kept."""
        status, folder = self.client.status(), Path("/proc") / str(self.process.pid)
        process = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        loop, scheduler, below = status["loop"], status["scheduler"], descendants(self.process.pid)
        self.seen |= {pid: started for pid in below if (started := start_of(pid)) is not None}
        self.looks.append(
            Look(
                at=time.monotonic(),
                ended=scheduler["ended"],
                live=scheduler["live"],
                rss=int(process["VmRSS"].split()[0]) << 10,
                descriptors=len(list((folder / "fd").iterdir())),
                threads=int(process["Threads"]),
                processes=len(below),
                p50=loop["p50"],
                p99=loop["p99"],
                worst=loop["max"],
            )
        )
        return self.looks[-1]


def descendants(pid: int) -> list[int]:
    """The processes below one, as /proc says."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended while we looked
            parents.setdefault(parent, []).append(int(entry.name))
    found, line = [], [pid]
    while line:
        below = parents.get(line.pop(), [])
        found += below
        line += below
    return found


@contextmanager
def serving(options: Namespace, folder: Path) -> Iterator[Node]:
    """A node until the end of the block, then stopped as by a user."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "node.toml").write_text(
        f'engine = "simulated"\nport = {port}\nnode_id = "{node_id()}"\nrun_limit ='
        f' {options.at_once}\nstate_dir = "{folder / "state"}"\n[simulated]\ntokens_per_s ='
        f" 200\nanswer_tokens = {options.tokens}\ncalling_turns = {options.turns}\nmax_running = 256\n"
    )
    argv = [sys.executable, "-m", "polarnode.cli", "--config", str(folder / "node.toml")]
    with (
        (folder / "node.log").open("wb") as log,
        subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            node = Node(
                process=process, client=PolarnodeClient(f"http://127.0.0.1:{port}"), state=folder / "state"
            )
            wait_ready(node, folder / "node.log")
            yield node
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def favour(pid: int, nice: int) -> None:
    """Every thread of a process, for one that is put aside while it holds the interpreter's lock holds up the
    loop; later ones inherit it.
    """
    for thread in (Path("/proc") / str(pid) / "task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def node_id() -> str:
    """What this run's containers are labelled with."""
    return f"soak-{os.getpid()}"


def wait_ready(node: Node, log: Path) -> None:
    """Return when the node takes tasks."""
    while "serving on" not in log.read_text():
        if node.process.poll() is not None:
            sys.exit(f"the node did not start:\n{log.read_text()}")
        time.sleep(0.2)


def submit(node: Node, options: Namespace) -> None:
    """All sessions at once, as a trainer does; the node takes as many as it has places."""
    for first in range(0, options.sessions, GROUP):
        node.client.submit(
            {
                "instruction": f"Task {first}.",
                "num_samples": min(GROUP, options.sessions - first),
                "harness": {
                    "name": "shell",
                    "command": ["python3", "/work/agent.py", str(options.turns), str(options.think)],
                },
                "runtime": {"files": [{"path": "agent.py", "text": AGENT}], "memory_mb": 128, "pids": 32},
                "evaluator": {"name": "command", "config": {"script": "test -s out"}},
            }
        )


def watched(node: Node, options: Namespace) -> float:
    """Look at the node until all sessions are over; returns the seconds it took."""
    started = time.monotonic()
    printed = 0.0
    while (seen := node.look()).ended < options.sessions:
        if seen.at - printed >= 30:
            printed = seen.at
            print(line(seen, started), flush=True)
        time.sleep(EVERY_S)
    print(line(seen, started), flush=True)
    return time.monotonic() - started


def line(look: Look, started: float) -> str:
    """Print one line of progress."""
    lag = f"loop late p50 {1e3 * look.p50:.1f} p99 {1e3 * look.p99:.1f} max {1e3 * look.worst:.0f} ms"
    held = (
        f"{look.rss >> 20} MiB, {look.descriptors} descriptors, {look.threads} threads, {look.processes}"
        " processes"
    )
    return (
        f"{look.at - started:6.0f} s  {look.ended:4d} over, {look.live:3d} live; {held}; {lag}; load"
        f" {os.getloadavg()[0]:.1f}"
    )


# ── what remains ─────────────────────────────────────────────────────────


def slope(looks: Sequence[Look], of: str) -> float:
    """How much more there is of something after each 100 sessions, by least squares, from when the node was
    warm.
    """
    last = looks[-1].ended
    warm = [look for look in looks if look.ended >= WARM * last and look.live >= 1]
    if len({look.ended for look in warm}) < 3:
        return 0.0
    return 100 * linear_regression([look.ended for look in warm], [getattr(look, of) for look in warm]).slope


def containers_left() -> list[str]:
    """Containers with this run's label that Podman still knows."""
    argv = ["podman", "ps", "--all", "--quiet", "--filter", f"label=polarnode.node={node_id()}"]
    store = store_at(default_state_dir())
    return subprocess.run(
        argv, env={**os.environ, **store.environment()}, capture_output=True, text=True, check=True
    ).stdout.split()


async def trajectories(state: Path) -> list[Trajectory]:
    """What the journal holds, read after the node is gone."""
    async with open_journal(state / "journal.sqlite", now=lambda: 0.0) as journal:
        found, before = [], None
        while page := await journal.reader.query(queries.tasks, limit=100, before=before):
            before = page[-1].task_id
            found += [
                await journal.reader.query(queries.trajectory, session.session_id)
                for task in page
                for session in task.sessions
            ]
    return [each for each in found if each is not None]


def report(node: Node, took: float, idle: Look, options: Namespace) -> int:
    """Print the figures; returns the exit code."""
    ended, left = trio.run(trajectories, node.state), containers_left()
    outcomes = Counter(each.outcome.status for each in ended)
    print(
        f"\n{len(ended)} sessions at {options.at_once} at a time in {took:.0f} s: {len(ended) / took:.2f} a"
        f" second; {dict(outcomes)}"
    )
    print(
        f"turns {sum(len(each.turns) for each in ended)}; rewarded"
        f" {sum((each.reward or 0) > 0 for each in ended)}; load now {os.getloadavg()}"
    )
    for phase in ("init_s", "ready_s", "run_s", "post_s"):
        spent = sorted(getattr(each.timing, phase) for each in ended)
        print(
            f"  {phase:8s} median {median(spent):6.2f}  p95 {spent[len(spent) * 95 // 100]:6.2f}  max"
            f" {spent[-1]:6.2f}"
        )
    warm = [look for look in node.looks if look.ended >= WARM * options.sessions]
    print(
        f"memory {warm[0].rss / 2**20:.1f} MiB when warm, {idle.rss / 2**20:.1f} at the end;"
        f" {slope(node.looks, 'rss') / 2**20:+.2f} MiB each 100 sessions"
    )
    print(
        f"descriptors {node.looks[0].descriptors} at the start,"
        f" {max(look.descriptors for look in node.looks)} at most, {idle.descriptors} at the end"
    )
    print(
        f"threads {node.looks[0].threads}, {max(look.threads for look in node.looks)}, {idle.threads};"
        f" processes below it {idle.processes}"
    )
    busy = [
        look for look in node.looks if look.live >= min(options.at_once, options.sessions) / 2
    ] or node.looks
    late = [
        1e3 * figure
        for figure in (
            median(look.p50 for look in busy),
            median(look.p99 for look in busy),
            max(look.p99 for look in busy),
        )
    ]
    print(
        f"event loop late, a minute each: p50 {late[0]:.1f} ms; p99 {late[1]:.1f} ms (median minute),"
        f" {late[2]:.1f} ms (worst); max {1e3 * max(look.worst for look in node.looks):.0f} ms"
    )
    print(f"containers left {len(left)}; processes left {len(alive(node.seen))}")
    return int(len(ended) < options.sessions or outcomes["completed"] < options.sessions or bool(left))


def alive(seen: Mapping[int, str]) -> list[int]:
    """Which of these processes, told by their ids and start times, still run."""
    return [pid for pid, started in seen.items() if start_of(pid) == started]


def start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None for one that is gone, or only waits for somebody to
    ask how it ended.
    """
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def settled(node: Node) -> Look:
    """The node at rest, after what is still being removed is."""
    time.sleep(SETTLE_S)
    return node.look()


@contextmanager
def profiled(node: Node, file: str | None) -> Iterator[None]:
    """py-spy beside the node, where it is asked for."""
    if file is None:
        yield
        return
    argv = [
        "py-spy",
        "record",
        "--pid",
        str(node.process.pid),
        "--output",
        file,
        "--format",
        "raw",
        "--rate",
        "50",
        "--duration",
        "36000",
    ]
    with subprocess.Popen(
        [str(Path(sys.executable).with_name(argv[0])), *argv[1:]], stdout=subprocess.DEVNULL
    ) as spy:
        try:
            yield
        finally:
            spy.send_signal(signal.SIGINT)


def read_options(argv: Sequence[str]) -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4, help="model calls a session")
    parser.add_argument("--think", type=float, default=1.0, help="seconds between them, on average")
    parser.add_argument("--tokens", type=int, default=256, help="sampled in each")
    parser.add_argument(
        "--nice", type=int, default=0, help="of the node's process alone, on a machine that others use too"
    )
    parser.add_argument("--profile", metavar="FILE", help="py-spy's raw stacks of the node")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    options = read_options(argv)
    with tempfile.TemporaryDirectory(prefix="polarnode-soak-") as folder:
        with serving(options, Path(folder)) as node:
            favour(node.process.pid, options.nice)
            node.look()
            with profiled(node, options.profile):
                submit(node, options)
                took = watched(node, options)
            idle = settled(node)
        return report(node, took, idle, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
