"""Finished groups, newest first, for whoever looks at them: a page, not a trainer.

The stream goes forward and its readers hold back retention. These reads do neither.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from polarnode.core.codec.json import plain, read_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Unreadable
from polarnode.groups.training_rows import Estimator, advantages_of
from polarnode.journal.damage import Damage, check, decoding, note, reading_pages
from polarnode.journal.schema import FORKED, read_fork, snapshot

ESTIMATOR: Final[Estimator] = "grpo"  # what most trainers use: a reward in standard deviations of its group
SCANNED: Final = 20_000  # groups that one read looks through for a state: 20 µs each

GROUPS: Final = """
SELECT events.seq, events.at, events.kind, events.key, events.task_id, events.group_id, events.session_id,
    events.outcome, events.reward, events.body, events.checksum, tasks.submitted, tasks.spec
FROM events LEFT JOIN tasks ON tasks.task_id = events.task_id
WHERE events.kind = 'group' AND (?1 IS NULL OR events.at <= ?1) AND (?2 IS NULL OR events.task_id = ?2)
ORDER BY events.seq DESC LIMIT ?3"""


def finished_groups(
    db: sqlite3.Connection, limit: int, until: float | None, state: str | None, task_id: str | None
) -> list[dict[str, Json]]:
    """Up to `limit` bodies of `group` events with when they ended and what their task says, newest first.

    `until`: only those that ended at this time or before; `state`: only those in this state; `task_id`: only
    this task's. `advantages` are those of usable sessions among each other, null for the others. A row that
    is damaged is left out, and noted: the stream reports it.
    """
    found: list[dict[str, Json]] = []
    with snapshot(db), reading_pages():
        for row in db.execute(GROUPS, (until, task_id, SCANNED if state is not None else limit)):
            group = _group(db, row)
            if group is not None and state in (None, group["state"]):
                found.append(group)
            if len(found) == limit:
                break
    return found


def _group(db: sqlite3.Connection, row: Sequence[Any]) -> dict[str, Json] | None:
    seq, at, kind, key, task_id, group_id, session_id, outcome, reward, body, expected, submitted, spec = row
    try:
        check(expected, kind, key, task_id, group_id, session_id, outcome, reward, at, body)
        with decoding():
            group: Any = read_json(body)
    except Unreadable as error:
        note(db, Damage(table="events", row=str(seq), session_id=None, reason=str(error)))
        return None
    task: Any = {}
    with suppress(Unreadable), decoding():
        task = {} if spec is None else read_json(spec)
    forks = _forks(db, task_id) if has_forks(task) else None
    return shown_group(group, task, forks, ended=at, submitted=submitted)


def has_forks(task: Mapping[str, Any]) -> bool:
    """Whether sessions of a task, by its spec as JSON, go on from others."""
    return bool(task.get("fork") or (task.get("group") or {}).get("fork"))


def shown_group(
    group: dict[str, Any],
    task: Mapping[str, Any],
    forks: Mapping[str, Json] | None,
    *,
    ended: float,
    submitted: float | None,
) -> dict[str, Json]:
    """The body of a `group` event with what its task says. `forks`: what the sessions were to inherit, where
    some did.
    """
    if forks is not None:
        sessions = group["sessions"]
        group["sessions"] = [{**each, "forked_from": forks.get(each["session_id"])} for each in sessions]
    return {
        "state": None,
        "reason": None,
        "usable": 0,
        **group,
        "advantages": advantages(group["sessions"]),
        "ended": ended,
        "submitted": submitted,
        "harness": str((task.get("harness") or {}).get("name", "")),
        "metadata": task.get("metadata") or {},
    }


def _forks(db: sqlite3.Connection, task_id: str) -> dict[str, Json]:
    """What the sessions of a task were to inherit, by session."""
    rows = db.execute(f"SELECT session_id, {FORKED} FROM sessions WHERE task_id = ?", (task_id,))
    return {session_id: plain(read_fork(value)) for session_id, value in rows}


def advantages(members: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The advantage of each member of a group's JSON that is usable, null for the others."""
    usable = [member for member in members if member.get("usable")]
    found = iter(advantages_of([member["reward"] for member in usable], ESTIMATOR))
    return [next(found) if member.get("usable") else None for member in members]
