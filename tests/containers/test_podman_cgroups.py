"""Control groups as they are laid out by cgroups v1, v2 and both at once, by runc and by crun, with and
without systemd.
"""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from polarnode.containers.control_groups import ControlGroup, control_group_of, freezer_file, thaw

ID = "0d4f"
V1 = f"5:pids:/libpod_parent/libpod-{ID}\n4:memory:/libpod_parent/libpod-{ID}\n1:name=systemd:/libpod_parent/libpod-{ID}\n"
HYBRID = V1 + f"0::/libpod_parent/libpod-{ID}\n"
LAYOUTS = {
    "v1": (V1, f"memory/libpod_parent/libpod-{ID}"),
    "hybrid": (HYBRID, f"memory/libpod_parent/libpod-{ID}"),
    "v2, runc": (f"0::/libpod_parent/libpod-{ID}\n", f"libpod_parent/libpod-{ID}"),
    "v2, crun": (f"0::/libpod_parent/libpod-{ID}/container\n", f"libpod_parent/libpod-{ID}"),
    "v2, crun, systemd": (
        f"0::/machine.slice/libpod-{ID}.scope/container\n",
        f"machine.slice/libpod-{ID}.scope",
    ),
    "v2, renamed": ("0::/somewhere/else\n", "somewhere/else"),
}


def cgroup_files(proc: Path, text: str) -> Path:
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(text)
    return proc


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cgroup_of_container_is_found(tmp_path: Path, layout: str) -> None:
    text, folder = LAYOUTS[layout]
    assert control_group_of(7, root=tmp_path, proc=cgroup_files(tmp_path / "proc", text)) == ControlGroup(
        tmp_path / folder
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_out_of_memory_kills_are_counted(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert ControlGroup(tmp_path).oom_kills() == 3


def test_old_kernel_counts_nothing(tmp_path: Path) -> None:
    """An old kernel counts nothing, and neither does a control group that is gone."""
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert ControlGroup(tmp_path).oom_kills() == 0
    gone = ControlGroup(tmp_path / "gone")
    assert (gone.oom_kills(), gone.processes()) == (0, [])


def test_nested_cgroup_processes_are_included(tmp_path: Path) -> None:
    (tmp_path / "container").mkdir()
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "container" / "cgroup.procs").write_text("12\n13\n")
    assert ControlGroup(tmp_path).processes() == [12, 13]


def test_socket_memory_limit_on_old_kernels(tmp_path: Path) -> None:
    """Sockets are bounded where the kernel does not count them as memory."""
    ControlGroup(tmp_path).limit_sockets()
    assert list(tmp_path.iterdir()) == [], "version 2 counts them itself"
    (tmp_path / "memory.kmem.tcp.limit_in_bytes").write_text("9223372036854771712")
    ControlGroup(tmp_path).limit_sockets()
    assert (tmp_path / "memory.kmem.tcp.limit_in_bytes").read_text() == str(64 << 20)


@pytest.mark.parametrize(
    ("stat", "held"),
    [
        ("anon 5\nfile 70\nshmem 20\nfile_mapped 3\n", 25),
        ("cache 70\nrss 1\nshmem 2\ntotal_cache 90\ntotal_rss 5\ntotal_shmem 20\n", 25),
        (None, 0),
    ],
)
def test_memory_excludes_disk_files(tmp_path: Path, stat: str | None, held: int) -> None:
    if stat is not None:
        (tmp_path / "memory.stat").write_text(stat)
    assert ControlGroup(tmp_path).memory_bytes() == held


@pytest.mark.parametrize(
    ("text", "place", "frozen", "thawed"),
    [
        (f"3:freezer:/c/{ID}\n{HYBRID}", f"freezer/c/{ID}/freezer.state", "FROZEN\n", "THAWED"),
        (f"3:freezer:/c/{ID}\n{HYBRID}", f"freezer/c/{ID}/freezer.state", "FREEZING\n", "THAWED"),
        (f"0::/c/{ID}\n", f"c/{ID}/cgroup.freeze", "1\n", "0"),
    ],
)
def test_frozen_cgroup_is_thawed(tmp_path: Path, text: str, place: str, frozen: str, thawed: str) -> None:
    proc = cgroup_files(tmp_path / "proc", text)
    assert freezer_file(7, root=tmp_path, proc=proc) is None
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(frozen)
    freezer = freezer_file(7, root=tmp_path, proc=proc)
    assert freezer == tmp_path / place
    thaw(freezer)
    assert freezer.read_text() == thawed
    freezer.unlink()
    thaw(freezer)
    assert not freezer.exists()


def test_cgroup_vanishes_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = errno.ENODEV  # as the kernel says of a group that was removed since it was opened

    def fails(_: Path) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_text", fails)
    thaw(tmp_path / "cgroup.freeze")
    number = errno.EIO
    with pytest.raises(OSError, match="error"):
        thaw(tmp_path / "cgroup.freeze")
