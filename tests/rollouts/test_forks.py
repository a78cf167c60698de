"""Forks by replay on a scheduler with containers in memory and a real journal: what they inherit, whom they
may go on from, and what a node that was killed keeps of them.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from fakes_runtime import ProgramFunction
from session_kit import agent, claim_of, life, submit, task

from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.task import ForkSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Built, Damaged, ForkedFrom, Outcome, Trajectory
from polarnode.journal import queries
from polarnode.journal.forks import ForkParent
from polarnode.journal.journal import open_journal
from polarnode.journal.log.port import NodeFacts
from polarnode.merge.attach import References
from polarnode.merge.invariants import check
from polarnode.merge.trajectory import requested_fork
from polarnode.rollouts.forks import begin_with_parent, check_fork
from polarnode.rollouts.recovery import recover


def programs(program: ProgramFunction | None = None) -> dict[str, ProgramFunction]:
    return {"agent": program or agent(turns=4, each=0.01)}


async def parent_in(path: Path) -> Trajectory:
    """A session of four turns, of an earlier life."""
    async with life(path, programs()) as (_, scheduler, _):
        _, (name,) = await submit(scheduler, task())
    async with open_journal(path, now=time.time) as journal:
        found = await journal.reader.query(queries.trajectory, name)
    assert found is not None
    assert len(found.turns) == 4
    return found


def fork_of(parent: str, turn: int, **more: Any) -> TaskSpec:
    return task(fork=ForkSpec(session=parent, turn=turn, by="replay"), **more)


async def forked(
    path: Path, spec: TaskSpec, program: ProgramFunction | None = None
) -> tuple[Trajectory, ...]:
    async with life(path, programs(program)) as (journal, scheduler, _):
        _, names = await submit(scheduler, spec)
    async with open_journal(path, now=time.time) as journal:
        found = [await journal.reader.query(queries.trajectory, name) for name in names]
        records = [await journal.reader.query(queries.session, name) for name in names]
    for each, record in zip(found, records, strict=True):
        assert each is not None
        assert record is not None
        assert record.sampled_tokens == each.sampled_tokens
        built = Built(traces=each.traces, left_out=each.left_out)
        assert check(each.turns, built, inherited=each.inherited).trainable == each.sampled_tokens
    return tuple(each for each in found if each is not None)


async def test_fork_of_session_from_earlier_life(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    parent = await parent_in(path)
    found = await forked(path, fork_of(parent.session_id, 2, num_samples=2))
    for each in found:
        assert each.outcome.status == "completed", each.outcome
        assert each.forked_from == ForkedFrom(session_id=parent.session_id, turn=2, got=2, by="replay")
        assert each.outcome.status == "completed"
        own, theirs = each.turns, parent.turns
        assert [one.sampled == other.sampled for one, other in zip(own, theirs, strict=True)][:2] == [
            True
        ] * 2
        assert [(left.turn, left.reason) for left in each.left_out] == [(0, "inherited"), (1, "inherited")]
        assert each.group_id != parent.group_id
    [grandchild] = await forked(path, fork_of(found[0].session_id, 3))
    assert grandchild.turns[2].sampled == found[0].turns[2].sampled
    tree = (parent, *found, grandchild)
    assert sum(each.trainable_tokens for each in tree) == sum(each.sampled_tokens for each in tree)


async def test_fork_reports_where_replay_diverged(tmp_path: Path) -> None:
    """A fork that leaves the recorded turns says where and why."""
    path = tmp_path / "journal.sqlite"
    parent = await parent_in(path)

    async def program(call: Any) -> int:
        wanders = agent(turns=1, each=0.01)
        setattr(wanders, "sessions_by_key", program.sessions_by_key)  # type: ignore[attr-defined]  # noqa: B010
        await wanders(call)
        return int(await wanders(call))  # begins again, where the parent went on

    [found] = await forked(path, fork_of(parent.session_id, 3), program)
    fork = found.forked_from
    assert fork is not None
    assert (fork.turn, fork.got) == (3, 1)
    assert str(fork.differs).startswith("turn 1: ")


async def test_fork_ending_early_keeps_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    parent = await parent_in(path)
    [found] = await forked(path, fork_of(parent.session_id, 3), agent(turns=2, each=0.01))
    fork = found.forked_from
    assert fork is not None
    assert (fork.got, fork.differs) == (2, "the session ended before its turn 2 was asked for")
    assert (found.traces, found.sampled_tokens) == ((), 0)


async def test_killed_node_keeps_partial_fork(tmp_path: Path) -> None:
    """A node that is killed keeps a partial fork, and forks again."""
    path = tmp_path / "journal.sqlite"
    parent = await parent_in(path)
    spec = fork_of(parent.session_id, 2, budgets={"retries": 1})
    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        async with life(path, programs(agent(turns=3, each=0.01, endless=True))) as (journal, scheduler, _):
            _, (name,) = await submit(scheduler, spec)
            with trio.fail_after(30):
                while len(await journal.reader.query(queries.turns, name)) < 3:  # noqa: ASYNC110 - it has no event
                    await trio.sleep(0.02)
            raise KeyError("as if it were killed")
    async with life(path, programs()) as (journal, scheduler, _):
        await recover(journal, scheduler, NodeFacts(name="n1"), lambda _: None)
    async with open_journal(path, now=time.time) as journal:
        lost = await journal.reader.query(queries.trajectory, name)
        assert lost is not None
        again = await journal.reader.query(queries.trajectory, str(lost.retried_as))
    assert again is not None
    assert (lost.outcome.status, again.outcome.status) == ("interrupted", "completed")
    assert lost.forked_from == again.forked_from == requested_fork(spec)
    assert [left.reason for left in lost.left_out] == ["inherited"] * 2
    assert (len(lost.turns), len(again.turns), again.attempt) == (3, 4, 1)
    assert lost.trainable_tokens == lost.sampled_tokens > 0


async def test_missing_parent_ends_fork(tmp_path: Path) -> None:
    [found] = await forked(tmp_path / "journal.sqlite", fork_of("nobody", 1, budgets={"retries": 2}))
    assert found.outcome == Outcome(
        status="error",
        boundary="fork",
        reason="fork.session 'nobody' is not in the log: it is unknown here, or was pruned",
    )
    assert (found.attempt, found.retried_as, found.turns) == (0, None, ())


async def test_retried_fork_may_inherit_everything(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    parent = await parent_in(path)
    spec = fork_of(parent.session_id, 2, budgets={"retries": 1})
    broken = agent(turns=1, each=0.01, ends=RuntimeFault("the container died"))
    async with life(path, programs(broken)) as (_, scheduler, _):
        _, (name,) = await submit(scheduler, spec)
    async with open_journal(path, now=time.time) as journal:
        first = await journal.reader.query(queries.trajectory, name)
        assert first is not None
        second = await journal.reader.query(queries.trajectory, str(first.retried_as))
    assert second is not None
    assert first.forked_from is not None
    assert (first.forked_from.got, second.attempt, second.forked_from) == (1, 1, first.forked_from)


# ── whom a fork may go on from ────────────────────────────────────────────────

SPEC = fork_of("p", 1)
PARENT = ForkParent(spec=task(), turns=(), damaged=(), count=3)


@pytest.mark.parametrize(
    ("spec", "parent", "path", "words"),
    [
        (SPEC, None, "$.fork.session", "unknown here, or was pruned"),
        (SPEC, evolve(PARENT, spec=None), "$.fork.session", "it is a capture"),
        (SPEC, evolve(PARENT, spec=task(instruction="")), "$.fork.session", "it is a capture"),
        (evolve(SPEC, harness=HarnessSpec(name="pi")), PARENT, "$.harness", "copy it from the parent's task"),
        (evolve(SPEC, instruction="else"), PARENT, "$.instruction", "word for word"),
        (fork_of("p", 3), PARENT, "$.fork.turn", "fork.turn is 3, and the turns of session 'p' are 0 to 2"),
        (fork_of("p", 0), evolve(PARENT, count=0), "$.fork.turn", "none yet"),
        (SPEC, evolve(PARENT, damaged=(Damaged(part="turns[0]", reason="r"),)), "$.fork.turn", "before that turn"),
        (task(fork=ForkSpec(session="p", turn=4)), PARENT, "$.fork.turn", "are 0 to 2"),
    ],
)  # fmt: skip
def test_unusable_parent_is_refused(spec: TaskSpec, parent: ForkParent | None, path: str, words: str) -> None:
    assert spec.fork is not None
    with pytest.raises(Refused) as refused:
        check_fork(spec, spec.fork, parent)
    assert refused.value.path == path
    assert words in str(refused.value)


async def test_resumed_session_begins_with_parent_turns(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    parent = await parent_in(path)
    async with life(path, programs()) as (journal, scheduler, _):
        spec = fork_of(parent.session_id, 2)
        identity = scheduler.admission.identity.session_identity(claim_of("s", spec))
        live = scheduler.session_factory.open(identity, spec)
        begin_with_parent(live, parent.turns[:2], References("p", b"theirs"), None, 2)
        assert [turn.session_id for turn in live.lineages.turns] == ["s", "s"]
        assert live.lineages.references.ref(1) == References("p", b"theirs").ref(1)
        assert (live.budget.counters.turns, live.budget.counters.sampled_tokens) == (2, 0)
        assert live.budget.tally.sampled_tokens.total() == 0
        await journal.writer.flush()
        assert len(await journal.reader.query(queries.turns, "s")) == 2


async def test_retried_fork_starts_without_inheritance(tmp_path: Path) -> None:
    async with life(tmp_path / "journal.sqlite", {}) as (_, scheduler, _):
        here, fork = scheduler.admission.identity, ForkSpec(session="p", turn=3)
        identity = here.session_identity(claim_of("s2", task(fork=fork), attempt=1))
        assert identity.forked_from == ForkedFrom(session_id="p", turn=3, got=3, by=fork.by)
        assert (identity.attempt, identity.continued_from) == (1, None)
        assert here.session_identity(claim_of("s", task())).forked_from is None
