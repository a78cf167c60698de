"""TRL (1.16): what a GRPOTrainer's `rollout_func` returns, and the rows of async GRPO (turns, training
sequences, rollout samples).

`rollout_func` cannot carry several rows per session (it takes one completion per prompt: keep one row with
`of_roles`, or train the rest elsewhere), weight versions, or experts. It cannot carry top logprobs either:
TRL requires a row for every token, and only trained tokens have one. TRL compares `logprobs` with its own
only when it corrects for another sampler (use_vllm). A RolloutSample has one `model_version`, by which TRL
drops stale rows: for a row that several weights sampled it is the oldest, and `metrics` counts the versions
as `weight_versions`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers.rows import (
    Absent,
    Arrays,
    Native,
    Number,
    TrainedRow,
    as_arrays,
    only_row,
    rows_of,
    sessions,
    version_number,
    versions_of,
)

Messages = Sequence[Mapping[str, Any]]
ROLLOUT: Final[Native] = {"input_ids": "numpy", "completion_mask": "numpy", "old_log_probs": "numpy"}


def rollout_output(
    group: Group | Iterable[Trajectory], *, absent: Absent | None = None, arrays: Arrays = "list"
) -> dict[str, Any]:
    """What `rollout_func` returns for these sessions, in their order: one for each prompt that it was called
    with.

    `reward`, `session_id` and `group_id` reach reward functions by name. A missing reward is None, and TRL
    trains nothing on that session. A session without a row is refused unless `absent` is given; the
    placeholder is not trained.
    """
    rows = [_rollout(each, absent) for each in sessions(group)]
    if not rows:
        raise Refused("a rollout of no session is none: TRL wants a completion for every prompt")
    found: dict[str, Any] = as_arrays({name: [row[name] for row in rows] for name in rows[0]}, arrays)
    return found


def turn_records(trajectory: Trajectory, *, arrays: Arrays = "list") -> list[list[dict[str, Any]]]:
    """The TurnRecords of each row: every prompt in full, every sample with the mask of its trained tokens."""
    records = [
        [
            {
                "prompt_ids": row.tokens[: span.start],
                "output_ids": row.tokens[span.start : span.end],
                "output_log_probs": row.logprobs[span.start : span.end],
                "output_mask": row.mask[span.start : span.end],
            }
            for span in row.trace.turn_spans
        ]
        for row in rows_of(trajectory)
    ]
    found: list[list[dict[str, Any]]] = as_arrays(records, arrays)
    return found


def training_sequences(
    trajectory: Trajectory, *, rollout_id: Any = None, arrays: Arrays = "list"
) -> list[dict[str, Any]]:
    """A TrainingSequence for each row. `rollout_id` is the session's id unless given."""
    whose = trajectory.session_id if rollout_id is None else rollout_id
    found: list[dict[str, Any]] = as_arrays(
        [_sequence(row) | {"rollout_id": whose} for row in rows_of(trajectory)], arrays
    )
    return found


def rollout_samples(
    trajectory: Trajectory,
    *,
    advantage: float,
    group_id: int,
    prompt: Messages = (),
    completion: Messages = (),
    number: Number = version_number,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A RolloutSample for each row. The messages are for TRL's logs; `arrays="native"` gives the arrays that
    TRL stacks.
    """
    shared = {
        "prompt": list(prompt),
        "completion": list(completion),
        "advantage": float(advantage),
        "group_id": group_id,
        "enqueued_at": None,
    }
    rows = [_sequence(row) | shared | _versions(row, number) for row in rows_of(trajectory)]
    found: list[dict[str, Any]] = as_arrays(rows, arrays, ROLLOUT)
    return found


def _rollout(trajectory: Trajectory, absent: Absent | None) -> dict[str, Any]:
    whose = {"session_id": trajectory.session_id, "group_id": trajectory.group_id}
    if absent is not None and not rows_of(trajectory):
        token = numpy.array([absent.token_id])
        nothing = {
            "prompt_ids": token,
            "completion_ids": token,
            "logprobs": numpy.zeros(1),
            "env_mask": numpy.zeros(1, dtype=int),
        }
        return nothing | {"reward": absent.reward} | whose
    row = only_row(trajectory)
    shared = {
        "prompt_ids": row.tokens[: row.prompt],
        "completion_ids": row.tokens[row.prompt :],
        "logprobs": row.logprobs[row.prompt :],
        "env_mask": row.mask[row.prompt :],
        "reward": row.reward,
    }
    return shared | whose


def _sequence(row: TrainedRow) -> dict[str, Any]:
    return {
        "input_ids": row.tokens.astype(numpy.int64),
        "completion_mask": row.mask.astype(numpy.int64),
        "old_log_probs": row.logprobs,
    }


def _versions(row: TrainedRow, number: Number) -> dict[str, Any]:
    versions = {number(version) for version in versions_of(row)}
    if not versions:
        raise Refused(f"{row.name} says no weight version, and a RolloutSample has one")
    metrics = {} if row.reward is None else {"reward": float(row.reward)}
    return {
        "model_version": min(versions),
        "metrics": metrics | ({"weight_versions": float(len(versions))} if len(versions) > 1 else {}),
    }
