"""The numbered migrations of the log's tables. Each is one file and one transaction.

A node opens a log only if it knows the log's last migration. It makes the tables where the database has none
yet, and never upgrades them by itself, because nodes of the version before would be cut off. A newer log is
refused, and the message names its migration. A node of the version before may run on it only where
`COMPATIBLE_MIGRATIONS` says so.
"""

import logging
from importlib.resources import files
from typing import Any, Final

import psycopg
from attrs import frozen
from psycopg import sql

from polarnode.core.errors import ConfigError
from polarnode.journal.log.postgres.connection import SCHEMA, Database

logger = logging.getLogger(__name__)

OLDEST_SERVER: Final = 140_000  # SQL-standard function bodies; Debian 12 has 15
# Newer migrations with which nodes of this version still run, because they only add what it does not read.
COMPATIBLE_MIGRATIONS: Final[frozenset[int]] = frozenset()
MIGRATION_LOCK: Final = (
    7_046_029_254_386_353_131  # only one process migrates at a time; the number is arbitrary
)


@frozen(kw_only=True)
class Migration:
    number: int
    name: str
    text: str


def read_migrations() -> tuple[Migration, ...]:
    """The migrations of this version, in order."""
    folder = files("polarnode.journal.log.postgres") / "migrations"
    found = sorted(
        (each for each in folder.iterdir() if each.name.endswith(".sql")), key=lambda each: each.name
    )
    return tuple(
        Migration(number=int(each.name[:4]), name=each.name, text=each.read_text("utf-8")) for each in found
    )


def applied_migrations(db: Database) -> tuple[int, ...]:
    """The numbers of the migrations that the database has."""
    try:
        exists: dict[str, Any] | None = db.execute(
            "SELECT to_regclass(%s) AS found", (f"{SCHEMA}.migrations",)
        ).fetchone()
        if exists is None or exists["found"] is None:
            return ()
        rows = db.execute(
            sql.SQL("SELECT number FROM {}.migrations ORDER BY number").format(sql.Identifier(SCHEMA))
        )
        return tuple(int(row["number"]) for row in rows)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"this login may not read the log ({_first_line(error)}): an administrator gives a node's login"
            " the role with GRANT polarnode_node TO its name"
        ) from error


def migrate(db: Database, migrations: tuple[Migration, ...] | None = None) -> tuple[str, ...]:
    """Apply the missing migrations, each in a transaction. Returns their names. Raises ConfigError."""
    wanted = read_migrations() if migrations is None else migrations
    if db.info.server_version < OLDEST_SERVER:
        raise ConfigError(f"PostgreSQL {db.info.server_version // 10_000} is too old: use 14 or newer")
    try:
        return _apply_missing(db, wanted)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"this login may not make the log's tables ({_first_line(error)}): run `polarnode migrate --log"
            " …` with the one that owns the database"
        ) from error


def _apply_missing(db: Database, wanted: tuple[Migration, ...]) -> tuple[str, ...]:
    done: list[str] = []
    for each in wanted:
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            db.execute("SET LOCAL statement_timeout = 0")
            have = applied_migrations(db)
            refuse_newer(have, wanted)
            if each.number in have:
                continue
            db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(SCHEMA)))
            db.execute(sql.SQL("SET LOCAL search_path = {}").format(sql.Identifier(SCHEMA)))
            db.execute(
                "CREATE TABLE IF NOT EXISTS migrations (number integer PRIMARY KEY, name text NOT NULL,"
                " at timestamptz NOT NULL DEFAULT clock_timestamp())"
            )
            try:
                db.execute(each.text.encode())
            except psycopg.errors.InsufficientPrivilege:
                raise
            except psycopg.Error as error:
                raise ConfigError(
                    f"the migration {each.name} failed, and nothing of it is left: {error}"
                ) from error
            db.execute("INSERT INTO migrations (number, name) VALUES (%s, %s)", (each.number, each.name))
        done.append(each.name)
        logger.info("the log was migrated: %s", each.name)
    return tuple(done)


def prepare_tables(db: Database) -> None:
    """Make the tables where there are none yet. Raises ConfigError where this node cannot use those that
    there are.
    """
    with db.transaction():  # a node that begins in the same moment waits, and never sees only some tables
        db.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
        if applied_migrations(db):
            check_version(db)
        else:
            migrate(db)


def check_version(db: Database) -> None:
    """Raise ConfigError where this node cannot use the tables of the log."""
    have, wanted = applied_migrations(db), read_migrations()
    refuse_newer(have, wanted)
    missing = [each.name for each in wanted if each.number not in have]
    if missing:
        raise ConfigError(
            f"the log lacks {', '.join(missing)}: run `polarnode migrate --log …` of this version with the"
            " login that owns its tables"
        )


def refuse_newer(have: tuple[int, ...], wanted: tuple[Migration, ...]) -> None:
    known = {each.number for each in wanted} | COMPATIBLE_MIGRATIONS
    newer = [number for number in have if number not in known]
    if newer:
        raise ConfigError(
            f"the log has migration {newer[-1]:04} and this polarnode knows up to {max(known, default=0):04}:"
            " use the polarnode that migrated it, or a newer one"
        )


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().splitlines()[0]
