"""The journal's one writing thread: takes all that is queued, commits it together, and reports progress.

`put` never waits and never fails, because the event loop calls it as the last act of a session. An entry is
dropped only when its commit is on disk, or when it alone can never be written (a damaged page or a bug,
logged and counted). From then on `damage` says so, because what comes next may be lost too. A full disk is
waited out with the backlog in memory. The thread ends after `stop`, when the backlog is written or cannot be.
"""

import logging
import shutil
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from attrs import define, evolve, field

from polarnode.journal.damage import is_corrupt
from polarnode.journal.disk import refusal
from polarnode.journal.entries import Entry
from polarnode.journal.retention import (
    Moment,
    acknowledged_seq,
    came_at,
    page_bytes,
    positions,
    prune,
)
from polarnode.journal.schema import transaction
from polarnode.journal.values import AwaitedConsumers, Progress, Retention

logger = logging.getLogger(__name__)

# a commit of this size takes about 0.1 s; beyond it the wait of the first entry grows and nothing is won
BATCH_BYTES = 16 << 20
# seconds that a turn may wait for others to be committed with: a commit costs the node some 0.3 ms whatever
# is in it, and no harness sees that its answer is on disk so much later
GATHER_S = 0.02
LOOK_S = 600.0  # between looks at what has become old while nothing is written: retention is in hours
# free on the disk below which events kept only to be read again are pruned: four times the space at which
# tasks are refused
SHORT_BYTES = 1 << 30
RETRY_S = 1.0  # between attempts while the disk is full: someone is deleting files, not racing us
# Errors of the statement or of the page that it meets, not of the disk: trying again fails again. An error
# without a code comes from Python's binding of values.
HOPELESS = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_MISUSE,
    sqlite3.SQLITE_RANGE,
    sqlite3.SQLITE_TOOBIG,
}


@define(eq=False)
class Writer:
    """Owns the writing connection and the backlog. `on_progress` is called in the writer's thread after every
    commit.
    """

    path: Path
    db: sqlite3.Connection
    retention: Retention
    on_progress: Callable[[Progress], None]
    now: Callable[[], float]  # called in its thread too
    present: frozenset[str] = frozenset()  # consumers with a stream open; replaced, never changed
    warning: str | None = None
    dropped: int = 0
    found: str | None = None  # what SQLite's check found wrong with the file when it was opened
    put_entries: int = 0
    backlog_bytes: int = 0
    _done_entries: int = 0
    _backlog: deque[Entry] = field(factory=deque)
    _stopping: bool = False
    _hurried: bool = False  # what is queued is committed at once
    _changed: threading.Condition = field(factory=threading.Condition)
    _thread: threading.Thread | None = None
    _last: Progress = field(factory=Progress)
    _opened: float = 0.0
    _pruning: bool = False  # the last commit dropped something, and there may be more

    @property
    def damage(self) -> str | None:
        """Why nothing new may be taken, until the journal is another one."""
        if self.dropped:
            what = f"{self.dropped} entries could not be written to the journal {self.path}, as node.log says"
        elif self.found is not None:
            what = f"the journal {self.path} is damaged ({self.found})"
        else:
            return None
        return (
            f"{what}: no new work is taken, and what it holds is still read; stop the node, run polarnode"
            " check, then put a copy of the file back, or move it away to start a new one"
        )

    @property
    def backlog_entries(self) -> int:
        return self.put_entries - self._done_entries

    def start(self) -> Progress:
        """Start the thread. Gives what the journal holds now."""
        # a disk that hangs must not keep the process
        self._thread = threading.Thread(target=self._run, name="journal writer", daemon=True)
        self._opened = self.now()
        self._last = self._progress()
        self._thread.start()
        return self._last

    def put(self, entry: Entry, *, gather: bool = False) -> int:
        """Queue an entry; returns its number. Order is kept. With `gather` it may wait for GATHER_S."""
        with self._changed:
            self._backlog.append(entry)
            self.put_entries += 1
            self.backlog_bytes += entry.size
            self._hurried = self._hurried or not gather
            if self._hurried or len(self._backlog) == 1:
                self._changed.notify()
            return self.put_entries

    def hurry(self) -> None:
        """Somebody waits for what is queued."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def stop(self) -> None:
        """Write what is queued and end; while the disk refuses, one more attempt is made and the rest given
        up.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread, in a thread of the caller's."""
        if self._thread is not None:
            self._thread.join(seconds)

    def waiting(self) -> AwaitedConsumers:
        """The consumers that the journal waits for now."""
        since = self.now() - self.retention.silence_s
        return AwaitedConsumers(since=since if self._opened <= since else -inf, present=self.present)

    # ── the thread ────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while (batch := self._take()) is not None:
                self._write_until_done(batch)
                del batch  # it holds up to BATCH_BYTES, and the next one may come in minutes
        finally:
            self.db.close()

    def _take(self) -> Sequence[Entry] | None:
        """The next batch, waited for; an empty one when it is time to prune, None when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._backlog or self._stopping, 0 if self._pruning else LOOK_S)
            if self._stopping and not self._backlog:
                return None
            if self._backlog:
                self._changed.wait_for(lambda: self._hurried or self._stopping, GATHER_S)
            self._hurried = False
            batch: list[Entry] = []
            size = 0
            while self._backlog and size < BATCH_BYTES:
                batch.append(self._backlog.popleft())
                size += batch[-1].size
            return batch

    def _write_until_done(self, batch: Sequence[Entry]) -> None:
        while not self._written(batch):
            with self._changed:
                if self._stopping:
                    logger.error(
                        "the journal is closed with %s entries unwritten: %s",
                        self.backlog_entries,
                        self.warning,
                    )
                    self._backlog.clear()
                    return
                self._changed.wait(RETRY_S)
        with self._changed:
            self._done_entries += len(batch)
            self.backlog_bytes -= sum(entry.size for entry in batch)
        self.warning = None
        self._report()

    def _written(self, batch: Sequence[Entry]) -> bool:
        """Commit the batch. False when the disk refuses; an entry that can never be written is dropped from
        it.
        """
        try:
            self._commit(batch)
        except sqlite3.Error as error:
            # the low byte is the class of the error
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in HOPELESS:
                return self._written_one_by_one(batch)
            why = refusal(self.path.parent) or "make room on its disk"
            self.warning = f"the journal cannot be written ({error}): {why}"
            return False
        except Exception:  # an entry's own bug must not stop the journal of all others
            return self._written_one_by_one(batch)
        return True

    def _written_one_by_one(self, batch: Sequence[Entry]) -> bool:
        if len(batch) > 1:
            return all(self._written([entry]) for entry in batch)
        logger.exception(
            "the journal drops an entry that it cannot write: its file is damaged (run polarnode check), or"
            " this is a bug of polarnode"
        )
        self.dropped += 1
        return True

    def _commit(self, batch: Sequence[Entry]) -> None:
        with transaction(self.db):
            for entry in batch:
                entry.apply(self.db)
            self._pruning = self._pruned(len(batch))

    def _pruned(self, came: int) -> bool:
        """Prune within the commit. What cannot be deleted because its page is damaged stays; the entries are
        written all the same.
        """
        self.db.execute("SAVEPOINT prune")
        try:
            found = prune(self.db, self.retention, self._moment(came))
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.db.execute("ROLLBACK TO prune")
            logger.error(
                "the journal cannot prune, because its file is damaged: run polarnode check (%s)", error
            )
            self.found = self.found or str(error)
            found = False
        self.db.execute("RELEASE prune")
        return found

    def _moment(self, came: int) -> Moment:
        """Within the commit: an acknowledgement in it counts."""
        acknowledged, last = acknowledged_seq(positions(self.db), self.waiting()), self._last
        short = last.disk_free + last.free_bytes < SHORT_BYTES
        return Moment(now=self.now(), acknowledged=acknowledged, short=short, came=came)

    def _report(self) -> None:
        try:
            self._last = self._progress()
        except (sqlite3.Error, OSError) as error:
            # the entries are on disk all the same, and someone may wait for them
            self.warning = f"the journal cannot be measured ({error}): look at its disk"
            if isinstance(error, sqlite3.Error) and is_corrupt(error):
                self.found = self.found or str(error)
            self._last = evolve(self._last, entries=self._done_entries)
        self.on_progress(self._last)

    def _progress(self) -> Progress:
        last = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        (pruned,) = self.db.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()
        consumers = positions(self.db)
        acknowledged = acknowledged_seq(consumers, self.waiting())
        stored, free = page_bytes(self.db)
        return Progress(
            entries=self._done_entries,
            last_seq=last[0] if last else 0,
            first_seq=pruned + 1,
            stored_bytes=stored,
            free_bytes=free,
            disk_free=shutil.disk_usage(self.path.parent).free,
            consumers=consumers,
            acknowledged_seq=acknowledged,
            oldest_unacknowledged=came_at(self.db, acknowledged + 1),
        )
