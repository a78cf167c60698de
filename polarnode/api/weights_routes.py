"""The trainer's routes to the engine: weights are updated and listed, generation is held and let go, memory
is lent. They read a request strictly, call `Weights` or `EngineControl`, and answer; they decide nothing.
"""

from collections.abc import Iterator
from typing import TypeVar

from attrs import frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.service import NotFound, json_response
from polarnode.core.codec.json import plain, structure
from polarnode.core.conversation import Json
from polarnode.core.weights import WeightsReport
from polarnode.engine.memory import EngineControl
from polarnode.engine.update import Make
from polarnode.engine.weight_values import (
    BroadcastBucket,
    GroupOrder,
    MemoryOrder,
    PauseOrder,
    Served,
    TensorBucket,
    UpdateOrder,
)
from polarnode.engine.weights import Weights
from polarnode.http.asgi import RouteRow, body_json, body_json_or

T = TypeVar("T")


@frozen(kw_only=True)
class WeightsRoutes:
    """`control` takes turns with `weights`."""

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
        """201 when the weights are served now, 200 when they were already."""
        order = await _body(UpdateOrder)
        self._insist_joined(order)
        return _reported(await self.weights.update(order))

    async def show(self) -> Response:
        read_query(request.args)
        history: list[Json] = [_served_json(each) for each in await self.weights.history()]
        return json_response({**plain(self.weights.status()), "history": history})

    async def begin(self) -> Response:
        order = await _body(UpdateOrder)
        self._insist_joined(order)
        return json_response(plain(await self.weights.open(order)), 201)

    async def add(self, update_id: str) -> Response:
        return json_response(plain(await self.weights.add(update_id, await self._bucket(update_id))))

    async def commit(self, update_id: str) -> Response:
        read_query(request.args)
        return _reported(await self.weights.commit(update_id))

    async def give_up(self, update_id: str) -> Response:
        read_query(request.args)
        await self.weights.give_up(update_id)
        return json_response(plain(self.weights.status()))

    async def _bucket(self, update_id: str) -> Make:
        """The body's shape depends on the source of the update."""
        if self.weights.opened(update_id).order.source.kind == "distributed":
            return self.control.received(update_id, await _body(BroadcastBucket))
        return self.control.mapped(await _body(TensorBucket))

    def _insist_joined(self, order: UpdateOrder) -> None:
        if order.source.kind == "distributed":
            self.control.insist_joined(order.source.group)

    # ── groups ────────────────────────────────────────────────────────────────

    async def join(self) -> Response:
        order = await _body(GroupOrder)
        await self.control.join(order)
        return json_response(
            {"name": order.name, "world_size": order.world_size, "rank_offset": order.rank_offset}, 201
        )

    async def leave(self, name: str) -> Response:
        read_query(request.args)
        if not await self.control.leave(name):
            raise NotFound(f"no group {name!r} is joined")
        return json_response({"name": name})

    # ── the engine ────────────────────────────────────────────────────────────

    async def pause(self) -> Response:
        return json_response(plain(await self.weights.pause(await _body(PauseOrder, optional=True))))

    async def resume(self) -> Response:
        read_query(request.args)
        return json_response(plain(await self.weights.resume()))

    async def release(self) -> Response:
        return json_response(plain(await self.control.release(await _body(MemoryOrder, optional=True))))

    async def take(self) -> Response:
        return json_response(plain(await self.control.take(await _body(MemoryOrder, optional=True))))


def _reported(report: WeightsReport) -> Response:
    return json_response(plain(report), 201 if report.created else 200)


def _served_json(served: Served) -> dict[str, Json]:
    """A served version, without the fields that only the node itself reads."""
    return {name: value for name, value in plain(served).items() if name not in ("digest", "model", "files")}


async def _body(shape: type[T], *, optional: bool = False) -> T:
    """The body as `shape`; with `optional` no body is an empty one."""
    read_query(request.args)
    body = await (body_json_or({}) if optional else body_json())
    return structure(body, shape, forbid_extra=True)
