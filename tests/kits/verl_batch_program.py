"""Batches of sessions of several rows in verl 0.9.1's own functions: how many optimizer steps, and what each
token weighs. A program of its own, which prints what came of it as JSON.

In: {"prompts": [[[rows, reward or null], …], …], "mini": prompts of a mini-batch}, a session for each pair;
null is one that the machine lost. The worker's postprocessing, the padding of a batch, its balancing, its
mini-batches, GRPO and the policy loss are verl's; only TransferQueue is a dict.
"""

import asyncio
import copy
import json
import logging
import sys
import uuid
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve
from trainers_kit import make_turn, publish, session_without_rows
from trainers_program import taken
from verl_program import (
    CONFIG,
    ROW,
    SAMPLING,
    V1,
    Node,
    Plain,
    Queue,
    advantages,
    agent_loop,
    core,
    install,
    methods,
    versions,
    worker_of,
)

from polarnode.core.task import GroupSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group, facts_of, judged, rows_of

PADDING = "verl/trainer/ppo/padding_utils.py"
BALANCING = "verl/utils/seqlen_balancing.py"


class Meta:
    """The part of KVBatchMeta that padding uses."""

    def __init__(
        self, keys: Any, tags: Any, partition_id: str, fields: Any = None, extra_info: Any = None
    ) -> None:
        self.keys, self.tags, self.partition_id = keys, tags, partition_id
        self.fields, self.extra_info = fields, extra_info

    def __len__(self) -> int:
        return len(self.keys)


def session(number: int, rows: int, reward: float | None) -> Trajectory:
    """A session of so many rows, each longer than the one before."""
    if reward is None:
        return session_without_rows("interrupted", sample_index=number % 4)
    turns = [
        make_turn(index, None, [index + 1, 2], [30 + place for place in range(2 + index)], lineage=index)
        for index in range(rows)
    ]
    return evolve(
        versions(publish(turns, reward=reward, sample_index=number % 4), "r-0a-"), session_id=f"s{number}"
    )


async def sampled(plug: Any, config: Any, prompts: list[list[Trajectory]]) -> Queue:
    """The queue after verl's worker ran the sessions of all prompts side by side."""
    queue = Queue()
    space, worker = worker_of(queue)

    async def one(uid: str, place: int) -> None:
        kwargs = ROW | {"uid": uid, "session_id": place}
        try:
            outputs = await agent_loop(plug, config).run(dict(SAMPLING), **kwargs)
        except plug.SessionLost:
            return
        await space["_agent_loop_postprocess"](worker, outputs, False, **kwargs)

    node = Node([each for sessions in prompts for each in sessions])
    plug.shared_rollouts = lambda settings: node
    places = [(f"u{number}", place) for number, each in enumerate(prompts) for place in range(len(each))]
    await asyncio.gather(*(one(*each) for each in places))
    return queue


def padded(queue: Queue, multiple: int) -> Meta:
    """The batch as verl pads it to whole mini-batches."""
    transfer = SimpleNamespace(
        kv_batch_get=lambda keys, partition_id: [queue.fields[key] for key in keys],
        kv_batch_put=lambda keys, partition_id, fields, tags: (
            queue.fields.update(zip(keys, fields, strict=True)),
            queue.tags.update(zip(keys, tags, strict=True)),
        ),
    )
    space = taken(
        PADDING, "build_padding_position_ids", "build_padding_routed_experts",
        "construct_minimal_padding_template", "upsample_batch_to_divisible_size",
        SYNTHETIC_PADDING_SEQ_LEN=128, torch=torch, copy=copy, uuid=uuid, tq=transfer, KVBatchMeta=Meta,
        logger=logging.getLogger("verl"), list_of_dict_to_tensordict=lambda rows: rows,
        compute_position_id_with_mask=lambda mask: torch.cumsum(mask, 1) - 1, late=True,
    )  # fmt: skip
    batch = Meta(list(queue.fields), list(queue.tags.values()), "train")
    found: Meta = space["upsample_batch_to_divisible_size"](batch, multiple, 0)
    return found


def mini_batches(batch: Meta, size: int) -> list[list[int]]:
    """The places of each mini-batch, after verl's balancing for one GPU."""
    balance = taken(
        BALANCING, "calculate_workload", "get_seqlen_balanced_partitions", "karmarkar_karp", torch=torch,
        heapq=__import__("heapq"), late=True,
    )  # fmt: skip
    lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
    parts = balance["get_seqlen_balanced_partitions"](
        balance["calculate_workload"](lengths), k_partitions=1, equal_size=True
    )
    order = torch.tensor([place for part in parts for place in part])

    iterate = taken(
        "verl/utils/tensordict_utils.py", "make_iterator",
        torch=torch, index_select_tensor_dict=lambda rows, places: rows.order[torch.tensor([int(each) for each in places])], late=True,
    )  # fmt: skip
    rows = SimpleNamespace(order=order, shape=order.shape, batch_size=order.shape)
    batches = iterate["make_iterator"](rows, size, 1, 42, {"shuffle": False})
    return [each.tolist() for each in batches]


def weights(queue: Queue, batch: Meta, places: list[list[int]], size: int) -> dict[str, list[float]]:
    """For each loss mean, what each trained token of a row weighs in its step: minus the gradient over the
    advantage, where the policy is still the one that sampled.
    """
    algos = core()
    rows = {key: queue.fields[key] for key in batch.keys}
    found, mask = advantages(rows)

    def wide(name: str) -> Any:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows.values()], batch_first=True)

    old = wide("rollout_log_probs").float()
    weighed: dict[str, dict[str, list[float]]] = {}
    for mean in ("token-mean", "seq-mean-token-sum"):
        of = weighed.setdefault(mean, {})
        for step in places:
            part = mask[step]
            new = old[step].clone().requires_grad_(True)
            info = {
                "dp_size": 1,
                "batch_num_tokens": int(part.sum()),
                "global_batch_size": size,
                "loss_scale_factor": None,
            }
            config = Plain(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, global_batch_info=info)
            loss, _ = algos["compute_policy_loss_vanilla"](
                old[step], new, torch.ones_like(old[step]), part, mean, config
            )
            loss.backward()
            assert new.grad is not None
            for place, gradient, kept in zip(step, new.grad, part, strict=True):
                of[batch.keys[place]] = (-gradient[kept]).tolist()
    return {
        **weighed,
        "advantages": {key: row[kept].tolist() for key, row, kept in zip(rows, found, mask, strict=True)},
    }  # type: ignore[return-value]


def ours(prompts: list[list[Trajectory]]) -> dict[str, Any]:
    """Our own arithmetic of the same sessions."""
    groups: list[Group] = []
    keys: dict[tuple[str, int], str] = {}
    for number, sessions in enumerate(prompts):
        facts = [evolve(facts_of(each), sample_index=place) for place, each in enumerate(sessions)]
        groups.append(judged(GroupSpec(), facts, task_id="t", group_id=f"u{number}").holding(sessions))
        for place, each in enumerate(sessions):
            keys |= {(each.session_id, row): f"u{number}_{place}_{row}" for row in range(len(each.traces))}
    counted: dict[str, int] = {}
    found: dict[str, Any] = {"advantages": {}, "token-mean": {}}
    for row in rows_of(groups, estimator="grpo", loss="token_mean"):
        place = counted[row.session_id] = counted.get(row.session_id, -1) + 1
        key = keys[row.session_id, place]
        found["advantages"][key] = [row.advantage] * row.tokens
        found["token-mean"][key] = [row.weight] * row.tokens
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    install()
    import polarnode.integrations.verl as plug

    said: list[str] = []
    plug.log.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    numbers = iter(range(1000))
    prompts = [[session(next(numbers), rows, reward) for rows, reward in each] for each in asked["prompts"]]
    samples = len(prompts[0])
    actor = Plain(CONFIG.actor_rollout_ref.actor) | {"ppo_mini_batch_size": asked["mini"]}
    rollout = Plain(CONFIG.actor_rollout_ref.rollout) | {"n": samples}
    config = Plain(CONFIG) | {
        "actor_rollout_ref": Plain(actor=Plain(actor), rollout=Plain(rollout)),
        "data": Plain(train_batch_size=len(prompts)),
        "algorithm": Plain(adv_estimator="grpo"),
        "trainer": Plain(CONFIG.trainer) | {"critic_warmup": 0},
    }
    config = Plain({name: Plain(value) for name, value in config.items()})
    queue = asyncio.run(sampled(plug, config, prompts))
    multiple = methods(
        V1 + "trainer_base.py", "PPOTrainer", "_get_required_batch_multiple", math=__import__("math")
    )["_get_required_batch_multiple"](SimpleNamespace(use_critic=False, config=config, global_steps=1), 1)
    rows = len(queue.fields)
    batch = padded(queue, multiple)
    steps = mini_batches(batch, multiple)
    json.dump(
        {
            "rows": rows,
            "real": [sum(not batch.tags[place].get("is_padding") for place in step) for step in steps],
            "verl": weights(queue, batch, steps, multiple),
            "ours": ours(prompts),
            "size": multiple,
            "said": said,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
