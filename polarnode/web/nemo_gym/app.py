"""The routes of a NeMo Gym agent server, as a Quart app.

The rule for whoever edits it: refusals are in the words Gym's own servers use (`{"detail"}`): 422 for what can not be asked, 409 for a rollout
id of another request, 503 while the node gives no answer, because that one is worth asking again.
"""

from typing import Final

import trio
from attrs import frozen
from quart import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from polarnode.conversation import Json
from polarnode.errors import PolarnodeError, Refused
from polarnode.web.handlers import RouteRow, body_json
from polarnode.web.nemo_gym.answers import aggregated, response, verify_response
from polarnode.web.nemo_gym.asked import Asked, read_responses, read_run
from polarnode.web.nemo_gym.rollouts import Rollouts
from polarnode.web.nemo_gym.template import Template
from polarnode.wire import dump_json, structure

BODY_BYTES: Final = 256 << 20  # the answers of a whole collection come back for their metrics, stripped of tokens
CAPTURED: Final = "/ng-rollout/<rollout_id>"  # before a path that Gym calls for a rollout with a name


def create_gym_app(rollouts: Rollouts, template: Template) -> QuartTrio:
    """The app. Whoever serves it runs `rollouts.follow` beside it."""
    app = QuartTrio("polarnode.nemo_gym", static_folder=None)
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None, MAX_CONTENT_LENGTH=BODY_BYTES)
    agent = _Agent(rollouts=rollouts, template=template)
    rows: tuple[RouteRow, ...] = (
        ("GET", "/", agent.alive),
        ("POST", "/run", agent.run),
        ("POST", "/v1/responses", agent.responses),
        ("POST", f"{CAPTURED}/v1/responses", agent.responses),
        ("POST", f"{CAPTURED}/training-token-capture/v1/responses", agent.responses),
        ("POST", "/aggregate_metrics", agent.aggregate),
    )
    for method, path, handler in rows:
        app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
    app.register_error_handler(PolarnodeError, _answer_error)
    app.register_error_handler(HTTPException, _answer_error)
    return app


@frozen(kw_only=True)
class AggregateRequest:
    """The body of `/aggregate_metrics`."""

    verify_responses: tuple[dict[str, Json], ...]


@frozen(kw_only=True)
class _Agent:
    """The handlers, with what they ask."""

    rollouts: Rollouts
    template: Template

    async def alive(self) -> Response:
        """Gym looks here before it asks for anything."""
        await trio.lowlevel.checkpoint()
        return _json({"server": "polarnode gym-agent"})

    async def run(self) -> Response:
        """One rollout of a dataset's row, scored."""
        asked = read_run(await body_json())
        found = await self.rollouts.run(self.template.task(asked), key=asked.key)
        return _json(await trio.to_thread.run_sync(verify_response, asked, found))

    async def responses(self, rollout_id: str | None = None) -> Response:
        """One rollout of an instruction alone."""
        asked: Asked = read_responses(await body_json(), rollout_id=rollout_id)
        found = await self.rollouts.run(self.template.task(asked), key=asked.key)
        return _json(await trio.to_thread.run_sync(response, asked.params, found))

    async def aggregate(self) -> Response:
        """The metrics of a collection."""
        said = structure(await body_json(), AggregateRequest)
        return _json(aggregated(list(said.verify_responses)))


def _json(value: Json, status: int = 200) -> Response:
    return Response(dump_json(value), status, content_type="application/json")


async def _answer_error(error: Exception) -> Response:
    await trio.lowlevel.checkpoint()  # async though it waits for nothing: Quart would run a plain function in a thread
    match error:
        case Refused():
            where = "" if error.path is None else f" (at {error.path})"
            return _json({"detail": f"{error}{where}"}, 422)
        case PolarnodeError():
            said = getattr(error, "status", None)  # the node's own answer, where it gave one
            return _json({"detail": str(error)}, said if said in (400, 401, 404, 409, 422, 429) else 503)
        case HTTPException():
            return _json({"detail": error.description or error.name}, error.code or 500)
    raise error
