"""The journal: order, numbers, positions, and what outlives the process."""

import os
import sqlite3
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import trio
from journal_samples import Clock, make_identity, make_spec, make_trajectory, make_turn
from journal_writes import cancel_task, publish_attempt, publish_end, submit_task

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.codec import pack_turn, trajectory_json
from polarnode.core.errors import JournalDamaged, JournalError, Refused
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.journal import queries, writer
from polarnode.journal.entries import JournalEntry
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.schema import SCHEMA_VERSION, WAL_CHECKPOINT_BYTES
from polarnode.journal.values import (
    EventFilters,
    JournalProgress,
    RetentionLimits,
    check_consumer,
    json_encoder,
)

Open = Callable[..., AbstractAsyncContextManager[Journal]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Open:
    """Opens the test's one journal, as often as it likes."""

    @asynccontextmanager
    async def opener(**more: Any) -> AsyncIterator[Journal]:
        async with open_journal(
            tmp_path / "state" / "journal.sqlite", now=lambda: clock.time, **more
        ) as journal:
            yield journal

    return opener


def take(journal: Journal, *sessions: str, task_id: str = "t", **more: Any) -> None:
    submit_task(
        journal,
        make_spec(**more),
        task_id=task_id,
        session_ids=sessions,
        idempotency_key=more.pop("key", None),
    )


def record(journal: Journal, trajectory: Trajectory) -> None:
    for turn in trajectory.turns:
        journal.writer.record_turn(turn)
    publish_end(journal, trajectory)


async def listed(journal: Journal, after: int = 0, **filters: Any) -> list[tuple[int, str]]:
    page = await journal.reader.events(after, filters=EventFilters(**filters))
    return [(event.seq, event.key) for event in page.events]


# What the polarnode before version 2 packed of `make_trajectory("s", turns=2)`: its turns and the trajectory
# itself.
OLD_TURNS = (
    (
        "AY2qc2Vzc2lvbl9pZKFzpWluZGV4AKhwcm92aWRlcqlhbnRocm9waWOnbGluZWFnZQCmcGFyZW50wKRraW5kpHJvb3SmcmVhc29uoKxwcm9tcHRfZGVsdGHEEAAAAAABAAAAAgAA"
        "AAMAAACtcHJvbXB0X2xlbmd0aASnc2FtcGxlZMQM6AMAAOkDAADqAwAAqGxvZ3Byb2JzxAwAAAC/AAAAvwAAAL+tdmVyc2lvbl9zcGFuc5GDp3ZlcnNpb26idjGlc3RhcnQAo2Vu"
        "ZAOmYW5zd2VygqVwYXJ0c5GlaGVsbG+tZmluaXNoX3JlYXNvbqRzdG9w"
    ),
    (
        "AY2qc2Vzc2lvbl9pZKFzpWluZGV4Aahwcm92aWRlcqlhbnRocm9waWOnbGluZWFnZQCmcGFyZW50AKRraW5kpmV4dGVuZKZyZWFzb26grHByb21wdF9kZWx0YcQQCgAAAAsAAAAM"
        "AAAADQAAAK1wcm9tcHRfbGVuZ3RoBKdzYW1wbGVkxAzoAwAA6QMAAOoDAACobG9ncHJvYnPEDAAAAL8AAAC/AAAAv612ZXJzaW9uX3NwYW5zkYOndmVyc2lvbqJ2MaVzdGFydACj"
        "ZW5kA6ZhbnN3ZXKCpXBhcnRzkaVoZWxsb61maW5pc2hfcmVhc29upHN0b3A="
    ),
)
OLD_TRAJECTORY = (
    "AYiqc2Vzc2lvbl9pZKFzp3Rhc2tfaWShdKhncm91cF9pZKFnrHNhbXBsZV9pbmRleACnb3V0Y29tZYGmc3RhdHVzqWNvbXBsZXRlZKZyZXdhcmTLP/AAAAAAAACmdHJhY2VzkYen"
    "bGluZWFnZQCpdG9rZW5faWRzAKlsb3NzX21hc2uTBwQHqGxvZ3Byb2JzwK1wcm9tcHRfbGVuZ3RoBKp0dXJuX3NwYW5zkYOkdHVybgClc3RhcnQEo2VuZAetdmVyc2lvbl9zcGFu"
    "c5GDp3ZlcnNpb26idjGlc3RhcnQEo2VuZAeldHVybnPA"
)


# ── what is written is read ───────────────────────────────────────────────────


async def test_turn_overhead_on_disk_is_small(opened: Open, tmp_path: Path) -> None:
    turns = [make_turn("a", index, sampled=256, prompt=1600) for index in range(800)]
    log = tmp_path / "state" / "journal.sqlite-wal"
    async with opened() as journal:
        for start in range(0, len(turns), 20):
            for turn in turns[start : start + 20]:
                journal.writer.record_turn(turn)
            await journal.writer.flush()
        assert log.stat().st_size < 1.2 * WAL_CHECKPOINT_BYTES
    size = (tmp_path / "state" / "journal.sqlite").stat().st_size
    assert size < 1.3 * sum(len(pack_turn(turn)) for turn in turns)


async def test_session_from_task_to_events(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "a", "b", num_samples=2, group_id="g")
        journal.writer.record_session(make_identity("a"))
        journal.writer.record_turn(make_turn("a"))
        await journal.writer.flush()
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert (task.group_id, task.spec, task.submitted, task.finished) == (
            "g",
            make_spec(num_samples=2, group_id="g"),
            1000.0,
            False,
        )
        assert [
            (one.session_id, one.sample_index, one.turns, one.sampled_tokens, one.outcome)
            for one in task.sessions
        ] == [
            ("a", 0, 1, 3, None),
            ("b", 1, 0, 0, None),
        ]
        assert await journal.reader.query(queries.turns, "a") == (make_turn("a"),)
        assert await journal.reader.query(queries.trajectory, "a") is None
        assert await listed(journal) == []

        first, second = (
            make_trajectory("a"),
            make_trajectory("b", sample_index=1, status="timeout", reward=None),
        )
        record(journal, first)
        await journal.writer.flush()
        assert await listed(journal) == [(1, "trajectory:a")]
        record(journal, second)
        await journal.writer.flush()
        assert await listed(journal) == [
            (1, "trajectory:a"),
            (2, "trajectory:b"),
            (3, "group:t"),
            (4, "task:t"),
        ]
        assert await journal.reader.query(queries.trajectory, "a") == first
        assert await journal.reader.query(queries.trajectory, "b") == second
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert task.finished
        assert [one.outcome for one in task.sessions] == [first.outcome, second.outcome]
        assert [one.reward for one in task.sessions] == [1.0, None]


async def test_events_contain_trainer_data(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "a", "b", group_id="g")
        record(journal, make_trajectory("a"))
        record(journal, make_trajectory("b", sample_index=1, status="failed", reward=0.0))
        await journal.writer.flush()
        page = await journal.reader.events(0, encoder=json_encoder("base64"))
        bodies = [orjson.loads(event.json(journal.id)) for event in page.events]
        assert bodies[0] == {
            "seq": 1,
            "journal": journal.id,
            "key": "trajectory:a",
            "trajectory": orjson.loads(orjson.dumps(trajectory_json(make_trajectory("a"), arrays="base64"))),
        }
        assert bodies[2]["group"]["rewards"] == [1.0, 0.0]
        assert (
            bodies[2]["group"]["sessions"][1].items()
            >= {
                "session_id": "b",
                "sample_index": 1,
                "status": "failed",
                "reward": 0.0,
            }.items()
        )
        assert bodies[3]["task"]["counts"] == {"completed": 1, "failed": 1}
        assert (bodies[3]["task"]["task_id"], bodies[3]["task"]["group_id"]) == ("t", "g")


async def test_repeated_publication_keeps_the_first(opened: Open) -> None:
    """The first publication stands, and a turn that is written again replaces the old one."""
    async with opened() as journal:
        take(journal, "a")
        record(journal, make_trajectory("a", reward=0.25))
        publish_end(journal, make_trajectory("a", reward=0.75))
        journal.writer.record_turn(make_turn("b", sampled=1))
        journal.writer.record_turn(make_turn("b", sampled=2))
        await journal.writer.flush()
        assert await listed(journal) == [(1, "trajectory:a"), (2, "group:t"), (3, "task:t")]
        found = await journal.reader.query(queries.trajectory, "a")
        assert found is not None
        assert found.reward == 0.25
        assert await journal.reader.query(queries.turns, "b") == (make_turn("b", sampled=2),)


async def test_capture_has_no_task_event(opened: Open) -> None:
    async with opened() as journal:
        journal.writer.record_session(make_identity("lone", task_id="capture"))
        record(journal, make_trajectory("lone", task_id="capture"))
        await journal.writer.flush()
        assert await listed(journal) == [(1, "trajectory:lone")]
        assert await journal.reader.query(queries.task, "capture") is None


async def test_tasks_by_key_and_newest_first(opened: Open) -> None:
    async with opened() as journal:
        for number in range(5):
            submit_task(
                journal,
                make_spec(),
                task_id=f"t{number}",
                session_ids=(f"s{number}",),
                idempotency_key=f"k{number % 2}",
            )
        await journal.writer.flush()
        found = await journal.reader.query(queries.task_of_key, "k1")
        assert found is not None
        assert found.task_id == "t1"
        assert await journal.reader.query(queries.task_of_key, "k9") is None
        first = await journal.reader.query(queries.tasks, limit=2)
        assert [task.task_id for task in first] == ["t4", "t3"]
        assert [task.task_id for task in await journal.reader.query(queries.tasks, limit=9, before="t3")] == [
            "t2",
            "t1",
            "t0",
        ]
        session = await journal.reader.query(queries.session, "s3")
        assert session is not None
        assert session.task_id == "t3"
        assert await journal.reader.query(queries.session, "none") is None


# ── reading on, filters, pages ────────────────────────────────────────────────


async def test_filters_move_reader_past_events(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "a", "b", task_id="t1", group_id="g1")
        take(journal, "c", task_id="t2", group_id="g2")
        record(journal, make_trajectory("a", task_id="t1", group_id="g1", status="failed", reward=0.0))
        record(journal, make_trajectory("c", task_id="t2", group_id="g2"))
        record(journal, make_trajectory("b", task_id="t1", group_id="g1", reward=0.5))
        await journal.writer.flush()
        assert [key for _, key in await listed(journal, task_id="t1")] == [
            "trajectory:a",
            "trajectory:b",
            "group:t1",
            "task:t1",
        ]
        assert [key for _, key in await listed(journal, group_id="g2")] == [
            "trajectory:c",
            "group:t2",
            "task:t2",
        ]
        assert [key for _, key in await listed(journal, outcome="failed", kinds=("trajectory",))] == [
            "trajectory:a"
        ]
        assert [key for _, key in await listed(journal, min_reward=0.5, kinds=("trajectory",))] == [
            "trajectory:c",
            "trajectory:b",
        ]
        nothing = await journal.reader.events(0, filters=EventFilters(task_id="none"))
        assert (nothing.events, nothing.seen) == ((), journal.commits.progress.last_seq)
        page = await journal.reader.events(0, filters=EventFilters(task_id="t1"), limit=1)
        assert (len(page.events), page.seen) == (1, 1)
        assert (await journal.reader.events(99)).seen == 99


async def test_page_is_bounded_in_bytes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarnode.journal.queries.PAGE_BYTES", 3000)
    async with opened() as journal:
        for number in range(6):
            record(journal, make_trajectory(f"s{number}", task_id="x"))
        await journal.writer.flush()
        seen, pages = 0, []
        while (page := await journal.reader.events(seen)).events:
            pages.append(len(page.events))
            seen = page.seen
        assert sum(pages) == 6
        assert len(pages) > 2


async def test_commit_wakes_waiting_reader(opened: Open) -> None:
    async with opened() as journal, trio.open_nursery() as nursery:
        woken: list[int] = []

        async def reader() -> None:
            await journal.commits.wait_event_after(0)
            woken.append(journal.commits.progress.last_seq)

        nursery.start_soon(reader)
        journal.writer.record_turn(make_turn("a"))
        await journal.writer.flush()
        assert woken == []
        record(journal, make_trajectory("a"))
        await journal.writer.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert woken == [1]


# ── consumers ─────────────────────────────────────────────────────────────────


async def test_position_only_moves_forward(opened: Open) -> None:
    """A position moves forward only, and never into the future."""
    async with opened() as journal:
        assert await journal.consumers.acknowledge("one", 7) == 0
        for number in range(3):
            record(journal, make_trajectory(f"s{number}", task_id="x"))
        await journal.writer.flush()
        assert await journal.consumers.acknowledge("one", 2) == 2
        assert await journal.consumers.acknowledge("one", 1) == 2
        assert await journal.consumers.acknowledge("one", 99) == 3
        assert await journal.consumers.acknowledge("two", 1) == 1
        assert (
            journal.consumers.position("one"),
            journal.consumers.position("two"),
            journal.consumers.position("three"),
        ) == (3, 1, 0)
    async with opened() as journal:
        assert (journal.consumers.position("one"), journal.consumers.position("two")) == (3, 1)
        assert journal.health.statistics().positions == {"one": 3, "two": 1}


def test_consumer_name_is_checked() -> None:
    assert check_consumer("trainer 1") == "trainer 1"
    for name in ("", "x" * 129, "a\n"):
        with pytest.raises(Refused, match="consumer must be a name"):
            check_consumer(name)


# ── lives ─────────────────────────────────────────────────────────────────────


async def test_sequence_continues_after_restart(opened: Open) -> None:
    async with opened() as journal:
        record(journal, make_trajectory("a", task_id="x"))
    async with opened() as journal:
        assert (journal.commits.progress.first_seq, journal.commits.progress.last_seq) == (1, 1)
        record(journal, make_trajectory("b", task_id="x"))
        await journal.writer.flush()
        assert await listed(journal) == [(1, "trajectory:a"), (2, "trajectory:b")]


async def test_unfinished_work_is_found_after_restart(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "done", "begun", "named", group_id="g")
        journal.writer.record_session(make_identity("begun", sample_index=1))
        record(journal, make_trajectory("done"))
        journal.writer.record_turn(make_turn("begun", 0))
        journal.writer.record_turn(make_turn("begun", 1))
        await journal.writer.flush()
        assert await journal.reader.query(queries.unfinished_sessions) == ()
    async with opened() as journal:
        begun, named = await journal.reader.query(queries.unfinished_sessions)
        assert begun.identity == make_identity("begun", sample_index=1)
        assert begun.spec == make_spec(group_id="g")
        assert begun.turns == (make_turn("begun", 0), make_turn("begun", 1))
        assert named.identity == attrs.evolve(
            make_identity("named", sample_index=2), harness_version=None, model="", node=""
        )
        for left in (begun, named):
            record(
                journal,
                attrs.evolve(
                    make_trajectory(left.identity.session_id, status="interrupted", turns=2),
                    turns=left.turns,
                    traces=(),
                ),
            )
        await journal.writer.flush()
        assert await journal.reader.query(queries.unfinished_sessions) == ()
        assert [key for _, key in await listed(journal)] == [
            "trajectory:done",
            "trajectory:begun",
            "trajectory:named",
            "group:t",
            "task:t",
        ]


async def test_cancelled_close_writes_the_queue(opened: Open) -> None:
    with trio.CancelScope() as scope:
        async with opened() as journal:
            for number in range(200):
                journal.writer.record_turn(make_turn("a", number))
            scope.cancel()
    async with opened() as journal:
        assert len(await journal.reader.query(queries.turns, "a")) == 200


async def test_virtual_clock_does_not_cut_close(opened: Open, autojump_clock: trio.testing.MockClock) -> None:
    async with opened() as journal:
        for number in range(200):
            journal.writer.record_turn(make_turn("a", number))
    async with opened() as journal:
        assert len(await journal.reader.query(queries.turns, "a")) == 200


async def test_journal_locks_out_other_processes(opened: Open) -> None:
    async with opened():
        with pytest.raises(JournalError, match="in use by another process"):
            async with opened():
                pytest.fail("two writers would share numbers")


async def test_previous_version_is_read_and_continued(opened: Open, tmp_path: Path) -> None:
    old = make_trajectory("s", turns=2)
    async with opened() as journal:
        record(journal, make_trajectory("s", turns=2))
        await journal.writer.flush()
    db = sqlite3.connect(tmp_path / "state" / "journal.sqlite")
    for index, body in enumerate(OLD_TURNS):
        db.execute("UPDATE turns SET body = ? WHERE turn = ?", (b64decode(body), index))
    db.execute("UPDATE trajectories SET body = ?", (b64decode(OLD_TRAJECTORY),))
    came_with_3 = (("sessions", "attempt"), ("sessions", "retried_as"), ("tasks", "cancelled"))
    came_with_4 = (
        ("events", "at"),
        ("positions", "moved"),
        ("positions", "heard"),
        ("sessions", "trainable"),
        ("sessions", "staleness"),
    )
    came_with_5 = (
        ("sessions", "identity_checksum"),
        ("sessions", "outcome_checksum"),
        *((table, "checksum") for table in ("tasks", "turns", "trajectories", "events")),
    )
    for table, column in came_with_3 + came_with_4 + came_with_5:
        db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    # the first four with 4, two with 6, the last with 10
    came = (
        "weights",
        "callbacks",
        "callback_urls",
        "marks",
        "evaluations",
        "evaluated",
        "results",
    )
    for table in came:
        db.execute(f"DROP TABLE {table}")
    db.execute("DELETE FROM meta WHERE name IN ('term', 'journal')")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()
    async with opened() as journal:
        assert await journal.reader.query(queries.trajectory, "s") == old
        carried = attrs.evolve(
            make_turn("new"),
            top=TopLogprobs(k=1, ids=ids([1, 2, 3]), logprobs=floats([-0.5] * 3)),
            routed=RoutedExperts(start=0, layers=2, top_k=1, dtype="uint8", data=bytes(12)),
        )
        journal.writer.record_turn(carried)
        await journal.writer.flush()
        assert await journal.reader.query(queries.turns, "new") == (carried,)
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    db.close()


async def test_unwritable_folder_is_one_sentence(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "state" / "journal.sqlite.lock").mkdir(parents=True)
    with pytest.raises(JournalError, match=r"cannot be opened .*make its folder writable"):
        async with opened():
            pytest.fail("opened")


async def test_files_are_private_despite_umask(opened: Open, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with opened() as journal:
            record(journal, make_trajectory("a"))
            await journal.writer.flush()
            modes = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "state").iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes
    assert "journal.sqlite-wal" in modes


@pytest.mark.parametrize("version", [0, -1])
async def test_foreign_database_is_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs (name TEXT)")
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(JournalError, match="database of another program"):
        async with open_journal(path, now=lambda: 0.0):
            pass
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


@pytest.mark.parametrize(("link", "words"), [(os.symlink, "in use by another"), (os.link, "a second name")])
async def test_linked_journal_has_one_writer(
    tmp_path: Path, link: Callable[[Path, Path], None], words: str
) -> None:
    """A journal has one writer, whatever names link to it."""
    path, other = tmp_path / "journal.sqlite", tmp_path / "other" / "journal.sqlite"
    other.parent.mkdir()
    async with open_journal(path, now=lambda: 0.0):
        link(path, other)
        with pytest.raises(JournalError, match=words):
            async with open_journal(other, now=lambda: 0.0):
                pass


async def test_invalid_journal_file_is_named(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with pytest.raises(JournalError, match="cannot be opened"):
        async with opened():
            pytest.fail("opened")
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 77")
    db.close()
    with pytest.raises(JournalError, match="version 77"):
        async with opened():
            pytest.fail("opened")


# ── retention ─────────────────────────────────────────────────────────────────


async def publish_many(journal: Journal, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        take(journal, f"s{number}", task_id=f"t{number}")
        record(journal, make_trajectory(f"s{number}", task_id=f"t{number}", sampled=2000))
        await journal.writer.flush()


async def test_acknowledged_events_are_pruned_first(opened: Open) -> None:
    """What all consumers have acknowledged is pruned first, and nothing else."""
    async with opened(retention=RetentionLimits(acknowledged=1 << 20, everything=1 << 40)) as journal:
        await journal.consumers.acknowledge("slow", 0)
        await publish_many(journal, 60)
        assert journal.commits.progress.first_seq == 1
        assert journal.health.statistics().stored_bytes > 1 << 20
        await journal.consumers.acknowledge("fast", 150)
        await publish_many(journal, 1, start=60)
        assert journal.commits.progress.first_seq == 1
        assert await journal.consumers.acknowledge("slow", 90) == 90
        await publish_many(journal, 30, start=61)
        assert 1 < journal.commits.progress.first_seq <= 91
        assert await journal.reader.query(queries.trajectory, "s0") is None
        assert await journal.reader.query(queries.task, "t0") is None
        assert await journal.reader.query(queries.turns, "s0") == ()
        assert await journal.reader.query(queries.trajectory, "s90") is not None


async def test_size_limit_prunes_oldest_events(opened: Open) -> None:
    """Beyond the last limit the oldest events go, and their numbers do not come again."""
    limits = RetentionLimits(acknowledged=3 << 18, everything=3 << 18)
    async with opened(retention=limits) as journal:
        journal.writer.record_turn(make_turn("running"))
        await publish_many(journal, 80)
        assert journal.commits.progress.first_seq > 1
        assert journal.health.statistics().stored_bytes < 1 << 20
        assert (await listed(journal))[0][0] == journal.commits.progress.first_seq
        assert len(await journal.reader.query(queries.turns, "running")) == 1
    async with opened(retention=limits) as journal:
        assert journal.commits.progress.last_seq == 240
        assert journal.commits.progress.first_seq > 1


# ── one place, several sessions ───────────────────────────────────────────────

LOST = Outcome(status="error", boundary="runtime", reason="the container did not start")


def replace(
    journal: Journal, lost: str, successor: str, *, sample_index: int = 0, attempt: int = 0, turns: int = 1
) -> Trajectory:
    """A session that the machine lost, and the one that takes its place."""
    trajectory = make_trajectory(lost, sample_index=sample_index, turns=turns, reward=None)
    replaced = attrs.evolve(trajectory, outcome=LOST, attempt=attempt, retried_as=successor)
    for turn in replaced.turns:
        journal.writer.record_turn(turn)
    publish_attempt(
        journal,
        replaced,
        attrs.evolve(make_identity(successor, sample_index=sample_index), attempt=attempt + 1),
    )
    return replaced


async def test_place_counts_its_last_session(opened: Open) -> None:
    """A place is that of its last session, and its group hears of no other."""
    async with opened() as journal:
        take(journal, "a", "b")
        replace(journal, "b", "b2", sample_index=1, turns=2)
        replace(journal, "b2", "b3", sample_index=1, attempt=1)
        record(journal, make_trajectory("a"))
        await journal.writer.flush()
        assert await listed(journal) == [(3, "trajectory:a")], (
            "a place that is to be filled keeps its group open"
        )
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert [(one.session_id, one.sample_index, one.attempt, one.retried_as) for one in task.sessions] == [
            ("a", 0, 0, None),
            ("b3", 1, 2, None),
        ]
        assert not task.finished
        record(journal, attrs.evolve(make_trajectory("b3", sample_index=1), attempt=2))
        await journal.writer.flush()
        page = await journal.reader.events(0)
        assert [event.key for event in page.events] == ["trajectory:a", "trajectory:b3", "group:t", "task:t"]
        group = orjson.loads(page.events[2].body)
        assert [one["session_id"] for one in group["sessions"]] == ["a", "b3"]
        assert orjson.loads(page.events[3].body)["counts"] == {"completed": 2}


async def test_replaced_session_can_be_read(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "a")
        replaced = replace(journal, "a", "a2", turns=2)
        await journal.writer.flush()
        assert await journal.reader.query(queries.turns, "a") == replaced.turns
        found, known = (
            await journal.reader.query(queries.trajectory, "a"),
            await journal.reader.query(queries.session, "a"),
        )
        assert found is not None
        assert known is not None
        assert (found.outcome, known.outcome, known.retried_as, known.turns) == (LOST, LOST, "a2", 2)
        assert (await journal.reader.events(0)).events == ()
        (event,) = (await journal.reader.events(0, filters=EventFilters(kinds=("attempt",)))).events
        assert (event.kind, event.key) == ("attempt", "attempt:a")
        assert orjson.loads(event.json(journal.id))["attempt"]["session_id"] == "a"
        for passed_over in (
            EventFilters(kinds=("attempt",), outcome="completed"),
            EventFilters(kinds=("attempt",), min_reward=0.0),
        ):
            page = await journal.reader.events(0, filters=passed_over)
            assert (page.events, page.seen) == ((), 1)


async def test_late_replacement_changes_nothing(opened: Open, tmp_path: Path) -> None:
    """An entry may be applied twice; and a session that has lost its place can not win it back."""
    async with opened() as journal:
        take(journal, "a")
        replace(journal, "a", "a2")
        replace(journal, "a", "a3")
        record(journal, make_trajectory("a"))
        await journal.writer.flush()
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert [one.session_id for one in task.sessions] == ["a2"]
        assert await journal.reader.query(queries.session, "a3") is None
        assert [
            event.key
            for event in (
                await journal.reader.events(0, filters=EventFilters(kinds=("trajectory", "attempt")))
            ).events
        ] == ["attempt:a"]
    async with opened() as journal:
        assert [
            left.identity.session_id for left in await journal.reader.query(queries.unfinished_sessions)
        ] == ["a2"]
        assert [
            left.identity.attempt for left in await journal.reader.query(queries.unfinished_sessions)
        ] == [1]


async def test_finished_session_is_not_replaced(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "a")
        record(journal, make_trajectory("a"))
        replace(journal, "a", "a2")
        await journal.writer.flush()
        assert await journal.reader.query(queries.session, "a2") is None
        assert await listed(journal) == [(1, "trajectory:a"), (2, "group:t"), (3, "task:t")]


async def test_cancellation_survives_restart(opened: Open) -> None:
    async with opened() as journal:
        take(journal, "a")
        take(journal, "b", task_id="other")
        cancel_task(journal, "t")
        cancel_task(journal, "nobody's")
        await journal.writer.flush()
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert task.cancelled == 1000.0
    async with opened() as journal:
        assert {
            left.identity.session_id: left.cancelled
            for left in await journal.reader.query(queries.unfinished_sessions)
        } == {
            "a": True,
            "b": False,
        }


async def test_replaced_sessions_are_pruned_with_turns(opened: Open) -> None:
    limits = RetentionLimits(acknowledged=1 << 19, everything=1 << 19)
    async with opened(retention=limits) as journal:
        take(journal, "a")
        replace(journal, "a", "a2", turns=3)
        record(journal, make_trajectory("a2"))
        await publish_many(journal, 80)
        assert journal.commits.progress.first_seq > 4
        assert (
            await journal.reader.query(queries.turns, "a"),
            await journal.reader.query(queries.session, "a"),
            await journal.reader.query(queries.session, "a2"),
        ) == (
            (),
            None,
            None,
        )


async def test_turns_are_committed_in_batches(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are committed together, unless somebody waits for one."""
    monkeypatch.setattr(writer, "GATHER_S", 3600.0)
    async with opened() as journal:
        commits: list[int] = []
        report = journal.writer._thread.on_progress

        def counted(progress: JournalProgress) -> None:
            commits.append(progress.entries)
            report(progress)

        journal.writer._thread.on_progress = counted
        before = journal.writer._thread.enqueued_entries
        for number in range(3):
            journal.writer.record_turn(make_turn("s", number))
            await trio.sleep(0.05)
        assert commits == []
        with trio.fail_after(30):
            await journal.writer.flush()
        assert commits == [before + 3]
        journal.writer.record_turn(make_turn("s", 3))
        publish_end(journal, make_trajectory("x"))  # an event is committed at once, with what came before it
        with trio.fail_after(30):
            await journal.commits.wait_event_after(0)
        assert commits == [before + 3, before + 5]
        journal.writer.record_turn(make_turn("s", 4))
    async with opened() as journal:  # closing waits for nothing
        assert [turn.index for turn in await journal.reader.query(queries.turns, "s")] == [0, 1, 2, 3, 4]


# ── when things go wrong ──────────────────────────────────────────────────────


async def test_full_disk_loses_nothing(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SQLITE_FULL: the writer's connection may not grow the file, until it may again."""
    monkeypatch.setattr("polarnode.journal.writer.RETRY_S", 0.01)
    async with opened() as journal:
        # SQLite takes the current size when it is larger
        journal.writer._thread.db.execute("PRAGMA max_page_count = 1")
        for number in range(50):
            record(journal, make_trajectory(f"s{number}", task_id="x", sampled=2000))
        while journal.health.statistics().warning is None:  # noqa: ASYNC110 - a thread's attempt that fails has no event
            await trio.sleep(0.01)
        state = journal.health.statistics()
        assert "make room on its disk" in (state.warning or "")
        assert state.refuses_tasks
        assert state.backlog_entries > 0
        assert state.backlog_bytes > 0
        journal.writer.record_turn(make_turn("more"))
        journal.writer._thread.db.execute("PRAGMA max_page_count = 1073741823")
        await journal.writer.flush()
        state = journal.health.statistics()
        assert (
            state.warning,
            state.refuses_tasks,
            state.backlog_entries,
            state.backlog_bytes,
            state.dropped,
        ) == (None, False, 0, 0, 0)
        assert journal.commits.progress.last_seq == 50
        assert len(await journal.reader.query(queries.turns, "more")) == 1


async def test_close_on_full_disk_is_bounded(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polarnode.journal.writer.RETRY_S", 0.01)
    async with opened() as journal:
        journal.writer._thread.db.execute("PRAGMA max_page_count = 1")
        for number in range(50):
            record(journal, make_trajectory(f"s{number}", task_id="x", sampled=2000))
    assert "entries unwritten" in caplog.text


async def test_low_disk_refuses_tasks_early(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as journal:
        assert not journal.health.statistics().refuses_tasks
        monkeypatch.setattr("polarnode.journal.health.DISK_FREE_BYTES", 1 << 60)
        assert journal.health.statistics().refuses_tasks
        assert "make room" in (journal.health.statistics().warning or "")
        monkeypatch.undo()
        monkeypatch.setattr("polarnode.journal.health.BACKLOG_BYTES", -1)
        assert "too slow" in (journal.health.statistics().warning or "")


async def test_bug_costs_one_entry(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    def twice(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO meta VALUES ('life', 1)")

    def nowhere(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO nothing VALUES (1)")

    def unbound(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO meta VALUES (?, ?)", ("x", object()))

    def buggy(db: sqlite3.Connection) -> None:
        raise ZeroDivisionError

    async with opened() as journal:
        with journal.writer._thread._condition:  # so that all are one batch
            journal.writer.record_turn(make_turn("a", 0))
            for bug in (twice, nowhere, unbound):
                journal.writer.write(JournalEntry(1, bug))
            journal.writer.record_turn(make_turn("a", 1))
            journal.writer.write(JournalEntry(1, buggy))
            journal.writer.record_turn(make_turn("a", 2))
        with pytest.raises(JournalDamaged, match="4 entries could not be written"):
            await journal.writer.flush()
        await journal.writer.flush()
        assert len(await journal.reader.query(queries.turns, "a")) == 3
        state = journal.health.statistics()
        assert (state.dropped, state.refuses_tasks) == (4, True)
        assert "no new work is taken" in (state.warning or "")
    assert "ZeroDivisionError" in caplog.text
    assert "IntegrityError" in caplog.text


async def test_unencodable_value_fails_at_caller(opened: Open) -> None:
    async with opened() as journal:
        with pytest.raises(TypeError):
            publish_end(journal, attrs.evolve(make_trajectory("a"), metrics={"odd": object()}))  # type: ignore[dict-item]
