"""A journal of every schema version is opened, migrated, recovered, streamed and exported by today's code.

`tests/data/journals/v<N>/journal.sqlite.gz` were written by the code of these commits: version 1 by 12656a6,
2 by ec9f332, 4 by 6b5b2a3, 5 by the commit that added checksums, 6 by the commit that added teachers' logprobs, 7 by
the one that gave journals an id, 8 from that one, with `b` as a fork, by the one that added forks, 9 from that one, with
`b` as one that goes on, by the one that added those, 10 is that of 9, opened by the commit that added results of a
shared log. No commit of version 3 exists: 74c7982 (the first of version 4) wrote that one, and
the step from 3 to 4 was then undone with DROP COLUMN and DROP TABLE.

Each holds a finished task of two samples (`over`: sessions `a` and `b`), a task that was running when the
node ended (`running`: `c`), a capture without a task (`capture`), and the consumer `trainer` at event 2. From
version 3 on there are also a cancelled task (`stopped`: `d`) and a retried session (`retried`: `e`, then
`f`); in version 4 a callback URL of `over` and the weights `v1`. When VERSION rises, add the journal of the
version before.
"""

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import attrs
import orjson
import pytest
from journal_samples import Clock, make_identity, make_spec, make_trajectory, make_turn
from journal_writes import publish_end

from polarnode.api.exports import export
from polarnode.api.query import Query
from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import Message
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import ContinuedFrom, ForkedFrom, NewMessages, Outcome, Trajectory
from polarnode.journal import entries, queries
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.schema import MIGRATIONS, SCHEMA_VERSION, connect_journal
from polarnode.journal.values import EventFilters
from polarnode.merge.trajectory import Result, assemble

VERSIONS = tuple(range(1, SCHEMA_VERSION + 1))
DATA = Path(__file__).parents[1] / "data" / "journals"
EVERY_KIND = EventFilters(kinds=("trajectory", "group", "task", "attempt"))
URL = "http://trainer.invalid/done"

Open = Callable[[int], AbstractAsyncContextManager[Journal]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens a copy of the journal of a version, as often as the test wants."""
    clock = Clock(2000.0)

    @asynccontextmanager
    async def opener(version: int) -> AsyncIterator[Journal]:
        path = tmp_path / "journal.sqlite"
        if not path.exists():
            path.write_bytes(gzip.decompress((DATA / f"v{version}" / "journal.sqlite.gz").read_bytes()))
            assert layout(path)["version"] == version
        async with open_journal(path, now=lambda: clock.time) as journal:
            yield journal

    return opener


def layout(path: Path) -> dict[str, Any]:
    """A journal's version, its tables with their columns, and its indices."""
    db: Connection = connect_journal(path, read_only=True)
    names = db.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
    found: dict[str, Any] = {
        name: {column[1:] for column in db.execute(f"PRAGMA table_info ({name})")}
        if kind == "table"
        else kind
        for kind, name in names.fetchall()
    }
    found["version"] = db.execute("PRAGMA user_version").fetchone()[0]
    db.close()
    return found


def finished(version: int) -> tuple[Trajectory, Trajectory]:
    """The trajectories `a` and `b` as the journal of this version holds them."""
    a = make_trajectory("a", task_id="over", turns=2)
    b = make_trajectory("b", task_id="over", sample_index=1, status="timeout", reward=None)
    first, *others = a.turns
    if version >= 2:
        top = TopLogprobs(k=1, ids=ids([1000, 1001, 1002]), logprobs=floats([-0.5] * 3))
        routed = RoutedExperts(start=0, layers=2, top_k=1, dtype="uint8", data=bytes(range(12)))
        first = attrs.evolve(first, top=top, routed=routed, matched=0, messages=1)
        a = attrs.evolve(a, traces=(attrs.evolve(a.traces[0], top=top),))
    if version >= 3:
        first = attrs.evolve(first, new_messages=NewMessages(messages=(Message(role="user", text="do it"),)))
    if version >= 8:
        b = attrs.evolve(b, forked_from=ForkedFrom(session_id="a", turn=2, got=1, by="replay", differs="?"))
    if version >= 9:
        b = attrs.evolve(b, continued_from=ContinuedFrom(session_id="a", turn=1, run_s=2.5))
    if version >= 6:
        scored = attrs.evolve(a.traces[0], teacher_logprobs=floats([0.0] * 4 + [-0.75] * 3))
        a = attrs.evolve(a, traces=(scored,))
    return attrs.evolve(a, turns=(first, *others)), b


def keys_before(version: int) -> list[tuple[int, str]]:
    """The events that the journal of this version holds."""
    keys = [
        "trajectory:a",
        "trajectory:b",
        "group:over",
        "task:over",
        *(["attempt:e"] if version >= 3 else []),
    ]
    return list(enumerate(keys, 1))


async def events(journal: Journal) -> list[tuple[int, str]]:
    return [(event.seq, event.key) for event in (await journal.reader.events(0, filters=EVERY_KIND)).events]


async def recover(journal: Journal) -> list[str]:
    """Publish each unfinished session as interrupted, as the node does at its start."""
    sessions = await journal.reader.query(queries.unfinished_sessions)
    for each in sessions:
        spec = each.spec or TaskSpec(instruction="", harness=HarnessSpec(name="pi"))
        outcome = Outcome(status="cancelled" if each.cancelled else "interrupted")
        publish_end(journal, assemble(each.identity, spec, each.turns, Result(outcome=outcome)))
    await journal.writer.flush()
    return [each.identity.session_id for each in sessions]


def test_every_version_has_a_journal() -> None:
    assert {path.name for path in DATA.iterdir()} == {f"v{version}" for version in VERSIONS}
    assert tuple(MIGRATIONS) == VERSIONS[:-1]


@pytest.mark.parametrize("version", VERSIONS)
async def test_migrated_tables_match_new_journal(opened: Open, tmp_path: Path, version: int) -> None:
    async with opened(version), open_journal(tmp_path / "new.sqlite", now=lambda: 2000.0):
        pass
    found = layout(tmp_path / "journal.sqlite")
    for table in ("copies", "commits", "held"):  # of an older fleet; they stay as they are
        found.pop(table, None)
    assert found == layout(tmp_path / "new.sqlite")


@pytest.mark.parametrize("version", VERSIONS)
async def test_rows_of_old_version_are_read(opened: Open, version: int) -> None:
    async with opened(version) as journal:
        task = await journal.reader.query(queries.task_of_key, "first")
        assert task is not None
        expected = make_spec(num_samples=2, group_id="g", callback_url=URL if version >= 4 else None)
        assert (task.task_id, task.group_id, task.spec, task.submitted) == ("over", "g", expected, 1000.0)
        assert [(one.session_id, one.turns, one.reward) for one in task.sessions] == [
            ("a", 2, 1.0),
            ("b", 1, None),
        ]
        for trajectory in finished(version):
            assert await journal.reader.query(queries.trajectory, trajectory.session_id) == trajectory
        assert await events(journal) == keys_before(version)
        assert journal.consumers.position("trainer") == 2
        weights = await journal.reader.query(entries.weight_rows, 10)
        assert [(row.version, row.body) for row in weights] == (
            [("v1", {"version": "v1"})] if version >= 4 else []
        )
        assert (await SqliteLog(journal).count_callbacks()).pending == (4 if version >= 4 else 0)


@pytest.mark.parametrize("version", VERSIONS)
async def test_unfinished_sessions_are_recovered(opened: Open, version: int) -> None:
    async with opened(version) as journal:
        first, second, *others = await journal.reader.query(queries.unfinished_sessions)
        assert first.identity == make_identity("c", task_id="running", group_id="running")
        assert (first.spec, first.turns) == (make_spec(instruction="do that"), (make_turn("c"),))
        assert (second.identity.session_id, second.spec, second.turns) == (
            "capture",
            None,
            (make_turn("capture"),),
        )
        assert [(one.identity.session_id, one.identity.attempt, one.cancelled) for one in others] == (
            [("d", 0, True), ("f", 1, False)] if version >= 3 else []
        )
        recovered = await recover(journal)
        after = [each for name in recovered for each in closing(name)]
        before = keys_before(version)
        assert await events(journal) == [*before, *enumerate(after, len(before) + 1)]
    async with opened(version) as journal:
        assert await journal.reader.query(queries.unfinished_sessions) == ()
        assert (
            await journal.consumers.acknowledge("trainer", len(before) + len(after))
            == journal.commits.progress.last_seq
        )


def closing(session_id: str) -> list[str]:
    """The events that the end of a recovered session brings; a capture has no group and no task."""
    task_of = {"c": "running", "d": "stopped", "f": "retried"}
    task = [f"{kind}:{task_of[session_id]}" for kind in ("group", "task")] if session_id in task_of else []
    return [f"trajectory:{session_id}", *task]


@pytest.mark.parametrize("version", VERSIONS)
async def test_recovered_and_finished_sessions_are_exported(opened: Open, version: int) -> None:
    async with opened(version) as journal:
        recovered = await recover(journal)
        log = SqliteLog(journal)
        response: Any = export(log, journal.reader.run_in_thread, Query(), await log.last_cursor()).response
        lines = [orjson.loads(line) for line in [part async for part in response]]
        ends = {"d": "cancelled"}
        assert [(line["session_id"], line["outcome"]["status"]) for line in lines] == [
            ("a", "completed"),
            ("b", "timeout"),
            *((name, ends.get(name, "interrupted")) for name in recovered),
        ]
        assert [len(line["turns"]) for line in lines[:4]] == [2, 1, 1, 1]
        assert lines[0]["traces"][0]["token_ids"] == [0, 1, 2, 3, 1000, 1001, 1002]
