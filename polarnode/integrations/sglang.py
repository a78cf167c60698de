"""The control routes of an SGLang server over a node's weights, for a trainer that updates SGLang servers: it
is given the node's address instead.

Bodies and answers are SGLang's (0.5.23: `srt/managers/io_struct.py`, `srt/entrypoints/http_server.py`). The
difference is the update of several requests. SGLang changes the model with each bucket, but a node serves a
version whole or not at all. So all buckets that arrive while generation is held are one update: the first
opens it, and `continue_generation` or `end_weight_update` commits it. That is the order in which the trainers
send them, in their own code:

* slime 624b824a8 (slime/backends/megatron_utils/update_weight, slime/ray/actor_group.py): pause_generation
  {}, flush_cache, buckets with `weight_version` (over a group for each pipeline stage) or
  update_weights_from_disk, continue_generation
* miles 31f1ca961 (miles/backends/megatron_utils/update_weight): pause_generation with a mode, flush_cache,
  begin_weight_update, buckets, update_weight_version, end_weight_update, continue_generation
* AReaL cbff54d64 (areal/engine/sglang_remote.py, areal/engine/fsdp_engine.py): pause_generation {} and
  in_place, buckets without a version, update_weights_from_disk or load_lora_adapter, continue_generation
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import trio
from attrs import define, evolve, field, frozen
from quart import Response, request

from polarnode.api.app import Extension
from polarnode.api.service import NodeService, error_answer, json_response, readiness_response
from polarnode.core.codec.json import structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, PolarnodeError, Refused
from polarnode.core.weights import AdapterReport, PauseMode, WeightsReport
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.memory import EngineControl
from polarnode.engine.update import MessageMaker
from polarnode.engine.weight_values import (
    ALL_MEMORY,
    AdapterOrder,
    BroadcastBucket,
    DiskSource,
    DistributedSource,
    GroupOrder,
    MemoryOrder,
    PauseOrder,
    TensorBucket,
    TensorSource,
    UpdateOrder,
    broadcast,
)
from polarnode.engine.weights import Weights
from polarnode.http.asgi import RouteRow, body_json_or
from polarnode.integrations.sglang_operations import (
    OPERATION_TABLE,
    OPERATIONS,
    REFUSED,
    DiskUpdate,
    DistributedUpdate,
    GroupName,
    InitGroup,
    LoraAdapter,
    MemoryTags,
    NewVersion,
    Nothing,
    PauseGeneration,
    TensorUpdate,
)

# ── the state between requests ────────────────────────────────────────────────

# Seconds for generation to resume after a trainer hung up or a step failed: one message to each host.
RESUME_TIMEOUT_S: Final = 60.0
PAUSE_STRENGTH: Final[Mapping[str | None, int]] = {None: 0, "in_place": 1, "retract": 2, "abort": 3}


@define(eq=False)
class SglangUpdates:
    """One trainer's requests as the node's updates. Requests that change something run one after another."""

    weights: Weights
    control: EngineControl
    _lock: trio.Lock = field(factory=trio.Lock, init=False)
    _update_id: str | None = field(default=None, init=False)
    _asked: str | None = field(default=None, init=False)  # the trainer's name for its last update
    _begun: bool = field(default=False, init=False)  # begin_weight_update was received
    # Generation continues when all memory is back, because slime sends continue_generation before the KV
    # cache is back.
    _should_continue: bool = field(default=False, init=False)

    @property
    def _held(self) -> str | None:
        return self.weights.status().paused

    async def pause(self, body: PauseGeneration) -> None:
        """Hold generation. An open update belongs to a trainer that ended, so it is given up. While
        generation is held, a weaker mode changes nothing.
        """
        async with self._lock:
            await self._give_up()
            if PAUSE_STRENGTH[body.mode] > PAUSE_STRENGTH[self._held]:
                await self.weights.pause(PauseOrder(mode=body.mode))
            self._should_continue = False

    async def resume(self) -> WeightsReport | None:
        """Serve the weights that were sent, and let generation continue. If they cannot be served, it
        continues with the previous weights.
        """
        async with self._lock:
            try:
                return await self._commit()
            finally:  # also if the trainer hung up, because agents wait
                self._should_continue = True
                with trio.move_on_after(RESUME_TIMEOUT_S, shield=True):
                    await self._continue()

    async def begin(self) -> None:
        """Begin an update, of which all buckets until `end` are parts."""
        async with self._lock:
            await self._give_up()
            self._begun = True

    async def end(self) -> WeightsReport | None:
        async with self._lock:
            return await self._commit()

    async def bucket(
        self, make: MessageMaker, source: TensorSource | DistributedSource, version: str | None
    ) -> str:
        """Take a bucket, as a part of the open update or as a whole model. Returns what was done."""
        async with self._lock:
            order = UpdateOrder(version="", source=source, mode=self._update_mode(abort=False))
            if not self._begun and self._held is None:
                report = await self._named(version, order, self.weights.update)
                return f"served as {report.version!r}"
            if self._update_id is None:
                # The buckets of the update arrive one by one.
                opening: UpdateOrder = evolve(order, source=evolve(cast(Any, source), buckets=()))
                opened = await self._named(version, opening, self.weights.open)
                self._update_id, self._asked = opened.update_id, version
            if version != self._asked:
                raise Conflict(
                    f"an update to {self._asked!r} is open: continue_generation serves it,"
                    " pause_generation gives it up"
                )
            update_id, self._update_id = self._update_id, None  # a bucket that fails ends the update
            taken = await self.weights.add(update_id, make)
            self._update_id = update_id
            return f"bucket {taken.buckets} of {taken.version!r}: continue_generation serves it"

    async def disk(self, body: DiskUpdate) -> WeightsReport:
        async with self._lock:
            order = UpdateOrder(
                version=body.weight_version or "",
                source=DiskSource(path=body.model_path),
                mode=self._update_mode(abort=body.abort_all_requests),
            )
            self._asked = body.weight_version
            report: WeightsReport = await self._named(body.weight_version, order, self.weights.update)
            return report

    async def adapter(self, body: LoraAdapter, store: AdapterStore) -> AdapterReport:
        name = re.sub(r"-v\d+$", "", body.lora_name)
        order = AdapterOrder(name=name, version="", source=DiskSource(path=body.lora_path))
        async with self._lock:
            report: AdapterReport = await self._named(body.lora_name, order, store.update)
            return report

    async def name(self, version: str) -> None:
        """Check the version that a trainer names after an update: the weights must have that name already."""
        async with self._lock:
            served = self.weights.status().version
            loaded = served if self._update_id is None else self.weights.opened(self._update_id).order.version
            if version not in (loaded, self._asked):
                raise Conflict(
                    f"the weights are {loaded!r}: give weight_version with the first bucket, or with the"
                    " checkpoint"
                )

    async def join(self, body: InitGroup) -> None:
        """Join a group. An existing group of that name belongs to a trainer that ended, so it is left
        first.
        """
        await self.control.leave(body.group_name)
        port = str(body.master_port)
        await self.control.join(
            GroupOrder(
                name=body.group_name,
                address=body.master_address.strip("[]"),
                port=int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0,
                world_size=body.world_size,
                rank_offset=body.rank_offset,
                backend=body.backend,
            )
        )

    async def release(self, body: MemoryTags) -> None:
        """Lend memory. Generation is held meanwhile; it continues when all memory is back."""
        async with self._lock:
            held = self._held
            if PAUSE_STRENGTH[held] < PAUSE_STRENGTH["retract"]:
                await self.weights.pause(PauseOrder(mode="retract"))
                self._should_continue = held is None
            try:
                await self.control.release(MemoryOrder(tags=body.tags or ALL_MEMORY))
            except PolarnodeError:
                with trio.move_on_after(RESUME_TIMEOUT_S, shield=True):
                    await self._continue()
                raise

    async def take(self, body: MemoryTags) -> None:
        async with self._lock:
            await self.control.take(MemoryOrder(tags=body.tags or ALL_MEMORY))
            await self._continue()

    # ── inside ────────────────────────────────────────────────────────────────

    def _update_mode(self, *, abort: bool) -> PauseMode:
        """The mode in which an update holds generation: that in which it is held already."""
        held = self._held
        if held is None:
            return "abort" if abort else "retract"
        return "in_place" if held == "in_place" else "abort" if held == "abort" else "retract"

    async def _commit(self) -> WeightsReport | None:
        update_id, self._update_id, self._begun = self._update_id, None, False
        return None if update_id is None else await self.weights.commit(update_id)

    async def _give_up(self) -> None:
        update_id, self._update_id, self._begun = self._update_id, None, False
        if update_id is not None:
            try:
                await self.weights.give_up(update_id)
            except Conflict:
                return  # the update had timed out

    async def _continue(self) -> None:
        """Let generation continue if the trainer asked for it and nothing stands in its way."""
        if self._should_continue and not self.weights.released and not self.weights.discarded:
            self._should_continue = False
            await self.weights.resume()

    async def _named(self, version: str | None, order: Any, serve: "Callable[[Any], Awaitable[Any]]") -> Any:
        """Serve an order under the trainer's name, or under a new one if there is none or it is used: a name
        means one set of weights forever, and a trainer that starts again counts from 1.
        """
        if version is not None:
            try:
                return await serve(evolve(order, version=version))
            except Conflict as conflict:
                refused = conflict
            if not await self._used(version):
                raise refused
        return await serve(evolve(order, version=await self._fresh(version)))

    async def _fresh(self, version: str | None) -> str:
        names = (f"unnamed-{n}" if version is None else f"{version}~{n + 1}" for n in count(1))
        for name in names:
            if not await self._used(name):
                break
        return name

    async def _used(self, version: str) -> bool:
        return (
            version in self.weights.engines.versions
            or await self.weights.log.weights_of(version, model=self.weights.name) is not None
        )


# ── routes ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SglangRoutes:
    """The handlers of SGLang's routes. `memory_saver`: whether memory can be lent."""

    service: NodeService
    weights: Weights
    control: EngineControl
    updates: SglangUpdates
    adapters: AdapterStore
    memory_saver: bool

    async def pause(self) -> Response:
        await self.updates.pause(await _body(PauseGeneration))
        return json_response({"status": "ok", "message": "generation is held"})

    async def resume(self) -> Response:
        await _body(Nothing)
        report = await self.updates.resume()
        done = "" if report is None else f", with weights {report.version!r}"
        return json_response({"status": "ok", "message": f"generation continues{done}"})

    async def flush(self) -> Response:
        """Do nothing, because newer weights never use cached prefixes of older ones."""
        await trio.lowlevel.checkpoint()
        return json_response({"success": True, "message": "prefixes of older weights are never used"})

    async def from_disk(self) -> Response:
        body = await _body(DiskUpdate)
        running = sum(host.in_flight for host in self.weights.engines.statistics().hosts)
        report = await self.updates.disk(body)
        return _done(f"served as {report.version!r}", num_paused_requests=running)

    async def from_group(self) -> Response:
        body = await _body(DistributedUpdate)
        self.control.require_joined(body.group_name)
        bucket = BroadcastBucket(
            names=body.names, dtypes=body.dtypes, shapes=body.shapes, layout=body.load_format
        )
        source = DistributedSource(group=body.group_name, buckets=(bucket,))
        make = broadcast(bucket, body.group_name)
        return _done(await self.updates.bucket(make, source, body.weight_version))

    async def from_tensor(self) -> Response:
        body = await _body(TensorUpdate)
        bucket = TensorBucket(payloads=body.serialized_named_tensors, layout=body.load_format)
        source = TensorSource(buckets=(bucket,))
        return _done(await self.updates.bucket(self.control.mapped(bucket), source, body.weight_version))

    async def begin(self) -> Response:
        await _body(Nothing)
        await self.updates.begin()
        return _done("the next buckets are one update")

    async def end(self) -> Response:
        await _body(Nothing)
        report = await self.updates.end()
        return _done("nothing was sent" if report is None else f"served as {report.version!r}")

    async def name(self) -> Response:
        body = await _body(NewVersion)
        await self.updates.name(body.new_version)
        return _done(f"the weights are {body.new_version!r}", new_version=body.new_version)

    async def init_group(self) -> Response:
        body = await _body(InitGroup)
        await self.updates.join(body)
        return _done(f"joined group {body.group_name!r}")

    async def destroy_group(self) -> Response:
        body = await _body(GroupName)
        if not await self.control.leave(body.group_name):
            raise Refused(f"no group {body.group_name!r} is joined", path="$.group_name")
        return _done(f"left group {body.group_name!r}")

    async def load_adapter(self) -> Response:
        report = await self.updates.adapter(await _body(LoraAdapter), self.adapters)
        return _done(f"adapter {report.name!r} is served as {report.version!r}", error_message=None)

    async def unload_adapter(self) -> Response:
        name = (await _body(LoraAdapter)).lora_name
        if await self.adapters.delete(name) is None:
            raise Refused(f"there is no adapter {name!r}: look at GET /v1/adapters", path="$.lora_name")
        return _done(f"adapter {name!r} is deleted", error_message=None)

    async def release(self) -> Response:
        await self.updates.release(await _body(MemoryTags))
        return json_response(None)

    async def take(self) -> Response:
        await self.updates.take(await _body(MemoryTags))
        return json_response(None)

    async def version(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response({"weight_version": self.weights.status().version})

    async def healthy(self) -> Response:
        await trio.lowlevel.checkpoint()
        return readiness_response(self.service.unready())

    async def model_info(self) -> Response:
        await trio.lowlevel.checkpoint()
        return json_response(self._model())

    async def server_info(self) -> Response:
        """The server arguments that trainers compare with their own, as a server of all GPUs."""
        await trio.lowlevel.checkpoint()
        engines = self.weights.engines
        own, hosts = urlsplit(f"//{request.host}"), engines.statistics().hosts
        return json_response(
            {
                **self._model(),
                "host": own.hostname,
                "port": own.port or 80,
                "tp_size": engines.ranks,
                "dp_size": len(hosts),
                "num_gpus": len(hosts) * engines.ranks,
                "node_rank": 0,
                "base_gpu_id": min((gpu for host in hosts for gpu in host.gpus), default=0),
                **dict.fromkeys(("pp_size", "ep_size", "nnodes", "gpu_id_step"), 1),
                "context_length": engines.context_length,
                "enable_memory_saver": self.memory_saver,
                "enable_return_routed_experts": engines.routes,
                "max_running_requests": None,
                "version": "polarnode",
            }
        )

    def _model(self) -> dict[str, Json]:
        path = Path(self.weights.model)
        return {
            "model_path": str(path),
            "tokenizer_path": str(path),
            "served_model_name": self.service.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "disaggregation_mode": "null",
            "weight_version": self.weights.status().version,
        }


def _done(message: str, **more: Json) -> Response:
    return json_response({"success": True, "message": message, **more})


async def _refuse(sentence: str) -> Response:
    await trio.lowlevel.checkpoint()
    raise Refused(sentence)


async def _body(shape: "type[Any]") -> Any:
    """Read the request's body as `shape`. Unknown fields are ignored, as in SGLang."""
    return structure(await body_json_or({}), shape)


Handler = Callable[[], Awaitable[Response]]


def answered(handler: Handler) -> Handler:
    """A handler whose errors are answered in SGLang's shape."""

    @wraps(handler)
    async def answer() -> Response:
        try:
            return await handler()
        except PolarnodeError as error:
            _, status, headers = error_answer(error)
            return json_response({"success": False, "message": str(error)}, status, headers)

    return answer


def sglang_extension(
    service: NodeService,
    *,
    weights: Weights,
    control: EngineControl,
    adapters: AdapterStore,
    memory_saver: bool,
) -> Extension:
    """SGLang's routes. Its trainers cannot send a bearer token, so HTTP's basic authentication with the token
    as the password is accepted too.
    """
    routes = SglangRoutes(
        service=service,
        weights=weights,
        control=control,
        updates=SglangUpdates(weights=weights, control=control),
        adapters=adapters,
        memory_saver=memory_saver,
    )
    rows: tuple[RouteRow, ...] = tuple(
        (method, path, answered(getattr(routes, name) if name else partial(_refuse, REFUSED[path])))
        for methods, path, name, _, _ in OPERATION_TABLE
        for method in methods.split()
    )
    return Extension(rows=rows, operations=OPERATIONS, basic=True)
