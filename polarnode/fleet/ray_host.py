"""The actor on each machine of a Ray cluster. It keeps one `polarnode` process running, started or adopted.

Ray's worker imports this module, which needs neither Ray nor Trio. Two locks decide who keeps which node. The
kernel releases them however their holder dies. NAME.lock is the lifeline, held by the actor: without it only
work in its log keeps the node alive. NAME.json is held by the node and has its pid and address, so that two
actors cannot start two nodes. A node runs in a process session of its own, because Ray kills what is in an
actor's process group.

    python -m polarnode.fleet.ray_host RECORD URL PYTHON ARGUMENT…

This command takes the node's lock, writes the record, and becomes the node.
"""

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from attrs import frozen

from polarnode.core.backoff import Backoff
from polarnode.core.codec.limits import is_loopback
from polarnode.fleet.ray_machines import HostedNode, HostOrder, node_arguments
from polarnode.support.locks import is_locked, take_lock

LOOK_INTERVAL_S: Final = 0.5  # between looks at the node: Ray itself takes 3.4 s to run a dead actor again
RESTART_PAUSES: Final = Backoff(first_s=1.0, longest_s=60.0)  # between starts of a node that ends by itself
SETTLED_S: Final = 120.0  # a node that lived so long did not fail to start, which takes 23 to 116 s on GPUs
STATUS_TIMEOUT_S: Final = 5.0  # longest wait for GET /v1/status
STOP_TIMEOUT_S: Final = 45.0  # a node has so long to end its sessions and save them
LOCK_TIMEOUT_S: Final = 2.0  # longest wait for a lock that another process only looks at
NODE_PORTS: Final = range(20_000, 32_000)  # below the ports that the kernel gives to outgoing connections
MAX_LOG_BYTES: Final = 16 << 20  # largest file of what nodes print; a node's own log is in its state folder
EXIT_TAKEN: Final = 75  # exit code: another node has the state folder


# ── the node's process ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class NodeRecord:
    """The process that has a machine's state folder. `began` is its start in ticks since the machine
    started.
    """

    pid: int
    began: str
    url: str

    @classmethod
    def read(cls, path: Path) -> "NodeRecord | None":
        """The record of the last start. None where there is none, or where it is being written."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def process_start(pid: int) -> str:
    """When a process was started, or "" where there is none. With the pid it identifies a process for
    good.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def become_node(record: Path, url: str, argv: list[str]) -> None:
    """Take the node's lock, write who has it, and run the node in this process."""
    file = take_lock(record, wait_s=LOCK_TIMEOUT_S)
    if file is None:
        sys.exit(EXIT_TAKEN)
    file.truncate()
    json.dump({"pid": os.getpid(), "began": process_start(os.getpid()), "url": url}, file)
    file.flush()
    os.set_inheritable(file.fileno(), True)  # only the exec below keeps it: a node's children inherit none
    os.execv(argv[0], argv)


# ── the actor ────────────────────────────────────────────────────────────


class NodeHost:
    """The actor. Its own thread looks after the node, so that no call to the actor waits."""

    def __init__(self, given: HostOrder) -> None:
        self._host_order = given
        self._folder = Path(given.order.folder).expanduser()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = given.machine.name
        self._record, self._lifeline = self._folder / f"{name}.json", self._folder / f"{name}.lock"
        self._log, self._state = self._folder / f"{name}.log", self._folder / name
        self._lifeline_lock: IO[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._served = self._url = self._problem = ""
        self._failures, self._started, self._next_start = 0, 0.0, 0.0
        self._parent, self._ending = os.getppid(), threading.Event()
        self._thread = threading.Thread(target=self._keep_node, name="node", daemon=True)
        self._thread.start()

    def look(self) -> HostedNode:
        """Report the node as it is now."""
        record = NodeRecord.read(self._record)
        return HostedNode(
            name=self._host_order.machine.name,
            url=self._url or None,
            pid=record.pid if record is not None and is_locked(self._record) else None,
            problem=self._problem,
            digest=self._host_order.order.digest,
        )

    def stop(self) -> None:
        """End the node and let it save its sessions. The actor starts no node after that."""
        self._ending.set()
        self._thread.join()
        if self._child is not None and not is_locked(self._record):
            self._child.kill()  # the child had not become the node yet
        record = NodeRecord.read(self._record)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if record is None or not is_locked(self._record) or process_start(record.pid) != record.began:
                break
            with suppress(ProcessLookupError):
                os.kill(record.pid, number)
            until = time.monotonic() + STOP_TIMEOUT_S
            while is_locked(self._record) and time.monotonic() < until:
                time.sleep(0.05)
        if self._child is not None:
            self._child.wait()
        if self._lifeline_lock is not None:
            self._lifeline_lock.close()

    def _keep_node(self) -> None:
        while not self._ending.wait(LOOK_INTERVAL_S):
            if os.getppid() != self._parent:
                # The raylet has died. Ray leaves its workers alive for more than a minute, and this one would
                # keep the lifeline from the actor of the next `ray start`.
                os._exit(1)
            try:
                self._problem = self._check_and_start()
            except Exception as error:  # such as a full disk or a folder of another user: it tries again
                self._problem = f"{type(error).__name__}: {error}"

    def _check_and_start(self) -> str:
        """Look at the node, and start it if there is none. Returns what is wrong, or ""."""
        ended = self._child.poll() if self._child is not None else None
        if ended is not None:
            self._child = None
            lived = time.monotonic() - self._started
            self._failures = 0 if lived >= SETTLED_S else self._failures + 1
            self._next_start = time.monotonic() + (
                RESTART_PAUSES.delay(self._failures - 1) if self._failures else 0
            )
        if self._lifeline_lock is None:
            self._lifeline_lock = take_lock(self._lifeline, wait_s=LOCK_TIMEOUT_S)
        record = NodeRecord.read(self._record)
        if record is not None and is_locked(self._record):
            return self._note_served(record)
        if self._lifeline_lock is None:
            return (
                "another actor holds its node: if this machine runs several Ray nodes, give each `ray start`"
                " a label polarnode-host=NAME"
            )
        if self._child is None and time.monotonic() >= self._next_start:
            self._start_node(record)
        return f"its node is not up: {self._last_line()}" if self._failures else ""

    def _note_served(self, record: NodeRecord) -> str:
        if self._served != f"{record.pid} {record.began}" and self._is_serving(record.url):
            self._served, self._url = f"{record.pid} {record.began}", record.url
        return ""

    def _is_serving(self, url: str) -> bool:
        # The request carries no token, so it does not matter whose certificate the answer has.
        handlers = [
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=_unverified_context()),
        ]
        opener = urllib.request.build_opener(*handlers)
        try:
            with opener.open(f"{url}/v1/status", timeout=STATUS_TIMEOUT_S):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 401  # a node that is still starting answers 503
        except OSError:
            return False

    def _start_node(self, before: NodeRecord | None) -> None:
        host = self._host_order.machine.host
        host = f"[{host}]" if ":" in host else host
        port = int(before.url.rpartition(":")[2]) if before is not None else 0
        # The port of its last start keeps its address. After a failure another port is tried.
        if not port or self._failures:
            port = secrets.choice(NODE_PORTS)
        options = self._host_order.order.options
        if "--port" in options:
            port = int(options[options.index("--port") + 1])
        arguments = node_arguments(self._host_order, port, str(self._state))
        # Off loopback a node that shares a log has a certificate, if need be one that it signed itself.
        secure = self._host_order.order.log and not is_loopback(self._host_order.machine.host)
        url = f"{'https' if secure or '--tls-cert' in options else 'http'}://{host}:{port}"
        argv = (sys.executable, "-m", "polarnode.fleet.ray_host", str(self._record), url)
        self._started = time.monotonic()
        full = self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if full else 0)
        with os.fdopen(os.open(self._log, flags, 0o600), "ab") as log:
            self._child = subprocess.Popen(
                (*argv, sys.executable, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._node_environment(),
                start_new_session=True,
            )

    def _node_environment(self) -> dict[str, str]:
        order = self._host_order.order
        # Ray sets OMP_NUM_THREADS by the CPUs of the actor, which has none: an engine on CPUs would have one
        # thread.
        usual = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        mine = {
            "POLARNODE_NODE_ID": self._host_order.machine.name,
            "POLARNODE_LIFELINE": str(self._lifeline),
            "POLARNODE_ORPHAN_S": f"{order.orphan_s:g}",
        }
        private = {"POLARNODE_TOKEN": order.token, "POLARNODE_LOG": order.log}
        return {**usual, **mine, **{name: value for name, value in private.items() if value}}

    def _last_line(self) -> str:
        """The last line that a node printed. A node that cannot start says why in it."""
        with open(self._log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), f"see {self._log}")


def _unverified_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


if __name__ == "__main__":
    become_node(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
