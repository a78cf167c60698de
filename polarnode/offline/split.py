"""Which tasks are held out: whole values of a metadata key (a repository), so that nothing of one is on both sides.

The rule for whoever edits it: the same values and the same share give the same split, on every machine and in every order.
"""

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from math import ceil

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.offline.tally import group_name


@frozen(kw_only=True)
class Split:
    """`values` of the metadata key `by` are held out; no `by`, nothing is."""

    by: str | None = None
    values: frozenset[str] = frozenset()

    def held_out(self, metadata: Mapping[str, Json]) -> bool:
        """Whether a task is on the other side."""
        return self.by is not None and group_name(metadata, self.by) in self.values


def split_of(tasks: Iterable[Mapping[str, Json]], *, by: str | None, share: float) -> Split:
    """Hold out `share` of the values of a key, rounded up, and never all: those whose names hash lowest. Refused for a key with one value."""
    if by is None:
        return Split()
    if not 0 < share < 1:
        raise Refused(f"--held-out {share:g} must be more than 0 and less than 1")
    names = {group_name(metadata, by) for metadata in tasks}
    if len(names) < 2:
        raise Refused(f"--held-out-by {by}: all tasks have the same value there, so none can be held out; name another key of their metadata")
    return Split(by=by, values=_lowest(names, min(ceil(share * len(names)), len(names) - 1)))


def _lowest(names: Collection[str], count: int) -> frozenset[str]:
    return frozenset(sorted(names, key=lambda name: (blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), name))[:count])
