"""Start and stop a node, or nodes that share a log, for one run: `polarnode --cpu` as a program in its own process group.

A trainer needs only a node's address; this is a convenience for running everything with one command. The nodes'
PostgreSQL is one of the run's own, because a log that others use would give these nodes the others' tasks.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from math import ceil
from pathlib import Path

from polarnode.client import PolarnodeClient
from polarnode.core.errors import PolarnodeError

START_S = 900.0  # the engine takes some twenty seconds, images that are not there yet some minutes
STOP_S = 60.0  # sessions end with what they have
POLL_S = 0.2
KITS = Path(__file__).parents[2] / "tests" / "kits"
SHOWN = re.compile("export POLARNODE_URL='([^']+)'")  # by `polarnode fleet`, whose nodes choose free ports


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
    client is that of the first, and each runs its part of `run_limit` sessions.
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
    command += ["--port", str(port)] if nodes == 1 else ["fleet", "--local", str(nodes)]
    command += ["--config", str(folder / "node.toml"), "--cpu", "--state-dir", str(folder / "state")]
    command += [] if model is None else ["--model", str(model)]
    environment = {name: value for name, value in os.environ.items() if name != "POLARNODE_LOG"}
    environment |= {"POLARNODE_TOKEN": token, "POLARNODE_NODE_ID": f"grpo-{os.getpid()}-{port}"}
    with ExitStack() as stack:
        if nodes > 1:
            environment["POLARNODE_LOG"] = stack.enter_context(own_log())
        with (folder / "node.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the trainer's; it then asks the node to stop
            )
        stack.callback(stop, process)
        url = f"http://127.0.0.1:{port}" if nodes == 1 else shown_url(process, folder)
        client = PolarnodeClient(url, token=token)
        wait_until(lambda: ready(client, nodes), process, folder)
        yield client


@contextmanager
def own_log() -> Iterator[str]:
    """The DSN of a PostgreSQL of this run, by the distribution's programs and the one way to start it that this
    repository has.
    """
    sys.path.insert(0, str(KITS))
    try:
        from postgres_kit import running_cluster
    finally:
        sys.path.remove(str(KITS))
    with running_cluster() as cluster:
        yield cluster.dsn()


def shown_url(process: "subprocess.Popen[bytes]", folder: Path) -> str:
    """The address of the first node, once `polarnode fleet` has printed it."""
    urls: list[str] = []

    def shown() -> bool:
        urls[:] = SHOWN.findall((folder / "node.txt").read_text(errors="replace"))
        return bool(urls)

    wait_until(shown, process, folder)
    return urls[0]


def wait_until(holds: Callable[[], bool], process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Until it holds; raises RuntimeError where the node has ended, or START_S have passed."""
    deadline = time.monotonic() + START_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                "the node does not serve; the end of its log: "
                f" {(folder / 'node.txt').read_text(errors='replace')[-2000:]}"
            )
        time.sleep(POLL_S)


def ready(client: PolarnodeClient, nodes: int) -> bool:
    """Whether an engine host answers, or all nodes of a log take sessions."""
    with suppress(PolarnodeError):
        status = client.status()
        if nodes > 1:
            return sum(node["state"] == "alive" for node in status["nodes"] or ()) == nodes
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
