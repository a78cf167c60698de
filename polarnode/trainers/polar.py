"""A trajectory as Polar's SessionResult, with its rows as Polar's Traces.

Polar's own classes read this. Its `timing` forbids unknown fields, so only its four numbers are written. A
word of Polar's never gets a meaning that its bridges do not know; facts that Polar cannot express are in the
metadata. A session that ran out of time has its rows and its reward here, like any other session; Polar's own
server would give none.

The shapes are those of NVIDIA-NeMo/ProRL-Agent-Server, `src/polar/trajectory/models.py` and
`src/polar/rollout/models.py` at 467f2ab, bac80ae and 063c948: one float of `response_logprobs` for each
response token, 0.0 where `loss_mask` is 0. The ids that a task came with are kept in its metadata under
`polarnode`.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal

from attrs import frozen

from polarnode.core.codec.json import plain
from polarnode.core.conversation import Answer, Conversation, FinishReason, Json, Message
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Clock, Outcome, Status, Timing, Trace, Trajectory, Turn, weight_versions
from polarnode.merge.figures import transcript
from polarnode.tokens.rendering import tools_shape

# ── messages ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class RowMessages:
    """The messages of a row as OpenAI Chat has them: `prompt` before its first sample, `response` from there
    on. `recorded` is False if a turn of the row has no messages, because polarnode 0.1 recorded it or it is
    not in the journal any more. Nothing is decoded from tokens.
    """

    prompt: tuple[Message, ...] = ()
    response: tuple[Message, ...] = ()
    tools: Json = None
    recorded: bool = False


def row_messages(trace: Trace, turns: Mapping[int, Turn]) -> RowMessages:
    """The messages of a row."""
    if not trace.turn_spans:
        return RowMessages()
    whole = transcript(turns, trace.turn_spans[-1].turn)
    prompt = prompt_of(turns, first_sampled_turn(trace))
    if whole is None or prompt is None:
        return RowMessages()
    at = len(prompt.messages)
    return RowMessages(
        prompt=whole.messages[:at], response=whole.messages[at:], tools=tools_json(whole), recorded=True
    )


def first_sampled_turn(trace: Trace) -> int:
    """The turn whose sample begins the row's response."""
    return next(
        (span.turn for span in trace.turn_spans if span.start >= trace.prompt_length),
        trace.turn_spans[-1].turn,
    )


def prompt_of(turns: Mapping[int, Turn], index: int) -> Conversation | None:
    """The conversation that a turn answered, without the answer; None if messages are missing."""
    turn = turns.get(index)
    if turn is None or turn.new_messages is None:
        return None
    if turn.parent is None:
        whole = transcript(turns, index)
        return None if whole is None else Conversation(messages=turn.new_messages.messages, tools=whole.tools)
    before = transcript(turns, turn.parent)
    return (
        None
        if before is None
        else Conversation(messages=(*before.messages, *turn.new_messages.messages), tools=before.tools)
    )


def tools_json(conversation: Conversation) -> Json:
    """The tools that the model was shown; null if there were none."""
    found: Json = plain(tools_shape(conversation.tools))
    return found or None


def messages_json(messages: Iterable[Message]) -> list[Json]:
    """Messages as OpenAI Chat writes them: the arguments of a call are text."""
    return [_message_json(message) for message in messages]


def _message_json(message: Message) -> Json:
    body: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.thinking:
        body["reasoning_content"] = message.thinking
    if message.calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.call_id is not None:
        body["tool_call_id"] = message.call_id
    return body


def answer_json(answer: Answer | None) -> Json:
    """An answer as the message that a client got."""
    return _message_json(answer.as_message() if answer is not None else Message(role="assistant"))


# ── origin ────────────────────────────────────────────────────────────

KEY: Final = "polarnode"


@frozen(kw_only=True)
class Origin:
    """The origin of a task: Polar's `task_id` and `session_id` (None: the same as ours). `run` counts the
    tasks that were submitted under one task_id, from 1; `notes` list the parts of the request that are done
    differently here.

    It is kept in the task's metadata, so that a reader of a trajectory can use the trainer's own ids.
    """

    task_id: str | None = None
    session_id: str | None = None
    run: int = 1
    notes: tuple[str, ...] = ()


def origin_of(metadata: Mapping[str, Json]) -> Origin:
    """The origin of a task with this metadata."""
    origin = metadata.get(KEY)
    if not isinstance(origin, dict):
        return Origin()
    notes, run = origin.get("notes"), origin.get("run")
    return Origin(
        task_id=_text(origin.get("task_id")),
        session_id=_text(origin.get("session_id")),
        run=run if isinstance(run, int) else 1,
        notes=tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )


def with_origin(metadata: Mapping[str, Json], origin: Origin) -> dict[str, Json]:
    """A task's metadata with its origin."""
    value: dict[str, Json] = {"task_id": origin.task_id, "run": origin.run, "notes": list(origin.notes)}
    if origin.session_id is not None:
        value["session_id"] = origin.session_id
    return {**metadata, KEY: value}


def without_origin(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """The metadata as it was submitted."""
    return {name: value for name, value in metadata.items() if name != KEY}


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


# ── statuses ────────────────────────────────────────────────────────────

SessionWord = Literal[
    "REGISTERED",
    "INITIALIZING",
    "READY",
    "RUNNING",
    "POST_RUN",
    "BUILDING",
    "EVALUATING",
    "COMPLETED",
    "ERROR",
    "TIMEOUT",
]
TaskWord = Literal["running", "completed", "failed"]

# By the phase of a session that is not over. Rows are built after the evaluation, in no time, so that no
# session is BUILDING.
PHASE_WORDS: Final[Mapping[str, SessionWord]] = {
    "pending": "REGISTERED",
    "init": "INITIALIZING",
    "ready": "READY",
    "run": "RUNNING",
    "post": "EVALUATING",
    "ended": "POST_RUN",
}
# Polar has no status for a cancelled session: it is an error, to its bridges too.
STATUSES: Final[Mapping[Status, SessionWord]] = {
    "completed": "COMPLETED",
    "timeout": "TIMEOUT",
    "failed": "ERROR",
    "error": "ERROR",
    "cancelled": "ERROR",
    "interrupted": "ERROR",
}
_FINISH_WORDS: Final[Mapping[FinishReason, str]] = {"stop_string": "stop"}


def outcome_word(outcome: Outcome | None, phase: str = "pending") -> SessionWord:
    """Polar's status of a session that is over or in a phase."""
    return PHASE_WORDS[phase] if outcome is None else STATUSES[outcome.status]


def task_word(*, finished: bool, cancelled: bool) -> TaskWord:
    """Polar's status of a task: completed however its sessions ended, but failed if it was cancelled, so that
    no client waits for the rest.
    """
    if not finished:
        return "running"
    return "failed" if cancelled else "completed"


def finish_word(reason: FinishReason) -> str:
    """Why a sample ended."""
    return _FINISH_WORDS.get(reason, reason)


def error_text(outcome: Outcome) -> str | None:
    """The error of a session's result; None for one that is completed."""
    if outcome.status == "completed":
        return None
    exit_code = f" with exit code {outcome.exit_code}" if outcome.exit_code else ""
    return outcome.reason or f"the session is {outcome.status}{exit_code}"


# ── traces ────────────────────────────────────────────────────────────


def trace_json(trace: Trace, turns: dict[int, Turn], outcome: Outcome) -> dict[str, Json]:
    """One row as a Trace: the tokens before its first sample are the prompt, the rest are the response."""
    at, messages = trace.prompt_length, row_messages(trace, turns)
    return {
        "prompt_ids": list[Json](trace.token_ids[:at]),
        "response_ids": list[Json](trace.token_ids[at:]),
        "loss_mask": list(trace.loss_mask[at:]),
        "prompt_messages": messages_json(messages.prompt),
        "response_messages": messages_json(messages.response),
        "tools": messages.tools,
        "finish_reason": finish_word(trace.finish_reason),
        "response_logprobs": list[Json](trace.logprobs[at:]),
        "reward": trace.reward,
        "reward_components": {},  # an evaluator here gives one reward, not a sum of named parts
        "metadata": {
            **_metadata(trace, turns, recorded=messages.recorded),
            **_training_filter(trace, outcome),
        },
    }


def _metadata(trace: Trace, turns: dict[int, Turn], *, recorded: bool) -> dict[str, Json]:
    ours: dict[str, Json] = {
        "lineage": trace.lineage,
        "role": trace.role,
        "weight_versions": list[Json](weight_versions(trace.version_spans)),
        # The spans are positions in the whole row, prompt and response, as are the turns' spans.
        "version_spans": plain(trace.version_spans),
        "turn_spans": plain(trace.turn_spans),
        "offset": trace.offset,
        "part": trace.part,
        "parts": trace.parts,
        "over_long": trace.over_long,
        "lacks": list(trace.missing_extras),
    }
    if not recorded:
        ours["words"] = "unknown"
    return {
        "completion_metadata": [
            _completion(turns[span.turn]) for span in trace.turn_spans if span.turn in turns
        ],
        "polarnode": ours,
    }


def _completion(turn: Turn) -> Json:
    return {
        "completion_id": completion_id(turn),
        "timestamp": turn.started + turn.ended_s,
        "turn": turn.index,
        "role": turn.role,
        "state": turn.state,
        "finish_reason": finish_word(turn.finish_reason),
        "usage": plain(turn.usage),
    }


def completion_id(turn: Turn) -> str:
    """A model call's id, made of its session and its index."""
    return f"msg_{turn.session_id}_{turn.index}"


# ── results ────────────────────────────────────────────────────────────

# Metadata that bridges set on a task and read in its results.
SCHEDULING_KEYS = ("group_id", "policy_version", "rollout_step")
# The reason that forks of Polar give if a budget of calls ended a session, which bridges then train. It is
# used for the budget of all calls, and for that of equal calls in a row, for which Polar has no word.
MAX_STEPS = "max_steps"
STEP_CLOCKS: Final[frozenset[Clock]] = frozenset(("turns", "repeats"))

# The budgets of a run: its seconds, its calls, its tokens, its repeats. The session has other clocks for its
# container and for its evaluation, which are not the agent's.
AGENT_CLOCKS: Final[frozenset[Clock]] = frozenset(("run", "turns", "tokens", "repeats"))
AGENT_TIMEOUT: Final = "agent_timeout"


def agent_timed_out(outcome: Outcome) -> bool:
    """Whether the agent's own budget ended its run, so that its rows are the policy's own work."""
    return outcome.status == "timeout" and outcome.clock in AGENT_CLOCKS


def _agent_result(outcome: Outcome) -> dict[str, Json]:
    """How the agent ended, as Polar's gateway writes it. Its bridge (src/slime_bridge/adapter.py at 5926834,
    `_is_trainable_agent_timeout`) trains a TIMEOUT with these three words and the rows' `training_filter`,
    with a reward of 0; it masks any other.
    """
    if agent_timed_out(outcome):
        ended: dict[str, Json] = {
            "status": "timeout",
            "timeout_source": "agent",
            "timeout_stage": "exec",
        }
    elif outcome.status == "timeout":
        ended = {"status": "timeout", "timeout_source": "session"}
    else:  # if the evaluator failed the session, its agent may have ended well
        well = outcome.status == "completed" or outcome.exit_code == 0
        ended = {"status": "completed" if well else "failed"}
    reason = error_text(outcome)
    return {**ended, "return_code": outcome.exit_code, **({} if reason is None else {"error": reason})}


def _training_filter(trace: Trace, outcome: Outcome) -> dict[str, Json]:
    """The value that Polar's gateway writes to the rows of an agent that used up its own budget."""
    if not agent_timed_out(outcome) or not trace.loss_mask.count(1):
        return {}
    return {
        "training_filter": {
            "masked": False,
            "trainable": True,
            "reason": AGENT_TIMEOUT,
            "detail": error_text(outcome),
            "original_reward": trace.reward,
        }
    }


def session_result(trajectory: Trajectory, spec: TaskSpec | None) -> dict[str, Json]:
    """The SessionResult of a session that is over. `spec` is the spec of its task, or None if there is
    none.
    """
    outcome, origin, metadata = (
        trajectory.outcome,
        origin_of(trajectory.metadata),
        without_origin(trajectory.metadata),
    )
    whose: dict[str, Json] = {
        "session_id": origin.session_id or trajectory.session_id,
        "task_id": origin.task_id or trajectory.task_id,
    }
    return {
        **whose,
        "status": STATUSES[outcome.status],
        "trajectory": _trajectory_json(trajectory, spec, whose, metadata),
        "timing": _timing_json(trajectory.timing),
        "node_id": trajectory.node,
        "error": error_text(outcome),
        "metadata": {**metadata, **_reason(outcome), "polarnode": _ours(trajectory, origin)},
    }


def missing_result(
    session_id: str,
    task_id: str,
    outcome: Outcome,
    metadata: Mapping[str, Json],
    node: str,
    *,
    error: str = "its trajectory went when the node's journal was over its retention",
) -> dict[str, Json]:
    """The SessionResult of a session whose trajectory is no longer kept or cannot be read: how it ended, and
    no rows.
    """
    status: SessionWord = STATUSES[outcome.status]
    origin = origin_of(metadata)
    return {
        "session_id": origin.session_id or session_id,
        "task_id": origin.task_id or task_id,
        "status": status,
        "trajectory": {"status": status, "metadata": {}, "traces": [], "error": error},
        "timing": _timing_json(Timing()),
        "node_id": node,
        "error": error,
        "metadata": {
            **without_origin(metadata),
            "polarnode": {"session_id": session_id, "task_id": task_id, "outcome": plain(outcome)},
        },
    }


def _trajectory_json(
    trajectory: Trajectory, spec: TaskSpec | None, whose: dict[str, Json], metadata: dict[str, Json]
) -> dict[str, Json]:
    turns = {turn.index: turn for turn in trajectory.turns}
    traces: list[Json] = [trace_json(trace, turns, trajectory.outcome) for trace in trajectory.traces]
    return {
        "status": STATUSES[trajectory.outcome.status],
        "metadata": {
            "builder": None if spec is None else spec.builder.import_path or spec.builder.name,
            **whose,
            "api_type": trajectory.turns[0].provider if trajectory.turns else None,
            "model_requested": None if spec is None else spec.harness.model_name,
            "model_used": trajectory.model,
            "record_count": len(trajectory.turns),
            "task_metadata": metadata,
            "trace_count": len(traces),
            "reconstruction_stats": _reconstruction_stats(trajectory),
            "agent_result": _agent_result(trajectory.outcome),
            **{name: metadata[name] for name in SCHEDULING_KEYS if name in metadata},
            "evaluation": _evaluation_json(trajectory, spec),
        },
        "traces": traces,
        "error": error_text(trajectory.outcome),
    }


def _reconstruction_stats(trajectory: Trajectory) -> dict[str, Json]:
    """Polar's statistics. Every chain is whole: a row that cannot be extended is followed by another, and
    nothing is dropped.
    """
    chains = sum(trace.part == 0 for trace in trajectory.traces)
    return {
        "chains_total": chains,
        "chains_reconstructed_full": chains,
        "chains_reconstructed_truncated": 0,
        "completions_total": len(trajectory.turns),
        "completions_merged": len(trajectory.turns) - len(trajectory.left_out),
    }


def _evaluation_json(trajectory: Trajectory, spec: TaskSpec | None) -> Json:
    if trajectory.reward is None:
        return None
    strategy = None if spec is None else spec.evaluator.import_path or spec.evaluator.name
    return {
        "strategy": strategy,
        "outcome_reward": trajectory.reward,
        "metadata": plain(trajectory.metrics.get("evaluation", {})),
    }


def _timing_json(timing: Timing) -> dict[str, Json]:
    return {
        "register_to_init_queue_ms": 0.0,  # the time of waiting for a slot is not recorded
        "init_ms": 1000.0 * timing.init_s,
        "run_ms": 1000.0 * timing.run_s,
        "postrun_ms": 1000.0 * timing.post_s,
    }


def _reason(outcome: Outcome) -> dict[str, Json]:
    return {"termination_reason": MAX_STEPS} if outcome.clock in STEP_CLOCKS else {}


def _ours(trajectory: Trajectory, origin: Origin) -> dict[str, Json]:
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "forked_from": plain(trajectory.forked_from),
        "outcome": plain(trajectory.outcome),
        "reward": trajectory.reward,
        "ready_s": trajectory.timing.ready_s,
        "left_out": plain(trajectory.left_out),
        "run": origin.run,
        "notes": list(origin.notes),
    }
