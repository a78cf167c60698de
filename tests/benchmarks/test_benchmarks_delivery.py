"""The benchmark of delivery runs, and its readers get all there is. Its figures are for people to judge."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script() -> Iterator[Any]:
    """The script as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        import delivery

        yield delivery
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("delivery", "journal"):
            sys.modules.pop(name, None)


async def test_every_reader_reads_all(script: Any, tmp_path: Path) -> None:
    async with script.serving(tmp_path, 3) as (journal, address):
        assert journal.commits.progress.last_seq == 3
        found = [await script.read_all(journal, address, 2, arrays) for arrays in ("json", "base64")]
        assert found[0].size > found[1].size > 3 * 4 * 2 * script.TURNS * script.SAMPLED
        with script.stopped(address, 1, "json"):
            assert (await script.read_all(journal, address, 1, "json", kept=0)).size == found[0].size


async def test_run_prints_line_per_kind(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("READERS", (1,)), ("ROUNDS", 1), ("STOPPED", 1)):
        monkeypatch.setattr(script, name, value)
    await script.measure(tmp_path, 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines[2:]] == ["| json | 1", "| base64 |", "4 readers:"]
