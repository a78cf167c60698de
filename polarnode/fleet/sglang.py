"""SGLang's control routes for all nodes of a fleet: trainers that update SGLang servers reach every engine.

Each node keeps the state between a trainer's requests (integrations/sglang.py). Here is only what differs
between nodes: ranks, payloads and names. Invariant: a bucket that one node refuses is given up by all, so
that no node serves an update that another has not got.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from attrs import define, field
from quart import Response, request

from polarnode.api.app import Extension
from polarnode.api.service import json_response
from polarnode.core.errors import Refused
from polarnode.fleet.members import FleetMember
from polarnode.fleet.routes import passed
from polarnode.fleet.updates import fresh, newest, payloads_of, rank_offsets
from polarnode.fleet.weights import FleetWeights, Words, took, worst
from polarnode.http.asgi import RouteRow, body_json_or
from polarnode.integrations.sglang_operations import GROUP, OPERATIONS

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
BUCKETS: Final = ("/update_weights_from_tensor", "/update_weights_from_distributed")
DISK: Final = "/update_weights_from_disk"
# what may end with other weights served
SERVING: Final = (*BUCKETS, DISK, CONTINUE, "/end_weight_update")


@define(eq=False, kw_only=True)
class FleetSglang:
    """One trainer's requests to all nodes."""

    weights: FleetWeights
    _held: bool = field(default=False, init=False)  # buckets are collected until generation continues
    _names: dict[str | None, str] = field(factory=dict, init=False)  # of the open update: asked, given

    def extension(self) -> Extension:
        """The routes, with a node's own descriptions."""
        rows: tuple[RouteRow, ...] = tuple(
            (method, path, self.ask_one if method == "GET" else self.ask_all) for method, path in OPERATIONS
        )
        return Extension(rows=rows, basic=True)

    async def ask_one(self) -> Response:
        """Any node's answer, with the GPUs of all."""
        members, path = self.weights.able(), request.path
        words = await self.weights.ask(members, "GET", path)
        if not took(words):
            return passed(worst(words))
        found = [answer for _, answer in took(words)]
        if "server_info" not in path:
            return passed(found[0])
        infos = [answer.json for answer in found]
        sums = {name: sum(each[name] for each in infos) for name in ("num_gpus", "dp_size")}
        own = urlsplit(f"//{request.host}")
        port = own.port or (443 if request.scheme == "https" else 80)
        return json_response({**infos[0], **sums, "host": own.hostname, "port": port})

    async def ask_all(self) -> Response:
        body, path = await body_json_or({}), request.path
        if not isinstance(body, dict):
            raise Refused("the body must be an object", path="$")
        answer: Response = await self.weights.apart(partial(self._all, path, body))
        return answer

    async def _all(self, path: str, body: dict[str, Any]) -> Response:
        members = self.weights.able()
        if path in (*BUCKETS, DISK):
            body = await self._named(path, body, members)
        sent = await self._bodies(path, body, members)
        words = await self.weights.ask(members, "POST", path, lambda each: {"value": sent[each.link.url]})
        await self._noted(path, body, members, words)
        return passed(worst(words) if len(took(words)) < len(words) else words[0][1])

    async def _named(self, path: str, body: dict[str, Any], members: list[FleetMember]) -> dict[str, Any]:
        """The body with a version that no node has used, the same for each bucket of an update."""
        asked, desired = body.get("weight_version"), self.weights.desired
        again = desired is not None and asked == desired["version"]
        if again and path == DISK and self._path() == body.get("model_path"):
            return body
        if asked not in self._names:
            words = took(await self.weights.ask(members, "GET", "/v1/weights"))
            states = [answer.json for _, answer in words]
            used = {each["version"] for state in states for each in state["history"]}
            self._names[asked] = fresh(asked, used.union(*(state["versions"] for state in states)))
        given = self._names[asked]
        if not self._held or path == DISK:  # a whole model: the next one is another
            self._names.clear()
        return {**body, "weight_version": given}

    def _path(self) -> object:
        """The folder of the desired version, if it has one."""
        return None if self.weights.desired is None else self.weights.desired["source"].get("path")

    async def _bodies(
        self, path: str, body: dict[str, Any], members: list[FleetMember]
    ) -> Mapping[str, dict[str, Any]]:
        """The body for each node, by its address."""
        sent = {each.link.url: body for each in members}
        if path == "/update_weight_version":
            name = body.get("new_version")
            return {url: {**body, "new_version": self._names.get(name, name)} for url in sent}
        if path == "/init_weights_update_group" and isinstance(first := body.get("rank_offset"), int):
            offsets = rank_offsets(first, await self.weights.ranks(members))
            return {url: {**body, "rank_offset": at} for url, at in zip(sent, offsets, strict=True)}
        handles = body.get("serialized_named_tensors")
        if path == BUCKETS[0] and isinstance(handles, list):
            parts = payloads_of(handles, await self.weights.ranks(members))
            return {
                url: {**body, "serialized_named_tensors": part} for url, part in zip(sent, parts, strict=True)
            }
        return sent

    async def _noted(self, path: str, body: dict[str, Any], members: list[FleetMember], words: Words) -> None:
        """What follows from the nodes' answers for the next request, and for nodes that join."""
        group, whole = str(body.get("group_name", GROUP)), len(took(words)) == len(words)
        if path == PAUSE:
            self._held, self.weights.paused = True, {"mode": body.get("mode") or "retract"}
            self._names.clear()
        elif path == "/begin_weight_update":
            self._held = True
            self._names.clear()
        elif path == "/init_weights_update_group" and whole:
            self.weights.groups[group] = [each.link.url for each in members]
        elif path == "/destroy_weights_update_group":
            self.weights.groups.pop(group, None)
        elif path in BUCKETS and not whole and self._held:
            others = [member for member, _ in took(words)]
            await self.weights.ask(others, "POST", PAUSE, lambda _: {"value": {"mode": "in_place"}})
        if path == CONTINUE:
            self.weights.paused = None
        if path in SERVING and not (path in BUCKETS and self._held):
            await self._served(members)
        if path in (CONTINUE, "/end_weight_update"):
            self._held = False
            self._names.clear()

    async def _served(self, members: list[FleetMember]) -> None:
        """What is served by now is desired; who serves something else is stale."""
        found = await self.weights.ask(members, "GET", "/v1/weights")
        states = {member.link.url: answer.json for member, answer in took(found)}
        last = newest([state["history"] for state in states.values()])
        if last is None:
            return
        self.weights.want({name: last[name] for name in ("version", "source", "mode")})
        for member in members:
            state = states.get(member.link.url)
            self.weights.mark(member, stale=state is None or state["version"] != last["version"])
