"""The front's routes: those of a node, served for all of them.

Each finds the node, passes the request on, and answers as the node did; lists are joined. It makes no
decisions. What names a session goes to the node that has it; what names neither task nor session goes to all.
"""

from collections.abc import AsyncIterator, Iterator
from math import ceil
from typing import Any, Final
from urllib.parse import quote

import trio
from attrs import evolve, frozen
from quart import Response, request
from quart_trio import QuartTrio

from polarnode.api.query import PARQUET, Query, read_query
from polarnode.api.service import NotFound, error_json, json_response, readiness
from polarnode.client.requests import JSON_BODY
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.forks import fork_task, read_fork
from polarnode.core.codec.json import dump_json, plain, read_json
from polarnode.core.codec.tasks import MAX_EVALUATED, read_capture, read_evaluation, read_task
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, Refused
from polarnode.core.positions import Position
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.fleet.front import Front
from polarnode.fleet.link import NodeAnswer
from polarnode.fleet.members import FleetMember
from polarnode.fleet.placement import BUSY_S, models_of, one_model, queue_s
from polarnode.http.asgi import RouteRow, body_json

EVALUATIONS_JOINED: Final = "+"  # between the ids of a request's evaluations on several nodes
SCORE_S: Final = 1800.0  # without a byte: a teacher reads millions of tokens in minutes
END_S: Final = 420.0  # of a capture's end, as the client waits for it
ANY: Final = TaskSpec(instruction="", harness=HarnessSpec())  # a capture's or a score's place: any node
PASSED: Final = ("retry-after", "content-disposition")  # of a node's headers


def passed(answer: NodeAnswer) -> Response:
    """A node's answer as it is."""
    headers = {name.title(): each for name, each in answer.headers.items() if name in PASSED}
    kind = answer.headers.get("content-type", "application/json")
    return Response(answer.body, answer.status, headers, content_type=kind)


def answer_nodes_errors(app: QuartTrio) -> None:
    """Answer what a node refuses as the node does, and 503 for one that does not answer."""

    async def refused(error: ClientError) -> Response:
        await trio.lowlevel.checkpoint()
        wait = {} if error.retry_after is None else {"Retry-After": str(ceil(error.retry_after))}
        return json_response(error_json(error.type, str(error), error.path), error.status, wait)

    async def unreachable(error: Unreachable) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response(error_json("unreachable", str(error)), 503, {"Retry-After": str(ceil(BUSY_S))})

    app.register_error_handler(ClientError, refused)
    app.register_error_handler(Unreachable, unreachable)


def path_of_request() -> str:
    """The request's path with its query, as it is sent to a node."""
    text = request.query_string.decode()
    return quote(request.path, safe="/:%") + (f"?{text}" if text else "")


@frozen(kw_only=True)
class FrontRoutes:
    """The handlers."""

    front: Front

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("POST", "/v1/tasks", self.submit),
            ("GET", "/v1/tasks", self.tasks),
            ("GET", "/v1/tasks/<task_id>", self.task),
            ("DELETE", "/v1/tasks/<task_id>", self.cancel),
            ("GET", "/v1/trajectories/<session_id>", self.of_session),
            ("GET", "/v1/sessions/<session_id>", self.of_session),
            ("POST", "/v1/sessions/<session_id>/fork", self.fork),
            ("GET", "/v1/sessions/<session_id>/artifacts", self.of_session),
            ("GET", "/v1/sessions/<session_id>/snapshots", self.of_session),
            ("GET", "/v1/sessions/<session_id>/forks", self.of_session),
            ("GET", "/v1/sessions/<session_id>/log", self.of_session),
            ("GET", "/v1/logs", self.logs),
            ("GET", "/v1/logs/<path:name>", self.log),
            ("GET", "/v1/groups", self.groups),
            ("GET", "/v1/export", self.export),
            ("POST", "/v1/capture", self.begin_capture),
            ("GET", "/v1/capture", self.captures),
            ("GET", "/v1/capture/<session_id>", self.of_session),
            ("DELETE", "/v1/capture/<session_id>", self.end_capture),
            ("POST", "/v1/evaluations", self.evaluate),
            ("GET", "/v1/evaluations/<evaluation_id>", self.evaluation),
            ("POST", "/v1/score", self.score),
            ("GET", "/v1/status", self.status),
            ("GET", "/v1/fleet/nodes", self.nodes),
            ("POST", "/v1/fleet/drain", self.drain),
            ("GET", "/metrics", self.metrics),
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
        )

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(self) -> Response:
        """Answer 202 when the task is in two journals, or in that of the fleet's only node."""
        read_query(request.args)
        spec, key = read_task(await body_json()), request.headers.get("Idempotency-Key")
        return json_response(plain(await self.front.submit(spec, idempotency_key=key or None)), 202)

    async def tasks(self) -> Response:
        """The newest of all nodes. `before` is a task's id, which one node alone can place."""
        query = read_query(request.args, "limit", "before")
        if query.before is not None:
            owner = await self._owner(query.before)
            (found,) = [await owner.link.call("GET", f"/v1/tasks/{quote(query.before, safe='')}")]
            limit = float(found["submitted"])
        else:
            limit = float("inf")
        every: list[dict[str, Any]] = []
        for _, answer in await self.front.lookup.ask_all("GET", f"/v1/tasks?limit={query.limit}"):
            every += [] if isinstance(answer, Exception) else answer["tasks"]
        shown = sorted(
            (each for each in every if each["submitted"] < limit), key=lambda each: -each["submitted"]
        )
        return json_response({"tasks": list[Json](shown[: query.limit])})

    async def task(self, task_id: str) -> Response:
        owner = await self._owner(task_id)
        return passed(await owner.link.ask("GET", path_of_request()))

    async def cancel(self, task_id: str) -> Response:
        """Answered when both journals of the task know it."""
        read_query(request.args)
        cancelled = await self.front.cancel(task_id)
        if cancelled is None:
            raise _no_task(task_id)
        return json_response({"task_id": task_id, "cancelled": cancelled})

    async def _owner(self, task_id: str) -> FleetMember:
        owner = await self.front.lookup.find(task_id)
        if owner is None:
            raise _no_task(task_id)
        return owner

    async def groups(self) -> Response:
        """The newest of all nodes. A group that two journals have, as a task's homes may, is listed once."""
        query = read_query(request.args, "limit", "until", "state", "task_id")
        found: dict[str, dict[str, Any]] = {}
        for _, answer in await self.front.lookup.ask_all("GET", path_of_request()):
            for group in [] if isinstance(answer, Exception) else answer["groups"]:
                found.setdefault(group["task_id"], group)
        newest = sorted(found.values(), key=lambda group: -group["ended"])
        return json_response({"groups": list[Json](newest[: query.limit])})

    # ── sessions ──────────────────────────────────────────────────────────────

    async def of_session(self, session_id: str) -> Response:
        return passed(await self._ask_for(session_id, "GET"))

    async def fork(self, session_id: str) -> Response:
        """A task of forks, placed on the node that has their parent; answered as POST /v1/tasks is."""
        read_query(request.args)
        order, key = read_fork(await body_json()), request.headers.get("Idempotency-Key")
        found = await self.front.lookup.session(session_id)
        if found is None:
            raise _no_session(session_id)
        member, session = found
        task = await member.link.call("GET", f"/v1/tasks/{quote(session['task_id'], safe='')}")
        if task["spec"] is None:
            raise Refused(f"session {session_id!r} cannot be forked: its task's row is damaged")
        spec = fork_task(read_task(task["spec"]), session_id, order)
        return json_response(plain(await self.front.submit(spec, idempotency_key=key or None)), 202)

    async def end_capture(self, session_id: str) -> Response:
        body = await sent_body()
        return passed(await self._ask_for(session_id, "DELETE", body))

    async def _ask_for(self, session_id: str, method: str, body: bytes | None = None) -> NodeAnswer:
        """The answer of the node that has the session."""
        front, path = self.front, path_of_request()
        known = front.roster.of_journal(front.nodes_of_sessions.get(session_id, ""))
        headers = JSON_BODY if body else {}
        if known is not None and known.answers:
            found = await known.link.ask(method, path, body=body, headers=headers, timeout_s=END_S)
            if found.status != 404:
                return found
        for member, answer in await front.lookup.ask_all(
            "GET", f"/v1/sessions/{quote(session_id, safe='')}?arrays=base64"
        ):
            if not isinstance(answer, Exception):
                return await member.link.ask(method, path, body=body, headers=headers, timeout_s=END_S)
        self._insist_all(f"session {session_id!r} may be on")
        raise _no_session(session_id)

    def _insist_all(self, what: str) -> None:
        """Busy where a node does not answer."""
        silent = [each.name for each in self.front.roster.members.values() if not each.answers]
        if silent:
            raise Busy(f"{what} {', '.join(silent)}, which does not answer", retry_after=BUSY_S)

    async def logs(self) -> Response:
        """Those of all nodes that answer; a name begins with its node's: `node-1/engine-0`."""
        read_query(request.args)
        found = list[Json]()
        for member, answer in await self.front.lookup.ask_all("GET", "/v1/logs"):
            if not isinstance(answer, Exception):
                found += [{**each, "name": f"{member.name}/{each['name']}"} for each in answer["logs"]]
        return json_response({"logs": found})

    async def log(self, name: str) -> Response:
        node, _, rest = name.partition("/")
        named = [each for each in self.front.roster.members.values() if each.name == node]
        if not named or not rest:
            raise NotFound(
                f"no log is called {name!r}: a node's are NODE/node, NODE/engine-0 …; look at GET /v1/logs"
            )
        path = f"/v1/logs/{quote(rest)}?{request.query_string.decode()}"
        answer = await named[0].link.ask("GET", path)
        if answer.status >= 300:
            return passed(answer)
        return json_response({**answer.json, "name": name})

    async def export(self) -> Response:
        """Every node's lines, one node after another. A Parquet file cannot be joined from several."""
        query: Query = read_query(
            request.args, "arrays", "turns", "format", "kind", "task_id", "group_id", "outcome", "min_reward"
        )
        if query.format == PARQUET and len(self.front.roster.members) > 1:
            raise Refused(
                "format=parquet is written by one node: export from each node, or as lines", path="?format"
            )
        self._insist_all("an export would lack the sessions of")
        kind = "application/vnd.apache.parquet" if query.format == PARQUET else "application/x-ndjson"
        members = sorted(self.front.roster.members.values(), key=lambda each: each.link.url)
        return Response(_exported(members, path_of_request()), content_type=kind)

    # ── captures ──────────────────────────────────────────────────────────────

    async def begin_capture(self) -> Response:
        """Placed on a node, and answered with that node's address; all of one task on the same node."""
        body = await sent_body() or b"{}"
        spec = read_capture(read_json(body))
        member = await self.front.lookup.find(spec.task_id) if spec.task_id else None
        member = member or self.front.node_for(evolve(ANY, requires=spec.requires))
        answer = await member.link.ask("POST", "/v1/capture", body=body, headers=JSON_BODY)
        if answer.status < 300:
            self.front.nodes_of_sessions[answer.json["session_id"]] = member.journal
        return passed(answer)

    async def captures(self) -> Response:
        read_query(request.args)
        found, limit = list[Json](), 0
        for _, answer in await self.front.lookup.ask_all("GET", "/v1/capture"):
            if not isinstance(answer, Exception):
                found += answer["captures"]
                limit += answer["limit"]
        return json_response({"captures": found, "limit": limit})

    # ── evaluations and scores ────────────────────────────────────────────────

    async def evaluate(self) -> Response:
        """An evaluation on each node that has some of the sessions; its id joins theirs."""
        read_query(request.args)
        spec, key = read_evaluation(await body_json()), request.headers.get("Idempotency-Key")
        if len(spec.sessions) > MAX_EVALUATED:
            raise Refused(f"sessions must be at most {MAX_EVALUATED}", path="$.sessions")
        headers = {} if key is None else {"Idempotency-Key": key}
        answers = await self.front.lookup.ask_all("POST", "/v1/evaluations", value=spec, headers=headers)
        found = [answer for _, answer in answers if not isinstance(answer, Exception)]
        if not found:
            errors = [answer for _, answer in answers if isinstance(answer, ClientError)]
            raise errors[0] if errors else Busy("no node of the fleet answers", retry_after=BUSY_S)
        return json_response(_joined_evaluation(found), 202)

    async def evaluation(self, evaluation_id: str) -> Response:
        read_query(request.args)
        found: list[dict[str, Any]] = []
        for each in evaluation_id.split(EVALUATIONS_JOINED):
            for _, answer in await self.front.lookup.ask_all(
                "GET", f"/v1/evaluations/{quote(each, safe='')}"
            ):
                found += [] if isinstance(answer, Exception) else [answer]
        if not found:
            raise NotFound(f"no evaluation {evaluation_id!r} is in a journal of this fleet")
        return json_response(_joined_evaluation(found))

    async def score(self) -> Response:
        """By a node with little to do; `model` of the query names its model, where nodes serve several."""
        query = read_query(request.args, "arrays", "model")
        body, path = await sent_body(), f"/v1/score?arrays={query.arrays}"
        reports = self.front.roster.reports()
        model = one_model(query.model, reports, complete=len(reports) == len(self.front.roster.members))
        requires = {} if model is None else {"model": model}
        member = self.front.node_for(evolve(ANY, requires=requires))
        return passed(await member.link.ask("POST", path, body=body, headers=JSON_BODY, timeout_s=SCORE_S))

    # ── the fleet ─────────────────────────────────────────────────────────────

    async def status(self) -> Response:
        """The nodes with their reports; the sums that integrations read have a node's names."""
        read_query(request.args)
        await trio.lowlevel.checkpoint()
        return json_response(fleet_status(self.front))

    async def nodes(self) -> Response:
        read_query(request.args)
        await trio.lowlevel.checkpoint()
        return json_response(
            {"nodes": [node_json(self.front, each) for each in self.front.roster.members.values()]}
        )

    async def drain(self) -> Response:
        body = await body_json()
        match body:
            case {"node": str(node), "draining": bool(draining)}:
                return json_response(node_json(self.front, await self.front.drain(node, draining)))
        raise Refused('the body must be {"node": NAME, "draining": true or false}', path="$")

    async def metrics(self) -> Response:
        """The front's own figures; each node has its own at its own address."""
        await trio.lowlevel.checkpoint()
        return Response(exposition(self.front), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def healthz(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response({"ok": True})

    async def readyz(self) -> Response:
        await trio.lowlevel.checkpoint()
        if not self.front.in_office:
            return readiness("this front is not in office")
        return readiness(None if self.front.roster.in_state("up") else "no node of the fleet is up")


async def sent_body() -> bytes:
    body = await request.get_data(as_text=False)
    return body if isinstance(body, bytes) else body.encode()


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r} is in this fleet's journals: its task lists its sessions")


def _no_task(task_id: str) -> NotFound:
    return NotFound(f"no task {task_id!r} is in a journal of this fleet: look at GET /v1/tasks")


async def _exported(members: list[FleetMember], path: str) -> AsyncIterator[bytes]:
    for member in members:
        async with member.link.stream(path) as pieces:
            async for piece in pieces:
                yield piece  # noqa: ASYNC119 - Quart closes it, however the client leaves


def _joined_evaluation(found: list[dict[str, Any]]) -> dict[str, Json]:
    """One status of several nodes' evaluations. A session that one node does not know, another does."""
    sessions: dict[str, Any] = {}
    for each in found:
        for session in each["sessions"]:
            known = sessions.get(session["session_id"])
            if known is None or known["state"] == "refused":
                sessions[session["session_id"]] = session
    states = [session["state"] for session in sessions.values()]
    return {
        **found[0],
        "evaluation_id": EVALUATIONS_JOINED.join(each["evaluation_id"] for each in found),
        "finished": all(each["finished"] for each in found),
        "counts": {state: states.count(state) for state in dict.fromkeys(states)},
        "sessions": list[Json](sessions.values()),
    }


# ── figures ────────────────────────────────────────────────────────────


def node_json(front: Front, member: FleetMember) -> dict[str, Json]:
    """A node as `polarnode fleet status` shows it."""
    report: dict[str, Json] = {} if member.report is None else plain(member.report)
    return {
        "url": member.link.url,
        "name": member.name,
        "state": member.state,
        "seconds": round(trio.current_time() - member.since, 1),
        "problem": member.problem,
        "copies": len(member.rows or {}),
        "run_again": front.lost.get(member.name, 0),
        "report": report,
    }


def fleet_status(front: Front) -> dict[str, Json]:
    """GET /v1/status of a fleet."""
    members = list(front.roster.members.values())
    reports = [each.report for each in members if each.report is not None]
    up = [each.report for each in front.roster.in_state("up") if each.report is not None]
    versions = sorted({each.version for each in up if each.version is not None})
    models = models_of(reports)
    return {
        "node": "fleet",
        "front": {"id": front.id, "term": front.term, "in_office": front.in_office},
        "nodes": [node_json(front, each) for each in members],
        "model": {"name": models[0] if len(models) == 1 else "", "names": list[Json](models)},
        "weights": {"version": versions[0] if len(versions) == 1 else None, "versions": list[Json](versions)},
        "scheduler": {
            "live": sum(each.load.live for each in up),
            "slots": sum(each.load.slots for each in up),
            "queue_seconds": round(queue_s(front.roster.candidates()), 1),
        },
        "run_again": {**front.lost},
        "journal": {"last_seq": _last(front)},
    }


def _last(front: Front) -> str:
    """The position after all events there are."""
    members = front.roster.members.values()
    return Position({each.report.journal: each.report.last_seq for each in members if each.report}).text


METRICS: Final = (
    ("polarnode_fleet_nodes", "Nodes by state.", "gauge"),
    ("polarnode_fleet_slots", "Sessions that the nodes that are up run at once.", "gauge"),
    ("polarnode_fleet_live_sessions", "Sessions that are not over, on nodes that are up.", "gauge"),
    ("polarnode_fleet_queue_seconds", "Expected seconds of the sessions that wait, over all slots.", "gauge"),
    ("polarnode_fleet_held_results", "Results that wait for their second home.", "gauge"),
    (
        "polarnode_fleet_places_run_again_total",
        "Places of a dead node that others ran again since this front began; no retries of a task.",
        "counter",
    ),
    ("polarnode_fleet_in_office", "Whether this front decides.", "gauge"),
)


def exposition(front: Front) -> bytes:
    """The front's figures in Prometheus' text format."""
    up = [each.report for each in front.roster.in_state("up") if each.report is not None]
    states = [each.state for each in front.roster.members.values()]
    values: dict[str, dict[str, float]] = {
        "polarnode_fleet_nodes": {
            f'{{state="{each}"}}': states.count(each) for each in dict.fromkeys(states)
        },
        "polarnode_fleet_slots": {"": sum(each.load.slots for each in up)},
        "polarnode_fleet_live_sessions": {"": sum(each.load.live for each in up)},
        "polarnode_fleet_queue_seconds": {"": queue_s(front.roster.candidates())},
        "polarnode_fleet_held_results": {"": sum(each.held for each in up)},
        "polarnode_fleet_places_run_again_total": {
            f"{{node={dump_json(name).decode()}}}": count for name, count in front.lost.items()
        },
        "polarnode_fleet_in_office": {"": float(front.in_office)},
    }
    lines = [
        line
        for name, description, kind in METRICS
        for line in (
            f"# HELP {name} {description}",
            f"# TYPE {name} {kind}",
            *(f"{name}{labels} {value:g}" for labels, value in values[name].items()),
        )
    ]
    return "\n".join([*lines, ""]).encode()
