"""What doctor says and what Podman is told: findings with remedies, two files of settings, and a store nobody
else writes to.
"""

import importlib
import os
import tomllib
from pathlib import Path

import pytest
from attrs import evolve

from polarnode.containers.container import FIRST_SHIFT, INIT_INSIDE, Shape, Volume, container_spec, shape_of
from polarnode.containers.probe import (
    MachineFinding,
    PodmanFindings,
    closed_folder,
    make_folders,
    mounted_at,
    store_at,
)
from polarnode.containers.probe import probe as probe_machine
from polarnode.containers.recipes import RuntimesSettings
from polarnode.containers.runtimes import open_runtimes
from polarnode.containers.service import containers_conf, storage_conf, write_configuration
from polarnode.core.errors import RuntimeFault
from polarnode.core.task import RuntimeSpec, VolumeSpec

PROBE = importlib.import_module("polarnode.containers.probe")  # the package has a function of that name

FOUND = PodmanFindings(
    podman=Path("/usr/bin/podman"),
    oci_runtime=Path("/usr/bin/runc"),
    init=Path("/usr/bin/catatonit"),
    seccomp=Path("/usr/share/containers/seccomp.json"),
    has_netavark=True,
    cgroups="v1",
    systemd=False,
    nofile=20000,
    nproc=4096,
    most_open_files=1_000_000,
    driver="overlay",
    mount_program=None,
    user_namespaces=True,
    quotas=False,
    freezes=True,
    limits=frozenset({"memory", "pids", "cpu"}),
    findings=(MachineFinding(name="a", ok=True, what="well"),),
)
SECCOMP = Path("/var/lib/polarnode/podman/etc/seccomp.json")
SHAPE = Shape(image="localhost/x", workdir="/work", user="agent", cpus=1.5, memory_mb=100, pids=7, disk_mb=50)


async def test_findings_explain_and_suggest_remedies(tmp_path: Path) -> None:
    found = await probe_machine(tmp_path / "not" / "there")
    assert len({each.name for each in found.findings}) == len(found.findings) >= 8
    for finding in found.findings:
        assert finding.what
        assert finding.ok or finding.remedy
    assert found.nofile > 0 < found.nproc <= 32768
    assert not (tmp_path / "not").exists(), "looking leaves nothing"


async def test_machine_without_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROBE, "SERVICE_PATH", str(tmp_path))
    monkeypatch.setattr(PROBE, "SECCOMP_PLACES", (str(tmp_path / "seccomp.json"),))
    found = await probe_machine(tmp_path)
    assert not found.ok
    assert found.podman is None
    assert "podman is not installed (apt-get install --no-install-recommends podman)" in found.faults()
    assert "neither runc nor crun is installed" in found.faults()
    assert f"no default seccomp profile at {tmp_path}/seccomp.json (apt-get install" in found.faults()
    with pytest.raises(RuntimeFault, match="podman is not installed"):
        async with open_runtimes(RuntimesSettings(state_dir=tmp_path, node_id="x")):
            raise AssertionError("it cannot have opened")


@pytest.mark.parametrize(
    ("says", "ok", "what"),
    [
        ("podman version 4.3.1", True, "podman 4.3.1"),
        ("podman version 3.0.1", False, "podman is 3.0.1"),
        ("", False, "unreadable"),
    ],
)
async def test_old_podman_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, ok: bool, what: str
) -> None:
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\necho {says}\n")
    program.chmod(0o755)
    monkeypatch.setattr(PROBE, "SERVICE_PATH", str(tmp_path))
    (finding,) = [each for each in (await probe_machine(tmp_path)).findings if each.name == "podman"]
    assert finding.ok == ok
    assert what in finding.what


def test_folder_closed_to_others_is_found(tmp_path: Path) -> None:
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    assert closed_folder(closed / "state" / "podman") is not None
    assert closed_folder(Path("/var/lib/polarnode/podman")) is None


def test_container_settings_follow_findings(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    written = tomllib.loads(containers_conf(store, FOUND))
    assert written["containers"]["default_ulimits"] == ["nofile=20000:20000", "nproc=4096:4096"]
    assert written["engine"]["runtime"] == "runc"
    assert written["engine"]["cgroup_manager"] == "cgroupfs"
    assert written["engine"]["lock_type"] == "file"
    assert written["engine"]["tmp_dir"] == f"{store.run_dir}/libpod"
    assert written["network"]["network_backend"] == "netavark"
    other = evolve(FOUND, systemd=True, has_netavark=False, oci_runtime=Path("/usr/bin/crun"))
    written = tomllib.loads(containers_conf(store, other))
    assert written["engine"]["cgroup_manager"] == "systemd"
    assert written["engine"]["runtime"] == "crun"
    assert "network_backend" not in written["network"]


def test_storage_is_private(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    written = tomllib.loads(storage_conf(store, FOUND))["storage"]
    assert written == {
        "driver": "overlay",
        "graphroot": f"{tmp_path}/storage",
        "runroot": f"{store.run_dir}/storage",
        "rootless_storage_path": f"{tmp_path}/storage",
    }
    quoted = store_at(tmp_path / 'a "b"')
    assert tomllib.loads(storage_conf(quoted, FOUND))["storage"]["graphroot"] == f'{tmp_path}/a "b"/storage'
    through = tomllib.loads(storage_conf(store, evolve(FOUND, mount_program=Path("/usr/bin/fuse-overlayfs"))))
    assert through["storage"]["options"]["overlay"]["mount_program"] == "/usr/bin/fuse-overlayfs"


def test_run_folder_is_constant_and_private(tmp_path: Path) -> None:
    store = store_at(tmp_path / "one")
    assert store == store_at(tmp_path / "two" / ".." / "one")
    assert store.run_dir != store_at(tmp_path / "two").run_dir
    make_folders(store)
    make_folders(store)
    write_configuration(store, FOUND)
    before = store.containers_conf.stat().st_ino
    write_configuration(store, FOUND)
    assert store.containers_conf.stat().st_ino == before, "a text that is the same is not written again"
    assert store.sockets.stat().st_mode & 0o777 == 0o700
    assert len(str(store.sockets / "1234567-01234567.sock")) < 100, "a unix socket's path has 108 bytes"
    store.run_dir.chmod(0o777)
    with pytest.raises(RuntimeFault, match="not a folder of ours alone"):
        make_folders(store)
    for folder in (store.sockets, store.run_dir):
        folder.rmdir()
    store.run_dir.symlink_to(tmp_path)
    with pytest.raises(RuntimeFault, match="not a folder of ours alone"):
        make_folders(store)
    store.run_dir.unlink()


def test_podman_gets_only_needed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_SECRET", "x")
    monkeypatch.setenv("https_proxy", "http://proxy")
    written = store_at(tmp_path).environment()
    assert "NODE_SECRET" not in written
    assert written["https_proxy"] == "http://proxy", "pulls may need it"
    assert written["CONTAINERS_CONF"] == f"{tmp_path}/etc/containers.conf"
    assert written["HOME"] == str(tmp_path)
    assert os.environ["HOME"] != written["HOME"]


def test_container_is_confined() -> None:
    spec = container_spec(
        SHAPE,
        FOUND,
        name="n",
        labels={"polarnode.node": "x"},
        lifetime_s=12.4,
        shift=FIRST_SHIFT,
        seccomp=SECCOMP,
    )
    assert spec["netns"] == {"nsmode": "none"}
    assert spec["cap_drop"] == ["all"]
    assert spec["no_new_privileges"] is True
    assert spec["privileged"] is False
    assert spec["timeout"] == 12
    assert spec["stop_timeout"] == 0
    assert spec["entrypoint"] == [INIT_INSIDE]
    assert spec["labels"] == {"polarnode.node": "x"}
    assert spec["resource_limits"] == {
        "memory": {"limit": 100 << 20, "swap": 100 << 20},
        "pids": {"limit": 7},
        "cpu": {"quota": 150_000, "period": 100_000},
    }
    ids = [{"container_id": 0, "host_id": FIRST_SHIFT, "size": 65536}]
    assert spec["idmappings"] == {
        "HostUIDMapping": False,
        "HostGIDMapping": False,
        "UIDMap": ids,
        "GIDMap": ids,
    }
    mount, terminals = spec["mounts"]  # type: ignore[misc]
    assert "ro" in mount["options"]  # type: ignore[index]
    assert terminals["destination"] == "/dev/pts"  # type: ignore[index,call-overload]
    assert "max=32" in terminals["options"]  # type: ignore[index,call-overload,operator]
    assert spec["seccomp_profile_path"] == str(SECCOMP)
    assert "storage_opts" not in spec, "only where the store has quotas"


def test_all_process_limits_are_passed() -> None:
    """One that is given drops all that containers.conf names."""
    spec = container_spec(SHAPE, FOUND, name="n", labels={}, lifetime_s=1.0, shift=0, seccomp=SECCOMP)
    written = {limit["type"]: (limit["soft"], limit["hard"]) for limit in spec["r_limits"]}  # type: ignore[union-attr,call-overload,index]
    assert written == {
        "nofile": (20000, 20000),
        "nproc": (4096, 4096),
        "fsize": (50 << 20, 50 << 20),
        "core": (1, 1),
        "sigpending": (1024, 1024),
        "msgqueue": (131072, 131072),
    }


@pytest.mark.parametrize(
    ("machine", "pids", "files"),
    [
        (1_000_000, 512, 1024),  # half of the machine's would be 976: programs are written for 1024
        (4_000_000, 512, 3906),
        (4_000_000, 4096, 1024),
        (2**63 - 1, 512, 20000),  # as systemd sets it: what the node itself may open
    ],
)
def test_session_opens_half_of_files(machine: int, pids: int, files: int) -> None:
    """One session opens at most half of the files that the machine can open."""
    findings = evolve(FOUND, most_open_files=machine)
    spec = container_spec(
        evolve(SHAPE, pids=pids), findings, name="n", labels={}, lifetime_s=1.0, shift=0, seccomp=SECCOMP
    )
    (limit,) = [each for each in spec["r_limits"] if each["type"] == "nofile"]  # type: ignore[union-attr,call-overload,index]
    assert limit["hard"] == files  # type: ignore[index,call-overload]


def test_quota_store_gets_the_limit() -> None:
    spec = container_spec(
        SHAPE, evolve(FOUND, quotas=True), name="n", labels={}, lifetime_s=1.0, shift=0, seccomp=SECCOMP
    )
    assert spec["storage_opts"] == {"size": "50m"}


def test_volumes_are_mounted_without_privileges() -> None:
    volumes = (
        Volume(source="/srv/a", target="/a", write=False),
        Volume(source="/srv/b", target="/b", write=True),
    )
    spec = container_spec(
        SHAPE, FOUND, name="n", labels={}, lifetime_s=1.0, shift=0, seccomp=SECCOMP, volumes=volumes
    )
    _, _, read, write = spec["mounts"]  # type: ignore[misc]
    assert read == {
        "type": "bind",
        "source": "/srv/a",
        "destination": "/a",
        "options": ["ro", "bind", "nosuid", "nodev", "private"],
    }
    assert write["options"][0] == "rw"  # type: ignore[index,call-overload]


MOUNTS = """/dev/vda / ext4 rw,relatime 0 0
/dev/vdb /data xfs rw,relatime,attr2,prjquota 0 0
/dev/vdc /data/plain xfs rw,relatime,noquota 0 0
"""


def test_layer_limit_needs_xfs_quotas() -> None:
    assert mounted_at(Path("/data/podman/store"), MOUNTS) == ("xfs", ("rw", "relatime", "attr2", "prjquota"))
    assert mounted_at(Path("/database"), MOUNTS)[0] == "ext4"
    assert mounted_at(Path("/data/plain/x"), MOUNTS)[1][-1] == "noquota"


def test_no_map_without_user_namespaces() -> None:
    spec = container_spec(
        SHAPE,
        evolve(FOUND, user_namespaces=False),
        name="n",
        labels={},
        lifetime_s=0.2,
        shift=0,
        seccomp=SECCOMP,
    )
    assert "userns" not in spec
    assert "idmappings" not in spec
    assert spec["timeout"] == 1, "0 would mean for ever"


def test_equal_shapes_are_interchangeable() -> None:
    plain = shape_of(RuntimeSpec(), "i")
    assert plain == shape_of(RuntimeSpec(env={"A": "b"}), "i")
    assert plain == shape_of(RuntimeSpec(read_only=False, writable=("/opt",), artifacts=("out",)), "i"), (
        "that comes after the start"
    )
    assert plain != shape_of(RuntimeSpec(cpus=2.0), "i")
    assert plain != shape_of(RuntimeSpec(), "j")
    assert plain != shape_of(RuntimeSpec(disk_mb=100), "i")
    assert plain != shape_of(RuntimeSpec(volumes=(VolumeSpec(source="/srv", target="/data"),)), "i")
