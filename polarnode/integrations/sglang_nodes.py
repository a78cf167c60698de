"""SGLang's control routes for all nodes of a log: trainers that update SGLang servers reach every engine.

Each node keeps the state between a trainer's requests (`sglang.py`). Here is only what differs between nodes:
ranks, payloads and names. Checkpoints and adapters reach the others by the log. Invariant: a bucket that one
node refuses is given up by all, so that no node serves an update that another has not got.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

import trio
from attrs import define, field
from quart import Response, request

from polarnode.api.proxy import Astray, answer_for
from polarnode.api.service import json_response
from polarnode.api.weight_nodes import (
    Handler,
    ModelNodes,
    Words,
    in_one_order,
    passed,
    payloads_of,
    rank_offsets,
    took,
    worst,
)
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.http.asgi import RouteRow, body_json_or
from polarnode.integrations.sglang import answered
from polarnode.journal.log.port import NodeRow

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
BUCKETS: Final = ("/update_weights_from_tensor", "/update_weights_from_distributed")
INFO: Final = ("/server_info", "/get_server_info")
OF_ALL: Final = (
    *(PAUSE, CONTINUE, *BUCKETS, "/begin_weight_update", "/end_weight_update", "/update_weight_version"),
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    *("/release_memory_occupation", "/resume_memory_occupation"),
)


@define(eq=False)
class SglangNodes:
    """One trainer's requests to all nodes, which run one after another."""

    nodes: ModelNodes
    _lock: trio.Lock = field(factory=trio.Lock, init=False)
    _begun: bool = field(default=False, init=False)  # begin_weight_update came
    _names: dict[str | None, str] = field(factory=dict, init=False)  # of the open update: asked, given

    def rows(self, rows: Iterable[RouteRow]) -> Iterator[RouteRow]:
        """The routes of a node, of which those in OF_ALL are asked of all."""
        for method, path, here in rows:
            if (
                path in OF_ALL
                or path in INFO
                or path.startswith(("/update_weights", "/load_lora", "/unload"))
            ):
                yield method, path, answered(partial(self._answer, here))
            else:
                yield method, path, here

    async def _answer(self, here: Handler) -> Response:
        try:
            if self.nodes.others.is_for_us():
                return await here()
            if (answer := await self.nodes.answered_elsewhere()) is not None:
                return answer
        except Astray as error:
            return answer_for(error)
        members = await self.nodes.members()
        fewest = 1 if request.path in (PAUSE, CONTINUE) and self.nodes.others.log.shared else 2
        if len(members) < fewest or request.path not in (*OF_ALL, *INFO):
            return await here()
        if request.path in INFO:
            return await self._info(members)
        body = await body_json_or({})
        if not isinstance(body, dict):
            raise Refused("the body must be an object", path="$")
        async with self._lock:
            return await self._all(request.path, dict(body), members)

    async def _info(self, members: list[NodeRow]) -> Response:
        """This node's answer, with the GPUs of all."""
        words = took(await self.nodes.ask(members, "GET", request.path))
        if not words:
            return passed(worst(words))
        infos = [answer.json for _, answer in words]
        sums = {name: sum(each[name] for each in infos) for name in ("num_gpus", "dp_size")}
        own = urlsplit(f"//{request.host}")
        port = own.port or (443 if request.scheme == "https" else 80)
        return json_response({**infos[0], **sums, "host": own.hostname, "port": port})

    @property
    def _held(self) -> bool:
        """Whether buckets are collected until generation continues. Another node may have been asked."""
        return self._begun or self.nodes.weights.status().paused is not None

    async def _all(self, path: str, body: dict[str, Any], members: list[NodeRow]) -> Response:
        if path in BUCKETS:
            body = {**body, "weight_version": await self._name(body.get("weight_version"))}
        sent = await self._bodies(path, body, members)
        if path in (PAUSE, CONTINUE):
            words = await self.nodes.hold(body, body.get("mode", "retract") if path == PAUSE else None)
        else:
            words = await self.nodes.ask(members, "POST", path, lambda row: sent.get(row.incarnation, body))
        await self._note(path, words)
        return passed(worst(words) if len(took(words)) < len(words) else words[0][1])

    async def _name(self, asked: str | None) -> str:
        """A version that the log does not have, the same for each bucket of an update."""
        weights = self.nodes.weights
        if asked not in self._names:
            for number in count(1):
                plain = asked if number == 1 else f"{asked}~{number}"
                name = plain if plain is not None and asked is not None else f"unnamed-{number}"
                known = await weights.log.weights_of(name, model=weights.name)
                if known is None and name not in weights.engines.versions:
                    self._names[asked] = name
                    break
        given = self._names[asked]
        if not self._held:  # a whole model: the next one is another
            self._names.clear()
        return given

    async def _bodies(
        self, path: str, body: dict[str, Any], members: list[NodeRow]
    ) -> Mapping[int, dict[str, Json]]:
        """The bodies of nodes that get one of their own, by incarnation."""
        members = in_one_order(members)
        every = [row.incarnation for row in members]
        if path == "/update_weight_version":
            name = body.get("new_version")
            return {each: {**body, "new_version": self._names.get(name, name)} for each in every}
        if path == "/init_weights_update_group" and isinstance(first := body.get("rank_offset"), int):
            offsets = rank_offsets(first, await self.nodes.ranks(members))
            return {each: {**body, "rank_offset": at} for each, at in zip(every, offsets, strict=True)}
        handles = body.get("serialized_named_tensors")
        if path == BUCKETS[0] and isinstance(handles, list):
            parts = payloads_of(handles, await self.nodes.ranks(members))
            return {
                each: {**body, "serialized_named_tensors": list[Json](part)}
                for each, part in zip(every, parts, strict=True)
            }
        return {}

    async def _note(self, path: str, words: Words) -> None:
        """What follows from the nodes' answers for the next request."""
        if path in (PAUSE, "/begin_weight_update"):
            self._begun |= path != PAUSE
            self._names.clear()
        elif path in BUCKETS and len(took(words)) < len(words) and self._held:
            others = [row for row, _ in took(words)]  # an update that is open there is given up
            await self.nodes.ask(others, "POST", PAUSE, lambda _: {"mode": "in_place"})
        elif path in (CONTINUE, "/end_weight_update"):
            self._begun = False
            self._names.clear()
