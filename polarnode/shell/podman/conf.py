"""Podman's two configuration files, written from what the probe found.

Defaults do not work everywhere: limits above ours are refused where CAP_SYS_RESOURCE is missing, and crun refuses mixed cgroups. Every node
of a store writes the same texts, so a file is replaced only when its text differs, in one step.
"""

import os
from pathlib import Path

from attrs import frozen

from polarnode.errors import RuntimeFault
from polarnode.shell.podman.probe import PodmanFindings, probe
from polarnode.shell.podman.store import SERVICE_PATH, Store, make_folders, store_at

EXEC_KEPT_S = 60  # seconds an ended exec can be asked for its exit code: 5 was too short under load, the default 300 keeps 2 processes each


@frozen(kw_only=True)
class Ready:
    """A store that podman can be run on, and what was found of the machine on the way."""

    store: Store
    podman: Path
    findings: PodmanFindings


async def ready_store(state_dir: Path) -> Ready:
    """Probe the machine, and make and configure the store. RuntimeFault with the remedies where the machine lacks something."""
    findings = await probe(state_dir)
    if findings.podman is None or not findings.ok:
        raise RuntimeFault(f"containers can not run here: {findings.faults()}")
    store = store_at(state_dir)
    make_folders(store)
    write_configuration(store, findings)
    return Ready(store=store, podman=findings.podman, findings=findings)


def write_configuration(store: Store, findings: PodmanFindings) -> None:
    """Write containers.conf and storage.conf of a store whose folders exist."""
    _replace(store.containers_conf, containers_conf(store, findings))
    _replace(store.storage_conf, storage_conf(store, findings))


def containers_conf(store: Store, findings: PodmanFindings) -> str:
    """The engine's settings as TOML."""
    lines = [
        "[containers]",
        f'default_ulimits = ["nofile={findings.nofile}:{findings.nofile}", "nproc={findings.nproc}:{findings.nproc}"]',
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
