"""A connection to PostgreSQL that is opened again when it is lost.

psycopg blocks, so a connection is used in threads, by one at a time. What it sets for its own session: an
answer that does not come, a transaction that is left open and a peer that is gone all end in seconds, not
in hours.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import psycopg
import trio
from attrs import define, field
from psycopg.rows import dict_row

from polarnode.core.errors import ConfigError, Refused
from polarnode.journal.log.port import LogAway

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Database = psycopg.Connection[dict[str, Any]]

SCHEMA: Final = "polarnode"
CONNECT_S: Final = 5  # a failover answers in less, or not at all; libpq takes no fraction
# After a server could not be reached the calls that waited for that one are answered too, in place of each
# waiting for CONNECT_S in its turn. The watcher asks again later than that.
HELD_S: Final = 0.3
STATEMENT_S: Final = (
    60  # a part of a body takes less than a second; a disk that hangs is reported in a minute
)
# Every transaction of a node is one statement or a few in a row; one that is open for longer belongs to a
# process that was stopped, and its locks hold the others.
IDLE_IN_TRANSACTION_S: Final = 5
TRIES: Final = 3  # of a statement that lost a deadlock or a serialization; a fourth in a row would be a bug
# A peer that vanished without a word is noticed after IDLE + COUNT * INTERVAL = 11 s.
KEEPALIVES: Final[dict[str, Any]] = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}
SETTINGS: Final = (
    f"-c search_path={SCHEMA} -c statement_timeout={STATEMENT_S}s"
    f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_S}s"
    " -c jit=off"  # to compile a claim takes longer than to run it
    " -c lock_timeout=20s"  # a lock is held for milliseconds, or by a process that the line above ends
)

_AGAIN = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)


def open_database(dsn: str, *, name: str) -> Database:
    """Open a connection with our settings. Raises psycopg.Error."""
    found = psycopg.connect(
        dsn,
        autocommit=True,
        row_factory=dict_row,
        application_name=f"polarnode {name}",
        connect_timeout=CONNECT_S,
        options=SETTINGS,
        **KEEPALIVES,
    )
    found.prepare_threshold = 3
    return found


@define(eq=False)
class Connection:
    """One connection, used by one thread at a time. `away` says why the log cannot be reached, or is None."""

    dsn: str
    name: str
    away: str | None = field(default=None, init=False)
    opened: int = field(default=0, init=False)  # times; another one may be to another server
    _refused: float = field(default=float("-inf"), init=False)  # when it could not be opened
    _db: Database | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1), init=False)

    async def run(self, call: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the connection in a thread. Raises LogAway."""
        return await trio.to_thread.run_sync(
            lambda: self.run_now(call, *args, **kwargs), limiter=self._limiter
        )

    def run_now(self, call: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the connection in this thread. Raises LogAway."""
        with self._lock:
            if self._db is None and self.away is not None and time.monotonic() - self._refused < HELD_S:
                raise _log_away(self.away)
            for tried in range(1, TRIES + 1):
                try:
                    db = self._opened()
                    found = call(db, *args, **kwargs)
                    self.away = None
                    return found
                except _AGAIN as error:
                    if tried == TRIES:  # whoever asked makes the call again, later
                        raise LogAway(f"the log refused a call {TRIES} times: {error}") from error
                except psycopg.Error as error:
                    self._failed(error)
        raise AssertionError("unreachable")

    def _opened(self) -> Database:
        if self._db is None:
            self._db = open_database(self.dsn, name=self.name)
            self.opened += 1
            if self.away is not None:
                logger.warning("the log answers again (%s connection)", self.name)
        return self._db

    def _failed(self, error: psycopg.Error) -> None:
        """Raise LogAway where the connection or the server failed, and the error itself where a statement
        did; Refused for text that no column can hold.
        """
        if isinstance(error, psycopg.DataError) and error.sqlstate is None:  # before it was sent
            raise Refused("ids, names and URLs must not contain the character U+0000") from error
        sort = "" if error.sqlstate is None else error.sqlstate[:2]
        # 08 connection, 53 no resources, 57 operator's intervention (shutdown, statement timeout), 58 its
        # disk, 25 a read-only standby or a transaction that was ended; 3D and 28: where it is being set up
        # again
        lost = self._db is None or self._db.closed or sort in ("08", "53", "57", "58", "25", "3D", "28")
        if sort == "55":  # a lock that was not given in time
            lost = True
        if self._db is None:
            self._refused = time.monotonic()
        self.close_now()
        if not lost:
            raise error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self.away is None:
            logger.warning("the log is away (%s connection): %s", self.name, reason)
        self.away = reason
        raise _log_away(reason) from error

    def close_now(self) -> None:
        """Close it; the next call opens another one."""
        db, self._db = self._db, None
        if db is not None:
            db.close()


def _log_away(reason: str) -> LogAway:
    return LogAway(f"the log is away ({reason}): sessions go on; try again later", reason=reason)


def check_dsn(dsn: str) -> str:
    """A DSN that libpq can read, or ConfigError. Its password is never part of the message."""
    read_dsn(dsn)
    return dsn


def read_dsn(dsn: str) -> Mapping[str, str]:
    """The settings in a DSN by libpq's names. Raises ConfigError, without its password, for what is none."""
    try:
        found = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise ConfigError(
            "log must be a DSN of libpq, such as postgresql://polarnode@db/polarnode?sslmode=verify-full"
        ) from error
    return {name: str(value) for name, value in found.items() if value is not None}
