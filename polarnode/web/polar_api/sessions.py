"""Polar's gateway: sessions dispatched one by one or captured without a runtime, looked at, and ended.

The rule for whoever edits it: nothing of a session is dropped because somebody asks for it; what Polar deletes, ends here with what it has.
"""

from collections.abc import AsyncIterator, Iterator

from attrs import frozen
from quart import Response, request

from polarnode.conversation import Json
from polarnode.errors import Conflict, Refused
from polarnode.shell.captures.capture import HARNESS, CaptureStatus
from polarnode.shell.glances import SessionStatus
from polarnode.shell.journal import SessionRecord, TaskRecord
from polarnode.shell.polar_results import polar_id, session_body
from polarnode.tasks import CaptureEnd, CaptureSpec
from polarnode.trainers.polar import Origin, with_origin
from polarnode.web.control_plane.errors import NotFound, json_response
from polarnode.web.handlers import RouteRow
from polarnode.web.polar_api.answers import body_object, count, moment
from polarnode.web.polar_api.completions import completion_pieces
from polarnode.web.polar_api.house import PolarHouse
from polarnode.web.polar_api.names import dispatch_name
from polarnode.web.polar_api.tasks import MOST_TASKS, TaskRoutes, session_row
from polarnode.wire import dump_json

SHOWN = 200


@frozen(kw_only=True)
class SessionRoutes:
    """The handlers, with what they ask."""

    house: PolarHouse
    tasks: TaskRoutes

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("GET", "/sessions", self.list),
            ("POST", "/sessions", self.create),
            ("GET", "/sessions/<session_id>", self.session),
            ("GET", "/sessions/<session_id>/completions", self.completions),
            ("DELETE", "/sessions/<session_id>", self.delete),
        )

    # ── in ────────────────────────────────────────────────────────────────────

    async def create(self) -> Response:
        """With `agent` and `session_id` a session to run; else a capture, whose harness its caller runs."""
        told = await body_object()
        return await (self._dispatched(told) if "agent" in told and "session_id" in told else self._captured(told))

    async def _dispatched(self, told: dict[str, Json]) -> Response:
        session_id, task_id = told.pop("session_id"), told.get("task_id")
        if not isinstance(session_id, str) or not isinstance(task_id, str):
            raise Refused("session_id and task_id name a dispatched session: both are texts", path="$.session_id")
        name = dispatch_name(session_id)
        if await self.house.journal.latest_run(name) is not None:
            raise Conflict(f"session {session_id} is known here: give each session an id of its own")
        told = {**told, "num_samples": 1, "timeout_seconds": told.pop("remaining_timeout_seconds", 600.0)}
        await self.tasks.take(told, name=name, origin=Origin(task_id=task_id, session_id=session_id), callback_format="polar_session")
        return json_response({"session_id": session_id, "task_id": task_id, "status": "REGISTERED", "node_id": self.house.node_id})

    async def _captured(self, told: dict[str, Json]) -> Response:
        """What Polar answers, and besides where and with which key the harness finds its model: on a socket of its own, not on this one."""
        session_id, task_id = told.get("session_id"), told.get("task_id")
        if session_id is not None:
            raise Refused(
                "a capture's session_id is made here, and its key is no session_id: leave it out, and take both from the answer", path="$.session_id"
            )
        if task_id is not None and not isinstance(task_id, str):
            raise Refused("task_id must be a text", path="$.task_id")
        metadata = with_origin({}, Origin(task_id=task_id))
        opened = await self.house.captures.begin(CaptureSpec(metadata=metadata))
        found = await self._task_of(opened.session_id)
        return json_response(
            {
                "session_id": opened.session_id,
                "task_id": task_id or opened.task_id,
                "created_at": moment(found[1].submitted),
                "completion_count": 0,
                "status": "REGISTERED",
                "node_id": self.house.node_id,
                "api_key": opened.key,
                "base_urls": dict(opened.base_urls),
                "env": dict(opened.env),
            }
        )

    # ── out ───────────────────────────────────────────────────────────────────

    async def list(self) -> Response:
        """Sessions that are not over: those with runtimes, then captures. `status`, `task_id`, `limit`."""
        status, task_id, live = request.args.get("status"), request.args.get("task_id"), self.house.live()
        limit, rows, tasks = count("limit", SHOWN, most=MOST_TASKS), list[Json](), dict[str, TaskRecord | None]()
        every: list[SessionStatus | CaptureStatus] = [*live.values(), *self.house.captures.list()]
        for each in every:
            if each.task_id not in tasks:
                tasks[each.task_id] = await self.house.journal.task(each.task_id)
            row = self._row(tasks[each.task_id], each.session_id)
            if row is not None and status in (None, row["status"]) and task_id in (None, row["task_id"]):
                rows.append(row)
            if len(rows) == limit:
                break
        return json_response({"sessions": rows, "node_id": self.house.node_id})

    def _row(self, task: TaskRecord | None, session_id: str) -> dict[str, Json] | None:
        found = next((one for one in task.sessions if one.session_id == session_id), None) if task is not None else None
        if task is None or found is None:
            return None  # its place was given to a fresh one meanwhile
        return {**session_row(task, found, self.house.live(), node=self.house.node_id), **self._models(task)}

    def _models(self, task: TaskRecord) -> dict[str, Json]:
        return {"model_requested": task.spec.harness.model_name, "model_used": self.house.model, "api_type": None}

    async def session(self, session_id: str) -> Response:
        """Where it is; its SessionResult when it is over."""
        session, task = await self._task_of(session_id)
        row = session_row(task, session, self.house.live(), node=self.house.node_id)
        head: dict[str, Json] = {name: row[name] for name in ("session_id", "task_id", "created_at", "completion_count", "status", "node_id")}
        return Response(self._with_result(head, task, session), content_type="application/json")

    async def _with_result(self, head: dict[str, Json], task: TaskRecord, session: SessionRecord) -> AsyncIterator[bytes]:
        yield dump_json(head)[:-1] + b',"result":'
        yield b"null}" if session.outcome is None else await session_body(self.house.journal, task, session, node=self.house.node_id) + b"}"

    async def completions(self, session_id: str) -> Response:
        """Every model call that is on disk, one after another."""
        session, task = await self._task_of(session_id)
        turns = await self.house.journal.turns(session.session_id)
        head: dict[str, Json] = {"session_id": session_id, "node_id": self.house.node_id}
        requested = task.spec.harness.model_name
        pieces = completion_pieces(self.house.journal.read, head, turns, model=self.house.model, requested=requested)
        return Response(pieces, content_type="application/json")

    async def delete(self, session_id: str) -> Response:
        """The session ends with what it has, and all of it stays in the journal."""
        session, task = await self._task_of(session_id)
        if task.spec.harness.name == HARNESS:
            await self.house.captures.end(session.session_id, CaptureEnd())
        elif len(task.sessions) == 1:
            await self.house.service.cancel(task.task_id)
        else:
            self.house.end_session(session.session_id)
        return json_response({"session_id": session_id, "task_id": polar_id(task), "deleted": True, "messages_deleted": 0})

    async def _task_of(self, session_id: str) -> tuple[SessionRecord, TaskRecord]:
        """A session by the id that its sender gave it, or by ours."""
        sent = await self.house.journal.latest_run(dispatch_name(session_id))
        if sent is not None:
            return sent.sessions[0], sent
        session = await self.house.journal.session(session_id)
        task = None if session is None else await self.house.journal.task(session.task_id)
        if session is None or task is None:
            raise NotFound("Session not found")
        return session, task
