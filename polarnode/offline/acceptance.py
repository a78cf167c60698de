"""Which sessions are training data: a user's expression over the columns of a trajectory, or the reason a
session is not.

The expression is parsed with `ast`, restricted to a whitelist, and evaluated without ever raising. It may
have no attributes, no calls except FUNCTIONS, no names except columns, and no operators whose cost is not
bounded by their operands. The logic is three-valued, as in SQL: a comparison with a missing value is
`UnknownValue`, with the reason; `and` and `or` ignore an Unknown side if the other side decides, and a
result of Unknown does not accept.

A new column gets a line in COLUMNS and one in docs/offline-data.md; a value that a trajectory does not have
is None, never a made-up 0. Every session has one reason from a closed list, so that a table of reasons adds
up; a sentence gives more detail.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from attrs import frozen

from polarnode.core.conversation import Json, Part, ToolCall
from polarnode.core.errors import Refused
from polarnode.core.spelling import nearest
from polarnode.core.trajectory import Trajectory

# The limit in characters is enough for a command line and far below the parser's recursion limit.
LONGEST: Final = 1000
_TYPES: Final = (type(None), bool, int, float, str)


@frozen
class UnknownValue:
    """A value that cannot be determined, and why."""

    reason: str


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"len": len, "min": min, "max": max, "abs": abs}
_ARITHMETIC_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE_OPERATORS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_EQUALITY_OPERATORS: Final = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


def read_expression(text: str, columns: Collection[str]) -> ast.expr:
    """Parse an expression into its tree. Raises Refused with one sentence that names the unknown part."""
    if len(text) > LONGEST:
        raise Refused(f"the expression has {len(text)} characters: {LONGEST} are enough")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" at column {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise Refused(f"{text.strip()!r} is no expression{where}: write one such as reward >= 1") from error
    _check(tree, columns)
    return tree


def _check(node: ast.expr, columns: Collection[str]) -> None:
    match node:
        case ast.Constant(value=value) if isinstance(value, _TYPES):
            return
        case ast.Name(id=name):
            _known(name, columns, node)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if args:
            if name not in FUNCTIONS:
                raise Refused(
                    f"{name}() at column {node.col_offset + 1} is unknown: there are {', '.join(FUNCTIONS)}"
                )
            _check_all(args, columns)
        case ast.BoolOp(values=values):
            _check_all(values, columns)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
            _check(operand, columns)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC_OPERATORS:
            _check_all([left, right], columns)
        case ast.Compare(left=left, comparators=others):
            _check_all([left, *others], columns)
        case ast.Subscript(value=value, slice=ast.Constant()):
            _check(value, columns)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            _check_all(elts, columns)
        case _:
            raise Refused(
                f"{ast.unparse(node)!r} at column {node.col_offset + 1} is not allowed here: compare columns"
                " with values, and, or, not"
            )


def _check_all(nodes: list[ast.expr], columns: Collection[str]) -> None:
    for node in nodes:
        _check(node, columns)


def _known(name: str, columns: Collection[str], node: ast.expr) -> None:
    if name in columns:
        return
    near = nearest(name, columns)
    remedy = f"did you mean {near}?" if near else f"there are {', '.join(columns)}"
    raise Refused(f"{name} at column {node.col_offset + 1} is not a column: {remedy}")


def evaluate(node: ast.expr, facts: Mapping[str, Json]) -> Any:
    """The value of a parsed expression for these columns, or Unknown if it has none. Never raises."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return facts.get(name)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _apply_function(node, FUNCTIONS[name], [evaluate(each, facts) for each in args])
        case ast.BoolOp(op=op, values=values):
            return _joined(isinstance(op, ast.And), values, facts)
        case ast.UnaryOp(op=op, operand=operand):
            return _apply_unary(node, op, evaluate(operand, facts))
        case ast.BinOp(left=left, op=op, right=right):
            return _apply_arithmetic(node, op, evaluate(left, facts), evaluate(right, facts))
        case ast.Compare():
            return _evaluate_comparison(node, facts)
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            return _member(evaluate(value, facts), key)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return _listed([evaluate(each, facts) for each in elts])
    return UnknownValue(f"{ast.unparse(node)} cannot be evaluated")


def _listed(values: list[Any]) -> Any:
    return next((each for each in values if isinstance(each, UnknownValue)), values)


def _member(whole: Any, key: Any) -> Any:
    """The value of a member. An absent member counts as missing, like a column without a value."""
    if isinstance(whole, UnknownValue):
        return whole
    if isinstance(whole, dict):
        return whole.get(key)
    if isinstance(whole, list | str) and isinstance(key, int) and -len(whole) <= key < len(whole):
        return whole[key]
    return None


def _joined(all_of: bool, values: list[ast.expr], facts: Mapping[str, Json]) -> Any:
    """The `and` or `or` of Kleene's logic: one side that decides is enough."""
    unknown: UnknownValue | None = None
    for each in values:
        found = truth(evaluate(each, facts))
        if isinstance(found, UnknownValue):
            unknown = unknown or found
        elif found is not all_of:
            return found
    return unknown if unknown is not None else all_of


def truth(value: Any) -> bool | UnknownValue:
    """Whether a value is true; a missing value is neither true nor false."""
    return (
        value
        if isinstance(value, UnknownValue)
        else UnknownValue("a value is missing")
        if value is None
        else bool(value)
    )


def _apply_unary(node: ast.expr, op: ast.unaryop, value: Any) -> Any:
    if isinstance(op, ast.Not):
        found = truth(value)
        return found if isinstance(found, UnknownValue) else not found
    return _apply_function(node, operator.neg if isinstance(op, ast.USub) else operator.pos, [value])


def _apply_arithmetic(node: ast.expr, op: ast.operator, left: Any, right: Any) -> Any:
    unknown = next((each for each in (left, right) if isinstance(each, UnknownValue)), None)
    if unknown is None and (left is None or right is None):
        return UnknownValue(f"{ast.unparse(node)}: a value is missing")
    if unknown is None and not all(isinstance(each, int | float) for each in (left, right)):
        # 'a' * 10**9 is not tried
        return UnknownValue(f"{ast.unparse(node)} needs two numbers, not {_shown(left)} and {_shown(right)}")
    return unknown or _apply_function(node, _ARITHMETIC_OPERATORS[type(op)], [left, right])


def _apply_function(node: ast.expr, function: Callable[..., Any], values: list[Any]) -> Any:
    unknown = _listed(values)
    if isinstance(unknown, UnknownValue):
        return unknown
    if any(value is None for value in values):
        return UnknownValue(f"{ast.unparse(node)} has a part that is missing")
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError) as error:
        return UnknownValue(f"{ast.unparse(node)} cannot be computed: {error}")


def _evaluate_comparison(node: ast.Compare, facts: Mapping[str, Json]) -> Any:
    left = evaluate(node.left, facts)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = evaluate(other, facts)
        found = _pair(
            op, left, right, asked_of_nothing=_is_none(node.left) or _is_none(other), shown=ast.unparse(node)
        )
        if found is not True:
            return found
        left = right
    return True


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _pair(op: ast.cmpop, left: Any, right: Any, *, asked_of_nothing: bool, shown: str) -> Any:
    for each in (left, right):
        if isinstance(each, UnknownValue):
            return each
    if (left is None or right is None) and not (asked_of_nothing and isinstance(op, _EQUALITY_OPERATORS)):
        return UnknownValue(f"{shown}: a value is missing")
    # `is` compares by value: "is True" means equality, and identity of numbers means nothing.
    if isinstance(op, ast.Is | ast.IsNot):
        return (left == right) is isinstance(op, ast.Is)
    try:
        return bool(_COMPARE_OPERATORS[type(op)](left, right))
    except TypeError:
        return UnknownValue(f"{shown}: {_shown(left)} and {_shown(right)} cannot be compared")


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


COLUMNS: Final[Mapping[str, str]] = {
    "reward": "the evaluator's, or None",
    "outcome": "completed, timeout, failed, error, cancelled or interrupted",
    "status": "another word for outcome",
    "clock": "which budget fired, or None",
    "boundary": "whose fault an error was, or None",
    "exit_code": "the harness's, or None",
    "turns": "model calls that ended",
    "traces": "training sequences",
    "lineages": "different lines of conversation",
    "sampled_tokens": "tokens the model sampled",
    "trainable_tokens": "tokens that carry loss, over all traces",
    "longest": "tokens of the longest training sequence",
    "run_s": "seconds the harness ran",
    "harness": "its name",
    "model": "its name",
    "task_id": "the task's name in its source",
    "group_id": "the group's",
    "sample": "which of the task's samples, from 0",
    "metadata": "the task's own, as metadata['repo']",
    "metrics": "the session's, as metrics['refusals']; the evaluator's are in metrics['evaluation']",
}


def facts_of(trajectory: Trajectory) -> dict[str, Json]:
    """The columns of one trajectory."""
    outcome = trajectory.outcome
    return {
        "reward": trajectory.reward,
        "outcome": outcome.status,
        "status": outcome.status,
        "clock": outcome.clock,
        "boundary": outcome.boundary,
        "exit_code": outcome.exit_code,
        "turns": len(trajectory.turns),
        "traces": len(trajectory.traces),
        "lineages": len({turn.lineage for turn in trajectory.turns}),
        "sampled_tokens": trajectory.sampled_tokens,
        "trainable_tokens": trajectory.trainable_tokens,
        "longest": max((len(trace.token_ids) for trace in trajectory.traces), default=0),
        "run_s": trajectory.timing.run_s,
        "harness": trajectory.harness,
        "model": trajectory.model,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample": trajectory.sample_index,
        "metadata": dict(trajectory.metadata),
        "metrics": dict(trajectory.metrics),
    }


AcceptanceReason = Literal[
    "accepted",
    "reward",
    "expression",
    "timeout",
    "failed",
    "error",
    "empty",
    "no trace",
    "cancelled",
    "interrupted",
]
REASONS: Final[tuple[AcceptanceReason, ...]] = (
    "accepted", "reward", "expression", "timeout", "failed", "error", "empty", "no trace",
    "cancelled", "interrupted",
)  # fmt: skip


@frozen(kw_only=True)
class AcceptanceRule:
    """The acceptance expression: its text and its parsed tree."""

    text: str
    tree: ast.expr


@frozen(kw_only=True)
class AcceptanceResult:
    """Whether a session is data; `reason` is one of REASONS, `because` a sentence."""

    reason: AcceptanceReason
    because: str = ""

    @property
    def accepted(self) -> bool:
        return self.reason == "accepted"


def parse_acceptance(text: str) -> AcceptanceRule:
    """Parse an expression over COLUMNS. Raises Refused with a sentence if it is invalid."""
    return AcceptanceRule(text=text.strip(), tree=read_expression(text, tuple(COLUMNS)))


def has_no_answer(trajectory: Trajectory) -> bool:
    """Whether a session generated nothing: it has no turn of its own, or none whose answer has a call, or has
    a letter in its text or thought.
    """
    own = (turn for turn in trajectory.turns if turn.index >= trajectory.inherited)
    return not any(
        _has_content(part) for turn in own if turn.answer is not None for part in turn.answer.parts
    )


def _has_content(part: Part) -> bool:
    return isinstance(part, ToolCall) or bool(part.text.strip())


def judge(acceptance: AcceptanceRule, trajectory: Trajectory) -> AcceptanceResult:
    """Whether a session is accepted, and why not. Never raises. An empty session or one without a trace is
    never accepted, whatever the expression.
    """
    if trajectory.outcome.status in ("cancelled", "interrupted"):  # the session was stopped before its end
        return AcceptanceResult(reason=trajectory.outcome.status, because=_why(trajectory))
    if has_no_answer(trajectory):
        return AcceptanceResult(reason="empty", because="no turn of it has an answer")
    facts = facts_of(trajectory)
    if truth(evaluate(acceptance.tree, facts)) is not True:
        return _refused(acceptance, trajectory, facts)
    if not trajectory.traces:
        return AcceptanceResult(reason="no trace", because="its builder made no training sequence")
    return AcceptanceResult(reason="accepted")


def _refused(
    acceptance: AcceptanceRule, trajectory: Trajectory, facts: Mapping[str, Json]
) -> AcceptanceResult:
    status, clause = trajectory.outcome.status, _failing_clause(acceptance.tree, facts)
    found = truth(evaluate(clause, facts))
    detail = found.reason if isinstance(found, UnknownValue) else f"{ast.unparse(clause)} does not hold"
    if status in ("timeout", "failed", "error"):
        return AcceptanceResult(reason=status, because=f"{_why(trajectory)}; {detail}")
    of_reward = any(isinstance(node, ast.Name) and node.id == "reward" for node in ast.walk(clause))
    named = f"{detail} (reward is {trajectory.reward})" if of_reward else detail
    return AcceptanceResult(reason="reward" if of_reward else "expression", because=named)


def _failing_clause(tree: ast.expr, facts: Mapping[str, Json]) -> ast.expr:
    """The first part of a conjunction that is not true, or the whole expression if it is not a
    conjunction.
    """
    if not (isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)):
        return tree
    return next((each for each in tree.values if truth(evaluate(each, facts)) is not True), tree)


def _why(trajectory: Trajectory) -> str:
    outcome = trajectory.outcome
    whose = outcome.boundary or outcome.clock
    return f"{outcome.status}{f' ({whose})' if whose else ''}: {outcome.reason or 'no reason was given'}"
