"""Changes of weights and engines for all nodes of a log that serve a model, at any node's address.

A version from a disk and an adapter reach the other nodes by the log (`engine/following.py`), and are
answered here alone. What has no files is passed on: handles, buckets over process groups, groups, and memory
that is lent go to every node of the model at once, each with its own ranks and payloads. A node that did not
take an update is stale, and named; an update of several requests that one node refuses is given up by all.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.proxy import NOT_ANSWERED_WITH, PASSED_TO, Astray, OtherNodes, answer_for, pass_on
from polarnode.api.service import json_response
from polarnode.client.requests import JSON_BODY
from polarnode.client.values import Unreachable
from polarnode.core.codec.json import dump_json, plain, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, Conflict, Refused
from polarnode.core.weights import PauseMode
from polarnode.engine.weights import EXTERNAL, Weights
from polarnode.http.asgi import RouteRow, body_json_or
from polarnode.http.link import NodeAnswer
from polarnode.journal.log.port import NodeRow

UPDATE_S: Final = 1000.0  # without a byte of an answer: a node's own bound of an update is 900 s
SHOWN_S: Final = (
    5.0  # that a node may take longer than the first to say what it serves: one that hangs is left
)
LATE_S: Final = 60.0  # that a node may take longer than the first to take an update: then it is stale
RESUME_S: Final = 30.0  # for generation to continue on all nodes: one message to each
# names the node that passed a request on to one that asks all: who gets it and would do so too has an address
# that leads back
PASSED_BY: Final = "Polarnode-Passed-By"
HOLDS: Final = ("/v1/engine/pause", "/v1/engine/resume")

Handler = Callable[..., Awaitable[Response]]
Words = list[tuple[NodeRow, NodeAnswer]]
Bodies = Callable[[NodeRow], Json]


# ── what follows from the nodes' answers ──────────────────────────────────────


def rank_offsets(first: int, ranks: Sequence[int]) -> list[int]:
    """The first rank of each node in a process group over all their GPUs."""
    return [first + sum(ranks[:at]) for at in range(len(ranks))]


def payloads_of(payloads: Sequence[str], ranks: Sequence[int]) -> list[list[str]]:
    """The payloads for each node: its own where there is one for every GPU of all, else the same."""
    if len(payloads) != sum(ranks):
        return [list(payloads) for _ in ranks]
    return [list(payloads[at : at + each]) for at, each in zip(rank_offsets(0, ranks), ranks, strict=True)]


def joined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The nodes' states of their weights as one node's; the first is that of the node that was asked."""
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


def in_one_order(members: Iterable[NodeRow]) -> list[NodeRow]:
    """Nodes as a trainer's payloads are for them, whichever node it asks."""
    return sorted(members, key=lambda each: each.facts.name)


def took(words: Words) -> Words:
    return [(row, answer) for row, answer in words if answer.status < 300]


def worst(words: Words) -> NodeAnswer:
    """A refusal before a silence: it says what is to be mended."""
    refused = [answer for _, answer in words if answer.status >= 300]
    return min(refused, key=lambda each: each.status, default=silent("no node answered"))


def silent(why: str) -> NodeAnswer:
    body: Json = {"error": {"type": "unreachable", "message": why}}
    return NodeAnswer(status=503, headers={"content-type": "application/json"}, body=dump_json(body))


def passed(answer: NodeAnswer) -> Response:
    """A node's answer as it is."""
    kept = {name.title(): each for name, each in answer.headers.items() if name not in NOT_ANSWERED_WITH}
    return Response(answer.body, answer.status, {**kept, "Content-Length": str(len(answer.body))})


def report_of_all(words: Words, stale: Sequence[str]) -> dict[str, Any]:
    """The reports of nodes as one: hosts are counted on from node to node."""
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
        """Those that are alive; this node is the first, the others in one order."""
        rows = await self.weights.nodes()
        return sorted(rows, key=lambda each: (each.facts.name != self.others.name, each.facts.name))

    async def elsewhere(self) -> NodeRow | None:
        """The node to ask in place of this one: where the request names another model, or no engine is
        here. Raises Refused where it must name a model.
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
        return min(found, key=lambda each: EXTERNAL in each.serving)  # those only, where there are no others

    async def ask(
        self,
        members: Sequence[NodeRow],
        method: str,
        path: str | Callable[[NodeRow], str],
        bodies: Bodies | None = None,
        *,
        late_s: float = UPDATE_S,
    ) -> Words:
        """Ask nodes at once, each for itself, and give their answers in order. A node has failed that gives
        none, or none within `late_s` after the first that did what was asked.
        """
        found: dict[int, NodeAnswer] = {}
        patience = trio.CancelScope()

        async def one(row: NodeRow) -> None:
            where, body = (
                path if isinstance(path, str) else path(row),
                None if bodies is None else bodies(row),
            )
            answer = await self.ask_one(row, method, where, body)
            found[row.incarnation] = answer
            if answer.status < 300:
                patience.deadline = min(patience.deadline, trio.current_time() + late_s)

        with patience:
            async with trio.open_nursery() as nursery:
                for row in members:
                    nursery.start_soon(one, row)
        late = silent(f"no answer within {late_s:.0f} s after the first node's")
        return [(row, found.get(row.incarnation, late)) for row in members]

    async def ask_one(
        self, row: NodeRow, method: str, path: str, value: Json = None, *, for_itself: bool = True
    ) -> NodeAnswer:
        headers = {PASSED_TO: row.facts.name} if for_itself else {PASSED_BY: self.others.name}
        body = None if value is None else dump_json(value)
        if body is not None:
            headers |= JSON_BODY
        try:
            return await self.others.link(row).ask(
                method, path, body=body, headers=headers, timeout_s=UPDATE_S
            )
        except Unreachable as error:
            return silent(str(error))

    async def hold(self, body: Json, mode: PauseMode | None) -> Words:
        """Hold generation of the model, or let it go on: first here, then in the log, which whoever joins
        follows, then on the other nodes.
        """
        here = (await self.members())[:1]
        words = await self.ask(here, "POST", request.path, lambda _: body)
        if took(words):
            await self.weights.log.hold(mode, model=self.weights.name)
            others = (await self.members())[1:]
            words += await self.ask(others, "POST", request.path, lambda _: body)
        return words

    async def ranks(self, members: Sequence[NodeRow]) -> list[int]:
        words = await self.ask(members, "GET", "/v1/weights", late_s=SHOWN_S)
        if len(took(words)) < len(words):
            raise Busy("a node does not give its number of GPUs: try again", retry_after=2.0)
        return [int(answer.json["ranks"]) for _, answer in words]

    async def answered_elsewhere(self) -> Response | None:
        """The answer of the node that is meant, if that is another one."""
        row = await self.elsewhere()
        if row is None:
            return None
        if (by := request.headers.get(PASSED_BY)) is not None:
            raise Astray(
                f"node {by!r} passed this request on to {self.others.name!r}, which has no engine for it:"
                " give each node a url at which it alone is reached"
            )
        if request.method == "PUT":  # files, which it takes as they come, and the others have from the log
            return await pass_on(self.others, row)
        query = request.query_string.decode()
        path = quote(request.path, safe="/:%") + (f"?{query}" if query else "")
        value = await body_json_or(None)
        return passed(await self.ask_one(row, request.method, path, value, for_itself=False))


# ── the routes ────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class _Opened:
    """An update of several requests: each node's own id of it, by incarnation, as a JSON object has it."""

    version: str
    kind: str
    ids: Mapping[str, str]


@define(eq=False)
class WeightNodeRoutes:
    """Routes of weights and engines, answered for all nodes of the model. Changes run one after another."""

    nodes: ModelNodes
    _lock: trio.Lock = field(factory=trio.Lock, init=False)

    def rows(self, rows: Iterable[RouteRow]) -> Iterator[RouteRow]:
        """The routes, of which those of weights are asked of all nodes."""
        table: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/weights"): self._update,
            ("GET", "/v1/weights"): self._show,
            ("POST", "/v1/weights/updates"): self._begin,
            ("POST", "/v1/weights/updates/<update_id>/buckets"): self._add,
            ("POST", "/v1/weights/updates/<update_id>/commit"): self._commit,
            ("DELETE", "/v1/weights/updates/<update_id>"): self._give_up,
            ("POST", "/v1/weights/groups"): self._join,
            ("DELETE", "/v1/weights/groups/<name>"): self._leave,
            **{("POST", path): self._hold for path in HOLDS},
            ("POST", "/v1/engine/memory/release"): self._of_all,
            ("POST", "/v1/engine/memory/resume"): self._of_all,
            ("POST", "/v1/adapters"): self._by_log,
            ("GET", "/v1/adapters"): self._by_log,
            ("PUT", "/v1/adapters/<name>/versions/<version>"): self._by_log,
            ("DELETE", "/v1/adapters/<name>"): self._by_log,
        }
        for method, path, handler in rows:
            ask = table.get((method, path))
            yield method, path, handler if ask is None else partial(self._answer, ask, handler)

    async def _answer(self, ask: Handler, here: Handler, **names: str) -> Response:
        """What was passed on to this node is answered here; else all nodes are asked, if there are more."""
        if request.path in HOLDS and "model" not in request.args:
            return await here(**names)  # every node's, of whichever model
        try:
            if self.nodes.others.is_for_us():
                return await here(**names)
            if (answer := await self.nodes.answered_elsewhere()) is not None:
                return answer
        except (Astray, Unreachable) as error:
            return answer_for(error)
        members = await self.nodes.members()
        if len(members) < (1 if request.path in HOLDS and self.nodes.others.log.shared else 2):
            return await here(**names)
        if request.method in ("GET", "PUT"):  # a slow upload is no reason for others to wait
            return await ask(here, members, **names)
        async with self._lock:
            return await ask(here, members, **names)

    async def _by_log(self, here: Handler, members: list[NodeRow], **names: str) -> Response:
        """The others have it from the log."""
        return await here(**names)

    async def _of_all(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await body_json_or({})
        return self._joined(await self.nodes.ask(members, "POST", request.path, lambda _: body))

    async def _hold(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await _object()
        mode = body.get("mode", "in_place") if request.path == HOLDS[0] else None
        return self._joined(await self.nodes.hold(body, mode))

    def _joined(self, words: Words) -> Response:
        if len(took(words)) < len(words):
            return passed(worst(words))
        return json_response(joined_state([answer.json for _, answer in words]))

    async def _show(self, here: Handler, members: list[NodeRow]) -> Response:
        words = took(await self.nodes.ask(members, "GET", "/v1/weights", late_s=SHOWN_S))
        if not words or words[0][0] is not members[0]:
            return await here()
        return json_response(joined_state([answer.json for _, answer in words]))

    # ── an update of one request ──────────────────────────────────────────────

    async def _update(self, here: Handler, members: list[NodeRow]) -> Response:
        body = await _object()
        source = body.get("source")
        source = source if isinstance(source, dict) else {}
        switch = body.pop("switch", "rolling")
        if switch not in ("rolling", "barrier"):
            raise Refused('switch must be "rolling" or "barrier"', path="$.switch")
        if switch == "barrier":
            return await self._at_a_barrier(body, source, members)
        return await self._updated(body, source, members)

    async def _updated(
        self, body: dict[str, Any], source: Mapping[str, Any], members: list[NodeRow]
    ) -> Response:
        if source.get("kind") not in ("tensor", "distributed"):
            return passed(await self.nodes.ask_one(members[0], "POST", "/v1/weights", body))
        reached = await self._of_group(source, members)
        bodies = await self._bodies(body, source, reached)
        words = await self.nodes.ask(reached, "POST", "/v1/weights", bodies, late_s=LATE_S)
        return await self._settled(members, words)

    async def _at_a_barrier(
        self, body: dict[str, Any], source: Mapping[str, Any], members: list[NodeRow]
    ) -> Response:
        """No node samples until all have loaded, or are stale. Where the trainer holds generation already,
        that is left to it.
        """
        if self.nodes.weights.status().paused is not None:
            return await self._updated(body, source, members)
        mode = body.get("mode", "in_place")
        pause: Json = {"mode": "retract" if mode == "drain" else mode}
        try:
            await self.nodes.ask(members, "POST", "/v1/engine/pause", lambda _: pause, late_s=LATE_S)
            return await self._updated(body, source, members)
        finally:  # agents wait, also where the trainer has gone, and where a node held on after its time
            with trio.move_on_after(RESUME_S, shield=True):
                await self.nodes.ask(members, "POST", "/v1/engine/resume", lambda _: {})

    async def _settled(self, members: Sequence[NodeRow], words: Words) -> Response:
        """The answer to an update that has no files: who did not take it is stale."""
        served = took(words)
        if not served:
            return passed(worst(words))
        have = {row.incarnation for row, _ in served}
        stale = [row.facts.name for row in members if row.incarnation not in have]
        report = report_of_all(served, stale)
        return json_response(report, 201 if report["created"] else 200)

    async def _of_group(self, source: Mapping[str, Any], members: list[NodeRow]) -> list[NodeRow]:
        """The nodes that receive: all, or those of the process group, which must all be there."""
        if source.get("kind") != "distributed":
            return in_one_order(members)
        name = str(source.get("group", "weights"))
        log, model = self.nodes.weights.log, self.nodes.weights.name
        joined = structure(await log.transfer("group", name, model=model) or [], tuple[int, ...])
        found = [each for each in members if each.incarnation in joined]
        if not joined or len(found) < len(joined):
            raise Conflict(
                f"group {name!r} is not joined by all its nodes any more: leave it (DELETE"
                f" /v1/weights/groups/{name}) and join again"
            )
        return in_one_order(found)

    async def _bodies(
        self, body: dict[str, Any], source: Mapping[str, Any], members: Sequence[NodeRow]
    ) -> Bodies:
        """An update for each node, with its own handles."""
        if source.get("kind") != "tensor":
            return lambda _: body
        ranks, buckets = await self.nodes.ranks(members), source.get("buckets") or []
        try:
            parts = [payloads_of(each["payloads"], ranks) for each in buckets]
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
        reached = await self._of_group(source, members)
        bodies = await self._bodies(body, source, reached)
        words = await self.nodes.ask(reached, "POST", "/v1/weights/updates", bodies, late_s=LATE_S)
        ids = {str(row.incarnation): answer.json["update_id"] for row, answer in took(words)}
        opened = _Opened(version=str(body.get("version")), kind=str(source.get("kind")), ids=ids)
        if len(ids) < len(reached):
            await self._end(opened, members)
            return passed(worst(words))
        update_id, weights = uuid4().hex, self.nodes.weights
        await weights.log.add_transfer("update", update_id, plain(opened), model=weights.name)
        return json_response({**words[0][1].json, "update_id": update_id}, 201)

    async def _add(self, here: Handler, members: list[NodeRow], update_id: str) -> Response:
        """A bucket that one node refuses ends the update on all."""
        opened = await self._opened(update_id)
        if opened is None:
            return await here(update_id=update_id)
        body, reached = await _object(), self._members(opened, members)
        parts: dict[int, Json] = {}
        if opened.kind == "tensor" and isinstance(body.get("payloads"), list):
            split = payloads_of(body["payloads"], await self.nodes.ranks(reached))
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

    async def _opened(self, update_id: str) -> _Opened | None:
        """An update that this node or another one began."""
        weights = self.nodes.weights
        found = await weights.log.transfer("update", update_id, model=weights.name)
        return None if found is None else structure(found, _Opened)

    async def _forget(self, update_id: str) -> None:
        weights = self.nodes.weights
        await weights.log.end_transfer("update", update_id, model=weights.name)

    def _members(self, opened: _Opened, members: Sequence[NodeRow]) -> list[NodeRow]:
        return in_one_order(each for each in members if str(each.incarnation) in opened.ids)

    async def _each(self, opened: _Opened, members: Sequence[NodeRow], end: str, bodies: Bodies) -> Words:
        """Ask every node of an update for its part of it, each under its own id. One that hangs is not waited
        for: the others hold generation meanwhile.
        """
        return await self.nodes.ask(
            members,
            "POST",
            lambda row: f"/v1/weights/updates/{opened.ids[str(row.incarnation)]}/{end}",
            bodies,
            late_s=LATE_S,
        )

    async def _end(self, opened: _Opened, members: Sequence[NodeRow]) -> None:
        async with trio.open_nursery() as nursery:
            for row in self._members(opened, members):
                path = f"/v1/weights/updates/{opened.ids[str(row.incarnation)]}"
                nursery.start_soon(self.nodes.ask_one, row, "DELETE", path)

    # ── groups ────────────────────────────────────────────────────────────────

    async def _join(self, here: Handler, members: list[NodeRow]) -> Response:
        """Every node's GPUs have the ranks after those of the node before it."""
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
