"""The weights and adapters of all nodes that serve a model: one desired version, which every node is brought
to.

Invariants: requests that change weights run one after another, and each reaches a node in that order; a node
that lacks the desired version, or an adapter, is stale and takes no new tasks; a joiner gets it first. What a
trainer began is carried out though it left. The front writes nothing down: a new one reads the newest version
in the nodes' histories.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import trio
from attrs import define, field
from quart import Response

from polarnode.api.service import json_response
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, PolarnodeError
from polarnode.fleet.front import Front
from polarnode.fleet.link import NodeAnswer
from polarnode.fleet.members import FleetMember
from polarnode.fleet.routes import passed
from polarnode.fleet.updates import newest, verdict

logger = logging.getLogger(__name__)

# seconds a node may be later than enough others: then the answer is given, and it catches up alone
STRAGGLER_S: Final = 60.0
UPDATE_S: Final = 1000.0  # without a byte of an answer: a node's own bound of an update is 900 s
CATCH_UP_S: Final = 2.0  # between tries to bring a stale node up to date

Words = list[tuple[FleetMember, NodeAnswer]]
Send = Callable[[FleetMember], Mapping[str, Any]]


def silent(error: Exception) -> NodeAnswer:
    body: Json = {"error": {"type": "unreachable", "message": str(error)}}
    return NodeAnswer(status=503, headers={"content-type": "application/json"}, body=dump_json(body))


def took(words: Words) -> Words:
    return [(member, answer) for member, answer in words if answer.status < 300]


def worst(words: Words) -> NodeAnswer:
    """A refusal before a silence: it says what is to be mended."""
    return min((answer for _, answer in words if answer.status >= 300), key=lambda each: each.status)


def report_of_all(words: Words) -> dict[str, Any]:
    """The reports of nodes as one: hosts are counted on from node to node."""
    reports = [answer.json for _, answer in words]
    hosts = [host for each in reports for host in each.get("hosts", ())]
    return {
        **reports[0],
        "seconds": max(each["seconds"] for each in reports),
        "hosts": [{**host, "index": at} for at, host in enumerate(hosts)],
        "created": any(each["created"] for each in reports),
    }


@define(eq=False, kw_only=True)
class FleetWeights:
    """Changes of the weights of all nodes that serve a model; None: of all nodes. Have `catch_up` called now
    and then.
    """

    front: Front
    model: str | None = None
    desired: dict[str, Any] | None = None  # version, source and mode; None: the model's own
    # by name: the order from a disk; without `source`, the version of a file that the nodes have
    adapters: dict[str, dict[str, Any]] = field(factory=dict)
    paused: dict[str, Any] | None = None
    groups: dict[str, list[str]] = field(factory=dict)  # the nodes' addresses, by group
    # when the nodes' histories have it; no history is newer than what was sent by this front
    desired_at: float = 0.0
    _lock: trio.Lock = field(factory=trio.Lock)
    changes: int = 0
    _changing: bool = False
    _each: dict[str, trio.Lock] = field(factory=dict)

    # ── the nodes ─────────────────────────────────────────────────────────────

    def able(self) -> list[FleetMember]:
        """The nodes that answer, in one order."""
        able = self.front.roster.in_state("up", "stale", "draining", "suspect")
        members = [each for each in able if each.answers and self.has(each)]
        if not members:
            raise Busy(f"no node of the fleet that serves {self.model or 'a model'} is up", retry_after=2.0)
        return sorted(members, key=lambda each: each.link.url)

    def has(self, member: FleetMember) -> bool:
        """Whether a node serves the model."""
        return self.model is None or (member.report is not None and member.report.model == self.model)

    async def ask(
        self, members: Sequence[FleetMember], method: str, path: str, send: Send | None = None
    ) -> Words:
        """Ask nodes at once; a node that gives no answer has failed."""
        found: dict[str, NodeAnswer] = {}

        async def one(member: FleetMember) -> None:
            found[member.link.url] = await self._one(member, method, path, send)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(one, member)
        return [(member, found[member.link.url]) for member in members]

    async def _one(self, member: FleetMember, method: str, path: str, send: Send | None = None) -> NodeAnswer:
        try:
            async with self._each.setdefault(member.link.url, trio.Lock()):
                more = {} if send is None else dict(send(member))
                return await member.link.ask(method, path, timeout_s=UPDATE_S, **more)
        except Unreachable as error:
            return silent(error)

    async def ranks(self, members: Sequence[FleetMember]) -> list[int]:
        words = await self.ask(members, "GET", "/v1/weights")
        if len(took(words)) < len(words):
            raise Busy("a node does not give its number of GPUs: try again", retry_after=2.0)
        return [int(answer.json["ranks"]) for _, answer in words]

    # ── changes ───────────────────────────────────────────────────────────────

    async def apart(self, change: Callable[[], Any]) -> Any:
        """The result of a change, which is carried out though the trainer hangs up."""
        done, found = trio.Event(), list[Any]()

        async def run() -> None:
            try:
                async with self._lock:
                    self._changing, self.changes = True, self.changes + 1
                    found.append(await change())
            # a node's answer of another shape is this request's failure, not the front's
            except (PolarnodeError, LookupError, TypeError, ValueError, AttributeError) as error:
                found.append(error)
            finally:
                self._changing = False
                done.set()

        self.front.nursery.start_soon(run)
        await done.wait()
        if not found:
            raise Busy("the front stops: ask again when it is back", retry_after=2.0)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    async def enough(self, members: Sequence[FleetMember], method: str, path: str, send: Send) -> Words:
        """The answers of nodes to a change: of all, or STRAGGLER_S after enough took it. Late ones go on."""
        words, news = list[tuple[FleetMember, NodeAnswer]](), [trio.Event()]

        async def one(member: FleetMember) -> None:
            words.append((member, await self._one(member, method, path, send)))
            news[0].set()

        for member in members:
            self.front.nursery.start_soon(one, member)
        least = self.front.config.min_nodes
        while len(words) < len(members):
            enough = verdict(len(took(words)), len(members), least) == "served"
            with trio.move_on_after(STRAGGLER_S if enough else UPDATE_S) as patience:
                await news[0].wait()
            news[0] = trio.Event()
            if patience.cancelled_caught:
                break
        return list(words)

    def stand(self, members: Sequence[FleetMember], words: Words, what: str) -> Response | None:
        """None for a change that enough nodes took; the others of `members` are stale. The answer where they
        are too few.
        """
        served = {member.link.url for member, _ in took(words)}
        judged = verdict(len(served), len(members), self.front.config.min_nodes)
        if judged == "refused":
            return passed(worst(words) if words else silent(Unreachable("no node answered")))
        late = [each for each in members if each.link.url not in served]
        for member in members:
            self.mark(member, stale=member in late)
        if judged == "served":
            return None
        why = worst(words).body.decode(errors="replace")[:500] if late and len(words) > len(served) else ""
        sentence = (
            f"{what} is served by {len(served)} of {len(members)} nodes, and not yet by"
            f" {', '.join(each.name for each in late)}, which take no new tasks until they have it:"
            f" send it again. {why}"
        )
        body: dict[str, Json] = {"error": {"type": "busy", "message": sentence}}
        return json_response(body, 503, {"Retry-After": "2"})

    def want(self, desired: dict[str, Any]) -> None:
        """What all nodes shall serve from now on."""
        self.desired, self.desired_at = desired, math.inf

    def mark(self, member: FleetMember, *, stale: bool) -> None:
        """Whether a node may take tasks."""
        if member.stale != stale:
            member.stale = stale
            log = logger.warning if stale else logger.info
            log("node %s %s", member.name, "has not got the weights" if stale else "has the weights again")
        if member.state in ("up", "stale"):
            member.become(member.look(trio.current_time()), trio.current_time())

    # ── nodes that join, and late ones ────────────────────────────────────────

    async def bring(self, member: FleetMember) -> bool:
        """Whether a node may take tasks now. It gets the desired version first; one that cannot is stale."""
        async with self._each.setdefault(member.link.url, trio.Lock()):
            before = self.changes
            if self._changing:
                return False
            try:
                brought = await self._brought(member)
            except Unreachable:
                return False
            if self.changes != before:  # an update that was not sent to it
                return False
            self.mark(member, stale=not brought)
        return True

    async def _brought(self, member: FleetMember) -> bool:
        found = await member.link.ask("GET", "/v1/weights")
        if found.status >= 300:  # an engine that has no weights of its own
            return True
        state = found.json
        self._learn(state["history"])
        if self.paused is not None and not state["paused"]:
            await member.link.ask("POST", "/v1/engine/pause", value=self.paused)
        if self.desired is not None and state["version"] != self.desired["version"]:
            answer = silent(Unreachable(f"weights {self.desired['version']!r} are on no disk"))
            if self.desired["source"]["kind"] == "disk":
                answer = await member.link.ask("POST", "/v1/weights", value=self.desired, timeout_s=UPDATE_S)
            if answer.status >= 300:
                answer = await self.pulled(member, self.desired) or answer
            if answer.status >= 300:
                member.problem = str(answer.error)
                return False
        return await self._adapters_brought(member)

    async def _adapters_brought(self, member: FleetMember) -> bool:
        """Whether a node serves all adapters that the others do."""
        found = await member.link.ask("GET", "/v1/adapters")
        states = found.json["adapters"] if found.status < 300 else ()
        served = {each["name"]: each["version"] for each in states}
        wanted = {**await self._adapters_of_peers(member, served), **self.adapters}
        for name, order in wanted.items():
            if "source" in order:
                answer = await member.link.ask("POST", "/v1/adapters", value=order, timeout_s=UPDATE_S)
            elif served.get(name) != order["version"]:
                answer = await self._sent_on(member, name, order["version"])
            else:
                continue
            if answer.status >= 300:
                member.problem = f"adapter {name!r}: {answer.error}"
                return False
        return True

    def _peers(self, member: FleetMember) -> list[FleetMember]:
        """Other nodes that serve all that this one shall."""
        return [each for each in self.front.roster.in_state("up") if each is not member and self.has(each)]

    async def _adapters_of_peers(
        self, member: FleetMember, served: Mapping[str, str]
    ) -> dict[str, dict[str, Any]]:
        """What a front before this one had nodes serve: adapters of a peer of which this node has none."""
        for peer in self._peers(member):
            try:
                found = await peer.link.ask("GET", "/v1/adapters")
            except Unreachable:
                continue
            states = found.json["adapters"] if found.status < 300 else ()
            return {
                each["name"]: {"name": each["name"], "version": each["version"]}
                for each in states
                if each["name"] not in served
            }
        return {}

    async def _sent_on(self, member: FleetMember, name: str, version: str) -> NodeAnswer:
        """The answer of a node that gets an adapter's file from a peer, through the front."""
        answer = silent(Unreachable(f"no other node has the file of version {version!r}: send it again"))
        at, place = f"/v1/fleet/adapters/{quote(name, safe='')}", quote(version, safe="")
        for peer in self._peers(member):
            try:
                size = (await peer.link.call("GET", at))["size"]
                headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
                async with peer.link.stream(f"{at}/{place}") as pieces:
                    path = f"/v1/adapters/{quote(name, safe='')}/versions/{place}"
                    answer = await member.link.ask(
                        "PUT", path, body=pieces, headers=headers, timeout_s=UPDATE_S
                    )
            except ClientError:
                continue  # not there, or another version
            except Unreachable as error:
                answer = silent(error)
            if answer.status < 300:
                return answer
        return answer

    async def pulled(self, member: FleetMember, order: Mapping[str, Any]) -> NodeAnswer | None:
        """The answer of a node that takes a version's files from a peer; None where no peer serves it."""
        answer = None
        for peer in self._peers(member):
            try:
                found = await peer.link.ask("GET", "/v1/fleet/weights")
                if found.status >= 300 or found.json["version"] != order["version"]:
                    continue
                where = {"url": peer.link.url, "certificate": peer.link.certificate}
                value = {"version": order["version"], "mode": order.get("mode", "in_place"), **where}
                answer = await member.link.ask("POST", "/v1/fleet/weights", value=value, timeout_s=UPDATE_S)
            except Unreachable as error:
                answer = silent(error)
            if answer.status < 300:
                return answer
        return answer

    def _learn(self, history: Sequence[Mapping[str, Any]]) -> None:
        """What a front before this one had a node serve, if it is newer than what is known."""
        last = newest([history])
        if last is None or last["at"] <= self.desired_at:
            return
        self.desired_at = last["at"]
        self.desired = {name: last[name] for name in ("version", "source", "mode")}
        for member in self.front.roster.in_state("up"):
            if self.has(member) and member.report and member.report.version != last["version"]:
                self.mark(member, stale=True)

    async def catch_up(self) -> None:
        """Bring stale nodes up to date."""
        async with trio.open_nursery() as nursery:
            for member in self.front.roster.in_state("stale"):
                if member.answers and self.has(member) and not self._changing:
                    nursery.start_soon(self.bring, member)
