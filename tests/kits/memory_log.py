"""The log of a node alone, in memory and in virtual time. tests/journal/log/test_log_contract.py holds it to what the real
ones do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import trio
from attrs import define, evolve, field

from polarnode.core.codec.packing import unpack_trajectory, unpack_turn
from polarnode.core.errors import Conflict
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory, Turn
from polarnode.groups.group import SessionFacts, make_member
from polarnode.journal.log.news import NewsCounter
from polarnode.journal.log.place_table import PlaceTable
from polarnode.journal.log.port import (
    Claim,
    ClaimOffer,
    EndedSession,
    EndingCause,
    FinishAnswer,
    JoinedNode,
    NodeFacts,
)


@define(eq=False)
class MemoryLog:
    """`turns_of` gives the turns of a session that ran here. `refuse`: what the next writes of an end raise."""

    shared: ClassVar[bool] = False
    lost: ClassVar[bool] = False
    least_load: ClassVar[float | None] = None

    def set_load(self, load: float | None) -> None:
        """There is nobody to tell."""

    turns_of: Callable[[str], Sequence[Turn]] = lambda _: ()
    published: list[Trajectory] = field(factory=list)  # in the order of their events, attempts too
    refuse: list[Exception] = field(factory=list)
    refuse_task: Exception | None = None
    tasks: dict[str, tuple[TaskSpec, tuple[str, ...]]] = field(factory=dict)
    cancelled: list[str] = field(factory=list)
    _table: PlaceTable = field(factory=PlaceTable)
    _over: dict[str, list[SessionFacts]] = field(factory=dict)
    _ended: set[str] = field(factory=set)
    _sessions: int = 0
    _news: NewsCounter = field(factory=NewsCounter)

    @property
    def open_places(self) -> int:
        return self._table.open_places

    def tell(self) -> None:
        self._news.announce()

    @property
    def news(self) -> int:
        return self._news.count

    place_news = event_news = news

    async def wait_news(self, seen: int, seconds: float) -> None:
        await self._news.wait(seen, seconds)

    def put(self, spec: TaskSpec, task_id: str, session_ids: tuple[str, ...], key: str | None = None) -> None:
        """Queue the places of a task at once."""
        if self.refuse_task is not None:
            raise self.refuse_task
        if task_id in self.tasks:
            if self.tasks[task_id][0] == spec:
                return
            raise Conflict(f"task {task_id} exists with another spec: choose another task_id")
        self.tasks[task_id] = (spec, session_ids)
        self._table.submit(spec, task_id=task_id, session_ids=session_ids, idempotency_key=key, submitted=0.0)
        self.tell()

    async def submit(self, spec: TaskSpec, *, task_id: str, session_ids: tuple[str, ...], **more: Any) -> Any:
        from types import SimpleNamespace

        self.put(spec, task_id, session_ids, more.get("idempotency_key"))
        await trio.lowlevel.checkpoint()
        sessions = tuple(SimpleNamespace(session_id=each, outcome=None) for each in session_ids)
        return SimpleNamespace(task_id=task_id, spec=spec, sessions=sessions)

    async def join(self, facts: NodeFacts) -> JoinedNode:
        await trio.lowlevel.checkpoint()
        self._table.incarnation += 1
        return JoinedNode(incarnation=self._table.incarnation, inherited=self._table.claims())

    async def claim(self, offer: ClaimOffer) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._table.claim(offer, {})

    def claim_now(self) -> tuple[Claim, ...]:
        """All that may run, at once."""
        return self._table.claim(ClaimOffer(incarnation=self._table.incarnation, room=1_000), {})

    async def claim_endings(self, incarnation: int, limit: int) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._table.claim_endings(limit)

    async def take_place(self, task_id: str, sample_index: int, incarnation: int) -> Claim | None:
        await trio.lowlevel.checkpoint()
        return self._table.take_place(task_id, sample_index)

    async def claims(self, incarnation: int) -> tuple[Claim, ...]:
        await trio.lowlevel.checkpoint()
        return self._table.claims()

    async def sessions_to_stop(self, incarnation: int) -> Mapping[str, EndingCause]:
        await trio.lowlevel.checkpoint()
        return self._table.sessions_to_stop()

    async def cancel(self, task_id: str, at: float) -> bool:
        await trio.lowlevel.checkpoint()
        found = self._table.cancel(task_id)
        if found:
            self.cancelled.append(task_id)
            self.tell()
        return found

    async def finish_claim(self, claim: Claim, ended: EndedSession) -> FinishAnswer:
        await trio.lowlevel.checkpoint()
        if self.refuse:
            raise self.refuse.pop(0)
        answer = self._table.finish_claim(claim, usable=make_member(claim.spec.group, ended.facts).usable)
        if answer is None:
            return "already" if ended.identity.session_id in self._ended else "unknown"
        if answer in ("now", "last"):
            self._over.setdefault(claim.task_id, []).append(ended.facts)
            self._write(ended)
        return answer

    async def put_back(
        self, claim: Claim, ended: EndedSession | None = None, *, counts: bool = True, keep: bool = False
    ) -> Claim | None:
        await trio.lowlevel.checkpoint()
        if self.refuse:
            raise self.refuse.pop(0)
        self._sessions += 1
        fresh = f"{claim.task_id}-{claim.sample_index}-again-{self._sessions}"
        was_held, kept = self._table.put_back(claim, fresh, counts=counts, keep=keep)
        if was_held and ended is not None:
            self._write(ended, fresh)
        return kept

    async def publish_session(self, ended: EndedSession, incarnation: int) -> FinishAnswer:
        await trio.lowlevel.checkpoint()
        if ended.identity.session_id in self._ended:
            return "already"
        self._write(ended)
        return "now"

    async def finished_places(self, task_id: str) -> tuple[SessionFacts, ...]:
        await trio.lowlevel.checkpoint()
        return tuple(sorted(self._over.get(task_id, ()), key=lambda each: each.sample_index))

    def _write(self, ended: EndedSession, retried_as: str | None = None) -> None:
        session_id = ended.identity.session_id
        turns = tuple(map(unpack_turn, ended.parts[1:])) or tuple(self.turns_of(session_id))
        whole = unpack_trajectory(ended.parts[0], turns)
        self.published.append(evolve(whole, retried_as=retried_as))
        self._ended.add(session_id)
        self.tell()
