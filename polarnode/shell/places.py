"""A place in a group, and the sessions that hold it one after another: who takes it when the machine lost one, and when that one begins.

Pure. Which ends are the machine's says `groups.lost_to_the_machine`. The rule for whoever edits it: what an agent did is never tried again, however it ended, because choosing among its attempts would bend
what a trainer learns from; only what the machine did to it is, and no more often than the task's budget says.
"""

from typing import Final

from attrs import evolve

from polarnode.merge.trajectory import Identity
from polarnode.tasks import Budgets

PAUSES: Final = (0.5, 2.0, 5.0)  # seconds before an attempt, growing: a Podman service that died is back in one or two


def retries_left(identity: Identity, budgets: Budgets) -> bool:
    """Whether another session may take this one's place."""
    return identity.attempt < budgets.retries


def successor(identity: Identity, session_id: str) -> Identity:
    """Who holds the place next."""
    return evolve(identity, session_id=session_id, attempt=identity.attempt + 1)


def pause_before(attempt: int) -> float:
    """Seconds between a session's end and the beginning of the one that takes its place; none before the first."""
    return PAUSES[min(attempt, len(PAUSES)) - 1] if attempt else 0.0
