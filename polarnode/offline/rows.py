"""The content of a file of training data: the training rows of sessions in Parquet, or their conversations
for SFT.

Parquet: token ids, mask and logprobs are packed columns, with the session they belong to.
docs/offline-data.md documents the schema: columns are added, never renamed. Numbers go from packed arrays to
columns without a Python object for each, and every row is an exact trace: a reader gets exactly what was
trained on. pyarrow is imported only when a table is made (`pip install 'polarnode[data]'`).

Conversations: messages and tools are written in the form that `transformers.apply_chat_template` and TRL
take. There is one conversation for each main lineage: that at the end of its last training row, from the
first message to the last answer, in the recorded words. Nothing is decoded from tokens and nothing is
repaired; if words are missing, there is a reason in place of a line. A sampled token is never encoded again
in training, so the template's rendering need not equal the trained tokens: a model may write its JSON with
other whitespace, a template may leave out earlier thoughts. `compared` reports the first difference; if the
two differ, the tokens are right.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

from polarnode.core.codec.json import dump_json, plain, read_json
from polarnode.core.codec.limits import exceeds_depth
from polarnode.core.conversation import Conversation, Json, Message
from polarnode.core.errors import ConfigError, Refused, boundary
from polarnode.core.trajectory import Trace, Trajectory, Turn, line_of, sequence
from polarnode.merge.figures import transcript
from polarnode.tokens.rendering import tools_shape

if TYPE_CHECKING:
    import pyarrow as pa

# ── rows in Parquet ───────────────────────────────────────────────────────────

VERSION: Final = b"1"
# The tokens of a row group. They make 9 MB of columns, which is small enough to hold and large enough to
# compress.
ROW_GROUP_TOKENS: Final = 1 << 20


@frozen(kw_only=True)
class ParquetRow:
    """One trace and its session."""

    trajectory: Trajectory
    trace: Trace
    accepted: bool
    held_out: bool

    @property
    def tokens(self) -> int:
        return len(self.trace.token_ids)


def rows_of(trajectory: Trajectory, *, accepted: bool, held_out: bool) -> list[ParquetRow]:
    """A row for each trace of a session."""
    return [
        ParquetRow(trajectory=trajectory, trace=trace, accepted=accepted, held_out=held_out)
        for trace in trajectory.traces
    ]


def schema() -> "pa.Schema":
    """The schema of the columns. Raises ConfigError if pyarrow is not installed."""
    pa = arrow()
    turn_span = pa.struct(
        [("turn", pa.int32()), ("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64())]
    )
    version_span = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
    columns: list[tuple[str, Any]] = [
        ("session_id", pa.string()),
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("sample_index", pa.int32()),
        ("lineage", pa.int32()),
        ("role", pa.string()),
        ("part", pa.int32()),
        ("parts", pa.int32()),
        ("offset", pa.int64()),
        ("prompt_length", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("turn_spans", pa.list_(turn_span)),
        ("version_spans", pa.list_(version_span)),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("session_reward", pa.float64()),
        ("outcome", pa.string()),
        ("harness", pa.string()),
        ("model", pa.string()),
        ("accepted", pa.bool_()),
        ("metadata", pa.string()),
        ("teacher_logprobs", pa.list_(pa.float32())),
    ]
    return pa.schema(columns, metadata={b"polarnode.rows": VERSION})


def table(rows: Sequence[ParquetRow]) -> "pa.Table":
    """The rows of one row group as a table."""
    pa = arrow()
    plain = [_plain_columns(row) for row in rows]
    packed: Mapping[str, Any] = {
        "token_ids": _lists(pa, [row.trace.token_ids for row in rows], pa.int32(), 4),
        "loss_mask": _lists(pa, [row.trace.loss_mask for row in rows], pa.uint8(), 1),
        "logprobs": _lists(pa, [row.trace.logprobs for row in rows], pa.float32(), 4),
    }
    columns = schema()
    made = [
        packed[each.name]
        if each.name in packed
        else pa.array([row[each.name] for row in plain], type=each.type)
        for each in columns
    ]
    return pa.Table.from_arrays(made, schema=columns)


def _plain_columns(row: ParquetRow) -> dict[str, Json]:
    trajectory, trace = row.trajectory, row.trace
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "lineage": trace.lineage,
        "role": trace.role,
        "part": trace.part,
        "parts": trace.parts,
        "offset": trace.offset,
        "prompt_length": trace.prompt_length,
        "turn_spans": plain(trace.turn_spans),
        "version_spans": plain(trace.version_spans),
        "finish_reason": trace.finish_reason,
        "reward": trace.reward,
        "session_reward": trajectory.reward,
        "outcome": trajectory.outcome.status,
        "harness": trajectory.harness,
        "model": trajectory.model,
        "accepted": row.accepted,
        "metadata": dump_json(plain(trajectory.metadata)).decode(),
        "teacher_logprobs": None if trace.teacher_logprobs is None else trace.teacher_logprobs.tolist(),
    }


def _lists(pa: Any, values: "Sequence[array[Any] | bytes]", kind: Any, width: int) -> Any:
    """A column of lists that is made from the memory of packed numbers."""
    offsets = array("i", [0])
    for value in values:
        offsets.append(offsets[-1] + len(value))
    data = b"".join(memoryview(value).cast("B") for value in values)
    numbers = pa.Array.from_buffers(kind, len(data) // width, [None, pa.py_buffer(data)])
    places = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets.tobytes())])
    return pa.ListArray.from_arrays(places, numbers)


def arrow() -> Any:
    """The pyarrow module. Raises ConfigError with the remedy if it is not installed."""
    with boundary(
        ConfigError,
        "rows.parquet needs pyarrow: pip install 'polarnode[data]', or leave the rows out with --rows none",
    ):
        import pyarrow as pa
    return pa


# ── conversations ─────────────────────────────────────────────────────────────

Found = Literal["equal", "differs", "refused"]
_MAX_TAIL_IDS: Final = 4  # ids that a template writes after the last turn's end, usually a line feed


@frozen(kw_only=True)
class TokenComparison:
    """A comparison of a rendering with the trained tokens. `at` is the first of the `length` trained tokens
    that differs.
    """

    found: Found
    at: int = 0
    length: int = 0
    why: str = ""


def compared(trained: Sequence[int], rendered: Sequence[int]) -> TokenComparison:
    """Compare a rendering with the trained sequence. They are equal if the rendering is that sequence, or
    that sequence followed by what the template writes between two turns.
    """
    shared = next(
        (place for place, (one, other) in enumerate(zip(trained, rendered, strict=False)) if one != other),
        min(len(trained), len(rendered)),
    )
    if shared == len(trained) and len(rendered) - shared <= _MAX_TAIL_IDS:
        return TokenComparison(found="equal", at=shared, length=len(trained))
    return TokenComparison(found="differs", at=shared, length=len(trained))


@frozen(kw_only=True)
class SftLine:
    """One line of sft.jsonl, and the exact tokens of the same conversation."""

    body: dict[str, Json]
    token_ids: Sequence[int]
    thinking: bool | None  # the template's enable_thinking


def sft_lines(trajectory: Trajectory) -> tuple[list[SftLine], list[str]]:
    """The lines of an accepted session, and a sentence for each lineage that has no line."""
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
    """The last turn with which the training sequences of each main lineage end."""
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
        "sampled": list[Json](_sampled(conversation.messages, turns, last, inherited=trajectory.inherited)),
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


def _sampled(
    messages: Sequence[Message], turns: Mapping[int, Turn], last: int, *, inherited: int
) -> Iterator[int]:
    """The positions of the assistant messages that were sampled in this very sequence. The others were shown
    as history, or belong to turns that a fork inherited.
    """
    line = line_of(turns, last) or ()
    added = [turn.new_messages.messages for turn in line if turn.new_messages is not None]
    shown = len(added[0]) if added else 0
    parents = [turn.index for turn in line if turn.index < inherited]
    before = transcript(turns, parents[-1]) if parents else None
    shown = shown if before is None else max(shown, len(before.messages))
    later = {id(message) for messages in added for message in messages}
    for place, message in enumerate(messages):
        if message.role == "assistant" and (place >= shown and id(message) not in later):
            yield place


def messages_json(messages: Sequence[Message]) -> Iterator[Json]:
    """The messages as JSON; a tool's result has the name of the tool that was called."""
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
    return found if isinstance(found, dict) and not exceeds_depth(found) else text
