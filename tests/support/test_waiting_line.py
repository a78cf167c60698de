"""The order of a full stage's line: what a reader of the rule would pick, whatever came and went before."""

import gc
import weakref

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polarnode.support.waiting_line import SPARE, EntryCohort, WaitingLine

COHORTS = 5


@define(eq=False)
class Naive:
    """The rule of the module's docstring, by sorting."""

    waiting: list[tuple[int, int, EntryCohort]] = field(
        factory=list
    )  # number, priority, cohort: as they came
    begun: set[EntryCohort] = field(factory=set)

    def pop(self) -> int:
        def rank(each: tuple[int, int, EntryCohort]) -> tuple[int, bool, int, int]:
            number, priority, cohort = each
            return -priority, cohort not in self.begun, cohort.age, number

        first = min(self.waiting, key=rank)
        self.waiting.remove(first)
        self.begun.add(first[2])
        return first[0]


class Line(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.line: WaitingLine[int] = WaitingLine()
        self.naive = Naive()
        self.cohorts = [EntryCohort() for _ in range(COHORTS)]
        self.came = 0

    @rule(cohort=st.integers(0, COHORTS - 1), priority=st.sampled_from([-1, 50, 90]))
    def comes(self, cohort: int, priority: int) -> None:
        self.line.add(self.came, priority=priority, cohort=self.cohorts[cohort])
        self.naive.waiting.append((self.came, priority, self.cohorts[cohort]))
        self.came += 1

    @precondition(lambda self: self.naive.waiting)
    @rule(times=st.integers(1, 3))
    def enter(self, times: int) -> None:
        for _ in range(min(times, len(self.naive.waiting))):
            assert self.line.pop() == self.naive.pop()

    @rule(cohort=st.integers(0, COHORTS - 1))
    def enters_at_once(self, cohort: int) -> None:
        self.line.begin(self.cohorts[cohort])
        self.naive.begun.add(self.cohorts[cohort])

    @precondition(lambda self: self.naive.waiting)
    @rule(place=st.integers(0, 99))
    def gives_up(self, place: int) -> None:
        number = self.naive.waiting.pop(place % len(self.naive.waiting))[0]
        assert self.line.discard(number)
        assert not self.line.discard(number)

    @rule()
    def comes_again_later(self) -> None:
        """A cohort that is over, and another in its place."""
        gone = self.cohorts[0]
        if all(cohort is not gone for *_, cohort in self.naive.waiting):
            self.cohorts[0] = EntryCohort()

    @invariant()
    def as_many_wait(self) -> None:
        assert len(self.line) == len(self.naive.waiting)

    def teardown(self) -> None:
        if hasattr(self, "line"):
            while self.naive.waiting:
                assert self.line.pop() == self.naive.pop()
            assert not self.line


Line.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLine = Line.TestCase


@given(st.lists(st.integers(0, COHORTS - 1), min_size=1, max_size=40), st.data())
def test_group_members_enter_together(coming: list[int], data: st.DataObject) -> None:
    """The members of a group enter one after another."""
    line: WaitingLine[int] = WaitingLine()
    groups = [EntryCohort() for _ in range(COHORTS)]
    for place in data.draw(st.permutations(range(len(coming)))):
        line.add(place, priority=50, cohort=groups[coming[place]])
    assert [coming[line.pop()] for _ in coming] == sorted(coming)


def test_begun_group_precedes_older_unbegun() -> None:
    """A group that has begun goes before an older one that has not."""
    line: WaitingLine[str] = WaitingLine()
    older, younger = EntryCohort(), EntryCohort()
    line.begin(younger)
    for name in ("older", "younger"):
        line.add(name, priority=50, cohort=older if name == "older" else younger)
    line.add("urgent", priority=51, cohort=EntryCohort())
    assert [line.pop() for _ in range(3)] == ["urgent", "younger", "older"]


def test_empty_line_refuses_pop() -> None:
    line: WaitingLine[int] = WaitingLine()
    with pytest.raises(IndexError):
        line.pop()
    line.add(1, priority=0, cohort=EntryCohort())
    assert line.discard(1)
    with pytest.raises(IndexError):
        line.pop()


def test_those_that_give_up_leave_nothing_behind() -> None:
    line: WaitingLine[int] = WaitingLine()
    first, group = EntryCohort(), EntryCohort()
    line.add(-1, priority=90, cohort=first)
    for number in range(100 * SPARE):
        line.add(number, priority=50, cohort=group)
        line.discard(number)
    assert len(line._heap) <= 2 * SPARE
    kept = weakref.ref(group)
    del group
    assert line.pop() == -1
    gc.collect()
    assert kept() is None
