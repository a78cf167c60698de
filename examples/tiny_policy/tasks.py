"""A family of small, verifiable file tasks, from writing one word to a search over two files.

A task is a pure function of its seed. One in five pairs of answer and target is held out of training, so an
evaluation uses things that the policy has not seen.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from examples.tiny_policy.words import KEYS, STEMS, SUFFIXES, WORDS

WORKDIR = "/work"


@dataclass(frozen=True)
class Task:
    """An instruction, the files to place before it, and a shell command that exits 0 if it was obeyed."""

    kind: str
    instruction: str
    check: str
    answer: str
    target: str
    source: str = ""
    key: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def _name(rng: random.Random) -> str:
    return rng.choice(STEMS) + rng.choice(SUFFIXES)


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[_name(rng)] = None
    return list(names)


def _value(rng: random.Random) -> str:
    """Mostly a word, sometimes a number: numbers are spelled digit by digit, which is harder to copy."""
    return str(rng.randrange(100, 1000)) if rng.random() < 0.15 else rng.choice(WORDS)


def _spell(rng: random.Random, *names: str) -> list[str]:
    """All paths of one task absolute, or all relative to the workdir."""
    return [f"{WORKDIR}/{name}" for name in names] if rng.random() < 0.5 else list(names)


def _task(kind: str, instruction: str, answer: str, target: str, **more: object) -> Task:
    path = target if target.startswith("/") else f"{WORKDIR}/{target}"
    check = f'test "$(cat {path})" = "{answer}"'
    return Task(kind, instruction, check, answer, target, **more)  # type: ignore[arg-type]


def _write(rng: random.Random) -> Task:
    answer = _value(rng)
    (target,) = _spell(rng, *_names(rng, 1))
    text = rng.choice(
        (
            f"Write the word {answer} to the file {target}.",
            f"Create the file {target} containing exactly {answer}.",
            f"Put {answer} into {target}.",
        )
    )
    return _task("write", text, answer, target)


def _copy(rng: random.Random) -> Task:
    answer = _value(rng)
    one, two = _names(rng, 2)
    source, target = _spell(rng, one, two)
    text = rng.choice(
        (
            f"Copy the word in {source} to {target}.",
            f"Read {source} and write the same word to {target}.",
            f"Make {target} contain exactly what {source} contains.",
        )
    )
    return _task("copy", text, answer, target, source=source, files={one: f"{answer}\n"})


def _lookup(rng: random.Random) -> Task:
    keys = rng.sample(KEYS, rng.randrange(2, 5))
    pairs = {key: _value(rng) for key in keys}
    key = rng.choice(keys)
    one, two = _names(rng, 2)
    source, target = _spell(rng, one, two)
    text = rng.choice(
        (
            f"The file {source} has lines key=value. Write the value of {key} to {target}.",
            f"Look up {key} in {source} and write its value to {target}.",
            f"Find the value of {key} in {source} and put only that value into {target}.",
        )
    )
    content = "".join(f"{k}={v}\n" for k, v in pairs.items())
    return _task("lookup", text, pairs[key], target, source=source, key=key, files={one: content})


def _follow(rng: random.Random) -> Task:
    answer = _value(rng)
    one, middle, two = _names(rng, 3)
    source, target = _spell(rng, one, two)
    text = rng.choice(
        (
            f"The file {source} names another file. Write the word in that file to {target}.",
            f"Read {source}, then read the file it names, and write the word you find there to {target}.",
        )
    )
    files = {one: f"{middle}\n", middle: f"{answer}\n"}
    return _task("follow", text, answer, target, source=source, files=files)


KINDS: Mapping[str, Callable[[random.Random], Task]] = {
    "write": _write,
    "copy": _copy,
    "lookup": _lookup,
    "follow": _follow,
}


def held_out(task: Task) -> bool:
    """Whether the policy was never shown this answer in this file."""
    return crc32(f"{task.answer}>{task.target.rpartition('/')[2]}".encode()) % 5 == 0


def make(seed: int, kind: str | None = None, test: bool = True) -> Task:
    """The task of this seed: a held-out one for `test`, else one for training."""
    rng = random.Random(f"{seed}:{kind}:{test}")
    recipe = KINDS[kind or rng.choice(list(KINDS))]
    while True:
        task = recipe(rng)
        if held_out(task) == test:
            return task


def stream(seed: int, test: bool = False) -> Iterator[Task]:
    """Endlessly many tasks, of all kinds in turn."""
    kinds = list(KINDS)
    for number in range(2**62):
        yield make(seed * 1_000_003 + number, kinds[number % len(kinds)], test)
