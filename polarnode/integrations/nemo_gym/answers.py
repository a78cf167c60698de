"""A trajectory as Gym's verify response: its reward, and a Responses object whose items carry the sampled
tokens.

A trainer that uses Gym takes one line of turns, in which each prompt begins with all that came before it. If
there are several rows, the main agent's row with the most trainable tokens is delivered; the others are
counted, never mixed in. The tokens of a turn stand once, at the last item of its answer.

A session without a reward is masked, so that its 0 is not taken for one. NeMo RL reads the mask below
`instance_config` (`_extract_mask_sample_flags` of nemo_rl/experience/rollouts.py at 7ea279a), but still
counts the 0 of a masked sample in its group's baseline, and raises for a rollout without any sampled token.
So a rollout for which `unusable` gives a reason is not sent to a trainer as an answer.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Final

from polarnode.core.codec.json import plain
from polarnode.core.conversation import Json, Message, Part, TextPart, ThinkingPart, ToolCall
from polarnode.core.trajectory import Outcome, Trajectory, Turn
from polarnode.groups import lost_to_the_machine
from polarnode.integrations.nemo_gym.requests import CreateParams, GymRequest
from polarnode.trainers.nemo_rl import gym_items
from polarnode.trainers.rows import TrainedRow, rows_of

# Gym's names of failures, by the boundary of our errors.
FAILURE_KINDS: Final[Mapping[str | None, str]] = {
    "runtime": "provider_unavailable",
    "evaluator": "verifier_error",
    "harness": "agent_request_failed",
    "client": "agent_request_failed",
}
SERVER: Final = "environment_server_failed"


def verify_response(request: GymRequest, found: Trajectory) -> dict[str, Json]:
    """The answer of `/run`: the row as it came, with `response`, `reward` and how the rollout ended."""
    kind, row = _failure(found.outcome), delivered(found)
    reward = found.reward if row is None else row.reward
    masked: dict[str, Json] = {"mask_sample": reward is None}
    config = (request.row or {}).get("instance_config")
    return {
        **(request.row or {}),
        "response": response(request.params, found),
        "reward": 0.0 if reward is None else reward,
        **masked,
        "instance_config": {**config, **masked} if isinstance(config, dict) else masked,
        "failure_kind": kind,
        "failure_reason": None if kind is None else found.outcome.reason,
        "polarnode": _ours(found),
    }


def unusable(found: Trajectory) -> str | None:
    """Why a rollout cannot be trained, in words; None if it can. Its agent is not to blame for its end, or
    its agent left nothing.
    """
    reason = found.outcome.reason or "without a reason"
    if lost_to_the_machine(found.outcome):
        return f"was lost to the machine: {reason}"
    if found.outcome.status == "cancelled":
        return f"was cancelled: {reason}"
    if delivered(found) is None:
        return f"ended ({found.outcome.status}: {reason}) before a token was sampled that can be trained"
    return None


def _failure(outcome: Outcome) -> str | None:
    """Gym's name of a failure; None if there is none."""
    match outcome.status:
        case "completed":
            return None
        case "timeout":
            return "agent_timeout"
        case "failed":
            return "agent_run_error"
        case "cancelled":
            return "cancelled"
        case "interrupted":
            return SERVER
        case "error":
            return FAILURE_KINDS.get(outcome.boundary, SERVER)


def _ours(found: Trajectory) -> Json:
    """The fields that Gym does not have."""
    row = delivered(found)
    return {
        "session_id": found.session_id,
        "task_id": found.task_id,
        "outcome": found.outcome.status,
        "forked_from": plain(found.forked_from),
        "rows": len(rows_of(found)),
        "delivered_row": None if row is None else row.index,
        "truncated": row is not None and row.truncated,
        "trainable_tokens": found.trainable_tokens,
        "delivered_tokens": 0 if row is None else row.trace.loss_mask.count(1),
        "weight_versions": list(
            dict.fromkeys(
                span.version
                for turn in found.turns
                if turn.index >= found.inherited
                for span in turn.version_spans
            )
        ),
    }


def prompt_digest(found: Trajectory) -> str | None:
    """A digest of the tokens before the first sample of the delivered row; None without a row."""
    row = delivered(found)
    return None if row is None else sha256(row.tokens[: row.trace.prompt_length].tobytes()).hexdigest()


def delivered(found: Trajectory) -> TrainedRow | None:
    """The row to deliver: the main agent's row with the most trainable tokens, else any row with the most;
    the first of equals.
    """
    rows = rows_of(found)
    main = [row for row in rows if row.trace.role == "main"] or list(rows)
    return max(main, key=lambda row: row.trace.loss_mask.count(1), default=None)


# ── a Responses object ────────────────────────────────────────────────────────


def response(params: CreateParams, found: Trajectory) -> dict[str, Json]:
    """The rollout as one Responses object: every message, call and result of the delivered turns."""
    row = delivered(found)
    turns = _line(found, row)
    # As in every format: a budget ended the session, or a limit cut its last answer.
    cut = found.outcome.status == "timeout" or (bool(turns) and turns[-1].finish_reason == "length")
    return {
        "id": f"resp_{found.session_id}",
        "object": "response",
        "created_at": found.turns[0].started if found.turns else 0.0,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": params.instructions,
        "metadata": {},
        "model": found.model,
        "output": list(_output(found, turns, row)),
        "parallel_tool_calls": params.parallel_tool_calls,
        "temperature": params.temperature,
        "tool_choice": params.tool_choice,
        "tools": [],
        "top_p": params.top_p,
        "max_output_tokens": params.max_output_tokens,
        "usage": _usage(turns),
    }


def _line(found: Trajectory, row: TrainedRow | None) -> list[Turn]:
    """The turns to deliver: those of the row, or those of the main agent if the session has no rows."""
    if row is None:
        return [turn for turn in found.turns if turn.role == "main"]
    within = {span.turn for span in row.trace.turn_spans}
    return [turn for turn in found.turns if turn.index in within]


def _usage(turns: list[Turn]) -> Json:
    prompt, sampled = (
        sum(turn.usage.prompt_tokens for turn in turns),
        sum(turn.usage.completion_tokens for turn in turns),
    )
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": sum(turn.usage.cached_tokens for turn in turns)},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": sum(turn.usage.thinking_tokens for turn in turns)},
        "total_tokens": prompt + sampled,
    }


def _output(found: Trajectory, turns: list[Turn], row: TrainedRow | None) -> Iterator[dict[str, Json]]:
    tokens = {} if row is None else _tokens(found, row)
    for place, turn in enumerate(turns):
        if place:
            for message in () if turn.new_messages is None else turn.new_messages.messages:
                item = _input_item(message)
                if item is not None:
                    yield item
        items = list(_answer_items(turn))
        if turn.index in tokens:
            # If the answer is empty, its tokens still need an item.
            items = items or [_message(turn, 0, "")]
            items[-1] |= tokens[turn.index]
        yield from items


def _tokens(found: Trajectory, row: TrainedRow) -> dict[int, dict[str, Json]]:
    """The token fields of an item, by the turn that ends with its last token."""
    ends = {span.end: span.turn for span in row.trained_spans}
    items = gym_items(found, arrays="native")[row.index]
    return {ends[len(item["prompt_token_ids"]) + len(item["generation_token_ids"])]: item for item in items}


def _input_item(message: Message) -> dict[str, Json] | None:
    """A message between two answers as an item; None if Gym has no item for it."""
    match message.role:
        case "tool":
            return {"type": "function_call_output", "call_id": message.call_id or "", "output": message.text}
        case "user" | "system":
            return {"type": "message", "role": message.role, "content": message.text}
        case "assistant":
            # The harness wrote this message; as an item of Gym's it would count as sampled.
            return None


def _answer_items(turn: Turn) -> Iterator[dict[str, Json]]:
    parts: tuple[Part, ...] = () if turn.answer is None else turn.answer.parts
    for index, part in enumerate(parts):
        match part:
            case ThinkingPart(text):
                summary: list[Json] = [{"type": "summary_text", "text": text}]
                yield {"id": _item_id("rs", turn, index), "type": "reasoning", "summary": summary}
            case TextPart(text):
                yield _message(turn, index, text)
            case ToolCall():
                call: dict[str, Json] = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
                yield {
                    "id": _item_id("fc", turn, index),
                    "type": "function_call",
                    "status": "completed",
                    **call,
                }


def _message(turn: Turn, index: int, text: str) -> dict[str, Json]:
    content: list[Json] = [{"type": "output_text", "text": text, "annotations": []}]
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    return {
        "id": _item_id("msg", turn, index),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _item_id(kind: str, turn: Turn, index: int) -> str:
    return f"{kind}_{turn.session_id}_{turn.index}_{index}"


# ── a collection ──────────────────────────────────────────────────────────────


def aggregated(responses: list[Mapping[str, Json]]) -> dict[str, Json]:
    """Gym's AggregateMetrics of a collection: the mean reward of each task and of all, without masked
    samples.
    """
    measured = [each for each in responses if each.get("mask_sample") is not True]
    by_task: dict[str, list[float]] = {}
    for each in measured:
        by_task.setdefault(str(each.get("_ng_task_index")), []).append(_reward(each))
    rewards = [_reward(each) for each in measured]
    overall: dict[str, Json] = {"mean/reward": sum(rewards) / len(rewards)} if rewards else {}
    groups: list[Json] = [
        {"_ng_task_index": _task_index(name), "mean/reward": sum(some) / len(some)}
        for name, some in by_task.items()
    ]
    return {
        "group_level_metrics": groups,
        "agent_metrics": {**overall, "masked_samples": len(responses) - len(measured)},
        "key_metrics": overall,
    }


def _reward(each: Mapping[str, Json]) -> float:
    reward = each.get("reward")
    return float(reward) if isinstance(reward, int | float) else 0.0


def _task_index(name: str) -> Json:
    return int(name) if name.isdigit() else None
