"""Re-tokenize a row from its conversation, as text gateways do: render, encode, train the answers' spans.

The other arm of the ablation. It favours the text: every message is as the node received it, the thoughts are
kept, and a span begins and ends where the template itself puts an answer.
"""

from typing import Any

from polarnode.core.conversation import Message
from polarnode.core.trajectory import Trace, Trajectory, Turn
from polarnode.merge.figures import parse_tools
from polarnode.tokens.rendering import messages_shape, tools_shape


def retold(trace: Trace, session: Trajectory, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids and mask of a trace's conversation; `session` has its turns in full."""
    turns = {turn.index: turn for turn in session.turns}
    line = [turns[span.turn] for span in trace.turn_spans]
    recorded, places = conversation(line)
    messages, tools = (
        messages_shape(recorded),
        tools_shape(parse_tools(line[0].new_messages)) if line[0].new_messages is not None else [],
    )

    def rendered(upto: int, *, asking: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:upto], tools=tools or None, tokenize=False, add_generation_prompt=asking
            )
        )

    whole = rendered(len(messages), asking=False)
    starts = [common(rendered(at, asking=True), whole) for at in places]
    # what follows a turn's end is the template's
    ends = [len(whole[: common(rendered(at + 1, asking=False), whole)].rstrip()) for at in places]
    spans = list(zip(starts, ends, strict=True))
    found = tokenizer(whole, return_offsets_mapping=True, add_special_tokens=False)
    mask = [
        int(any(start <= one and two <= end for start, end in spans)) for one, two in found["offset_mapping"]
    ]
    return list(found["input_ids"]), mask


def conversation(line: list[Turn]) -> tuple[list[Message], list[int]]:
    """The messages of a line of turns, and which of them are answers that were sampled."""
    messages: list[Message] = []
    places = []
    for turn in line:
        messages += turn.new_messages.messages if turn.new_messages is not None else ()
        places.append(len(messages))
        # what the harness was given
        messages.append(Message(role="assistant") if turn.answer is None else turn.answer.as_message())
    return messages, places


def common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next(
        (at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs),
        min(len(one), len(other)),
    )
