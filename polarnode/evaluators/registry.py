"""Which evaluator a task means: one of ours by name, or the user's own by import path."""

from polarnode.errors import Refused
from polarnode.evaluators import command, session_completed
from polarnode.evaluators.evaluator import Evaluator
from polarnode.plugins import load_value
from polarnode.tasks import EvaluatorSpec

EVALUATORS = {known.name: known for known in (session_completed.EVALUATOR, command.EVALUATOR)}


def find(spec: EvaluatorSpec, *, allowed_imports: tuple[str, ...] = ()) -> Evaluator:
    """The evaluator of a task, its config already looked at. An import path must lead to an `Evaluator` value."""
    evaluator = (
        _named(spec) if spec.import_path is None else load_value(spec.import_path, Evaluator, allowed=allowed_imports, path="$.evaluator.import_path")
    )
    evaluator.check(spec.config)
    return evaluator


def _named(spec: EvaluatorSpec) -> Evaluator:
    evaluator = EVALUATORS.get(spec.name)
    if evaluator is None:
        raise Refused(f"no evaluator is called {spec.name}; there are: {', '.join(sorted(EVALUATORS))}", path="$.evaluator.name")
    return evaluator
