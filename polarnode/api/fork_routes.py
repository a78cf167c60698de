"""The route that forks a session."""

from collections.abc import Iterator

from attrs import frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.service import NodeService, NotFound, json_response
from polarnode.core.codec.forks import fork_task, read_fork
from polarnode.core.codec.json import plain
from polarnode.core.errors import Refused
from polarnode.http.asgi import RouteRow, body_json


@frozen(kw_only=True)
class ForkRoutes:
    """The handler of forks."""

    service: NodeService

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the control plane's table."""
        yield ("POST", "/v1/sessions/<session_id>/fork", self.fork)

    async def fork(self, session_id: str) -> Response:
        """Submit a task of forks that is made from the parent's task. The answer is that of POST
        /v1/tasks.
        """
        read_query(request.args)
        order = read_fork(await body_json())
        session = await self.service.log.session(session_id)
        if session is None:
            raise NotFound(f"no session {session_id!r} is in the log: its task lists its sessions")
        task = await self.service.log.task(session.task_id)
        if task is None or task.damaged is not None:
            raise Refused(
                f"session {session_id!r} has no task that it can be forked by: it is a capture, or its task's"
                " row is damaged"
            )
        spec = fork_task(task.spec, session_id, order)
        submitted = await self.service.submit(spec, idempotency_key=request.headers.get("Idempotency-Key"))
        return json_response(plain(submitted), 202)
