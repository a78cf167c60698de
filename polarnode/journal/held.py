"""Results that wait: ends of sessions that the log has not acknowledged, so that a restart delivers them.

Entries and queries, as in `entries.py` and `queries.py`. A result stands beside the rows of its turns, which
the journal has already.
"""

import sqlite3
from struct import Struct
from typing import Final

from attrs import frozen

from polarnode.core.codec.packing import pack_trajectory, unpack_trajectory
from polarnode.core.errors import Unreadable
from polarnode.core.trajectory import Trajectory
from polarnode.journal.damage import Damage, check, checksum, decoding, note
from polarnode.journal.entries import ROW_BYTES, Entry, insert_session
from polarnode.journal.queries import readable_turns
from polarnode.journal.schema import snapshot

# When it ended, and the number and size of the parts that follow: it is one, the trajectory.
_HEAD: Final = Struct(">dII")


@frozen(kw_only=True)
class EndedResult:
    """A session's trajectory with its turns, and when it ended: the time of its event."""

    trajectory: Trajectory
    at: float


def hold_entry(trajectory: Trajectory, *, at: float) -> Entry:
    """A result whose event has no number yet. Its turns are in the journal."""
    body = pack_trajectory(trajectory)
    row = (trajectory.session_id, trajectory.task_id, _HEAD.pack(at, 1, len(body)) + body)
    ids = {"session_id": trajectory.session_id, "task_id": trajectory.task_id}

    def apply(db: sqlite3.Connection) -> None:
        insert_session(db, **ids, sample_index=trajectory.sample_index, attempt=trajectory.attempt)
        over = "SELECT 1 FROM sessions WHERE session_id = ? AND outcome IS NOT NULL"
        if db.execute(over, row[:1]).fetchone() is None:
            db.execute("INSERT OR IGNORE INTO held VALUES (?, ?, ?, ?)", (*row, checksum(*row)))

    return Entry(ROW_BYTES + len(row[2]), apply)


def held_result(db: sqlite3.Connection, session_id: str) -> EndedResult | None:
    """A result that waits, with its turns; None where it is damaged, or there is none."""
    with snapshot(db):
        row = db.execute("SELECT * FROM held WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            return None
        turns, damaged = readable_turns(db, session_id)
    try:
        check(row[3], *row[:3])
        with decoding():
            at, parts, size = _HEAD.unpack_from(row[2])
            body = row[2][_HEAD.size :]
            if parts != 1 or len(body) != size:
                raise Unreadable("it is cut off")
            return EndedResult(trajectory=unpack_trajectory(body, turns, damaged=damaged), at=at)
    except Unreadable as error:
        note(db, Damage(table="held", row=session_id, session_id=session_id, reason=str(error)))
        return None
