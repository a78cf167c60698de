"""AReaL: the dict of [1, T] tensors of each row, and that of a whole rollout with its rows padded to one
length.

`turn_ids` and `original_rewards` belong to AReaL after 1.0.4 (areal-project/AReaL cbff54d64,
areal/experimental/openai/types.py): `gae_timestep_unit: turn` needs the first, and AReaL logs the second as
the task's reward. 1.0.4 ignores both. The format cannot carry temperatures, experts, top logprobs, rewards of
turns, or versions that are not whole numbers (`number` converts yours). Versions are -1 on every token that
is not trained in the row, including samples that are only context. AReaL treats a missing reward as 0, so a
session without a reward is refused.

AReaL's `reward_norm` compares rows: a session of three rows counts three times in its group's mean. With an
`estimator` the rewards here are advantages, compared by session; turn `reward_norm` off then.

`teacher_logp` float32[1, T] is present if the rows carry their teacher's logprobs: the position before a
token has the token's logprob, as AReaL's `compute_logp` gives it. Its actor (areal/trainer/ppo/actor.py,
`grpo_loss_fn`) reads it, with two weights. A teacher has an effect there only with an `rl_loss_weight` of 0:
the term that it adds to a loss of rewards is the policy's logprob less the teacher's, whose gradient does not
depend on the teacher.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.groups.training_rows import Estimator
from polarnode.groups.training_rows import rows_of as advantage_rows
from polarnode.trainers.rows import (
    UNSAMPLED_VERSION,
    Array,
    Arrays,
    NativeKinds,
    Number,
    TrainedRow,
    as_arrays,
    predicted,
    rows_of,
    sessions,
    teachers,
    version_array,
    version_number,
)

NAMES: Final = (
    "input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "attention_mask", "rewards",
    "original_rewards", "truncated", "teacher_logp",
)  # fmt: skip
TENSORS: Final[NativeKinds] = dict.fromkeys(NAMES, "torch")
# The padding values other than 0. AReaL counts a version or a turn of 0 or more as generated, and itself pads
# with 0.
NOTHING: Final = {"versions": UNSAMPLED_VERSION, "turn_ids": UNSAMPLED_VERSION}


def tensors(
    trajectory: Trajectory, *, number: Number = version_number, arrays: Arrays = "list"
) -> list[dict[str, Any]]:
    """The tensors of each row: input_ids, loss_mask, versions int64[1, T], logprobs float32[1, T], turn_ids
    int32[1, T], attention_mask bool[1, T], rewards and original_rewards float32[1]; teacher_logp float32[1,
    T] if the rows have one.
    """
    found: list[dict[str, Any]] = as_arrays(_all_tensors([trajectory], number), arrays, TENSORS)
    return found


def rollout(
    group: Group | Iterable[Trajectory],
    *,
    number: Number = version_number,
    estimator: Estimator | None = None,
    rl_loss_weight: float = 1.0,
    distill_loss_weight: float = 0.005,
    arrays: Arrays = "list",
) -> dict[str, Any] | None:
    """The return value of a rollout workflow: the rows of all these sessions in one dict, padded on the
    right. If there is no row it is None, which AReaL drops.

    With an `estimator` (`polarnode.groups`), `rewards` holds each row's advantage over its group's sessions,
    for which `group` must be a Group; `original_rewards` holds rewards in either case. The two weights are
    AReaL's, for the loss of rewards and for the teacher's; they are present with `teacher_logp`.
    """
    rows = _all_tensors(sessions(group), number)
    if not rows:
        return None
    if estimator is not None:
        if not isinstance(group, Group):
            raise Refused("an estimator compares the sessions of a Group, and this is a list of sessions")
        for row, compared in zip(rows, advantage_rows([group], estimator=estimator), strict=True):
            row["rewards"] = numpy.array([compared.advantage], dtype=numpy.float32)
    longest = max(each["input_ids"].shape[1] for each in rows)
    found: dict[str, Any] = as_arrays(
        {name: numpy.concatenate([_pad_tensor(each, name, longest) for each in rows]) for name in rows[0]},
        arrays,
        TENSORS,
    )
    weights = {"rl_loss_weight": rl_loss_weight, "distill_loss_weight": distill_loss_weight}
    return found | weights if "teacher_logp" in found else found


def _all_tensors(trajectories: Iterable[Trajectory], number: Number) -> list[dict[str, Array]]:
    trained = [row for each in trajectories for row in rows_of(each)]
    rows = [_tensors(row, number) for row in trained]
    for row, teacher in zip(rows, teachers(trained) or (), strict=False):
        row["teacher_logp"] = predicted(teacher)[None]
    return rows


def _tensors(row: TrainedRow, number: Number) -> dict[str, Array]:
    if row.reward is None:
        raise Refused(
            f"session {row.trajectory.session_id} has no reward, and AReaL would take that for 0: leave the"
            " session out"
        )
    return {
        "input_ids": row.tokens.astype(numpy.int64)[None],
        "loss_mask": row.mask.astype(numpy.int64)[None],
        "logprobs": row.logprobs[None],
        "versions": version_array(row, number)[None],
        "turn_ids": _turn_ids(row)[None],
        "attention_mask": numpy.ones((1, len(row.tokens)), dtype=bool),
        "rewards": numpy.array([row.reward], dtype=numpy.float32),
        "original_rewards": numpy.array([row.reward], dtype=numpy.float32),
        "truncated": numpy.array([row.truncated], dtype=bool),
    }


def _turn_ids(row: TrainedRow) -> Array:
    """int32[T]: the index of the turn of a trained token among the row's trained turns, from 0; -1 on every
    other token.
    """
    found = numpy.full(len(row.tokens), UNSAMPLED_VERSION, dtype=numpy.int32)
    for number, span in enumerate(row.trained_spans):
        found[span.start : span.end] = number
    found[row.mask == 0] = UNSAMPLED_VERSION
    return found


def _pad_tensor(row: dict[str, Array], name: str, length: int) -> Array:
    value = row[name]
    if value.ndim == 1:
        return value
    wide = numpy.full((1, length), NOTHING.get(name, 0), dtype=value.dtype)
    wide[:, : value.shape[1]] = value
    return wide
