"""Which node takes a task, and which one keeps its copy.

Pure. A whole group goes to the node with the least expected seconds of waiting work (docs/fleet.md has the
figures); a prepared image breaks ties. The second home is chosen by rendezvous hashing (Thaler and
Ravishankar, 1998) and then stored with the task: it is never computed again.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Final

from attrs import frozen

from polarnode.core.fleet import NodeReport
from polarnode.core.task import TaskSpec

LEAST_S: Final = 1.0  # of a session whose node has ended none yet: nodes that are alike must compare as alike
BUSY_S: Final = 5.0  # before a task that no node takes is sent again: loads are 2 s old


@frozen(kw_only=True)
class Candidate:
    """A node that may take tasks. `placed`: sessions sent to it that its report does not count yet."""

    report: NodeReport
    placed: int = 0

    def expected_s(self, more: int) -> float:
        """Seconds until so many more sessions would be over here, by what sessions took so far."""
        load = self.report.load
        return (load.live + self.placed + more) * max(load.session_s, LEAST_S) / max(load.slots, 1)

    def has_room(self, more: int) -> bool:
        """Whether the node would take so many more sessions."""
        load = self.report.load
        return load.busy is None and load.live + self.placed + more <= max(load.pending_limit, 1)


def home_of(spec: TaskSpec, candidates: Iterable[Candidate]) -> str | None:
    """The journal id of the node that takes the task; None when none has room."""
    able = [each for each in candidates if each.has_room(spec.num_samples)]
    if not able:
        return None

    def order(each: Candidate) -> tuple[float, bool, str]:
        cold = spec.runtime.image not in each.report.load.images
        return each.expected_s(spec.num_samples), cold, each.report.journal

    return min(able, key=order).report.journal


def second_of(task_id: str, home: str, journals: Iterable[str]) -> str:
    """The journal that keeps the task's copy; "" when there is no other."""
    others = (each for each in journals if each != home)
    return max(others, key=lambda each: blake2b(f"{each} {task_id}".encode()).digest(), default="")


def unmet(requires: Mapping[str, str], report: NodeReport) -> str | None:
    """The first label that a task requires and the node has not, as a sentence; None when it has all."""
    labels = {**report.labels, "model": report.model}
    for name, value in requires.items():
        if labels.get(name) != value:
            return f"{report.node} has {name}={labels.get(name, '')!s}, and the task requires {value}"
    return None


def queue_s(candidates: Iterable[Candidate]) -> float:
    """Expected seconds of the sessions that wait, over all slots: what an autoscaler looks at."""
    every = list(candidates)
    slots = sum(each.report.load.slots for each in every)
    waiting = sum(
        max(0, each.report.load.live + each.placed - each.report.load.slots)
        * max(each.report.load.session_s, LEAST_S)
        for each in every
    )
    return waiting / slots if slots else 0.0
