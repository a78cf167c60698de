"""Tasks that a fleet keeps in two journals: as their home, as their second home, and as a former home.

Law: no place's event gets a number here before the second home has filled the place for this home's epoch. A
session that ends is held, then committed, then published; the three are entries of the journal in this order,
so that a kill between two of them repeats the later one. `_tasks` is what the journal has, entries that are
on their way included: it changes in the same step that enqueues them, so nothing is awaited between a look at
an epoch and the entry that relies on it. Clocks and fronts decide when something happens, never whether.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode

import trio
from attrs import define, evolve, field

from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import structure
from polarnode.core.errors import Conflict, PolarnodeError, Refused
from polarnode.core.fleet import (
    FLEET,
    Adoption,
    Committed,
    CopyOrder,
    CopyRow,
    CopyRows,
    Epoch,
    Moved,
    Peer,
    ResumeOrder,
    Role,
    TaskCopy,
    TermOrder,
    place_path,
)
from polarnode.core.trajectory import Trajectory
from polarnode.journal import copies
from polarnode.journal.copies import EndedResult
from polarnode.journal.journal import Journal
from polarnode.rollouts.ended_copies import EndedCopies
from polarnode.rollouts.lifecycle import Homes, new_session_id
from polarnode.rollouts.office import Office
from polarnode.rollouts.scheduler import Scheduler, recover
from polarnode.rollouts.session import Session
from polarnode.rollouts.snapshot_copies import KeptSnapshots

logger = logging.getLogger(__name__)

# after a second home that did not answer: one that is gone costs a refused connection every two seconds
PAUSES: Final = Backoff(first_s=0.1, longest_s=2.0)
DROP_S: Final = 2.0  # between looks at finished tasks whose copies can go: nobody waits for it


# One request to another node of the fleet (`node.peers`): its status and JSON; None without a whole answer
AskPeer = Callable[..., Awaitable[tuple[int, Any] | None]]


@define(eq=False)
class _Task:
    """A task that this journal is or was the home of. `synced`: its second home has all its finished places.
    `waiting`: it began in an earlier run, and no front has confirmed it yet.
    """

    role: Role
    epoch: Epoch
    home: str
    second: str
    synced: bool = False
    waiting: bool = False


@define(eq=False)
class SecondHomes(Homes):
    """A node's part in a fleet; `run` commits in the background."""

    journal: Journal
    scheduler: Scheduler
    ask: AskPeer
    snapshots: KeptSnapshots
    office: Office = field(factory=Office)
    ended: EndedCopies = field(factory=EndedCopies)
    peers: Mapping[str, Peer] = field(factory=dict)
    changes: int = 0  # of what GET /v1/fleet/tasks answers
    _born: str = field(factory=new_session_id)
    _tasks: dict[str, _Task] = field(factory=dict)
    _acknowledged: set[str] = field(factory=set, init=False)  # tasks of `CopyRow.acknowledged`
    _held: dict[str, str] = field(factory=dict)  # tasks by session, of results that can be settled now
    _serving: set[str] = field(factory=set)
    _changed: trio.Event = field(factory=trio.Event)
    _ordering: trio.Lock = field(factory=trio.Lock)  # one order at a time: each looks, then writes

    # ── what sessions ask ─────────────────────────────────────────────────────

    def holds(self, trajectory: Trajectory) -> bool:
        """Take a finished session's result, if its task has a second home."""
        task = self._tasks.get(trajectory.task_id)
        if task is None or (task.role == "home" and not task.second):
            return False
        self.journal.write(copies.hold_entry(trajectory, at=self.journal.now()))
        self._held[trajectory.session_id] = trajectory.task_id
        self._change()
        return True

    def first_attempt(self, task_id: str) -> int:
        return self._tasks[task_id].epoch.number if task_id in self._tasks else 0

    def moved(self, task_id: str) -> bool:
        return task_id in self._tasks and self._tasks[task_id].role == "former"

    def outlives(self, task_id: str) -> bool:
        task = self._tasks.get(task_id)
        return task is not None and task.role == "home" and task.second != ""

    def second_of(self, task_id: str) -> tuple[Epoch, Peer] | None:
        """The second home of a task of this home; None where it has none, or is not known."""
        peer = self.peers.get(self._tasks[task_id].second) if self.outlives(task_id) else None
        return None if peer is None else (self._tasks[task_id].epoch, peer)

    @property
    def digest(self) -> str:
        """Changes when `rows` does."""
        return f"{self._born}-{self.changes}"

    @property
    def held(self) -> int:
        """Results that wait for their second home."""
        return len(self._held)

    def waits(self, task_id: str) -> bool:
        """Whether a front must confirm the task before its sessions go on."""
        return task_id in self._tasks and self._tasks[task_id].waiting

    # ── terms ─────────────────────────────────────────────────────────────────

    async def take_term(self, order: TermOrder) -> None:
        """A front takes office, or names the nodes again. Raises Superseded."""
        if self.office.take(order, trio.current_time()):
            self.journal.write(copies.term_entry(order.term, order.front))
        self.peers = {peer.journal: peer for peer in order.peers}
        self._change()
        await self.journal.flushed()

    # ── copies ────────────────────────────────────────────────────────────────

    async def rows(self, task_id: str | None = None, key: str | None = None) -> CopyRows:
        await self.journal.flushed()
        waiting = {name for name, task in self._tasks.items() if task.waiting}
        found = await self.journal.query(copies.copy_rows, waiting, task_id, key)
        acknowledged = self._acknowledged
        return CopyRows(tasks=tuple(evolve(row, acknowledged=row.task_id in acknowledged) for row in found))

    async def row_or_none(self, task_id: str) -> CopyRow | None:
        return next(iter((await self.rows(task_id)).tasks), None)

    def begin(self, copy: TaskCopy) -> None:
        """The node is about to begin this task as its home; its second home has the copy."""
        if copy.home != self.journal.id:
            raise Refused(f"$.copy.home must be this node's journal, {self.journal.id}", path="$.copy.home")
        before = self._tasks.get(copy.task_id)
        if before is not None:
            raise Conflict(f"task {copy.task_id} is here with epoch {before.epoch}: look at {FLEET}")
        self._tasks[copy.task_id] = _Task("home", copy.epoch, copy.home, copy.second, synced=True)
        self._change()

    def begin_failed(self, task_id: str) -> None:
        """The node did not take the task after all."""
        self._tasks.pop(task_id, None)

    async def keep(self, order: CopyOrder) -> CopyRow:
        """Keep a copy as its second home. Raises Conflict where its places are not all here."""
        copy = order.copy
        async with self._ordering:
            self.journal.write(copies.copy_entry(copy, "second", places=order.places))
            task = self._tasks.get(copy.task_id)
            if task is not None and task.role == "former" and task.epoch < copy.epoch:
                task.epoch = copy.epoch  # what is left of its sessions is retired all the same
            self._change()
            row = await self.row_or_none(copy.task_id)
        if row is None:
            raise Conflict(f"not all of the {order.places} places of task {copy.task_id} are staged here")
        return row

    async def drop(self, task_id: str, epoch: Epoch, *, ended: bool = False) -> CopyRow | None:
        """Forget a copy whose epoch is not higher. Gives what is left of it. `ended`: so has its task."""
        found = await self.journal.query(copies.copy_of, task_id) if ended else None
        if found is not None and found[0] == "second" and found[1].epoch <= epoch:
            self.ended.add(found[1])
        self.journal.write(copies.drop_entry(task_id, epoch))
        self._change()
        row = await self.row_or_none(task_id)
        # what is left is no copy: a plain task, or what a former home keeps
        dropped = row is None or row.home == "" or row.epoch == Epoch(0, 0)
        if dropped and not self._in_use(task_id):
            self._tasks.pop(task_id, None)
            self._acknowledged.discard(task_id)
        return row

    def _in_use(self, task_id: str) -> bool:
        return task_id in self._held.values() or bool(self.scheduler.registry.live(Session, task_id))

    async def cancel_copy(self, task_id: str) -> CopyRow:
        """Remember, as a second home, that the task was cancelled."""
        self.journal.write(copies.cancel_copy_entry(task_id, now=self.journal.now()))
        self._change()
        row = await self.row_or_none(task_id)
        if row is None:
            raise Refused(f"task {task_id} is not in this node's journal: give it its copy first")
        return row

    def cancelled(self, task_id: str) -> None:
        """The task is being cancelled, as its home: sessions that have to come end at once, after a restart
        too.
        """
        if task_id in self._tasks:
            self.journal.task_cancelled(task_id)
            self.journal.write(copies.cancel_copy_entry(task_id, now=self.journal.now()))
            self._change()

    # ── commits, as a second home ─────────────────────────────────────────────

    async def commit(
        self, task_id: str, place: int, session_id: str, epoch: Epoch, data: bytes, *, staged: bool
    ) -> Committed:
        """Fill a place for its home, once. The answer is on disk. Raises Refused for a body that is no result
        of this place.
        """
        result = await self.journal.read(partial(copies.read_result, data))
        whole = result.trajectory
        if (whole.task_id, whole.sample_index, whole.session_id) != (task_id, place, session_id):
            raise Refused("the body must be the result of the place and session that the path names")
        self.journal.write(copies.commit_entry(task_id, place, session_id, epoch, data, staged=staged))
        row = await self.row_or_none(task_id)
        if staged:
            return Committed(accepted=True, session_id=session_id, epoch=epoch, home=self.journal.id)
        holder = await self.journal.query(copies.holder_of, task_id, place)
        if row is None:  # the home must give it again
            return Committed(accepted=False, session_id="", epoch=Epoch(0, 0), home="")
        ours = row.role == "second" and row.epoch <= epoch
        # a task that was adopted here and ended is later than any home that comes back
        later = row.epoch if row.epoch > Epoch(0, 0) else Epoch(epoch.term, epoch.number + 1)
        return Committed(
            accepted=ours and holder == session_id,
            session_id=holder,
            epoch=row.epoch if ours else max(later, row.epoch),
            home=row.home if row.role != "home" else self.journal.id,
        )

    # ── orders of a front ─────────────────────────────────────────────────────

    async def adopt(self, adoptions: Iterable[Adoption]) -> CopyRows:
        """Become home of tasks: hold the places that are committed here, begin sessions for the others."""
        self._insist_on()
        await self._ordered(partial(self._adopted, tuple(adoptions)))
        return await self.rows()

    async def _ordered(self, work: Callable[[], Awaitable[None]]) -> None:
        """Carry out an order to its end, even if whoever sent it is gone: half of one would be found at the
        node's next start only.
        """
        done, failed = trio.Event(), list[PolarnodeError]()

        async def run() -> None:
            try:
                async with self._ordering:
                    await work()
            except PolarnodeError as error:
                failed.append(error)
            finally:
                self._change()
                done.set()

        self.scheduler.nursery.start_soon(run)
        await done.wait()
        for error in failed:
            raise error

    async def _adopted(self, adoptions: tuple[Adoption, ...]) -> None:
        begun: list[TaskCopy] = []
        for adoption in adoptions:
            found = await self.journal.query(copies.copy_of, adoption.task_id)
            if found is None or found[0] != "second" or found[1].epoch >= adoption.epoch:
                continue
            copy = found[1]
            self.journal.write(
                copies.adopt_entry(
                    copy,
                    adoption,
                    home=self.journal.id,
                    session_ids=tuple(new_session_id() for _ in range(copy.spec.num_samples)),
                    callback_kinds=self.journal.kinds_for(copy.spec),
                )
            )
            self._tasks[copy.task_id] = _Task("home", adoption.epoch, self.journal.id, adoption.second)
            begun.append(copy)
        await self.journal.flushed()
        held = await self.journal.query(copies.held_sessions)
        for copy in begun:
            await self._go_on(copy, held)

    async def _go_on(self, copy: TaskCopy, held: Mapping[str, str]) -> None:
        """Begin the sessions of an adopted task."""
        record = await self.journal.task(copy.task_id)
        sessions = [] if record is None else [each for each in record.sessions if each.outcome is None]
        spec = evolve(copy.spec, task_id=copy.task_id)
        over = await self.journal.places_over(copy.task_id)
        self.scheduler.registry.groups.begin(copy.task_id, spec, over)
        self._hold((each for each, task_id in held.items() if task_id == copy.task_id), held)
        places = {each.sample_index: each.session_id for each in sessions if each.session_id not in held}
        self.scheduler.adopt(spec, copy.task_id, places)
        if record is not None and record.cancelled is not None:
            self.scheduler.cancel(copy.task_id)

    async def replace_seconds(self, adoptions: Iterable[Adoption]) -> CopyRows:
        """Give tasks of this home another second home. Their results are held until it has what they have."""
        async with self._ordering:
            for each in adoptions:
                task = self._tasks.get(each.task_id)
                if task is None or task.role != "home" or task.epoch >= each.epoch:
                    continue
                self.journal.write(copies.seconds_entry(each))
                task.epoch, task.second, task.synced = each.epoch, each.second, False
        self._change()
        return await self.rows()

    async def resume(self, order: ResumeOrder) -> CopyRows:
        """Go on with the tasks of an earlier run that are still this node's, and retire those that moved."""
        self._insist_on()
        await self._ordered(partial(self._resumed, order))
        return await self.rows()

    async def _resumed(self, order: ResumeOrder) -> None:
        mine = {each for each in order.own if self.waits(each)}
        for moved in order.moved:
            mine |= {moved.task_id} if self.waits(moved.task_id) else set()
            self._lose(moved)
        held = await self.journal.query(copies.held_sessions)
        for task_id in mine:
            self._tasks[task_id].waiting = False
        self._hold((each for each, task_id in held.items() if task_id in mine), held)
        await recover(self.journal, self.scheduler, logger.warning, skips=lambda name: name not in mine)

    def _insist_on(self) -> None:
        if self.scheduler.registry.stopping:
            raise Refused("this node is stopping and begins no sessions: use another node")

    def _lose(self, moved: Moved) -> None:
        """A task of this home is another's: its sessions end, and what they have becomes attempts."""
        task = self._tasks.get(moved.task_id)
        if task is None or task.role != "home" or task.epoch >= moved.epoch:
            return
        self.journal.write(copies.moved_entry(moved))
        task.role, task.epoch, task.home, task.second = "former", moved.epoch, moved.home, ""
        logger.warning("task %s has moved to %s, epoch %s", moved.task_id, moved.home, moved.epoch)
        for session in self.scheduler.registry.live(Session, moved.task_id):
            session.cancel("stopped")
        self._change()

    async def load(self) -> None:
        """What the journal has at the node's start. Tasks that are not confirmed yet wait for a front."""
        self.office.term, self.office.front = await self.journal.query(copies.term_of)
        for copy_row in (await self.rows()).tasks:
            if copy_row.role == "second":
                continue
            task = _Task(copy_row.role, copy_row.epoch, copy_row.home, copy_row.second)
            task.waiting = copy_row.role == "home" and copy_row.second != "" and not copy_row.finished
            self._tasks[copy_row.task_id] = task
        held = await self.journal.query(copies.held_sessions)
        self._hold((each for each, task_id in held.items() if not self.waits(task_id)), held)

    def _hold(self, sessions: Iterable[str], tasks: Mapping[str, str]) -> None:
        """Settle these results from now on, which the journal holds already."""
        self._held |= {each: tasks[each] for each in sessions if tasks[each] in self._tasks}
        self._change()

    # ── settling results ──────────────────────────────────────────────────────

    async def run(self, ready: trio.Event) -> None:
        """Commit and publish results, retire those of tasks that moved, drop copies of finished tasks."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drop_finished)
            ready.set()
            while True:
                changed = self._changed
                for target in {self._target(each) for each in self._held.values()} - self._serving:
                    self._serving.add(target)
                    nursery.start_soon(self._serve, target)
                await changed.wait()

    def _target(self, task_id: str) -> str:
        """The journal that a result of the task waits for; "" for none."""
        task = self._tasks[task_id]
        return task.home if task.role == "former" else task.second

    async def _serve(self, target: str) -> None:
        """Settle what waits for one journal, in order; what cannot be settled now lets the others pass."""
        failures = 0
        while (session_id := self._next_for(target)) is not None:
            if await self._settled(session_id):
                self._held.pop(session_id, None)
                failures = 0
                continue
            if session_id in self._held:
                self._held[session_id] = self._held.pop(session_id)
            await trio.sleep(PAUSES.delay(failures))
            failures += 1
        self._serving.discard(target)

    def _next_for(self, target: str) -> str | None:
        return next((each for each, task in self._held.items() if self._target(task) == target), None)

    async def _settled(self, session_id: str) -> bool:
        """Settle one result. False when that must be tried again."""
        task_id = self._held[session_id]
        task = self._tasks[task_id]
        settle = self._retired if task.role == "former" else self._committed
        try:
            await self.journal.flushed()
            result = await self.journal.query(copies.held_result, session_id)
            if result is not None:
                return await settle(task_id, task, result)
            logger.error("the result of session %s is lost with its row in the journal", session_id)
            return True
        except PolarnodeError as error:
            logger.warning("the result of session %s waits: %s", session_id, error)
            return False

    async def _committed(self, task_id: str, task: _Task, result: EndedResult) -> bool:
        """Fill the place at the second home, then publish."""
        whole, epoch, second = result.trajectory, task.epoch, task.second
        if second:
            if not task.synced and not await self._synchronised(task_id, task):
                return False
            body = await self.journal.read(partial(copies.pack_result, whole, result.at))
            path = place_path(task_id, whole.sample_index, epoch, session=whole.session_id)
            answer = await self._asked(second, "PUT", path, body=body)
            if task.epoch != epoch or task.role != "home" or answer is None:
                return False
            committed = structure(answer, Committed)
            if not (committed.accepted and committed.session_id == whole.session_id):
                self._refused(task_id, task, committed)
                return False
        if task.epoch != epoch or task.role != "home":
            return False
        self.journal.write(copies.publish_held_entry(whole, at=result.at))
        self.scheduler.registry.count(whole)
        self._change()
        return True

    def _refused(self, task_id: str, task: _Task, committed: Committed) -> None:
        if committed.epoch > task.epoch:
            self._lose(Moved(task_id=task_id, epoch=committed.epoch, home=committed.home))
        elif committed.home == "":
            task.synced = False
        else:
            logger.error(
                "session %s holds a place of task %s at its second home, and another session here: this is a"
                " bug of polarnode",
                committed.session_id,
                task_id,
            )

    async def _synchronised(self, task_id: str, task: _Task) -> bool:
        """Give the second home the task and all its finished places, unless it has them for this epoch."""
        epoch, second = task.epoch, task.second
        rows = await self._asked(second, "GET", f"{FLEET}?{urlencode({'task_id': task_id})}")
        if rows is None or task.epoch != epoch:
            return False
        row = next(iter(structure(rows, CopyRows).tasks), None)
        if row is not None and (row.role == "home" or row.epoch > epoch):
            later = max(row.epoch, Epoch(epoch.term, epoch.number + 1))
            self._lose(Moved(task_id=task_id, epoch=later, home=row.home))
            return False
        kept = row is not None and row.role == "second" and row.epoch == epoch
        if not kept and not await self._copied(task_id, epoch, second):
            return False
        if task.epoch != epoch or task.role != "home":
            return False
        task.synced = True
        return True

    async def _copied(self, task_id: str, epoch: Epoch, second: str) -> bool:
        """Stage the places whose events have numbers, then the copy, which takes them all at once: a second
        home that has only some of them would begin the others again.
        """
        await self.journal.flushed()
        found = await self.journal.query(copies.copy_of, task_id)
        if found is None or found[1].epoch != epoch:
            return False
        places = 0
        for session_id in await self.journal.query(copies.ended_places, task_id):
            whole = await self.journal.trajectory(session_id)
            if whole is None:  # pruned: every reader has it, and its task is days old
                continue
            at = await self.journal.query(copies.ended_at, session_id)
            body = await self.journal.read(partial(copies.pack_result, whole, at))
            path = place_path(task_id, whole.sample_index, epoch, session=session_id, staged="true")
            if await self._asked(second, "PUT", path, body=body) is None:
                return False
            places += 1
        order = CopyOrder(term=self.office.term, role="second", copy=found[1], places=places)
        kept = await self._asked(second, "POST", FLEET, value=order)
        if kept is None or structure(kept, CopyRow).epoch != epoch:
            return False
        again = await self.journal.query(copies.copy_of, task_id)
        if again is not None and again[1].cancelled is not None and found[1].cancelled is None:
            return await self._asked(second, "POST", f"/v1/fleet/cancel/{quote(task_id)}") is not None
        return True

    async def _retired(self, task_id: str, task: _Task, result: EndedResult) -> bool:
        """A result whose task moved is an attempt, unless its new home delivers this very session."""
        session_id, place = result.trajectory.session_id, result.trajectory.sample_index
        homes = [task.home] if task.home else list(self.peers)
        for home in homes:
            # without the task: it ended there, and every reader has it
            gone: Any = {"sessions": []} if task.home else None
            record = await self._asked(home, "GET", f"/v1/tasks/{quote(task_id)}", missing=gone)
            if record is None:
                continue
            holders = {each["sample_index"]: each["session_id"] for each in record["sessions"]}
            if holders.get(place) == session_id:
                self.journal.write(copies.forget_session_entry(session_id))
            else:
                taken = holders.get(place, home)
                entry = copies.retire_held_entry(result.trajectory, taken, at=result.at)
                self.journal.write(entry)
                self.scheduler.services.tally.lost(result.trajectory.outcome)
            self._change()
            return True
        return False

    async def _asked(
        self,
        journal: str,
        method: str,
        path: str,
        *,
        value: object = None,
        body: bytes | None = None,
        missing: Any = None,
    ) -> Any:
        """The JSON that a node answers, `missing` for 404; None when it is not reached, or refuses."""
        peer = self.peers.get(journal)
        answer = None if peer is None else await self.ask(peer, method, path, value=value, body=body)
        if peer is None or answer is None:
            return None
        status, found = answer
        if status == 404 and missing is not None:
            return missing
        if status >= 300:
            logger.warning("node %s refused %s %s: %s", peer.url, method, path, found)
            return None
        return found

    # ── finished tasks ────────────────────────────────────────────────────────

    async def _drop_finished(self) -> None:
        """Drop the copies of tasks whose `task` event every consumer that is waited for has acknowledged."""
        while True:
            await trio.sleep(DROP_S)
            try:
                if self._tasks:
                    await self._drop_acknowledged()
            except PolarnodeError as error:
                logger.warning("copies of finished tasks are kept: %s", error)

    async def _drop_acknowledged(self) -> None:
        acknowledged = self.journal.statistics().acknowledged_seq
        silent: set[str] = set()
        for task_id in await self.journal.query(copies.settled_copies, acknowledged):
            task = self._tasks.get(task_id)
            if task is None or task.role != "home" or task.second in silent or self._in_use(task_id):
                continue
            epoch = task.epoch
            if epoch.number:  # an earlier home may come back: the front knows when none is left
                if task_id not in self._acknowledged:
                    self._acknowledged.add(task_id)
                    self._change()
                continue
            if task.second:
                at = {"term": self.office.term, "epoch_term": epoch.term, "epoch_number": epoch.number}
                path = f"{FLEET}/{quote(task_id)}?{urlencode({**at, 'ended': 1})}"
                answer = await self._asked(task.second, "DELETE", path)
                if answer is None:
                    silent.add(task.second)
                    continue
                left = next(iter(structure(answer, CopyRows).tasks), None)
                if left is not None and left.epoch > epoch:
                    self._lose(Moved(task_id=task_id, epoch=left.epoch, home=left.home))
                    continue
            if task.epoch == epoch:
                await self.drop(task_id, epoch)

    def _change(self) -> None:
        self.changes += 1
        changed, self._changed = self._changed, trio.Event()
        changed.set()
