"""What a client is answered and what it raises.

Values shared with the node are in `core.status` and `core.weights`. The errors that pass by themselves are a
short list, each for its reason; anything else is raised at once, because asking again cannot help.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from attrs import field, frozen

from polarnode.core.codec.json import read_json, structure
from polarnode.core.codec.trajectories import read_trajectory
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group, read_group

# ── values ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Event:
    """One event of the stream. `kind` is trajectory, group, task, gap, or attempt where it was asked for;
    `key` is the same each time an event is delivered; `data` its JSON.
    """

    seq: int
    kind: str
    key: str
    data: Any
    size: int = field(default=0, eq=False, repr=False)  # bytes as it came

    @property
    def trajectory(self) -> Trajectory | None:
        """The trajectory (a replaced one of an attempt), read; None for other kinds, and for one that was
        pruned or is in a trainer's format.

        Its `turns` are there when asked for with turns="full".
        """
        if self.kind not in ("trajectory", "attempt") or self.data is None or "format" in self.data:
            return None
        return read_trajectory(self.data)

    @property
    def group(self) -> Group | None:
        """The group, read, without its trajectories, which have events of their own; None for other kinds."""
        return read_group(self.data) if self.kind == "group" else None


# ── errors ────────────────────────────────────────────────────────────

T = TypeVar("T")

# No room now (429, 503), or an intermediary whose node is being restarted (502, 504). 507 is not one of them:
# a full disk waits for a person.
PASSING = (429, 502, 503, 504)


class ClientError(PolarnodeError):
    """The node answered with an error: its `status`, its `type`, the `path` of the field when it named one,
    and after how long to ask again.
    """

    boundary = "client"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        path: str | None = None,
        retry_after: float | None = None,
    ) -> None:
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
    """The error of an answer that is no success; an intermediary, or a node that is starting, may send a body
    of its own. `headers` are in lower case.
    """
    wait = headers.get("retry-after", "")
    # a date is not ours: our own pauses do as well
    seconds = float(wait) if wait.isascii() and wait.isdigit() else None
    found = _error_of(body)
    if found is None:
        return ClientError(
            f"the answer is {status} {reason}, not one of a polarnode",
            status=status,
            type="http",
            retry_after=seconds,
        )
    message, kind, path = found
    return ClientError(message, status=status, type=kind, path=path, retry_after=seconds)


def _error_of(body: bytes) -> tuple[str, str, str | None] | None:
    try:
        value = read_json(body)
    except Refused:
        return None
    found = value.get("error") if isinstance(value, dict) else None
    match found:
        case {"message": str(message), "type": str(kind), "path": str(path)}:
            return message, kind, path
        case {"message": str(message), "type": str(kind)}:
            return message, kind, None
    return None


def read_answer(body: bytes, shape: type[T]) -> T:
    """The answer's JSON as a `shape`; what no polarnode sends is an error of status 200."""
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
