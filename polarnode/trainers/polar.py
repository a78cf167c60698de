"""The words of a row, as OpenAI Chat has them: what was asked before the first sample of the row, and all
that came after.

The rule for whoever edits it: nothing is read back from tokens; where words are missing there are none.

What Polar's side knows a task by: its ids and what was said when it was taken, kept in the task's metadata
under `polarnode`.

The rule for whoever edits it: it travels with the task, so that whoever reads a trajectory a year later can
still call it as its trainer did.

Polar's words for what we say otherwise: where a session is, how it ended, why a sample did.

The rule for whoever edits it: a word of Polar's is never given a meaning its bridges do not know; what it can
not say stands in the metadata.

A row as Polar's Trace: prompt, response, mask, and one logprob entry a token of the response.

The rule for whoever edits it: some bridges read `loss_mask`, others take a token for trainable when its
logprob entry has a `token`; both must say the same, token by token. The id stands for the text, as engines
write it when they are asked for tokens and not for words.

A trajectory as Polar's SessionResult, field by field.

The rule for whoever edits it: Polar's own classes read this, and `timing` forbids what it does not know, so
that there are its four numbers and no more. A session that ran out of time has its rows and its reward here
like any other; Polar's own would have none.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal

from attrs import frozen

from polarnode.core.codec.json import plain
from polarnode.core.codec.turns import weight_versions
from polarnode.core.conversation import Answer, Conversation, FinishReason, Json, Message
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Outcome, Status, Timing, Trace, Trajectory, Turn
from polarnode.merge.transcript import transcript
from polarnode.tokens.rendering import tools_shape

# ── messages ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Words:
    """`known` is False where a turn of the row has no words: it was recorded by polarnode 0.1, or is not in
    the journal any more.
    """

    prompt: tuple[Message, ...] = ()
    response: tuple[Message, ...] = ()
    tools: Json = None
    known: bool = False


def words_of(trace: Trace, turns: Mapping[int, Turn]) -> Words:
    """The words of a row."""
    if not trace.turn_spans:
        return Words()
    whole = transcript(turns, trace.turn_spans[-1].turn)
    asked = prompt_of(turns, first_sampled(trace))
    if whole is None or asked is None:
        return Words()
    at = len(asked.messages)
    return Words(
        prompt=whole.messages[:at], response=whole.messages[at:], tools=tools_json(whole), known=True
    )


def first_sampled(trace: Trace) -> int:
    """The turn whose sample is where the row's answer begins."""
    return next(
        (span.turn for span in trace.turn_spans if span.start >= trace.prompt_length),
        trace.turn_spans[-1].turn,
    )


def prompt_of(turns: Mapping[int, Turn], index: int) -> Conversation | None:
    """What a turn answered, without its answer; None where words are missing."""
    turn = turns.get(index)
    if turn is None or turn.heard is None:
        return None
    if turn.parent is None:
        whole = transcript(turns, index)
        return None if whole is None else Conversation(messages=turn.heard.messages, tools=whole.tools)
    before = transcript(turns, turn.parent)
    return (
        None
        if before is None
        else Conversation(messages=(*before.messages, *turn.heard.messages), tools=before.tools)
    )


def tools_json(said: Conversation) -> Json:
    """The tools the model was shown; null for none."""
    found: Json = plain(tools_shape(said.tools))
    return found or None


def messages_json(messages: Iterable[Message]) -> list[Json]:
    """Messages as OpenAI Chat writes them: the arguments of a call are text."""
    return [_message_json(message) for message in messages]


def _message_json(message: Message) -> Json:
    said: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.thinking:
        said["reasoning_content"] = message.thinking
    if message.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.call_id is not None:
        said["tool_call_id"] = message.call_id
    return said


def answer_json(answer: Answer | None) -> Json:
    """An answer as the message a client got."""
    return _message_json(answer.as_message() if answer is not None else Message(role="assistant"))


# ── origin ────────────────────────────────────────────────────────────

KEY: Final = "polarnode"


@frozen(kw_only=True)
class Origin:
    """`task_id` and `session_id` as Polar's side says them (None: as ours); `run` counts the tasks that were
    submitted by one task_id, from 1.
    """

    task_id: str | None = None
    session_id: str | None = None
    run: int = 1
    notes: tuple[str, ...] = ()


def origin_of(metadata: Mapping[str, Json]) -> Origin:
    """The origin of a task with this metadata."""
    said = metadata.get(KEY)
    if not isinstance(said, dict):
        return Origin()
    notes, run = said.get("notes"), said.get("run")
    return Origin(
        task_id=_text(said.get("task_id")),
        session_id=_text(said.get("session_id")),
        run=run if isinstance(run, int) else 1,
        notes=tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )


def with_origin(metadata: Mapping[str, Json], origin: Origin) -> dict[str, Json]:
    """A task's metadata with where it came from."""
    said: dict[str, Json] = {"task_id": origin.task_id, "run": origin.run, "notes": list(origin.notes)}
    return {**metadata, KEY: said if origin.session_id is None else {**said, "session_id": origin.session_id}}


def told(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """The metadata as it was submitted."""
    return {name: value for name, value in metadata.items() if name != KEY}


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


# ── words ────────────────────────────────────────────────────────────

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

# By the phase of a session that is not over. Ours builds its rows after it was judged, in no time, so that it
# is never BUILDING.
PHASES: Final[Mapping[str, SessionWord]] = {
    "pending": "REGISTERED",
    "init": "INITIALIZING",
    "ready": "READY",
    "run": "RUNNING",
    "post": "EVALUATING",
    "ended": "POST_RUN",
}
# Polar knows no cancelled session: it calls it an error, and so do its bridges.
STATUSES: Final[Mapping[Status, SessionWord]] = {
    "completed": "COMPLETED",
    "timeout": "TIMEOUT",
    "failed": "ERROR",
    "error": "ERROR",
    "cancelled": "ERROR",
    "interrupted": "ERROR",
}
_FINISHES: Final[Mapping[FinishReason, str]] = {"stop_string": "stop"}


def outcome_word(outcome: Outcome | None, phase: str = "pending") -> SessionWord:
    """The status of a session that is over, or in a phase."""
    return PHASES[phase] if outcome is None else STATUSES[outcome.status]


def task_word(*, finished: bool, cancelled: bool) -> TaskWord:
    """The status of a task: completed whatever became of its sessions, but failed where it was cancelled, so
    that nobody waits for the rest.
    """
    if not finished:
        return "running"
    return "failed" if cancelled else "completed"


def finish_word(reason: FinishReason) -> str:
    """Why a sample ended."""
    return _FINISHES.get(reason, reason)


def error_text(outcome: Outcome) -> str | None:
    """What Polar calls a session's error; None for one that is completed."""
    if outcome.status == "completed":
        return None
    exit_code = f" with exit code {outcome.exit_code}" if outcome.exit_code else ""
    return outcome.reason or f"the session is {outcome.status}{exit_code}"


# ── traces ────────────────────────────────────────────────────────────


def trace_json(trace: Trace, turns: dict[int, Turn]) -> dict[str, Json]:
    """One row: what was asked before its first sample is the prompt, all behind it the response."""
    at, words = trace.prompt_length, words_of(trace, turns)
    return {
        "prompt_ids": list[Json](trace.token_ids[:at]),
        "response_ids": list[Json](trace.token_ids[at:]),
        "loss_mask": list(trace.loss_mask[at:]),
        "prompt_messages": messages_json(words.prompt),
        "response_messages": messages_json(words.response),
        "tools": words.tools,
        "finish_reason": finish_word(trace.finish_reason),
        "response_logprobs": _logprobs(trace),
        "reward": trace.reward,
        "metadata": _metadata(trace, turns, known=words.known),
    }


def _logprobs(trace: Trace) -> list[Json]:
    at = trace.prompt_length
    response = zip(trace.token_ids[at:], trace.logprobs[at:], trace.loss_mask[at:], strict=True)
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
        if trained
        else {"token_id": token, "logprob": 0.0}
        for token, logprob, trained in response
    ]


def _metadata(trace: Trace, turns: dict[int, Turn], *, known: bool) -> dict[str, Json]:
    ours: dict[str, Json] = {
        "lineage": trace.lineage,
        "role": trace.role,
        "weight_versions": list[Json](weight_versions(trace.version_spans)),
        # of the whole row, prompt and response, as are the turns' spans
        "version_spans": plain(trace.version_spans),
        "turn_spans": plain(trace.turn_spans),
        "offset": trace.offset,
        "part": trace.part,
        "parts": trace.parts,
        "over_long": trace.over_long,
        "lacks": list(trace.lacks),
    }
    if not known:
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
    """A name for a model call: Polar's are made up, ours say which it is."""
    return f"msg_{turn.session_id}_{turn.index}"


# ── results ────────────────────────────────────────────────────────────

# what bridges stamp on a task and look for in its results
SCHEDULING = ("group_id", "policy_version", "rollout_step")
# how forks of Polar say that it was the budget of calls that ended a session: bridges train such a one
MAX_STEPS = "max_steps"


def session_result(trajectory: Trajectory, spec: TaskSpec | None) -> dict[str, Json]:
    """A session that is over. `spec` is its task's; None where it has none."""
    outcome, origin, metadata = trajectory.outcome, origin_of(trajectory.metadata), told(trajectory.metadata)
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
    session_id: str, task_id: str, outcome: Outcome, metadata: Mapping[str, Json], node: str
) -> dict[str, Json]:
    """A session whose trajectory is not kept any more: how it ended, and no rows."""
    status: SessionWord = STATUSES[outcome.status]
    origin, error = origin_of(metadata), "its trajectory went when the node's journal was over its retention"
    return {
        "session_id": origin.session_id or session_id,
        "task_id": origin.task_id or task_id,
        "status": status,
        "trajectory": {"status": status, "metadata": {}, "traces": [], "error": error},
        "timing": _timing_json(Timing()),
        "node_id": node,
        "error": error,
        "metadata": {
            **told(metadata),
            "polarnode": {"session_id": session_id, "task_id": task_id, "outcome": plain(outcome)},
        },
    }


def _trajectory_json(
    trajectory: Trajectory, spec: TaskSpec | None, whose: dict[str, Json], metadata: dict[str, Json]
) -> dict[str, Json]:
    turns = {turn.index: turn for turn in trajectory.turns}
    traces: list[Json] = [trace_json(trace, turns) for trace in trajectory.traces]
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
            "reconstruction_stats": _stats(trajectory),
            **{name: metadata[name] for name in SCHEDULING if name in metadata},
            "evaluation": _evaluation(trajectory, spec),
        },
        "traces": traces,
        "error": error_text(trajectory.outcome),
    }


def _stats(trajectory: Trajectory) -> dict[str, Json]:
    """Every chain is whole: a row that can not go on is followed by another, and nothing of it is dropped."""
    chains = sum(trace.part == 0 for trace in trajectory.traces)
    return {
        "chains_total": chains,
        "chains_reconstructed_full": chains,
        "chains_reconstructed_truncated": 0,
        "completions_total": len(trajectory.turns),
        "completions_merged": len(trajectory.turns) - len(trajectory.left_out),
    }


def _evaluation(trajectory: Trajectory, spec: TaskSpec | None) -> Json:
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
        "register_to_init_queue_ms": 0.0,  # waiting for a place is nobody's time here
        "init_ms": 1000.0 * timing.init_s,
        "run_ms": 1000.0 * timing.run_s,
        "postrun_ms": 1000.0 * timing.post_s,
    }


def _reason(outcome: Outcome) -> dict[str, Json]:
    return {"termination_reason": MAX_STEPS} if outcome.clock == "turns" else {}


def _ours(trajectory: Trajectory, origin: Origin) -> dict[str, Json]:
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "outcome": plain(trajectory.outcome),
        "reward": trajectory.reward,
        "ready_s": trajectory.timing.ready_s,
        "left_out": plain(trajectory.left_out),
        "run": origin.run,
        "notes": list(origin.notes),
    }
