"""Results of this node's sessions that a shared log may lack. They are kept until the log has acknowledged
them, and for a while after.

The log may be unavailable for minutes when a session ends, and a standby that takes over may lack the last
seconds of what was acknowledged. So a result is written to the node's own journal before it is sent to the
log, and it is sent again when the log's identity changes. The turns of its session are in the journal
already.
"""

import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from attrs import define, evolve, frozen

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.tasks import task_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Unreadable
from polarnode.journal.damage import Damage, checksum, decode_boundary, note_damage, verify_checksum
from polarnode.journal.entries import ROW_BYTES, JournalEntry
from polarnode.journal.log.port import Claim, EndedSession
from polarnode.journal.queries import MAX_TURN_NUMBER, readable_turns
from polarnode.journal.reader import JournalReader
from polarnode.journal.writer import JournalWriter

# An acknowledged result is kept for this long, and for at most this many bytes. A site promotes a standby in
# less time, and a standby that is further behind is of no use. The bytes hold some minutes of a busy node.
KEEP_ACKNOWLEDGED_S: Final = 600.0
KEEP_ACKNOWLEDGED_BYTES: Final = 256 << 20


@frozen(kw_only=True)
class StoredResult:
    """A session that is over. `claim` is the claim that it ran under, or None for an attempt whose place was
    given to another session. `ended` has no parts: they stay on disk until the result is sent to the log
    (`ResultStore.whole`). `answered` is when the log acknowledged it, in seconds since the epoch.
    """

    claim: Claim | None
    ended: EndedSession
    answered: float | None = None


@define(eq=False)
class ResultStore:
    """The results that a journal keeps for a shared log."""

    writer: JournalWriter
    reader: JournalReader
    now: Callable[[], float]  # seconds since the epoch

    def store_result(self, claim: Claim | None, ended: EndedSession) -> None:
        """Enqueue a result for the journal. This never waits."""
        about = dump_json({"claim": _claim_json(claim), "ended": plain(without_parts(ended))})
        row = (ended.identity.session_id, about, ended.parts[0])
        self.writer.write(
            JournalEntry(ROW_BYTES + len(about) + len(row[2]), partial(_insert_result, row=row))
        )

    def mark_acknowledged(self, session_id: str) -> None:
        """Note that the log acknowledged a result. It is still kept, because a standby may not have it
        yet.
        """
        self.writer.write(
            JournalEntry(ROW_BYTES, partial(_mark_acknowledged, session_id=session_id, at=self.now()))
        )

    def clear_acknowledgements(self) -> None:
        """Note that no result is acknowledged any more. The log has another identity now and may lack all of
        them, so each is kept until this log acknowledges it.
        """
        self.writer.write(JournalEntry(ROW_BYTES, _clear_acknowledgements))

    async def load_result(self, ended: EndedSession) -> EndedSession:
        """Load the trajectory of a result, and the turns that this journal has of it. Raises Unreadable."""
        await self.writer.flush()
        parts = await self.reader.query(_read_parts, ended.identity.session_id)
        return evolve(ended, parts=parts)

    async def read_all(self) -> tuple[StoredResult, ...]:
        """All results that are kept and can be read, the oldest first."""
        await self.writer.flush()
        return await self.reader.query(read_results)

    def delete_old(self) -> None:
        """Delete results that were acknowledged long ago, with the turns of their sessions."""
        self.writer.write(
            JournalEntry(ROW_BYTES, partial(_delete_old_results, before=self.now() - KEEP_ACKNOWLEDGED_S))
        )


def without_parts(ended: EndedSession) -> EndedSession:
    """The part of a result that stays in memory. Its trajectory may have 100 MB, and the log may be
    unavailable for hours.
    """
    return evolve(ended, parts=())


# ── entries and reads ─────────────────────────────────────────────────────────


def _claim_json(claim: Claim | None) -> Json:
    if claim is None:
        return None
    found: dict[str, Json] = plain(evolve(claim, ending=None))
    return {**found, "spec": task_json(claim.spec)}


def _insert_result(db: sqlite3.Connection, *, row: tuple[str, bytes, bytes]) -> None:
    db.execute(
        "INSERT OR IGNORE INTO results (session_id, about, body, checksum) VALUES (?, ?, ?, ?)",
        (*row, checksum(*row)),
    )


def _mark_acknowledged(db: sqlite3.Connection, *, session_id: str, at: float) -> None:
    db.execute("UPDATE results SET answered = ? WHERE session_id = ?", (at, session_id))


def _clear_acknowledgements(db: sqlite3.Connection) -> None:
    db.execute("UPDATE results SET answered = NULL")


def packed_turns(
    db: sqlite3.Connection, session_id: str, *, before: int = MAX_TURN_NUMBER
) -> tuple[bytes, ...]:
    """The packed turns of a session with numbers below `before`, without those that cannot be read."""
    readable = {turn.index for turn in readable_turns(db, session_id, before=before)[0]}
    rows = db.execute("SELECT turn, body FROM turns WHERE session_id = ? ORDER BY turn", (session_id,))
    return tuple(body for turn, body in rows if turn in readable)


def _read_parts(db: sqlite3.Connection, session_id: str) -> tuple[bytes, ...]:
    row = db.execute(
        "SELECT about, body, checksum FROM results WHERE session_id = ?", (session_id,)
    ).fetchone()
    if row is None:
        raise Unreadable(f"the journal has no result of session {session_id} any more")
    about, body, expected = row
    verify_checksum(expected, session_id, about, body)
    return (body, *packed_turns(db, session_id))


def read_results(db: sqlite3.Connection) -> tuple[StoredResult, ...]:
    """All results that can be read, the oldest first. Only one body at a time is in memory."""
    found: list[StoredResult] = []
    rows = db.execute("SELECT session_id, about, body, answered, checksum FROM results ORDER BY rowid")
    for session_id, about, body, answered, expected in rows:
        try:
            verify_checksum(expected, session_id, about, body)
            with decode_boundary():
                value = read_json(about)
                assert isinstance(value, Mapping)
                claim = None if value["claim"] is None else structure(value["claim"], Claim)
                ended = structure(value["ended"], EndedSession)
        except Unreadable as error:
            note_damage(db, Damage(table="results", row=session_id, session_id=session_id, reason=str(error)))
            continue
        found.append(StoredResult(claim=claim, ended=ended, answered=answered))
    return tuple(found)


SELECT_OLD_RESULTS: Final = """
SELECT session_id FROM (
    SELECT session_id, answered, sum(size) OVER (ORDER BY answered DESC, session_id) AS newer FROM (
        SELECT session_id, answered, length(body) + coalesce((
            SELECT sum(length(body)) FROM turns WHERE turns.session_id = results.session_id), 0) AS size
        FROM results WHERE answered IS NOT NULL))
WHERE answered < ? OR newer > ?"""


def _delete_old_results(db: sqlite3.Connection, *, before: float) -> None:
    old = db.execute(SELECT_OLD_RESULTS, (before, KEEP_ACKNOWLEDGED_BYTES)).fetchall()
    for table in ("turns", "sessions", "results"):
        db.executemany(f"DELETE FROM {table} WHERE session_id = ?", old)
