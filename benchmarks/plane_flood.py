"""Measure what a flood of wrong keys costs an agent that has a right one, at a captures' endpoint for other
machines.

    python benchmarks/plane_flood.py [--rate N] [--answer S] [--calls N] [--rounds N] [kept | new | half ...]

An agent calls over one connection of TLS, alone and beside a flood by turns, so that what else the machine
does hits both alike; the ratio of the medians is the figure. The node has one core; agent, flood and the
simulated engine, which takes --answer seconds, another. `kept`: wrong keys over connections that are kept; `new`:
over a new connection each; `half`: handshakes that stop in the middle; `plain`: HTTP without TLS. `same`: as
`new`, from the agent's own address; `elsewhere`: to a port where nobody listens, which shows what the load of
the flood itself costs an agent and an engine on its core.
"""

import asyncio
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from contextlib import suppress
from pathlib import Path

from attrs import frozen
from model_plane import AT_ONCE, open_gateway

KINDS = ("kept", "new", "half", "plain", "same", "elsewhere")
AGENT, FLOOD = "127.0.0.2", "127.0.0.3"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "word " * 800}]}
REFUSED_S = 0.01  # a connection that is refused is closed by then
BURST = 8  # tries begun at once
ATTEMPT_S = 5.0  # a try that has no answer by then is given up
AT_ONCE_MOST = 400  # tries in progress


def request(key: str, body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def answered(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return int(head.split()[1])


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "tls.crt"))


# ── the flood, a process of its own ───────────────────────────────────────────


async def flood(kind: str, port: int, folder: Path, rate: float) -> None:
    """Try `rate` keys a second until the input ends, then print what became of them."""
    counted, context = Counter[str](), trusting(folder)
    source = (AGENT if kind == "same" else FLOOD, 0)
    kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    gate = asyncio.Semaphore(AT_ONCE_MOST)

    async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind(source)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        await asyncio.sleep(REFUSED_S)
        with suppress(BlockingIOError):  # a peek is cheaper than a handshake that is refused
            if not sock.recv(1, socket.MSG_PEEK):
                sock.close()
                raise EOFError
        secure = None if kind in ("half", "plain") else context
        return await asyncio.open_connection(
            sock=sock, ssl=secure, server_hostname="127.0.0.1" if secure else None
        )

    async def one() -> None:
        pair = kept.pop() if kept else await connected()
        try:
            if kind == "half":
                pair[1].write(b"\x16\x03\x01\x02\x00\x01\x00")
                await pair[0].read()
                counted["closed"] += 1
                return
            pair[1].write(request(f"sk-{counted.total()}", b"{}"))
            counted[str(await answered(pair[0]))] += 1
            if kind == "kept":
                kept.append(pair)
                pair = None
        finally:
            if pair is not None:
                pair[1].transport.abort()

    async def tried() -> None:
        async with gate:
            try:
                await asyncio.wait_for(one(), ATTEMPT_S)
            except (OSError, EOFError) as error:  # TimeoutError is an OSError
                counted["held" if isinstance(error, TimeoutError) else "cut"] += 1

    began, sent, tasks = time.perf_counter(), 0, set[asyncio.Task[None]]()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not ended.done():
        # what was missed while others had the core is spread, not sent at once
        for _ in range(min(int(rate * (time.perf_counter() - began)) - sent, BURST)):
            if len(tasks) > 2 * AT_ONCE_MOST:
                break
            task = asyncio.create_task(tried())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.sleep(0.002)
    print(json.dumps({"rate": sent / (time.perf_counter() - began), "counted": counted}), flush=True)


# ── the agent ─────────────────────────────────────────────────────────────────


@frozen
class Agent:
    """An agent's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def calls(self, count: int) -> list[float]:
        """The seconds of so many calls, one after the other."""
        taken, body = [], json.dumps(ASKED).encode()
        for _ in range(count):
            began = time.perf_counter()
            self.writer.write(request("key-0", body))
            status = await answered(self.reader)
            taken.append(time.perf_counter() - began)
            if status != 200:
                raise RuntimeError(f"the agent's call was answered {status}")
        return taken


async def measured(kind: str, *, rate: float, answer: float, calls: int, rounds: int, folder: Path) -> str:
    tls = {"chain": str(folder / "tls.crt"), "key": str(folder / "tls.key")}
    alone, beside, found = list[float](), list[float](), {"rate": 0.0, "counted": {}}
    engine = {**AT_ONCE, "tokens_per_s": 255 / answer if answer else 0}
    async with open_gateway(engine, doors=1, sessions=2, captures=tls) as gateway:
        port = gateway.ports[0]
        agent = Agent(
            *await asyncio.open_connection(
                "127.0.0.1", port, ssl=trusting(folder), local_addr=(AGENT, 0), server_hostname="127.0.0.1"
            )
        )
        await agent.calls(calls // 2)  # warm: the first calls import and compile
        await gateway.figures()
        for _ in range(rounds):
            alone += await agent.calls(calls)
            process = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--flood", kind, str(port if kind != "elsewhere" else 9), str(folder), str(rate),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdin is not None
            await asyncio.sleep(2.0)  # it has begun, and its address's first tries are used up
            beside += await agent.calls(calls)
            output, _ = await process.communicate(b"")
            found = json.loads(output)
        lag = (await gateway.figures())["lag_p99_ms"]
        agent.writer.transport.abort()
    cells = (
        kind,
        f"{found['rate']:.0f}",
        f"{statistics.median(alone) * 1e3:.1f}",
        f"{statistics.median(beside) * 1e3:.1f}",
        f"{statistics.median(beside) / statistics.median(alone):.2f}",
        f"{statistics.quantiles(beside, n=20)[-1] * 1e3:.1f}",
        f"{lag:.0f}",
        ", ".join(f"{count} {name}" for name, count in sorted(found["counted"].items())),
    )
    return f"| {' | '.join(cells)} |"


def make_certificate(folder: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=flood",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"],
        check=True, capture_output=True,
    )  # fmt: skip


async def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--rate", type=float, default=1000.0, help="wrong keys a second [default: 1000]")
    parser.add_argument(
        "--answer", type=float, default=0.25, help="seconds of the engine for an answer [default: 0.25]"
    )
    parser.add_argument("--calls", type=int, default=100, help="of the agent, in each part [default: 100]")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    asked = parser.parse_args()
    print(
        "| flood | a second | alone p50 ms | beside p50 ms | ratio | beside p95 ms | lag p99 ms | last round's tries |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="pnflood") as name:
        folder = Path(name)
        await asyncio.to_thread(make_certificate, folder)
        for kind in asked.kinds or KINDS:
            print(
                await measured(
                    kind,
                    rate=asked.rate,
                    answer=asked.answer,
                    calls=asked.calls,
                    rounds=asked.rounds,
                    folder=folder,
                ),
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--flood"]:
        kind, port, folder, rate = sys.argv[2:6]
        with suppress(KeyboardInterrupt):
            asyncio.run(flood(kind, int(port), Path(folder), float(rate)))
        os._exit(0)  # connections that are held need no farewell
    asyncio.run(main())
