"""prime-rl: the fields of a `TrainingSample` for each row, and the array that its msgspec struct is on the
wire.

All columns have the row's length. `temperatures` are 1 and `advantages` 0 on tokens that are not trained;
experts have a row of zeros for the last token. It cannot carry weight versions (prime-rl keeps them per
rollout, outside the sample), rewards, top logprobs, or which session a row belongs to. A sample of a slice
(`part`) does not show its position in the whole row.
"""

from typing import Any, Final

import numpy

from polarnode.core.trajectory import Trajectory
from polarnode.trainers.rows import (
    Arrays,
    TrainedRow,
    as_arrays,
    padded,
    routed,
    rows_of,
    temperatures,
)

# The struct's fields in order: an array_like struct has only their values on the wire. The seventh holds
# image tensors.
FIELDS: Final = (
    "token_ids", "mask", "logprobs", "temperatures", "env_name", "ref_logprobs",
    "mm_kwargs", "routed_experts", "mm_token_type_ids",
    "rl_weights", "ce_weights", "ref_kl_weights", "advantages",
)  # fmt: skip


def training_samples(
    trajectory: Trajectory,
    *,
    env_name: str = "polarnode",
    advantage: float | None = None,
    temperature: float | None = None,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A TrainingSample for each row. `advantage` is the session's and is repeated for each trained token;
    without one the field is None. `temperature` is used for turns that the trajectory was read without;
    `routed_experts.data` stays bytes.
    """
    rows = [_sample(row, env_name, advantage, temperature) for row in rows_of(trajectory)]
    found: list[dict[str, Any]] = as_arrays(rows, arrays)
    return found


def on_the_wire(sample: dict[str, Any]) -> list[Any]:
    """A sample as msgspec writes and reads it: `msgpack.packb(on_the_wire(sample))` gives the same bytes."""
    values = [sample[name] for name in FIELDS]
    if sample["routed_experts"] is not None:
        values[FIELDS.index("routed_experts")] = [
            sample["routed_experts"][name] for name in ("data", "shape", "dtype")
        ]
    return values


def _sample(
    row: TrainedRow, env_name: str, advantage: float | None, temperature: float | None
) -> dict[str, Any]:
    absent: dict[str, Any] = dict.fromkeys(FIELDS)
    return absent | {
        "token_ids": row.tokens,
        "mask": row.mask.astype(bool),
        "logprobs": row.logprobs,
        "temperatures": temperatures(row, temperature),
        "env_name": env_name,
        "routed_experts": _experts(row),
        "advantages": None if advantage is None else numpy.where(row.mask == 1, advantage, 0.0),
    }


def _experts(row: TrainedRow) -> dict[str, Any] | None:
    experts = routed(row)
    if experts is None:
        return None
    whole = padded(experts, len(row.tokens))
    return {"data": whole.tobytes(), "shape": list(whole.shape), "dtype": str(whole.dtype)}
