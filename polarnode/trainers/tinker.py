"""Tinker: a `Datum` for each row, shifted by one as its losses require: the input is every token but the
last, the targets every token but the first.

A Datum cannot carry weight versions, temperatures, experts, rewards or its session's id: keep those
separately. A row whose first token is trained is refused, because the shift leaves that token without an
input.

A Datum has no field for a teacher. Distillation adds the reverse KL to `advantages`, as tinker-cookbook does
(9dfcc3a2, tinker_cookbook/distillation/train_on_policy.py, `incorporate_kl_penalty`).
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.trainers.rows import Array, Arrays, NativeKinds, TrainedRow, as_arrays, rows_of

Kind = Literal["int64", "float32"]
NATIVE_DATUM: Final[NativeKinds] = {"data": "numpy"}


def datums(
    trajectory: Trajectory,
    *,
    advantage: float | Sequence[float] | None = None,
    kl_penalty_coef: float = 0.0,
    mask: bool = True,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A Datum for each row, for reinforcement-learning losses: `target_tokens`, `logprobs`, and `advantages`
    if one is given, for the session or for each of its rows. `mask` is for the cookbook, which removes it
    before forward_backward; remove it yourself if you call that directly.

    With a `kl_penalty_coef` (the cookbook's is 1), that many times the difference of the teacher's logprob
    and the token's own is added to the advantage of every trained token; without an `advantage` that is pure
    distillation. Raises Refused for a row without its teacher's logprobs.
    """
    rows = []
    trained_rows = rows_of(trajectory)
    each = advantage if isinstance(advantage, Sequence) else [advantage] * len(trained_rows)
    if len(each) != len(trained_rows):
        raise Refused(
            f"{len(each)} advantages were given for the {len(trained_rows)} rows of session"
            f" {trajectory.session_id}: give one for each row, or one number"
        )
    for row, one in zip(trained_rows, each, strict=True):
        trained = row.mask[1:]
        inputs = {"logprobs": _tensor_data(row.logprobs[1:], "float32")}
        if one is not None or kl_penalty_coef:
            advantages = numpy.where(trained == 1, one or 0.0, 0.0)
            if kl_penalty_coef:
                advantages += kl_penalty_coef * (row.teacher - row.logprobs)[1:]
            inputs["advantages"] = _tensor_data(advantages, "float32")
        if mask:
            inputs["mask"] = _tensor_data(trained, "float32")
        rows.append(_row_datum(row, inputs))
    found: list[dict[str, Any]] = as_arrays(rows, arrays, NATIVE_DATUM)
    return found


def supervised_datums(trajectory: Trajectory, *, arrays: Arrays = "list") -> list[dict[str, Any]]:
    """A Datum for each row, for `cross_entropy`: `target_tokens` and `weights`, 1 where trained."""
    rows = [
        _row_datum(row, {"weights": _tensor_data(row.mask[1:], "float32")}) for row in rows_of(trajectory)
    ]
    found: list[dict[str, Any]] = as_arrays(rows, arrays, NATIVE_DATUM)
    return found


def _row_datum(row: TrainedRow, inputs: dict[str, Any]) -> dict[str, Any]:
    if row.mask[0]:
        raise Refused(
            f"the first token of {row.name} is trained, and Tinker's shift has no place for it: nothing"
            " stands before it"
        )
    chunk = {"type": "encoded_text", "tokens": row.tokens[:-1]}
    return {
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": {"target_tokens": _tensor_data(row.tokens[1:], "int64"), **inputs},
    }


def _tensor_data(values: Array, kind: Kind) -> dict[str, Any]:
    """The fields of a TensorData."""
    return {"data": values.astype(kind), "dtype": kind, "shape": [len(values)]}
