"""The values that a client returns and the errors that it raises.

Values shared with the node are in `core.status` and `core.weights`. The transient statuses are a short list,
each for a reason; any other error is raised at once, because a retry cannot help.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attrs import field, frozen

from polarnode.core.codec.json import read_json, structure
from polarnode.core.codec.trajectories import read_trajectory
from polarnode.core.cursors import Cursor
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.status import STARTING, RewardEvent, UnreadableEvent
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import Group, read_group

# ── values ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Event:
    """One event of the stream.

    * `kind`: trajectory, group, task, gap or unreadable; attempt or reward where it was requested.
    * `key`: the same each time the event is delivered. `data`: the event's JSON.
    * `id`: the position after it, which is what is acknowledged: its number, and with it the log's name where
      nodes share one.
    * `seq`: its number. `journal`: that name, "" where a node is alone.
    """

    seq: int
    kind: str
    key: str
    data: Any
    journal: str = ""
    id: str = field(default="", eq=False, repr=False)
    size: int = field(default=0, eq=False, repr=False)  # bytes as it came

    @property
    def cursor(self) -> Cursor:
        """Where a reader is after it."""
        return Cursor(position=self.seq, log=self.journal)

    @property
    def trajectory(self) -> Trajectory | None:
        """The trajectory of a `trajectory` or `attempt` event. None for other kinds, for a pruned one, and in
        a trainer's format.

        It has its `turns` when they were requested with turns="full".
        """
        if self.kind not in ("trajectory", "attempt") or self.data is None or "format" in self.data:
            return None
        return read_trajectory(self.data)

    @property
    def group(self) -> Group | None:
        """The group of a `group` event, without its trajectories, which have events of their own. None for
        other kinds.
        """
        return read_group(self.data) if self.kind == "group" else None

    @property
    def reward(self) -> RewardEvent | None:
        """The reward that a later evaluation gave a session. None for other kinds."""
        return structure(self.data, RewardEvent) if self.kind == "reward" else None

    @property
    def unreadable(self) -> UnreadableEvent | None:
        """The event that the node could not give, and why; None for other kinds. Acknowledge it like any
        other: the node will not be able to give it later either.
        """
        return structure(self.data, UnreadableEvent) if self.kind == "unreadable" else None


# ── errors ────────────────────────────────────────────────────────────

T = TypeVar("T")

# No room now (429, 503), or an intermediary whose node is being restarted (502, 504). 507 is not one of them:
# a full disk needs an operator.
TRANSIENT_STATUSES = (429, 502, 503, 504)


class ClientError(PolarnodeError):
    """The node answered with an error.

    * `status`, `type`: the HTTP status and the type of the error. `path`: the field that is at fault, if the
      node named one.
    * `retry_after`: seconds after which a retry may succeed, if the node gave them.
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
        """Whether a later retry can succeed."""
        return self.status in TRANSIENT_STATUSES


class Unreachable(PolarnodeError):
    """The node gave no answer, or not a complete one."""

    boundary = "node"


class NodeStarts(Unreachable):
    """The node's socket is bound and its engine is not ready yet: for a client it is not there yet."""


def read_error(status: int, reason: str, headers: Mapping[str, str], body: bytes) -> ClientError | NodeStarts:
    """Read the error of a response. `headers` have lower-case names.

    An intermediary may send a body that is not the node's own.
    """
    wait = headers.get("retry-after", "")
    # the node sends seconds; for a date, the client's own pauses are used
    seconds = float(wait) if wait.isascii() and wait.isdigit() else None
    found = _error_of(body)
    if found is None:
        return ClientError(
            f"the answer is {status} {reason}, not from polarnode",
            status=status,
            type="http",
            retry_after=seconds,
        )
    message, kind, path = found
    if kind == STARTING:
        return NodeStarts(f"the node is not ready yet: {message}")
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
    """Read the answer's JSON as a `shape`. Anything else is a ClientError with status 200."""
    try:
        return structure(read_json(body), shape)
    except Refused as refused:
        raise _garbled(str(refused)) from None


def read_object(body: bytes) -> dict[str, Any]:
    """Read the answer's JSON as an object. Anything else is a ClientError with status 200."""
    try:
        value = read_json(body)
    except Refused as refused:
        raise _garbled(str(refused)) from None
    if not isinstance(value, dict):
        raise _garbled("it is not an object")
    return value


def read_with(read: Callable[[Any], T], body: bytes) -> T:
    """Read the answer's object with `read`. What that refuses is a ClientError with status 200."""
    value = read_object(body)
    try:
        return read(value)
    except Refused as refused:
        raise _garbled(str(refused)) from None


def read_text(body: bytes) -> str:
    """Read the answer as UTF-8 text. Anything else is a ClientError with status 200."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise _garbled(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _garbled(why: str) -> ClientError:
    return ClientError(f"the answer is not from polarnode: {why}", status=200, type="garbled")
