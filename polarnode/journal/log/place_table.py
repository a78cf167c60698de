"""The places of unfinished tasks at a node alone: which are queued, which run, and what is claimed next.

Pure, and in memory: one process at a time has a journal open, so which of its places run is known here. What
must outlive the process, tasks, sessions and their ends, is in the journal's tables.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attrs import define, field

from polarnode.core.task import CAPTURE, TaskSpec
from polarnode.journal.log.port import Claim, EndingCause, FinishAnswer, Offer

# Tasks of one priority that are looked at together: those that run here and those with an image that is here
# go first among so many, and a claim from a queue of 100,000 tasks costs no more than one from 512.
LOOKED_AT = 512


@define(eq=False)
class _Place:
    session_id: str
    attempt: int = -1  # of the session that has it; none has begun yet
    retries: int = 0
    running: bool = False
    spent: bool = False  # lost once more than its task's retries allow


@define(eq=False)
class _Task:
    """A task with places that are not over. `number` is its age, the oldest has the least."""

    number: int
    task_id: str
    spec: TaskSpec
    submitted: float
    idempotency_key: str | None
    places: dict[int, _Place]
    cancelled: bool = False
    usable: int = 0  # of its sessions that are over

    @property
    def ending(self) -> EndingCause | None:
        if self.cancelled:
            return "cancelled"
        enough = self.spec.group.early_stop_min
        return "early stop" if enough is not None and self.usable >= enough else None

    @property
    def runs(self) -> bool:
        return any(place.running for place in self.places.values())

    def queued(self, *, to_end: bool) -> Iterator[int]:
        """The queued places that are to be ended, or to be run, in order."""
        stopped = self.ending is not None
        return (
            index
            for index, place in self.places.items()
            if not place.running and (stopped or place.spent) is to_end
        )


@define(eq=False)
class PlaceTable:
    """The places of one node. `incarnation` is the only one that holds any."""

    incarnation: int = 0
    open_places: int = field(default=0, init=False)
    _tasks: dict[str, _Task] = field(factory=dict, init=False)
    _keys: set[str] = field(factory=set, init=False)  # the tasks' idempotency keys
    # by priority, the numbers of tasks with places to run, and their ids
    _waiting: dict[int, list[tuple[int, str]]] = field(factory=dict, init=False)
    _to_end: dict[str, None] = field(factory=dict, init=False)  # tasks with queued places to end, by id
    _stopped: dict[str, None] = field(factory=dict, init=False)  # tasks that nobody should run any more
    _numbers: int = field(default=0, init=False)

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(
        self,
        spec: TaskSpec,
        *,
        task_id: str,
        session_ids: Iterable[str],
        idempotency_key: str | None,
        submitted: float,
    ) -> None:
        """Queue the places of a task."""
        places = {index: _Place(session_id=session_id) for index, session_id in enumerate(session_ids)}
        self._add(spec, task_id, idempotency_key, submitted, places)

    def inherit(
        self,
        spec: TaskSpec,
        *,
        task_id: str,
        idempotency_key: str | None,
        submitted: float,
        sessions: Mapping[int, tuple[str, int, bool]],
        usable: int,
        cancelled: bool,
        readable: bool,
    ) -> None:
        """Add a task of an earlier run of the process. `sessions`: by place, the session that has it, its
        attempt, and whether it began; each attempt before it counts as a retry. Where the task is not
        `readable` none is tried again.
        """
        places = {
            index: _Place(
                session_id,
                attempt=attempt if began else attempt - 1,
                retries=attempt,
                running=began,
                spent=not readable,
            )
            for index, (session_id, attempt, began) in sessions.items()
        }
        task = self._add(spec, task_id, idempotency_key, submitted, places)
        task.usable, task.cancelled = usable, cancelled
        self._requeue(task)

    def _add(
        self,
        spec: TaskSpec,
        task_id: str,
        idempotency_key: str | None,
        submitted: float,
        places: dict[int, _Place],
    ) -> _Task:
        self._numbers += 1
        task = _Task(self._numbers, task_id, spec, submitted, idempotency_key, places)
        self._tasks[task_id] = task
        if idempotency_key is not None:
            self._keys.add(idempotency_key)
        self.open_places += len(places)
        self._requeue(task)
        return task

    def has(self, task_id: str, idempotency_key: str | None) -> bool:
        """Whether a task of this id, or of this key, has places that are not over."""
        return task_id in self._tasks or idempotency_key in self._keys

    def cancel(self, task_id: str) -> bool:
        """Cancel a task; False where it has no place that is not over."""
        task = self._tasks.get(task_id)
        if task is None:
            return False
        task.cancelled = True
        self._requeue(task)
        return True

    def to_stop(self) -> dict[str, EndingCause]:
        """By session, why those that run must be ended now."""
        return {
            place.session_id: task.ending
            for task in map(self._tasks.__getitem__, self._stopped)
            for place in task.places.values()
            if place.running and task.ending is not None
        }

    # ── claims ────────────────────────────────────────────────────────────────

    def claim(self, offer: Offer, current: Mapping[str, str]) -> tuple[Claim, ...]:
        """Take up to `room` places. `current`: by adapter ("" is the base), the version that counts; a node
        that serves another takes nothing of it.
        """
        taken: list[Claim] = []
        for task in self._in_order(offer):
            if len(taken) >= offer.room:
                break
            if offer.begun_only and not task.runs:
                continue
            versions = {name: current[name] for name in ("", task.spec.adapter) if name in current}
            if not task.spec.requires.items() <= offer.labels.items():
                continue
            if any(offer.serving.get(name) != version for name, version in versions.items()):
                continue
            queued = (
                index for index in task.queued(to_end=False) if (task.task_id, index) not in offer.avoided
            )
            chosen = tuple(islice(queued, offer.room - len(taken)))
            taken += self._take(task, chosen)
        return tuple(taken)

    def _in_order(self, offer: Offer) -> Iterator[_Task]:
        """Tasks with places to run: by priority, then those that run here, then those with an image that is
        here, then by age.
        """
        for priority in sorted(self._waiting, reverse=True):
            waiting = tuple(self._waiting[priority])
            for start in range(0, len(waiting), LOOKED_AT):
                tasks = [self._tasks[task_id] for _, task_id in waiting[start : start + LOOKED_AT]]
                yield from sorted(
                    tasks, key=lambda task: (not task.runs, task.spec.runtime.image not in offer.images)
                )

    def claim_endings(self, limit: int) -> tuple[Claim, ...]:
        """Take up to so many places that nobody should run."""
        taken: list[Claim] = []
        for task_id in tuple(self._to_end):
            task = self._tasks[task_id]
            chosen = tuple(islice(task.queued(to_end=True), limit - len(taken)))
            taken += self._take(task, chosen)
        return tuple(taken)

    def take(self, task_id: str, sample_index: int) -> Claim | None:
        """Take one place by its name; None where it is not queued."""
        task = self._tasks.get(task_id)
        place = None if task is None else task.places.get(sample_index)
        if task is None or place is None or place.running:
            return None
        (claim,) = self._take(task, (sample_index,))
        return claim

    def claims(self) -> tuple[Claim, ...]:
        """All that run."""
        return tuple(
            self._claim(task, index)
            for task in self._tasks.values()
            for index, place in task.places.items()
            if place.running
        )

    def _take(self, task: _Task, chosen: Iterable[int]) -> list[Claim]:
        taken: list[Claim] = []
        for index in chosen:
            place = task.places[index]
            place.running, place.attempt = True, place.attempt + 1
            taken.append(self._claim(task, index))
        self._requeue(task)
        return taken

    def _claim(self, task: _Task, index: int) -> Claim:
        place = task.places[index]
        return Claim(
            task_id=task.task_id,
            sample_index=index,
            session_id=place.session_id,
            attempt=place.attempt,
            incarnation=self.incarnation,
            retries=place.retries,
            spec=task.spec,
            submitted=task.submitted,
            idempotency_key=task.idempotency_key,
            ending=task.ending or ("retries spent" if place.spent else None),
        )

    # ── the end of a session ──────────────────────────────────────────────────

    def finish(self, claim: Claim, *, usable: bool) -> FinishAnswer | None:
        """Fill a place. None where no such place is open: the journal knows how it ended."""
        task = self._tasks.get(claim.task_id)
        place = None if task is None else task.places.get(claim.sample_index)
        if task is None or place is None:
            return None
        if not self._holds(claim, place):
            return "another"
        del task.places[claim.sample_index]
        task.usable += usable
        self._requeue(task)
        self.open_places -= 1
        if task.places:
            return "now"
        del self._tasks[claim.task_id]
        if task.idempotency_key is not None:
            self._keys.discard(task.idempotency_key)
        self._stopped.pop(claim.task_id, None)
        return "last"

    def put_back(
        self, claim: Claim, session_id: str, *, counts: bool, keep: bool
    ) -> tuple[bool, Claim | None]:
        """Queue a place for another session, whose id is given, or with `keep` hold it for that. Gives
        whether the place was the claim's, and the claim that follows.
        """
        task = self._tasks.get(claim.task_id)
        place = None if task is None else task.places.get(claim.sample_index)
        if task is None or place is None or not self._holds(claim, place):
            return False, None
        place.spent = place.spent or (counts and place.retries >= task.spec.budgets.retries)
        place.retries += counts
        place.running, place.session_id = False, session_id
        if keep and not place.spent and task.ending is None:
            (kept,) = self._take(task, (claim.sample_index,))
            return True, kept
        self._requeue(task)
        return True, None

    def _holds(self, claim: Claim, place: _Place) -> bool:
        return (
            place.running and place.session_id == claim.session_id and claim.incarnation == self.incarnation
        )

    def _requeue(self, task: _Task) -> None:
        """Note anew whether a task has places to run, and places to end."""
        waiting = self._waiting.setdefault(task.spec.priority, [])
        entry = (task.number, task.task_id)
        at = bisect_left(waiting, entry)
        listed = at < len(waiting) and waiting[at] == entry
        if task.spec.harness.name != CAPTURE and any(True for _ in task.queued(to_end=False)):
            if not listed:
                insort(waiting, entry)
        elif listed:
            del waiting[at]
        if not waiting:
            del self._waiting[task.spec.priority]
        if any(True for _ in task.queued(to_end=True)):
            self._to_end[task.task_id] = None
        else:
            self._to_end.pop(task.task_id, None)
        if task.ending is not None:
            self._stopped[task.task_id] = None
