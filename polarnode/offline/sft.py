"""A session as conversations for supervised fine-tuning, and how they compare with the tokens of the session.

Messages and tools are written as `transformers.apply_chat_template` and TRL take them: one conversation for
each main lineage, what stands at the end of its last training row, from the first message to the last answer,
in the recorded words. Nothing is decoded from tokens and nothing is repaired; where words are missing there
is no line, and a reason.

A sampled token is never encoded again in training, so the template's rendering need not equal the trained
tokens: a model may write its JSON with other whitespace, a template may leave out earlier thoughts.
`compared` reports the first difference; where they differ the tokens are right.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from polarnode.core.codec.json import plain, read_json
from polarnode.core.codec.limits import nested_deeper
from polarnode.core.conversation import Conversation, Json, Message
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trace, Trajectory, Turn, line_of, sequence
from polarnode.merge.transcript import transcript
from polarnode.tokens.rendering import tools_shape

Found = Literal["equal", "differs", "refused"]
_TAIL: Final = 4  # ids a template writes after the last turn's end: a line feed, as a rule


@frozen(kw_only=True)
class Comparison:
    """`at` is the first token that differs, of `length` trained ones."""

    found: Found
    at: int = 0
    length: int = 0
    why: str = ""


def compared(trained: Sequence[int], rendered: Sequence[int]) -> Comparison:
    """Equal when the rendering is the trained sequence, or that and what the template writes between two
    turns.
    """
    shared = next(
        (place for place, (one, other) in enumerate(zip(trained, rendered, strict=False)) if one != other),
        min(len(trained), len(rendered)),
    )
    if shared == len(trained) and len(rendered) - shared <= _TAIL:
        return Comparison(found="equal", at=shared, length=len(trained))
    return Comparison(found="differs", at=shared, length=len(trained))


@frozen(kw_only=True)
class SftLine:
    """One line of sft.jsonl, and the exact tokens of the same conversation."""

    body: dict[str, Json]
    token_ids: Sequence[int]
    thinking: bool | None  # enable_thinking of the template


def sft_lines(trajectory: Trajectory) -> tuple[list[SftLine], list[str]]:
    """The lines of an accepted session, and why there is none for a lineage, a sentence each."""
    turns = {turn.index: turn for turn in trajectory.turns}
    lines: list[SftLine] = []
    missing: list[str] = []
    for lineage, last in sorted(_last_turns(trajectory.traces).items()):
        conversation = transcript(turns, last)
        if conversation is None:
            missing.append(
                f"lineage {lineage} of session {trajectory.session_id} has no words: it was recorded by"
                " polarnode 0.1"
            )
        else:
            lines.append(
                SftLine(
                    body=_line(trajectory, conversation, turns, last),
                    token_ids=sequence(turns, last),
                    thinking=conversation.thinking,
                )
            )
    return lines, missing


def _last_turns(traces: Sequence[Trace]) -> dict[int, int]:
    """The turn that each main lineage's training sequences end with, the last of them."""
    found: dict[int, int] = {}
    for trace in traces:
        if trace.role == "main" and trace.turn_spans:
            found[trace.lineage] = max(found.get(trace.lineage, -1), trace.turn_spans[-1].turn)
    return found


def _line(
    trajectory: Trajectory, conversation: Conversation, turns: Mapping[int, Turn], last: int
) -> dict[str, Json]:
    return {
        "messages": list(messages_json(conversation.messages)),
        "tools": plain(tools_shape(conversation.tools)),
        "sampled": list[Json](_sampled(conversation.messages, turns, last)),
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "lineage": turns[last].lineage,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome.status,
        "harness": trajectory.harness,
        "model": trajectory.model,
        "metadata": plain(trajectory.metadata),
    }


def _sampled(messages: Sequence[Message], turns: Mapping[int, Turn], last: int) -> Iterator[int]:
    """The places of the assistant messages that were sampled in this very sequence: the others were shown as
    history.
    """
    line = line_of(turns, last) or ()
    added = [turn.new_messages.messages for turn in line if turn.new_messages is not None]
    shown = len(added[0]) if added else 0
    later = {id(message) for messages in added for message in messages}
    for place, message in enumerate(messages):
        if message.role == "assistant" and (place >= shown and id(message) not in later):
            yield place


def messages_json(messages: Sequence[Message]) -> Iterator[Json]:
    """The messages, a tool's result with the name of what was called."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        body: dict[str, Json] = {"role": message.role, "content": message.text}
        if message.thinking:
            body["reasoning_content"] = message.thinking
        if message.calls:
            body["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": _arguments(call.arguments)},
                }
                for call in message.calls
            ]
        if message.call_id is not None:
            body["tool_call_id"] = message.call_id
            if message.call_id in names:
                body["name"] = names[message.call_id]
        yield body


def _arguments(text: str) -> Json:
    """Tool-call arguments as an object, as templates require. Text that is not an object, or one that is too
    deep to be written in a row, stays as it is; empty text becomes an empty object.
    """
    if not text.strip():
        return {}
    try:
        found = read_json(text.encode("utf-8", "surrogatepass"))
    except Refused:
        return text
    return found if isinstance(found, dict) and not nested_deeper(found) else text
