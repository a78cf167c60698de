"""Polar's words for what we say otherwise: where a session is, how it ended, why a sample did.

The rule for whoever edits it: a word of Polar's is never given a meaning its bridges do not know; what it can not say stands in the metadata.
"""

from collections.abc import Mapping
from typing import Final, Literal

from polarnode.conversation import FinishReason
from polarnode.records import Outcome, Status

SessionWord = Literal["REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING", "COMPLETED", "ERROR", "TIMEOUT"]
TaskWord = Literal["running", "completed", "failed"]

# By the phase of a session that is not over. Ours builds its rows after it was judged, in no time, so that it is never BUILDING.
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
    """The status of a task: completed whatever became of its sessions, but failed where it was cancelled, so that nobody waits for the rest."""
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
