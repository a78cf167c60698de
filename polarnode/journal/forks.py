"""What a fork needs of its parent, from the journal: the parent's task and its first turns.

The parent may be live, over, or of an earlier run of the node: its turns are in the journal since they ended.
"""

import sqlite3

from attrs import frozen

from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Damaged, Turn
from polarnode.journal import queries
from polarnode.journal.schema import snapshot


@frozen(kw_only=True)
class ForkParent:
    """A session to go on from. `spec` is its task's, None for a capture and where its row is damaged. `turns`
    are those below the turn that was asked for, `damaged` names those of them that cannot be read; `count` is
    the number of turns that it has, so far or in all.
    """

    spec: TaskSpec | None
    turns: tuple[Turn, ...]
    damaged: tuple[Damaged, ...]
    count: int


def fork_parent(db: sqlite3.Connection, session_id: str, turn: int) -> ForkParent | None:
    """The parent of forks that begin with its turn `turn`; None when the journal does not have it."""
    found = queries.session(db, session_id)
    if found is None:
        return None
    task = queries.task(db, found.task_id)
    with snapshot(db):
        turns, damaged = queries.readable_turns(db, session_id, before=turn)
        last = "SELECT coalesce(max(turn), -1) FROM turns WHERE session_id = ?"
        (highest,) = db.execute(last, (session_id,)).fetchone()
    return ForkParent(
        spec=None if task is None or task.damaged is not None else task.spec,
        turns=turns,
        damaged=damaged,
        count=highest + 1,
    )
