"""Measure the journal: durable turns a second with group commit, latency of one flush, bytes on disk.

python benchmarks/journal.py [TURNS]     (default 20000 turns of 60 new prompt tokens and 80 sampled)
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import trio

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, TextPart
from polarnode.core.trajectory import Turn, VersionSpan
from polarnode.journal.journal import Journal, open_journal

PROMPT, SAMPLED = 60, 80
FLUSHES = 300


def turn(index: int) -> Turn:
    """An ordinary turn of a session of its own line."""
    return Turn(
        session_id="s",
        index=index,
        provider="benchmark",
        lineage=0,
        parent=None,
        kind="root",
        reason="first",
        prompt_delta=ids(range(index, index + PROMPT)),
        prompt_length=PROMPT,
        sampled=ids(range(index, index + SAMPLED)),
        logprobs=floats(-0.001 * number for number in range(SAMPLED)),
        version_spans=(VersionSpan(version="0", start=0, end=SAMPLED),),
        answer=Answer(parts=(TextPart("some words of an answer " * 12),), finish_reason="stop"),
    )


async def measure(folder: Path, turns: int) -> None:
    """Write and flush."""
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        made = [turn(index) for index in range(turns)]
        began = time.perf_counter()
        for each in made:
            journal.writer.record_turn(each)
        await journal.writer.flush()
        print(f"{turns / (time.perf_counter() - began):,.0f} durable turns a second, written together")
        await one_by_one(journal, turns)


async def one_by_one(journal: Journal, first: int) -> None:
    """The latency of waiting for each turn by itself."""
    took = []
    for index in range(first, first + FLUSHES):
        began = time.perf_counter()
        journal.writer.record_turn(turn(index))
        await journal.writer.flush()
        took.append(time.perf_counter() - began)
    took.sort()
    print(
        f"one flush: median {statistics.median(took) * 1e3:.2f} ms, p99"
        f" {took[int(len(took) * 0.99)] * 1e3:.2f} ms"
    )


def main() -> None:
    """Measure in a folder that is removed again."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trio.run(measure, folder, turns)
        size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{size / ((turns + FLUSHES) * SAMPLED):.1f} bytes on disk a sampled token, with {PROMPT} prompt"
        " tokens and the answer's text a turn"
    )


if __name__ == "__main__":
    main()
