"""Compress the answers of an app with gzip for clients that accept it.

A page that is read through a tunnel then needs a quarter of the bytes. polarnode's own clients ask for
`identity`, because on the same machine compressing costs more than it saves. Streams are never compressed,
because compression would hold their bytes back.
"""

import gzip

import trio
from quart import Response, request
from quart.wrappers.response import DataBody
from quart_trio import QuartTrio

MIN_COMPRESSED_BYTES = 1400  # what fits into one packet gains nothing
GZIP_LEVEL = 4  # of 9: 0.7 MB of a trajectory take 20 ms; level 9 saves 4 % more in four times that
MAX_INLINE_BYTES = 64 << 10  # 2 ms; more is compressed in a thread
TYPES = ("application/json", "text/", "image/svg+xml")


def compress_answers(app: QuartTrio) -> None:
    """Compress what `app` answers whole, where the client's `Accept-Encoding` names gzip."""

    @app.after_request
    async def compress(response: Response) -> Response:
        if not _can_be_compressed(response):
            # This is async although it waits for nothing, because Quart would run a plain function in a
            # thread.
            await trio.lowlevel.checkpoint()
            return response
        response.headers.add("Vary", "Accept-Encoding")
        if request.accept_encodings.quality("gzip") > 0:
            body = await response.get_data(as_text=False)
            small = len(body) <= MAX_INLINE_BYTES
            response.set_data(
                _gzip_bytes(body) if small else await trio.to_thread.run_sync(_gzip_bytes, body)
            )
            response.headers["Content-Encoding"] = "gzip"
        return response


def _can_be_compressed(response: Response) -> bool:
    length = response.content_length
    return (
        isinstance(response.response, DataBody)
        and length is not None
        and length >= MIN_COMPRESSED_BYTES
        and response.content_type is not None
        and response.content_type.startswith(TYPES)
        and "Content-Encoding" not in response.headers
    )


def _gzip_bytes(body: bytes) -> bytes:
    return gzip.compress(body, GZIP_LEVEL, mtime=0)
