"""Measure what readers cost a node.

    python benchmarks/delivery.py [SESSIONS]     (default 300 sessions of 20 turns, 2800 tokens each)

Prints events a second for 1, 4 and 16 readers, as JSON and as base64, with JSON shared or made for each, and
the cost of slow readers. Readers are processes on the same machine that count bytes and parse nothing.
Compare the ratios of one run.
"""

import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from attrs import frozen
from journal import PROMPT, SAMPLED, turn

from polarnode.api.app import control_plane
from polarnode.api.routes import ControlRoutes
from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Json
from polarnode.core.trajectory import Outcome, Trace, Trajectory, TurnSpan, VersionSpan
from polarnode.http.server import Address, open_server
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import pack_ended
from polarnode.journal.log.sqlite import SqliteLog, end_entry
from polarnode.journal.queries import CACHE_BYTES, ByteCache

TURNS = 20
READERS = (1, 4, 16)
ROUNDS = 3  # the median of so many: other work runs on the machine
STOPPED = 16  # readers that read nothing, beside 4 that do
READER = """
import http.client, sys, time
host, port, path = sys.argv[1:]
began = time.monotonic()
connection = http.client.HTTPConnection(host, int(port))
connection.request("GET", path)
answer = connection.getresponse()
size = 0
while data := answer.read1(1 << 18):
    size += len(data)
print(began, time.monotonic(), size)
"""


class NoNode:
    """The part of `NodeService` that the routes of the log need."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.log = journal, SqliteLog(journal)

    def status(self) -> dict[str, Json]:
        return {}


def trajectory(number: int) -> Trajectory:
    """A session of 20 turns in one row."""
    step = PROMPT + SAMPLED
    spans = [(index, index * step + PROMPT, (index + 1) * step) for index in range(TURNS)]
    return Trajectory(
        session_id=f"s{number}",
        task_id="t",
        group_id="g",
        sample_index=0,
        outcome=Outcome(status="completed"),
        reward=1.0,
        traces=(
            Trace(
                lineage=0,
                token_ids=ids(range(step * TURNS)),
                loss_mask=(b"\0" * PROMPT + b"\1" * SAMPLED) * TURNS,
                logprobs=floats(
                    -0.001 * place if place % step >= PROMPT else 0.0 for place in range(step * TURNS)
                ),
                prompt_length=PROMPT,
                turn_spans=tuple(TurnSpan(turn=index, start=start, end=end) for index, start, end in spans),
                version_spans=tuple(
                    VersionSpan(version="0", start=start, end=end) for _, start, end in spans
                ),
            ),
        ),
        turns=(),
    )


def publish(journal: Journal, number: int) -> None:
    for index in range(TURNS):
        journal.writer.record_turn(attrs.evolve(turn(index), session_id=f"s{number}"))
    journal.writer.write(end_entry(pack_ended(trajectory(number), finished=journal.now())))


@asynccontextmanager
async def serving(folder: Path, sessions: int) -> AsyncIterator[tuple[Journal, Address]]:
    """A journal of so many sessions behind a control plane."""
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        for number in range(sessions):
            publish(journal, number)
        await journal.writer.flush()
        service: Any = NoNode(journal)
        async with open_server(
            control_plane(ControlRoutes(service=service).rows(), token=None),
            Address(host="127.0.0.1", port=0),
        ) as address:
            yield journal, address


@frozen(kw_only=True)
class Reading:
    """One round: seconds until all readers had everything, what it cost the node's process, and the bytes of
    one reader.
    """

    took: float
    cpu: float
    size: int


async def read_all(
    journal: Journal, address: Address, readers: int, arrays: str, *, kept: int = CACHE_BYTES
) -> Reading:
    """So many readers at once read everything; `kept` bytes of JSON are kept for the next."""
    journal.reader._event_cache = ByteCache(limit=kept)
    outputs: list[str] = []

    async def read() -> None:
        path = f"/v1/trajectories/stream?follow=false&after=0&arrays={arrays}"
        result = await trio.run_process(
            [sys.executable, "-c", READER, address.host, str(address.port), path], capture_stdout=True
        )
        outputs.append(result.stdout.decode())

    before = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(readers):
            nursery.start_soon(read)
    cpu = time.process_time() - before
    times = [tuple(map(float, each.split())) for each in outputs]
    return Reading(
        took=max(end for _, end, _ in times) - min(began for began, _, _ in times),
        cpu=cpu,
        size=int(times[0][2]),
    )


@contextmanager
def stopped(address: Address, count: int, arrays: str) -> Iterator[None]:
    """Readers that ask and read nothing."""
    asked = f"GET /v1/trajectories/stream?after=0&arrays={arrays} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.create_connection((address.host, address.port)))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sockets[-1].sendall(asked)
        yield
    finally:
        for each in sockets:
            each.close()


def median(rounds: list[Reading]) -> Reading:
    return Reading(
        took=statistics.median(each.took for each in rounds),
        cpu=statistics.median(each.cpu for each in rounds),
        size=rounds[0].size,
    )


async def measure(folder: Path, sessions: int) -> None:
    """All of it, a line each."""
    async with serving(folder, sessions) as (journal, address):
        print(
            "| arrays | readers | kB an event | events/s to each | node's CPU, ms an event sent | made for"
            " each reader: events/s | ms |"
        )
        print("|---|---|---|---|---|---|---|")
        for arrays in ("json", "base64"):
            for readers in READERS:
                await one_row(journal, address, readers, arrays, sessions)
        await beside_stopped(journal, address, sessions)


async def one_row(journal: Journal, address: Address, readers: int, arrays: str, sessions: int) -> None:
    """Both ways in turn, so that what else the machine does falls on both."""
    rounds: tuple[list[Reading], list[Reading]] = ([], [])
    for _ in range(ROUNDS):
        for found, kept in zip(rounds, (CACHE_BYTES, 0), strict=True):
            found.append(await read_all(journal, address, readers, arrays, kept=kept))
    once, each = map(median, rounds)
    sent = sessions * readers
    print(
        f"| {arrays} | {readers} | {once.size / sessions / 1e3:.0f} | {sessions / once.took:,.0f} |"
        f" {once.cpu / sent * 1e3:.2f} | {sessions / each.took:,.0f} | {each.cpu / sent * 1e3:.2f} |"
    )


async def beside_stopped(journal: Journal, address: Address, sessions: int) -> None:
    rounds: tuple[list[Reading], list[Reading]] = ([], [])
    for _ in range(ROUNDS):
        rounds[0].append(await read_all(journal, address, 4, "json"))
        with stopped(address, STOPPED, "json"):
            await trio.sleep(1.0)  # until they are stuck
            rounds[1].append(await read_all(journal, address, 4, "json"))
    alone, beside = map(median, rounds)
    print(
        f"4 readers: {sessions / alone.took:,.0f} events/s to each, {alone.cpu / sessions / 4 * 1e3:.2f} ms"
        f" of CPU an event; beside {STOPPED} that take nothing {sessions / beside.took:,.0f} and"
        f" {beside.cpu / sessions / 4 * 1e3:.2f}"
    )


def main() -> None:
    """Measure in a folder that is removed again."""
    sessions = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as name:
        trio.run(measure, Path(name), sessions)


if __name__ == "__main__":
    main()
