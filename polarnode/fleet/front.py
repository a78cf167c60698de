"""The front of a fleet: it holds a term, follows every node's reports, places tasks, and has those of a dead
node adopted.

It keeps nothing on disk but its vote. Invariants: it decides only in office, that is while a majority of the
roster has its term, and after every node has answered or is gone; a task is in two journals before it is
answered; a decision that was made from old news does no harm, because nodes compare epochs.
"""

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import trio
from attrs import define, evolve, field, frozen

from polarnode.client.scripts import Block, Decoder
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.tasks import task_json
from polarnode.core.errors import Busy, PolarnodeError, Refused
from polarnode.core.fleet import (
    Adoption,
    AdoptOrder,
    CopyOrder,
    CopyRow,
    CopyRows,
    Epoch,
    NodeReport,
    ResumeOrder,
    TaskCopy,
    TermOrder,
)
from polarnode.core.status import Submitted
from polarnode.core.task import TaskSpec
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.link import Link, NobodyListens
from polarnode.fleet.lookup import NEWS, TaskLookup
from polarnode.fleet.members import GONE_S, FleetMember, MemberState, Roster
from polarnode.fleet.ownership import KnownHomes, NodePlan, Seen, majority, plans
from polarnode.fleet.placement import BUSY_S, able_of, home_of, insist_possible, second_of, why_none
from polarnode.support.bounded import remember

logger = logging.getLogger(__name__)

PAUSES: Final = Backoff(
    first_s=0.2, longest_s=2.0
)  # between tries to reach a node: it may be back any moment
LOOK_S: Final = 0.5  # between looks at who is silent: a part of SUSPECT_S
CAMPAIGN_S: Final = 1.0  # between tries to get a term: the front before holds its own while it lives
STARTING_S: Final = 3.0  # before a task is worth sending again to a front that is not in office
DECIDE_S: Final = 1.0  # between rounds of decisions while something is left to do: what failed is tried again
IDLE_S: Final = 10.0  # between rounds when nothing changed and nothing was left to do
# between any two rounds: each looks at all tasks, a millisecond for 100, and commits change them all the time
ROUND_S: Final = 0.2
REMEMBERED: Final = 100_000  # sessions whose node is known without asking: 20 MB


@frozen(kw_only=True)
class _Vote:
    """The file of the front's own vote."""

    term: int


@define(eq=False, kw_only=True)
class Front:
    """A front that runs. Created by `open_front`."""

    config: FleetConfig
    nursery: trio.Nursery
    roster: Roster = field(factory=Roster)
    id: str = field(factory=lambda: secrets.token_hex(8))
    term: int = 0
    in_office: bool = False
    # places of dead nodes that other nodes ran again since this front began, by the dead node's name
    lost: dict[str, int] = field(factory=dict)
    joined: list[Callable[[FleetMember], Awaitable[bool]]] = field(factory=list)  # asked before a node is up
    homes: KnownHomes = field(factory=KnownHomes)
    lookup: TaskLookup = field(init=False)
    nodes_of_sessions: dict[str, str] = field(factory=dict)  # journals, by session
    changed: trio.Event = field(factory=trio.Event)  # set and replaced when a member changes
    _attended: dict[str, trio.CancelScope] = field(factory=dict)
    _submitting: dict[str, trio.Lock] = field(factory=dict)
    _placing: set[str] = field(factory=set)
    # homes of tasks that were answered, and are not in the rows known of their homes yet: until then nothing
    # is decided about a task, because its copy would look like one that never began
    _begun: dict[str, str] = field(factory=dict)
    _news: trio.Event = field(factory=trio.Event)  # decisions are due

    def __attrs_post_init__(self) -> None:
        self.lookup = TaskLookup(self.roster, self.homes)

    # ── the roster ────────────────────────────────────────────────────────────

    def listed(self, urls: Mapping[str, str]) -> None:
        """The launcher's list of nodes now: addresses, each with its pinned certificate or ""."""
        members = self.roster.members
        for url, certificate in urls.items():
            if url not in members:
                token = self.config.node_token or self.config.token
                link = Link(url=url, token=token, certificate=certificate)
                members[url] = FleetMember(link=link, last_byte=trio.current_time())
                self._attended[url] = trio.CancelScope()
                self.nursery.start_soon(self._attend, members[url], self._attended[url])
            elif members[url].link.certificate != certificate:
                members[url].link.certificate = certificate  # of the next connection, and all close now
                self.nursery.start_soon(members[url].link.close)
        for url in members.keys() - urls.keys():
            if members[url].state in ("gone", "left") or self._left(members[url]):
                self._attended.pop(url).cancel()
                del members[url]
                self._note()

    def _left(self, member: FleetMember) -> bool:
        """Whether nothing of a node that drains is needed any more."""
        report = member.report
        if report is None or not report.draining or report.load.live or member.rows:
            return False
        return not report.status.get("unacknowledged") and member.become("left", trio.current_time())

    async def _attend(self, member: FleetMember, scope: trio.CancelScope) -> None:
        failures = 0
        try:
            with scope:
                while True:
                    failures = await self._tried(member, failures)
                    await trio.sleep(PAUSES.delay(failures))
        finally:
            await member.link.close()  # noqa: ASYNC102 - bounded and shielded there

    async def _tried(self, member: FleetMember, failures: int) -> int:
        """Follow a node until that fails. Gives how often it has failed in sequence, 0 if it answered."""
        began = member.last_byte
        try:
            await self._follow(member)
        except NobodyListens as error:
            member.problem = str(error)
            if failures:  # twice: a listener that was full for a moment is no death
                self._become(member, "gone")
        except NEWS as error:
            member.problem = str(error)
        except Refused as error:
            member.problem = f"{member.link.url} is no node of this release: {error}"
        return failures + 1 if member.last_byte == began else 1

    async def _follow(self, member: FleetMember) -> None:
        """Follow a node's reports until its feed breaks."""
        report = structure(await member.link.call("GET", "/v1/fleet"), NodeReport)
        other = self.roster.of_journal(report.journal)
        if other is not None and other is not member and other.state != "gone":
            raise Refused(f"it is {other.link.url} by another address: name it once")
        member.reported(report, trio.current_time())
        member.rows, member.granted = None, 0
        self._become(member, "joining")
        await self._give_term(member)
        path = f"/v1/fleet/feed?{urlencode({'front': self.id})}"
        async with member.link.stream(path, silence_s=GONE_S) as pieces:
            decoder = Decoder()
            async for piece in pieces:
                member.last_byte = trio.current_time()
                for each in decoder.feed(piece):
                    if isinstance(each, Block):
                        await self._reported(member, structure(read_json(each.data), NodeReport))

    async def _reported(self, member: FleetMember, report: NodeReport) -> None:
        before = member.report
        member.reported(report, trio.current_time())
        if member.rows is None or before is None or before.tasks_digest != report.tasks_digest:
            found = structure(await member.link.call("GET", "/v1/fleet/tasks"), CopyRows)
            member.rows = {row.task_id: row for row in found.tasks}
            self.homes.listed(member.journal, found.tasks)
            self._note()
        if self.in_office and (member.granted != self.term or report.front != self.id or report.challenged):
            await self._give_term(member)
        if member.state == "suspect":
            self._become(member, member.look(trio.current_time()))
        self._left(member)

    def _become(self, member: FleetMember, state: MemberState) -> None:
        before = member.state
        if member.become(state, trio.current_time()):
            why = f" ({member.problem})" if state in ("gone", "suspect") and member.problem else ""
            log = logger.warning if state in ("gone", "suspect", "stale") else logger.info
            log("node %s is %s, was %s%s", member.name, state, before, why)
            self._note()

    def _note(self) -> None:
        self._news.set()
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    async def watch(self) -> None:
        """Look at who is silent, until cancelled."""
        while True:
            now = trio.current_time()
            for member in self.roster.members.values():
                if member.state != "joining" or now - member.last_byte >= GONE_S:
                    self._become(member, member.look(now))
            await trio.sleep(LOOK_S)

    # ── the term ──────────────────────────────────────────────────────────────

    async def campaign(self) -> None:
        """Get a term, and get another when this one is superseded, until cancelled."""
        while True:
            if not self.in_office and self.roster.members:
                await self._stand()
            await trio.sleep(CAMPAIGN_S if not self.in_office else LOOK_S)

    async def _stand(self) -> None:
        reached = [each for each in self.roster.members.values() if each.report and each.state != "gone"]
        if not majority(len(reached), len(self.roster.members), own_vote=True):
            return  # a term that cannot be got is not worth a number
        terms = [each.report.term for each in reached if each.report is not None]
        self.term = max([self.term, await self._vote(None), *terms]) + 1
        await self._vote(self.term)
        async with trio.open_nursery() as nursery:
            for member in reached:
                nursery.start_soon(self._isolated, self._give_term, member)
        granted = sum(each.granted == self.term for each in self.roster.members.values())
        if majority(granted, len(self.roster.members), own_vote=True):
            self.in_office = True
            logger.info("in office, term %s, by %s of %s nodes", self.term, granted, len(self.roster.members))
            self._note()

    async def _give_term(self, member: FleetMember) -> None:
        if not self.term:
            return
        order = TermOrder(term=self.term, front=self.id, peers=self.roster.peers())
        try:
            found = await member.link.call("POST", "/v1/fleet/term", value=order)
        except ClientError as error:
            if error.status != 409:
                raise
            if self.in_office:
                logger.warning("another front is in office: %s", error)
            self.in_office = False
            return
        except Unreachable:
            return
        member.granted = structure(found, NodeReport).term

    async def announce(self) -> None:
        """Name all nodes to all of them."""
        async with trio.open_nursery() as nursery:
            for member in self.roster.members.values():
                if member.answers:
                    nursery.start_soon(self._isolated, self._give_term, member)

    async def _vote(self, term: int | None) -> int:
        """The front's own vote: the highest term that it stood for. Its file counts below three nodes."""
        path = Path(self.config.state_dir) / "front.json"

        def write() -> int:
            known = structure(read_json(path.read_bytes()), _Vote).term if path.exists() else 0
            if term is not None and term > known:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                with part.open("wb") as file:
                    file.write(dump_json(plain(_Vote(term=term))))
                    file.flush()
                    os.fsync(file.fileno())
                part.rename(path)
            return max(known, term or 0)

        return await trio.to_thread.run_sync(write)

    # ── decisions ─────────────────────────────────────────────────────────────

    async def decide(self) -> None:
        """Have orphaned tasks adopted, lost second homes replaced, nodes that came back resume, until
        cancelled.
        """
        peers: object = None
        left = True
        while True:
            with trio.move_on_after(DECIDE_S if left else IDLE_S):
                await self._news.wait()
            self._news = trio.Event()
            if not self.in_office:
                continue
            found = plans(self._seen()) if self.roster.settled else {}
            joining = self.roster.in_state("joining")
            left = bool(found or joining)
            if peers != self.roster.peers():
                peers = self.roster.peers()
                await self.announce()
            async with trio.open_nursery() as nursery:
                for journal, plan in found.items():
                    known = self.roster.of_journal(journal)
                    if known is not None:
                        nursery.start_soon(self._isolated, self._carry_out, known, plan)
                for member in joining:
                    if member.answers and member.granted == self.term:
                        nursery.start_soon(self._isolated, self._let_in, member)
            await trio.sleep(ROUND_S)

    async def _isolated(
        self, act: Callable[..., Awaitable[None]], member: FleetMember, *more: object
    ) -> None:
        """The isolation edge: no answer of one node ends the front, which goes on with the others."""
        try:
            await act(member, *more)
        except Exception as error:
            member.problem = f"what it answered is not understood: {error}"
            logger.exception("node %s was not understood", member.name)

    def _seen(self) -> Seen:
        members = self.roster.members.values()
        # asked of each task: a search of the roster for each would be most of the decision's time
        there = {each.journal for each in members if each.state not in ("gone", "left")}
        answering = {each.journal: each.rows or {} for each in members if each.answers}
        for task_id, home in [*self._begun.items()]:
            if home not in answering or task_id in answering[home]:
                del self._begun[task_id]
        return Seen(
            rows={
                each.journal: each.rows.values() for each in members if each.rows is not None and each.answers
            },
            gone=lambda journal: journal not in there and self.roster.gone(journal),
            leaving={each.journal for each in members if each.state == "draining"},
            choose=self._second,
            term=self.term,
            busy=self._placing | self._begun.keys(),
            complete=all(each.answers for each in members),
            known=self.homes.known,
            ended=self.homes.ended,
        )

    def _second(self, task_id: str, home: str, requires: Mapping[str, str] | None = None) -> str:
        """Another home for a task. What it `requires` is found in a copy, where that is not given."""
        if requires is None:
            copies = ((each.rows or {}).get(task_id) for each in self.roster.members.values())
            requires = next((row.requires for row in copies if row is not None and row.requires), {})
        able = [each.journal for each in self.roster.in_state("up", "stale", "joining") if each.answers]
        return second_of(task_id, home, set(able) & {*able_of(requires, home, self.roster.reports())})

    async def _carry_out(self, member: FleetMember, plan: NodePlan) -> None:
        """Ask a node for what was decided. What fails is decided again."""
        link, term, rows = member.link, self.term, list[CopyRow]()
        for each in (*plan.adopt, *plan.seconds):
            self.homes.ordered(member.journal, each)
        with suppress(*NEWS):
            if plan.own or plan.moved:
                resume = ResumeOrder(term=term, own=tuple(plan.own), moved=tuple(plan.moved))
                rows += await _rows(link, "/v1/fleet/resume", resume)
            if plan.adopt:
                logger.warning("node %s adopts %s tasks of dead nodes", member.name, len(plan.adopt))
                order = AdoptOrder(term=term, tasks=tuple(plan.adopt))
                adopted = await _rows(link, "/v1/fleet/adopt", order)
                self._count_lost(member, plan.adopt, adopted)
                rows += adopted
            if plan.seconds:
                order = AdoptOrder(term=term, tasks=tuple(plan.seconds))
                rows += await _rows(link, "/v1/fleet/seconds", order)
            for drop in plan.drop:
                epoch = drop.epoch
                at = {"term": term, "epoch_term": epoch.term, "epoch_number": epoch.number}
                at |= {"ended": 1} if drop.ended else {}
                await link.call("DELETE", f"/v1/fleet/tasks/{quote(drop.task_id, safe='')}?{urlencode(at)}")
                if member.rows is not None:
                    member.rows.pop(drop.task_id, None)
        if member.rows is not None:
            member.rows |= {row.task_id: row for row in rows}

    def _count_lost(
        self, member: FleetMember, adoptions: Sequence[Adoption], adopted: Sequence[CopyRow]
    ) -> None:
        """Count the places that a node runs again because their home is gone."""
        epochs = {row.task_id: row.epoch for row in adopted if row.role == "home"}
        for each in adoptions:
            before = (member.rows or {}).get(each.task_id)
            if before is not None and epochs.get(each.task_id) == each.epoch:
                name = self.roster.name_of(before.home)
                self.lost[name] = self.lost.get(name, 0) + before.open_places

    async def _let_in(self, member: FleetMember) -> None:
        """A node that answered and has nothing to settle takes tasks, once it serves what it has to."""
        if any(row.waiting and not self.homes.later(row) for row in (member.rows or {}).values()):
            return
        for each in self.joined:
            if not await each(member):
                return
        if member.state == "joining":
            member.become("up", trio.current_time())
            self._become(member, member.look(trio.current_time()))
            logger.info("node %s (%s) takes tasks", member.name, member.link.url)
            self._note()

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        """Place a task, or repeat the answer to an identical earlier one. Raises Refused, Conflict, Busy,
        and ClientError as the node refused.
        """
        self._insist_office()
        name = idempotency_key or spec.task_id or secrets.token_hex(8)
        lock = self._submitting.setdefault(name, trio.Lock())
        try:
            async with lock:  # two submissions of one key at once must be one task
                submitted = await self._submitted(spec, idempotency_key)
        finally:
            if not lock.statistics().tasks_waiting:
                self._submitting.pop(name, None)
        return submitted

    async def _submitted(self, spec: TaskSpec, key: str | None) -> Submitted:
        owner = await self.lookup.find(spec.task_id, key) if spec.task_id or key else None
        if owner is not None:
            return await self._hand_over(owner, spec, key)
        if len(self.roster.members) == 1:
            (alone,) = self.roster.members.values()
            return await self._hand_over(alone, spec, key)
        member = self.node_for(spec) if spec.fork is None else await self.lookup.parent_of(spec.fork)
        home = member.journal
        task_id = spec.task_id or f"task-{secrets.token_hex(8)}"
        copy = TaskCopy(
            task_id=task_id,
            epoch=Epoch(self.term, 0),
            home=home,
            second=self._second(task_id, home, spec.requires),
            spec=evolve(spec, task_id=task_id),
            idempotency_key=key,
            submitted=time.time(),
        )
        self._placing.add(task_id)
        member.sent.append((trio.current_time(), spec.num_samples))
        try:
            return await self._placed(copy, member)
        finally:
            self._placing.discard(task_id)

    def node_for(self, spec: TaskSpec) -> FleetMember:
        """The node that takes a task or a capture. Raises Refused where none ever could, and Busy."""
        reports = self.roster.reports()
        insist_possible(spec.requires, reports, complete=len(reports) == len(self.roster.members))
        home = home_of(spec, self.roster.candidates())
        member = None if home is None else self.roster.of_journal(home)
        if member is None:
            up = [each.report for each in self.roster.in_state("up") if each.report is not None]
            silent = [each.name for each in self.roster.members.values() if each.report is None]
            why = why_none(spec.requires, up, silent)
            raise Busy(f"no node takes the task now: {why}", retry_after=BUSY_S)
        return member

    async def _hand_over(self, member: FleetMember, spec: TaskSpec, key: str | None) -> Submitted:
        """The submission of a task that a node has, or of a fleet of one node, is answered by the node."""
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = await member.link.call("POST", "/v1/tasks", value=task_json(spec), headers=headers)
        return self._known(structure(answer, Submitted), member)

    async def _placed(self, copy: TaskCopy, member: FleetMember) -> Submitted:
        """The copy first: a home that has begun a task has a second home for it."""
        second = self.roster.of_journal(copy.second)
        order = CopyOrder(term=self.term, role="home", copy=copy)
        try:
            if second is not None:
                keep = evolve(order, role="second")
                await second.link.call("POST", "/v1/fleet/tasks", value=_order_json(keep))
            answer = await member.link.call("POST", "/v1/fleet/tasks", value=_order_json(order))
            remember(self._begun, copy.task_id, copy.home, most=REMEMBERED)
        except Unreachable as error:
            raise Busy(f"a node went away while it took the task: {error}", retry_after=1.0) from error
        except ClientError as error:
            if error.type == "superseded":
                self.in_office = False
                raise Busy("another front is in office: send the task to it", retry_after=BUSY_S) from error
            if second is not None:
                at = {"term": self.term, "epoch_term": copy.epoch.term, "epoch_number": copy.epoch.number}
                path = f"/v1/fleet/tasks/{quote(copy.task_id, safe='')}?{urlencode(at)}"
                with suppress(*NEWS):  # else it is dropped as one that never began
                    await second.link.call("DELETE", path)  # noqa: ASYNC120 - nobody waits
            raise
        return self._known(structure(answer, Submitted), member)

    def _known(self, submitted: Submitted, member: FleetMember) -> Submitted:
        for session_id in submitted.session_ids:
            remember(self.nodes_of_sessions, session_id, member.journal, most=REMEMBERED)
        return submitted

    def _insist_office(self) -> None:
        if not self.in_office or not self.roster.settled:
            silent = [each.name for each in self.roster.members.values() if not each.answers]
            raise Busy(
                "the front is starting: it waits for the answers of "
                + (", ".join(silent[:5]) or "its nodes"),
                retry_after=STARTING_S,
            )

    async def cancel(self, task_id: str) -> bool | None:
        """Cancel a task in both its journals, before the answer. None for an unknown one."""
        owner = await self.lookup.find(task_id)
        if owner is None:
            return None
        path = f"/v1/fleet/cancel/{quote(task_id, safe='')}"
        for member, answer in await self.lookup.ask_all(
            "GET", f"/v1/fleet/tasks?{urlencode({'task_id': task_id})}"
        ):
            rows = () if isinstance(answer, PolarnodeError) else structure(answer, CopyRows).tasks
            if any(row.role == "second" for row in rows):
                await member.link.call("POST", path)
        answer = await owner.link.call("DELETE", f"/v1/tasks/{quote(task_id, safe='')}")
        return bool(answer["cancelled"])

    async def drain(self, node: str, draining: bool) -> FleetMember:
        """Let a node take no new tasks, by its name or address."""
        for member in self.roster.members.values():
            if node in (member.name, member.link.url):
                await member.link.call("POST", "/v1/fleet/drain", value={"draining": draining})
                return member
        raise Refused(f"there is no node {node!r}: look at GET /v1/fleet/nodes", path="$.node")


def _order_json(order: CopyOrder) -> Any:
    value: Any = plain(order)
    value["copy"]["spec"] = task_json(order.copy.spec)
    return value


async def _rows(link: Link, path: str, order: object) -> tuple[CopyRow, ...]:
    return structure(await link.call("POST", path, value=order), CopyRows).tasks


@asynccontextmanager
async def open_front(
    config: FleetConfig, launch: Callable[["Front"], Awaitable[None]]
) -> AsyncIterator[Front]:
    """A front that runs. `launch` keeps its list of nodes, until cancelled."""
    async with trio.open_nursery() as nursery:
        front = Front(config=config, nursery=nursery)
        for run in (front.watch, front.campaign, front.decide, partial(launch, front)):
            nursery.start_soon(run)
        yield front
        nursery.cancel_scope.cancel()
