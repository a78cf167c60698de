"""NeMo RL: a `message_log` for each row, and the output items of NeMo Gym from which NeMo RL makes one.

Every assistant message in a message log is trained, so a sample that is only context is written as a user
message. It cannot carry weight versions, temperatures, top logprobs, or rewards of turns; text is there only
if `decode` is given. The experts of a row's last token are zeros, because nothing was computed from it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from polarnode.core.trajectory import Trajectory
from polarnode.trainers.rows import (
    Array,
    Arrays,
    Native,
    TrainedRow,
    as_arrays,
    padded,
    routed,
    rows_of,
    stretches,
)

Decode = Callable[[Sequence[int]], str]  # a tokenizer's decode
LOG: Final[Native] = {"token_ids": "torch", "generation_logprobs": "torch", "routed_experts": "torch"}


def results(
    trajectory: Trajectory, *, decode: Decode | None = None, arrays: Arrays = "list"
) -> list[dict[str, Any]]:
    """What a rollout gives NeMo RL for each row: `message_log`, `input_message_log` (the prompt) and
    `full_result` with the reward.
    """
    found: list[dict[str, Any]] = as_arrays(
        [_result(row, decode) for row in rows_of(trajectory)], arrays, LOG
    )
    return found


def gym_items(trajectory: Trajectory, *, arrays: Arrays = "list") -> list[list[dict[str, Any]]]:
    """For each row, the output items of its trained turns in order. Each item's prompt holds everything
    before it.

    `routed_experts` cover the positions from 0 to the last but one of the item.
    """
    found: list[list[dict[str, Any]]] = as_arrays([_items(row) for row in rows_of(trajectory)], arrays)
    return found


def _result(row: TrainedRow, decode: Decode | None) -> dict[str, Any]:
    experts = routed(row)
    if experts is not None:
        experts = padded(experts, len(row.tokens))
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
    ids = row.tokens[start:end]
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
    return [
        {
            "prompt_token_ids": row.tokens[:start],
            "generation_token_ids": row.tokens[start:end],
            "generation_log_probs": row.logprobs[start:end],
            **({} if experts is None else {"routed_experts": experts[: end - 1]}),
        }
        for start, end, trained in _places(row)
        if trained
    ]
