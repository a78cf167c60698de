"""The front's routes of weights, engines and adapters: those of a node, asked of all nodes at once.

What one node alone refuses in an update of several requests ends it on all. Whatever has reached a node goes
through `FleetWeights.apart`, so that no two changes interleave.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.service import json_response
from polarnode.client.values import Unreachable
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, Refused
from polarnode.fleet.link import NodeAnswer
from polarnode.fleet.members import FleetMember
from polarnode.fleet.routes import passed
from polarnode.fleet.updates import joined_state, payloads_of, rank_offsets
from polarnode.fleet.weights import FleetWeights, Send, Words, report_of_all, silent, took, worst
from polarnode.http.asgi import RouteRow, body_json, body_json_or

RESUME_S: Final = 30.0  # for generation to continue on all nodes: one message to each
ADAPTER_BYTES: Final = 4 << 30  # as a node takes at most
PIECE: Final = 1 << 20  # of a file that is sent on
OPEN_MOST: Final = 8  # updates of several requests that are remembered: one is open, the rest were left


@define(eq=False, kw_only=True)
class _Opened:
    """An update of several requests: each node's own id of it."""

    version: str
    kind: str
    mode: str
    ids: dict[str, str]
    answer: dict[str, Any] | None = None


@frozen(kw_only=True)
class FleetWeightsRoutes:
    """The handlers of weights, the engines and adapters."""

    weights: FleetWeights
    opened: dict[str, _Opened] = field(factory=dict)

    def rows(self) -> Iterator[RouteRow]:
        engine = partial(self._engine)
        yield from (
            ("POST", "/v1/weights", self.update),
            ("GET", "/v1/weights", self.show),
            ("POST", "/v1/weights/updates", self.begin),
            ("POST", "/v1/weights/updates/<update_id>/buckets", self.add),
            ("POST", "/v1/weights/updates/<update_id>/commit", self.commit),
            ("DELETE", "/v1/weights/updates/<update_id>", self.give_up),
            ("POST", "/v1/weights/groups", self.join),
            ("DELETE", "/v1/weights/groups/<name>", self.leave),
            ("POST", "/v1/engine/pause", engine),
            ("POST", "/v1/engine/resume", engine),
            ("POST", "/v1/engine/memory/release", engine),
            ("POST", "/v1/engine/memory/resume", engine),
            ("POST", "/v1/adapters", self.update_adapter),
            ("GET", "/v1/adapters", self.adapters),
            ("PUT", "/v1/adapters/<name>/versions/<version>", self.receive_adapter),
            ("DELETE", "/v1/adapters/<name>", self.delete_adapter),
        )

    # ── weights ───────────────────────────────────────────────────────────────

    async def update(self) -> Response:
        """Answered when enough nodes serve it. `switch`: `rolling`, each by itself; `barrier`, none samples
        until all have it.
        """
        read_query(request.args, "model")
        body = await _object()
        switch = body.pop("switch", "rolling")
        if switch not in ("rolling", "barrier"):
            raise Refused('switch must be "rolling" or "barrier"', path="$.switch")
        answer: Response = await self.weights.apart(partial(self._update, body, switch == "barrier"))
        return answer

    async def _update(self, body: dict[str, Any], barrier: bool) -> Response:
        weights, members = self.weights, self.weights.able()
        source = body.get("source")
        source = source if isinstance(source, dict) else {}
        reached = self._of_group(source, members)
        sent = await self._bodies(body, reached) if source.get("kind") == "tensor" else {}
        held = barrier and weights.paused is None
        if held:
            mode = body.get("mode", "in_place")
            pause = {"mode": "retract" if mode == "drain" else mode}
            paused = await weights.ask(reached, "POST", "/v1/engine/pause", lambda _: {"value": pause})
            reached = [member for member, _ in took(paused)] or reached
        try:
            words = await weights.enough(
                reached, "POST", "/v1/weights", lambda each: {"value": sent.get(each.link.url, body)}
            )
            if source.get("kind") == "disk":
                words = await self._from_peers(words, body)
        finally:
            if held:  # agents wait, also where the front ends
                with trio.move_on_after(RESUME_S, shield=True):
                    await weights.ask(reached, "POST", "/v1/engine/resume")
        return self._settled(members, words, body)

    async def _from_peers(self, words: Words, body: dict[str, Any]) -> Words:
        """The answers, after nodes that do not see the folder took the files from one that does."""
        found = took(words)
        if not found:
            return words

        async def one(member: FleetMember, answer: NodeAnswer) -> None:
            found.append((member, await self.weights.pulled(member, body) or answer))

        async with trio.open_nursery() as nursery:
            for member, answer in words:
                if answer.status in (400, 409):
                    nursery.start_soon(one, member, answer)
        asked = [member for member, _ in found]
        return found + [each for each in words if each[0] not in asked]

    def _settled(self, members: Sequence[FleetMember], words: Words, body: Mapping[str, Any]) -> Response:
        """The answer to an update, which is what all nodes shall serve now unless all refused it."""
        version = body.get("version")
        if took(words):
            source = took(words)[0][1].json["source"]
            mode = body.get("mode", "in_place")
            self.weights.want({"version": version, "source": source, "mode": mode})
        if (short := self.weights.stand(members, words, f"version {version!r}")) is not None:
            return short
        report = report_of_all(took(words))
        return json_response(report, 201 if report["created"] else 200)

    def _of_group(self, source: Mapping[str, Any], members: list[FleetMember]) -> list[FleetMember]:
        """The nodes that receive: all, or those of the process group, which must all be there."""
        if source.get("kind") != "distributed":
            return members
        name = source.get("group", "weights")
        urls = self.weights.groups.get(str(name), [])
        found = [each for each in members if each.link.url in urls]
        if not urls or len(found) < len(urls):
            raise Conflict(
                f"group {name!r} is not joined by all its nodes any more: leave it (DELETE"
                f" /v1/weights/groups/{name}) and join again"
            )
        return found

    async def _bodies(
        self, body: dict[str, Any], members: Sequence[FleetMember]
    ) -> dict[str, dict[str, Any]]:
        """An update of handles for each node, by address."""
        ranks, buckets = await self.weights.ranks(members), body["source"].get("buckets") or []
        try:
            parts = [payloads_of(each["payloads"], ranks) for each in buckets]
        except (TypeError, KeyError, AttributeError):
            raise Refused("each bucket must be an object with payloads", path="$.source.buckets") from None
        return {
            member.link.url: {
                **body,
                "source": {
                    **body["source"],
                    "buckets": [
                        {**each, "payloads": part[at]} for each, part in zip(buckets, parts, strict=True)
                    ],
                },
            }
            for at, member in enumerate(members)
        }

    async def show(self) -> Response:
        read_query(request.args, "model")
        words = took(await self.weights.ask(self.weights.able(), "GET", "/v1/weights"))
        desired = self.weights.desired
        version = None if desired is None else str(desired["version"])
        return json_response(joined_state([answer.json for _, answer in words], version))

    # ── in several requests ───────────────────────────────────────────────────

    async def begin(self) -> Response:
        read_query(request.args, "model")
        body = await _object()
        answer: Response = await self.weights.apart(partial(self._begin, body))
        return answer

    async def _begin(self, body: dict[str, Any]) -> Response:
        source = body.get("source")
        source = source if isinstance(source, dict) else {}
        members = self._of_group(source, self.weights.able())
        sent = await self._bodies(body, members) if source.get("kind") == "tensor" else {}
        words = await self.weights.ask(
            members, "POST", "/v1/weights/updates", lambda each: {"value": sent.get(each.link.url, body)}
        )
        ids = {member.link.url: answer.json["update_id"] for member, answer in took(words)}
        opened = _Opened(
            version=str(body.get("version")),
            kind=str(source.get("kind")),
            mode=str(body.get("mode", "in_place")),
            ids=ids,
        )
        if len(ids) < len(members):
            await self._end(opened)
            return passed(worst(words))
        update_id = uuid4().hex
        while len(self.opened) >= OPEN_MOST:
            self.opened.pop(next(iter(self.opened)))
        self.opened[update_id] = opened
        return json_response({**words[0][1].json, "update_id": update_id}, 201)

    def _members(self, opened: _Opened) -> list[FleetMember]:
        return [each for each in self.weights.able() if each.link.url in opened.ids]

    def _one_opened(self, update_id: str) -> _Opened:
        if update_id not in self.opened:
            raise Conflict(f"no update {update_id!r} is open on this front: begin another")
        return self.opened[update_id]

    async def _end(self, opened: _Opened) -> None:
        async def one(member: FleetMember) -> None:
            with suppress(Unreachable):
                await member.link.ask("DELETE", f"/v1/weights/updates/{opened.ids[member.link.url]}")

        async with trio.open_nursery() as nursery:
            for member in self._members(opened):
                nursery.start_soon(one, member)

    async def _each(self, opened: _Opened, end: str, send: Send) -> Words:
        """Ask every node of an update for its part of it, each under its own id."""
        members, words = self._members(opened), list[tuple[FleetMember, NodeAnswer]]()

        async def one(member: FleetMember) -> None:
            path = f"/v1/weights/updates/{opened.ids[member.link.url]}/{end}"
            words.extend(await self.weights.ask([member], "POST", path, send))

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(one, member)
        return words

    async def add(self, update_id: str) -> Response:
        """A bucket that one node refuses ends the update on all."""
        read_query(request.args, "model")
        opened, body = self._one_opened(update_id), await _object()

        async def run() -> Response:
            members, parts = self._members(opened), dict[str, Any]()
            if opened.kind == "tensor" and isinstance(body.get("payloads"), list):
                split = payloads_of(body["payloads"], await self.weights.ranks(members))
                parts = {
                    each.link.url: {**body, "payloads": mine}
                    for each, mine in zip(members, split, strict=True)
                }
            words = await self._each(
                opened, "buckets", lambda each: {"value": parts.get(each.link.url, body)}
            )
            if len(took(words)) < len(opened.ids):
                await self._end(opened)
                self.opened.pop(update_id, None)
                return passed(worst(words)) if words else passed(silent(Unreachable("no node answered")))
            return json_response({**words[0][1].json, "update_id": update_id})

        answer: Response = await self.weights.apart(run)
        return answer

    async def commit(self, update_id: str) -> Response:
        read_query(request.args, "model")
        opened = self._one_opened(update_id)

        async def run() -> Response:
            members = self.weights.able()
            words = await self._each(opened, "commit", lambda _: {})
            body = {"version": opened.version, "mode": opened.mode}
            return self._settled(members, words, body)

        answer: Response = await self.weights.apart(run)
        return answer

    async def give_up(self, update_id: str) -> Response:
        read_query(request.args, "model")
        opened = self._one_opened(update_id)
        await self.weights.apart(partial(self._end, opened))
        self.opened.pop(update_id, None)
        return await self.show()

    # ── groups and engines ────────────────────────────────────────────────────

    async def join(self) -> Response:
        """Every node's GPUs have the ranks after those of the node before it, by address."""
        read_query(request.args, "model")
        body = await _object()
        members = self.weights.able()
        first = body.get("rank_offset", 1)
        if not isinstance(first, int):
            raise Refused("rank_offset must be a number", path="$.rank_offset")
        at = dict(
            zip(
                (each.link.url for each in members),
                rank_offsets(first, await self.weights.ranks(members)),
                strict=True,
            )
        )
        words = await self.weights.ask(
            members,
            "POST",
            "/v1/weights/groups",
            lambda each: {"value": {**body, "rank_offset": at[each.link.url]}},
        )
        if len(took(words)) < len(words):
            return passed(worst(words))
        self.weights.groups[str(body.get("name", "weights"))] = list(at)
        return json_response({**words[0][1].json, "rank_offset": first}, 201)

    async def leave(self, name: str) -> Response:
        read_query(request.args, "model")
        self.weights.groups.pop(name, None)
        path = f"/v1/weights/groups/{quote(name, safe='')}"
        words = await self.weights.ask(self.weights.able(), "DELETE", path)
        return json_response({"name": name}) if took(words) else passed(worst(words))

    async def _engine(self) -> Response:
        """Generation and memory of all nodes."""
        read_query(request.args, "model")
        body, path = await body_json_or({}), request.path
        send: Send = (lambda _: {}) if path == "/v1/engine/resume" else (lambda _: {"value": body})

        async def run() -> Response:
            words = await self.weights.ask(self.weights.able(), "POST", path, send)
            if path == "/v1/engine/resume":
                self.weights.paused = None
            if len(took(words)) < len(words):
                return passed(worst(words))
            if path == "/v1/engine/pause":
                self.weights.paused = {"mode": words[0][1].json.get("paused") or "in_place"}
            desired = self.weights.desired
            version = None if desired is None else str(desired["version"])
            return json_response(joined_state([answer.json for _, answer in words], version))

        answer: Response = await self.weights.apart(run)
        return answer

    # ── adapters ──────────────────────────────────────────────────────────────

    async def update_adapter(self) -> Response:
        read_query(request.args, "model")
        body = await _object()

        async def run() -> Response:
            members = self.weights.able()
            words = await self.weights.enough(members, "POST", "/v1/adapters", lambda _: {"value": body})
            return self._adapted(members, words, str(body.get("name")), body)

        answer: Response = await self.weights.apart(run)
        return answer

    def _adapted(
        self, members: Sequence[FleetMember], words: Words, name: str, order: dict[str, Any]
    ) -> Response:
        if took(words):
            self.weights.adapters[name] = order
        if (short := self.weights.stand(members, words, f"adapter {name!r}")) is not None:
            return short
        report = took(words)[0][1].json
        return json_response(report, 201 if report["created"] else 200)

    async def receive_adapter(self, name: str, version: str) -> Response:
        """The body goes to a file here, and from there to every node."""
        read_query(request.args, "model")
        length = request.content_length or 0
        if not 0 < length <= ADAPTER_BYTES:
            raise Refused(f"send 1 to {ADAPTER_BYTES} bytes with a Content-Length")
        path = f"/v1/adapters/{quote(name, safe='')}/versions/{quote(version, safe='')}"
        folder = Path(self.weights.front.config.state_dir)
        await trio.Path(folder).mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix="adapter-") as file:
            async for piece in request.body:
                await trio.to_thread.run_sync(file.write, piece)
            await trio.to_thread.run_sync(file.flush)
            headers = {"Content-Length": str(length), "Content-Type": "application/octet-stream"}

            async def run() -> Response:
                members = self.weights.able()
                send: Send = lambda _: {"body": _pieces(Path(file.name)), "headers": headers}  # noqa: E731
                words = await self.weights.ask(members, "PUT", path, send)
                return self._adapted(members, words, name, {"name": name, "version": version})

            answer: Response = await self.weights.apart(run)
            return answer

    async def adapters(self) -> Response:
        """Every adapter once, with the sums of the nodes' figures."""
        read_query(request.args, "model")
        words = took(await self.weights.ask(self.weights.able(), "GET", "/v1/adapters"))
        found: dict[str, dict[str, Any]] = {}
        for _, answer in words:
            for each in answer.json["adapters"]:
                known = found.setdefault(each["name"], {**each, "sessions": 0, "calls": 0, "loads": 0})
                for figure in ("sessions", "calls", "loads"):
                    known[figure] += each[figure]
        whole: dict[str, Json] = words[0][1].json if words else {}
        return json_response({**whole, "adapters": list[Json](found.values())})

    async def delete_adapter(self, name: str) -> Response:
        read_query(request.args, "model")

        async def run() -> Response:
            path = f"/v1/adapters/{quote(name, safe='')}"
            words = await self.weights.ask(self.weights.able(), "DELETE", path)
            if [answer for _, answer in words if answer.status not in (200, 404)] or not took(words):
                return passed(worst(words))
            self.weights.adapters.pop(name, None)
            return json_response(took(words)[0][1].json)

        answer: Response = await self.weights.apart(run)
        return answer


async def _object() -> dict[str, Any]:
    body = await body_json()
    if not isinstance(body, dict):
        raise Refused("the body must be an object", path="$")
    return dict(body)


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    async with await trio.open_file(path, "rb") as file:
        while piece := await file.read(PIECE):
            yield piece  # noqa: ASYNC119 - httpx2 reads it to its end or closes it
