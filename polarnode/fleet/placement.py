"""Which node takes a task, and which one keeps its copy.

Pure. Only nodes that have the labels a task requires take part, `model` among them. A whole group goes to the
node with the least expected seconds of waiting work (docs/fleet.md has the figures); a prepared image breaks
ties. The second home is chosen by rendezvous hashing (Thaler and
Ravishankar, 1998) and then stored with the task: it is never computed again.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

from attrs import frozen

from polarnode.core.codec.json import child
from polarnode.core.errors import Refused
from polarnode.core.fleet import NodeReport, label_texts
from polarnode.core.task import TaskSpec

LEAST_S: Final = 1.0  # of a session whose node has ended none yet: nodes that are alike must compare as alike
SHOWN: Final = 16  # nodes, or values of a label, in a refusal: a page of text
BUSY_S: Final = 5.0  # before a task that no node takes is sent again: loads are 2 s old


@frozen(kw_only=True)
class Candidate:
    """A node that may take tasks. `placed`: sessions sent to it that its report does not count yet."""

    report: NodeReport
    placed: int = 0

    def expected_s(self, more: int, priority: int = 0) -> float:
        """Seconds until so many more sessions would be over here, by what sessions took so far. Of those with
        a lower priority only as many count as have a slot, which they keep.
        """
        load = self.report.load
        before = sum(count for each, count in load.by_priority.items() if int(each) >= priority)
        ahead = max(before, min(load.live, load.slots)) if load.by_priority else load.live
        return (ahead + self.placed + more) * max(load.session_s, LEAST_S) / max(load.slots, 1)

    def has_room(self, more: int) -> bool:
        """Whether the node would take so many more sessions."""
        load = self.report.load
        return load.busy is None and load.live + self.placed + more <= max(load.pending_limit, 1)


def home_of(spec: TaskSpec, candidates: Iterable[Candidate]) -> str | None:
    """The journal id of the node that takes the task; None when none that may has room."""
    able = [
        each for each in candidates if each.has_room(spec.num_samples) and each.report.meets(spec.requires)
    ]
    if not able:
        return None

    def order(each: Candidate) -> tuple[float, bool, str]:
        cold = spec.runtime.image not in each.report.load.images
        return each.expected_s(spec.num_samples, spec.priority), cold, each.report.journal

    return min(able, key=order).report.journal


def second_of(task_id: str, home: str, journals: Iterable[str]) -> str:
    """The journal that keeps the task's copy; "" when there is no other."""
    others = (each for each in journals if each != home)
    return max(others, key=lambda each: blake2b(f"{each} {task_id}".encode()).digest(), default="")


def models_of(reports: Iterable[NodeReport]) -> list[str]:
    """The models that nodes serve, each once."""
    return sorted({each.model for each in reports})


def one_model(asked: str | None, reports: Iterable[NodeReport], *, complete: bool) -> str | None:
    """The model that a request is for: the one that it names, or the only one that is served. Raises Refused
    where it must name one of several, and for one that no node serves. None where no node is known.
    """
    models = models_of(reports)
    if asked is not None and (asked in models or not complete):
        return asked
    if asked is not None:
        raise Refused(
            f"model is {asked!r}, and this fleet serves {', '.join(models) or 'none'}", path="?model"
        )
    if len(models) > 1:
        raise Refused(
            f"model is missing: this fleet serves {', '.join(models)}; name one, as ?model={models[0]}",
            path="?model",
        )
    return models[0] if models else None


def able_of(requires: Mapping[str, str], home: str, reports: Iterable[NodeReport]) -> list[str]:
    """The journals that may keep the copy of a task of this home: they may have to run it. So they meet what
    it requires and, where that is known, serve the home's model.
    """
    every = list(reports)
    models = {each.model for each in every if each.journal == home}
    return [each.journal for each in every if each.meets(requires) and (not models or each.model in models)]


def insist_possible(requires: Mapping[str, str], reports: Iterable[NodeReport], *, complete: bool) -> None:
    """Raise Refused for what a task requires if no node of the roster could ever take it, or if nodes of
    several models could. `complete`: the roster has no other nodes than those of the reports.
    """
    every = list(reports)
    able = [each for each in every if each.meets(requires)]
    models = models_of(able)
    if len(models) > 1:
        raise Refused(
            f"requires.model is missing: this fleet serves {', '.join(models)}, and a task is for one of"
            " them",
            path="$.requires.model",
        )
    if able or not complete:
        return
    labels = [each.all_labels for each in every]
    name = next(
        (name for name, value in requires.items() if all(each.get(name) != value for each in labels)), None
    )
    if name is None:
        nodes = "; ".join(label_texts(each) for each in labels[:SHOWN])
        raise Refused(
            f"requires names labels that no node has together; the nodes have {nodes}", path="$.requires"
        )
    path = child("$.requires", name)
    values = sorted({each[name] for each in labels if name in each})
    have = f"they have {', '.join(values[:SHOWN])}" if values else _names(labels)
    raise Refused(f"{path[2:]} is {requires[name]!r}, and no node of this fleet has that: {have}", path=path)


def why_none(requires: Mapping[str, str], up: Iterable[NodeReport], silent: Sequence[str]) -> str:
    """Why no node takes a task now: a part of a sentence. `silent`: nodes that never answered."""
    able = [each for each in up if each.meets(requires)]
    never = f"; {', '.join(silent[:SHOWN])} never answered" if silent else ""
    if not able:
        return f"no node{f' that has {label_texts(requires)}' if requires else ''} is up{never}"
    reasons = [each.load.busy for each in able if each.load.busy]
    return reasons[0] if reasons else f"all nodes that could, {len(able)}, are full{never}"


def _names(labels: Iterable[Mapping[str, str]]) -> str:
    """The names of all nodes' labels."""
    return f"their labels are {', '.join(sorted({name for each in labels for name in each})[:SHOWN])}"


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
