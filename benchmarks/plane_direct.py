"""The simulated engine without the node: its latency to the same client, beside every latency through the
node.

It is the engine that the node starts, with the same settings, on the core of the load; the client of
`plane_agents` sends it prompts of the length that the node would have rendered, as frames.
"""

import asyncio
import os
import sys
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any

from attrs import define, field
from plane_agents import FIRST, LAST, TURNS, Played

from polarnode.core.conversation import Sampling
from polarnode.core.errors import EngineError
from polarnode.core.ports import GenerateOrder
from polarnode.engine.calls import to_generate
from polarnode.engine.engines import SIMULATED_PROGRAM
from polarnode.engine.host_resources import open_scratch, open_wires
from polarnode.engine.protocol import Failed, FrameDecoder, Piece, Ready, Shutdown, Start, ToHost, encode

READ_SIZE = 1 << 18
TOKEN_BYTES = 4  # of the load's text


@define(eq=False)
class DirectEngine:
    """One engine host. `ask` returns when a request's last piece is here."""

    context_length: int
    _writer: asyncio.StreamWriter
    _waiting: dict[str, "asyncio.Future[None]"] = field(factory=dict)

    async def ask(self, order: GenerateOrder) -> None:
        answered = self._waiting[order.request_id] = asyncio.get_running_loop().create_future()
        self.send(to_generate(order, context_length=self.context_length))
        await answered

    def send(self, message: ToHost) -> None:
        self._writer.write(encode(message))

    def take(self, message: object) -> None:
        match message:
            case Piece(rid=rid, finish=finish) if finish is not None:
                self._waiting.pop(rid).set_result(None)
            case Failed(rid=rid, message=text):
                self._waiting.pop(rid).set_exception(EngineError(text))


@asynccontextmanager
async def open_direct(arguments: Mapping[str, Any]) -> AsyncIterator[DirectEngine]:
    """A simulated engine that was started with the node's `arguments`."""
    with open_scratch() as scratch, open_wires() as wires:
        process = await asyncio.create_subprocess_exec(
            *SIMULATED_PROGRAM, "--tag", scratch.tag, *wires.arguments(),
            env={**os.environ, "TMPDIR": str(scratch.path)}, cwd=scratch.path, pass_fds=wires.theirs(),
            start_new_session=True, stdout=sys.stderr,
        )  # fmt: skip
        wires.close_host_ends()
        reader, writer = await asyncio.open_connection(sock=wires.ours)
        engine = DirectEngine(arguments["context_length"], writer)
        decoder = FrameDecoder()
        engine.send(Start(arguments=arguments))
        while not any(isinstance(each, Ready) for each in decoder.feed(await reader.read(READ_SIZE))):
            if reader.at_eof():
                raise RuntimeError("the simulated engine ended: its output is above")

        async def receive() -> None:
            while data := await reader.read(READ_SIZE):
                for message in decoder.feed(data):
                    engine.take(message)

        receiving = asyncio.create_task(receive())
        try:
            yield engine
        finally:
            engine.send(Shutdown())
            await process.wait()
            receiving.cancel()
            writer.close()


async def play_direct(
    engine: DirectEngine, *, agents: int, turns: int, stop_ids: tuple[int, ...], ramp_s: float
) -> list[Played]:
    """The sessions of `model_plane.play`, of so many agents, as prompts alone."""

    async def one(number: int) -> list[Played]:
        await asyncio.sleep(ramp_s * number / agents)
        return [await turn(number, place) for place in range(turns)]

    async def turn(number: int, place: int) -> Played:
        size = FIRST + place * (LAST - FIRST) // (TURNS - 1)
        prompt = array("i", [7 + number % 89]) * (size // TOKEN_BYTES)
        order = GenerateOrder(
            request_id=token_hex(16),
            prompt=prompt,
            sampling=Sampling(temperature=1.0),
            stop_ids=stop_ids,
            affinity=f"direct {number}",
        )
        sent = time.perf_counter()
        await engine.ask(order)
        last = time.perf_counter()
        return Played(turn=place, sent=sent, first=last, last=last, bytes=size)

    played = await asyncio.gather(*map(one, range(agents)))
    return [each for some in played for each in some]
