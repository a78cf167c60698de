"""`polarnode fleet --local 3` with real containers: nodes are killed while sessions run, every place of every
group is filled once, and a front that is killed leaves no node behind.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import Reader
from recovery_kit import (
    PATIENCE_S,
    PROGRAM,
    SETTINGS,
    TOKEN,
    Place,
    free_port,
    place_at,
    podman,
    short_temporary,
    until,
)

from polarnode.client import PolarnodeClient, Unreachable

pytestmark = pytest.mark.podman

NODES, TASKS, SAMPLES = 3, 4, 2


@contextmanager
def local_fleet(place: Place, folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", PolarnodeClient]]:
    """A front with nodes of this machine, which all take tasks."""
    port = free_port()
    argv = [*PROGRAM, "fleet", "--local", str(NODES), "--cpu", "--config", str(folder / "node.toml")]
    with (folder / "said.txt").open("wb") as said:
        front = subprocess.Popen(
            [*argv, "--port", str(port), "--state-dir", str(folder / "fleet")],
            env={**os.environ, "POLARNODE_TOKEN": TOKEN, "TMPDIR": str(place.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    client = PolarnodeClient(f"http://127.0.0.1:{port}", token=TOKEN, patience_s=PATIENCE_S)

    def all_up() -> bool:
        assert front.poll() is None, (folder / "said.txt").read_text()[-3000:]
        with suppress(Unreachable):
            return [node["state"] for node in client.status()["nodes"]] == ["up"] * NODES
        return False

    try:
        until(all_up, "every node takes tasks")
        yield front, client
    finally:
        if front.poll() is None:
            front.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                front.wait(PATIENCE_S)
        front.kill()
        front.wait()
        for pid in nodes_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def nodes_in(folder: Path) -> dict[int, str]:
    """The nodes' processes that were started below a folder, and their names."""
    found = {}
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            argv = each.read_bytes().decode().split("\0")
            state = argv[argv.index("--state-dir") + 1] if "--state-dir" in argv else ""
            if "polarnode.cli" in argv and state.startswith(str(folder / "fleet" / "nodes")):
                found[int(each.parent.name)] = Path(state).name
    return found


def busy_node(client: PolarnodeClient) -> str:
    """The name of the node that has most sessions."""
    nodes: list[dict[str, Any]] = client.status()["nodes"]
    return str(max(nodes, key=lambda node: node["report"].get("load", {}).get("live", 0))["name"])


def test_nodes_and_the_front_are_killed_with_containers_running(podman_works: None, tmp_path: Path) -> None:
    with short_temporary() as temporary:
        place = place_at(tmp_path, temporary, settings=SETTINGS)
        with local_fleet(place, tmp_path) as (front, client):
            tasks = {f"task-{number}": SAMPLES for number in range(TASKS)}
            tree = {"fork": {"at": [2], "per_session": 1}}
            for task_id, samples in tasks.items():
                task = place.task(retries=10, num_samples=samples, turns=4, begin="the same way")
                client.submit(task | {"task_id": task_id, "group": tree if task_id == "task-0" else {}})
            reader, killed = Reader(), set[str]()
            for event in client.trajectories(consumer="trainer", ack=True):
                reader.add(event.kind, event.key, event.data)
                if event.kind == "trajectory" and len(killed) < 2:
                    name = busy_node(client)
                    for pid in [pid for pid, each in nodes_in(tmp_path).items() if each == name]:
                        os.kill(pid, signal.SIGKILL)  # the second one may be starting again
                        killed.add(name)
                if all(f"group:{task_id}" in reader.events for task_id in tasks):
                    break
            assert killed
            reader.check(tasks)
            root, fork = [each["session_id"] for each in client.task("task-0")["sessions"]]
            began = client.trajectory(fork).forked_from
            assert began is not None
            assert (began.session_id, began.turn, began.got) == (root, 2, 2)
            front.kill()
            front.wait()
            until(lambda: not nodes_in(tmp_path), "the nodes end without their front")
        left = json.loads(podman("ps", "--all", "--format", "json"))
        assert [each["Id"] for each in left if place.mark in json.dumps(each)] == []
