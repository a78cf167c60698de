"""The HTTP client with which commands and the other nodes of a log reach one node, with the node's token.

Invariants: a pinned certificate is compared with its digest before anything is sent, and is the only one that
is trusted; no proxy of the environment is used, and no redirect is followed. Any failure to get a whole
answer raises Unreachable; an answer with an error status is an answer.
"""

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import httpx2
import trio
from attrs import define, field, frozen

from polarnode.client.pins import causes, reason_of, trust
from polarnode.client.values import ClientError, NodeStarts, Unreachable, read_error
from polarnode.core.codec.json import dump_json, plain, read_json

CONNECT_S: Final = 3.0  # a machine that is up answers in milliseconds, also across a data centre
ANSWER_S: Final = 30.0  # seconds without a byte of an answer
# The most bytes of an answer that is not streamed. The largest is a trajectory with its extras in base64.
MOST_BYTES: Final = 1 << 30
# UnicodeError is raised for an address or a header that cannot be encoded.
FAULTS: Final = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, UnicodeError)
# This many connections stay open: the feed's, and those of some concurrent requests.
KEPT: Final = 8


@frozen(kw_only=True)
class NodeAnswer:
    """A whole answer. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON. Raises Refused for anything else."""
        return read_json(self.body)

    @property
    def error(self) -> ClientError | NodeStarts:
        """The error that the node reports, for a status of 300 or more."""
        return read_error(self.status, "", self.headers, self.body)


@frozen(kw_only=True)
class OpenAnswer:
    """An answer whose body is read while it arrives. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]

    async def whole(self, url: str) -> NodeAnswer:
        """The answer with all of its body. Raises Unreachable."""
        body, size = [], 0
        async for piece in self.pieces:
            body.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise Unreachable(f"{url} answers with more than {MOST_BYTES >> 20} MiB")
        return NodeAnswer(status=self.status, headers=self.headers, body=b"".join(body))


class NotListening(Unreachable):
    """No connection was made, because the process is gone or its machine refuses connections. It is also
    raised for a node that is still starting, which knows of no task yet.
    """


@define(eq=False, kw_only=True)
class Link:
    """Sends requests to one node. `certificate` is the SHA-256 of its self-signed certificate; it is "" where
    a CA signed the certificate, and for plain HTTP. Close it with `close`.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    certificate: str = ""
    _client: httpx2.AsyncClient | None = field(default=None, init=False, repr=False)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        value: object = None,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> NodeAnswer:
        """Send one request and return its whole answer; `value` is sent as JSON. Raises Unreachable."""
        sent = dict(headers or {})
        if value is not None:
            body, sent["Content-Type"] = dump_json(plain(value)), "application/json"
        async with self.open(method, path, body=body, headers=sent, silence_s=timeout_s) as opened:
            answer = await opened.whole(self.url)
        if answer.status == 503 and isinstance(answer.error, NodeStarts):
            raise NotListening(f"{self.url}: {answer.error}")
        return answer

    async def call(self, method: str, path: str, **more: Any) -> Any:
        """Send a request as `ask` does, and return the JSON of its answer. Raises Unreachable, and
        ClientError for an error status.
        """
        answer = await self.ask(method, path, **more)
        if answer.status >= 300:
            raise answer.error
        return answer.json

    @asynccontextmanager
    async def stream(
        self, path: str, *, headers: Mapping[str, str] | None = None, silence_s: float = ANSWER_S
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a GET and give its body while it arrives. Raises Unreachable, and ClientError for an error
        status; the body raises Unreachable when the connection breaks, or is silent for `silence_s`.
        """
        async with self.open("GET", path, headers=headers, silence_s=silence_s) as opened:
            if opened.status >= 300:
                error = (await opened.whole(self.url)).error
                raise NotListening(f"{self.url}: {error}") if isinstance(error, NodeStarts) else error
            yield opened.pieces

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float = ANSWER_S,
    ) -> AsyncIterator[OpenAnswer]:
        """Send one request and give its answer before the body has arrived, whatever the status is. Raises
        Unreachable; the body raises it too, when the connection breaks or is silent for `silence_s`.
        """
        response = await self._send(method, path, body, dict(headers or {}), silence_s)
        pieces = self._pieces(response)
        try:
            found = {name.lower(): each for name, each in response.headers.items()}
            yield OpenAnswer(status=response.status_code, headers=found, pieces=pieces)
        finally:
            with trio.move_on_after(CONNECT_S, shield=True), suppress(Unreachable, *FAULTS):
                await response.aclose()
                # httpx2 leaves its generator to the garbage collector in the middle of a body, and Trio warns
                # about that. Reading on ends the generator, because its connection is closed.
                async for _ in pieces:
                    pass

    async def close(self) -> None:
        """Close its connections."""
        client, self._client = self._client, None
        if client is not None:
            with trio.move_on_after(CONNECT_S, shield=True):
                await client.aclose()

    async def _pieces(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in response.aiter_raw():
                yield piece
        except FAULTS as error:
            raise self._unreachable_error(error) from error

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterable[bytes] | None,
        headers: dict[str, str],
        silence_s: float,
    ) -> httpx2.Response:
        mine = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        try:
            client = self._open()
            request = client.build_request(
                method,
                self.url.rstrip("/") + path,
                content=body,
                headers={"Accept-Encoding": "identity", **mine, **headers},
                timeout=httpx2.Timeout(silence_s, connect=CONNECT_S),
            )
            return await client.send(request, stream=True)
        except FAULTS as error:
            raise self._unreachable_error(error) from error

    def _open(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=KEPT)
            verify = trust(self.url, self.certificate.lower()) or False
            self._client = httpx2.AsyncClient(verify=verify, trust_env=False, limits=limits)
        return self._client

    def _unreachable_error(self, error: Exception) -> Unreachable:
        refused = any(isinstance(each, ConnectionRefusedError) for each in causes(error))
        return (NotListening if refused else Unreachable)(f"{self.url} does not answer: {reason_of(error)}")
