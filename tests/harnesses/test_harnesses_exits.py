"""How a run ended: exit codes that lie are overruled by the turns, and by nothing else."""

import pytest
from attrs import evolve

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, FinishReason, TextPart, ToolCall
from polarnode.core.ports import LOST
from polarnode.core.trajectory import Turn, TurnRole, TurnState
from polarnode.harnesses import harness, shell
from polarnode.harnesses.harness import exit_outcome

HONEST = harness.Harness(name="honest", version="1", image="base", launch=shell.launch)
LIAR = evolve(HONEST, name="liar", exit_code_honest=False)


def turn(
    *,
    role: TurnRole = "main",
    state: TurnState = "complete",
    finish: FinishReason = "stop",
    calls: bool = False,
    refused: bool = False,
) -> Turn:
    said = ToolCall(id="call1", name="bash", arguments="{}") if calls else TextPart(text="done")
    return Turn(
        session_id="s",
        index=0,
        provider="openai_chat",
        lineage=0,
        parent=None,
        kind="root",
        reason="first",
        role=role,
        state=state,
        refused=refused,
        prompt_delta=ids([1]),
        prompt_length=1,
        sampled=ids([2]),
        logprobs=floats([-0.5]),
        answer=Answer(parts=(said,), finish_reason=finish),
    )


@pytest.mark.parametrize(
    ("exit_code", "turns", "status", "words"),
    [
        (0, [turn()], "completed", None),
        (0, [], "failed", "never called its model"),
        (0, [turn(role="auxiliary")], "failed", "never called its model"),
        (0, [turn(), turn(state="failed")], "error", "the engine failed the harness's last call"),
        (0, [turn(state="failed"), turn(role="auxiliary")], "error", "the engine failed"),
        (0, [turn(), turn(state="failed", refused=True)], "failed", "without a whole answer"),
        (1, [turn(), turn(state="failed", refused=True)], "failed", "exit code 1"),
        (1, [turn(state="failed"), turn(state="failed", refused=True)], "failed", "exit code 1"),
        (0, [turn(), turn(state="partial")], "failed", "without a whole answer"),
        (0, [turn(state="failed"), turn()], "completed", None),
        (
            1,
            [turn(calls=True, finish="tool_calls"), turn(role="compaction"), turn()],
            "completed",
            "its work was done",
        ),
        (1, [turn(finish="stop_string")], "completed", "its work was done"),
        (1, [turn(calls=True, finish="tool_calls")], "failed", "exit code 1"),
        (1, [turn(finish="length")], "failed", "exit code 1"),
        (LOST, [turn()], "failed", "it let itself be traced"),
        (1, [turn(state="failed")], "error", "exit code 1"),
        (1, [turn(state="failed"), turn(state="partial")], "failed", "exit code 1"),
        (
            1,
            [turn(calls=True, finish="tool_calls"), turn(role="subagent", state="failed")],
            "failed",
            "exit code 1",
        ),
        (1, [], "failed", "exit code 1"),
        (137, [turn(role="subagent")], "failed", "exit code 137"),
        (127, [], "failed", "exit code 127: a program was not found in its image"),
    ],
)
def test_unreliable_exit_code_uses_turns(
    exit_code: int, turns: list[Turn], status: str, words: str | None
) -> None:
    """An exit code that lies is judged by the turns."""
    outcome = exit_outcome(LIAR, exit_code, turns)
    assert (outcome.status, outcome.exit_code) == (status, exit_code)
    assert (words or "") in (outcome.reason or "")
    assert (outcome.reason is None) == (words is None)


@pytest.mark.parametrize(("exit_code", "status"), [(0, "completed"), (1, "failed")])
def test_honest_exit_code_is_believed(exit_code: int, status: str) -> None:
    """An honest exit code is believed, whatever the turns."""
    assert {
        exit_outcome(HONEST, exit_code, turns).status for turns in ([], [turn()], [turn(state="partial")])
    } == {status}


def test_exit_after_engine_failure_is_retryable() -> None:
    """It may be tried again; who failed after the engine had answered again may not."""
    lost = exit_outcome(HONEST, 1, [turn(), turn(state="failed")])
    assert (lost.status, lost.boundary, lost.exit_code) == ("error", "engine", 1)
    assert exit_outcome(HONEST, 1, [turn(state="failed"), turn()]).status == "failed"
    assert exit_outcome(HONEST, 0, [turn(state="failed")]).status == "completed", "it knew what to do"
