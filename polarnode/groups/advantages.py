"""Rewards of a group's usable sessions into advantages: how much better each was than its siblings.

Pure. Sources. `leave_one_out`: Kool, van Hoof, Welling, "Buy 4 REINFORCE samples, get a baseline for free" (2019), for language models Ahmadian
et al., "Back to basics" (RLOO, arXiv 2402.14740). `grpo`: Shao et al., "DeepSeekMath" (arXiv 2402.03300). `grpo_without_std`: Liu et al.,
"Understanding R1-Zero-like training" (Dr. GRPO, arXiv 2503.20783), as a division by the spread favours tasks that are nearly always solved or
nearly never.

The rule for whoever edits it: equal rewards, and one reward alone, are exactly 0, never a rounding error over a small number.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Final, Literal, assert_never

from attrs import frozen

Estimator = Literal["leave_one_out", "grpo", "grpo_without_std"]
EPSILON: Final = 1e-6  # added to the spread, as verl does: rewards that differ by rounding alone stay near 0


@frozen(kw_only=True)
class Scale:
    """What a session's rewards are compared with."""

    baseline: float
    spread: float = 1.0

    def of(self, reward: float) -> float:
        return (reward - self.baseline) / self.spread


def leave_one_out(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the others: the baseline does not depend on what session i did, so the gradient has no bias."""
    return advantages_of(rewards, "leave_one_out")


def group_normalised(rewards: Sequence[float], *, std: bool = True) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (std + EPSILON) with the sample's std (n - 1), as TRL and verl take it; `std=False` leaves the division out."""
    return advantages_of(rewards, "grpo" if std else "grpo_without_std")


def advantages_of(rewards: Sequence[float], estimator: Estimator) -> tuple[float, ...]:
    """One a session, in their order. They sum to 0."""
    return tuple(scale.of(reward) for scale, reward in zip(scales(rewards, estimator), rewards, strict=True))


def scales(rewards: Sequence[float], estimator: Estimator) -> tuple[Scale, ...]:
    """What each session's rewards are compared with; also the rewards that its lineages have of their own."""
    mean = mean_of(rewards)
    match estimator:
        case "leave_one_out":
            others = max(len(rewards) - 1, 1)
            return tuple(Scale(baseline=mean - (reward - mean) / others) for reward in rewards)
        case "grpo":
            return tuple(Scale(baseline=mean, spread=spread_of(rewards)) for _ in rewards)
        case "grpo_without_std":
            return tuple(Scale(baseline=mean) for _ in rewards)
    assert_never(estimator)


def mean_of(rewards: Sequence[float]) -> float:
    """0 of none; of equal ones exactly what they are."""
    if not rewards or min(rewards) == max(rewards):
        return rewards[0] if rewards else 0.0
    return fsum(rewards) / len(rewards)


def spread_of(rewards: Sequence[float]) -> float:
    """1 where there is none."""
    mean = mean_of(rewards)
    squares = fsum((reward - mean) ** 2 for reward in rewards)
    return sqrt(squares / (len(rewards) - 1)) + EPSILON if squares > 0 else 1.0
