"""How the journal is, in figures: for its status, for whoever holds tasks back, and for each consumer.

The rule for whoever edits it: these are made of what the writer knew after its last commit, so that asking costs no look at the disk.
"""

from collections.abc import Mapping

from polarnode.shell.journal.values import ConsumerRecord, JournalStatistics, Progress, Waiting
from polarnode.shell.journal.writer import Writer

BACKLOG_BYTES = 512 << 20  # in memory before new tasks are refused: minutes of a full disk at 64 sessions


def statistics(progress: Progress, writer: Writer, *, now: float, warning: str | None, refuses_tasks: bool) -> JournalStatistics:
    """What the journal holds and what it waits for."""
    unacknowledged, oldest = progress.behind(progress.acknowledged_seq), progress.oldest_unacknowledged
    return JournalStatistics(
        first_seq=progress.first_seq,
        last_seq=progress.last_seq,
        positions={name: position.seq for name, position in progress.consumers.items()},
        stored_bytes=progress.stored_bytes,
        most_bytes=writer.retention.everything,
        free_bytes=progress.free_bytes,
        disk_free=progress.disk_free,
        acknowledged_seq=progress.acknowledged_seq,
        unacknowledged_events=unacknowledged,
        unacknowledged_bytes=progress.about_bytes(unacknowledged),
        oldest_unacknowledged_s=None if oldest is None else max(0.0, now - oldest),
        entries=progress.entries,
        backlog_entries=writer.backlog_entries,
        backlog_bytes=writer.backlog_bytes,
        most_backlog_bytes=BACKLOG_BYTES,
        dropped=writer.dropped,
        warning=warning,
        refuses_tasks=refuses_tasks,
    )


def consumer_records(progress: Progress, waiting: Waiting, streams: Mapping[str, int]) -> tuple[ConsumerRecord, ...]:
    """Each consumer, in the order of their names; `streams` counts those open by consumer."""
    return tuple(
        ConsumerRecord(
            consumer=name,
            position=at.seq,
            behind_events=progress.behind(at.seq),
            behind_bytes=progress.about_bytes(progress.behind(at.seq)),
            missed=max(0, progress.first_seq - 1 - at.seq),
            moved=at.moved,
            heard=at.heard,
            connected=streams.get(name, 0),
            holds=waiting.holds(name, at),
        )
        for name, at in progress.consumers.items()
    )
