"""Where this house's Podman lives: a store of its own, apart from every other Podman on the machine.

Images stay in `state_dir` between runs and are shared by all nodes that name the same folder. Rule for whoever edits it: the database in
`state_dir` remembers its run folder and silently overrides a changed one, so the run folder is a pure function of `state_dir`.
"""

import hashlib
import os
import stat
from pathlib import Path

from attrs import frozen

from polarnode.errors import RuntimeFault

MEMORY_FOLDERS = (Path("/dev/shm"), Path("/run"))  # emptied by a reboot, which is how Podman learns that there was one
SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where runc, conmon and iptables may be


def default_state_dir() -> Path:
    """One store per machine, shared by nodes, tests and demos, so that an image is built once.

    Not root's home: a container's mapped users must pass through every folder above their root, and Podman opens those that forbid it.
    """
    if "XDG_STATE_HOME" in os.environ:
        return Path(os.environ["XDG_STATE_HOME"]) / "polarnode" / "podman"
    if os.geteuid() == 0:
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
    def storage(self) -> Path:
        """Podman's own graph root: images and containers."""
        return self.state_dir / "storage"

    @property
    def sockets(self) -> Path:
        """Where the nodes' API sockets are; whoever can open one is root."""
        return self.run_dir / "api"

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"

    def environment(self) -> dict[str, str]:
        """The whole environment of every podman we start: both files, and nothing of the node's own but its trust and proxy settings."""
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        own = {"CONTAINERS_CONF": str(self.containers_conf), "CONTAINERS_STORAGE_CONF": str(self.storage_conf)}
        return {"PATH": SERVICE_PATH, "HOME": str(self.state_dir), "LANG": "C.UTF-8", "TMPDIR": str(self.state_dir / "tmp"), **passed, **own}


# What reaching a registry may need; it is for pulls and builds, and `httpproxy: false` keeps it out of containers.
PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "REGISTRY_AUTH_FILE")


def store_at(state_dir: Path) -> Store:
    """The store in a folder, not yet made."""
    resolved = state_dir.resolve()
    name = f"polarnode-{os.geteuid()}-{hashlib.sha256(os.fsencode(resolved)).hexdigest()[:12]}"
    return Store(state_dir=resolved, run_dir=_memory_folder(resolved) / name)


def make_folders(store: Store) -> None:
    """Make what is missing. A run folder that someone else made, in a place anyone may write to, is refused."""
    for folder in (store.state_dir, store.state_dir / "etc", store.state_dir / "tmp", store.log_dir):
        folder.mkdir(parents=True, exist_ok=True)
    store.state_dir.chmod(0o711)  # mapped container users pass through it to their own root, and may not list it
    store.run_dir.mkdir(mode=0o711, exist_ok=True)
    store.sockets.mkdir(mode=0o700, exist_ok=True)
    found = store.run_dir.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise RuntimeFault(f"{store.run_dir} is not a folder of ours alone: remove it, or set another podman_dir")


def _memory_folder(fallback: Path) -> Path:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    for folder in MEMORY_FOLDERS:
        if [str(folder), "tmpfs"] in mounts and os.access(folder, os.W_OK):
            return folder
    return fallback
