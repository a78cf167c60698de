"""A disk that takes nothing is called what it is, with what mends it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from polarnode.core.errors import DiskFull
from polarnode.journal.disk import probe_disk
from polarnode.journal.journal import open_journal
from polarnode.rollouts.admission import check_capture, check_task, require_writable

FAULTS = [
    (errno.EROFS, "is read-only"),
    (errno.EDQUOT, "has used up its quota"),
    (errno.ENOSPC, "is full"),
    (errno.EIO, "fails"),
    (errno.ENOENT, "is gone"),
    (errno.ELOOP, "refuses (Too many levels"),
]


@pytest.mark.parametrize(("number", "what"), FAULTS)
def test_refusal_names_disk_fault(
    number: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise OSError(number, os.strerror(number))

    assert probe_disk(tmp_path) is None
    monkeypatch.setattr(os, "fsync", refused)
    assert what in str(probe_disk(tmp_path))
    assert not list(tmp_path.iterdir()), "what was tried is removed"


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    assert "is gone" in str(probe_disk(tmp_path / "not mounted"))


async def test_submit_says_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence of a refused task, capture and evaluation is the disk's own."""
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 0.0) as journal:

        def mounted(_: Any) -> Any:
            class Found:
                f_flag = os.ST_RDONLY

            return Found()

        monkeypatch.setattr(os, "statvfs", mounted)
        state = journal.health.statistics()
        monkeypatch.undo()
    for check in (
        lambda: check_task(state, pending=0, more=1, limit=9),
        lambda: check_capture(state, count=0, limit=9),
        lambda: require_writable(state, "send it again"),
    ):
        with pytest.raises(DiskFull, match=r"disk is read-only \(.*\): make it writable again.* again"):
            check()
