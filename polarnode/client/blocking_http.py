"""Scripts obeyed over http.client, one connection a request: threads may share a client, and nothing is left open behind a request.

The rule for whoever edits it: whatever a connection raises leaves this module as ClientError or Unreachable.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field, frozen

from polarnode.client.commands import Ask, Close, Command, Give, Open, Read, Request, Running, Script, Sleep, T
from polarnode.client.errors import Unreachable, read_error
from polarnode.errors import PolarnodeError

READ_BYTES = 1 << 16


@frozen(kw_only=True)
class BlockingHttp:
    """Where the node is, and the key to it."""

    base_url: str
    token: str | None = field(repr=False)

    def run(self, script: Script[T]) -> T:
        """What the script returns."""
        running = Running(script)
        with closing(_Wire(self)) as wire:
            while (command := running.next()) is not None:
                wire.step(running, command)
        return running.value

    def iterate(self, script: Script[None]) -> Iterator[Any]:
        """What the script gives."""
        running = Running(script)
        with closing(_Wire(self)) as wire:
            while (command := running.next()) is not None:
                if isinstance(command, Give):
                    yield command.value
                    running.answered(None)
                else:
                    wire.step(running, command)

    def unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"{self.base_url} does not answer ({type(error).__name__}: {error}): is the node running?")


@define(eq=False)
class _Wire:
    """The connections of one script: a short one for each Ask, one that stays for what is Open."""

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
            case Close() | Give():
                self.close()
            case Sleep(seconds):
                time.sleep(seconds)
        return None

    def _ask(self, request: Request[Any]) -> bytes:
        with closing(self._connect(request)) as connection:
            try:
                return self._send(connection, request).read()
            except (OSError, HTTPException) as error:
                raise self.http.unreachable(error) from error

    def _open(self, request: Request[Any]) -> str:
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
            if not data and self._response.length:  # http.client says nothing of a body shorter than it was promised
                raise IncompleteRead(b"", self._response.length)
        except (OSError, HTTPException) as error:
            raise self.http.unreachable(error) from error
        return data

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _connect(self, request: Request[Any]) -> HTTPConnection:
        url = urlsplit(self.http.base_url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        return kind(url.hostname or "127.0.0.1", url.port, timeout=request.silence_s)

    def _send(self, connection: HTTPConnection, request: Request[Any]) -> HTTPResponse:
        """The head of an answer of 2xx; ClientError for another."""
        mine = {} if self.http.token is None else {"Authorization": f"Bearer {self.http.token}"}
        path = urlsplit(self.http.base_url).path.rstrip("/") + request.path
        connection.request(request.method, path, request.body, {**mine, **request.headers})
        response = connection.getresponse()
        if response.status >= 300:
            said = {name.lower(): value for name, value in response.headers.items()}
            raise read_error(response.status, response.reason, said, response.read())
        return response
