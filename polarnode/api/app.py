"""The control plane as a Quart app: settings, the token, the table of routes, the routes that integrations
add, and the OpenAPI 3.1 document of them all.

Quart's time limits are off, because they cut streams silently. The limit on request bodies is set here. Every
route except the two probes needs the token. What other sites' web pages send is refused. A path that is not
in the table is answered 404 with a message.

The document is built by pure functions from the served routes and the types that read and write their
bodies. It repeats nothing that the code states elsewhere: tests compare the parameters with `query`, and
every route with its operation.
"""

import re
from collections.abc import Container, Iterable, Mapping
from hmac import compare_digest
from importlib.metadata import version
from itertools import starmap
from typing import Any, Final, cast, get_args

import trio
from attrs import field, frozen
from hypercorn.typing import HTTPScope
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from polarnode.api.openapi_shapes import BYTES, ENGINE, JSON, OPERATIONS, Operation, Where
from polarnode.api.query import MOST_LINES, MOST_TASKS, PARQUET, Begin, Kind, read_query
from polarnode.api.service import Unauthorized, answer_error
from polarnode.core import cursors
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import dump_json
from polarnode.core.codec.schema import Schema, Schemas
from polarnode.core.codec.trajectories import JSON_SCHEMAS, Turns
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, PolarnodeError
from polarnode.core.trajectory import Status
from polarnode.groups.group import GroupState
from polarnode.http.asgi import BrowserGuard, RouteRow, admit_request, guard_browsers
from polarnode.http.compression import compress_answers
from polarnode.http.places import place_of
from polarnode.journal.values import EventKind
from polarnode.trainers import FORMATS

# ── parameters ────────────────────────────────────────────────────────────

LARGEST: Final = 10**18 - 1  # the largest number accepted


def _one(description: str, schema: Schema) -> Schema:
    return {"description": description, "schema": schema}


def _enum(values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list[Json](values)}


_CURSOR: Final[Schema] = {"type": "string", "pattern": f"^{cursors.TEXT}$"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": LARGEST}

PARAMETERS: Final[Mapping[str, Schema]] = {
    "consumer": _one(
        "A name whose position the node keeps.",
        {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
    ),
    "after": _one("Begin after this position, an `id:` of the stream or a number.", _CURSOR),
    "begin": _one(
        "Where to begin without `after` and without a consumer's position.",
        {**_enum(get_args(Begin)), "default": "oldest"},
    ),
    "follow": _one(
        "false: end the stream when no more events are stored.", {"type": "boolean", "default": True}
    ),
    "task_id": _one("Only sessions of this task.", {"type": "string"}),
    "group_id": _one("Only sessions of this group.", {"type": "string"}),
    "outcome": _one("Only sessions with this status.", _enum(get_args(Status))),
    "min_reward": _one("Only sessions with at least this reward.", {"type": "number"}),
    "arrays": _one("The encoding of arrays.", _enum(get_args(Arrays))),
    "turns": _one("Whether turns include their tokens.", _enum(get_args(Turns))),
    "format": _one(
        "A trainer's format; parquet, of token rows, only for the export.", _enum((*FORMATS, PARQUET))
    ),
    "kind": _one(
        "sft: one conversation per line; rewards: one later reward per line.", _enum(get_args(Kind))
    ),
    "limit": _one(
        "The most records returned.", {"type": "integer", "minimum": 1, "maximum": MOST_TASKS, "default": 100}
    ),
    "before": _one("The last task_id of the previous page.", {"type": "string"}),
    "kinds": {
        "description": "The kinds of events sent.",
        "style": "form",
        "explode": False,
        "schema": {"type": "array", "items": _enum(get_args(EventKind)), "minItems": 1},
    },
    "offset": _one("The byte of the log to begin at.", _COUNT),
    "tail": _one("Only so many of the last lines.", {"type": "integer", "minimum": 1, "maximum": MOST_LINES}),
    "pieces": _one(
        "Whether the text of each token is added, for people.", {"type": "boolean", "default": False}
    ),
    "until": _one(
        "Only groups that ended at this time or before, in seconds since the epoch.", {"type": "number"}
    ),
    "since": _one("Only samples taken after this time, in seconds since the epoch.", {"type": "number"}),
    "state": _one("Only groups in this state.", _enum(get_args(GroupState))),
    "model": _one("Of nodes that serve several models: which one is meant.", {"type": "string"}),
}


# ── document ────────────────────────────────────────────────────────────

HEADERS: Final[Mapping[str, Schema]] = {
    "Idempotency-Key": {"type": "string"},
    "Last-Event-ID": {"type": "string", "pattern": f"^(?:{cursors.TEXT})?$"},
}
REASONS: Final[Mapping[int, str]] = {
    400: "The request is not valid; `path` names the field.",
    401: "The token is missing or wrong.",
    403: "A web page of another origin sent this, or its `Host` is not served.",
    404: "Nothing has this id or name.",
    409: "The request conflicts with the current state, or its id or key is in use.",
    410: "It is in the journal and cannot be read: its row is damaged, or it cannot be written as JSON.",
    413: "The body is too large.",
    415: "The body's type is not JSON.",
    422: "The request is not valid: FastAPI's status for 400.",
    429: "No capacity now: retry after `Retry-After` seconds.",
    500: "A bug of polarnode, or what the message explains.",
    502: "A node passed it on to another than this one.",
    503: "Unavailable now: the log, the engine or the node that has this does not answer.",
    507: "The journal's disk is full, read-only or failing: the sentence says which.",
}
_EVERY: Final = (400, 403, 500, 503)  # 503: the log is away, or all places of the socket are taken
_PLACE: Final = re.compile(r"<(?:\w+:)?(\w+)>")  # of a name in a row's path


def document(rows: Iterable[Where], operations: Mapping[Where, Operation], *, token: bool) -> dict[str, Json]:
    """The document of these routes. `token` is whether the routes need one. Routes without an operation are
    left out.
    """
    asked = Schemas(strict=True, suffix="Request", known=JSON_SCHEMAS)
    given = Schemas(strict=False, known=JSON_SCHEMAS)
    loose = Schemas(strict=False, suffix="OpenRequest")
    paths: dict[str, Any] = {}
    for where in filter(operations.__contains__, rows):
        method, path = where
        item = paths.setdefault(_braced(path), {})
        op = operations[where]
        item[method.lower()] = _operation(where, op, loose if op.open_body else asked, given, token=token)
    schemes: Schema = {"token": {"type": "http", "scheme": "bearer"}} if token else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "polarnode",
            "version": version("polarnode"),
            "description": "The control plane of a node: described in docs/api.md.",
        },
        "paths": paths,
        "components": {"schemas": {**asked.named, **loose.named, **given.named}, "securitySchemes": schemes},
    }


def _operation(where: Where, op: Operation, asked: Schemas, given: Schemas, *, token: bool) -> Schema:
    method, path = where
    found: Schema = {
        "operationId": _name(method, path),
        "summary": op.summary,
        "tags": [op.tag],
        "parameters": [
            *_in_path(path),
            *(_in_query(name, PARAMETERS[name]) for name in op.query),
            *starmap(_in_query, op.own.items()),
            *(_in_header(name, HEADERS[name]) for name in op.headers),
            *starmap(_in_header, op.own_headers.items()),
        ],
        "responses": _responses(op, given, token=token and not op.open),
    }
    if op.body is bytes:
        found["requestBody"] = {"required": True, "content": {BYTES: {}}}
    elif op.body is not None:
        found["requestBody"] = {
            "required": not op.optional_body,
            "content": {JSON: {"schema": asked.of(op.body)}},
        }
    if token and not op.open:
        found["security"] = [{"token": []}]
    return found


def _responses(op: Operation, given: Schemas, *, token: bool) -> Schema:
    shape: Schema = {"type": "string"} if op.answer is None else given.of(op.answer)
    links: Schema = {_name(*where): _link(place, where) for place, where in op.leads_to.items()}
    content: Schema = {each: {"schema": shape} for each in (op.content, *op.also)}
    found: Schema = {
        str(op.status): {"description": op.summary, "content": content, **({"links": links} if links else {})}
    }
    if op.again is not None:
        found[str(op.again)] = {"description": "The same answer as before.", "content": content}
    refusal: Schema = {JSON: {"schema": given.of(op.refusal)}}
    unread = [415] if op.body not in (None, bytes) else []
    for status in sorted({*_EVERY, *op.errors, *unread, *([401] if token else [])}):
        # /readyz has the same body in both
        probed = status == 503 and 503 in op.errors and op.open
        body: Schema = {JSON: {"schema": shape}} if probed else refusal
        found[str(status)] = {"description": REASONS[status], "content": body}
    return found


def _link(place: str, where: Where) -> Schema:
    return {"operationId": _name(*where), "parameters": {_in_braces(where[1])[0]: f"$response.body#{place}"}}


def _braced(path: str) -> str:
    return _PLACE.sub(r"{\1}", path)


def _in_braces(path: str) -> list[str]:
    return _PLACE.findall(path)


def _name(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z]\w*", _braced(path))
    return "_".join([method.lower(), *words])


def _in_path(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _in_braces(path)
    ]


def _in_query(name: str, parameter: Schema) -> Json:
    return {"name": name, "in": "query", "required": False, **parameter}


def _in_header(name: str, schema: Schema) -> Json:
    return {"name": name, "in": "header", "required": False, "schema": schema}


# ── openapi ────────────────────────────────────────────────────────────

EVERY: Final[Mapping[Where, Operation]] = {**OPERATIONS, **ENGINE}

__all__ = ["EVERY", "Operation", "Where", "document"]


# ── the app ─────────────────────────────────────────────────────────────────────────────────────────

BODY_BYTES = 64 << 20  # room for a task with its workspace as base64 files; larger files belong in an image
# whose answers last as long as their readers like: Polar's is `/events`
STREAMS = ("/v1/trajectories/stream", "/v1/sessions/live", "/events")
STREAM_RETRY_S = 10.0  # between tries to open one more stream than the socket has places for
OPEN_PATHS = ("/healthz", "/readyz")  # probes have no token, and their answers reveal nothing
OPEN_BELOW = "/ui/"  # the page's files, which are in every release: the page asks its user for the token


@frozen(kw_only=True)
class Extension:
    """What another package adds to the control plane: rows of the route table, their OpenAPI operations, and
    headers that carry the token besides `Authorization`.

    `basic`: its routes also take the token as the password of HTTP's basic authentication, for clients that
    send nothing else.
    """

    rows: tuple[RouteRow, ...]
    operations: Mapping[Where, Operation] = field(factory=dict)
    token_headers: tuple[str, ...] = ()
    basic: bool = False


def control_plane(
    routes: Iterable[RouteRow],
    *,
    token: str | None,
    guard: BrowserGuard | None = None,
    extensions: Iterable[Extension] = (),
) -> QuartTrio:
    """Create the app that serves a node's `routes` and the extensions'.

    With `token` None every request that `guard` lets pass is accepted: bind the app to a loopback address
    only. Without a `guard` loopback's names are served, and every name where there is a token.
    """
    extensions = tuple(extensions)
    app = QuartTrio("polarnode.control_plane", static_folder=None)
    app.url_map.merge_slashes = False  # else a path with // is answered by a redirect, in HTML
    app.config.update(
        RESPONSE_TIMEOUT=None,
        BODY_TIMEOUT=None,
        MAX_CONTENT_LENGTH=BODY_BYTES,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    guard_browsers(app, guard or BrowserGuard(any_host=token is not None), open_to_all=token is None)
    if token is not None:
        headers = tuple(header for extension in extensions for header in extension.token_headers)
        basic = frozenset(path for each in extensions if each.basic for _, path, _ in each.rows)
        _guard(app, f"Bearer {token}".encode(), headers, basic)
    _limit_streams(app)
    compress_answers(app)
    rows = [*routes]
    operations = dict(EVERY)
    for extension in extensions:
        rows += extension.rows
        operations |= extension.operations
    for method, path, handler in (*rows, _document_row(rows, operations, token=token is not None)):
        app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
    app.register_error_handler(PolarnodeError, answer_error)
    app.register_error_handler(HTTPException, answer_error)
    return app


NO_TOKEN = (
    "this needs the control plane's token: send it as 'Authorization: Bearer …'; polarnode's commands take"
    " --token or POLARNODE_TOKEN"
)
OTHER_TOKEN = (
    "the token that was sent (polarnode's commands take --token or POLARNODE_TOKEN) is another than this"
    " control plane's: compare it with the POLARNODE_TOKEN that the node was started with"
)


def _guard(app: QuartTrio, expected: bytes, headers: tuple[str, ...], basic: Container[str]) -> None:
    """Ask for the token; `basic` are the paths that take it as a password."""

    @app.before_request
    async def check_token() -> None:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        if request.path in OPEN_PATHS or request.path.startswith(OPEN_BELOW):
            return
        sent = [
            request.headers.get("Authorization", ""),
            *(f"Bearer {request.headers.get(header, '')}" for header in headers),
        ]
        given, rule = request.authorization, request.url_rule
        if rule is not None and rule.rule in basic and given is not None and given.type == "basic":
            sent.append(f"Bearer {given.password}")
        # compare all of them, so that the time taken does not reveal which one matched
        if not sum(compare_digest(each.encode(), expected) for each in sent):
            raise Unauthorized(OTHER_TOKEN if any(each.partition(" ")[2] for each in sent) else NO_TOKEN)
        admit_request()


def _limit_streams(app: QuartTrio) -> None:
    """Leave places on the socket to requests that are no streams."""

    @app.before_request
    async def check_streams() -> None:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        place = place_of(cast(HTTPScope, request.scope)) if request.path in STREAMS else None
        if place is not None and not place.open_stream():
            raise Busy(
                "as many streams are open as this node serves: end some, or read several tasks from one",
                retry_after=STREAM_RETRY_S,
            )


DOCUMENT = ("GET", "/v1/openapi.json")


def _document_row(
    rows: Iterable[RouteRow], operations: Mapping[Where, Operation], *, token: bool
) -> RouteRow:
    body = dump_json(document([*(row[:2] for row in rows), DOCUMENT], operations, token=token))

    async def openapi() -> Response:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        read_query(request.args)
        return Response(body, content_type="application/json")

    return (*DOCUMENT, openapi)
