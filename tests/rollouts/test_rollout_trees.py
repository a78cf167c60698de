"""Trees on a scheduler with containers in memory and a real journal: when forks begin, of which state, and how
their group ends, whatever happens meanwhile.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from attrs import evolve
from fakes_runtime import Call, ProgramFunction
from keeper_kit import KEEPER_HARNESS
from keeper_kit import programs as keepers
from session_kit import agent, life, submit, task

from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import ForkPolicy, ForkSpec, GroupSpec, SnapshotSpec, TaskSpec
from polarnode.groups import Group, forests_of, read_group, rows_of, tree_rows_of
from polarnode.journal import queries
from polarnode.journal.finished_groups import finished_groups
from polarnode.journal.forks import forks
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import NodeFacts
from polarnode.journal.values import EventFilters
from polarnode.rollouts.forks import tree_way
from polarnode.rollouts.recovery import recover

POLICY = ForkPolicy(at=(1, 3), per_session=2)


def tree(policy: ForkPolicy = POLICY, *, samples: int = 6, **more: Any) -> TaskSpec:
    requires = more.pop("group", {})
    return task(task_id="t", num_samples=samples, group=GroupSpec(fork=policy, **requires), **more)


def ordered(*programs: ProgramFunction) -> ProgramFunction:
    """A harness whose sessions run these programs, in the order in which they begin; further ones the last."""
    left = list(programs)

    async def program(call: Call) -> int:
        run = left.pop(0) if len(left) > 1 else left[0]
        setattr(run, "sessions_by_key", program.sessions_by_key)  # type: ignore[attr-defined]  # noqa: B010
        return int(await run(call))

    return program


FOUR = agent(turns=4, each=0.01)


async def grown(folder: Path, spec: TaskSpec, program: ProgramFunction = FOUR) -> Group:
    async with life(folder / "journal.sqlite", {"agent": program}) as (_, scheduler, _):
        await submit(scheduler, spec)
    return await group_in(folder)


async def group_in(folder: Path) -> Group:
    """The group of the task, with its sessions, from the one event that says that it is over."""
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        page = await journal.reader.events(0, filters=EventFilters(kinds=frozenset({"group"})))
        [event] = page.events
        group = read_group(orjson.loads(event.body))
        found = [
            await journal.reader.query(queries.trajectory, member.session_id) for member in group.members
        ]
    return group.holding(each for each in found if each is not None)


def states(group: Group) -> list[tuple[int, int, int] | None]:
    """Of each place: the place of its root, the turn it was forked before, the turns it inherited."""
    places = {each.session_id: each.sample_index for each in group.trajectories}
    forks = [each.forked_from for each in group.trajectories]
    return [fork and (places[fork.session_id], fork.turn, fork.got) for fork in forks]


async def test_forks_join_group_of_roots(tmp_path: Path) -> None:
    """Forks take the states of their roots, and are one group with them."""
    group = await grown(tmp_path, tree())
    assert (group.state, group.reason) == ("complete", None)
    assert states(group) == [None, None, (0, 1, 1), (0, 3, 3), (1, 1, 1), (1, 3, 3)]
    assert {each.forked_from.by for each in group.trajectories if each.forked_from} == {"replay"}
    rows = tree_rows_of(forests_of([group]))
    assert sum(row.tokens for row in rows) == sum(each.sampled_tokens for each in group.trajectories)
    with pytest.raises(Refused, match=r"group t is a tree .*use tree_rows_of"):
        rows_of([group])


async def test_forks_are_listed_and_marked(tmp_path: Path) -> None:
    """The forks of a session are listed, and marked in their group."""
    group = await grown(tmp_path, tree(budgets={"retries": 1}))
    root, *_, last = group.trajectories
    path = tmp_path / "journal.sqlite"
    async with life(path, {"agent": FOUR}) as (_, scheduler, _):
        fork = ForkSpec(session=root.session_id, turn=2, by="replay")
        _, (later,) = await submit(scheduler, task(task_id="later", fork=fork))
    async with open_journal(path, now=time.time) as journal:
        names = [each.session_id for each in group.trajectories]
        assert [each.session_id for each in await journal.reader.query(forks, names[0], 10)] == [
            *names[2:4],
            later,
        ]
        assert [each.session_id for each in await journal.reader.query(forks, names[0], 1)] == [names[2]]
        assert await journal.reader.query(forks, later, 10) == ()
        record = await journal.reader.query(queries.session, last.session_id)
        assert record is not None
        assert record.forked_from == last.forked_from
        shown = {
            each["task_id"]: each["sessions"]
            for each in await journal.reader.query(finished_groups, 9, None, None, None)
        }
        marks = [each["forked_from"] and each["forked_from"]["turn"] for each in shown["t"]]
        assert (marks, shown["later"][0]["forked_from"]["turn"]) == ([None, None, 1, 3, 1, 3], 2)


async def test_root_without_state_loses_only_forks(tmp_path: Path) -> None:
    lost = agent(turns=4, each=0.01, ends=RuntimeFault("the container died"))
    one_turn = agent(turns=1, each=0.01)
    spec = tree(samples=9, group={"min_usable": 5})
    group = await grown(tmp_path, spec, ordered(lost, one_turn, FOUR))
    assert Counter(states(group)[3:]) == {None: 4, **dict.fromkeys(filter(None, states(group)), 1)}
    whys = [member.why for member in group.members]
    assert whys.count("not forked") == 4
    assert whys.count("lost to the machine: runtime") == 1
    reasons = [str(each.outcome.reason) for each in group.trajectories if "not forked" in str(each.outcome)]
    assert sum("is not usable (lost to the machine: runtime)" in each for each in reasons) == 2
    assert sum("has no turn of group.fork.at with one of its main agent" in each for each in reasons) == 2
    # two of three roots, and two forks
    assert (group.state, whys.count(None)) == ("dropped", 4)
    assert group.reason == (
        "too few: 4 of 9 sessions are usable, 5 are wanted (1 lost to the machine, 4 not forked)"
    )


async def test_retried_root_is_forked_when_over(tmp_path: Path) -> None:
    lost = agent(turns=2, each=0.01, ends=RuntimeFault("the container died"))
    group = await grown(tmp_path, tree(samples=3, budgets={"retries": 1}), ordered(lost, FOUR))
    assert states(group) == [None, (0, 1, 1), (0, 3, 3)]
    assert [each.attempt for each in group.trajectories] == [1, 0, 0]


async def test_lost_fork_keeps_its_turn(tmp_path: Path) -> None:
    """A fork that the machine lost is forked before the same turn again."""
    lost = agent(turns=2, each=0.01, ends=RuntimeFault("the container died"))
    spec = tree(ForkPolicy(at=(3,), per_session=1), samples=2, budgets={"retries": 1})
    group = await grown(tmp_path, spec, ordered(FOUR, lost, FOUR))
    assert states(group) == [None, (0, 3, 3)]
    assert [each.attempt for each in group.trajectories] == [0, 1]


async def test_complete_group_begins_no_fork(tmp_path: Path) -> None:
    group = await grown(tmp_path, tree(samples=3, group={"early_stop_min": 1}))
    assert group.state == "early"
    assert [member.why for member in group.members] == [None, "early stop", "early stop"]
    assert states(group) == [None] * 3


async def test_cancelled_tree_begins_no_fork(tmp_path: Path) -> None:
    slow = agent(turns=1, each=0.01, endless=True)
    async with life(tmp_path / "journal.sqlite", {"agent": slow}) as (_, scheduler, place):
        await submit(scheduler, tree())
        await place.scheduler.services.containers.ensure_image("any")  # a checkpoint: all have begun
        assert await scheduler.cancel("t")
    group = await group_in(tmp_path)
    assert {each.outcome.status for each in group.trajectories} == {"cancelled"}
    assert not any(each.forked_from for each in group.trajectories)


async def begun(journal: Journal, over: Sequence[str], running: Sequence[str]) -> bool:
    """Whether the sessions `over` have all turns, and one that is `running` has some."""
    turns = {name: len(await journal.reader.query(queries.turns, name)) for name in (*over, *running)}
    return all(turns[name] == 4 for name in over) and any(turns[name] for name in running)


@pytest.mark.parametrize("after", [0, 2], ids=["while roots run", "while forks run"])
async def test_killed_node_continues_its_tree(tmp_path: Path, after: int) -> None:
    path = tmp_path / "journal.sqlite"
    endless = agent(turns=4, each=0.01, endless=True)
    first = ordered(*[FOUR] * after, endless)
    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        async with life(path, {"agent": first}) as (journal, scheduler, _):
            _, names = await submit(scheduler, tree(budgets={"retries": 1}))
            with trio.fail_after(30):
                while not await begun(journal, names[: after or 2], names[after:]):  # noqa: ASYNC110
                    await trio.sleep(0.02)
            raise KeyError("as if it were killed")
    async with life(path, {"agent": FOUR}) as (journal, scheduler, _):
        await recover(journal, scheduler, NodeFacts(name="n1"), lambda _: None)
    group = await group_in(tmp_path)
    assert (group.state, group.reason) == ("complete", None)
    assert states(group) == [None, None, (0, 1, 1), (0, 3, 3), (1, 1, 1), (1, 3, 3)]
    assert sum(each.attempt for each in group.trajectories) == 6 - after


# ── resumed ───────────────────────────────────────────────────────────────────


async def test_forks_resume_only_from_snapshots(tmp_path: Path) -> None:
    """Where there are snapshots forks are resumed, and only before those turns."""
    spec = evolve(tree(ForkPolicy(at="even", per_session=2), samples=3), harness=KEEPER_HARNESS)
    spec = evolve(spec, snapshot_at=SnapshotSpec(turns=(0, 1, 3)))
    async with life(tmp_path / "journal.sqlite", keepers()) as (_, scheduler, _):
        await submit(scheduler, spec)
    group = await group_in(tmp_path)
    assert group.state == "complete", group
    assert states(group) == [None, (0, 1, 1), (0, 3, 3)]
    assert {each.forked_from.by for each in group.trajectories if each.forked_from} == {"resume"}


async def test_unsnapshotted_session_is_not_resumed(tmp_path: Path) -> None:
    spec = evolve(tree(ForkPolicy(per_session=1), samples=2), harness=KEEPER_HARNESS)
    spec = evolve(spec, snapshot_at=SnapshotSpec(turns=(9,)))
    async with life(tmp_path / "journal.sqlite", keepers()) as (_, scheduler, _):
        await submit(scheduler, spec)
    [root, fork] = (await group_in(tmp_path)).trajectories
    assert fork.outcome.reason == (
        f"not forked: its root, session {root.session_id}, has no turn of group.fork.at with a snapshot to"
        " resume from"
    )


async def test_unresumable_forks_are_refused_or_replayed(tmp_path: Path) -> None:
    resumed = evolve(POLICY, by="resume")
    async with life(tmp_path / "journal.sqlite", keepers()) as (_, scheduler, _):
        with pytest.raises(Refused, match=r"shell cannot go on.*by=replay") as refused:
            await submit(scheduler, tree(resumed))
        assert refused.value.path == "$.group.fork.by"
        with pytest.raises(Refused, match="forks are resumed from snapshots: set snapshot_at"):
            await submit(scheduler, evolve(tree(resumed), harness=KEEPER_HARNESS))
        harness = scheduler.admission.admit(evolve(tree(), harness=KEEPER_HARNESS)).harness
    plain = evolve(tree(), harness=KEEPER_HARNESS)
    assert tree_way(plain, harness) == "replay"
    assert tree_way(evolve(plain, snapshot_at=SnapshotSpec(every=1)), harness) == "resume"
    kept = evolve(plain, snapshot_at=SnapshotSpec(every=1), group=GroupSpec(fork=evolve(POLICY, by="replay")))
    assert tree_way(kept, harness) == "replay"
