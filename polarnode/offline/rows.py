"""Training rows in a Parquet file: token ids, mask and logprobs as packed columns, with the session they
belong to.

The schema is documented in docs/offline-data.md: columns are added, never renamed. Numbers go from packed
array to column without a Python object each, and every row is an exact trace: what is read back is what was
trained on. pyarrow is imported only when a table is made (`pip install 'polarnode[data]'`).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, boundary
from polarnode.core.trajectory import Trace, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

VERSION: Final = b"1"
# tokens of a row group: 9 MB of columns, few enough to hold, many enough to compress
GROUP_TOKENS: Final = 1 << 20


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
    """The columns. ConfigError where pyarrow is not installed."""
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
    ]
    return pa.schema(columns, metadata={b"polarnode.rows": VERSION})


def table(rows: Sequence[ParquetRow]) -> "pa.Table":
    """Rows as one table, a row group's worth of them."""
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
    }


def _lists(pa: Any, values: "Sequence[array[Any] | bytes]", kind: Any, width: int) -> Any:
    """A column of lists from packed numbers, by their memory."""
    offsets = array("i", [0])
    for value in values:
        offsets.append(offsets[-1] + len(value))
    data = b"".join(memoryview(value).cast("B") for value in values)
    numbers = pa.Array.from_buffers(kind, len(data) // width, [None, pa.py_buffer(data)])
    places = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets.tobytes())])
    return pa.ListArray.from_arrays(places, numbers)


def arrow() -> Any:
    """pyarrow. ConfigError with the remedy where it is not installed."""
    with boundary(
        ConfigError,
        "rows.parquet needs pyarrow: pip install 'polarnode[data]', or leave the rows out with --rows none",
    ):
        import pyarrow as pa
    return pa
