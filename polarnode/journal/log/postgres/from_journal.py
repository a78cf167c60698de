"""A lone node's journal into an empty log: what `polarnode migrate --from` does.

All of it is one transaction, and the journal is only read. Events keep their positions and their keys, and
the log knows the journal's name, so that a trainer's cursor goes on where it was. What ran when the node was
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
from polarnode.core.task import CAPTURE, TaskSpec
from polarnode.groups.group import member_of
from polarnode.journal import queries
from polarnode.journal.check import open_to_read
from polarnode.journal.damage import Damages, check, decoding
from polarnode.journal.entries import adapter_of
from polarnode.journal.log.postgres.connection import Database
from polarnode.journal.log.rules import check_names
from polarnode.journal.log.sqlite import journal_names
from polarnode.journal.schema import read_fork

COPIED: Final = ("tasks", "sessions", "events", "consumers", "weights", "evaluations")
# What must be empty: a log in which something happened has positions of its own.
USED: Final = """
SELECT (SELECT position FROM log) > 0 OR EXISTS (SELECT 1 FROM tasks) OR EXISTS (SELECT 1 FROM consumers)
    OR EXISTS (SELECT 1 FROM weights) OR EXISTS (SELECT 1 FROM nodes WHERE state = 'alive') AS used"""
OLD_FLEET: Final = ("copies", "commits", "held")  # tables that only nodes of an old fleet wrote to


def copy_journal(db: Database, path: Path) -> str:
    """Copy a journal into an empty log; what was copied, in words. Raises ConfigError."""
    if path.is_dir():
        path = path / "journal.sqlite"
    if not path.is_file():
        raise ConfigError(f"--from {path}: there is no such journal; name journal.sqlite in a state folder")
    damages = Damages()
    with _unused(path):
        with boundary(ConfigError, f"--from {path} cannot be read"):
            journal, _ = open_to_read(path, damages)
        with closing(journal), db.transaction():
            # a journal of gigabytes takes minutes, of which each statement reads the journal before it writes
            db.execute("SET LOCAL statement_timeout = 0")
            db.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            db.execute("LOCK TABLE log, nodes IN EXCLUSIVE MODE")
            try:
                _refuse_old_fleet(journal, path)
                _refuse_used(db)
                _copy(db, journal)
            except sqlite3.Error as error:
                raise JournalError(f"--from {path} cannot be read: {error}") from error
        rows = {
            name: db.execute(sql.SQL("SELECT count(*) AS n FROM {}").format(sql.Identifier(name))).fetchone()
            for name in COPIED
        }
    found = ", ".join(f"{row['n'] if row else 0} {name}" for name, row in rows.items())
    damaged = len(damages.rows())
    return f"{found}; {damaged} damaged rows were mended or left out" if damaged else found


def _refuse_used(db: Database) -> None:
    row = db.execute(USED).fetchone()
    if row is None or row["used"]:
        raise ConfigError(
            "--from needs an empty log, and this one has tasks, events, consumers, weights or nodes of its"
            " own: createdb another one"
        )


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    """Hold the lock of the journal's node, where one has run on it."""
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
    for table in OLD_FLEET:
        if table in tables and journal.execute(f"SELECT 1 FROM main.{table} LIMIT 1").fetchone():
            raise ConfigError(
                f"--from {path}: it is one of several journals of an old fleet, whose events have no common"
                " order: read them to the end with the polarnode that wrote them, and begin with an empty log"
            )


# ── what is copied ────────────────────────────────────────────────────────────


def _copy(db: Database, journal: sqlite3.Connection) -> None:
    row = db.execute(
        "INSERT INTO nodes (name, state) VALUES ('migrate', 'left') RETURNING incarnation"
    ).fetchone()
    assert row is not None
    writer: int = row["incarnation"]
    for table, columns, rows in (
        ("tasks", TASKS, _tasks(journal)),
        ("places", PLACES, _places(journal)),
        ("sessions", SESSIONS, _sessions(journal, writer)),
        ("bodies", "session_id, written_by, part, data", _bodies(journal, writer)),
        ("events", EVENTS, _events(journal)),
        ("consumers", "name, position, moved, heard", journal.execute(CONSUMERS)),
        ("marks", "position, at", journal.execute("SELECT seq, at FROM marks")),
        ("weights", "model, version, adapter, at, body", _weights(journal)),
        ("callbacks", "position, task_id, url", journal.execute("SELECT seq, task_id, url FROM callbacks")),
        ("evaluations", "evaluation_id, idempotency_key, submitted, spec", _evaluations(journal)),
        (
            "evaluated",
            EVALUATED,
            journal.execute(f"SELECT {EVALUATED.replace('position', 'seq')} FROM evaluated"),
        ),
    ):
        copy = sql.SQL("COPY {} ({}) FROM STDIN").format(
            sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns.split(", ")))
        )
        with db.cursor() as cursor, cursor.copy(copy) as writing:
            for each in rows:
                writing.write_row(each)
    # a task's number is given by the log
    db.execute(
        "UPDATE places SET number = tasks.number, priority = tasks.priority FROM tasks"
        " WHERE tasks.task_id = places.task_id"
    )
    _copy_head(db, journal)


def _copy_head(db: Database, journal: sqlite3.Connection) -> None:
    """The position that the log goes on from, and the names that cursors of the journal have."""
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


TASKS: Final = (
    "task_id, group_id, idempotency_key, submitted, spec, priority, requires, image, adapter, by_caller,"
    " max_retries, early_stop_min, usable, enough, finished, cancelled, callback_url, callback_kinds"
)


def _tasks(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    rows = journal.execute(queries.TASK + "ORDER BY number").fetchall()
    keys = set[str]()
    for task_id, group_id, key, submitted, body, expected, cancelled in rows:
        spec = _spec(task_id, group_id, key, submitted, body, expected)
        facts = queries.places_over(journal, task_id)
        usable = sum(member_of(spec.group, each).usable for each in facts)
        enough = spec.group.early_stop_min
        kinds = journal.execute("SELECT kinds FROM callback_urls WHERE task_id = ?", (task_id,)).fetchone()
        open_places = journal.execute(
            "SELECT 1 FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL", (task_id,)
        ).fetchone()
        # the first task of a key is the one that the key gives
        mine = key if key not in keys else None
        keys.add(key)
        yield (
            *(task_id, group_id, mine, submitted, body, spec.priority, Jsonb(dict(spec.requires))),
            *(spec.runtime.image, spec.adapter, spec.harness.name == CAPTURE, spec.budgets.retries, enough),
            *(usable, enough is not None and usable >= enough, open_places is None, cancelled),
            *(spec.callback_url, [] if kinds is None else kinds[0].split(",")),
        )


def _spec(
    task_id: str, group_id: str, key: str | None, submitted: float, body: bytes, expected: Any
) -> TaskSpec:
    try:
        check(expected, task_id, group_id, key, submitted, body)
        with decoding():
            spec = structure(read_json(body), TaskSpec)
        check_names(spec, task_id, (), key)
    except PolarnodeError as error:
        raise _damaged("tasks", task_id, error) from error
    return spec


def _damaged(table: str, row: object, error: Exception) -> JournalError:
    return JournalError(
        f"row {row} of table {table} cannot be taken into the log: {error}; `polarnode check` names all such"
        " rows"
    )


PLACES: Final = "task_id, place, priority, number, state, session_id, attempt, retries, spent"


def _places(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    """Of each place the session that has it. One that had begun and is not over counts as lost, and is run
    again where its task has retries left; nobody comes back for a capture's.
    """
    rows = journal.execute(
        "SELECT s.task_id, sample_index, session_id, attempt, outcome IS NOT NULL, identity IS NOT NULL, spec"
        " FROM sessions s JOIN tasks USING (task_id) WHERE retried_as IS NULL ORDER BY number, sample_index"
    ).fetchall()
    for task_id, place, session_id, attempt, over, began, body in rows:
        spec = structure(read_json(body), TaskSpec)
        by_caller = spec.harness.name == CAPTURE
        lost = not over and (began or by_caller)
        retries = attempt + lost
        yield (
            *(task_id, place, 0, 0, "over" if over else "queued", session_id),
            *(attempt if over or began else attempt - 1, retries),
            lost and (by_caller or retries > spec.budgets.retries),
        )


SESSIONS: Final = (
    "session_id, task_id, place, attempt, identity, forked_from, outcome, reward, trainable, staleness,"
    " turns, sampled, finished, retried_as, written_by"
)


def _sessions(journal: sqlite3.Connection, writer: int) -> Iterator[Sequence[Any]]:
    query = (
        queries.SESSION + "WHERE outcome IS NOT NULL OR task_id IN (SELECT task_id FROM tasks)"
        " ORDER BY (SELECT rowid FROM main.sessions began WHERE began.session_id = sessions.session_id)"
    )
    for row in journal.execute(query).fetchall():
        session_id, task_id, place, attempt, outcome = row[:5]
        (identity,) = journal.execute(
            "SELECT identity FROM sessions WHERE session_id = ?", (session_id,)
        ).fetchone()
        record, parent = queries.session_of(journal, row), read_fork(row[13])
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


def _bodies(journal: sqlite3.Connection, writer: int) -> Iterator[Sequence[Any]]:
    """Trajectories and their turns as they are packed. Where a row is damaged, what can be read is packed
    again.
    """
    for (session_id,) in journal.execute("SELECT session_id FROM trajectories").fetchall():
        for part, data in enumerate(_parts(journal, session_id)):
            yield session_id, writer, part, data


def _parts(journal: sqlite3.Connection, session_id: str) -> Iterable[bytes]:
    body, expected = journal.execute(
        "SELECT body, checksum FROM trajectories WHERE session_id = ?", (session_id,)
    ).fetchone()
    turns = journal.execute(
        "SELECT turn, sampled, body, checksum FROM turns WHERE session_id = ? ORDER BY turn", (session_id,)
    ).fetchall()
    try:
        check(expected, session_id, body)
        for number, sampled, data, wanted in turns:
            check(wanted, session_id, number, sampled, data)
        return [body, *(each[2] for each in turns)]
    except Unreadable:
        whole = queries.trajectory(journal, session_id)
        return () if whole is None else [pack_trajectory(whole), *map(pack_turn, whole.turns)]


EVENTS: Final = "position, kind, key, task_id, group_id, session_id, outcome, reward, body, at, bytes"


def _events(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
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
            check(expected, *row)
        except Unreadable as error:
            raise _damaged("events", seq, error) from error
        size = sizes.get(session_id, 0) if body is None else len(body)
        yield seq, kind, key, task_id, group_id, session_id, outcome, reward, body, at, size


def _weights(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    known = set[str]()
    for version, at, body, expected in journal.execute(
        "SELECT version, at, body, checksum FROM weights ORDER BY number"
    ).fetchall():
        try:
            check(expected, version, at, body)
            with decoding():
                value = read_json(body)
                adapter = adapter_of(value)
        except Unreadable as error:
            raise _damaged("weights", version, error) from error
        if version not in known:  # the first row of a version is its own, as in the log
            # the label `model` of the nodes that serve it is the name of the checkpoint's folder
            path = value.get("model") if isinstance(value, dict) else None
            yield Path(str(path or "")).name, version, adapter, at, body
        known.add(version)


def _evaluations(journal: sqlite3.Connection) -> Iterator[Sequence[Any]]:
    for name, key, submitted, body, expected in journal.execute(
        "SELECT evaluation_id, idempotency_key, submitted, body, checksum FROM evaluations"
    ).fetchall():
        try:
            check(expected, name, key, submitted, body)
        except Unreadable as error:
            raise _damaged("evaluations", name, error) from error
        yield name, key, submitted, body


CONSUMERS: Final = "SELECT consumer, seq, moved, heard FROM positions"
EVALUATED: Final = "evaluation_id, session_id, n, position, reward, error"
