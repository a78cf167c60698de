"""Results that wait for the log: what a restart reads of them, and what the check says of a damaged one."""

from pathlib import Path

from journal_samples import make_identity, make_trajectory
from journal_writes import publish_end
from test_journal_check import changed

from polarnode.journal.check import check_journal
from polarnode.journal.held import held_result, hold_entry
from polarnode.journal.journal import Journal, open_journal


def hold(journal: Journal, session_id: str) -> None:
    whole = make_trajectory(session_id, task_id=session_id, turns=2)
    journal.session_started(make_identity(session_id, task_id=session_id))
    for turn in whole.turns:
        journal.turn(turn)
    journal.write(hold_entry(whole, at=1234.5))


async def test_held_result_after_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1000.0) as journal:
        hold(journal, "a")
    async with open_journal(path, now=lambda: 2000.0) as journal:
        result = await journal.query(held_result, "a")
        assert result is not None
        assert (result.at, result.trajectory) == (1234.5, make_trajectory("a", task_id="a", turns=2))
        assert await journal.query(held_result, "b") is None


async def test_published_session_is_not_held(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
        publish_end(journal, make_trajectory("a", task_id="a"))
        hold(journal, "a")
        await journal.flushed()
        assert await journal.query(held_result, "a") is None


async def test_damaged_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_journal(path, now=lambda: 1000.0) as journal:
        hold(journal, "a")
        hold(journal, "b")
    assert check_journal(path).faults == ()
    changed(path, "UPDATE held SET body = substr(body, 1, 40) WHERE session_id = 'a'")
    assert [(each.table, each.row) for each in check_journal(path).faults] == [("held", "a")]
    async with open_journal(path, now=lambda: 1000.0) as journal:
        assert await journal.query(held_result, "a") is None
        assert await journal.query(held_result, "b") is not None
