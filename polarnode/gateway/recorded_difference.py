"""Compare two sessions, recorded or finished: how many prompts both have, and the first prompt that differs,
in words.

Prompts are equal if their paths have the same key, which is how a session compares them: ids, trimmed answers
and the spelling of JSON do not count. The counterpart of a request is any request of the other session with
the same prompt, so sub-agents may call in another order. The first request without a counterpart is shown
beside the request of the other session that has none either and shares most of its path.

For a finished session the prompts are the token ids before each sample, where one of its rows holds them.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final, TypeVar

from attrs import frozen

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Conversation, Message
from polarnode.core.errors import Refused, shortened
from polarnode.core.trajectory import Trajectory
from polarnode.gateway.recorded_request import RecordedRequest
from polarnode.gateway.replay import RequestPath, path_of
from polarnode.merge.fingerprint import FingerprintCache

# After the first difference, this many characters are searched for the place where the texts agree again.
# SequenceMatcher is quadratic in the number of words, and a difference is a date, an id or a line.
WINDOW: Final = 1_000
_KEY_BYTES: Final = 16  # enough to identify one prompt among the thousands of two sessions
CONTEXT: Final = 60  # characters shown on each side of the words that differ
SHOWN: Final = 200  # The characters of words in a sentence; a line of a log holds two of them.
_WORD: Final = re.compile(r"\w+|\s+|[^\w\s]")
_WORD_END_PATTERN: Final = re.compile(r"\w*$")


@frozen(kw_only=True)
class Difference:
    """The first request without a counterpart, `file`, and the one it is compared with, `against_file`.
    Either is None if that session has no more requests.

    `part` names where the prompts differ: "head" (tools and thinking), a message with its number from 1, or a
    token with its place from 0. `words` stand between the texts `before` and `after`, which have an ellipsis
    where they are shortened.
    """

    file: str | None
    against_file: str | None
    part: str | None = None
    before: str = ""
    words: str = ""
    against_words: str = ""
    after: str = ""


@frozen(kw_only=True)
class PromptComparison:
    """The result of a comparison. `requests` counts the requests that ask the model, `equal` those of them
    with a counterpart; `errors` name the requests that could not be read.
    """

    requests: int
    against_requests: int
    equal: int
    first: Difference | None
    errors: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether each session has all prompts of the other, and every request could be read."""
        return self.first is None and not self.errors


@frozen(kw_only=True)
class _Prompt:
    file: str
    conversation: Conversation
    path: RequestPath

    @property
    def key(self) -> str:
        return self.path.key


@frozen(kw_only=True)
class TokenPrompt:
    """The prompt of a turn: the first `length` ids of a row. Equal ids have equal keys."""

    file: str
    row: "array[int]"
    length: int
    key: str


def compare_sessions(one: Sequence[RecordedRequest], other: Sequence[RecordedRequest]) -> PromptComparison:
    """Compare two sessions, each in the order of its requests."""
    memo = FingerprintCache()
    left, right = _prompts(one, memo, first=0), _prompts(other, memo, first=len(one))
    left_alone, right_alone = _alone(left, right), _alone(right, left)
    return PromptComparison(
        requests=len(left),
        against_requests=len(right),
        equal=len(left) - len(left_alone),
        first=_first(left_alone, right_alone),
        errors=tuple(f"{each.file}: {each.error}" for each in (*one, *other) if each.error is not None),
    )


def _prompts(recorded: Sequence[RecordedRequest], memo: FingerprintCache, *, first: int) -> list[_Prompt]:
    """The requests that ask the model. A request whose tools cannot be read is equal to no other."""
    return [
        _Prompt(
            file=each.file,
            conversation=each.request.conversation,
            path=path_of(each.request.conversation, memo, number),
        )
        for number, each in enumerate(recorded, first)
        if each.request is not None
    ]


P = TypeVar("P", _Prompt, TokenPrompt)


def _alone(prompts: Sequence[P], others: Sequence[P]) -> list[P]:
    """The prompts that the other session does not have, or does not have as often."""
    left = Counter(each.key for each in others)
    alone = []
    for each in prompts:
        left[each.key] -= 1
        if left[each.key] < 0:
            alone.append(each)
    return alone


def _first(left: Sequence[_Prompt], right: Sequence[_Prompt]) -> Difference | None:
    if not left or not right:
        return _surplus_request(left, right)
    one = left[0]
    # max() takes the first of several.
    return _difference(one, max(right, key=lambda each: _shared(one.path, each.path)))


def _difference(one: _Prompt, other: _Prompt) -> Difference:
    """Where two prompts with different keys first differ."""
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


def first_difference(recorded: Conversation, sent: Conversation) -> str | None:
    """How a request differs from the one that was recorded in its place, as the rest of a sentence. None if
    both have the same path.
    """
    memo = FingerprintCache()
    one, other = (
        _Prompt(file=name, conversation=each, path=path_of(each, memo, number))
        for number, (name, each) in enumerate((("recorded", recorded), ("sent", sent)))
    )
    if one.key == other.key:
        return None
    found = _difference(one, other)
    words, sent_words = (
        f'"{shortened(" ".join(each.split()), SHOWN)}"' if each.strip() else "nothing"
        for each in (found.words, found.against_words)
    )
    after = " ".join(found.before.split())
    return f'in {found.part}, after "{after}", it has {sent_words} where {words} was recorded'


def _surplus_request(left: Sequence[P], right: Sequence[P]) -> Difference | None:
    """What one session has beyond the other; None if neither has anything left."""
    if not left and not right:
        return None
    return Difference(file=left[0].file if left else None, against_file=right[0].file if right else None)


def _shared(one: RequestPath, other: RequestPath) -> int:
    """How many keys two paths have in common from their root; 0 if the roots differ."""
    pairs = zip(one.keys, other.keys, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ── finished sessions ─────────────────────────────────────────────────────────


def token_prompts(trajectory: Trajectory) -> list[TokenPrompt]:
    """The prompts of a session's turns that its rows hold, in the order of the turns. Raises Refused for a
    row in parts that leave tokens out.
    """
    found: dict[int, TokenPrompt] = {}
    row: array[int] = array("i")
    for trace in trajectory.traces:
        if trace.offset > len(row):
            raise Refused(
                f"a row of session {trajectory.session_id} is in parts without all of its prompts: compare"
                " sessions of tasks without max_row_tokens"
            )
        row = row[: trace.offset] + trace.token_ids  # The parts before this one hold its beginning.
        digest, end = blake2b(digest_size=_KEY_BYTES), 0
        for span in sorted(trace.turn_spans, key=lambda span: span.start):
            start = trace.offset + span.start
            digest.update(row[end:start].tobytes())
            end = start
            if span.turn not in found:
                key = digest.copy().hexdigest()
                found[span.turn] = TokenPrompt(file=f"turn {span.turn}", row=row, length=start, key=key)
    return [found[turn] for turn in sorted(found)]


def compare_tokens(
    one: Sequence[TokenPrompt], other: Sequence[TokenPrompt], text: Callable[[Sequence[int]], str]
) -> PromptComparison:
    """Compare the prompts of two finished sessions; `text` decodes ids."""
    left, right = _alone(one, other), _alone(other, one)
    first = _surplus_request(left, right)
    if left and right:
        here = left[0]
        there = max(right, key=lambda each: _shared_ids(here, each))
        first = _token_difference(here, there, text)
    return PromptComparison(
        requests=len(one), against_requests=len(other), equal=len(one) - len(left), first=first
    )


def _token_difference(
    here: TokenPrompt, there: TokenPrompt, text: Callable[[Sequence[int]], str]
) -> Difference:
    place = _shared_ids(here, there)
    one, other = (
        text(each.row[max(0, place - CONTEXT) : min(each.length, place + WINDOW)]) for each in (here, there)
    )
    before, words, against_words, after = _words(one, other)
    return Difference(
        file=here.file,
        against_file=there.file,
        part=f"token {place}",
        before=before,
        words=words,
        against_words=against_words,
        after=after,
    )


def _shared_ids(one: TokenPrompt, other: TokenPrompt) -> int:
    return _common_prefix(one.row, other.row, min(one.length, other.length))


# ── words ─────────────────────────────────────────────────────────────────────


def _head(conversation: Conversation) -> str:
    tools = dump_json([plain(tool) for tool in conversation.tools]).decode()
    return f"thinking {conversation.thinking}\n{tools}"


def _message_at(prompt: _Prompt, place: int) -> Message | None:
    messages = prompt.path.messages
    return messages[place] if place < len(messages) else None


def _text(message: Message | None) -> str:
    """A message as text: its role, so that another role is a difference too, then its text and its calls."""
    if message is None:
        return ""
    calls = (f"{call.name} {call.arguments}" for call in message.calls)
    return "\n".join((f"{message.role}: {message.text}", *calls))


def _words(one: str, other: str) -> tuple[str, str, str, str]:
    """The first words that differ, with the text before and after them in `one`."""
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
    """The place where the first word that differs begins."""
    shared = _common_prefix(one, other, min(len(one), len(other)))
    found = _WORD_END_PATTERN.search(one[max(0, shared - WINDOW) : shared])
    return shared - (len(found[0]) if found else 0)


def _common_prefix(one: Sequence[Any], other: Sequence[Any], most: int) -> int:
    """The length of the common prefix, `most` at most. Slices are compared at the speed of C."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
