"""A small expression over named columns: read with `ast`, nothing in it but a whitelist, and evaluated without ever raising.

Three-valued, as in SQL: what is said of a value that is missing is neither true nor false but `Unknown`, with the reason; `and` and `or` pass
over it where the other side decides, and an Unknown at the end accepts nothing. The rule for whoever edits it: no attribute, no call but of
FUNCTIONS, no name but a column, and no operator whose cost is not bounded by its operands.
"""

import ast
import difflib
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused

LONGEST: Final = 1000  # characters: what a person writes on a command line; a parser's recursion stays far away
_TYPES: Final = (type(None), bool, int, float, str)


@frozen
class Unknown:
    """What can not be said, and why."""

    reason: str


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"len": len, "min": min, "max": max, "abs": abs}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
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
_SAME: Final = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


# ── reading ───────────────────────────────────────────────────────────────────


def read_expression(text: str, columns: Collection[str]) -> ast.expr:
    """The tree of an expression in which everything is known. Refused with one sentence that names what is not."""
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
                raise Refused(f"{name}() at column {node.col_offset + 1} is not known: known are {', '.join(FUNCTIONS)}")
            _check_all(args, columns)
        case ast.BoolOp(values=values):
            _check_all(values, columns)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
            _check(operand, columns)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _check_all([left, right], columns)
        case ast.Compare(left=left, comparators=others):
            _check_all([left, *others], columns)
        case ast.Subscript(value=value, slice=ast.Constant()):
            _check(value, columns)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            _check_all(elts, columns)
        case _:
            raise Refused(f"{ast.unparse(node)!r} at column {node.col_offset + 1} can not be said here: compare columns with values, and, or, not")


def _check_all(nodes: list[ast.expr], columns: Collection[str]) -> None:
    for node in nodes:
        _check(node, columns)


def _known(name: str, columns: Collection[str], node: ast.expr) -> None:
    if name in columns:
        return
    near = difflib.get_close_matches(name, columns, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(columns)}"
    raise Refused(f"{name} at column {node.col_offset + 1} is not a column: {remedy}")


# ── evaluating ────────────────────────────────────────────────────────────────


def evaluate(node: ast.expr, facts: Mapping[str, Json]) -> Any:
    """What an expression that was read says of these facts; Unknown where it can not be said. Never raises."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return facts.get(name)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _applied(node, FUNCTIONS[name], [evaluate(each, facts) for each in args])
        case ast.BoolOp(op=op, values=values):
            return _joined(isinstance(op, ast.And), values, facts)
        case ast.UnaryOp(op=op, operand=operand):
            return _unary(node, op, evaluate(operand, facts))
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(node, op, evaluate(left, facts), evaluate(right, facts))
        case ast.Compare():
            return _compared(node, facts)
        case ast.Subscript(value=value, slice=ast.Constant(value=key)):
            return _member(evaluate(value, facts), key)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return _listed([evaluate(each, facts) for each in elts])
    return Unknown(f"{ast.unparse(node)} can not be evaluated")


def _listed(values: list[Any]) -> Any:
    return next((each for each in values if isinstance(each, Unknown)), values)


def _member(whole: Any, key: Any) -> Any:
    """A member that is not there is missing, like a column that has no value."""
    if isinstance(whole, Unknown):
        return whole
    if isinstance(whole, dict):
        return whole.get(key)
    if isinstance(whole, list | str) and isinstance(key, int) and -len(whole) <= key < len(whole):
        return whole[key]
    return None


def _joined(all_of: bool, values: list[ast.expr], facts: Mapping[str, Json]) -> Any:
    """Kleene's and, or: one side that decides is enough."""
    unknown: Unknown | None = None
    for each in values:
        found = truth(evaluate(each, facts))
        if isinstance(found, Unknown):
            unknown = unknown or found
        elif found is not all_of:
            return found
    return unknown if unknown is not None else all_of


def truth(value: Any) -> bool | Unknown:
    """Whether a value holds; a missing one does neither."""
    return value if isinstance(value, Unknown) else Unknown("a value is missing") if value is None else bool(value)


def _unary(node: ast.expr, op: ast.unaryop, value: Any) -> Any:
    if isinstance(op, ast.Not):
        found = truth(value)
        return found if isinstance(found, Unknown) else not found
    return _applied(node, operator.neg if isinstance(op, ast.USub) else operator.pos, [value])


def _arithmetic(node: ast.expr, op: ast.operator, left: Any, right: Any) -> Any:
    unknown = next((each for each in (left, right) if isinstance(each, Unknown)), None)
    if unknown is None and (left is None or right is None):
        return Unknown(f"{ast.unparse(node)}: a value is missing")
    if unknown is None and not all(isinstance(each, int | float) for each in (left, right)):
        return Unknown(f"{ast.unparse(node)} needs two numbers, not {_shown(left)} and {_shown(right)}")  # 'a' * 10**9 is not tried
    return unknown or _applied(node, _ARITHMETIC[type(op)], [left, right])


def _applied(node: ast.expr, function: Callable[..., Any], values: list[Any]) -> Any:
    unknown = _listed(values)
    if isinstance(unknown, Unknown):
        return unknown
    if any(value is None for value in values):
        return Unknown(f"{ast.unparse(node)} has a part that is missing")
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError) as error:
        return Unknown(f"{ast.unparse(node)} can not be reckoned: {error}")


def _compared(node: ast.Compare, facts: Mapping[str, Json]) -> Any:
    left = evaluate(node.left, facts)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = evaluate(other, facts)
        found = _pair(op, left, right, asked_of_nothing=_is_none(node.left) or _is_none(other), shown=ast.unparse(node))
        if found is not True:
            return found
        left = right
    return True


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _pair(op: ast.cmpop, left: Any, right: Any, *, asked_of_nothing: bool, shown: str) -> Any:
    for each in (left, right):
        if isinstance(each, Unknown):
            return each
    if (left is None or right is None) and not (asked_of_nothing and isinstance(op, _SAME)):
        return Unknown(f"{shown}: a value is missing")
    if isinstance(op, ast.Is | ast.IsNot):  # by value: "is True" means it, and identity of numbers means nothing
        return (left == right) is isinstance(op, ast.Is)
    try:
        return bool(_COMPARE[type(op)](left, right))
    except TypeError:
        return Unknown(f"{shown}: {_shown(left)} and {_shown(right)} can not be compared")


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
