"""Measure what the stream of a fleet costs its front.

    python benchmarks/fleet_streams.py [SECONDS [EVENTS_A_SECOND]]      (default 60 seconds, 14 events/s)

64 stub nodes in one process send events of 300 kB, each with 16 open tasks in two journals; a front in a
process of its own has one reader, which acknowledges once a second. Prints the front's CPU, its memory, the
milliseconds between an event's first byte at its node and its last byte at the reader, and how soon a new
front streams. Then a reader that is far behind: how many megabytes a second.
"""

import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from polarnode.client.scripts import Block, Decoder
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.fleet import CopyRow, CopyRows, Epoch, NodeLoad, NodeReport
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.serving import serve_front

NODES, SIZE, TASKS = 64, 300_000, 16
BACKLOG = 30  # events of each node that a reader far behind reads
FILLING = b"x" * SIZE
REPORT_S = 2.0
SETTLED_S = 5.0

# ── stub nodes ────────────────────────────────────────────────────────────


def journal(number: int) -> str:
    return f"j{number % NODES:016x}"


@define(eq=False)
class Stub:
    """What a front asks of a node, over HTTP, with as little work as possible."""

    number: int
    sent: int = 0  # events of the present
    grown: trio.Event = field(factory=trio.Event)

    def report(self) -> bytes:
        report = NodeReport(
            node=f"node-{self.number}", journal=journal(self.number), model="m", ready=True, term=1
        )
        return dump_json(plain(report)).replace(
            dump_json(plain(NodeLoad())), dump_json(plain(NodeLoad(slots=128, live=16)))
        )

    def rows(self) -> bytes:
        rows = [
            CopyRow(
                task_id=f"t{owner}-{task}",
                role="home" if owner == self.number else "second",
                epoch=Epoch(1, 0),
                home=journal(owner),
                second=journal(owner + 1),
                open_places=8,
            )
            for owner in (self.number, (self.number - 1) % NODES)
            for task in range(TASKS)
        ]
        return dump_json(plain(CopyRows(tasks=tuple(rows))))

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection: requests in sequence."""
        held = b""
        try:
            while True:
                while b"\r\n\r\n" not in held:
                    more = await stream.receive_some(1 << 16)
                    if not more:
                        return
                    held += more
                head, _, held = held.partition(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                headers = dict(line.split(b": ", 1) for line in lines[1:])
                size = int(headers.get(b"content-length", b"0"))
                while len(held) < size:
                    held += await stream.receive_some(1 << 16)
                body, held = held[:size], held[size:]
                await self._answer(stream, lines[0], headers, body)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _answer(
        self, stream: trio.SocketStream, line: bytes, headers: dict[bytes, bytes], body: bytes
    ) -> None:
        method, path, _ = line.split(b" ")
        path = path.partition(b"?")[0]
        if path in (b"/v1/fleet/feed", b"/v1/trajectories/stream"):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            await stream.send_all(head)
            await (
                self._feed(stream)
                if path.endswith(b"feed")
                else self._events(stream, int(headers.get(b"last-event-id", b"0")))
            )
            return
        answer = self.report()
        if path == b"/v1/trajectories/ack":
            seq = json.loads(body)["seq"]
            answer = dump_json({"consumer": "reader", "position": seq, "id": str(seq), "pending": []})
        elif path == b"/v1/fleet/tasks" and method == b"get":
            answer = self.rows()
        elif path == b"/v1/fleet/term":
            answer = answer.replace(b'"term":1', b'"term":%d' % json.loads(body)["term"])
        elif path == b"/v1/consumers":
            answer = b'{"consumers": []}'
        elif path in (b"/v1/weights", b"/v1/adapters"):
            answer = b'{"history": [], "adapters": []}'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await stream.send_all(head % len(answer) + answer)

    async def _feed(self, stream: trio.SocketStream) -> None:
        while True:
            await stream.send_all(_chunk(b"data: " + self.report() + b"\n\n"))
            await trio.sleep(REPORT_S)

    async def _events(self, stream: trio.SocketStream, seen: int) -> None:
        await stream.send_all(_chunk(b": polarnode\n\n"))
        while True:
            while seen < BACKLOG + self.sent:
                seen += 1
                body = b'{"seq":%d,"journal":"%b","key":"task:%b-%d","at":%.6f,"task":"%b"}' % (
                    seen,
                    journal(self.number).encode(),
                    journal(self.number).encode(),
                    seen,
                    time.monotonic(),
                    FILLING,
                )
                await stream.send_all(_chunk(b"event: task\nid: %d\ndata: %b\n\n" % (seen, body)))
            with trio.move_on_after(8):
                await self.grown.wait()
                continue
            await stream.send_all(_chunk(b": keep-alive\n\n"))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def nodes(rate: float) -> None:
    """Serve all stubs, and let one of them have a new event at random moments."""
    stubs = [Stub(number) for number in range(NODES)]
    async with trio.open_nursery() as nursery:
        ports = []
        for stub in stubs:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            ports.append(listeners[0].socket.getsockname()[1])
            nursery.start_soon(trio.serve_listeners, stub.serve, listeners)
        print(json.dumps(ports), flush=True)
        while True:
            await trio.sleep(random.expovariate(rate))
            stub = random.choice(stubs)
            stub.sent += 1
            stub.grown.set()
            stub.grown = trio.Event()


# ── the front and its reader ──────────────────────────────────────────────────


async def front(port: int, ports: list[int], folder: str) -> None:
    urls = tuple(f"http://127.0.0.1:{each}" for each in ports)
    config = FleetConfig(nodes=urls, host="127.0.0.1", port=port, state_dir=folder)
    async with serve_front(config.check()):
        print("serves", flush=True)
        await trio.sleep_forever()


def events(port: int, last: str | None, query: str = "") -> Iterator[tuple[Block, float]]:
    """The events of the front's stream, and when each was whole. Tried again until the front is there."""
    headers = {} if last is None else {"Last-Event-ID": last}
    while True:
        try:
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/trajectories/stream{query}", headers=headers
            )
            answer = urllib.request.urlopen(asked, timeout=30)
            break
        except OSError:
            time.sleep(0.02)
    decoder = Decoder()
    with answer:
        while data := answer.read1(1 << 18):
            for each in decoder.feed(data):
                if isinstance(each, Block):
                    yield each, time.monotonic()


def acknowledge(port: int, position: str) -> Any:
    body = json.dumps({"consumer": "reader", "id": position}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/trajectories/ack", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has had."""
    found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(found[11]) + int(found[12])) / 100


def memory(pid: int) -> int:
    """Its largest resident memory, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


@contextmanager
def process(*argv: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, __file__, *argv], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def first_line(running: "subprocess.Popen[str]") -> str:
    assert running.stdout is not None
    return running.stdout.readline()


def main(seconds: float, rate: float) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        process("nodes", str(rate)) as served,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        ports = first_line(served)
        port = free.getsockname()[1]
        free.close()
        argv = ("front", str(port), ports, folder)
        with process(*argv) as running:
            first_line(running)
            time.sleep(8)  # every node is up
            usual = memory(running.pid)
            last = behind(port, running.pid)
            began = used = acked = 0.0
            opened, took = time.monotonic(), list[float]()
            for block, now in events(port, last):
                last = block.id
                if now - opened < SETTLED_S:  # what came meanwhile is read first
                    continue
                if not began:
                    began, used = now, cpu(running.pid)
                took.append(1000 * (now - float(block.data.partition(b'"at":')[2].split(b",", 1)[0])))
                if now - acked >= 1:
                    acked = now
                    assert acknowledge(port, last or "")["pending"] == []
                if now - began >= seconds:
                    break
            used = (cpu(running.pid) - used) / (time.monotonic() - began)
            p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
            print(
                f"{len(took) / seconds:.1f} events/s: {100 * used:.1f} % of a core, {usual} MB,"
                f" {memory(running.pid)} MB after a reader that was far behind"
            )
            print(f"added: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {max(took):.1f} ms")
        began = time.monotonic()
        with process(*argv):
            next(events(port, last))
            print(f"a new front streams after {time.monotonic() - began:.2f} s from the start of its process")


def behind(port: int, pid: int) -> str:
    """Read everything that there is; gives the position after it."""
    began, used, size, count = time.monotonic(), cpu(pid), 0, 0
    last = ""
    for block, _ in events(port, None):
        size, count, last = size + len(block.data), count + 1, block.id or ""
        if count >= NODES * BACKLOG:
            break
    took = time.monotonic() - began
    print(
        f"a reader {size / 1e6:.0f} MB behind: {size / 1e6 / took:.0f} MB/s, {count / took:.0f} events/s,"
        f" {100 * (cpu(pid) - used) / took:.0f} % of a core"
    )
    return last


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["nodes", given]:
            trio.run(nodes, float(given))
        case ["front", port, ports, folder]:
            trio.run(front, int(port), json.loads(ports), folder)
        case given:
            main(float([*given, "60"][0]), float([*given[1:], "14"][0]))
