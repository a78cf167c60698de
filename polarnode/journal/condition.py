"""The status of an open journal: what it holds, what it waits for, and how far its consumers have read."""

from collections.abc import Mapping

from polarnode.core.status import Consumer
from polarnode.journal.damage import Damage
from polarnode.journal.values import BACKLOG_BYTES, AwaitedConsumers, JournalProgress, JournalStatistics
from polarnode.journal.writer import JournalWriter

# Status names at most this many damaged rows, in 3 kB. node.log and `polarnode check` name all of them.
MAX_NAMED_ROWS = 20


def journal_statistics(
    progress: JournalProgress,
    writer: JournalWriter,
    *,
    now: float,
    warning: str | None,
    refuses_tasks: bool,
    damaged: tuple[Damage, ...] = (),
) -> JournalStatistics:
    """Describe what the journal holds and what it waits for."""
    unacknowledged, oldest = progress.events_after(progress.acknowledged_seq), progress.oldest_unacknowledged
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
        unacknowledged_bytes=progress.estimate_bytes(unacknowledged),
        oldest_unacknowledged_s=None if oldest is None else max(0.0, now - oldest),
        entries=progress.entries,
        backlog_entries=writer.backlog_entries,
        backlog_bytes=writer.backlog_bytes,
        most_backlog_bytes=BACKLOG_BYTES,
        dropped=writer.dropped,
        damage=writer.damage,
        damaged_rows=len(damaged),
        damaged=damaged[:MAX_NAMED_ROWS],
        warning=warning,
        refuses_tasks=refuses_tasks,
    )


def consumer_records(
    progress: JournalProgress, waiting: AwaitedConsumers, streams: Mapping[str, int]
) -> tuple[Consumer, ...]:
    """Describe every consumer, in the order of their names. `streams` counts open streams by consumer."""
    return tuple(
        Consumer(
            consumer=name,
            position=at.seq,
            behind_events=progress.events_after(at.seq),
            behind_bytes=progress.estimate_bytes(progress.events_after(at.seq)),
            missed=max(0, progress.first_seq - 1 - at.seq),
            moved=at.moved,
            last_seen=at.last_seen,
            connected=streams.get(name, 0),
            holds=waiting.awaits(name, at),
        )
        for name, at in progress.consumers.items()
    )
