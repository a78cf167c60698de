"""verl (0.9.1): an `AgentLoopOutput` for each row; the same as rows of its TransferQueue (V1 trainers), and
as a padded `DataProto` (classic trainers).

verl cannot carry a weight version per token: it has a row's first and last as whole numbers. An
AgentLoopOutput leaves other versions out, and V1 refuses a row without them, because its metrics count with
them. It cannot carry a temperature per token. V1 cannot carry a reward per row: it takes the last row's
reward as the whole session's, also for the statistics of its group. So each row has the session's reward, and
a lineage's own is in `extra_fields`; only `data_proto` has rewards of rows. The agent loop of the classic
trainer takes a single row, and V1's any number.

A teacher's logprobs are `teacher_logprobs` and `teacher_ids` [T, 1], as its own teachers make them
(verl/experimental/teacher_loop/teacher_manager.py): the position before a token has the token's number, the
last none. The estimators of `verl/trainer/distillation/losses.py` (`k1`, `k3` …) read them; its top-k losses
need more than the sampled token's.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers.rows import (
    Array,
    Arrays,
    NativeKinds,
    Number,
    TrainedRow,
    alone,
    as_arrays,
    padded,
    predicted,
    routed,
    rows_of,
    sessions,
    teachers,
    version_number,
    versions_of,
)

OUTPUT: Final[NativeKinds] = {"routed_experts": "numpy", "teacher_ids": "torch", "teacher_logprobs": "torch"}
TENSORS: Final[NativeKinds] = {"fields": "torch", "batch": "torch"}


def agent_loop_outputs(
    trajectory: Trajectory, *, number: Number | None = None, arrays: Arrays = "list"
) -> list[dict[str, Any]]:
    """The fields of an AgentLoopOutput for each row: `[AgentLoopOutput(**row) for row in
    agent_loop_outputs(trajectory)]`.

    `routed_experts` has a row for every position but the last; `as_dict` pads it. Classic trainers need it
    with `arrays="native"`. They are left out if a row of the session lacks them: V1 reads the fields of a
    session's first row of all its rows. A teacher's logprobs are in `extra_fields`, where verl puts its own.
    """
    trained = rows_of(trajectory)
    teachers(trained)
    rows = [_output(row, number) for row in trained]
    for row, output in zip(trained, rows, strict=True):
        output["extra_fields"] |= _taught(row)
    if any("routed_experts" not in row for row in rows):
        rows = [{name: value for name, value in row.items() if name != "routed_experts"} for row in rows]
    found: list[dict[str, Any]] = as_arrays(rows, arrays, OUTPUT)
    return found


def transfer_rows(
    trajectory: Trajectory,
    *,
    uid: str,
    global_steps: int,
    prompt: Mapping[str, Any] | None = None,
    session: int | None = None,
    number: Number | None = None,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """The entry that a V1 agent loop puts into the TransferQueue for each row: its `key`, `fields` and `tag`.

    `uid` is the prompt's, `global_steps` the step in which it was drawn. `prompt` has the fields of the
    dataset's row (`raw_prompt`, `index`, `data_source`, `reward_model` …), which verl's validation and reward
    managers read back. `session` counts the rollouts of a prompt; by default it is the sample index. Raises
    Refused for a weight version that is not a whole number, unless `number` is given.
    """
    count = trajectory.sample_index if session is None else session
    shared = {**(prompt or {}), "uid": uid, "session_id": count, "global_steps": global_steps}
    rows = rows_of(trajectory)
    teachers(rows)
    carried = all(row.trace.routed is not None for row in rows)
    found: list[dict[str, Any]] = as_arrays(
        [_transfer_row(row, f"{uid}_{count}", global_steps, number, carried) for row in rows], arrays, TENSORS
    )
    for each in found:
        each["fields"] |= shared
    return found


def transfer_group(
    group: Group | Iterable[Trajectory],
    *,
    uid: str,
    global_steps: int,
    prompt: Mapping[str, Any] | None = None,
    number: Number | None = None,
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """A whole prompt: its own `key` and `tag` (`finished`, or `failure` if one of its sessions is unusable),
    and the `rows` of its sessions. Sessions of several tasks, which share sample indexes, are counted in
    their order. The one usable session of several has nothing to be compared with: its tokens are masked.
    """
    used = sessions(group)
    lost = any(not member.usable for member in group.members) if isinstance(group, Group) else False
    status = "failure" if lost or not used or any(not rows_of(each) for each in used) else "finished"
    distinct = len({each.sample_index for each in used}) == len(used)
    rows = [
        row
        for place, each in enumerate(used)
        for row in transfer_rows(
            each,
            uid=uid,
            global_steps=global_steps,
            prompt=prompt,
            session=None if distinct else place,
            number=number,
            arrays=arrays,
        )
    ]
    if isinstance(group, Group) and alone(group):
        for row in rows:
            row["fields"] |= untrained(row["fields"])
    tag = {"is_prompt": True, "status": status, "global_steps": global_steps}
    return {"key": uid, "tag": tag, "rows": rows}


def data_proto(
    group: Group | Iterable[Trajectory],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    number: Number | None = None,
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """`batch` and `non_tensor_batch` of a DataProto: prompts padded on the left, responses on the right, as
    verl's own agent loop pads them.

    The lengths are those of the longest row unless given. A longer row is refused: a truncated row would
    train on a sequence that was never sampled. The one usable session of several is masked.
    """
    rows = [row for each in sessions(group) for row in rows_of(each)]
    if not rows:
        raise Refused("no session of these has a row: there is nothing to make a batch of")
    teachers(rows)
    width = (
        _padded_width("prompt", [row.prompt for row in rows], prompt_length),
        _padded_width("response", [_response(row) for row in rows], response_length),
    )
    parts = [_padded_fields(row, pad_token_id, *width) for row in rows]
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    batch = {name: numpy.stack([part[name] for part in parts]) for name in shared}
    if isinstance(group, Group) and alone(group):
        batch |= untrained(batch)
    found: dict[str, Any] = as_arrays(
        {"batch": batch, "non_tensor_batch": _beside(rows, number)}, arrays, TENSORS
    )
    return found


def untrained(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The masks of a row, with nothing trained. V1 takes the reward of a session for its advantage if no
    other session of the prompt is left (`compute_grpo_outcome_advantage`).
    """
    return {
        name: [0] * len(fields[name]) if isinstance(fields[name], list) else fields[name] * 0
        for name in ("response_mask", "loss_mask")
        if name in fields
    }


# ── one row ───────────────────────────────────────────────────────────────────


def _output(row: TrainedRow, number: Number | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_ids": row.tokens[: row.prompt],
        "response_ids": row.tokens[row.prompt :],
        "response_mask": row.mask[row.prompt :],
        "response_logprobs": row.logprobs[row.prompt :],
        "num_turns": _chat_turns(row),
        "metrics": {"generate_sequences": sum(turn.ended_s for turn in row.turns)},
        "extra_fields": _extra_fields(row, number),
    }
    experts, reward = routed(row), row.trajectory.reward
    return (
        fields
        | ({} if experts is None else {"routed_experts": experts})
        | ({} if reward is None else {"reward_score": reward})
    )


def _extra_fields(row: TrainedRow, number: Number | None) -> dict[str, Any]:
    reward = row.trajectory.reward
    rewards = [span.reward for span in row.trained_spans if span.reward is not None]
    own = _whose(row.trajectory) | {
        "row": row.index,
        "rows": row.count,
        "role": row.trace.role,
        "weight_versions": list(dict.fromkeys(versions_of(row))),
        "lineage_reward": row.trace.reward,
        "truncated": row.truncated,
    }
    return {
        # V1 filters groups by a number of this name (algorithm.filter_groups.metric=score)
        "reward_extra_info": {} if reward is None else {"score": reward},
        "polarnode": own,
        **_steps(row, number),
        **({"turn_scores": rewards} if rewards else {}),
    }


def _whose(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "status": trajectory.outcome.status,
    }


def _steps(row: TrainedRow, number: Number | None) -> dict[str, int]:
    """The first and last weight version, if they are numbers."""
    versions = versions_of(row)
    if not versions or (
        number is None and not all(version.isascii() and version.isdigit() for version in versions)
    ):
        return {}
    counted = [(number or version_number)(version) for version in versions]
    return {"min_global_steps": min(counted), "max_global_steps": max(counted)}


def _chat_turns(row: TrainedRow) -> int:
    """The number of chat turns of a row: its samples, plus the segments of context before them."""
    ends = [0, *(span.end for span in row.trace.turn_spans)]
    return sum(1 + (span.start > end) for span, end in zip(row.trace.turn_spans, ends, strict=False))


def _response(row: TrainedRow) -> int:
    return len(row.tokens) - row.prompt


def _scores(row: TrainedRow, reward: float | None) -> dict[str, Array]:
    """The reward on the last token of the response, where verl reads it."""
    if reward is None:
        return {}
    scores = numpy.zeros(_response(row), dtype=numpy.float32)
    scores[-1] = reward
    return {"rm_scores": scores}


def _experts(row: TrainedRow) -> dict[str, Array]:
    experts = routed(row)
    return {} if experts is None else {"routed_experts": padded(experts, len(row.tokens)).astype(numpy.int16)}


def _taught(row: TrainedRow) -> dict[str, Array]:
    if row.trace.teacher_logprobs is None:
        return {}
    columns = {"teacher_ids": row.tokens, "teacher_logprobs": row.teacher}
    return {name: predicted(values)[:, None] for name, values in columns.items()}


# ── V1: TransferQueue ─────────────────────────────────────────────────────────


def _transfer_row(
    row: TrainedRow, session: str, global_steps: int, number: Number | None, carried: bool
) -> dict[str, Any]:
    output, steps = _output(row, number), _counted_steps(row, number)
    tokens, mask = row.tokens.astype(numpy.int64), row.mask[row.prompt :].astype(numpy.int64)
    fields = {
        "prompts": tokens[: row.prompt],
        "responses": tokens[row.prompt :],
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": tokens,
        "position_ids": numpy.arange(len(tokens), dtype=numpy.int64),
        "rollout_log_probs": row.logprobs[row.prompt :],
        "multi_modal_inputs": {},
        **(_experts(row) if carried else {}),
        **_taught(row),
        **_scores(row, row.trajectory.reward),
        **{name: output[name] for name in ("num_turns", "metrics", "extra_fields")},
    }
    tag = {
        "status": "success",
        "prompt_len": row.prompt,
        "response_len": _response(row),
        "seq_len": len(tokens),
        "global_steps": global_steps,
        **steps,
    }
    return {"key": f"{session}_{row.index}", "fields": fields, "tag": tag}


def _counted_steps(row: TrainedRow, number: Number | None) -> dict[str, int]:
    """The first and last weight version. V1's metrics make integers of both, for every row of a batch."""
    versions = versions_of(row)
    if not versions:
        raise Refused(
            f"{row.name} has no weight version, and verl's V1 counts in them: give the engine a version with"
            " each update"
        )
    counted = [(number or version_number)(version) for version in versions]
    return {"min_global_steps": min(counted), "max_global_steps": max(counted)}


# ── classic: DataProto ────────────────────────────────────────────────────────


def _padded_width(what: str, lengths: list[int], limit: int | None) -> int:
    if limit is not None and max(lengths) > limit:
        raise Refused(
            f"a {what} of {max(lengths)} tokens does not fit {what}_length {limit}: raise it, or let the"
            " builder cut rows (max_row_tokens)"
        )
    return max(lengths) if limit is None else limit


def _padded_fields(row: TrainedRow, pad: int, prompt: int, response: int) -> dict[str, Array]:
    before, after = prompt - row.prompt, response - _response(row)
    attention = numpy.concatenate(
        [_int_zeros(before), numpy.ones(len(row.tokens), dtype=numpy.int64), _int_zeros(after)]
    )
    ids = numpy.concatenate(
        [_int_zeros(before) + pad, row.tokens.astype(numpy.int64), _int_zeros(after) + pad]
    )
    found = {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "response_mask": numpy.concatenate([row.mask[row.prompt :].astype(numpy.int64), _int_zeros(after)]),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": numpy.maximum(numpy.cumsum(attention) - 1, 0),
        "rollout_log_probs": padded(row.logprobs[row.prompt :], response),
    }
    found |= {name: padded(scores, response) for name, scores in _scores(row, row.reward).items()}
    for name, values in (_experts(row) | _taught(row)).items():
        whole = numpy.zeros((prompt + response, *values.shape[1:]), dtype=values.dtype)
        whole[before : before + len(values)] = values
        found[name] = whole
    return found


def _int_zeros(count: int) -> Array:
    return numpy.zeros(count, dtype=numpy.int64)


def _beside(rows: list[TrainedRow], number: Number | None) -> dict[str, list[Any]]:
    steps = [_steps(row, number) for row in rows]
    return {
        "__num_turns__": [_chat_turns(row) for row in rows],
        "uid": [row.trajectory.group_id for row in rows],
        "index": [row.trajectory.sample_index for row in rows],
        "agent_name": [row.trajectory.harness for row in rows],
        "min_global_steps": [each.get("min_global_steps") for each in steps],
        "max_global_steps": [each.get("max_global_steps") for each in steps],
        "session_id": [row.trajectory.session_id for row in rows],
    }
