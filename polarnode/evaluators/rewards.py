"""Rewards as numbers: what may be one, whose they are, and how several become one.

Pure. The rule for whoever edits it: a reward that is no number, or of a turn nobody made, is an error with its words, never left out; what
several evaluators say is added up so that each trace is worth what it would be worth were they one.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

from polarnode.errors import EvaluatorError
from polarnode.records import Turn, Verdict

LARGEST = sys.float_info.max  # of a reward: beyond it, and for what is no number, a comparison fails


def is_finite(reward: object) -> TypeGuard[float]:
    """Whether it is a finite number, and nothing that Python takes for one."""
    return isinstance(reward, int | float) and not isinstance(reward, bool) and -LARGEST <= reward <= LARGEST


def finite(reward: object, what: str) -> float:
    """The reward as a float; `what` names it, such as "its reward"."""
    if not is_finite(reward):
        raise EvaluatorError(f"the evaluator gave {reward!r:.80} as {what}: return a finite number")
    return float(reward)


def known(rewards: object, there: Collection[int], what: str) -> dict[int, float]:
    """Rewards by the number of a turn or lineage (`what`), each of one that is `there`."""
    if not isinstance(rewards, Mapping):
        raise EvaluatorError(
            f"the evaluator gave {type(rewards).__name__} as its {what} rewards: return a mapping from a {what}'s number to a reward"
        )
    for number in rewards:
        if isinstance(number, bool) or not isinstance(number, int) or number not in there:
            raise EvaluatorError(f"the evaluator gave a reward to {what} {number!r:.80}, which this session has not: it has {_listed(there)}")
    return {number: finite(reward, f"the reward of {what} {number}") for number, reward in rewards.items()}


def checked_rewards(verdict: Verdict, turns: Sequence[Turn]) -> tuple[dict[int, float], dict[int, float]]:
    """The rewards of lineages and of turns that a verdict holds, each of one of this session."""
    lineages = known(verdict.lineage_rewards, {turn.lineage for turn in turns}, "lineage")
    return lineages, known(verdict.turn_rewards, {turn.index for turn in turns}, "turn")


def _listed(there: Collection[int]) -> str:
    if not there:
        return "none"
    return f"{min(there)} to {max(there)}" if len(there) > 1 else str(min(there))


def summed(verdicts: Sequence[tuple[float, Verdict]]) -> tuple[float, dict[int, float], dict[int, float]]:
    """What weighted verdicts come to: a session's reward, its lineages', its turns'.

    A lineage that one of them gives a reward of its own has, of each other, the session's: that is what its traces would have had. A turn
    that one of them says nothing of has nothing of it.
    """
    lineages = sorted({lineage for _, verdict in verdicts for lineage in verdict.lineage_rewards})
    turns = sorted({turn for _, verdict in verdicts for turn in verdict.turn_rewards})
    session = sum(weight * verdict.reward for weight, verdict in verdicts)
    by_lineage = {each: sum(weight * verdict.lineage_rewards.get(each, verdict.reward) for weight, verdict in verdicts) for each in lineages}
    by_turn = {each: sum(weight * verdict.turn_rewards.get(each, 0.0) for weight, verdict in verdicts) for each in turns}
    return session, by_lineage, by_turn
