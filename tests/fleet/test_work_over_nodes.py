"""What nodes of one log do for each other: groups and trees that run at several, callbacks and evaluations of a node
that is lost.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import session_kit as kit
import trio
from attrs import evolve
from callback_kit import open_receiver
from fleet_kit import hollow_nodes, hollow_task
from log_kit import claim, end, expire_node, join, keys, open_postgres, submit
from postgres_kit import Cluster, running_cluster

from polarnode.api import callbacks
from polarnode.api.callbacks import open_callbacks
from polarnode.client import AsyncPolarnodeClient
from polarnode.core.task import EvaluationSpec, ForkSpec
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Log
from polarnode.rollouts import claims
from polarnode.rollouts import evaluations as module
from polarnode.rollouts.forks import ForkElsewhere, ForkNodes, NoParents
from polarnode.support.concurrency import open_background

RUNNING = """
SELECT places.task_id, nodes.name FROM polarnode.places JOIN polarnode.nodes USING (incarnation)
WHERE places.state = 'running'"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


@pytest.fixture
def dsn(cluster: Cluster) -> str:
    return cluster.database()


async def until(holds: Callable[[], Any]) -> None:
    with trio.fail_after(60):
        while not await holds():  # noqa: ASYNC110 - what another node does has no event here
            await trio.sleep(0.05)


# ── callbacks ─────────────────────────────────────────────────────────────────


async def test_another_node_sends_after_the_lease(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender hangs in its POST and is gone; the next node sends each event once, in the task's order."""
    monkeypatch.setattr(callbacks, "LEASE_S", 0.5)
    monkeypatch.setattr(callbacks, "SETTLE_S", 0.0)
    async with open_postgres(dsn) as first, open_postgres(dsn) as second, open_receiver() as receiver:
        node = await join(first, "a")
        await submit(first, "t", callback_url=receiver.url)
        (held,) = await claim(first, node)
        await first.finish_claim(held, end(held))
        receiver.manner = "hang"
        async with open_callbacks(first):
            await receiver.wait_asked(1)
        receiver.manner = "take"
        async with open_callbacks(second) as sender:
            await receiver.until(3)
            await until(lambda: _none_pending(second))
        assert receiver.keys == ["trajectory:t-0", "group:t", "task:t"]
        assert {head["idempotency-key"] for head in receiver.heads} == set(receiver.keys)
        assert sender.statistics().taken == 3


async def _none_pending(log: Log) -> bool:
    return not (await log.count_callbacks()).pending


async def test_two_nodes_send_each_event_once(dsn: str) -> None:
    async with open_postgres(dsn) as first, open_postgres(dsn) as second, open_receiver() as receiver:
        node = await join(first, "a")
        async with open_callbacks(first), open_callbacks(second):
            for number in range(10):
                await submit(first, f"t{number}", callback_url=receiver.url)
                (held,) = await claim(first, node)
                await first.finish_claim(held, end(held))
            await receiver.until(30)
            await until(lambda: _none_pending(first))
        assert set(receiver.counts.values()) == {1}
        for number in range(10):
            own = [key for key in receiver.keys if key.split(":")[1].split("-")[0] == f"t{number}"]
            assert own == [f"trajectory:t{number}-0", f"group:t{number}", f"task:t{number}"]


# ── evaluations ───────────────────────────────────────────────────────────────


async def test_evaluation_of_lost_node_is_finished(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKE_OVER_INTERVAL_S", 0.05)
    async with (
        open_postgres(dsn) as first,
        open_postgres(dsn) as second,
        open_journal(tmp_path / "journal.sqlite", now=lambda: 9.0) as journal,
        kit.town(tmp_path, {}) as town,
    ):
        lost, alive = await join(first, "a"), await join(second, "b")
        await submit(first, "t", evaluator=kit.task(evaluator="WHOLE").evaluator)
        (held,) = await claim(first, lost)
        await first.finish_claim(held, end(held))
        evaluations = kit.make_evaluations(town.scheduler, journal, workers=1)
        evaluations.log, evaluations.incarnation = second, lambda: alive
        async with open_background(evaluations.run):
            spec = EvaluationSpec(sessions=("t-0",))
            await first.submit_evaluation(
                spec, {"t-0": None}, evaluation_id="e", idempotency_key=None, incarnation=lost, now=1.0
            )
            await expire_node(second, lost)

            async def finished() -> bool:
                found = await first.evaluation("e")
                return found is not None and found.finished

            await until(finished)
        assert [key for key in await keys(second) if key.startswith("reward")] == ["reward:t-0:1"]
        found = await second.evaluation("e")
        assert found is not None
        assert found.sessions[0].state == "evaluated", found.sessions


# ── another primary ───────────────────────────────────────────────────────────


async def test_lost_results_are_sent_again(dsn: str, tmp_path: Path) -> None:
    """The log is an earlier one from one moment to the next, as behind a proxy, and no call of it failed."""
    lacks = (
        "BEGIN; SET search_path = polarnode; TRUNCATE tasks, sessions, events, bodies CASCADE;"
        " UPDATE log SET position = 0; SELECT mark_restored(); COMMIT"
    )
    async with hollow_nodes(tmp_path, 1, token="secret", settings={"log": dsn}) as nodes:
        async with AsyncPolarnodeClient(nodes[0].url, token="secret") as client:
            taken = await client.submit(hollow_task(samples=1, seconds=0.1))
            with trio.fail_after(60):
                await anext(aiter(client.groups()))
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute(lacks)
        async with open_postgres(dsn, watch=False) as log:

            async def told() -> bool:
                return f"group:{taken.task_id}" in await keys(log)

            await until(told)
            assert await log.trajectory(taken.session_ids[0]) is not None


# ── groups and forks ──────────────────────────────────────────────────────────


async def test_early_stop_holds_at_both_nodes(dsn: str, tmp_path: Path) -> None:
    """The first session that is usable is enough: those that run or wait at both nodes are ended."""
    settings = {"log": dsn, "run_limit": 1, "ready_limit": 1}
    async with hollow_nodes(tmp_path, 2, token="secret", settings=settings) as nodes:
        async with AsyncPolarnodeClient(nodes[1].url, token="secret") as client:
            task = hollow_task(samples=8, seconds=3.0, group={"early_stop_min": 1})
            taken = await client.submit(task)
            with trio.fail_after(60):
                group = await anext(aiter(client.groups()))
        assert [member.session_id for member in group.members] == list(taken.session_ids)
        stopped = [each for each in group.trajectories if each.outcome.status == "cancelled"]
        assert len(stopped) >= 4
        assert all("early stop" in str(each.outcome.reason) for each in stopped)
        assert len({each.node for each in group.trajectories}) == 2, "it ran at both"


async def test_sessions_spread_over_nodes(dsn: str, tmp_path: Path) -> None:
    """A group begins at one node, which its prompt is in the cache of; what comes next goes to the emptier one,
    whether it comes at once or one by one, and whatever room the node has that was asked.
    """
    async with (
        hollow_nodes(tmp_path, 2, token="secret", settings={"log": dsn, "run_limit": 32}) as nodes,
        AsyncPolarnodeClient(nodes[0].url, token="secret") as client,
    ):
        # sessions that end while others begin would make a node emptier than the test means
        await client.submit(hollow_task(samples=4, seconds=300.0, task_id="group"))
        for number in range(4):
            await trio.sleep(1.2)  # a node tells its load each second
            await client.submit(hollow_task(samples=1, seconds=300.0, task_id=f"single-{number}"))
        await trio.sleep(1.2)
        for number in range(16):
            await client.submit(hollow_task(samples=1, seconds=300.0, task_id=f"burst-{number}"))
        with psycopg.connect(dsn, autocommit=True) as db:

            async def running() -> list[tuple[str, str]]:
                return db.execute(RUNNING).fetchall()

            async def all_run() -> bool:
                return len(await running()) == 24

            await until(all_run)
            placed = await running()
    by_node = {
        name: Counter(node for task, node in placed if task.startswith(name))
        for name in ("group", "single", "burst")
    }
    assert list(by_node["group"].values()) == [4]
    (first,) = by_node["group"]
    assert by_node["single"][first] <= 1, "the other node had less to do"
    assert min(by_node["burst"].values()) >= 4, by_node
    assert len(by_node["burst"]) == 2, by_node


@asynccontextmanager
async def parents(log: Log, node: str, folder: Path) -> AsyncIterator[tuple[ForkNodes, Journal]]:
    async with open_journal(folder / f"{node}.sqlite", now=lambda: 9.0) as journal:
        nodes = ForkNodes(
            log=log,
            journal_writer=journal.writer,
            journal_reader=journal.reader,
            node=node,
            snapshots=folder / node,
        )
        yield nodes, journal


async def test_root_of_another_node_has_turns(dsn: str, tmp_path: Path) -> None:
    async with (
        open_postgres(dsn, watch=False) as first,
        open_postgres(dsn, watch=False) as second,
        parents(second, "b", tmp_path) as (here, _),
    ):
        root_node = await join(first, "a")
        await join(second, "b")
        await submit(first, "t")
        (held,) = await claim(first, root_node)
        replay, resume = (
            ForkSpec(session=held.session_id, turn=1, by=by)
            for by in cast(tuple[Any, ...], ("replay", "resume"))
        )
        assert await here.elsewhere(replay) == "a", "its turns are not in the log yet"
        with pytest.raises(ForkElsewhere, match="node a, which has session t-0"):
            await here.require_here(replay)
        await first.finish_claim(held, end(held, turns=3))
        await here.require_here(replay)
        found = await here.parent(replay)
        assert found is not None
        assert (len(found.turns), found.count) == (1, 3)
        assert await here.elsewhere(resume) == "a", "its snapshots are on the disk of its node"
        await first.leave(root_node)
        assert await here.elsewhere(resume) is None, "nobody has it any more: the fork says so itself"


async def test_misplaced_fork_is_given_back(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs no retry, and this node leaves its place to the other one for a while."""
    monkeypatch.setattr(claims, "AVOID_PLACE_S", 600.0)
    async with (
        open_postgres(dsn) as log,
        open_journal(tmp_path / "journal.sqlite", now=lambda: 9.0) as journal,
        kit.town(tmp_path, {}) as town,
    ):
        asked = list[str]()

        class Elsewhere(NoParents):
            async def require_here(self, fork: ForkSpec) -> None:
                asked.append(fork.session)
                await trio.lowlevel.checkpoint()
                raise ForkElsewhere("it begins at node a, which has session root")

        async with kit.scheduling(log, town, journal.writer, parents=Elsewhere()) as scheduler:
            await scheduler.claims.membership.join(town.scheduler.claims.membership.facts)
            other = await join(log, "a")
            spec = evolve(kit.task(), fork=ForkSpec(session="root", turn=0))
            await log.submit(spec, task_id="f", session_ids=("f-0",), submitted=1.0)

            async def given_back() -> bool:
                return "attempt:f-0" in await keys(log)

            await until(given_back)
            assert not await log.claim(scheduler.claims._make_offer(10)), "it takes it no more"
            (theirs,) = await claim(log, other)
            assert (theirs.task_id, theirs.attempt, theirs.retries) == ("f", 1, 0)
            assert asked == ["root"]
            await log.finish_claim(theirs, end(theirs))
