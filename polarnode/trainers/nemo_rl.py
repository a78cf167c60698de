"""NeMo RL: a `message_log` for each row, and the output items of NeMo Gym from which NeMo RL makes a log.

Every assistant message in a message log is trained, so a sample that is only context is written as a user
message. It cannot carry weight versions, temperatures, top logprobs, or rewards of turns; text is there only
if `decode` is given. The experts of a row's last token are zeros, because nothing was computed from it.

The readers behind the shapes, in NVIDIA-NeMo/RL at 7ea279a: `_postprocess_nemo_gym_to_nemo_rl_result`
(nemo_rl/environments/nemo_gym.py), which needs a row of experts for each token of an item's prompt and
sample, as `decode_routed_experts` (nemo_rl/utils/routed_experts_codec.py) reads them; and
`batched_message_log_to_flat_message` (nemo_rl/data/llm_message_utils.py), which refuses a batch of two
dtypes: token ids are int64 there, as `torch.tensor` makes them, and experts int16 (`routed_experts_dtype`).
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy

from polarnode.core.trajectory import Trajectory
from polarnode.trainers.rows import (
    Array,
    Arrays,
    NativeKinds,
    TrainedRow,
    as_arrays,
    padded,
    routed,
    rows_of,
    stretches,
)

Decode = Callable[[Sequence[int]], str]  # a tokenizer's decode
LOG: Final[NativeKinds] = {"token_ids": "torch", "generation_logprobs": "torch", "routed_experts": "torch"}


def results(
    trajectory: Trajectory, *, decode: Decode | None = None, arrays: Arrays = "list"
) -> list[dict[str, Any]]:
    """The result of a rollout for each row: `message_log`, `input_message_log` (the prompt) and `full_result`
    with the reward.
    """
    found: list[dict[str, Any]] = as_arrays(
        [_result(row, decode) for row in rows_of(trajectory)], arrays, LOG
    )
    return found


def gym_items(trajectory: Trajectory, *, arrays: Arrays = "list") -> list[list[dict[str, Any]]]:
    """For each row, the output items of its trained samples in order. Each item's prompt holds everything
    before it. Samples that follow one another directly are one item, because NeMo RL makes a tensor of floats
    from a prompt that adds no token.

    `routed_experts` has a row for each token of the item's prompt and sample. For "native" it is the text of
    NeMo RL's own codec, because reading the numbers of a long session from JSON takes seconds.
    """
    items = [_items(row) for row in rows_of(trajectory)]
    if arrays == "native":
        items = [[_encode_experts(item) for item in each] for each in items]
    found: list[list[dict[str, Any]]] = as_arrays(items, arrays)
    return found


def _encode_experts(item: dict[str, Any]) -> dict[str, Any]:
    experts = item.get("routed_experts")
    if experts is None:
        return item
    rows, layers, top_k = experts.shape  # the codec has no type for unsigned bytes
    data = b64encode(experts.astype("<i2").tobytes()).decode()
    return item | {"routed_experts": f"nrlre1:int16:{rows}x{layers}x{top_k}:{data}"}


def _result(row: TrainedRow, decode: Decode | None) -> dict[str, Any]:
    experts = routed(row)
    if experts is not None:
        experts = padded(experts, len(row.tokens)).astype(numpy.int16)
    log = [_message(row, place, decode, experts) for place in _places(row)]
    return {
        "message_log": log,
        "input_message_log": log[:1],
        "full_result": {
            "reward": row.reward,
            "session_id": row.trajectory.session_id,
            "group_id": row.trajectory.group_id,
            "sample_index": row.trajectory.sample_index,
            "row": row.index,
            "rows": row.count,
            "outcome": row.trajectory.outcome.status,
            "truncated": row.truncated,
        },
    }


def _places(row: TrainedRow) -> Iterator[tuple[int, int, bool]]:
    """(start, end, trained) of each segment. Each trained sample is its own segment, even if the next follows
    directly.
    """
    cuts = {span.start for span in row.trained_spans}
    for start, end, value in stretches(row.mask):
        inner = sorted(cut for cut in cuts if start < cut < end)
        for first, last in zip([start, *inner], [*inner, end], strict=True):
            yield first, last, value == 1


def _message(
    row: TrainedRow, place: tuple[int, int, bool], decode: Decode | None, experts: Array | None
) -> dict[str, Any]:
    start, end, trained = place
    ids = row.tokens[start:end].astype(numpy.int64)
    item: dict[str, Any] = {
        "role": "assistant" if trained else "user",
        "content": "" if decode is None else decode(ids.tolist()),
        "token_ids": ids,
    }
    if trained:
        item["generation_logprobs"] = row.logprobs[start:end]
    return item if experts is None else item | {"routed_experts": experts[start:end]}


def _items(row: TrainedRow) -> list[dict[str, Any]]:
    experts = routed(row)
    if experts is not None:
        experts = padded(experts, len(row.tokens))
    return [
        {
            "prompt_token_ids": row.tokens[:start],
            "generation_token_ids": row.tokens[start:end],
            "generation_log_probs": row.logprobs[start:end],
            **({} if experts is None else {"routed_experts": experts[:end]}),
        }
        for start, end, trained in stretches(row.mask)
        if trained
    ]
