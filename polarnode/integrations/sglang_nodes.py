"""SGLang's control routes for all nodes of a log: trainers that update SGLang servers reach every engine.

Each node keeps the state between a trainer's requests (`sglang.py`). This module only handles what differs
between nodes: ranks, payloads and names. Checkpoints and adapters reach the other nodes through the log.
Invariant: a bucket that one node refuses is given up by all, so that no node serves an update that another
has not got.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

import trio
from attrs import define, field
from quart import Response, request

from polarnode.api.proxy import MisdirectedRequest, pass_failure_response
from polarnode.api.service import json_response
from polarnode.api.weight_nodes import (
    Handler,
    ModelNodes,
    Words,
    passed,
    rank_offsets,
    sort_by_name,
    split_payloads,
    took,
    worst,
)
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.http.asgi import RouteRow, body_json_or
from polarnode.integrations.sglang import answered
from polarnode.journal.log.port import NodeRow

PAUSE_PATH, CONTINUE_PATH = "/pause_generation", "/continue_generation"
BUCKETS: Final = ("/update_weights_from_tensor", "/update_weights_from_distributed")
INFO: Final = ("/server_info", "/get_server_info")
ALL_NODE_PATHS: Final = (
    *(
        PAUSE_PATH,
        CONTINUE_PATH,
        *BUCKETS,
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weight_version",
    ),
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    *("/release_memory_occupation", "/resume_memory_occupation"),
)


@define(eq=False)
class SglangNodes:
    """One trainer's requests to all nodes, which run one after another."""

    nodes: ModelNodes
    _lock: trio.Lock = field(factory=trio.Lock, init=False)
    _begun: bool = field(default=False, init=False)  # begin_weight_update was received
    # The open update's names: the name that the trainer asked for, and the one that was given.
    _names: dict[str | None, str] = field(factory=dict, init=False)

    def rows(self, rows: Iterable[RouteRow]) -> Iterator[RouteRow]:
        """The rows of the route table; requests of the routes in ALL_NODE_PATHS go to all nodes."""
        for method, path, here in rows:
            if (
                path in ALL_NODE_PATHS
                or path in INFO
                or path.startswith(("/update_weights", "/load_lora", "/unload"))
            ):
                yield method, path, answered(partial(self._answer, here))
            else:
                yield method, path, here

    async def _answer(self, here: Handler) -> Response:
        try:
            if self.nodes.others.was_passed_on():
                return await here()
            if (answer := await self.nodes.answer_elsewhere()) is not None:
                return answer
        except MisdirectedRequest as error:
            return pass_failure_response(error)
        members = await self.nodes.members()
        fewest = 1 if request.path in (PAUSE_PATH, CONTINUE_PATH) and self.nodes.others.log.shared else 2
        if len(members) < fewest or request.path not in (*ALL_NODE_PATHS, *INFO):
            return await here()
        if request.path in INFO:
            return await self._info(members)
        body = await body_json_or({})
        if not isinstance(body, dict):
            raise Refused("the body must be an object", path="$")
        async with self._lock:
            return await self._ask_all_members(request.path, dict(body), members)

    async def _info(self, members: list[NodeRow]) -> Response:
        """This node's answer, with the number of GPUs of all nodes."""
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
        """Whether buckets are collected until generation continues. The request to hold it may have come to
        another node.
        """
        return self._begun or self.nodes.weights.status().paused is not None

    async def _ask_all_members(self, path: str, body: dict[str, Any], members: list[NodeRow]) -> Response:
        if path in BUCKETS:
            body = {**body, "weight_version": await self._name(body.get("weight_version"))}
        sent = await self._bodies(path, body, members)
        if path in (PAUSE_PATH, CONTINUE_PATH):
            words = await self.nodes.hold(body, body.get("mode", "retract") if path == PAUSE_PATH else None)
        else:
            words = await self.nodes.ask(members, "POST", path, lambda row: sent.get(row.incarnation, body))
        await self._note(path, words)
        return passed(worst(words) if len(took(words)) < len(words) else words[0][1])

    async def _name(self, asked: str | None) -> str:
        """A version name that the log does not have yet; it is the same for each bucket of an update."""
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
        if not self._held:  # the bucket is a whole model, so the next one is another version
            self._names.clear()
        return given

    async def _bodies(
        self, path: str, body: dict[str, Any], members: list[NodeRow]
    ) -> Mapping[int, dict[str, Json]]:
        """The bodies that differ by node, by incarnation."""
        members = sort_by_name(members)
        every = [row.incarnation for row in members]
        if path == "/update_weight_version":
            name = body.get("new_version")
            return {each: {**body, "new_version": self._names.get(name, name)} for each in every}
        if path == "/init_weights_update_group" and isinstance(first := body.get("rank_offset"), int):
            offsets = rank_offsets(first, await self.nodes.ranks(members))
            return {each: {**body, "rank_offset": at} for each, at in zip(every, offsets, strict=True)}
        handles = body.get("serialized_named_tensors")
        if path == BUCKETS[0] and isinstance(handles, list):
            parts = split_payloads(handles, await self.nodes.ranks(members))
            return {
                each: {**body, "serialized_named_tensors": list[Json](part)}
                for each, part in zip(every, parts, strict=True)
            }
        return {}

    async def _note(self, path: str, words: Words) -> None:
        """Note what the nodes' answers mean for the next request."""
        if path in (PAUSE_PATH, "/begin_weight_update"):
            self._begun |= path != PAUSE_PATH
            self._names.clear()
        elif path in BUCKETS and len(took(words)) < len(words) and self._held:
            others = [row for row, _ in took(words)]  # they give up the update that is open there
            await self.nodes.ask(others, "POST", PAUSE_PATH, lambda _: {"mode": "in_place"})
        elif path in (CONTINUE_PATH, "/end_weight_update"):
            self._begun = False
            self._names.clear()
