"""A connection to PostgreSQL that is opened again when it is lost.

psycopg blocks, so a connection is used in threads, by one at a time. Its settings end an answer that does not
come, a transaction that is left open and a connection to a peer that is gone in seconds, not in hours.
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
from polarnode.journal.log.port import LogUnavailable

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Database = psycopg.Connection[dict[str, Any]]

SCHEMA: Final = "polarnode"
CONNECT_TIMEOUT_S: Final = (
    5  # a server answers in less, or not at all during a failover; libpq takes no fraction
)
# For this long after a server could not be reached, calls that waited for that attempt fail at once too. Each
# would otherwise wait for CONNECT_S in its turn. The watcher asks again later than that.
REFUSE_CALLS_S: Final = 0.3
STATEMENT_TIMEOUT_S: Final = (
    60  # a part of a body takes less than a second; a disk that hangs is reported in a minute
)
# Every transaction of a node is one statement or a few in a row. One that stays open for longer belongs to a
# process that was stopped, and its locks block the others.
IDLE_IN_TRANSACTION_S: Final = 5
# Tries of a statement that fails by a deadlock or a serialization. A fourth failure in a row would be a bug.
MAX_TRIES: Final = 3
# A peer that vanished without a word is noticed after IDLE + COUNT * INTERVAL = 11 s.
KEEPALIVE_SETTINGS: Final[dict[str, Any]] = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}
SESSION_SETTINGS: Final = (
    f"-c search_path={SCHEMA} -c statement_timeout={STATEMENT_TIMEOUT_S}s"
    f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_S}s"
    " -c jit=off"  # compiling a claim takes longer than running it
    # A lock is held for milliseconds, or by a stopped process whose idle transaction the server ends.
    " -c lock_timeout=20s"
)

_RETRYABLE_ERRORS = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)


def open_database(dsn: str, *, name: str) -> Database:
    """Open a connection with the settings above. Raises psycopg.Error."""
    found = psycopg.connect(
        dsn,
        autocommit=True,
        row_factory=dict_row,
        application_name=f"polarnode {name}",
        connect_timeout=CONNECT_TIMEOUT_S,
        options=SESSION_SETTINGS,
        **KEEPALIVE_SETTINGS,
    )
    found.prepare_threshold = 3
    return found


@define(eq=False)
class LogConnection:
    """One connection, used by one thread at a time. `away` says why the log cannot be reached, or is None."""

    dsn: str
    name: str
    unavailable_reason: str | None = field(default=None, init=False)
    # How often it was opened: each connection may be to another server.
    times_opened: int = field(default=0, init=False)
    _refused_at: float = field(default=float("-inf"), init=False)  # when it last could not be opened
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
            if (
                self._db is None
                and self.unavailable_reason is not None
                and time.monotonic() - self._refused_at < REFUSE_CALLS_S
            ):
                raise _log_unavailable(self.unavailable_reason)
            for tried in range(1, MAX_TRIES + 1):
                try:
                    db = self._open_if_needed()
                    found = call(db, *args, **kwargs)
                    self.unavailable_reason = None
                    return found
                except _RETRYABLE_ERRORS as error:
                    if tried == MAX_TRIES:  # the caller makes the call again later
                        raise LogUnavailable(f"the log refused a call {MAX_TRIES} times: {error}") from error
                except psycopg.Error as error:
                    self._raise_failure(error)
        raise AssertionError("unreachable")

    def _open_if_needed(self) -> Database:
        if self._db is None:
            self._db = open_database(self.dsn, name=self.name)
            self.times_opened += 1
            if self.unavailable_reason is not None:
                logger.warning("the log answers again (%s connection)", self.name)
        return self._db

    def _raise_failure(self, error: psycopg.Error) -> None:
        """Raise LogAway where the connection or the server failed, and the error itself where a statement
        did; Refused for text that no column can hold.
        """
        if isinstance(error, psycopg.DataError) and error.sqlstate is None:  # psycopg refused to send it
            raise Refused("ids, names and URLs must not contain the character U+0000") from error
        sort = "" if error.sqlstate is None else error.sqlstate[:2]
        # The classes of errors that mean a lost server: 08 connection, 53 no resources, 57 operator's
        # intervention (shutdown, statement timeout), 58 the server's disk, 25 a read-only standby or a
        # transaction that was ended, 3D and 28 a database or login that is missing while the server is being
        # set up again.
        lost = self._db is None or self._db.closed or sort in ("08", "53", "57", "58", "25", "3D", "28")
        if sort == "55":  # a lock was not granted in time
            lost = True
        if self._db is None:
            self._refused_at = time.monotonic()
        self.close_now()
        if not lost:
            raise error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self.unavailable_reason is None:
            logger.warning("the log is away (%s connection): %s", self.name, reason)
        self.unavailable_reason = reason
        raise _log_unavailable(reason) from error

    def close_now(self) -> None:
        """Close the connection. The next call opens another one."""
        db, self._db = self._db, None
        if db is not None:
            db.close()


def _log_unavailable(reason: str) -> LogUnavailable:
    return LogUnavailable(f"the log is away ({reason}): sessions go on; try again later", reason=reason)


def check_dsn(dsn: str) -> str:
    """Return a DSN if libpq can read it. Raises ConfigError otherwise, without the password in the
    message.
    """
    read_dsn(dsn)
    return dsn


def read_dsn(dsn: str) -> Mapping[str, str]:
    """The settings in a DSN, by libpq's names. Raises ConfigError for what is no DSN, without its
    password.
    """
    try:
        found = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise ConfigError(
            "log must be a DSN of libpq, such as postgresql://polarnode@db/polarnode?sslmode=verify-full"
        ) from error
    return {name: str(value) for name, value in found.items() if value is not None}
