"""TRL (1.16): what a GRPOTrainer's `rollout_func` returns, and the rows of async GRPO (turns, training
sequences, rollout samples).

`rollout_func` cannot carry several rows per session (it takes one completion per prompt: `rollout_members`
keeps one, async GRPO takes all), weight versions, or experts. It cannot carry top logprobs either:
TRL requires a row for every token, and only trained tokens have one. TRL compares `logprobs` with its own
only when it corrects for another sampler (use_vllm), and has no field for a teacher's: those of a row are for
`AsyncDistillationTrainer` (`distillation_samples`). A RolloutSample has one `model_version`, by which TRL
drops stale rows: for a row that several weights sampled it is the oldest, and `metrics` counts the versions
as `weight_versions`.

TRL takes a completion for truncated if its last token does not end an answer (`mask_truncated_completions`).
If a budget ended a session between two whole answers, its completion gets one more untrained token that ends
no answer. With `ends`, the trainer's ids of tokens that end an answer, the completion of a whole session
always ends with one of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group, check_flat
from polarnode.trainers.rows import (
    Absent,
    Arrays,
    NativeKinds,
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
# What to do with a session of several rows if there is room for only one.
SeveralRows = Literal["last", "refuse"]
ROLLOUT: Final[NativeKinds] = {"input_ids": "numpy", "completion_mask": "numpy", "old_log_probs": "numpy"}
NATIVE_DISTILLATION: Final[NativeKinds] = dict.fromkeys(
    ("input_ids", "completion_mask", "teacher_topk_ids", "teacher_topk_logprobs"), "numpy"
)


def rollout_output(
    group: Group | Iterable[Trajectory],
    *,
    absent: Absent | None = None,
    ends: Collection[int] = (),
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """The return value of `rollout_func` for these sessions, in their order: one for each prompt that it was
    called with.

    `reward`, `session_id` and `group_id` reach reward functions by name. A missing reward is None, and TRL
    trains nothing on that session. A session without a row is refused unless `absent` is given; the
    placeholder is not trained.
    """
    rows = [_rollout(each, absent, ends) for each in sessions(group)]
    if not rows:
        raise Refused("a rollout of no session is none: TRL wants a completion for every prompt")
    found: dict[str, Any] = as_arrays({name: [row[name] for row in rows] for name in rows[0]}, arrays)
    return found


def rollout_members(
    group: Group,
    *,
    absent: Absent,
    several: SeveralRows = "last",
    ends: Collection[int] = (),
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """The return value of `rollout_func` for every member of a group, usable or not, in the order of their
    samples.

    TRL normalises over the members that have a reward, so one that is not usable has none: its reward is
    None and its one token is untrained. `several`: of a session with several rows keep the "last" of role
    main (the last of all if none is), or "refuse" it. Beside the fields of `rollout_output`, `unusable` is 1
    for a member that is not usable, and `rows_left_out` counts the rows that were not kept.
    """
    check_flat(group)
    usable = {each.session_id: each for each in group.usable}
    found: list[dict[str, Any]] = []
    for member in group.members:
        trajectory = usable.get(member.session_id)
        if trajectory is None or not rows_of(trajectory):
            nothing = {"session_id": member.session_id, "group_id": group.group_id, "reward": None}
            found.append(_placeholder_fields(absent) | nothing | {"rows_left_out": 0, "unusable": 1})
            continue
        kept = only_row(trajectory) if several == "refuse" else _kept(trajectory)
        left = {"rows_left_out": kept.count - 1, "unusable": 0}
        found.append(_completion(kept, ends) | _identity(trajectory) | left)
    output: dict[str, Any] = as_arrays({name: [row[name] for row in found] for name in found[0]}, arrays)
    return output


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
        [_sequence_fields(row) | {"rollout_id": whose} for row in rows_of(trajectory)], arrays
    )
    return found


def rollout_samples(
    trajectory: Trajectory,
    *,
    advantage: float | Sequence[float],
    group_id: int,
    prompt: Messages = (),
    completion: Messages = (),
    number: Number = version_number,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A RolloutSample for each row. `advantage`: the session's, or one for each of its rows. The messages are
    for TRL's logs; `arrays="native"` gives the arrays that TRL stacks.
    """
    shared = {
        "prompt": list(prompt),
        "completion": list(completion),
        "group_id": group_id,
        "enqueued_at": None,
    }
    trained = rows_of(trajectory)
    each = advantage if isinstance(advantage, Sequence) else [advantage] * len(trained)
    if len(each) != len(trained):
        raise Refused(
            f"{len(each)} advantages were given for the {len(trained)} rows of session"
            f" {trajectory.session_id}: give one for each row, or one number"
        )
    rows = [
        _sequence_fields(row) | shared | {"advantage": float(one)} | _versions(row, number)
        for row, one in zip(trained, each, strict=True)
    ]
    found: list[dict[str, Any]] = as_arrays(rows, arrays, ROLLOUT)
    return found


def distillation_samples(
    trajectory: Trajectory,
    *,
    teacher_id: str,
    prompt_id: int,
    prompt: Messages = (),
    completion: Messages = (),
    number: Number = version_number,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A RolloutSample of trl.experimental.async_distillation for each row, for `beta=1.0` (reverse KL), which
    reads only the teacher's logprob of each sampled token. Raises Refused for a row without them.
    """
    shared = {
        "prompt": list(prompt),
        "completion": list(completion),
        "teacher_id": teacher_id,
        "prompt_id": prompt_id,
        "enqueued_at": None,
    }
    rows = []
    for row in rows_of(trajectory):
        trained = row.mask[:, None] == 1
        rows.append(
            {
                "input_ids": row.tokens.astype(numpy.int64),
                "completion_mask": row.mask.astype(numpy.int64),
                # TRL's own values where a teacher says nothing
                "teacher_topk_ids": numpy.where(trained, row.tokens[:, None], -1),
                "teacher_topk_logprobs": numpy.where(trained, row.teacher[:, None], -numpy.inf),
                **shared,
                **_versions(row, number),
            }
        )
    found: list[dict[str, Any]] = as_arrays(rows, arrays, NATIVE_DISTILLATION)
    return found


def _rollout(trajectory: Trajectory, absent: Absent | None, ends: Collection[int]) -> dict[str, Any]:
    if absent is not None and not rows_of(trajectory):
        return _placeholder_fields(absent) | _identity(trajectory)
    return _completion(only_row(trajectory), ends) | _identity(trajectory)


def _kept(trajectory: Trajectory) -> TrainedRow:
    """The row with which the harness's main agent ended."""
    rows = rows_of(trajectory)
    return ([row for row in rows if row.trace.role == "main"] or rows)[-1]


def _identity(trajectory: Trajectory) -> dict[str, Any]:
    return {"session_id": trajectory.session_id, "group_id": trajectory.group_id}


def _completion(row: TrainedRow, ends: Collection[int]) -> dict[str, Any]:
    ids, logprobs, mask = (each[row.prompt :] for each in (row.tokens, row.logprobs, row.mask))
    last = _last_token(row, ends)
    if last is not None:
        ids = numpy.append(ids, last).astype(ids.dtype)
        logprobs = numpy.append(logprobs, 0).astype(logprobs.dtype)
        mask = numpy.append(mask, 0).astype(mask.dtype)
    return {
        "prompt_ids": row.tokens[: row.prompt],
        "completion_ids": ids,
        "logprobs": logprobs,
        "env_mask": mask,
        "reward": row.reward,
    }


def _last_token(row: TrainedRow, ends: Collection[int]) -> int | None:
    """The untrained token that must be added so that TRL takes a completion rightly as truncated or whole;
    None if no token is needed.
    """
    last = int(row.tokens[-1])
    if not row.truncated:
        return next(iter(ends)) if ends and last not in ends else None
    if ends:
        ending = set(ends)
    else:  # the last token of each sample ends it, unless the sample was cut
        spans = row.trace.turn_spans
        whole = spans[:-1] if row.trace.finish_reason == "length" else spans
        ending = {int(row.tokens[span.end - 1]) for span in whole}
    if last not in ending:
        return None
    tokens: list[int] = [*row.tokens.tolist(), *range(len(ending) + 1)]
    return next(token for token in tokens if token not in ending)


def _placeholder_fields(absent: Absent) -> dict[str, Any]:
    """One untrained token."""
    token = numpy.array([absent.token_id])
    return {
        "prompt_ids": token,
        "completion_ids": token,
        "logprobs": numpy.zeros(1),
        "env_mask": numpy.zeros(1, dtype=int),
        "reward": absent.reward,
    }


def _sequence_fields(row: TrainedRow) -> dict[str, Any]:
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
