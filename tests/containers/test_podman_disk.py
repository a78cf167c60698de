"""What sessions write: measured however it is hidden, bounded each for itself, and the largest ended first
when the disk is nearly full.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve
from podman_parts import LIFETIME_S, SMALL, until

from polarnode.containers import disk
from polarnode.containers.control_groups import ControlGroup
from polarnode.containers.disk import (
    DiskSpace,
    DiskWatch,
    WatchedContainer,
    WritableLayer,
    disk_space_at,
    unlinked_bytes,
    used_bytes,
)
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.support.concurrency import open_background

MB = 1 << 20


def layer_at(folder: Path, *pids: int) -> WritableLayer:
    """A container's layer that is a folder, and a group of those processes."""
    (folder / "diff").mkdir(parents=True)
    (folder / "group").mkdir()
    (folder / "group" / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return WritableLayer(
        folder=folder / "diff", group=ControlGroup(folder / "group"), device=os.stat(folder).st_dev
    )


def written_to(folder: Path, ended: list[str], limit_mb: int = 4) -> WatchedContainer:
    async def end() -> None:
        await trio.lowlevel.checkpoint()
        ended.append(folder.name)

    return WatchedContainer(id=folder.name, layer=layer_at(folder), limit_mb=limit_mb, end=end)


LOCKER = """
import fcntl, struct, sys
with open(sys.argv[1], "w") as file:
    for place in range(int(sys.argv[2])):
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * place, 1, 0))
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(path: Path, count: int) -> Iterator[int]:
    """A process that holds so many locks on a file; its id."""
    argv = [sys.executable, "-c", LOCKER, str(path), str(count)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder.pid


async def test_locks_end_only_their_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts them in no control group; they are searched for only while the machine has many."""
    monkeypatch.setattr(disk, "MAX_SESSION_LOCKS", 100)
    monkeypatch.setattr(disk, "LOCKS_S", 0.01)
    monkeypatch.setattr(disk, "LOCKS_REST_S", 0.01)
    monkeypatch.setattr(disk, "SLABINFO_PATH", tmp_path / "slabinfo")
    ended: list[str] = []
    watch = DiskWatch(store=tmp_path, reserve=0)
    greedy, modest = written_to(tmp_path / "greedy", ended), written_to(tmp_path / "modest", ended)
    with holding(tmp_path / "one", 101) as first, holding(tmp_path / "two", 100) as second:
        for each, pid in ((greedy, first), (modest, second)):
            (each.layer.group.folder / "cgroup.procs").write_text(f"{pid}\n")
            watch.add(each)
        (tmp_path / "slabinfo").write_text("file_lock_cache 201 294 192 21 1 : tunables 0 0 0\n")
        async with open_background(watch.run):
            await trio.sleep(0.2)
            assert ended == [], "the machine has few"
            (tmp_path / "slabinfo").write_text("file_lock_cache 300000 300006 192 21 1 : tunables 0 0 0\n")
            await until(lambda: bool(ended))
    assert set(ended) == {"greedy"}
    assert greedy.because == "the session held more than 100 locks on files"
    assert disk.count_machine_locks(tmp_path / "not there") == 0


# ── measuring ─────────────────────────────────────────────────────────────────


async def test_usage_counts_bytes_on_disk(tmp_path: Path) -> None:
    layer = layer_at(tmp_path)
    empty = await used_bytes(layer)
    assert empty is not None
    (layer.folder / "plain").write_bytes(os.urandom(MB))
    os.link(layer.folder / "plain", layer.folder / "second name")
    with (layer.folder / "hole").open("wb") as file:
        file.truncate(1 << 40)
    (layer.folder / "out").symlink_to("/usr")
    assert await used_bytes(layer) == pytest.approx(empty + MB, abs=64 * 1024)


async def test_overlong_paths_are_measured(tmp_path: Path) -> None:
    layer = layer_at(tmp_path)
    script = (
        "import os\nfor _ in range(600):\n    os.mkdir('d' * 20); os.chdir('d' * 20)\nopen('hidden',"
        " 'wb').write(os.urandom(3 << 20))"
    )
    await trio.run_process(["python3", "-c", script], cwd=layer.folder)
    measured = await used_bytes(layer)
    assert measured is not None
    assert measured > 3 * MB
    await trio.run_process(["rm", "-rf", str(layer.folder)])


async def test_missing_container_uses_nothing(tmp_path: Path) -> None:
    layer = layer_at(tmp_path)
    layer.folder.rmdir()
    assert await used_bytes(layer) is None


def test_deleted_open_files_are_counted(tmp_path: Path) -> None:
    layer = layer_at(tmp_path, os.getpid(), 2**22 + 1)
    path = layer.folder / "hidden"
    with path.open("w+b") as file:
        file.write(os.urandom(2 * MB))
        file.flush()
        assert unlinked_bytes(layer) == 0, "a file with a name is found by the walk"
        path.unlink()
        assert unlinked_bytes(layer) == pytest.approx(2 * MB, abs=64 * 1024)
        with os.fdopen(os.dup(file.fileno()), "rb"):
            assert unlinked_bytes(layer) == pytest.approx(2 * MB, abs=64 * 1024), (
                "held twice, it is there once"
            )
        mapped = mmap.mmap(file.fileno(), MB)
    assert unlinked_bytes(layer) == pytest.approx(2 * MB, abs=64 * 1024), "mapped, with no descriptor left"
    mapped.close()
    assert unlinked_bytes(layer) == 0


# ── watching ──────────────────────────────────────────────────────────────────


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("LOOK_S", 0.01),
        ("LEAST_S", 0.01),
        ("PAUSE_PER_CONTAINER_S", 0.0),
        ("REST", 0),
        ("MOVED", 0),
    ):
        monkeypatch.setattr(disk, name, value)


async def test_excess_writer_is_ended_and_told(tmp_path: Path, quick: None) -> None:
    ended: list[str] = []
    large, small = written_to(tmp_path / "large", ended), written_to(tmp_path / "small", ended)
    watch = DiskWatch(store=tmp_path, reserve=0)
    for each in (large, small):
        watch.add(each)
        (each.layer.folder / "file").write_bytes(os.urandom(2 * MB))
    async with open_background(watch.run):
        await until(lambda: small.measured > 0 and large.measured > 0)
        assert ended == []
        (large.layer.folder / "more").write_bytes(os.urandom(3 * MB))
        await until(lambda: bool(ended))
        count = large.measured
        await until(lambda: large.measured > count + 2)
        assert ended == ["large"], "it may stay as it is, to be judged or removed"
        (large.layer.folder / "again").write_bytes(os.urandom(2 * MB))
        await until(lambda: len(ended) > 1)
    assert ended == ["large", "large"]
    assert large.because == "the session wrote more than its disk_mb (4)"
    assert not large.for_room
    assert small.because is None
    assert watch.ended == 2


async def test_idle_disk_is_not_measured(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"content": 100 * MB, "files": 10 * MB}
    monkeypatch.setattr(disk, "MOVED", 10 * MB)
    monkeypatch.setattr(disk, "disk_space_at", lambda folder: DiskSpace(**free))
    each = written_to(tmp_path / "one", [])
    watch = DiskWatch(store=tmp_path, reserve=0)
    watch.add(each)
    async with open_background(watch.run):
        await until(lambda: each.measured == 1)
        free["content"] -= 9 * MB
        await trio.sleep(0.5)
        assert each.measured == 1
        free["content"] -= 2 * MB
        await until(lambda: each.measured == 2)
        free["files"] -= 10 * MB
        await until(lambda: each.measured == 3)
        monkeypatch.setattr(disk, "FULL_ROUND_S", 0.2)
        await until(lambda: each.measured > 4)


async def test_slow_measurement_delays_no_other(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(layer: WritableLayer) -> int | None:
        if layer is slow_one.layer:
            await trio.sleep_forever()
        return await used_bytes(layer)

    slow_one, other = written_to(tmp_path / "slow", []), written_to(tmp_path / "other", [])
    monkeypatch.setattr(disk, "used_bytes", slow)
    watch = DiskWatch(store=tmp_path, reserve=0)
    watch.add(slow_one)
    watch.add(other)
    async with open_background(watch.run):
        await until(lambda: other.measured > 3)
    assert slow_one.measured == 0


async def test_full_disk_ends_largest_first(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends the largest container, and then waits for it to go."""
    free, ended = [100 * MB], list[str]()
    monkeypatch.setattr(disk, "disk_space_at", lambda folder: DiskSpace(content=free[0], files=1000 * MB))
    watch, each = DiskWatch(store=tmp_path, reserve=80 * MB), []
    for number in range(3):
        each.append(written_to(tmp_path / f"{number}", ended, limit_mb=100))
        (each[number].layer.folder / "file").write_bytes(os.urandom((number + 1) * MB))
        watch.add(each[number])
    async with open_background(watch.run):
        await until(lambda: all(one.size > MB // 2 for one in each))
        free[0] = 41 * MB
        await trio.sleep(0.2)
        assert ended == [], "half the reserve is left"
        free[0] = 39 * MB
        await until(lambda: bool(ended))
        await trio.sleep(0.2)
        assert ended == ["2"]
        watch.discard("2")
        await until(lambda: len(ended) == 2)
    assert ended == ["2", "1"]
    assert str(each[2].because).startswith(
        "the machine's disk is nearly full and this session wrote the most, 3 MB"
    )
    assert each[2].for_room, "the machine's fault, so that the session is tried again"


async def test_fast_disk_filler_is_ended(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster than it is measured: neither the machine's fault nor that of who wrote the most before."""
    monkeypatch.setattr(disk, "LEAST_S", 60.0)
    free, ended = [100 * MB], list[str]()
    monkeypatch.setattr(disk, "disk_space_at", lambda folder: DiskSpace(content=free[0], files=1000 * MB))
    watch = DiskWatch(store=tmp_path, reserve=80 * MB)
    honest, greedy = (written_to(tmp_path / name, ended, limit_mb=4) for name in ("honest", "greedy"))
    for each, size in ((honest, 3), (greedy, 1)):
        (each.layer.folder / "file").write_bytes(os.urandom(size * MB))
        watch.add(each)
    async with open_background(watch.run):
        await until(lambda: honest.measured > 0 and greedy.measured > 0)
        (greedy.layer.folder / "more").write_bytes(os.urandom(4 * MB))
        free[0] = 39 * MB
        await until(lambda: bool(ended))
    assert ended == ["greedy"]
    assert (greedy.because, greedy.for_room) == ("the session wrote more than its disk_mb (4)", False)
    assert (honest.because, honest.for_room) == (None, False)


async def test_test_has_own_disk_room(tmp_path: Path, quick: None) -> None:
    """Where a session wrote all that it may, its test is not ended for that."""
    ended: list[str] = []
    one, watch = written_to(tmp_path / "one", ended, limit_mb=4), DiskWatch(store=tmp_path, reserve=0)
    (one.layer.folder / "all").write_bytes(os.urandom(4 * MB - 64 * 1024))
    watch.add(one)
    one.begin_judging()
    one.begin_judging()  # once
    (one.layer.folder / "report").write_bytes(os.urandom(MB // 2))
    async with open_background(watch.run):
        await until(lambda: one.measured > 1)
        assert ended == []
        (one.layer.folder / "more").write_bytes(os.urandom(MB))
        await until(lambda: bool(ended))


async def test_node_writes_are_not_counted(tmp_path: Path, quick: None) -> None:
    """A workspace of a session that wrote too much is copied to its judge, which wrote nothing."""
    ended: list[str] = []
    judge, watch = written_to(tmp_path / "judge", ended, limit_mb=2), DiskWatch(store=tmp_path, reserve=0)
    watch.add(judge)
    async with open_background(watch.run):
        with judge.spared() as spared:
            (judge.layer.folder / "copied").write_bytes(os.urandom(5 * MB))
            count = judge.measured
            await until(lambda: judge.measured > count + 2)
            spared(5 * MB)
        (judge.layer.folder / "own").write_bytes(os.urandom(MB))
        count = judge.measured
        await until(lambda: judge.measured > count + 2)
        assert ended == []
        (judge.layer.folder / "more").write_bytes(os.urandom(2 * MB))
        await until(lambda: bool(ended))


async def test_container_leaving_during_measurement_is_forgotten(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, ended = DiskWatch(store=tmp_path, reserve=0), list[str]()
    one = written_to(tmp_path / "one", ended, limit_mb=1)
    (one.layer.folder / "file").write_bytes(os.urandom(3 * MB))
    measuring = trio.Event()

    async def noting(layer: WritableLayer) -> int | None:
        watch.discard("one")
        measuring.set()
        return await used_bytes(layer)

    monkeypatch.setattr(disk, "used_bytes", noting)
    watch.add(one)
    async with open_background(watch.run):
        await measuring.wait()
        await until(lambda: one.measured == 1)
        await trio.sleep(0.1)
    assert ended == []


def test_room_is_of_the_folder(tmp_path: Path) -> None:
    figures = subprocess.run(
        ["stat", "-f", "-c", "%f %S %d", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split()
    room = disk_space_at(tmp_path)
    assert room.content == pytest.approx(int(figures[0]) * int(figures[1]), rel=0.05)
    assert room.files == pytest.approx(int(figures[2]) * 4096, rel=0.05)


def test_disk_without_inodes_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = os.statvfs(tmp_path)
    content = figures.f_bfree * figures.f_frsize
    # 0 where they are made as they are needed
    for files, free, least in ((1000, 10, 10 * 4096), (0, 0, content)):
        short = os.statvfs_result(
            (
                figures.f_bsize,
                figures.f_frsize,
                figures.f_blocks,
                figures.f_bfree,
                figures.f_bavail,
                files,
                free,
                free,
                0,
                255,
            )
        )
        monkeypatch.setattr(disk.os, "statvfs", lambda folder, short=short: short)
        assert (disk_space_at(tmp_path).content, disk_space_at(tmp_path).least) == (content, least)
        monkeypatch.undo()


def test_either_shortage_changes_room() -> None:
    """On a disk with few places for files the free bytes must still be looked at, and the other way round."""
    before = DiskSpace(content=100 << 30, files=1 << 30)
    assert evolve(before, content=99 << 30).moved(before)
    assert evolve(before, files=0).moved(before)
    assert not evolve(before, content=before.content - 1).moved(before)


async def test_empty_files_count_too(tmp_path: Path) -> None:
    """A million of them would take all the places for files that a disk has."""
    layer = layer_at(tmp_path)
    for number in range(1000):
        (layer.folder / f"{number}").touch()
    measured = await used_bytes(layer)
    assert measured is not None
    assert measured >= 1000 * 4096


async def test_process_shortage_stops_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def none_left(argv: list[str], **more: object) -> None:
        await trio.lowlevel.checkpoint()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(disk.trio, "run_process", none_left)
    assert await used_bytes(layer_at(tmp_path)) is None
    assert "cannot be measured" in caplog.text


# ── in a container ────────────────────────────────────────────────────────────

SPEC = evolve(SMALL, disk_mb=48)
BECAUSE = "the session wrote more than its disk_mb (48)"

MANY = "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/urandom > f$i; done"
UNLINKED = """
import os, tempfile, time
held = [tempfile.TemporaryFile(dir="/work") for _ in range(8)]
print(os.listdir("/work"), flush=True)
for file in held:
    file.write(os.urandom(12 << 20)); file.flush()
time.sleep(1000)
"""


async def _ended_for_its_disk(runtime: PodmanRuntime, argv: list[str]) -> bytes:
    with trio.fail_after(600):
        ended = await runtime.run(argv)
    assert ended.exit_code == 137
    assert runtime.ended_because == BECAUSE
    assert ended.stderr.endswith(f"\n{BECAUSE}\n".encode())
    assert (await runtime.run(["echo", "alive"])).stdout == b"alive\n", (
        "it can be looked at, and its artifacts kept"
    )
    return ended.stdout


@pytest.mark.podman
async def test_disk_filler_is_ended(runtimes: NodeRuntimes) -> None:
    async with (
        runtimes.open(SPEC, session_id="filler", lifetime_s=LIFETIME_S) as filler,
        runtimes.open(SPEC, session_id="neighbour", lifetime_s=LIFETIME_S) as neighbour,
    ):
        await filler.seal(SPEC)
        await _ended_for_its_disk(filler, ["sh", "-c", f"setsid sh -c '{MANY}' & {MANY}"])
        assert (await filler.run(["sh", "-c", "ls /proc | grep -c '^[0-9]'"])).stdout.split()[0] in (
            b"3",
            b"4",
        ), "its daemons are gone too"
        assert neighbour.ended_because is None
        assert (await neighbour.run(["true"])).exit_code == 0


@pytest.mark.podman
async def test_two_large_files_exceed_limit(runtimes: NodeRuntimes) -> None:
    """No file is beyond the limit, few are made, and then nothing happens any more."""
    async with runtimes.open(SPEC, session_id="two", lifetime_s=LIFETIME_S) as runtime:
        await _ended_for_its_disk(
            runtime,
            ["sh", "-c", "for f in 1 2; do head -c 40000000 /dev/urandom > $f; done; exec sleep 1000"],
        )


@pytest.mark.podman
async def test_unlistable_files_are_counted(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SPEC, session_id="hidden", lifetime_s=LIFETIME_S) as runtime:
        assert await _ended_for_its_disk(runtime, ["python3", "-c", UNLINKED]) == b"[]\n"


@pytest.mark.podman
async def test_file_size_limit_includes_holes(runtimes: NodeRuntimes) -> None:
    """The kernel refuses at the first byte too many, so a bomb of nothing but holes is none."""
    async with runtimes.open(SPEC, session_id="bomb", lifetime_s=LIFETIME_S) as runtime:
        for user in ("agent", "root"):
            ended = await runtime.run(
                [
                    "sh",
                    "-c",
                    (
                        "ulimit -f unlimited; truncate -s 1T /tmp/bomb; wc -c < /tmp/bomb; truncate -s 48M"
                        " /tmp/large; (echo x >> /tmp/large); wc -c < /tmp/large; ulimit -Hc"
                    ),
                ],
                user=user,
            )
            assert b"unlimited" not in ended.stdout
            sizes = [int(line) for line in ended.stdout.split()]
            assert sizes == [0, SPEC.disk_mb << 20, 0], ended
            await runtime.run(["sh", "-c", "rm -f /tmp/bomb /tmp/large"], user=user)
