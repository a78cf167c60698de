"""Locks of files: one holder, given back with its process, and seen by others."""

import os
import signal
from pathlib import Path

from polarnode.support.locks import is_locked, take_lock


def test_lock_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert not is_locked(path), "there is no file"
    file = take_lock(path)
    assert file is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_locked(path)
    assert take_lock(path, wait_s=0.1) is None
    file.close()
    assert not is_locked(path)


def test_lock_freed_by_killed_process(tmp_path: Path) -> None:
    path, (ready, write) = tmp_path / "a.lock", os.pipe()
    pid = os.fork()
    if not pid:
        held = take_lock(path)
        os.write(write, b"x" if held is not None else b"-")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        assert is_locked(path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(write)
    again = take_lock(path, wait_s=5.0)
    assert again is not None
    again.close()
