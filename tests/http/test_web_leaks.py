"""Nothing of a call or a connection is left to Python's collector of cycles: a node lets it come rarely, and
sessions end by the hundred.
"""

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, answers, served, stage
from tokens_kit import model

from polarnode.gateway.live_sessions import LiveSession

BODY = (
    b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function",'
    b' "function": {"name": "look"}}]}'
)
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-s1\r\ncontent-type:"
    b" application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The collector does not come."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def ask(base: str) -> bytes:
    """One request on a connection of its own, to its end."""
    host, _, port = base.removeprefix("http://").partition(":")
    said = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(HEAD % len(BODY) + BODY)
        async for data in stream:
            said += data
    return said


def alive(name: str) -> int:
    return sum(type(each).__name__ == name for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
async def test_unreferenced_session_is_freed() -> None:
    engine = ScriptedEngine(
        reply=answers("hello"), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT
    )

    async def played() -> "weakref.ref[LiveSession]":
        here = stage(engine)
        async with served(here.app) as base:
            for _ in range(3):
                assert b" 200 " in await ask(base)
        assert len(here.turns) == 3
        return weakref.ref(here.s1)

    before = alive("Connection")
    session = await played()
    for _ in range(20):  # what the server still has to wind up
        await trio.sleep(0.05)
    assert session() is None
    assert alive("Connection") == before
