"""Snapshots of a container's writable places: put into another, nothing of them differs."""

import errno
import hashlib
import os
import socket
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from attrs import define, evolve
from podman_parts import LIFETIME_S, SMALL

from polarnode.containers import snapshots
from polarnode.containers.files import ContainerFiles
from polarnode.containers.inside import Process
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.containers.snapshots import SnapshotFiles, archive, check_size, restore
from polarnode.core.errors import Refused, RuntimeFault

PLACES = ("/work", "/home/agent")
Seen = dict[bytes, tuple[object, ...]]


def digest(top: str, shift: int = 0) -> Seen:
    """Everything below a folder, and the folder itself: what a fork must have the same. Names of one file
    share a number.
    """
    found: Seen = {}
    links: dict[int, int] = {}
    root = os.fsencode(top)
    for folder, folders, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
            told = os.lstat(path)
            kind, content = stat.S_IFMT(told.st_mode), b""
            if stat.S_ISLNK(told.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(told.st_mode):
                content = hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).digest()
            links_of = links.setdefault(told.st_ino, len(links)) if told.st_nlink > 1 and content else None
            if stat.S_ISREG(told.st_mode) or stat.S_ISLNK(told.st_mode) or stat.S_ISDIR(told.st_mode):
                found[os.path.relpath(path, root)] = (
                    kind,
                    stat.S_IMODE(told.st_mode),
                    told.st_uid - shift,
                    told.st_gid - shift,
                    told.st_mtime_ns,
                    content,
                    links_of is not None,
                )
    return found


def linked(top: Path, *names: str) -> bool:
    return len({os.lstat(top / name).st_ino for name in names}) == 1


@define(eq=False)
class Box:
    """A folder that stands for a container."""

    root: Path
    files: ContainerFiles

    async def kept(self, to: Path, *places: str, limit: int = 1 << 30) -> SnapshotFiles:
        return await trio.to_thread.run_sync(
            lambda: archive(self.files, places=places or PLACES, to=to, limit=limit)
        )

    async def restored(self, tar: Path, *places: str) -> int:
        return await trio.to_thread.run_sync(lambda: restore(tar, self.files, places or PLACES))

    def seen(self) -> dict[str, Seen]:
        return {place: digest(f"{self.root}{place}", self.files.shift) for place in PLACES}


def boxes(folder: Path, shift: int) -> Iterator[Box]:
    for place in PLACES:
        (folder / place.strip("/")).mkdir(parents=True)
        os.chown(folder / place.strip("/"), shift + 1000, shift + 1000)
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    yield Box(folder, ContainerFiles(root=opened, shift=shift))
    os.close(opened)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    yield from boxes(tmp_path / "source", 100_000)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Box]:
    yield from boxes(tmp_path / "target", 700_000)


def fill(root: Path, shift: int) -> None:
    """All that a file can be, in both places."""
    work, home = root / "work", root / "home/agent"
    (work / "empty").mkdir(mode=0o700)
    (work / "deep/er").mkdir(parents=True)
    (work / "deep/er/run").write_text("#!/bin/sh")
    for name, mode in (("setuid", 0o4755), ("setgid", 0o2711), ("nothing", 0), ("sticky", 0o1644)):
        (work / name).write_text(name)
        os.chown(work / name, shift + 1000, shift + 50)
        (work / name).chmod(mode)
    (work / "link").symlink_to("deep/er/run")
    (work / "away").symlink_to("/etc/" + "x" * 200)
    (work / "first").write_bytes(os.urandom(100_000))
    (work / "deep/second").hardlink_to(work / "first")
    (home / "third").hardlink_to(work / "first")
    for name in (b"\xff\xfe", "é✓ 漢".encode(), b"new\nline", b"-rf", b"y" * 255, b"polarnode-times"):
        Path(os.fsdecode(os.path.join(os.fsencode(home), name))).write_bytes(name)
    with (home / "holes").open("wb") as file:
        file.truncate(3_000_001)
    for top, folders, files in os.walk(os.fsencode(root)):
        for path in (os.path.join(top, name) for name in (*folders, *files)):
            if os.lstat(path).st_uid == 0:  # root of this machine, which no container has
                os.chown(path, shift, shift + 7, follow_symlinks=False)
    os.chown(work / "link", shift + 33, shift + 33, follow_symlinks=False)
    os.utime(work / "link", ns=(1, 1_700_000_000_123_456_789), follow_symlinks=False)
    os.utime(work / "deep/er/run", ns=(5, 1_600_000_000_987_654_321))
    os.utime(work / "setuid", ns=(5, -1_500_000_000))
    os.utime(work / "deep", ns=(5, 1_500_000_000_000_000_001))
    os.utime(home, ns=(5, 1_234_567_890_000_000_007))
    (work / "deep").chmod(0o2750)


async def test_restored_container_is_identical(box: Box, other: Box, tmp_path: Path) -> None:
    fill(box.root, box.files.shift)
    (other.root / "work/removed").mkdir()
    (other.root / "work/removed/since").write_text("was in the image")
    (other.root / "work/first").symlink_to("/etc/passwd")
    (other.root / "home/agent/empty").write_text("a file where a folder comes")
    before, tar = box.seen(), tmp_path / "s.snapshot-3.tar"
    kept = await box.kept(tar)
    assert box.seen() == before, "taking it changes nothing"
    assert (kept.left_out, kept.changed, kept.places) == ((), (), PLACES)
    assert kept.files == 5 + 1 + 6 + 1
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600
    assert await other.restored(tar) == kept.bytes
    assert other.seen() == before
    assert linked(other.root, "work/first", "work/deep/second", "home/agent/third")
    assert sorted(os.listdir(tmp_path)) == ["s.snapshot-3.tar", "source", "target"]


async def test_any_tar_reads_snapshot(box: Box, tmp_path: Path) -> None:
    fill(box.root, box.files.shift)
    await box.kept(tmp_path / "kept.tar")
    (tmp_path / "unpacked").mkdir()
    await trio.run_process(["tar", "-xpf", str(tmp_path / "kept.tar"), "-C", str(tmp_path / "unpacked")])
    assert linked(tmp_path / "unpacked", "work/first", "home/agent/third")
    assert stat.S_IMODE((tmp_path / "unpacked/work/setuid").stat().st_mode) == 0o4755


async def test_place_missing_in_image_is_created(box: Box, other: Box, tmp_path: Path) -> None:
    (box.root / "srv").mkdir(mode=0o711)
    (box.root / "srv/a").write_text("x")
    await box.kept(tmp_path / "kept.tar", "/srv")
    await other.restored(tmp_path / "kept.tar", "/srv")
    assert (other.root / "srv/a").read_text() == "x"
    assert stat.S_IMODE((other.root / "srv").stat().st_mode) == 0o711


async def test_special_files_are_left_out(box: Box, tmp_path: Path) -> None:
    """A file that is no plain file is left out, and not missed."""
    os.mkfifo(box.root / "work/pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(box.root / "work/socket"))
    kept = await box.kept(tmp_path / "kept.tar")
    assert len(kept.left_out) == 2
    assert kept.missed() == ()
    deep = box.root / "work"
    for _ in range(202):
        deep = deep / "d"
        deep.mkdir()
    kept = await box.kept(tmp_path / "kept.tar")
    (missed,) = kept.missed()
    assert missed.endswith("it is more than 200 folders deep")
    await trio.run_process(["rm", "-rf", str(box.root / "work/d")])


async def test_oversized_snapshot_leaves_nothing(box: Box, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (box.root / "work/a").write_bytes(bytes(1 << 20))
    (box.root / "home/agent/b").write_bytes(b"x")
    with pytest.raises(Refused, match="more than 1 MiB: raise max_mb") as refused:
        await box.kept(folder / "kept.tar", limit=1 << 20)
    assert refused.value.path == "$.snapshot_at.max_mb"
    assert os.listdir(folder) == []
    with pytest.raises(Refused, match="more than 1 MiB"):
        await trio.to_thread.run_sync(check_size, box.files, PLACES, 1 << 20)
    await trio.to_thread.run_sync(check_size, box.files, PLACES, (1 << 20) + 1)


async def test_too_many_files_are_refused(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "ENTRIES_LIMIT", 20)
    for number in range(30):
        (box.root / f"work/{number}").mkdir()
    with pytest.raises(Refused, match="more than 20 files and folders"):
        await box.kept(tmp_path / "kept.tar")


async def test_cancelled_snapshot_leaves_nothing(box: Box, tmp_path: Path) -> None:
    (box.root / "work/a").write_bytes(os.urandom(1 << 20))
    for number in range(5_000):
        (box.root / f"work/{number}").symlink_to("x")
    with trio.move_on_after(0.01) as scope:
        await box.kept(tmp_path / "kept.tar")
    assert scope.cancelled_caught
    assert os.listdir(tmp_path) == ["source"]


async def test_file_written_meanwhile_is_reported(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = box.root / "work/busy"
    busy.write_text("one")
    copy = snapshots.TarWriter.copy

    def slow(self: snapshots.TarWriter, opened: int, size: int) -> None:
        busy.write_text("longer")
        copy(self, opened, size)

    monkeypatch.setattr(snapshots.TarWriter, "copy", slow)
    kept = await box.kept(tmp_path / "kept.tar")
    assert kept.changed == ("work/busy",)


async def test_truncated_archive_restores_nothing(box: Box, other: Box, tmp_path: Path) -> None:
    fill(box.root, box.files.shift)
    tar = tmp_path / "kept.tar"
    await box.kept(tar)
    (other.root / "work/mine").write_text("x")
    whole = tar.read_bytes()
    for length in (0, 700, len(whole) // 2, len(whole) - 12_000):
        tar.write_bytes(whole[:length])
        with pytest.raises(RuntimeFault, match=r"kept\.tar could not be restored: "):
            await other.restored(tar)
    assert (other.root / "work/mine").read_text() == "x"
    tar.unlink()
    with pytest.raises(RuntimeFault, match="No such file"):
        await other.restored(tar)


@pytest.mark.parametrize("how", ["climbs", "through a link", "device"])
async def test_forged_archive_leads_nowhere(other: Box, tmp_path: Path, how: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    members = [tarfile.TarInfo("work")]
    members[0].type = tarfile.DIRTYPE
    if how == "climbs":
        members.append(tarfile.TarInfo("work/../../outside/file"))
    elif how == "device":
        members.append(tarfile.TarInfo("work/null"))
        members[1].type = tarfile.CHRTYPE
    else:
        members += [tarfile.TarInfo("work/link"), tarfile.TarInfo("work/link/file")]
        members[1].type, members[1].linkname = tarfile.SYMTYPE, str(outside)
    times = tarfile.TarInfo(snapshots.TIMES)
    times.size = 4 * len(members)
    tar = tmp_path / "forged.tar"
    with tar.open("wb") as file:
        for each in members:
            file.write(each.tobuf())
        file.write(times.tobuf() + bytes(512) + bytes(1024))
    with pytest.raises(RuntimeFault, match="could not be restored"):
        await other.restored(tar)
    assert os.listdir(outside) == []


# ── of a container ────────────────────────────────────────────────────────────

LEFT = """
set -e; cd /work; umask 022
mkdir -p empty deep/er; echo '#!/bin/sh' > deep/er/run; chmod 4755 deep/er/run; chmod 1777 empty
ln -s deep/er/run link; ln deep/er/run second; echo hallo > 'ünï cödé ✓'; mkfifo pipe
touch -d '2001-02-03 04:05:06.123456789' second; touch -h -d '1999-01-01' link
rm -f "$HOME/.profile" given; mkdir -p "$HOME/.agent"; echo '{}' > "$HOME/.agent/session.jsonl"
echo x > /tmp/tool.log; echo y > /var/tmp/z; touch -d '2002-02-02' deep
"""


@pytest.mark.podman
async def test_linked_workdir_leads_nowhere(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    """Else what it leads to would be in the snapshot, and be emptied where that is restored."""
    spec = evolve(SMALL, workdir="/tmp/w")
    async with runtimes.open(spec, session_id="link", lifetime_s=LIFETIME_S) as runtime:
        await runtime.seal(spec)
        before = await runtime.snapshot(spec, tmp_path / "before.tar", 1 << 20)
        await runtime.run(["sh", "-c", "cd /tmp; mv w v; ln -s /etc w"])
        after = await runtime.snapshot(spec, tmp_path / "after.tar", 1 << 20)
    assert "/tmp" in before.places
    assert (after.places, after.files) == (before.places, before.files)


@pytest.mark.podman
async def test_fresh_container_restores_running_one(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    """The first is sealed and its harness waits; the second is of the same image, and another user range."""
    tar, spec = tmp_path / "s.tar", evolve(SMALL, writable=("/srv/data", "/work/deep"))
    async with (
        runtimes.open(spec, session_id="first", lifetime_s=LIFETIME_S) as first,
        runtimes.open(spec, session_id="second", lifetime_s=LIFETIME_S) as second,
    ):
        for each in (first, second):
            await each.put({"/work/given": b"of the task"})
            made = await each.run(["sh", "-c", "mkdir -p -m 777 /srv/data; chmod 777 /srv/data"], user="root")
            assert made.exit_code == 0, made.stderr
        await first.seal(spec)
        ended = await first.run(["sh", "-c", LEFT + "echo z > /srv/data/z; (sleep 300; :) >/dev/null 2>&1 &"])
        assert ended.exit_code == 0, ended.stderr
        living = await first.processes()
        assert {each.comm for each in living} == {"sh", "sleep"}
        kept = await first.snapshot(spec, tar, 64 << 20, measured=True)
        assert kept.places == tuple(sorted(("/work", first.home, "/tmp", "/var/tmp", "/srv/data")))
        assert [each.partition(":")[0] for each in kept.left_out] == ["work/pipe"]
        await second.restore_snapshot(tar, kept.places)
        await second.seal(spec)
        for place in kept.places:
            one, two = (
                digest(f"/proc/self/fd/{each._files.root}{place}", each.shift) for each in (first, second)
            )
            assert one == two, place
        assert await second.read("/work/given") is None
        ended = await second.run(
            ["sh", "-c", "test -u /work/deep/er/run && cat /work/link && echo w > /work/new"]
        )
        assert (ended.exit_code, ended.stdout) == (0, b"#!/bin/sh\n")
        assert await second.processes() == frozenset()
        assert await runtimes.image_id(spec) == await runtimes.image_id(SMALL)
        with pytest.raises(RuntimeFault, match="podman inspect"):
            await runtimes.image_id(evolve(SMALL, image="localhost/gone:1"))


def test_reused_process_id_is_recognised() -> None:
    one = Process(pid=7, started=1, comm="sh", program="/bin/sh")
    assert one == evolve(one, comm="python", program="")
    assert one != evolve(one, started=2)
    assert errno.EXDEV in snapshots.REASONS
