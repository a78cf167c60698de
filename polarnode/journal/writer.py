"""How the journal is written: the calls of the event loop, the one thread that commits, and the wait for it.

Invariant: a session's writes are in order and never wait. What must not be lost is enqueued by a plain call,
because a Trio checkpoint between "done" and "recorded" can lose a finished rollout. Such a call never fails,
because it is the last act of a session. There is one queue and one thread: the thread takes all that is
queued, commits it together, and reports the commit to the event loop.

An entry leaves memory only when its commit is on disk, or when it alone can never be written because of a
damaged page or a bug. Such an entry is logged and counted, and from then on `damage` says so, because what
comes next may be lost too. While the disk is full the queue waits in memory. After `stop` the thread ends
when the queue is written or cannot be.
"""

import logging
import shutil
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import trio
from attrs import define, evolve, field

from polarnode.core.errors import JournalDamaged
from polarnode.core.trajectory import Turn
from polarnode.journal.damage import is_corrupt
from polarnode.journal.disk import probe_disk
from polarnode.journal.entries import JournalEntry, session_entry, turn_entry
from polarnode.journal.log.news import NewsCounter
from polarnode.journal.retention import (
    PruneInputs,
    acknowledged_seq,
    event_time,
    page_bytes,
    prune,
    read_positions,
)
from polarnode.journal.schema import transaction
from polarnode.journal.values import AwaitedConsumers, JournalProgress, RetentionLimits
from polarnode.merge.trajectory import Identity

logger = logging.getLogger(__name__)

# ── the calls ─────────────────────────────────────────────────────────────────


@define(eq=False)
class JournalWriter:
    """The writes of the event loop. Entries are written in the order of the calls; those without `async`
    never wait.
    """

    _thread: "WriterThread"
    _commits: "CommitWatch"

    def record_session(self, identity: Identity) -> None:
        """Record the identity of a session. A session without a task begins with this. The entry may wait to
        be committed with others, as a turn may: nothing that could be lost is known of the session before it.
        """
        self._thread.enqueue(session_entry(identity), gather=True)

    def record_turn(self, turn: Turn) -> None:
        """Record a finished model call. A second turn with the same index replaces it."""
        self._thread.enqueue(turn_entry(turn), gather=True)

    def write(self, entry: JournalEntry) -> int:
        """Enqueue an entry that another module made, and return its number."""
        return self._thread.enqueue(entry)

    async def commit(self, entry: JournalEntry) -> None:
        """Enqueue an entry before the first checkpoint, and return when it is on disk. Raises JournalDamaged
        when it could not be written.
        """
        dropped = self._thread.dropped
        await self.wait_written(self._thread.enqueue(entry))
        if self._thread.dropped != dropped:
            raise JournalDamaged(self._thread.damage or "")

    async def flush(self) -> None:
        """Return when everything that was enqueued before this call is on disk. Raises JournalDamaged when
        some of it could not be written.
        """
        dropped = self._thread.dropped
        await self.wait_written(self._thread.enqueued_entries)
        if self._thread.dropped != dropped:
            raise JournalDamaged(self._thread.damage or "")

    async def wait_written(self, number: int) -> None:
        """Return when the entry with this number is on disk or dropped, and all entries before it."""
        if self._commits.progress.entries < number:
            self._thread.commit_soon()
        await self._commits.wait_entry(number)


# ── commits, as the event loop knows them ─────────────────────────────────────


@define(eq=False)
class CommitWatch:
    """The state after the last commit, and the waits for later ones. Reading it needs no disk access."""

    progress: JournalProgress
    news: NewsCounter = field(factory=NewsCounter, init=False)  # counts commits that wrote events
    _next_commit: trio.Event = field(factory=trio.Event, init=False)  # set and replaced at every commit

    def note_commit(self, progress: JournalProgress) -> None:
        """Note what a commit left, and wake those who wait."""
        before, self.progress = self.progress, progress
        if progress.last_seq != before.last_seq:
            self.news.announce()
        committed, self._next_commit = self._next_commit, trio.Event()
        committed.set()

    async def wait_entry(self, number: int) -> None:
        """Return when the entry with this number was part of a commit."""
        while self.progress.entries < number:
            await self._next_commit.wait()
        await trio.lowlevel.checkpoint()

    async def wait_event_after(self, seq: int) -> None:
        """Return when there is an event after `seq`."""
        while self.progress.last_seq <= seq:
            await self._next_commit.wait()
        await trio.lowlevel.checkpoint()


# ── the thread ────────────────────────────────────────────────────────────────

# A commit of this size takes about 0.1 s. A larger one would only make its first entry wait longer.
MAX_BATCH_BYTES = 16 << 20
# Seconds that a turn may wait for others to be committed with it. A commit costs the node some 0.3 ms
# whatever is in it, and no harness notices that its answer is on disk this much later.
GATHER_S = 0.02
PRUNE_INTERVAL_S = 600.0  # between prunings while nothing is written: the limits of retention are in hours
# With less free on the disk, events that are kept only to be read again are pruned. It is four times the
# space at which tasks are refused.
PRUNE_DISK_FREE_BYTES = 1 << 30
RETRY_S = 1.0  # between attempts while the disk is full, until somebody has deleted files
# Errors of the statement or of the page that it meets, not of the disk: another attempt would fail again. An
# error without a code comes from Python's binding of values.
PERMANENT_ERRORS = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_MISUSE,
    sqlite3.SQLITE_RANGE,
    sqlite3.SQLITE_TOOBIG,
}


@define(eq=False)
class WriterThread:
    """The thread that commits. It owns the writing connection and the queue. `on_progress` is called in it
    after every commit.
    """

    path: Path
    db: sqlite3.Connection
    retention: RetentionLimits
    on_progress: Callable[[JournalProgress], None]
    now: Callable[[], float]  # called in the writer's thread too
    connected_consumers: frozenset[str] = frozenset()  # consumers with a stream open; replaced, never changed
    warning: str | None = None
    dropped: int = 0
    file_fault: str | None = None  # what SQLite's check found wrong with the file when it was opened
    enqueued_entries: int = 0
    backlog_bytes: int = 0
    _written_entries: int = 0
    _backlog: deque[JournalEntry] = field(factory=deque)
    _stopping: bool = False
    _commit_now: bool = False  # what is queued is to be committed at once
    _condition: threading.Condition = field(factory=threading.Condition)
    _thread: threading.Thread | None = None
    _last_progress: JournalProgress = field(factory=JournalProgress)
    _opened_at: float = 0.0
    _more_to_prune: bool = False  # the last commit pruned something, and there may be more to prune

    @property
    def damage(self) -> str | None:
        """Why no new work may be taken until the journal is replaced; None for a whole journal."""
        if self.dropped:
            what = f"{self.dropped} entries could not be written to the journal {self.path}, as node.log says"
        elif self.file_fault is not None:
            what = f"the journal {self.path} is damaged ({self.file_fault})"
        else:
            return None
        return (
            f"{what}: no new work is taken, and what it holds is still read; stop the node, run polarnode"
            " check, then put a copy of the file back, or move it away to start a new one"
        )

    @property
    def backlog_entries(self) -> int:
        return self.enqueued_entries - self._written_entries

    def start(self) -> JournalProgress:
        """Start the thread. Returns what the journal holds now."""
        # The thread is a daemon, so that a disk that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="journal writer", daemon=True)
        self._opened_at = self.now()
        self._last_progress = self._read_progress()
        self._thread.start()
        return self._last_progress

    def enqueue(self, entry: JournalEntry, *, gather: bool = False) -> int:
        """Queue an entry and return its number. Order is kept. With `gather` the entry may wait for
        GATHER_S.
        """
        with self._condition:
            self._backlog.append(entry)
            self.enqueued_entries += 1
            self.backlog_bytes += entry.size
            self._commit_now = self._commit_now or not gather
            if self._commit_now or len(self._backlog) == 1:
                self._condition.notify()
            return self.enqueued_entries

    def commit_soon(self) -> None:
        """Commit what is queued at once, because somebody waits for it."""
        with self._condition:
            self._commit_now = True
            self._condition.notify()

    def stop(self) -> None:
        """Write what is queued and end. While the disk refuses, one more attempt is made and the rest is
        given up.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end. This blocks, so it is called in a thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def awaited_consumers(self) -> AwaitedConsumers:
        """The consumers that the journal waits for now."""
        since = self.now() - self.retention.silence_s
        return AwaitedConsumers(
            since=since if self._opened_at <= since else -inf, connected=self.connected_consumers
        )

    # ── in the thread ─────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while (batch := self._take_batch()) is not None:
                self._write_with_retries(batch)
                del batch  # a batch holds up to MAX_BATCH_BYTES, and the next one may come in minutes
        finally:
            self.db.close()

    def _take_batch(self) -> Sequence[JournalEntry] | None:
        """Wait for the next batch. It is empty when it is time to prune, and None when it is time to end."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._backlog or self._stopping, 0 if self._more_to_prune else PRUNE_INTERVAL_S
            )
            if self._stopping and not self._backlog:
                return None
            if self._backlog:
                self._condition.wait_for(lambda: self._commit_now or self._stopping, GATHER_S)
            self._commit_now = False
            batch: list[JournalEntry] = []
            size = 0
            while self._backlog and size < MAX_BATCH_BYTES:
                batch.append(self._backlog.popleft())
                size += batch[-1].size
            return batch

    def _write_with_retries(self, batch: Sequence[JournalEntry]) -> None:
        while not self._write_batch(batch):
            with self._condition:
                if self._stopping:
                    logger.error(
                        "the journal is closed with %s entries unwritten: %s",
                        self.backlog_entries,
                        self.warning,
                    )
                    self._backlog.clear()
                    return
                self._condition.wait(RETRY_S)
        with self._condition:
            self._written_entries += len(batch)
            self.backlog_bytes -= sum(entry.size for entry in batch)
        self.warning = None
        self._report_progress()

    def _write_batch(self, batch: Sequence[JournalEntry]) -> bool:
        """Commit the batch. Returns False when the disk refuses. An entry that can never be written is
        dropped from it.
        """
        try:
            self._commit(batch)
        except sqlite3.Error as error:
            # The low byte of the code is the class of the error.
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in PERMANENT_ERRORS:
                return self._write_one_by_one(batch)
            why = probe_disk(self.path.parent) or "make room on its disk"
            self.warning = f"the journal cannot be written ({error}): {why}"
            return False
        except Exception:  # a bug of one entry must not stop the others
            return self._write_one_by_one(batch)
        return True

    def _write_one_by_one(self, batch: Sequence[JournalEntry]) -> bool:
        if len(batch) > 1:
            return all(self._write_batch([entry]) for entry in batch)
        logger.exception(
            "the journal drops an entry that it cannot write: its file is damaged (run polarnode check), or"
            " this is a bug of polarnode"
        )
        self.dropped += 1
        return True

    def _commit(self, batch: Sequence[JournalEntry]) -> None:
        with transaction(self.db):
            for entry in batch:
                entry.apply(self.db)
            self._more_to_prune = self._prune_some(len(batch))

    def _prune_some(self, came: int) -> bool:
        """Prune within the commit. Rows on a damaged page cannot be deleted and stay; the entries are written
        all the same.
        """
        self.db.execute("SAVEPOINT prune")
        try:
            found = prune(self.db, self.retention, self._prune_inputs(came))
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.db.execute("ROLLBACK TO prune")
            logger.error(
                "the journal cannot prune, because its file is damaged: run polarnode check (%s)", error
            )
            self.file_fault = self.file_fault or str(error)
            found = False
        self.db.execute("RELEASE prune")
        return found

    def _prune_inputs(self, came: int) -> PruneInputs:
        """The inputs of pruning. They are read within the commit, so an acknowledgement in it counts."""
        acknowledged, last = (
            acknowledged_seq(read_positions(self.db), self.awaited_consumers()),
            self._last_progress,
        )
        short = last.disk_free + last.free_bytes < PRUNE_DISK_FREE_BYTES
        return PruneInputs(now=self.now(), acknowledged=acknowledged, disk_short=short, new_entries=came)

    def _report_progress(self) -> None:
        try:
            self._last_progress = self._read_progress()
        except (sqlite3.Error, OSError) as error:
            # The entries are on disk all the same, and somebody may wait for them.
            self.warning = f"the journal cannot be measured ({error}): look at its disk"
            if isinstance(error, sqlite3.Error) and is_corrupt(error):
                self.file_fault = self.file_fault or str(error)
            self._last_progress = evolve(self._last_progress, entries=self._written_entries)
        self.on_progress(self._last_progress)

    def _read_progress(self) -> JournalProgress:
        last = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        (pruned,) = self.db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
        consumers = read_positions(self.db)
        acknowledged = acknowledged_seq(consumers, self.awaited_consumers())
        stored, free = page_bytes(self.db)
        return JournalProgress(
            entries=self._written_entries,
            last_seq=last[0] if last else 0,
            first_seq=pruned + 1,
            stored_bytes=stored,
            free_bytes=free,
            disk_free=shutil.disk_usage(self.path.parent).free,
            consumers=consumers,
            acknowledged_seq=acknowledged,
            oldest_unacknowledged=event_time(self.db, acknowledged + 1),
        )
