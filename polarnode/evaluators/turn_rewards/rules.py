"""Rules that give a turn a reward by itself: cheap, the same on every run, and seen in the record alone.

Pure. The rule for whoever edits it: a rule counts what nobody would do on purpose, and how often; what it is worth is the task's to say. Add
one as a row of RULES, named by what it counts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polarnode.conversation import ToolCall
from polarnode.evaluators.judged.transcript import shown_turns
from polarnode.records import Turn

Turns = Mapping[int, Turn]


def malformed_call(turn: Turn, turns: Turns) -> int:
    """Tool calls that were sampled and could not be read."""
    return 0 if turn.answer is None else turn.answer.malformed_calls


def repeated_call(turn: Turn, turns: Turns) -> int:
    """Calls, equal in name and arguments, that the turn it extends made too: nothing had changed between them but their result."""
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
    return int(turn.state == "complete" and turn.answer is not None and not turn.answer.text.strip() and not turn.answer.calls)


def each_turn(turn: Turn, turns: Turns) -> int:
    """Every turn, once: what one costs."""
    return 1


def _same(call: ToolCall) -> tuple[str, str]:
    """A call by what it does: the order of its arguments and the spaces between them are nothing."""
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except ValueError:
        return call.name, call.arguments


RULES: Final[Mapping[str, Callable[[Turn, Turns], int]]] = {
    rule.__name__: rule for rule in (malformed_call, repeated_call, cut_answer, empty_answer, each_turn)
}


def counted(rules: Sequence[str], turns: Sequence[Turn]) -> dict[int, dict[str, int]]:
    """By turn of the agent's own work, how often each of these rules counts."""
    by_index = {each.index: each for each in turns}
    return {each.index: {name: RULES[name](each, by_index) for name in rules} for each in shown_turns(turns)}
