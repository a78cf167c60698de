"""A node whose journal's file is damaged, when it opens or while it runs, takes nothing new and says so."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from hollow_node import open_hollow
from journal_samples import make_spec

from polarnode.core.errors import JournalDamaged
from polarnode.core.task import CaptureEnd, CaptureSpec, EvaluationSpec
from polarnode.journal import queries
from polarnode.journal.entries import JournalEntry
from polarnode.journal.schema import PAGE_BYTES
from polarnode.node.config import NodeConfig


def corrupt(*_: object) -> NoReturn:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    raise error


def config_at(folder: Path) -> NodeConfig:
    return NodeConfig(engine="simulated", port=0, state_dir=str(folder / "state"))


async def test_lost_entry_ends_running_sessions(tmp_path: Path) -> None:
    async with open_hollow(config_at(tmp_path)) as (node, _):
        opened = await node.captures.begin(CaptureSpec(task_id="before"))
        node.journal.writer.write(JournalEntry(1, corrupt))
        with pytest.raises(JournalDamaged):
            await node.journal.writer.flush()
        with trio.fail_after(30):
            found = await node.captures.trajectory(opened.session_id)
        assert found.outcome.status == "cancelled"
        assert node.captures.list() == ()
        for ask in (
            lambda: node.captures.begin(CaptureSpec(task_id="after")),
            lambda: node.submit(make_spec(task_id="t"), idempotency_key=None),
            lambda: node.evaluations.accept(EvaluationSpec(task_id="before"), idempotency_key=None),
        ):
            with pytest.raises(JournalDamaged, match="no new work is taken"):
                await ask()
        assert "no new work is taken" in (node.journal.health.statistics().warning or "")


async def test_lost_capture_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hollow(config_at(tmp_path)) as (node, _):
        monkeypatch.setattr("polarnode.journal.writer.session_entry", lambda *_: JournalEntry(1, corrupt))
        with pytest.raises(JournalDamaged):
            await node.captures.begin(CaptureSpec(task_id="t"))


async def test_damaged_start_reads_but_refuses(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    async with open_hollow(config) as (node, _):
        ended = [await node.captures.begin(CaptureSpec(task_id=f"t{number}")) for number in range(3)]
        for each in ended:
            assert await node.captures.end(each.session_id, CaptureEnd(reward=1.0)) is not None
        await node.captures.begin(CaptureSpec(task_id="open"))
    path = tmp_path / "state" / "journal.sqlite"
    with closing(sqlite3.connect(path)) as db:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_evaluations_1'"
        (page,) = db.execute(query).fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES)
        file.write(b"\x55" * PAGE_BYTES)
    async with open_hollow(config) as (node, _):
        state = node.journal.health.statistics()
        assert "is damaged" in state.warning
        assert state.refuses_tasks
        assert not node.ready()
        with pytest.raises(JournalDamaged):
            await node.captures.begin(CaptureSpec(task_id="after"))
        found = await node.journal.reader.query(queries.trajectory, ended[0].session_id)
        assert found is not None
        assert found.reward == 1.0
