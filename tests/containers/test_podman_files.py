"""A container's files from outside, on a folder that stands for its root: no link leads out of it, nor
anywhere.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarnode.containers.files import Account, ContainerFiles
from polarnode.core.errors import ContentFault, RuntimeFault

ME = Account(uid=os.geteuid(), gid=os.getegid(), home="/")
PASSWD = (
    "root:x:0:0:root:/root:/bin/bash\nbroken line\nagent:x:1000:1001::/home/agent:/bin/sh\nbare:x:7:7:::\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "passwd").write_text(PASSWD)
    (tmp_path / "outside").write_text("outside")
    return folder


@pytest.fixture
def files(root: Path) -> Iterator[ContainerFiles]:
    opened = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield ContainerFiles(root=opened, shift=0)
    os.close(opened)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_file_written_with_folders_and_mode(files: ContainerFiles, root: Path) -> None:
    files.write("/work/a/b.sh", b"one", ME, 0o750)
    assert (root / "work/a/b.sh").read_bytes() == b"one"
    assert stat.S_IMODE((root / "work/a/b.sh").stat().st_mode) == 0o750
    assert stat.S_IMODE((root / "work/a").stat().st_mode) == 0o755
    files.write("/work/a/b.sh", b"2", ME, 0o600)
    assert (root / "work/a/b.sh").read_bytes() == b"2"
    assert stat.S_IMODE((root / "work/a/b.sh").stat().st_mode) == 0o600


@pytest.mark.parametrize(("mode", "after"), [(0o700, 0o700), (0o2770, 0o2770), (0, 0o700), (0o555, 0o755)])
def test_folder_is_opened_for_owner(files: ContainerFiles, root: Path, mode: int, after: int) -> None:
    (root / "work").mkdir()
    (root / "work").chmod(mode)
    files.open_to_owner("/work", ME)
    assert stat.S_IMODE((root / "work").stat().st_mode) == after


def test_folder_replaces_a_file(files: ContainerFiles, root: Path) -> None:
    (root / "work").write_text("file")
    files.open_to_owner("/work", ME)
    files.open_to_owner("/deep/in/there", ME)
    assert (root / "work").is_dir()
    assert (root / "deep/in/there").is_dir()
    (root / "link").symlink_to("/etc")
    with pytest.raises(ContentFault, match="a link is in the way"):
        files.open_to_owner("/link", ME)
    assert (root / "link").is_symlink()


MADE = 1_600_000_000


def test_placed_files_have_given_time(files: ContainerFiles, root: Path) -> None:
    (root / "work").mkdir()
    os.utime(root / "work", (MADE - 7, MADE - 7))
    files.prepare_root(MADE)
    files.make_folder("/home/agent", ME, at_s=MADE)
    for path in ("/work/a", "/work/new/b", "/work/a"):
        files.write(path, b"x", ME, 0o644, at_s=MADE + 5)
    times = {path: (root / path).stat().st_mtime for path in ("work", "work/a", "work/new", "work/new/b")}
    assert times == {
        "work": MADE - 7,
        "work/a": MADE + 5,
        "work/new": MADE + 5,
        "work/new/b": MADE + 5,
    }
    assert [(root / path).stat().st_mtime for path in ("", "home", "home/agent")] == [MADE] * 3
    files.write("/work/a", b"x", ME, 0o644)
    assert min((root / path).stat().st_mtime for path in ("work", "work/a")) > MADE + 1_000


@pytest.mark.parametrize("linked", [False, True])
def test_host_name_is_removed_alone(files: ContainerFiles, root: Path, linked: bool) -> None:
    place = root / "etc" / ("real" if linked else "hosts")
    if linked:
        (root / "etc/hosts").symlink_to("/etc/real")
    files.forget_host("polarnode-1f")  # there is none yet
    place.write_bytes(
        b"127.0.0.1\tlocalhost\n::1 agent polarnode-1f\n1.1.1.1 polarnode-1f0 polarnode-1f x\xff\n"
    )
    files.forget_host("polarnode-1f")
    assert place.read_bytes() == b"127.0.0.1\tlocalhost\n::1 agent\n1.1.1.1 polarnode-1f0 x\xff\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_ids_are_shifted_by_namespace(root: Path) -> None:
    opened = os.open(root, os.O_PATH | os.O_DIRECTORY)
    ContainerFiles(root=opened, shift=100_000).write(
        "/new/file", b"", Account(uid=1000, gid=1001, home="/"), 0o644
    )
    os.close(opened)
    for path in (root / "new", root / "new/file"):
        assert (path.stat().st_uid, path.stat().st_gid) == (101_000, 101_001)


def test_hard_link_is_not_written_through(files: ContainerFiles, root: Path) -> None:
    (root / "work").mkdir()
    os.link(root / "etc/passwd", root / "work/mine")
    files.write("/work/mine", b"new", ME, 0o644)
    assert (root / "etc/passwd").read_text() == PASSWD
    assert (root / "work/mine").read_bytes() == b"new"


LINKS = ["../outside", "/etc/passwd", "loop", "/proc/self/cwd"]


@pytest.mark.parametrize("target", LINKS)
def test_links_are_not_followed(files: ContainerFiles, root: Path, target: str) -> None:
    (root / "loop").symlink_to(target)
    assert files.read("/loop", 100) is None
    assert files.read("/loop/passwd", 100) is None
    with pytest.raises(RuntimeFault, match="no plain file"):
        files.write("/loop", b"x", ME, 0o644)
    with pytest.raises(RuntimeFault, match="link is in the way"):
        files.write("/loop/x", b"x", ME, 0o644)
    with pytest.raises(RuntimeFault, match="link is in the way"):
        files.make_folder("/loop/deeper", ME)
    assert (root.parent / "outside").read_text() == "outside"
    assert (root / "etc/passwd").read_text() == PASSWD


@pytest.mark.parametrize("path", ["", "/", "work", "./work", "/work/../../outside", "/.."])
def test_odd_paths_are_refused(files: ContainerFiles, path: str) -> None:
    with pytest.raises(RuntimeFault, match="no path in a container"):
        files.write(path, b"x", ME, 0o644)


def test_only_plain_files_are_read(files: ContainerFiles, root: Path) -> None:
    """Reading is bounded, and of plain files alone."""
    (root / "large").write_bytes(b"x" * 5000)
    os.mkfifo(root / "pipe")
    assert files.read("/large", 10) == b"x" * 10
    assert files.read("/large", 9000) == b"x" * 5000
    assert files.read("/large", 0) == b""
    for path in ("/pipe", "/etc", "/none", "/large/below", "/etc/passwd/", "/../outside"):
        assert (
            files.read(path, 10) in (None, b"root:x:0:0")
            if path == "/etc/passwd/"
            else files.read(path, 10) is None
        ), path
    with pytest.raises(RuntimeFault, match="no plain file"):
        files.write("/pipe", b"x", ME, 0o644)


def test_no_descriptor_stays_open(files: ContainerFiles, root: Path) -> None:
    (root / "link").symlink_to("/etc")
    before = open_descriptors()
    for _ in range(3):
        files.write("/a/b/c", b"x", ME, 0o644)
        for path in ("/a/b/c", "/a", "/link", "/none"):
            files.read(path, 5)
        for path in ("/link/x", "/a/b/c/d", "/a"):
            with pytest.raises(RuntimeFault):
                files.write(path, b"", ME, 0o644)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("agent", Account(uid=1000, gid=1001, home="/home/agent")),
        ("1000", Account(uid=1000, gid=1001, home="/home/agent")),
        ("root", Account(uid=0, gid=0, home="/root")),
        ("1000:5", Account(uid=1000, gid=5, home="/home/agent")),
        ("4242", Account(uid=4242, gid=0, home="/")),
        ("4242:43", Account(uid=4242, gid=43, home="/")),
        ("bare", Account(uid=7, gid=7, home="/")),
    ],
)
def test_users_by_name_and_number(files: ContainerFiles, user: str, expected: Account) -> None:
    assert files.account(user) == expected


def test_unknown_user_lists_known_users(files: ContainerFiles) -> None:
    with pytest.raises(RuntimeFault, match="no user ghost: name one of root, agent, bare"):
        files.account("ghost")


def test_irregular_account_files_are_refused(files: ContainerFiles, root: Path) -> None:
    assert files.account_obstacle() is None, "an image may have no groups"
    group = root / "etc/group"
    group.write_text("agent:x:1001:\n")
    assert files.account_obstacle() is None
    group.unlink()
    group.symlink_to("/etc/passwd")
    assert files.account_obstacle() is None, "as some images have it"
    os.mkfifo(root / "pipe")
    group.unlink()
    group.symlink_to("/pipe")
    assert "/etc/group of the container is no plain file" in str(files.account_obstacle())
    group.unlink()
    os.truncate(root / "etc/passwd", 1 << 40)
    assert "/etc/passwd of the container is no plain file of at most 1 MiB" in str(files.account_obstacle())
