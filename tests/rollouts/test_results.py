"""Ends of sessions on their way to a shared log, on a real PostgreSQL: it is away, lost, and the node restarts."""

import gc
import os
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, evolve
from fakes_engine import until
from journal_samples import make_identity, make_spec, make_trajectory
from log_kit import claim, join, keys, open_postgres, submit
from postgres_kit import Cluster, running_cluster

from polarnode.core.trajectory import Trajectory
from polarnode.journal.held import ResultStore
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log import patience
from polarnode.journal.log.port import Claim, EndedSession, FinishAnswer, Log
from polarnode.rollouts.membership import LogMembership
from polarnode.rollouts.results import STOP_WAIT_S, SessionResults
from polarnode.support.concurrency import open_background

NOW = 1000.0


@define
class Here:
    """A node's results, its journal, and what had its place."""

    journal: Journal
    results: SessionResults
    filled: list[str]

    def end(self, held: Claim) -> Trajectory:
        """The end of a session of two turns, which its node's journal has."""
        whole = make_trajectory(held.session_id, task_id=held.task_id, turns=2)
        self.journal.writer.record_session(make_identity(held.session_id, task_id=held.task_id))
        for turn in whole.turns:
            self.journal.writer.record_turn(turn)
        self.results.hold(held)
        self.results.publish(whole)
        return whole


@asynccontextmanager
async def node(folder: Path, log: Log) -> AsyncIterator[Here]:
    """One life of a node with this folder."""
    filled: list[str] = []

    async def on_filled(held: Claim, ended: EndedSession, answer: FinishAnswer) -> None:
        filled.append(f"{ended.identity.session_id}: {answer}")

    async with open_journal(folder / "journal.sqlite", now=lambda: NOW) as journal:
        results = SessionResults(
            log=log,
            membership=LogMembership(log),
            now=lambda: NOW,
            on_filled=on_filled,
            held=ResultStore(journal.writer, journal.reader, lambda: NOW),
        )
        yield Here(journal, results, filled)


async def test_results_wait_for_log(tmp_path: Path) -> None:
    """A session that ends while the log is away is held, and has its place as soon as it answers."""
    with running_cluster() as cluster:
        async with open_postgres(cluster.database()) as log, node(tmp_path, log) as here:
            here.results.membership.incarnation = await join(log)
            await submit(log, "t")
            (held,) = await claim(log, here.results.membership.incarnation)
            await trio.to_thread.run_sync(cluster.crash)
            async with open_background(here.results.run):
                whole = here.end(held)
                await here.journal.writer.flush()
                assert (here.results.waiting, here.filled) == (1, [])
                await trio.to_thread.run_sync(cluster.start)
                with trio.fail_after(60):
                    await here.results.delivered()
            assert here.filled == [f"{held.session_id}: last"]
            assert await log.trajectory(held.session_id) == whole


async def test_waiting_results_fill_no_memory(tmp_path: Path) -> None:
    """What is in memory of results that wait for the log does not grow with them, of this life or the last."""
    count, size = 12, 1 << 20  # more than are on their way at once

    def end(here: Here) -> None:
        for number in range(count):
            whole = make_trajectory(f"s{number}", task_id="t", turns=0)
            here.results.publish(evolve(whole, metadata={"text": os.urandom(size // 2).hex()}))

    async def settled(here: Here, away: Away) -> None:
        """Everything is on disk, and the log was asked twice as often as there are results."""
        await here.journal.writer.flush()
        with trio.fail_after(60):
            await until(lambda: away.asked >= 2 * count)
        gc.collect()
        assert here.results.waiting == count

    for life in (end, None):
        away = Away()
        async with node(tmp_path, away) as here, open_background(here.results.run):  # type: ignore[arg-type]
            tracemalloc.start()
            try:
                if life is not None:
                    life(here)
                else:
                    for each in await here.results.held.read_all():  # type: ignore[union-attr]
                        here.results._take(each)
                await settled(here, away)
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert held < size, f"{held} bytes of {count} results of {size} bytes"


async def test_next_life_delivers_results(tmp_path: Path) -> None:
    """A node that is killed before the log heard of an end says so at its next start, with the turns."""
    with running_cluster() as cluster:
        async with open_postgres(cluster.database()) as log:
            async with node(tmp_path, log) as first:
                first.results.membership.incarnation = await join(log)
                await submit(log, "t")
                (held,) = await claim(log, first.results.membership.incarnation)
                whole = first.end(held)  # nothing delivers it
            async with node(tmp_path, log) as second, open_background(second.results.run):
                joined = await log.join((await log.nodes())[0].facts)
                second.results.membership.incarnation = joined.incarnation
                inherited = {each.session_id: each for each in joined.inherited}
                assert await second.results.restore(inherited) == {held.session_id}
                with trio.fail_after(60):
                    await second.results.delivered()
                assert second.filled == [f"{held.session_id}: last"]
                assert await log.trajectory(held.session_id) == whole


async def test_lost_results_are_sent_to_primary(tmp_path: Path) -> None:
    """A node that starts after a failover tells the new primary what the old one took with it."""
    with running_cluster() as cluster:
        async with (
            open_postgres(cluster.database()) as log,
            node(tmp_path, log) as first,
            open_background(first.results.run),
        ):
            first.results.membership.incarnation = await join(log)
            await submit(log, "t")
            (held,) = await claim(log, first.results.membership.incarnation)
            first.end(held)
            with trio.fail_after(60):
                await first.results.delivered()
            await first.journal.writer.flush()
        async with (
            open_postgres(cluster.database()) as promoted,
            node(tmp_path, promoted) as second,
            open_background(second.results.run),
        ):
            second.results.membership.incarnation = await join(promoted)
            for told in (["last"], []):  # the second time it is known
                second.filled.clear()
                assert await second.results.restore({}) == {held.session_id}
                with trio.fail_after(60):
                    await second.results.delivered()
                assert second.filled == [f"{held.session_id}: {answer}" for answer in told]


async def test_newer_claim_is_given_back(tmp_path: Path) -> None:
    """A node that joins again while it gives a place back holds it by another claim, and gives that back."""

    @define
    class Joining:
        """The log, at which the node joins again before it gives the first place back."""

        log: Log
        again: list[Claim]

        def __getattr__(self, name: str) -> object:
            return getattr(self.log, name)

        async def put_back(self, held: Claim, *given: EndedSession, counts: bool, keep: bool) -> Claim | None:
            if not self.again:
                self.again += (await self.log.join((await self.log.nodes())[0].facts)).inherited
                here.results.hold(self.again[0])
            return await self.log.put_back(held, *given, counts=counts, keep=keep)

    with running_cluster() as cluster:
        async with open_postgres(cluster.database()) as log, node(tmp_path, Joining(log, [])) as here:  # type: ignore[arg-type]
            here.results.membership.incarnation = await join(log)
            await submit(log, "t")
            (held,) = await claim(log, here.results.membership.incarnation)
            here.results.hold(held)
            kept = await here.results.put_back(make_trajectory(held.session_id, task_id="t"), counts=True)
            assert kept is not None
            assert [each.session_id for each in await log.claims(kept.incarnation)] == [kept.session_id]


async def test_new_primary_gets_acknowledged_results(tmp_path: Path) -> None:
    """A primary that never had a task gets it with what was acknowledged by the lost one, once."""
    with running_cluster() as cluster:
        old, new = cluster.database(), cluster.database()
        async with (
            open_postgres(old) as log,
            open_postgres(new) as promoted,
            node(tmp_path, log) as here,
            open_background(here.results.run),
        ):
            here.results.membership.incarnation = await join(log)
            await here.results.restore({})
            await submit(log, "t")
            (held,) = await claim(log, here.results.membership.incarnation)
            whole = here.end(held)
            with trio.fail_after(60):
                await here.results.delivered()
            await here.results.resend_results()
            assert here.filled == [f"{held.session_id}: last"], "the log is the same"
            await _other_identity(cluster, new)
            here.results.log, here.results.membership.incarnation = promoted, await join(promoted)
            for _ in range(2):  # the second time it is known
                await here.results.resend_results()
                with trio.fail_after(60):
                    await here.results.delivered()
            assert await promoted.trajectory(held.session_id) == whole
            expected = [f"trajectory:{held.session_id}", "group:t", "task:t"]
            assert await keys(promoted) == expected


async def _other_identity(cluster: Cluster, dsn: str) -> None:
    """Two databases of one server have one identity, until one is said to be restored."""
    async with open_postgres(dsn, watch=False) as log:
        await log.mark_restored()


class Away:
    """A log that never answers, and counts what it is asked."""

    shared = True

    def __init__(self) -> None:
        self.asked = 0

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        async def refused(*_: object, **__: object) -> object:
            self.asked += 1
            raise patience.LogUnavailable("the log is away")

        return refused


async def test_stop_is_bounded_without_log(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """A node ends though the log does not answer; what it had to say stays in its journal."""
    async with node(tmp_path, Away()) as here, open_background(here.results.run):  # type: ignore[arg-type]
        here.results.publish(make_trajectory("a", task_id="t"))
        await here.results.leave()
        assert here.results.waiting == 1
        (found,) = await ResultStore(here.journal.writer, here.journal.reader, lambda: NOW).read_all()
        assert found.answered is None


async def test_stop_shortens_retries(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Nothing cuts a place short that is given back but the node's stop, which waits no longer than STOP_WAIT_S."""
    lost = make_trajectory("a", task_id="t")
    held = Claim(
        task_id="t",
        sample_index=0,
        session_id="a",
        attempt=0,
        incarnation=1,
        retries=0,
        spec=make_spec(),
        submitted=NOW,
    )
    async with node(tmp_path, Away()) as here:  # type: ignore[arg-type]
        here.results.hold(held)

        async def give_back() -> None:
            with here.results.patience() as scope:
                await here.results.put_back(lost, counts=True)
            assert scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_back)
            await trio.sleep(10 * STOP_WAIT_S)
            assert len(nursery.child_tasks) == 1
            here.results.shorten_waits()
        (found,) = await ResultStore(here.journal.writer, here.journal.reader, lambda: NOW).read_all()
        assert (found.claim, found.answered) == (None, None), "the next start tells it"
