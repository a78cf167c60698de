"""Ids as Polar's side gives them, and as they stand in the journal.

The rule for whoever edits it: an id of ours is for ever, Polar's may be used again once its task is over; so each use is a task of its own
here, called by the id and its number. What can not be a name of ours is called by its digest.
"""

from hashlib import sha256

from polarnode.shell.journal.runs import RUN
from polarnode.wire.laws import NAME

ROOM = 128 - len(RUN) - 9  # of a name, for the number of a run


def task_name(polar_id: str) -> str:
    """What the first task of an id is called."""
    return _name(polar_id, "polar-")


def dispatch_name(session_id: str) -> str:
    """What the task of one session is called, whose id its sender chose."""
    return _name(f"session:{session_id}", "polar-session-")


def run_name(first: str, run: int) -> str:
    """What a later task of the same id is called."""
    return first if run == 1 else f"{first}{RUN}{run}"


def _name(said: str, prefix: str) -> str:
    if NAME.fullmatch(said) and len(said) <= ROOM and RUN not in said:
        return said
    return prefix + sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]
