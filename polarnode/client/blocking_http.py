"""Scripts run over http.client, with one connection a request: threads may share a client, and nothing stays
open after a request. A connection's errors leave this module as ClientError, Unreachable or ConfigError.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from attrs import define, field, frozen

from polarnode.client.pins import node_address, other_certificate, silence, split_pin, trust
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
from polarnode.client.values import read_error
from polarnode.core.errors import PolarnodeError

READ_BYTES = 1 << 16

V = TypeVar("V")


@define(eq=False)
class BlockingEvents(Generic[V]):
    """An iterator over the values that a script gives.

    A loop that ends early leaves it at once: what is owed to the node, such as acknowledgements, is sent and
    its connection is closed. Use `with` or `close` where it is kept under a name.
    """

    _values: Generator[V, None, None]

    def __iter__(self) -> Iterator[V]:
        return self

    def __next__(self) -> V:
        return next(self._values)

    def close(self) -> None:
        self._values.close()

    def __enter__(self) -> "BlockingEvents[V]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@frozen(kw_only=True)
class BlockingHttp:
    """The address and the bearer token of one node; runs scripts over blocking connections."""

    base_url: str
    token: str | None = field(repr=False)

    def run(self, script: Script[T]) -> T:
        """Run a script to its end and return its value."""
        running = Running(script)
        with closing(_ScriptConnection(self)) as wire:
            while (command := running.next()) is not None:
                wire.step(running, command)
        return running.value

    def iterate(self, script: Script[None]) -> BlockingEvents[Any]:
        """Run a script and yield each value that it gives."""
        return BlockingEvents(self._values(script))

    def _values(self, script: Script[None]) -> Generator[Any, None, None]:
        running = Running(script)
        with closing(_ScriptConnection(self)) as wire:
            try:
                while (command := running.next()) is not None:
                    if isinstance(command, YieldValue):
                        yield command.value
                        running.answered(None)
                    else:
                        wire.step(running, command)
            except (GeneratorExit, KeyboardInterrupt):  # the caller left, or was interrupted as it waited
                running.left()
                while (command := running.next()) is not None:
                    wire.step(running, command)
                raise

    def unreachable(self, error: Exception) -> PolarnodeError:
        """ConfigError for another certificate than the pinned one, which no wait mends."""
        url = split_pin(self.base_url)[0]
        return other_certificate(error) or silence(url, error, f"{type(error).__name__}: {error}")


@define(eq=False)
class _ScriptConnection:
    """The connections of one script: a short one for each Ask, one that stays open for an Open."""

    http: BlockingHttp
    _connection: HTTPConnection | None = field(default=None, init=False)
    _response: HTTPResponse | None = field(default=None, init=False)

    def step(self, running: Running[Any], command: Command) -> None:
        try:
            answer = self._obey(command)
        except PolarnodeError as error:
            running.failed(error)
        else:
            running.answered(answer)

    def _obey(self, command: Command) -> object:
        match command:
            case Ask(request):
                return self._ask(request)
            case Open(request):
                return self._open(request)
            case Read():
                return self._read()
            case Close() | YieldValue():
                self.close()
            case SleepFor(seconds):
                time.sleep(seconds)
        return None

    def _ask(self, request: ClientRequest[Any]) -> bytes:
        with closing(self._connect(request)) as connection:
            try:
                return self._send(connection, request).read()
            except (OSError, HTTPException) as error:
                raise self.http.unreachable(error) from error

    def _open(self, request: ClientRequest[Any]) -> str:
        self.close()
        self._connection = self._connect(request)
        try:
            self._response = self._send(self._connection, request)
        except (OSError, HTTPException) as error:
            raise self.http.unreachable(error) from error
        return str(self._response.headers.get("Content-Type", ""))

    def _read(self) -> bytes:
        if self._response is None:
            return b""
        try:
            data = self._response.read1(READ_BYTES)
            # http.client raises nothing for a body shorter than promised
            if not data and self._response.length:
                raise IncompleteRead(b"", self._response.length)
        except (OSError, HTTPException) as error:
            raise self.http.unreachable(error) from error
        return data

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _connect(self, request: ClientRequest[Any]) -> HTTPConnection:
        address, certificate = node_address(self.http.base_url)
        url, context, limit = urlsplit(address), trust(address, certificate), request.silence_s
        if context is None:
            return HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=limit)
        return HTTPSConnection(url.hostname or "", url.port, timeout=limit, context=context)

    def _send(self, connection: HTTPConnection, request: ClientRequest[Any]) -> HTTPResponse:
        """Return the response once its head is read. Raises ClientError for a status of 300 or more."""
        mine = {} if self.http.token is None else {"Authorization": f"Bearer {self.http.token}"}
        path = urlsplit(self.http.base_url).path.rstrip("/") + request.path
        connection.request(request.method, path, request.body, {**mine, **request.headers})
        response = connection.getresponse()
        if response.status >= 300:
            headers = {name.lower(): value for name, value in response.headers.items()}
            raise read_error(response.status, response.reason, headers, response.read())
        return response
