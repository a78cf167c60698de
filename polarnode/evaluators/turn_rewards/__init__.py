"""`turn_rewards`: process rewards, for each turn or each lineage, from rules, a function of your own, a judge, or all of them added up.

They stand in the spans of their turns (`of = "turn"`) or in the traces of their lineages (`of = "lineage"`). The session's reward is
`weights.outcome` (times 1 or 0, by how it ended) plus `weights.turns` times their `total`: the sum, the mean, or none of it.
"""

from collections.abc import Mapping
from inspect import isawaitable

from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, boundary
from polarnode.evaluators import session_completed
from polarnode.evaluators.evaluator import Allowed, Evaluator, Finished
from polarnode.evaluators.judged.transcript import shown_turns
from polarnode.evaluators.rewards import known
from polarnode.evaluators.turn_rewards.config import Total, TurnRewardsConfig, Whose, check_allowed, read_config
from polarnode.evaluators.turn_rewards.judging import judged
from polarnode.evaluators.turn_rewards.rules import counted
from polarnode.plugins import load
from polarnode.records import Verdict

__all__ = ["NAME", "TurnRewardsConfig", "evaluator", "read_config"]

NAME = "turn_rewards"

Numbers = dict[int, float]


def evaluator(allowed: Allowed) -> Evaluator:
    """The evaluator, for a node that allows these modules and has these judges."""

    def check(config: Mapping[str, Json]) -> None:
        check_allowed(read_config(config), allowed)

    async def evaluate(finished: Finished) -> Verdict:
        return await _verdict(finished, read_config(finished.config), allowed)

    return Evaluator(name=NAME, evaluate=evaluate, check=check, copies=False)


async def _verdict(finished: Finished, config: TurnRewardsConfig, allowed: Allowed) -> Verdict:
    metrics: dict[str, Json] = {}
    sources: list[Numbers] = []
    if config.rules:
        by_rule, metrics["rules"] = _by_rules(finished, config)
        sources.append(by_rule)
    if config.rewards is not None:
        sources.append(await _by_function(finished, config.rewards, config.of, allowed))
    if config.judge is not None:
        found = await judged(finished, config.judge, config.of)
        metrics["judged"] = dict(found.metrics)
        sources.append(dict(found.rewards))
    rewards = _added(sources)
    outcome = (await session_completed.evaluate(finished)).reward
    session = config.weights.outcome * outcome + config.weights.turns * _total(rewards, config.total)
    metrics |= {"outcome": outcome, f"{config.of}_rewards": {str(number): reward for number, reward in rewards.items()}}
    if config.of == "lineage":
        return Verdict(reward=session, metrics=metrics, lineage_rewards=_of_lineages(rewards, outcome, config))
    return Verdict(reward=session, metrics=metrics, turn_rewards={number: config.weights.turns * reward for number, reward in rewards.items()})


def _of_lineages(rewards: Numbers, outcome: float, config: TurnRewardsConfig) -> Numbers:
    """A lineage's traces have its own in the place of the total; what the outcome is worth, they all have."""
    return {number: config.weights.outcome * outcome + config.weights.turns * reward for number, reward in rewards.items()}


def _total(rewards: Numbers, total: Total) -> float:
    if total == "none" or not rewards:
        return 0.0
    return sum(rewards.values()) / (len(rewards) if total == "mean" else 1)


def _added(sources: list[Numbers]) -> Numbers:
    numbers = sorted({number for source in sources for number in source})
    return {number: sum(source.get(number, 0.0) for source in sources) for number in numbers}


# ── where they come from ──────────────────────────────────────────────────────


def _by_rules(finished: Finished, config: TurnRewardsConfig) -> tuple[Numbers, Json]:
    """What the rules count, times their worth: by turn, or added up by lineage; and how often each counted."""
    found = counted(tuple(config.rules), finished.turns)
    counts: dict[str, Json] = {name: sum(each[name] for each in found.values()) for name in config.rules}
    by_turn = {index: sum(config.rules[name] * count for name, count in each.items()) for index, each in found.items()}
    if config.of == "turn":
        return by_turn, counts
    by_lineage: Numbers = {}
    for turn in shown_turns(finished.turns):
        by_lineage[turn.lineage] = by_lineage.get(turn.lineage, 0.0) + by_turn[turn.index]
    return by_lineage, counts


async def _by_function(finished: Finished, import_path: str, of: Whose, allowed: Allowed) -> Numbers:
    """The user's own. It may be `async`; one that is not holds up every session while it works, and should be quick."""
    function = load(import_path, allowed=allowed.imports)
    if not callable(function):
        raise EvaluatorError(f"{import_path} is no function any more: it was one when the task was taken")
    with boundary(EvaluatorError, f"{import_path} gave no rewards"):
        found = function(finished)
        rewards: object = await found if isawaitable(found) else found
    there = {turn.index if of == "turn" else turn.lineage for turn in finished.turns}
    return known(rewards, there, of)
