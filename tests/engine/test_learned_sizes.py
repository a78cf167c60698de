"""The file of learned sizes: written whole, read bounded, and never what keeps a node from starting."""

from pathlib import Path

import pytest

from polarnode.engine.learned_sizes import MOST_BYTES, read_learned, write_learned
from polarnode.engine.residency import LearnedSizes

LEARNED = LearnedSizes(margin=0.75, ends={"pi": (10_000, 12_000), "codex": (40_000,)})


def test_sizes_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.sizes.json"
    assert read_learned(path) is None
    write_learned(path, LEARNED)
    assert read_learned(path) == LEARNED
    assert path.stat().st_mode & 0o077 == 0, "it is its user's alone"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (b'{"margin": 0.8, "ends": {"pi": ["many"]}}', "ends"),
        (b'{"margin": 0.8, "en', "not JSON"),
        (b" " * (MOST_BYTES + 1), "more than"),
    ],
    ids=["misfit", "torn", "huge"],
)
def test_damaged_file_is_named_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: bytes, reason: str
) -> None:
    path = tmp_path / "engine-0.sizes.json"
    path.write_bytes(written)
    assert read_learned(path) is None
    assert str(path) in caplog.text
    assert reason in caplog.text
    write_learned(path, LEARNED)
    assert read_learned(path) == LEARNED


def test_write_failure_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_learned(tmp_path / "missing" / "engine-0.sizes.json", LEARNED)
    assert "cannot be kept" in caplog.text
