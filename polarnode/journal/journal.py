"""The node's durable, ordered record of what happened. Writing is synchronous and never waits; reading sees
only what is on disk.

What must not be lost is enqueued by a plain call, because a Trio checkpoint between "done" and "recorded" can
lose a finished rollout. Numbers of events are given in commit order and never twice, so a trainer may resume
at any of them. Each reader keeps its own position, and a slow reader delays no session. Statistics are those
of the writer's last commit, so they need no disk access. One process owns a journal while it has it open.
"""

import errno
import fcntl
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from sqlite3 import Connection
from typing import IO, Concatenate, ParamSpec, TypeVar

import trio
from attrs import define, field

from polarnode.core.errors import JournalDamaged, JournalError, Refused, boundary
from polarnode.core.status import Consumer, SessionRecord
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.groups.group import SessionFacts
from polarnode.journal import entries, queries
from polarnode.journal.condition import consumer_records, journal_statistics
from polarnode.journal.damage import DamageRecorder
from polarnode.journal.disk import disk_error_sentence
from polarnode.journal.entries import (
    JournalEntry,
    WeightsRow,
    session_entry,
    turn_entry,
    weight_row,
    weight_rows,
)
from polarnode.journal.forks import EarlierAttempt, ForkParent, earlier_attempts, fork_parent, forks
from polarnode.journal.log.news import NewsCounter
from polarnode.journal.pending_callbacks import EVENT_KINDS
from polarnode.journal.queries import ByteCache, finished_places
from polarnode.journal.retention import (
    MAX_CONSUMERS,
    acknowledge_entry,
    forget_entry,
    longest_unseen,
    seen_entry,
)
from polarnode.journal.schema import (
    WAL_KEPT_BYTES,
    connect_journal,
    find_structure_fault,
    open_error,
    prepare_journal,
)
from polarnode.journal.values import (
    BACKLOG_BYTES,
    DISK_FREE_BYTES,
    EventFilters,
    EventKind,
    EventPage,
    JournalProgress,
    JournalStatistics,
    RetentionLimits,
    TaskRecord,
    TrajectoryEncoder,
    UnfinishedSession,
    json_encoder,
)
from polarnode.journal.writer import JournalWriter
from polarnode.merge.trajectory import Identity
from polarnode.support.bounded import open_private

logger = logging.getLogger(__name__)

# ── journal ────────────────────────────────────────────────────────────

P = ParamSpec("P")
T = TypeVar("T")

# Threads and connections for reading. Packing JSON holds the interpreter's lock, so more of them would only
# wait for it.
MAX_READERS = 4
EVENTS_PER_PAGE = 64  # group events of small sessions are a kilobyte; large ones are bounded by bytes


@define(eq=False)
class Journal:
    """The journal. Created by `open_journal`."""

    path: Path
    id: str  # random, given when the journal was created, and never changed
    now: Callable[[], float]
    callback_kinds: Mapping[str, tuple[EventKind, ...]]
    _writer: JournalWriter
    _progress: JournalProgress
    news: NewsCounter = field(factory=NewsCounter)  # counts commits that wrote events
    _commit_event: trio.Event = field(factory=trio.Event)  # set and replaced at every commit
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(MAX_READERS))
    _connections: list[Connection] = field(factory=list)
    _event_cache: ByteCache = field(factory=ByteCache)
    _open_streams: Counter[str] = field(factory=Counter)  # streams open by consumer
    _damages: DamageRecorder = field(factory=DamageRecorder)
    damage_event: trio.Event = field(factory=trio.Event)  # set for good once the file is known to be damaged

    # ── writing: synchronous, in order, never waits ───────────────────────────

    def callback_kinds_for(self, spec: TaskSpec) -> tuple[EventKind, ...]:
        """The kinds of events that are sent to the task's callback."""
        return self.callback_kinds.get(spec.callback_format, EVENT_KINDS)

    def record_session(self, identity: Identity) -> None:
        """Record the identity of a session. A session without a task begins with this. The entry may wait to
        be committed with others, as a turn may: nothing that could be lost is known of the session before it.
        """
        self._writer.enqueue(session_entry(identity), gather=True)

    def record_turn(self, turn: Turn) -> None:
        """Record a finished model call. A second turn with the same index replaces it."""
        self._writer.enqueue(turn_entry(turn), gather=True)

    def write(self, entry: JournalEntry) -> None:
        """Enqueue an entry that another module made."""
        self._writer.enqueue(entry)

    async def commit(self, entry: JournalEntry) -> None:
        """Enqueue an entry before the first checkpoint, and return when it is on disk. Raises JournalDamaged
        when it could not be written.
        """
        dropped = self._writer.dropped
        await self._wait_written(self._writer.enqueue(entry))
        if self._writer.dropped != dropped:
            raise JournalDamaged(self._writer.damage or "")

    async def flush(self) -> None:
        """Return when everything that was enqueued before this call is on disk. Raises JournalDamaged when
        some of it could not be written.
        """
        dropped = self._writer.dropped
        await self._wait_written(self._writer.enqueued_entries)
        if self._writer.dropped != dropped:
            raise JournalDamaged(self._writer.damage or "")

    async def _wait_written(self, number: int) -> None:
        if self._progress.entries < number:
            self._writer.commit_soon()
        while self._progress.entries < number:
            await self._commit_event.wait()
        await trio.lowlevel.checkpoint()

    # ── consumers ─────────────────────────────────────────────────────────────

    async def position(self, consumer: str) -> int:
        """The number of the last event that `consumer` acknowledged; 0 for an unknown consumer."""
        await trio.lowlevel.checkpoint()
        return self._position(consumer)

    async def acknowledge(self, consumer: str, seq: int, *, now: float | None = None) -> int:
        """Move a consumer's position forward, never back and never beyond the last event. Returns the
        position.

        `now` is in seconds since the epoch; the journal's own time is the default. An unknown consumer is
        created, with `seq` 0 at the beginning. Where there are MOST consumers, a new one replaces the one
        that was not seen for longest; Refused is raised when the journal waits for all of them.
        """
        consumers = self._progress.consumers
        if consumer not in consumers and len(consumers) >= MAX_CONSUMERS:
            unseen = longest_unseen(consumers, self._writer.awaited_consumers())
            if unseen is None:
                raise Refused(
                    f"there are {MAX_CONSUMERS} consumers: DELETE /v1/consumers/{{name}} those that do not"
                    " come back",
                    path="$.consumer",
                )
            self._writer.enqueue(forget_entry(unseen))
        if consumer not in consumers:
            logger.info("consumer %s is new, after event %d", consumer, min(seq, self.last_seq))
        await self._wait_written(
            self._writer.enqueue(acknowledge_entry(consumer, seq, now=self.now() if now is None else now))
        )
        return self._position(consumer)

    def _position(self, consumer: str) -> int:
        found = self._progress.consumers.get(consumer)
        return 0 if found is None else found.seq

    async def forget_consumer(self, consumer: str) -> bool:
        """Delete `consumer` and its position. Its name may be used again. Returns False when it does not
        exist.
        """
        existed = consumer in self._progress.consumers
        await self._wait_written(self._writer.enqueue(forget_entry(consumer)))
        logger.info("consumer %s was forgotten", consumer)
        return existed

    def track_stream(self, consumer: str, change: int) -> None:
        """Count a stream of a consumer that is opened (`change` 1) or closed (-1). While a stream is open,
        retention waits for the consumer, even if it acknowledges nothing for long.
        """
        self._open_streams[consumer] += change
        self._open_streams += Counter()  # drops those at 0
        self._writer.connected_consumers = frozenset(self._open_streams)
        self._writer.enqueue(seen_entry(consumer, now=self.now()))
        verb = "reads" if change > 0 else "left"
        logger.info("consumer %s %s after event %d", consumer, verb, self._position(consumer))

    @property
    def connected_consumers(self) -> frozenset[str]:
        """The consumers that have a stream open."""
        return self._writer.connected_consumers

    def open_streams(self, consumer: str) -> int:
        """How many streams of a consumer are open."""
        return self._open_streams[consumer]

    def consumers(self) -> tuple[Consumer, ...]:
        """Describe every consumer, and how far it is behind."""
        return consumer_records(self._progress, self._writer.awaited_consumers(), self._open_streams)

    # ── reading ───────────────────────────────────────────────────────────────

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self.query(queries.task, task_id)

    async def latest_run(self, name: str) -> TaskRecord | None:
        """The last task that was submitted under a name. Later tasks of one name have numbers
        (`entries.RUN`).
        """
        return await self.query(entries.latest_run, name)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        """The first task that was submitted with this idempotency key."""
        return await self.query(queries.task_of_key, idempotency_key)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        """Tasks, newest first. `before` is the last task_id of the previous page."""
        return await self.query(queries.tasks, limit, before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self.query(queries.session, session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """A session's trajectory with all its turns. None when the session is unknown, pruned or not over."""
        return await self.query(queries.trajectory, session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        return await self.query(queries.turns, session_id)

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session that forks go on from; None when it is unknown or pruned. It may be live or have just
        ended: its last turns are on disk before it is read.
        """
        await self.flush()
        return await self.query(fork_parent, fork.session, fork.turn)

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        """The earlier sessions of a session's place, the last one first. All that is enqueued of them is on
        disk before they are read.
        """
        await self.flush()
        return await self.query(earlier_attempts, place)

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        """The first forks of a session, in the order in which they began."""
        return await self.query(forks, session_id, limit)

    async def weights(self, limit: int | None) -> tuple[WeightsRow, ...]:
        """The versions of the base model's weights, newest first."""
        return await self.query(weight_rows, limit)

    async def adapters(self) -> tuple[WeightsRow, ...]:
        """The versions of all adapters, newest first."""
        return await self.query(weight_rows, None, adapters=True)

    async def weights_of(self, version: str) -> WeightsRow | None:
        return await self.query(weight_row, version)

    async def finished_places(self, task_id: str) -> tuple[SessionFacts, ...]:
        """What is needed of the task's finished sessions to judge its group."""
        return await self.query(finished_places, task_id)

    async def unfinished_sessions(self) -> tuple[UnfinishedSession, ...]:
        """Sessions of earlier runs of the node that have no trajectory. The caller publishes one for each, so
        that it ends `interrupted`.
        """
        return await self.query(queries.unfinished_sessions)

    async def events(
        self,
        after: int,
        *,
        filters: EventFilters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = EVENTS_PER_PAGE,
    ) -> EventPage:
        """A page of the events after `after`, bounded in number and bytes. Trajectories are JSON unless
        `encoder` writes them otherwise. The next page begins at this page's `seen`.
        """
        return await self.query(
            queries.events,
            after,
            limit,
            filters or EventFilters(),
            encoder or json_encoder(),
            self._event_cache,
        )

    async def wait_event_after(self, seq: int) -> None:
        """Return when there is an event after `seq`."""
        while self.last_seq <= seq:
            await self._commit_event.wait()
        await trio.lowlevel.checkpoint()

    @property
    def last_seq(self) -> int:
        return self._progress.last_seq

    @property
    def first_seq(self) -> int:
        """The number of the oldest event that is kept, or of the next one where none is."""
        return self._progress.first_seq

    async def run_in_thread(self, call: Callable[[], T]) -> T:
        """Run a long pure call, such as a trajectory to JSON, in the threads of the journal's reads."""
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    async def query(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of a read connection in a thread, off the event loop."""
        return await trio.to_thread.run_sync(
            lambda: self._query_now(query, *args, **kwargs), limiter=self._limiter
        )

    def _query_now(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with boundary(JournalError, "the journal cannot be read (polarnode check names what is damaged)"):
            db = self._connections.pop() if self._connections else self._open_connection()
            try:
                return query(db, *args, **kwargs)
            finally:
                self._connections.append(db)

    def _open_connection(self) -> Connection:
        return connect_journal(self.path, read_only=True, damages=self._damages)

    # ── condition ─────────────────────────────────────────────────────────────

    def statistics(self) -> JournalStatistics:
        return journal_statistics(
            self._progress,
            self._writer,
            now=self.now(),
            warning=self._current_warning(),
            refuses_tasks=self.refuses_tasks,
            damaged=self._damages.damaged_rows(),
        )

    @property
    def refuses_tasks(self) -> bool:
        """Whether new tasks must be refused, because the file is damaged, the disk is full or nearly so, or
        too much waits in memory.
        """
        return self._current_warning() is not None

    @property
    def damage(self) -> str | None:
        """Why no new work may be taken, where the file is damaged; None otherwise."""
        return self._writer.damage

    def require_undamaged(self) -> None:
        """Raise JournalDamaged where the file is damaged, because what is written now may be lost."""
        if self._writer.damage is not None:
            raise JournalDamaged(self._writer.damage)

    def _current_warning(self) -> str | None:
        return self._writer.damage or self._writer.warning or self._disk_warning()

    def _disk_warning(self) -> str | None:
        try:
            flags = os.statvfs(self.path.parent).f_flag
        except OSError as error:  # a request for the node's status must not fail because of its disk
            return f"the journal's disk does not answer ({error}): no new task is taken"
        if flags & os.ST_RDONLY:
            why = disk_error_sentence(OSError(errno.EROFS, os.strerror(errno.EROFS)), self.path.parent)
            return f"{why}, no new task is taken"
        # SQLite reuses the file's free pages first. It writes them to the write-ahead log, which needs room
        # too.
        free = self._progress.disk_free + self._progress.free_bytes
        if free < DISK_FREE_BYTES or self._progress.disk_free < WAL_KEPT_BYTES:
            return (
                f"the journal's disk has {self._progress.disk_free >> 20} MiB left: make room, no new task is"
                " taken"
            )
        if self._writer.backlog_bytes > BACKLOG_BYTES:
            return (
                f"{self._writer.backlog_bytes >> 20} MiB wait for the journal's disk, which is too slow: no"
                " new task is taken"
            )
        return None

    @property
    def progress(self) -> JournalProgress:
        """The state after the last commit."""
        return self._progress

    def _set_progress(self, progress: JournalProgress) -> None:
        before, self._progress = self._progress, progress
        if progress.last_seq != before.last_seq:
            self.news.announce()
        committed, self._commit_event = self._commit_event, trio.Event()
        committed.set()
        self._look_for_damage()

    def _look_for_damage(self) -> None:
        if self._writer.damage is not None and not self.damage_event.is_set():
            logger.error("%s", self._writer.damage)
            self.damage_event.set()

    def _close_connections(self) -> None:
        for db in self._connections:
            db.close()


# ── opening ────────────────────────────────────────────────────────────

# Closing waits this long for the writer. A batch of 16 MiB takes 0.1 s, so only a backlog of gigabytes or a
# disk that hangs takes longer.
CLOSE_TIMEOUT_S = 30.0
# Opening waits this long for SQLite's check of the file, which reads 2 GB a second where they are in memory.
# The check of a larger file goes on while the node runs.
CHECK_WAIT_S = 10.0


@asynccontextmanager
async def open_journal(
    path: Path,
    *,
    now: Callable[[], float],
    retention: RetentionLimits | None = None,
    callback_kinds: Mapping[str, tuple[EventKind, ...]] | None = None,
) -> AsyncIterator[Journal]:
    """Open the journal in the SQLite file `path` for this process alone. The file is created if it is
    missing.

    Leaving the block writes what is queued, in at most CLOSE_S. `now` gives wall-clock seconds since the
    epoch. `callback_kinds` maps a task's `callback_format` to the kinds of events that its callback is sent;
    formats that are not in it are sent EVENT_KINDS. Raises JournalError when the file cannot be opened.
    """
    token = trio.lowlevel.current_trio_token()
    with _hold_lock_file(path):
        damages = DamageRecorder()
        db = await trio.to_thread.run_sync(prepare_journal, path, damages)

        def call_soon(act: Callable[P, None], *args: P.args, **_: P.kwargs) -> None:
            # The Trio run may have ended in an error while the last batch was written.
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(act, *args)

        def on_progress(progress: JournalProgress) -> None:
            call_soon(journal._set_progress, progress)

        def check_structure() -> None:
            writer.file_fault = writer.file_fault or find_structure_fault(path)
            call_soon(journal._look_for_damage)

        writer = JournalWriter(
            path=path, db=db, retention=retention or RetentionLimits(), on_progress=on_progress, now=now
        )
        try:
            (journal_id,) = db.execute("SELECT value FROM meta WHERE name = 'journal'").fetchone()
            progress = writer.start()
        except sqlite3.Error as error:
            raise open_error(path, error) from error
        journal = Journal(
            path=path,
            id=journal_id,
            now=now,
            callback_kinds=callback_kinds or {},
            writer=writer,
            progress=progress,
            damages=damages,
        )
        try:
            with trio.move_on_after(CHECK_WAIT_S):
                await trio.to_thread.run_sync(check_structure, abandon_on_cancel=True)
            journal._look_for_damage()
            yield journal
        finally:
            writer.stop()
            with trio.move_on_after(CLOSE_TIMEOUT_S + 1, shield=True):
                # The thread is not abandoned when the deadline fires: its own bound ends it, and under a
                # virtual clock the deadline fires at once.
                await trio.to_thread.run_sync(writer.join, CLOSE_TIMEOUT_S)
            journal._close_connections()


@contextmanager
def _hold_lock_file(path: Path) -> Iterator[None]:
    """Hold the journal's lock file, because two writers would give the same numbers. It lies beside the file
    itself, even where `path` is a symbolic link.
    """
    try:
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(path.name + ".lock"), "w", opener=open_private)  # noqa: SIM115
    except OSError as error:
        raise JournalError(
            f"the journal {path} cannot be opened ({error}): make its folder writable, or give the node"
            " another state folder"
        ) from error
    with lock:
        _take_lock(lock, path)
        if path.is_file() and path.stat().st_nlink > 1:  # SQLite keeps another write-ahead log for each name
            raise JournalError(
                f"the journal {path} has a second name (a hard link), under which others may write: copy"
                " it to a file of its own"
            )
        yield


def _take_lock(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(
            f"the journal {path} is in use by another process: stop that node, or give this one its own state"
            " folder"
        ) from None
