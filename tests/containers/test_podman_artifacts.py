"""What is kept of a session: a tar the node writes, bounded, of plain things, that any tar reads and no link
leads out of.
"""

import os
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import define, evolve
from podman_parts import LIFETIME_S, SMALL

from polarnode.containers import files
from polarnode.containers.files import CollectedFiles, ContainerFiles, artifacts_path, collect
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core import codec
from polarnode.core.errors import RuntimeFault


@define(eq=False)
class Box:
    """A folder that stands for a container, with a workdir `/work`."""

    work: Path
    tar: Path
    opened: int

    async def kept(self, *paths: str, shift: int = 0) -> CollectedFiles:
        files = ContainerFiles(root=self.opened, shift=shift)
        return await trio.to_thread.run_sync(
            partial(collect, files, paths=paths, workdir="/work", to=self.tar)
        )

    def names(self) -> list[str]:
        with tarfile.open(self.tar) as archive:
            return archive.getnames()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    work = tmp_path / "root" / "work"
    work.mkdir(parents=True)
    (tmp_path / "outside").write_text("outside")
    opened = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    yield Box(work, tmp_path / "kept" / "s.tar", opened)
    os.close(opened)


async def test_files_folders_and_links_are_kept(box: Box, tmp_path: Path) -> None:
    (box.work / "out" / "deep").mkdir(parents=True)
    (box.work / "out" / "deep" / "report.txt").write_text("well")
    (box.work / "out" / "run").write_text("#!/bin/sh")
    (box.work / "out" / "run").chmod(0o4755)
    (box.work / "out" / "link").symlink_to("deep/report.txt")
    (box.work / "out" / "away").symlink_to(tmp_path)
    (box.work.parent / "var").mkdir()
    (box.work.parent / "var" / "log").write_text("a log")
    os.utime(box.work / "out" / "run", (1000, 1000))
    kept = await box.kept("out", "/var/log")
    assert kept == CollectedFiles(path=box.tar, files=3, bytes=18)
    with tarfile.open(box.tar) as archive:
        found = {each.name: each for each in archive}
        assert set(found) == {
            "out",
            "out/deep",
            "out/deep/report.txt",
            "out/run",
            "out/link",
            "out/away",
            "var/log",
        }
        assert (found["out/link"].linkname, found["out/away"].linkname) == ("deep/report.txt", str(tmp_path))
        assert (found["out/run"].mode, found["out/run"].mtime) == (0o755, 1000)
        report = archive.extractfile("out/deep/report.txt")
        assert report is not None
        assert report.read() == b"well"


def test_any_tar_reads_archive(box: Box, tmp_path: Path) -> None:
    names = [
        b"new\nline",
        b"\xff\xfe",
        "é✓".encode(),
        b"-rf",
        b"x" * 255,
        b"a" * 120 + b"/" + b"b" * 120 + b"/" + b"c" * 50,
    ]
    for name in names:
        path = os.path.join(os.fsencode(box.work), b"odd", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(b"content of " + name)
    os.symlink(b"\xff" * 300, os.path.join(os.fsencode(box.work), b"odd", b"long link"))
    trio.run(box.kept, "odd")
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", str(box.tar), "-C", str(tmp_path / "unpacked")], check=True)
    for name in names:
        assert (
            Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"unpacked/odd", name))).read_bytes()
            == b"content of " + name
        )
    assert os.readlink(os.path.join(os.fsencode(tmp_path), b"unpacked/odd/long link")) == b"\xff" * 300
    with tarfile.open(box.tar) as archive:
        assert len(archive.getnames()) == len(names) + 4


async def test_omissions_are_reported(box: Box) -> None:
    (box.work / "out").mkdir()
    os.mkfifo(box.work / "out" / "pipe")
    os.mknod(box.work / "out" / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(box.work / "out" / "socket"))
    (box.work / "out" / "file").write_text("x")
    with trio.fail_after(30):
        kept = await box.kept("out", "none", "/none/deeper")
    assert sorted(kept.left_out) == [
        "/none/deeper: No such file or directory",
        "none: No such file or directory",
        "out/device: it is neither a file nor a folder nor a link",
        "out/pipe: it is neither a file nor a folder nor a link",
        "out/socket: it is neither a file nor a folder nor a link",
    ]
    assert box.names() == ["out", "out/file"]
    assert codec.read_json(codec.dump_json(kept.metrics())) == kept.metrics()


@pytest.mark.parametrize("path", ["link", "link/outside", "link/", "up/root/work/secret"])
async def test_planted_link_leads_nowhere(box: Box, tmp_path: Path, path: str) -> None:
    (box.work / "link").symlink_to(tmp_path)
    (box.work / "up").symlink_to("../..")
    await box.kept(path)
    assert set(box.names()) <= {"link"}, "a link is kept as what it is"
    assert b"outside" not in box.tar.read_bytes().replace(str(tmp_path).encode(), b"")


async def test_oversized_bomb_is_left_out(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what reading would give: a file of nothing but holes is as large as it says."""
    monkeypatch.setattr(files, "BYTES_LIMIT", 10_000)
    with (box.work / "bomb").open("wb") as file:
        file.truncate(1 << 40)
    (box.work / "small").write_bytes(bytes(6000))
    (box.work / "second").write_bytes(bytes(6000))
    kept = await box.kept("bomb", "small", "second")
    assert (kept.files, kept.bytes) == (1, 6000)
    assert kept.left_out == (
        f"bomb: with its {1 << 40} bytes the artifacts would be larger than 10000",
        "second: with its 6000 bytes the artifacts would be larger than 10000",
    )
    assert box.tar.stat().st_size < 20_000


async def test_too_many_files_are_refused(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENTRIES_LIMIT", 20)
    for number in range(50):
        (box.work / f"{number}").mkdir()
    kept = await box.kept(".", "0")
    assert len(box.names()) == 20
    assert len(kept.left_out) == 2
    assert "more than 20 files and folders" in kept.left_out[0]


async def test_omission_report_is_bounded(box: Box) -> None:
    for number in range(200):
        os.mkfifo(box.work / f"{number}")
    kept = await box.kept(".")
    assert len(kept.left_out) == files.NAMED_LIMIT + 1
    assert kept.left_out[-1] == f"and {200 - files.NAMED_LIMIT} more"


async def test_endless_tree_is_cut(box: Box) -> None:
    script = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\n"
    await trio.run_process(["python3", "-c", script], cwd=box.work)
    before = len(os.listdir("/proc/self/fd"))
    kept = await box.kept("d")
    assert [said.partition(": ")[2] for said in kept.left_out] == ["it is more than 200 folders deep"]
    assert len(os.listdir("/proc/self/fd")) == before
    await trio.run_process(["rm", "-rf", str(box.work / "d")])


async def test_path_named_twice_is_kept_once(box: Box) -> None:
    (box.work / "out").mkdir()
    (box.work / "out" / "a").write_text("x")
    await box.kept("out", "out/a", "out/", "./out")
    assert box.names() == ["out", "out/a"]


async def test_workdir_itself_may_be_kept(box: Box) -> None:
    (box.work / "a").write_text("x")
    await box.kept(".")
    assert box.names() == [".", "./a"]


async def test_ids_are_those_inside(box: Box) -> None:
    (box.work / "a").write_text("x")
    os.chown(box.work / "a", 1_001_000, 1_001_001)
    await box.kept("a", shift=1_000_000)
    with tarfile.open(box.tar) as archive:
        found = archive.getmember("a")
    assert (found.uid, found.gid) == (1000, 1001)


async def test_partial_archive_is_removed(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    (box.work / "a").write_bytes(os.urandom(40 << 20))
    monkeypatch.setattr(files, "READ", 512)
    with trio.move_on_after(0.05) as scope:
        await box.kept("a")
    assert scope.cancelled_caught
    assert os.listdir(box.tar.parent) == []
    box.tar.parent.rmdir()
    box.tar.parent.symlink_to("/dev/full")
    with pytest.raises((RuntimeFault, FileExistsError)):
        await box.kept("a")


async def test_full_disk_is_clear_fault(box: Box) -> None:
    box.tar.parent.mkdir()
    box.tar.with_name(f"{box.tar.name}.half").symlink_to("/dev/full")
    (box.work / "a").write_bytes(bytes(1 << 20))
    with pytest.raises(
        RuntimeFault, match=r"the session's artifacts could not be kept: .*No space left on device"
    ):
        await box.kept("a")
    assert os.listdir(box.tar.parent) == []


def test_archive_path_of_session(tmp_path: Path) -> None:
    assert artifacts_path(tmp_path, "task-1-0") == tmp_path / "task-1-0.artifacts.tar"


# ── of a container ────────────────────────────────────────────────────────────

HOSTILE = """
mkdir -p out/deep; cd out
ln -s /etc/passwd passwd; ln -s /proc/1/root/etc magic; ln -s . loop; mkfifo pipe; truncate -s 200M bomb
echo fine > deep/fine; ln /work/out/deep/fine second; ln -s /dev/zero zero
printf '#!/bin/sh\\necho forged' > /tmp/tar; chmod +x /tmp/tar
(while :; do mv deep moved; ln -sfn /etc deep; rm deep; mv moved deep; done) >/dev/null 2>&1 &
"""


@pytest.mark.podman
async def test_artifacts_of_hostile_agent(
    runtimes: NodeRuntimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plants links, bombs and pipes, and moves a folder to and fro while the node walks."""
    monkeypatch.setattr(files, "BYTES_LIMIT", 1 << 20)
    async with runtimes.open(
        evolve(SMALL, disk_mb=512), session_id="artifacts", lifetime_s=LIFETIME_S
    ) as runtime:
        await runtime.run(["sh", "-c", HOSTILE])
        await runtime.seal(SMALL)
        for _ in range(20):
            kept = await runtime.collect(["out", "/etc/hostname", "/dev/zero"], tmp_path / "kept.tar")
            with tarfile.open(kept.path) as archive:
                for each in archive:
                    assert each.isfile() or each.isdir() or each.issym(), each
                assert not any(name.startswith("out/deep/passwd") for name in archive.getnames())
        await runtime.end_processes()
        kept = await runtime.collect(["out"], tmp_path / "kept.tar")
        with tarfile.open(kept.path) as archive:
            assert archive.getmember("out/passwd").linkname == "/etc/passwd"
            assert (archive.getmember("out").uid, archive.getmember("out/second").isfile()) == (1000, True)
        assert {said.partition(":")[0] for said in kept.left_out} == {"out/bomb", "out/pipe"}
        await runtime.seal(SMALL)
        kept = await runtime.collect(["."], tmp_path / "kept.tar")
        with tarfile.open(kept.path) as archive:
            assert "./out/second" in archive.getnames(), "the workdir is a mount of its own under a seal"
