"""The query parameters of a URL, and the body of acknowledgements. Parameters are read as strictly as a body:
unknown ones are refused, and each refusal names its parameter (`?after`).
"""

from collections.abc import Callable, Mapping
from math import isfinite, nan
from typing import Any, Final, Literal, get_args

from attrs import frozen

from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.trajectories import Turns
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Status
from polarnode.groups.group import GroupState
from polarnode.journal.values import DEFAULT_KINDS, EventFilters, EventKind, check_consumer
from polarnode.trainers import FORMATS

Kind = Literal["trajectories", "sft", "rewards"]
BeginAt = Literal["oldest", "newest"]
PARQUET: Final = "parquet"


@frozen(kw_only=True)
class Query:
    """The parameters of all routes; each route allows some of them."""

    consumer: str | None = None
    after: Cursor | None = None
    begin: BeginAt = "oldest"  # where a reader without a position begins
    follow: bool = True
    task_id: str | None = None
    group_id: str | None = None
    outcome: str | None = None
    min_reward: float | None = None
    arrays: Arrays = "json"
    turns: Turns = "table"
    format: str | None = None
    kind: Kind = "trajectories"
    limit: int = 100
    before: str | None = None
    kinds: tuple[EventKind, ...] = DEFAULT_KINDS
    pieces: bool = False
    until: float | None = None
    since: float | None = None
    state: GroupState | None = None
    model: str | None = None  # the model that is meant, if nodes of the log serve several
    offset: int | None = None  # for logs: the byte at which to begin
    tail: int | None = None  # for logs: only so many of the last lines

    def filters(self) -> EventFilters:
        return EventFilters(
            task_id=self.task_id,
            group_id=self.group_id,
            outcome=self.outcome,
            min_reward=self.min_reward,
            kinds=self.kinds,
        )


FILTER_PARAMETERS = ("task_id", "group_id", "outcome", "min_reward")
MOST_TASKS = 1000  # records on a page, with their sessions: some megabytes
MAX_LINES = 10_000  # lines of a log's end: more than anyone reads at once


def read_query(parameters: Mapping[str, str], *allowed: str) -> Query:
    """Read a URL's parameters. Raises Refused for a parameter that is not `allowed` or not valid."""
    for name in parameters:
        if name not in allowed:
            raise _refused(name, f"is not a parameter of this route: it takes {', '.join(allowed) or 'none'}")
    read: dict[str, Any] = {name: READERS[name](name, text) for name, text in parameters.items()}
    return Query(**read)


@frozen(kw_only=True)
class Ack:
    """The body of POST /v1/trajectories/ack: the stream's `id:` line, or the number of an event."""

    consumer: str
    id: str | None = None
    seq: int | None = None

    @property
    def cursor(self) -> Cursor:
        """The cursor that is acknowledged. Raises Refused."""
        if (self.id is None) == (self.seq is None):
            raise Refused("id is missing: send the stream's `id:` line, or seq, one of them", path="$.id")
        if self.id is not None:
            return Cursor.read(self.id, "$.id")
        seq = self.seq or 0
        if not 0 <= seq < 1 << 63:  # SQLite and PostgreSQL store it in 64 bits
            raise Refused(
                "seq must be the number of an event, as the stream's `id:` line has it", path="$.seq"
            )
        return Cursor(position=seq)


def _refused(name: str, sentence: str) -> Refused:
    return Refused(f"{name} {sentence}", path=f"?{name}")


def _text(name: str, text: str) -> str:
    return text


def _read_consumer(name: str, text: str) -> str:
    return check_consumer(text)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise _refused(name, f"must be a whole number, not {text!r}")
    return int(text)


def _read_cursor(name: str, text: str) -> Cursor:
    return Cursor.read(text, f"?{name}")


def _limit(name: str, text: str) -> int:
    count, most = _count(name, text), MOST_TASKS if name == "limit" else MAX_LINES
    if not 1 <= count <= most:
        raise _refused(name, f"must be 1 to {most}, not {count}")
    return count


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise _refused(name, f"must be a number, not {text!r}")
    return number


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise _refused(name, f"must be true or false, not {text!r}")
    return text == "true"


_PARAMETER_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "outcome": get_args(Status),
    "arrays": get_args(Arrays),
    "turns": get_args(Turns),
    "format": (*FORMATS, PARQUET),
    "kind": get_args(Kind),
    "begin": get_args(BeginAt),
    "state": get_args(GroupState),
}


def _one_of(name: str, text: str) -> str:
    options = _PARAMETER_OPTIONS[name]
    if text not in options:
        raise _refused(name, f"must be one of {', '.join(options)}, not {text!r}")
    return text


def _kinds(name: str, text: str) -> tuple[str, ...]:
    kinds, options = tuple(text.split(",")), get_args(EventKind)
    if not set(kinds) <= set(options):
        raise _refused(name, f"must be some of {','.join(options)}, with commas between them, not {text!r}")
    return kinds


READERS: Mapping[str, Callable[[str, str], Any]] = {
    "consumer": _read_consumer,
    "after": _read_cursor,
    "begin": _one_of,
    "follow": _flag,
    "task_id": _text,
    "group_id": _text,
    "outcome": _one_of,
    "min_reward": _number,
    "arrays": _one_of,
    "turns": _one_of,
    "format": _one_of,
    "kind": _one_of,
    "limit": _limit,
    "before": _text,
    "kinds": _kinds,
    "pieces": _flag,
    "until": _number,
    "since": _number,
    "state": _one_of,
    "model": _text,
    "offset": _count,
    "tail": _limit,
}


def last_event_id(text: str | None) -> Cursor | None:
    """The cursor in a `Last-Event-ID` header. An empty header, as browsers send it, counts as none."""
    return Cursor.read(text, "?Last-Event-ID") if text else None
