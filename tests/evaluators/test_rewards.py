"""Rewards as numbers, and several evaluators as one: nothing is left out, nothing is half, and each part
stays readable.
"""

from typing import Any

import pytest
from fakes_runtime import MemoryRuntime
from hypothesis import given
from hypothesis import strategies as st
from rewards_kit import finished, quiet, session
from session_kit import agent, town
from trio.abc import Clock

from polarnode.core.errors import EvaluatorError, Refused, RuntimeFault
from polarnode.core.task import EvaluatorPart, EvaluatorSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import registry
from polarnode.evaluators.contract import (
    Evaluator,
    Finished,
    checked_numbers,
    checked_rewards,
    finite,
    summed,
)
from polarnode.evaluators.registry import WeightedEvaluator

SMALL = st.floats(-8, 8, allow_nan=False)
VERDICTS = st.builds(
    Verdict,
    reward=SMALL,
    lineage_rewards=st.dictionaries(st.integers(0, 2), SMALL),
    turn_rewards=st.dictionaries(st.integers(0, 4), SMALL),
)


@given(st.lists(st.tuples(SMALL, VERDICTS), min_size=1, max_size=4))
def test_trace_reward_sums_its_parts(verdicts: list[tuple[float, Verdict]]) -> None:
    """Whichever part gives lineages rewards: the sum in a trace is that of what each part alone would have
    put there.
    """
    session_reward, lineages, turns = summed(verdicts)
    for lineage in range(3):
        alone = sum(
            weight * verdict.lineage_rewards.get(lineage, verdict.reward) for weight, verdict in verdicts
        )
        assert lineages.get(lineage, session_reward) == pytest.approx(alone)
    assert set(turns) == {turn for _, verdict in verdicts for turn in verdict.turn_rewards}
    for turn, reward in turns.items():
        assert reward == pytest.approx(
            sum(weight * verdict.turn_rewards.get(turn, 0.0) for weight, verdict in verdicts)
        )


def test_reward_is_finite_and_has_owner() -> None:
    assert (finite(1, "x"), checked_numbers({2: 1}, {2}, "turn")) == (1.0, {2: 1.0})
    with pytest.raises(EvaluatorError, match="as x: return a finite number"):
        finite(float("inf"), "x")
    with pytest.raises(EvaluatorError, match="turn 3, which this session has not: it has 2"):
        checked_numbers({3: 1.0}, {2}, "turn")
    assert checked_rewards(
        Verdict(reward=0.0, lineage_rewards={0: 1}, turn_rewards={1: 2}), session("a", "b")
    ) == ({0: 1.0}, {1: 2.0})


# ── several as one ────────────────────────────────────────────────────────────


def part(
    verdict: Any, *, name: str = "p", weight: float = 1.0, seen: list[Any] | None = None, **flags: bool
) -> WeightedEvaluator:
    async def evaluate(finished: Finished) -> Verdict:
        if seen is not None:
            seen.append(dict(finished.config))
        if isinstance(verdict, BaseException):
            raise verdict
        found: Verdict = verdict
        return found

    return WeightedEvaluator(
        evaluator=Evaluator(name=name, evaluate=evaluate, check=lambda config: None, **flags),
        config={"of": name},
        weight=weight,
    )


async def test_parts_are_weighted_and_named() -> None:
    """Parts are weighed, added up and kept by name."""
    seen: list[Any] = []
    parts = [
        part(Verdict(reward=1.0, metrics={"passed": 3}), name="tests", weight=2.0, seen=seen),
        part(
            Verdict(reward=0.5, lineage_rewards={0: 0.25}, turn_rewards={1: -1.0}),
            name="judge",
            weight=0.5,
            seen=seen,
        ),
        part(Verdict(reward=4.0, turn_rewards={0: 3.0, 1: 1.0}), name="length", weight=-0.25, seen=seen),
    ]
    whole = registry.combined(parts)
    found = await whole.evaluate(finished(session("a", "b")))
    assert (whole.name, seen) == (
        "tests + judge + length",
        [{"of": "tests"}, {"of": "judge"}, {"of": "length"}],
    )
    assert found.reward == 2.0 + 0.25 - 1.0
    assert (found.lineage_rewards, found.turn_rewards) == ({0: 2.0 + 0.125 - 1.0}, {0: -0.75, 1: -0.75})
    assert found.metrics == {
        "tests": {"reward": 1.0, "weight": 2.0, "metrics": {"passed": 3}},
        "judge": {"reward": 0.5, "weight": 0.5},
        "length": {"reward": 4.0, "weight": -0.25},
    }


async def test_same_named_parts_are_numbered() -> None:
    whole = registry.combined(
        [part(Verdict(reward=1.0)), part(Verdict(reward=2.0), name="q"), part(Verdict(reward=3.0))]
    )
    assert list((await whole.evaluate(finished())).metrics) == ["p[0]", "q", "p[2]"]


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (
            EvaluatorError("the suite is gone"),
            EvaluatorError,
            "judge, a part of the evaluator, failed: the suite is gone",
        ),
        (
            ZeroDivisionError("by my hand"),
            EvaluatorError,
            "judge, a part of the evaluator, failed: by my hand",
        ),
        (
            RuntimeFault("the container ended"),
            RuntimeFault,
            "judge, a part of the evaluator, failed: the container ended",
        ),
        (None, EvaluatorError, "judge, a part of the evaluator, failed: it returned NoneType"),
        (Verdict(reward=float("nan")), EvaluatorError, "failed: the evaluator gave nan as its reward"),
        (
            Verdict(reward=1.0, turn_rewards={7: 1.0}),
            EvaluatorError,
            "failed: the evaluator gave a reward to turn 7",
        ),
    ],
)
async def test_failing_part_is_named(bad: Any, error: type[Exception], words: str) -> None:
    after: list[Any] = []
    whole = registry.combined(
        [
            part(Verdict(reward=1.0), name="tests"),
            part(bad, name="judge"),
            part(Verdict(reward=1.0), name="last", seen=after),
        ]
    )
    with pytest.raises(error) as raised:
        await whole.evaluate(finished(session("a")))
    assert words in str(raised.value)
    assert str(raised.value).count("a part of the evaluator") == 1
    assert after == [], "the parts behind it are not asked"


async def test_part_waits_for_previous_processes() -> None:
    """No part begins beside processes that the one before left running."""
    done: list[str] = []

    class Watched(MemoryRuntime):
        async def end_processes(self) -> None:
            done.append(f"ended in {self.id}")
            await super().end_processes()

    def says(name: str) -> WeightedEvaluator:
        async def evaluate(finished: Finished) -> Verdict:
            done.append(name)
            return Verdict(reward=1.0)

        return WeightedEvaluator(
            evaluator=Evaluator(name=name, evaluate=evaluate, check=lambda config: None), config={}
        )

    shared, other = quiet(Watched(id="here")), quiet(Watched(id="left"))
    seen = finished(runtime=shared)
    await registry.combined([says("a"), says("b")]).evaluate(seen)
    assert done == ["a", "ended in here", "b"]
    done.clear()
    apart = Finished(
        **{name: getattr(seen, name) for name in Finished.__slots__ if name not in ("left", "__weakref__")},
        left=other,
    )
    await registry.combined([says("a"), says("b")]).evaluate(apart)
    assert done == ["a", "ended in here", "ended in left", "b"]


@pytest.mark.parametrize(
    ("flags", "fresh", "copies"),
    [
        ([{}, {}], False, True),
        ([{"copies": False}, {"copies": False}], False, False),
        ([{"fresh": True}, {"copies": False}], True, True),
        ([{"fresh": True, "copies": False}, {"copies": False}], True, False),
    ],
)
def test_combination_runtime_from_its_parts(flags: list[dict[str, bool]], fresh: bool, copies: bool) -> None:
    whole = registry.combined([part(None, **each) for each in flags])
    assert (whole.fresh, whole.copies) == (fresh, copies)


def test_clean_workdir_excludes_harness_workdir() -> None:
    """A clean workdir and the harness's are not one."""
    with pytest.raises(
        Refused, match="command judges the workdir as the harness left it and swebench a clean one"
    ) as refused:
        registry.combined([part(None, name="swebench", fresh=True, copies=False), part(None, name="command")])
    assert refused.value.path == "$.evaluator.parts[1]"


def test_combination_has_no_config() -> None:
    with pytest.raises(Refused, match="each their own config"):
        registry.combined([part(None)]).check({"x": 1})


# ── by a task ─────────────────────────────────────────────────────────────────


def parts(*said: Any) -> EvaluatorSpec:
    return EvaluatorSpec(parts=tuple(EvaluatorPart(**each) for each in said))


async def test_parts_are_found_as_one() -> None:
    spec = parts(
        {"name": "session_completed", "weight": 0.5}, {"import_path": "session_kit:COUNTS", "weight": 0.1}
    )
    found = registry.find(spec, allowed_imports=("session_kit",))
    assert found.name == "session_completed + _counts"


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ({"name": "command", "config": {"scrpt": "x"}}, "$.evaluator.parts[1].config.scrpt"),
        ({"name": "nobody"}, "$.evaluator.parts[1].name"),
        ({"import_path": "session_kit:ALLOWED"}, "$.evaluator.parts[1].import_path"),
        ({"name": "llm_judge", "config": {"judge": "k", "rubric": "r"}}, "$.evaluator.parts[1].config.judge"),
        (
            {"name": "llm_judge", "config": {"judge": "j", "criteria": [{"name": "a", "weight": 0}]}},
            "$.evaluator.parts[1].config.criteria[0].weight",
        ),
        ({"name": "turn_rewards", "config": {"rules": {"nothing": 1}}}, "$.evaluator.parts[1].config.rules"),
    ],
)
def test_part_refused_at_its_path(said: Any, path: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.find(
            parts({"name": "session_completed"}, said),
            allowed_imports=("session_kit",),
            judges=frozenset({"j"}),
        )
    assert refused.value.path == path


async def test_session_judged_by_several(autojump_clock: Clock, tmp_path: Any) -> None:
    """Through admission, POST and the trajectory: rewards in the trace and its spans, each part's numbers in
    metrics.evaluation.
    """
    spec = parts(
        {"name": "session_completed", "weight": 2.0},
        {"name": "turn_rewards", "config": {"rules": {"each_turn": -0.25}, "weights": {"outcome": 0.0}}},
    )
    async with town(tmp_path, {"agent": agent(turns=3)}) as place:
        found = await place.one(evaluator=spec)
    assert found.reward == 2.0 - 0.75
    (trace,) = found.traces
    assert (trace.reward, [span.reward for span in trace.turn_spans]) == (1.25, [-0.25] * 3)
    evaluation: Any = found.metrics["evaluation"]
    assert evaluation["session_completed"] == {"reward": 1.0, "weight": 2.0}
    assert evaluation["turn_rewards"]["metrics"]["turn_rewards"] == {"0": -0.25, "1": -0.25, "2": -0.25}


async def test_failing_part_is_session_outcome(autojump_clock: Clock, tmp_path: Any) -> None:
    async with town(tmp_path, {"agent": agent()}) as place:
        found = await place.one(
            evaluator=parts({"name": "session_completed"}, {"import_path": "session_kit:RAISES"})
        )
    assert (found.reward, found.outcome.status, found.outcome.boundary) == (None, "error", "evaluator")
    assert found.outcome.reason == "_raises, a part of the evaluator, failed: by my own hand"
