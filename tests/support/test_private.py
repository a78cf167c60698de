"""What the node keeps is its user's alone, and its log is bounded."""

import logging
import os
import stat
from pathlib import Path

import pytest

from polarnode.support.bounded import (
    LINE_WINDOW_S,
    LINES,
    LineLimit,
    make_private_folder,
    open_node_log,
    open_private,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_new_folder_and_files_are_private(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "state")
    with open(tmp_path / "state" / "journal.sqlite", "w", opener=open_private):
        pass
    assert (mode(tmp_path / "state"), mode(tmp_path / "state" / "journal.sqlite")) == (0o700, 0o600)


def test_older_release_folder_is_tightened(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "sessions").mkdir(parents=True, mode=0o755)
    for name in ("journal.sqlite", "journal.sqlite-wal", "node.log", "engine-0.log"):
        (state / name).touch(mode=0o644)
    make_private_folder(state)
    make_private_folder(state / "sessions")
    assert {mode(each) for each in state.iterdir() if each.is_file()} == {0o600}
    assert (mode(state), mode(state / "sessions")) == (0o700, 0o700)


def test_shared_folder_keeps_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that holds other things keeps its mode."""
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "thesis.tex").touch(mode=0o644)
    (tmp_path / "shared" / "journal.sqlite").touch(mode=0o644)
    make_private_folder(tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o755
    assert mode(tmp_path / "shared" / "thesis.tex") == 0o644
    assert mode(tmp_path / "shared" / "journal.sqlite") == 0o600
    assert "folder of its own" in caplog.text


def test_public_folder_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    make_private_folder(tmp_path / "tmp")
    assert mode(tmp_path / "tmp") == 0o1777


def record(at: float, message: str = "refusing %s", value: object = 1) -> logging.LogRecord:
    found = logging.LogRecord("http", logging.WARNING, __file__, 1, message, (value,), None)
    found.created = at
    return found


def test_repeated_log_lines_are_limited() -> None:
    """Lines of one kind are limited, and those left out are counted."""
    limit = LineLimit()
    passed = [limit.filter(record(1.0, value=number)) for number in range(LINES + 50)]
    assert sum(passed) == LINES
    assert limit.filter(record(1.0, "another kind %s"))
    later = record(1.0 + LINE_WINDOW_S, value=7)
    assert limit.filter(later)
    assert later.getMessage() == "refusing 7 (50 more of these lines were left out)"
    unlimited = record(1.0 + LINE_WINDOW_S)
    unlimited.unlimited = True
    assert all(limit.filter(unlimited) for _ in range(2 * LINES))


def test_log_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarnode.support.bounded.LOG_BYTES", 1000)
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        open_node_log(tmp_path / "state")
        for number in range(200):
            logging.getLogger(f"kind{number}").warning("a line of this log")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
    files = sorted((tmp_path / "state").iterdir())
    assert [each.name for each in files] == ["node.log", *(f"node.log.{number}" for number in range(1, 5))]
    assert all(each.stat().st_size <= 1000 and mode(each) == 0o600 for each in files)
