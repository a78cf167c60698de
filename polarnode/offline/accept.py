"""Which sessions are data: an expression of the person who generates, and for every other session the reason it is none.

The rule for whoever edits it: one reason a session, from a closed list, so that a table of reasons adds up; the sentence beside it says more.
"""

import ast
from collections.abc import Mapping
from typing import Final, Literal

from attrs import frozen

from polarnode.conversation import Json, Part, ToolCall
from polarnode.offline.expression import Unknown, evaluate, read_expression, truth
from polarnode.offline.facts import COLUMNS, facts_of
from polarnode.records import Trajectory

Reason = Literal["accepted", "reward", "expression", "timeout", "failed", "error", "empty", "no trace", "cancelled", "interrupted"]
REASONS: Final[tuple[Reason, ...]] = (
    "accepted", "reward", "expression", "timeout", "failed", "error", "empty", "no trace", "cancelled", "interrupted",
)  # fmt: skip


@frozen(kw_only=True)
class Acceptance:
    """What a session must be to be data, as it was written and as it was read."""

    text: str
    tree: ast.expr


@frozen(kw_only=True)
class Judged:
    """Whether a session is data; `reason` is one of REASONS, `because` a sentence."""

    reason: Reason
    because: str = ""

    @property
    def accepted(self) -> bool:
        return self.reason == "accepted"


def parse_acceptance(text: str) -> Acceptance:
    """Refused with a sentence for what is no expression over COLUMNS."""
    return Acceptance(text=text.strip(), tree=read_expression(text, tuple(COLUMNS)))


def is_empty(trajectory: Trajectory) -> bool:
    """Whether nothing was generated: no turn, or none whose answer has a call, or a text or thought with a letter in it."""
    return not any(_says(part) for turn in trajectory.turns if turn.answer is not None for part in turn.answer.parts)


def _says(part: Part) -> bool:
    return isinstance(part, ToolCall) or bool(part.text.strip())


def judge(acceptance: Acceptance, trajectory: Trajectory) -> Judged:
    """Never raises. An empty session and one without a trace have nothing to train on, whatever the expression says."""
    if trajectory.outcome.status in ("cancelled", "interrupted"):  # it was not let come to its end
        return Judged(reason=trajectory.outcome.status, because=_why(trajectory))
    if is_empty(trajectory):
        return Judged(reason="empty", because="no turn of it has an answer")
    facts = facts_of(trajectory)
    if truth(evaluate(acceptance.tree, facts)) is not True:
        return _refused(acceptance, trajectory, facts)
    if not trajectory.traces:
        return Judged(reason="no trace", because="its builder made no training sequence")
    return Judged(reason="accepted")


def _refused(acceptance: Acceptance, trajectory: Trajectory, facts: Mapping[str, Json]) -> Judged:
    status, clause = trajectory.outcome.status, _clause(acceptance.tree, facts)
    found = truth(evaluate(clause, facts))
    said = found.reason if isinstance(found, Unknown) else f"{ast.unparse(clause)} does not hold"
    if status in ("timeout", "failed", "error"):
        return Judged(reason=status, because=f"{_why(trajectory)}; {said}")
    of_reward = any(isinstance(node, ast.Name) and node.id == "reward" for node in ast.walk(clause))
    named = f"{said} (reward is {trajectory.reward})" if of_reward else said
    return Judged(reason="reward" if of_reward else "expression", because=named)


def _clause(tree: ast.expr, facts: Mapping[str, Json]) -> ast.expr:
    """The first part of a conjunction that does not hold; the whole where it is none."""
    if not (isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)):
        return tree
    return next((each for each in tree.values if truth(evaluate(each, facts)) is not True), tree)


def _why(trajectory: Trajectory) -> str:
    outcome = trajectory.outcome
    whose = outcome.boundary or outcome.clock
    return f"{outcome.status}{f' ({whose})' if whose else ''}: {outcome.reason or 'no reason was given'}"
