"""Whether a node has room for a task: asked before it is taken, so that what is taken is never lost for want of memory or disk.

Pure. The rule for whoever edits it: a refusal here passes with time, and says what will make it pass; what no waiting mends is 400 or 507.
"""

from typing import Final

from polarnode.shell.journal import JournalStatistics

RETRY_AFTER_S: Final = 5.0  # a session ends every second or so on a busy node; a trainer that comes back sooner only asks more often
BACKLOG_BYTES: Final = 64 << 20  # in memory: four commits of the journal's; more is a disk that does not keep up
DISK_FREE_BYTES: Final = 512 << 20  # for the journal: the sessions of a full node write some hundred MB yet; below half of it the answer is 507
FULL: Final = 0.95  # of all that is kept: beyond it trajectories that nobody has acknowledged would soon be forgotten


def no_room(journal: JournalStatistics, *, pending: int, more: int, limit: int) -> str | None:
    """Why a task of `more` sessions can not be taken now, beside `pending` ones of at most `limit`; None when it can."""
    if pending + more > limit:
        return f"{pending} sessions wait or run, and with {more} more they would be over pending_limit ({limit}): submit again when some have ended"
    if journal.backlog_bytes > BACKLOG_BYTES:
        return f"{journal.backlog_bytes >> 20} MiB wait for the journal's disk: submit again when it has caught up"
    if (free := journal.disk_free + journal.free_bytes) < DISK_FREE_BYTES:  # what was pruned is written again first
        return f"the journal's disk has {free >> 20} MiB left: free some, or move state_dir to a larger one"
    if journal.positions and journal.unacknowledged_bytes > FULL * journal.most_bytes:  # who acknowledges nothing ever wants the latest
        kept = f"{journal.unacknowledged_bytes >> 20} of {journal.most_bytes >> 20} MiB"
        return f"trajectories of {kept} are kept that no consumer has acknowledged: read and acknowledge some, delete a consumer that is gone, or raise keep_mb"
    return None
