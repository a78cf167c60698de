"""Atropos: the `ScoredData` of one group, the body of one POST to its API's /scored_data.

Masks hold the token id where it is trained and -100 elsewhere; logprobs are 1.0 elsewhere. It cannot carry
weight versions, experts, more than one temperature, or which row belongs to which session. Its trainers
compare the scores of a group's sequences, so a session counts once per row: if any session has several rows,
pass `advantages`, which are computed per session.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers.rows import Array, Arrays, TrainedRow, as_arrays, rows_of, sessions

IGNORED: Final = -100  # the label that losses ignore
NO_LOGPROB: Final = 1.0  # not a possible logprob


def scored_data(
    group: Group | Iterable[Trajectory],
    *,
    advantages: Mapping[str, float] | None = None,
    env_id: int | None = None,
    generation_params: Mapping[str, Any] | None = None,
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """The ScoredData of these sessions, one sequence per row. `advantages` are by session id and are repeated
    for each trained token.
    """
    rows = [row for each in sessions(group) for row in rows_of(each)]
    if not rows:
        raise Refused("no session of this group has a row: there is nothing to post")
    data = {
        "tokens": [row.tokens for row in rows],
        "masks": [numpy.where(row.mask == 1, row.tokens, IGNORED) for row in rows],
        "scores": [_score(row) for row in rows],
        "advantages": None if advantages is None else [_advantages(row, advantages) for row in rows],
        "inference_logprobs": [
            numpy.where(row.mask == 1, row.logprobs, numpy.float32(NO_LOGPROB)) for row in rows
        ],
        "generation_params": None if generation_params is None else dict(generation_params),
        "env_id": env_id,
    }
    found: dict[str, Any] = as_arrays(data, arrays)
    return found


def _score(row: TrainedRow) -> float:
    if row.reward is None:
        raise Refused(
            f"session {row.trajectory.session_id} has no reward, and Atropos wants a score for each sequence:"
            " leave the session out"
        )
    return float(row.reward)


def _advantages(row: TrainedRow, advantages: Mapping[str, float]) -> Array:
    session = row.trajectory.session_id
    if session not in advantages:
        raise Refused(f"no advantage is given for session {session}: give one for each, by session id")
    return numpy.where(row.mask == 1, advantages[session], 0.0)
