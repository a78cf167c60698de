"""Start and stop a node, or a fleet of them, for one run: `polarnode --cpu` as a program in its own process group.

A trainer needs only a node's address; this is a convenience for running everything with one command.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path

from polarnode.client import PolarnodeClient
from polarnode.core.errors import PolarnodeError

START_S = 900.0  # the engine takes some twenty seconds, images that are not there yet some minutes
STOP_S = 60.0  # sessions end with what they have
POLL_S = 0.2


@contextmanager
def own_node(
    folder: Path,
    *,
    run_limit: int,
    model: Path | None = None,
    teachers: Mapping[str, Path] | None = None,
    lora_rank: int = 0,
    nodes: int = 1,
) -> Iterator[PolarnodeClient]:
    """A node that serves until the end of the block; what it logs is in `folder`/node.txt. `teachers`:
    checkpoints that score, by name. `lora_rank`: of the largest adapter that it takes. Of several `nodes` the
    client is that of their front, and each runs its part of `run_limit` sessions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = [
        f'[teachers.{name}]\ncpu = true\nmodel = "{path.resolve()}"\n'
        for name, path in (teachers or {}).items()
    ]
    own = f"lora_rank = {lora_rank}\nrun_limit = {ceil(run_limit / nodes)}\n"
    (folder / "node.toml").write_text("".join([own, *tables]))
    port, token = free_port(), os.urandom(16).hex()
    command = [sys.executable, "-m", "polarnode.cli"]
    command += [] if nodes == 1 else ["fleet", "--local", str(nodes)]
    command += ["--config", str(folder / "node.toml"), "--cpu", "--port", str(port)]
    command += ["--state-dir", str(folder / "state")]
    command += [] if model is None else ["--model", str(model)]
    with (folder / "node.txt").open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "POLARNODE_TOKEN": token, "POLARNODE_NODE_ID": f"grpo-{os.getpid()}-{port}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is the trainer's; it then asks the node to stop
        )
    try:
        client = PolarnodeClient(f"http://127.0.0.1:{port}", token=token)
        wait_ready(client, process, folder, nodes)
        yield client
    finally:
        stop(process)


def wait_ready(client: PolarnodeClient, process: "subprocess.Popen[bytes]", folder: Path, nodes: int) -> None:
    """Until an engine host answers, or all nodes of a fleet take tasks."""
    deadline = time.monotonic() + START_S
    while not ready(client, nodes):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                "the node does not serve; the end of its log: "
                f" {(folder / 'node.txt').read_text(errors='replace')[-2000:]}"
            )
        time.sleep(POLL_S)


def ready(client: PolarnodeClient, nodes: int) -> bool:
    with suppress(PolarnodeError):
        status = client.status()
        if nodes > 1:
            return sum(node["state"] == "up" for node in status["nodes"]) == nodes
        return any(host["state"] == "ready" for host in status["engine"]["hosts"])
    return False


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask the node to stop, then kill it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    if process.poll() is None:
        process.kill()
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
