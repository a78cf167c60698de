"""Finished groups, newest first, for a page that shows them.

Trainers read the stream instead: it goes forward, and its readers hold back retention. These reads do
neither.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from polarnode.core.codec.json import plain, read_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Unreadable
from polarnode.groups.training_rows import Estimator, advantages_of
from polarnode.journal.damage import Damage, decode_boundary, note_damage, page_boundary, verify_checksum
from polarnode.journal.schema import FORKED_FROM_COLUMN, read_forked_from, read_snapshot

DEFAULT_ESTIMATOR: Final[Estimator] = (
    "grpo"  # most trainers use it: a reward in standard deviations of its group
)
MAX_SCANNED_GROUPS: Final = 20_000  # most groups that one read looks through for a state, at 20 µs each

SELECT_GROUPS: Final = """
SELECT events.seq, events.at, events.kind, events.key, events.task_id, events.group_id, events.session_id,
    events.outcome, events.reward, events.body, events.checksum, tasks.submitted, tasks.spec
FROM events LEFT JOIN tasks ON tasks.task_id = events.task_id
WHERE events.kind = 'group' AND (?1 IS NULL OR events.at <= ?1) AND (?2 IS NULL OR events.task_id = ?2)
ORDER BY events.seq DESC LIMIT ?3"""


def finished_groups(
    db: sqlite3.Connection, limit: int, until: float | None, state: str | None, task_id: str | None
) -> list[dict[str, Json]]:
    """Up to `limit` bodies of `group` events, each with the time it ended and facts of its task, newest
    first.

    `until` selects groups that ended at this time or before, `state` those in this state, and `task_id` those
    of this task. `advantages` compare the usable sessions with each other and are null for the others. A
    damaged row is left out and noted: the stream reports it.
    """
    found: list[dict[str, Json]] = []
    with read_snapshot(db), page_boundary():
        for row in db.execute(
            SELECT_GROUPS, (until, task_id, MAX_SCANNED_GROUPS if state is not None else limit)
        ):
            group = _read_group(db, row)
            if group is not None and state in (None, group["state"]):
                found.append(group)
            if len(found) == limit:
                break
    return found


def _read_group(db: sqlite3.Connection, row: Sequence[Any]) -> dict[str, Json] | None:
    seq, at, kind, key, task_id, group_id, session_id, outcome, reward, body, expected, submitted, spec = row
    try:
        verify_checksum(expected, kind, key, task_id, group_id, session_id, outcome, reward, at, body)
        with decode_boundary():
            group: Any = read_json(body)
    except Unreadable as error:
        note_damage(db, Damage(table="events", row=str(seq), session_id=None, reason=str(error)))
        return None
    task: Any = {}
    with suppress(Unreadable), decode_boundary():
        task = {} if spec is None else read_json(spec)
    forks = _fork_origins(db, task_id) if has_forks(task) else None
    return describe_group(group, task, forks, ended=at, submitted=submitted)


def has_forks(task: Mapping[str, Any]) -> bool:
    """Whether a task, given as its spec in JSON, has sessions that are forks."""
    return bool(task.get("fork") or (task.get("group") or {}).get("fork"))


def describe_group(
    group: dict[str, Any],
    task: Mapping[str, Any],
    forks: Mapping[str, Json] | None,
    *,
    ended: float,
    submitted: float | None,
) -> dict[str, Json]:
    """Add facts of its task to the body of a `group` event. `forks` says by session what it was to inherit;
    it is None where no session is a fork.
    """
    if forks is not None:
        sessions = group["sessions"]
        group["sessions"] = [{**each, "forked_from": forks.get(each["session_id"])} for each in sessions]
    return {
        "state": None,
        "reason": None,
        "usable": 0,
        **group,
        "advantages": group_advantages(group["sessions"]),
        "ended": ended,
        "submitted": submitted,
        "harness": str((task.get("harness") or {}).get("name", "")),
        "metadata": task.get("metadata") or {},
    }


def _fork_origins(db: sqlite3.Connection, task_id: str) -> dict[str, Json]:
    """Map each session of a task to what it was to inherit from its parent."""
    rows = db.execute(f"SELECT session_id, {FORKED_FROM_COLUMN} FROM sessions WHERE task_id = ?", (task_id,))
    return {session_id: plain(read_forked_from(value)) for session_id, value in rows}


def group_advantages(members: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The advantage of each usable member of a group's JSON, and None for the others."""
    usable = [member for member in members if member.get("usable")]
    found = iter(advantages_of([member["reward"] for member in usable], DEFAULT_ESTIMATOR))
    return [next(found) if member.get("usable") else None for member in members]
