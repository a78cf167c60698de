"""Demonstrations in bulk, by several processes, ahead of training."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import Pool

from examples.tiny_policy.tasks import Task, stream
from examples.tiny_policy.transcript import Transcript, demonstrate


@dataclass(frozen=True)
class Order:
    """A lesson to be made."""

    harness: str
    task: Task
    seed: int
    noise: float


@dataclass(frozen=True)
class Lesson:
    """One task under one harness, demonstrated."""

    harness: str
    task: Task
    demo: Transcript


def make(order: Order) -> Lesson:
    """Demonstrate the task as ordered."""
    return Lesson(order.harness, order.task, demonstrate(order.harness, order.task, order.seed, order.noise))


def orders(harness: str, count: int, noise: float, seed: int) -> Iterator[Order]:
    """Orders for the first `count` training tasks of `seed`."""
    for number, task in enumerate(itertools.islice(stream(seed), count)):
        yield Order(harness, task, seed * 100_003 + number, noise)


def lessons(wanted: Iterable[Order], pool: Pool) -> Iterator[Lesson]:
    """Make all lessons, in order, ahead of the consumer."""
    return pool.imap(make, wanted, chunksize=8)
