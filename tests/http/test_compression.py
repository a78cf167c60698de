"""Answers are compressed for clients that ask, and are the same bytes afterwards."""

import gzip
from collections.abc import AsyncIterator

import pytest
from quart import Response
from quart_trio import QuartTrio

from polarnode.http.compression import MAX_INLINE_BYTES, MIN_COMPRESSED_BYTES, compress_answers

BODIES = {
    "small": b"x" * (MIN_COMPRESSED_BYTES - 1),
    "middle": b'{"a":1}' * 1000,
    "large": b"word " * MAX_INLINE_BYTES,
}


def app() -> QuartTrio:
    made = QuartTrio("tests", static_folder=None)
    compress_answers(made)

    @made.route("/<name>")
    async def body(name: str) -> Response:
        return Response(BODIES[name], content_type="application/json")

    @made.route("/tar")
    async def tar() -> Response:
        return Response(BODIES["middle"], content_type="application/x-tar")

    @made.route("/stream")
    async def stream() -> Response:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"data: x\n\n" * 1000

        return Response(parts(), content_type="text/event-stream")

    return made


@pytest.mark.parametrize(("name", "packed"), [("small", False), ("middle", True), ("large", True)])
async def test_large_answer_is_compressed(name: str, packed: bool) -> None:
    found = await app().test_client().get(f"/{name}", headers={"Accept-Encoding": "gzip, br"})
    body = await found.get_data(as_text=False)
    assert found.headers.get("Content-Encoding") == ("gzip" if packed else None)
    assert int(found.headers["Content-Length"]) == len(body)
    assert (gzip.decompress(body) if packed else body) == BODIES[name]
    assert (len(body) < len(BODIES[name]) / 3) == packed


@pytest.mark.parametrize("accepted", [None, "identity", "br", "gzip;q=0"])
async def test_client_without_gzip_gets_none(accepted: str | None) -> None:
    headers = {} if accepted is None else {"Accept-Encoding": accepted}
    found = await app().test_client().get("/middle", headers=headers)
    assert "Content-Encoding" not in found.headers
    assert found.headers["Vary"] == "Accept-Encoding", "a cache must not give the packed answer to others"
    assert await found.get_data(as_text=False) == BODIES["middle"]


@pytest.mark.parametrize("name", ["tar", "stream"])
async def test_streams_and_archives_stay_uncompressed(name: str) -> None:
    found = await app().test_client().get(f"/{name}", headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in found.headers
