"""What `turn_rewards` can be told, and what it refuses.

The rule for whoever edits it: every default is the one whose effect a reader would guess; a setting that would do nothing is refused.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Literal

from attrs import field, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.evaluators import settings
from polarnode.evaluators.evaluator import Allowed
from polarnode.evaluators.judged.asking import check_answer, check_judge
from polarnode.evaluators.judged.rubric import CriterionConfig, rubric_of
from polarnode.evaluators.judged.showing import LARGEST_SHOWN
from polarnode.evaluators.turn_rewards.rules import RULES
from polarnode.plugins import load

Whose = Literal["turn", "lineage"]
Total = Literal["sum", "mean", "none"]

MOST_ITEMS = 256  # turns one session's judge may be asked about: more is a run budget's mistake, and hours of a judge


@frozen(kw_only=True)
class TurnJudgeConfig:
    """A judge of single turns or lineages: one question for each of them, or one for all."""

    judge: str
    rubric: str | None = None
    criteria: tuple[CriterionConfig, ...] = ()
    ask: Literal["each", "together"] = "together"
    most: int = 32  # turns or lineages judged, the first ones; metrics say how many were not
    thinking: bool = False
    message_chars: int = 2_000
    max_chars: int = 60_000  # of the evidence of one question
    max_tokens: int = 4096  # an answer to one question for all of 32 turns has a sentence for each
    temperature: float = 0.0


@frozen(kw_only=True)
class WeightsConfig:
    """What the session's reward is made of: `outcome` times 1 or 0 by how it ended, `turns` times what its turns came to."""

    outcome: float = 1.0
    turns: float = 1.0


@frozen(kw_only=True)
class TurnRewardsConfig:
    """The shape of `evaluator.config`. What several sources say of a turn is added up."""

    rules: Mapping[str, float] = field(factory=dict)
    rewards: str | None = None  # package.module:attribute of a function from Finished to rewards by number
    judge: TurnJudgeConfig | None = None
    of: Whose = "turn"
    total: Total = "sum"
    weights: WeightsConfig = field(factory=WeightsConfig)


def read_config(config: Mapping[str, Json]) -> TurnRewardsConfig:
    """The config, or a refusal naming the field."""
    read = settings.read(config, TurnRewardsConfig)
    if not read.rules and read.rewards is None and read.judge is None:
        raise Refused("turn_rewards needs at least one of rules, rewards and judge", path=settings.ROOT)
    for name, worth in read.rules.items():
        if name not in RULES:
            raise Refused(f"there is no rule {name!r}; there are: {', '.join(RULES)}", path=f"{settings.ROOT}.rules")
        _check_number(worth, f"rules.{name}")
    _check_number(read.weights.outcome, "weights.outcome")
    _check_number(read.weights.turns, "weights.turns")
    if read.judge is not None:
        _check_turn_judge(read.judge, f"{settings.ROOT}.judge")
    return read


def check_allowed(read: TurnRewardsConfig, allowed: Allowed) -> None:
    """Refuse what this node does not let a task name, or has not."""
    if read.judge is not None:
        check_judge(read.judge.judge, allowed, f"{settings.ROOT}.judge.judge")
    if read.rewards is not None:
        try:
            found = load(read.rewards, allowed=allowed.imports)
        except Refused as refused:
            raise Refused(str(refused), path=f"{settings.ROOT}.rewards") from refused
        if not callable(found):
            raise settings.refused("rewards", f"must name a function; {read.rewards} is a {type(found).__name__}")


def _check_number(value: float, name: str) -> None:
    if not isfinite(value):
        raise settings.refused(name, f"must be a finite number, not {value}")


def _check_turn_judge(judge: TurnJudgeConfig, path: str) -> None:
    rubric_of(judge.rubric, judge.criteria, path)
    check_answer(max_tokens=judge.max_tokens, temperature=judge.temperature, path=path)
    for name, most in (("most", MOST_ITEMS), ("message_chars", LARGEST_SHOWN), ("max_chars", LARGEST_SHOWN)):
        if not 1 <= getattr(judge, name) <= most:
            raise Refused(f"{name} must be 1 to {most}", path=f"{path}.{name}")
