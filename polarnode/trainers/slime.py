"""slime: the fields of a `Sample` for each row, as `Sample.from_dict` takes them.

Source: THUDM/slime 624b824 (0.3.1), `slime/utils/types.py`. A Sample is then read by `slime/ray/rollout.py`
(`_convert_samples_to_train_data`), `slime/utils/dp_schedule.py` and `slime/backends/megatron_utils/data.py`.

A Sample cannot carry temperatures or top logprobs. It lists weight versions, one per version span; the spans
themselves are in `metadata["polarnode"]["version_spans"]`. All rows of a session share `rollout_id` and
`index`, by which slime counts a session once in its loss and its batches; without a reward hook
(`polarnode.integrations.slime.reward_post_process`) its advantages count rows.

`teacher_log_probs` float32[response] is what `--use-opd --opd-type sglang` trains on
(`slime/backends/megatron_utils/loss.py`, `apply_opd_kl_to_advantages`). slime looks for it in a batch's first
Sample, and then needs it in all: a group in which only some usable sessions have it is refused.

A session that cannot be trained on becomes a stand-in: one untrained token with `remove_sample`, so that the
group keeps its size. In a group its reward is the mean of the others' rewards, so that it moves no baseline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import numpy
from attrs import frozen

from polarnode.core.codec.json import plain
from polarnode.core.trajectory import Status, Trajectory
from polarnode.groups.group import Group, check_flat
from polarnode.trainers.rows import (
    Arrays,
    NativeKinds,
    TrainedRow,
    as_arrays,
    routed,
    rows_of,
    teachers,
    versions_of,
)

Decode = Callable[[Sequence[int]], str]  # a tokenizer's decode

SAMPLE: Final[NativeKinds] = {"rollout_routed_experts": "torch"}

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
    """A Sample for each row: `[Sample.from_dict(each) for each in samples(trajectory)]`.

    `index` is the number of the session in the run, as slime's data source gives it to each sample. All its
    rows have it, and `rollout_id`, which is `index` if it is not given. `response` has text if `decode` is
    given. A session without a row is one stand-in, with the session's reward.
    """
    rows = rows_of(trajectory)
    teachers(rows)
    made = [_sample(row, decode) for row in rows] or [_stand_in(trajectory, None, trajectory.reward)]
    fields = {
        "group_index": group_index,
        "index": index,
        "rollout_id": index if rollout_id is None else rollout_id,
        "prompt": prompt,
        "label": label,
    }
    listed: list[dict[str, Any]] = as_arrays([fields | each for each in made], arrays, SAMPLE)
    return listed


def group_samples(
    group: Group | Iterable[Trajectory],
    *,
    group_index: int,
    index: int = 0,
    size: int | None = None,
    decode: Decode | None = None,
    arrays: Arrays = "list",
    **fields: Any,
) -> list[list[dict[str, Any]]]:
    """The samples of a group, a list for each of its sessions, as slime's rollout function returns them.

    `index` is the number of the group's first session in the run: the one at place p has `index + p` as its
    `index` and `rollout_id`. Members that are not usable, and places of `size` without a session, are
    stand-ins. Of an iterable, a session is usable if it has a reward and a row.
    """
    places = _places(group, size)
    usable = [each.trajectory for each in places if each.usable and each.trajectory is not None]
    teachers([row for each in usable for row in rows_of(each)])
    made = {each.session_id: [_sample(row, decode) for row in rows_of(each)] for each in usable}
    rewards = [each.reward for each in usable if each.reward is not None]
    mean = fmean(rewards) if rewards else None
    like = next((rows[0] for rows in made.values()), None)
    found: list[list[dict[str, Any]]] = []
    for number, place in enumerate(places):
        session = place.trajectory
        rows = made.get(session.session_id, []) if session is not None and place.usable else []
        own = {"group_index": group_index, "index": index + number, "rollout_id": index + number}
        found.append([{**fields, **own, **row} for row in rows or [_stand_in(session, like, mean)]])
    listed: list[list[dict[str, Any]]] = as_arrays(found, arrays, SAMPLE)
    return listed


@frozen
class _Place:
    """One place of a group, and the session that holds it, if there is one."""

    trajectory: Trajectory | None = None
    usable: bool = False


def _places(group: Group | Iterable[Trajectory], size: int | None) -> list[_Place]:
    if isinstance(group, Group):
        check_flat(group)
        held = {each.session_id: each for each in group.trajectories}
        usable = {each.session_id for each in group.usable}
        found = [_Place(held.get(member.session_id), member.session_id in usable) for member in group.members]
    else:
        found = [_Place(each, each.reward is not None and bool(rows_of(each))) for each in group]
    return found + [_Place()] * ((size or 0) - len(found))


def _sample(row: TrainedRow, decode: Decode | None) -> dict[str, Any]:
    response = row.tokens[row.prompt :]
    turns, experts = row.turns, routed(row)
    status = STATUS[row.trajectory.outcome.status]
    if row.truncated and status != "aborted":
        status = "truncated"
    return {
        "tokens": row.tokens,
        "response": "" if decode is None else decode(response.tolist()),
        "response_length": len(response),
        "reward": row.reward,
        "loss_mask": row.mask[row.prompt :],
        "weight_versions": list(versions_of(row)),
        "rollout_log_probs": row.logprobs[row.prompt :],
        "teacher_log_probs": None if row.trace.teacher_logprobs is None else row.teacher[row.prompt :],
        "rollout_routed_experts": None if experts is None else experts.astype(numpy.int32),
        "remove_sample": False,
        "status": status,
        "metadata": {**row.trajectory.metadata, "polarnode": _own(row.trajectory) | _row_metadata(row)},
        "session_id": row.trajectory.session_id,
        "prefix_cache_info": {
            "cached_tokens": sum(turn.usage.cached_tokens for turn in turns),
            "total_prompt_tokens": sum(turn.prompt_length for turn in turns),
        },
    }


def _stand_in(
    trajectory: Trajectory | None, like: Mapping[str, Any] | None, reward: float | None
) -> dict[str, Any]:
    """One untrained token after a prompt of one, because slime pads a mask by the prompt's length less one.
    `like` is a row of the group: with its ids and experts, a batch that carries experts carries them here,
    and a batch with teachers a teacher's logprob.
    """
    experts = None if like is None else like["rollout_routed_experts"]
    taught = like is not None and like["teacher_log_probs"] is not None
    status = "failed" if trajectory is None else STATUS[trajectory.outcome.status]
    own = {} if trajectory is None else trajectory.metadata
    return {
        "tokens": numpy.zeros(2, dtype=numpy.int32) if like is None else like["tokens"][:2],
        "response": "",
        "response_length": 1,
        "reward": reward,
        "loss_mask": numpy.zeros(1, dtype=numpy.uint8),
        "weight_versions": [],
        "rollout_log_probs": numpy.zeros(1, dtype=numpy.float32),
        "teacher_log_probs": numpy.zeros(1, dtype=numpy.float32) if taught else None,
        "rollout_routed_experts": None if experts is None else experts[:1],
        "remove_sample": True,
        "status": status if status == "aborted" else "failed",
        "metadata": {**own, "polarnode": {"outcome": "lost"} if trajectory is None else _own(trajectory)},
        "session_id": None if trajectory is None else trajectory.session_id,
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }


def _own(trajectory: Trajectory) -> dict[str, Any]:
    outcome = trajectory.outcome
    return {
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "outcome": outcome.status,
        "reason": outcome.reason,
        "staleness": trajectory.staleness,
        "forked_from": plain(trajectory.forked_from),
        "session_reward": trajectory.reward,
    }


def _row_metadata(row: TrainedRow) -> dict[str, Any]:
    """Which row of its session it is, its own reward, and the weight version of each stretch of its tokens:
    `[start, end, version]`, counted from the first token of the response.
    """
    spans = [
        [span.start - row.prompt, span.end - row.prompt, span.version]
        for span in row.trace.version_spans
        if row.trace.loss_mask.find(1, span.start, span.end) >= 0
    ]
    return {
        "row": row.index,
        "rows": row.count,
        "role": row.trace.role,
        "part": row.trace.part,
        "parts": row.trace.parts,
        "row_reward": row.reward,
        "version_spans": spans,
    }
