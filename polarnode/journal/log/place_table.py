"""The places of unfinished tasks at a node alone: which are queued, which run, and what is claimed next.

The table is pure and in memory. One process at a time has a journal open, so this process knows which places
run. What must outlive it (tasks, sessions and their ends) is in the journal's tables.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attrs import define, field

from polarnode.core.task import CAPTURE_HARNESS, TaskSpec
from polarnode.journal.log.port import Claim, ClaimOffer, EndingCause, FinishAnswer

# This many tasks of one priority are looked at together. Among them, tasks that run here and tasks with an
# image that is here go first. So a claim from a queue of 100,000 tasks costs no more than one from 512.
CLAIM_WINDOW = 512


@define(eq=False)
class _PlaceState:
    session_id: str
    attempt: int = -1  # the attempt of the session that has the place; -1 before the first one began
    retries: int = 0
    running: bool = False
    spent: bool = False  # it was lost once more than its task's retries allow


@define(eq=False)
class _OpenTask:
    """A task with places that are not over. `number` orders tasks by age: the oldest has the lowest."""

    number: int
    task_id: str
    spec: TaskSpec
    submitted: float
    idempotency_key: str | None
    places: dict[int, _PlaceState]
    cancelled: bool = False
    usable: int = 0  # the number of its finished sessions that are usable

    @property
    def ending_cause(self) -> EndingCause | None:
        if self.cancelled:
            return "cancelled"
        enough = self.spec.group.early_stop_min
        return "early stop" if enough is not None and self.usable >= enough else None

    @property
    def is_running(self) -> bool:
        return any(place.running for place in self.places.values())

    def queued_places(self, *, to_end: bool) -> Iterator[int]:
        """The queued places in order: with `to_end` those to end without a run, otherwise those to run."""
        stopped = self.ending_cause is not None
        return (
            index
            for index, place in self.places.items()
            if not place.running and (stopped or place.spent) is to_end
        )


@define(eq=False)
class PlaceTable:
    """The places of one node. Only claims of `incarnation`, the current one, hold any."""

    incarnation: int = 0
    open_places: int = field(default=0, init=False)
    _tasks: dict[str, _OpenTask] = field(factory=dict, init=False)
    _keys: set[str] = field(factory=set, init=False)  # the tasks' idempotency keys
    # by priority, the numbers and ids of tasks with places to run
    _queues: dict[int, list[tuple[int, str]]] = field(factory=dict, init=False)
    _tasks_to_end: dict[str, None] = field(factory=dict, init=False)  # ids of tasks with queued places to end
    _tasks_to_stop: dict[str, None] = field(factory=dict, init=False)  # ids of tasks that nobody should run
    _last_number: int = field(default=0, init=False)

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
        places = {index: _PlaceState(session_id=session_id) for index, session_id in enumerate(session_ids)}
        self._add_task(spec, task_id, idempotency_key, submitted, places)

    def add_unfinished(
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
        """Add a task of an earlier run of the process. `sessions` maps each place to the session that has it,
        its attempt, and whether it began; each attempt before it counts as a retry. Where the task is not
        `readable` no place is tried again.
        """
        places = {
            index: _PlaceState(
                session_id,
                attempt=attempt if began else attempt - 1,
                retries=attempt,
                running=began,
                spent=not readable,
            )
            for index, (session_id, attempt, began) in sessions.items()
        }
        task = self._add_task(spec, task_id, idempotency_key, submitted, places)
        task.usable, task.cancelled = usable, cancelled
        self._update_queues(task)

    def _add_task(
        self,
        spec: TaskSpec,
        task_id: str,
        idempotency_key: str | None,
        submitted: float,
        places: dict[int, _PlaceState],
    ) -> _OpenTask:
        self._last_number += 1
        task = _OpenTask(self._last_number, task_id, spec, submitted, idempotency_key, places)
        self._tasks[task_id] = task
        if idempotency_key is not None:
            self._keys.add(idempotency_key)
        self.open_places += len(places)
        self._update_queues(task)
        return task

    def has_task(self, task_id: str, idempotency_key: str | None) -> bool:
        """Whether a task with this id, or with this key, has places that are not over."""
        return task_id in self._tasks or idempotency_key in self._keys

    def cancel(self, task_id: str) -> bool:
        """Cancel a task. Returns False where all of its places are over."""
        task = self._tasks.get(task_id)
        if task is None:
            return False
        task.cancelled = True
        self._update_queues(task)
        return True

    def sessions_to_stop(self) -> dict[str, EndingCause]:
        """Map each running session that must be ended now to the cause."""
        return {
            place.session_id: task.ending_cause
            for task in map(self._tasks.__getitem__, self._tasks_to_stop)
            for place in task.places.values()
            if place.running and task.ending_cause is not None
        }

    # ── claims ────────────────────────────────────────────────────────────────

    def claim(self, offer: ClaimOffer, current: Mapping[str, str]) -> tuple[Claim, ...]:
        """Take up to `room` places. `current` maps each adapter ("" is the base) to its current version: a
        node that serves another version takes no place that needs it.
        """
        taken: list[Claim] = []
        for task in self._tasks_in_order(offer):
            if len(taken) >= offer.room:
                break
            if offer.begun_only and not task.is_running:
                continue
            versions = {name: current[name] for name in ("", task.spec.adapter) if name in current}
            if not task.spec.requires.items() <= offer.labels.items():
                continue
            if any(offer.serving.get(name) != version for name, version in versions.items()):
                continue
            queued = (
                index
                for index in task.queued_places(to_end=False)
                if (task.task_id, index) not in offer.avoided
            )
            chosen = tuple(islice(queued, offer.room - len(taken)))
            taken += self._take_places(task, chosen)
        return tuple(taken)

    def _tasks_in_order(self, offer: ClaimOffer) -> Iterator[_OpenTask]:
        """Tasks with places to run, ordered by priority, then whether they run here, then whether their image
        is here, then age.
        """
        for priority in sorted(self._queues, reverse=True):
            waiting = tuple(self._queues[priority])
            for start in range(0, len(waiting), CLAIM_WINDOW):
                tasks = [self._tasks[task_id] for _, task_id in waiting[start : start + CLAIM_WINDOW]]
                yield from sorted(
                    tasks, key=lambda task: (not task.is_running, task.spec.runtime.image not in offer.images)
                )

    def claim_endings(self, limit: int) -> tuple[Claim, ...]:
        """Take up to `limit` queued places that nobody should run."""
        taken: list[Claim] = []
        for task_id in tuple(self._tasks_to_end):
            task = self._tasks[task_id]
            chosen = tuple(islice(task.queued_places(to_end=True), limit - len(taken)))
            taken += self._take_places(task, chosen)
        return tuple(taken)

    def take_place(self, task_id: str, sample_index: int) -> Claim | None:
        """Take one place of a task by its number. None where it is not queued."""
        task = self._tasks.get(task_id)
        place = None if task is None else task.places.get(sample_index)
        if task is None or place is None or place.running:
            return None
        (claim,) = self._take_places(task, (sample_index,))
        return claim

    def claims(self) -> tuple[Claim, ...]:
        """The claims of all places that run."""
        return tuple(
            self._make_claim(task, index)
            for task in self._tasks.values()
            for index, place in task.places.items()
            if place.running
        )

    def _take_places(self, task: _OpenTask, chosen: Iterable[int]) -> list[Claim]:
        taken: list[Claim] = []
        for index in chosen:
            place = task.places[index]
            place.running, place.attempt = True, place.attempt + 1
            taken.append(self._make_claim(task, index))
        self._update_queues(task)
        return taken

    def _make_claim(self, task: _OpenTask, index: int) -> Claim:
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
            ending=task.ending_cause or ("retries spent" if place.spent else None),
        )

    # ── the end of a session ──────────────────────────────────────────────────

    def finish_claim(self, claim: Claim, *, usable: bool) -> FinishAnswer | None:
        """Fill a place. None where no such place is open: only the journal knows how it ended."""
        task = self._tasks.get(claim.task_id)
        place = None if task is None else task.places.get(claim.sample_index)
        if task is None or place is None:
            return None
        if not self._is_holder(claim, place):
            return "another"
        del task.places[claim.sample_index]
        task.usable += usable
        self._update_queues(task)
        self.open_places -= 1
        if task.places:
            return "now"
        del self._tasks[claim.task_id]
        if task.idempotency_key is not None:
            self._keys.discard(task.idempotency_key)
        self._tasks_to_stop.pop(claim.task_id, None)
        return "last"

    def put_back(
        self, claim: Claim, session_id: str, *, counts: bool, keep: bool
    ) -> tuple[bool, Claim | None]:
        """Queue a place for another session, whose id is given. With `keep` the place is not queued but
        claimed for that session at once. Returns whether the claim held the place, and the new claim if there
        is one.
        """
        task = self._tasks.get(claim.task_id)
        place = None if task is None else task.places.get(claim.sample_index)
        if task is None or place is None or not self._is_holder(claim, place):
            return False, None
        place.spent = place.spent or (counts and place.retries >= task.spec.budgets.retries)
        place.retries += counts
        place.running, place.session_id = False, session_id
        if keep and not place.spent and task.ending_cause is None:
            (kept,) = self._take_places(task, (claim.sample_index,))
            return True, kept
        self._update_queues(task)
        return True, None

    def _is_holder(self, claim: Claim, place: _PlaceState) -> bool:
        return (
            place.running and place.session_id == claim.session_id and claim.incarnation == self.incarnation
        )

    def _update_queues(self, task: _OpenTask) -> None:
        """Update the queues after a change of a task, which may have places to run, and places to end."""
        waiting = self._queues.setdefault(task.spec.priority, [])
        entry = (task.number, task.task_id)
        at = bisect_left(waiting, entry)
        listed = at < len(waiting) and waiting[at] == entry
        if task.spec.harness.name != CAPTURE_HARNESS and any(True for _ in task.queued_places(to_end=False)):
            if not listed:
                insort(waiting, entry)
        elif listed:
            del waiting[at]
        if not waiting:
            del self._queues[task.spec.priority]
        if any(True for _ in task.queued_places(to_end=True)):
            self._tasks_to_end[task.task_id] = None
        else:
            self._tasks_to_end.pop(task.task_id, None)
        if task.ending_cause is not None:
            self._tasks_to_stop[task.task_id] = None
