"""Decisions that every implementation of the log makes alike, after it has read its own tables. Pure."""

from collections.abc import Sequence

from attrs import evolve

from polarnode.core.cursors import Cursor
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec
from polarnode.journal.log.port import EndingCause, LogGap, LogStatus
from polarnode.journal.values import JournalStatistics


def check_names(
    spec: TaskSpec, task_id: str, session_ids: Sequence[str], idempotency_key: str | None
) -> None:
    """Raise Refused for a name with the character U+0000, which no text of PostgreSQL can hold."""
    texts = [task_id, spec.group_id or "", idempotency_key or "", spec.callback_url or "", *session_ids]
    texts += [spec.adapter, spec.runtime.image, *spec.requires, *spec.requires.values()]
    if any("\0" in text for text in texts):
        raise Refused("ids, keys, labels and URLs must not contain the character U+0000")


def ending_cause(*, cancelled: bool, enough: bool, spent: bool) -> EndingCause | None:
    """Why a place is to be ended and not run, or None. `enough` means that its group needs no more sessions,
    and `spent` that the place was lost once more than its task's retries allow.
    """
    if cancelled:
        return "cancelled"
    if enough:
        return "early stop"
    return "retries spent" if spent else None


def compute_gap(
    asked: Cursor, *, log: str, last: int, pruned: int, known: bool, lost_after: int | None
) -> LogGap | None:
    """What a reader misses that asks for the events after a cursor; None where it misses nothing.

    `last` and `pruned` are the last position of this log, and the last one that retention deleted. `known`
    says that this log was once named `asked.log`. `lost_after` is the last position of that history which
    this log has too, or None where it has all of it.
    """
    after, reason = asked.position, None
    if asked.log not in ("", log):
        if not known:
            after = pruned
            reason = f"this log does not know the log {asked.log}: it is read from its beginning"
        elif lost_after is not None and asked.position > lost_after:
            after = lost_after
            reason = (
                f"the log {asked.log} was lost after event {after}: what was read of it beyond that is not in"
                " this log, or comes again under the same keys"
            )
    if reason is None and after > last and asked.log:
        after = last
        reason = f"the log ends at event {last}: it was restored, and nobody said so (mark it as restored)"
    if reason is None and after > last:
        # A bare number does not name its log. Reading this one from its beginning may send events twice,
        # which are known by their keys.
        after = pruned
        reason = f"the log ends at event {last}: the position is another log's, and this one is read whole"
    if reason is None and after < pruned:
        reason = f"retention deleted the events up to {pruned}"
        after = pruned
    return None if reason is None else LogGap(asked=asked, log=log, position=after, reason=reason)


def with_log_status(journal: JournalStatistics, log: LogStatus, *, now: float) -> JournalStatistics:
    """The statistics of a node's journal, with the events and readers of its log in place of its own. Both
    are the same where the node is alone.
    """
    waits_since = log.oldest_unacknowledged
    return evolve(
        journal,
        first_seq=log.pruned + 1,
        last_seq=log.position,
        positions=log.consumers,
        acknowledged_seq=log.acknowledged,
        unacknowledged_events=log.position - max(log.acknowledged, log.pruned),
        unacknowledged_bytes=log.unacknowledged_bytes,
        oldest_unacknowledged_s=None if waits_since is None else max(0.0, now - waits_since),
    )
