"""The control plane as a Quart app: settings, the token, the table of routes, and the routes that
integrations add.

Quart's time limits are off, because they cut streams silently. The limit on request bodies is set here. Every
route except the two probes needs the token. What other sites' web pages send is refused. A path that is not
in the table is answered 404 with a message.
"""

from collections.abc import Iterable, Iterator, Mapping
from hmac import compare_digest
from pathlib import Path
from typing import cast

import trio
from attrs import field, frozen
from hypercorn.typing import HTTPScope
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from polarnode.api.openapi import EVERY, Operation, Where, document
from polarnode.api.query import read_query
from polarnode.api.routes import Routes
from polarnode.api.service import Service, Unauthorized, answer_error
from polarnode.core.codec.json import dump_json
from polarnode.core.errors import Busy, PolarnodeError
from polarnode.http.asgi import BrowserGuard, RouteRow, admit_request, guard_browsers
from polarnode.http.connections import place_of

BODY_BYTES = 64 << 20  # room for a task with its workspace as base64 files; larger files belong in an image
# whose answers last as long as their readers like: Polar's is `/events`
STREAMS = ("/v1/trajectories/stream", "/events")
STREAM_RETRY_S = 10.0  # between tries to open one more stream than the socket has places for
OPEN_PATHS = ("/healthz", "/readyz")  # probes have no token, and their answers reveal nothing


@frozen(kw_only=True)
class Extension:
    """What another package adds to the control plane: rows of the route table, their OpenAPI operations, and
    headers that carry the token besides `Authorization`.
    """

    rows: tuple[RouteRow, ...]
    operations: Mapping[Where, Operation] = field(factory=dict)
    token_headers: tuple[str, ...] = ()


def create_app(
    service: Service,
    *,
    token: str | None,
    guard: BrowserGuard | None = None,
    sessions_dir: Path | None = None,
    extensions: Iterable[Extension] = (),
) -> QuartTrio:
    """Create the control plane's app. `sessions_dir` is where the node keeps artifacts.

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
        _guard(app, f"Bearer {token}".encode(), headers)
    _limit_streams(app)
    rows = [*table(Routes(service=service, sessions_dir=sessions_dir))]
    operations = dict(EVERY)
    for extension in extensions:
        rows += extension.rows
        operations |= extension.operations
    for method, path, handler in (*rows, _document_row(rows, operations, token=token is not None)):
        app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
    app.register_error_handler(PolarnodeError, answer_error)
    app.register_error_handler(HTTPException, answer_error)
    return app


def _guard(app: QuartTrio, expected: bytes, headers: tuple[str, ...]) -> None:
    @app.before_request
    async def check_token() -> None:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        if request.path in OPEN_PATHS:
            return
        sent = [
            request.headers.get("Authorization", ""),
            *(f"Bearer {request.headers.get(header, '')}" for header in headers),
        ]
        # compare all of them, so that the time taken does not reveal which one matched
        if not sum(compare_digest(each.encode(), expected) for each in sent):
            raise Unauthorized("this needs the control plane's token: send it as 'Authorization: Bearer …'")
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


def table(routes: Routes) -> Iterator[RouteRow]:
    """The routes that every control plane has."""
    yield from (
        ("POST", "/v1/tasks", routes.submit),
        ("GET", "/v1/tasks", routes.tasks),
        ("GET", "/v1/tasks/<task_id>", routes.task),
        ("DELETE", "/v1/tasks/<task_id>", routes.cancel),
        ("GET", "/v1/trajectories/stream", routes.stream),
        ("POST", "/v1/trajectories/ack", routes.acknowledge),
        ("GET", "/v1/consumers", routes.consumers),
        ("DELETE", "/v1/consumers/<path:consumer>", routes.forget_consumer),
        ("GET", "/v1/trajectories/<session_id>", routes.trajectory),
        ("GET", "/v1/sessions/<session_id>", routes.session),
        ("GET", "/v1/sessions/<session_id>/artifacts", routes.artifacts),
        ("GET", "/v1/export", routes.export),
        ("GET", "/v1/status", routes.status),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/healthz", routes.healthz),
        ("GET", "/readyz", routes.readyz),
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
