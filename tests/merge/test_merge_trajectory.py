"""A session's turns, outcome and verdict as one trajectory: nothing that fails on the way costs the
record.
"""

from typing import Any

import merge_toys as toys
import pytest
from attrs import evolve

from polarnode.core.arrays import floats
from polarnode.core.task import BuilderSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Built, Outcome, Timing, Trajectory, Turn, Verdict
from polarnode.merge.builders import prefix_merging
from polarnode.merge.figures import lineage_figures
from polarnode.merge.invariants import check
from polarnode.merge.trajectory import Identity, Result, assemble, violated_invariant, without_traces

WHO = Identity(
    session_id="s-1", task_id="t", group_id="g", sample_index=3, harness="pi", harness_version="0.73.1", model="tiny", node="n0"
)  # fmt: skip
DONE = Outcome(status="completed", exit_code=0)


def task(**builder: Any) -> TaskSpec:
    return TaskSpec(
        instruction="i",
        harness=HarnessSpec(name="pi"),
        builder=BuilderSpec(**builder),
        metadata={"split": "train"},
    )


def session(turns: int = 3) -> toys.Session:
    made, history = toys.Session(), [toys.user()]
    for _ in range(turns):
        _, message = made.say(toys.ask(*history), "an answer")
        history += [message, toys.user("more")]
    return made


def left(trajectory: Trajectory) -> list[tuple[int, str]]:
    return [(each.turn, each.reason) for each in trajectory.left_out]


def test_trajectory_has_every_trainer_field() -> None:
    turns = session().turns
    verdict = Verdict(reward=0.5, metrics={"passed": 3})
    result = Result(outcome=DONE, verdict=verdict, timing=Timing(run_s=9.0), metrics={"refusals": {}})
    found = assemble(WHO, task(), turns, result)
    assert (found.session_id, found.task_id, found.group_id, found.sample_index) == ("s-1", "t", "g", 3)
    assert (found.harness, found.harness_version, found.model, found.node) == ("pi", "0.73.1", "tiny", "n0")
    assert (found.outcome, found.reward, found.timing, found.metadata) == (
        DONE,
        0.5,
        Timing(run_s=9.0),
        {"split": "train"},
    )
    assert (found.turns, len(found.traces), found.left_out) == (turns, 1, ())
    assert [trace.reward for trace in found.traces] == [0.5]
    sampled = sum(len(turn.sampled) for turn in turns)
    counts = {"sampled_tokens": sampled, "trainable_tokens": sampled, "turns": 3, "traces": 1}
    lineage = lineage_figures(turns, (), thinking="keep")
    assert found.metrics == counts | {"refusals": {}, "evaluation": {"passed": 3}, "lineage": lineage}
    assert check(found.turns, Built(traces=found.traces, left_out=found.left_out)).trainable == sampled
    assert violated_invariant(found) is None


def test_trace_and_turn_rewards() -> None:
    """A trace has its lineage's reward, and a turn its own."""
    made, history = toys.Session(), [toys.user()]
    for _ in range(2):
        _, message = made.say(toys.ask(*history), "an answer")
        history += [message, toys.user("more")]
    made.say(toys.ask(toys.system("another agent"), toys.user("look it up")), "found")
    verdict = Verdict(reward=0.5, lineage_rewards={1: -1.0}, turn_rewards={0: 0.25, 2: 0.0})
    found = assemble(WHO, task(), made.turns, Result(outcome=DONE, verdict=verdict))
    assert [(trace.lineage, trace.reward) for trace in found.traces] == [(0, 0.5), (1, -1.0)]
    assert [[(span.turn, span.reward) for span in trace.turn_spans] for trace in found.traces] == [
        [(0, 0.25), (1, None)],
        [(2, 0.0)],
    ]
    assert (found.reward, violated_invariant(found)) == (0.5, None)
    check(found.turns, Built(traces=found.traces, left_out=found.left_out))  # a reward is no law of tokens
    plain = assemble(WHO, task(), made.turns, Result(outcome=DONE, verdict=Verdict(reward=0.5)))
    assert {span.reward for trace in plain.traces for span in trace.turn_spans} == {None}


def test_slices_have_their_turns_rewards() -> None:
    turns = session(4).turns
    [whole] = assemble(WHO, task(), turns, Result(outcome=DONE)).traces
    verdict = Verdict(reward=1.0, turn_rewards={turn.index: turn.index / 4 for turn in turns})
    found = assemble(
        WHO,
        task(config={"max_row_tokens": len(whole.token_ids) // 2}),
        turns,
        Result(outcome=DONE, verdict=verdict),
    )
    assert len(found.traces) > 1
    assert all(span.reward == span.turn / 4 for trace in found.traces for span in trace.turn_spans)


def test_task_chooses_the_builder() -> None:
    found = assemble(WHO, task(name="per_request"), session().turns, Result(outcome=DONE))
    assert (len(found.traces), found.reward, [trace.reward for trace in found.traces]) == (
        3,
        None,
        [None] * 3,
    )


def test_task_limits_row_length() -> None:
    turns = session(4).turns
    [whole] = assemble(WHO, task(), turns, Result(outcome=DONE)).traces
    found = assemble(
        WHO,
        task(config={"max_row_tokens": len(whole.token_ids) // 2}),
        turns,
        Result(outcome=DONE, verdict=Verdict(reward=1.0)),
    )
    assert (found.outcome, len(found.traces) > 1, {trace.reward for trace in found.traces}) == (
        DONE,
        True,
        {1.0},
    )
    assert [(trace.part, trace.parts) for trace in found.traces] == [
        (part, len(found.traces)) for part in range(len(found.traces))
    ]
    assert (
        found.metrics["trainable_tokens"]
        == found.metrics["sampled_tokens"]
        == sum(trace.loss_mask.count(1) for trace in found.traces)
    )


def test_task_may_train_failed_turns() -> None:
    made = session(2)
    made.say(toys.ask(toys.user("again")), "a broken answer", state="failed")
    assert left(assemble(WHO, task(), made.turns, Result(outcome=DONE))) == [(2, "failed")]
    found = assemble(WHO, task(config={"train_failed": True}), made.turns, Result(outcome=DONE))
    assert (found.outcome, left(found), len(found.traces)) == (DONE, [], 2)


def test_overlong_row_is_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row longer than the task allows is an internal error."""

    def bug(turns: Any, config: Any) -> Built:
        return prefix_merging(turns, {})

    monkeypatch.setattr("polarnode.merge.builders._BUILDERS", {"prefix_merging": bug})
    found = assemble(WHO, task(config={"max_row_tokens": 5}), session().turns, Result(outcome=DONE))
    assert "5 are the most, and it is not marked as over long" in (violated_invariant(found) or "")


def test_session_without_calls_is_trajectory() -> None:
    found = assemble(WHO, task(), (), Result(outcome=Outcome(status="failed", exit_code=1)))
    assert (found.traces, found.turns, found.left_out, found.outcome.status) == ((), (), (), "failed")


def test_broken_law_costs_the_traces() -> None:
    """A broken law costs the traces and says its numbers."""
    first, second, third = session().turns
    broken = evolve(second, logprobs=floats([-1.0]))
    found = assemble(WHO, task(), (first, broken, third), Result(outcome=DONE, verdict=Verdict(reward=1.0)))
    assert (found.outcome.status, found.outcome.boundary, found.outcome.exit_code) == ("error", "laws", 0)
    assert (
        violated_invariant(found)
        == found.outcome.reason
        == f"invariant 3: turn 1 sampled {len(second.sampled)} tokens with 1 logprobs"
    )
    assert (found.turns, found.traces, left(found)) == (
        (first, broken, third),
        (),
        [(0, "laws"), (1, "laws"), (2, "laws")],
    )
    assert found.reward == 1.0, "how the session did is still known"


def foreign_index_error(turns: Any, config: Any) -> Built:
    raise IndexError("a builder's bug")


def foreign_garbage(turns: Any, config: Any) -> Built:
    return Built(traces=("no trace",))  # type: ignore[arg-type]


def foreign_half(turns: Any, config: Any) -> Built:
    return Built(traces=())


@pytest.mark.parametrize(
    ("builder", "boundary", "sentence"),
    [
        ({"name": "nobody"}, "client", "there is no builder 'nobody'"),
        ({"config": {"x": 1}}, "client", "builders have no setting 'x'"),
        ({"import_path": "os:system"}, "client", "may not be imported"),
        ({"import_path": "test_merge_trajectory:foreign_index_error"}, "client", "failed: a builder's bug"),
        (
            {"import_path": "test_merge_trajectory:foreign_garbage"},
            "client",
            "the builder 'test_merge_trajectory:foreign_garbage' made no traces: ",
        ),
        ({"import_path": "test_merge_trajectory:foreign_half"}, "laws", "invariant 2: 0 of the"),
    ],
)
def test_failing_builder_costs_the_traces(builder: dict[str, Any], boundary: str, sentence: str) -> None:
    turns = session().turns
    timed_out = Outcome(status="timeout", clock="run", log_tail="last words")
    found = assemble(
        WHO, task(**builder), turns, Result(outcome=timed_out), allowed_imports=("test_merge_trajectory",)
    )
    assert (found.outcome.status, found.outcome.boundary) == ("error", boundary)
    assert sentence in (found.outcome.reason or "")
    assert (found.outcome.clock, found.outcome.log_tail) == (
        "run",
        "last words",
    ), "how the run ended stays readable"
    assert (found.turns, found.traces, left(found)) == (turns, (), [(index, boundary) for index in range(3)])
    check(found.turns, Built(traces=(), left_out=found.left_out))


def test_own_builder_bug_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(turns: Any, config: Any) -> Built:
        raise KeyError("ours")

    monkeypatch.setattr("polarnode.merge.builders._BUILDERS", {"prefix_merging": bug})
    found = assemble(WHO, task(), session().turns, Result(outcome=DONE))
    assert violated_invariant(found) == "the builder 'prefix_merging' made no traces: 'ours'"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(Outcome(status="error", boundary="node"), "node"), (Outcome(status="interrupted"), "interrupted")],
)
def test_trajectory_without_traces(outcome: Outcome, reason: str) -> None:
    turns: tuple[Turn, ...] = session(2).turns
    found = without_traces(WHO, task(), turns, Result(outcome=outcome, timing=Timing(init_s=1.0)))
    assert (found.outcome, found.traces, found.turns, found.timing.init_s) == (outcome, (), turns, 1.0)
    assert left(found) == [(0, reason), (1, reason)]
    check(found.turns, Built(traces=(), left_out=found.left_out))


def test_early_side_call_is_left_out() -> None:
    made = toys.Session()
    asks = toys.system("You are a title generator. You output ONLY a thread title.")
    made.say(toys.ask(asks, toys.user(), tools=()), "a title")
    made.say(toys.ask(toys.system(), toys.user()), "an answer")
    found = assemble(WHO, task(), made.turns, Result(outcome=DONE))
    assert [turn.role for turn in found.turns] == ["auxiliary", "main"]
    assert left(found) == [(0, "auxiliary")]
    everything = assemble(
        WHO, task(config={"train_roles": ["main", "auxiliary"]}), made.turns, Result(outcome=DONE)
    )
    assert (len(everything.traces), everything.left_out) == (2, ())
