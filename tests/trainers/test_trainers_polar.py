"""A trajectory as Polar's SessionResult: whatever a session was, its trained tokens are there as bridges read
them.
"""

from typing import Any, get_args

import polar_client as polar
import pytest
from attrs import evolve
from hypothesis import given
from sample_kit import examples
from trainers_kit import (
    make_turn,
    one_row,
    publish,
    published,
    session_of_two_rows,
    session_without_rows,
    trained,
)

from polarnode.core.codec import dump_json, read_json
from polarnode.core.conversation import Answer, FinishReason, Message, TextPart, Tool, ToolCall
from polarnode.core.task import BuilderSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import NewMessages, Outcome, Status, Trajectory
from polarnode.trainers import polar as projection
from polarnode.trainers.polar import (
    PHASE_WORDS,
    STATUSES,
    Origin,
    answer_json,
    completion_id,
    error_text,
    finish_word,
    messages_json,
    missing_result,
    origin_of,
    outcome_word,
    prompt_of,
    session_result,
    task_word,
    with_origin,
)

SPEC = TaskSpec(
    instruction="x",
    harness=HarnessSpec(name="pi", model_name="policy"),
    builder=BuilderSpec(name="per_request"),
)


def read(trajectory: Trajectory, spec: TaskSpec | None = SPEC) -> polar.SessionResult:
    """As it comes out of the wire."""
    found: polar.SessionResult = polar.read(
        read_json(dump_json(session_result(trajectory, spec))), polar.SessionResult
    )
    return found


# ── tokens ────────────────────────────────────────────────────────────────────


@given(published())
@examples(60)
def test_trained_tokens_once_with_logprobs(trajectory: Trajectory) -> None:
    """Every trained token is there once with its logprob."""
    result = read(trajectory)
    by_mask = []
    for trace, row in zip(result.trajectory.traces, trajectory.traces, strict=True):
        assert [*trace.prompt_ids, *trace.response_ids] == list(row.token_ids)
        logprobs = trace.response_logprobs or ()
        assert len(trace.response_ids) == len(trace.loss_mask) == len(logprobs)
        entries = list(zip(trace.response_ids, logprobs, trace.loss_mask, strict=True))
        by_mask.append([(token, logprob) for token, logprob, one in entries if one])
        assert all(logprob == 0.0 for _, logprob, one in entries if not one)
    expected = [[(token, logprob) for token, logprob, _ in row] for row in trained(trajectory)]
    assert [row for row in by_mask if row] == expected


@given(published())
@examples(30)
def test_every_row_has_a_prompt(trajectory: Trajectory) -> None:
    """Bridges drop a trace without one."""
    for trace in read(trajectory).trajectory.traces:
        assert trace.prompt_ids or trace.metadata["polarnode"]["offset"] > 0


def test_row_of_two_turns() -> None:
    (trace,) = read(one_row()).trajectory.traces
    assert (trace.prompt_ids, trace.response_ids, trace.loss_mask) == (
        (10, 11, 12),
        (20, 21, 13, 14, 22, 23, 24),
        (1, 1, 0, 0, 1, 1, 1),
    )
    assert trace.metadata["polarnode"]["version_spans"] == [
        {"version": "7", "start": 3, "end": 5}, {"version": "7", "start": 7, "end": 8}, {"version": "8", "start": 8, "end": 10}
    ]  # fmt: skip
    assert [each["turn"] for each in trace.metadata["completion_metadata"]] == [0, 1]


def test_reconstruction_counts_match_traces() -> None:
    result = read(session_of_two_rows())
    stats = result.trajectory.metadata.reconstruction_stats
    assert (stats.chains_total, stats.chains_reconstructed_full, stats.chains_reconstructed_truncated) == (
        2,
        2,
        0,
    )
    assert (stats.completions_total, stats.completions_merged) == (2, 2)
    assert result.trajectory.metadata.trace_count == len(result.trajectory.traces) == 2


def test_session_without_rows_is_explained() -> None:
    result = read(session_without_rows(), None)
    assert (result.status, result.error, result.trajectory.error, result.trajectory.traces) == (
        "ERROR",
        "it was so",
        "it was so",
        (),
    )
    assert (result.trajectory.metadata.builder, result.trajectory.metadata.evaluation) == (None, None)


def test_pruned_session_says_so() -> None:
    said = missing_result(
        "s", "t", Outcome(status="completed"), with_origin({"a": 1}, Origin(task_id="theirs")), "n0"
    )
    assert (said["session_id"], said["task_id"], said["status"]) == ("s", "theirs", "COMPLETED")
    assert "retention" in str(said["error"])
    assert set(said) == set(session_result(one_row(), None))


# ── time ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clock", ["run", "turns", "tokens", "repeats"])
def test_own_budget_end_stays_trainable(clock: Any) -> None:
    """An agent that is out of its own budget stays trainable in the bridge."""
    late = evolve(one_row(), outcome=Outcome(status="timeout", clock=clock, reason="late"), reward=0.5)
    late = evolve(late, traces=tuple(evolve(trace, reward=0.5) for trace in late.traces))
    result = read(late)
    (trace,) = result.trajectory.traces
    assert polar.trainable_agent_timeout(result, trace)
    assert trace.metadata["training_filter"]["original_reward"] == trace.reward == 0.5
    assert trace.loss_mask.count(1) == 5


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome(status="timeout", clock="init"), "timeout"),
        (Outcome(status="error", boundary="runtime"), "failed"),
        (Outcome(status="error", boundary="evaluator", exit_code=0), "completed"),
        (Outcome(status="failed", exit_code=1), "failed"),
        (Outcome(status="cancelled"), "failed"),
        (Outcome(status="completed", exit_code=0), "completed"),
    ],
)
def test_other_ends_are_no_timeout(outcome: Outcome, word: str) -> None:
    result = read(evolve(one_row(), outcome=outcome))
    assert result.trajectory.metadata.agent_result.status == word
    for trace in result.trajectory.traces:
        assert not polar.trainable_agent_timeout(result, trace)
        assert "training_filter" not in trace.metadata


# ── words ─────────────────────────────────────────────────────────────────────


def heard(first: str, tools: str = "") -> NewMessages:
    return NewMessages(messages=(Message(role="user", text=first),), tools=tools)


def spoken() -> Trajectory:
    """A call of a tool, its result, and what was said of it."""
    call = ToolCall(id="c1", name="look", arguments='{"at": "x"}')
    tools = '[{"name":"look","description":"Looks.","parameters":{"type":"object"}}]'
    first = make_turn(
        0,
        None,
        [1, 2],
        [3],
        new_messages=heard("Hello?", tools),
        answer=Answer(parts=(call,), finish_reason="tool_calls"),
        finish_reason="tool_calls",
    )
    result = NewMessages(messages=(Message(role="tool", text="nothing", call_id="c1"),))
    second = make_turn(
        1,
        first,
        [4],
        [5],
        new_messages=result,
        answer=Answer(parts=(TextPart("Nothing."),), finish_reason="stop"),
    )
    return publish([first, second])


def test_messages_split_at_first_sample() -> None:
    (trace,) = read(spoken()).trajectory.traces
    assert [message["content"] for message in trace.prompt_messages] == ["Hello?"]
    assert [message["role"] for message in trace.response_messages] == ["assistant", "tool", "assistant"]
    assert trace.response_messages[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    ]
    assert trace.response_messages[1]["tool_call_id"] == "c1"
    assert trace.tools == (
        {
            "type": "function",
            "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
        },
    )
    assert "words" not in trace.metadata["polarnode"]


def test_row_without_words_says_so() -> None:
    (trace,) = read(one_row()).trajectory.traces
    assert (trace.prompt_messages, trace.response_messages, trace.tools) == ((), (), None)
    assert trace.metadata["polarnode"]["words"] == "unknown"


def test_call_prompt_has_all_before_it() -> None:
    turns = {turn.index: turn for turn in spoken().turns}
    asked = prompt_of(turns, 1)
    assert asked is not None
    assert asked.tools == (Tool(name="look", description="Looks.", parameters={"type": "object"}),)
    assert [each["role"] for each in messages_json(asked.messages) if isinstance(each, dict)] == [
        "user",
        "assistant",
        "tool",
    ]
    assert prompt_of({}, 0) is None
    assert answer_json(None) == {"role": "assistant", "content": ""}
    assert completion_id(turns[1]) == "msg_s_1"


def test_every_status_has_polar_word() -> None:
    assert set(STATUSES) == set(get_args(Status))
    assert set(STATUSES.values()) == set(polar.TERMINAL)
    assert set(PHASE_WORDS.values()) <= set(get_args(polar.Word))
    assert {finish_word(each) for each in get_args(FinishReason)} == {
        "stop",
        "tool_calls",
        "length",
        "abort",
        "error",
    }
    assert [outcome_word(None, phase) for phase in ("pending", "init", "ready", "run", "post")] == [
        "REGISTERED", "INITIALIZING", "READY", "RUNNING", "EVALUATING"
    ]  # fmt: skip
    assert outcome_word(Outcome(status="timeout")) == "TIMEOUT"
    assert [task_word(finished=finished, cancelled=cancelled) for finished, cancelled in ((False, True), (True, False), (True, True))] == [
        "running", "completed", "failed"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(status="completed", reason="whatever"), None),
        (Outcome(status="failed", exit_code=3), "the session is failed with exit code 3"),
        (Outcome(status="cancelled", reason="cancelled in run"), "cancelled in run"),
    ],
)
def test_only_errors_have_a_sentence(outcome: Outcome, said: str | None) -> None:
    assert error_text(outcome) == said


# ── whose it is ───────────────────────────────────────────────────────────────


def test_task_keeps_trainers_id() -> None:
    known = Origin(task_id="theirs", session_id="sk-polar-1", run=3, notes=("a note",))
    metadata = with_origin({"group_id": 4, "mine": True}, known)
    assert origin_of(metadata) == known
    result = read(evolve(one_row(), metadata=metadata))
    assert (result.task_id, result.session_id) == ("theirs", "sk-polar-1")
    assert result.trajectory.metadata.task_metadata == {"group_id": 4, "mine": True}
    assert (
        result.metadata["group_id"],
        result.metadata["polarnode"]["notes"],
        result.metadata["polarnode"]["run"],
    ) == (4, ["a note"], 3)
    assert (result.metadata["polarnode"]["task_id"], result.metadata["polarnode"]["session_id"]) == (
        "t",
        "s0",
    )


@pytest.mark.parametrize("said", [None, "x", {}, {"task_id": 3, "run": "x", "notes": "n"}])
def test_foreign_metadata_is_no_origin(said: Any) -> None:
    assert origin_of({projection.KEY: said}) == Origin()
