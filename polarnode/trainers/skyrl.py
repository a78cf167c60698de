"""SkyRL (0.3.0 and NovaSky-AI/SkyRL a9564572e): a `GeneratorOutput` for a batch of sessions.

Rows are in order, `is_last_step` on the last of each session: with several rows per session SkyRL must be
step-wise (`generator.step_wise_trajectories=true`). It gives all rows of a session the advantage of the last
row's reward, so each row has its session's reward; a lineage's own reward cannot be carried. Weight versions,
temperatures, top logprobs and rewards of turns cannot be carried either. The stop reason of a row is `length`
if a budget ended its session or a limit cut its last answer; SkyRL's overlong filtering masks such rows.
Experts are lists for 0.3.0 and arrays ("native") after it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy
from attrs import evolve, frozen

from polarnode.core.conversation import FinishReason
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group, check_flat
from polarnode.trainers.rows import (
    Absent,
    Array,
    Arrays,
    NativeKinds,
    TrainedRow,
    as_arrays,
    only_row,
    padded,
    routed,
    rows_of,
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
# The stop reason of a placeholder, which SkyRL treats as unfinished.
STAND_IN_REASON: Final = "absent"
OUTPUT: Final[NativeKinds] = {"rollout_expert_indices": "numpy"}


@frozen
class _Place:
    """A place of the batch: a session, and whether its rows may be trained. The session is None if the node
    no longer has it.
    """

    ids: tuple[str, int]
    session: Trajectory | None
    usable: bool = True
    why: str = "no trajectory"


def generator_output(
    group: Group | Iterable[Trajectory],
    *,
    step_wise: bool | None = None,
    absent: Absent | None = None,
    trajectory_ids: Sequence[tuple[str, int]] | None = None,
    experts: bool = True,
    arrays: Arrays = "list",
) -> dict[str, Any]:
    """The GeneratorOutput of these sessions, in their order.

    * `step_wise=False` is for a SkyRL that is not step-wise: a session of several rows is refused.
    * `absent`: an untrained placeholder for a session without a row, and for each unusable member of a group,
      because SkyRL wants something for every input. Its reward is `absent.reward`; None means the session's
      own, else the mean of its group, which leaves the group's mean where the others put it. Without
      `absent` such a session is refused, or left out of a group if `step_wise` is true.
    * `trajectory_ids`: (instance_id, repetition_id) of SkyRL's input for each session. By default the group's
      id and the sample index.
    * A batch in which only some rows have their experts is refused: `experts=False` leaves all experts out.
    """
    places = _places(group, trajectory_ids)
    baseline = _mean_rewards(places)
    rows = [
        entry
        for place in places
        for entry in _place_entries(place, step_wise, absent, baseline.get(place.ids[0]))
    ]
    if not rows:
        raise Refused("a GeneratorOutput of no session is none")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    output = columns | {
        "rollout_metrics": None,
        "rollout_expert_indices": _all_or_none(columns) if experts else None,
        "is_last_step": None if step_wise is False else columns["is_last_step"],
    }
    found: dict[str, Any] = as_arrays(output, arrays, OUTPUT)
    return found


def _places(group: Group | Iterable[Trajectory], ids: Sequence[tuple[str, int]] | None) -> list[_Place]:
    if isinstance(group, Group):
        check_flat(group)
        held = {each.session_id: each for each in group.trajectories}
        dropped = f"its group was dropped: {group.reason}" if group.state == "dropped" else None
        found = [
            _Place(
                (group.group_id, member.sample_index),
                held.get(member.session_id),
                member.usable and dropped is None,
                dropped or member.why or "not usable",
            )
            for member in group.members
        ]
    else:
        found = [_Place((each.group_id, each.sample_index), each) for each in group]
    if ids is None:
        return found
    if len(ids) != len(found):
        raise Refused(f"there are {len(ids)} trajectory_ids for {len(found)} sessions: give one for each")
    return [evolve(place, ids=(str(each[0]), int(each[1]))) for place, each in zip(found, ids, strict=True)]


def _mean_rewards(places: list[_Place]) -> dict[str, float]:
    """The mean reward of each instance's usable sessions."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for place in places:
        if place.usable and place.session is not None and place.session.reward is not None:
            rewards[place.ids[0]].append(place.session.reward)
    return {instance: sum(each) / len(each) for instance, each in rewards.items()}


def _place_entries(
    place: _Place, step_wise: bool | None, absent: Absent | None, baseline: float | None
) -> list[dict[str, Any]]:
    session = place.session
    if session is None or not place.usable:
        if absent is None and step_wise:
            return []
        return [_stand_in(place, absent, baseline)]
    if not rows_of(session) and (absent is not None or step_wise is not False):
        return [_stand_in(place, absent, baseline)]
    rows = (only_row(session),) if step_wise is False else rows_of(session)
    return [_entry(row, place.ids) for row in rows]


def _entry(row: TrainedRow, ids: tuple[str, int]) -> dict[str, Any]:
    reward = row.reward if row.trajectory.reward is None else row.trajectory.reward
    if reward is None:
        raise Refused(
            f"session {row.trajectory.session_id} has no reward, and SkyRL wants one for each row: leave the"
            " session out"
        )
    experts = routed(row)
    return {
        "prompt_token_ids": row.tokens[: row.prompt],
        "response_ids": row.tokens[row.prompt :],
        "rewards": float(reward),
        "loss_masks": row.mask[row.prompt :],
        "stop_reasons": "length" if row.truncated else STOPS[row.trace.finish_reason],
        "rollout_logprobs": row.logprobs[row.prompt :],
        "rollout_expert_indices": None if experts is None else padded(experts, len(row.tokens)),
        "is_last_step": row.last,
        **_whose(row.trajectory, ids),
    }


def _whose(trajectory: Trajectory | None, ids: tuple[str, int]) -> dict[str, Any]:
    evaluation = None if trajectory is None else trajectory.metrics.get("evaluation")
    return {
        "trajectory_ids": {"instance_id": ids[0], "repetition_id": ids[1]},
        # This list has an entry for each row, as SkyRL's step-wise evaluation demands of every list.
        "trajectory_generation_times": 0.0 if trajectory is None else trajectory.timing.run_s,
        "env_metrics": {
            **(evaluation if isinstance(evaluation, dict) else {}),
            "outcome": "interrupted" if trajectory is None else trajectory.outcome.status,
        },
    }


def _stand_in(place: _Place, absent: Absent | None, baseline: float | None) -> dict[str, Any]:
    session = place.session
    name = f"sample {place.ids[1]} of {place.ids[0]}" if session is None else f"session {session.session_id}"
    if absent is None:
        what = "has no row to train" if place.usable else f"is not usable ({place.why})"
        raise Refused(
            f"{name} {what}, and SkyRL wants one for each prompt: leave it out, or pass"
            " absent=Absent(token_id=…)"
        )
    own = session.reward if session is not None and place.usable else None
    reward = next((each for each in (absent.reward, own, baseline) if each is not None), None)
    if reward is None:
        raise Refused(f"{name} has no reward, nor has its group: pass absent=Absent(token_id=…, reward=…)")
    token = numpy.array([absent.token_id])
    return {
        "prompt_token_ids": token,
        "response_ids": token,
        "rewards": float(reward),
        "loss_masks": numpy.zeros(1, dtype=numpy.uint8),
        "stop_reasons": STAND_IN_REASON,
        "rollout_logprobs": numpy.zeros(1, dtype=numpy.float32),
        "rollout_expert_indices": None,
        "is_last_step": True,
        **_whose(session, place.ids),
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
    if stop_reason != STAND_IN_REASON:
        raise Refused(
            "some of these rows carry their experts and some do not, and SkyRL has those of all or of none:"
            " pass experts=False"
        )
    return numpy.zeros((2, *like.shape[1:]), dtype=like.dtype)
