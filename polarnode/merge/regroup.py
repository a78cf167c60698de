"""Calls of one answer that a harness shows as several messages, put together again: the answer was one, and its tokens are.

Some harnesses write each of several parallel calls as an assistant message of its own, with its result behind it. Whoever edits this joins only
what the ids prove to be one turn's, in its order, and moves nothing else; it is done before a request is planned, so that what is matched and what
is rendered are the same messages.
"""

from itertools import pairwise

from attrs import evolve

from polarnode.conversation import Message, ModelRequest
from polarnode.merge import notes
from polarnode.merge.references import PLACE_DIGITS, References


def regrouped(request: ModelRequest, references: References) -> ModelRequest:
    """The request with each answer's calls in one message. O(messages); the request itself where nothing is to be joined."""
    kept: list[Message] = []
    joined: dict[int, int] = {}  # turn to how many messages it came in
    last: int | None = None  # where the assistant message stands that only results stand behind
    for message in request.conversation.messages:
        turn = None if last is None or not _alike(kept[last], message) else _turn(kept[last], message, references)
        if turn is not None and last is not None:
            kept[last] = kept[last].joined(evolve(message, text="", thinking=""))  # its words are the first one's, or none
            joined[turn] = joined.get(turn, 1) + 1
            continue
        last = len(kept) if message.role == "assistant" else last if message.role == "tool" else None
        kept.append(message)
    if not joined:
        return request
    said = tuple(f"{notes.REGROUPED}: the calls of turn {turn} came in {count} messages and are one here" for turn, count in joined.items())
    return evolve(request, conversation=evolve(request.conversation, messages=tuple(kept)), notes=(*request.notes, *said))


def _alike(first: Message, second: Message) -> bool:
    """Whether two messages may be one, at a glance: the ids of their calls differ only in their places, and the second says nothing new."""
    if not (second.calls and first.calls and second.role == "assistant"):
        return False
    return first.calls[-1].id[:-PLACE_DIGITS] == second.calls[0].id[:-PLACE_DIGITS] and second.text in ("", first.text)


def _turn(first: Message, second: Message, references: References) -> int | None:
    """The turn whose calls both messages show, one behind the other."""
    found = [references.locate(call.id) for call in (first.calls[-1], *second.calls)]
    proven = [one for one in found if one is not None]
    in_order = all(one.rest < other.rest for one, other in pairwise(proven))
    return proven[0].index if len(proven) == len(found) and len({one.index for one in proven}) == 1 and in_order else None
