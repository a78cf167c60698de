"""The health of an open journal: what it holds and waits for, what is wrong with its disk or its file, and
whether it takes new work.
"""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import trio
from attrs import define, field

from polarnode.core.errors import JournalDamaged
from polarnode.journal.damage import DamageRecorder
from polarnode.journal.disk import disk_error_sentence
from polarnode.journal.schema import WAL_KEPT_BYTES
from polarnode.journal.values import BACKLOG_BYTES, DISK_FREE_BYTES, JournalStatistics
from polarnode.journal.writer import CommitWatch, WriterThread

logger = logging.getLogger(__name__)

# Status names at most this many damaged rows, in 3 kB. node.log and `polarnode check` name all of them.
MAX_NAMED_ROWS = 20


@define(eq=False, kw_only=True)
class JournalHealth:
    """The health as of the writer's last commit, so that asking needs no look at the file."""

    path: Path
    now: Callable[[], float]  # seconds since the epoch
    damage_event: trio.Event = field(factory=trio.Event, init=False)  # set for good once `damage` is known
    _thread: WriterThread
    _commits: CommitWatch
    _damages: DamageRecorder

    def statistics(self) -> JournalStatistics:
        """Describe what the journal holds, what it waits for, and what is wrong."""
        progress, damaged, warning = self._commits.progress, self._damages.damaged_rows(), self._warning()
        unacknowledged = progress.events_after(progress.acknowledged_seq)
        oldest = progress.oldest_unacknowledged
        return JournalStatistics(
            first_seq=progress.first_seq,
            last_seq=progress.last_seq,
            positions={name: position.seq for name, position in progress.consumers.items()},
            stored_bytes=progress.stored_bytes,
            most_bytes=self._thread.retention.everything,
            free_bytes=progress.free_bytes,
            disk_free=progress.disk_free,
            acknowledged_seq=progress.acknowledged_seq,
            unacknowledged_events=unacknowledged,
            unacknowledged_bytes=progress.estimate_bytes(unacknowledged),
            oldest_unacknowledged_s=None if oldest is None else max(0.0, self.now() - oldest),
            entries=progress.entries,
            backlog_entries=self._thread.backlog_entries,
            backlog_bytes=self._thread.backlog_bytes,
            most_backlog_bytes=BACKLOG_BYTES,
            dropped=self._thread.dropped,
            damage=self.damage,
            damaged_rows=len(damaged),
            damaged=damaged[:MAX_NAMED_ROWS],
            warning=warning,
            refuses_tasks=warning is not None,
        )

    def _warning(self) -> str | None:
        """Why new tasks must be refused: the file is damaged, the disk is full or nearly so, or too much
        waits in memory.
        """
        if (known := self.damage or self._thread.warning) is not None:
            return known
        try:
            flags = os.statvfs(self.path.parent).f_flag
        except OSError as error:  # a request for the node's status must not fail because of its disk
            return f"the journal's disk does not answer ({error}): no new task is taken"
        if flags & os.ST_RDONLY:
            why = disk_error_sentence(OSError(errno.EROFS, os.strerror(errno.EROFS)), self.path.parent)
            return f"{why}, no new task is taken"
        # SQLite reuses the file's free pages first. It writes them to the write-ahead log, which needs room
        # too.
        progress = self._commits.progress
        free = progress.disk_free + progress.free_bytes
        if free < DISK_FREE_BYTES or progress.disk_free < WAL_KEPT_BYTES:
            return (
                f"the journal's disk has {progress.disk_free >> 20} MiB left: make room, no new task is taken"
            )
        if self._thread.backlog_bytes > BACKLOG_BYTES:
            return (
                f"{self._thread.backlog_bytes >> 20} MiB wait for the journal's disk, which is too slow: no"
                " new task is taken"
            )
        return None

    @property
    def damage(self) -> str | None:
        """Why no new work may be taken, where the file is damaged; None otherwise."""
        return self._thread.damage

    def require_undamaged(self) -> None:
        """Raise JournalDamaged where the file is damaged, because what is written now may be lost."""
        if self.damage is not None:
            raise JournalDamaged(self.damage)

    def announce_damage(self) -> None:
        """Log the damage of the file the first time it is known, and wake those who wait for it."""
        if self.damage is not None and not self.damage_event.is_set():
            logger.error("%s", self.damage)
            self.damage_event.set()
