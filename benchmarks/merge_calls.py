"""Measure `polarnode merge`: time of reading and of making rows, ids a second, peak memory, by shape.

    python benchmarks/merge_calls.py [TURNS:TOKENS ...]     (default 29:32000 1000:128000)

Calls are generated while they are read, so no shape needs a file; generating them is not counted. 5000:128000
reads 2 GB and takes some minutes.
"""

import random
import resource
import sys
import time
from collections.abc import Callable, Iterator

from polarnode.merge.token_forest import Sessions

Text = list[str]


def main() -> None:
    """Measure each size named on the command line, in each shape."""
    for size in sys.argv[1:] or ["29:32000", "1000:128000"]:
        turns, _, tokens = size.partition(":")
        for name, shape in SHAPES.items():
            measure(f"{turns} turns, {tokens} tokens, {name}", shape(int(turns), int(tokens) // int(turns)))


def measure(name: str, lines: Iterator[bytes]) -> None:
    """Merge one session and print its figures."""
    sessions, size, spent = Sessions(), 0, 0.0
    for number, line in enumerate(lines):
        size += len(line)
        began = time.process_time()
        sessions.take(line, number)
        spent += time.process_time() - began
    began = time.process_time()
    written = sum(len(row) for row in sessions.rows())
    rows, counts = time.process_time() - began, sessions.counts
    share = counts.trainable / counts.sampled
    print(
        f"{name}: read {size / 1e6:.1f} MB in {spent:.2f} s, {counts.rows} rows of {written / 1e6:.2f} MB in"
        f" {rows:.3f} s,",
        end=" ",
    )
    print(
        f"{share:.0%} of sampled tokens trainable, peak of the process"
        f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"
    )


def agents(count: int) -> Callable[[int, int], Iterator[bytes]]:
    """Agents that take turns in one session, each only appended to."""

    def lines(turns: int, step: int) -> Iterator[bytes]:
        numbers = random.Random(1)
        texts = [some(numbers, 50) for _ in range(count)]
        for turn in range(turns):
            yield extended(numbers, turn, texts[turn % count], step)

    return lines


def compacted(turns: int, step: int) -> Iterator[bytes]:
    """A session whose history is replaced by a summary four times."""
    numbers = random.Random(1)
    text: Text = []
    for turn in range(turns):
        if turn % (turns // 5 + 1) == 0:
            text[:] = some(numbers, 50)
        yield extended(numbers, turn, text, step)


def retried(turns: int, step: int) -> Iterator[bytes]:
    """Every tenth call was made before, and its answer not used."""
    numbers = random.Random(1)
    text = some(numbers, 50)
    for turn in range(turns):
        if turn % 10 == 9:
            yield extended(numbers, -turn, list(text), step)
        yield extended(numbers, turn, text, step)


def extended(numbers: random.Random, turn: int, text: Text, step: int) -> bytes:
    """A call that adds `step` tokens to a text, a third of them sampled."""
    text += some(numbers, step - step // 3)
    sampled = some(numbers, step // 3)
    head = f'{{"session_id":"s","turn_id":{turn},"prompt_ids":[{",".join(text)}],"sampled_ids":[{",".join(sampled)}],'
    text += sampled
    return (head + f'"logprobs":[{",".join(["-0.25"] * len(sampled))}]}}').encode()


def some(numbers: random.Random, count: int) -> Text:
    """Token ids, as JSON writes them."""
    return [str(numbers.randrange(150_000)) for _ in range(count)]


SHAPES = {"linear": agents(1), "four agents": agents(4), "compaction": compacted, "retries": retried}

if __name__ == "__main__":
    main()
