"""Which sessions a generation consists of, how their tasks are called, and which are still to run.

A slot is one sample of one task of the source; each attempt at it is a task of its own with a name that tells both, so that the node's
journal alone says after a `kill -9` what is done. The rule for whoever edits it: names never change for the same source, or a folder that was
begun can not be gone on with.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

from attrs import evolve, frozen

from polarnode.records import Status
from polarnode.tasks import GroupSpec, TaskSpec

_NAME: Final = 80  # characters of a source's own name kept in a task's: its whole is in the digest
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
RUN_AGAIN: Final[frozenset[Status]] = frozenset({"cancelled", "interrupted"})  # a session that was not let come to its end is no attempt


@frozen(kw_only=True, eq=False)
class Slot:
    """One sample of a task, known by itself. `task` is what its task is called in the data, `place` the task's in the source."""

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
        return evolve(self.spec, task_id=self.named(attempt), group_id=self.group, num_samples=1, group=GroupSpec())

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
    """Every sample of every task, samples of one task one behind the other: they share their prompt, and the engine's cache holds it."""
    for place, (name, spec) in enumerate(tasks):
        for sample in range(spec.num_samples):
            yield Slot(place=place, sample=sample, task=spec.task_id or name, spec=spec)


def finished(attempts: Sequence[Attempt], *, retry_empty: int) -> bool:
    """Whether a slot is done: its last attempt came to its end, and was not an empty one that may be tried again."""
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
    return kept if kept == name else f"{kept}-{blake2b(name.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"
