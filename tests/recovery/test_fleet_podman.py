"""`polarnode fleet --local 3` with real containers and a real PostgreSQL: nodes are killed while sessions run, every
place of every group is filled once, and a command that is killed leaves no node behind.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fleet_kit import Reader
from postgres_kit import running_cluster
from recovery_kit import (
    PATIENCE_S,
    PROGRAM,
    SETTINGS,
    TOKEN,
    Place,
    place_at,
    podman,
    short_temporary,
    until,
)

from polarnode.client import PolarnodeClient, Unreachable

pytestmark = pytest.mark.podman

NODES, TASKS, SAMPLES = 3, 4, 2


@contextmanager
def local_fleet(place: Place, folder: Path, dsn: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The command that keeps nodes on this machine, once all of them take tasks."""
    argv = [*PROGRAM, "fleet", "--local", str(NODES), "--cpu", "--config", str(folder / "node.toml")]
    environment = {"POLARNODE_TOKEN": TOKEN, "POLARNODE_LOG": dsn, "TMPDIR": str(place.temporary)}
    with (folder / "said.txt").open("wb") as said:
        command = subprocess.Popen(
            [*argv, "--state-dir", str(folder / "fleet")],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )

    def all_up() -> bool:
        assert command.poll() is None, (folder / "said.txt").read_text()[-3000:]
        return len(nodes_in(folder)) == NODES and all(map(is_ready, nodes_in(folder).values()))

    try:
        until(all_up, "every node takes tasks")
        yield command
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                command.wait(PATIENCE_S)
        command.kill()
        command.wait()
        for pid in nodes_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def nodes_in(folder: Path) -> dict[int, int]:
    """The nodes' processes that were started below a folder, and their ports."""
    found = {}
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            argv = each.read_bytes().decode().split("\0")
            state = argv[argv.index("--state-dir") + 1] if "--state-dir" in argv else ""
            if "polarnode.cli" in argv and "--port" in argv and state.startswith(str(folder / "fleet")):
                found[int(each.parent.name)] = int(argv[argv.index("--port") + 1])
    return found


def client_at(port: int, patience_s: float = PATIENCE_S) -> PolarnodeClient:
    return PolarnodeClient(f"http://127.0.0.1:{port}", token=TOKEN, patience_s=patience_s)


def live_at(port: int) -> int:
    """How many sessions a node runs; -1 where it does not answer."""
    with suppress(Unreachable):
        return int(client_at(port, 0.1).status()["scheduler"]["live"])
    return -1


def is_ready(port: int) -> bool:
    with suppress(Unreachable):
        status = client_at(port, 0.1).status()
        return "engine" in status and any(host["state"] == "ready" for host in status["engine"]["hosts"])
    return False


def test_nodes_are_killed_with_containers_running(podman_works: None, tmp_path: Path) -> None:
    with short_temporary() as temporary, running_cluster() as cluster:
        place = place_at(tmp_path, temporary, settings=SETTINGS)
        with local_fleet(place, tmp_path, cluster.database()) as command:
            asked, *others = nodes_in(tmp_path).values()
            client = client_at(asked)
            tasks = {f"task-{number}": SAMPLES for number in range(TASKS)}
            tree = {"fork": {"at": [2], "per_session": 1}}
            for task_id, samples in tasks.items():
                task = place.task(retries=10, num_samples=samples, turns=4, begin="the same way")
                client.submit(task | {"task_id": task_id, "group": tree if task_id == "task-0" else {}})
            reader, killed = Reader(), set[int]()
            for event in client.trajectories(consumer="trainer", ack=True):
                reader.add(event.kind, event.key, event.data)
                if event.kind == "trajectory" and len(killed) < 2:
                    busy = max(others, key=live_at)
                    for pid in [pid for pid, port in nodes_in(tmp_path).items() if port == busy]:
                        os.kill(pid, signal.SIGKILL)  # it may be starting again
                        killed.add(busy)
                if all(f"group:{task_id}" in reader.events for task_id in tasks):
                    break
            assert killed
            reader.check(tasks)
            root, fork = [each["session_id"] for each in client.task("task-0")["sessions"]]
            began = client.trajectory(fork).forked_from
            assert began is not None
            assert (began.session_id, began.turn, began.got) == (root, 2, 2)
            command.kill()
            command.wait()
            until(lambda: not nodes_in(tmp_path), "the nodes end without who keeps them")
        left = json.loads(podman("ps", "--all", "--format", "json"))
        assert [each["Id"] for each in left if place.mark in json.dumps(each)] == []
