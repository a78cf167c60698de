"""Tasks that were submitted by one name, one after another.

The rule for whoever edits it: the last that was taken is the one that is meant; those before it may be pruned, so that numbers begin anywhere.
"""

import sqlite3
from typing import Final

from polarnode.shell.journal import reads
from polarnode.shell.journal.values import TaskRecord

RUN: Final = ":run-"  # stands between the name and the number of a task that is not the first
_AFTER: Final = ":run."  # '.' follows '-': every name with a number lies between the two


def latest_run(db: sqlite3.Connection, name: str) -> TaskRecord | None:
    """The task of this name, or the last of its later ones."""
    asked = "SELECT task_id FROM tasks WHERE task_id = ? OR (task_id > ? AND task_id < ?) ORDER BY number DESC LIMIT 1"
    row = db.execute(asked, (name, name + RUN, name + _AFTER)).fetchone()
    return None if row is None else reads.task(db, row[0])
