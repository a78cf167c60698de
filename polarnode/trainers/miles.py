"""miles: the fields of its `Sample` for each row, and the tensors that its session server sends.

Source: radixark/miles 31f1ca9, `miles/utils/types.py`. A Sample is then read by
`miles/ray/rollout/train_data_conversion.py`, and the session server's data by
`miles/rollout/session/samples/codec.py`.

A Sample is slime's with different names and types: experts are an int32 array [T - 1, layers, top_k], and
`routing_key` replaces `session_id`. All rows of a session have the session's reward, because miles refuses
rewards that differ within one; a row's own (of its lineage) is `metadata["polarnode"]["row_reward"]`, which
`polarnode.integrations.slime.reward_post_process` trains on. `rollout_indexer_topk` stays None, because the
engine hosts report no indexer.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy

from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group
from polarnode.trainers import slime
from polarnode.trainers.rows import Arrays, NativeKinds, as_arrays

SLIME_ONLY_FIELDS: Final = ("session_id",)  # fields of slime's Sample that miles does not have
ADDED_FIELDS: Final[dict[str, Any]] = {
    "rollout_indexer_topk": None,
    "opd_reverse_kl": None,
    "adapter": None,
    "reward_spec": None,
}
SAMPLE: Final[NativeKinds] = {"rollout_routed_experts": "numpy"}
NATIVE_WIRE: Final[NativeKinds] = {"tensors": "numpy"}
# The fields that miles' decoder reads from the JSON of a sample. It refuses a sample that lacks one of them.
WIRE_METADATA_FIELDS: Final = (
    "response",
    "response_length",
    "reward",
    "status",
    "weight_versions",
    "metadata",
    "prefix_cache_info",
)


def samples(trajectory: Trajectory, *, arrays: Arrays = "list", **fields: Any) -> list[dict[str, Any]]:
    """A Sample for each row. Takes the same arguments as `slime.samples`."""
    packed = slime.samples(trajectory, arrays="numpy", **fields)
    found: list[dict[str, Any]] = as_arrays([_renamed(each) for each in packed], arrays, SAMPLE)
    return found


def group_samples(
    group: Group | Iterable[Trajectory],
    *,
    group_index: int,
    index: int = 0,
    size: int | None = None,
    arrays: Arrays = "list",
    **fields: Any,
) -> list[list[dict[str, Any]]]:
    """The samples of a group, a list for each of its sessions, numbered as `slime.group_samples` says."""
    packed = slime.group_samples(
        group, group_index=group_index, index=index, size=size, arrays="numpy", **fields
    )
    renamed = [[_renamed(each) for each in session] for session in packed]
    found: list[list[dict[str, Any]]] = as_arrays(renamed, arrays, SAMPLE)
    return found


def session_tensors(
    trajectory: Trajectory, *, decode: slime.Decode | None = None, arrays: Arrays = "list"
) -> list[dict[str, Any]]:
    """The answer of miles' session server for each row: `tensors` in its types, and `metadata` as JSON.
    `response` has text if `decode` is given.
    """
    packed = slime.samples(trajectory, decode=decode, arrays="numpy")
    sent = [_wire(_renamed(each)) for each in packed if not each["remove_sample"]]
    found: list[dict[str, Any]] = as_arrays(sent, arrays, NATIVE_WIRE)
    return found


def _renamed(sample: dict[str, Any]) -> dict[str, Any]:
    shared = sample["metadata"]["polarnode"].get("session_reward")
    added = ADDED_FIELDS | {"routing_key": sample["session_id"]}
    if shared is not None and not sample["remove_sample"]:
        added["reward"] = shared
    return {name: value for name, value in sample.items() if name not in SLIME_ONLY_FIELDS} | added


def _wire(sample: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        "tokens": sample["tokens"].astype(numpy.int64),
        "loss_mask": sample["loss_mask"],
        "rollout_log_probs": sample["rollout_log_probs"].astype(numpy.float64),
    }
    if sample["rollout_routed_experts"] is not None:
        tensors["rollout_routed_experts"] = sample["rollout_routed_experts"]
    return {"tensors": tensors, "metadata": {name: sample[name] for name in WIRE_METADATA_FIELDS}}
