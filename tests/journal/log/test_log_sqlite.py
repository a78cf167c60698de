"""What the log of a node alone does beside the contract: what a restart finds, and how claims cost."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from journal_samples import make_identity, make_spec
from log_kit import NOW, claim, end, join, open_sqlite, submit

from polarnode.core.cursors import Cursor
from polarnode.core.task import GroupSpec
from polarnode.journal.journal import open_journal
from polarnode.journal.log.place_table import PlaceTable
from polarnode.journal.log.port import FILLED_ANSWERS, ClaimOffer, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.reader import JournalReader
from polarnode.journal.writer import WriterThread


async def test_restart_inherits_running_sessions(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_sqlite(path) as log:
        node = await join(log)
        await submit(log, "done")
        await submit(log, "t", num_samples=3, retries=1, group=GroupSpec(early_stop_min=2))
        done, first, second, third = await claim(log, node)
        await log.record_session(end(third).identity)
        for each in (done, first):
            await log.finish_claim(each, end(each))
        again = await log.put_back(second, end(second, status="interrupted"), keep=True)
        assert again is not None
        await log.record_session(end(again).identity)
    async with open_sqlite(path) as log:
        joined = await log.join(NodeFacts(name="n"))
        assert [(each.session_id, each.attempt, each.retries) for each in joined.inherited] == [
            (again.session_id, 1, 1),
            (third.session_id, 0, 0),
        ]
        assert not await claim(log, joined.incarnation), "what ran is inherited, and not queued"
        mine, other = joined.inherited
        assert await log.put_back(mine, end(mine, status="interrupted"), keep=True) is None, (
            "retries are spent"
        )
        assert await log.finish_claim(other, end(other)) in FILLED_ANSWERS
        (ending,) = await log.claim_endings(joined.incarnation, 10)
        assert ending.ending == "early stop", "what was usable before the restart counts"
        assert await log.finish_claim(ending, end(ending, status="error", reward=None)) in FILLED_ANSWERS
        record = await log.task("t")
        assert record is not None
        assert record.finished


async def test_restart_keeps_cancellation(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_sqlite(path) as log:
        node = await join(log)
        await submit(log, "t", num_samples=2)
        (began,) = await claim(log, node, 1)
        await log.record_session(end(began).identity)
        assert await log.cancel("t", NOW)
    async with open_sqlite(path) as log:
        joined = await log.join(NodeFacts(name="n"))
        assert [each.ending for each in joined.inherited] == ["cancelled"]
        assert await log.sessions_to_stop(joined.incarnation) == {"t-0": "cancelled"}
        (queued,) = await log.claim_endings(joined.incarnation, 10)
        assert (queued.session_id, queued.attempt) == ("t-1", 0), "it never began, and keeps its session"


async def test_restored_journal_reports_gap(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_sqlite(path) as log:
        node, before = await join(log), await log.log_name()
        await submit(log, "t")
        (held,) = await claim(log, node)
        await log.finish_claim(held, end(held))
        after = await log.mark_restored()
        assert after != before
        assert (await log.events(Cursor(position=3, log=before))).gap is None
        ahead = (await log.events(Cursor(position=9, log=before))).gap
        assert ahead is not None
        assert ahead.position == 3
    async with open_sqlite(path) as log:
        assert await log.log_name() == after
        unknown = (await log.events(Cursor(position=1, log="another"))).gap
        assert unknown is not None
        assert "another" in unknown.reason


async def test_single_node_watches_nobody(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: NOW) as journal:
        log = SqliteLog(journal)
        node = await join(log)
        assert await log.read_signs() == {node: 0}
        assert await log.put_back_lost() == 0
        with pytest.raises(NotImplementedError, match="--log postgresql"):
            await log.declare_lost(node, 0)
        await log.leave(node)
        assert not await log.give_sign(node)
        assert await log.nodes() == ()


async def test_session_costs_few_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session costs its node no more reads and transactions than its rows need."""
    counts = Counter[str]()

    def count(owner: type, name: str) -> None:
        usual = getattr(owner, name)

        def counted(self: Any, *args: Any, **more: Any) -> Any:
            counts[name] += 1
            return usual(self, *args, **more)

        monkeypatch.setattr(owner, name, counted)

    async with open_sqlite(tmp_path / "journal.sqlite") as log:
        node = await join(log)
        count(JournalReader, "query")
        count(WriterThread, "_commit")
        await submit(log, "t", key="k")
        assert counts == {"query": 1, "_commit": 1}, "whether the task is known, and its row"
        counts.clear()
        await submit(log, "nobody-chose-this-id")
        assert counts == {"_commit": 1}, "it cannot be known"
        counts.clear()
        for number in range(9):
            log.journal.writer.record_session(make_identity(f"s{number}"))
        await log.journal.writer.flush()
        assert counts["_commit"] <= 2, "they wait for each other"
        counts.clear()
        news, event_news = log.news, log.event_news
        await submit(log, "u", key="u")
        assert (log.news > news, log.event_news) == (True, event_news), "who reads events is not woken"
        counts.clear()
        (held,) = await claim(log, node, room=1)
        assert not counts
        assert await log.finish_claim(held, end(held)) == "last"
        assert counts == {"_commit": 1}


async def test_concurrent_submits_make_one_task(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "journal.sqlite") as log:
        await join(log)
        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(partial(submit, log, name, key="k"))
        assert log.open_places == 1
        assert len(await log.tasks()) == 1


def test_claim_looks_beyond_first_tasks() -> None:
    """Tasks that no offer fits do not hide those behind them, however many there are."""
    table = PlaceTable(incarnation=1)
    for number in range(1_200):
        spec = make_spec(requires={"zone": "far"} if number < 1_199 else {})
        table.submit(
            spec, task_id=f"t{number}", session_ids=[f"s{number}"], idempotency_key=None, submitted=NOW
        )
    found = table.claim(ClaimOffer(incarnation=1, room=2), {})
    assert [each.session_id for each in found] == ["s1199"]
