"""Find the evaluator of a task: a built-in one by name, the user's own by import path, or a weighted sum.

The built-in evaluators that are the same on every node are in ALIKE; those that depend on what the node
allows are made by the functions in MADE. In a sum the evaluators judge one after the other in the same
runtime, each after the processes of the one before have ended. If one fails, the whole sum fails with its
name: there is no partial reward.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from attrs import evolve, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused, RuntimeFault, boundary
from polarnode.core.plugins import load_value
from polarnode.core.spelling import remedy
from polarnode.core.task import EvaluatorPart, EvaluatorSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import (
    command,
    harbor,
    judging,
    program_cases,
    swebench,
    test_on_output,
    turn_rewards,
)
from polarnode.evaluators.contract import AllowedNames, Evaluator, Finished, checked_rewards, finite, summed

# ── weighted sum ───────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class WeightedEvaluator:
    """An evaluator with its own config, and what its reward counts."""

    evaluator: Evaluator
    config: Mapping[str, Json]
    weight: float = 1.0


def combined(parts: Sequence[WeightedEvaluator]) -> Evaluator:
    """Combine the parts into one Evaluator. Raises Refused if they cannot share a runtime.

    It is fresh if one of them is, and needs a copy of the workdir if one of them does.
    """
    names = _names(parts)
    fresh = any(part.evaluator.fresh for part in parts)
    _check_shared(parts, names, fresh=fresh)

    async def evaluate(finished: Finished) -> Verdict:
        verdicts: list[tuple[str, float, Verdict]] = []
        for name, part in zip(names, parts, strict=True):
            if verdicts:
                await _end_processes(finished)
            verdicts.append((name, part.weight, await _verdict(name, part, finished)))
        return _together(verdicts)

    def check(config: Mapping[str, Json]) -> None:
        for name in config:
            raise Refused(
                "the parts of an evaluator have each their own config", path=f"$.evaluator.config.{name}"
            )

    return Evaluator(
        name=" + ".join(names),
        evaluate=evaluate,
        check=check,
        fresh=fresh,
        copies=any(part.evaluator.copies for part in parts),
    )


def _names(parts: Sequence[WeightedEvaluator]) -> tuple[str, ...]:
    """The names of the parts in metrics and errors: the evaluator's name, with the part's index if several
    parts have that name.
    """
    counted = Counter(part.evaluator.name for part in parts)
    return tuple(
        f"{part.evaluator.name}[{place}]" if counted[part.evaluator.name] > 1 else part.evaluator.name
        for place, part in enumerate(parts)
    )


def _check_shared(parts: Sequence[WeightedEvaluator], names: Sequence[str], *, fresh: bool) -> None:
    """Refuse parts of which one needs a clean workdir while another one changes it or judges the
    harness's.
    """
    clean = [
        name
        for name, part in zip(names, parts, strict=True)
        if part.evaluator.fresh and not part.evaluator.copies
    ]
    copied = [place for place, part in enumerate(parts) if part.evaluator.copies]
    if len(clean) > 1:
        place = names.index(clean[1])
        sentence = (
            f"{clean[0]} and {clean[1]} both put the agent's work onto a clean workdir: they cannot share a"
            " runtime"
        )
        raise Refused(f"{sentence}; keep one of them", path=f"$.evaluator.parts[{place}]")
    if fresh and clean and copied:
        sentence = (
            f"{names[copied[0]]} judges the workdir as the harness left it and {clean[0]} a clean one: they"
            " cannot share a runtime"
        )
        raise Refused(f"{sentence}; keep one of them", path=f"$.evaluator.parts[{copied[0]}]")


async def _end_processes(finished: Finished) -> None:
    await finished.runtime.end_processes()
    if finished.left is not finished.runtime:
        await finished.left.end_processes()


async def _verdict(name: str, part: WeightedEvaluator, finished: Finished) -> Verdict:
    failed = f"{name}, a part of the evaluator, failed"
    try:
        with boundary(EvaluatorError, failed):
            return _checked(await part.evaluator.evaluate(evolve(finished, config=part.config)), finished)
    except (EvaluatorError, RuntimeFault) as error:
        if str(error).startswith(failed):
            raise
        # The error keeps its type, because a fault of the machine is not one of the evaluator.
        raise type(error)(f"{failed}: {error}") from error


def _checked(verdict: object, finished: Finished) -> Verdict:
    """Check a part's verdict here, where the part's name is known: a part may be user code."""
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(
            f"it returned {type(verdict).__name__}: return a polarnode.core.trajectory.Verdict"
        )
    lineages, turns = checked_rewards(verdict, finished.turns)
    return evolve(
        verdict, reward=finite(verdict.reward, "its reward"), lineage_rewards=lineages, turn_rewards=turns
    )


def _together(verdicts: Sequence[tuple[str, float, Verdict]]) -> Verdict:
    """Return the sum of the verdicts, with each part's own numbers under its name in the metrics."""
    session, lineages, turns = summed([(weight, verdict) for _, weight, verdict in verdicts])
    metrics: dict[str, Json] = {
        name: {
            "reward": verdict.reward,
            "weight": weight,
            **({"metrics": dict(verdict.metrics)} if verdict.metrics else {}),
        }
        for name, weight, verdict in verdicts
    }
    return Verdict(reward=session, metrics=metrics, lineage_rewards=lineages, turn_rewards=turns)


# ── lookup ─────────────────────────────────────────────────────────────────────

MADE: Final[Mapping[str, Callable[[AllowedNames], Evaluator]]] = {
    "llm_judge": judging.evaluator,
    "turn_rewards": turn_rewards.evaluator,
}
FIXED_EVALUATORS: Final = (
    command.SESSION_COMPLETED,
    command.EVALUATOR,
    program_cases.EVALUATOR,
    test_on_output.EVALUATOR,
    harbor.EVALUATOR,
    swebench.EVALUATOR,
)
EVALUATORS: Final[Mapping[str, Evaluator]] = {
    evaluator.name: evaluator
    for evaluator in (*FIXED_EVALUATORS, *(make(AllowedNames()) for make in MADE.values()))
}
WHOLE = "$.evaluator"


def find(
    spec: EvaluatorSpec, *, allowed_imports: tuple[str, ...] = (), judges: Collection[str] | None = None
) -> Evaluator:
    """The evaluator of a task, with its config checked. An import path must name an `Evaluator` value.

    `judges` are the names of the node's judges, or None if they are not known.
    """
    allowed = AllowedNames(imports=allowed_imports, judges=judges)
    if not spec.parts:
        return _checked_evaluator(spec, allowed, WHOLE)
    found = [
        _checked_evaluator(part, allowed, f"{WHOLE}.parts[{index}]") for index, part in enumerate(spec.parts)
    ]
    parts = tuple(
        WeightedEvaluator(evaluator=each, config=part.config, weight=part.weight)
        for each, part in zip(found, spec.parts, strict=True)
    )
    return combined(parts)


def _checked_evaluator(spec: EvaluatorSpec | EvaluatorPart, allowed: AllowedNames, path: str) -> Evaluator:
    """Find one evaluator and check its config. A refusal names the path of this evaluator in the task."""
    evaluator = (
        _named(spec.name, allowed, path)
        if spec.import_path is None
        else load_value(spec.import_path, Evaluator, allowed=allowed.imports, path=f"{path}.import_path")
    )
    try:
        evaluator.check(spec.config)
    except Refused as refused:
        raise Refused(
            str(refused), path=(refused.path or f"{WHOLE}.config").replace(WHOLE, path, 1)
        ) from refused
    return evolve(evaluator, fresh=True, copies=False) if evaluator.separates(spec.config) else evaluator


def _named(name: str, allowed: AllowedNames, path: str) -> Evaluator:
    made = MADE.get(name)
    evaluator = EVALUATORS.get(name) if made is None else made(allowed)
    if evaluator is None:
        raise Refused(f"no evaluator is called {name}; {remedy(name, EVALUATORS)}", path=f"{path}.name")
    return evaluator
