"""`polarnode doctor --log`: checks of the PostgreSQL that nodes share.

A finding is not ok only if a node would not start with this log; all other findings are advice.
"""

import time
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import sql

from polarnode.containers.probe import MachineFinding
from polarnode.core.errors import ConfigError
from polarnode.journal.log.postgres.connection import SCHEMA, Database, check_dsn, open_database
from polarnode.journal.log.postgres.migrations import (
    OLDEST_SERVER,
    applied_migrations,
    check_version,
    read_migrations,
)

CONNECTIONS_PER_NODE: Final = 3  # connections of a node: writer, reader and watcher
OTHERS: Final = 10  # connections that administrators, backups and `polarnode fleet` take
# Retention and the leases of callbacks compare the nodes' clocks with the server's.
MAX_CLOCK_SKEW_S: Final = 30.0
MAX_ROUND_TRIP_S: Final = (
    0.05  # seconds of a slow round trip; claims and ends of sessions wait for a few of them
)
ROUNDS: Final = 5

RIGHTS_QUERY: Final = """
SELECT has_table_privilege('places', 'SELECT, INSERT, UPDATE, DELETE') AS tables,
    has_function_privilege(oid, 'EXECUTE') AS functions, pg_is_in_recovery() AS standby
FROM pg_proc WHERE proname = 'finish_place' AND pronamespace = to_regnamespace(%s)"""
SERVER: Final = """
SELECT current_setting('fsync') AS fsync, current_setting('full_page_writes') AS pages,
    current_setting('synchronous_commit') AS commits,
    current_setting('synchronous_standby_names') AS standbys,
    current_setting('autovacuum') AS autovacuum, current_setting('max_connections')::int AS connections,
    current_setting('superuser_reserved_connections')::int AS reserved,
    current_setting('archive_mode') AS archiving, current_user AS login"""
STANDBYS_QUERY: Final = "SELECT state, sync_state FROM pg_stat_replication"


def log_findings(dsn: str) -> Iterator[MachineFinding]:
    """All findings about a log. None of them contains the DSN's password."""
    try:
        db = open_database(check_dsn(dsn), name="doctor")
    except psycopg.Error as error:
        yield MachineFinding(
            name="log",
            ok=True,
            what=f"it cannot be reached: {str(error).strip().splitlines()[0]}",
            remedy="start it, or mend the DSN; a node that is started meanwhile waits for it",
        )
        return
    except ConfigError as error:
        yield MachineFinding(name="log", ok=False, what=str(error), remedy="see docs/fleet.md")
        return
    with db:
        try:
            yield from _table_findings(db)
            yield from _server(db)
        except psycopg.Error as error:
            what = f"it cannot be examined: {str(error).strip().splitlines()[0]}"
            yield MachineFinding(name="log", ok=True, what=what, remedy="ask its administrator")


def _table_findings(db: Database) -> Iterator[MachineFinding]:
    version = db.info.server_version
    yield MachineFinding(
        name="log",
        ok=version >= OLDEST_SERVER,
        what=f"PostgreSQL {version // 10_000}.{version % 10_000} at {db.info.host or 'a socket'},"
        f" database {db.info.dbname}; no extension is needed",
        remedy="" if version >= OLDEST_SERVER else "use PostgreSQL 14 or newer",
    )
    try:
        if not applied_migrations(db):
            made = _one(db, "SELECT has_database_privilege(current_database(), 'CREATE') AS may")["may"]
            yield MachineFinding(
                name="log tables",
                ok=bool(made),
                what="none yet; the first node makes them"
                if made
                else "none yet, and this login may make none",
                remedy=""
                if made
                else "run `polarnode migrate --log …` with the login that owns the database",
            )
            return
        check_version(db)
    except ConfigError as error:
        yield MachineFinding(
            name="log tables", ok=False, what=str(error), remedy="see docs/fleet.md#upgrading"
        )
        return
    names = [each.name for each in read_migrations()]
    yield MachineFinding(name="log tables", ok=True, what=f"of this version, up to {names[-1]}")
    rights = _one(db, RIGHTS_QUERY, SCHEMA)
    may = bool(rights.get("tables")) and bool(rights.get("functions"))
    yield MachineFinding(
        name="log rights",
        ok=may,
        what=f"{_one(db, SERVER)['login']} {'has' if may else 'lacks'} what a node needs",
        remedy="" if may else "an administrator: GRANT polarnode_node TO this login",
    )
    if rights.get("standby"):
        yield MachineFinding(
            name="log role",
            ok=True,
            what="this server is a standby and takes no writes",
            remedy="name the primary, or all servers with target_session_attrs=read-write",
        )
    nodes = int(_one(db, "SELECT count(*) AS n FROM nodes WHERE state = 'alive'")["n"]) if may else 0
    yield _connections(_one(db, SERVER), nodes)


def _connections(server: dict[str, Any], nodes: int) -> MachineFinding:
    """Whether the server has enough connections for one more node."""
    free = server["connections"] - server["reserved"] - OTHERS
    most, enough = free // CONNECTIONS_PER_NODE, (nodes + 1) * CONNECTIONS_PER_NODE <= free
    needed = (nodes + 1) * CONNECTIONS_PER_NODE + server["reserved"] + OTHERS
    return MachineFinding(
        name="log connections",
        ok=True,
        what=(
            f"max_connections {server['connections']}: enough for {most} nodes of"
            f" {CONNECTIONS_PER_NODE} each; {nodes} are alive"
        ),
        remedy="" if enough else f"set max_connections to {needed} or more, and restart the server",
    )


def _server(db: Database) -> Iterator[MachineFinding]:
    server = _one(db, SERVER)
    lasting = server["fsync"] == server["pages"] == "on" and server["commits"] != "off"
    yield MachineFinding(
        name="log commits",
        ok=True,
        what=f"fsync {server['fsync']}, full_page_writes {server['pages']},"
        f" synchronous_commit {server['commits']}",
        remedy=""
        if lasting
        else "set all three on: else a crash of the server loses events that trainers were given",
    )
    yield _standby_finding(db, server)
    yield MachineFinding(
        name="log vacuum",
        ok=True,
        what=f"autovacuum {server['autovacuum']}",
        remedy="" if server["autovacuum"] == "on" else "set autovacuum on: events come and go all day",
    )
    rounds = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        row = _one(db, "SELECT extract(epoch FROM clock_timestamp())::double precision AS now")
        rounds.append((time.monotonic() - began, row["now"] - time.time()))
    took, ahead = min(rounds)
    yield MachineFinding(
        name="log round trip",
        ok=True,
        what=f"{took * 1000:.1f} ms",
        remedy=""
        if took <= MAX_ROUND_TRIP_S
        else "put the database nearer: each claim and each end waits for some",
    )
    yield MachineFinding(
        name="log clock",
        ok=True,
        what=f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
        remedy=""
        if abs(ahead) <= MAX_CLOCK_SKEW_S
        else "set both by NTP: retention and callbacks compare them",
    )


def _standby_finding(db: Database, server: dict[str, Any]) -> MachineFinding:
    """How much would be lost with the primary."""
    rows = db.execute(STANDBYS_QUERY).fetchall()
    waited = [row for row in rows if row["sync_state"] in ("sync", "quorum")]
    if waited and server["commits"] not in ("off", "local"):
        return MachineFinding(
            name="log standby", ok=True, what=f"{len(waited)} synchronous: promoted, it lacks nothing"
        )
    if server["standbys"] and not waited:
        return MachineFinding(
            name="log standby",
            ok=True,
            what=f"synchronous_standby_names {server['standbys']!r}, and none is connected: commits wait",
            remedy="start the standby, or unset synchronous_standby_names",
        )
    what = f"{len(rows)} asynchronous" if rows else "none"
    archiving = "on" if server["archiving"] != "off" else "off"
    return MachineFinding(
        name="log standby",
        ok=True,
        what=f"{what}, archiving {archiving}",
        remedy="a lost primary loses its last seconds, or all without a backup: docs/log.md says what to run",
    )


def _one(db: Database, query: str, *values: object) -> dict[str, Any]:
    return db.execute(sql.SQL(query), values).fetchone() or {}
