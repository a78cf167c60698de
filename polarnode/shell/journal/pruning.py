"""What is forgotten when the journal grows beyond its retention: oldest first, a whole session at a time, never one that still runs.

The rule for whoever edits it: a number that was pruned is remembered (`meta.pruned`), because a reader who asks for it must hear of the gap.
"""

import sqlite3

from polarnode.shell.journal.values import Retention

PRUNED_AT_ONCE = 64  # events a commit: some milliseconds of deleting, so that turns do not wait behind it


def stored_bytes(db: sqlite3.Connection) -> int:
    """Bytes of pages in use; the file may be larger, its free pages are written again first."""
    pages, free, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


def prune(db: sqlite3.Connection, retention: Retention) -> bool:
    """Drop some of the oldest events when there is too much, inside the caller's transaction. True when something went."""
    stored = stored_bytes(db)
    if stored <= retention.acknowledged:
        return False
    upto = _last_seq(db) if stored > retention.everything else _acknowledged_by_all(db)
    rows = db.execute("SELECT seq, kind, task_id, session_id FROM events WHERE seq <= ? ORDER BY seq LIMIT ?", (upto, PRUNED_AT_ONCE)).fetchall()
    for seq, kind, task_id, session_id in rows:
        _forget(db, kind, task_id, session_id)
        db.execute("DELETE FROM events WHERE seq = ?", (seq,))
        db.execute("UPDATE meta SET value = ? WHERE name = 'pruned'", (seq,))
    return bool(rows)


def _forget(db: sqlite3.Connection, kind: str, task_id: str, session_id: str | None) -> None:
    if kind == "trajectory":
        db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
        db.execute("DELETE FROM trajectories WHERE session_id = ?", (session_id,))
    if kind == "task":  # the last event of its task: all its trajectories went before it
        db.execute("DELETE FROM sessions WHERE task_id = ?", (task_id,))
        db.execute("DELETE FROM tasks WHERE task_id = ?", (task_id,))


def _acknowledged_by_all(db: sqlite3.Connection) -> int:
    found = db.execute("SELECT min(seq) FROM positions").fetchone()[0]
    return int(found or 0)


def _last_seq(db: sqlite3.Connection) -> int:
    found = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return int(found[0]) if found else 0
