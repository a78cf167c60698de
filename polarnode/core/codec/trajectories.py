"""Trajectories as JSON, written for a trainer and read back.

Fields and types are those of the classes in `core.trajectory`. This module adds the order of keys, the keys
computed from several turns, and the types that have no JSON form of their own. Invariant: the shape is the
one in docs/api.md; fields are added and never renamed, and a reader ignores unknown fields, so that a
trainer's client may be older than the node.
"""

from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

import attrs

from polarnode.core.arrays import Float32Array, Int32Array, RoutedExperts, TopLogprobs
from polarnode.core.codec.arrays import (
    Arrays,
    check_routed_experts,
    check_top_logprobs,
    encoder,
    experts_json,
    read_floats,
    read_ids,
    read_int16_bytes,
    read_mask,
)
from polarnode.core.codec.json import (
    JsonWriter,
    class_by_tag,
    class_hook,
    dump_json,
    layout,
    make_converter,
    misfit,
    read_json,
    structure,
)
from polarnode.core.codec.schema import Schema
from polarnode.core.conversation import (
    Answer,
    Json,
    JsonText,
    Message,
    Part,
    TextPart,
    ThinkingPart,
    ToolCall,
)
from polarnode.core.status import ScoreAnswer, ScoreRequest
from polarnode.core.trajectory import (
    LeftOut,
    NewMessages,
    Trace,
    Trajectory,
    Turn,
    left_out_by_reason,
    prompt_digests,
    weight_versions,
    with_published_roles,
)

Turns = Literal["table", "full"]

# ── order of keys, where it is not the class's; a new field goes to the end ───────

_HEAD: Final = (
    *("session_id", "task_id", "group_id", "sample_index", "attempt", "retried_as", "staleness"),
    *("outcome", "reward"),
)
_ROW_FIELDS: Final = (
    *("index", "provider", "lineage", "parent", "kind", "reason", "role", "state", "finish_reason"),
    *("prompt_length", "close_length", "matched", "messages"),
)
_ARRAYS: Final = ("token_ids", "loss_mask", "logprobs", "version_spans", "prompt_length", "turn_spans")
_FULL_ROW_FIELDS: Final = (
    *("prompt_delta", "sampled", "logprobs", "version_spans", "top", "routed"),
    *("request_key", "before_key", "message_key", "new_messages"),
)
_TURN_FIELDS: Final = frozenset(each.name for each in attrs.fields(Turn))
_FULL_TURN_FIELDS: Final = frozenset(each.name for each in attrs.fields(Turn) if "full" in each.metadata)

HEAD: Final = layout(Trajectory, first=_HEAD, without={each.name for each in attrs.fields(Trajectory)})
REST: Final = layout(Trajectory, without={*_HEAD, "traces", "turns"})
TRACE_LAYOUT: Final = layout(Trace, first=_ARRAYS)
ROW_HEAD_LAYOUT: Final = layout(Turn, first=_ROW_FIELDS, without=_TURN_FIELDS)
ROW_REST_LAYOUT: Final = layout(Turn, without={"session_id", *_ROW_FIELDS, *_FULL_TURN_FIELDS})
FULL_ROW_LAYOUT: Final = layout(Turn, first=_FULL_ROW_FIELDS, without=_TURN_FIELDS - _FULL_TURN_FIELDS)


# ── writing ───────────────────────────────────────────────────────────────────

PART_TAGS: Final[Mapping[str, type[Part]]] = {
    "text": TextPart,
    "thinking": ThinkingPart,
    "tool_call": ToolCall,
}
_TAG_OF: Final = {kind: tag for tag, kind in PART_TAGS.items()}


def _writer(arrays: Arrays) -> JsonWriter:
    write = JsonWriter()
    encode = encoder(arrays)
    unsaid = write.fields(Message(role="user"))

    def message_json(message: Message) -> Json:
        """The message's role and text, and its other fields where they are set."""
        found = write.fields(message).items()
        return {key: part for key, part in found if key in ("role", "text") or part != unsaid[key]}

    def answer_json(answer: Answer) -> Json:
        parts: list[Json] = [{"type": _TAG_OF[type(part)], **write.fields(part)} for part in answer.parts]
        return write.fields(answer) | {"parts": parts}

    def new_messages_json(new: NewMessages) -> Json:
        return write.fields(new) | {"tools": read_json(new.tools.encode()) if new.tools else []}

    write.special = {
        array: encode,
        bytes: encode,
        RoutedExperts: partial(experts_json, write=write),
        Message: message_json,
        Answer: answer_json,
        NewMessages: new_messages_json,
        Trace: partial(write.fields, fields=TRACE_LAYOUT),
    }
    return write


_JSON_WRITERS: Final[Mapping[Arrays, JsonWriter]] = {"json": _writer("json"), "base64": _writer("base64")}


def trajectory_json(
    trajectory: Trajectory, *, arrays: Arrays = "json", turns: Turns = "table"
) -> dict[str, Json]:
    """The whole trajectory as JSON. `turns="full"` adds each turn's own tokens, logprobs and answer to its
    row.
    """
    write = _JSON_WRITERS[arrays]
    rows = turns_json(
        trajectory.turns, left_out=trajectory.left_out, arrays=arrays if turns == "full" else None
    )
    found: dict[str, Any] = {
        **write.fields(trajectory, HEAD),
        "arrays": arrays,
        "traces": write(trajectory.traces),
        "turns": rows,
        **write.fields(trajectory, REST),
    }
    versions = weight_versions([span for turn in trajectory.turns for span in turn.version_spans])
    found["model"]["weight_versions"] = versions
    return found


def turns_json(
    turns: tuple[Turn, ...], *, left_out: tuple[LeftOut, ...] = (), arrays: Arrays | None = None
) -> list[Json]:
    """The turns table as JSON; with `arrays`, full rows with arrays in that encoding.

    A row holds everything about a turn except its tokens. `prompt_sha256` lets a reader that has the tokens
    verify them.
    """
    write = _JSON_WRITERS[arrays or "json"]
    digests = prompt_digests(turns)
    reasons = {each.turn: each.reason for each in left_out}
    rows: list[Json] = []
    for turn in with_published_roles(turns, left_out):
        row = {
            **write.fields(turn, ROW_HEAD_LAYOUT),
            "sampled_length": len(turn.sampled),
            "prompt_sha256": digests.get(turn.index),
            **write.fields(turn, ROW_REST_LAYOUT),
            "left_out": reasons.get(turn.index),
            "weight_versions": weight_versions(turn.version_spans),
        }
        rows.append(row if arrays is None else row | write.fields(turn, FULL_ROW_LAYOUT))
    return rows


def session_end_json(found: Trajectory) -> dict[str, Json]:
    """How a session ended, without its tokens."""
    turns, tokens = left_out_by_reason(found)
    return {
        "session_id": found.session_id,
        "task_id": found.task_id,
        "group_id": found.group_id,
        "sample_index": found.sample_index,
        "outcome": _JSON_WRITERS["json"](found.outcome),
        "reward": found.reward,
        "turns": len(found.turns),
        "traces": len(found.traces),
        "sampled_tokens": found.sampled_tokens,
        "trainable_tokens": found.trainable_tokens,
        "left_out": dict(turns),
        "left_out_tokens": dict(tokens),
    }


# ── reading ───────────────────────────────────────────────────────────────────


def _read_part(value: Any, _: Any) -> Part:
    if not isinstance(value, dict):
        raise misfit("an object", value)
    kind = class_by_tag(value, "type", PART_TAGS)
    part: Part = READER.get_structure_hook(kind)(value, kind)
    return part


def _read_text(value: Any, _: Any) -> str:
    if not isinstance(value, list):
        raise misfit("a list", value)
    return dump_json(value).decode() if value else ""


def _read_top(value: Any, shape: Any) -> TopLogprobs:
    return check_top_logprobs(_TOP_HOOK(value, shape))


def _read_routed(value: Any, shape: Any) -> RoutedExperts:
    wide = isinstance(value, dict) and value.get("dtype") == "int16"
    return check_routed_experts((_INT16_EXPERTS_HOOK if wide else _UINT8_EXPERTS_HOOK)(value, shape))


READER: Final = make_converter(
    forbid_extra=False,
    hooks={
        Int32Array: read_ids,
        Float32Array: read_floats,
        bytes: read_mask,
        JsonText: _read_text,
        Part: _read_part,
        TopLogprobs: _read_top,
        RoutedExperts: _read_routed,
    },
)
_TOP_HOOK: Final = class_hook(TopLogprobs, READER)
_UINT8_EXPERTS_HOOK: Final = class_hook(RoutedExperts, READER)
_INT16_EXPERTS_HOOK: Final = class_hook(RoutedExperts, READER, {"data": read_int16_bytes})

_PACKED_LIST: Final[Schema] = {"type": ["array", "string"]}
# The types above in JSON Schema.
JSON_SCHEMAS: Final[Mapping[Any, Schema]] = {
    Int32Array: _PACKED_LIST,
    Float32Array: _PACKED_LIST,
    bytes: _PACKED_LIST,
    JsonText: {"type": "array"},
    Part: {"type": "object", "properties": {"type": {"enum": list(PART_TAGS)}}, "required": ["type"]},
}

_NO_TOKENS: Final[Mapping[str, Json]] = {"prompt_delta": [], "sampled": [], "logprobs": []}


def read_trajectory(value: Json) -> Trajectory:
    """Read a trajectory from JSON. Raises Refused with the path of the first field that does not fit.

    `turns` holds the turns that were written in full. The rows of a table have no tokens, so `turns` is then
    empty.
    """
    if not isinstance(value, dict):
        return structure(value, Trajectory, converter=READER)  # this call raises Refused
    rows = value.get("turns", [])
    given = rows
    if isinstance(rows, list):
        session = {"session_id": value.get("session_id")}
        given = [
            {**row, **session, **({} if _is_full(row) else _NO_TOKENS)} if isinstance(row, dict) else row
            for row in rows
        ]
    found = structure({"reward": None, **value, "turns": given}, Trajectory, converter=READER)
    full = (
        turn
        for turn, row in zip(found.turns, rows, strict=True)  # type: ignore[arg-type]
        if _is_full(row)  # type: ignore[arg-type]
    )
    return attrs.evolve(found, turns=tuple(full))


def _is_full(row: Mapping[str, Json]) -> bool:
    return row.get("prompt_delta") is not None


# ── rows to score ─────────────────────────────────────────────────────────────

_SCORE_READER: Final = make_converter(forbid_extra=True, hooks={Int32Array: read_ids, bytes: read_mask})


def read_score_request(value: Json) -> ScoreRequest:
    """Read the body of POST /v1/score. Raises Refused with the path of the first field that does not fit."""
    return structure(value, ScoreRequest, converter=_SCORE_READER)


def score_answer_json(answer: ScoreAnswer, arrays: Arrays) -> bytes:
    return dump_json(_JSON_WRITERS[arrays](answer))


def read_score_answer(value: Json) -> ScoreAnswer:
    """Read the answer of POST /v1/score."""
    return structure(value, ScoreAnswer, converter=READER)
