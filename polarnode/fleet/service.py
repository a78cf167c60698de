"""Polar's rollout server over a fleet: its tasks are the front's, and what is read of one is answered by the
node that owns it.

Invariant: a task is submitted and cancelled by the front alone, so that both its journals have it. An id that
Polar uses again is looked up on every node, as its tasks may be on several.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, cast
from urllib.parse import quote

from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.app import Extension
from polarnode.api.service import NotFound, Service, json_response
from polarnode.client.values import ClientError
from polarnode.core.codec.json import structure
from polarnode.core.codec.tasks import read_task
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, Conflict, Refused
from polarnode.core.status import SessionRecord, Submitted
from polarnode.core.task import TaskSpec
from polarnode.fleet.front import Front
from polarnode.fleet.members import FleetMember
from polarnode.fleet.placement import BUSY_S
from polarnode.fleet.routes import passed, path_of_request
from polarnode.http.asgi import RouteRow
from polarnode.integrations.polar.answers import answered, task_name
from polarnode.integrations.polar.tasks import TaskRoutes
from polarnode.journal.values import TaskRecord
from polarnode.trainers.polar import origin_of

ADMIN: Final = ("inference/pause", "inference/resume", "policy_version")
OF_ALL: Final = tuple(f"/rollout/admin/{each}" for each in ADMIN)
OF_ONE: Final = (
    *(("POST", f"/admin/{each}") for each in ADMIN),
    ("GET", "/admin/inference/status"),
    ("GET", "/rollout/status"),
    ("GET", "/events"),
    ("GET", "/sessions"),
    ("POST", "/sessions"),
    ("GET", "/sessions/<session_id>"),
    ("DELETE", "/sessions/<session_id>"),
    ("GET", "/sessions/<session_id>/completions"),
)
LISTED: Final = 200  # tasks of a list without a limit, as Polar has it


@frozen(kw_only=True)
class FleetRuns:
    """What `TaskRoutes` needs of a journal to take a task: the last one of a name, on any node."""

    front: Front

    async def latest_run(self, name: str) -> TaskRecord | None:
        answers = await self.front.lookup.ask_all("GET", f"/v1/fleet/runs/{quote(name, safe='')}")
        found = [_record(answer) for _, answer in answers if not isinstance(answer, Exception)]
        return max(found, key=lambda each: (origin_of(each.spec.metadata).run, each.submitted), default=None)

    async def task(self, task_id: str) -> TaskRecord | None:
        owner = await self.front.lookup.find(task_id)
        if owner is None:
            return None
        return _record(await owner.link.call("GET", f"/v1/tasks/{quote(task_id, safe='')}"))

    async def flushed(self) -> None:
        """The nodes answer when a task is on their disks."""


@frozen(kw_only=True)
class FleetTasks:
    """What `TaskRoutes` needs of a node to take a task. Folders that tasks mount are the nodes' own affair:
    none can be named here.
    """

    front: Front
    journal: FleetRuns
    volumes: tuple[str, ...] = ()
    node_id: str = "fleet"

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        try:
            return await self.front.submit(spec, idempotency_key=idempotency_key)
        except ClientError as error:
            match error.status:
                case 400:
                    raise Refused(str(error)) from error
                case 409:
                    raise Conflict(str(error)) from error
            raise Busy(str(error), retry_after=BUSY_S) from error


def _record(answer: dict[str, Any]) -> TaskRecord:
    """A node's answer about a task as the value that it was made of."""
    sessions = [{name: each[name] for name in each if name != "status"} for each in answer["sessions"]]
    return TaskRecord(
        task_id=answer["task_id"],
        group_id=answer["group_id"],
        spec=read_task(answer["spec"]),
        idempotency_key=answer["idempotency_key"],
        submitted=answer["submitted"],
        sessions=tuple(structure(each, SessionRecord) for each in sessions),
    )


@define(eq=False, kw_only=True)
class PolarRoutes:
    """The handlers."""

    front: Front
    hold: Callable[[bool], None] | None = None  # a pause or its end, for nodes that join
    tasks: TaskRoutes = field(init=False)

    def __attrs_post_init__(self) -> None:
        taken = FleetTasks(front=self.front, journal=FleetRuns(front=self.front))
        self.tasks = TaskRoutes(cast("Service", taken))

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("POST", "/rollout/task/submit", self.tasks.submit),
            ("GET", "/rollout/task/<task_id>", self.read),
            ("DELETE", "/rollout/task/<task_id>", self.cancel),
            ("GET", "/tasks", self.list),
            ("GET", "/tasks/<task_id>/sessions", self.read),
            ("GET", "/nodes", self.nodes),
            ("GET", "/health", self.health),
            ("GET", "/nodes/<node_id>", self.node),
        )
        yield from (("POST", path, self.of_all) for path in OF_ALL)
        yield from ((method, path, self.of_one) for method, path in OF_ONE)

    async def read(self, task_id: str) -> Response:
        """As the node that owns the task answers."""
        _, owner = await self._owner(task_id)
        return passed(await owner.link.ask("GET", path_of_request()))

    async def cancel(self, task_id: str) -> Response:
        """Cancel in both journals. An id that no node has is refused when it comes, where that is asked."""
        try:
            name, owner = await self._owner(task_id)
        except NotFound:
            return await self.tasks.cancel(task_id)
        cancelled = await self.front.cancel(name)
        path = f"/rollout/task/{quote(task_id, safe='')}?results=false"
        head = await owner.link.call("GET", path)
        shown = {name: head[name] for name in ("task_id", "status", "total_sessions", "completed_sessions")}
        return json_response({**shown, "cancelled": bool(cancelled)})

    async def _owner(self, task_id: str) -> tuple[str, FleetMember]:
        """The task of Polar's id, or of ours, and the node that owns it."""
        latest = await self.tasks.service.journal.latest_run(task_name(task_id))
        name = task_id if latest is None else latest.task_id
        owner = await self.front.lookup.find(name)
        if owner is None:
            raise NotFound("Task not found")
        return name, owner

    async def list(self) -> Response:
        """Of all nodes, the newest first; of an id the one that changed last."""
        rows: dict[str, Any] = {}
        for _, answer in await self.front.lookup.ask_all("GET", path_of_request()):
            for row in [] if isinstance(answer, Exception) else answer["tasks"]:
                if row["updated_at"] >= rows.get(row["task_id"], row)["updated_at"]:
                    rows[row["task_id"]] = row
        newest = sorted(rows.values(), key=lambda row: -row["created_at"])
        limit = request.args.get("limit", str(LISTED))
        return json_response({"tasks": _json(newest[: int(limit) if limit.isdigit() else LISTED])})

    async def nodes(self) -> Response:
        answers = await self.front.lookup.ask_all("GET", "/nodes")
        return json_response(_json([row for _, each in answers if isinstance(each, list) for row in each]))

    async def node(self, node_id: str) -> Response:
        """The row of one node, as it answers."""
        answers = await self.front.lookup.ask_all("GET", path_of_request())
        for _, answer in answers:
            if isinstance(answer, dict):
                return json_response(answer)
        raise NotFound(f"no node {node_id!r} is in this fleet: look at GET /nodes")

    async def of_all(self) -> Response:
        """What a rollout server answers for its gateways: the answers of all nodes as one."""
        answers = await self.front.lookup.ask_all("POST", path_of_request())
        if not answers:
            raise Busy("no node of the fleet answers", retry_after=BUSY_S)
        if not [each for _, each in answers if isinstance(each, dict)]:
            raise answers[0][1]
        if self.hold is not None and not request.path.endswith("policy_version"):
            self.hold(request.path.endswith("pause"))
        return json_response(joined_admin([(member.name, answer) for member, answer in answers]))

    async def of_one(self, **_: str) -> Response:
        """What each node answers for itself alone."""
        nodes = ", ".join(each.link.url for each in self.front.roster.members.values())
        raise NotFound(f"{request.path} is of one node: send it to a node of this fleet ({nodes})")

    async def health(self) -> Response:
        """Whether the fleet takes tasks; each node's own is among GET /nodes."""
        up = len(self.front.roster.in_state("up"))
        healthy = self.front.in_office and up > 0
        return json_response({"status": "ok" if healthy else "error", "node_id": "fleet", "nodes": up})


def joined_admin(answers: list[tuple[str, Any]]) -> dict[str, Json]:
    """One answer of several nodes below /rollout/admin; a node that gave an error makes `all_…` false."""
    found = [answer for _, answer in answers if isinstance(answer, dict)]
    failed: list[Json] = [
        {"node_id": name, "status": "error", "response": {"error": str(answer)}}
        for name, answer in answers
        if not isinstance(answer, dict)
    ]
    joined: dict[str, Json] = {**found[0]}
    for name in joined:
        if name.startswith("all_"):
            joined[name] = not failed and all(each[name] for each in found)
    if "inflight" in joined:
        joined["inflight"] = sum(each["inflight"] for each in found)
    return {**joined, "nodes": [*(row for each in found for row in each["nodes"]), *failed]}


def _json(rows: list[Any]) -> list[Json]:
    return list[Json](rows)


def polar_routes(front: Front, hold: Callable[[bool], None] | None = None) -> Extension:
    """Polar's routes of a fleet."""
    routes = PolarRoutes(front=front, hold=hold)
    rows = tuple((method, path, answered(handler)) for method, path, handler in routes.rows())
    return Extension(rows=rows, token_headers=("X-Polar-Control-Token",), basic=True)
