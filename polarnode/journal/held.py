"""Results of this node's sessions that a shared log may lack: until it has answered, and for a while after.

A log that other machines keep may be away for minutes when a session ends, and a standby that takes over may
lack the last seconds of what was acknowledged. So a result is in the node's own journal before the log is
told, and is told again when the log's identity changes. The turns of its session are in the journal already.
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
from polarnode.journal.damage import Damage, check, checksum, decoding, note
from polarnode.journal.entries import ROW_BYTES, Entry
from polarnode.journal.journal import Journal
from polarnode.journal.log.port import Claim, Ended
from polarnode.journal.queries import MOST_TURNS, readable_turns

# Of an acknowledged result: longer than a site takes to promote a standby, and a standby that is further
# behind is no standby. The bytes are some minutes of a busy node.
KEPT_S: Final = 600.0
KEPT_BYTES: Final = 256 << 20


@frozen(kw_only=True)
class HeldResult:
    """A session that is over, with the claim that it ran by: None for an attempt whose place was another's.
    `ended` has no parts: they stay on disk until the log is told (`HeldResults.whole`). `answered`: when the
    log acknowledged it, in seconds since the epoch.
    """

    claim: Claim | None
    ended: Ended
    answered: float | None = None


@define(eq=False)
class HeldResults:
    """The results that a journal holds for a shared log."""

    journal: Journal
    now: Callable[[], float]  # seconds since the epoch

    def hold(self, claim: Claim | None, ended: Ended) -> None:
        """Keep a result. It never waits."""
        about = dump_json({"claim": _claim_json(claim), "ended": plain(without_parts(ended))})
        row = (ended.identity.session_id, about, ended.parts[0])
        self.journal.write(Entry(ROW_BYTES + len(about) + len(row[2]), partial(_insert, row=row)))

    def answered(self, session_id: str) -> None:
        """The log has it. It is kept on, because a standby may not have it yet."""
        self.journal.write(Entry(ROW_BYTES, partial(_answered, session_id=session_id, at=self.now())))

    def unanswered(self) -> None:
        """The log that has the name now may have none of them: each is kept until that one has answered."""
        self.journal.write(Entry(ROW_BYTES, _unanswered))

    async def whole(self, ended: Ended) -> Ended:
        """A result with its trajectory and the turns that this journal has. Raises Unreadable."""
        await self.journal.flushed()
        parts = await self.journal.query(_parts, ended.identity.session_id)
        return evolve(ended, parts=parts)

    async def all(self) -> tuple[HeldResult, ...]:
        """All that is kept and can be read, the oldest first."""
        await self.journal.flushed()
        return await self.journal.query(read_results)

    def sweep(self) -> None:
        """Delete what was acknowledged long ago, with the turns of its sessions."""
        self.journal.write(Entry(ROW_BYTES, partial(_sweep, before=self.now() - KEPT_S)))


def without_parts(ended: Ended) -> Ended:
    """What is kept in memory of a result: its trajectory may be of 100 MB, and the log away for hours."""
    return evolve(ended, parts=())


# ── entries and reads ─────────────────────────────────────────────────────────


def _claim_json(claim: Claim | None) -> Json:
    if claim is None:
        return None
    found: dict[str, Json] = plain(evolve(claim, ending=None))
    return {**found, "spec": task_json(claim.spec)}


def _insert(db: sqlite3.Connection, *, row: tuple[str, bytes, bytes]) -> None:
    db.execute(
        "INSERT OR IGNORE INTO results (session_id, about, body, checksum) VALUES (?, ?, ?, ?)",
        (*row, checksum(*row)),
    )


def _answered(db: sqlite3.Connection, *, session_id: str, at: float) -> None:
    db.execute("UPDATE results SET answered = ? WHERE session_id = ?", (at, session_id))


def _unanswered(db: sqlite3.Connection) -> None:
    db.execute("UPDATE results SET answered = NULL")


def packed_turns(db: sqlite3.Connection, session_id: str, *, before: int = MOST_TURNS) -> tuple[bytes, ...]:
    """The turns of a session below `before` that can be read, as they were packed."""
    readable = {turn.index for turn in readable_turns(db, session_id, before=before)[0]}
    rows = db.execute("SELECT turn, body FROM turns WHERE session_id = ? ORDER BY turn", (session_id,))
    return tuple(body for turn, body in rows if turn in readable)


def _parts(db: sqlite3.Connection, session_id: str) -> tuple[bytes, ...]:
    row = db.execute(
        "SELECT about, body, checksum FROM results WHERE session_id = ?", (session_id,)
    ).fetchone()
    if row is None:
        raise Unreadable(f"the journal has no result of session {session_id} any more")
    about, body, expected = row
    check(expected, session_id, about, body)
    return (body, *packed_turns(db, session_id))


def read_results(db: sqlite3.Connection) -> tuple[HeldResult, ...]:
    """All results that can be read, the oldest first. One body at a time is in memory."""
    found: list[HeldResult] = []
    rows = db.execute("SELECT session_id, about, body, answered, checksum FROM results ORDER BY rowid")
    for session_id, about, body, answered, expected in rows:
        try:
            check(expected, session_id, about, body)
            with decoding():
                value = read_json(about)
                assert isinstance(value, Mapping)
                claim = None if value["claim"] is None else structure(value["claim"], Claim)
                ended = structure(value["ended"], Ended)
        except Unreadable as error:
            note(db, Damage(table="results", row=session_id, session_id=session_id, reason=str(error)))
            continue
        found.append(HeldResult(claim=claim, ended=ended, answered=answered))
    return tuple(found)


OLD: Final = """
SELECT session_id FROM (
    SELECT session_id, answered, sum(size) OVER (ORDER BY answered DESC, session_id) AS newer FROM (
        SELECT session_id, answered, length(body) + coalesce((
            SELECT sum(length(body)) FROM turns WHERE turns.session_id = results.session_id), 0) AS size
        FROM results WHERE answered IS NOT NULL))
WHERE answered < ? OR newer > ?"""


def _sweep(db: sqlite3.Connection, *, before: float) -> None:
    old = db.execute(OLD, (before, KEPT_BYTES)).fetchall()
    for table in ("turns", "sessions", "results"):
        db.executemany(f"DELETE FROM {table} WHERE session_id = ?", old)
