"""A row that is damaged, or that cannot be written as JSON, costs itself alone and is named. A damaged file
takes nothing new, which `polarnode.journal.health` says.
"""

import os
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any, NoReturn

import attrs
import orjson
import pytest
from journal_samples import make_identity, make_spec, make_trajectory, make_turn
from journal_writes import publish_end, serve_weights, submit_task

from polarnode.api.exports import export
from polarnode.api.query import Query
from polarnode.core.codec.json import TOO_DEEP
from polarnode.core.errors import JournalDamaged, JournalError
from polarnode.core.trajectory import LeftOut, Outcome, Trajectory
from polarnode.journal import entries, queries
from polarnode.journal.damage import checksum, encode_trajectory
from polarnode.journal.entries import JournalEntry
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.schema import PAGE_BYTES
from polarnode.journal.values import EventFilters, json_encoder
from polarnode.merge.trajectory import Result, assemble

Open = Callable[[], AbstractAsyncContextManager[Journal]]
EVERY_KIND = EventFilters(kinds=("trajectory", "group", "task", "attempt"))


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def opener() -> AsyncIterator[Journal]:
        async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
            yield journal

    return opener


def change(tmp_path: Path, sql: str, *values: Any) -> None:
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        assert db.execute(sql, values).rowcount == 1
    db.close()


async def fill(journal: Journal, *session_ids: str, turns: int = 2, **more: Any) -> None:
    """A finished task of one session for each."""
    for name in session_ids:
        submit_task(journal, make_spec(), task_id=f"t-{name}", session_ids=(name,), idempotency_key=None)
        journal.writer.record_session(make_identity(name, task_id=f"t-{name}", group_id=f"t-{name}"))
        whole = chained(name, turns)
        for turn in whole.turns:
            journal.writer.record_turn(turn)
        publish_end(journal, attrs.evolve(whole, **more))
    await journal.writer.flush()


def chained(name: str, turns: int) -> Trajectory:
    """A session whose turns extend each other, built as a node builds it."""
    found = [make_turn(name, 0)]
    for index in range(1, turns):
        turn, before = make_turn(name, index), found[-1].end
        found.append(attrs.evolve(turn, prompt_length=before + len(turn.prompt_delta)))
    identity = make_identity(name, task_id=f"t-{name}", group_id=f"t-{name}")
    whole = assemble(identity, make_spec(), found, Result(outcome=Outcome(status="completed")))
    return attrs.evolve(whole, reward=1.0)


async def told(journal: Journal, **more: Any) -> list[tuple[str, str, Any]]:
    """Every event, page by page: kind, key and body."""
    found, seen = [], 0
    while seen < journal.commits.progress.last_seq:
        page = await journal.reader.events(seen, filters=EVERY_KIND, **more)
        found += [(each.kind, each.key, orjson.loads(each.body)) for each in page.events]
        assert page.seen > seen
        seen = page.seen
    return found


def keys(*names: str) -> list[str]:
    return [key for name in names for key in (f"trajectory:{name}", f"group:t-{name}", f"task:t-{name}")]


async def damaged_rows(journal: Journal) -> list[tuple[str, str]]:
    return [(each.table, each.row) for each in journal.health.statistics().damaged]


FLIPPED = "UPDATE {table} SET body = substr(body, 1, 20) || x'ff00ff' || substr(body, 24) WHERE {where}"


async def test_damaged_turn_costs_only_its_traces(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        await fill(journal, "a", "b", "c", turns=3)
    change(tmp_path, FLIPPED.format(table="turns", where="session_id = 'b' AND turn = 1"))
    async with opened() as journal:
        found = await told(journal)
        assert [key for _, key, _ in found] == keys("a", "b", "c")
        assert {kind for kind, _, _ in found} == {"trajectory", "group", "task"}
        by_key = {key: body for _, key, body in found}
        assert by_key["trajectory:a"]["damaged"] == by_key["trajectory:c"]["damaged"] == []
        whole = by_key["trajectory:b"]
        assert [turn["index"] for turn in whole["turns"]] == [0, 2]
        assert [each["part"] for each in whole["damaged"]] == ["turns[1]", "traces[0]"]
        assert "checksum does not match" in whole["damaged"][0]["reason"]
        assert (whole["traces"], whole["reward"], whole["outcome"]["status"]) == ([], 1.0, "completed")
        assert [row["left_out"] for row in whole["turns"]] == ["damaged", "damaged"]
        assert [turn.index for turn in await journal.reader.query(queries.turns, "b")] == [0, 2]
        assert await damaged_rows(journal) == [("turns", "b/1")]
        assert journal.health.statistics().damaged_rows == 1


async def test_damaged_trajectory_is_rebuilt_from_turns(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        await fill(journal, "a", "b", metrics={"steps": 3})
        before = await journal.reader.query(queries.trajectory, "b")
    change(tmp_path, FLIPPED.format(table="trajectories", where="session_id = 'b'"))
    async with opened() as journal:
        assert [key for _, key, _ in await told(journal)] == keys("a", "b")
        after = await journal.reader.query(queries.trajectory, "b")
    assert before is not None
    assert after is not None
    assert [each.part for each in after.damaged] == ["trajectory"]
    assert (after.turns, after.outcome, after.reward) == (before.turns, before.outcome, before.reward)
    assert [trace.token_ids for trace in after.traces] == [trace.token_ids for trace in before.traces]
    assert [trace.loss_mask for trace in after.traces] == [trace.loss_mask for trace in before.traces]
    assert "steps" not in after.metrics


@pytest.mark.parametrize("kind", ["group", "task"])
async def test_group_and_task_events_are_remade(opened: Open, tmp_path: Path, kind: str) -> None:
    async with opened() as journal:
        await fill(journal, "a", "b")
        before = await told(journal)
    change(tmp_path, FLIPPED.format(table="events", where=f"key = '{kind}:t-a'"))
    async with opened() as journal:
        assert await told(journal) == before
        (damaged,) = await damaged_rows(journal)
        assert damaged[0] == "events"


@pytest.mark.parametrize(
    ("column", "value"), [("key", "trajectory:z"), ("kind", "trajector?"), ("session_id", None)]
)
async def test_unidentifiable_event_is_marked_unreadable(
    opened: Open, tmp_path: Path, column: str, value: str | None
) -> None:
    async with opened() as journal:
        await fill(journal, "a", "b", "c")
    change(tmp_path, f"UPDATE events SET {column} = ? WHERE key = 'trajectory:b'", value)
    async with opened() as journal:
        found = await told(journal)
        assert len(found) == 9
        odd = [each for each in found if each[0] == "unreadable"]
        ((_, key, body),) = odd
        assert found.index(odd[0]) == 3
        assert key == ("trajectory:z" if column == "key" else "trajectory:b")
        assert body["task_id"] == "t-b"
        assert "checksum" in body["reason"]
        assert await journal.consumers.acknowledge("trainer", 9) == 9


async def test_other_event_columns_cost_nothing(opened: Open, tmp_path: Path) -> None:
    """Damage elsewhere in an event's row costs nothing."""
    async with opened() as journal:
        await fill(journal, "a")
        before = await told(journal)
    change(tmp_path, "UPDATE events SET reward = 7 WHERE key = 'trajectory:a'")
    async with opened() as journal:
        assert await told(journal) == before
        assert await damaged_rows(journal) == [("events", "1")]


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return {"n": value}


@pytest.mark.parametrize("depth", [252, 300])
@pytest.mark.parametrize("part", ["metrics", "metadata"])
async def test_too_deep_parts_are_replaced(opened: Open, depth: int, part: str) -> None:
    async with opened() as journal:
        await fill(journal, "a")
        await fill(journal, "b", **{part: nested(depth)})
        await fill(journal, "c")
        found = await told(journal)
        assert [key for _, key, _ in found] == keys("a", "b", "c")
        body = found[3][2]
        assert TOO_DEEP in str(body[part])
        assert len(body["traces"]) == 1
        log = SqliteLog(journal)
        for query in (Query(), Query(format="slime"), Query(kind="sft")):
            response: Any = export(log, journal.reader.run_in_thread, query, await log.last_cursor()).response
            lines = b"".join([part async for part in response]).splitlines()
            assert len(lines) == (0 if query.kind == "sft" else 3)


async def test_encoder_failure_makes_unreadable_event(opened: Open) -> None:
    def encode(whole: Trajectory) -> bytes:
        if whole.session_id == "b":
            raise KeyError
        return encode_json(whole)

    encode_json = json_encoder().encode
    assert encode_json is not None
    encoder = attrs.evolve(json_encoder(), name="odd", encode=encode)
    async with opened() as journal:
        await fill(journal, "a", "b", "c")
        found = await told(journal, encoder=encoder)
        assert [kind for kind, _, _ in found].count("unreadable") == 1
        kind, key, body = found[3]
        assert (kind, key) == ("unreadable", "trajectory:b")
        assert body == {
            "kind": "trajectory",
            "session_id": "b",
            "task_id": "t-b",
            "group_id": "t-b",
            "reason": "the trajectory cannot be written (KeyError)",
        }


async def test_out_of_memory_is_no_damage(opened: Open) -> None:
    def encode(_: Trajectory) -> bytes:
        raise MemoryError

    with pytest.raises(MemoryError):
        encode_trajectory(encode, make_trajectory("a"))


async def test_task_with_damaged_row_ends(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        submit_task(journal, make_spec(), task_id="t", session_ids=("a",), idempotency_key="k")
        journal.writer.record_session(make_identity("a"))
        journal.writer.record_turn(make_turn("a"))
        await journal.writer.flush()
    change(tmp_path, "UPDATE tasks SET spec = x'7b7b' WHERE task_id = 't'")
    async with opened() as journal:
        (lost,) = await journal.reader.query(queries.unfinished_sessions)
        assert (lost.spec, [each.part for each in lost.damaged]) == (None, ["task"])
        publish_end(journal, make_trajectory("a"))
        await journal.writer.flush()
        assert [key for _, key, _ in await told(journal)] == ["trajectory:a", "group:t", "task:t"]
        assert journal.health.statistics().dropped == 0
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert task.damaged is not None
        assert task.finished


@pytest.mark.parametrize("column", ["identity", "sample_index"])
async def test_recovery_continues_past_damaged_session(opened: Open, tmp_path: Path, column: str) -> None:
    async with opened() as journal:
        for name in ("a", "b"):
            submit_task(journal, make_spec(), task_id=name, session_ids=(name,), idempotency_key=None)
            journal.writer.record_session(make_identity(name, task_id=name, group_id=name))
            for index in range(3):
                journal.writer.record_turn(chained(name, 3).turns[index])
        await journal.writer.flush()
    change(tmp_path, f"UPDATE sessions SET {column} = 5 WHERE session_id = 'a'")
    change(tmp_path, FLIPPED.format(table="turns", where="session_id = 'a' AND turn = 1"))
    async with opened() as journal:
        lost, whole = await journal.reader.query(queries.unfinished_sessions)
        assert [each.part for each in lost.damaged] == ["identity", "turns[1]"]
        assert (lost.identity.session_id, lost.identity.group_id) == ("a", "a")
        assert whole.damaged == ()
        spec = lost.spec or make_spec()
        trajectory = assemble(
            lost.identity,
            spec,
            lost.turns,
            Result(outcome=Outcome(status="interrupted")),
            damaged=lost.damaged,
        )
        assert trajectory.outcome.status == "interrupted", "turn 2 extends a missing one: no broken invariant"
        assert [turn.index for turn in trajectory.turns] == [0, 2]
        assert LeftOut(turn=2, reason="damaged") in trajectory.left_out
        assert len(trajectory.traces) == 1
        publish_end(journal, trajectory)
        await journal.writer.flush()
        again = (await told(journal))[0][2]["damaged"]
        assert [each["part"] for each in again] == ["identity", "turns[1]"], (
            "each once, however often it is read"
        )


async def test_lost_outcome_becomes_explained_error(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        await fill(journal, "a")
    change(tmp_path, "UPDATE sessions SET outcome = x'ff' WHERE session_id = 'a'")
    async with opened() as journal:
        record = await journal.reader.query(queries.session, "a")
        assert record is not None
        assert record.outcome is not None
        assert (record.outcome.status, record.outcome.boundary) == ("error", "journal")
        assert await journal.reader.query(queries.unfinished_sessions) == ()


async def test_damaged_weights_are_skipped(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        for version in ("v1", "v2"):
            serve_weights(journal, version)
        await journal.writer.flush()
    change(tmp_path, "UPDATE weights SET body = x'00' WHERE version = 'v2'")
    async with opened() as journal:
        assert [row.version for row in await journal.reader.query(entries.weight_rows, 5)] == ["v1"]
        assert [row.version for row in await journal.reader.query(entries.weight_rows, 1)] == ["v1"], (
            "what a node begins with"
        )


async def test_damaged_page_costs_its_rows(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        await fill(journal, *(f"s{number}" for number in range(60)), turns=8)
        count = journal.commits.progress.last_seq
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        size = db.execute("PRAGMA page_size").fetchone()[0]
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turns'").fetchone()[0]
    db.close()
    with (tmp_path / "journal.sqlite").open("r+b") as file:
        file.seek((root - 1) * size)
        page = file.read(size)
        assert page[0] == 5, "an interior page: its last child is a leaf"
        file.seek((int.from_bytes(page[8:12], "big") - 1) * size)
        file.write(bytes([99]) * 64)
    async with opened() as journal:
        found = await told(journal)
        assert len(found) == count
        lost = [row for row in journal.reader.damages.damaged_rows() if row.table == "turns"]
        bodies = [body for kind, _, body in found if kind == "trajectory"]
        assert 0 < len(lost) < 100
        assert sum(len(body["turns"]) for body in bodies) + len(lost) == 480
        assert sum(body["damaged"] == [] for body in bodies) == 60 - len({row.session_id for row in lost})


def corrupt(*_: object) -> NoReturn:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    raise error


async def test_entry_on_damaged_page_fails_alone(opened: Open) -> None:
    async with opened() as journal:
        journal.writer.write(JournalEntry(1, corrupt))
        with pytest.raises(JournalDamaged, match="1 entries could not be written"):
            await fill(journal, "a")
        assert [key for _, key, _ in await told(journal)] == keys("a")
        assert journal.health.damage_event.is_set()
        assert (journal.health.statistics().dropped, journal.health.statistics().refuses_tasks) == (1, True)


async def test_pruning_damage_stops_no_writes(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polarnode.journal.writer.prune", corrupt)
    async with opened() as journal:
        await fill(journal, "a")
        assert [key for _, key, _ in await told(journal)] == keys("a")
        assert "is damaged" in (journal.health.statistics().damage or "")
    assert "cannot prune" in caplog.text


# ── what is refused when the file is damaged ──────────────────────────────────────────────────────


def overwrite(path: Path, page: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES)
        file.write(data)


def root_of(path: Path, name: str) -> int:
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        return int(page)


@pytest.mark.parametrize(
    "name", ["turns", "trajectories", "sqlite_autoindex_turns_1", "sqlite_autoindex_sessions_1"]
)
async def test_damaged_page_refuses_new_work(opened: Open, tmp_path: Path, name: str) -> None:
    async with opened() as journal:
        await fill(journal, *(f"s{number}" for number in range(60)), turns=8)
    path = tmp_path / "journal.sqlite"
    overwrite(path, root_of(path, name), random.Random(name).randbytes(PAGE_BYTES))
    async with opened() as journal:
        state = journal.health.statistics()
        assert "is damaged" in (state.damage or "")
        assert (state.warning, state.refuses_tasks) == (state.damage, True)
        assert journal.health.damage_event.is_set()
        with pytest.raises(JournalDamaged, match="put a copy of the file back"):
            journal.health.require_undamaged()


@pytest.mark.parametrize("pages", [range(1, 2), range(2, 4), range(3, 6), range(6, 12), range(20, 30)])
async def test_zeroed_pages_give_clear_error(opened: Open, tmp_path: Path, pages: range) -> None:
    async with opened() as journal:
        await fill(journal, *(f"s{number}" for number in range(20)))
    for page in pages:
        overwrite(tmp_path / "journal.sqlite", page, bytes(PAGE_BYTES))
    sentence = ""
    try:
        async with opened() as journal:
            sentence = journal.health.statistics().damage or ""
    except JournalError as error:
        sentence = str(error)
    assert ("is damaged" in sentence) or ("cannot be opened" in sentence)
    assert "or move it away to start a new one" in sentence


async def test_emptied_journal_is_not_recreated(opened: Open, tmp_path: Path) -> None:
    async with opened() as journal:
        await fill(journal, "a")
    path = tmp_path / "journal.sqlite"
    os.truncate(path, 0)
    with pytest.raises(JournalError, match="is empty, and no node leaves it so: put a copy of it back"):
        async with opened():
            pytest.fail("opened")
    assert path.stat().st_size == 0
    path.unlink()
    async with opened() as journal:
        assert journal.commits.progress.last_seq == 0


@pytest.mark.parametrize(
    ("act", "lacks"),
    [
        ("DROP TABLE turns", "the table turns"),
        ("DROP TABLE meta", "the table meta"),
        ("DELETE FROM meta", "the row life of meta"),
        ("DELETE FROM meta WHERE name = 'journal'", "the row journal of meta"),
    ],
)
async def test_incomplete_journal_takes_no_work(opened: Open, tmp_path: Path, act: str, lacks: str) -> None:
    async with opened() as journal:
        await fill(journal, "a")
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db, db:
        db.execute(act)
    with pytest.raises(JournalError, match=rf"is damaged \(it lacks {lacks}\): put a copy of it back"):
        async with opened():
            pytest.fail("opened")


async def test_log_of_lost_journal_is_kept(opened: Open, tmp_path: Path) -> None:
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    async with opened() as journal:
        await fill(journal, "a")
        kept = log.read_bytes()
    path.unlink()
    log.write_bytes(kept)
    with pytest.raises(JournalError, match="has its last commits"):
        async with opened():
            pytest.fail("opened")
    assert log.read_bytes() == kept


async def test_interrupted_creation_starts_over(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite.new").write_bytes(b"half")
    (tmp_path / "journal.sqlite.new-wal").write_bytes(b"half")
    async with opened() as journal:
        await fill(journal, "a")
    assert "journal.sqlite.new" not in os.listdir(tmp_path)


def test_checksum_matches_sqlite_values() -> None:
    assert checksum(1, -0.0, None) == checksum(1.0, 0.0, None)
    assert checksum(float("nan")) == checksum(None)
    assert checksum("a", "bc") != checksum("ab", "c")
    assert checksum(b"1") != checksum("1")
    assert checksum(None, "") != checksum("", None)
