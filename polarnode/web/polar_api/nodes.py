"""Polar's look at its machines, of which a polarnode is one: health, the one node, and whether generation is held.

The rule for whoever edits it: the numbers are those of our own status in Polar's words; a route that would let somebody else be a node of this
one (`register`, `heartbeat`), or say what a session was worth (`callbacks/session_result`), is not served.
"""

import time
from collections.abc import Iterator

import trio
from attrs import frozen
from quart import Response, request

from polarnode.conversation import Json
from polarnode.shell.polar_results import polar_id, status_head
from polarnode.shell.weights import PauseOrder
from polarnode.trainers.polar import PHASES
from polarnode.web.control_plane.errors import NotFound, json_response
from polarnode.web.handlers import RouteRow
from polarnode.web.polar_api.answers import moment
from polarnode.web.polar_api.house import PolarHouse

HEARTBEAT_S = 30  # Polar's own; nobody sends one here, and the last is always now
LISTED = 1000  # tasks of a status: a megabyte of names


@frozen(kw_only=True)
class NodeRoutes:
    """The handlers, with what they ask."""

    house: PolarHouse

    def rows(self) -> Iterator[RouteRow]:
        yield from (
            ("GET", "/health", self.health),
            ("GET", "/nodes", self.nodes),
            ("GET", "/nodes/<node_id>", self.node),
            ("GET", "/rollout/status", self.status),
            ("GET", "/admin/inference/status", self.inference),
            ("POST", "/admin/inference/pause", self.pause),
            ("POST", "/admin/inference/resume", self.resume),
        )

    async def health(self) -> Response:
        """The rollout server's and the gateway's in one."""
        await trio.lowlevel.checkpoint()
        counts, live, figures = self._metrics(), self.house.live().values(), self.house.service.figures()
        words = [PHASES[status.phase] for status in live]
        sessions: list[Json] = [{"session_id": each.session_id, "task_id": each.task_id, "status": PHASES[each.phase]} for each in live]
        rooms = {name: figures.stages[name] for name in ("init", "run", "post") if name in figures.stages}
        return json_response(
            {
                "status": "ok",
                "nodes": 1,
                "node_id": self.house.node_id,
                "gateway_url": _own_url(),
                "inference": {"status": "ok" if self.house.service.ready() else "error"},
                "metrics": counts,
                "active_status_counts": {word: words.count(word) for word in dict.fromkeys(words)},
                "active_sessions": sessions,
                **{
                    f"available_{word}": max(0, rooms[name].limit - rooms[name].inside)
                    for name, word in (("init", "init"), ("run", "run"), ("post", "postrun"))
                    if name in rooms
                },
            }
        )

    async def nodes(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response([self._info()])

    async def node(self, node_id: str) -> Response:
        await trio.lowlevel.checkpoint()
        if node_id != self.house.node_id:
            raise NotFound("Node not found")
        return json_response(self._info())

    async def status(self) -> Response:
        """The newest tasks with their statuses, sessions under way, the node."""
        tasks: dict[str, Json] = {}
        for task in await self.house.journal.tasks(limit=LISTED):
            tasks.setdefault(polar_id(task), status_head(task)["status"])
        return json_response({"tasks": tasks, "pipeline": {"pending_sessions": len(self.house.live())}, "nodes": [self._info()]})

    def _info(self) -> dict[str, Json]:
        stages = self.house.service.figures().stages
        workers: dict[str, Json] = {
            f"max_{word}_workers": stages[name].limit for name, word in (("init", "init"), ("run", "run"), ("post", "postrun")) if name in stages
        }
        return {
            "node_id": self.house.node_id,
            "gateway_url": _own_url(),
            **workers,
            "metrics": self._metrics(),
            "dispatch_reservations": 0,
            "healthy": self.house.service.ready(),
            "draining": False,
            "heartbeat_interval_seconds": HEARTBEAT_S,
            "last_heartbeat": moment(time.time()),
        }

    def _metrics(self) -> dict[str, Json]:
        stages = self.house.service.figures().stages

        def of(name: str, place: str) -> int:
            return int(getattr(stages[name], place)) if name in stages else 0

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
        return json_response(self._inference())

    async def pause(self) -> Response:
        """Generation stands still at once and goes on where it was: there is nothing to wait for, and no time to run out."""
        await self.house.generation.pause(PauseOrder())
        return json_response(self._inference())

    async def resume(self) -> Response:
        await self.house.generation.resume()
        return json_response(self._inference())

    def _inference(self) -> dict[str, Json]:
        """`drained`: no token is being sampled. `inflight` are calls, held ones too."""
        engine = self.house.service.figures().engine
        inflight = sum(host.in_flight for host in engine.hosts)
        return {
            "paused": engine.paused is not None,
            "drained": engine.paused is not None or inflight == 0,
            "inflight": inflight,
            "base_url": _own_url(),
            "engine": engine.kind,
            "request_timeout_seconds": None,
            "policy_version": engine.weight_version,
        }


def _own_url() -> str:
    return request.host_url.rstrip("/")
