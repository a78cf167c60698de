"""The node's own Podman service, on a socket that only root can open, and its configuration.

containers.conf and storage.conf are written from what the probe found, because the defaults do not work
everywhere: limits above ours are refused without CAP_SYS_RESOURCE, and crun refuses mixed cgroups. The
seccomp profile of sessions is the machine's default with less allowed. Every node of a store writes the same
texts, so a file is replaced only when its text differs, in one step.

The service ends with the node even when the node is killed: its shell keeps a watcher on a pipe that only the
node holds open, and the watcher ends the whole process group when the pipe closes. (PR_SET_PDEATHSIG would
watch the thread that started the service, and Trio starts programs from threads that retire.) Containers do
not depend on the service: a service that dies is started again, and calls meanwhile fail with RuntimeFault.
"""

import errno
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import trio
from attrs import define, field, frozen

from polarnode.containers.probe import SERVICE_PATH, PodmanFindings, Store, make_folders, probe, store_at
from polarnode.containers.user_namespace import Limits
from polarnode.core.backoff import Backoff
from polarnode.core.errors import RuntimeFault

# ── configuration ─────────────────────────────────────────────────────────────

# Seconds for which the exit code of an ended exec is kept. 5 was too short under load; the default of 300
# keeps two processes for each exec.
EXEC_KEPT_S = 60


@frozen(kw_only=True)
class ConfiguredStore:
    """A store that podman can run on, and the findings about the machine."""

    store: Store
    podman: Path
    findings: PodmanFindings


async def configure_store(state_dir: Path, limits: Limits = "enforced") -> ConfiguredStore:
    """Probe the machine, and make and configure the store. Raises RuntimeFault with the remedies if the
    machine lacks something.
    """
    findings = await probe(state_dir, limits)
    if findings.podman is None or findings.seccomp is None or not findings.ok:
        raise RuntimeFault(f"containers cannot run here: {findings.faults()}")
    store = store_at(state_dir)
    make_folders(store)
    write_configuration(store, findings)
    return ConfiguredStore(store=store, podman=findings.podman, findings=findings)


def write_configuration(store: Store, findings: PodmanFindings) -> None:
    """Write containers.conf, storage.conf and the sessions' seccomp profiles of a store whose folders exist.
    Raises RuntimeFault where the machine's default profile cannot be used.
    """
    _replace_file(store.seccomp_profile, seccomp_profile(findings))
    _replace_file(traced_profile(store), seccomp_profile(findings, ptrace=True))
    _replace_file(store.containers_conf, containers_conf(store, findings))
    _replace_file(store.storage_conf, storage_conf(store, findings))


def traced_profile(store: Store) -> Path:
    """The seccomp profile of sessions whose task asks for `ptrace`."""
    return store.seccomp_profile.with_stem("seccomp-ptrace")


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
        f"cgroup_manager = {_text('systemd' if findings.systemd else 'cgroupfs')}",
        'events_logger = "file"',
        f"exit_command_delay = {EXEC_KEPT_S}",
        'lock_type = "file"',  # shared-memory locks are one file for every Podman of the machine
        f"tmp_dir = {_text(store.run_dir / 'libpod')}",
        f"runtime = {_text(findings.oci_runtime.name if findings.oci_runtime else 'runc')}",
        "[network]",
        f"network_config_dir = {_text(store.state_dir / 'etc' / 'networks')}",
    ]
    if findings.has_netavark:
        lines.append('network_backend = "netavark"')
    return "\n".join(lines) + "\n"


def storage_conf(store: Store, findings: PodmanFindings) -> str:
    """The settings for the storage of images and containers, as TOML."""
    lines = [
        "[storage]",
        f"driver = {_text(findings.driver)}",
        f"graphroot = {_text(store.storage)}",
        f"runroot = {_text(store.run_dir / 'storage')}",
        # Without root Podman does not read graphroot.
        f"rootless_storage_path = {_text(store.storage)}",
    ]
    if findings.mount_program is not None:
        lines += ["[storage.options.overlay]", f"mount_program = {_text(findings.mount_program)}"]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    """A string of TOML. A path may hold quotes and backslashes; JSON's escapes are valid in TOML too."""
    return json.dumps(str(value), ensure_ascii=False)


def seccomp_profile(findings: PodmanFindings, *, ptrace: bool = False) -> str:
    """The system calls that sessions may make, as JSON in the form of Podman's own profile. `ptrace`: their
    programs may ask to be traced.
    """
    if findings.seccomp is None:
        raise RuntimeFault("this machine has no default seccomp profile: see `polarnode doctor`")
    try:
        default = json.loads(findings.seccomp.read_text())
    except (OSError, ValueError) as error:
        raise RuntimeFault(f"{findings.seccomp} cannot be read: {error}; reinstall it") from error
    return json.dumps(session_profile(default, ptrace=ptrace), indent=1) + "\n"


def _replace_file(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


# ── system calls ──────────────────────────────────────────────────────────────

# These calls are refused as if the kernel lacked them, so that programs fall back. Asynchronous I/O is
# refused because one session can take the machine's fs.aio-max-nr; databases then use threads. io_uring is
# refused because its workers run in the kernel, as do most attacks through it. Keys are refused because the
# kernel keeps them by user, not by namespace. `socketcall` hides its arguments from seccomp; 32-bit programs
# since 2016 do not use it. The rest needs capabilities that nothing in a container has.
REFUSED = (
    *("io_setup", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("keyctl", "add_key", "request_key", "socketcall"),
    *("bpf", "fanotify_init", "perf_event_open", "userfaultfd"),
)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = (
    1,
    2,
    10,
    16,
)  # the only families of sockets; vsock (40) reaches the hypervisor
FAMILIES = 46  # kernels have the families below; all numbers from here on are refused together
# Routes and addresses, lists of sockets, and devices are allowed; the packet filter (12) and its like are
# not.
NETLINK_PROTOCOLS = (0, 4, 15)
PROTOCOL_COUNT = 23
# A request of ptrace. A program that makes it is traced by its parent, which is conmon for programs that the
# node runs. conmon takes the program's first stop for its end, and the exit code is lost. Programs that trace
# others (strace, sanitizers) work.
PTRACE_TRACEME = 0


def session_profile(default: Mapping[str, Any], *, ptrace: bool = False) -> dict[str, Any]:
    """The seccomp profile of sessions: a default profile with less allowed. `ptrace`: TRACEME is allowed too.
    This is a pure function.

    Sockets are allowed by equality, because a rule that only refuses some numbers misses numbers with high
    bits set, which the kernel ignores. Raises RuntimeFault for a default that allows calls which it does not
    name.
    """
    if default.get("defaultAction") != "SCMP_ACT_ERRNO" or not isinstance(default.get("syscalls"), list):
        raise RuntimeFault("the machine's default seccomp profile does not refuse unknown system calls")
    replaced = {*REFUSED, "socket", "socketpair"}
    kept = [
        {**rule, "names": names}
        for rule in default["syscalls"]
        if (names := [name for name in rule["names"] if name not in replaced])
    ]
    if not ptrace:
        kept = [part for rule in kept for part in _without_traceme(rule)]
    unknown = {"defaultErrnoRet": errno.ENOSYS, "defaultErrno": "ENOSYS"}
    return {**default, **unknown, "syscalls": [*kept, *_socket_rules()]}


def _without_traceme(rule: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a rule of a default profile, so that its part about ptrace allows everything but TRACEME."""
    if others := [name for name in rule["names"] if name != "ptrace"]:
        yield {**rule, "names": others}
    if "ptrace" in rule["names"]:
        yield {
            **rule,
            "names": ["ptrace"],
            "args": [*(rule.get("args") or ()), *_rule("ptrace", None, (0, "NE", PTRACE_TRACEME))["args"]],
        }
        yield {**rule, **_rule("ptrace", "EPERM", (0, "EQ", PTRACE_TRACEME))}


def _socket_rules() -> Iterator[dict[str, Any]]:
    """The rules of sockets. Refusals come first, and allowed families have a second comparison that always
    holds: for 32-bit programs libseccomp 2.5 otherwise finds two rules of one system call, `socketcall`, and
    fails.
    """
    for family in range(FAMILIES):
        if family not in (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK):
            yield _rule("socket", "EAFNOSUPPORT", (0, "EQ", family))
    yield _rule("socket", "EAFNOSUPPORT", (0, "GE", FAMILIES))
    for protocol in range(PROTOCOL_COUNT):
        if protocol not in NETLINK_PROTOCOLS:
            yield _rule("socket", "EPROTONOSUPPORT", (0, "EQ", AF_NETLINK), (2, "EQ", protocol))
    yield _rule("socket", "EPROTONOSUPPORT", (0, "EQ", AF_NETLINK), (2, "GE", PROTOCOL_COUNT))
    for family in (AF_UNIX, AF_INET, AF_INET6):
        yield _rule("socket", None, (0, "EQ", family), (1, "GE", 0))
    for protocol in NETLINK_PROTOCOLS:
        yield _rule("socket", None, (0, "EQ", AF_NETLINK), (2, "EQ", protocol))
    yield _rule("socketpair", None, (0, "EQ", AF_UNIX))


def _rule(name: str, error: str | None, *arguments: tuple[int, str, int]) -> dict[str, Any]:
    """A rule that allows, or refuses with an error. Its arguments are (index, comparison, value)."""
    checks = [
        {"index": index, "op": f"SCMP_CMP_{how}", "value": value, "valueTwo": 0}
        for index, how, value in arguments
    ]
    rule = {"names": [name], "args": checks, "includes": {}, "excludes": {}, "comment": "polarnode"}
    if error is None:
        return {**rule, "action": "SCMP_ACT_ALLOW"}
    return {**rule, "action": "SCMP_ACT_ERRNO", "errno": error, "errnoRet": getattr(errno, error)}


# ── the service ───────────────────────────────────────────────────────────────

# Seconds until the socket must answer. It takes 0.1 s on a quiet machine, 1-3 s on a loaded one, and more if
# a store has to be refreshed after a reboot.
START_S = 60.0
END_S = 5.0  # seconds that the service has to end; it holds nothing that a kill would lose
POLL = 0.02  # seconds between checks of the socket while the service starts
# The pauses before restarts grow, so that a service that cannot start does not take up the machine.
RESTART_PAUSES = Backoff(first_s=0.1, longest_s=10.0, factor=4.0)

# Standard input is the lifeline. It is passed as descriptor 3, because a background job's own input is
# /dev/null unless redirected, and no shell but bash duplicates two-digit descriptors.
WATCHED_SCRIPT = '(read -r _; kill -KILL 0) <&3 & exec "$@" </dev/null 3<&-'

# Logs of killed nodes are kept for a week, to find out why, but only if they are not empty.
LOGS_KEPT_S = 7 * 86400.0

_log = logging.getLogger(__name__)


def sweep(store: Store) -> None:
    """Remove the sockets of killed nodes, and those logs of their services that are empty or old. A file name
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
            with suppress(RuntimeFault):  # the reason is in the log, and the next start may succeed
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
            with trio.move_on_after(3 * END_S, shield=True):  # more than the deadlines in `_end`
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
        argv = ["sh", "-c", f"exec 3<&0; {WATCHED_SCRIPT}", "sh", *service]
        env = self.store.environment()
        # conmon 2.1 leaves a file `oom` in the folder from which it was started whenever a container meets
        # its memory limit.
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
