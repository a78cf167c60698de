"""Forks: what a session inherited is its context, and trained in the session that sampled it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import evolve
from merge_toys import Session, ask, system, told, user

from polarnode.core.conversation import Json
from polarnode.core.errors import InvariantViolated, Refused
from polarnode.core.task import BuilderSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Built, ForkedFrom, LeftOut, Outcome, Trace, Turn, Verdict, VersionSpan
from polarnode.groups.group import updates_behind
from polarnode.groups.training_rows import turn_rewards
from polarnode.merge.builders import build, prefix_merging, row, select
from polarnode.merge.invariants import check
from polarnode.merge.trajectory import Identity, Result, assemble, without_traces

DONE = Outcome(status="completed")
TASK = TaskSpec(instruction="i", harness=HarnessSpec(name="pi"))


def turns(count: int = 4) -> tuple[Turn, ...]:
    session, messages = Session(), [system(), user()]
    for number in range(count):
        _, answer = session.say(ask(*messages), f"step {number}", [("bash", f'{{"n": {number}}}')])
        messages += [answer, told(answer.calls[0], f"result {number}")]
    return session.turns


def identity(got: int, asked: int = 2, differs: str | None = None) -> Identity:
    return Identity(
        session_id="s-1", task_id="t", group_id="g", sample_index=0, harness="pi", harness_version=None, model="m", node="n",
        forked_from=ForkedFrom(session_id="s-0", turn=asked, got=got, by="replay", differs=differs),
    )  # fmt: skip


def trained(trace: Trace) -> list[int]:
    return [span.turn for span in trace.turn_spans if 1 in trace.loss_mask[span.start : span.end]]


@pytest.mark.parametrize("name", ["prefix_merging", "per_request"])
@pytest.mark.parametrize("limit", [None, 20])
def test_inherited_turns_are_left_out(name: str, limit: int | None) -> None:
    """Inherited turns are context and left out."""
    spec = BuilderSpec(name=name, config={} if limit is None else {"max_row_tokens": limit})
    made = turns()
    built = build(spec, made, inherited=2)
    assert {turn for trace in built.traces for turn in trained(trace)} == {2, 3}
    assert [(each.turn, each.reason) for each in built.left_out] == [(0, "inherited"), (1, "inherited")]
    counts = check(made, built, inherited=2)
    assert (
        counts.trainable == counts.sampled == sum(len(turn.sampled) for turn in made if turn.index in (2, 3))
    )


def test_fork_without_samples_has_no_row() -> None:
    made = turns(2)
    built = build(BuilderSpec(), made, inherited=2)
    assert built.traces == ()
    assert check(made, built, inherited=2).sampled == 0


def test_custom_builder_skips_inherited_turns() -> None:
    here, made = f"{__name__}:one_row_each", turns()
    built = build(BuilderSpec(import_path=here), made, inherited=3, allowed_imports=("*",))
    assert [trained(trace) for trace in built.traces] == [[3]]
    check(made, built, inherited=3)


def one_row_each(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    selection = select(turns, config)
    traces = tuple(row(turns[: turn.index + 1], {turn.index}) for turn in selection.trained)
    return Built(traces=traces, left_out=selection.left_out)


def test_task_cannot_set_inherited() -> None:
    with pytest.raises(Refused, match="name the fork in the task's `fork`"):
        build(BuilderSpec(config={"inherited_turns": 1}), ())


def test_retrained_inherited_turns_are_caught() -> None:
    made = turns()
    with pytest.raises(InvariantViolated, match="turns below 2 are inherited, but turn 0 is not left out"):
        check(made, prefix_merging(made, {}), inherited=2)
    again = build(BuilderSpec(), made, inherited=2)
    with pytest.raises(InvariantViolated, match="turns below 1 are inherited, but turn 1 is inherited"):
        check(made, again, inherited=1)
    with pytest.raises(InvariantViolated, match="turns below 0 are inherited, but turn 0 is inherited"):
        check(made, again)


def test_row_of_only_inherited_is_caught() -> None:
    made = turns(3)
    built = build(BuilderSpec(), made, inherited=2)
    idle = evolve(built, traces=(*built.traces, row(made[:2], ())))
    with pytest.raises(InvariantViolated, match="trace 1 of a fork trains no token"):
        check(made, idle, inherited=2)


@pytest.mark.parametrize(
    ("got", "asked", "there", "found", "differs"),
    [
        (2, 2, 4, 2, None),
        (1, 2, 4, 1, "the date"),
        (2, 2, 1, 1, "the session ended before its turn 1 was asked for"),
        (2, 2, 0, 0, "the session ended before its turn 0 was asked for"),
    ],
)
def test_trajectory_counts_inherited_turns(
    got: int, asked: int, there: int, found: int, differs: str | None
) -> None:
    who = identity(got, asked, differs if got < asked else None)
    whole = assemble(who, TASK, turns(there), Result(outcome=DONE))
    assert whole.outcome == DONE
    assert whole.forked_from == ForkedFrom(
        session_id="s-0", turn=asked, got=found, by="replay", differs=differs
    )
    assert whole.sampled_tokens == whole.trainable_tokens == whole.metrics["sampled_tokens"]
    assert evolve(whole, turns=()).sampled_tokens == whole.sampled_tokens
    lineage: Any = whole.metrics["lineage"]
    assert lineage["turns"] == there - found
    assert lineage["left_out"] == {}


def test_fork_without_traces_still_inherits() -> None:
    lost = without_traces(
        identity(2), TASK, turns(3), Result(outcome=Outcome(status="error", boundary="node"))
    )
    assert lost.left_out == (
        LeftOut(turn=0, reason="inherited"),
        LeftOut(turn=1, reason="inherited"),
        LeftOut(turn=2, reason="node"),
    )
    assert lost.sampled_tokens == len(lost.turns[2].sampled)


def test_staleness_counts_own_samples_only() -> None:
    """A fork is as stale as the tokens that it sampled itself."""
    made = [
        evolve(turn, version_spans=(VersionSpan(version=f"w{turn.index}", start=0, end=len(turn.sampled)),))
        for turn in turns()
    ]
    history = [f"w{turn.index}" for turn in made]
    whole = assemble(identity(2), TASK, made, Result(outcome=DONE))
    assert updates_behind(whole, history) == 1
    assert updates_behind(evolve(whole, forked_from=None), history) == 3


def test_inherited_rewards_count_in_parent() -> None:
    """The rewards of inherited turns count in the parent."""
    verdict = Verdict(reward=1.0, turn_rewards={0: 0.5, 3: 0.25})
    whole = assemble(identity(2), TASK, turns(), Result(outcome=DONE, verdict=verdict))
    assert turn_rewards(whole) == {3: 0.25}
