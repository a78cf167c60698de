"""What a node asks the other nodes of its log for: live things of the sessions that run there, and of all of
them what each knows only of itself.

Turns so far, logs, files, snapshots and open captures are on one node's disk, and any node answers for it: it
passes the request on with the token that all nodes have, to the address and the certificate in the log's
table of nodes. Invariants: `OtherNodes.of_session` alone says where a session's live things are; a request
that was passed on is answered by the node that it names or by nobody, so none goes round; a body is in memory
a piece at a time, in both directions; what is of one connection, and the caller's own credentials, go no
further.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import ceil
from typing import Any, Final, Literal
from urllib.parse import quote

import trio
from attrs import define, field, frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.service import NotFound, error_json, json_response
from polarnode.client.requests import JSON_BODY
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.labels import one_model, unmet
from polarnode.http.asgi import RouteRow, body_json
from polarnode.http.link import ANSWER_S, Link, OpenAnswer
from polarnode.journal.log.port import RETRY_S, Log, LogAway, NodeRow

# names the node that a request was passed on to. Whoever else receives it has an address that is another's.
PASSED_TO: Final = "Polarnode-Passed-To"
NODES_S: Final = 1.0  # the nodes that are alive are asked for once in so long: a sign of life comes as often
ALL_S: Final = 10.0  # for one node's word when all are asked: a page waits for the slowest
# without a byte of an answer that is passed on and changes something: a teacher reads millions of tokens in
# minutes, and the end of a capture waits for its test
SILENCE_S: Final = 1800.0
# of a caller's headers: the others are of his connection, of his browser, or his own token
ASKED_WITH: Final = ("accept", "content-type", "content-length", "idempotency-key", "range", "if-none-match")
# of a node's headers: these are of its connection, or are made anew
NOT_ANSWERED_WITH: Final = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "upgrade"),
    *("transfer-encoding", "server", "date", "alt-svc"),
)
NEWS: Final = (Unreachable, ClientError)

Handler = Callable[..., Awaitable[Response]]
# When the node that has a session is asked: for what only it knows, while the session is live; for files,
# which stay with it; or because it has what a fork goes on from, and any node where it is gone.
Asked = Literal["live", "files", "parent"]
OF_SESSION: Final[Mapping[tuple[str, str], Asked]] = {
    ("GET", "/v1/sessions/<session_id>"): "live",
    ("GET", "/v1/sessions/<session_id>/artifacts"): "files",
    ("GET", "/v1/sessions/<session_id>/snapshots"): "files",
    ("GET", "/v1/sessions/<session_id>/log"): "files",
    ("POST", "/v1/sessions/<session_id>/fork"): "parent",
    ("GET", "/v1/capture/<session_id>"): "live",
    ("DELETE", "/v1/capture/<session_id>"): "live",
}


class NodeGone(NotFound):
    """What is asked for was at a node that is not there any more. 404."""


class Astray(PolarnodeError):
    """A request that was passed on to another node than this one. 502."""

    boundary = "node"


# ── the other nodes ───────────────────────────────────────────────────────────


@define(eq=False, kw_only=True)
class OtherNodes:
    """The other nodes of a log; a node alone has none. `name` is this node's, `token` that of all. Bodies
    that read several nodes run in `nursery`. Created by `open_others`.
    """

    log: Log
    name: str
    nursery: trio.Nursery
    token: str | None = field(default=None, repr=False)
    # by incarnation and certificate
    _links: dict[tuple[int, str], Link] = field(factory=dict, init=False)
    _alive: tuple[NodeRow, ...] | None = field(default=None, init=False)  # None before the first answer
    _until: float = field(default=float("-inf"), init=False)  # when `_alive` is too old

    async def of_session(self, session_id: str) -> NodeRow | None:
        """The node that a session runs at, or ran at; None where that is this one, or nobody knows of it.
        Raises NodeGone where that node is gone, and did not come back under its name.
        """
        row = await self.log.node_of(session_id)
        if row is None or row.facts.name == self.name:
            return None
        if row.state == "alive":
            return row
        again = [each for each in await self.log.nodes() if each.facts.name == row.facts.name]
        if not again:
            raise NodeGone(
                f"session {session_id!r} ran at node {row.facts.name!r}, and its node is gone; its place runs"
                " elsewhere, unless it was over: its task lists the sessions of its places"
            )
        return again[-1]

    async def alive(self, *, fresh: bool = False) -> tuple[NodeRow, ...]:
        """Those that are alive, as of a second ago or now, or as they were when the log went away."""
        now = trio.current_time()
        if now < self._until and self._alive is not None and not fresh:
            await trio.lowlevel.checkpoint()
            return self._alive
        self._until = now + NODES_S
        try:
            found = await self.log.nodes()
        except LogAway:
            return self._alive or ()
        self._alive = tuple(each for each in found if each.facts.name != self.name)
        kept = {(each.incarnation, each.facts.certificate) for each in found}
        gone = [self._links.pop(each) for each in self._links.keys() - kept]
        for link in gone:  # closing waits, and another caller may look meanwhile
            await link.close()
        return self._alive

    def link(self, row: NodeRow) -> Link:
        """Requests to a node. Its certificate is pinned where it made it itself."""
        facts = row.facts
        found = self._links.get((row.incarnation, facts.certificate))
        if found is None:
            found = Link(url=facts.url, token=self.token, certificate=facts.certificate)
            self._links[row.incarnation, facts.certificate] = found
        return found

    async def ask(self, row: NodeRow, method: str, path: str, value: Json = None) -> Any:
        """One node's JSON, of a request that it answers for itself. Raises Unreachable and ClientError."""
        headers, body = {PASSED_TO: row.facts.name}, None if value is None else dump_json(value)
        if body is not None:
            headers |= JSON_BODY
        return await self.link(row).call(method, path, body=body, headers=headers, timeout_s=ALL_S)

    async def ask_all(
        self, method: str, path: str, value: Json = None, *, fresh: bool = False
    ) -> list[tuple[NodeRow, Any | Unreachable | ClientError]]:
        """Every node's JSON, or its error, in the order of their names; with `fresh` of one too that joined a
        moment ago.
        """
        found: dict[int, tuple[NodeRow, Any]] = {}

        async def ask(row: NodeRow) -> None:
            try:
                found[row.incarnation] = row, await self.ask(row, method, path, value)
            except NEWS as error:
                found[row.incarnation] = row, error

        async with trio.open_nursery() as nursery:
            for row in await self.alive(fresh=fresh):
                nursery.start_soon(ask, row)
        return sorted(found.values(), key=lambda each: each[0].facts.name)

    async def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            await link.close()

    def is_for_us(self) -> bool:
        """Whether another node passed the current request on to this one. Raises Astray where it was to
        reach another.
        """
        to = request.headers.get(PASSED_TO)
        if to not in (None, self.name):
            raise Astray(
                f"this is node {self.name!r}, and a node passed this request on to {to!r}: give that one a"
                " url at which it alone is reached"
            )
        return to is not None


@asynccontextmanager
async def open_others(log: Log, *, name: str, token: str | None) -> AsyncIterator[OtherNodes]:
    """The other nodes of a log, and connections to those that were asked, until the block ends."""
    async with trio.open_nursery() as nursery:
        others = OtherNodes(log=log, name=name, token=token, nursery=nursery)
        try:
            yield others
        finally:
            nursery.cancel_scope.cancel()
            await others.close()  # noqa: ASYNC102 - each is bounded and shielded there


# ── passing on ────────────────────────────────────────────────────────────────


@define(eq=False)
class PassedBody(AsyncIterator[bytes]):
    """The body of another node's answer as it comes. `aclose`, which Quart calls however the reader leaves,
    ends the request there.
    """

    answer: OpenAnswer
    stack: AsyncExitStack

    async def __anext__(self) -> bytes:
        return await anext(self.answer.pieces)

    async def aclose(self) -> None:
        await self.stack.aclose()


async def pass_on(
    others: OtherNodes, row: NodeRow, *, path: str | None = None, body: bytes | None = None
) -> Response:
    """Another node's answer to the current request; `body` is that of the request, where it was read.
    Raises Unreachable where there is none; an answer that breaks off later breaks off here.
    """
    headers = {name: request.headers[name] for name in ASKED_WITH if name in request.headers}
    headers[PASSED_TO] = row.facts.name
    sent: bytes | AsyncIterator[bytes] | None = body
    if body is None and (request.content_length or "transfer-encoding" in request.headers):
        sent = request.body
    async with AsyncExitStack() as opening:
        answer = await opening.enter_async_context(
            others.link(row).open(
                request.method,
                path_of_request() if path is None else path,
                body=sent,
                headers=headers,
                silence_s=ANSWER_S if request.method == "GET" else SILENCE_S,
            )
        )
        stack = opening.pop_all()
    kept = {name.title(): each for name, each in answer.headers.items() if name not in NOT_ANSWERED_WITH}
    return Response(PassedBody(answer, stack), answer.status, kept)


def path_of_request() -> str:
    """The path of the current request with its query, as it is sent on."""
    text = request.query_string.decode()
    return quote(request.path, safe="/:%") + (f"?{text}" if text else "")


def answer_for(error: Astray | Unreachable) -> Response:
    """The answer where a request went astray, or where the node that it is for is silent."""
    if isinstance(error, Unreachable):
        said = error_json("unreachable", f"the node that has this does not answer: {error}")
        return json_response(said, 503, {"Retry-After": str(ceil(RETRY_S))})
    return json_response(error_json("astray", str(error)), 502)


@frozen
class PassingRoutes:
    """Routes of a node, answered for all nodes of its log."""

    others: OtherNodes

    def rows(
        self, rows: Iterable[RouteRow], of_session: Mapping[tuple[str, str], Asked] = OF_SESSION
    ) -> Iterator[RouteRow]:
        """The routes, of which those in `of_session` are asked of the node that has the session."""
        joined: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/tasks"): self._task,
            ("POST", "/v1/capture"): self._capture,
            ("POST", "/v1/score"): self._score,
            ("GET", "/v1/capture"): self._captures,
            ("GET", "/v1/logs"): self._logs,
            ("GET", "/v1/logs/<path:name>"): self._log,
            ("POST", "/v1/engine/pause"): self._of_all,
            ("POST", "/v1/engine/resume"): self._of_all,
        }
        for method, path, handler in rows:
            where = method, path
            if where in of_session:
                handler = partial(self._guarded, partial(self._session, of_session[where]), handler)
            elif where in joined:
                handler = partial(self._guarded, joined[where], handler)
            yield method, path, handler

    async def _guarded(self, ask: Handler, here: Handler, **names: str) -> Response:
        """What was passed on to this node is answered here; else whoever should is asked."""
        try:
            return await (here(**names) if self.others.is_for_us() else ask(here, **names))
        except (Astray, Unreachable) as error:
            return answer_for(error)

    # ── of one node ───────────────────────────────────────────────────────────

    async def _session(self, asked: Asked, here: Handler, session_id: str) -> Response:
        row = await self._place(asked, session_id)
        if row is None:
            return await here(session_id=session_id)
        return await pass_on(self.others, row)

    async def _place(self, asked: Asked, session_id: str) -> NodeRow | None:
        """The other node that is asked; None where this one answers."""
        row: NodeRow | None = None
        gone: NodeGone | None = None
        try:
            row = await self.others.of_session(session_id)
        except NodeGone as error:
            gone = error
        if row is None and gone is None:
            return None
        if asked == "live" and await self._is_over(session_id):
            return None
        if gone is not None and asked != "parent":
            raise gone
        return row

    async def _is_over(self, session_id: str) -> bool:
        """Whether the log has all of a session."""
        record = await self.others.log.session(session_id)
        return record is not None and record.outcome is not None

    async def _task(self, here: Handler) -> Response:
        """A task is taken by a node that can run it, which knows what is wrong with it. One of forks by the
        node that has their parent, whose turns and snapshots are there.
        """
        body = await _sent_body()
        row: NodeRow | None = None
        if (b'"fork"' in body or b'"requires"' in body) and await self.others.alive():
            match _read(body):
                case {"fork": {"session": str(session)}}:
                    row = await self._place("parent", session)
                case {"requires": dict(requires)}:
                    row = await self._able(requires)
        return await (here() if row is None else pass_on(self.others, row, body=body))

    async def _capture(self, here: Handler) -> Response:
        """A capture is opened at a node that has engines, and the labels that it requires."""
        body = await _sent_body()
        row: NodeRow | None = None
        if await self.others.alive():
            match _read(body) if body else {}:
                case {"requires": dict(requires)}:
                    row = await self._able(requires, engines=True)
                case {**more} if "requires" not in more:
                    row = await self._able({}, engines=True)
        return await (here() if row is None else pass_on(self.others, row, body=body))

    async def _score(self, here: Handler) -> Response:
        """Rows are scored by a node that has engines, of the model that the query names."""
        model = request.args.get("model")
        rows = await self.others.log.nodes() if model is not None or await self.others.alive() else ()
        models = {row.facts.labels.get("model") for row in rows if "" in row.serving}
        if model is not None and model not in models:
            there = ", ".join(sorted(filter(None, models))) or "none"
            raise Refused(
                f"no node that is alive serves the model {model!r}: they serve {there}", path="?model"
            )
        named = {} if model is None else {"model": model}
        row = await self._able(named, engines=True, path="?model") if rows else None
        return await (here() if row is None else pass_on(self.others, row))

    async def _able(
        self, requires: Mapping[str, object], *, engines: bool = False, path: str = "$.requires.model"
    ) -> NodeRow | None:
        """The node with the least to do that has these labels, and with `engines` some; None where this one
        has, or no node has: this one says then what it lacks.
        """
        labels = {name: str(each) for name, each in requires.items()}
        rows = [row for row in await self.others.log.nodes() if unmet(labels, row.facts.labels) is None]
        able = [row for row in rows if "" in row.serving or not engines]
        if engines:  # a task says so itself
            one_model(labels, (row.facts.labels for row in able), path=path)
        if not able or any(row.facts.name == self.others.name for row in able):
            return None
        return min(able, key=lambda row: row.running)

    async def _log(self, here: Handler, name: str) -> Response:
        """A log of another node is named NODE/NAME."""
        node, _, rest = name.partition("/")
        if node == self.others.name and rest:
            return await here(name=rest)
        row = next((each for each in await self.others.alive() if each.facts.name == node), None)
        if row is None or not rest:
            return await here(name=name)
        query = request.query_string.decode()
        path = f"/v1/logs/{quote(rest)}" + (f"?{query}" if query else "")
        try:
            return json_response({**await self.others.ask(row, "GET", path), "name": name})
        except ClientError as error:
            return _refused(error)

    # ── of all nodes ──────────────────────────────────────────────────────────

    async def _captures(self, here: Handler) -> Response:
        """Those that are open at any node."""
        answer, more = await here(), await self.others.ask_all("GET", "/v1/capture")
        words = [each for _, each in more if not isinstance(each, Exception)]
        if not words:
            return answer
        words.insert(0, await _json_of(answer))
        captures = [capture for each in words for capture in each["captures"]]
        return json_response({"captures": captures, "limit": sum(each["limit"] for each in words)})

    async def _logs(self, here: Handler) -> Response:
        """Those of this node, and of the others by the name of each before theirs."""
        answer, more = await here(), await self.others.ask_all("GET", "/v1/logs")
        words = [(row, each) for row, each in more if not isinstance(each, Exception)]
        if not words:
            return answer
        logs: list[Json] = [*(await _json_of(answer))["logs"]]
        for row, found in words:
            logs += [{**each, "name": f"{row.facts.name}/{each['name']}"} for each in found["logs"]]
        return json_response({"logs": logs})

    async def _of_all(self, here: Handler) -> Response:
        """A pause or its end at this node, then in the log, then at all others; who did not do it is named.
        Of one model's nodes it is a change of their engines (`weight_nodes`).
        """
        if "model" in request.args:
            return await here()
        body = await _sent_body()
        answer = await here()
        if answer.status_code >= 300:
            return answer
        paused = (await _json_of(answer))["paused"]
        await self.others.log.hold(paused)  # before the others are asked: who joins meanwhile reads it
        value = read_json(body) if body else None
        words = await self.others.ask_all("POST", request.path, value, fresh=True)
        wrong = [f"{row.facts.name}: {each}" for row, each in words if isinstance(each, Exception)]
        if not wrong:
            return answer
        sentence = (
            f"done at {1 + len(words) - len(wrong)} of {1 + len(words)} nodes, not at {'; '.join(wrong)}"
        )
        return json_response(error_json("nodes", sentence), 503, {"Retry-After": str(ceil(RETRY_S))})


async def _sent_body() -> bytes:
    body = await request.get_data(as_text=False)
    return body if isinstance(body, bytes) else body.encode()


def _read(body: bytes) -> Json:
    """A body as JSON. What is none is refused by the handler, in its words."""
    try:
        return read_json(body)
    except Refused:
        return None


async def _json_of(answer: Response) -> Any:
    return read_json(await answer.get_data(as_text=False))


def _refused(error: ClientError) -> Response:
    """What a node refuses, as it does."""
    wait = {} if error.retry_after is None else {"Retry-After": str(ceil(error.retry_after))}
    return json_response(error_json(error.type, str(error), error.path), error.status, wait)


# ── draining ──────────────────────────────────────────────────────────────────

DRAIN: Final = "/v1/fleet/drain"


@frozen(kw_only=True)
class DrainOrder:
    """Body of POST /v1/fleet/drain. `node` is a name or an address; without it the node that is asked is
    meant.
    """

    draining: bool
    node: str | None = None


@frozen(kw_only=True)
class DrainAnswer:
    """Whether a node takes no new places."""

    name: str
    draining: bool


@frozen
class DrainRoutes:
    """The handler of drains: a node takes no new places until that is taken back. `drain` is this node's."""

    others: OtherNodes
    drain: Callable[[bool], Awaitable[None]]

    def rows(self) -> Iterator[RouteRow]:
        yield ("POST", DRAIN, self.change)

    async def change(self) -> Response:
        """At whichever node of the log."""
        read_query(request.args)
        order = structure(await body_json(), DrainOrder, forbid_extra=True)
        node, draining = order.node, order.draining
        try:
            if self.others.is_for_us() or node in (None, self.others.name):
                await self.drain(draining)
                return json_response(plain(DrainAnswer(name=self.others.name, draining=draining)))
            rows = await self.others.log.nodes()
            row = next((each for each in rows if node and node in (each.facts.name, each.facts.url)), None)
            if row is None:
                names = ", ".join(each.facts.name for each in rows)
                raise NotFound(f"no node that is alive is called {node!r}: there are {names or 'none'}")
            return json_response(await self.others.ask(row, "POST", DRAIN, {"draining": draining}))
        except (Astray, Unreachable) as error:
            return answer_for(error)
        except ClientError as error:
            return _refused(error)
