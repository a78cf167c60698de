"""Reads for a session that goes on from another session's state.

A fork needs the task and the first turns of its parent. Another attempt at a place needs the sessions that
the machine lost there. These sessions may be live, over, or of an earlier run of the node: each turn is in
the journal from the moment it ended.
"""

import sqlite3

from attrs import frozen

from polarnode.core.status import SessionRecord
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Damaged, Outcome, Turn
from polarnode.journal import queries
from polarnode.journal.schema import FORKED_FROM_COLUMN, read_snapshot
from polarnode.merge.trajectory import Identity


@frozen(kw_only=True)
class ForkParent:
    """A session that forks go on from.

    `spec` is that of its task; it is None for a capture, and where the task's row is damaged. `turns` are the
    turns before the one that was asked for, and `damaged` names those of them that cannot be read. `next` is
    the turn that was asked for, or None where there is none that can be read. `count` is the number of turns
    that the session has so far.
    """

    spec: TaskSpec | None
    turns: tuple[Turn, ...]
    damaged: tuple[Damaged, ...]
    count: int
    next: Turn | None = None


def fork_parent(db: sqlite3.Connection, session_id: str, turn: int) -> ForkParent | None:
    """The parent of forks that begin at turn `turn`; None when it is unknown or pruned. It may be live or
    have just ended, so the caller flushes the writer first.
    """
    found = queries.session(db, session_id)
    if found is None:
        return None
    task = queries.task(db, found.task_id)
    with read_snapshot(db):
        turns, damaged = queries.readable_turns(db, session_id, before=turn + 1)
        count = _count_turns(db, session_id)
    return ForkParent(
        spec=None if task is None or task.damaged is not None else task.spec,
        turns=tuple(each for each in turns if each.index < turn),
        damaged=tuple(each for each in damaged if each.part != f"turns[{turn}]"),
        count=count,
        next=next((each for each in turns if each.index == turn), None),
    )


@frozen(kw_only=True)
class EarlierAttempt:
    """An earlier session of the same place. `outcome` is None where it is not over. `count` is the number of
    its turns.
    """

    identity: Identity
    outcome: Outcome | None
    count: int

    @property
    def made_progress(self) -> bool:
        """Whether this session has turns beyond those that it began with."""
        before, fork = self.identity.continued_from, self.identity.forked_from
        return self.count > max(0 if before is None else before.turn, 0 if fork is None else fork.got)


def earlier_attempts(db: sqlite3.Connection, place: Identity) -> tuple[EarlierAttempt, ...]:
    """The earlier sessions of a session's place, the last one first. A damaged row ends the list. The caller
    flushes the writer first, because these sessions may have just ended.
    """
    query = (
        "SELECT session_id FROM sessions WHERE task_id = ? AND sample_index = ? AND attempt < ?"
        " ORDER BY attempt DESC"
    )
    found = list[EarlierAttempt]()
    with read_snapshot(db):
        for (session_id,) in db.execute(query, (place.task_id, place.sample_index, place.attempt)).fetchall():
            known, record = queries.identity_of(db, session_id), queries.session(db, session_id)
            if known is None or record is None:
                break
            count = _count_turns(db, session_id)
            found.append(EarlierAttempt(identity=known, outcome=record.outcome, count=count))
    return tuple(found)


def _count_turns(db: sqlite3.Connection, session_id: str) -> int:
    last = "SELECT coalesce(max(turn), -1) FROM turns WHERE session_id = ?"
    return int(db.execute(last, (session_id,)).fetchone()[0]) + 1


# A fork begins after its parent, or waits for it in the same task. No other sessions are looked at.
WHERE_FORK_OF = f"""WHERE retried_as IS NULL AND session_id != ?1 AND instr(identity, CAST(?1 AS BLOB))
    AND (rowid > (SELECT rowid FROM sessions WHERE session_id = ?1)
        OR task_id = (SELECT task_id FROM sessions WHERE session_id = ?1))
    AND json_extract({FORKED_FROM_COLUMN}, '$.session_id') = ?1
ORDER BY rowid LIMIT ?2"""


def forks(db: sqlite3.Connection, session_id: str, limit: int) -> tuple[SessionRecord, ...]:
    """The first forks of a session, in the order in which they began. The query looks at the identity of each
    session that began later.
    """
    with read_snapshot(db):
        rows = db.execute(queries.SELECT_SESSION + WHERE_FORK_OF, (session_id, limit)).fetchall()
        return tuple(queries.read_session(db, row) for row in rows)
