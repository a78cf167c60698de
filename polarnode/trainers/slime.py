"""slime: the fields of a `Sample` for each row, as `Sample.from_dict` takes them.

A Sample cannot carry a weight version per token (it lists one per version span), temperatures, or top
logprobs. slime normalises rewards over the samples of a group, so a session counts once per row, unless your
reward post-processing counts by `rollout_id`, which all rows of a session share. A session without a row
becomes one Sample without tokens and with `remove_sample`, so that the group keeps its size and the status
shows how the session ended.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy

from polarnode.core.trajectory import Status, Trajectory
from polarnode.groups.group import Group
from polarnode.trainers.rows import (
    Arrays,
    Native,
    TrainedRow,
    as_arrays,
    routed,
    rows_of,
    sessions,
    versions_of,
)

Decode = Callable[[Sequence[int]], str]  # a tokenizer's decode

SAMPLE: Final[Native] = {"rollout_routed_experts": "torch"}

# slime's statuses: aborted may be retried, failed may still hold valid output, truncated reached a limit.
STATUS: Final[dict[Status, str]] = {
    "completed": "completed",
    "timeout": "truncated",
    "failed": "failed",
    "error": "failed",
    "cancelled": "aborted",
    "interrupted": "aborted",
}


def samples(
    trajectory: Trajectory,
    *,
    group_index: int | None = None,
    index: int | None = None,
    rollout_id: int | None = None,
    prompt: str | list[dict[str, str]] = "",
    label: str | None = None,
    decode: Decode | None = None,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A Sample for each row: `[Sample.from_dict(each) for each in samples(trajectory)]`. `index` is the first
    row's; later rows count up from it. `response` has text if `decode` is given.
    """
    fields = {"group_index": group_index, "rollout_id": rollout_id, "prompt": prompt, "label": label}
    rows = rows_of(trajectory)
    found = [fields | _sample(row, decode) for row in rows] or [fields | _nothing(trajectory)]
    for place, each in enumerate(found):
        each["index"] = None if index is None else index + place
    listed: list[dict[str, Any]] = as_arrays(found, arrays, SAMPLE)
    return listed


def group_samples(
    group: Group | Iterable[Trajectory], *, group_index: int, index: int = 0, **fields: Any
) -> list[dict[str, Any]]:
    """The samples of a group, session by session. `rollout_id` is the session's position in the group;
    `index` counts all samples.
    """
    found: list[dict[str, Any]] = []
    for place, trajectory in enumerate(sessions(group)):
        found += samples(
            trajectory, group_index=group_index, rollout_id=place, index=index + len(found), **fields
        )
    return found


def _sample(row: TrainedRow, decode: Decode | None) -> dict[str, Any]:
    response = row.tokens[row.prompt :]
    turns, experts = row.turns, routed(row)
    status = STATUS[row.trajectory.outcome.status]
    if status == "completed" and row.trace.finish_reason == "length":
        status = "truncated"
    return {
        "tokens": row.tokens,
        "response": "" if decode is None else decode(response.tolist()),
        "response_length": len(response),
        "reward": row.reward,
        "loss_mask": row.mask[row.prompt :],
        "weight_versions": list(versions_of(row)),
        "rollout_log_probs": row.logprobs[row.prompt :],
        "rollout_routed_experts": None if experts is None else experts.astype(numpy.int32),
        "remove_sample": False,
        "status": status,
        "metadata": {**row.trajectory.metadata, "polarnode": _own(row.trajectory, row)},
        "session_id": row.trajectory.session_id,
        "prefix_cache_info": {
            "cached_tokens": sum(turn.usage.cached_tokens for turn in turns),
            "total_prompt_tokens": sum(turn.prompt_length for turn in turns),
        },
    }


def _nothing(trajectory: Trajectory) -> dict[str, Any]:
    status = STATUS[trajectory.outcome.status]
    return {
        "tokens": [],
        "response": "",
        "response_length": 0,
        "reward": trajectory.reward,
        "loss_mask": [],
        "weight_versions": [],
        "rollout_log_probs": [],
        "rollout_routed_experts": None,
        "remove_sample": True,
        "status": status if status == "aborted" else "failed",
        "metadata": {**trajectory.metadata, "polarnode": _own(trajectory, None)},
        "session_id": trajectory.session_id,
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }


def _own(trajectory: Trajectory, row: TrainedRow | None) -> dict[str, Any]:
    place = (
        {}
        if row is None
        else {
            "row": row.index,
            "rows": row.count,
            "role": row.trace.role,
            "part": row.trace.part,
            "parts": row.trace.parts,
        }
    )
    outcome = trajectory.outcome
    fields = {
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
    }
    return fields | {"outcome": outcome.status, "reason": outcome.reason} | place
