"""The least that a node on Trio can add to a call: the floor under the latencies of `model_plane.py paced`.

    python benchmarks/plane_least.py [--agents N] [--turns N]

A program of this file alone takes the same requests of the same client on the same core: h11 reads one, orjson
parses its body, the tokenizer encodes its new text, it waits as long as an engine would sample, and answers.
Nothing is rendered, planned, parsed, recorded or limited. Latency is what the client waited beyond the wait.
"""

import asyncio
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

import h11
import orjson
import trio
from model_plane import GENERATION_S, RAMP_S, added_ms, cores, middle
from plane_agents import Agent, Head, Played, Text
from plane_apis import APIS

from polarnode.http.connections import MAX_READ_BYTES
from polarnode.node.config import TINY_MODEL
from polarnode.tokens.template import load_model
from polarnode.tokens.tokenizer import LoadedTokenizer

SAMPLED_CHARS = 1_000  # of an answer, as many as 256 tokens of the load


async def serve(wait_s: float) -> None:
    tokenizer = load_model(TINY_MODEL).tokenizer
    async with trio.open_nursery() as nursery:
        answer = partial(_answer, tokenizer=tokenizer, wait_s=wait_s)
        listeners = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        print(listeners[0].socket.getsockname()[1], flush=True)


async def _answer(stream: trio.SocketStream, *, tokenizer: LoadedTokenizer, wait_s: float) -> None:
    connection, parts = h11.Connection(h11.SERVER), list[bytes]()
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(MAX_READ_BYTES))
            case h11.Data(data=data):
                parts.append(bytes(data))
            case h11.EndOfMessage():
                latest = orjson.loads(b"".join(parts))["messages"][-1]["content"]
                tokenizer.encode_plain(latest)
                await trio.sleep(wait_s)
                message = {"role": "assistant", "content": "x" * SAMPLED_CHARS}
                body = orjson.dumps({"choices": [{"message": message}]})
                head = h11.Response(status_code=200, headers=[("content-length", str(len(body)))])
                events = (head, h11.Data(data=body), h11.EndOfMessage())
                await stream.send_all(b"".join(connection.send(event) or b"" for event in events))
                connection.start_next_cycle()
                parts.clear()
            case h11.ConnectionClosed():
                return


async def play(port: int, *, agents: int, turns: int, ramp_s: float) -> Sequence[Played]:
    text, api = Text(), APIS["openai_chat"]
    players = [Agent(api, port, False, text, Head.of(text)) for _ in range(agents)]

    async def one(number: int) -> None:
        await asyncio.sleep(ramp_s * number / agents)
        await players[number].play("key", turns)

    await asyncio.gather(*map(one, range(agents)))
    return [each for player in players for each in player.played]


async def measure(agents: int, turns: int) -> None:
    wait_s = GENERATION_S.get(agents, 1.0)
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", str(wait_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        os.sched_setaffinity(0, [cores()[1]])  # not sooner: a program finds its core among its parent's
        await play(port, agents=1, turns=2, ramp_s=0.0)  # the first calls import
        played = await play(port, agents=agents, turns=turns, ramp_s=min(RAMP_S, wait_s))
    finally:
        process.terminate()
    await process.wait()
    later, first = (middle(added_ms(played, wait_s, later=later)) for later in (True, False))
    print(f"| least | {agents} | {wait_s} | {later} | – | {first} |")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--serve", type=float, metavar="SECONDS", help="be the program that waits so long")
    asked = parser.parse_args()
    if asked.serve is not None:
        os.sched_setaffinity(0, [cores()[0]])
        trio.run(serve, asked.serve)
    else:
        asyncio.run(measure(asked.agents, asked.turns))


if __name__ == "__main__":
    main()
