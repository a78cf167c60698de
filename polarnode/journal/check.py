"""Verify a journal: SQLite's own check, checksums, decoding, references, and the order of events.

The check only reads, and a node may run on the journal meanwhile: each statement sees one commit, each
reference is checked within one statement, and events that retention prunes between two statements are not
faults. Journals of earlier versions are not migrated: views add the columns that came later.
"""

import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, get_args
from urllib.parse import quote

from attrs import define, frozen

from polarnode.core.errors import JournalError, Unreadable, boundary
from polarnode.core.trajectory import Turn
from polarnode.journal import entries, held, queries
from polarnode.journal.damage import Damage, DamageRecorder, JournalConnection, note_damage, page_boundary
from polarnode.journal.schema import CREATE_TABLES, LOCK_TIMEOUT_MS, OLD_FLEET_TABLES, SCHEMA_VERSION
from polarnode.journal.values import KEYS_ONLY, EventFilters, EventKind

# The tables `copies`, `commits` and `held` of older fleets are left out: no node reads them, so nothing in
# them is a fault.
CHECKED_TABLES: Final = (
    "tasks",
    "sessions",
    "turns",
    "trajectories",
    "events",
    "weights",
    "evaluations",
    "results",
)
# SQLite's check lists at most this many faults: nobody repairs a file by reading a longer list.
MAX_SQLITE_FAULTS: Final = 100


@frozen(kw_only=True)
class TableCheck:
    """One table: the number of its rows, of those without a checksum, and of the faults in them."""

    rows: int
    unverified: int
    faults: int


@frozen(kw_only=True)
class CheckReport:
    """What `check_journal` found. `version` is that of the journal's tables."""

    path: str
    version: int
    tables: Mapping[str, TableCheck]
    faults: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


@define(eq=False)
class _FaultCollector(DamageRecorder):
    """Collects every fault once, without a limit, and logs nothing."""

    def add_damage(self, damage: Damage) -> None:
        self._known.setdefault((damage.table, damage.row + damage.reason), damage)


def check_journal(path: Path) -> CheckReport:
    """Read all of a journal. Raises JournalError when the file does not exist or cannot be opened."""
    if not path.is_file():
        raise JournalError(f"{path} does not exist: name the state folder of a node")
    faults = _FaultCollector()
    with boundary(JournalError, f"{path} cannot be read as a journal"):
        db, version = open_to_read(path, faults)
        try:
            for step in CHECK_STEPS:
                _run_step(db, step)
            return CheckReport(
                path=str(path),
                version=version,
                tables=_check_tables(db, faults),
                faults=faults.damaged_rows(),
            )
        finally:
            db.close()


def open_to_read(path: Path, faults: DamageRecorder) -> tuple[sqlite3.Connection, int]:
    """Open a journal of any version for reading. Returns the connection, which shows today's tables and
    columns, and the journal's version. The journal's node may run meanwhile.
    """
    db = _open_read_only(path, faults)
    try:
        version = _read_version(db, path)
        _add_later_columns(db)
    except BaseException:
        db.close()
        raise
    return db, version


def _open_read_only(path: Path, faults: DamageRecorder) -> sqlite3.Connection:
    # A read-only connection also reads the write-ahead log that a killed node left beside the file.
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, factory=JournalConnection)
    db.damages = faults
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    db.execute(f"PRAGMA busy_timeout = {LOCK_TIMEOUT_MS}")
    return db


def _read_version(db: sqlite3.Connection, path: Path) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= SCHEMA_VERSION:
        raise JournalError(
            f"{path} has version {version} and this polarnode reads 1 to {SCHEMA_VERSION}: it is no"
            " journal, or one"
            " of a later polarnode"
        )
    return int(version)


def _add_later_columns(db: sqlite3.Connection) -> None:
    """Cover tables of an earlier version with views that have today's columns. SQLite finds a view in `temp`
    before the table of the same name.
    """
    today = sqlite3.connect(":memory:")
    today.executescript(f"{CREATE_TABLES};{OLD_FLEET_TABLES}")
    for (table,) in today.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        if table.startswith("sqlite_"):
            continue
        wanted = [(row[1], row[4] or "NULL") for row in today.execute(f"PRAGMA table_info ({table})")]
        present = {row[1] for row in db.execute(f"PRAGMA main.table_info ({table})")}
        missing = [f"{default} AS {name}" for name, default in wanted if name not in present]
        if not present:
            db.execute(f"CREATE TEMP TABLE {table} ({', '.join(name for name, _ in wanted)})")
        elif missing:
            db.execute(f"CREATE TEMP VIEW {table} AS SELECT *, {', '.join(missing)} FROM main.{table}")
    today.close()


def _run_step(db: sqlite3.Connection, step: Callable[[sqlite3.Connection], None]) -> None:
    """Run one step. A damaged page ends this step, and the other steps still run."""
    try:
        with page_boundary():
            step(db)
    except Unreadable as error:
        note_damage(db, Damage(table="file", row=step.__name__.strip("_"), reason=str(error)))


def _check_tables(db: sqlite3.Connection, faults: DamageRecorder) -> dict[str, TableCheck]:
    found: dict[str, TableCheck] = {}
    for table in CHECKED_TABLES:
        column = "identity_checksum" if table == "sessions" else "checksum"
        rows = unverified = 0
        try:
            with page_boundary():
                query = f"SELECT count(*), count(*) - count({column}) FROM {table}"
                rows, unverified = db.execute(query).fetchone()
        except Unreadable as error:
            note_damage(db, Damage(table=table, row="all", reason=str(error)))
        count = sum(each.table == table for each in faults.damaged_rows())
        found[table] = TableCheck(rows=rows, unverified=unverified, faults=count)
    return found


# ── steps ────────────────────────────────────────────────────────────


def _structure(db: sqlite3.Connection) -> None:
    """Run SQLite's own check of pages, trees and indices."""
    for (sentence,) in db.execute(f"PRAGMA integrity_check ({MAX_SQLITE_FAULTS})").fetchall():
        if sentence != "ok":
            note_damage(db, Damage(table="file", row="structure", reason=str(sentence)))


def _tasks(db: sqlite3.Connection) -> None:
    for (task_id,) in db.execute("SELECT task_id FROM tasks ORDER BY number").fetchall():
        queries.task(db, task_id)


def _sessions(db: sqlite3.Connection) -> None:
    """Read sessions with their turns and trajectories."""
    query = "SELECT session_id FROM sessions UNION SELECT session_id FROM turns"
    for (session_id,) in db.execute(query).fetchall():
        _check_turns(db, session_id, queries.check_session(db, session_id))


def _check_turns(db: sqlite3.Connection, session_id: str, turns: tuple[Turn, ...]) -> None:
    """Check that a session's turns are numbered without holes, and that each extends an earlier one."""
    query = "SELECT count(*), coalesce(max(turn), -1) FROM turns WHERE session_id = ?"
    count, last = db.execute(query, (session_id,)).fetchone()
    whose = {"table": "turns", "session_id": session_id}
    if count != last + 1:
        reason = f"{last + 1 - count} of the turns before it are missing"
        note_damage(db, Damage(**whose, row=f"{session_id}/{last}", reason=reason))
    for turn in turns:
        if turn.parent is not None and turn.parent >= turn.index:
            reason = f"it extends turn {turn.parent}, which is not before it"
            note_damage(db, Damage(**whose, row=f"{session_id}/{turn.index}", reason=reason))


def _events(db: sqlite3.Connection) -> None:
    """Read each event, and check that no number between the oldest and the last is missing."""
    every = EventFilters(kinds=get_args(EventKind))
    seen = 0
    while True:
        page = queries.events(db, seen, 1000, every, KEYS_ONLY, queries.ByteCache())
        seen = max(seen, page.first_seq - 1)  # pruned
        for event in page.events:
            if event.seq > seen + 1:
                reason = f"the events {seen + 1} to {event.seq - 1} before it are missing"
                note_damage(db, Damage(table="events", row=str(event.seq), reason=reason))
            seen = event.seq
        if page.seen >= page.last_seq:
            return
        seen = page.seen


def _weights(db: sqlite3.Connection) -> None:
    entries.weight_rows(db, None)


def _evaluations(db: sqlite3.Connection) -> None:
    for (evaluation_id,) in db.execute("SELECT evaluation_id FROM evaluations").fetchall():
        entries.evaluation(db, evaluation_id)


def _results(db: sqlite3.Connection) -> None:
    """Read the results that a shared log may lack."""
    held.read_results(db)


# By fault: the table, and a query that gives the keys of its rows that have this fault.
REFERENCE_CHECKS: Final[Mapping[str, tuple[str, str]]] = {
    "its session is missing": (
        "turns",
        "SELECT DISTINCT session_id FROM turns WHERE session_id NOT IN (SELECT session_id FROM sessions)",
    ),
    "the session of the trajectory is missing": (
        "trajectories",
        "SELECT session_id FROM trajectories WHERE session_id NOT IN (SELECT session_id FROM sessions)",
    ),
    "the trajectory of the event is missing": (
        "events",
        """SELECT seq FROM events WHERE kind IN ('trajectory', 'attempt')
        AND session_id NOT IN (SELECT session_id FROM trajectories)""",
    ),
    "the task of the event is missing": (
        "events",
        """SELECT seq FROM events WHERE kind IN ('group', 'task')
        AND task_id NOT IN (SELECT task_id FROM tasks)""",
    ),
    "no session of the task is there": (
        "tasks",
        """SELECT task_id FROM tasks WHERE task_id NOT IN (SELECT task_id FROM sessions)
        AND task_id NOT IN (SELECT task_id FROM copies WHERE role = 'former')""",
    ),
    "the event that a callback waits for is missing": (
        "callbacks",
        "SELECT seq FROM callbacks WHERE seq NOT IN (SELECT seq FROM events)",
    ),
    "the session that took its place is missing": (
        "sessions",
        """SELECT session_id FROM sessions WHERE retried_as NOT IN (SELECT session_id FROM sessions)
        AND task_id NOT IN (SELECT task_id FROM copies WHERE role = 'former')""",
    ),
    "the evaluation of the session is missing": (
        "evaluated",
        """SELECT session_id FROM evaluated
        WHERE evaluation_id NOT IN (SELECT evaluation_id FROM evaluations)""",
    ),
    "the session of the result is missing": (
        "results",
        "SELECT session_id FROM results WHERE session_id NOT IN (SELECT session_id FROM sessions)",
    ),
    "it acknowledges events that were never given": (
        "positions",
        """SELECT consumer FROM positions
        WHERE seq > (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events')""",
    ),
}


def _references(db: sqlite3.Connection) -> None:
    for reason, (table, query) in REFERENCE_CHECKS.items():
        for (row,) in db.execute(query).fetchall():
            note_damage(db, Damage(table=table, row=str(row), reason=reason))


CHECK_STEPS: Final = (_structure, _tasks, _sessions, _events, _weights, _evaluations, _results, _references)
