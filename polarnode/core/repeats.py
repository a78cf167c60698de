"""Whether an agent loops: how many turns in a row, at a conversation's end, did the same and got the same.

Pure, and without state: every request of a harness shows its whole conversation, so forks, sub-agents,
retries and restarts need no bookkeeping. Only the end is read, up to the first turn that differs, which is
nearly always the one before the last.

A turn is what the model wrote, and what came back for it. Two turns are equal

* when their calls have the same names, arguments (as JSON values) and results, in order, and what else came
  back is the same. The text beside calls does not matter: a model that loops announces each attempt in other
  words. Turns without calls are equal when the model's text and what came back are;
* or when every result of both is the same error, whatever the calls. A result is an error only where its
  beginning or its end has a word for it (`_ERROR`): an empty result, an `ok`, a `File written.` or the bare
  exit code of a search without a match also come back again and again, from agents that make progress.

Nothing else counts: different calls in a cycle are not equal turns, because a cycle of reading, editing and
testing is how agents work. A harness that shortens its history begins a new count.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.conversation import Message, ToolCall

# What tells two results of the same command apart although nothing happened between them, each beside the
# characters without which it cannot stand in a text: seconds with a fraction, as test runners and Codex print
# them, Codex's chunk ids, Gemini CLI's process groups, Pi's log files, and Claude Code's reminders. Whole
# seconds stay: a program that waits prints them, and its waiting is progress.
_VOLATILE_PATTERNS: Final = (
    (".", re.compile(r"\d+\.\d+(?= ?m?s(?:ec|econds?)?\b)")),
    ("Chunk ID: ", re.compile(r"Chunk ID: [0-9a-f]{6}")),
    ("PGID: ", re.compile(r"PGID: \d+")),
    ("/pi-bash-", re.compile(r"/pi-bash-[0-9a-f]{16}")),
    ("<system-", re.compile(r"<(system-(?:reminder|warning))>.*?</\1>", re.DOTALL)),
)
# The words by which programs and harnesses report that something went wrong, also at the end of a longer one
# ("TypeError", "tool_use_error"). No tool of a harness confirms its work with one of them. "No matches found"
# and an exit code alone are not among them: an agent that searches sees these with every wrong guess.
_WORDS: Final = (
    *("error", "exception", "traceback", "fatal", "failed", "failure", "invalid", "denied", "unsupported"),
    *("unknown", "cannot", "unable to", "timed out", "not found", "no such", "not exist", "n't exist"),
)
_ERROR: Final = re.compile(rf"(?<!\bno )(?<!\b0 )(?:{'|'.join(_WORDS)})s?\b")
_SUCCESS_PATTERN: Final = re.compile(r"(?:exit(?:ed with)? code|returncode)[\"'>: ]{0,4}0\b")
ERROR_END_CHARS: Final = (
    500  # read at either end of a result: an error stands first, or last as in a traceback
)
# The limit in characters. A longer result is output, and would take milliseconds to compare.
MAX_ERROR_CHARS: Final = 16_000


@frozen
class _Turn:
    """What the model wrote between two messages of others, the `results` of its calls in their order, and the
    text that came back `beside` them.
    """

    text: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]
    beside: str


def equal_turns(messages: Sequence[Message], most: int) -> int:
    """How many equal turns in a row a conversation ends with, counted up to `most`; 0 where nothing came back
    for the last turn yet. O(bytes of the turns that are equal, and of one more).
    """
    turns = _turns_from_end(messages)
    last = next(turns, None)
    if last is None:
        return 0
    length, errors = 1, _errors(last)
    for turn in turns:  # equal turns have the same errors, so both kinds of runs count
        if length >= most or not (_alike(turn, last) or (errors and _errors(turn) == errors)):
            break
        length += 1
    return min(length, most)


def _turns_from_end(messages: Sequence[Message]) -> Iterator[_Turn]:
    """The conversation's turns, latest first, up to one for which nothing came back."""
    place = len(messages)
    while place:
        end = place
        while place and messages[place - 1].role != "assistant":
            place -= 1
        middle = place
        while place and messages[place - 1].role == "assistant":
            place -= 1
        if place == middle or middle == end:
            return
        yield _turn(messages[place:middle], messages[middle:end])


def _turn(answer: Sequence[Message], after: Sequence[Message]) -> _Turn:
    calls = tuple(call for message in answer for call in message.calls)
    # Some harnesses send the results of parallel calls in the order in which they came.
    order = {call.id: place for place, call in enumerate(calls)}
    results = sorted(
        (message for message in after if message.role == "tool"),
        key=lambda message: order.get(message.call_id or "", len(order)),
    )
    return _Turn(
        text="".join(message.text for message in answer),
        calls=calls,
        results=tuple(message.text for message in results),
        beside="\n".join(message.text for message in after if message.role == "user"),
    )


def _alike(one: _Turn, other: _Turn) -> bool:
    """Whether two turns did the same and got the same. What differs most often is compared first."""
    return (
        len(one.calls) == len(other.calls)
        and len(one.results) == len(other.results)
        and (bool(one.calls) or one.text == other.text)
        and all(map(_same_call, one.calls, other.calls))
        and all(map(_same, one.results, other.results))
        and _same(one.beside, other.beside)
    )


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    return one.name == other.name and (one.arguments == other.arguments or _sorted(one) == _sorted(other))


def _sorted(call: ToolCall) -> str:
    """A call's arguments with sorted keys; as they are where they are not JSON."""
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments


def _same(one: str, other: str) -> bool:
    return one == other or _strip_volatile(one) == _strip_volatile(other)


def _strip_volatile(text: str) -> str:
    """A result without what differs each time it is produced."""
    for mark, pattern in _VOLATILE_PATTERNS:
        if mark in text:
            text = pattern.sub("", text)
    return text.strip()


def _errors(turn: _Turn) -> frozenset[str]:
    """The errors that came back, where nothing else did."""
    results = turn.results or (turn.beside,)
    return frozenset(map(_strip_volatile, results)) if all(map(_is_error, results)) else frozenset()


def _is_error(result: str) -> bool:
    if len(result) > MAX_ERROR_CHARS:
        return False
    ends = (
        result
        if len(result) <= 2 * ERROR_END_CHARS
        else f"{result[:ERROR_END_CHARS]}\n{result[-ERROR_END_CHARS:]}"
    )
    ends = ends.lower()
    # The words are searched first, because searching for a pattern takes fifty times as long.
    return (
        any(word in ends for word in _WORDS)
        and bool(_ERROR.search(ends))
        and not _SUCCESS_PATTERN.search(ends)
    )
