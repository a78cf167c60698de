"""Answers in the shape of Polar's own servers, which are FastAPI's: `{"detail": …}` for what is refused.

The rule for whoever edits it: bridges raise for a status and log the detail; so every refusal keeps its
status, and its sentence says what to do.

Ids as Polar's side gives them, and as they stand in the journal.

The rule for whoever edits it: an id of ours is for ever, Polar's may be used again once its task is over; so
each use is a task of its own here, called by the id and its number. What can not be a name of ours is called
by its digest.

What Polar's face needs of the node: the same service trainers have, and a look at what is under way.

The rule for whoever edits it: the face decides nothing that the node does not decide for its own routes.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import wraps
from hashlib import sha256
from typing import ParamSpec, Protocol

from attrs import field, frozen
from quart import Response, request

from polarnode.api.service import Service, answer_of, json_response
from polarnode.core.codec.tasks import NAME
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import CaptureEnd, CaptureSpec
from polarnode.core.trajectory import Trajectory
from polarnode.engine.weight_values import PauseOrder
from polarnode.http.asgi import body_json
from polarnode.journal.entries import RUN
from polarnode.journal.journal import Journal
from polarnode.journal.queries import Recent
from polarnode.rollouts.captures import CaptureStatus, Opened
from polarnode.rollouts.scheduler import SessionStatus

# ── answers ────────────────────────────────────────────────────────────

P = ParamSpec("P")
STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d+)\]|\['([^']*)'\]")


def answered(handler: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """A handler whose refusals are Polar's."""

    @wraps(handler)
    async def asked(*args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await handler(*args, **kwargs)
        except PolarnodeError as error:
            return refusal(error)

    return asked


def refusal(error: PolarnodeError) -> Response:
    """What could not be done, as FastAPI tells it."""
    if isinstance(error, Refused):
        return json_response(
            {"detail": [{"loc": _location(error.path), "msg": str(error), "type": "value_error"}]}, 422
        )
    _, status, headers = answer_of(error)
    return json_response({"detail": str(error)}, status, headers)


def _location(path: str | None) -> list[Json]:
    """`$.agent.env['A B']` as `["body", "agent", "env", "A B"]`; `?limit` as `["query", "limit"]`."""
    if path is None or path.startswith("?"):
        return ["body"] if path is None else ["query", path[1:]]
    steps: list[Json] = [int(number) if number else name or odd for name, number, odd in STEP.findall(path)]
    return ["body", *steps]


async def body_object() -> dict[str, Json]:
    """The JSON object of the request's body."""
    found = await body_json()
    if not isinstance(found, dict):
        raise Refused("the body is no JSON object: send one", path="$")
    return found


def count(name: str, default: int, *, most: int) -> int:
    """A whole number of the URL's query, from 1."""
    said = request.args.get(name, "")
    if not said:
        return default
    if not (said.isascii() and said.isdigit() and 1 <= int(said[:9]) <= most):
        raise Refused(f"{name} must be 1 to {most}, not {said!r}", path=f"?{name}")
    return int(said)


def moment(seconds: float) -> str:
    """Seconds since the epoch as Polar writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ── names ────────────────────────────────────────────────────────────

ROOM = 128 - len(RUN) - 9  # of a name, for the number of a run


def task_name(polar_id: str) -> str:
    """What the first task of an id is called."""
    return _name(polar_id, "polar-")


def dispatch_name(session_id: str) -> str:
    """What the task of one session is called, whose id its sender chose."""
    return _name(f"session:{session_id}", "polar-session-")


def run_name(first: str, run: int) -> str:
    """What a later task of the same id is called."""
    return first if run == 1 else f"{first}{RUN}{run}"


def _name(said: str, prefix: str) -> str:
    if NAME.fullmatch(said) and len(said) <= ROOM and RUN not in said:
        return said
    return prefix + sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# ── house ────────────────────────────────────────────────────────────


class CapturesService(Protocol):
    """`shell.captures.Captures`, as the gateway's sessions see it."""

    async def begin(self, spec: CaptureSpec) -> Opened: ...

    async def end(self, session_id: str, said: CaptureEnd) -> Trajectory | None: ...

    def list(self) -> tuple[CaptureStatus, ...]: ...


class Generation(Protocol):
    """Of `shell.weights.Weights`: generation held and let go."""

    async def pause(self, order: PauseOrder) -> object: ...

    async def resume(self) -> object: ...


@frozen(kw_only=True)
class PolarHouse:
    """`sessions` are those that are not over, `end_session` ends one with what it has, `volumes` the folders
    of this machine that tasks may see.
    """

    service: Service
    journal: Journal
    generation: Generation
    captures: CapturesService
    sessions: Callable[[], Iterable[SessionStatus]]
    end_session: Callable[[str], bool]
    node_id: str
    model: str
    volumes: tuple[str, ...] = ()
    recent: Recent = field(factory=Recent)  # SessionResults that were made lately
    called_off: dict[str, str] = field(factory=dict)  # tasks that were cancelled before they came

    def live(self) -> Mapping[str, SessionStatus]:
        """Sessions that are not over, by id."""
        return {status.session_id: status for status in self.sessions() if status.outcome is None}
