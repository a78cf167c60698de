"""Answers in the shape of Polar's own servers, which are FastAPI's: `{"detail": …}` for what is refused.

The rule for whoever edits it: bridges raise for a status and log the detail; so every refusal keeps its status, and its sentence says what to do.
"""

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import wraps
from typing import ParamSpec

from quart import Response, request

from polarnode.conversation import Json
from polarnode.errors import PolarnodeError, Refused
from polarnode.web.control_plane.errors import answer_of, json_response
from polarnode.web.handlers import body_json

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
        return json_response({"detail": [{"loc": _location(error.path), "msg": str(error), "type": "value_error"}]}, 422)
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
