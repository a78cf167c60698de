"""`llm_judge`: one of the node's judges, a model, scores a session by a rubric.

Config: `judge` (a name in the node's settings); `rubric` (text) and/or `criteria` (name, description, weight,
scale); `show` (what of the session the judge sees); `max_tokens` and `temperature` of the answer. The reward
is the weighted mean of the scores, each scaled to 0..1. Invariant: the agent's text reaches the judge only as
fenced evidence, and a judge without a valid answer is an error, never a reward of 0.
"""

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.ports import Question
from polarnode.core.trajectory import Outcome, Verdict
from polarnode.evaluators import contract
from polarnode.evaluators.contract import Allowed, Evaluator, Finished
from polarnode.evaluators.judge_evidence import Evidence, ShowConfig, check_show, evidence
from polarnode.evaluators.judging import (
    CriterionConfig,
    JudgeRequest,
    Rubric,
    answers,
    check_answer,
    check_judge,
    fence_of,
    question,
    read_scores,
    rubric_of,
)

NAME = "llm_judge"
INTRODUCTION = (
    "You judge the work of an AI agent. You are shown the task it was given and evidence of what it did, and"
    " you score it by the criteria below. Judge only what the evidence shows: what the agent claims and"
    " nothing bears out did not happen."
)


@frozen(kw_only=True)
class LlmJudgeConfig:
    """The shape of `evaluator.config`."""

    judge: str
    rubric: str | None = None
    criteria: tuple[CriterionConfig, ...] = ()
    show: ShowConfig = field(factory=ShowConfig)
    max_tokens: int = 2048  # a reason and a score for each criterion; a judge that thinks aloud needs more
    temperature: float = 0.0  # the same session, the same reward, as far as the endpoint can


def evaluator(allowed: Allowed) -> Evaluator:
    """The evaluator for a node with these judges. It reads the workdir in place, so no copy is made."""

    def check(config: Mapping[str, Json]) -> None:
        check_judge(read_config(config).judge, allowed, f"{contract.ROOT}.judge")

    return Evaluator(name=NAME, evaluate=evaluate, check=check, copies=False)


def read_config(config: Mapping[str, Json]) -> LlmJudgeConfig:
    """The config, or a refusal naming the field."""
    read = contract.read(config, LlmJudgeConfig)
    rubric_of(read.rubric, read.criteria)
    check_show(read.show)
    check_answer(max_tokens=read.max_tokens, temperature=read.temperature, path=contract.ROOT)
    return read


async def evaluate(finished: Finished) -> Verdict:
    """Show the session, ask, and weigh the scores."""
    config = read_config(finished.config)
    judge = finished.judge(config.judge)
    rubric = rubric_of(config.rubric, config.criteria)
    shown = await evidence(finished, config.show)
    answered = await answers(
        judge,
        [
            JudgeRequest(
                question=_question(config, rubric, finished.outcome, shown),
                read=lambda value: read_scores(rubric, value),
            )
        ],
    )
    (scores,) = answered.found
    metrics: dict[str, Json] = {
        "judge": config.judge,
        "criteria": rubric.metrics(scores),
        "misfits": answered.misfits,
    }
    return Verdict(reward=rubric.reward(scores), metrics=metrics)


def _question(
    config: LlmJudgeConfig, rubric: Rubric, outcome: Outcome, shown: Sequence[Evidence]
) -> Question:
    fence = fence_of([each.text for each in shown])
    system = "\n\n".join(
        [
            INTRODUCTION,
            fence.instructions,
            rubric.as_text(),
        ]
    )
    ended = (
        "How the session ended:"
        f" {outcome.status}{'' if outcome.exit_code is None else f', exit code {outcome.exit_code}'}."
    )
    evidences = [fence.around(each.name, each.text) for each in shown]
    user = "\n\n".join(
        [*evidences, ended, "The evidence is complete. Score each criterion, its reason first."]
    )
    return question(
        system, user, schema=rubric.schema(), max_tokens=config.max_tokens, temperature=config.temperature
    )
