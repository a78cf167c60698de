"""What the journal says of weights: rows as values, and which weights a node begins with.

Rule for whoever edits it: a node that was restarted serves the weights it served last, or says in words that it does not; it never guesses.
"""

from collections.abc import Sequence
from pathlib import Path

import trio
from attrs import evolve

from polarnode.conversation import Json
from polarnode.engine_host.checkpoints import fingerprint
from polarnode.errors import Conflict
from polarnode.shell.engine import Loaded
from polarnode.shell.journal import Journal
from polarnode.shell.journal.weights import WeightsRow
from polarnode.shell.weights.values import DiskSource, Served, UpdateOrder, UpdateReport, digest
from polarnode.wire import plain, structure


def served_of(row: WeightsRow) -> Served:
    return evolve(structure(row.body, Served), at=row.at)


def plain_of(served: Served) -> dict[str, Json]:
    body: dict[str, Json] = plain(served)
    return body


def report_of(served: Served, *, created: bool) -> UpdateReport:
    return UpdateReport(version=served.version, mode=served.mode, source=served.source, seconds=served.seconds, hosts=served.hosts, created=created)


async def answered(journal: Journal, versions: Sequence[str], order: UpdateOrder) -> UpdateReport | None:
    """The answer to an order that is served already; None for one to obey. Conflict for a version that is the name of other weights.

    `versions` are those of this life of the node. What an earlier life served last, and this one could not begin with, may be sent again.
    """
    row = await journal.weights_of(order.version)
    if row is None:
        if order.version in versions:
            raise Conflict(f"version {order.version!r} is that of the weights the node was started with: choose another name")
        return None
    known, last = served_of(row), (await journal.weights(1))[0]
    if (isinstance(order.source, DiskSource) and known.digest != digest(order)) or known.source["kind"] != order.source.kind:
        raise Conflict(f"version {order.version!r} was served with another source: give these weights a version of their own")
    if order.version == versions[-1] and known.digest == digest(order):
        return report_of(known, created=False)
    if order.version in versions or order.version != last.version or not await _unchanged(known):
        raise Conflict(f"version {order.version!r} was served before and others are now: give these weights a version of their own")
    return None


async def _unchanged(known: Served) -> bool:
    """A trainer's tensors are taken by its word."""
    return known.source["kind"] != "disk" or await trio.to_thread.run_sync(fingerprint, Path(known.source["path"])) == known.files


async def last_weights(journal: Journal, model: str, *, resume: bool) -> tuple[Loaded | None, str | None]:
    """What to serve in place of `model`'s own weights, and a sentence when the last version can not be served, or is on purpose not."""
    rows = await journal.weights(1)
    if not rows:
        return None, None
    last = served_of(rows[0])
    if (why := await trio.to_thread.run_sync(_why_not, last, model, resume)) is None:
        return Loaded(version=last.version, path=last.source["path"], files=last.files), None
    return None, f"weights {last.version!r}, the last of this journal, are not served: {why}; those of {model} are, until an update"


def _why_not(last: Served, model: str, resume: bool) -> str | None:
    if not resume:
        return "resume_weights is false"
    if last.model != model:
        return f"they are of another model, {last.model}"
    if last.source["kind"] != "disk":
        return f"they came as {last.source['kind']} from a trainer, and no disk has them"
    path = Path(last.source["path"])
    if not path.is_dir():
        return f"their folder {path} is gone"
    return None if fingerprint(path) == last.files else f"the files under {path} have changed since"
