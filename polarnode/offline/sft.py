"""How far a conversation in words is the tokens a model was trained on: the chat template's rendering of it
against the sequence itself.

A sampled token is never encoded again in training, so the two need not be equal: a model may write its JSON
with other blanks, a template may leave out what was thought before. The rule for whoever edits it: it only
compares; where they differ the tokens are right.

A session as conversations for supervised fine-tuning: messages and tools, as
`transformers.apply_chat_template` and TRL take them.

One conversation a main lineage: what stands at the end of its last training sequence, from the first message
to the last answer, in the words that were said. The rule for whoever edits it: nothing is read back from
tokens, nothing is repaired; where words are missing there is no line, and a reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from polarnode.core.codec.json import plain, read_json
from polarnode.core.codec.turns import line_of, sequence
from polarnode.core.conversation import Conversation, Json, Message, ToolCall
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trace, Trajectory, Turn
from polarnode.merge.transcript import transcript
from polarnode.tokens.rendering import tools_shape

# ── fidelity ────────────────────────────────────────────────────────────

Found = Literal["equal", "differs", "refused"]
_TAIL: Final = 4  # ids a template writes behind the last turn's end: a line feed, as a rule


@frozen(kw_only=True)
class Compared:
    """`at` is the first token that differs, of `length` trained ones."""

    found: Found
    at: int = 0
    length: int = 0
    why: str = ""


def compared(trained: Sequence[int], rendered: Sequence[int]) -> Compared:
    """Equal when the rendering is the trained sequence, or that and what the template writes between two
    turns.
    """
    shared = next(
        (place for place, (one, other) in enumerate(zip(trained, rendered, strict=False)) if one != other),
        min(len(trained), len(rendered)),
    )
    if shared == len(trained) and len(rendered) - shared <= _TAIL:
        return Compared(found="equal", at=shared, length=len(trained))
    return Compared(found="differs", at=shared, length=len(trained))


# ── sft ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SftLine:
    """One line of sft.jsonl, and the exact tokens of the same conversation as the model had them, for whoever
    compares.
    """

    body: dict[str, Json]
    token_ids: Sequence[int]
    thinking: bool | None  # enable_thinking of the template


def sft_lines(trajectory: Trajectory) -> tuple[list[SftLine], list[str]]:
    """The lines of an accepted session, and why there is none for a lineage, a sentence each."""
    turns = {turn.index: turn for turn in trajectory.turns}
    lines: list[SftLine] = []
    missing: list[str] = []
    for lineage, last in sorted(_last_turns(trajectory.traces).items()):
        said = transcript(turns, last)
        if said is None:
            missing.append(
                f"lineage {lineage} of session {trajectory.session_id} has no words: it was recorded by"
                " polarnode 0.1"
            )
        else:
            lines.append(
                SftLine(
                    body=_line(trajectory, said, turns, last),
                    token_ids=sequence(turns, last),
                    thinking=said.thinking,
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
    trajectory: Trajectory, said: Conversation, turns: Mapping[int, Turn], last: int
) -> dict[str, Json]:
    return {
        "messages": list(messages_json(said.messages)),
        "tools": plain(tools_shape(said.tools)),
        "sampled": list[Json](_sampled(said.messages, turns, last)),
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
    """The places of the assistant messages that were sampled in this very sequence: the other ones were shown
    to it as history.
    """
    line = line_of(turns, last) or ()
    heard = [turn.heard.messages for turn in line if turn.heard is not None]
    shown = len(heard[0]) if heard else 0
    later = {id(message) for messages_heard in heard for message in messages_heard}
    for place, message in enumerate(messages):
        if message.role == "assistant" and (place >= shown and id(message) not in later):
            yield place


# ── messages as chat templates take them ──────────────────────────────────────


def messages_json(messages: Sequence[Message]) -> Iterator[Json]:
    """The messages, a tool's result with the name of what was called."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        yield _message_json(message, names)


def _message_json(message: Message, names: Mapping[str, str]) -> dict[str, Json]:
    said: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.thinking:
        said["reasoning_content"] = message.thinking
    if message.calls:
        said["tool_calls"] = [_call_json(call) for call in message.calls]
    if message.call_id is not None:
        said["tool_call_id"] = message.call_id
        if message.call_id in names:
            said["name"] = names[message.call_id]
    return said


def _call_json(call: ToolCall) -> dict[str, Json]:
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.name, "arguments": _arguments(call.arguments)},
    }


def _arguments(text: str) -> Json:
    """An object, as templates want it; what is none stays the text it is, and nothing at all is an
    empty one.
    """
    if not text.strip():
        return {}
    try:
        found = read_json(text.encode("utf-8", "surrogatepass"))
    except Refused:
        return text
    return found if isinstance(found, dict) else text
