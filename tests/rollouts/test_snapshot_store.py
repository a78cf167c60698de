"""Snapshots in a storage of all nodes: copied, fetched, removed, and gone on from where a node was lost."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import define
from journal_samples import make_identity, make_trajectory
from keeper_kit import KEEPER_HARNESS, Keeper, programs
from log_kit import expire_node, open_postgres
from postgres_kit import running_cluster
from session_kit import scheduling, submit, task, town

from polarnode.core.conversation import Conversation
from polarnode.core.errors import ConfigError
from polarnode.core.snapshots import ReferenceKey, Snapshot
from polarnode.core.task import ForkSpec, SnapshotSpec
from polarnode.journal.held import ResultStore
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Log, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.rollouts.forks import ForkNodes
from polarnode.rollouts.scheduler import Scheduler
from polarnode.rollouts.services import NodeIdentity
from polarnode.rollouts.session_records import SharedSessionRecords
from polarnode.rollouts.snapshot_store import SnapshotStore, open_snapshot_store
from polarnode.rollouts.snapshots import archive_path, beside, list_snapshots, write
from polarnode.support.concurrency import open_background


@define
class Here:
    """One node's folder, journal and storage."""

    folder: Path
    journal: Journal
    store: SnapshotStore

    def take(self, session_id: str, turn: int, content: bytes = b"files") -> None:
        """A session with so many turns, and a snapshot before its turn `turn`."""
        self.journal.writer.record_session(make_identity(session_id))
        for each in make_trajectory(session_id, turns=turn + 1).turns:
            self.journal.writer.record_turn(each)
        archive = archive_path(self.folder, session_id, turn)
        archive.write_bytes(content)
        write(snapshot(session_id, turn), beside(archive))
        self.store.put(session_id, turn)

    def turns(self, session_id: str) -> list[int]:
        return [each.turn for each in list_snapshots(self.folder, session_id).snapshots]


def snapshot(session_id: str, turn: int) -> Snapshot:
    return Snapshot(
        session_id=session_id,
        turn=turn,
        taken=1000.0,
        before_key="",
        conversation=Conversation(messages=()),
        references=ReferenceKey(session_id=session_id, secret="00"),
        image="i",
        image_id="sha256:1",
        places=(),
        files=1,
        bytes=5,
        seconds=0.1,
    )


@asynccontextmanager
async def node(folder: Path, shared: Path) -> AsyncIterator[Here]:
    await trio.Path(folder).mkdir()
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        store = open_snapshot_store(
            str(shared), folder=folder, journal_writer=journal.writer, journal_reader=journal.reader
        )
        async with open_background(store.run):
            yield Here(folder, journal, store)


async def until_there(path: Path) -> None:
    with trio.fail_after(30):
        while not await trio.Path(path).exists():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_other_node_fetches_snapshot(tmp_path: Path) -> None:
    """With the turns before it, which the other node's journal has not."""
    shared = tmp_path / "shared"
    async with node(tmp_path / "one", shared) as one, node(tmp_path / "two", shared) as two:
        one.take("a", 2)
        one.take("ab", 1)  # whose name begins as the other's
        for name, turn in (("a", 2), ("ab", 1)):
            await until_there(beside(archive_path(shared, name, turn)))
        assert await two.store.turns(ForkSpec(session="a", turn=2)) is None
        await two.store.fetch("a")
        assert (two.turns("a"), two.turns("ab")) == ([2], [])
        assert archive_path(two.folder, "a", 2).read_bytes() == b"files"
        turns = await two.store.turns(ForkSpec(session="a", turn=2))
        assert turns == make_trajectory("a", turns=3).turns[:2]
        assert sorted(each.name for each in two.folder.glob("*.part")) == []


async def test_removed_snapshot_leaves_the_store(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    async with node(tmp_path / "one", shared) as one:
        one.take("a", 1)
        one.take("a", 2)
        await until_there(beside(archive_path(shared, "a", 1)))
        await until_there(beside(archive_path(shared, "a", 2)))
        await one.store.remove("a", 1)
        assert {each.name for each in shared.iterdir()} == {
            f"a.snapshot-2.{end}" for end in ("tar", "turns", "json")
        }
        await one.store.sweep(SqliteLog(one.journal))
        assert beside(archive_path(shared, "a", 2)).exists(), "its session is in the log"
        one.take("pruned", 1)
        await until_there(beside(archive_path(shared, "pruned", 1)))
        async with open_journal(tmp_path / "other.sqlite", now=time.time) as empty:
            await one.store.sweep(SqliteLog(empty))
        assert list(shared.iterdir()) == []


async def test_storage_failure_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A session goes on without the copy, and who looks for it finds none."""
    caplog.set_level(logging.WARNING)
    shared = tmp_path / "shared"
    shared.write_text("no folder")
    async with node(tmp_path / "one", shared) as one:
        one.take("a", 1)
        with trio.fail_after(30):
            while "not copied to" not in caplog.text:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await one.store.fetch("b")
        await one.store.remove("a", 1)
    assert one.turns("a") == [1]


async def test_unknown_storage_is_refused(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=time.time) as journal:
        with pytest.raises(ConfigError, match="snapshots: nosuch://there cannot be reached"):
            open_snapshot_store(
                "nosuch://there",
                folder=tmp_path,
                journal_writer=journal.writer,
                journal_reader=journal.reader,
            )


# ── a node that is lost ───────────────────────────────────────────────────────


@asynccontextmanager
async def life(log: Log, folder: Path, shared: Path, keeper: Keeper) -> AsyncIterator[Scheduler]:
    """A node of a shared log, over containers in memory, until it is cancelled."""
    async with node(folder, shared) as here, town(folder, programs(keeper)) as place:
        parents = ForkNodes(
            log=log,
            journal_writer=here.journal.writer,
            journal_reader=here.journal.reader,
            node=folder.name,
            snapshots=folder,
            copies=here.store,
        )
        records = SharedSessionRecords(here.journal.writer, log)
        async with (
            open_background(records.run),
            scheduling(
                log,
                place,
                records,
                identity=NodeIdentity(node=folder.name, model="tiny"),
                parents=parents,
                copies=here.store,
                held=ResultStore(here.journal.writer, here.journal.reader, time.time),
            ) as scheduler,
        ):
            await scheduler.claims.membership.join(NodeFacts(name=folder.name))
            yield scheduler


async def test_session_of_lost_node_goes_on(tmp_path: Path) -> None:
    """At another node, from its last snapshot; every token of the place is trained once."""
    spec = task(harness=KEEPER_HARNESS, snapshot_at=SnapshotSpec(turns=(3,)), budgets={"retries": 1})
    shared, first, second = tmp_path / "shared", Keeper(turns=40, takes=0.1), Keeper(turns=6)
    with running_cluster() as cluster:
        dsn = cluster.database()
        async with open_postgres(dsn) as one, open_postgres(dsn, name="two") as two:
            with trio.CancelScope() as killed:
                async with life(one, tmp_path / "one", shared, first) as scheduler:
                    task_id, (lost,) = await submit(scheduler, spec)
                    await until_there(beside(archive_path(shared, lost, 3)))
                    incarnation = scheduler.claims.membership.incarnation
                    killed.cancel()
                    await trio.sleep_forever()
            await expire_node(two, incarnation)
            async with life(two, tmp_path / "two", shared, second) as scheduler:
                with trio.fail_after(60):
                    facts = await scheduler.registry.results.place_over(task_id, 0)
            assert facts is not None
            found = await two.trajectory(facts.session_id)
            assert found is not None
            assert (first.begun, second.begun) == ([0], [3])
            assert found.continued_from is not None
            assert (found.continued_from.session_id, found.continued_from.turn) == (lost, 3)
            assert [turn.index for turn in found.turns] == [0, 1, 2, 3, 4, 5]
            assert found.trainable_tokens == found.sampled_tokens
