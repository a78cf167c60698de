"""`turn_rewards`: rewards for each turn or lineage, from rules, a user function, a judge, or their sum.

The rewards are written to the spans of turns (`of = "turn"`) or to the traces of lineages (`of = "lineage"`).
The session's reward is `weights.outcome` (times 1 or 0, by how the session ended) plus `weights.turns` times
the `total` of these rewards: the sum, the mean, or none. A rule only counts events in the record; a new rule
is a row of RULES. A setting without effect is refused. Invariant: each item is judged once or counted as not
judged.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from math import isfinite
from typing import Final, Literal

from attrs import field, frozen

from polarnode.core import codec
from polarnode.core.conversation import Json, ToolCall
from polarnode.core.errors import EvaluatorError, Refused, boundary
from polarnode.core.plugins import load
from polarnode.core.ports import Judge, Question
from polarnode.core.trajectory import Turn, Verdict
from polarnode.evaluators import command, contract
from polarnode.evaluators.contract import AllowedNames, Evaluator, Finished, checked_numbers
from polarnode.evaluators.judge_evidence import (
    LARGEST_SHOWN,
    TurnText,
    clipped,
    render_every_turn,
    shown_turns,
    transcript,
    turn_texts,
)
from polarnode.evaluators.judging import (
    CriterionConfig,
    CriterionScore,
    JudgeAnswers,
    JudgeRequest,
    JudgeScores,
    Rubric,
    answers,
    check_answer,
    check_judge,
    list_schema,
    make_fence,
    question,
    read_rubric,
    read_scores,
)

# ── rules ──────────────────────────────────────────────────────────────────────

Turns = Mapping[int, Turn]


def malformed_call(turn: Turn, turns: Turns) -> int:
    """Tool calls that were sampled and could not be read."""
    return 0 if turn.answer is None else turn.answer.malformed_calls


def repeated_call(turn: Turn, turns: Turns) -> int:
    """Calls that equal, in name and arguments, a call of the turn that this turn extends: between the two,
    nothing was added but that call's result.
    """
    before = turns.get(turn.parent) if turn.parent is not None else None
    if turn.answer is None or before is None or before.answer is None:
        return 0
    made = {_same(call) for call in before.answer.calls}
    return sum(_same(call) in made for call in turn.answer.calls)


def cut_answer(turn: Turn, turns: Turns) -> int:
    """An answer that ended at a token limit."""
    return int(turn.finish_reason == "length")


def empty_answer(turn: Turn, turns: Turns) -> int:
    """A whole answer without text and without a call."""
    return int(
        turn.state == "complete"
        and turn.answer is not None
        and not turn.answer.text.strip()
        and not turn.answer.calls
    )


def each_turn(turn: Turn, turns: Turns) -> int:
    """Every turn counts once, for a cost of each turn."""
    return 1


def _same(call: ToolCall) -> tuple[str, str]:
    """A key by which equal calls are recognised: the order of arguments and the spaces do not count."""
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):  # what a model wrote may be of any depth
        return call.name, call.arguments


RULES: Final[Mapping[str, Callable[[Turn, Turns], int]]] = {
    rule.__name__: rule for rule in (malformed_call, repeated_call, cut_answer, empty_answer, each_turn)
}


def counted(rules: Sequence[str], turns: Sequence[Turn]) -> dict[int, dict[str, int]]:
    """Count how often each of these rules applies, for each turn of the agent's own work."""
    by_index = {each.index: each for each in turns}
    return {each.index: {name: RULES[name](each, by_index) for name in rules} for each in shown_turns(turns)}


# ── config ─────────────────────────────────────────────────────────────────────

RewardOf = Literal["turn", "lineage"]
Total = Literal["sum", "mean", "none"]

# The most turns or lineages that a judge scores in a session. More would take hours and point to a wrong run
# budget.
MAX_JUDGED_ITEMS = 256


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
    """The weights of the session's reward: `outcome` times 1 or 0, by how the session ended, and `turns`
    times the total of its turns' rewards.
    """

    outcome: float = 1.0
    turns: float = 1.0


@frozen(kw_only=True)
class TurnRewardsConfig:
    """The shape of `evaluator.config`. Rewards of a turn from several sources are added up."""

    rules: Mapping[str, float] = field(factory=dict)
    rewards: str | None = None  # package.module:attribute of a function from Finished to rewards by number
    judge: TurnJudgeConfig | None = None
    of: RewardOf = "turn"
    total: Total = "sum"
    weights: WeightsConfig = field(factory=WeightsConfig)


def read_config(config: Mapping[str, Json]) -> TurnRewardsConfig:
    """The config, or a refusal naming the field."""
    read = contract.read(config, TurnRewardsConfig)
    if not read.rules and read.rewards is None and read.judge is None:
        raise Refused("turn_rewards needs at least one of rules, rewards and judge", path=contract.ROOT)
    for name, worth in read.rules.items():
        if name not in RULES:
            raise Refused(
                f"there is no rule {name!r}; there are: {', '.join(RULES)}", path=f"{contract.ROOT}.rules"
            )
        _check_number(worth, f"rules.{name}")
    _check_number(read.weights.outcome, "weights.outcome")
    _check_number(read.weights.turns, "weights.turns")
    if read.judge is not None:
        _check_turn_judge(read.judge, f"{contract.ROOT}.judge")
    return read


def check_allowed(read: TurnRewardsConfig, allowed: AllowedNames) -> None:
    """Refuse names that this node does not allow in a task, or does not have."""
    if read.judge is not None:
        check_judge(read.judge.judge, allowed, f"{contract.ROOT}.judge.judge")
    if read.rewards is not None:
        try:
            found = load(read.rewards, allowed=allowed.imports)
        except Refused as refused:
            raise Refused(str(refused), path=f"{contract.ROOT}.rewards") from refused
        if not callable(found):
            raise contract.refused(
                "rewards", f"must name a function; {read.rewards} is a {type(found).__name__}"
            )


def _check_number(value: float, name: str) -> None:
    if not isfinite(value):
        raise contract.refused(name, f"must be a finite number, not {value}")


def _check_turn_judge(judge: TurnJudgeConfig, path: str) -> None:
    read_rubric(judge.rubric, judge.criteria, path)
    check_answer(max_tokens=judge.max_tokens, temperature=judge.temperature, path=path)
    for name, most in (
        ("most", MAX_JUDGED_ITEMS),
        ("message_chars", LARGEST_SHOWN),
        ("max_chars", LARGEST_SHOWN),
    ):
        if not 1 <= getattr(judge, name) <= most:
            raise Refused(f"{name} must be 1 to {most}", path=f"{path}.{name}")


# ── judge ──────────────────────────────────────────────────────────────────────

# This many questions are written and asked at a time. Each takes 0.5 ms of the node's event loop, and a judge
# accepts about as many at once.
BATCH = 16
REASON = 200  # characters of a reason kept for each turn and criterion: a trajectory has hundreds of them
TASK_SHARE = 4  # at most one in this many characters of the evidence is the task's instruction


@frozen(kw_only=True)
class JudgedRewards:
    """Rewards by number, and the record of how they were determined."""

    rewards: Mapping[int, float]
    metrics: Mapping[str, Json] = field(factory=dict)


async def judge_rewards(finished: Finished, config: TurnJudgeConfig, of: RewardOf) -> JudgedRewards:
    """Have a judge score the session's turns or lineages. For a session without any, no call is made."""
    turns = turn_texts(finished.turns, message_most=config.message_chars, thinking=config.thinking)
    numbers = (
        [turn.index for turn in turns]
        if of == "turn"
        else list(dict.fromkeys(turn.lineage for turn in turns))
    )
    asking = _JudgeQuestions(
        instruction=finished.instruction, config=config, of=of, turns=turns, numbers=numbers[: config.most]
    )
    scores, misfits = await _scores(asking, finished.judge(config.judge)) if numbers else ({}, 0)
    kept: dict[str, Json] = {
        str(number): asking.rubric.metrics(found, most=REASON) for number, found in scores.items()
    }
    metrics: dict[str, Json] = {
        "judge": config.judge,
        "scores": kept,
        "misfits": misfits,
        "not_judged": len(numbers[config.most :]),
    }
    return JudgedRewards(
        rewards={number: asking.rubric.reward(found) for number, found in scores.items()}, metrics=metrics
    )


@frozen(kw_only=True)
class _JudgeQuestions:
    """The questions about one session. Its turns are rendered once, however many questions show them."""

    instruction: str
    config: TurnJudgeConfig
    of: RewardOf
    turns: Sequence[TurnText]
    numbers: Sequence[int]
    rubric: Rubric = field(init=False)

    @rubric.default
    def _default_rubric(self) -> Rubric:
        return read_rubric(self.config.rubric, self.config.criteria)

    def evidence(self, turns: Sequence[TurnText], shares: int = 1) -> str:
        """These turns in their share of the room."""
        return transcript(turns, most=max(1, self.config.max_chars // shares))

    def lineage_turns(self, number: int) -> list[TurnText]:
        return [turn for turn in self.turns if turn.lineage == number]


async def _scores(
    asking: _JudgeQuestions, judge: Judge
) -> tuple[dict[int, Mapping[str, CriterionScore]], int]:
    rubric = asking.rubric
    if asking.config.ask == "together":
        one: JudgeRequest[dict[int, Mapping[str, CriterionScore]]] = JudgeRequest(
            question=_of_all(asking), read=lambda value: _read_score_list(value, asking)
        )
        all_of_them = await answers(judge, [one])
        return all_of_them.found[0], all_of_them.misfits
    found: dict[int, Mapping[str, CriterionScore]] = {}
    misfits = 0
    for start in range(0, len(asking.numbers), BATCH):
        batch = asking.numbers[start : start + BATCH]
        each: list[JudgeRequest[Mapping[str, CriterionScore]]] = [
            JudgeRequest(
                question=_question_of_one(asking, number), read=lambda value: read_scores(rubric, value)
            )
            for number in batch
        ]
        answered: JudgeAnswers[Mapping[str, CriterionScore]] = await answers(judge, each)
        found |= zip(batch, answered.found, strict=True)
        misfits += answered.misfits
    return found, misfits


# ── questions ──────────────────────────────────────────────────────────────────


def _of_all(asking: _JudgeQuestions) -> Question:
    of, numbers = asking.of, asking.numbers
    if of == "turn":
        judged_turns = [turn for turn in asking.turns if turn.index in numbers]
        evidence = {
            "what the agent did, turn by turn": render_every_turn(judged_turns, most=asking.config.max_chars)
        }
    else:
        evidence = {
            f"lineage {number}": asking.evidence(asking.lineage_turns(number), len(numbers))
            for number in numbers
        }
    closing = f"Score every {of} by itself, each exactly once: {of}s {', '.join(map(str, numbers))}."
    return _question(asking, evidence, closing, list_schema(asking.rubric.schema(), of))


def _question_of_one(asking: _JudgeQuestions, number: int) -> Question:
    form = asking.rubric.schema()
    if asking.of == "lineage":
        return _question(
            asking,
            {f"lineage {number}": asking.evidence(asking.lineage_turns(number))},
            f"Score lineage {number}.",
            form,
        )
    before = [turn for turn in asking.turns if turn.index < number]
    evidence = {
        f"turn {number}, which you score": asking.evidence(
            [turn for turn in asking.turns if turn.index == number], 2
        )
    }
    if before:
        evidence = {"what the agent had done before": asking.evidence(before, 2), **evidence}
    return _question(
        asking, evidence, f"Score turn {number} alone, in the light of what came before it.", form
    )


def _question(
    asking: _JudgeQuestions, evidence: Mapping[str, str], closing: str, form: Mapping[str, Json]
) -> Question:
    of, config = asking.of, asking.config
    shown = {
        "the task the agent was given": clipped(asking.instruction, max(1, config.max_chars // TASK_SHARE)),
        **evidence,
    }
    fence = make_fence(list(shown.values()))
    what = (
        "turns, each a call of its model with what it was told and what it answered"
        if of == "turn"
        else "lineages, each a conversation of its own"
    )
    system = "\n\n".join(
        [
            f"You judge the work of an AI agent {of} by {of}: its {what}.",
            fence.instructions,
            asking.rubric.as_text(),
        ]
    )
    user = "\n\n".join(
        [*(fence.around(name, text) for name, text in shown.items()), f"The evidence is complete. {closing}"]
    )
    return question(system, user, schema=form, max_tokens=config.max_tokens, temperature=config.temperature)


# ── answers ────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TurnScores:
    turn: int
    criteria: Mapping[str, CriterionScore]


@frozen(kw_only=True)
class TurnList:
    turns: tuple[TurnScores, ...]


@frozen(kw_only=True)
class LineageScores:
    lineage: int
    criteria: Mapping[str, CriterionScore]


@frozen(kw_only=True)
class LineageList:
    lineages: tuple[LineageScores, ...]


def _read_score_list(value: Json, asking: _JudgeQuestions) -> dict[int, Mapping[str, CriterionScore]]:
    if asking.of == "turn":
        scored = [
            (each.turn, each.criteria) for each in codec.structure(value, TurnList, forbid_extra=True).turns
        ]
    else:
        scored = [
            (each.lineage, each.criteria)
            for each in codec.structure(value, LineageList, forbid_extra=True).lineages
        ]
    numbers = [number for number, _ in scored]
    if sorted(numbers) != sorted(asking.numbers):
        raise Refused(
            f"it scores the {asking.of}s {numbers} and was asked for {list(asking.numbers)}, each once"
        )
    return {
        number: asking.rubric.read(JudgeScores(criteria=criteria), f"$.{asking.of}s[{place}]")
        for place, (number, criteria) in enumerate(scored)
    }


# ── evaluator ──────────────────────────────────────────────────────────────────

__all__ = ["NAME", "TurnRewardsConfig", "evaluator", "read_config"]

NAME = "turn_rewards"

RewardsByNumber = dict[int, float]


def evaluator(allowed: AllowedNames) -> Evaluator:
    """The evaluator, for a node that allows these modules and has these judges."""

    def check(config: Mapping[str, Json]) -> None:
        check_allowed(read_config(config), allowed)

    async def evaluate(finished: Finished) -> Verdict:
        return await _verdict(finished, read_config(finished.config), allowed)

    return Evaluator(name=NAME, evaluate=evaluate, check=check, copies=False)


async def _verdict(finished: Finished, config: TurnRewardsConfig, allowed: AllowedNames) -> Verdict:
    metrics: dict[str, Json] = {}
    sources: list[RewardsByNumber] = []
    if config.rules:
        by_rule, metrics["rules"] = _rule_rewards(finished, config)
        sources.append(by_rule)
    if config.rewards is not None:
        sources.append(await _function_rewards(finished, config.rewards, config.of, allowed))
    if config.judge is not None:
        found = await judge_rewards(finished, config.judge, config.of)
        metrics["judged"] = dict(found.metrics)
        sources.append(dict(found.rewards))
    scored = sorted({number for source in sources for number in source})
    rewards = {number: sum(source.get(number, 0.0) for source in sources) for number in scored}
    outcome = (await command.evaluate_completed(finished)).reward
    session = config.weights.outcome * outcome + config.weights.turns * _total_reward(rewards, config.total)
    metrics |= {
        "outcome": outcome,
        f"{config.of}_rewards": {str(number): reward for number, reward in rewards.items()},
    }
    if config.of == "lineage":
        return Verdict(
            reward=session, metrics=metrics, lineage_rewards=_lineage_rewards(rewards, outcome, config)
        )
    return Verdict(
        reward=session,
        metrics=metrics,
        turn_rewards={number: config.weights.turns * reward for number, reward in rewards.items()},
    )


def _lineage_rewards(rewards: RewardsByNumber, outcome: float, config: TurnRewardsConfig) -> RewardsByNumber:
    """The rewards of lineages: each has its own reward in place of the total, and all have the outcome's
    part.
    """
    return {
        number: config.weights.outcome * outcome + config.weights.turns * reward
        for number, reward in rewards.items()
    }


def _total_reward(rewards: RewardsByNumber, total: Total) -> float:
    if total == "none" or not rewards:
        return 0.0
    return sum(rewards.values()) / (len(rewards) if total == "mean" else 1)


# ── rules and functions ────────────────────────────────────────────────────────


def _rule_rewards(finished: Finished, config: TurnRewardsConfig) -> tuple[RewardsByNumber, Json]:
    """The counts of the rules times their worth, by turn or summed by lineage, and how often each rule
    counted.
    """
    found = counted(tuple(config.rules), finished.turns)
    counts: dict[str, Json] = {name: sum(each[name] for each in found.values()) for name in config.rules}
    by_turn = {
        index: sum(config.rules[name] * count for name, count in each.items())
        for index, each in found.items()
    }
    if config.of == "turn":
        return by_turn, counts
    by_lineage: RewardsByNumber = {}
    for turn in shown_turns(finished.turns):
        by_lineage[turn.lineage] = by_lineage.get(turn.lineage, 0.0) + by_turn[turn.index]
    return by_lineage, counts


async def _function_rewards(
    finished: Finished, import_path: str, of: RewardOf, allowed: AllowedNames
) -> RewardsByNumber:
    """The rewards of the user's own function. It may be `async`; a plain function holds up every session
    while it works, and should be quick.
    """
    function = load(import_path, allowed=allowed.imports)
    if not callable(function):
        raise EvaluatorError(f"{import_path} is no function any more: it was one when the task was taken")
    with boundary(EvaluatorError, f"{import_path} gave no rewards"):
        found = function(finished)
        rewards: object = await found if isawaitable(found) else found
    there = {turn.index if of == "turn" else turn.lineage for turn in finished.turns}
    return checked_numbers(rewards, there, of)
