"""The order in which waiters enter a full stage: by priority, by cohort and by age.

This module is pure and reads no clock. The next waiter has the highest priority; among those, it is of a
cohort of which a member has entered before; then of the oldest cohort; then it is the one that came first. So
all members of a cohort that has begun enter before another cohort begins: the samples of a group end
together, and a training step does not wait for one session that was left behind. Within a priority nobody
waits forever, because cohorts begin in order of age and each has a limited number of members.
"""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Final, Generic, TypeVar
from weakref import WeakSet

from attrs import define, field

Waiter = TypeVar("Waiter", bound=Hashable)

_age_counter: Final = count()
SPARE: Final = 64  # stale heap entries that do not yet justify a rebuild: 8 KB


@define(eq=False)
class EntryCohort:
    """Waiters that should pass a stage together, such as the sessions of a group. The cohort with the smaller
    `age` is older. A stage forgets that a cohort has begun when nothing refers to the cohort any more.
    """

    age: int = field(factory=lambda: next(_age_counter), init=False)


@define(eq=False)
class WaitingLine(Generic[Waiter]):
    """The waiters of one stage. Every step is O(log waiters)."""

    # The waiters by cohort and priority. A dict keeps the order of arrival and removes any waiter in one
    # step.
    _waiting: dict[EntryCohort, dict[int, dict[Waiter, None]]] = field(factory=dict, init=False)
    _places: dict[Waiter, tuple[int, EntryCohort]] = field(factory=dict, init=False)
    # Entries are (-priority, not begun, age, cohort). There is a current entry for each priority at which a
    # cohort waits, and there may be outdated ones.
    _heap: list[tuple[int, bool, int, EntryCohort]] = field(factory=list, init=False)
    _most: int = field(default=SPARE, init=False)  # entries of the heap before it is rebuilt
    _begun: "WeakSet[EntryCohort]" = field(factory=WeakSet, init=False)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, waiter: Waiter, *, priority: int, cohort: EntryCohort) -> None:
        """Add a waiter behind those of the same cohort and priority."""
        self._places[waiter] = (priority, cohort)
        queues = self._waiting.setdefault(cohort, {})
        if priority not in queues:
            queues[priority] = {}
            self._list(priority, cohort)
        queues[priority][waiter] = None

    def discard(self, waiter: Waiter) -> bool:
        """Remove a waiter that gave up. Returns False if it is not waiting."""
        place = self._places.pop(waiter, None)
        if place is None:
            return False
        priority, cohort = place
        queues = self._waiting[cohort]
        del queues[priority][waiter]
        if not queues[priority]:
            del queues[priority]
        if not queues:
            del self._waiting[cohort]
        if not self._places:
            self._heap.clear()  # otherwise its entries would keep cohorts that are over in memory
        return True

    def first(self) -> Waiter:
        """The next waiter to enter, who stays in the line. Raises IndexError if nobody waits."""
        while True:
            priority, unbegun, _, cohort = self._heap[0]
            queue = self._waiting.get(cohort, {}).get(-priority)
            if queue is not None and unbegun is (cohort not in self._begun):
                return next(iter(queue))
            heapq.heappop(self._heap)

    def pop(self) -> Waiter:
        """Remove the next waiter to enter from the line, and return it. Raises IndexError if nobody waits."""
        waiter = self.first()
        _, cohort = self._places[waiter]
        self.discard(waiter)
        self.begin(cohort)
        return waiter

    def begin(self, cohort: EntryCohort) -> None:
        """Note that a member of this cohort has entered: its others go before cohorts that have not begun."""
        if cohort in self._begun:
            return
        self._begun.add(cohort)
        for priority in self._waiting.get(cohort, ()):
            self._list(priority, cohort)

    def _list(self, priority: int, cohort: EntryCohort) -> None:
        if len(self._heap) > self._most:  # many waiters gave up in the middle of the line
            listed = [(each, one) for one, queues in self._waiting.items() for each in queues]
            self._heap = [self._entry(*each) for each in listed]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SPARE
        heapq.heappush(self._heap, self._entry(priority, cohort))

    def _entry(self, priority: int, cohort: EntryCohort) -> tuple[int, bool, int, EntryCohort]:
        return -priority, cohort not in self._begun, cohort.age, cohort
