"""What a fleet keeps in two journals: copies of tasks, commits of finished places, results that wait for one.

Entries and queries, as in `entries.py` and `queries.py`. A task's row in `copies` is what this journal is to
it; only an entry that raises its epoch changes that. A place is filled once: its first commit stays, unless
the home of a later epoch replaces all of them at once, staged under a name of their own before. A result in
`held` has no event yet; the entry that gives it one deletes it in the same transaction.
"""

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from struct import Struct
from typing import Any, Final

from attrs import evolve, frozen

from polarnode.core.codec.json import dump_json, read_json, structure
from polarnode.core.codec.packing import pack_trajectory, pack_turn, unpack_trajectory, unpack_turn
from polarnode.core.codec.tasks import task_json
from polarnode.core.errors import Unreadable
from polarnode.core.fleet import Adoption, CopyRow, Epoch, Moved, Role, TaskCopy
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.journal.damage import Damage, check, checksum, decoding, note
from polarnode.journal.entries import (
    ROW_BYTES,
    Entry,
    attempt_entry,
    insert_session,
    task_entry,
    trajectory_entry,
    turn_entry,
)
from polarnode.journal.pending_callbacks import EVENT_KINDS
from polarnode.journal.queries import readable_turns
from polarnode.journal.schema import snapshot

STAGED: Final = "\x1f"  # between a task's id and an epoch: no id has it

# ── results as bytes ────────────────────────────────────────────────────────────

_HEAD: Final = Struct(">dI")  # when it ended, and the number of parts: the trajectory, then its turns
_PART: Final = Struct(">I")


@frozen(kw_only=True)
class EndedResult:
    """A session's trajectory with its turns, and when it ended: the time of its event in every journal."""

    trajectory: Trajectory
    at: float


def pack_result(trajectory: Trajectory, at: float, *, turns: bool = True) -> bytes:
    """A result as a commit has it; without its turns as `held` has it, beside the rows of its turns."""
    return _packed(at, [pack_trajectory(trajectory), *(map(pack_turn, trajectory.turns) if turns else ())])


def _packed(at: float, parts: Sequence[bytes]) -> bytes:
    return _HEAD.pack(at, len(parts)) + b"".join(_PART.pack(len(part)) + part for part in parts)


def pack_turns(turns: Iterable[Turn]) -> bytes:
    """Turns as the copy of a snapshot has them."""
    return _packed(0.0, list(map(pack_turn, turns)))


def read_turns(data: bytes) -> tuple[Turn, ...]:
    """What `pack_turns` wrote, of one turn at least. Raises Unreadable."""
    with decoding():
        return tuple(map(unpack_turn, _parts(data)[1]))


def read_result(data: bytes) -> EndedResult:
    """What `pack_result` wrote with its turns. Raises Unreadable."""
    with decoding():
        at, (body, *turns) = _parts(data)
        trajectory = unpack_trajectory(body, tuple(map(unpack_turn, turns)))
        return EndedResult(trajectory=trajectory, at=at)


def _parts(data: bytes) -> tuple[float, list[bytes]]:
    at, count = _HEAD.unpack_from(data)
    found, place = list[bytes](), _HEAD.size
    for _ in range(count):
        (size,) = _PART.unpack_from(data, place)
        place += _PART.size + size
        found.append(data[place - size : place])
    if place != len(data) or not found:
        raise Unreadable("it is cut off")
    return at, found


# ── copies ────────────────────────────────────────────────────────────

_COPY: Final = "SELECT task_id, role, term, number, home, second, cancelled, body, checksum FROM copies "
_REQUIRES: Final = b'{"requires":{"'  # how a copy begins whose task requires labels
_LATER: Final = "(term < ?1 OR (term = ?1 AND number < ?2))"  # than the row's epoch is the one that is given


def copy_entry(copy: TaskCopy, role: Role, *, places: int = 0) -> Entry:
    """A task's row, unless there is one of this epoch or a later one, or the task was this journal's own. It
    takes the `places` that were staged for it; nothing is written when they are not all there.
    """
    body = dump_json(
        {
            "requires": {**copy.spec.requires},  # first: a list of all copies reads no specs for it
            "spec": task_json(copy.spec),
            "key": copy.idempotency_key,
            "submitted": copy.submitted,
        }
    )
    return Entry(ROW_BYTES + len(body), partial(_put_copy, copy=copy, role=role, body=body, places=places))


def begin_entry(copy: TaskCopy, task: Entry) -> Entry:
    """A task that begins at its home: its copy and its rows are one entry."""
    row = copy_entry(copy, "home")

    def apply(db: sqlite3.Connection) -> None:
        row.apply(db)
        task.apply(db)

    return Entry(row.size + task.size, apply)


def _put_copy(db: sqlite3.Connection, *, copy: TaskCopy, role: Role, body: bytes, places: int) -> None:
    task_id, epoch = copy.task_id, copy.epoch
    row = _role_of(db, task_id)
    own = db.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if (row is None and own is not None) or (row is not None and (row[0] == "home" or row[1] >= epoch)):
        return
    staged = f"{task_id}{STAGED}{epoch.term}.{epoch.number}"
    (count,) = db.execute("SELECT count(*) FROM commits WHERE task_id = ?", (staged,)).fetchone()
    if count != places:
        return
    db.execute(
        "INSERT OR REPLACE INTO copies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(task_id, role, epoch.term, epoch.number, copy.home, copy.second, copy.cancelled, body),
            checksum(task_id, body),
        ),
    )
    db.execute("DELETE FROM commits WHERE task_id = ?", (task_id,))
    for place, session_id, data in db.execute(
        "SELECT place, session_id, body FROM commits WHERE task_id = ?", (staged,)
    ).fetchall():
        _insert_commit(db, task_id, place, session_id, data)
    db.execute(
        "DELETE FROM commits WHERE task_id > ? AND task_id < ?", (task_id + STAGED, task_id + STAGED + "~")
    )


def _role_of(db: sqlite3.Connection, task_id: str) -> tuple[Role, Epoch] | None:
    row = db.execute("SELECT role, term, number FROM copies WHERE task_id = ?", (task_id,)).fetchone()
    return None if row is None else (row[0], Epoch(row[1], row[2]))


def cancel_copy_entry(task_id: str, *, now: float) -> Entry:
    """The task was cancelled: its adopter ends what it would begin."""
    query = "UPDATE copies SET cancelled = coalesce(cancelled, ?) WHERE task_id = ?"
    return _statement(query, (now, task_id))


def seconds_entry(adoption: Adoption) -> Entry:
    """A task of this home has another second home."""
    epoch = adoption.epoch
    return _statement(
        "UPDATE copies SET term = ?1, number = ?2, second = ?3 WHERE task_id = ?4 AND role = 'home'"
        f" AND {_LATER}",
        (epoch.term, epoch.number, adoption.second, adoption.task_id),
    )


def moved_entry(moved: Moved) -> Entry:
    """A task of this home is another journal's now."""
    return _statement(
        "UPDATE copies SET role = 'former', term = ?1, number = ?2, home = ?3, second = '' WHERE task_id = ?4"
        f" AND role = 'home' AND {_LATER}",
        (moved.epoch.term, moved.epoch.number, moved.home, moved.task_id),
    )


def _statement(query: str, values: tuple[object, ...]) -> Entry:
    def apply(db: sqlite3.Connection) -> None:
        db.execute(query, values)

    return Entry(ROW_BYTES, apply)


def drop_entry(task_id: str, epoch: Epoch) -> Entry:
    """Forget a copy of this epoch or an earlier one. A former home keeps its row, without the homes, because
    its sessions name successors in another journal; both keep it while they have sessions without an end.
    """
    return Entry(ROW_BYTES, partial(_drop, task_id=task_id, epoch=epoch))


def _drop(db: sqlite3.Connection, *, task_id: str, epoch: Epoch) -> None:
    row = _role_of(db, task_id)
    if row is None or row[1] > epoch or (row[0] != "second" and _open_sessions(db, task_id)):
        return
    own = db.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if row[0] == "former" or (row[0] == "second" and own is not None):
        # without a row the task would look like one that began and ended here
        former = "UPDATE copies SET role = 'former', home = '', second = '' WHERE task_id = ?"
        db.execute(former, (task_id,))
    else:
        db.execute("DELETE FROM copies WHERE task_id = ?", (task_id,))
    db.execute("DELETE FROM commits WHERE task_id = ?", (task_id,))


def _open_sessions(db: sqlite3.Connection, task_id: str) -> int:
    query = "SELECT count(*) FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NULL"
    return int(db.execute(query, (task_id,)).fetchone()[0])


def copy_of(db: sqlite3.Connection, task_id: str) -> tuple[Role, TaskCopy] | None:
    """A task's row with its spec; None where there is none, or it is damaged."""
    row = db.execute(_COPY + "WHERE task_id = ?", (task_id,)).fetchone()
    copy = None if row is None else _copy(db, row)
    return None if copy is None else (row[1], copy)


def _copy(db: sqlite3.Connection, row: tuple[Any, ...]) -> TaskCopy | None:
    task_id, _, term, number, home, second, cancelled, body, expected = row
    try:
        check(expected, task_id, body)
        with decoding():
            found: Any = read_json(body)
            return TaskCopy(
                task_id=task_id,
                epoch=Epoch(term, number),
                home=home,
                second=second,
                spec=structure(found["spec"], TaskSpec),
                idempotency_key=found["key"],
                submitted=found["submitted"],
                cancelled=cancelled,
            )
    except Unreadable as error:
        note(db, Damage(table="copies", row=task_id, reason=str(error)))
        return None


def copy_rows(
    db: sqlite3.Connection, waiting: Collection[str], task_id: str | None = None, key: str | None = None
) -> tuple[CopyRow, ...]:
    """The copies that were not dropped; of one task or key alone, its plain task too."""
    with snapshot(db):
        if task_id is None and key is None:
            rows = db.execute(_COPY + "WHERE role <> 'former' OR home <> ''").fetchall()
            return tuple(_copy_row(db, row, waiting) for row in rows)
        if task_id is None:
            keyed = "SELECT task_id FROM tasks WHERE idempotency_key = ? LIMIT 1"
            found = db.execute(keyed, (key,)).fetchone()
            if found is None:  # a second home has no index of keys: it is asked once a submission
                copies = ((row, _copy(db, row)) for row in db.execute(_COPY).fetchall())
                of_key = (row for row, copy in copies if copy is not None and copy.idempotency_key == key)
                return tuple(_copy_row(db, row, waiting) for row in of_key)
            (task_id,) = found
        row = db.execute(_COPY + "WHERE task_id = ?", (task_id,)).fetchone()
        if row is not None:
            return (_copy_row(db, row, waiting),)
        (journal,) = db.execute("SELECT value FROM meta WHERE name = 'journal'").fetchone()
        plain = db.execute("SELECT cancelled FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
        left = _open_sessions(db, str(task_id))
    if plain is None:
        return ()
    return (
        CopyRow(
            task_id=str(task_id),
            role="home",
            epoch=Epoch(0, 0),
            home=journal,
            second="",
            finished=not left,
            cancelled=plain[0] is not None,
            open_places=left,
        ),
    )


def _copy_row(db: sqlite3.Connection, row: tuple[Any, ...], waiting: Collection[str]) -> CopyRow:
    task_id, role, term, number, home, second, cancelled, body, _ = row
    copy = _copy(db, row) if role == "second" or body.startswith(_REQUIRES) else None
    if role == "second":
        query = "SELECT count(*) FROM commits WHERE task_id = ?"
        samples = 0 if copy is None else copy.spec.num_samples
        left = max(0, samples - int(db.execute(query, (task_id,)).fetchone()[0]))
    else:
        left = _open_sessions(db, task_id)
        own = db.execute("SELECT cancelled FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
        cancelled = cancelled if own is None else own[0] or cancelled
    return CopyRow(
        task_id=task_id,
        role=role,
        epoch=Epoch(term, number),
        home=home,
        second=second,
        finished=role == "home" and not left,
        cancelled=cancelled is not None,
        waiting=task_id in waiting,
        open_places=left,
        requires={} if copy is None else copy.spec.requires,
    )


def settled_copies(db: sqlite3.Connection, acknowledged: int) -> tuple[str, ...]:
    """Tasks of this home whose `task` event is acknowledged, or pruned."""
    query = (
        "SELECT task_id FROM copies WHERE role = 'home' AND (EXISTS (SELECT 1 FROM events WHERE kind = 'task'"
        " AND events.task_id = copies.task_id AND seq <= ?) OR NOT EXISTS (SELECT 1 FROM tasks WHERE"
        " tasks.task_id = copies.task_id))"
    )
    return tuple(task_id for (task_id,) in db.execute(query, (acknowledged,)).fetchall())


# ── commits ────────────────────────────────────────────────────────────


def commit_entry(
    task_id: str, place: int, session_id: str, epoch: Epoch, data: bytes, *, staged: bool = False
) -> Entry:
    """Fill a place for its home of this epoch, if nobody did and the task has no later one. `staged`: for a
    copy that comes when all its places are there.
    """
    key = f"{task_id}{STAGED}{epoch.term}.{epoch.number}" if staged else task_id

    def apply(db: sqlite3.Connection) -> None:
        row = _role_of(db, task_id)
        if staged or (row is not None and row[0] == "second" and row[1] <= epoch):
            _insert_commit(db, key, place, session_id, data)

    return Entry(ROW_BYTES + len(data), apply)


def _insert_commit(db: sqlite3.Connection, task_id: str, place: int, session_id: str, data: bytes) -> None:
    row = (task_id, place, session_id, data)
    db.execute("INSERT OR IGNORE INTO commits VALUES (?, ?, ?, ?, ?)", (*row, checksum(*row)))


def holder_of(db: sqlite3.Connection, task_id: str, place: int) -> str:
    """The session that has a place of a task, committed or not; "" where none has."""
    row = (
        db.execute(
            "SELECT session_id FROM commits WHERE task_id = ? AND place = ?", (task_id, place)
        ).fetchone()
        or db.execute(
            "SELECT session_id FROM sessions WHERE task_id = ? AND sample_index = ? AND retried_as IS NULL",
            (task_id, place),
        ).fetchone()
    )
    return "" if row is None else str(row[0])


def keeps_place(db: sqlite3.Connection, task_id: str, place: int, epoch: Epoch | None = None) -> bool:
    """Whether a place of a task of this journal is open: as second home, of this epoch if one is named, or as
    home.
    """
    row = _role_of(db, task_id)
    if row is None or row[0] == "former" or (epoch is not None and row != ("second", epoch)):
        return False
    query = (
        "SELECT 1 FROM commits WHERE task_id = ? AND place = ?"
        if row[0] == "second"
        else "SELECT 1 FROM sessions WHERE task_id = ? AND sample_index = ? AND retried_as IS NULL AND"
        " (outcome IS NOT NULL OR session_id IN (SELECT session_id FROM held))"
    )
    return db.execute(query, (task_id, place)).fetchone() is None


def committed(db: sqlite3.Connection, task_id: str, place: int) -> EndedResult | None:
    """A commit; None where it is damaged, or there is none."""
    query = "SELECT session_id, body, checksum FROM commits WHERE task_id = ? AND place = ?"
    row = db.execute(query, (task_id, place)).fetchone()
    if row is None:
        return None
    try:
        check(row[2], task_id, place, *row[:2])
        return read_result(row[1])
    except Unreadable as error:
        note(db, Damage(table="commits", row=f"{task_id}/{place}", reason=str(error)))
        return None


def ended_places(db: sqlite3.Connection, task_id: str) -> tuple[str, ...]:
    """The sessions of a task whose events have numbers."""
    query = "SELECT session_id FROM sessions WHERE task_id = ? AND retried_as IS NULL AND outcome IS NOT NULL"
    return tuple(session_id for (session_id,) in db.execute(query, (task_id,)).fetchall())


def ended_at(db: sqlite3.Connection, session_id: str) -> float:
    row = db.execute("SELECT finished FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return 0.0 if row is None or row[0] is None else float(row[0])


# ── adoption ────────────────────────────────────────────────────────────


def adopt_entry(
    copy: TaskCopy,
    adoption: Adoption,
    *,
    home: str,
    session_ids: tuple[str, ...],
    callback_kinds: tuple[str, ...] = EVENT_KINDS,
) -> Entry:
    """The second home becomes home, unless the task has this epoch or a later one: committed places become
    results that are held, each other place gets the session of `session_ids` at its number.
    """
    begin = task_entry(
        copy.spec,
        task_id=copy.task_id,
        session_ids=(),
        idempotency_key=copy.idempotency_key,
        now=copy.submitted,
        callback_kinds=callback_kinds,
    )

    def apply(db: sqlite3.Connection) -> None:
        task_id, epoch = copy.task_id, adoption.epoch
        row = _role_of(db, task_id)
        if row is None or row[0] != "second" or row[1] >= epoch:
            return
        begin.apply(db)
        cancelled = "(SELECT cancelled FROM copies WHERE task_id = ?1)"
        db.execute(f"UPDATE tasks SET cancelled = {cancelled} WHERE task_id = ?1", (task_id,))
        db.execute(
            "UPDATE copies SET role = 'home', term = ?, number = ?, home = ?, second = ? WHERE task_id = ?",
            (epoch.term, epoch.number, home, adoption.second, task_id),
        )
        filled = _hold_commits(db, task_id)
        for place, session_id in enumerate(session_ids):
            if place not in filled:
                insert_session(
                    db,
                    session_id=session_id,
                    task_id=task_id,
                    sample_index=place,
                    attempt=epoch.number,
                )

    return Entry(2 * ROW_BYTES + begin.size + ROW_BYTES * len(session_ids), apply)


def _hold_commits(db: sqlite3.Connection, task_id: str) -> set[int]:
    """Make the commits of a task results of this journal. A damaged one leaves its place open."""
    query = "SELECT place FROM commits WHERE task_id = ?"
    filled = set[int]()
    for (place,) in db.execute(query, (task_id,)).fetchall():
        result = committed(db, task_id, place)
        if result is None:
            continue
        whole = result.trajectory
        row = {"session_id": whole.session_id, "task_id": task_id, "sample_index": place}
        insert_session(db, **row, attempt=whole.attempt)
        for turn in whole.turns:
            turn_entry(turn).apply(db)
        hold_entry(whole, at=result.at).apply(db)
        filled.add(place)
    db.execute("DELETE FROM commits WHERE task_id = ?", (task_id,))
    return filled


# ── results that wait ────────────────────────────────────────────────────────────


def hold_entry(trajectory: Trajectory, *, at: float) -> Entry:
    """A result whose event has no number yet. Its turns are in the journal."""
    row = (trajectory.session_id, trajectory.task_id, pack_result(trajectory, at, turns=False))
    ids = {"session_id": trajectory.session_id, "task_id": trajectory.task_id}

    def apply(db: sqlite3.Connection) -> None:
        insert_session(db, **ids, sample_index=trajectory.sample_index, attempt=trajectory.attempt)
        over = "SELECT 1 FROM sessions WHERE session_id = ? AND outcome IS NOT NULL"
        if db.execute(over, row[:1]).fetchone() is None:
            db.execute("INSERT OR IGNORE INTO held VALUES (?, ?, ?, ?)", (*row, checksum(*row)))

    return Entry(ROW_BYTES + len(row[2]), apply)


def publish_held_entry(trajectory: Trajectory, *, at: float) -> Entry:
    """The result is committed: its event gets a number, and the task's end where it was the last place."""
    return _settled(trajectory_entry(trajectory, now=at), trajectory.session_id)


def retire_held_entry(trajectory: Trajectory, successor: str, *, at: float) -> Entry:
    """Another journal's session has the place: an `attempt` event."""
    return _settled(attempt_entry(evolve(trajectory, retried_as=successor), now=at), trajectory.session_id)


def _settled(publish: Entry, session_id: str) -> Entry:
    def apply(db: sqlite3.Connection) -> None:
        publish.apply(db)
        db.execute("DELETE FROM held WHERE session_id = ?", (session_id,))

    return Entry(publish.size, apply)


def forget_session_entry(session_id: str) -> Entry:
    """Another journal delivers this very session: it has no event here."""

    def apply(db: sqlite3.Connection) -> None:
        for table in ("held", "turns", "sessions"):
            db.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))

    return Entry(ROW_BYTES, apply)


def held_sessions(db: sqlite3.Connection) -> dict[str, str]:
    """The task of each session whose result waits."""
    return dict(db.execute("SELECT session_id, task_id FROM held ORDER BY rowid").fetchall())


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
            at, (body,) = _parts(row[2])
            whole = unpack_trajectory(body, turns, damaged=damaged)
            return EndedResult(trajectory=whole, at=at)
    except Unreadable as error:
        note(db, Damage(table="held", row=session_id, session_id=session_id, reason=str(error)))
        return None


# ── terms ────────────────────────────────────────────────────────────


def term_entry(term: int, front: str) -> Entry:
    """The front that holds office here."""

    def apply(db: sqlite3.Connection) -> None:
        db.execute("UPDATE meta SET value = ? WHERE name = 'term'", (term,))
        # the letter keeps SQLite from reading a number
        db.execute("INSERT OR REPLACE INTO meta VALUES ('front', ?)", (f"f{front}",))

    return Entry(ROW_BYTES, apply)


def term_of(db: sqlite3.Connection) -> tuple[int, str]:
    (term,) = db.execute("SELECT value FROM meta WHERE name = 'term'").fetchone()
    row = db.execute("SELECT value FROM meta WHERE name = 'front'").fetchone()
    return int(term), "" if row is None else str(row[0])[1:]
