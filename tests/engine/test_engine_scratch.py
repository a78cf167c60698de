"""What engine hosts leave behind, removed by the node that made it or by the next one."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarnode.core.errors import EngineError
from polarnode.engine.host_resources import MIN_STALE_AGE_S, PREFIX, SHARED_MEMORY, open_scratch, sweep


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pn"))  # short: sockets live in there
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def leave(folder: Path, tag: str, *, age: float) -> Path:
    """A killed node's folder, and a semaphore of its host."""
    path = folder / f"{PREFIX}{tag}"
    path.mkdir()
    (path / "lock").touch()
    (path / "tmpsocket").touch()
    (SHARED_MEMORY / f"sem.{tag}-x1").touch()
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_nothing_remains_after_block(temporary: Path) -> None:
    with open_scratch() as scratch:
        (scratch.path / "file").write_text("x")
        (SHARED_MEMORY / f"sem.{scratch.tag}-abc").touch()
        (SHARED_MEMORY / f"sglang_loads_{scratch.tag}_1.shm").touch()
        assert scratch.path.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []
    assert list(SHARED_MEMORY.glob(f"*{scratch.tag}*")) == []


def test_missing_folder_is_no_error() -> None:
    with open_scratch() as scratch:
        (scratch.path / "lock").unlink()
        scratch.path.rmdir()  # the host's lifeline was quicker


def test_two_hosts_share_nothing() -> None:
    with open_scratch() as one, open_scratch() as other:
        assert one.tag != other.tag
        assert one.tag not in str(other.path)


def test_killed_nodes_folder_is_swept(temporary: Path) -> None:
    path = leave(temporary, "pnstale", age=2 * MIN_STALE_AGE_S)
    assert sweep() == 1
    assert not path.exists()
    assert not (SHARED_MEMORY / "sem.pnstale-x1").exists()


def test_folder_without_lock_is_swept(temporary: Path) -> None:
    path = leave(temporary, "pnhalf", age=0)
    (path / "lock").unlink()
    os.utime(path, (time.time() - 2 * MIN_STALE_AGE_S,) * 2)
    assert sweep() == 1


def test_living_nodes_folder_stays(temporary: Path) -> None:
    path = leave(temporary, "pnlive", age=2 * MIN_STALE_AGE_S)
    with (path / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep() == 0
    assert path.exists()
    assert sweep() == 1


def test_unfinished_folder_is_left_alone(temporary: Path) -> None:
    leave(temporary, "pnyoung", age=0)
    assert sweep() == 0
    (SHARED_MEMORY / "sem.pnyoung-x1").unlink()


def test_folder_too_long_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 60)
    with pytest.raises(EngineError, match="TMPDIR=/tmp/xxx"), open_scratch():
        pass
