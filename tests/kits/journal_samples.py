"""Turns, trajectories and tasks for tests of the journal and what stands on it."""

from typing import Any

from attrs import define
from journal_writes import publish_end, submit_task

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, TextPart
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trace, Trajectory, Turn, TurnSpan, VersionSpan
from polarnode.journal.journal import Journal
from polarnode.merge.trajectory import Identity


@define
class Clock:
    """Wall time as the test says it is."""

    time: float = 1000.0


def make_spec(**more: Any) -> TaskSpec:
    said: dict[str, Any] = {"instruction": "do it", "harness": HarnessSpec(name="pi")}
    return TaskSpec(**(said | more))


def make_identity(
    session_id: str, *, task_id: str = "t", group_id: str = "g", sample_index: int = 0
) -> Identity:
    return Identity(
        session_id=session_id,
        task_id=task_id,
        group_id=group_id,
        sample_index=sample_index,
        harness="pi",
        harness_version="1",
        model="tiny",
        node="n0",
    )


def make_turn(session_id: str, index: int = 0, *, sampled: int = 3, prompt: int = 4) -> Turn:
    return Turn(
        session_id=session_id,
        index=index,
        provider="anthropic",
        lineage=0,
        parent=index - 1 if index else None,
        kind="extend" if index else "root",
        reason="",
        prompt_delta=ids(range(10 * index, 10 * index + prompt)),
        prompt_length=prompt,
        sampled=ids(range(1000, 1000 + sampled)),
        logprobs=floats([-0.5] * sampled),
        version_spans=(VersionSpan(version="v1", start=0, end=sampled),),
        answer=Answer(parts=(TextPart("hello"),), finish_reason="stop"),
    )


def make_trajectory(
    session_id: str,
    *,
    task_id: str = "t",
    group_id: str = "g",
    sample_index: int = 0,
    turns: int = 1,
    status: Any = "completed",
    reward: float | None = 1.0,
    sampled: int = 3,
) -> Trajectory:
    session = tuple(make_turn(session_id, index, sampled=sampled) for index in range(turns))
    return Trajectory(
        session_id=session_id,
        task_id=task_id,
        group_id=group_id,
        sample_index=sample_index,
        outcome=Outcome(status=status),
        reward=reward,
        traces=tuple(_trace(turn) for turn in session[:1]),
        turns=session,
    )


def _trace(turn: Turn) -> Trace:
    prompt, sampled = len(turn.prompt_delta), len(turn.sampled)
    return Trace(
        lineage=0,
        token_ids=turn.prompt_delta + turn.sampled,
        loss_mask=b"\0" * prompt + b"\1" * sampled,
        logprobs=floats([0.0] * prompt) + turn.logprobs,
        prompt_length=prompt,
        turn_spans=(TurnSpan(turn=turn.index, start=prompt, end=prompt + sampled),),
        version_spans=(VersionSpan(version="v1", start=prompt, end=prompt + sampled),),
    )


def write_sessions(journal: Journal) -> None:
    """Two tasks, `a` and `b`, of one session each, which is over and has two turns."""
    for name in ("a", "b"):
        submit_task(journal, make_spec(), task_id=name, session_ids=(name,), idempotency_key=None)
        journal.writer.record_session(make_identity(name, task_id=name, group_id=name))
        whole = make_trajectory(name, task_id=name, group_id=name, turns=2)
        for turn in whole.turns:
            journal.writer.record_turn(turn)
        publish_end(journal, whole)
