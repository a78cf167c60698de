"""How far groups are: when one has enough sessions, and how its end is counted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from journal_samples import make_trajectory
from log_kit import NOW, claim, end, join, submit

from polarnode.core.task import GroupSpec, HarnessSpec
from polarnode.journal.journal import open_journal
from polarnode.journal.log.port import Claim
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.rollouts.group_progress import GroupProgress
from polarnode.support.metrics import NodeCounters


@asynccontextmanager
async def opened(
    folder: Path, *, early_stop_min: int | None = None, harness: str = "pi"
) -> AsyncIterator[tuple[GroupProgress, tuple[Claim, ...]]]:
    """The progress of a task of three samples, and its claims."""
    async with open_journal(folder / "journal.sqlite", now=lambda: NOW) as journal:
        log = SqliteLog(journal)
        incarnation = await join(log)
        group, agent = GroupSpec(early_stop_min=early_stop_min), HarnessSpec(name=harness)
        await submit(log, "t", num_samples=3, group=group, harness=agent)
        yield GroupProgress(log, NodeCounters()), await claim(log, incarnation)


async def test_early_stop_needs_usable_sessions(tmp_path: Path) -> None:
    async with opened(tmp_path, early_stop_min=2) as (progress, claims):
        failed = make_trajectory(claims[0].session_id, task_id="t", status="error", reward=None)
        progress.count_session(claims[0], failed)
        for number, enough in ((1, False), (2, True)):
            progress.count_session(claims[number], make_trajectory(claims[number].session_id, task_id="t"))
            assert progress.has_enough(claims[0]) is enough


async def test_group_without_early_stop_never_has_enough(tmp_path: Path) -> None:
    async with opened(tmp_path) as (progress, claims):
        for held in claims:
            progress.count_session(held, make_trajectory(held.session_id, task_id="t"))
        assert not progress.has_enough(claims[0])


async def test_group_is_counted_with_last_sample(tmp_path: Path) -> None:
    async with opened(tmp_path) as (progress, claims):
        for held in claims[:2]:
            await progress.count_filled_place(held, end(held), "now")
        assert progress.tally.groups.total() == 0
        await progress.count_filled_place(claims[2], end(claims[2]), "last")
        assert (progress.tally.groups.total(), progress.tally.sessions.total()) == (1, 3)


async def test_repeated_sample_is_not_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as (progress, claims):
        await progress.count_filled_place(claims[0], end(claims[0]), "already")
        assert progress.tally.sessions.total() == 0


async def test_log_supplies_samples_of_others(tmp_path: Path) -> None:
    """Samples that ended elsewhere, or in an earlier run, are asked of the log."""
    async with opened(tmp_path) as (progress, claims):
        for held in claims:
            await progress.log.finish_claim(held, end(held))
        await progress.count_filled_place(claims[2], end(claims[2]), "last")
        assert progress.tally.groups.total() == 1
        assert progress.tally.sessions.total() == 1, "the others were counted where they ended"


@pytest.mark.parametrize("answer", ["now", "last"])
async def test_capture_makes_no_group(tmp_path: Path, answer: str) -> None:
    async with opened(tmp_path, harness="capture") as (progress, claims):
        await progress.count_filled_place(claims[0], end(claims[0]), answer)  # type: ignore[arg-type]
        assert (progress.tally.groups.total(), progress.tally.sessions.total()) == (0, 1)
