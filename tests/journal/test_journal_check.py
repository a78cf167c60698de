"""`polarnode check` names every damaged row, and nothing in a journal without damage, of any version."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from journal_samples import make_identity, make_turn, write_sessions
from journal_writes import serve_weights

from polarnode.cli.main import main
from polarnode.core.errors import JournalError
from polarnode.journal.check import check_journal
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.schema import SCHEMA_VERSION

DATA = Path(__file__).parents[1] / "data" / "journals"


async def fill(journal: Journal) -> None:
    write_sessions(journal)
    journal.writer.record_session(make_identity("open"))
    journal.writer.record_turn(make_turn("open"))
    serve_weights(journal, "v1")
    await journal.writer.flush()
    await journal.consumers.acknowledge("trainer", 2)


def changed(path: Path, sql: str) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(sql).rowcount > 0
    db.close()


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_valid_journal_has_no_faults(tmp_path: Path, version: int) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(gzip.decompress((DATA / f"v{version}" / "journal.sqlite.gz").read_bytes()))
    before = path.read_bytes()
    report = check_journal(path)
    assert report.faults == ()
    assert report.version == version
    turns = report.tables["turns"]
    assert (turns.rows > 0, turns.unverified) == (True, 0 if version >= 5 else turns.rows)
    assert path.read_bytes() == before


async def test_check_reads_while_node_writes(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
        await fill(journal)
        assert check_journal(tmp_path / "journal.sqlite").faults == ()


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("UPDATE turns SET body = x'00' WHERE session_id = 'a' AND turn = 1", ("turns", "a/1")),
        ("UPDATE turns SET sampled = 9 WHERE session_id = 'b' AND turn = 0", ("turns", "b/0")),
        ("UPDATE trajectories SET body = substr(body, 1, 30) WHERE session_id = 'b'", ("trajectories", "b")),
        ("UPDATE tasks SET spec = x'7b' WHERE task_id = 'a'", ("tasks", "a")),
        ("UPDATE sessions SET reward = 3 WHERE session_id = 'a'", ("sessions", "a")),
        ("UPDATE sessions SET identity = x'00' WHERE session_id = 'open'", ("sessions", "open")),
        ("UPDATE events SET reward = 3 WHERE seq = 1", ("events", "1")),
        ("UPDATE events SET body = x'00' WHERE seq = 2", ("events", "2")),
        ("UPDATE weights SET body = x'00'", ("weights", "1")),
        ("DELETE FROM events WHERE seq = 2", ("events", "3")),
        ("DELETE FROM turns WHERE session_id = 'a' AND turn = 0", ("turns", "a/1")),
        ("DELETE FROM sessions WHERE session_id = 'open'", ("turns", "open")),
        ("DELETE FROM trajectories WHERE session_id = 'a'", ("events", "1")),
        ("DELETE FROM tasks WHERE task_id = 'a'", ("events", "2")),
        ("UPDATE positions SET seq = 99", ("positions", "trainer")),
    ],
)
async def test_each_fault_is_named(tmp_path: Path, sql: str, named: tuple[str, str]) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1000.0) as journal:
        await fill(journal)
    changed(path, sql)
    faults = check_journal(path).faults
    assert named in [(each.table, each.row) for each in faults]
    assert all(each.reason for each in faults)
    if sql.startswith("UPDATE"):
        assert len({(each.table, each.row) for each in faults}) == 1, faults


async def test_damaged_page_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1000.0) as journal:
        await fill(journal)
    with sqlite3.connect(path) as db:
        (size,) = db.execute("PRAGMA page_size").fetchone()
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trajectories'").fetchone()
    db.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(bytes([99]) * 64)
    assert "file" in [each.table for each in check_journal(path).faults]


async def test_command_prints_faults_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1000.0) as journal:
        await fill(journal)
    fine = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert (fine.exit_code, fine.stdout.splitlines()[-1]) == (
        0,
        f"{path} (version {SCHEMA_VERSION}): no faults",
    )
    changed(path, "UPDATE turns SET body = x'00' WHERE session_id = 'a' AND turn = 1")
    faulty = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert faulty.exit_code == 1
    assert "· row a/1 of table turns of session a: its checksum does not match" in faulty.stdout
    as_json = CliRunner().invoke(main, ["check", "--json", str(path)])
    body = json.loads(as_json.stdout)
    assert (as_json.exit_code, body["ok"], body["faults"][0]["row"]) == (1, False, "a/1")
    assert body["tables"]["turns"] == {"rows": 5, "unverified": 0, "faults": 1}


def test_invalid_journal_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist"):
        check_journal(tmp_path / "journal.sqlite")
    (tmp_path / "journal.sqlite").write_bytes(b"no database, but long enough to look like one" * 100)
    with pytest.raises(JournalError, match="cannot be read as a journal"):
        check_journal(tmp_path / "journal.sqlite")
