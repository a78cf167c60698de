"""prime-rl: the fields of a `TrainingSample` for each row, and the message graph of a verifiers `Trace`.

Contract: PrimeIntellect-ai/prime-rl 559b44772 (0.8.0), src/prime_rl/transports/rollouts/types.py and
src/prime_rl/orchestrator/trajectories.py; PrimeIntellect-ai/verifiers a60a606ec and 0.4.0,
verifiers/v1/graph.py. A stock run is fed by `trace_nodes`, through `polarnode.integrations.prime_rl`: the
orchestrator makes samples of a trace's branches. A TrainingSample never leaves the orchestrator's process:
it packs them with `prepare_batch` into the MicroBatch lists that its trainer decodes.

All columns have the row's length. `temperatures` are 1 and `advantages` 0 on tokens that are not trained;
experts have a row of zeros for the last token. It cannot carry weight versions (prime-rl keeps them per
rollout, outside the sample), rewards, top logprobs, or which session a row belongs to. A sample of a slice
(`part`) does not show its position in the whole row.

A teacher's logprobs are `ref_logprobs` of a sample, and `reference_logprobs` of a node's trained tokens; None
where a row has none. prime-rl's `opd` and `opsd` (src/prime_rl/orchestrator/algo/) keep those that are
present and have their own teacher score the others; their loss component is `ref_kl`.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy

from polarnode.core.trajectory import Trajectory, Turn
from polarnode.trainers.rows import (
    Arrays,
    TrainedRow,
    as_arrays,
    padded,
    routed,
    rows_of,
    temperatures,
)

# The struct's fields in order: an array_like struct is a list of their values. The seventh holds images.
FIELDS: Final = (
    "token_ids", "mask", "logprobs", "temperatures", "env_name", "ref_logprobs",
    "mm_kwargs", "routed_experts", "mm_token_type_ids",
    "rl_weights", "ce_weights", "ref_kl_weights", "advantages",
)  # fmt: skip


def training_samples(
    trajectory: Trajectory,
    *,
    env_name: str = "polarnode",
    advantage: float | None = None,
    temperature: float | None = None,
    arrays: Arrays = "list",
) -> list[dict[str, Any]]:
    """A TrainingSample for each row. `advantage` is the session's and is repeated for each trained token;
    without one the field is None. `temperature` is used for turns that are missing because the trajectory was
    read without them; `routed_experts.data` stays bytes.
    """
    rows = [_sample(row, env_name, advantage, temperature) for row in rows_of(trajectory)]
    found: list[dict[str, Any]] = as_arrays(rows, arrays)
    return found


def values(sample: dict[str, Any]) -> list[Any]:
    """A sample's values in the order of the struct: in prime-rl's environment, `msgspec.convert(values(each),
    TrainingSample)` gives what its `prepare_batch` packs.
    """
    found = [sample[name] for name in FIELDS]
    if sample["routed_experts"] is not None:
        found[FIELDS.index("routed_experts")] = [
            sample["routed_experts"][name] for name in ("data", "shape", "dtype")
        ]
    return found


def trace_nodes(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The session as the `MessageNode` fields of one verifiers trace: a branch from root to leaf for each
    row, so each row is one sample and the session one trace, however many rows it has.

    A trained turn is a `sampled` node: its tokens, its mask, and the logprobs of its trained tokens. The
    tokens between two of them are one node of the role user. `message` is text where the turns were read
    whole (`turns=full`), else empty; nothing is trained from text. `routed_experts` [tokens, layers, top_k]
    stay numpy arrays.
    """
    nodes: list[dict[str, Any]] = []
    turns = {turn.index: turn for turn in trajectory.turns}
    for row in rows_of(trajectory):
        experts = routed(row)
        whole = None if experts is None else padded(experts, len(row.tokens))
        parent: int | None = None
        for start, end, span, sampled in _stretches(row):
            node = _node(row, start, end, turns.get(span), sampled=sampled)
            if sampled and row.trace.teacher_logprobs is not None:
                node["reference_logprobs"] = row.teacher[start:end][row.mask[start:end] == 1].tolist()
            node["parent"] = parent
            node["routed_experts"] = None if whole is None else whole[start:end]
            parent = len(nodes)
            nodes.append(node)
    return nodes


def _stretches(row: TrainedRow) -> Iterator[tuple[int, int, int, bool]]:
    """(start, end, turn, sampled) of each trained sample, of the tokens before it, and of those after the
    last.
    """
    place = 0
    for span in row.trained_spans:
        if span.start > place:
            yield place, span.start, span.turn, False
        yield span.start, span.end, span.turn, True
        place = span.end
    if place < len(row.tokens):
        yield place, len(row.tokens), -1, False


def _node(row: TrainedRow, start: int, end: int, turn: Turn | None, *, sampled: bool) -> dict[str, Any]:
    mask = row.mask[start:end] == 1
    text = ""
    if turn is not None and sampled:
        text = "" if turn.answer is None else turn.answer.text
    elif turn is not None and turn.new_messages is not None:
        text = "\n".join(each.text for each in turn.new_messages.messages)
    return {
        "message": {"role": "assistant" if sampled else "user", "content": text},
        "sampled": sampled,
        "token_ids": row.tokens[start:end].tolist(),
        "mask": mask.tolist(),
        "logprobs": row.logprobs[start:end][mask].tolist(),
    }


def _sample(
    row: TrainedRow, env_name: str, advantage: float | None, temperature: float | None
) -> dict[str, Any]:
    absent: dict[str, Any] = dict.fromkeys(FIELDS)
    return absent | {
        "token_ids": row.tokens,
        "mask": row.mask.astype(bool),
        "logprobs": row.logprobs,
        "temperatures": temperatures(row, temperature),
        "env_name": env_name,
        "ref_logprobs": None if row.trace.teacher_logprobs is None else row.teacher,
        "routed_experts": _experts(row),
        "advantages": None if advantage is None else numpy.where(row.mask == 1, advantage, 0.0),
    }


def _experts(row: TrainedRow) -> dict[str, Any] | None:
    experts = routed(row)
    if experts is None:
        return None
    whole = padded(experts, len(row.tokens))
    return {"data": whole.tobytes(), "shape": list(whole.shape), "dtype": str(whole.dtype)}
