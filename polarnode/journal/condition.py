"""What an open journal says of itself: what it holds, what it waits for, and how far its readers are."""

from collections.abc import Mapping

from polarnode.core.status import Consumer
from polarnode.journal.damage import Damage
from polarnode.journal.values import BACKLOG_BYTES, AwaitedConsumers, JournalStatistics, Progress
from polarnode.journal.writer import Writer

NAMED = 20  # damaged rows that status names: 3 kB; the log and `polarnode check` name all of them


def statistics(
    progress: Progress,
    writer: Writer,
    *,
    now: float,
    warning: str | None,
    refuses_tasks: bool,
    damaged: tuple[Damage, ...] = (),
) -> JournalStatistics:
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
        damage=writer.damage,
        damaged_rows=len(damaged),
        damaged=damaged[:NAMED],
        warning=warning,
        refuses_tasks=refuses_tasks,
    )


def consumer_records(
    progress: Progress, waiting: AwaitedConsumers, streams: Mapping[str, int]
) -> tuple[Consumer, ...]:
    """Every consumer, in the order of their names. `streams` counts open streams by consumer."""
    return tuple(
        Consumer(
            consumer=name,
            position=at.seq,
            behind_events=progress.behind(at.seq),
            behind_bytes=progress.about_bytes(progress.behind(at.seq)),
            missed=max(0, progress.first_seq - 1 - at.seq),
            moved=at.moved,
            last_seen=at.last_seen,
            connected=streams.get(name, 0),
            holds=waiting.holds(name, at),
        )
        for name, at in progress.consumers.items()
    )
