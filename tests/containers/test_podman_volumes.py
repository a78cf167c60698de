"""Folders of the machine in a container: only where the node's config allows what a path really leads to,
whoever moves links meanwhile.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from podman_parts import LIFETIME_S, SMALL, settings

from polarnode.containers.container import Volume, check_volumes, open_volumes, volume_refusal
from polarnode.containers.runtimes import open_runtimes
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import HarnessSpec, RuntimeSpec, TaskSpec, VolumeSpec
from polarnode.rollouts.admission import admitted


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "file").write_text("seen")
    (tmp_path / "outside").mkdir()
    (tmp_path / "allowed-not").mkdir()
    return folder


def test_folders_below_allowed_are_allowed(allowed: Path) -> None:
    for source in (allowed, allowed / "data", f"{allowed}/./data/"):
        assert volume_refusal(str(source), [str(allowed)]) is None


def test_linked_prefix_allows_its_target(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(allowed)
    assert volume_refusal(str(allowed / "data"), [str(tmp_path / "alias")]) is None
    assert volume_refusal(str(tmp_path / "alias" / "data"), [str(allowed)]) is None


def test_other_folder_refusal_names_setting(allowed: Path, tmp_path: Path) -> None:
    (allowed / "up").symlink_to("../outside")
    (allowed / "loop").symlink_to("loop")
    for source in (
        tmp_path,
        tmp_path / "outside",
        tmp_path / "allowed-not",
        f"{allowed}/../outside",
        allowed / "up",
        Path("/"),
    ):
        said = volume_refusal(str(source), [str(allowed)])
        assert said is not None, source
        assert "this node's setting volumes allows" in said
    assert f"(it leads to {tmp_path}/outside)" in str(volume_refusal(str(allowed / "up"), [str(allowed)]))
    assert "it names none" in str(volume_refusal(str(allowed), []))
    for source in (allowed / "none", allowed / "loop", allowed / "data" / "file"):
        assert "is not a folder" in str(volume_refusal(str(source), [str(allowed)])), source


def test_folder_containing_mount_is_refused() -> None:
    """Its own rights would not be what the task was given."""
    assert "has another file system mounted in it" in str(volume_refusal("/", ["/"]))
    assert volume_refusal("/proc", ["/"]) is None or "mounted in it" in str(volume_refusal("/proc", ["/"]))


def test_refusal_names_the_field(allowed: Path) -> None:
    fine, not_fine = (
        VolumeSpec(source=str(allowed), target="/data"),
        VolumeSpec(source="/etc", target="/data"),
    )
    check_volumes((fine,), (str(allowed),))
    with pytest.raises(Refused) as refused:
        check_volumes((fine, not_fine), (str(allowed),))
    assert refused.value.path == "$.runtime.volumes[1].source"


def test_forbidden_volume_rejects_task(allowed: Path) -> None:
    spec = TaskSpec(
        instruction="i",
        harness=HarnessSpec(command=("true",)),
        runtime=RuntimeSpec(volumes=(VolumeSpec(source=str(allowed), target="/data"),)),
    )
    admitted(spec, model="m", context_length=4096, allowed_imports=(), volumes=(str(allowed.parent),))
    with pytest.raises(Refused, match="setting volumes") as refused:
        admitted(spec, model="m", context_length=4096, allowed_imports=())
    assert refused.value.path == "$.runtime.volumes[0].source"


def test_source_is_rechecked_at_creation(allowed: Path, tmp_path: Path) -> None:
    volume = VolumeSpec(source=str(allowed / "data"), target="/data", write=True)
    with open_volumes((volume,), (str(allowed),)) as sources:
        assert sources.volumes == (Volume(source=str(allowed / "data"), target="/data", write=True),)
    shutil.rmtree(allowed / "data")
    (allowed / "data").symlink_to(tmp_path / "outside")
    with pytest.raises(RuntimeFault, match="it leads to"), open_volumes((volume,), (str(allowed),)):
        pass


def test_folder_moved_during_creation_is_detected(allowed: Path, tmp_path: Path) -> None:
    """What stands in the container is compared with what was checked; `root` stands for the container."""
    volume = VolumeSpec(source=str(allowed / "data"), target="/data")
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    opened = os.open(root, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    with open_volumes((volume,), (str(allowed),)) as sources:
        with pytest.raises(RuntimeFault, match="replaced while its container was made"):
            sources.check_mounted(opened)
        (root / "data").rmdir()
        with pytest.raises(RuntimeFault, match="is not in its container"):
            sources.check_mounted(opened)
        (allowed / "data").rename(allowed / "moved")
        (allowed / "moved").rename(root / "data")
        with pytest.raises(RuntimeFault, match="replaced while its container was made"):
            sources.check_mounted(opened)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(opened)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that a container's users can reach, as a person who runs a node would make it."""
    folder = Path(f"/var/tmp/polarnode-volumes-{secrets.token_hex(4)}")
    for name in ("read", "write"):
        (folder / name).mkdir(parents=True)
        (folder / name / "there").write_text(name)
        (folder / name).chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.podman
async def test_volume_is_read_only_by_default(podman: None, shared: Path) -> None:
    spec = evolve(
        SMALL,
        volumes=(
            VolumeSpec(source=str(shared / "read"), target="/data/read"),
            VolumeSpec(source=str(shared / "write"), target="/work/out", write=True),
        ),
    )
    async with (
        open_runtimes(evolve(settings(), volumes=(str(shared),))) as runtimes,
        runtimes.open(spec, session_id="volumes", lifetime_s=LIFETIME_S) as runtime,
    ):
        for sealed in (False, True):
            if sealed:
                await runtime.seal(spec)
            ended = await runtime.run(
                [
                    "sh",
                    "-c",
                    (
                        "cat /data/read/there out/there; echo new > out/new; cp /bin/true out/setuid; chmod"
                        " 4755 out/setuid; echo x > /data/read/x"
                    ),
                ]
            )
            assert ended.stdout == b"readwrite"
            assert b"Read-only file system" in ended.stderr
            assert (shared / "write" / "new").read_text() == "new\n"
            (shared / "write" / "new").unlink()
        assert (
            await runtime.run(["sh", "-c", "grep -E ' /(data/read|work/out) ' /proc/self/mountinfo"])
        ).stdout.count(b"nosuid,nodev") >= 2
        await runtime.unseal()
    assert sorted(os.listdir(shared / "read")) == ["there"]
    assert (shared / "write" / "setuid").stat().st_uid != 0


@pytest.mark.podman
async def test_forbidden_volume_starts_no_container(podman: None, shared: Path) -> None:
    spec = evolve(SMALL, volumes=(VolumeSpec(source=str(shared), target="/data"),))
    async with open_runtimes(settings()) as runtimes:
        with pytest.raises(RuntimeFault, match="setting volumes allows: it names none"):
            async with runtimes.open(spec, session_id="volumes", lifetime_s=LIFETIME_S):
                pass
