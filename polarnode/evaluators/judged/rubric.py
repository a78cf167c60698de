"""What a judge is asked to score: criteria with their scales and weights, the form of its answer, and what the scores come to.

Pure. The rule for whoever edits it: an answer is taken as the form says or not at all; no score is guessed, cut to its scale or left out.
"""

import re
from collections.abc import Mapping, Sequence
from math import isfinite

from attrs import field, frozen

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.evaluators.settings import ROOT

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # a property's name that every endpoint takes in a JSON schema
MOST_CRITERIA = 32  # of one question: a judge loses sight of more, and its answer grows past its tokens
REASON = 1000  # characters of a judge's reason kept in metrics
ALONE = "score"  # the name of the one criterion of a rubric without criteria


@frozen(kw_only=True)
class CriterionConfig:
    """One thing to score. `scale` is its lowest and its highest score; `weight` what it counts beside the others."""

    name: str
    description: str = ""
    weight: float = 1.0
    scale: tuple[float, ...] = (0.0, 10.0)

    def share(self, score: float) -> float:
        """A score as 0 to 1."""
        low, high = self.scale
        return (score - low) / (high - low)


@frozen(kw_only=True)
class Score:
    """What a judge gives to a criterion, its reason first: a score that follows from a reason is a better one."""

    reason: str
    score: float


@frozen(kw_only=True)
class Scores:
    """The form of an answer."""

    criteria: Mapping[str, Score]


@frozen(kw_only=True)
class Rubric:
    """All that is asked: words for the whole, and the criteria."""

    words: str
    criteria: tuple[CriterionConfig, ...] = field()

    def as_text(self) -> str:
        """For the judge."""
        lines = [
            f"- {each.name}, from {each.scale[0]:g} to {each.scale[1]:g}{': ' if each.description else ''}{each.description}"
            for each in self.criteria
        ]
        said = [self.words] if self.words else []
        return "\n\n".join([*said, "Criteria:\n" + "\n".join(lines)])

    def schema(self) -> dict[str, Json]:
        """The form as JSON Schema, in the part of it that endpoints enforce."""
        one: Json = _object({"reason": {"type": "string"}, "score": {"type": "number"}})
        return _object({"criteria": _object({each.name: one for each in self.criteria})})

    def read(self, scores: Scores, path: str = "$") -> Mapping[str, Score]:
        """The scores, each criterion's there and on its scale. Refused, with its path, where they are not."""
        for name in scores.criteria:
            if name not in {each.name for each in self.criteria}:
                raise Refused(f"criteria has {name!r}, which nobody asked for", path=path)
        for each in self.criteria:
            given = scores.criteria.get(each.name)
            if given is None:
                raise Refused(f"criteria.{each.name} is missing", path=path)
            low, high = each.scale
            if not low <= given.score <= high:
                raise Refused(f"criteria.{each.name}.score is {given.score:g} and must be {low:g} to {high:g}", path=path)
        return scores.criteria

    def reward(self, scores: Mapping[str, Score]) -> float:
        """The weighted mean of the scores, each as 0 to 1."""
        total = sum(each.weight for each in self.criteria)
        return sum(each.weight * each.share(scores[each.name].score) for each in self.criteria) / total

    def metrics(self, scores: Mapping[str, Score], *, most: int = REASON) -> dict[str, Json]:
        """Scores and reasons as they are kept, of each reason `most` characters."""
        return {each.name: {"score": scores[each.name].score, "reason": scores[each.name].reason[:most]} for each in self.criteria}


def _object(properties: Mapping[str, Json]) -> dict[str, Json]:
    required: list[Json] = list(properties)
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def read_scores(rubric: Rubric, value: Json) -> Mapping[str, Score]:
    """An answer in its form. Refused with what does not fit."""
    return rubric.read(wire.structure(value, Scores, forbid_extra=True))


def list_of(form: Mapping[str, Json], number: str) -> dict[str, Json]:
    """The form for several things at once: a list of it, each with the `number` (turn, lineage) of what it is of."""
    properties = form["properties"]
    each = _object({number: {"type": "integer"}, **(properties if isinstance(properties, dict) else {})})
    return _object({f"{number}s": {"type": "array", "items": each}})


def rubric_of(words: str | None, criteria: Sequence[CriterionConfig], path: str = ROOT) -> Rubric:
    """The rubric of a config. Refused where there is nothing to score, or a criterion can not be."""
    if not criteria:
        if not (words or "").strip():
            raise Refused("a judge needs a rubric, criteria, or both: say what it should score", path=path)
        return Rubric(words=words or "", criteria=(CriterionConfig(name=ALONE),))
    if len(criteria) > MOST_CRITERIA:
        raise Refused(
            f"criteria are {len(criteria)}, and {MOST_CRITERIA} are the most one question can have: use several parts", path=f"{path}.criteria"
        )
    for place, each in enumerate(criteria):
        _check(each, [other.name for other in criteria[:place]], f"{path}.criteria[{place}]")
    return Rubric(words=words or "", criteria=tuple(criteria))


def _check(each: CriterionConfig, before: Sequence[str], path: str) -> None:
    laws = (
        (NAME.fullmatch(each.name), "name", "must be 1 to 64 letters, digits, '_' or '-'"),
        (each.name not in before, "name", f"{each.name} stands twice"),
        (isfinite(each.weight) and each.weight > 0, "weight", "must be more than 0; what should not happen is a part with a negative weight"),
        (len(each.scale) == 2 and all(map(isfinite, each.scale)), "scale", "must be two numbers, the lowest and the highest score"),
        (each.scale[:1] < each.scale[1:], "scale", "must begin with the lowest score"),
    )
    for holds, name, sentence in laws:
        if not holds:
            raise Refused(f"{name} {sentence}", path=f"{path}.{name}")
