"""Several evaluators as one: each judges in turn, in the same runtime, and their rewards are added up, each times its weight.

The rule for whoever edits it: there is no reward of some of the parts. One that fails fails the whole, by its name; and none of them begins
beside what the one before it left running.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused, RuntimeFault, boundary
from polarnode.evaluators.evaluator import Evaluator, Finished
from polarnode.evaluators.rewards import checked_rewards, finite, summed
from polarnode.records import Verdict


@frozen(kw_only=True)
class Part:
    """An evaluator with its own config, and what its reward counts."""

    evaluator: Evaluator
    config: Mapping[str, Json]
    weight: float = 1.0


def evaluator(parts: Sequence[Part]) -> Evaluator:
    """The parts as one Evaluator. Refused where they can not share a runtime.

    It is fresh when one of them is, and needs a copy of the workdir when one of them does.
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
            raise Refused("the parts of an evaluator have each their own config", path=f"$.evaluator.config.{name}")

    return Evaluator(name=" + ".join(names), evaluate=evaluate, check=check, fresh=fresh, copies=any(part.evaluator.copies for part in parts))


def _names(parts: Sequence[Part]) -> tuple[str, ...]:
    """By which metrics and errors name a part: its evaluator's name, with its place behind it where there are several of that name."""
    counted = Counter(part.evaluator.name for part in parts)
    return tuple(f"{part.evaluator.name}[{place}]" if counted[part.evaluator.name] > 1 else part.evaluator.name for place, part in enumerate(parts))


def _check_shared(parts: Sequence[Part], names: Sequence[str], *, fresh: bool) -> None:
    """One that builds on a clean workdir finds no clean one where another judges the harness's."""
    clean = [name for name, part in zip(names, parts, strict=True) if part.evaluator.fresh and not part.evaluator.copies]
    copied = [place for place, part in enumerate(parts) if part.evaluator.copies]
    if len(clean) > 1:
        place = names.index(clean[1])
        sentence = f"{clean[0]} and {clean[1]} both put the agent's work onto a clean workdir: they can not share a runtime"
        raise Refused(f"{sentence}; keep one of them", path=f"$.evaluator.parts[{place}]")
    if fresh and clean and copied:
        sentence = f"{names[copied[0]]} judges the workdir as the harness left it and {clean[0]} a clean one: they can not share a runtime"
        raise Refused(f"{sentence}; keep one of them", path=f"$.evaluator.parts[{copied[0]}]")


async def _end_processes(finished: Finished) -> None:
    await finished.runtime.end_processes()
    if finished.left is not finished.runtime:
        await finished.left.end_processes()


async def _verdict(name: str, part: Part, finished: Finished) -> Verdict:
    failed = f"{name}, a part of the evaluator, failed"
    try:
        with boundary(EvaluatorError, failed):
            return _checked(await part.evaluator.evaluate(evolve(finished, config=part.config)), finished)
    except (EvaluatorError, RuntimeFault) as error:
        if str(error).startswith(failed):
            raise
        raise type(error)(f"{failed}: {error}") from error  # of its own kind: a machine's fault is not an evaluator's


def _checked(verdict: object, finished: Finished) -> Verdict:
    """A part may be anybody's code: what it says is looked at here, where its name is still known."""
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(f"it returned {type(verdict).__name__}: return a polarnode.records.Verdict")
    lineages, turns = checked_rewards(verdict, finished.turns)
    return evolve(verdict, reward=finite(verdict.reward, "its reward"), lineage_rewards=lineages, turn_rewards=turns)


def _together(verdicts: Sequence[tuple[str, float, Verdict]]) -> Verdict:
    """The sum, and each part's own numbers by its name."""
    session, lineages, turns = summed([(weight, verdict) for _, weight, verdict in verdicts])
    metrics: dict[str, Json] = {
        name: {"reward": verdict.reward, "weight": weight, **({"metrics": dict(verdict.metrics)} if verdict.metrics else {})}
        for name, weight, verdict in verdicts
    }
    return Verdict(reward=session, metrics=metrics, lineage_rewards=lineages, turn_rewards=turns)
