"""SkyRL: a `GeneratorOutput` for a batch of sessions.

With several rows per session it is step-wise: rows in order, `is_last_step` on the last of each session.
SkyRL then gives all rows of a session the advantage of the last row's reward, so lineages with different
rewards are refused. It cannot carry weight versions, temperatures, top logprobs, or rewards of turns.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy

from polarnode.core.conversation import FinishReason
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers.rows import (
    Absent,
    Array,
    Arrays,
    Native,
    TrainedRow,
    as_arrays,
    only_row,
    padded,
    routed,
    rows_of,
    sessions,
)

# SkyRL has stop and length, and treats everything but stop as unfinished.
STOPS: Final[dict[FinishReason, str]] = {
    "stop": "stop",
    "tool_calls": "stop",
    "stop_string": "stop",
    "length": "length",
    "abort": "abort",
    "error": "error",
}
# the stop reason of a placeholder, which SkyRL treats as unfinished
STAND_IN: Final = "absent"
OUTPUT: Final[Native] = {"rollout_expert_indices": "numpy"}


def generator_output(
    group: Group | Iterable[Trajectory],
    *,
    step_wise: bool | None = None,
    absent: Absent | None = None,
    experts: bool = True,
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """The GeneratorOutput of these sessions, in their order. `step_wise` allows several rows per session; by
    default it is on if any session has several.

    A session without a row or a reward is refused. With `absent`, an untrained placeholder with its reward
    replaces a session without a row. A batch in which only some rows have their experts is refused too:
    `experts=False` leaves all experts out.
    """
    given_sessions = sessions(group)
    wise = any(len(rows_of(each)) > 1 for each in given_sessions) if step_wise is None else step_wise
    rows = [entry for each in given_sessions for entry in _entries(each, wise, absent)]
    if not rows:
        raise Refused("a GeneratorOutput of no session is none")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    output = columns | {
        "rollout_metrics": None,
        "rollout_expert_indices": _all_or_none(columns) if experts else None,
        "is_last_step": columns["is_last_step"] if wise else None,
    }
    found: dict[str, Any] = as_arrays(output, arrays, OUTPUT)
    return found


def _entries(trajectory: Trajectory, step_wise: bool, absent: Absent | None) -> list[dict[str, Any]]:
    rows = (
        rows_of(trajectory)
        if step_wise
        else (() if absent is not None and not rows_of(trajectory) else (only_row(trajectory),))
    )
    if not rows:
        return [_stand_in(trajectory, absent)]
    if len({row.reward for row in rows}) > 1:
        raise Refused(
            f"the rows of session {trajectory.session_id} have different rewards, and SkyRL gives all of them"
            " the last one's"
        )
    return [_entry(row) for row in rows]


def _entry(row: TrainedRow) -> dict[str, Any]:
    if row.reward is None:
        raise Refused(
            f"session {row.trajectory.session_id} has no reward, and SkyRL wants one for each row: leave the"
            " session out"
        )
    experts = routed(row)
    return {
        "prompt_token_ids": row.tokens[: row.prompt],
        "response_ids": row.tokens[row.prompt :],
        "rewards": float(row.reward),
        "loss_masks": row.mask[row.prompt :],
        "stop_reasons": STOPS[row.trace.finish_reason],
        "rollout_logprobs": row.logprobs[row.prompt :],
        "rollout_expert_indices": None if experts is None else padded(experts, len(row.tokens)),
        "is_last_step": row.last,
        **_whose(row.trajectory),
    }


def _whose(trajectory: Trajectory) -> dict[str, Any]:
    evaluation = trajectory.metrics.get("evaluation")
    return {
        "trajectory_ids": {"instance_id": trajectory.group_id, "repetition_id": trajectory.sample_index},
        "trajectory_generation_times": trajectory.timing.run_s,
        "env_metrics": {
            **(evaluation if isinstance(evaluation, dict) else {}),
            "outcome": trajectory.outcome.status,
        },
    }


def _stand_in(trajectory: Trajectory, absent: Absent | None) -> dict[str, Any]:
    if absent is None or absent.reward is None:
        raise Refused(
            f"session {trajectory.session_id} has no row to train, and SkyRL wants one for each prompt: leave"
            " it out, or pass absent=Absent(token_id=…, reward=…)"
        )
    token = numpy.array([absent.token_id])
    return {
        "prompt_token_ids": token,
        "response_ids": token,
        "rewards": float(absent.reward),
        "loss_masks": numpy.zeros(1, dtype=numpy.uint8),
        "stop_reasons": STAND_IN,
        "rollout_logprobs": numpy.zeros(1, dtype=numpy.float32),
        "rollout_expert_indices": None,
        "is_last_step": True,
        **_whose(trajectory),
    }


def _all_or_none(columns: dict[str, list[Any]]) -> list[Array] | None:
    """SkyRL takes the experts of every row of a batch, or of none. Placeholders have none and get zeros."""
    found: list[Array | None] = columns["rollout_expert_indices"]
    there = [each for each in found if each is not None]
    if not there:
        return None
    return [
        each if each is not None else _no_experts(there[0], reason)
        for each, reason in zip(found, columns["stop_reasons"], strict=True)
    ]


def _no_experts(like: Array, stop_reason: str) -> Array:
    if stop_reason != STAND_IN:
        raise Refused(
            "some of these rows carry their experts and some do not, and SkyRL has those of all or of none:"
            " pass experts=False"
        )
    return numpy.zeros((2, *like.shape[1:]), dtype=like.dtype)
