"""`polarnode migrate`: makes or updates the tables of a shared log, and copies a single node's journal into
an empty log.
"""

import os
from pathlib import Path

import psycopg

from polarnode.cli.options import log_dsn
from polarnode.cli.output import open_console
from polarnode.core.errors import ConfigError
from polarnode.journal.log.postgres.connection import check_dsn, open_database
from polarnode.journal.log.postgres.from_journal import copy_journal
from polarnode.journal.log.postgres.migrations import migrate as apply_migrations


def migrate(log: str | None, journal: Path | None) -> None:
    """Bring the log to this version. Raises ConfigError."""
    dsn = check_dsn(log_dsn(log)) if log is not None else os.environ.get("POLARNODE_LOG", "")
    if not dsn:
        raise ConfigError("name the log: give --log, or set POLARNODE_LOG")
    console = open_console()
    try:
        with open_database(check_dsn(dsn), name="migrate") as db:
            for name in apply_migrations(db):
                console.print(f"· {name}", style="dim")
            console.print("the log is of this version")
            if journal is not None:
                found = copy_journal(db, journal)
                console.print(f"copied from {journal}: {found}")
    except psycopg.OperationalError as error:
        raise ConfigError(f"the log cannot be reached: {str(error).strip().splitlines()[0]}") from error
