"""The control plane's own routes. Each reads the request, calls the service, and answers; it makes no
decisions.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import trio
from attrs import evolve, frozen
from quart import Response, request

from polarnode.api.exports import check_format, cursor_text, event_stream, export, file_pieces, format_json
from polarnode.api.metrics import CONTENT_TYPE, render_metrics
from polarnode.api.page import PageRoutes
from polarnode.api.query import FILTER_PARAMETERS, Ack, Query, last_event_id, read_query
from polarnode.api.service import NodeService, NotFound, json_response, readiness_response, turns_of
from polarnode.containers.files import artifacts_path
from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.codec.tasks import read_capture, read_capture_end, read_evaluation, read_task, task_json
from polarnode.core.codec.trajectories import (
    read_score_request,
    score_answer_json,
    session_end_json,
    trajectory_json,
    turns_json,
)
from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Conflict, Refused
from polarnode.core.status import ScoreAnswer, SessionRecord
from polarnode.core.trajectory import Trajectory
from polarnode.core.weights import AdapterReport, WeightsReport
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.memory import EngineControl
from polarnode.engine.scoring import ScoringEngines
from polarnode.engine.update import MessageMaker
from polarnode.engine.weight_values import (
    AdapterOrder,
    BroadcastBucket,
    GroupOrder,
    MemoryOrder,
    PauseOrder,
    Served,
    TensorBucket,
    UpdateOrder,
)
from polarnode.engine.weights import Weights
from polarnode.http.asgi import RouteRow, body_json, body_json_or, event_response
from polarnode.journal.damage import encode_trajectory
from polarnode.journal.log.port import LogUnavailable, NodeRow
from polarnode.journal.log.rules import with_log_status
from polarnode.journal.values import TaskRecord, check_consumer
from polarnode.rollouts.captures import Captures
from polarnode.rollouts.evaluations import Evaluations
from polarnode.rollouts.snapshots import list_snapshots
from polarnode.tokens.pieces import pieces_of

FORKS = 1000  # forks of one session in an answer: about 500 kB


# ── routes ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class ControlRoutes:
    """The handlers of the control plane\'s own routes."""

    service: NodeService
    sessions_dir: Path | None = None  # the folder in which the node keeps artifacts

    def rows(self) -> Iterator[RouteRow]:
        """The rows that every node's table has."""
        yield from PageRoutes(log=self.service.log).rows()
        yield from (
            ("POST", "/v1/tasks", self.submit),
            ("GET", "/v1/tasks", self.tasks),
            ("GET", "/v1/tasks/<task_id>", self.task),
            ("DELETE", "/v1/tasks/<task_id>", self.cancel),
            ("GET", "/v1/trajectories/stream", self.stream),
            ("POST", "/v1/trajectories/ack", self.acknowledge),
            ("GET", "/v1/consumers", self.consumers),
            ("DELETE", "/v1/consumers/<path:consumer>", self.forget_consumer),
            ("GET", "/v1/trajectories/<session_id>", self.trajectory),
            ("GET", "/v1/sessions/<session_id>", self.session),
            ("GET", "/v1/sessions/<session_id>/artifacts", self.artifacts),
            ("GET", "/v1/sessions/<session_id>/snapshots", self.snapshots),
            ("GET", "/v1/sessions/<session_id>/forks", self.forks),
            ("GET", "/v1/export", self.export),
            ("GET", "/v1/status", self.status),
            ("GET", "/metrics", self.metrics),
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
        )

    # ── tasks ─────────────────────────────────────────────────────────────────

    async def submit(self) -> Response:
        """Answer 202 when the task is in the log, from where it survives a crash of the node."""
        read_query(request.args)
        spec = read_task(await body_json())
        submitted = await self.service.submit(spec, idempotency_key=request.headers.get("Idempotency-Key"))
        return json_response(plain(submitted), 202)

    async def tasks(self) -> Response:
        query = read_query(request.args, "limit", "before")
        found = await self.service.log.tasks(limit=query.limit, before=query.before)
        return json_response({"tasks": [task_record_json(task) for task in found]})

    async def task(self, task_id: str) -> Response:
        read_query(request.args)
        found = await self._existing_task(task_id)
        spec = task_json(found.spec) if found.damaged is None else None
        return json_response(task_record_json(found) | {"spec": spec})

    async def cancel(self, task_id: str) -> Response:
        read_query(request.args)
        cancelled = await self.service.cancel(task_id)
        if not cancelled:
            await self._existing_task(task_id)
        return json_response({"task_id": task_id, "cancelled": cancelled})

    async def _existing_task(self, task_id: str) -> TaskRecord:
        found = await self.service.log.task(task_id)
        if found is None:
            raise NotFound(f"no task {task_id!r} is in the log: look at GET /v1/tasks")
        return found

    # ── trajectories ──────────────────────────────────────────────────────────

    async def stream(self) -> Response:
        options = (
            "consumer",
            "after",
            "begin",
            "follow",
            "kinds",
            "arrays",
            "turns",
            "format",
            *FILTER_PARAMETERS,
        )
        query = check_format(read_query(request.args, *options))
        if query.after is not None and query.begin == "newest":
            raise Refused("begin cannot go with after: send one of them", path="?begin")
        # The header comes before `after`, because a browser that reconnects repeats its first URL and adds
        # the header.
        start = last_event_id(request.headers.get("Last-Event-ID"))
        start = query.after if start is None else start
        log = self.service.log
        place = await log.last_cursor() if query.begin == "newest" else Cursor()
        if query.consumer is not None:
            place = await log.ensure_consumer(query.consumer, place, now=time.time())
        resumes = start is None and query.consumer is not None
        start = place if start is None else start
        return event_response(event_stream(log, query, start, resumes=resumes))

    async def acknowledge(self) -> Response:
        read_query(request.args)
        ack = structure(await body_json(), Ack, forbid_extra=True)
        log, consumer = self.service.log, check_consumer(ack.consumer)
        found = await log.acknowledge(consumer, ack.cursor, now=time.time())
        where: dict[str, Json] = {"position": found.position, "id": cursor_text(log, found)}
        return json_response({"consumer": consumer, **where, "pending": []})

    async def consumers(self) -> Response:
        read_query(request.args)
        return json_response({"consumers": [plain(each) for each in await self.service.log.consumers()]})

    async def forget_consumer(self, consumer: str) -> Response:
        """Delete a consumer. Refused while it reads a stream: its next acknowledgement would create it again
        at the beginning.
        """
        read_query(request.args)
        if any(each.connected for each in await self.service.log.consumers() if each.consumer == consumer):
            raise Conflict(f"a stream of consumer {consumer!r} is open: end it first")
        if not await self.service.log.forget_consumer(consumer):
            raise NotFound(f"there is no consumer {consumer!r}: look at GET /v1/consumers")
        return json_response({"consumer": consumer, "forgotten": True})

    async def trajectory(self, session_id: str) -> Response:
        query = check_format(read_query(request.args, "arrays", "turns", "format", "pieces"))
        found = await self.service.log.trajectory(session_id)
        if found is None:
            session = await self._existing_session(session_id)
            raise NotFound(
                f"session {session.session_id!r} is not over yet: its turns are at GET"
                f" /v1/sessions/{session.session_id}"
            )
        body = await self.service.journal.reader.run_in_thread(partial(self._trajectory_body, found, query))
        return Response(body, content_type="application/json")

    def _trajectory_body(self, trajectory: Trajectory, query: Query) -> bytes:
        if query.format is not None:
            return dump_json(format_json(query.format, trajectory, query.arrays))
        write = partial(trajectory_json, arrays=query.arrays, turns=query.turns)
        rows = [trace.token_ids for trace in trajectory.traces]
        pieces = {"pieces": plain(pieces_of(rows, self.service.token_bytes))} if query.pieces else {}
        return encode_trajectory(lambda whole: dump_json(write(whole) | pieces), trajectory)

    async def session(self, session_id: str) -> Response:
        """Everything of a session that is on disk, whether it is over or not: its turns in full, and its
        trajectory without them.
        """
        query = read_query(request.args, "arrays")
        record = await self._existing_session(session_id)
        turns = await turns_of(self.service, record)
        found = await self.service.log.trajectory(session_id)

        def body(found: Trajectory | None) -> bytes:
            left_out = () if found is None else found.left_out
            rows = turns_json(turns, left_out=left_out, arrays=query.arrays)
            whole = None if found is None else {**trajectory_json(found, arrays=query.arrays), "turns": []}
            return dump_json({"session": session_record_json(record), "turns": rows, "trajectory": whole})

        make = partial(body, None) if found is None else partial(encode_trajectory, body, found)
        return Response(
            await self.service.journal.reader.run_in_thread(make), content_type="application/json"
        )

    async def artifacts(self, session_id: str) -> Response:
        """The tar of the artifacts that its task names."""
        read_query(request.args)
        record = await self._existing_session(session_id)
        path = artifacts_path(self.sessions_dir or Path(), record.session_id)
        size = await trio.to_thread.run_sync(_size, path) if self.sessions_dir else None
        if size is None:
            raise NotFound(
                f"session {session_id!r} has no artifacts: its task names none in runtime.artifacts, or its"
                " harness has not ended"
            )
        headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{path.name}"'}
        return Response(file_pieces(path, size), 200, headers, content_type="application/x-tar")

    async def snapshots(self, session_id: str) -> Response:
        read_query(request.args)
        record = await self._existing_session(session_id)
        look = partial(list_snapshots, self.sessions_dir or Path(), record.session_id)
        return json_response(plain(await trio.to_thread.run_sync(look)))

    async def forks(self, session_id: str) -> Response:
        read_query(request.args)
        record = await self._existing_session(session_id)
        found = await self.service.log.forks(record.session_id, FORKS)
        return json_response(
            {"session_id": record.session_id, "forks": [session_record_json(each) for each in found]}
        )

    async def _existing_session(self, session_id: str) -> SessionRecord:
        found = await self.service.log.session(session_id)
        if found is None:
            raise NotFound(f"no session {session_id!r} is in the log: its task lists its sessions")
        return found

    async def export(self) -> Response:
        query = read_query(request.args, "arrays", "turns", "format", "kind", *FILTER_PARAMETERS)
        log = self.service.log
        return export(log, self.service.journal.reader.run_in_thread, query, await log.last_cursor())

    # ── the node ──────────────────────────────────────────────────────────────

    # Async though they wait for nothing: Quart would run plain functions in threads.

    async def status(self) -> Response:
        """The node, and the log as it stood seconds ago: an answer does not wait for it."""
        read_query(request.args)
        await trio.lowlevel.checkpoint()
        log, standing = self.service.log, self.service.log.log_status
        journal = with_log_status(self.service.journal.health.statistics(), standing, now=time.time())
        away = await log.unavailable_reason()
        kind = "postgresql" if log.shared else "sqlite"
        return json_response(
            {
                **self.service.status(),
                "queued": log.open_places,
                "log": {"kind": kind, "identity": standing.log, "away": away},
                **({"nodes": await self._nodes(away)} if log.shared else {}),
                "journal": plain(journal),
            }
        )

    async def _nodes(self, away: str | None) -> Json:
        """The nodes of a shared log; null while it is away."""
        with suppress(LogUnavailable):
            return None if away is not None else [_node_json(each) for each in await self.service.log.nodes()]
        return None

    async def metrics(self) -> Response:
        """The metrics in Prometheus text format, rendered in a thread."""
        read_query(request.args)
        began, log = trio.current_time(), self.service.log
        away = await log.unavailable_reason() is not None
        figures = evolve(
            self.service.figures(),
            pass_s=trio.current_time() - began,
            queued=log.open_places,
            log_position=log.log_status.position,
            log_unacknowledged_bytes=log.log_status.unacknowledged_bytes,
            log_away=away,
        )
        return Response(await trio.to_thread.run_sync(render_metrics, figures), content_type=CONTENT_TYPE)

    async def healthz(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response({"ok": True})

    async def readyz(self) -> Response:
        away = await self.service.log.unavailable_reason()
        why = self.service.unready()
        if why is None and away is not None:
            why = f"the log is away ({away}): sessions go on, and tasks are refused until it answers"
        return readiness_response(why)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _node_json(node: NodeRow) -> Json:
    """A node of the log as JSON, for the status of the fleet. A password in a URL is left out."""
    found = urlsplit(node.facts.url)
    host = found.netloc.rpartition("@")[2]
    return {
        "name": node.facts.name,
        "url": urlunsplit((found.scheme, host, found.path, "", "")),
        "state": node.state,
        "running": node.running,
        "draining": bool(node.report.get("draining")),
        "labels": dict(node.facts.labels),
        "serving": dict(node.serving),
        "version": node.facts.version,
    }


# ── records as JSON ───────────────────────────────────────────────────────────


def task_record_json(task: TaskRecord) -> dict[str, Json]:
    """A task and its sessions, without token arrays and without its spec."""
    statuses = ["pending" if one.outcome is None else one.outcome.status for one in task.sessions]
    return {
        "task_id": task.task_id,
        "group_id": task.group_id,
        "idempotency_key": task.idempotency_key,
        "submitted": task.submitted,
        "finished": task.finished,
        "counts": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
        "sessions": [session_record_json(one) for one in task.sessions],
        "damaged": task.damaged,
    }


def session_record_json(session: SessionRecord) -> dict[str, Json]:
    """A session without its turns; `status` is pending until it is over."""
    status = "pending" if session.outcome is None else session.outcome.status
    record: dict[str, Json] = plain(session)
    return {**record, "status": status}


# ── captures ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class CaptureRoutes:
    """The handlers of captures."""

    captures: Captures

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the control plane's table."""
        yield from (
            ("POST", "/v1/capture", self.begin),
            ("GET", "/v1/capture", self.list),
            ("GET", "/v1/capture/<session_id>", self.look),
            ("DELETE", "/v1/capture/<session_id>", self.end),
        )

    async def begin(self) -> Response:
        """Answer 201 when the capture is in the journal; 200 for a capture that was opened before and is
        still open.
        """
        read_query(request.args)
        opened = await self.captures.begin(read_capture(await body_json_or({})))
        return json_response(plain(opened), 201 if opened.created else 200)

    async def list(self) -> Response:
        """The open captures, without their keys."""
        read_query(request.args)
        await trio.lowlevel.checkpoint()
        return json_response(
            {
                "captures": [plain(status) for status in self.captures.list()],
                "limit": self.captures.limit,
            }
        )

    async def look(self, session_id: str) -> Response:
        """An open capture, or the outcome of one that is over."""
        read_query(request.args)
        status = self.captures.status(session_id)
        if status is not None:
            return json_response({**plain(status), "outcome": None})
        return self._ended(session_id, await self.captures.trajectory(session_id))

    async def end(self, session_id: str) -> Response:
        """End a capture. The answer is sent when its trajectory is on disk."""
        read_query(request.args)
        return self._ended(
            session_id, await self.captures.end(session_id, read_capture_end(await body_json_or({})))
        )

    def _ended(self, session_id: str, found: Trajectory | None) -> Response:
        if found is None:
            raise NotFound(
                f"no capture {session_id!r} is in this node's journal: those that are open are at GET"
                " /v1/capture"
            )
        return json_response(session_end_json(found))


# ── evaluations ────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class EvaluationRoutes:
    """The handlers of evaluations of finished sessions."""

    evaluations: Evaluations

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the control plane's table."""
        yield ("POST", "/v1/evaluations", self.begin)
        yield ("GET", "/v1/evaluations/<evaluation_id>", self.look)

    async def begin(self) -> Response:
        """Answer 202 when the evaluation is in the journal, from where it survives a crash of the node."""
        read_query(request.args)
        spec, key = read_evaluation(await body_json()), request.headers.get("Idempotency-Key")
        return json_response(plain(await self.evaluations.accept(spec, idempotency_key=key)), 202)

    async def look(self, evaluation_id: str) -> Response:
        read_query(request.args)
        found = await self.evaluations.status(evaluation_id)
        if found is None:
            raise NotFound(
                f"no evaluation {evaluation_id!r} is in this node's journal: retention prunes one with its"
                " last reward"
            )
        return json_response(plain(found))


# ── scoring ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class ScoreRoutes:
    """The handler of given rows, whose tokens get their logprobs."""

    scoring: ScoringEngines

    def rows(self) -> Iterator[RouteRow]:
        yield ("POST", "/v1/score", self.score)

    async def score(self) -> Response:
        """Score rows. Nothing of it is kept: a client that leaves ends it."""
        query = read_query(request.args, "arrays", "model")  # `model` was used already if nodes share the log
        asked = read_score_request(await body_json())
        found = ScoreAnswer(engine=asked.engine, arrays=query.arrays, rows=await self.scoring.answer(asked))
        make = partial(score_answer_json, found, query.arrays)
        return Response(await trio.to_thread.run_sync(make), content_type="application/json")


# ── weights and the engine ────────────────────────────────────────────────────

T = TypeVar("T")


@frozen(kw_only=True)
class WeightsRoutes:
    """The handlers of weights and the engine. `control` and `weights` never change the engine at the same
    time.
    """

    weights: Weights
    control: EngineControl

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("POST", "/v1/weights", self.update),
            ("GET", "/v1/weights", self.show),
            ("POST", "/v1/weights/updates", self.begin),
            ("POST", "/v1/weights/updates/<update_id>/buckets", self.add),
            ("POST", "/v1/weights/updates/<update_id>/commit", self.commit),
            ("DELETE", "/v1/weights/updates/<update_id>", self.give_up),
            ("POST", "/v1/weights/groups", self.join),
            ("DELETE", "/v1/weights/groups/<name>", self.leave),
            ("POST", "/v1/engine/pause", self.pause),
            ("POST", "/v1/engine/resume", self.resume),
            ("POST", "/v1/engine/memory/release", self.release),
            ("POST", "/v1/engine/memory/resume", self.take),
        )

    # ── weights ───────────────────────────────────────────────────────────────

    async def update(self) -> Response:
        """Answer 201 when the weights are now served, 200 when they were served already."""
        order = await _body(UpdateOrder)
        self._require_joined(order)
        return _report_response(await self.weights.update(order))

    async def show(self) -> Response:
        read_query(request.args, "model")
        history: list[Json] = [_served_json(each) for each in await self.weights.history()]
        return json_response({**plain(self.weights.status()), "history": history})

    async def begin(self) -> Response:
        order = await _body(UpdateOrder)
        self._require_joined(order)
        return json_response(plain(await self.weights.open(order)), 201)

    async def add(self, update_id: str) -> Response:
        return json_response(plain(await self.weights.add(update_id, await self._read_bucket(update_id))))

    async def commit(self, update_id: str) -> Response:
        read_query(request.args, "model")
        return _report_response(await self.weights.commit(update_id))

    async def give_up(self, update_id: str) -> Response:
        read_query(request.args, "model")
        await self.weights.give_up(update_id)
        return json_response(plain(self.weights.status()))

    async def _read_bucket(self, update_id: str) -> MessageMaker:
        """Read one bucket; the source of the update decides the body's shape."""
        if self.weights.opened(update_id).order.source.kind == "distributed":
            return self.control.received(update_id, await _body(BroadcastBucket))
        return self.control.mapped(await _body(TensorBucket))

    def _require_joined(self, order: UpdateOrder) -> None:
        if order.source.kind == "distributed":
            self.control.require_joined(order.source.group)

    # ── groups ────────────────────────────────────────────────────────────────

    async def join(self) -> Response:
        order = await _body(GroupOrder)
        await self.control.join(order)
        return json_response(
            {"name": order.name, "world_size": order.world_size, "rank_offset": order.rank_offset}, 201
        )

    async def leave(self, name: str) -> Response:
        read_query(request.args, "model")
        if not await self.control.leave(name):
            raise NotFound(f"no group {name!r} is joined")
        return json_response({"name": name})

    # ── the engine ────────────────────────────────────────────────────────────

    async def pause(self) -> Response:
        return json_response(plain(await self.weights.pause(await _body(PauseOrder, optional=True))))

    async def resume(self) -> Response:
        read_query(request.args, "model")
        return json_response(plain(await self.weights.resume()))

    async def release(self) -> Response:
        return json_response(plain(await self.control.release(await _body(MemoryOrder, optional=True))))

    async def take(self) -> Response:
        return json_response(plain(await self.control.take(await _body(MemoryOrder, optional=True))))


@frozen(kw_only=True)
class AdapterRoutes:
    """The handlers of adapters."""

    store: AdapterStore

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("POST", "/v1/adapters", self.update),
            ("GET", "/v1/adapters", self.show),
            ("PUT", "/v1/adapters/<name>/versions/<version>", self.receive),
            ("DELETE", "/v1/adapters/<name>", self.delete),
        )

    async def update(self) -> Response:
        """Answer 201 when the adapter is now served, 200 when it was served already."""
        return _report_response(await self.store.update(await _body(AdapterOrder)))

    async def receive(self, name: str, version: str) -> Response:
        """The same for a safetensors file as the body, which goes to the disk as it comes."""
        read_query(request.args, "model")
        return _report_response(
            await self.store.receive(name, version, request.body, request.content_length or 0)
        )

    async def show(self) -> Response:
        read_query(request.args, "model")
        await trio.lowlevel.checkpoint()
        return json_response(plain(self.store.status()))

    async def delete(self, name: str) -> Response:
        read_query(request.args, "model")
        state = await self.store.delete(name)
        if state is None:
            raise NotFound(f"there is no adapter {name!r}: look at GET /v1/adapters")
        return json_response(plain(state))


def _report_response(report: WeightsReport | AdapterReport) -> Response:
    return json_response(plain(report), 201 if report.created else 200)


def _served_json(served: Served) -> dict[str, Json]:
    """A served version as JSON, without the node's internal fields."""
    return {name: value for name, value in plain(served).items() if name not in ("digest", "model", "files")}


async def _body(shape: type[T], *, optional: bool = False) -> T:
    """Read the body as `shape`. With `optional` a missing body counts as an empty object."""
    read_query(request.args, "model")
    body = await (body_json_or({}) if optional else body_json())
    return structure(body, shape, forbid_extra=True)
