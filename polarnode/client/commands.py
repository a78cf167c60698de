"""What a script of the client asks of the world, and how a script is written.

A script is a generator: it yields one of these commands, is sent the answer or thrown the error, and returns its value. It does no I/O itself,
so that the synchronous and the asynchronous client obey the very same scripts (`blocking_http.py`, `awaiting_http.py`). The rules for whoever
edits it: a script has at most one stream open, and every wait is a `Sleep` that it yields.
"""

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, cast

from attrs import define, field, frozen

from polarnode.errors import PolarnodeError

T = TypeVar("T")

SILENCE_S = 30.0  # the node speaks at least every 10 s on a stream; three misses are a dead connection


@frozen(kw_only=True)
class Request(Generic[T]):
    """One request, and how its answer is read. `path` holds its query, `headers` none of the client's own."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    headers: Mapping[str, str] = field(factory=dict)
    silence_s: float = SILENCE_S  # without a byte for so long, the connection is dead


@frozen
class Ask:
    """Send the request; answer its whole body. Raises ClientError for what is no success, Unreachable for no answer."""

    request: Request[Any]


@frozen
class Open:
    """Send the request and leave its body to be read; answer its content type. Raises as Ask."""

    request: Request[Any]


@frozen
class Read:
    """Some bytes of the body that is open, b"" at its end. Raises Unreachable when it breaks off, or is silent for too long."""


@frozen
class Close:
    """Close the body that is open, if one is."""


@frozen
class Sleep:
    seconds: float


@frozen
class Give:
    """Hand a value to whoever iterates; answered when the next is asked for."""

    value: Any


Command = Ask | Open | Read | Close | Sleep | Give
Script = Generator[Command, Any, T]


def ask(request: Request[T]) -> Script[T]:
    """One request, once."""
    body = yield Ask(request)
    return request.read(body)


@define(eq=False)
class Running(Generic[T]):
    """A script under way: what it wants next, and how that went."""

    script: Script[T]
    _step: Callable[[], Command] = field(init=False)
    _value: T | None = field(default=None, init=False)

    @_step.default
    def _begin(self) -> Callable[[], Command]:
        return partial(next, self.script)

    def next(self) -> Command | None:
        """What to do now; None when the script is over."""
        try:
            return self._step()
        except StopIteration as stop:
            self._value = stop.value
            return None

    def answered(self, answer: object) -> None:
        self._step = partial(self.script.send, answer)

    def failed(self, error: PolarnodeError) -> None:
        self._step = partial(self.script.throw, error)

    @property
    def value(self) -> T:
        """What the script returned, once it is over."""
        return cast(T, self._value)
