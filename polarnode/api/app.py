"""The control plane as a Quart app: settings, the token at the door, the table of routes.

The rules for whoever edits it. Quart's own time limits are off (they cut a stream silently); the limit on
bodies is ours and has a reason. Every route but the two for probes needs the token, and what is not in the
table is a 404 with a sentence.
"""

from collections.abc import Iterable, Iterator
from hmac import compare_digest
from pathlib import Path

import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from polarnode.api.openapi import EVERY, document
from polarnode.api.query import read_query
from polarnode.api.routes import Routes
from polarnode.api.service import Service, Unauthorized, answer_error
from polarnode.core.codec.json import dump_json
from polarnode.core.errors import PolarnodeError
from polarnode.http.asgi import RouteRow
from polarnode.journal.journal import Journal

BODY_BYTES = 64 << 20  # a task with its workspace as base64 files; what is larger belongs in an image
OPEN_PATHS = ("/healthz", "/readyz")  # a probe has no token, and learns nothing


def create_app(
    service: Service,
    *,
    token: str | None,
    journal: Journal,
    sessions_dir: Path | None = None,
    also: Iterable[RouteRow] = (),
) -> QuartTrio:
    """The app of the control plane; `sessions_dir` is where the node keeps artifacts, `also` are rows of
    other rooms.

    With `token` None every request is let in: bind it to a loopback address only.
    """
    app = QuartTrio("polarnode.control_plane", static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,
        BODY_TIMEOUT=None,
        MAX_CONTENT_LENGTH=BODY_BYTES,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    _guard(app, token)
    rows = (*table(Routes(service=service, journal=journal, sessions_dir=sessions_dir)), *also)
    _route(app, (*rows, _document_row(rows, token=token is not None)))
    app.register_error_handler(PolarnodeError, answer_error)
    app.register_error_handler(HTTPException, answer_error)
    return app


def _guard(app: QuartTrio, token: str | None) -> None:
    expected = None if token is None else f"Bearer {token}".encode()

    @app.before_request
    async def check_token() -> None:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        if expected is None or request.path in OPEN_PATHS:
            return
        # the same token, as bridges of Polar's send it
        polar = f"Bearer {request.headers.get('X-Polar-Control-Token', '')}"
        bearer = request.headers.get("Authorization", "")
        if not compare_digest(bearer.encode(), expected) | compare_digest(polar.encode(), expected):
            raise Unauthorized("this needs the control plane's token: send it as 'Authorization: Bearer …'")


def table(routes: Routes) -> Iterator[RouteRow]:
    """The rows that every control plane has."""
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


def _document_row(rows: Iterable[RouteRow], *, token: bool) -> RouteRow:
    body = dump_json(document([*(row[:2] for row in rows), DOCUMENT], EVERY, token=token))

    async def told() -> Response:
        # async though it waits for nothing: Quart would run a plain function in a thread
        await trio.lowlevel.checkpoint()
        read_query(request.args)
        return Response(body, content_type="application/json")

    return (*DOCUMENT, told)


def _route(app: QuartTrio, rows: Iterable[RouteRow]) -> None:
    for method, path, handler in rows:
        app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
