"""A trajectory as JSON: what a trainer reads, and back.

The rule for whoever edits it: the shape is the one the API's page promises; fields are added, never renamed,
and a reader ignores what it does not know, so that a trainer's client may be older than the node. Token
arrays are lists or base64 (`arrays`), said at the top.
"""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from polarnode.core.codec.arrays import (
    Arrays,
    Encode,
    RoutedShape,
    TopShape,
    carried_json,
    encoder,
    read_floats,
    read_ids,
    read_mask,
    read_routed,
    read_top,
)
from polarnode.core.codec.json import plain, structure
from polarnode.core.codec.turns import (
    TurnShape,
    prompt_digests,
    turn_of,
    turn_row,
    turn_tokens,
    weight_versions,
)
from polarnode.core.conversation import FinishReason, Json
from polarnode.core.trajectory import (
    LeftOut,
    Outcome,
    Timing,
    Trace,
    Trajectory,
    Turn,
    TurnRole,
    TurnSpan,
    VersionSpan,
)

Turns = Literal["table", "full"]


def trajectory_json(
    trajectory: Trajectory, *, arrays: Arrays = "json", turns: Turns = "table"
) -> dict[str, Json]:
    """The whole trajectory. `turns="full"` adds each turn's own tokens, logprobs and answer to its row."""
    encode = encoder(arrays)
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "retried_as": trajectory.retried_as,
        "staleness": trajectory.staleness,
        "outcome": plain(trajectory.outcome),
        "reward": trajectory.reward,
        "arrays": arrays,
        "traces": [_trace_json(trace, encode) for trace in trajectory.traces],
        "turns": turns_json(
            trajectory.turns, left_out=trajectory.left_out, encode=encode if turns == "full" else None
        ),
        "left_out": plain(trajectory.left_out),
        "metrics": plain(trajectory.metrics),
        "timing": plain(trajectory.timing),
        "harness": {"name": trajectory.harness, "version": trajectory.harness_version},
        "model": {"name": trajectory.model, "weight_versions": list[Json](_versions(trajectory))},
        "node": trajectory.node,
        "metadata": plain(trajectory.metadata),
    }


def turns_json(
    turns: tuple[Turn, ...], *, left_out: tuple[LeftOut, ...] = (), encode: Encode | None = None
) -> list[Json]:
    """The turns table; with `encode`, full rows."""
    digests = prompt_digests(turns)
    reasons = {left.turn: left.reason for left in left_out}
    rows = [
        turn_row(turn, prompt_sha256=digests.get(turn.index), left_out=reasons.get(turn.index))
        for turn in turns
    ]
    if encode is None:
        return list[Json](rows)
    return [row | turn_tokens(turn, encode) for row, turn in zip(rows, turns, strict=True)]


def _versions(trajectory: Trajectory) -> list[str]:
    return weight_versions([span for turn in trajectory.turns for span in turn.version_spans])


def _trace_json(trace: Trace, encode: Encode) -> dict[str, Json]:
    return {
        "token_ids": encode(trace.token_ids),
        "loss_mask": encode(trace.loss_mask),
        "logprobs": encode(trace.logprobs),
        "version_spans": plain(trace.version_spans),
        "prompt_length": trace.prompt_length,
        "turn_spans": plain(trace.turn_spans),
        "lineage": trace.lineage,
        "role": trace.role,
        "finish_reason": trace.finish_reason,
        "reward": trace.reward,
        "offset": trace.offset,
        "part": trace.part,
        "parts": trace.parts,
        "over_long": trace.over_long,
        **carried_json(trace, encode),
        "lacks": list(trace.lacks),
    }


# ── in ────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class TraceShape:
    token_ids: Json
    loss_mask: Json
    logprobs: Json
    version_spans: tuple[VersionSpan, ...]
    prompt_length: int
    turn_spans: tuple[TurnSpan, ...]
    lineage: int
    role: TurnRole
    finish_reason: FinishReason
    reward: float | None = None
    offset: int = 0
    part: int = 0
    parts: int = 1
    over_long: bool = False
    top_logprobs: TopShape | None = None
    routed_experts: RoutedShape | None = None
    lacks: tuple[str, ...] = ()


@frozen(kw_only=True)
class HarnessShape:
    name: str = ""
    version: str | None = None


@frozen(kw_only=True)
class ModelShape:
    name: str = ""


@frozen(kw_only=True)
class TrajectoryShape:
    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    traces: tuple[TraceShape, ...]
    turns: tuple[TurnShape, ...] = ()
    reward: float | None = None
    left_out: tuple[LeftOut, ...] = ()
    metrics: Mapping[str, Json] = field(factory=dict)
    timing: Timing = field(factory=Timing)
    harness: HarnessShape = field(factory=HarnessShape)
    model: ModelShape = field(factory=ModelShape)
    node: str = ""
    metadata: Mapping[str, Json] = field(factory=dict)
    attempt: int = 0
    retried_as: str | None = None
    staleness: int | None = None


def read_trajectory(value: Json) -> Trajectory:
    """The trajectory `value` says; Refused with a path when it says none.

    `turns` holds the turns that were written in full; a table's rows have no tokens, so they stay in the JSON
    and `turns` is empty.
    """
    shape = structure(value, TrajectoryShape)
    full = [(index, row) for index, row in enumerate(shape.turns) if row.prompt_delta is not None]
    return Trajectory(
        session_id=shape.session_id,
        task_id=shape.task_id,
        group_id=shape.group_id,
        sample_index=shape.sample_index,
        outcome=shape.outcome,
        reward=shape.reward,
        traces=tuple(_trace_of(trace, f"$.traces[{index}]") for index, trace in enumerate(shape.traces)),
        turns=tuple(turn_of(row, shape.session_id, f"$.turns[{index}]") for index, row in full),
        left_out=shape.left_out,
        metrics=shape.metrics,
        timing=shape.timing,
        harness=shape.harness.name,
        harness_version=shape.harness.version,
        model=shape.model.name,
        node=shape.node,
        metadata=shape.metadata,
        attempt=shape.attempt,
        retried_as=shape.retried_as,
        staleness=shape.staleness,
    )


def _trace_of(shape: TraceShape, path: str) -> Trace:
    return Trace(
        lineage=shape.lineage,
        token_ids=read_ids(shape.token_ids, f"{path}.token_ids"),
        loss_mask=read_mask(shape.loss_mask, f"{path}.loss_mask"),
        logprobs=read_floats(shape.logprobs, f"{path}.logprobs"),
        prompt_length=shape.prompt_length,
        turn_spans=shape.turn_spans,
        version_spans=shape.version_spans,
        role=shape.role,
        finish_reason=shape.finish_reason,
        reward=shape.reward,
        offset=shape.offset,
        part=shape.part,
        parts=shape.parts,
        over_long=shape.over_long,
        top=read_top(shape.top_logprobs, f"{path}.top_logprobs"),
        routed=read_routed(shape.routed_experts, f"{path}.routed_experts"),
        lacks=shape.lacks,
    )
