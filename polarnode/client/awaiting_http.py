"""Scripts run over httpx2, under Trio or asyncio.

No cancel scope and no nursery is open while a value is yielded. A script sees a cancelled wait as a broken
connection, so iteration can continue after a deadline. Closing is bounded and shielded.
"""

from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread
import httpx2
from attrs import define, field

from polarnode.client.pins import other_certificate, reason_of, silence, trust
from polarnode.client.requests import (
    Ask,
    ClientRequest,
    Close,
    Command,
    Open,
    Read,
    Running,
    Script,
    SleepFor,
    T,
    YieldValue,
)
from polarnode.client.streams import LEAVE_TIMEOUT_S
from polarnode.client.values import Unreachable, read_error
from polarnode.core.errors import PolarnodeError

CLOSE_S = 5.0  # seconds to close a connection; its result is not needed
FAULTS = (
    httpx2.HTTPError,
    httpx2.StreamError,
    httpx2.InvalidURL,
    OSError,
    anyio.ClosedResourceError,
    anyio.BrokenResourceError,
)

V = TypeVar("V")


@define(eq=False, kw_only=True)
class AwaitingHttp:
    """The address and the bearer token of one node, and the connections to it."""

    base_url: str
    token: str | None = field(repr=False)
    certificate: str = ""  # the SHA-256 of the only one that is trusted; "": those of the machine's CAs
    client: httpx2.AsyncClient = field(init=False)
    # the open responses, and the streams with acknowledgements: a loop that ended early may not have closed
    # its own
    reading: "set[_ScriptConnection]" = field(factory=set, init=False, repr=False)
    unsent_streams: "set[AsyncEvents[Any]]" = field(factory=set, init=False, repr=False)

    @client.default
    def _make_client(self) -> httpx2.AsyncClient:
        # As http.client: no proxies of the environment, no redirects. No limit on connections: a stream that
        # is read keeps one.
        verify = trust(self.base_url, self.certificate) or False
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=4)
        return httpx2.AsyncClient(verify=verify, trust_env=False, limits=limits)

    async def run(self, script: Script[T]) -> T:
        """Run a script to its end and return its value."""
        running, wire = Running(script), _ScriptConnection(self)
        try:
            while (command := running.next()) is not None:
                await wire.step(running, command)
        finally:
            await wire.close()  # noqa: ASYNC102 - shielded and bounded in `_closed`
        return running.value

    def unreachable(self, error: Exception) -> PolarnodeError:
        """The error for what a connection raised: ConfigError for another certificate than the pinned one,
        which no wait mends.
        """
        why = f"{type(error).__name__}: {reason_of(error)}"
        return other_certificate(error) or silence(self.base_url, error, why)

    async def aclose(self) -> None:
        for events in tuple(self.unsent_streams):
            await events.aclose()
        for wire in tuple(self.reading):
            await wire.close()
        with anyio.move_on_after(CLOSE_S, shield=True), suppress(*FAULTS):
            await self.client.aclose()


@define(eq=False)
class AsyncEvents(Generic[V]):
    """An asynchronous iterator over the values that a script gives.

    Use `async with` or `aclose` when a loop ends early: what is owed to the node, such as acknowledgements,
    is sent and its connection is closed. A cancelled wait loses nothing: iteration continues over a new
    connection. `owes`: it has acknowledgements to send, which the client's own end sends too.
    """

    http: AwaitingHttp
    script: Script[None]
    owes: bool = False
    _running: Running[None] = field(init=False)
    _wire: "_ScriptConnection" = field(init=False)
    _over: bool = field(default=False, init=False)

    @_running.default
    def _make_running(self) -> Running[None]:
        return Running(self.script)

    @_wire.default
    def _make_wire(self) -> "_ScriptConnection":
        return _ScriptConnection(self.http)

    def __attrs_post_init__(self) -> None:
        if self.owes:
            self.http.unsent_streams.add(self)

    def __aiter__(self) -> AsyncIterator[V]:
        return self

    async def __anext__(self) -> V:
        while not self._over:
            try:
                command = self._running.next()
            except BaseException:
                await self.aclose()
                raise
            if command is None:
                await self.aclose()
            elif isinstance(command, YieldValue):
                self._running.answered(None)
                return command.value  # type: ignore[no-any-return]
            else:
                await self._wire.step(self._running, command)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.http.unsent_streams.discard(self)
        if not self._over:
            self._over = True
            with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
                await self._leave()
        await self._wire.close()

    async def _leave(self) -> None:
        """Let the script send what it owes."""
        self._running.left()
        while (command := self._running.next()) is not None:
            await self._wire.step(self._running, command)

    async def __aenter__(self) -> "AsyncEvents[V]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@define(eq=False)
class _ScriptConnection:
    """The response that one script has open."""

    http: AwaitingHttp
    _response: httpx2.Response | None = field(default=None, init=False)
    _pieces: AsyncIterator[bytes] | None = field(default=None, init=False)

    async def step(self, running: Running[Any], command: Command) -> None:
        try:
            answer = await self._obey(command)
        except PolarnodeError as error:
            running.failed(error)
        except BaseException:  # cancelled: the script sees a broken connection when it is resumed
            await self.close()  # noqa: ASYNC102 - shielded and bounded in `_closed`
            if isinstance(command, SleepFor | Close | YieldValue):
                running.answered(None)
            else:
                running.failed(Unreachable("the wait was cancelled"))
            raise
        else:
            running.answered(answer)

    async def _obey(self, command: Command) -> object:
        match command:
            case Ask(request):
                return await self._ask(request)
            case Open(request):
                return await self._open(request)
            case Read():
                return await self._read()
            case Close() | YieldValue():
                await self.close()
            case SleepFor(seconds):
                await anyio.sleep(seconds)
        return None

    async def _ask(self, request: ClientRequest[Any]) -> bytes:
        response = await self._send(request)
        try:
            return await self._whole(response)
        finally:
            await _closed(response)  # noqa: ASYNC102 - shielded and bounded in `_closed`

    async def _open(self, request: ClientRequest[Any]) -> str:
        await self.close()
        self._response = await self._send(request)
        self._pieces = self._response.aiter_raw()
        self.http.reading.add(self)
        return str(self._response.headers.get("content-type", ""))

    async def _read(self) -> bytes:
        if self._pieces is None:
            return b""
        try:
            return bytes(await anext(self._pieces, b""))
        except FAULTS as error:
            raise self.http.unreachable(error) from error

    async def close(self) -> None:
        response, pieces, self._response, self._pieces = self._response, self._pieces, None, None
        if response is not None:
            self.http.reading.discard(self)
            await _closed(response, pieces)

    async def _send(self, request: ClientRequest[Any]) -> httpx2.Response:
        """Return the response once its head is read. Raises ClientError for a status of 300 or more."""
        mine = {} if self.http.token is None else {"Authorization": f"Bearer {self.http.token}"}
        url = self.http.base_url.rstrip("/") + request.path
        try:
            built = self.http.client.build_request(
                request.method,
                url,
                content=request.body,
                headers={"Accept-Encoding": "identity", **mine, **request.headers},
                timeout=httpx2.Timeout(request.silence_s),
            )
            response = await self.http.client.send(built, stream=True)
        except FAULTS as error:
            raise self.http.unreachable(error) from error
        if response.status_code < 300:
            return response
        try:
            body = await self._whole(response)
        finally:
            await _closed(response)  # noqa: ASYNC102 - shielded and bounded in `_closed`
        raise read_error(response.status_code, response.reason_phrase, dict(response.headers), body)

    async def _whole(self, response: httpx2.Response) -> bytes:
        try:
            # as http.client, not decoded: a small body could expand to a huge one
            return b"".join([piece async for piece in response.aiter_raw()])
        except FAULTS as error:
            raise self.http.unreachable(error) from error


@define(eq=False)
class Later:
    """A script that runs when it is awaited. Who does not await it leaves it undone."""

    http: AwaitingHttp
    script: Script[None]

    def __await__(self) -> Generator[Any, Any, None]:
        return self.http.run(self.script).__await__()


async def _closed(response: httpx2.Response, pieces: AsyncIterator[bytes] | None = None) -> None:
    """Close a response. Bounded, shielded, and without errors, because nothing more is expected of it."""
    with anyio.move_on_after(CLOSE_S, shield=True), suppress(*FAULTS):
        await response.aclose()
        # httpx2 leaves its own generator to the garbage collector in mid-body, and Trio warns about that.
        # Read on, it ends with its connection.
        if pieces is not None:
            async for _ in pieces:
                pass
