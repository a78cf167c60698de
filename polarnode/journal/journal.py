"""The node's durable, ordered record of what happened, opened for this process alone.

Its parts: `writer.py` writes in order and never waits, `reader.py` reads what is on disk, `consumers.py` has
the positions of readers with a name, and `health.py` says whether new work may be taken. Numbers of events
are given in commit order and never twice, so a trainer may resume at any of them. One process owns a journal
while it has it open.
"""

import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO

import trio
from attrs import frozen

from polarnode.core.errors import JournalError
from polarnode.journal.consumers import JournalConsumers
from polarnode.journal.damage import DamageRecorder
from polarnode.journal.health import JournalHealth
from polarnode.journal.reader import JournalReader
from polarnode.journal.schema import find_structure_fault, open_error, prepare_journal
from polarnode.journal.values import JournalProgress, RetentionLimits
from polarnode.journal.writer import CommitWatch, JournalWriter, WriterThread
from polarnode.support.bounded import open_private

# Closing waits this long for the writer. A batch of 16 MiB takes 0.1 s, so only a backlog of gigabytes or a
# disk that hangs takes longer.
CLOSE_TIMEOUT_S = 30.0
# Opening waits this long for SQLite's check of the file, which reads 2 GB a second where they are in memory.
# The check of a larger file goes on while the node runs.
CHECK_WAIT_S = 10.0


@frozen(kw_only=True, eq=False)
class Journal:
    """The parts of an open journal, from which a caller gives each user those that it needs. Created by
    `open_journal`.
    """

    id: str  # random, given when the journal was created, and never changed
    now: Callable[[], float]  # seconds since the epoch
    writer: JournalWriter
    commits: CommitWatch
    reader: JournalReader
    consumers: JournalConsumers
    health: JournalHealth


@asynccontextmanager
async def open_journal(
    path: Path, *, now: Callable[[], float], retention: RetentionLimits | None = None
) -> AsyncIterator[Journal]:
    """Open the journal in the SQLite file `path` for this process alone. The file is created if it is
    missing.

    Leaving the block writes what is queued, in at most CLOSE_TIMEOUT_S. `now` gives wall-clock seconds since
    the epoch. Raises JournalError when the file cannot be opened.
    """
    token = trio.lowlevel.current_trio_token()

    def call_on_event_loop(act: Callable[[], None]) -> None:
        # The Trio run may have ended in an error while the last batch was written.
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(act)

    with _hold_lock_file(path):
        damages = DamageRecorder()
        db = await trio.to_thread.run_sync(prepare_journal, path, damages)

        # These two run in threads, and what they find is noted on the event loop.
        def on_progress(progress: JournalProgress) -> None:
            def note() -> None:
                commits.note_commit(progress)
                health.announce_damage()

            call_on_event_loop(note)

        def check_structure() -> None:
            thread.file_fault = thread.file_fault or find_structure_fault(path)
            call_on_event_loop(health.announce_damage)

        thread = WriterThread(
            path=path, db=db, retention=retention or RetentionLimits(), on_progress=on_progress, now=now
        )
        try:
            (journal_id,) = db.execute("SELECT value FROM meta WHERE name = 'journal'").fetchone()
            commits = CommitWatch(thread.start())
        except sqlite3.Error as error:
            raise open_error(path, error) from error
        writer = JournalWriter(thread, commits)
        reader = JournalReader(path, damages)
        consumers = JournalConsumers(now=now, writer=writer, thread=thread, commits=commits)
        health = JournalHealth(path=path, now=now, thread=thread, commits=commits, damages=damages)
        try:
            with trio.move_on_after(CHECK_WAIT_S):
                await trio.to_thread.run_sync(check_structure, abandon_on_cancel=True)
            health.announce_damage()
            yield Journal(
                id=journal_id,
                now=now,
                writer=writer,
                commits=commits,
                reader=reader,
                consumers=consumers,
                health=health,
            )
        finally:
            thread.stop()
            with trio.move_on_after(CLOSE_TIMEOUT_S + 1, shield=True):
                # The thread is not abandoned when the deadline fires: its own bound ends it, and under a
                # virtual clock the deadline fires at once.
                await trio.to_thread.run_sync(thread.join, CLOSE_TIMEOUT_S)
            reader.close()


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
