"""Probe this machine's Podman: findings with remedies, and the location of the store of images and
containers.

The store is separate from every other Podman on the machine. Images stay in `state_dir` between runs and are
shared by all nodes that name the same folder. The run folder is a pure function of `state_dir`, because the
database in `state_dir` remembers the run folder and silently overrides a changed one.

Each finding is a fact, whether a node can work with it, and a remedy. `open_runtimes` writes its
configuration from the same findings that `polarnode doctor` shows. Invariant: probing starts no container and
runs no podman that would open its default store.
"""

import hashlib
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import trio
from attrs import frozen

from polarnode.containers import user_namespace
from polarnode.containers.control_groups import (
    LIMIT_CONTROLLERS,
    CgroupsVersion,
    cgroups_version,
    enforced,
    has_controller,
    has_systemd,
)
from polarnode.containers.criu import freezing_obstacle
from polarnode.containers.sealing import sealing_obstacle
from polarnode.containers.user_namespace import ADMINISTRATOR_REMEDY, Limits, ProcessRights, read_rights
from polarnode.core.errors import RuntimeFault

# ── the store ─────────────────────────────────────────────────────────────────

# A reboot empties these folders. That is how Podman learns that there was one.
MEMORY_FOLDERS = (Path("/dev/shm"), Path("/run"))
# The folders in which runc, conmon and iptables may be.
SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def default_state_dir() -> Path:
    """The default folder of the store: one for each machine, shared by nodes, tests and demos, so that an
    image is built once.

    It is not in root's home, because a container's mapped users must pass through every folder above their
    root, and Podman opens folders that forbid it to everyone.
    """
    if "XDG_STATE_HOME" in os.environ:
        return Path(os.environ["XDG_STATE_HOME"]) / "polarnode" / "podman"
    if read_rights().kind == "root":
        return Path("/var/lib/polarnode/podman")
    return Path.home() / ".local" / "state" / "polarnode" / "podman"


@frozen(kw_only=True)
class Store:
    """The folders of one store. `run_dir` is on tmpfs and holds nothing that must outlive a reboot."""

    state_dir: Path
    run_dir: Path

    @property
    def containers_conf(self) -> Path:
        return self.state_dir / "etc" / "containers.conf"

    @property
    def storage_conf(self) -> Path:
        return self.state_dir / "etc" / "storage.conf"

    @property
    def seccomp_profile(self) -> Path:
        """The system calls that sessions may make: this machine's default without `service.REFUSED`."""
        return self.state_dir / "etc" / "seccomp.json"

    @property
    def storage(self) -> Path:
        """Podman's own graph root: images and containers."""
        return self.state_dir / "storage"

    @property
    def sockets(self) -> Path:
        """The folder of the nodes' API sockets; any process that can open one is root."""
        return self.run_dir / "api"

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"

    def environment(self) -> dict[str, str]:
        """The whole environment of every podman that the node starts: both configuration files, and from the
        node's own environment only its trust and proxy settings.
        """
        passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        if user_namespace.CONFIGURED_VARIABLE in os.environ:
            named = {name: os.environ[name] for name in user_namespace.PASSED_VARIABLES if name in os.environ}
            # Without XDG_RUNTIME_DIR runc uses /run, which belongs to root.
            passed = {"XDG_RUNTIME_DIR": str(self.run_dir), **passed, **named}
        own = {
            "CONTAINERS_CONF": str(self.containers_conf),
            "CONTAINERS_STORAGE_CONF": str(self.storage_conf),
        }
        return {
            "PATH": SERVICE_PATH,
            "HOME": str(self.state_dir),
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.state_dir / "tmp"),
            **passed,
            **own,
        }


# These variables may be needed to reach a registry. They are for pulls and builds, and `httpproxy: false`
# keeps them out of containers.
PASSED_VARIABLES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "REGISTRY_AUTH_FILE",
)


def store_at(state_dir: Path) -> Store:
    """The store in a folder, not yet created."""
    resolved = state_dir.resolve()
    name = f"polarnode-{os.geteuid()}-{hashlib.sha256(os.fsencode(resolved)).hexdigest()[:12]}"
    return Store(state_dir=resolved, run_dir=_memory_folder(resolved) / name)


def make_folders(store: Store) -> None:
    """Make the missing folders. A run folder that another user made, in a world-writable place, is
    refused.
    """
    for folder in (store.state_dir, store.state_dir / "etc", store.state_dir / "tmp", store.log_dir):
        folder.mkdir(parents=True, exist_ok=True)
    # Mapped container users pass through the folder to their own root, and may not list it.
    store.state_dir.chmod(0o711)
    store.run_dir.mkdir(mode=0o711, exist_ok=True)
    store.sockets.mkdir(mode=0o700, exist_ok=True)
    found = store.run_dir.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise RuntimeFault(
            f"{store.run_dir} is not a folder of ours alone: remove it, or set another podman_dir"
        )


def _memory_folder(fallback: Path) -> Path:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    for folder in MEMORY_FOLDERS:
        if [str(folder), "tmpfs"] in mounts and os.access(folder, os.W_OK):
            return folder
    return fallback


# ── what is probed ────────────────────────────────────────────────────────────


OLDEST_PODMAN = (4, 3)  # the one of Debian 12; older ones were never tried
IDMAPPED_KERNEL = (5, 19)  # from this kernel on a user namespace needs no copy of the image
# The most open files of a container. With a million, programs that close every possible descriptor take
# minutes.
MOST_FILES = 65536
INIT_PLACES = (
    "/usr/libexec/podman/catatonit",
    "/usr/bin/catatonit",
    "/usr/lib/podman/catatonit",
    "/usr/local/libexec/podman/catatonit",
)
# The places where Podman itself looks for its default profile, in its order.
SECCOMP_PLACES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
NETWORK_PLACES = (
    "/usr/lib/podman/netavark",
    "/usr/libexec/podman/netavark",
    "/usr/local/libexec/podman/netavark",
)
# They are needed for namespaces, for /proc/PID/root, to end processes, and to change owners of files.
NEEDED_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SYS_PTRACE": 19, "CAP_KILL": 5, "CAP_CHOWN": 0}


@frozen(kw_only=True)
class MachineFinding:
    """One fact about the machine. `remedy` is what to do; empty where nothing needs doing."""

    name: str
    ok: bool
    what: str
    remedy: str = ""


@frozen(kw_only=True)
class PodmanFindings:
    """The findings from which a node's Podman configuration is written, and which `polarnode doctor` shows. A
    missing tool is None. `limits`: the controllers of control groups that enforce a session's limits.
    """

    podman: Path | None
    oci_runtime: Path | None
    init: Path | None
    seccomp: Path | None
    has_netavark: bool
    cgroups: CgroupsVersion
    systemd: bool
    nofile: int
    nproc: int
    most_open_files: int
    driver: Literal["overlay", "vfs"]
    mount_program: Path | None
    user_namespaces: bool
    quotas: bool
    freezes: bool
    limits: frozenset[str]
    findings: tuple[MachineFinding, ...]
    freezing_obstacle: str | None = "it was not looked for"  # the reason why sessions cannot be frozen

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def faults(self) -> str:
        """One sentence with everything that prevents use, each with its remedy."""
        return "; ".join(f"{finding.what} ({finding.remedy})" for finding in self.findings if not finding.ok)


async def probe(state_dir: Path, wanted: Limits = "enforced") -> PodmanFindings:
    """Probe the machine for a store in `state_dir` (which need not exist). It takes about 0.1 s. If `wanted`
    is best effort, a limit that is not enforced is no obstacle.
    """
    rights = read_rights()
    podman, init, seccomp = _find_program("podman"), _first(INIT_PLACES), _first(SECCOMP_PLACES)
    cgroups, filesystem = cgroups_version(), _filesystem_kind(state_dir)
    oci = _oci_runtime(cgroups)
    mount_program = _fuse_overlay() if filesystem == "overlay" else None
    driver: Literal["overlay", "vfs"] = (
        "vfs" if filesystem == "overlay" and mount_program is None else "overlay"
    )
    layers, root = driver == "overlay" and mount_program is None, rights.kind == "root"
    native = layers and _kernel() >= IDMAPPED_KERNEL
    user_namespaces = root and native and closed_folder(state_dir) is None
    quotas = root and layers and _has_quotas(state_dir)
    limits = enforced(cgroups, rights)
    # In version 2 every group has a freezer, and a container has a group if its limits are enforced.
    freezes = bool(limits) and (cgroups == "v2" or has_controller("freezer", cgroups))
    freezing = await freezing_obstacle(
        _find_program("criu"), oci_runtime=oci, freezes=freezes, overlay=layers, root=root
    )
    what, _, remedy = (freezing or "sessions can be frozen by criu").partition(": ")
    findings = (
        _rights_finding(rights),
        await _podman_finding(podman),
        _runtime(oci, cgroups),
        _init(init),
        _seccomp_finding(seccomp),
        _cgroup_finding(cgroups, rights, limits, wanted),
        _storage_finding(driver, mount_program, filesystem),
        _isolation_finding(native, closed_folder(state_dir), rights),
        _sealing_finding(sealing_obstacle()),
        _disk_limit_finding(quotas),
        _freezer_finding(freezes),
        MachineFinding(name="fork by freezing", ok=True, what=what, remedy=remedy),
        _memory(state_dir),
        _builder(),
    )
    nofile, nproc, most_open_files = _limits()
    return PodmanFindings(
        podman=podman,
        oci_runtime=oci,
        init=init,
        seccomp=seccomp,
        has_netavark=_first(NETWORK_PLACES) is not None,
        cgroups=cgroups,
        systemd=has_systemd(),
        nofile=nofile,
        nproc=nproc,
        most_open_files=most_open_files,
        driver=driver,
        mount_program=mount_program,
        user_namespaces=user_namespaces,
        quotas=quotas,
        freezes=freezes,
        limits=limits,
        findings=findings,
        freezing_obstacle=freezing,
    )


def _find_program(name: str) -> Path | None:
    found = shutil.which(name, path=SERVICE_PATH)
    return Path(found) if found else None


def _first(places: tuple[str, ...]) -> Path | None:
    return next((Path(place).resolve() for place in places if Path(place).exists()), None)


def _fuse_overlay() -> Path | None:
    return _find_program("fuse-overlayfs") if Path("/dev/fuse").exists() else None


def _oci_runtime(cgroups: CgroupsVersion) -> Path | None:
    names = ("crun", "runc") if cgroups == "v2" else ("runc", "crun")
    return next((found for name in names if (found := _find_program(name)) is not None), None)


def _filesystem_kind(folder: Path) -> str:
    """The kind of file system a folder is or will be on."""
    return mounted_at(folder, Path("/proc/mounts").read_text())[0]


def _has_quotas(folder: Path) -> bool:
    """Whether Podman can bound a container's layer: only XFS can, and only if it was mounted for it."""
    kind, options = mounted_at(folder, Path("/proc/mounts").read_text())
    return kind == "xfs" and not {"prjquota", "pquota"}.isdisjoint(options)


def mounted_at(folder: Path, mounts: str) -> tuple[str, tuple[str, ...]]:
    """The kind and the options of the file system a folder is or will be on, from the text of
    /proc/mounts.
    """
    place, best = str(folder.resolve()), ("", "unknown", "")
    for line in mounts.splitlines():
        point, kind, options = line.split()[1:4]
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind, options)
    return best[1], tuple(best[2].split(","))


def closed_folder(state_dir: Path) -> Path | None:
    """The first folder above a store that mapped users could not pass; None if there is none. Podman would
    open it to all users, which must not happen to a home.
    """
    above = [folder for folder in state_dir.resolve().parents if folder.exists()]
    return next((folder for folder in above if folder.stat().st_mode & 0o111 != 0o111), None)


def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _limits() -> tuple[int, int, int]:
    """The node's own hard limits of files and processes, and the files that all programs of the machine may
    open together. Containers get limits within the node's own, because without CAP_SYS_RESOURCE the kernel
    refuses Podman's defaults.
    """
    most_pids = int(Path("/proc/sys/kernel/pid_max").read_text())
    files, processes = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        resource.getrlimit(resource.RLIMIT_NPROC)[1],
    )
    nofile = MOST_FILES if files == resource.RLIM_INFINITY else min(files, MOST_FILES)
    # conmon lowers its own limit to 32768 if pid_max is 32768 or the limit is higher, and cannot raise it
    # again.
    nproc = min(most_pids, 32768, most_pids if processes == resource.RLIM_INFINITY else processes)
    return nofile, nproc, int(Path("/proc/sys/fs/file-max").read_text())


# ── findings ──────────────────────────────────────────────────────────────────


def _rights_finding(rights: ProcessRights) -> MachineFinding:
    if rights.kind == "user":
        return MachineFinding(
            name="rights",
            ok=False,
            what="not root, and without a user namespace to be root of",
            remedy=ADMINISTRATOR_REMEDY,
        )
    if rights.kind == "namespace":
        return MachineFinding(
            name="rights",
            ok=True,
            what=f"root of a user namespace with {rights.ids} ids, not of this machine",
        )
    effective = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")
    )
    lacking = [
        name for name, bit in NEEDED_CAPABILITIES.items() if not int(effective.split()[1], 16) >> bit & 1
    ]
    if lacking:
        return MachineFinding(
            name="rights",
            ok=False,
            what=f"root without {', '.join(lacking)}",
            remedy="give the node's own container --privileged",
        )
    return MachineFinding(name="rights", ok=True, what="root with the capabilities that containers need")


async def _podman_finding(podman: Path | None) -> MachineFinding:
    if podman is None:
        return MachineFinding(
            name="podman",
            ok=False,
            what="podman is not installed",
            remedy="apt-get install --no-install-recommends podman",
        )
    with trio.move_on_after(20):  # seconds; it forks nothing and opens no store, and takes 50 ms
        answer = await trio.run_process(
            [podman, "--version"], capture_stdout=True, stderr=subprocess.DEVNULL, check=False
        )
        found = re.search(rb"(\d+)\.(\d+)(?:\.\d+)?", answer.stdout)
        if found and (int(found[1]), int(found[2])) >= OLDEST_PODMAN:
            return MachineFinding(name="podman", ok=True, what=f"podman {found[0].decode()}")
        return MachineFinding(
            name="podman",
            ok=False,
            what=f"podman is {found[0].decode() if found else 'unreadable'}",
            remedy="install podman 4.3 or newer",
        )
    return MachineFinding(
        name="podman",
        ok=False,
        what="podman --version does not answer",
        remedy="look at what the machine is busy with",
    )


def _runtime(oci: Path | None, cgroups: CgroupsVersion) -> MachineFinding:
    if oci is None:
        return MachineFinding(
            name="container runtime",
            ok=False,
            what="neither runc nor crun is installed",
            remedy="apt-get install runc",
        )
    if oci.name == "crun" and cgroups == "hybrid":
        return MachineFinding(
            name="container runtime",
            ok=False,
            what="crun refuses mixed cgroups",
            remedy="apt-get install runc",
        )
    return MachineFinding(name="container runtime", ok=True, what=oci.name)


def _init(init: Path | None) -> MachineFinding:
    if init is None:
        return MachineFinding(
            name="first process",
            ok=False,
            what="catatonit is not installed",
            remedy="apt-get install catatonit",
        )
    return MachineFinding(name="first process", ok=True, what=f"catatonit at {init}")


def _seccomp_finding(profile: Path | None) -> MachineFinding:
    if profile is None:
        return MachineFinding(
            name="system calls",
            ok=False,
            what=f"no default seccomp profile at {' or '.join(SECCOMP_PLACES)}",
            remedy="apt-get install golang-github-containers-common (elsewhere: containers-common)",
        )
    return MachineFinding(name="system calls", ok=True, what=f"bounded by {profile} and the node's own rules")


def _cgroup_finding(
    cgroups: CgroupsVersion, rights: ProcessRights, limits: Collection[str], wanted: Limits
) -> MachineFinding:
    missing = [name for name in LIMIT_CONTROLLERS if name not in limits]
    if missing and rights.kind != "root":
        delegate = (
            f"as an administrator, give this user the controllers: Delegate={' '.join(LIMIT_CONTROLLERS)}"
            " under"
            " [Service] in /etc/systemd/system/user@.service.d/delegate.conf"
            if cgroups == "v2" and has_systemd()
            else "they need cgroups v2 and systemd, or root"
        )
        return MachineFinding(
            name="cgroups",
            ok=wanted == "best_effort",
            what=f"cgroups {cgroups} keep no limit of {', '.join(missing)} without root: a session can take"
            " the whole machine",
            remedy=f"{delegate}; or accept it: --limits best_effort, or POLARNODE_LIMITS=best_effort",
        )
    if missing:
        remedy = "mount these controllers: without them a session can take the whole machine"
        return MachineFinding(
            name="cgroups", ok=False, what=f"cgroups {cgroups} without {', '.join(missing)}", remedy=remedy
        )
    return MachineFinding(name="cgroups", ok=True, what=f"cgroups {cgroups}")


def _storage_finding(driver: str, mount_program: Path | None, filesystem: str) -> MachineFinding:
    if driver == "vfs":
        remedy = "set podman_dir to a folder on ext4 or xfs, or apt-get install fuse-overlayfs"
        return MachineFinding(
            name="storage",
            ok=False,
            what=f"{filesystem} cannot hold overlay: each container would copy its image",
            remedy=remedy,
        )
    how = f"overlay through {mount_program.name}, slower than native" if mount_program else "native overlay"
    return MachineFinding(name="storage", ok=True, what=f"{how} on {filesystem}")


def _isolation_finding(native: bool, closed: Path | None, rights: ProcessRights) -> MachineFinding:
    if rights.kind != "root":
        return MachineFinding(
            name="isolation",
            ok=True,
            what="no network, no capabilities, one user namespace for all containers: the same user in two of"
            " them is one user of this machine, and one session can take all inotify instances and pending"
            " signals of the others",
            remedy="a node that root runs gives each container ids of its own",
        )
    if native and closed is None:
        return MachineFinding(
            name="isolation",
            ok=True,
            what="no network, no capabilities, a user namespace of its own for each container",
        )
    remedy = (
        f"a kernel of {'.'.join(map(str, IDMAPPED_KERNEL))} or newer and native overlay would add it at no"
        " cost"
    )
    if closed is not None:
        remedy = (
            f"{closed} may be entered by its owner alone: set podman_dir to a folder below one that all may"
            " pass"
        )
    return MachineFinding(
        name="isolation",
        ok=True,
        what="no network, no capabilities, but no user namespaces: one session can take all inotify instances"
        " and pending signals of the others",
        remedy=remedy,
    )


def _sealing_finding(obstacle: str | None) -> MachineFinding:
    if obstacle is None:
        return MachineFinding(
            name="read-only root", ok=True, what="all but the workspace is read-only while a harness runs"
        )
    remedy = (
        "give the node's own container the right to mount, or set runtime.read_only = false in tasks: others"
        " end with an error"
    )
    return MachineFinding(
        name="read-only root", ok=True, what=f"no root can be made read-only here ({obstacle})", remedy=remedy
    )


def _disk_limit_finding(quotas: bool) -> MachineFinding:
    missing = [name for name in ("du", "nice") if _find_program(name) is None]
    if missing:
        return MachineFinding(
            name="disk limit",
            ok=False,
            what=f"{' and '.join(missing)} cannot be found",
            remedy="apt-get install coreutils",
        )
    if quotas:
        return MachineFinding(name="disk limit", ok=True, what="each container has a quota")
    remedy = "a podman_dir on XFS mounted with pquota would refuse the write itself"
    return MachineFinding(
        name="disk limit",
        ok=True,
        what="what containers write is measured, and one over its limit is ended",
        remedy=remedy,
    )


def _freezer_finding(freezes: bool) -> MachineFinding:
    if freezes:
        return MachineFinding(
            name="freezer", ok=True, what="sessions that wait for the engine are frozen while memory is short"
        )
    remedy = "mount the freezer controller of cgroups v1, or use v2"
    return MachineFinding(
        name="freezer", ok=True, what="no freezer: sessions that wait for the engine go on", remedy=remedy
    )


def _memory(state_dir: Path) -> MachineFinding:
    run_dir = store_at(state_dir).run_dir
    if run_dir.is_relative_to(state_dir.resolve()):
        remedy = "mount a tmpfs on /dev/shm: Podman cannot notice a reboot otherwise"
        return MachineFinding(name="run folder", ok=True, what=f"{run_dir} is not in memory", remedy=remedy)
    return MachineFinding(name="run folder", ok=True, what=str(run_dir))


def _builder() -> MachineFinding:
    if _find_program("mmdebstrap") is None:
        remedy = "apt-get install mmdebstrap, or give --base-image a Debian image that can be pulled"
        return MachineFinding(
            name="image builder", ok=True, what="no mmdebstrap: images need a public base", remedy=remedy
        )
    return MachineFinding(
        name="image builder", ok=True, what="mmdebstrap builds a base where no registry is reachable"
    )
