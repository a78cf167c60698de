"""How a journal is opened: its lock, its writer, its end; and what a consumer may be called.

The rule for whoever edits it: one process owns a journal for as long as it lives, and leaving writes what is queued, within a bound.
"""

import fcntl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO

import trio

from polarnode.errors import JournalError, Refused
from polarnode.shell.journal.journal import Journal
from polarnode.shell.journal.schema import prepare
from polarnode.shell.journal.values import Progress, Retention
from polarnode.shell.journal.writer import Writer

CLOSE_S = 30.0  # for the writer to finish: 16 MiB batches take 0.1 s each, so this is a backlog of gigabytes or a disk that hangs


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

        writer = Writer(path=path, db=db, retention=retention or Retention(), on_progress=on_progress, now=now)
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
