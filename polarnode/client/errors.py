"""What a client raises, and which of it passes by itself.

The rule for whoever edits it: what passes is a short list, each for its reason; anything else is raised at once, for asking again can not help.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from polarnode.errors import PolarnodeError, Refused
from polarnode.wire import read_json, structure

T = TypeVar("T")

# No room now (429, 503), or an intermediary whose node is being restarted (502, 504). 507 is not one of them: a full disk waits for a person.
PASSING = (429, 502, 503, 504)


class ClientError(PolarnodeError):
    """The node answered with an error: its `status`, its `type`, the `path` of the field when it named one, and after how long to ask again."""

    boundary = "client"

    def __init__(self, message: str, *, status: int, type: str, path: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.type, self.path, self.retry_after = status, type, path, retry_after

    @property
    def passes(self) -> bool:
        """Whether asking again later can help."""
        return self.status in PASSING


class Unreachable(PolarnodeError):
    """No answer from the node, or none that is whole."""

    boundary = "node"


def read_error(status: int, reason: str, headers: Mapping[str, str], body: bytes) -> ClientError:
    """What an answer that is no success says; a node that is starting, or an intermediary, may say nothing of ours. `headers` in small letters."""
    wait = headers.get("retry-after", "")
    seconds = float(wait) if wait.isascii() and wait.isdigit() else None  # a date is not ours: our own pauses do as well
    said = _error_of(body)
    if said is None:
        return ClientError(f"the answer is {status} {reason}, not one of a polarnode", status=status, type="http", retry_after=seconds)
    message, kind, path = said
    return ClientError(message, status=status, type=kind, path=path, retry_after=seconds)


def _error_of(body: bytes) -> tuple[str, str, str | None] | None:
    try:
        value = read_json(body)
    except Refused:
        return None
    said = value.get("error") if isinstance(value, dict) else None
    match said:
        case {"message": str(message), "type": str(kind), "path": str(path)}:
            return message, kind, path
        case {"message": str(message), "type": str(kind)}:
            return message, kind, None
    return None


def read_answer(body: bytes, shape: type[T]) -> T:
    """The answer's JSON as a `shape`; what is none of a polarnode's is said so, as an error of status 200."""
    try:
        return structure(read_json(body), shape)
    except Refused as refused:
        raise _garbled(str(refused)) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The answer's JSON as it is; what is no object is not one of a polarnode's."""
    try:
        value = read_json(body)
    except Refused as refused:
        raise _garbled(str(refused)) from None
    if not isinstance(value, dict):
        raise _garbled("it is not an object")
    return value


def _garbled(why: str) -> ClientError:
    return ClientError(f"the answer is not one of a polarnode: {why}", status=200, type="garbled")
