"""The durable, ordered log of what happened. Writing is synchronous and never waits; reading sees only what is on disk.

The rules for whoever edits it. What must not be lost is enqueued by a plain call, because a checkpoint between "done" and "recorded" can lose
a finished rollout. Numbers of events are given in commit order and never twice, so that a trainer may resume at any of them. Each reader
keeps its own place; nobody's slowness holds up a session.
"""

import fcntl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from sqlite3 import Connection
from typing import IO, Concatenate, ParamSpec, TypeVar

import trio
from attrs import define, field

from polarnode.errors import JournalError, Refused, boundary
from polarnode.merge.trajectory import Identity
from polarnode.records import Trajectory, Turn
from polarnode.shell.journal import reads
from polarnode.shell.journal.entries import acknowledge_entry, session_entry, task_entry, trajectory_entry, turn_entry
from polarnode.shell.journal.schema import connect, prepare
from polarnode.shell.journal.values import EventPage, Filters, JournalStatistics, Progress, Retention, SessionRecord, TaskRecord, UnfinishedSession
from polarnode.shell.journal.writer import Writer
from polarnode.tasks import TaskSpec
from polarnode.wire import Arrays, Turns

P = ParamSpec("P")
T = TypeVar("T")

READERS = 4  # threads and connections for reading: packing JSON holds the interpreter's lock, more of them would only queue there
CLOSE_S = 30.0  # for the writer to finish: 16 MiB batches take 0.1 s each, so this is a backlog of gigabytes or a disk that hangs
BACKLOG_BYTES = 512 << 20  # in memory before new tasks are refused: minutes of a full disk at 64 sessions
DISK_FREE_BYTES = 256 << 20  # left for the sessions that run when no new task is taken
EVENTS_A_PAGE = 64  # group events of small sessions are a kilobyte; large ones are bounded by bytes


@define(eq=False)
class Journal:
    """Made by `open_journal`."""

    path: Path
    now: Callable[[], float]
    _writer: Writer
    _progress: Progress
    _news: trio.Event = field(factory=trio.Event)  # set and replaced at every commit
    _limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(READERS))
    _connections: list[Connection] = field(factory=list)

    # ── writing: synchronous, in order, never waits ───────────────────────────

    def task_submitted(self, spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], idempotency_key: str | None) -> None:
        """A task was taken; its sessions count as unfinished from here on."""
        self._writer.put(task_entry(spec, task_id=task_id, session_ids=session_ids, idempotency_key=idempotency_key, now=self.now()))

    def session_started(self, identity: Identity) -> None:
        """Who a session is; a session without a task (a capture) begins with this."""
        self._writer.put(session_entry(identity))

    def turn(self, turn: Turn) -> None:
        """A model call is over. The same index again replaces it."""
        self._writer.put(turn_entry(turn))

    def publish(self, trajectory: Trajectory) -> None:
        """A session is over: a `trajectory` event, and when it was its task's last also `group` and `task`. The first publication stands."""
        self._writer.put(trajectory_entry(trajectory, now=self.now()))

    async def flushed(self) -> None:
        """Return when all that was written before this call is on disk."""
        await self._wait_written(self._writer.put_entries)

    async def _wait_written(self, number: int) -> None:
        while self._progress.entries < number:
            await self._news.wait()
        await trio.lowlevel.checkpoint()

    # ── consumers ─────────────────────────────────────────────────────────────

    async def position(self, consumer: str) -> int:
        """The last event `consumer` acknowledged; 0 for one we never heard of."""
        await trio.lowlevel.checkpoint()
        return self._progress.positions.get(consumer, 0)

    async def acknowledge(self, consumer: str, seq: int) -> int:
        """Move a position forward; returns where it is. Never back, never beyond the last event. 0 makes a consumer known."""
        await self._wait_written(self._writer.put(acknowledge_entry(consumer, seq)))
        return self._progress.positions.get(consumer, 0)

    # ── reading ───────────────────────────────────────────────────────────────

    async def task(self, task_id: str) -> TaskRecord | None:
        return await self._read(reads.task, task_id)

    async def task_of_key(self, idempotency_key: str) -> TaskRecord | None:
        """The first task that was submitted with this key."""
        return await self._read(reads.task_of_key, idempotency_key)

    async def tasks(self, *, limit: int = 100, before: str | None = None) -> tuple[TaskRecord, ...]:
        """Newest first; `before` is the last task_id of the page before."""
        return await self._read(reads.tasks, limit, before)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self._read(reads.session, session_id)

    async def trajectory(self, session_id: str) -> Trajectory | None:
        """With all its turns; None when it is not over, not known or pruned."""
        return await self._read(reads.trajectory, session_id)

    async def turns(self, session_id: str) -> tuple[Turn, ...]:
        return await self._read(reads.turns, session_id)

    async def unfinished(self) -> tuple[UnfinishedSession, ...]:
        """Sessions of earlier lives without a trajectory: give each one, so that it ends `interrupted`."""
        return await self._read(reads.unfinished)

    async def events(
        self, after: int, *, filters: Filters | None = None, arrays: Arrays = "json", turns: Turns = "table", limit: int = EVENTS_A_PAGE
    ) -> EventPage:
        """The events after `after`, bounded in number and bytes. Go on from the page's `seen`."""
        return await self._read(reads.events, after, limit, filters or Filters(), arrays, turns)

    async def wait_after(self, seq: int) -> None:
        """Return when there is an event after `seq`."""
        while self.last_seq <= seq:
            await self._news.wait()
        await trio.lowlevel.checkpoint()

    @property
    def last_seq(self) -> int:
        return self._progress.last_seq

    @property
    def first_seq(self) -> int:
        """The oldest event that is kept (or the next one to come)."""
        return self._progress.first_seq

    async def read(self, call: Callable[[], T]) -> T:
        """Run a long pure call (a trajectory to JSON) where the journal's reads run, off the event loop."""
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    async def _read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await trio.to_thread.run_sync(lambda: self._read_now(query, *args, **kwargs), limiter=self._limiter)

    def _read_now(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with boundary(JournalError, "the journal can not be read"):
            db = self._connections.pop() if self._connections else connect(self.path, read_only=True)
            try:
                return query(db, *args, **kwargs)
            finally:
                self._connections.append(db)

    # ── how it is ─────────────────────────────────────────────────────────────

    def statistics(self) -> JournalStatistics:
        progress, writer = self._progress, self._writer
        return JournalStatistics(
            first_seq=progress.first_seq,
            last_seq=progress.last_seq,
            positions=progress.positions,
            stored_bytes=progress.stored_bytes,
            disk_free=progress.disk_free,
            entries=progress.entries,
            backlog_entries=writer.backlog_entries,
            backlog_bytes=writer.backlog_bytes,
            dropped=writer.dropped,
            warning=self._warning(),
            refuses_tasks=self.refuses_tasks,
        )

    @property
    def refuses_tasks(self) -> bool:
        """No new task should be taken: the disk is full or nearly so, or too much waits in memory."""
        return self._writer.warning is not None or self._full_sentence() is not None

    def _warning(self) -> str | None:
        return self._writer.warning or self._full_sentence()

    def _full_sentence(self) -> str | None:
        if self._progress.disk_free < DISK_FREE_BYTES:
            return f"the journal's disk has {self._progress.disk_free >> 20} MiB left: make room, no new task is taken"
        if self._writer.backlog_bytes > BACKLOG_BYTES:
            return f"{self._writer.backlog_bytes >> 20} MiB wait for the journal's disk, which is too slow: no new task is taken"
        return None

    def _advance(self, progress: Progress) -> None:
        self._progress = progress
        news, self._news = self._news, trio.Event()
        news.set()

    def _close_connections(self) -> None:
        for db in self._connections:
            db.close()


@asynccontextmanager
async def open_journal(path: Path, *, now: Callable[[], float], retention: Retention | None = None) -> AsyncIterator[Journal]:
    """The journal in the SQLite file `path` (made when there is none), for this process alone. JournalError when it can not be opened.

    Leaving writes what is queued, in at most CLOSE_S. `now` gives wall seconds since the epoch.
    """
    token = trio.lowlevel.current_trio_token()
    with _locked(path):
        db = await trio.to_thread.run_sync(prepare, path)

        def on_progress(progress: Progress) -> None:
            with suppress(trio.RunFinishedError):  # the run ended in an error while the last batch was written
                token.run_sync_soon(journal._advance, progress)

        writer = Writer(path=path, db=db, retention=retention or Retention(), on_progress=on_progress)
        journal = Journal(path=path, now=now, writer=writer, progress=writer.start())
        try:
            yield journal
        finally:
            writer.stop()
            with trio.move_on_after(CLOSE_S + 1, shield=True):
                # Not abandoned when the deadline fires: the thread's own bound ends it, and under a virtual clock the deadline fires at once.
                await trio.to_thread.run_sync(writer.join, CLOSE_S)
            journal._close_connections()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The journal's own lock file, held for as long as the process lives: two writers would each believe to know the last number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        _lock(lock, path)
        yield


def _lock(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(f"the journal {path} is in use by another process: stop that node, or give this one its own state folder") from None


def check_consumer(name: str) -> str:
    """A consumer's name, or Refused."""
    if not 0 < len(name) <= 128 or not name.isprintable():
        raise Refused("consumer must be a name of 1 to 128 printable characters", path="$.consumer")
    return name
