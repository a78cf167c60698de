"""Who enters a full stage next: a line by priority, by cohort and by age.

Pure, no clock. The next one is of the highest priority that waits; then of a cohort of which somebody has
entered before; then of the oldest cohort; then the one that came first. So the members of a cohort go one
after another, and all of one that has begun go before another begins: the samples of a group end together,
and the last session of a training step is not one that was left behind at a gate. Nobody waits for ever
within a priority: cohorts begin in order of age, and those that have begun have only so many members.
"""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Final, Generic, TypeVar
from weakref import WeakSet

from attrs import define, field

Waiter = TypeVar("Waiter", bound=Hashable)

_ages: Final = count()
SPARE: Final = 64  # entries of a heap for nobody that are not worth making it again: 8 KB


@define(eq=False)
class Cohort:
    """Those that should pass a stage together, as the sessions of a group. The one with the smaller `age` is
    older. A stage forgets that it has begun when nobody holds it any more.
    """

    age: int = field(factory=lambda: next(_ages), init=False)


@define(eq=False)
class WaitingLine(Generic[Waiter]):
    """The waiters of one stage. Every step is O(log waiters)."""

    # by cohort and priority; a dict keeps the order of arrival and forgets anyone at once
    _waiting: dict[Cohort, dict[int, dict[Waiter, None]]] = field(factory=dict, init=False)
    _places: dict[Waiter, tuple[int, Cohort]] = field(factory=dict, init=False)
    # (-priority, not begun, age, cohort): an entry as it is now for each priority at which a cohort
    # waits, and some of before
    _heap: list[tuple[int, bool, int, Cohort]] = field(factory=list, init=False)
    _most: int = field(default=SPARE, init=False)  # entries of the heap before it is made again
    _begun: "WeakSet[Cohort]" = field(factory=WeakSet, init=False)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, waiter: Waiter, *, priority: int, cohort: Cohort) -> None:
        """Let somebody wait, behind those of the same cohort and priority."""
        self._places[waiter] = (priority, cohort)
        queues = self._waiting.setdefault(cohort, {})
        if priority not in queues:
            queues[priority] = {}
            self._list(priority, cohort)
        queues[priority][waiter] = None

    def discard(self, waiter: Waiter) -> bool:
        """Forget somebody who gave up. False where nobody of this name waits."""
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
            self._heap.clear()  # or its entries would keep cohorts that are over
        return True

    def first(self) -> Waiter:
        """The next to enter, who goes on waiting. Raises IndexError when nobody waits."""
        while True:
            priority, unbegun, _, cohort = self._heap[0]
            queue = self._waiting.get(cohort, {}).get(-priority)
            if queue is not None and unbegun is (cohort not in self._begun):
                return next(iter(queue))
            heapq.heappop(self._heap)

    def pop(self) -> Waiter:
        """The next to enter, who waits no more. Raises IndexError when nobody waits."""
        waiter = self.first()
        _, cohort = self._places[waiter]
        self.discard(waiter)
        self.begin(cohort)
        return waiter

    def begin(self, cohort: Cohort) -> None:
        """Somebody of this cohort has entered: the others of it go before cohorts that have not begun."""
        if cohort in self._begun:
            return
        self._begun.add(cohort)
        for priority in self._waiting.get(cohort, ()):
            self._list(priority, cohort)

    def _list(self, priority: int, cohort: Cohort) -> None:
        if len(self._heap) > self._most:  # many gave up in the middle of the line
            listed = [(each, one) for one, queues in self._waiting.items() for each in queues]
            self._heap = [self._entry(*each) for each in listed]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SPARE
        heapq.heappush(self._heap, self._entry(priority, cohort))

    def _entry(self, priority: int, cohort: Cohort) -> tuple[int, bool, int, Cohort]:
        return -priority, cohort not in self._begun, cohort.age, cohort
