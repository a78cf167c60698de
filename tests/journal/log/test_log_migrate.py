"""`polarnode migrate`: the tables of an empty database, and a lone node's journal of every version in it.

The command is `polarnode.cli.migrating`, what it copies `polarnode.journal.log.postgres.from_journal`.
"""

import gzip
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from click.testing import CliRunner
from log_kit import EVERY_KIND, NOW, claim, end, join, open_postgres, open_sqlite, submit
from postgres_kit import Cluster

from polarnode.cli.main import main
from polarnode.journal.journal import open_journal
from polarnode.journal.log.port import Cursor, Log
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.schema import SCHEMA_VERSION
from polarnode.journal.values import EventFilters

DATA = Path(__file__).parents[2] / "data/journals"
EVERYTHING = EventFilters(kinds=EVERY_KIND)


def run(*arguments: str, **env: str) -> Any:
    return CliRunner().invoke(main, ["migrate", *arguments], env={"POLARNODE_LOG": "", **env})


def empty(cluster: Cluster) -> str:
    return cluster.database(())


async def read_all(log: Log) -> list[tuple[int, str, str, bytes]]:
    page = (await log.events(Cursor(), filters=EVERYTHING, limit=1000)).page
    return [(each.seq, each.kind, each.key, each.body) for each in page.events]


async def test_journal_migrates_to_log(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_sqlite(path) as lone:
        me = await join(lone)
        await submit(lone, "over", num_samples=2, key="k")
        for each in await claim(lone, me):
            await lone.finish_claim(each, end(each, turns=2))
        await submit(lone, "begun", num_samples=2, retries=1)
        (first, _) = await claim(lone, me)
        lost = end(first, status="interrupted", reward=None)
        again = await lone.put_back(first, lost, keep=True)
        assert again is not None
        await lone.record_session(end(again).identity)
        await submit(lone, "waits")
        await lone.acknowledge("trainer", Cursor(position=3), now=NOW)
        await lone.add_weights("v1", {"path": "/w"}, at=NOW)
        before, name = await read_all(lone), await lone.log_name()
        tasks = [await lone.task(each) for each in ("over", "begun", "waits")]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    dsn = empty(cluster)
    done = await trio.to_thread.run_sync(lambda: run("--log", dsn, "--from", str(path)))
    assert done.exit_code == 0, done.output
    assert "3 tasks, 6 sessions, 5 events, 1 consumers, 1 weights" in " ".join(done.output.split())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    async with open_postgres(dsn, watch=False) as log:  # retention would delete events of 1970
        assert await read_all(log) == before
        assert [await log.task(each) for each in ("over", "begun", "waits")] == tasks
        assert (await log.consumer_cursor("trainer")).position == 3
        assert [each.version for each in await log.weights()] == ["v1"]
        # a cursor of the journal goes on
        page = await log.events(Cursor(position=3, log=name), filters=EVERYTHING)
        assert page.gap is None
        assert page.page.events[0].seq == 4
        # what had begun is lost once more, and what had not begins
        me = await join(log)
        claims = {(each.task_id, each.sample_index): each for each in await claim(log, me)}
        assert {place: each.attempt for place, each in claims.items()} == {("begun", 1): 0, ("waits", 0): 0}
        (ending,) = await log.claim_endings(me, 10)
        assert (ending.task_id, ending.sample_index, ending.ending) == ("begun", 0, "retries spent")
        for each in (*claims.values(), ending):
            assert await log.finish_claim(each, end(each)) in ("now", "last")
        after = await read_all(log)
        assert after[: len(before)] == before
        assert [each[0] for each in after] == [*range(1, len(after) + 1)]


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
async def test_old_journal_versions_migrate(cluster: Cluster, tmp_path: Path, version: int) -> None:
    path = tmp_path / "journal.sqlite"
    source = DATA / f"v{version}" / "journal.sqlite.gz"
    path.write_bytes(gzip.decompress(source.read_bytes()))
    dsn = empty(cluster)
    done = await trio.to_thread.run_sync(lambda: run("--log", dsn, "--from", str(path)))
    assert done.exit_code == 0, done.output
    async with (
        open_journal(path, now=lambda: NOW) as journal,
        open_postgres(dsn) as log,
    ):
        lone = SqliteLog(journal)
        assert await read_all(log) == await read_all(lone)
        assert await log.consumer_cursor("trainer") == Cursor(position=2, log=await log.log_name())
        for task in await lone.tasks():
            assert await log.task(task.task_id) == task
        for _, _, key, _ in await read_all(log):
            kind, _, session_id = key.partition(":")
            if kind in ("trajectory", "attempt"):
                assert await log.trajectory(session_id) == await lone.trajectory(session_id)
        assert [each.version for each in await log.weights()] == [
            each.version for each in await lone.weights()
        ]


async def test_damaged_body_is_repaired(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_sqlite(path) as lone:
        me = await join(lone)
        await submit(lone, "t")
        (mine,) = await claim(lone, me)
        await lone.finish_claim(mine, end(mine, turns=2))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE trajectories SET body = substr(body, 1, 20)")
    dsn = empty(cluster)
    done = await trio.to_thread.run_sync(lambda: run("--log", dsn, "--from", str(path)))
    assert "1 damaged rows were mended" in " ".join(done.output.split()), done.output
    async with open_postgres(dsn) as log:
        whole = await log.trajectory(mine.session_id)
        assert whole is not None
        assert len(whole.turns) == 2


async def test_only_empty_log_takes_journal(cluster: Cluster, dsn: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_sqlite(path), open_postgres(dsn) as log:
        await submit(log, "t")
        running = await trio.to_thread.run_sync(lambda: run("--log", dsn, "--from", str(path)))
    assert "its node runs" in running.output
    used = await trio.to_thread.run_sync(lambda: run("--log", dsn, "--from", str(path)))
    assert "needs an empty log" in used.output
    assert used.exit_code == 1


def test_old_fleet_journal_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(gzip.decompress((DATA / "v9" / "journal.sqlite.gz").read_bytes()))
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO held VALUES ('s', 't', x'00', NULL)")
    dsn = empty(cluster)
    assert "several journals of an old fleet" in " ".join(
        run("--log", dsn, "--from", str(path)).output.split()
    )
    with psycopg.connect(dsn) as log:
        assert log.execute("SELECT count(*) FROM polarnode.tasks").fetchone() == (0,)


def test_tables_are_created_once(cluster: Cluster) -> None:
    dsn = empty(cluster)
    assert "0001_tables.sql" in run(POLARNODE_LOG=dsn).output
    assert "0001_tables.sql" not in run(POLARNODE_LOG=dsn).output
    assert "name the log" in run().output
    refused = run("--log", f"{dsn} password=secret").output
    assert "must not hold a password" in refused
    assert "secret" not in refused
    assert "cannot be reached" in run("--log", "host=/nowhere dbname=x").output


async def test_node_creates_missing_tables(cluster: Cluster) -> None:
    """A node makes the tables of an empty database, and two that begin at once wait for each other."""
    dsn = empty(cluster)
    async with open_postgres(dsn) as one, open_postgres(dsn) as other:
        assert await one.log_name() == await other.log_name()
