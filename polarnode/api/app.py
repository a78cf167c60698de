"""The control plane as a Quart app: settings, the token, the table of routes, the routes that integrations
add, and the OpenAPI 3.1 document of them all.

Quart's time limits are off, because they cut streams silently. The limit on request bodies is set here. Every
route except the two probes needs the token. Requests from web pages of other sites are refused. A path that
is not in the table is answered 404 with a message.

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

from polarnode.api.openapi_shapes import BYTES, ENGINE_OPERATIONS, JSON, OPERATIONS, Operation, RouteKey
from polarnode.api.query import MAX_LINES, MOST_TASKS, PARQUET, BeginAt, Kind, read_query
from polarnode.api.service import Unauthorized, answer_error
from polarnode.core import cursors
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import dump_json
from polarnode.core.codec.schema import Schema, SchemaCollector
from polarnode.core.codec.trajectories import JSON_SCHEMAS, Turns
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, PolarnodeError
from polarnode.core.trajectory import Status
from polarnode.groups.group import GroupState
from polarnode.http.asgi import BrowserGuard, RouteRow, admit_request, guard_browsers
from polarnode.http.compression import compress_answers
from polarnode.http.places import slot_of
from polarnode.journal.values import EventKind
from polarnode.trainers import FORMATS

# ── parameters ────────────────────────────────────────────────────────────

MAX_NUMBER: Final = 10**18 - 1  # the largest number that a parameter may have


def _one(description: str, schema: Schema) -> Schema:
    return {"description": description, "schema": schema}


def _enum(values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list[Json](values)}


_CURSOR_SCHEMA: Final[Schema] = {"type": "string", "pattern": f"^{cursors.TEXT}$"}
_COUNT_SCHEMA: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER}

PARAMETERS: Final[Mapping[str, Schema]] = {
    "consumer": _one(
        "A name whose position the node keeps.",
        {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
    ),
    "after": _one("Begin after this position, an `id:` of the stream or a number.", _CURSOR_SCHEMA),
    "begin": _one(
        "Where to begin without `after` and without a consumer's position.",
        {**_enum(get_args(BeginAt)), "default": "oldest"},
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
    "offset": _one("The byte of the log to begin at.", _COUNT_SCHEMA),
    "tail": _one("Only so many of the last lines.", {"type": "integer", "minimum": 1, "maximum": MAX_LINES}),
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
_EVERY: Final = (400, 403, 500, 503)  # 503: the log does not answer, or the socket has no free place
_PATH_PARAMETER: Final = re.compile(r"<(?:\w+:)?(\w+)>")  # a parameter in a row's path


def document(
    rows: Iterable[RouteKey], operations: Mapping[RouteKey, Operation], *, token: bool
) -> dict[str, Json]:
    """The OpenAPI document of these routes. `token` says whether the routes need one. Routes without an
    operation are left out.
    """
    asked = SchemaCollector(strict=True, suffix="Request", known=JSON_SCHEMAS)
    given = SchemaCollector(strict=False, known=JSON_SCHEMAS)
    loose = SchemaCollector(strict=False, suffix="OpenRequest")
    paths: dict[str, Any] = {}
    for where in filter(operations.__contains__, rows):
        method, path = where
        item = paths.setdefault(_template_path(path), {})
        op = operations[where]
        item[method.lower()] = _operation_schema(
            where, op, loose if op.open_body else asked, given, token=token
        )
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


def _operation_schema(
    where: RouteKey, op: Operation, asked: SchemaCollector, given: SchemaCollector, *, token: bool
) -> Schema:
    method, path = where
    found: Schema = {
        "operationId": _name(method, path),
        "summary": op.summary,
        "tags": [op.tag],
        "parameters": [
            *_path_parameters(path),
            *(_query_parameter(name, PARAMETERS[name]) for name in op.query),
            *starmap(_query_parameter, op.own.items()),
            *(_header_parameter(name, HEADERS[name]) for name in op.headers),
            *starmap(_header_parameter, op.own_headers.items()),
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


def _responses(op: Operation, given: SchemaCollector, *, token: bool) -> Schema:
    shape: Schema = {"type": "string"} if op.answer is None else given.of(op.answer)
    links: Schema = {_name(*where): _response_link(place, where) for place, where in op.leads_to.items()}
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


def _response_link(place: str, where: RouteKey) -> Schema:
    return {"operationId": _name(*where), "parameters": {_path_names(where[1])[0]: f"$response.body#{place}"}}


def _template_path(path: str) -> str:
    return _PATH_PARAMETER.sub(r"{\1}", path)


def _path_names(path: str) -> list[str]:
    return _PATH_PARAMETER.findall(path)


def _name(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z]\w*", _template_path(path))
    return "_".join([method.lower(), *words])


def _path_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _path_names(path)
    ]


def _query_parameter(name: str, parameter: Schema) -> Json:
    return {"name": name, "in": "query", "required": False, **parameter}


def _header_parameter(name: str, schema: Schema) -> Json:
    return {"name": name, "in": "header", "required": False, "schema": schema}


# ── openapi ────────────────────────────────────────────────────────────

EVERY: Final[Mapping[RouteKey, Operation]] = {**OPERATIONS, **ENGINE_OPERATIONS}

__all__ = ["EVERY", "Operation", "RouteKey", "document"]


# ── the app ─────────────────────────────────────────────────────────────────────────────────────────

BODY_BYTES = 64 << 20  # enough for a task whose workspace is base64 files; larger files belong in an image
# The paths of routes whose answers last as long as their readers like; Polar's is `/events`.
STREAMS = ("/v1/trajectories/stream", "/v1/sessions/live", "/events")
STREAM_RETRY_S = 10.0  # after which a client may ask again for a stream that has no place
OPEN_PATHS = ("/healthz", "/readyz")  # probes send no token, and the answers reveal nothing
OPEN_PREFIX = "/ui/"  # the page's public files; the page asks its user for the token


@frozen(kw_only=True)
class Extension:
    """What another package adds to the control plane: rows of the route table, their OpenAPI operations, and
    headers that carry the token besides `Authorization`.

    `basic`: its routes also take the token as the password of HTTP's basic authentication, for clients that
    send nothing else.
    """

    rows: tuple[RouteRow, ...]
    operations: Mapping[RouteKey, Operation] = field(factory=dict)
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

    If `token` is None, every request that `guard` lets pass is accepted: bind the app to a loopback address
    only. Without a `guard` the app serves every host name if there is a token, else only loopback names.
    """
    extensions = tuple(extensions)
    app = QuartTrio("polarnode.control_plane", static_folder=None)
    app.url_map.merge_slashes = False  # otherwise a path with // is answered by a redirect, in HTML
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
        _require_token(app, f"Bearer {token}".encode(), headers, basic)
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


NO_TOKEN_MESSAGE = (
    "this needs the control plane's token: send it as 'Authorization: Bearer …'; polarnode's commands take"
    " --token or POLARNODE_TOKEN"
)
WRONG_TOKEN_MESSAGE = (
    "the token that was sent (polarnode's commands take --token or POLARNODE_TOKEN) is another than this"
    " control plane's: compare it with the POLARNODE_TOKEN that the node was started with"
)


def _require_token(app: QuartTrio, expected: bytes, headers: tuple[str, ...], basic: Container[str]) -> None:
    """Make every request show the token. `basic`: the paths that also take it as a password."""

    @app.before_request
    async def check_token() -> None:
        # This function is async although it waits for nothing, because Quart would run a plain function in a
        # thread.
        await trio.lowlevel.checkpoint()
        if request.path in OPEN_PATHS or request.path.startswith(OPEN_PREFIX):
            return
        sent = [
            request.headers.get("Authorization", ""),
            *(f"Bearer {request.headers.get(header, '')}" for header in headers),
        ]
        given, rule = request.authorization, request.url_rule
        if rule is not None and rule.rule in basic and given is not None and given.type == "basic":
            sent.append(f"Bearer {given.password}")
        # All of them are compared, so that the time does not reveal which one matched.
        if not sum(compare_digest(each.encode(), expected) for each in sent):
            raise Unauthorized(
                WRONG_TOKEN_MESSAGE if any(each.partition(" ")[2] for each in sent) else NO_TOKEN_MESSAGE
            )
        admit_request()


def _limit_streams(app: QuartTrio) -> None:
    """Keep some places of the socket free for requests that are not streams."""

    @app.before_request
    async def check_streams() -> None:
        # This function is async although it waits for nothing, because Quart would run a plain function in a
        # thread.
        await trio.lowlevel.checkpoint()
        place = slot_of(cast(HTTPScope, request.scope)) if request.path in STREAMS else None
        if place is not None and not place.open_stream():
            raise Busy(
                "as many streams are open as this node serves: end some, or read several tasks from one",
                retry_after=STREAM_RETRY_S,
            )


DOCUMENT_ROUTE = ("GET", "/v1/openapi.json")


def _document_row(
    rows: Iterable[RouteRow], operations: Mapping[RouteKey, Operation], *, token: bool
) -> RouteRow:
    body = dump_json(document([*(row[:2] for row in rows), DOCUMENT_ROUTE], operations, token=token))

    async def openapi() -> Response:
        # This function is async although it waits for nothing, because Quart would run a plain function in a
        # thread.
        await trio.lowlevel.checkpoint()
        read_query(request.args)
        return Response(body, content_type="application/json")

    return (*DOCUMENT_ROUTE, openapi)
