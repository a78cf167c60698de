"""Results that a shared log may lack: what a restart reads of them, how long they stay, what the check says."""

from pathlib import Path

import pytest
from attrs import evolve
from journal_samples import Clock, make_identity, make_spec, make_trajectory
from test_journal_check import changed

from polarnode.journal import held, queries
from polarnode.journal.check import check_journal
from polarnode.journal.held import ResultStore
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Claim, pack_ended, pack_whole_session


def hold(journal: Journal, results: ResultStore, session_id: str) -> None:
    """Hold the result of a session of two turns, which has its place."""
    whole = make_trajectory(session_id, task_id=session_id, turns=2)
    journal.writer.record_session(make_identity(session_id, task_id=session_id))
    for turn in whole.turns:
        journal.writer.record_turn(turn)
    results.store_result(claim(session_id), pack_ended(whole, finished=1234.5))


def claim(session_id: str) -> Claim:
    return Claim(
        task_id=session_id,
        sample_index=0,
        session_id=session_id,
        attempt=2,
        incarnation=7,
        retries=1,
        spec=make_spec(task_id=session_id),
        submitted=1000.0,
        idempotency_key="key",
    )


async def test_restart_finds_waiting_results(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal.sqlite", Clock(2000.0)
    async with open_journal(path, now=lambda: clock.time) as journal:
        hold(journal, ResultStore(journal.writer, journal.reader, lambda: clock.time), "a")
    async with open_journal(path, now=lambda: clock.time) as journal:
        results = ResultStore(journal.writer, journal.reader, lambda: clock.time)
        (found,) = await results.read_all()
        assert (found.claim, found.answered) == (claim("a"), None)
        whole = pack_whole_session(make_trajectory("a", task_id="a", turns=2), finished=1234.5)
        assert found.ended == evolve(whole, parts=()), "its size is that of its figures"
        assert await results.load_result(found.ended) == whole


async def test_sweep_keeps_recent_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not acknowledged stays, and so does what was acknowledged a short time ago, in so many bytes."""
    clock = Clock(2000.0)
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: clock.time) as journal:
        results = ResultStore(journal.writer, journal.reader, lambda: clock.time)
        for session_id in ("waits", "old", "recent", "last"):
            hold(journal, results, session_id)

        async def kept() -> set[str]:
            results.delete_old()
            return {each.ended.identity.session_id for each in await results.read_all()}

        results.mark_acknowledged("old")
        clock.time += held.KEEP_ACKNOWLEDGED_S / 2
        results.mark_acknowledged("recent")
        clock.time += 1
        results.mark_acknowledged("last")
        assert await kept() == {"waits", "old", "recent", "last"}
        clock.time += held.KEEP_ACKNOWLEDGED_S / 2
        assert await kept() == {"waits", "recent", "last"}
        assert [bool(await journal.reader.query(queries.turns, each)) for each in ("old", "recent")] == [
            False,
            True,
        ]
        monkeypatch.setattr(held, "KEEP_ACKNOWLEDGED_BYTES", 1)
        assert await kept() == {"waits"}


async def test_check_names_damaged_result(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1000.0) as journal:
        for session_id in ("a", "b"):
            hold(journal, ResultStore(journal.writer, journal.reader, lambda: 1000.0), session_id)
    assert check_journal(path).faults == ()
    changed(path, "UPDATE results SET body = substr(body, 1, 40) WHERE session_id = 'a'")
    assert [(each.table, each.row) for each in check_journal(path).faults] == [("results", "a")]
    async with open_journal(path, now=lambda: 1000.0) as journal:
        (found,) = await ResultStore(journal.writer, journal.reader, lambda: 1000.0).read_all()
        assert found.ended.identity.session_id == "b"
