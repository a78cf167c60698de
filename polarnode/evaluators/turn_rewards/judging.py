"""A judge's rewards for single turns or lineages: one question for each, or one for all of them.

The rule for whoever edits it: each item is judged once or its number stands among those that were not; a list that has one twice, or one that
was not asked about, does not fit.
"""

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.evaluators.evaluator import Finished
from polarnode.evaluators.judged.asking import Asked, Told, answers, question
from polarnode.evaluators.judged.fence import fence_of
from polarnode.evaluators.judged.rubric import Rubric, Score, Scores, list_of, read_scores, rubric_of
from polarnode.evaluators.judged.transcript import Written, clipped, every_turn, transcript, written
from polarnode.evaluators.turn_rewards.config import TurnJudgeConfig, Whose
from polarnode.ports import Judge, Question

BATCH = 16  # questions written and asked at a time: each takes 0.5 ms of the node's one loop, and a judge takes about as many at once
REASON = 200  # characters of a reason kept for each turn and criterion: a trajectory has hundreds of them
TASK_SHARE = 4  # of the evidence at most one in so many characters is the task's instruction


@frozen(kw_only=True)
class Judged:
    """Rewards by number, and what is kept of how they came about."""

    rewards: Mapping[int, float]
    metrics: Mapping[str, Json] = field(factory=dict)


async def judged(finished: Finished, config: TurnJudgeConfig, of: Whose) -> Judged:
    """Ask about the session's turns or lineages. A session without any is asked nothing."""
    turns = written(finished.turns, message_most=config.message_chars, thinking=config.thinking)
    numbers = [turn.index for turn in turns] if of == "turn" else list(dict.fromkeys(turn.lineage for turn in turns))
    asking = _Asking(instruction=finished.instruction, config=config, of=of, turns=turns, numbers=numbers[: config.most])
    scores, misfits = await _scores(asking, finished.judge(config.judge)) if numbers else ({}, 0)
    kept: dict[str, Json] = {str(number): asking.rubric.metrics(found, most=REASON) for number, found in scores.items()}
    metrics: dict[str, Json] = {"judge": config.judge, "scores": kept, "misfits": misfits, "not_judged": len(numbers[config.most :])}
    return Judged(rewards={number: asking.rubric.reward(found) for number, found in scores.items()}, metrics=metrics)


@frozen(kw_only=True)
class _Asking:
    """What is asked about one session; its turns are written once, however many questions show them."""

    instruction: str
    config: TurnJudgeConfig
    of: Whose
    turns: Sequence[Written]
    numbers: Sequence[int]
    rubric: Rubric = field(init=False)

    @rubric.default
    def _rubric(self) -> Rubric:
        return rubric_of(self.config.rubric, self.config.criteria)

    def evidence(self, turns: Sequence[Written], shares: int = 1) -> str:
        """These turns in their share of the room."""
        return transcript(turns, most=max(1, self.config.max_chars // shares))

    def of_lineage(self, number: int) -> list[Written]:
        return [turn for turn in self.turns if turn.lineage == number]


async def _scores(asking: _Asking, judge: Judge) -> tuple[dict[int, Mapping[str, Score]], int]:
    rubric = asking.rubric
    if asking.config.ask == "together":
        one: Asked[dict[int, Mapping[str, Score]]] = Asked(question=_of_all(asking), read=lambda value: _read_list(value, asking))
        all_of_them = await answers(judge, [one])
        return all_of_them.found[0], all_of_them.misfits
    found: dict[int, Mapping[str, Score]] = {}
    misfits = 0
    for start in range(0, len(asking.numbers), BATCH):
        batch = asking.numbers[start : start + BATCH]
        each: list[Asked[Mapping[str, Score]]] = [
            Asked(question=_of_one(asking, number), read=lambda value: read_scores(rubric, value)) for number in batch
        ]
        told: Told[Mapping[str, Score]] = await answers(judge, each)
        found |= zip(batch, told.found, strict=True)
        misfits += told.misfits
    return found, misfits


# ── what is asked ─────────────────────────────────────────────────────────────


def _of_all(asking: _Asking) -> Question:
    of, numbers = asking.of, asking.numbers
    if of == "turn":
        judged_turns = [turn for turn in asking.turns if turn.index in numbers]
        evidence = {"what the agent did, turn by turn": every_turn(judged_turns, most=asking.config.max_chars)}
    else:
        evidence = {f"lineage {number}": asking.evidence(asking.of_lineage(number), len(numbers)) for number in numbers}
    closing = f"Score every {of} by itself, each exactly once: {of}s {', '.join(map(str, numbers))}."
    return _question(asking, evidence, closing, list_of(asking.rubric.schema(), of))


def _of_one(asking: _Asking, number: int) -> Question:
    form = asking.rubric.schema()
    if asking.of == "lineage":
        return _question(asking, {f"lineage {number}": asking.evidence(asking.of_lineage(number))}, f"Score lineage {number}.", form)
    before = [turn for turn in asking.turns if turn.index < number]
    evidence = {f"turn {number}, which you score": asking.evidence([turn for turn in asking.turns if turn.index == number], 2)}
    if before:
        evidence = {"what the agent had done before": asking.evidence(before, 2), **evidence}
    return _question(asking, evidence, f"Score turn {number} alone, in the light of what came before it.", form)


def _question(asking: _Asking, evidence: Mapping[str, str], closing: str, form: Mapping[str, Json]) -> Question:
    of, config = asking.of, asking.config
    shown = {"the task the agent was given": clipped(asking.instruction, max(1, config.max_chars // TASK_SHARE)), **evidence}
    fence = fence_of(list(shown.values()))
    what = (
        "turns, each a call of its model with what it was told and what it answered" if of == "turn" else "lineages, each a conversation of its own"
    )
    system = "\n\n".join([f"You judge the work of an AI agent {of} by {of}: its {what}.", fence.told, asking.rubric.as_text()])
    user = "\n\n".join([*(fence.around(name, text) for name, text in shown.items()), f"The evidence is complete. {closing}"])
    return question(system, user, schema=form, max_tokens=config.max_tokens, temperature=config.temperature)


# ── what is read ──────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TurnScores:
    turn: int
    criteria: Mapping[str, Score]


@frozen(kw_only=True)
class TurnList:
    turns: tuple[TurnScores, ...]


@frozen(kw_only=True)
class LineageScores:
    lineage: int
    criteria: Mapping[str, Score]


@frozen(kw_only=True)
class LineageList:
    lineages: tuple[LineageScores, ...]


def _read_list(value: Json, asking: _Asking) -> dict[int, Mapping[str, Score]]:
    if asking.of == "turn":
        said = [(each.turn, each.criteria) for each in wire.structure(value, TurnList, forbid_extra=True).turns]
    else:
        said = [(each.lineage, each.criteria) for each in wire.structure(value, LineageList, forbid_extra=True).lineages]
    given = [number for number, _ in said]
    if sorted(given) != sorted(asking.numbers):
        raise Refused(f"it scores the {asking.of}s {given} and was asked for {list(asking.numbers)}, each once")
    return {number: asking.rubric.read(Scores(criteria=criteria), f"$.{asking.of}s[{place}]") for place, (number, criteria) in enumerate(said)}
