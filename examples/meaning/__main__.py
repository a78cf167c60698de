"""Print what becomes of recorded logprobs when a row is kept, and when it is re-tokenized.

    python -m examples.meaning out/trajectories.jsonl --requests out/requests [--model polarnode/models/tiny]
    [--tolerance 0.02]

Exit code 1 if a kept row differs. This module only combines the results of the others.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.meaning import retold
from examples.meaning.checkpoint import Checkpoint
from examples.meaning.echoes import echoes
from examples.meaning.tally import TOLERANCE, Differences, Retellings, Tally, tables
from examples.meaning.trajectories import Row, Sample, Session, sessions

MODEL = Path(__file__).parents[2] / "polarnode" / "models" / "tiny"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.meaning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="TRAJECTORIES")
    parser.add_argument(
        "--requests",
        type=Path,
        help="what polarnode run --record-requests wrote; without it nothing is rendered again",
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    given = parser.parse_args(arguments)
    checkpoint, tallies = Checkpoint(given.model), dict[str, Tally]()
    for session in sessions(given.files):
        count(tallies.setdefault(session.label, Tally()), session, given.requests, checkpoint)
    print(tables(tallies))
    if given.requests is not None and (unmatched := sum(tally.unmatched for tally in tallies.values())):
        print(
            f"\n{unmatched} turns have no recorded request that is surely theirs, and rows with them are not"
            " rendered again"
        )
    wrong = list(problems(tallies, given.tolerance))
    print("\n" + ("\n".join(wrong) or "every recorded logprob is the model's own in the row as it is"))
    return int(bool(wrong))


def count(tally: Tally, session: Session, requests: Path | None, checkpoint: Checkpoint) -> None:
    """One session more."""
    echoed = {} if requests is None else echoes(requests, session, checkpoint)
    tally.sessions += 1
    tally.rows += len(session.rows)
    tally.turns += len(session.turns)
    tally.longest = max(tally.longest, *(len(row.samples) for row in session.rows), 0)
    tally.unmatched += len(session.turns) - len(echoed)
    for row in session.rows:
        compare(
            tally.kept, row, row.ids, {at: at for sample in row.samples for at in sample.trained}, checkpoint
        )
        retell(tally.in_place, row, retold.in_place(row, checkpoint), checkpoint)
        if (again := retold.rendered(row, session, echoed, checkpoint)) is not None:
            retell(tally.rendered, row, again, checkpoint)
        if (pieces := retold.pieces(row, session, echoed, checkpoint)) is not None:
            tally.compared_rows, tally.pieces = tally.compared_rows + 1, tally.pieces + pieces


def retell(found: Retellings, row: Row, again: retold.Retold, checkpoint: Checkpoint) -> None:
    broken = sum(sample.turn not in again.whole for sample in row.samples)
    found.rows, found.broken_rows = found.rows + 1, found.broken_rows + bool(broken)
    found.turns, found.broken_turns = found.turns + len(row.samples), found.broken_turns + broken
    compare(found.differences, row, again.ids, again.kept, checkpoint)


def compare(
    found: Differences, row: Row, ids: list[int], kept: dict[int, int], checkpoint: Checkpoint
) -> None:
    """The trained tokens of a row with the model's logprobs of the same tokens in `ids`."""
    # the first token of all has no logprob
    there = [(sample, at) for sample, at in trained(row) if kept.get(at, 0) > 0]
    own = checkpoint.logprobs(ids, [kept[at] for _, at in there], [sample.temperature for sample, _ in there])
    found.add((row.logprobs[at] for _, at in there), own)
    found.lost += row.tokens - len(there)


def trained(row: Row) -> Iterator[tuple[Sample, int]]:
    return ((sample, at) for sample in row.samples for at in sample.trained)


def problems(tallies: dict[str, Tally], tolerance: float) -> Iterator[str]:
    """Why the exit code is 1."""
    if not any(tally.kept.count for tally in tallies.values()):
        yield "there is nothing to check"
    for name, tally in sorted(tallies.items()):
        if tally.kept.worst > tolerance:
            yield f"{name}: logprobs differ by {tally.kept.worst:.4f} in rows as they are"


if __name__ == "__main__":
    sys.exit(main())
