"""The body of a request, as every Quart app here reads it."""

from collections.abc import Awaitable, Callable

import pytest
from quart_trio import QuartTrio

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.http.asgi import body_bytes, body_json, body_json_or


async def read(reader: Callable[[], Awaitable[object]], body: bytes) -> object:
    async with QuartTrio(__name__).test_request_context("/", method="POST", data=body):
        return await reader()


async def or_seven() -> Json:
    return await body_json_or(7)


async def test_body_bytes_are_unchanged() -> None:
    assert await read(body_bytes, b"\xff\x00 ") == b"\xff\x00 "


@pytest.mark.parametrize("reader", [body_json, or_seven])
async def test_invalid_json_is_refused(reader: Callable[[], Awaitable[Json]]) -> None:
    assert await read(reader, b' {"a": [1, "\xc3\xa9"]} ') == {"a": [1, "é"]}
    with pytest.raises(Refused):
        await read(reader, b"{")


@pytest.mark.parametrize("body", [b"", b" \n"])
async def test_empty_required_body_is_refused(body: bytes) -> None:
    assert await read(or_seven, body) == 7
    with pytest.raises(Refused):
        await read(body_json, body)
