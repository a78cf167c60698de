"""One generation of offline data: its manifest, its slots (samples to run), the held-out split and the table
of results.

The manifest records what a folder was started with, so that it is only resumed with the same tasks.
Acceptance, splits and retries are not in it, because they are applied anew to the existing sessions each
time.

A slot is one sample of one task of the source. Each attempt at a slot is a task of its own, whose name
contains the task and the sample, so that after a `kill -9` the node's journal alone says what is done. Names
never change for the same source, because otherwise a folder could not be resumed. The same values and share
give the same split on every machine and in every order. In the table, a row's reasons add up to its attempts,
and the rows add up to the last row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from polarnode.offline.acceptance import REASONS, AcceptanceReason, AcceptanceResult


@frozen(kw_only=True)
class Manifest:
    """What a folder was started with. `digest` covers all tasks as they are submitted, in order."""

    source: str
    harness: str
    model: str
    engine: str
    tasks: int
    slots: int
    digest: str
    version: int = 1

    def json(self) -> Json:
        body: Json = plain(self)
        return body

    def check(self, now: "Manifest", *, folder: str) -> None:
        """Raise Refused if the folder was started with something else."""
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


def make_manifest(tasks: Sequence[tuple[str, TaskSpec]], *, source: str, model: str, engine: str) -> Manifest:
    """The manifest of these tasks."""
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


def read_manifest(body: Json, *, folder: str) -> Manifest:
    """The manifest of a folder. Raises Refused if the folder has no valid one."""
    try:
        return structure(body, Manifest)
    except Refused as refused:
        raise Refused(
            f"{folder}: generate.json cannot be read ({refused}): give another --out", path=refused.path
        ) from refused


_NAME: Final = 80  # characters of a source's name kept in a task's name; the digest covers all of it
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
# A session that was stopped before its end is not an attempt.
RUN_AGAIN: Final[frozenset[Status]] = frozenset({"cancelled", "interrupted"})


@frozen(kw_only=True, eq=False)
class Slot:
    """One sample of a task. `task` is the task's name in the data, `place` its position in the source."""

    place: int
    sample: int
    task: str
    spec: TaskSpec

    def named(self, attempt: int) -> str:
        """The name of an attempt's task in the journal."""
        again = f".r{attempt}" if attempt else ""
        return f"{self.place:06d}-{_plain(self.task)}.{self.sample}{again}"

    def order(self, attempt: int) -> TaskSpec:
        """The task to submit for an attempt: a single session, so no group is formed."""
        return evolve(
            self.spec, task_id=self.named(attempt), group_id=self.group, num_samples=1, group=GroupSpec()
        )

    @property
    def group(self) -> str:
        """All samples of the task are one group."""
        return self.spec.group_id or f"{self.place:06d}-{_plain(self.task)}"


@frozen(kw_only=True)
class Attempt:
    """The result of one attempt at a slot: how it ended, whether it was empty, whether it is accepted."""

    session_id: str
    status: Status
    empty: bool
    accepted: bool = False


def list_slots(tasks: Sequence[tuple[str, TaskSpec]]) -> Iterator[Slot]:
    """Every sample of every task. Samples of one task are next to each other, because they share their prompt
    and the engine's cache then holds it.
    """
    for place, (name, spec) in enumerate(tasks):
        for sample in range(spec.num_samples):
            yield Slot(place=place, sample=sample, task=spec.task_id or name, spec=spec)


def finished(attempts: Sequence[Attempt], *, retry_empty: int) -> bool:
    """Whether a slot is done: its last attempt finished, and was not an empty one that may be retried."""
    if not attempts or attempts[-1].status in RUN_AGAIN:
        return False
    empties = sum(attempt.empty for attempt in attempts if attempt.status not in RUN_AGAIN)
    return not attempts[-1].empty or empties > retry_empty


def next_attempt(attempts: Sequence[Attempt]) -> int:
    """The number of the attempt that comes after these."""
    return len(attempts)


def _plain(name: str) -> str:
    """A name that is allowed for a task. If a name had to be changed, it ends with a digest of the
    original.
    """
    kept = "".join(letter if letter in _PLAIN else "-" for letter in name[:_NAME])
    return (
        kept
        if kept == name
        else f"{kept}-{blake2b(name.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"
    )


# Metadata keys that name the origin of tasks; the first one that any task has is used.
GROUPING_KEYS: Final = ("repo", "dataset", "source")
ALL: Final = "all"
OTHER: Final = "(none)"


@define(eq=False)
class TableRow:
    """One row of the table."""

    name: str
    reasons: Counter[AcceptanceReason] = field(factory=Counter)
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
        """Accepted attempts over attempts; 0 when there are none."""
        return self.accepted / self.attempts if self.attempts else 0.0

    def add(self, trajectory: Trajectory, result: AcceptanceResult) -> None:
        """Count one session."""
        self.reasons[result.reason] += 1
        self.turns += len(trajectory.turns)
        self.sampled_tokens += trajectory.sampled_tokens
        self.run_s += trajectory.timing.run_s


@define(eq=False)
class GenerationTable:
    """All rows of the table. `by` is the metadata key that groups them; None puts everything into one row."""

    by: str | None
    total: TableRow = field(factory=lambda: TableRow(ALL))
    groups: dict[str, TableRow] = field(factory=dict)

    def add(self, trajectory: Trajectory, result: AcceptanceResult) -> None:
        """Count one session, in its row and in the sum."""
        if self.by is not None:
            name = group_name(trajectory.metadata, self.by)
            self.groups.setdefault(name, TableRow(name)).add(trajectory, result)
        self.total.add(trajectory, result)

    def rows(self) -> list[TableRow]:
        """The rows, with the largest share first, as is usual in the literature, and the sum last."""
        ordered = sorted(self.groups.values(), key=lambda group: (-group.share, group.name))
        return [*ordered, self.total]

    def seen(self) -> list[AcceptanceReason]:
        """The reasons other than acceptance that occurred, in their order."""
        return [reason for reason in REASONS if reason != "accepted" and self.total.reasons[reason]]

    def json(self) -> dict[str, Json]:
        """As JSON."""
        rows: list[Json] = [_row_json(group) for group in self.rows()]
        return {"by": self.by, "rows": rows}


def _row_json(group: TableRow) -> dict[str, Json]:
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


def find_grouping(tasks: Sequence[Mapping[str, Json]]) -> str | None:
    """The first key of GROUPING that some task's metadata has."""
    return next(
        (key for key in GROUPING_KEYS if any(metadata.get(key) is not None for metadata in tasks)), None
    )


@frozen(kw_only=True)
class Split:
    """The held-out split: tasks whose metadata key `by` has one of `values`. Without `by`, nothing is held
    out.
    """

    by: str | None = None
    values: frozenset[str] = frozenset()

    def held_out(self, metadata: Mapping[str, Json]) -> bool:
        """Whether a task is held out."""
        return self.by is not None and group_name(metadata, self.by) in self.values


def make_split(tasks: Iterable[Mapping[str, Json]], *, by: str | None, share: float) -> Split:
    """Hold out a `share` of the values of a key, rounded up but never all of them: those with the lowest
    hashes. Raises Refused for a key with one value.
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
    count = min(ceil(share * len(names)), len(names) - 1)
    ordered = sorted(
        names, key=lambda name: (blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), name)
    )
    return Split(by=by, values=frozenset(ordered[:count]))
