"""miles: the fields of its `Sample` for each row, and the tensors its session server sends.

A Sample is slime's with different names and types: experts are an int32 array [T - 1, layers, top_k], and
`routing_key` replaces `session_id`. It cannot carry what slime's cannot. `rollout_indexer_topk` stays None,
because the engine hosts report no indexer.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy

from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers import slime
from polarnode.trainers.rows import Arrays, Native, as_arrays, sessions

SLIMES: Final = ("session_id",)  # fields of slime's Sample that miles does not have
ALSO: Final[dict[str, Any]] = {
    "rollout_indexer_topk": None,
    "opd_reverse_kl": None,
    "adapter": None,
    "reward_spec": None,
}
SAMPLE: Final[Native] = {"rollout_routed_experts": "numpy"}
WIRE: Final[Native] = {"tensors": "numpy"}


def samples(trajectory: Trajectory, *, arrays: Arrays = "list", **fields: Any) -> list[dict[str, Any]]:
    """A Sample for each row. Takes the same arguments as `slime.samples`."""
    packed = slime.samples(trajectory, arrays="numpy", **fields)
    added = ALSO | {"routing_key": trajectory.session_id}
    renamed = [{name: value for name, value in each.items() if name not in SLIMES} | added for each in packed]
    found: list[dict[str, Any]] = as_arrays(renamed, arrays, SAMPLE)
    return found


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


def session_tensors(trajectory: Trajectory, *, arrays: Arrays = "list") -> list[dict[str, Any]]:
    """What miles' session server answers for each row: `tensors` in its types, and `metadata` as JSON."""
    packed = [each for each in slime.samples(trajectory, arrays="numpy") if not each["remove_sample"]]
    found: list[dict[str, Any]] = as_arrays([_wire(each) for each in packed], arrays, WIRE)
    return found


def _wire(sample: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        "tokens": sample["tokens"].astype(numpy.int64),
        "loss_mask": sample["loss_mask"],
        "rollout_log_probs": sample["rollout_log_probs"].astype(numpy.float64),
    }
    if sample["rollout_routed_experts"] is not None:
        tensors["rollout_routed_experts"] = sample["rollout_routed_experts"]
    names = ("response_length", "reward", "status", "weight_versions", "metadata", "prefix_cache_info")
    return {"tensors": tensors, "metadata": {name: sample[name] for name in names}}
