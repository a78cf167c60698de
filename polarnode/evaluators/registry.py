"""Which evaluator a task means: one of ours by name, the user's own by import path, or several of them as one.

The rule for whoever edits it: an evaluator that works alike on every node is a row of ALIKE; one that must know what this node allows a
task to name is made for it, by a row of MADE.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from polarnode.errors import Refused
from polarnode.evaluators import combined, command, harbor, llm_judge, session_completed, swebench, test_on_output, turn_rewards
from polarnode.evaluators.combined import Part
from polarnode.evaluators.evaluator import Allowed, Evaluator
from polarnode.plugins import load_value
from polarnode.tasks import EvaluatorPart, EvaluatorSpec

MADE: Final[Mapping[str, Callable[[Allowed], Evaluator]]] = {"llm_judge": llm_judge.evaluator, "turn_rewards": turn_rewards.evaluator}
ALIKE: Final = (session_completed.EVALUATOR, command.EVALUATOR, test_on_output.EVALUATOR, harbor.EVALUATOR, swebench.EVALUATOR)
EVALUATORS: Final[Mapping[str, Evaluator]] = {known.name: known for known in (*ALIKE, *(make(Allowed()) for make in MADE.values()))}
WHOLE = "$.evaluator"


def find(spec: EvaluatorSpec, *, allowed_imports: tuple[str, ...] = (), judges: Collection[str] | None = None) -> Evaluator:
    """The evaluator of a task, its config already looked at. An import path must lead to an `Evaluator` value.

    `judges` are the names of the node's, None where they are not known.
    """
    allowed = Allowed(imports=allowed_imports, judges=judges)
    if not spec.parts:
        return _checked(spec, allowed, WHOLE)
    found = [_checked(part, allowed, f"{WHOLE}.parts[{index}]") for index, part in enumerate(spec.parts)]
    parts = tuple(Part(evaluator=each, config=part.config, weight=part.weight) for each, part in zip(found, spec.parts, strict=True))
    return combined.evaluator(parts)


def _checked(spec: EvaluatorSpec | EvaluatorPart, allowed: Allowed, path: str) -> Evaluator:
    """One evaluator, found and its config checked; what it refuses is refused at its own place in the task."""
    evaluator = _named(spec.name, allowed, path) if spec.import_path is None else _imported(spec.import_path, allowed, path)
    try:
        evaluator.check(spec.config)
    except Refused as refused:
        raise Refused(str(refused), path=(refused.path or f"{WHOLE}.config").replace(WHOLE, path, 1)) from refused
    return evaluator


def _imported(import_path: str, allowed: Allowed, path: str) -> Evaluator:
    return load_value(import_path, Evaluator, allowed=allowed.imports, path=f"{path}.import_path")


def _named(name: str, allowed: Allowed, path: str) -> Evaluator:
    made = MADE.get(name)
    evaluator = EVALUATORS.get(name) if made is None else made(allowed)
    if evaluator is None:
        raise Refused(f"no evaluator is called {name}; there are: {', '.join(sorted(EVALUATORS))}", path=f"{path}.name")
    return evaluator
