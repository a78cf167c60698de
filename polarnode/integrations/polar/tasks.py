"""Polar's rollout server: submits, polls, cancels and lists tasks.

A task is in the journal before its submission is answered, as on our own routes. An id that a trainer used
more than once, as Polar allows, names the task that was submitted last.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import trio
from attrs import define, evolve, field
from quart import Response, request

from polarnode.api.service import NodeService, NotFound, json_response
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, Refused
from polarnode.core.status import LiveSessionStatus, SessionRecord
from polarnode.core.task import TaskSpec
from polarnode.http.asgi import RouteRow
from polarnode.integrations.polar.answers import (
    body_object,
    count,
    live_sessions,
    moment,
    polar_id,
    run_name,
    status_head,
    task_body,
    task_name,
)
from polarnode.integrations.trainer_sampling import UNCUT
from polarnode.journal.queries import ByteCache
from polarnode.journal.values import TaskRecord
from polarnode.sources.polar import convert_request, name_request_paths
from polarnode.sources.source import spec_of
from polarnode.support.bounded import remember
from polarnode.trainers.polar import KEY, Origin, origin_of, outcome_word, with_origin

MOST_TASKS = 1000  # tasks listed at once, as in Polar
LOOKED_AT = 5000  # tasks that a filtered list reads: a few hundred milliseconds
PAGE = 200
# The number of ids that are kept of tasks cancelled before they were submitted. A request that is under way
# arrives within seconds.
MAX_CALLED_OFF = 1000


@define(eq=False)
class TaskRoutes:
    """The handlers."""

    service: NodeService
    _recent_results: ByteCache = field(
        factory=ByteCache, init=False
    )  # SessionResults that were made recently
    _called_off: dict[str, str] = field(
        factory=dict, init=False
    )  # tasks that were cancelled before they were submitted
    # Two simultaneous submissions of one id must be one task.
    _submitting: trio.Lock = field(factory=trio.Lock, init=False)

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("POST", "/rollout/task/submit", self.submit),
            ("GET", "/rollout/task/<task_id>", self.task),
            ("DELETE", "/rollout/task/<task_id>", self.cancel),
            ("GET", "/tasks", self.tasks),
            ("GET", "/tasks/<task_id>/sessions", self.sessions),
        )

    # ── in ────────────────────────────────────────────────────────────────────

    async def submit(self) -> Response:
        """Submit a task; the answer is sent when the task is in the journal. Its `notes` list the parts of
        the request that are done differently here, or not at all.
        """
        body = await body_object()
        task_id = body.get("task_id")
        if not isinstance(task_id, str) or not task_id:
            raise Refused("task_id is missing: every TaskRequest has one", path="$.task_id")
        spec = await self.take(
            body, name=task_name(task_id), origin=Origin(task_id=task_id), callback_format="polar_task"
        )
        notes = list[Json](origin_of(spec.metadata).notes)
        return json_response(
            {"task_id": task_id, "status": "running", "metadata": {"task_id": spec.task_id, "notes": notes}}
        )

    async def take(
        self, body: dict[str, Json], *, name: str, origin: Origin, callback_format: str
    ) -> TaskSpec:
        """Submit a request under one of our names, or under the next name if the last task of that name is
        over. Returns the task as it was taken.
        """
        found = await trio.to_thread.run_sync(partial(convert_request, body, volumes=self.service.volumes))
        with name_request_paths():
            # A TaskRequest has no sampling, and its trainer computes logprobs without penalties and cuts.
            own: dict[str, Json] = {
                "sampling": dict(UNCUT),
                "task_id": name,
                "callback_format": callback_format,
            }
            spec = spec_of(evolve(found, value={**found.value, **own}))
        async with self._submitting:
            if name in self._called_off:
                raise Conflict(f"{origin.task_id} was cancelled before it came: submit it by another task_id")
            run = await self._run(name)
            if KEY in spec.metadata:
                raise Refused(
                    f"{KEY} in a task's metadata is the node's own: rename yours",
                    path=f"$.metadata.{KEY}",
                )
            spec = evolve(
                spec,
                task_id=run_name(name, run),
                metadata=with_origin(spec.metadata, evolve(origin, run=run, notes=tuple(found.notes))),
            )
            with name_request_paths():
                await self.service.submit(spec, idempotency_key=request.headers.get("Idempotency-Key"))
        return spec

    async def _run(self, name: str) -> int:
        """The number of the task that a submission under this name belongs to."""
        latest = await self.service.log.latest_run(name)
        if latest is None:
            return 1
        run = origin_of(latest.spec.metadata).run
        return run + 1 if latest.finished else run

    # ── out ───────────────────────────────────────────────────────────────────

    async def task(self, task_id: str) -> Response:
        """The TaskStatus of a task. With `results=false`, which Polar does not have, the sessions' results
        are left out, so that a poll costs nothing.
        """
        found = await self._existing(task_id)
        body = task_body(
            self.service.log,
            found,
            status_head(found),
            node=self.service.node_id,
            results=request.args.get("results", "true") != "false",
            recent=self._recent_results,
        )
        return Response(body, content_type="application/json")

    async def cancel(self, task_id: str) -> Response:
        """Cancel a task; its sessions keep their turns. With `register_if_missing=true` an id that does not
        exist yet is refused when it is submitted.
        """
        found = await self._find(task_id)
        if found is not None:
            cancelled = await self.service.cancel(found.task_id)
            return json_response({**status_head(await self._existing(task_id)), "cancelled": cancelled})
        if request.args.get("register_if_missing", "false").lower() not in ("true", "1"):
            raise NotFound("Task not found")
        remember(self._called_off, task_name(task_id), task_id, most=MAX_CALLED_OFF)
        return json_response(
            {
                "task_id": task_id,
                "status": "failed",
                "total_sessions": 0,
                "completed_sessions": 0,
                "cancelled": True,
            }
        )

    async def tasks(self) -> Response:
        """The tasks, newest first. Parameters: `status`, `harness`, `since`, `limit`."""
        status, harness, since = (
            request.args.get("status"),
            request.args.get("harness"),
            _seconds(request.args.get("since")),
        )
        limit, rows, seen, before = count("limit", PAGE, most=MOST_TASKS), list[Json](), set[str](), None
        for _ in range(LOOKED_AT // PAGE):
            page = await self.service.log.tasks(limit=PAGE, before=before)
            for task in page:
                row = task_row(task)
                matches = (
                    status in (None, row["status"])
                    and harness in (None, row["harness"])
                    and _changed(task) >= since
                )
                if matches and polar_id(task) not in seen:
                    rows.append(row)
                seen.add(polar_id(task))
            if len(page) < PAGE or len(rows) >= limit:
                break
            before = page[-1].task_id
        return json_response({"tasks": rows[:limit]})

    async def sessions(self, task_id: str) -> Response:
        """The sessions that hold the task's places, without their results."""
        found, live = await self._existing(task_id), live_sessions(self.service)
        rows: list[Json] = [
            session_row(found, session, live, node=self.service.node_id) for session in found.sessions
        ]
        return json_response({"task_id": task_id, "sessions": rows})

    async def _existing(self, task_id: str) -> TaskRecord:
        found = await self._find(task_id)
        if found is None:
            raise NotFound("Task not found")
        return found

    async def _find(self, task_id: str) -> TaskRecord | None:
        """Find a task by Polar's id or by ours."""
        log = self.service.log
        return await log.latest_run(task_name(task_id)) or await log.task(task_id)


def task_row(task: TaskRecord) -> dict[str, Json]:
    """A task, without its results."""
    return {
        **status_head(task),
        "harness": task.spec.harness.name,
        "created_at": task.submitted,
        "updated_at": _changed(task),
    }


def session_row(
    task: TaskRecord, session: SessionRecord, live: Mapping[str, LiveSessionStatus], *, node: str
) -> dict[str, Json]:
    """A session, without its result."""
    phase = live[session.session_id].phase if session.session_id in live else "pending"
    return {
        "session_id": origin_of(task.spec.metadata).session_id or session.session_id,
        "task_id": polar_id(task),
        "status": outcome_word(session.outcome, phase),
        "node_id": node,
        "created_at": moment(task.submitted),
        "completion_count": session.turns,
        "reward": session.reward,
        "error": None
        if session.outcome is None or session.outcome.status == "completed"
        else session.outcome.reason,
    }


def _changed(task: TaskRecord) -> float:
    return max(
        [task.submitted, *(session.finished for session in task.sessions if session.finished is not None)]
    )


def _seconds(text: str | None) -> float:
    try:
        return float(text or "-inf")
    except ValueError:
        raise Refused(f"since must be seconds since the epoch, not {text!r}", path="?since") from None
