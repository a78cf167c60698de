"""What a folder of generated data was begun with, so that it is only ever gone on with as it was begun.

Acceptance, splits and retries are not in it: they are asked of what there is, each time. The rule for whoever
edits it: a refusal names what is different, what it was, and what to do.

Which sessions a generation consists of, how their tasks are called, and which are still to run.

A slot is one sample of one task of the source; each attempt at it is a task of its own with a name that tells
both, so that the node's journal alone says after a `kill -9` what is done. The rule for whoever edits it:
names never change for the same source, or a folder that was begun can not be gone on with.

The table of what was generated: attempts, how many were accepted, and why the others were not, by group of
tasks.

The rule for whoever edits it: a row's reasons add up to its attempts, and the rows to the last one.

Which tasks are held out: whole values of a metadata key (a repository), so that nothing of one is on both
sides.

The rule for whoever edits it: the same values and the same share give the same split, on every machine and in
every order.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import Final

from attrs import define, evolve, field, fields, frozen

from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.codec.tasks import task_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import GroupSpec, TaskSpec
from polarnode.core.trajectory import Status, Trajectory
from polarnode.offline.acceptance import REASONS, Judged, Reason

# ── manifest ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Manifest:
    """`digest` is of all tasks as they are submitted, in order."""

    source: str
    harness: str
    model: str
    engine: str
    tasks: int
    slots: int
    digest: str
    version: int = 1

    def json(self) -> Json:
        said: Json = plain(self)
        return said

    def check(self, now: "Manifest", *, folder: str) -> None:
        """Refused when the folder was begun with something else."""
        for each in fields(Manifest):
            was, is_now = getattr(self, each.name), getattr(now, each.name)
            if was != is_now:
                what = (
                    "the tasks of the source are not the same any more"
                    if each.name == "digest"
                    else f"its {each.name} was {was!r}, not {is_now!r}"
                )
                raise Refused(
                    f"{folder} was begun otherwise: {what}; give the same again, or another --out (only"
                    " --accept and what is exported may change)"
                )


def manifest_of(tasks: Sequence[tuple[str, TaskSpec]], *, source: str, model: str, engine: str) -> Manifest:
    """What these tasks would be begun with."""
    digest = blake2b(digest_size=16)
    for name, spec in tasks:
        digest.update(dump_json([name, task_json(spec)]) + b"\n")
    harnesses = dict.fromkeys(spec.harness.name for _, spec in tasks)
    return Manifest(
        source=source,
        harness=", ".join(harnesses),
        model=model,
        engine=engine,
        tasks=len(tasks),
        slots=sum(spec.num_samples for _, spec in tasks),
        digest=digest.hexdigest(),
    )


def read_manifest(said: Json, *, folder: str) -> Manifest:
    """The manifest of a folder. Refused when it is none."""
    try:
        return structure(said, Manifest)
    except Refused as refused:
        raise Refused(
            f"{folder}: generate.json can not be read ({refused}): give another --out", path=refused.path
        ) from refused


# ── slots ────────────────────────────────────────────────────────────

_NAME: Final = 80  # characters of a source's own name kept in a task's: its whole is in the digest
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
# a session that was not let come to its end is no attempt
RUN_AGAIN: Final[frozenset[Status]] = frozenset({"cancelled", "interrupted"})


@frozen(kw_only=True, eq=False)
class Slot:
    """One sample of a task, known by itself. `task` is what its task is called in the data, `place` the
    task's in the source.
    """

    place: int
    sample: int
    task: str
    spec: TaskSpec

    def named(self, attempt: int) -> str:
        """What the task of an attempt is called in the journal."""
        again = f".r{attempt}" if attempt else ""
        return f"{self.place:06d}-{_plain(self.task)}.{self.sample}{again}"

    def order(self, attempt: int) -> TaskSpec:
        """What is submitted for an attempt: one session, of which alone no group can be judged."""
        return evolve(
            self.spec, task_id=self.named(attempt), group_id=self.group, num_samples=1, group=GroupSpec()
        )

    @property
    def group(self) -> str:
        """All samples of the task are one group."""
        return self.spec.group_id or f"{self.place:06d}-{_plain(self.task)}"


@frozen(kw_only=True)
class Attempt:
    """What became of one attempt at a slot: how it ended, whether it said nothing, whether it is data."""

    session_id: str
    status: Status
    empty: bool
    accepted: bool = False


def slots_of(tasks: Sequence[tuple[str, TaskSpec]]) -> Iterator[Slot]:
    """Every sample of every task, samples of one task one behind the other: they share their prompt, and the
    engine's cache holds it.
    """
    for place, (name, spec) in enumerate(tasks):
        for sample in range(spec.num_samples):
            yield Slot(place=place, sample=sample, task=spec.task_id or name, spec=spec)


def finished(attempts: Sequence[Attempt], *, retry_empty: int) -> bool:
    """Whether a slot is done: its last attempt came to its end, and was not an empty one that may be tried
    again.
    """
    if not attempts or attempts[-1].status in RUN_AGAIN:
        return False
    empties = sum(attempt.empty for attempt in attempts if attempt.status not in RUN_AGAIN)
    return not attempts[-1].empty or empties > retry_empty


def next_attempt(attempts: Sequence[Attempt]) -> int:
    """The number of the attempt that comes after these."""
    return len(attempts)


def _plain(name: str) -> str:
    """A name as tasks may be called; one that had to be changed ends with a digest of its own."""
    kept = "".join(letter if letter in _PLAIN else "-" for letter in name[:_NAME])
    return (
        kept
        if kept == name
        else f"{kept}-{blake2b(name.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"
    )


# ── tally ────────────────────────────────────────────────────────────

# metadata that tells tasks' origin, the first that any task has
GROUPING: Final = ("repo", "dataset", "source")
ALL: Final = "all"
OTHER: Final = "(none)"


@define(eq=False)
class Group:
    """One row."""

    name: str
    reasons: Counter[Reason] = field(factory=Counter)
    turns: int = 0
    sampled_tokens: int = 0
    run_s: float = 0.0

    @property
    def attempts(self) -> int:
        return self.reasons.total()

    @property
    def accepted(self) -> int:
        return self.reasons["accepted"]

    @property
    def share(self) -> float:
        """Of its attempts, so many were accepted; 0 for none."""
        return self.accepted / self.attempts if self.attempts else 0.0

    def add(self, trajectory: Trajectory, judged: Judged) -> None:
        """Count one session."""
        self.reasons[judged.reason] += 1
        self.turns += len(trajectory.turns)
        self.sampled_tokens += trajectory.sampled_tokens
        self.run_s += trajectory.timing.run_s


@define(eq=False)
class Tally:
    """All rows. `by` is the metadata key that tells them apart; None puts everything into one."""

    by: str | None
    total: Group = field(factory=lambda: Group(ALL))
    groups: dict[str, Group] = field(factory=dict)

    def add(self, trajectory: Trajectory, judged: Judged) -> None:
        """Count one session, in its row and in the sum."""
        if self.by is not None:
            name = group_name(trajectory.metadata, self.by)
            self.groups.setdefault(name, Group(name)).add(trajectory, judged)
        self.total.add(trajectory, judged)

    def rows(self) -> list[Group]:
        """The rows, the largest share first as in the literature, and the sum last."""
        ordered = sorted(self.groups.values(), key=lambda group: (-group.share, group.name))
        return [*ordered, self.total]

    def seen(self) -> list[Reason]:
        """The reasons that occurred besides acceptance, in their order."""
        return [reason for reason in REASONS if reason != "accepted" and self.total.reasons[reason]]

    def json(self) -> dict[str, Json]:
        """As JSON."""
        rows: list[Json] = [_row_json(group) for group in self.rows()]
        return {"by": self.by, "rows": rows}


def _row_json(group: Group) -> dict[str, Json]:
    return {
        "name": group.name,
        "attempts": group.attempts,
        "accepted": group.accepted,
        "share": round(group.share, 4),
        "reasons": {reason: count for reason, count in group.reasons.items() if reason != "accepted"},
        "turns": group.turns,
        "sampled_tokens": group.sampled_tokens,
        "run_s": round(group.run_s, 3),
    }


def group_name(metadata: Mapping[str, Json], key: str) -> str:
    """The name of a task's group."""
    value = metadata.get(key)
    return OTHER if value is None else value if isinstance(value, str) else str(value)


def grouping_of(tasks: Sequence[Mapping[str, Json]]) -> str | None:
    """The first key of GROUPING that some task's metadata has."""
    return next((key for key in GROUPING if any(metadata.get(key) is not None for metadata in tasks)), None)


# ── split ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Split:
    """`values` of the metadata key `by` are held out; no `by`, nothing is."""

    by: str | None = None
    values: frozenset[str] = frozenset()

    def held_out(self, metadata: Mapping[str, Json]) -> bool:
        """Whether a task is on the other side."""
        return self.by is not None and group_name(metadata, self.by) in self.values


def split_of(tasks: Iterable[Mapping[str, Json]], *, by: str | None, share: float) -> Split:
    """Hold out `share` of the values of a key, rounded up, and never all: those whose names hash lowest.
    Refused for a key with one value.
    """
    if by is None:
        return Split()
    if not 0 < share < 1:
        raise Refused(f"--held-out {share:g} must be more than 0 and less than 1")
    names = {group_name(metadata, by) for metadata in tasks}
    if len(names) < 2:
        raise Refused(
            f"--held-out-by {by}: all tasks have the same value there, so none can be held out; name another"
            " key of their metadata"
        )
    return Split(by=by, values=_lowest(names, min(ceil(share * len(names)), len(names) - 1)))


def _lowest(names: Collection[str], count: int) -> frozenset[str]:
    return frozenset(
        sorted(
            names, key=lambda name: (blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), name)
        )[:count]
    )
