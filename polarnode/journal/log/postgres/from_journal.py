"""Copies the journal of a node alone into an empty log, for `polarnode migrate --from`.

The copy is one transaction, and the journal is only read. Events keep their positions and their keys, and the
log knows the journal's name, so that a trainer's cursor stays valid. A session that ran when the node was
killed is queued again: its turns stay in the journal, because no other node could go on from them.
"""

import fcntl
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from psycopg import sql
from psycopg.types.json import Jsonb

from polarnode.core.codec.json import read_json, structure
from polarnode.core.codec.packing import pack_trajectory, pack_turn
from polarnode.core.errors import ConfigError, JournalError, PolarnodeError, Unreadable, boundary
from polarnode.core.task import CAPTURE_HARNESS, TaskSpec
from polarnode.groups.group import make_member
from polarnode.journal import queries
from polarnode.journal.check import open_to_read
from polarnode.journal.damage import DamageRecorder, decode_boundary, verify_checksum
from polarnode.journal.entries import adapter_of
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.rules import check_names
from polarnode.journal.log.sqlite import journal_names
from polarnode.journal.schema import read_forked_from

COPIED_TABLES: Final = ("tasks", "sessions", "events", "consumers", "weights", "evaluations")
# Whether the log is used already. It must not be, because a log in which something happened has positions of
# its own.
SELECT_LOG_USED: Final = """
SELECT (SELECT position FROM log) > 0 OR EXISTS (SELECT 1 FROM tasks) OR EXISTS (SELECT 1 FROM consumers)
    OR EXISTS (SELECT 1 FROM weights) OR EXISTS (SELECT 1 FROM nodes WHERE state = 'alive') AS used"""
OLD_FLEET_TABLES: Final = ("copies", "commits", "held")  # tables to which only nodes of an old fleet wrote


def copy_journal(db: Database, path: Path) -> str:
    """Copy a journal into an empty log. Returns what was copied, in words. Raises ConfigError."""
    if path.is_dir():
        path = path / "journal.sqlite"
    if not path.is_file():
        raise ConfigError(f"--from {path}: there is no such journal; name journal.sqlite in a state folder")
    damages = DamageRecorder()
    with _hold_journal_lock(path):
        with boundary(ConfigError, f"--from {path} cannot be read"):
            journal, _ = open_to_read(path, damages)
        with closing(journal), db.transaction():
            # A journal of gigabytes takes minutes, and each statement reads the journal before it writes.
            db.execute("SET LOCAL statement_timeout = 0")
            db.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            db.execute("LOCK TABLE log, nodes IN EXCLUSIVE MODE")
            try:
                _refuse_old_fleet(journal, path)
                _refuse_used(db)
                _copy_tables(db, journal)
            except sqlite3.Error as error:
                raise JournalError(f"--from {path} cannot be read: {error}") from error
        rows = {
            name: db.execute(sql.SQL("SELECT count(*) AS n FROM {}").format(sql.Identifier(name))).fetchone()
            for name in COPIED_TABLES
        }
    found = ", ".join(f"{row['n'] if row else 0} {name}" for name, row in rows.items())
    damaged = len(damages.damaged_rows())
    return f"{found}; {damaged} damaged rows were mended or left out" if damaged else found


def _refuse_used(db: Database) -> None:
    row = db.execute(SELECT_LOG_USED).fetchone()
    if row is None or row["used"]:
        raise ConfigError(
            "--from needs an empty log, and this one has tasks, events, consumers, weights or nodes of its"
            " own: createdb another one"
        )


@contextmanager
def _hold_journal_lock(path: Path) -> Iterator[None]:
    """Hold the lock that a node takes on its journal, where a node has run on it."""
    lock = path.with_name(path.name + ".lock")
    if not lock.exists():
        yield
        return
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--from {path}: its node runs; stop it first") from None
        yield


def _refuse_old_fleet(journal: sqlite3.Connection, path: Path) -> None:
    tables = {name for (name,) in journal.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
    for table in OLD_FLEET_TABLES:
        if table in tables and journal.execute(f"SELECT 1 FROM main.{table} LIMIT 1").fetchone():
            raise ConfigError(
                f"--from {path}: it is one of several journals of an old fleet, whose events have no common"
                " order: read them to the end with the polarnode that wrote them, and begin with an empty log"
            )


# ── what is copied ────────────────────────────────────────────────────────────


def _copy_tables(db: Database, journal: sqlite3.Connection) -> None:
    row = db.execute(
        "INSERT INTO nodes (name, state) VALUES ('migrate', 'left') RETURNING incarnation"
    ).fetchone()
    assert row is not None
    writer: int = row["incarnation"]
    for table, columns, rows in (
        ("tasks", TASK_COLUMNS, _task_rows(journal)),
        ("places", PLACE_COLUMNS, _place_rows(journal)),
        ("sessions", SESSION_COLUMNS, _session_rows(journal, writer)),
        ("bodies", "session_id, written_by, part, data", _body_rows(journal, writer)),
        ("events", EVENT_COLUMNS, _event_rows(journal)),
        ("consumers", "name, position, moved, heard", journal.execute(SELECT_CONSUMERS)),
        ("marks", "position, at", journal.execute("SELECT seq, at FROM marks")),
        ("weights", "model, version, adapter, at, body", _weight_rows(journal)),
        ("callbacks", "position, task_id, url", journal.execute("SELECT seq, task_id, url FROM callbacks")),
        ("evaluations", "evaluation_id, idempotency_key, submitted, spec", _evaluation_rows(journal)),
        (
            "evaluated",
            EVALUATED_COLUMNS,
            journal.execute(f"SELECT {EVALUATED_COLUMNS.replace('position', 'seq')} FROM evaluated"),
        ),
    ):
        copy = sql.SQL("COPY {} ({}) FROM STDIN").format(
            sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns.split(", ")))
        )
        with db.cursor() as cursor, cursor.copy(copy) as writing:
            for each in rows:
                writing.write_row(each)
    # The log itself numbers tasks.
    db.execute(
        "UPDATE places SET number = tasks.number, priority = tasks.priority FROM tasks"
        " WHERE tasks.task_id = places.task_id"
    )
    _copy_head(db, journal)


def _copy_head(db: Database, journal: sqlite3.Connection) -> None:
    """Copy the position that the log goes on from, and the names of the log in cursors of the journal."""
    meta = dict(journal.execute("SELECT name, value FROM meta").fetchall())
    last, names = journal_names(journal, str(meta.get("journal") or ""))
    db.execute(
        "UPDATE log SET position = %s, pruned = %s, callbacks_expired = %s,"
        " stored = (SELECT coalesce(sum(bytes), 0) FROM events)",
        (last, meta.get("pruned", 0), meta.get("callbacks_expired", 0)),
    )
    db.execute("DELETE FROM identities")
    for name, after in names:
        if name:  # journals before version 7 had none, and their cursors name no log
            db.execute("INSERT INTO identities (identity, after) VALUES (%s, %s)", (name, after))
    db.execute("SELECT settle_identity()")


TASK_COLUMNS: Final = (
    "task_id, group_id, idempotency_key, submitted, spec, priority, requires, image, adapter, by_caller,"
    " max_retries, early_stop_min, usable, enough, finished, cancelled, callback_url, callback_kinds"
)


def _task_rows(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    rows = journal.execute(queries.SELECT_TASK + "ORDER BY number").fetchall()
    keys = set[str]()
    for task_id, group_id, key, submitted, body, expected, cancelled in rows:
        spec = _read_spec(task_id, group_id, key, submitted, body, expected)
        facts = queries.finished_places(journal, task_id)
        usable = sum(make_member(spec.group, each).usable for each in facts)
        enough = spec.group.early_stop_min
        kinds = journal.execute("SELECT kinds FROM callback_urls WHERE task_id = ?", (task_id,)).fetchone()
        open_places = journal.execute(
            "SELECT 1 FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL", (task_id,)
        ).fetchone()
        # Several tasks of a journal may have one key. The first of them keeps it.
        mine = key if key not in keys else None
        keys.add(key)
        yield (
            *(task_id, group_id, mine, submitted, body, spec.priority, Jsonb(dict(spec.requires))),
            *(
                spec.runtime.image,
                spec.adapter,
                spec.harness.name == CAPTURE_HARNESS,
                spec.budgets.retries,
                enough,
            ),
            *(usable, enough is not None and usable >= enough, open_places is None, cancelled),
            *(spec.callback_url, [] if kinds is None else kinds[0].split(",")),
        )


def _read_spec(
    task_id: str, group_id: str, key: str | None, submitted: float, body: bytes, expected: Any
) -> TaskSpec:
    try:
        verify_checksum(expected, task_id, group_id, key, submitted, body)
        with decode_boundary():
            spec = structure(read_json(body), TaskSpec)
        check_names(spec, task_id, (), key)
    except PolarnodeError as error:
        raise _damage_error("tasks", task_id, error) from error
    return spec


def _damage_error(table: str, row: object, error: Exception) -> JournalError:
    return JournalError(
        f"row {row} of table {table} cannot be taken into the log: {error}; `polarnode check` names all such"
        " rows"
    )


PLACE_COLUMNS: Final = "task_id, place, priority, number, state, session_id, attempt, retries, spent"


def _place_rows(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    """Each place with the session that has it. A session that had begun and is not over counts as lost, and
    its place is run again where the task has retries left. The place of a capture is not, because nobody
    comes back for it.
    """
    rows = journal.execute(
        "SELECT s.task_id, sample_index, session_id, attempt, outcome IS NOT NULL, identity IS NOT NULL, spec"
        " FROM sessions s JOIN tasks USING (task_id) WHERE retried_as IS NULL ORDER BY number, sample_index"
    ).fetchall()
    for task_id, place, session_id, attempt, over, began, body in rows:
        spec = structure(read_json(body), TaskSpec)
        by_caller = spec.harness.name == CAPTURE_HARNESS
        lost = not over and (began or by_caller)
        retries = attempt + lost
        yield (
            *(task_id, place, 0, 0, "over" if over else "queued", session_id),
            *(attempt if over or began else attempt - 1, retries),
            lost and (by_caller or retries > spec.budgets.retries),
        )


SESSION_COLUMNS: Final = (
    "session_id, task_id, place, attempt, identity, forked_from, outcome, reward, trainable, staleness,"
    " turns, sampled, finished, retried_as, written_by"
)


def _session_rows(journal: sqlite3.Connection, writer: int) -> Iterator[Sequence[Any]]:
    query = (
        queries.SELECT_SESSION + "WHERE outcome IS NOT NULL OR task_id IN (SELECT task_id FROM tasks)"
        " ORDER BY (SELECT rowid FROM main.sessions began WHERE began.session_id = sessions.session_id)"
    )
    for row in journal.execute(query).fetchall():
        session_id, task_id, place, attempt, outcome = row[:5]
        (identity,) = journal.execute(
            "SELECT identity FROM sessions WHERE session_id = ?", (session_id,)
        ).fetchone()
        record, parent = queries.read_session(journal, row), read_forked_from(row[13])
        trainable, staleness = row[6], row[7]
        if outcome is not None and trainable is None:  # journals before version 4
            whole = queries.trajectory(journal, session_id)
            trainable = 0 if whole is None else whole.trainable_tokens
            staleness = None if whole is None else whole.staleness
        yield (
            *(session_id, task_id, place, attempt, identity, parent and parent.session_id),
            *(outcome, record.reward, trainable, staleness, row[11], row[12], row[8], row[9]),
            None if outcome is None else writer,
        )


def _body_rows(journal: sqlite3.Connection, writer: int) -> Iterator[Sequence[Any]]:
    """Trajectories and their turns as they are packed. Where a row is damaged, the rest is read and packed
    again.
    """
    for (session_id,) in journal.execute("SELECT session_id FROM trajectories").fetchall():
        for part, data in enumerate(_body_parts(journal, session_id)):
            yield session_id, writer, part, data


def _body_parts(journal: sqlite3.Connection, session_id: str) -> Iterable[bytes]:
    body, expected = journal.execute(
        "SELECT body, checksum FROM trajectories WHERE session_id = ?", (session_id,)
    ).fetchone()
    turns = journal.execute(
        "SELECT turn, sampled, body, checksum FROM turns WHERE session_id = ? ORDER BY turn", (session_id,)
    ).fetchall()
    try:
        verify_checksum(expected, session_id, body)
        for number, sampled, data, wanted in turns:
            verify_checksum(wanted, session_id, number, sampled, data)
        return [body, *(each[2] for each in turns)]
    except Unreadable:
        whole = queries.trajectory(journal, session_id)
        return () if whole is None else [pack_trajectory(whole), *map(pack_turn, whole.turns)]


EVENT_COLUMNS: Final = "position, kind, key, task_id, group_id, session_id, outcome, reward, body, at, bytes"


def _event_rows(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    sizes = dict(
        journal.execute(
            "SELECT session_id, length(body) + (SELECT coalesce(sum(length(turns.body)), 0) FROM turns"
            " WHERE turns.session_id = trajectories.session_id) FROM trajectories"
        ).fetchall()
    )
    rows = journal.execute(
        "SELECT seq, kind, key, task_id, group_id, session_id, outcome, reward, body, at, checksum"
        " FROM events ORDER BY seq"
    )
    for seq, kind, key, task_id, group_id, session_id, outcome, reward, body, at, expected in rows:
        row = (kind, key, task_id, group_id, session_id, outcome, reward, at, body)
        try:
            verify_checksum(expected, *row)
        except Unreadable as error:
            raise _damage_error("events", seq, error) from error
        size = sizes.get(session_id, 0) if body is None else len(body)
        yield seq, kind, key, task_id, group_id, session_id, outcome, reward, body, at, size


def _weight_rows(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    known = set[str]()
    for version, at, body, expected in journal.execute(
        "SELECT version, at, body, checksum FROM weights ORDER BY number"
    ).fetchall():
        try:
            verify_checksum(expected, version, at, body)
            with decode_boundary():
                value = read_json(body)
                adapter = adapter_of(value)
        except Unreadable as error:
            raise _damage_error("weights", version, error) from error
        if version not in known:  # only the first row of a version counts, as in the log
            # The name of the checkpoint's folder is the label `model` of the nodes that serve the version.
            path = value.get("model") if isinstance(value, dict) else None
            yield Path(str(path or "")).name, version, adapter, at, body
        known.add(version)


def _evaluation_rows(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    for name, key, submitted, body, expected in journal.execute(
        "SELECT evaluation_id, idempotency_key, submitted, body, checksum FROM evaluations"
    ).fetchall():
        try:
            verify_checksum(expected, name, key, submitted, body)
        except Unreadable as error:
            raise _damage_error("evaluations", name, error) from error
        yield name, key, submitted, body


SELECT_CONSUMERS: Final = "SELECT consumer, seq, moved, heard FROM positions"
EVALUATED_COLUMNS: Final = "evaluation_id, session_id, n, position, reward, error"
