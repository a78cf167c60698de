"""Copying exercises before any task: lists repeated, and values looked up by key.

A policy that cannot copy a word learns the form of the demonstrations and nothing of their content. A few
hundred small steps of this make copying form first.
"""

import random

from examples.tiny_policy.tasks import Task, make
from examples.tiny_policy.transcript import Piece, Transcript
from examples.tiny_policy.words import KEYS, STEMS, WORDS

_JOINTS = (" ", ", ", "\n", '", "', " /", "=", " > ", ".txt ", '"}}\n{"')


def _item(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return str(rng.randrange(100, 1000))
    return rng.choice(rng.choice((WORDS, STEMS, KEYS)))


def echo(rng: random.Random) -> Transcript:
    """A list, then the same list again, to learn copying."""
    text = "".join(
        rng.choice((" ", " ", "", '"', "/", ", ")) + _item(rng) for _ in range(rng.randrange(6, 20))
    )
    return (Piece(text + "\n", False), Piece(text, True))


def lookup(rng: random.Random) -> Transcript:
    """Pairs, then the same pairs in another order and spelling; only the values are learned."""
    pairs = {_item(rng): _item(rng) for _ in range(rng.randrange(2, 8))}
    first, second, bar = (rng.choice(_JOINTS) for _ in range(3))
    pieces = [Piece("".join(f"{key}{first}{value}\n" for key, value in pairs.items()), False)]
    for key in rng.sample(list(pairs), len(pairs)):
        pieces += [Piece(bar + key + second, False), Piece(pairs[key], True)]
    return tuple(pieces)


def roles(rng: random.Random) -> Transcript:
    """A task's own words, each requested in the positions where a tool call needs it; twice, in any order."""
    task = make(rng.randrange(2**31), test=False)
    pieces = [Piece(f"{task.instruction}\n" + "".join(task.files.values()), False)]
    for _ in range(2):
        places = [place for place in _places(task) if place[2]]
        rng.shuffle(places)
        for before, after, text in places:
            pieces += [Piece(before, False), Piece(text, True), Piece(after, False)]
    return tuple(pieces)


def _places(task: Task) -> list[tuple[str, str, str]]:
    """The text before and after each item of the task."""
    return [
        ('write", "path": "', '",', task.target),
        ('"content": "', '"}}\n', task.answer),
        ('read", "path": "', '"}}\n', task.source),
        ("echo", " >", f" {task.answer}"),
        (">", '"}}\n', f" {task.target}"),
        ("cat", '"}}\n', f" {task.source}" if task.source else ""),
        ("grep", "=", f" {task.key}" if task.key else ""),
    ]


def drill(rng: random.Random) -> Transcript:
    """One exercise."""
    return rng.choice((echo, lookup, roles, roles, roles, roles))(rng)
