"""Polar's gateway: dispatches single sessions or captures them without a runtime, reads and ends them,
reports the node's health, and pauses and resumes generation.

No data of a session is dropped on request: a session that Polar deletes ends here and keeps what it has. The
numbers are those of our own status under Polar's names. Routes that would let another process be a node of
this one (`register`, `heartbeat`), or set a session's reward (`callbacks/session_result`), are not served.
"""

import logging
import time
from collections.abc import AsyncIterator, Iterator

import trio
from attrs import frozen
from quart import Response, request

from polarnode.api.service import NodeService, NotFound, json_response, turns_of
from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, Refused
from polarnode.core.status import CaptureStatus, LiveSessionStatus, SessionRecord
from polarnode.core.task import CAPTURE_HARNESS, CaptureEnd, CaptureSpec
from polarnode.engine.weight_values import PauseOrder
from polarnode.http.asgi import RouteRow
from polarnode.integrations.polar.answers import (
    body_object,
    count,
    dispatch_name,
    live_sessions,
    moment,
    polar_id,
    session_body,
    status_head,
)
from polarnode.integrations.polar.completions import completion_pieces
from polarnode.integrations.polar.tasks import MOST_TASKS, TaskRoutes, session_row
from polarnode.journal.values import TaskRecord
from polarnode.trainers.polar import PHASE_WORDS, Origin, with_origin

logger = logging.getLogger(__name__)

# ── sessions ────────────────────────────────────────────────────────────

SHOWN = 200


@frozen(kw_only=True)
class SessionRoutes:
    """The handlers."""

    service: NodeService
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
        """Create a session to run, if the body has `agent` and `session_id`; else a capture, whose harness
        the caller runs.
        """
        body = await body_object()
        return await (
            self._dispatch_session(body) if "agent" in body and "session_id" in body else self._capture(body)
        )

    async def _dispatch_session(self, body: dict[str, Json]) -> Response:
        session_id, task_id = body.pop("session_id"), body.get("task_id")
        if not isinstance(session_id, str) or not isinstance(task_id, str):
            raise Refused(
                "session_id and task_id name a dispatched session: both are strings", path="$.session_id"
            )
        name = dispatch_name(session_id)
        if await self.service.log.latest_run(name) is not None:
            raise Conflict(f"session {session_id} exists here: give each session an id of its own")
        body = {**body, "num_samples": 1, "timeout_seconds": body.pop("remaining_timeout_seconds", 600.0)}
        await self.tasks.take(
            body,
            name=name,
            origin=Origin(task_id=task_id, session_id=session_id),
            callback_format="polar_session",
        )
        return json_response(
            {
                "session_id": session_id,
                "task_id": task_id,
                "status": "REGISTERED",
                "node_id": self.service.node_id,
            }
        )

    async def _capture(self, body: dict[str, Json]) -> Response:
        """Polar's answer, and in addition the address and key at which the harness finds its model, which is
        on another socket than this one.
        """
        session_id, task_id = body.get("session_id"), body.get("task_id")
        if session_id is not None:
            raise Refused(
                "a capture's session_id is made here, and its key is no session_id: leave it out, and take"
                " both from the answer",
                path="$.session_id",
            )
        if task_id is not None and not isinstance(task_id, str):
            raise Refused("task_id must be a string", path="$.task_id")
        metadata = with_origin({}, Origin(task_id=task_id))
        opened = await self.service.captures.begin(CaptureSpec(metadata=metadata))
        found = await self._task_of(opened.session_id)
        return json_response(
            {
                "session_id": opened.session_id,
                "task_id": task_id or opened.task_id,
                "created_at": moment(found[1].submitted),
                "completion_count": 0,
                "status": "REGISTERED",
                "node_id": self.service.node_id,
                "api_key": opened.key,
                "base_urls": dict(opened.base_urls),
                "env": dict(opened.env),
            }
        )

    # ── out ───────────────────────────────────────────────────────────────────

    async def list(self) -> Response:
        """Sessions that are not over: those with runtimes, then captures. `status`, `task_id`, `limit`."""
        status, task_id, live = (
            request.args.get("status"),
            request.args.get("task_id"),
            live_sessions(self.service),
        )
        limit, rows, tasks = (
            count("limit", SHOWN, most=MOST_TASKS),
            list[Json](),
            dict[str, TaskRecord | None](),
        )
        every: list[LiveSessionStatus | CaptureStatus] = [*live.values(), *self.service.captures.list()]
        for each in every:
            if each.task_id not in tasks:
                tasks[each.task_id] = await self.service.log.task(each.task_id)
            row = self._row(tasks[each.task_id], each.session_id)
            if row is not None and status in (None, row["status"]) and task_id in (None, row["task_id"]):
                rows.append(row)
            if len(rows) == limit:
                break
        return json_response({"sessions": rows, "node_id": self.service.node_id})

    def _row(self, task: TaskRecord | None, session_id: str) -> dict[str, Json] | None:
        found = (
            next((one for one in task.sessions if one.session_id == session_id), None)
            if task is not None
            else None
        )
        if task is None or found is None:
            return None  # its place was given to another session meanwhile
        return {
            **session_row(task, found, live_sessions(self.service), node=self.service.node_id),
            "model_requested": task.spec.harness.model_name,
            "model_used": self.service.model_name,
            "api_type": None,
        }

    async def session(self, session_id: str) -> Response:
        """The state of a session, or its SessionResult when it is over."""
        session, task = await self._task_of(session_id)
        row = session_row(task, session, live_sessions(self.service), node=self.service.node_id)
        head: dict[str, Json] = {
            name: row[name]
            for name in ("session_id", "task_id", "created_at", "completion_count", "status", "node_id")
        }
        return Response(self._with_result(head, task, session), content_type="application/json")

    async def _with_result(
        self, head: dict[str, Json], task: TaskRecord, session: SessionRecord
    ) -> AsyncIterator[bytes]:
        yield dump_json(head)[:-1] + b',"result":'
        yield (
            b"null}"
            if session.outcome is None
            else await session_body(self.service.log, task, session, node=self.service.node_id) + b"}"
        )

    async def completions(self, session_id: str) -> Response:
        """All model calls of a session that are on disk, one after another."""
        session, task = await self._task_of(session_id)
        turns = await turns_of(self.service, session)
        head: dict[str, Json] = {"session_id": session_id, "node_id": self.service.node_id}
        requested = task.spec.harness.model_name
        pieces = completion_pieces(
            self.service.journal.reader.run_in_thread,
            head,
            turns,
            model=self.service.model_name,
            requested=requested,
        )
        return Response(pieces, content_type="application/json")

    async def delete(self, session_id: str) -> Response:
        """End the session. Its turns stay in the journal."""
        session, task = await self._task_of(session_id)
        if task.spec.harness.name == CAPTURE_HARNESS:
            await self.service.captures.end(session.session_id, CaptureEnd())
        elif len(task.sessions) == 1:
            await self.service.cancel(task.task_id)
        else:
            self.service.end_session(session.session_id)
        return json_response(
            {"session_id": session_id, "task_id": polar_id(task), "deleted": True, "messages_deleted": 0}
        )

    async def _task_of(self, session_id: str) -> tuple[SessionRecord, TaskRecord]:
        """A session by the id that its sender chose, or by ours."""
        dispatched = await self.service.log.latest_run(dispatch_name(session_id))
        if dispatched is not None:
            return dispatched.sessions[0], dispatched
        session = await self.service.log.session(session_id)
        task = None if session is None else await self.service.log.task(session.task_id)
        if session is None or task is None:
            raise NotFound("Session not found")
        return session, task


# ── nodes ────────────────────────────────────────────────────────────

HEARTBEAT_INTERVAL_S = 30  # Polar's own number; no heartbeats are sent here, so the last one is always now
LISTED = 1000  # tasks listed in a status: a megabyte of names


@frozen(kw_only=True)
class PolarNodeRoutes:
    """The handlers."""

    service: NodeService

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("GET", "/health", self.health),
            ("GET", "/nodes", self.nodes),
            ("GET", "/nodes/<node_id>", self.node),
            ("GET", "/rollout/status", self.status),
            ("GET", "/admin/inference/status", self.inference),
            ("POST", "/admin/inference/pause", self.pause),
            ("POST", "/admin/inference/resume", self.resume),
            ("POST", "/admin/policy_version", self.policy_version),
            ("POST", "/rollout/admin/inference/pause", self.pause_all),
            ("POST", "/rollout/admin/inference/resume", self.resume_all),
            ("POST", "/rollout/admin/policy_version", self.show_policy_version_all),
        )

    async def health(self) -> Response:
        """The health of the rollout server and the gateway in one."""
        await trio.lowlevel.checkpoint()
        counts, live, figures = self._metrics(), live_sessions(self.service).values(), self.service.figures()
        words = [PHASE_WORDS[status.phase] for status in live]
        sessions: list[Json] = [
            {"session_id": each.session_id, "task_id": each.task_id, "status": PHASE_WORDS[each.phase]}
            for each in live
        ]
        return json_response(
            {
                "status": "ok",
                "nodes": 1,
                "node_id": self.service.node_id,
                "gateway_url": _own_url(),
                "inference": {"status": "ok" if self.service.ready() else "error"},
                "metrics": counts,
                "active_status_counts": {word: words.count(word) for word in dict.fromkeys(words)},
                "active_sessions": sessions,
                **{
                    f"available_{word}": max(0, figures.stages[name].limit - figures.stages[name].inside)
                    for name, word in (("init", "init"), ("run", "run"), ("post", "postrun"))
                    if name in figures.stages
                },
            }
        )

    async def nodes(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response([self._info()])

    async def node(self, node_id: str) -> Response:
        await trio.lowlevel.checkpoint()
        if node_id != self.service.node_id:
            raise NotFound("Node not found")
        return json_response(self._info())

    async def status(self) -> Response:
        """The newest tasks with their statuses, the sessions under way, and the node."""
        tasks: dict[str, Json] = {}
        for task in await self.service.log.tasks(limit=LISTED):
            tasks.setdefault(polar_id(task), status_head(task)["status"])
        return json_response(
            {
                "tasks": tasks,
                "pipeline": {"pending_sessions": len(live_sessions(self.service))},
                "nodes": [self._info()],
            }
        )

    def _info(self) -> dict[str, Json]:
        stages = self.service.figures().stages
        workers: dict[str, Json] = {
            f"max_{word}_workers": stages[name].limit
            for name, word in (("init", "init"), ("run", "run"), ("post", "postrun"))
            if name in stages
        }
        return {
            "node_id": self.service.node_id,
            "gateway_url": _own_url(),
            **workers,
            "metrics": self._metrics(),
            "dispatch_reservations": 0,
            "healthy": self.service.ready(),
            "draining": False,
            "heartbeat_interval_seconds": HEARTBEAT_INTERVAL_S,
            "last_heartbeat": moment(time.time()),
        }

    def _metrics(self) -> dict[str, Json]:
        stages = self.service.figures().stages

        def of(name: str, count: str) -> int:
            return int(getattr(stages[name], count)) if name in stages else 0

        return {
            "init_queue_depth": of("live", "waiting") + of("init", "waiting"),
            "init_inflight": of("init", "inside"),
            "ready_depth": of("run", "waiting"),
            "run_inflight": of("run", "inside"),
            "postrun_queue_depth": of("post", "waiting"),
            "postrun_inflight": of("post", "inside"),
        }

    # ── generation held ───────────────────────────────────────────────────────

    async def inference(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response(self._inference_json())

    async def pause(self) -> Response:
        """Pause generation at once; it resumes where it stopped. There is no wait and no timeout."""
        await self.service.generation.pause(PauseOrder())
        return json_response(self._inference_json())

    async def resume(self) -> Response:
        await self.service.generation.resume()
        return json_response(self._inference_json())

    async def policy_version(self) -> Response:
        """The version that the engine serves. After a weight update a trainer asks whether it is `?version=`;
        the request changes nothing here.
        """
        await trio.lowlevel.checkpoint()
        return json_response({"policy_version": self._policy_version(self._asked_version())})

    # ── the same, as a rollout server answers for all of its gateways ───────────

    async def pause_all(self) -> Response:
        await self.service.generation.pause(PauseOrder())
        found = self._inference_json()
        return json_response(
            {
                "all_paused": found["paused"],
                "all_drained": found["drained"],
                "inflight": found["inflight"],
                "nodes": self._fan_out(found),
            }
        )

    async def resume_all(self) -> Response:
        await self.service.generation.resume()
        found = self._inference_json()
        return json_response({"all_resumed": not found["paused"], "nodes": self._fan_out(found)})

    async def show_policy_version_all(self) -> Response:
        """The version of all engines. `all_updated` is true if the engine serves `?version=`, so that a
        trainer whose weights do not arrive here stops at its first step.
        """
        await trio.lowlevel.checkpoint()
        version = self._asked_version()
        served = self._policy_version(version)
        return json_response(
            {
                "all_updated": served == version,
                "policy_version": version,
                "nodes": self._fan_out({"policy_version": served}),
            }
        )

    def _fan_out(self, response: dict[str, Json]) -> list[Json]:
        return [{"node_id": self.service.node_id, "status": "ok", "response": response}]

    def _asked_version(self) -> int:
        text = request.args.get("version", "")
        if not (text.isascii() and text.isdigit()):
            raise Refused(
                f"version must be the whole number of the trainer's weights, not {text!r}", path="?version"
            )
        return int(text)

    def _policy_version(self, asked: int) -> Json:
        """The engine's version: `asked` if the engine's version is that number, else its own text."""
        served = self.service.figures().engine.weight_version
        if served == str(asked):
            return asked
        logger.warning(
            "the trainer says that its weights have version %d and the engine serves %s: push them under that"
            " number, or sample from the trainer's own engines (docs/polar.md, Weights)",
            asked,
            served,
        )
        return served

    def _inference_json(self) -> dict[str, Json]:
        """`drained`: no token is being sampled. `inflight` are calls that are sampled and `held` those that
        wait: a bridge takes a pause for failed while `inflight` is not 0 (NVIDIA-NeMo/ProRL-Agent-Server,
        src/slime_bridge/rollout.py at 4be108f, `_gateway_generation_control`).
        """
        engine = self.service.figures().engine
        paused, calls = engine.paused is not None, sum(host.in_flight for host in engine.hosts)
        return {
            "paused": paused,
            "drained": paused or calls == 0,
            "inflight": 0 if paused else calls,
            "held": calls if paused else 0,
            "base_url": _own_url(),
            "engine": engine.kind,
            "request_timeout_seconds": None,
            "policy_version": engine.weight_version,
        }


def _own_url() -> str:
    return request.host_url.rstrip("/")
