"""Start and stop a node for one run: `polarnode --cpu` as a program in its own process group.

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
) -> Iterator[PolarnodeClient]:
    """A node that serves until the end of the block; what it logs is in `folder`/node.txt. `teachers`:
    checkpoints that score, by name. `lora_rank`: of the largest adapter that it takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = [
        f'[teachers.{name}]\ncpu = true\nmodel = "{path.resolve()}"\n'
        for name, path in (teachers or {}).items()
    ]
    (folder / "node.toml").write_text("".join([f"lora_rank = {lora_rank}\n", *tables]))
    port, token = free_port(), os.urandom(16).hex()
    command = [
        sys.executable,
        "-m",
        "polarnode.cli",
        "--config",
        str(folder / "node.toml"),
        "--cpu",
        "--port",
        str(port),
        "--run-limit",
        str(run_limit),
        "--state-dir",
        str(folder / "state"),
    ]
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
        wait_ready(client, process, folder)
        yield client
    finally:
        stop(process)


def wait_ready(client: PolarnodeClient, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Until an engine host answers."""
    deadline = time.monotonic() + START_S
    while not ready(client):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                "the node does not serve; the end of its log: "
                f" {(folder / 'node.txt').read_text(errors='replace')[-2000:]}"
            )
        time.sleep(POLL_S)


def ready(client: PolarnodeClient) -> bool:
    with suppress(PolarnodeError):
        return any(host["state"] == "ready" for host in client.status()["engine"]["hosts"])
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
