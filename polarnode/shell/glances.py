"""What a scheduler says of itself: its sessions at a glance, its stages and counts.

The rule for whoever edits it: whoever waits for a task counts places, not sessions, because a place may be held by several, one after another.
"""

from collections.abc import Mapping

from attrs import evolve, frozen

from polarnode.records import Trajectory
from polarnode.shell.gates import GateStatistics
from polarnode.shell.session import Phase, Session


@frozen(kw_only=True)
class SessionStatus:
    """One session at a glance. A place of a group (`task_id`, `sample_index`) is over when a session that held it has an `outcome`."""

    session_id: str
    task_id: str
    harness: str
    phase: Phase
    turns: int
    sampled_tokens: int
    outcome: str | None = None
    reward: float | None = None
    traces: int | None = None
    sample_index: int = 0
    attempt: int = 0


@frozen(kw_only=True)
class SchedulerStatistics:
    """The stages and the sessions in them. `retried` are those whose place was given to a fresh one; they are not among the `ended`."""

    stages: Mapping[str, GateStatistics]
    live: int
    ended: int
    retried: int
    stopping: bool


def glance(session: Session, published: Trajectory | None = None) -> SessionStatus:
    """A session now, or with its trajectory when it is over."""
    identity, counters = session.order.identity, session.live.counters
    status = SessionStatus(
        session_id=identity.session_id,
        task_id=identity.task_id,
        harness=identity.harness,
        phase=session.phase,
        turns=counters.turns,
        sampled_tokens=counters.sampled_tokens,
        sample_index=identity.sample_index,
        attempt=identity.attempt,
    )
    if published is None:
        return status
    return evolve(status, outcome=published.outcome.status, reward=published.reward, traces=len(published.traces))
