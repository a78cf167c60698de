"""The end of a task: its `group` and `task` events, when the last of its places is over.

The rule for whoever edits it: both are made of what the tables hold, in the transaction that brings the last trajectory, so that no death of
the node parts them; and the node's own judgement of a group that is not over yet is made of the same facts.
"""

import sqlite3

from attrs import evolve, field, frozen

from polarnode.conversation import Json
from polarnode.groups import Facts, group_json, judged
from polarnode.records import Outcome
from polarnode.shell.journal import outgoing
from polarnode.tasks import GroupSpec
from polarnode.wire import dump_json, read_json, structure

OPEN = "SELECT 1 FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL LIMIT 1"
OVER = """
SELECT session_id, sample_index, outcome, reward, trainable, staleness
FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NOT NULL ORDER BY sample_index"""


def places_over(db: sqlite3.Connection, task_id: str) -> tuple[Facts, ...]:
    """The sessions that hold the task's places and are over, in order of sample_index."""
    return tuple(_facts(*row) for row in db.execute(OVER, (task_id,)).fetchall())


def _facts(session_id: str, sample_index: int, outcome: bytes, reward: float | None, trainable: int | None, staleness: int | None) -> Facts:
    return Facts(
        session_id=session_id,
        sample_index=sample_index,
        outcome=evolve(structure(read_json(outcome), Outcome), log_tail=None),
        reward=reward,
        trainable_tokens=trainable,
        staleness=staleness,
    )


def end_task(db: sqlite3.Connection, task_id: str, now: float) -> None:
    """Write the group's and the task's events, when that was the last of its places."""
    task = db.execute("SELECT group_id, submitted, spec FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task is None or db.execute(OPEN, (task_id,)).fetchone() is not None:
        return
    group_id, submitted, spec = task
    group = judged(_group_spec(spec), places_over(db, task_id), task_id=task_id, group_id=group_id)
    statuses = [member.status for member in group.members]
    counts: dict[str, Json] = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    times: dict[str, Json] = {"submitted": submitted, "finished": now}
    _insert(db, "group", group_json(group), now)
    _insert(db, "task", {"task_id": task_id, "group_id": group_id, "counts": counts, **times}, now)


@frozen(kw_only=True)
class _OfGroup:
    """What of a task's spec counts here; one that was written before there was a `group` has the defaults."""

    group: GroupSpec = field(factory=GroupSpec)


def _group_spec(spec: bytes) -> GroupSpec:
    return structure(read_json(spec), _OfGroup).group


def _insert(db: sqlite3.Connection, kind: str, body: dict[str, Json], now: float) -> None:
    row = (kind, f"{kind}:{body['task_id']}", body["task_id"], body["group_id"], dump_json(body), now)
    db.execute("INSERT INTO events (kind, key, task_id, group_id, body, at) VALUES (?, ?, ?, ?, ?, ?)", row)
    outgoing.owe(db, kind, str(body["task_id"]))
