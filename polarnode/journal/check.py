"""Verify a journal: SQLite's own check, checksums, decoding, references, and the order of events.

It reads only, and a node may run on the journal meanwhile: each statement sees one commit, references are
checked within one statement, and what retention prunes between two statements is no fault. Journals of
earlier versions are read as they are: views give them the columns that came later.
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
from polarnode.journal.damage import Damage, Damages, JournalConnection, note, reading_pages
from polarnode.journal.schema import BUSY_MS, FLEET, TABLES, VERSION
from polarnode.journal.values import KEYS_ALONE, EventKind, Filters

# Not `copies`, `commits` and `held` of older fleets: no node reads them, so nothing in them is a fault.
BODIES: Final = ("tasks", "sessions", "turns", "trajectories", "events", "weights", "evaluations", "results")
FAULTS_OF_SQLITE: Final = 100  # that its check lists; a file with more is not repaired by reading them


@frozen(kw_only=True)
class TableCheck:
    """One table: how many rows it has, how many of them without a checksum, how many faults they have."""

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
class _Faults(Damages):
    """Every fault, once each; nothing is logged."""

    def note(self, damage: Damage) -> None:
        self._known.setdefault((damage.table, damage.row + damage.reason), damage)


def check_journal(path: Path) -> CheckReport:
    """Read all of a journal. Raises JournalError when there is none, or it cannot be opened."""
    if not path.is_file():
        raise JournalError(f"{path} does not exist: name the state folder of a node")
    faults = _Faults()
    with boundary(JournalError, f"{path} cannot be read as a journal"):
        db, version = open_to_read(path, faults)
        try:
            for step in STEPS:
                _tried(db, step)
            return CheckReport(
                path=str(path), version=version, tables=_tables(db, faults), faults=faults.rows()
            )
        finally:
            db.close()


def open_to_read(path: Path, faults: Damages) -> tuple[sqlite3.Connection, int]:
    """A journal of any version to read, with today's tables and columns, and its version. Its node may run
    meanwhile.
    """
    db = _opened(path, faults)
    try:
        version = _version(db, path)
        _add_later_columns(db)
    except BaseException:
        db.close()
        raise
    return db, version


def _opened(path: Path, faults: Damages) -> sqlite3.Connection:
    # a read-only connection finds what a killed node left in the log beside the file
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, factory=JournalConnection)
    db.damages = faults
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    return db


def _version(db: sqlite3.Connection, path: Path) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= VERSION:
        raise JournalError(
            f"{path} has version {version} and this polarnode reads 1 to {VERSION}: it is no journal, or one"
            " of a later polarnode"
        )
    return int(version)


def _add_later_columns(db: sqlite3.Connection) -> None:
    """Cover tables of an earlier version with views that have today's columns. A view in `temp` goes before
    the table of its name.
    """
    today = sqlite3.connect(":memory:")
    today.executescript(f"{TABLES};{FLEET}")
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


def _tried(db: sqlite3.Connection, step: Callable[[sqlite3.Connection], None]) -> None:
    """A step that meets a damaged page ends there; the others go on."""
    try:
        with reading_pages():
            step(db)
    except Unreadable as error:
        note(db, Damage(table="file", row=step.__name__.strip("_"), reason=str(error)))


def _tables(db: sqlite3.Connection, faults: Damages) -> dict[str, TableCheck]:
    found: dict[str, TableCheck] = {}
    for table in BODIES:
        column = "identity_checksum" if table == "sessions" else "checksum"
        rows = unverified = 0
        try:
            with reading_pages():
                query = f"SELECT count(*), count(*) - count({column}) FROM {table}"
                rows, unverified = db.execute(query).fetchone()
        except Unreadable as error:
            note(db, Damage(table=table, row="all", reason=str(error)))
        count = sum(each.table == table for each in faults.rows())
        found[table] = TableCheck(rows=rows, unverified=unverified, faults=count)
    return found


# ── steps ────────────────────────────────────────────────────────────


def _structure(db: sqlite3.Connection) -> None:
    """SQLite's own check of pages, trees and indices."""
    for (sentence,) in db.execute(f"PRAGMA integrity_check ({FAULTS_OF_SQLITE})").fetchall():
        if sentence != "ok":
            note(db, Damage(table="file", row="structure", reason=str(sentence)))


def _tasks(db: sqlite3.Connection) -> None:
    for (task_id,) in db.execute("SELECT task_id FROM tasks ORDER BY number").fetchall():
        queries.task(db, task_id)


def _sessions(db: sqlite3.Connection) -> None:
    """Sessions with their turns and trajectories."""
    query = "SELECT session_id FROM sessions UNION SELECT session_id FROM turns"
    for (session_id,) in db.execute(query).fetchall():
        _check_turns(db, session_id, queries.whole_session(db, session_id))


def _check_turns(db: sqlite3.Connection, session_id: str, turns: tuple[Turn, ...]) -> None:
    """The numbers of a session's turns have no holes, and each turn extends an earlier one."""
    query = "SELECT count(*), coalesce(max(turn), -1) FROM turns WHERE session_id = ?"
    count, last = db.execute(query, (session_id,)).fetchone()
    whose = {"table": "turns", "session_id": session_id}
    if count != last + 1:
        reason = f"{last + 1 - count} of the turns before it are missing"
        note(db, Damage(**whose, row=f"{session_id}/{last}", reason=reason))
    for turn in turns:
        if turn.parent is not None and turn.parent >= turn.index:
            reason = f"it extends turn {turn.parent}, which is not before it"
            note(db, Damage(**whose, row=f"{session_id}/{turn.index}", reason=reason))


def _events(db: sqlite3.Connection) -> None:
    """Each event, and that no number between the oldest and the last is missing."""
    every = Filters(kinds=get_args(EventKind))
    seen = 0
    while True:
        page = queries.events(db, seen, 1000, every, KEYS_ALONE, queries.Recent())
        seen = max(seen, page.first_seq - 1)  # pruned
        for event in page.events:
            if event.seq > seen + 1:
                reason = f"the events {seen + 1} to {event.seq - 1} before it are missing"
                note(db, Damage(table="events", row=str(event.seq), reason=reason))
            seen = event.seq
        if page.seen >= page.last_seq:
            return
        seen = page.seen


def _weights(db: sqlite3.Connection) -> None:
    entries.weights(db, None)


def _evaluations(db: sqlite3.Connection) -> None:
    for (evaluation_id,) in db.execute("SELECT evaluation_id FROM evaluations").fetchall():
        entries.evaluation(db, evaluation_id)


def _results(db: sqlite3.Connection) -> None:
    """Results that a shared log may lack."""
    held.read_results(db)


# by table and its key, what must be there for each row, as a query that gives the keys of the rows without it
REFERENCES: Final[Mapping[str, tuple[str, str]]] = {
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
    for reason, (table, query) in REFERENCES.items():
        for (row,) in db.execute(query).fetchall():
            note(db, Damage(table=table, row=str(row), reason=reason))


STEPS: Final = (_structure, _tasks, _sessions, _events, _weights, _evaluations, _results, _references)
