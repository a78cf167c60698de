"""Compares two recorded sessions: how many prompts both have, the first that differs, and its words.

Prompts are equal where their paths have the same key, as a session compares them: ids, trimmed answers and
the spelling of JSON do not count. A request's counterpart is any request of the other session with its
prompt, so sub-agents may call in another order. The first one without a counterpart is shown beside the
request of the other session that has no counterpart either and shares most of its path.
"""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Final

from attrs import frozen

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Conversation, Message
from polarnode.gateway.recorded_request import Recorded
from polarnode.gateway.replay import RequestPath, path_of
from polarnode.merge.fingerprint import Memo

# Characters after the first difference in which the place is looked for where the texts agree again:
# SequenceMatcher is quadratic in the number of words, and a difference is a date, an id or a line.
WINDOW: Final = 1_000
CONTEXT: Final = 60  # characters shown on each side of the words that differ
_WORD: Final = re.compile(r"\w+|\s+|[^\w\s]")
_END_OF_WORD: Final = re.compile(r"\w*$")


@frozen(kw_only=True)
class Difference:
    """The first request without a counterpart, `file`, and the one it is compared with; None where a session
    has no more requests.

    `part` names where the prompts differ: "head" (tools and thinking) or a message with its number from 1.
    `words` stand between the texts `before` and `after`, which end with an ellipsis where more was left out.
    """

    file: str | None
    against_file: str | None
    part: str | None = None
    before: str = ""
    words: str = ""
    against_words: str = ""
    after: str = ""


@frozen(kw_only=True)
class Comparison:
    """`requests` are those that ask the model, `equal` those of them with a counterpart; `errors` are
    requests that could not be read.
    """

    requests: int
    against_requests: int
    equal: int
    first: Difference | None
    errors: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether each session has the prompts of the other, and all could be read."""
        return self.first is None and not self.errors


@frozen(kw_only=True)
class _Prompt:
    file: str
    conversation: Conversation
    path: RequestPath


def compare_sessions(one: Sequence[Recorded], other: Sequence[Recorded]) -> Comparison:
    """Compare two sessions, each in the order of its requests."""
    memo = Memo()
    left, right = _prompts(one, memo, first=0), _prompts(other, memo, first=len(one))
    left_alone, right_alone = _alone(left, right), _alone(right, left)
    return Comparison(
        requests=len(left),
        against_requests=len(right),
        equal=len(left) - len(left_alone),
        first=_first(left_alone, right_alone),
        errors=tuple(f"{each.file}: {each.error}" for each in (*one, *other) if each.error is not None),
    )


def _prompts(recorded: Sequence[Recorded], memo: Memo, *, first: int) -> list[_Prompt]:
    """The requests that ask the model. One whose tools cannot be read is equal to none."""
    return [
        _Prompt(
            file=each.file,
            conversation=each.request.conversation,
            path=path_of(each.request.conversation, memo, number),
        )
        for number, each in enumerate(recorded, first)
        if each.request is not None
    ]


def _alone(prompts: Sequence[_Prompt], others: Sequence[_Prompt]) -> list[_Prompt]:
    """The prompts that the other session has not, or not as often."""
    left = Counter(each.path.key for each in others)
    alone = []
    for each in prompts:
        left[each.path.key] -= 1
        if left[each.path.key] < 0:
            alone.append(each)
    return alone


def _first(left: Sequence[_Prompt], right: Sequence[_Prompt]) -> Difference | None:
    if not left or not right:
        return _surplus(left, right)
    one = left[0]
    other = max(right, key=lambda each: _shared(one.path, each.path))  # of several the first
    shared = _shared(one.path, other.path)
    if shared == 0:
        part, texts = "head", (_head(one.conversation), _head(other.conversation))
    else:
        messages = [_message_at(each, shared - 1) for each in (one, other)]
        shown = next(message for message in messages if message is not None)
        part = f"message {shared} ({shown.role})"
        texts = (_text(messages[0]), _text(messages[1]))
    before, words, against_words, after = _words(*texts)
    return Difference(
        file=one.file,
        against_file=other.file,
        part=part,
        before=before,
        words=words,
        against_words=against_words,
        after=after,
    )


def _surplus(left: Sequence[_Prompt], right: Sequence[_Prompt]) -> Difference | None:
    """What one session has beyond the other."""
    if not left and not right:
        return None
    return Difference(file=left[0].file if left else None, against_file=right[0].file if right else None)


def _shared(one: RequestPath, other: RequestPath) -> int:
    """How many keys two paths have in common from their root: 0 where the root differs."""
    pairs = zip(one.keys, other.keys, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ── words ─────────────────────────────────────────────────────────────────────


def _head(conversation: Conversation) -> str:
    tools = dump_json([plain(tool) for tool in conversation.tools]).decode()
    return f"thinking {conversation.thinking}\n{tools}"


def _message_at(prompt: _Prompt, place: int) -> Message | None:
    messages = prompt.path.messages
    return messages[place] if place < len(messages) else None


def _text(message: Message | None) -> str:
    """A message as text: its role, so that another role is a difference too, its words and its calls."""
    if message is None:
        return ""
    calls = (f"{call.name} {call.arguments}" for call in message.calls)
    return "\n".join((f"{message.role}: {message.text}", *calls))


def _words(one: str, other: str) -> tuple[str, str, str, str]:
    """The first words that differ, with what stands before and after them in `one`."""
    start = _start(one, other)
    left, right = (_WORD.findall(text[start : start + WINDOW]) for text in (one, other))
    changed = (
        (from_one, to_one, from_other, to_other)
        for tag, from_one, to_one, from_other, to_other in SequenceMatcher(
            None, left, right, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    )
    from_one, to_one, from_other, to_other = next(changed, (0, 0, 0, 0))
    before = one[:start] + "".join(left[:from_one])
    after = one[len(before) + len("".join(left[from_one:to_one])) :]
    return (
        "…" * (len(before) > CONTEXT) + before[-CONTEXT:],
        "".join(left[from_one:to_one]),
        "".join(right[from_other:to_other]),
        after[:CONTEXT] + "…" * (len(after) > CONTEXT),
    )


def _start(one: str, other: str) -> int:
    """Where the word begins in which two texts first differ."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # a slice is compared at C's speed
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    found = _END_OF_WORD.search(one[max(0, low - WINDOW) : low])
    return low - (len(found[0]) if found else 0)
