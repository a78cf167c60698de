"""The control plane as a Quart app: settings, the token at the door, the table of routes.

The rules for whoever edits it. Quart's own time limits are off (they cut a stream silently); the limit on bodies is ours and has a reason.
Every route but the two for probes needs the token, and what is not in the table is a 404 with a sentence.
"""

from hmac import compare_digest

import trio
from quart import request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from polarnode.errors import PolarnodeError
from polarnode.shell.journal import Journal
from polarnode.web.control_plane.errors import Unauthorized, answer_error
from polarnode.web.control_plane.routes import Routes
from polarnode.web.control_plane.service import Service

BODY_BYTES = 64 << 20  # a task with its workspace as base64 files; what is larger belongs in an image
OPEN_PATHS = ("/healthz", "/readyz")  # a probe has no token, and learns nothing


def create_app(service: Service, *, token: str | None, journal: Journal) -> QuartTrio:
    """The app of the control plane. With `token` None every request is let in: bind it to a loopback address only."""
    app = QuartTrio("polarnode.control_plane", static_folder=None)
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None, MAX_CONTENT_LENGTH=BODY_BYTES)
    _guard(app, token)
    _route(app, Routes(service=service, journal=journal))
    app.register_error_handler(PolarnodeError, answer_error)
    app.register_error_handler(HTTPException, answer_error)
    return app


def _guard(app: QuartTrio, token: str | None) -> None:
    expected = None if token is None else f"Bearer {token}".encode()

    @app.before_request
    async def check_token() -> None:
        await trio.lowlevel.checkpoint()  # async though it waits for nothing: Quart would run a plain function in a thread
        if expected is None or request.path in OPEN_PATHS:
            return
        said = request.headers.get("Authorization", "").encode()
        if not compare_digest(said, expected):
            raise Unauthorized("this needs the control plane's token: send it as 'Authorization: Bearer …'")


def _route(app: QuartTrio, routes: Routes) -> None:
    table = (
        ("POST", "/v1/tasks", routes.submit),
        ("GET", "/v1/tasks", routes.tasks),
        ("GET", "/v1/tasks/<task_id>", routes.task),
        ("DELETE", "/v1/tasks/<task_id>", routes.cancel),
        ("GET", "/v1/trajectories/stream", routes.stream),
        ("POST", "/v1/trajectories/ack", routes.acknowledge),
        ("GET", "/v1/trajectories/<session_id>", routes.trajectory),
        ("GET", "/v1/sessions/<session_id>", routes.session),
        ("GET", "/v1/export", routes.export),
        ("GET", "/v1/status", routes.status),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/healthz", routes.healthz),
        ("GET", "/readyz", routes.readyz),
    )
    for method, path, handler in table:
        app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
