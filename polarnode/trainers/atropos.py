"""Atropos: the `ScoredData` of one group, the body of one POST to its API's /scored_data.

Checked with atroposlib 0.4.0; the project is archived. Masks hold the token id where it is trained and -100
elsewhere; logprobs are 1.0 elsewhere. It cannot carry weight versions, experts, more than one temperature, or
which row belongs to which session.

Two things in Atropos' own code decide what may be posted. Its example trainer (example_trainer/data.py)
normalises `scores` over the sequences of a group and never reads `advantages`, so a session of three rows
counts three times there: such sessions need `advantages` here, and a trainer that reads them. Its API
(atroposlib/api/server.py) keeps sequences with an `env_id` until it has exactly the `group_size` that this
environment registered, and keeps them forever if no sum of posts equals it.

A teacher's logprobs are `distill_token_ids` and `distill_logprobs` [sequence][position][1], as its
`TeacherDistillationEnv` makes them with `teacher_top_k = 0` (NousResearch/atropos,
atroposlib/envs/teacher_distillation_env.py; not in the package): the token itself, 1.0 where it is not
trained, as for its own logprobs. Either all rows of a group have a teacher's logprobs or none has; a group in
which only some have them is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers.rows import Array, Arrays, TrainedRow, as_arrays, rows_of, sessions, teachers

IGNORED_LABEL: Final = -100  # the label that losses ignore
NO_LOGPROB: Final = 1.0  # not a possible logprob


def scored_data(
    group: Group | Iterable[Trajectory],
    *,
    advantages: Mapping[str, float] | None = None,
    env_id: int | None = None,
    group_size: int | None = None,
    generation_params: Mapping[str, Any] | None = None,
    mask_truncated: bool = False,
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """The ScoredData of these sessions, one sequence per row. `advantages` are by session id and are repeated
    for each trained token. `group_size` is what the environment `env_id` registered. Without an `env_id` the
    API queues a group of any size at once. `mask_truncated` marks each sequence that a budget or a limit
    ended with `set_advantage_to_zero`, Atropos' own setting for a sequence that is not to be trained.
    """
    rows = [row for each in sessions(group) for row in rows_of(each)]
    if not rows:
        raise Refused("no session of this group has a row: there is nothing to post")
    if advantages is None:
        _check_one_row_each(rows)
    if env_id is not None:
        _check_group_size(len(rows), group_size)
    data = {
        "tokens": [row.tokens for row in rows],
        "masks": [numpy.where(row.mask == 1, row.tokens, IGNORED_LABEL) for row in rows],
        "scores": [_score(row) for row in rows],
        "advantages": None if advantages is None else [_row_advantages(row, advantages) for row in rows],
        "inference_logprobs": [_where_trained(row, row.logprobs) for row in rows],
        "generation_params": None if generation_params is None else dict(generation_params),
        "env_id": env_id,
        "overrides": [{"set_advantage_to_zero": True} if row.truncated else {} for row in rows]
        if mask_truncated
        else None,
    }
    taught = teachers(rows)
    if taught is not None:
        pairs = zip(rows, taught, strict=True)
        data["distill_token_ids"] = [row.tokens[:, None] for row in rows]
        data["distill_logprobs"] = [_where_trained(row, teacher)[:, None] for row, teacher in pairs]
    found: dict[str, Any] = as_arrays(data, arrays)
    return found


def _where_trained(row: TrainedRow, logprobs: Array) -> Array:
    return numpy.where(row.mask == 1, logprobs, numpy.float32(NO_LOGPROB))


def _check_one_row_each(rows: Sequence[TrainedRow]) -> None:
    for row in rows:
        if row.count > 1:
            raise Refused(
                f"session {row.trajectory.session_id} has {row.count} rows, and Atropos compares the"
                " scores of sequences, so it would count once for each: keep one with"
                " polarnode.trainers.rows.of_roles, or pass advantages= for a trainer that reads them"
            )


def _check_group_size(rows: int, group_size: int | None) -> None:
    if group_size is None:
        raise Refused(
            "env_id needs group_size=, the group_size that the environment registered: Atropos keeps a group"
            " of any other size for ever"
        )
    if rows != group_size:
        raise Refused(
            f"the group has {rows} sequences and its environment registered {group_size}: Atropos would"
            " keep it for ever; leave env_id out, and it is queued at once"
        )


def _score(row: TrainedRow) -> float:
    if row.reward is None:
        raise Refused(
            f"session {row.trajectory.session_id} has no reward, and Atropos wants a score for each sequence:"
            " leave the session out"
        )
    return float(row.reward)


def _row_advantages(row: TrainedRow, advantages: Mapping[str, float]) -> Array:
    session = row.trajectory.session_id
    if session not in advantages:
        raise Refused(f"no advantage is given for session {session}: give one for each, by session id")
    return numpy.where(row.mask == 1, advantages[session], 0.0)
