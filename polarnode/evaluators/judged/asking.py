"""Questions to a judge whose answers have a form: asked, read strictly, and asked once more with what did not fit.

The rule for whoever edits it: an answer that fits neither time is an error with the judge's own words, never a reward. What a judge writes
besides JSON is dropped only by rules that need no guessing.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from attrs import evolve, frozen

from polarnode import wire
from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused
from polarnode.evaluators.evaluator import Allowed
from polarnode.ports import Judge, Question

T = TypeVar("T")

SHOWN = 300  # characters of an answer in an error
MOST_TOKENS = 131_072  # of an answer: more is a mistyped number
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)
THOUGHT = "</think>"


@frozen(kw_only=True)
class Asked(Generic[T]):
    """A question, and how its answer is read: Refused where it does not fit."""

    question: Question
    read: Callable[[Json], T]


@frozen(kw_only=True)
class Told(Generic[T]):
    """What the answers say, in order, and how many of them did not fit the first time."""

    found: tuple[T, ...]
    misfits: int


def question(system: str, user: str, *, schema: Mapping[str, Json], max_tokens: int, temperature: float) -> Question:
    """A question of two messages; the form stands in it too, for endpoints that are not asked to enforce it."""
    form = f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{wire.dump_json(dict(schema)).decode()}"
    messages: tuple[Mapping[str, Json], ...] = ({"role": "system", "content": f"{system}\n\n{form}"}, {"role": "user", "content": user})
    return Question(messages=messages, schema=schema, max_tokens=max_tokens, temperature=temperature)


async def answers(judge: Judge, asked: Sequence[Asked[T]]) -> Told[T]:
    """Every answer, read. EvaluatorError when one fits neither time."""
    found: dict[int, T] = {}
    again: dict[int, Question] = {}
    texts = await judge.ask_each([each.question for each in asked])
    for place, text in enumerate(texts):
        try:
            found[place] = asked[place].read(json_of(text))
        except Refused as misfit:
            again[place] = _again(asked[place].question, text, misfit)
    second = await judge.ask_each(list(again.values())) if again else []
    for place, text in zip(again, second, strict=True):
        found[place] = _last(asked[place], text)
    return Told(found=tuple(found[place] for place in range(len(asked))), misfits=len(again))


def _again(first: Question, text: str, misfit: Refused) -> Question:
    said = f"This does not fit: {misfit}. Answer again, with one JSON object of the form you were given and nothing else."
    return evolve(first, messages=(*first.messages, {"role": "assistant", "content": text}, {"role": "user", "content": said}))


def _last(asked: Asked[T], text: str) -> T:
    try:
        return asked.read(json_of(text))
    except Refused as misfit:
        raise EvaluatorError(f"the judge's answer does not fit, and did not the first time: {misfit}; it wrote {text[:SHOWN]!r}") from misfit


def json_of(text: str) -> Json:
    """The JSON of an answer: without what stands before the end of a thought, and out of its code block where there is exactly one."""
    said = text.rpartition(THOUGHT)[2].strip()
    blocks = FENCED.findall(said)
    return wire.read_json((blocks[0] if len(blocks) == 1 else said).encode("utf-8", "replace"))


# ── what their configs have in common ─────────────────────────────────────────


def check_judge(name: str, allowed: Allowed, path: str) -> None:
    """Refuse a judge that this node does not have."""
    if allowed.judges is not None and name not in allowed.judges:
        raise Refused(unknown_judge(name, allowed.judges), path=path)


def unknown_judge(name: str, names: Collection[str]) -> str:
    """What to say of a judge that the node does not have."""
    there = f"it has {', '.join(sorted(names))}" if names else "it has none: they stand in its settings, [judges.NAME]"
    return f"this node has no judge called {name!r}; {there}"


def check_answer(*, max_tokens: int, temperature: float, path: str) -> None:
    """Refuse what no endpoint takes."""
    if not 1 <= max_tokens <= MOST_TOKENS:
        raise Refused(f"max_tokens must be 1 to {MOST_TOKENS}, not {max_tokens}", path=f"{path}.max_tokens")
    if not 0 <= temperature <= 2:
        raise Refused(f"temperature must be 0 to 2, not {temperature}", path=f"{path}.temperature")
