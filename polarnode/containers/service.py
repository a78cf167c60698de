"""The node's own Podman service, on a socket only root can open, and its configuration.

containers.conf and storage.conf are written from what the probe found, because the defaults do not work
everywhere: limits above ours are refused without CAP_SYS_RESOURCE, and crun refuses mixed cgroups. Every node
of a store writes the same texts, so a file is replaced only when its text differs, in one step.

The service ends with the node even when the node is killed: its shell keeps a watcher on a pipe that only the
node holds open, and the watcher ends the whole process group when the pipe closes. (PR_SET_PDEATHSIG would
watch the thread that started it, and Trio starts programs from threads that retire.) Containers do not depend
on the service: one that dies is started again, and calls meanwhile fail with RuntimeFault.
"""

import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import trio
from attrs import define, field, frozen

from polarnode.containers.probe import SERVICE_PATH, PodmanFindings, Store, make_folders, probe, store_at
from polarnode.core.backoff import Backoff
from polarnode.core.errors import RuntimeFault

# ── configuration ─────────────────────────────────────────────────────────────

# seconds an ended exec keeps its exit code: 5 was too short under load, the default 300 keeps 2
# processes each
EXEC_KEPT_S = 60


@frozen(kw_only=True)
class ConfiguredStore:
    """A store that podman can run on, and the findings about the machine."""

    store: Store
    podman: Path
    findings: PodmanFindings


async def configure_store(state_dir: Path) -> ConfiguredStore:
    """Probe the machine, and make and configure the store. Raises RuntimeFault with the remedies where the
    machine lacks something.
    """
    findings = await probe(state_dir)
    if findings.podman is None or not findings.ok:
        raise RuntimeFault(f"containers cannot run here: {findings.faults()}")
    store = store_at(state_dir)
    make_folders(store)
    write_configuration(store, findings)
    return ConfiguredStore(store=store, podman=findings.podman, findings=findings)


def write_configuration(store: Store, findings: PodmanFindings) -> None:
    """Write containers.conf and storage.conf of a store whose folders exist."""
    _replace(store.containers_conf, containers_conf(store, findings))
    _replace(store.storage_conf, storage_conf(store, findings))


def containers_conf(store: Store, findings: PodmanFindings) -> str:
    """The engine's settings as TOML."""
    lines = [
        "[containers]",
        (
            f'default_ulimits = ["nofile={findings.nofile}:{findings.nofile}",'
            f' "nproc={findings.nproc}:{findings.nproc}"]'
        ),
        'log_driver = "k8s-file"',
        "http_proxy = false",
        'base_hosts_file = "none"',  # this machine's own names are no business of a session
        'host_containers_internal_ip = "none"',
        f'env = ["PATH={SERVICE_PATH}"]',
        "[engine]",
        f'cgroup_manager = "{"systemd" if findings.systemd else "cgroupfs"}"',
        'events_logger = "file"',
        f"exit_command_delay = {EXEC_KEPT_S}",
        'lock_type = "file"',  # shared-memory locks are one file for every Podman of the machine
        f'tmp_dir = "{store.run_dir / "libpod"}"',
        f'runtime = "{findings.oci_runtime.name if findings.oci_runtime else "runc"}"',
        "[network]",
        f'network_config_dir = "{store.state_dir / "etc" / "networks"}"',
    ]
    if findings.has_netavark:
        lines.append('network_backend = "netavark"')
    return "\n".join(lines) + "\n"


def storage_conf(store: Store, findings: PodmanFindings) -> str:
    """Where images and containers are, as TOML."""
    lines = [
        "[storage]",
        f'driver = "{findings.driver}"',
        f'graphroot = "{store.storage}"',
        f'runroot = "{store.run_dir / "storage"}"',
    ]
    if findings.mount_program is not None:
        lines += ["[storage.options.overlay]", f'mount_program = "{findings.mount_program}"']
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


# ── the service ───────────────────────────────────────────────────────────────

# seconds until the socket answers: 0.1 s quiet, 1-3 s on a loaded machine, more where a reboot left a store
# to refresh
START_S = 60.0
END_S = 5.0  # seconds it has for the end; it holds nothing that a kill would lose
POLL = 0.02  # seconds between looks for the socket while it starts
# before a restart, growing, so that a service that cannot start does not eat the machine
RESTART_PAUSES = Backoff(first_s=0.1, longest_s=10.0, factor=4.0)

# Standard input is the lifeline. A background job's own is /dev/null unless redirected, and no shell but bash
# dups two-digit descriptors.
WATCHED = '(read -r _; kill -KILL 0) <&3 & exec "$@" </dev/null 3<&-'

# logs of killed nodes, to find out why: kept for a week, and only if they are not empty
LOGS_KEPT_S = 7 * 86400.0

_log = logging.getLogger(__name__)


def sweep(store: Store) -> None:
    """Remove the sockets of killed nodes, and of their services' logs the empty and the old ones. A file name
    begins with its node's process id.
    """
    for path in (*store.sockets.glob("*.sock"), *store.log_dir.glob("*.log")):
        pid = path.stem.partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and not _worth_keeping(path):
            path.unlink(missing_ok=True)


def _worth_keeping(path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:  # another node that starts swept it
        return False
    return path.suffix == ".log" and found.st_size > 0 and time.time() - found.st_mtime < LOGS_KEPT_S


@define(eq=False)
class PodmanService:
    """A running service. `restarts` counts how often it had to be started again."""

    podman: Path
    store: Store
    socket: Path
    restarts: int = field(default=0, init=False)
    _process: trio.Process | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """The service's process now, for statistics and tests."""
        return self._process.pid if self._process else None

    async def run(self, ready: trio.Event) -> None:
        """Keep it running until cancelled; sets `ready` when the socket first answers. Raises RuntimeFault
        when the first start fails.
        """
        sweep(self.store)
        async with self._started():
            ready.set()
            await self._wait_ended()
        while True:
            await trio.sleep(RESTART_PAUSES.delay(self.restarts))
            self.restarts += 1
            _log.warning("the podman service ended and is started again, for the %d. time", self.restarts)
            with suppress(RuntimeFault):  # it is in the log; the next one may come up
                async with self._started():
                    await self._wait_ended()

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        alive, lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            with (self.store.log_dir / f"{self.socket.stem}.log").open("ab") as log:
                await self._start(alive, log)
            await self._wait_answering()
            yield
        finally:
            os.close(alive)
            with trio.move_on_after(3 * END_S, shield=True):  # more than its own deadlines
                await self._end()
            os.close(lifeline)

    async def _start(self, alive: int, log: BinaryIO) -> None:
        self.socket.unlink(missing_ok=True)
        service = [
            str(self.podman),
            "--log-level",
            "error",
            "system",
            "service",
            "--time",
            "0",
            f"unix://{self.socket}",
        ]
        argv = ["sh", "-c", f"exec 3<&0; {WATCHED}", "sh", *service]
        env = self.store.environment()
        # conmon 2.1 leaves a file `oom` in the folder it was started from whenever a container meets its
        # memory limit
        self._process = await trio.lowlevel.open_process(
            argv, stdin=alive, stdout=log, stderr=log, env=env, cwd=self.store.run_dir, start_new_session=True
        )

    async def _wait_answering(self) -> None:
        with trio.move_on_after(START_S):
            while not await self._answers():
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeFault(f"the podman service ended at its start: {self._last_words()}")
                await trio.sleep(POLL)
            return
        raise RuntimeFault(f"the podman service did not answer within {START_S:.0f} s: {self._last_words()}")

    async def _answers(self) -> bool:
        try:
            async with await trio.open_unix_socket(str(self.socket)):
                return True
        except OSError:
            return False

    async def _wait_ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for order in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, order)
            with trio.move_on_after(END_S):
                await process.wait()
        if process.returncode is None:
            _log.error("the podman service %d outlived SIGKILL", process.pid)
        self.socket.unlink(missing_ok=True)

    def _last_words(self) -> str:
        log = self.store.log_dir / f"{self.socket.stem}.log"
        return log.read_text(errors="replace")[-500:].strip() if log.exists() else "its log is empty"
