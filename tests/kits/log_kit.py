"""What tests of the log do all the time: tasks, nodes that join, sessions that end."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from attrs import evolve
from journal_samples import make_spec, make_trajectory

from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.task import Budgets
from polarnode.core.trajectory import Outcome
from polarnode.journal.journal import open_journal
from polarnode.journal.log.port import Claim, ClaimOffer, EndedSession, Log, NodeFacts, pack_whole_session
from polarnode.journal.log.postgres.postgres import open_postgres_log
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.pending_callbacks import EVENT_KINDS
from polarnode.journal.values import EventFilters, EventKind

EVERY_KIND: tuple[EventKind, ...] = ("trajectory", "group", "task", "attempt", "reward")
NOW = 1_000.0


def end(
    claim: Claim,
    *,
    reward: float | None = 1.0,
    status: Any = "completed",
    turns: int = 1,
    sampled: int = 3,
    finished: float = NOW,
    forked_from: Any = None,
    outcome: Outcome | None = None,
    metadata: Mapping[str, Json] | None = None,
) -> EndedSession:
    """The end of a claim's session."""
    whole = make_trajectory(
        claim.session_id,
        task_id=claim.task_id,
        group_id=claim.spec.group_id or claim.task_id,
        sample_index=claim.sample_index,
        turns=turns,
        status=status,
        reward=reward,
        sampled=sampled,
    )
    whole = evolve(whole, attempt=claim.attempt, forked_from=forked_from, outcome=outcome or whole.outcome)
    whole = evolve(whole, metadata=metadata or whole.metadata)
    return pack_whole_session(whole, finished=finished)


async def submit(
    log: Log,
    task_id: str,
    *,
    num_samples: int = 1,
    retries: int = 2,
    key: str | None = None,
    callback_kinds: tuple[str, ...] = EVENT_KINDS,
    **more: Any,
) -> None:
    spec = make_spec(num_samples=num_samples, budgets=Budgets(retries=retries), **more)
    await log.submit(
        spec,
        task_id=task_id,
        session_ids=tuple(f"{task_id}-{index}" for index in range(num_samples)),
        idempotency_key=key,
        callback_kinds=callback_kinds,
        submitted=NOW,
    )


async def join(log: Log, name: str = "n", **more: Any) -> int:
    return (await log.join(NodeFacts(name=name, **more))).incarnation


async def claim(log: Log, incarnation: int, room: int = 100, **more: Any) -> tuple[Claim, ...]:
    return await log.claim(ClaimOffer(incarnation=incarnation, room=room, **more))


async def keys(log: Log, after: int = 0) -> list[str]:
    """The keys of all events, in order; positions have no gap."""
    found: list[str] = []
    cursor = Cursor(position=after)
    while True:
        page = (await log.events(cursor, filters=EventFilters(kinds=EVERY_KIND))).page
        if not page.events:
            return found
        for event in page.events:
            assert event.seq == after + len(found) + 1, "a gap in the positions"
            found.append(event.key)
        cursor = Cursor(position=page.seen)


async def expire_node(log: Log, incarnation: int) -> None:
    """What a watcher does about a node that was silent for too long."""
    while not await log.declare_lost(incarnation, (await log.read_signs())[incarnation]):
        pass  # it gave a sign in between
    await log.put_back_lost()


@asynccontextmanager
async def open_postgres(dsn: str, **more: Any) -> AsyncIterator[Log]:
    async with open_postgres_log(dsn, **more) as log:
        yield cast(Log, log)


@asynccontextmanager
async def open_sqlite(path: Path) -> AsyncIterator[Log]:
    async with open_journal(path, now=lambda: NOW) as journal:
        yield SqliteLog(journal)
