"""Every refusal in one shape: `{"error": {"type", "message", "path"?}}`, the message one sentence that says what to do.

The rule for whoever edits it: nothing leaves the control plane as HTML or as a bare status; a bug of ours says only that it is one.
"""

from math import ceil

import trio
from quart import Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from polarnode.conversation import Json
from polarnode.errors import PolarnodeError, Refused
from polarnode.web.control_plane.service import Busy, Conflict, DiskFull
from polarnode.wire import dump_json

# What Quart and Werkzeug raise by themselves, in our words.
SENTENCES = {
    404: ("not_found", "nothing is served at this path: see docs/api.md for the routes of the control plane"),
    405: ("method_not_allowed", "this path does not take this method: see docs/api.md for the routes of the control plane"),
    413: ("too_large", "the body is larger than the control plane takes: put large files in the runtime's image"),
    500: ("internal", "this is a bug of polarnode: its log has the details"),
}


class NotFound(PolarnodeError):
    """A task, session or trajectory that is not there. 404."""

    boundary = "client"


class Unauthorized(PolarnodeError):
    """No token, or another. 401."""

    boundary = "client"


def json_response(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status, headers, content_type="application/json")


def error_json(kind: str, message: str, path: str | None = None) -> dict[str, Json]:
    where: dict[str, Json] = {} if path is None else {"path": path}
    return {"error": {"type": kind, "message": message, **where}}


def answer_of(error: PolarnodeError) -> tuple[str, int, dict[str, str]]:
    """What an error is called, its status, and the headers that go with it."""
    match error:
        case Refused():
            return "invalid_request", 400, {}
        case Unauthorized():
            return "unauthorized", 401, {"WWW-Authenticate": "Bearer"}
        case NotFound():
            return "not_found", 404, {}
        case Conflict():
            return "conflict", 409, {}
        case Busy():
            return "busy", 429, {"Retry-After": str(ceil(error.retry_after))}
        case DiskFull():
            return "disk_full", 507, {}
    return error.boundary, 500, {}


async def answer_error(error: Exception) -> Response:
    """Quart's handler for what we raise on purpose and for what it raises itself."""
    await trio.lowlevel.checkpoint()  # async though it waits for nothing: Quart would run a plain function in a thread
    match error:
        case PolarnodeError():
            kind, status, headers = answer_of(error)
            return json_response(error_json(kind, str(error), error.path if isinstance(error, Refused) else None), status, headers)
        case HTTPException():
            kind, sentence = SENTENCES.get(error.code or 500, ("http", error.description or error.name))
            allowed = {"Allow": ", ".join(error.valid_methods or ())} if isinstance(error, MethodNotAllowed) else None
            return json_response(error_json(kind, sentence), error.code or 500, allowed)
    raise error
