"""A session as a person would read it: what each turn was told and what it answered, as long as a judge can read.

Pure. The rule for whoever edits it: turns stand in the order they were asked, each with its number; what is left out is said where it was, in
figures, so that a judge knows what it has not seen. Every line that somebody else wrote begins with QUOTE and no line of ours does: an answer
can not pretend to be a tool's result, or another turn.
"""

from collections.abc import Iterator, Sequence

from attrs import field, frozen

from polarnode.conversation import Answer, Message, TextPart, ThinkingPart, ToolCall
from polarnode.records import Turn

HEAD = 0.3  # of what may be shown is its beginning, the rest its end: an agent's last turns tell most of what it left
QUOTE = "| "
SHOWN_ROLES = ("main", "subagent")  # titles, routers and summaries are not the agent's work


def clipped(text: str, most: int) -> str:
    """A text's beginning and end, with how much was between."""
    head, left, tail = _ends_of(text, most)
    return f"{head}\n{_left_out(left)}\n{tail}" if left else text


def quoted(text: str, most: int) -> str:
    """The same, each of its lines marked as somebody else's; every sign that ends a line for some reader ends one here."""
    head, left, tail = _ends_of(text, most)
    return "\n".join([*_lines(head), _left_out(left), *_lines(tail)] if left else _lines(text))


def _lines(text: str) -> list[str]:
    return [f"{QUOTE}{line}" for line in text.splitlines() or [""]]


def _ends_of(text: str, most: int) -> tuple[str, int, str]:
    if len(text) <= most:
        return text, 0, ""
    head = int(most * HEAD)
    return text[:head], len(text) - most, text[len(text) - most + head :]


def _left_out(count: int) -> str:
    return f"[… {count} characters are left out …]"


def _clipped_lines(text: str, most: int) -> str:
    """A text of ours in whole lines, so that none of its quotes loses its mark."""
    head, left, tail = _ends_of(text, most)
    if not left:
        return text
    kept, _, cut = head.rpartition("\n")
    lost, _, rest = tail.partition("\n")
    return "\n".join(filter(None, (kept, _left_out(left + len(cut) + len(lost)), rest)))


def shown_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of the agent's own work, in order."""
    return [turn for turn in turns if turn.role in SHOWN_ROLES]


@frozen
class Written:
    """A turn in words."""

    index: int
    lineage: int
    text: str = field(repr=False)


def written(turns: Sequence[Turn], *, message_most: int, thinking: bool) -> list[Written]:
    """The agent's own turns in words, each message in at most `message_most` characters."""
    shown = shown_turns(turns)
    return [Written(turn.index, turn.lineage, turn_text(turn, message_most=message_most, thinking=thinking)) for turn in shown]


def transcript(turns: Sequence[Written], *, most: int) -> str:
    """These turns in at most about `most` characters: from both ends, whole turns."""
    texts = [turn.text for turn in turns]
    if sum(map(len, texts)) <= most:
        return "\n\n".join(texts)
    texts = [_clipped_lines(text, most - int(most * HEAD)) for text in texts]  # so that the last one is always there
    first = _fitting(texts, int(most * HEAD))
    last = _fitting(texts[first:][::-1], most - sum(map(len, texts[:first])))
    left = turns[first : len(turns) - last]
    if not left:
        return "\n\n".join(texts)
    between = f"[… turns {left[0].index} to {left[-1].index} are left out …]"
    return "\n\n".join([*texts[:first], between, *texts[len(texts) - last :]])


def every_turn(turns: Sequence[Written], *, most: int) -> str:
    """All of these turns, the longest cut until they fit together: who scores a turn must have seen it."""
    cap = _cap([len(turn.text) for turn in turns], most)
    return "\n\n".join(_clipped_lines(turn.text, cap) for turn in turns)


def _cap(lengths: Sequence[int], most: int) -> int:
    """The length at which the longer ones are cut, so that all together are at most `most`."""
    room = most
    for place, length in enumerate(sorted(lengths)):
        cap = room // (len(lengths) - place)
        if length > cap:
            return max(1, cap)
        room -= length
    return max(lengths, default=1)


def _fitting(texts: Sequence[str], most: int) -> int:
    """How many of these, from the first on, fit together."""
    length = 0
    for count, text in enumerate(texts):
        length += len(text)
        if length > most:
            return count
    return len(texts)


def turn_text(turn: Turn, *, message_most: int, thinking: bool) -> str:
    """One turn: what is new in its prompt, and its answer."""
    told = ["(its words were not kept)"] if turn.heard is None else [_message(each, message_most) for each in turn.heard.messages]
    said = ["(no answer)"] if turn.answer is None else list(_parts(turn.answer, message_most, thinking=thinking))
    return "\n".join([f"── turn {turn.index}{_whose(turn)} ──", *told, *said, *_ends(turn)])


def _whose(turn: Turn) -> str:
    of = f", a sub-agent's (lineage {turn.lineage})" if turn.role == "subagent" else ""
    return of if turn.parent is None or turn.parent == turn.index - 1 else f"{of}, after turn {turn.parent}"


def _message(message: Message, most: int) -> str:
    calls = [_call(call, most) for call in message.calls]
    return "\n".join([f"[{message.role}]", quoted(message.text, most), *calls])


def _parts(answer: Answer, most: int, *, thinking: bool) -> Iterator[str]:
    for part in answer.parts:
        match part:
            case TextPart(text):
                yield f"[agent]\n{quoted(text, most)}"
            case ThinkingPart(text):
                if thinking:
                    yield f"[agent thinks]\n{quoted(text, most)}"
            case ToolCall():
                yield _call(part, most)


def _call(call: ToolCall, most: int) -> str:
    return f"[agent calls a tool]\n{quoted(f'{call.name} {call.arguments}', most)}"


def _ends(turn: Turn) -> Iterator[str]:
    """What a reader of the words alone would not see."""
    if turn.finish_reason not in ("stop", "tool_calls"):
        yield f"(the answer ended by {turn.finish_reason})"
    if turn.answer is not None and turn.answer.malformed_calls:
        yield f"({turn.answer.malformed_calls} tool calls in it could not be read)"
