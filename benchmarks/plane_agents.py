"""The load generator: agents that play sessions of tool calls over raw sockets, as cheaply as possible.

It uses asyncio and a client of a few lines, because it has one core for a thousand agents.
"""

import asyncio
import random
import re
import time
from pathlib import Path

import orjson
from attrs import Factory, define, field, frozen
from plane_apis import Api, events
from tokenizers import Tokenizer

from polarnode.node.config import TINY_MODEL

# of a session, and the bytes of its first and its last request: the load of the peers' measurement
TURNS = 29
FIRST, LAST = 13_500, 127_000
TOOLS = 10
_SHORT = re.compile("\u0120[a-z]{2,3}")  # some four bytes a token, as English has in a large vocabulary


@frozen(kw_only=True)
class Played:
    """One request: when it was sent, its first byte and its last, in seconds; `turn` of its session."""

    turn: int
    sent: float
    first: float
    last: float
    bytes: int


def words(tokenizer: Path = TINY_MODEL / "tokenizer.json") -> list[str]:
    """Short words that are one token each."""
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=False)
    return sorted(token.replace("\u0120", " ") for token in vocabulary if _SHORT.fullmatch(token))


@define(eq=False)
class Text:
    """A source of plain text."""

    _words: list[str] = field(factory=words)
    _chance: random.Random = field(factory=lambda: random.Random(1))

    def of(self, size: int) -> str:
        return "".join(self._chance.choices(self._words, k=max(1, size // 4 + 2)))[:size]


@frozen(kw_only=True)
class Head:
    """What the sessions of a group begin with: a system prompt, and tools with their descriptions."""

    system: str
    tools: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: Text) -> "Head":
        return cls(
            tools=tuple(
                (name, text.of(300)) for name in ("bash", *(f"tool{number}" for number in range(1, TOOLS)))
            ),
            system=text.of(4000),
        )


@define(eq=False)
class Agent:
    """One harness: a connection of its own, a session after the other."""

    api: Api
    port: int
    stream: bool
    text: Text
    shared: Head
    # a thousand of them are seconds of work
    opening: str = field(init=False, default=Factory(lambda self: self.text.of(FIRST), takes_self=True))
    played: list[Played] = field(factory=list)
    _client: "Client | None" = None

    async def play(self, key: str, turns: int) -> None:
        """One session of so many turns."""
        text, api = self.text, self.api
        head = api.head(self.shared.system, self.shared.tools, self.stream)
        if "instructions" not in head and "system" not in head and "systemInstruction" not in head:
            history = [orjson.dumps({"role": "system", "content": self.shared.system})]
        else:
            history = []
        opening = orjson.dumps(head)[:-1] + f',"{api.history}":['.encode()
        history.append(
            orjson.dumps(api.user(self.opening[: FIRST - len(opening) - sum(map(len, history)) - 60]))
        )
        for turn in range(turns):
            answer = await self._ask(opening + b",".join(history) + b"]}", key, turn)
            messages, calls = api.read(answer)
            echoed = [orjson.dumps(each) for each in messages]
            grown = (LAST - FIRST) // (TURNS - 1) - sum(map(len, echoed)) - 100
            history += [*echoed, *(orjson.dumps(each) for each in api.result(calls, text.of(max(50, grown))))]

    async def _ask(self, body: bytes, key: str, turn: int) -> object:
        if self._client is None:
            self._client = (
                await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self.port)
            )[1]
        head = f"POST {self.api.path(self.stream)} HTTP/1.1\r\nhost: x\r\n{self.api.key_header}{key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sent = time.perf_counter()
        status, answer = await self._client.ask(head.encode() + body)
        self.played.append(
            Played(turn=turn, sent=sent, first=self._client.first, last=time.perf_counter(), bytes=len(body))
        )
        if status != 200:
            raise RuntimeError(f"{self.api.name}, turn {turn}: status {status}: {answer[:500]!r}")
        return self.api.joined(list(events(answer))) if self.stream else orjson.loads(answer)


class Client(asyncio.Protocol):
    """HTTP/1.1, one request at a time: a status, a body by its length or in chunks."""

    def __init__(self) -> None:
        self.first = 0.0
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._buffer.clear()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self.first = time.perf_counter()
        self._buffer += data
        if (
            self._answer is not None
            and not self._answer.done()
            and (found := whole(self._buffer)) is not None
        ):
            self._answer.set_result(found)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(
                ConnectionError(
                    f"the node closed the connection: {exc}, after {bytes(self._buffer[-200:])!r}"
                )
            )


def whole(buffer: bytearray) -> tuple[int, bytes] | None:
    """A response's status and body, once all of it is there."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(buffer[:end]).lower()
    status = int(head[9:12])
    if (at := head.find(b"content-length:")) >= 0:
        size = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return (status, bytes(buffer[end + 4 :])) if len(buffer) >= end + 4 + size else None
    # the last chunk; looking at the end alone keeps a long stream linear
    if not buffer.endswith(b"0\r\n\r\n"):
        return None
    parts, place = [], end + 4
    while (size := int(buffer[place : (line := buffer.index(b"\r\n", place))], 16)) > 0:
        parts.append(bytes(buffer[line + 2 : line + 2 + size]))
        place = line + 4 + size
    return status, b"".join(parts)
