"""The durable log: turns as they come, results, consumers and their positions. SQLite in WAL mode, one writer thread, group commit.

The rule for whoever edits it: other rooms import from here; SQL stays in `schema`, `entries`, `pruning` and `reads`.
"""

from polarnode.shell.journal.journal import Journal
from polarnode.shell.journal.opening import check_consumer, open_journal
from polarnode.shell.journal.values import (
    GONE,
    KEYS_ALONE,
    USUAL_KINDS,
    ConsumerRecord,
    EventKind,
    EventPage,
    Filters,
    JournalStatistics,
    Retention,
    SessionRecord,
    StoredEvent,
    TaskRecord,
    Telling,
    UnfinishedSession,
    as_json,
)

__all__ = [
    "GONE",
    "KEYS_ALONE",
    "USUAL_KINDS",
    "ConsumerRecord",
    "EventKind",
    "EventPage",
    "Filters",
    "Journal",
    "JournalStatistics",
    "Retention",
    "SessionRecord",
    "StoredEvent",
    "TaskRecord",
    "Telling",
    "UnfinishedSession",
    "as_json",
    "check_consumer",
    "open_journal",
]
