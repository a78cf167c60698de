"""The definition of a session's container: its volumes, its shape, its owner's label, and its libpod spec.

The spec is made by a pure function. It gives a container no network but loopback, no capabilities and no way
to gain any, a user namespace of its own where that costs nothing, and a limit for everything that a container
could exhaust. The root is one layer and writable here; while a harness runs, the node makes it read-only,
except for the workspace (`sealing.py`). Podman's own read-only root is not used, because it would copy each
image's workdir into a volume at every start, and the layer of a prepared container would lack the workdir.

A volume's source must be below a folder that the node's config names. Its resolved path is checked when the
task is submitted and again when a container is made. Before anything runs, the folder mounted in the
container is compared with the one that was checked, so that a link that was moved meanwhile leads nowhere
else. Invariant: a source is judged only by its resolved path, never by how it is written.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import frozen

from polarnode.containers.criu import CONFIG_ANNOTATION
from polarnode.containers.files import open_below
from polarnode.containers.probe import PodmanFindings
from polarnode.containers.sealing import mounts_of
from polarnode.containers.user_namespace import IDS
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import RuntimeSpec, VolumeSpec

# ── volumes ───────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Volume:
    """A volume whose source is resolved and allowed."""

    source: str
    target: str
    write: bool


def check_volumes(volumes: Sequence[VolumeSpec], allowed: Sequence[str]) -> None:
    """Raise Refused, with its path, for the first volume that this node does not allow."""
    for index, volume in enumerate(volumes):
        refusal = volume_refusal(volume.source, allowed)
        if refusal is not None:
            raise Refused(refusal, path=f"$.runtime.volumes[{index}].source")


def volume_refusal(source: str, allowed: Sequence[str]) -> str | None:
    """Why a source is not allowed; None when it is."""
    try:
        real = Path(source).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        return f"{source} is not a folder of this node's machine ({error})"
    if not real.is_dir():
        return f"{source} is not a folder: name the one it is in"
    if not any(real.is_relative_to(Path(prefix).resolve()) for prefix in allowed):
        leads = "" if str(real) == os.path.normpath(source) else f" (it leads to {real})"
        return (
            f"{source}{leads} is not below a folder that this node's setting volumes allows:"
            f" {', '.join(allowed) or 'it names none'}"
        )
    within = next(
        (
            mount.place
            for mount in mounts_of(os.getpid())
            if Path(mount.place).is_relative_to(real) and Path(mount.place) != real
        ),
        None,
    )
    return (
        None
        if within is None
        else (
            f"{source} has another file system mounted in it, at {within}: name what is below or above it"
            " apart"
        )
    )


@contextmanager
def open_volumes(volumes: Sequence[VolumeSpec], allowed: Sequence[str]) -> Iterator["OpenVolumes"]:
    """Open the sources and hold them while their container is made. Raises RuntimeFault for one that is no
    longer allowed.
    """
    with ExitStack() as stack:
        found: list[tuple[Volume, int]] = []
        for volume in volumes:
            refusal = volume_refusal(volume.source, allowed)
            if refusal is not None:
                raise RuntimeFault(refusal)
            real = str(Path(volume.source).resolve(strict=True))
            try:
                opened = os.open(real, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                raise RuntimeFault(f"volume {volume.source}: {error.strerror}") from error
            stack.callback(os.close, opened)
            found.append((Volume(source=real, target=volume.target, write=volume.write), opened))
        yield OpenVolumes(tuple(found))


@frozen
class OpenVolumes:
    """Allowed volumes, each with its source open."""

    _found: tuple[tuple[Volume, int], ...]

    @property
    def volumes(self) -> tuple[Volume, ...]:
        return tuple(volume for volume, _ in self._found)

    def check_mounted(self, root: int) -> None:
        """Check that the folders mounted in a container, which has not started yet, are those that were
        checked before. Raises RuntimeFault if one is not.
        """
        for volume, source in self._found:
            path, real = os.readlink(f"/proc/self/fd/{source}"), os.fstat(source)
            try:
                with open_below(root, volume.target, os.O_PATH, links=True) as mounted:
                    seen = os.fstat(mounted)
            except OSError as error:
                raise RuntimeFault(
                    f"volume {volume.source} is not in its container at {volume.target}: {error.strerror}"
                ) from error
            if path != volume.source or (seen.st_dev, seen.st_ino) != (real.st_dev, real.st_ino):
                raise RuntimeFault(f"volume {volume.source} was replaced while its container was made")


# ── the spec ──────────────────────────────────────────────────────────────────

INIT_INSIDE = "/dev/polarnode-init"  # on the container's own /dev, so nothing is left in its layer
CPU_PERIOD_US = 100_000  # microseconds; the kernel's default
SHARED_MEMORY = 64 << 20  # bytes of /dev/shm, Podman's default, charged to the container's memory
# oom_score_adj, of at most 1000: out of memory, the kernel ends a session before the node, its engine or the
# machine's services.
OOM_SCORE = 500

# The kernel counts these resources for the whole machine, or for root as the owner of all containers' user
# namespaces, and no control group counts them. The others of this kind are in `inside.USER_LIMITS` and
# `service.REFUSED`.
MAX_TERMINALS = 32  # a screenful of panes; enough for 64 sessions of kernel.pty.max (4096, 1024 reserved)
MAX_PENDING_SIGNALS = 1024  # pending signals, and as many timers: two for each of 512 processes
MAX_QUEUE_BYTES = 128 << 10  # bytes of POSIX message queues: one of the usual size; 800 KiB are there for all
MIN_OPEN_FILES = 1024  # programs are written for a process with this many open files
FILES_SHARE = 2  # one session may open one in this many of the machine's files (fs.file-max)
# Bytes of a core dump. 0 would still start a core_pattern that is a program, as root of this machine; 1 does
# not.
CORE_LIMIT_BYTES = 1
TERMINALS_MOUNT: Json = {
    "type": "devpts",
    "source": "devpts",
    "destination": "/dev/pts",
    "options": [
        "nosuid",
        "noexec",
        "newinstance",
        "ptmxmode=0666",
        "mode=0620",
        "gid=5",
        f"max={MAX_TERMINALS}",
    ],
}

# User ids from here to 2^31 are unused. The ids that systemd gives to containers end below.
FIRST_SHIFT = 0x7000_0000
SHIFT_RANGES = 4096  # number of id ranges before they are used again; fewer containers live at once

LABEL_NODE = "polarnode.node"
LABEL_SESSION = "polarnode.session"
LABEL_OWNER = "polarnode.owner"


@frozen(kw_only=True)
class Shape:
    """What makes two containers interchangeable before their first use. `image` is Podman's name of it."""

    image: str
    workdir: str
    user: str
    cpus: float
    memory_mb: int
    pids: int
    disk_mb: int
    volumes: tuple[VolumeSpec, ...] = ()
    ptrace: bool = False


def shape_of(spec: RuntimeSpec, image: str) -> Shape:
    """The shape a task needs. Files, prepare steps, environment and writable places are added later and are
    not part of it.
    """
    return Shape(
        image=image,
        workdir=spec.workdir,
        user=spec.user,
        cpus=spec.cpus,
        memory_mb=spec.memory_mb,
        pids=spec.pids,
        disk_mb=spec.disk_mb,
        volumes=spec.volumes,
        ptrace=spec.ptrace,
    )


@frozen(kw_only=True)
class Owner:
    """A process that owns containers. No other process is equal to it, not even one with the same id."""

    pid: int
    started: int
    boot: str

    def label(self) -> str:
        return f"{self.pid}.{self.started}.{self.boot}"

    def is_alive(self) -> bool:
        return _owner_of_pid(self.pid) == self


def current_owner() -> Owner:
    """Return this process as an owner of containers."""
    found = _owner_of_pid(os.getpid())
    if found is None:
        raise OSError("/proc does not know this process")
    return found


def read_owner(label: str) -> Owner | None:
    """Parse an owner from its label; None when the text is no such label."""
    pid, _, rest = label.partition(".")
    started, _, boot = rest.partition(".")
    return (
        Owner(pid=int(pid), started=int(started), boot=boot) if pid.isdigit() and started.isdigit() else None
    )


def _owner_of_pid(pid: int) -> Owner | None:
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if ticks[0] in "ZX" else Owner(pid=pid, started=int(ticks[19]), boot=boot)


def container_spec(
    shape: Shape,
    findings: PodmanFindings,
    *,
    name: str,
    labels: Mapping[str, str],
    lifetime_s: float,
    shift: int,
    seccomp: Path,
    volumes: Sequence[Volume] = (),
    criu: Path | None = None,
) -> dict[str, Json]:
    """The libpod spec of a container. `volumes` are the shape's volumes, resolved; `seccomp` is the
    container's profile of system calls. `criu`: the configuration file for freezing it, which need not exist.
    conmon kills the container `lifetime_s` seconds after its init, whether node and service are alive or
    dead.
    """
    return {
        "name": name,
        "hostname": "agent",
        "image": shape.image,
        "entrypoint": [INIT_INSIDE],
        "command": ["-P"],  # pause: reap zombies, and survive the agent's `kill -9 -1`
        "user": "0",  # the agent cannot trace the first process
        "work_dir": "/",
        "mounts": [
            _mount(str(findings.init), INIT_INSIDE, "ro"),
            TERMINALS_MOUNT,
            *(_mount(each.source, each.target, "rw" if each.write else "ro") for each in volumes),
        ],
        "labels": dict(labels),
        "stop_timeout": 0,
        "timeout": max(1, round(lifetime_s)),
        "systemd": "false",
        "healthconfig": {"Test": ["NONE"]},
        "log_configuration": {"driver": "k8s-file"},
        "shm_size": SHARED_MEMORY,
        "seccomp_profile_path": str(seccomp),
        **_confinement_spec(findings, shift),
        "resource_limits": _limits(shape, findings.limits),
        "r_limits": _process_limits(shape, findings),
        **({} if criu is None else {"annotations": {CONFIG_ANNOTATION: str(criu)}}),
        **({"storage_opts": {"size": f"{shape.disk_mb}m"}} if findings.quotas else {}),
    }


def _mount(source: str, target: str, rights: str) -> Json:
    """A bind mount that does not include mounts below it, because those would keep their own rights."""
    return {
        "type": "bind",
        "source": source,
        "destination": target,
        "options": [rights, "bind", "nosuid", "nodev", "private"],
    }


def _confinement_spec(findings: PodmanFindings, shift: int) -> dict[str, Json]:
    confined: dict[str, Json] = {
        "netns": {"nsmode": "none"},
        # Otherwise, with cgroups v1, /proc/self/cgroup shows the container's id, which differs in each
        # session.
        "cgroupns": {"nsmode": "private"},
        "use_image_resolve_conf": True,  # otherwise this machine's name servers are written into it
        "httpproxy": False,
        "env_host": False,
        "cap_drop": ["all"],
        "no_new_privileges": True,
        "privileged": False,
        "oom_score_adj": OOM_SCORE,
    }
    if findings.user_namespaces:
        ids: Json = [{"container_id": 0, "host_id": shift, "size": IDS}]
        confined["userns"] = {"nsmode": "private"}
        confined["idmappings"] = {
            "HostUIDMapping": False,
            "HostGIDMapping": False,
            "UIDMap": ids,
            "GIDMap": ids,
        }
    return confined


def _limits(shape: Shape, enforced: Collection[str]) -> dict[str, Json]:
    """The limits that this machine enforces. Podman fails at, or drops, a limit that it cannot enforce."""
    memory = shape.memory_mb << 20
    every: dict[str, Json] = {
        "memory": {"limit": memory, "swap": memory},  # memory and swap together: no swap
        "pids": {"limit": shape.pids},
        "cpu": {"quota": round(shape.cpus * CPU_PERIOD_US), "period": CPU_PERIOD_US},
    }
    return {name: limit for name, limit in every.items() if name in enforced}


def _process_limits(shape: Shape, findings: PodmanFindings) -> Json:
    """All process limits, including those of containers.conf, because setting one limit drops all of those.
    No file may exceed the disk limit, holes included, and nothing dumps core.
    """
    share = findings.most_open_files // (FILES_SHARE * shape.pids)
    limits = {
        "nofile": min(findings.nofile, max(MIN_OPEN_FILES, share)),
        "nproc": findings.nproc,
        "fsize": shape.disk_mb << 20,
        "core": CORE_LIMIT_BYTES,
        "sigpending": MAX_PENDING_SIGNALS,
        "msgqueue": MAX_QUEUE_BYTES,
    }
    return [{"type": name, "hard": most, "soft": most} for name, most in limits.items()]
