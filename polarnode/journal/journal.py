"""The durable, ordered log of what happened. Writing is synchronous and never waits; reading sees only what
is on disk.

What must not be lost is enqueued by a plain call, because a checkpoint between "done" and "recorded" can lose
a finished rollout. Numbers of events are given in commit order and never twice, so a trainer may resume at
any of them. Each reader keeps its own position, and a slow reader delays no session. Statistics are those of
the writer's last commit, so they need no disk access. One process owns a journal while it has it open.
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
from polarnode.groups.group import Facts
from polarnode.journal import entries, queries
from polarnode.journal.condition import consumer_records, statistics
from polarnode.journal.damage import Damages
from polarnode.journal.disk import refusal_of
from polarnode.journal.entries import (
    Entry,
    WeightsRow,
    session_entry,
    turn_entry,
    weights,
    weights_of,
)
from polarnode.journal.forks import EarlierAttempt, ForkParent, earlier_attempts, fork_parent, forks
from polarnode.journal.log.news import News
from polarnode.journal.pending_callbacks import EVENT_KINDS
from polarnode.journal.queries import Recent, places_over
from polarnode.journal.retention import MOST, acknowledge_entry, forget_entry, longest_unseen, seen_entry
from polarnode.journal.schema import WAL_KEPT_BYTES, cannot_open, connect, prepare, structure_fault
from polarnode.journal.values import (
    BACKLOG_BYTES,
    DISK_FREE_BYTES,
    EventKind,
    EventPage,
    Filters,
    JournalStatistics,
    Progress,
    Retention,
    TaskRecord,
    TrajectoryEncoder,
    UnfinishedSession,
    json_encoder,
)
from polarnode.journal.writer import Writer
from polarnode.merge.trajectory import Identity
from polarnode.support.bounded import private_opener

logger = logging.getLogger(__name__)

# ── journal ────────────────────────────────────────────────────────────

P = ParamSpec("P")
T = TypeVar("T")

# threads and connections for reading: packing JSON holds the interpreter's lock, more of them would only
# queue there
READERS = 4
EVENTS_A_PAGE = 64  # group events of small sessions are a kilobyte; large ones are bounded by bytes


@define(eq=False)
class Journal:
    """The journal. Created by `open_journal`."""

    path: Path
    id: str  # given at the journal's birth, at random, and never changed
    now: Callable[[], float]
    callback_kinds: Mapping[str, tuple[EventKind, ...]]
    _writer: Writer
    _progress: Progress
    news: News = field(factory=News)  # of events that are on disk
    _committed: trio.Event = field(factory=trio.Event)  # set and replaced at every commit
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(READERS))
    _connections: list[Connection] = field(factory=list)
    _recent: Recent = field(factory=Recent)
    _reading: Counter[str] = field(factory=Counter)  # streams open by consumer
    _damages: Damages = field(factory=Damages)
    damaged: trio.Event = field(factory=trio.Event)  # set, for good, when the file is known to be damaged

    # ── writing: synchronous, in order, never waits ───────────────────────────

    def kinds_for(self, spec: TaskSpec) -> tuple[EventKind, ...]:
        """The kinds of events that the task's callback is sent."""
        return self.callback_kinds.get(spec.callback_format, EVENT_KINDS)

    def session_started(self, identity: Identity) -> None:
        """The identity of a session. A session without a task begins with this. It waits for others, as a
        turn does: nothing is known of the session before that could be lost.
        """
        self._writer.put(session_entry(identity), gather=True)

    def turn(self, turn: Turn) -> None:
        """Record a finished model call. A second turn with the same index replaces it."""
        self._writer.put(turn_entry(turn), gather=True)

    def write(self, entry: Entry) -> None:
        """Enqueue an entry that its room made."""
        self._writer.put(entry)

    async def commit(self, entry: Entry) -> None:
        """Enqueue an entry, before anything is awaited, and return when it is on disk. Raises JournalDamaged
        when it could not be written.
        """
        dropped = self._writer.dropped
        await self._wait_written(self._writer.put(entry))
        if self._writer.dropped != dropped:
            raise JournalDamaged(self._writer.damage or "")

    async def flushed(self) -> None:
        """Return when all that was enqueued before this call is on disk. Raises JournalDamaged when some of
        it could not be written.
        """
        dropped = self._writer.dropped
        await self._wait_written(self._writer.put_entries)
        if self._writer.dropped != dropped:
            raise JournalDamaged(self._writer.damage or "")

    async def _wait_written(self, number: int) -> None:
        if self._progress.entries < number:
            self._writer.hurry()
        while self._progress.entries < number:
            await self._committed.wait()
        await trio.lowlevel.checkpoint()

    # ── consumers ─────────────────────────────────────────────────────────────

    async def position(self, consumer: str) -> int:
        """The last event `consumer` acknowledged; 0 for an unknown one."""
        await trio.lowlevel.checkpoint()
        return self._position(consumer)

    async def acknowledge(self, consumer: str, seq: int, *, now: float | None = None) -> int:
        """Move a consumer's position forward, never back and never beyond the last event. Returns the
        position. `now`: seconds since the epoch, the journal's own time where it is not given.

        0 creates a consumer. Raises Refused for a new consumer when MOST of them are waited for; otherwise
        the one unseen for longest is deleted for it.
        """
        consumers = self._progress.consumers
        if consumer not in consumers and len(consumers) >= MOST:
            unseen = longest_unseen(consumers, self._writer.waiting())
            if unseen is None:
                raise Refused(
                    f"there are {MOST} consumers: DELETE /v1/consumers/{{name}} those that do not come back",
                    path="$.consumer",
                )
            self._writer.put(forget_entry(unseen))
        if consumer not in consumers:
            logger.info("consumer %s is new, after event %d", consumer, min(seq, self.last_seq))
        await self._wait_written(
            self._writer.put(acknowledge_entry(consumer, seq, now=self.now() if now is None else now))
        )
        return self._position(consumer)

    def _position(self, consumer: str) -> int:
        found = self._progress.consumers.get(consumer)
        return 0 if found is None else found.seq

    async def forget(self, consumer: str) -> bool:
        """Delete `consumer` and its position; the name may be used again. False when it does not exist."""
        existed = consumer in self._progress.consumers
        await self._wait_written(self._writer.put(forget_entry(consumer)))
        logger.info("consumer %s was forgotten", consumer)
        return existed

    def attend(self, consumer: str, change: int) -> None:
        """Count a stream of a consumer that is opened (1) or closed (-1). While one is open, retention waits
        for the consumer, however long it acknowledges nothing.
        """
        self._reading[consumer] += change
        self._reading += Counter()  # drops those at 0
        self._writer.present = frozenset(self._reading)
        self._writer.put(seen_entry(consumer, now=self.now()))
        verb = "reads" if change > 0 else "left"
        logger.info("consumer %s %s after event %d", consumer, verb, self._position(consumer))

    @property
    def present(self) -> frozenset[str]:
        """The consumers that have a stream open."""
        return self._writer.present

    def streams(self, consumer: str) -> int:
        """How many streams of a consumer are open."""
        return self._reading[consumer]

    def consumers(self) -> tuple[Consumer, ...]:
        """Every consumer, and how far it is behind."""
        return consumer_records(self._progress, self._writer.waiting(), self._reading)

    # ── reading ───────────────────────────────────────────────────────────────

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self.query(queries.task, task_id)

    async def latest_run(self, name: str) -> TaskRecord | None:
        """The last task that was submitted under a name that may be used again (`entries.RUN`)."""
        return await self.query(entries.latest_run, name)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        """The first task that was submitted with this key."""
        return await self.query(queries.task_of_key, idempotency_key)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        """Newest first; `before` is the last task_id of the page before."""
        return await self.query(queries.tasks, limit, before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self.query(queries.session, session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """The trajectory with all its turns; None when the session is not over, unknown or pruned."""
        return await self.query(queries.trajectory, session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        return await self.query(queries.turns, session_id)

    async def fork_parent(self, fork: ForkSpec) -> ForkParent | None:
        """The session that forks go on from; None when it is unknown or pruned. It may be live, or have just
        ended: its last turns too.
        """
        await self.flushed()
        return await self.query(fork_parent, fork.session, fork.turn)

    async def earlier_attempts(self, place: Identity) -> tuple[EarlierAttempt, ...]:
        """The sessions that had a session's place before it, the last one first, and all that is enqueued of
        them.
        """
        await self.flushed()
        return await self.query(earlier_attempts, place)

    async def forks(self, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
        """The first forks of a session, in the order they began."""
        return await self.query(forks, session_id, limit)

    async def weights(self, limit: int | None) -> tuple[WeightsRow, ...]:
        """Those of the base, newest first."""
        return await self.query(weights, limit)

    async def adapters(self) -> tuple[WeightsRow, ...]:
        """The versions of all adapters, newest first."""
        return await self.query(weights, None, adapters=True)

    async def weights_of(self, version: str) -> WeightsRow | None:
        return await self.query(weights_of, version)

    async def places_over(self, task_id: str) -> tuple[Facts, ...]:
        """What a group's judge needs of the task's sessions that are over."""
        return await self.query(places_over, task_id)

    async def unfinished(self) -> tuple[UnfinishedSession, ...]:
        """Sessions of earlier runs without a trajectory. Publish one for each, so that it ends
        `interrupted`.
        """
        return await self.query(queries.unfinished)

    async def events(
        self,
        after: int,
        *,
        filters: Filters | None = None,
        encoder: TrajectoryEncoder | None = None,
        limit: int = EVENTS_A_PAGE,
    ) -> EventPage:
        """The events after `after`, bounded in number and bytes, with trajectories as JSON unless `encoder`
        writes them otherwise. Continue from the page's `seen`.
        """
        return await self.query(
            queries.events, after, limit, filters or Filters(), encoder or json_encoder(), self._recent
        )

    async def wait_after(self, seq: int) -> None:
        """Return when there is an event after `seq`."""
        while self.last_seq <= seq:
            await self._committed.wait()
        await trio.lowlevel.checkpoint()

    @property
    def last_seq(self) -> int:
        return self._progress.last_seq

    @property
    def first_seq(self) -> int:
        """The oldest event that is kept, or the next one to come."""
        return self._progress.first_seq

    async def read(self, call: Callable[[], T]) -> T:
        """Run a long pure call (a trajectory to JSON) where the journal's reads run, off the event loop."""
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    async def query(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of a read connection, off the event loop."""
        return await trio.to_thread.run_sync(
            lambda: self._read_now(query, *args, **kwargs), limiter=self._limiter
        )

    def _read_now(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with boundary(JournalError, "the journal cannot be read (polarnode check names what is damaged)"):
            db = self._connections.pop() if self._connections else self._connection()
            try:
                return query(db, *args, **kwargs)
            finally:
                self._connections.append(db)

    def _connection(self) -> Connection:
        return connect(self.path, read_only=True, damages=self._damages)

    # ── condition ─────────────────────────────────────────────────────────────

    def statistics(self) -> JournalStatistics:
        return statistics(
            self._progress,
            self._writer,
            now=self.now(),
            warning=self._warning(),
            refuses_tasks=self.refuses_tasks,
            damaged=self._damages.rows(),
        )

    @property
    def refuses_tasks(self) -> bool:
        """Whether new tasks must be refused: the file is damaged, the disk is full or nearly so, or too much
        waits in memory.
        """
        return self._warning() is not None

    @property
    def damage(self) -> str | None:
        """Why nothing new may be taken, where the file is damaged."""
        return self._writer.damage

    def insist_whole(self) -> None:
        """Raise JournalDamaged where the file is damaged: what is written now may be lost."""
        if self._writer.damage is not None:
            raise JournalDamaged(self._writer.damage)

    def _warning(self) -> str | None:
        return self._writer.damage or self._writer.warning or self._full_sentence()

    def _full_sentence(self) -> str | None:
        try:
            flags = os.statvfs(self.path.parent).f_flag
        except OSError as error:  # nobody who asks how the node is may fail by it
            return f"the journal's disk does not answer ({error}): no new task is taken"
        if flags & os.ST_RDONLY:
            why = refusal_of(OSError(errno.EROFS, os.strerror(errno.EROFS)), self.path.parent)
            return f"{why}, no new task is taken"
        # free pages of the file are reused first, through a write-ahead log beside it
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
    def progress(self) -> Progress:
        """The state after the last commit."""
        return self._progress

    def _advance(self, progress: Progress) -> None:
        before, self._progress = self._progress, progress
        if progress.last_seq != before.last_seq:
            self.news.tell()
        committed, self._committed = self._committed, trio.Event()
        committed.set()
        self._look_for_damage()

    def _look_for_damage(self) -> None:
        if self._writer.damage is not None and not self.damaged.is_set():
            logger.error("%s", self._writer.damage)
            self.damaged.set()

    def _close_connections(self) -> None:
        for db in self._connections:
            db.close()


# ── opening ────────────────────────────────────────────────────────────

# for the writer to finish: 16 MiB batches take 0.1 s each, so this is a backlog of gigabytes or a disk that
# hangs
CLOSE_S = 30.0
# seconds that opening waits for SQLite's check of the file, which takes 2 GB of it in each where they are in
# memory; of a larger one the check goes on beside the node
CHECK_S = 10.0


@asynccontextmanager
async def open_journal(
    path: Path,
    *,
    now: Callable[[], float],
    retention: Retention | None = None,
    callback_kinds: Mapping[str, tuple[EventKind, ...]] | None = None,
) -> AsyncIterator[Journal]:
    """Open the journal in the SQLite file `path` for this process alone. The file is created if it is
    missing.

    Leaving the block writes what is queued, in at most CLOSE_S. `now` gives wall seconds since the epoch.
    `callback_kinds` are the kinds of events that a task's callback is sent, by its `callback_format`;
    formats that are not in it are sent EVENT_KINDS. Raises JournalError when the file cannot be opened.
    """
    token = trio.lowlevel.current_trio_token()
    with _locked(path):
        damages = Damages()
        db = await trio.to_thread.run_sync(prepare, path, damages)

        def soon(act: Callable[P, None], *args: P.args, **_: P.kwargs) -> None:
            # the run ended in an error while the last batch was written
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(act, *args)

        def on_progress(progress: Progress) -> None:
            soon(journal._advance, progress)

        def check() -> None:
            writer.found = writer.found or structure_fault(path)
            soon(journal._look_for_damage)

        writer = Writer(
            path=path, db=db, retention=retention or Retention(), on_progress=on_progress, now=now
        )
        try:
            (journal_id,) = db.execute("SELECT value FROM meta WHERE name = 'journal'").fetchone()
            progress = writer.start()
        except sqlite3.Error as error:
            raise cannot_open(path, error) from error
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
            with trio.move_on_after(CHECK_S):
                await trio.to_thread.run_sync(check, abandon_on_cancel=True)
            journal._look_for_damage()
            yield journal
        finally:
            writer.stop()
            with trio.move_on_after(CLOSE_S + 1, shield=True):
                # Not abandoned when the deadline fires: the thread's own bound ends it, and under a virtual
                # clock the deadline fires at once.
                await trio.to_thread.run_sync(writer.join, CLOSE_S)
            journal._close_connections()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the journal's own lock file: two writers would give the same numbers. It stands beside the file
    itself, however many links lead there.
    """
    try:
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(path.name + ".lock"), "w", opener=private_opener)  # noqa: SIM115
    except OSError as error:
        raise JournalError(
            f"the journal {path} cannot be opened ({error}): make its folder writable, or give the node"
            " another state folder"
        ) from error
    with lock:
        _lock(lock, path)
        if path.is_file() and path.stat().st_nlink > 1:  # under each name SQLite keeps another WAL
            raise JournalError(
                f"the journal {path} has a second name (a hard link), under which others may write: copy"
                " it to a file of its own"
            )
        yield


def _lock(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(
            f"the journal {path} is in use by another process: stop that node, or give this one its own state"
            " folder"
        ) from None
