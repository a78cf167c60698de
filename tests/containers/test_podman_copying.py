"""A workspace made the same elsewhere: every kind of file, names of any bytes, nothing outside, and only what
was changed.
"""

import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import define, evolve
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from podman_parts import LIFETIME_S, SMALL, settings

from polarnode.containers import copying
from polarnode.containers.copying import Copy
from polarnode.containers.files import ContainerFiles
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.errors import EvaluatorError
from polarnode.core.task import RuntimeSpec, VolumeSpec

MB = 1 << 20


@define(eq=False)
class Pair:
    """Two folders that stand for containers, each with a workdir `/work`."""

    source: Path
    target: Path
    left: int
    right: int

    def copy(self, limit: int = 1 << 30, shifts: tuple[int, int] = (0, 0)) -> Copy:
        return Copy(
            source=ContainerFiles(root=self.left, shift=shifts[0]),
            target=ContainerFiles(root=self.right, shift=shifts[1]),
            limit=limit,
        )

    async def copied(self, limit: int = 1 << 30, shifts: tuple[int, int] = (0, 0)) -> Copy:
        made = self.copy(limit, shifts)
        await trio.to_thread.run_sync(made.run, "/work", "/work")
        return made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    for name in ("source", "target"):
        (tmp_path / name / "work").mkdir(parents=True)
    (tmp_path / "outside").write_text("outside")
    left, right = (os.open(tmp_path / name, os.O_PATH | os.O_DIRECTORY) for name in ("source", "target"))
    yield Pair(tmp_path / "source" / "work", tmp_path / "target" / "work", left, right)
    os.close(left)
    os.close(right)


def listed(folder: Path) -> dict[bytes, tuple[object, ...]]:
    """Every path below a folder with all that a copy must keep."""
    found = {}
    for path, names, files in os.walk(os.fsencode(folder)):
        for name in [b"", *names, *files]:
            full = os.path.join(path, name)
            found_stat = os.lstat(full)
            content = os.readlink(full) if stat.S_ISLNK(found_stat.st_mode) else b""
            if stat.S_ISREG(found_stat.st_mode):
                content = Path(os.fsdecode(full)).read_bytes()
            when = () if stat.S_ISLNK(found_stat.st_mode) else (found_stat.st_mtime_ns,)
            found[os.path.relpath(full, os.fsencode(folder))] = (
                found_stat.st_mode,
                found_stat.st_uid,
                found_stat.st_gid,
                content,
                *when,
            )
    return found


def write(folder: Path, name: bytes, content: bytes) -> None:
    Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(content)


ODD_NAMES = [
    b"plain",
    b"-rf",
    b" two  words ",
    b"new\nline",
    b"*",
    b"quo'te\"",
    b".hidden",
    "é✓".encode(),
    b"\xff\xfe",
    b"\\",
    b"x" * 255,
]


async def test_workspace_arrives_unchanged(pair: Pair) -> None:
    work = pair.source
    for name in ODD_NAMES:
        write(work, name, b"content of " + name)
    (work / "deep" / "er").mkdir(parents=True)
    (work / "deep" / "empty").mkdir(mode=0o700)
    (work / "locked").mkdir()
    (work / "locked" / "in").write_text("x")
    (work / "locked").chmod(0)
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o4755)
    (work / "secret").write_text("x")
    (work / "secret").chmod(0)
    (work / "link").symlink_to("plain")
    (work / "dangling").symlink_to("/nowhere/at all")
    (work / "deep" / "up").symlink_to("../../..")
    os.utime(work / "plain", ns=(1, 123_456_789_012))
    os.utime(work / "deep", ns=(1, 223_456_789_012))
    await pair.copied()
    assert listed(pair.target) == listed(pair.source)


async def test_target_matches_source_after_copy(pair: Pair) -> None:
    """What is not in the source goes, and what changed its kind changes."""
    for name in ("test_that_failed.py", ".git", "-x", "a file", "a folder/below", "a link's place"):
        (pair.target / name).parent.mkdir(exist_ok=True)
        (pair.target / name).write_text("from the image")
    (pair.target / "to a folder").symlink_to("..")
    (pair.source / "a file").mkdir()
    (pair.source / "a folder").write_text("now a file")
    (pair.source / "a link's place").symlink_to("a folder")
    (pair.source / "to a folder").mkdir()
    (pair.source / "to a folder" / "in").write_text("x")
    await pair.copied()
    assert listed(pair.target) == listed(pair.source)
    assert not (pair.target.parent / "in").exists()


async def test_hard_links_stay_hard_links(pair: Pair) -> None:
    (pair.source / "a").mkdir()
    (pair.source / "one").write_text("x")
    os.link(pair.source / "one", pair.source / "a" / "two")
    os.link(pair.source / "one", pair.source / "three")
    (pair.target / "three").write_text("old")
    made = await pair.copied()
    assert {(pair.target / name).stat().st_ino for name in ("one", "a/two", "three")} == {
        (pair.target / "one").stat().st_ino
    }
    assert made.size == 1


async def test_holes_stay_holes(pair: Pair) -> None:
    with (pair.source / "bomb").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"in the middle")
    (pair.source / "empty").write_bytes(b"")
    made = await pair.copied(limit=MB)
    there = (pair.target / "bomb").stat()
    assert (there.st_size, made.size < MB, there.st_blocks * 512 < MB) == (1 << 40, True, True)
    with (pair.target / "bomb").open("rb") as file:
        file.seek(1 << 39)
        assert file.read(14) == b"in the middle\0"


async def test_special_files_are_left_out(pair: Pair) -> None:
    os.mkfifo(pair.source / "pipe")
    os.mknod(pair.source / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pair.source / "socket"))
    (pair.source / "file").write_text("x")
    (pair.target / "pipe").write_text("from the image")
    with trio.fail_after(30):
        await pair.copied()
    assert os.listdir(pair.target) == ["file"]


async def test_ids_are_those_inside(pair: Pair) -> None:
    shifts = (1_000_000, 2_000_000)
    for number, name in ((1_000_000, "roots"), (1_001_000, "agents"), (5, "nobodys")):
        (pair.source / name).write_text("x")
        os.chown(pair.source / name, number, number)
    os.chown(pair.source, 1_001_000, 1_001_000)
    await pair.copied(shifts=shifts)
    found_stat = {name: (pair.target / name).stat().st_uid for name in (".", "roots", "agents", "nobodys")}
    assert found_stat == {".": 2_001_000, "roots": 2_000_000, "agents": 2_001_000, "nobodys": 2_065_534}


async def test_shared_image_files_are_not_copied(pair: Pair) -> None:
    """The very file, by its number and a change time that nobody can set: here by a second name, as an
    overlay shows a lower file in both.
    """
    for name in ("same", "changed"):
        (pair.source / name).write_text("from the image")
        os.link(pair.source / name, pair.target / name)
    (pair.target / "changed").unlink()
    (pair.target / "changed").write_text("from the image")
    before = (pair.target / "same").stat().st_ino
    made = await pair.copied()
    assert (made.looked, made.copied) == (2, 1)
    assert (pair.target / "same").stat().st_ino == before


async def test_links_are_never_followed(pair: Pair, tmp_path: Path) -> None:
    (pair.source / "out").symlink_to(tmp_path)
    (pair.target / "out").mkdir()
    (pair.target / "trap").symlink_to(tmp_path)
    (pair.source / "trap").mkdir()
    (pair.source / "trap" / "outside").write_text("written through a link")
    await pair.copied()
    assert (tmp_path / "outside").read_text() == "outside"
    assert (pair.target / "out").is_symlink()


@pytest.mark.parametrize("end", ["source", "target"])
async def test_linked_workdir_is_refused(pair: Pair, tmp_path: Path, end: str) -> None:
    folder = tmp_path / end / "work"
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(
        EvaluatorError, match="could not be copied to a fresh runtime: /work: a link is in the way"
    ):
        await pair.copied()


async def test_oversized_copy_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (pair.source / "large").write_bytes(bytes(range(256)) * 16 * 1024)
    with pytest.raises(
        EvaluatorError, match="larger than 1 MB: evaluate it where it is, without fresh_runtime"
    ):
        await pair.copied(limit=MB)
    monkeypatch.setattr(copying, "ENTRIES_LIMIT", 10)
    for number in range(12):
        (pair.source / f"{number}").write_text("")
    with pytest.raises(EvaluatorError, match="more than 10 files"):
        await pair.copied()


async def test_too_deep_tree_is_refused(pair: Pair) -> None:
    script = "import os\nfor _ in range(300):\n    os.mkdir('d' * 20); os.chdir('d' * 20)\n"
    await trio.run_process(["python3", "-c", script], cwd=pair.source)
    with pytest.raises(EvaluatorError, match="more than 200 folders deep"):
        await pair.copied()
    for folder in (pair.source, pair.target):
        await trio.run_process(["rm", "-rf", str(folder)])


async def test_many_hard_links_use_bounded_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "NAMES_LIMIT", 2)
    for number in range(5):
        (pair.source / f"{number}").write_text(f"{number}")
        os.link(pair.source / f"{number}", pair.source / f"{number} again")
    made = await pair.copied()
    assert listed(pair.target) == listed(pair.source)
    assert len(made._first_names) == 2


async def test_cancellation_stops_copy_midway(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE", 4096)
    (pair.source / "large").write_bytes(os.urandom(20 * MB))
    made = pair.copy()
    with trio.move_on_after(0.005) as scope:
        while True:
            await trio.to_thread.run_sync(made.run, "/work", "/work")
            (pair.target / "large").unlink()
    assert scope.cancelled_caught


async def test_no_descriptor_stays_open(pair: Pair) -> None:
    (pair.source / "a" / "b").mkdir(parents=True)
    (pair.source / "a" / "b" / "c").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await pair.copied()
        shutil.rmtree(pair.target / "a")
        with pytest.raises(EvaluatorError):
            await trio.to_thread.run_sync(partial(pair.copy().run, "/none", "/work"))
    assert len(os.listdir("/proc/self/fd")) == before


NAMES = st.sampled_from(["a", "b", "c", "\udcff", "new\nline"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
STEPS = st.one_of(
    st.tuples(st.just("file"), PATHS, st.binary(max_size=20)),
    st.tuples(st.just("folder"), PATHS, st.integers(0, 0o777)),
    st.tuples(st.just("link"), PATHS, st.sampled_from(["a", "../..", "/nowhere/at all", "."])),
    st.tuples(st.just("second"), PATHS, PATHS),
    st.tuples(st.just("hole"), PATHS, st.integers(0, 100_000)),
)


def grown(folder: Path, steps: list[tuple[str, str, object]]) -> None:
    """A tree of any kind; steps that cannot be done are not."""
    for kind, name, detail in steps:
        place = folder.resolve() / name
        if any(above.is_symlink() for above in (place, *place.parents)):
            continue  # never through a link: they lead anywhere
        with suppress(OSError):
            if kind == "file":
                place.write_bytes(detail)  # type: ignore[arg-type]
            elif kind == "folder":
                place.mkdir(mode=detail, parents=True)  # type: ignore[arg-type]
            elif kind == "link":
                place.symlink_to(detail)  # type: ignore[arg-type]
            elif kind == "second":
                os.link(folder / str(detail), place, follow_symlinks=False)
            else:
                with place.open("ab") as file:
                    file.truncate(detail)  # type: ignore[arg-type]


@settings_of_hypothesis(deadline=None, max_examples=60)
@given(left=st.lists(STEPS, max_size=12), right=st.lists(STEPS, max_size=12))
def test_copy_equals_source(
    left: list[tuple[str, str, object]], right: list[tuple[str, str, object]]
) -> None:
    """Whatever was there a copy is the source."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        roots = []
        for name, steps in (("source", left), ("target", right)):
            (Path(folder) / name / "work").mkdir(parents=True)
            grown(Path(folder) / name / "work", steps)
            roots.append(os.open(Path(folder) / name, os.O_PATH | os.O_DIRECTORY))
            opened.callback(os.close, roots[-1])
        pair = Pair(Path(folder) / "source" / "work", Path(folder) / "target" / "work", *roots)
        trio.run(pair.copied)
        assert listed(pair.target) == listed(pair.source)
        assert trio.run(pair.copied).copied == trio.run(pair.copied).copied, "again it is the same"
        assert listed(pair.target) == listed(pair.source)


# ── from container to container ───────────────────────────────────────────────

LEFT = """
head -c 40000000 /dev/urandom > large; echo x > '-odd name'; mkdir -p a/b; ln -s /etc a/link; chmod 700 a; chmod 666 large
touch a/b/.hidden "$(printf 'new\\nline')" "$(printf 'bad\\377name')"; ln a/b/.hidden a/second; truncate -s 200M hole; mkfifo pipe
printf '#!/bin/sh\\nexit 3' > /tmp/tar; chmod +x /tmp/tar
"""
LIST = "find . ! -type p -printf '%p %y %m %l %U %G %s %n %T@\\n' | sort; cat large | md5sum"


@pytest.mark.podman
async def test_large_workspace_copies_between_containers(runtimes: NodeRuntimes) -> None:
    async with (
        runtimes.open(evolve(SMALL, disk_mb=1024), session_id="source", lifetime_s=LIFETIME_S) as source,
        runtimes.open(evolve(SMALL, disk_mb=1024), session_id="clean", lifetime_s=LIFETIME_S) as clean,
    ):
        assert (await source.run(["sh", "-c", LEFT])).exit_code == 0
        await source.put({"/work/owned/by/root": b"x"}, user="root", mode=0o600)
        await source.seal(SMALL)
        await clean.put({"/work/stale/file": b"from the image", "/work/.stale": b""})
        await source.copy_workdir(clean)
        found_stat = [
            (await runtime.run(["sh", "-c", LIST], user="root")).stdout for runtime in (source, clean)
        ]
        assert found_stat[0] == found_stat[1]
        assert b"./-odd name f 644" in found_stat[0]
        assert b"./owned/by/root f 600  0 0" in found_stat[0]
        assert (await clean.run(["sh", "-c", "ls -A /tmp; ls | grep -c pipe"])).stdout == b"0\n"
        assert (
            await clean.run(["sh", "-c", "echo more >> a/b/.hidden && cat a/second"])
        ).stdout == b"more\n", "it is the agent's, as it was"


@pytest.mark.podman
async def test_image_files_are_not_copied(runtimes: NodeRuntimes) -> None:
    """A workdir that is the image's own, with files of Podman's mounted in it: one is changed, one removed,
    one new, one as good as new.
    """
    spec = RuntimeSpec(memory_mb=256, pids=64, user="root", workdir="/etc")
    async with (
        runtimes.open(spec, session_id="source", lifetime_s=LIFETIME_S) as source,
        runtimes.open(spec, session_id="clean", lifetime_s=LIFETIME_S) as clean,
    ):
        await source.run(
            ["sh", "-c", "echo x >> bash.bashrc; rm debian_version; echo new > new; touch passwd"]
        )
        made = Copy(source=source._files, target=clean._files, limit=MB)
        await trio.to_thread.run_sync(made.run, "/etc", "/etc")
        assert made.looked > 100
        assert 3 <= made.copied <= 6, "Podman makes a file or two in each container"
        found_stat = [
            (
                await runtime.run(
                    ["sh", "-c", "find . -xdev -printf '%p %y %m %l %U %G %s\\n' | sort; cat bash.bashrc"]
                )
            ).stdout
            for runtime in (source, clean)
        ]
        assert found_stat[0] == found_stat[1]
        assert b"./new f" in found_stat[1]
        assert b"debian_version" not in found_stat[1]


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(f"/var/tmp/polarnode-copying-{secrets.token_hex(4)}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "precious").write_text("the machine's")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.podman
@pytest.mark.parametrize(
    ("target", "script"),
    [
        ("/work/a/b/data", "mv a elsewhere; echo x > a"),
        ("/work/data", "echo x > new"),
        ("/work", "echo x > new"),
    ],
)
async def test_volume_in_workspace_is_untouched(podman: None, shared: Path, target: str, script: str) -> None:
    """Not even where the agent moved the folders above it: the clean runtime has it mounted too, and what is
    surplus there is removed.
    """
    spec = evolve(SMALL, volumes=(VolumeSpec(source=str(shared), target=target, write=True),))
    async with (
        open_runtimes(evolve(settings(), volumes=(str(shared),))) as opened,
        opened.open(spec, session_id="source", lifetime_s=LIFETIME_S) as source,
        opened.open(spec, session_id="clean", lifetime_s=LIFETIME_S) as clean,
    ):
        moved = await source.run(["sh", "-c", script], user="agent")
        # a file where the volume stands: it cannot be as it was left, and says so
        with suppress(EvaluatorError):
            await source.copy_workdir(clean)
        assert (shared / "precious").read_text() == "the machine's", moved
        assert (await clean.run(["cat", f"{target}/precious"])).stdout == b"the machine's"
