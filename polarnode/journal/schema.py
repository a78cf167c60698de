"""The tables, their migrations, and how a connection is opened.

A change of the tables raises VERSION and adds the step from the version before. So does a new field in what
is packed into a blob: this polarnode reads old blobs, but the version before it cannot read new ones.
tests/journal/test_journal_versions.py opens a journal of every version. `events.seq` is AUTOINCREMENT because
a number must never be given twice, even when its row was pruned.

synchronous=FULL: in WAL mode NORMAL loses nothing when the process is killed, but a power cut may roll back
the last commits, and a trainer that has already read those events would then miss others that get the same
numbers. Group commit makes the difference one fsync a batch.
"""

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from polarnode.core.codec.json import read_json, structure
from polarnode.core.errors import JournalError, Unreadable
from polarnode.core.trajectory import ForkedFrom
from polarnode.journal.damage import DamageRecorder, JournalConnection, decode_boundary, is_corrupt
from polarnode.support.bounded import open_private

SCHEMA_VERSION = 10
# Tables of the fleets before version 10, whose nodes held tasks for each other. No new journal has them.
OLD_FLEET_TABLES = """
CREATE TABLE copies (
    task_id TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    term INTEGER NOT NULL,
    number INTEGER NOT NULL,
    home TEXT NOT NULL,
    second TEXT NOT NULL,
    cancelled REAL,
    body BLOB NOT NULL,
    checksum INTEGER
);
CREATE TABLE commits (
    task_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER,
    PRIMARY KEY (task_id, place)
);
CREATE TABLE held (session_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, body BLOB NOT NULL, checksum INTEGER)
"""
INSERT_JOURNAL_ID = "INSERT INTO meta VALUES ('journal', 'j' || lower(hex(randomblob(8))))"
CREATE_RESULTS = """
CREATE TABLE results (
    session_id TEXT PRIMARY KEY,
    about BLOB NOT NULL,
    body BLOB NOT NULL,
    answered REAL,
    checksum INTEGER
)"""

# By version: the statements that make the next version. Version 2 added routed experts and alternatives in
# turns and traces. Version 3 added retried sessions, cancelled tasks and the new messages of turns. Version 4
# added the times of events and positions, the weights that were served, pending callbacks, what a group needs
# of its sessions, when a consumer was last seen, and marks of what all consumers had acknowledged. Version 5
# added checksums (`damage.py`). Version 6 added teachers' logprobs in traces, and evaluations of finished
# sessions. Version 7 added the journal's id, and what a fleet kept in two journals. Version 8 added forks.
# Version 9 added sessions that go on where another was lost. Version 10 added results of sessions that a
# shared log may lack.
MIGRATIONS: Mapping[int, str] = {
    1: "",
    2: (
        "ALTER TABLE sessions ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;\nALTER TABLE sessions ADD COLUMN"
        " retried_as TEXT;\nALTER TABLE tasks ADD COLUMN cancelled REAL"
    ),
    3: (
        "ALTER TABLE events ADD COLUMN at REAL NOT NULL DEFAULT 0;\nALTER TABLE positions ADD COLUMN moved"
        " REAL NOT NULL DEFAULT 0;\nCREATE TABLE weights (number INTEGER PRIMARY KEY AUTOINCREMENT, version"
        " TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL);\nALTER TABLE sessions ADD COLUMN trainable"
        " INTEGER;\nALTER TABLE sessions ADD COLUMN staleness INTEGER;\nCREATE TABLE callbacks (seq INTEGER"
        " PRIMARY KEY, task_id TEXT NOT NULL, url TEXT NOT NULL);\nCREATE INDEX callbacks_by_url ON callbacks"
        " (url, task_id, seq);\nCREATE TABLE callback_urls (task_id TEXT PRIMARY KEY, url TEXT NOT NULL,"
        " kinds TEXT NOT NULL) WITHOUT ROWID;\nALTER TABLE positions ADD COLUMN heard REAL NOT NULL DEFAULT"
        " 0;\nCREATE TABLE marks (seq INTEGER PRIMARY KEY, at REAL NOT NULL);\nCREATE INDEX callbacks_by_task"
        " ON callbacks (task_id)"
    ),
    4: (
        "ALTER TABLE tasks ADD COLUMN checksum INTEGER;\nALTER TABLE sessions ADD COLUMN identity_checksum"
        " INTEGER;\nALTER TABLE sessions ADD COLUMN outcome_checksum INTEGER;\nALTER TABLE turns ADD COLUMN"
        " checksum INTEGER;\nALTER TABLE trajectories ADD COLUMN checksum INTEGER;\nALTER TABLE events ADD"
        " COLUMN checksum INTEGER;\nALTER TABLE weights ADD COLUMN checksum INTEGER"
    ),
    5: (
        "CREATE TABLE evaluations (evaluation_id TEXT PRIMARY KEY, idempotency_key TEXT, submitted REAL NOT"
        " NULL, body BLOB NOT NULL, checksum INTEGER);\nCREATE TABLE evaluated (evaluation_id TEXT NOT NULL,"
        " session_id TEXT NOT NULL, n INTEGER, seq INTEGER, reward REAL, error TEXT, UNIQUE (evaluation_id,"
        " session_id));\nCREATE INDEX evaluated_by_session ON evaluated (session_id, n)"
    ),
    6: INSERT_JOURNAL_ID,
    7: "",
    8: "",
    9: CREATE_RESULTS,
}

CREATE_TABLES = (
    """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    task_id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    idempotency_key TEXT,
    submitted REAL NOT NULL,
    spec BLOB NOT NULL,
    cancelled REAL,
    checksum INTEGER
);
CREATE INDEX tasks_by_key ON tasks (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    sample_index INTEGER NOT NULL,
    life INTEGER NOT NULL,
    identity BLOB,
    outcome BLOB,
    reward REAL,
    finished REAL,
    attempt INTEGER NOT NULL DEFAULT 0,
    retried_as TEXT,
    trainable INTEGER,
    staleness INTEGER,
    identity_checksum INTEGER,
    outcome_checksum INTEGER
);
CREATE INDEX sessions_by_task ON sessions (task_id, sample_index);
CREATE INDEX sessions_unfinished ON sessions (life) WHERE outcome IS NULL;
CREATE TABLE turns (
    session_id TEXT NOT NULL,
    turn INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER,
    UNIQUE (session_id, turn)
);
CREATE TABLE trajectories (session_id TEXT PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    session_id TEXT,
    outcome TEXT,
    reward REAL,
    body BLOB,
    at REAL NOT NULL DEFAULT 0,
    checksum INTEGER
);
CREATE INDEX events_by_task ON events (task_id, seq);
CREATE INDEX events_by_group ON events (group_id, seq);
CREATE TABLE positions (
    consumer TEXT PRIMARY KEY,
    seq INTEGER NOT NULL,
    moved REAL NOT NULL DEFAULT 0,
    heard REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE marks (seq INTEGER PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE weights (number INTEGER PRIMARY KEY AUTOINCREMENT, version TEXT NOT NULL, at REAL NOT NULL,
    body BLOB NOT NULL, checksum INTEGER);
CREATE TABLE callbacks (seq INTEGER PRIMARY KEY, task_id TEXT NOT NULL, url TEXT NOT NULL);
CREATE INDEX callbacks_by_url ON callbacks (url, task_id, seq);
CREATE TABLE callback_urls (task_id TEXT PRIMARY KEY, url TEXT NOT NULL, kinds TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX callbacks_by_task ON callbacks (task_id);
CREATE TABLE evaluations (
    evaluation_id TEXT PRIMARY KEY,
    idempotency_key TEXT,
    submitted REAL NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER
);
CREATE TABLE evaluated (
    evaluation_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    n INTEGER,
    seq INTEGER,
    reward REAL,
    error TEXT,
    UNIQUE (evaluation_id, session_id)
);
CREATE INDEX evaluated_by_session ON evaluated (session_id, n);
INSERT INTO meta VALUES ('life', 0), ('pruned', 0);
"""
    f"{INSERT_JOURNAL_ID};\n{CREATE_RESULTS}"
)
TABLE_NAMES = tuple(re.findall(r"CREATE TABLE (\w+)", CREATE_TABLES))
META_ROWS = ("life", "pruned", "journal")  # rows of `meta` that every journal has

# Each commit writes whole pages, first to the write-ahead log. A turn is 1-16 kB: in pages of 16 kB it would
# leave up to half of its page empty, and take twice the disk. The price of small pages is that rows of
# megabytes take longer: 14 ms more for each 12 MB.
PAGE_BYTES = 4096
# At this size of the write-ahead log a checkpoint moves its pages to the file. It holds some 400 turns, and
# is small beside any journal.
WAL_CHECKPOINT_BYTES = 4 << 20
WAL_KEPT_BYTES = 64 << 20  # largest write-ahead log that a burst leaves on disk after its checkpoint
LOCK_TIMEOUT_MS = (
    10_000  # another program that reads (sqlite3 on the command line) may hold the lock for a moment
)


def connect_journal(
    path: Path, *, read_only: bool = False, damages: DamageRecorder | None = None
) -> sqlite3.Connection:
    """Open a connection, which one thread at a time may use. Transactions are explicit. The damaged rows that
    it meets are noted in `damages`.
    """
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=JournalConnection)
    db.damages = damages or DamageRecorder()
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    db.execute(f"PRAGMA busy_timeout = {LOCK_TIMEOUT_MS}")
    if read_only:
        db.execute("PRAGMA query_only = 1")
        return db
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    (page,) = db.execute("PRAGMA page_size").fetchone()  # an older journal keeps its own
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_CHECKPOINT_BYTES // page}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
    return db


def prepare_journal(path: Path, damages: DamageRecorder | None = None) -> sqlite3.Connection:
    """Open the writer's connection to the journal at `path`, which is created or migrated, and count a new
    run of the node in `meta.life`. Raises JournalError when the journal cannot be used.
    """
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_emptied(path)
        if not path.exists():
            _create_journal(path)
        db = connect_journal(path, damages=damages)
        with transaction(db):
            _create_or_migrate(db, path)
            db.execute("UPDATE meta SET value = value + 1 WHERE name = 'life'")
    except (sqlite3.Error, OSError) as error:
        raise open_error(path, error) from error
    return db


def open_error(path: Path, error: Exception) -> JournalError:
    """The error for a journal that cannot be opened, with a remedy that fits its cause."""
    damaged = isinstance(error, sqlite3.Error) and is_corrupt(error)
    remedy = "put a copy of it back" if damaged else "make room, fix its permissions"
    return JournalError(
        f"the journal {path} cannot be opened ({error}): {remedy}, or move it away to start a new one"
    )


def _refuse_emptied(path: Path) -> None:
    """Raise JournalError where the file lost its content. SQLite would begin a new journal in it, and delete
    the write-ahead log with the last commits of the old one.
    """
    found, log = path.is_file(), path.with_name(f"{path.name}-wal")
    if found and not path.stat().st_size:
        raise JournalError(
            f"the journal {path} is empty, and no node leaves it so: put a copy of it back, or remove it to"
            " start a new one"
        )
    if not found and log.is_file() and log.stat().st_size:
        raise JournalError(
            f"the journal {path} is gone, and {log.name} beside it has its last commits: put it back, or move"
            " that file away too to start a new one"
        )


def _create_journal(path: Path) -> None:
    """Create a journal. It gets its name once it is whole, so that an empty file is never a new journal."""
    new = path.with_name(f"{path.name}.new")
    for left in (new, *path.parent.glob(f"{new.name}-*")):  # files of a node that was killed at this point
        left.unlink(missing_ok=True)
    # SQLite gives the files beside it the mode of this one.
    os.close(open_private(str(new), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
    with closing(connect_journal(new)) as db, transaction(db):
        _create_or_migrate(db, path)
    new.rename(path)


def find_structure_fault(path: Path) -> str | None:
    """What SQLite's own check finds wrong with the pages of the file; None for a whole file. The check reads
    all of the file, 2 GB in a second.
    """
    try:
        with closing(connect_journal(path, read_only=True)) as db:
            (found,) = db.execute("PRAGMA quick_check (1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error) if is_corrupt(error) else None
    return None if found == "ok" else str(found).splitlines()[-1]  # after "*** in database main ***"


def _create_or_migrate(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (objects,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version < 0 or (version == 0 and objects):  # tables and version come in one transaction
        raise JournalError(
            f"{path} is a database of another program and no journal: move it away, or give the node a"
            " folder of its own"
        )
    if version == 0:
        for statement in CREATE_TABLES.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return
    for before in range(version, SCHEMA_VERSION):
        for statement in filter(None, MIGRATIONS[before].split(";\n")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {before + 1}")
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"the journal {path} has version {version} and this polarnode reads up to {SCHEMA_VERSION}: use"
            " the"
            " polarnode that wrote it"
        )
    _refuse_incomplete(db, path)


def _refuse_incomplete(db: sqlite3.Connection, path: Path) -> None:
    """Raise JournalError where a table or a row of `meta` is gone. The pages of such a file are whole, so
    SQLite's check finds nothing, and the node would answer turns that the journal cannot keep.
    """
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    lacking = [f"the table {name}" for name in TABLE_NAMES if name not in tables]
    if not lacking:
        rows = {name for (name,) in db.execute("SELECT name FROM meta")}
        lacking = [f"the row {name} of meta" for name in META_ROWS if name not in rows]
    if lacking:
        raise JournalError(
            f"the journal {path} is damaged (it lacks {lacking[0]}): put a copy of it back, or move it away"
            " to start a new one"
        )


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Write all of the block or none of it. It is on disk when this returns."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def read_snapshot(db: sqlite3.Connection) -> Iterator[None]:
    """Let every read of the block see the same commit."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


# ── forks ─────────────────────────────────────────────────────────────────────

# An expression for what the identity of a fork says of its parent, as JSON. It is NULL for a session that is
# no fork, and where the identity is damaged.
FORKED_FROM_COLUMN = """CASE WHEN json_valid(CAST(identity AS TEXT))
        THEN json_extract(CAST(identity AS TEXT), '$.forked_from') END"""


def read_forked_from(value: str | None) -> ForkedFrom | None:
    """Decode what FORKED gave. None for a damaged row; reading its outcome or identity notes it."""
    with suppress(Unreadable), decode_boundary():
        return None if value is None else structure(read_json(value.encode()), ForkedFrom)
    return None
