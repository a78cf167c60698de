"""Changes of weights and engines for all nodes of a log that serve a model, at any node's address.

A version from a disk and an adapter reach the other nodes through the log (`engine/following.py`), so only
this node answers such a request. A change without files is passed on: handles, buckets over process groups,
groups, and lent memory go to every node of the model at once, each with its own ranks and payloads. A node
that did not take an update is stale, and the answer names it. If one node refuses a part of an update of
several requests, all nodes give the update up.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.proxy import (
    DROPPED_ANSWER_HEADERS,
    PASSED_TO,
    MisdirectedRequest,
    OtherNodes,
    pass_failure_response,
    pass_on,
)
from polarnode.api.service import json_response
from polarnode.client.requests import JSON_BODY
from polarnode.client.values import Unreachable
from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, Conflict, Refused
from polarnode.core.weights import PauseMode
from polarnode.engine.weights import EXTERNAL_MARK, Weights
from polarnode.http.asgi import RouteRow, body_json_or
from polarnode.http.link import NodeAnswer
from polarnode.journal.log.port import NodeRow

UPDATE_TIMEOUT_S: Final = 1000.0  # the longest silence in an answer; a node itself limits an update to 900 s
SHOWN_S: Final = 5.0  # longer than the first node: then a node that has not said what it serves is left out
LATE_S: Final = 60.0  # a node that takes an update this much later than the first is stale
RESUME_TIMEOUT_S: Final = 30.0  # for generation to resume on all nodes: one message to each
# This header names the node that passed a request on to a node that asks all nodes. If a node gets it that
# would pass the request on too, an address leads back.
PASSED_BY: Final = "Polarnode-Passed-By"
HOLD_PATHS: Final = ("/v1/engine/pause", "/v1/engine/resume")

Handler = Callable[..., Awaitable[Response]]
Words = list[tuple[NodeRow, NodeAnswer]]
BodyForNode = Callable[[NodeRow], Json]


# ── what follows from the nodes' answers ──────────────────────────────────────


def rank_offsets(first: int, ranks: Sequence[int]) -> list[int]:
    """The first rank of each node in a process group over all their GPUs."""
    return [first + sum(ranks[:at]) for at in range(len(ranks))]


def split_payloads(payloads: Sequence[str], ranks: Sequence[int]) -> list[list[str]]:
    """The payloads for each node: its own part if there is one payload for every GPU of all nodes, else all
    of them.
    """
    if len(payloads) != sum(ranks):
        return [list(payloads) for _ in ranks]
    return [list(payloads[at : at + each]) for at, each in zip(rank_offsets(0, ranks), ranks, strict=True)]


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several nodes' weights, joined as if they were one node. The first is that of the node
    that was asked.
    """
    return {
        **states[0],
        "updating": next((each["updating"] for each in states if each["updating"]), None),
        "paused": next((each["paused"] for each in states if each["paused"]), None),
        "released": sorted({tag for each in states for tag in each["released"]}),
        "failures": sum(each["failures"] for each in states),
        "last_seconds": max((each["last_seconds"] or 0.0 for each in states), default=None),
        "warning": next((each["warning"] for each in states if each["warning"]), None),
        "ranks": sum(each["ranks"] for each in states),
    }


def sort_by_name(members: Iterable[NodeRow]) -> list[NodeRow]:
    """The nodes in the order of a trainer's payloads, which is the same whichever node it asks."""
    return sorted(members, key=lambda each: each.facts.name)


def took(words: Words) -> Words:
    return [(row, answer) for row, answer in words if answer.status < 300]


def worst(words: Words) -> NodeAnswer:
    """The failure to report: the one with the lowest status, so a refusal before a silence, because a refusal
    says what to mend.
    """
    refused = [answer for _, answer in words if answer.status >= 300]
    return min(refused, key=lambda each: each.status, default=silent("no node answered"))


def silent(why: str) -> NodeAnswer:
    body: Json = {"error": {"type": "unreachable", "message": why}}
    return NodeAnswer(status=503, headers={"content-type": "application/json"}, body=dump_json(body))


def passed(answer: NodeAnswer) -> Response:
    """A node's answer as it is."""
    kept = {name.title(): each for name, each in answer.headers.items() if name not in DROPPED_ANSWER_HEADERS}
    return Response(answer.body, answer.status, {**kept, "Content-Length": str(len(answer.body))})


def join_reports(words: Words, stale: Sequence[str]) -> dict[str, Any]:
    """The reports of several nodes as one report; the numbering of hosts goes on from node to node."""
    reports = [answer.json for _, answer in words]
    hosts = [host for each in reports for host in each.get("hosts", ())]
    return {
        **reports[0],
        "seconds": max(each["seconds"] for each in reports),
        "hosts": [{**host, "index": at} for at, host in enumerate(hosts)],
        "created": any(each["created"] for each in reports),
        "stale": list(stale),
    }


# ── the nodes of a model ──────────────────────────────────────────────────────


@define(eq=False, kw_only=True)
class ModelNodes:
    """The nodes of a log that serve this node's model, this one among them."""

    others: OtherNodes
    weights: Weights

    async def members(self) -> list[NodeRow]:
        """The nodes that are alive: this node first, then the others in a fixed order."""
        rows = await self.weights.nodes()
        return sorted(rows, key=lambda each: (each.facts.name != self.others.name, each.facts.name))

    async def elsewhere(self) -> NodeRow | None:
        """The node to ask in place of this one, if the request names another model or if this node has no
        engine. Raises Refused if the request must name a model.
        """
        asked = request.args.get("model")
        rows = [each for each in await self.others.log.nodes() if "" in each.serving]
        models = sorted({each.facts.labels.get("model", "") for each in rows})
        if asked is None and len(models) > 1:
            raise Refused(
                f"the log serves {', '.join(models)}: name the one that is meant, as ?model={models[0]}",
                path="?model",
            )
        if asked is not None and asked not in models:
            raise Refused(f"no node serves {asked!r}: the log serves {', '.join(models)}", path="?model")
        has_engine = bool(self.weights.engines.restarts)
        if has_engine and asked in (None, self.weights.name):
            return None
        wanted = asked or next(iter(models), None)
        found = [each for each in rows if each.facts.labels.get("model", "") == wanted]
        if not found:
            raise Busy("no node of the log has an engine now", retry_after=2.0)
        # External ones are taken only if there are no others.
        return min(found, key=lambda each: EXTERNAL_MARK in each.serving)

    async def ask(
        self,
        members: Sequence[NodeRow],
        method: str,
        path: str | Callable[[NodeRow], str],
        bodies: BodyForNode | None = None,
        *,
        late_s: float = UPDATE_TIMEOUT_S,
    ) -> Words:
        """Ask several nodes at once, each for itself, and return their answers in order. A node fails if it
        gives no answer, or none within `late_s` after the first success.
        """
        found: dict[int, NodeAnswer] = {}
        patience = trio.CancelScope()

        async def one(row: NodeRow) -> None:
            where, body = (
                path if isinstance(path, str) else path(row),
                None if bodies is None else bodies(row),
            )
            answer = await self.ask_node(row, method, where, body)
            found[row.incarnation] = answer
            if answer.status < 300:
                patience.deadline = min(patience.deadline, trio.current_time() + late_s)

        with patience:
            async with trio.open_nursery() as nursery:
                for row in members:
                    nursery.start_soon(one, row)
        late = silent(f"no answer within {late_s:.0f} s after the first node's")
        return [(row, found.get(row.incarnation, late)) for row in members]

    async def ask_node(
        self, row: NodeRow, method: str, path: str, value: Json = None, *, for_itself: bool = True
    ) -> NodeAnswer:
        headers = {PASSED_TO: row.facts.name} if for_itself else {PASSED_BY: self.others.name}
        body = None if value is None else dump_json(value)
        if body is not None:
            headers |= JSON_BODY
        try:
            return await self.others.link(row).ask(
                method, path, body=body, headers=headers, timeout_s=UPDATE_TIMEOUT_S
            )
        except Unreachable as error:
            return silent(str(error))

    async def hold(self, body: Json, mode: PauseMode | None) -> Words:
        """Pause or resume generation of the model: first here, then in the log, which nodes that join follow,
        then on the other nodes.
        """
        here = (await self.members())[:1]
        words = await self.ask(here, "POST", request.path, lambda _: body)
        if took(words):
            await self.weights.log.hold_generation(mode, model=self.weights.name)
            others = (await self.members())[1:]
            words += await self.ask(others, "POST", request.path, lambda _: body)
        return words

    async def ranks(self, members: Sequence[NodeRow]) -> list[int]:
        words = await self.ask(members, "GET", "/v1/weights", late_s=SHOWN_S)
        if len(took(words)) < len(words):
            raise Busy("a node does not give its number of GPUs: try again", retry_after=2.0)
        return [int(answer.json["ranks"]) for _, answer in words]

    async def answer_elsewhere(self) -> Response | None:
        """The answer of another node, if the request is meant for that node."""
        row = await self.elsewhere()
        if row is None:
            return None
        if (by := request.headers.get(PASSED_BY)) is not None:
            raise MisdirectedRequest(
                f"node {by!r} passed this request on to {self.others.name!r}, which has no engine for it:"
                " give each node a url at which it alone is reached"
            )
        # The body is files: this node takes them as they come, and the others get them from the log.
        if request.method == "PUT":
            return await pass_on(self.others, row)
        query = request.query_string.decode()
        path = quote(request.path, safe="/:%") + (f"?{query}" if query else "")
        value = await body_json_or(None)
        return passed(await self.ask_node(row, request.method, path, value, for_itself=False))


# ── the routes ────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class _OpenUpdate:
    """An update of several requests. Each node has its own id for it; the keys are incarnations, as strings
    of a JSON object.
    """

    version: str
    kind: str
    ids: Mapping[str, str]


@define(eq=False)
class WeightNodeRoutes:
    """Routes of weights and engines, answered for all nodes of the model. Changes run one after another."""

    nodes: ModelNodes
    _lock: trio.Lock = field(factory=trio.Lock, init=False)

    def rows(self, rows: Iterable[RouteRow]) -> Iterator[RouteRow]:
        """The rows of the route table; requests that change weights go to all nodes."""
        table: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/weights"): self._update,
            ("GET", "/v1/weights"): self._show,
            ("POST", "/v1/weights/updates"): self._begin,
            ("POST", "/v1/weights/updates/<update_id>/buckets"): self._add,
            ("POST", "/v1/weights/updates/<update_id>/commit"): self._commit,
            ("DELETE", "/v1/weights/updates/<update_id>"): self._give_up,
            ("POST", "/v1/weights/groups"): self._join,
            ("DELETE", "/v1/weights/groups/<name>"): self._leave,
            **{("POST", path): self._hold for path in HOLD_PATHS},
            ("POST", "/v1/engine/memory/release"): self._of_all,
            ("POST", "/v1/engine/memory/resume"): self._of_all,
            ("POST", "/v1/adapters"): self._answer_here,
            ("GET", "/v1/adapters"): self._answer_here,
            ("PUT", "/v1/adapters/<name>/versions/<version>"): self._answer_here,
            ("DELETE", "/v1/adapters/<name>"): self._answer_here,
        }
        for method, path, handler in rows:
            ask = table.get((method, path))
            yield method, path, handler if ask is None else partial(self._answer, ask, handler)

    async def _answer(self, ask: Handler, here: Handler, **names: str) -> Response:
        """Answer a request here if it was passed on to this node or there is no other node; otherwise ask all
        nodes.
        """
        if request.path in HOLD_PATHS and "model" not in request.args:
            return await here(**names)  # without a model, all nodes are meant, whatever they serve
        try:
            if self.nodes.others.was_passed_on():
                return await here(**names)
            if (answer := await self.nodes.answer_elsewhere()) is not None:
                return answer
        except (MisdirectedRequest, Unreachable) as error:
            return pass_failure_response(error)
        members = await self.nodes.members()
        if len(members) < (1 if request.path in HOLD_PATHS and self.nodes.others.log.shared else 2):
            return await here(**names)
        if request.method in ("GET", "PUT"):  # other changes need not wait for a slow upload
            return await ask(here, members, **names)
        async with self._lock:
            return await ask(here, members, **names)

    async def _answer_here(self, here: Handler, members: list[NodeRow], **names: str) -> Response:
        """Answer here; the other nodes follow the log."""
        return await here(**names)

    async def _of_all(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await body_json_or({})
        return self._joined(await self.nodes.ask(members, "POST", request.path, lambda _: body))

    async def _hold(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await _object()
        mode = body.get("mode", "in_place") if request.path == HOLD_PATHS[0] else None
        return self._joined(await self.nodes.hold(body, mode))

    def _joined(self, words: Words) -> Response:
        if len(took(words)) < len(words):
            return passed(worst(words))
        return json_response(join_states([answer.json for _, answer in words]))

    async def _show(self, here: Handler, members: list[NodeRow]) -> Response:
        words = took(await self.nodes.ask(members, "GET", "/v1/weights", late_s=SHOWN_S))
        if not words or words[0][0] is not members[0]:
            return await here()
        return json_response(join_states([answer.json for _, answer in words]))

    # ── an update of one request ──────────────────────────────────────────────

    async def _update(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await _object()
        source = body.get("source")
        source = source if isinstance(source, dict) else {}
        switch = body.pop("switch", "rolling")
        if switch not in ("rolling", "barrier"):
            raise Refused('switch must be "rolling" or "barrier"', path="$.switch")
        if switch == "barrier":
            return await self._update_at_barrier(body, source, members)
        return await self._updated(body, source, members)

    async def _updated(
        self, body: dict[str, Any], source: Mapping[str, Any], members: list[NodeRow]
    ) -> Response:
        if source.get("kind") not in ("tensor", "distributed"):
            return passed(await self.nodes.ask_node(members[0], "POST", "/v1/weights", body))
        reached = await self._receiving_nodes(source, members)
        bodies = await self._bodies(body, source, reached)
        words = await self.nodes.ask(reached, "POST", "/v1/weights", bodies, late_s=LATE_S)
        return await self._settled(members, words)

    async def _update_at_barrier(
        self, body: dict[str, Any], source: Mapping[str, Any], members: list[NodeRow]
    ) -> Response:
        """Keep all nodes from sampling until all have loaded or are stale. If the trainer holds generation
        already, it is left to the trainer to resume it.
        """
        if self.nodes.weights.status().paused is not None:
            return await self._updated(body, source, members)
        mode = body.get("mode", "in_place")
        pause: Json = {"mode": "retract" if mode == "drain" else mode}
        try:
            await self.nodes.ask(members, "POST", "/v1/engine/pause", lambda _: pause, late_s=LATE_S)
            return await self._updated(body, source, members)
        finally:  # agents wait, so resume even if the trainer is gone or a node was too slow
            with trio.move_on_after(RESUME_TIMEOUT_S, shield=True):
                await self.nodes.ask(members, "POST", "/v1/engine/resume", lambda _: {})

    async def _settled(self, members: Sequence[NodeRow], words: Words) -> Response:
        """The answer to an update that has no files. Nodes that did not take it are stale."""
        served = took(words)
        if not served:
            return passed(worst(words))
        have = {row.incarnation for row, _ in served}
        stale = [row.facts.name for row in members if row.incarnation not in have]
        report = join_reports(served, stale)
        return json_response(report, 201 if report["created"] else 200)

    async def _receiving_nodes(self, source: Mapping[str, Any], members: list[NodeRow]) -> list[NodeRow]:
        """The nodes that receive an update: all, or those of the process group, which must all be alive."""
        if source.get("kind") != "distributed":
            return sort_by_name(members)
        name = str(source.get("group", "weights"))
        log, model = self.nodes.weights.log, self.nodes.weights.name
        joined = structure(await log.read_transfer("group", name, model=model) or [], tuple[int, ...])
        found = [each for each in members if each.incarnation in joined]
        if not joined or len(found) < len(joined):
            raise Conflict(
                f"group {name!r} is not joined by all its nodes any more: leave it (DELETE"
                f" /v1/weights/groups/{name}) and join again"
            )
        return sort_by_name(found)

    async def _bodies(
        self, body: dict[str, Any], source: Mapping[str, Any], members: Sequence[NodeRow]
    ) -> BodyForNode:
        """The body of an update for each node, with that node's own handles."""
        if source.get("kind") != "tensor":
            return lambda _: body
        ranks, buckets = await self.nodes.ranks(members), source.get("buckets") or []
        try:
            parts = [split_payloads(each["payloads"], ranks) for each in buckets]
        except (TypeError, KeyError, AttributeError):
            raise Refused("each bucket must be an object with payloads", path="$.source.buckets") from None
        own: dict[int, Json] = {}
        for at, row in enumerate(members):
            mine = zip(buckets, (list[Json](part[at]) for part in parts), strict=True)
            split: list[Json] = [{**each, "payloads": payloads} for each, payloads in mine]
            own[row.incarnation] = {**body, "source": {**source, "buckets": split}}
        return lambda row: own[row.incarnation]

    # ── an update of several requests ─────────────────────────────────────────

    async def _begin(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await _object()
        source = body.get("source")
        source = source if isinstance(source, dict) else {}
        reached = await self._receiving_nodes(source, members)
        bodies = await self._bodies(body, source, reached)
        words = await self.nodes.ask(reached, "POST", "/v1/weights/updates", bodies, late_s=LATE_S)
        ids = {str(row.incarnation): answer.json["update_id"] for row, answer in took(words)}
        opened = _OpenUpdate(version=str(body.get("version")), kind=str(source.get("kind")), ids=ids)
        if len(ids) < len(reached):
            await self._end(opened, members)
            return passed(worst(words))
        update_id, weights = uuid4().hex, self.nodes.weights
        await weights.log.add_transfer("update", update_id, plain(opened), model=weights.name)
        return json_response({**words[0][1].json, "update_id": update_id}, 201)

    async def _add(self, here: Handler, members: list[NodeRow], update_id: str) -> Response:
        """Add a bucket on every node. If one node refuses it, the update ends on all nodes."""
        opened = await self._opened(update_id)
        if opened is None:
            return await here(update_id=update_id)
        body, reached = await _object(), self._members(opened, members)
        parts: dict[int, Json] = {}
        if opened.kind == "tensor" and isinstance(body.get("payloads"), list):
            split = split_payloads(body["payloads"], await self.nodes.ranks(reached))
            for row, mine in zip(reached, split, strict=True):
                parts[row.incarnation] = {**body, "payloads": list[Json](mine)}
        words = await self._each(opened, reached, "buckets", lambda row: parts.get(row.incarnation, body))
        if len(took(words)) < len(opened.ids):
            await self._forget(update_id)
            await self._end(opened, members)
            return passed(worst(words))
        return json_response({**words[0][1].json, "update_id": update_id})

    async def _commit(self, here: Handler, members: list[NodeRow], update_id: str) -> Response:
        opened = await self._opened(update_id)
        if opened is None:
            return await here(update_id=update_id)
        reached = self._members(opened, members)
        return await self._settled(members, await self._each(opened, reached, "commit", lambda _: {}))

    async def _give_up(self, here: Handler, members: list[NodeRow], update_id: str) -> Response:
        opened = await self._opened(update_id)
        if opened is None:
            return await here(update_id=update_id)
        await self._forget(update_id)
        await self._end(opened, members)
        return await self._show(here, members)

    async def _opened(self, update_id: str) -> _OpenUpdate | None:
        """An update that this node or another one began."""
        weights = self.nodes.weights
        found = await weights.log.read_transfer("update", update_id, model=weights.name)
        return None if found is None else structure(found, _OpenUpdate)

    async def _forget(self, update_id: str) -> None:
        weights = self.nodes.weights
        await weights.log.end_transfer("update", update_id, model=weights.name)

    def _members(self, opened: _OpenUpdate, members: Sequence[NodeRow]) -> list[NodeRow]:
        return sort_by_name(each for each in members if str(each.incarnation) in opened.ids)

    async def _each(
        self, opened: _OpenUpdate, members: Sequence[NodeRow], end: str, bodies: BodyForNode
    ) -> Words:
        """Ask every node of an update for its part, each under its own id. A node that hangs is not waited
        for, because the other nodes hold generation meanwhile.
        """
        return await self.nodes.ask(
            members,
            "POST",
            lambda row: f"/v1/weights/updates/{opened.ids[str(row.incarnation)]}/{end}",
            bodies,
            late_s=LATE_S,
        )

    async def _end(self, opened: _OpenUpdate, members: Sequence[NodeRow]) -> None:
        async with trio.open_nursery() as nursery:
            for row in self._members(opened, members):
                path = f"/v1/weights/updates/{opened.ids[str(row.incarnation)]}"
                nursery.start_soon(self.nodes.ask_node, row, "DELETE", path)

    # ── groups ────────────────────────────────────────────────────────────────

    async def _join(self, here: Handler, members: list[NodeRow]) -> Response:
        """Join a process group on every node. The GPUs of a node have the ranks after those of the node
        before it.
        """
        body = await _object()
        first = body.get("rank_offset", 1)
        if not isinstance(first, int):
            raise Refused("rank_offset must be a number", path="$.rank_offset")
        offsets = rank_offsets(first, await self.nodes.ranks(members))
        own = dict(zip((each.incarnation for each in members), offsets, strict=True))
        words = await self.nodes.ask(
            members, "POST", "/v1/weights/groups", lambda row: {**body, "rank_offset": own[row.incarnation]}
        )
        if len(took(words)) < len(words):
            return passed(worst(words))
        weights, name = self.nodes.weights, str(body.get("name", "weights"))
        await weights.log.add_transfer("group", name, list(own), model=weights.name)
        return json_response({**words[0][1].json, "rank_offset": first}, 201)

    async def _leave(self, here: Handler, members: list[NodeRow], name: str) -> Response:
        await self.nodes.weights.log.end_transfer("group", name, model=self.nodes.weights.name)
        path = f"/v1/weights/groups/{quote(name, safe='')}"
        words = await self.nodes.ask(members, "DELETE", path)
        return json_response({"name": name}) if took(words) else passed(worst(words))


async def _object() -> dict[str, Any]:
    body = await body_json_or({})
    if not isinstance(body, dict):
        raise Refused("the body must be an object", path="$")
    return dict(body)
