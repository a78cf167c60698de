"""What the tests of judges share: an endpoint that does what it is told, and judges in memory held to the
same form.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11
import orjson
import trio
from attrs import define, field

from polarnode.core.errors import EvaluatorError
from polarnode.core.ports import Judge, Question
from polarnode.evaluators.judging import JudgeConfig
from polarnode.rollouts.judges import NodeJudges, open_judges

Answer = Callable[["Endpoint", trio.abc.Stream], Awaitable[None]]


@define(eq=False)
class Endpoint:
    """A server of one answer a connection: `script` in order, the last for ever. `asked` are the requests:
    headers and body.
    """

    script: list[Answer]
    asked: list[tuple[dict[str, str], Any]] = field(factory=list)
    inside: int = 0
    most: int = 0

    async def serve(self, stream: trio.abc.Stream) -> None:
        connection = h11.Connection(h11.SERVER)
        headers, body = dict[str, str](), bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(65_536))
            elif isinstance(event, h11.Request):
                headers = {name.decode(): value.decode() for name, value in event.headers} | {
                    ":path": event.target.decode()
                }
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        if not headers:
            return
        place = len(self.asked)
        self.asked.append((headers, orjson.loads(body)))
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.script[min(place, len(self.script) - 1)](self, stream)
        finally:
            self.inside -= 1


def sends(status: int, body: bytes, **headers: str) -> Answer:
    lines = [
        f"HTTP/1.1 {status} x",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
    ]

    async def answer(endpoint: Endpoint, stream: trio.abc.Stream) -> None:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)

    return answer


def says(text: str | None, finish: str = "stop", **message: Any) -> Answer:
    said = {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish,
            }
        ]
    }
    return sends(200, orjson.dumps(said), content_type="application/json")


def error(status: int, message: str, **headers: str) -> Answer:
    return sends(status, orjson.dumps({"error": {"message": message, "type": "x"}}), **headers)


async def hangs_up(endpoint: Endpoint, stream: trio.abc.Stream) -> None:
    await trio.lowlevel.checkpoint()


async def breaks_off(endpoint: Endpoint, stream: trio.abc.Stream) -> None:
    await stream.send_all(b'HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n{"choices": [')


def slow(seconds: float, then: Answer) -> Answer:
    async def answer(endpoint: Endpoint, stream: trio.abc.Stream) -> None:
        await trio.sleep(seconds)
        await then(endpoint, stream)

    return answer


async def never(endpoint: Endpoint, stream: trio.abc.Stream) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[str]:
    """The base URL of an endpoint on loopback."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def one(stream: trio.abc.Stream) -> None:
        async with stream:
            try:
                await endpoint.serve(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the client left

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, one, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}/v1"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def judged_by(
    *script: Answer, environment: Mapping[str, str] | None = None, **config: Any
) -> AsyncIterator[tuple[NodeJudges, Endpoint]]:
    """Judges with one, `j`, at an endpoint with this script."""
    endpoint = Endpoint(list(script))
    async with (
        serving(endpoint) as url,
        open_judges({"j": JudgeConfig(base_url=url, model="m", **config)}, environment or {}) as judges,
    ):
        yield judges, endpoint


def asks(text: str = "how good was it?", **more: Any) -> Question:
    return Question(messages=({"role": "user", "content": text},), **more)


# ── a judge in memory ─────────────────────────────────────────────────────────


@define(eq=False)
class ScriptedJudge:
    """`polarnode.core.ports.Judge` whose answers are given: texts in order, the last for ever, or a function
    of the question.
    """

    says: Sequence[str] | Callable[[Question], str]
    asked: list[Question] = field(factory=list)

    async def ask(self, question: Question) -> str:
        await trio.lowlevel.checkpoint()
        self.asked.append(question)
        if callable(self.says):
            return self.says(question)
        return self.says[min(len(self.asked), len(self.says)) - 1]

    async def ask_each(self, questions: Sequence[Question]) -> list[str]:
        return [await self.ask(question) for question in questions]

    def __call__(self, name: str) -> Judge:
        if name != "j":
            raise EvaluatorError(f"no judge is called {name}")
        return self


# ── what any judge must do ────────────────────────────────────────────────────


async def contract_an_answer_is_its_text(judge: Judge) -> None:
    """For a judge that answers every question with `yes`."""
    assert await judge.ask(asks()) == "yes"


async def contract_answers_come_in_the_order_of_their_questions(judge: Judge) -> None:
    assert await judge.ask_each([asks("a"), asks("b")]) == ["yes", "yes"]
    assert await judge.ask_each([]) == []


CONTRACT = [found for name, found in list(globals().items()) if name.startswith("contract_")]
