"""How a harness's run ended, judged by its exit code and, where that lies, by the session's turns.

A failure behind an engine that died is the engine's: a harness whose last call the engine failed had nothing left to go on with.
Measured: pi, openclaw, hermes and gemini_cli exit 0 having done nothing, opencode exits 1 after a compaction although its work is done. Rule for
whoever edits it: an exit code is overruled only by what the model plane itself saw, and the reason says so.
"""

from collections.abc import Sequence

from polarnode.errors import EngineError
from polarnode.harnesses.harness import Harness
from polarnode.records import Outcome, Turn


def exit_outcome(harness: Harness, exit_code: int, turns: Sequence[Turn]) -> Outcome:
    """Completed, failed, or an error of the engine's, with the reason where it is not plain."""
    judged = _judged(harness, exit_code, turns)
    return _of_engine(judged) if judged.status == "failed" and lost_its_engine(turns) else judged


def lost_its_engine(turns: Sequence[Turn]) -> bool:
    """Whether the engine failed the main agent's last call. One that was asked again and answered is forgotten: the agent went on from there."""
    last = _last_main(turns)
    return last is not None and last.state == "failed"


def _of_engine(failed: Outcome) -> Outcome:
    reason = f"the engine failed the harness's last call, and it ended with exit code {failed.exit_code}"
    return Outcome(status="error", boundary=EngineError.boundary, exit_code=failed.exit_code, reason=reason)


def _judged(harness: Harness, exit_code: int, turns: Sequence[Turn]) -> Outcome:
    if harness.exit_code_honest:
        return _plain(exit_code)
    last = _last_main(turns)
    if exit_code == 0 and (last is None or last.state != "complete"):
        reason = f"{harness.name} ended with exit code 0, but without a whole answer to its last call" if last else "it never called its model"
        return Outcome(status="failed", exit_code=exit_code, reason=reason)
    if exit_code != 0 and last is not None and _said_its_last(last):
        reason = f"{harness.name} ended with exit code {exit_code} after its last answer was whole: its work was done"
        return Outcome(status="completed", exit_code=exit_code, reason=reason)
    return _plain(exit_code)


def _plain(exit_code: int) -> Outcome:
    if exit_code == 0:
        return Outcome(status="completed", exit_code=0)
    return Outcome(status="failed", exit_code=exit_code, reason=f"the harness ended with exit code {exit_code}")


def _last_main(turns: Sequence[Turn]) -> Turn | None:
    """The main agent's last turn; side calls and sub-agents say nothing about how it ended."""
    return next((turn for turn in reversed(turns) if turn.role == "main"), None)


def _said_its_last(turn: Turn) -> bool:
    """A whole answer that asks for no tool: the agent loop of every harness ends on one."""
    answer = turn.answer
    return turn.state == "complete" and answer is not None and answer.finish_reason in ("stop", "stop_string") and not answer.calls
