"""Whatever happens to whom and when: one trajectory a session, within the laws, and nothing left open."""

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from session_kit import MemoryNode, agent, town
from trio.testing import MockClock

from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import HarnessSpec, PrepareStep, RuntimeSpec

# a coarse grid, so that things happen in the same instant
TIMES = st.integers(0, 240).map(lambda quarters: quarters / 4)
ENDS: st.SearchStrategy[Any] = st.sampled_from([0, 0, 3, RuntimeFault("in the run"), KeyError("a bug")])
EVALUATORS = st.sampled_from(
    ["COUNTS", "COUNTS", "RAISES", "EXITS", "HANGS", "HANGS_AND_FALLS", "NAN", "ODD"]
)
BUILDERS = st.sampled_from(["", "", "broken_builder", "garbage_builder"])
BUDGETS = st.fixed_dictionaries(
    {
        "init_s": st.sampled_from([3.0, 30.0]),
        "run_s": st.sampled_from([2.0, 20.0]),
        "post_s": st.sampled_from([1.0, 10.0]),
    },
    optional={"max_turns": st.integers(1, 3), "max_tokens": st.integers(1, 9)},
)


@frozen(kw_only=True)
class Group:
    """A task that comes at a time."""

    at: float
    samples: int
    priority: int
    harness: dict[str, Any]
    prepares: float
    fails_to_prepare: bool
    evaluator: str
    budgets: dict[str, Any]


@frozen(kw_only=True)
class Blow:
    """What happens at a time; `whom` picks a task or a container."""

    at: float
    what: str
    whom: int


HARNESSES = st.fixed_dictionaries(
    {
        "turns": st.integers(0, 4),
        "each": st.sampled_from([0.25, 1.0, 6.0]),
        "ends": ENDS,
        "endless": st.sampled_from([False, False, True]),
    }
)
GROUPS = st.builds(
    Group, at=TIMES, samples=st.integers(1, 3), priority=st.integers(0, 3), harness=HARNESSES, prepares=st.sampled_from([0.0, 2.0, 5.0]),
    fails_to_prepare=st.sampled_from([False, False, False, True]), evaluator=EVALUATORS, budgets=BUDGETS,
)  # fmt: skip
BLOWS = st.builds(
    Blow,
    at=TIMES,
    what=st.sampled_from(["cancel", "fault", "slow", "kill", "bug", "stop"]),
    whom=st.integers(0, 5),
)
LIMITS = st.fixed_dictionaries({name: st.integers(1, 4) for name in ("live", "init", "run", "post")})


async def send(place: MemoryNode, number: int, group: Group) -> None:
    await trio.sleep(group.at)
    steps = (
        PrepareStep(argv=("sleep", str(group.prepares))),
        PrepareStep(argv=("false" if group.fails_to_prepare else "true",)),
    )
    try:
        place.submit(
            task_id=str(number), num_samples=group.samples, priority=group.priority, evaluator=group.evaluator, budgets=group.budgets,
            harness=HarnessSpec(name="shell", command=(f"agent{number}",)), runtime=RuntimeSpec(prepare=steps),
        )  # fmt: skip
    except Refused:
        assert place.scheduler.registry.stopping


async def strike(place: MemoryNode, blow: Blow) -> None:
    await trio.sleep(blow.at)
    match blow.what:
        case "cancel":
            await place.scheduler.cancel(str(blow.whom))
        case "fault":
            place.runtimes.faults.append(RuntimeFault("does not start"))
        case "slow":
            place.runtimes.takes.append(4.0)
        case "kill" if place.runtimes.opened:
            place.runtimes.opened[blow.whom % len(place.runtimes.opened)].alive = False
        # twice in one instant would be more than a session can say of itself
        case "bug" if not place.notes.refuse:
            place.notes.refuse.append(TypeError("can not be packed"))
        case "stop" if blow.at > 20:
            await place.scheduler.registry.stop(cancel=blow.whom % 2 == 0)


def play(
    groups: Sequence[Group], blows: Sequence[Blow], limits: dict[str, int], *, force_at: float | None
) -> MemoryNode:
    """All of it in virtual time; with `force_at` the node is left by force then."""
    programs = {f"agent{number}": agent(**group.harness) for number, group in enumerate(groups)}
    seen: list[MemoryNode] = []

    async def main(folder: Path) -> None:
        with trio.move_on_after(force_at) if force_at is not None else trio.CancelScope():
            async with town(folder, programs, **limits) as place:
                seen.append(place)
                async with trio.open_nursery() as nursery:
                    for number, group in enumerate(groups):
                        nursery.start_soon(send, place, number, group)
                    for blow in blows:
                        nursery.start_soon(strike, place, blow)

    with TemporaryDirectory() as folder:
        trio.run(main, Path(folder), clock=MockClock(autojump_threshold=0))
    return seen[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(GROUPS, min_size=1, max_size=4), st.lists(BLOWS, max_size=6), LIMITS)
def test_every_session_ends_in_one_trajectory(
    groups: list[Group], blows: list[Blow], limits: dict[str, int]
) -> None:
    """What holds at the end is checked where the town is left; here, that outcomes say what can be
    acted on.
    """
    logging.disable(logging.CRITICAL)  # bugs are logged with their traces, thousands of them here
    place = play(groups, blows, limits, force_at=None)
    logging.disable(logging.NOTSET)
    for found in place.published:
        outcome = found.outcome
        assert (outcome.status == "error") == (outcome.boundary is not None)
        assert outcome.status == "completed" or outcome.reason
        assert (outcome.status == "timeout") <= (outcome.clock is not None)
        assert (found.reward is not None) <= (outcome.status in ("completed", "failed", "timeout"))
        assert (outcome.status == "cancelled") <= (found.timing.post_s == 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(GROUPS, min_size=1, max_size=4), st.lists(BLOWS, max_size=4), LIMITS, TIMES)
def test_forced_exit_leaves_nothing_open(
    groups: list[Group], blows: list[Blow], limits: dict[str, int], force_at: float
) -> None:
    """A node left by force leaves nothing open."""
    logging.disable(logging.CRITICAL)
    place = play(groups, blows, limits, force_at=force_at + 0.001)  # once it is open
    logging.disable(logging.NOTSET)
    place.check_left()
    ended = [each.session_id for each in place.published]
    assert len(set(ended)) == len(ended)
    assert set(ended) <= {each.session_id for each in place.notes.started}
