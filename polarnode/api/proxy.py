"""Requests that a node passes on to other nodes of its log: those about live sessions that run at another
node, and those that each node can answer only about itself.

The turns so far, logs, files, snapshots and open captures of a session are on one node's disk, but any node
answers requests for them: it passes the request on with the token that all nodes have, to the address and the
certificate in the log's table of nodes. Invariants: only `OtherNodes.of_session` decides which node has a
live session; a request that was passed on is answered by the node that it names or not at all, so none goes
round in circles; a body is in memory a piece at a time, in both directions; headers of one connection and the
caller's own credentials are not passed on.
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
from polarnode.core.labels import choose_model, first_unmet_label
from polarnode.http.asgi import RouteRow, body_json
from polarnode.http.link import ANSWER_S, Link, OpenAnswer
from polarnode.journal.log.port import LOG_RETRY_S, Log, LogUnavailable, NodeRow

# This header names the node that a request was passed on to. If another node receives it, the address in the
# table of nodes is wrong.
PASSED_TO: Final = "Polarnode-Passed-To"
NODES_INTERVAL_S: Final = 1.0  # the log is read for live nodes this often; nodes report as often
ASK_ALL_TIMEOUT_S: Final = 10.0  # for the answer of one node when all are asked; a page waits for the slowest
# The longest silence in the answer to a request that is passed on and changes something. A teacher reads
# millions of tokens in minutes, and the end of a capture waits for its test.
SILENCE_S: Final = 1800.0
# The headers of a caller that are passed on. The others are those of its connection or browser, or its own
# token.
PASSED_REQUEST_HEADERS: Final = (
    "accept",
    "content-type",
    "content-length",
    "idempotency-key",
    "range",
    "if-none-match",
)
# The headers of a node's answer that are not passed on: they are those of its connection, or are made anew.
DROPPED_ANSWER_HEADERS: Final = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "upgrade"),
    *("transfer-encoding", "server", "date", "alt-svc"),
)
NODE_ERRORS: Final = (Unreachable, ClientError)

Handler = Callable[..., Awaitable[Response]]
# When the node that has a session is asked: for what only it knows, while the session is live; for files,
# which stay with it; or because it has what a fork goes on from, and any node where it is gone.
Asked = Literal["live", "files", "parent"]
SESSION_ROUTES: Final[Mapping[tuple[str, str], Asked]] = {
    ("GET", "/v1/sessions/<session_id>"): "live",
    ("GET", "/v1/sessions/<session_id>/artifacts"): "files",
    ("GET", "/v1/sessions/<session_id>/snapshots"): "files",
    ("GET", "/v1/sessions/<session_id>/log"): "files",
    ("POST", "/v1/sessions/<session_id>/fork"): "parent",
    ("GET", "/v1/capture/<session_id>"): "live",
    ("DELETE", "/v1/capture/<session_id>"): "live",
}


class NodeGone(NotFound):
    """The requested data was at a node that no longer exists. 404."""


class MisdirectedRequest(PolarnodeError):
    """A request reached this node, but was passed on to another one. 502."""

    boundary = "node"


# ── the other nodes ───────────────────────────────────────────────────────────


@define(eq=False, kw_only=True)
class OtherNodes:
    """The other nodes of a log; a single node has none. `name` is this node's name, `token` the token of all
    nodes. Bodies that read several nodes run in `nursery`. Created by `open_others`.
    """

    log: Log
    name: str
    nursery: trio.Nursery
    token: str | None = field(default=None, repr=False)
    # The connections, by incarnation and certificate.
    _links: dict[tuple[int, str], Link] = field(factory=dict, init=False)
    _alive: tuple[NodeRow, ...] | None = field(default=None, init=False)  # None before the log's first answer
    _until: float = field(default=float("-inf"), init=False)  # the time until which `_alive` is used

    async def of_session(self, session_id: str) -> NodeRow | None:
        """The node that a session runs or ran at; None if that is this node or the session is unknown. Raises
        NodeGone if that node is gone and did not come back under its name.
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
        """The nodes that are alive, as of at most a second ago, or as of when the log went away."""
        now = trio.current_time()
        if now < self._until and self._alive is not None and not fresh:
            await trio.lowlevel.checkpoint()
            return self._alive
        self._until = now + NODES_INTERVAL_S
        try:
            found = await self.log.nodes()
        except LogUnavailable:
            return self._alive or ()
        self._alive = tuple(each for each in found if each.facts.name != self.name)
        kept = {(each.incarnation, each.facts.certificate) for each in found}
        gone = [self._links.pop(each) for each in self._links.keys() - kept]
        for link in gone:  # closing waits, and another caller may run meanwhile
            await link.close()
        return self._alive

    def link(self, row: NodeRow) -> Link:
        """The connections to a node. Its certificate is pinned if the node made it itself."""
        facts = row.facts
        found = self._links.get((row.incarnation, facts.certificate))
        if found is None:
            found = Link(url=facts.url, token=self.token, certificate=facts.certificate)
            self._links[row.incarnation, facts.certificate] = found
        return found

    async def ask(self, row: NodeRow, method: str, path: str, value: Json = None) -> Any:
        """The JSON answer of one node to a request that it answers for itself. Raises Unreachable and
        ClientError.
        """
        headers, body = {PASSED_TO: row.facts.name}, None if value is None else dump_json(value)
        if body is not None:
            headers |= JSON_BODY
        return await self.link(row).call(
            method, path, body=body, headers=headers, timeout_s=ASK_ALL_TIMEOUT_S
        )

    async def ask_all(
        self, method: str, path: str, value: Json = None, *, fresh: bool = False
    ) -> list[tuple[NodeRow, Any | Unreachable | ClientError]]:
        """The JSON answer of every node, or its error, in the order of their names. `fresh` includes a node
        that joined a moment ago.
        """
        found: dict[int, tuple[NodeRow, Any]] = {}

        async def ask(row: NodeRow) -> None:
            try:
                found[row.incarnation] = row, await self.ask(row, method, path, value)
            except NODE_ERRORS as error:
                found[row.incarnation] = row, error

        async with trio.open_nursery() as nursery:
            for row in await self.alive(fresh=fresh):
                nursery.start_soon(ask, row)
        return sorted(found.values(), key=lambda each: each[0].facts.name)

    async def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            await link.close()

    def was_passed_on(self) -> bool:
        """Whether another node passed the current request on to this one. Raises Astray if it was meant for
        another node.
        """
        to = request.headers.get(PASSED_TO)
        if to not in (None, self.name):
            raise MisdirectedRequest(
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
    """Pass the current request on to another node, and return its answer; `body` is the request's body if it
    was read already. Raises Unreachable if there is no answer. If the answer breaks off later, the returned
    one breaks off too.
    """
    headers = {name: request.headers[name] for name in PASSED_REQUEST_HEADERS if name in request.headers}
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
    kept = {name.title(): each for name, each in answer.headers.items() if name not in DROPPED_ANSWER_HEADERS}
    return Response(PassedBody(answer, stack), answer.status, kept)


def path_of_request() -> str:
    """The path of the current request with its query, as it is sent on."""
    text = request.query_string.decode()
    return quote(request.path, safe="/:%") + (f"?{text}" if text else "")


def pass_failure_response(error: MisdirectedRequest | Unreachable) -> Response:
    """The answer to a request that went astray, or whose node does not answer."""
    if isinstance(error, Unreachable):
        said = error_json("unreachable", f"the node that has this does not answer: {error}")
        return json_response(said, 503, {"Retry-After": str(ceil(LOG_RETRY_S))})
    return json_response(error_json("astray", str(error)), 502)


@frozen
class PassingRoutes:
    """Routes of a node, answered for all nodes of its log."""

    others: OtherNodes

    def rows(
        self, rows: Iterable[RouteRow], of_session: Mapping[tuple[str, str], Asked] = SESSION_ROUTES
    ) -> Iterator[RouteRow]:
        """The rows of the route table. Requests of the routes in `of_session` go to the node that has the
        session.
        """
        joined: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/tasks"): self._task,
            ("POST", "/v1/capture"): self._capture,
            ("POST", "/v1/score"): self._score,
            ("GET", "/v1/capture"): self._join_captures,
            ("GET", "/v1/logs"): self._join_logs,
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
        """Answer a request here if it was passed on to this node; otherwise pass it on to the node that
        should answer it.
        """
        try:
            return await (here(**names) if self.others.was_passed_on() else ask(here, **names))
        except (MisdirectedRequest, Unreachable) as error:
            return pass_failure_response(error)

    # ── of one node ───────────────────────────────────────────────────────────

    async def _session(self, asked: Asked, here: Handler, session_id: str) -> Response:
        row = await self._place(asked, session_id)
        if row is None:
            return await here(session_id=session_id)
        return await pass_on(self.others, row)

    async def _place(self, asked: Asked, session_id: str) -> NodeRow | None:
        """The other node that should answer; None if this one should."""
        row: NodeRow | None = None
        gone: NodeGone | None = None
        try:
            row = await self.others.of_session(session_id)
        except NodeGone as error:
            gone = error
        if row is None and gone is None:
            return None
        if asked == "live" and await self._is_session_over(session_id):
            return None
        if gone is not None and asked != "parent":
            raise gone
        return row

    async def _is_session_over(self, session_id: str) -> bool:
        """Whether a session is over, so that the log has all of it."""
        record = await self.others.log.session(session_id)
        return record is not None and record.outcome is not None

    async def _task(self, here: Handler) -> Response:
        """A task goes to a node that can run it, because that node knows what is wrong with it. A task of
        forks goes to the node that has their parent's turns and snapshots.
        """
        body = await _sent_body()
        row: NodeRow | None = None
        if (b'"fork"' in body or b'"requires"' in body) and await self.others.alive():
            match _read(body):
                case {"fork": {"session": str(session)}}:
                    row = await self._place("parent", session)
                case {"requires": dict(requires)}:
                    row = await self._least_busy_node(requires)
        return await (here() if row is None else pass_on(self.others, row, body=body))

    async def _capture(self, here: Handler) -> Response:
        """A capture goes to a node that has engines and the labels that it requires."""
        body = await _sent_body()
        row: NodeRow | None = None
        if await self.others.alive():
            match _read(body) if body else {}:
                case {"requires": dict(requires)}:
                    row = await self._least_busy_node(requires, engines=True)
                case {**more} if "requires" not in more:
                    row = await self._least_busy_node({}, engines=True)
        return await (here() if row is None else pass_on(self.others, row, body=body))

    async def _score(self, here: Handler) -> Response:
        """Rows go to a node that has engines of the model that the query names."""
        model = request.args.get("model")
        rows = await self.others.log.nodes() if model is not None or await self.others.alive() else ()
        models = {row.facts.labels.get("model") for row in rows if "" in row.serving}
        if model is not None and model not in models:
            there = ", ".join(sorted(filter(None, models))) or "none"
            raise Refused(
                f"no node that is alive serves the model {model!r}: they serve {there}", path="?model"
            )
        named = {} if model is None else {"model": model}
        row = await self._least_busy_node(named, engines=True, path="?model") if rows else None
        return await (here() if row is None else pass_on(self.others, row))

    async def _least_busy_node(
        self, requires: Mapping[str, object], *, engines: bool = False, path: str = "$.requires.model"
    ) -> NodeRow | None:
        """The least busy node that has these labels, and if `engines` is true also engines. None if this node
        has them, or if no node has: then this node's answer says what it lacks.
        """
        labels = {name: str(each) for name, each in requires.items()}
        rows = [
            row
            for row in await self.others.log.nodes()
            if first_unmet_label(labels, row.facts.labels) is None
        ]
        able = [row for row in rows if "" in row.serving or not engines]
        if engines:  # a task names the model in its labels
            choose_model(labels, (row.facts.labels for row in able), path=path)
        if not able or any(row.facts.name == self.others.name for row in able):
            return None
        return min(able, key=lambda row: row.running)

    async def _log(self, here: Handler, name: str) -> Response:
        """The log file of another node is named NODE/NAME."""
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

    async def _join_captures(self, here: Handler) -> Response:
        """The captures that are open at any node."""
        answer, more = await here(), await self.others.ask_all("GET", "/v1/capture")
        words = [each for _, each in more if not isinstance(each, Exception)]
        if not words:
            return answer
        words.insert(0, await _answer_json(answer))
        captures = [capture for each in words for capture in each["captures"]]
        return json_response({"captures": captures, "limit": sum(each["limit"] for each in words)})

    async def _join_logs(self, here: Handler) -> Response:
        """The log files of this node, and those of the other nodes as NODE/NAME."""
        answer, more = await here(), await self.others.ask_all("GET", "/v1/logs")
        words = [(row, each) for row, each in more if not isinstance(each, Exception)]
        if not words:
            return answer
        logs: list[Json] = [*(await _answer_json(answer))["logs"]]
        for row, found in words:
            logs += [{**each, "name": f"{row.facts.name}/{each['name']}"} for each in found["logs"]]
        return json_response({"logs": logs})

    async def _of_all(self, here: Handler) -> Response:
        """Pause or resume at this node, then in the log, then at all other nodes; nodes that failed are
        named. A request for one model's nodes is a change of their engines (`weight_nodes`).
        """
        if "model" in request.args:
            return await here()
        body = await _sent_body()
        answer = await here()
        if answer.status_code >= 300:
            return answer
        paused = (await _answer_json(answer))["paused"]
        # This comes before the other nodes are asked, because a node that joins meanwhile reads it.
        await self.others.log.hold_generation(paused)
        value = read_json(body) if body else None
        words = await self.others.ask_all("POST", request.path, value, fresh=True)
        wrong = [f"{row.facts.name}: {each}" for row, each in words if isinstance(each, Exception)]
        if not wrong:
            return answer
        sentence = (
            f"done at {1 + len(words) - len(wrong)} of {1 + len(words)} nodes, not at {'; '.join(wrong)}"
        )
        return json_response(error_json("nodes", sentence), 503, {"Retry-After": str(ceil(LOG_RETRY_S))})


async def _sent_body() -> bytes:
    body = await request.get_data(as_text=False)
    return body if isinstance(body, bytes) else body.encode()


def _read(body: bytes) -> Json:
    """Read a body as JSON. If it is not JSON, the handler refuses it with its own message."""
    try:
        return read_json(body)
    except Refused:
        return None


async def _answer_json(answer: Response) -> Any:
    return read_json(await answer.get_data(as_text=False))


def _refused(error: ClientError) -> Response:
    """The refusal of a node, as it is."""
    wait = {} if error.retry_after is None else {"Retry-After": str(ceil(error.retry_after))}
    return json_response(error_json(error.type, str(error), error.path), error.status, wait)


# ── draining ──────────────────────────────────────────────────────────────────

DRAIN_PATH: Final = "/v1/fleet/drain"


@frozen(kw_only=True)
class DrainOrder:
    """Body of POST /v1/fleet/drain. `node` is a name or an address; without it, the node that receives the
    request is drained.
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
    """The handler of drains. A drained node takes no new places until its drain is taken back. `drain` drains
    this node.
    """

    others: OtherNodes
    drain: Callable[[bool], Awaitable[None]]

    def rows(self) -> Iterator[RouteRow]:
        yield ("POST", DRAIN_PATH, self.change)

    async def change(self) -> Response:
        """Begin or take back the drain of any node of the log."""
        read_query(request.args)
        order = structure(await body_json(), DrainOrder, forbid_extra=True)
        node, draining = order.node, order.draining
        try:
            if self.others.was_passed_on() or node in (None, self.others.name):
                await self.drain(draining)
                return json_response(plain(DrainAnswer(name=self.others.name, draining=draining)))
            rows = await self.others.log.nodes()
            row = next((each for each in rows if node and node in (each.facts.name, each.facts.url)), None)
            if row is None:
                names = ", ".join(each.facts.name for each in rows)
                raise NotFound(f"no node that is alive is called {node!r}: there are {names or 'none'}")
            return json_response(await self.others.ask(row, "POST", DRAIN_PATH, {"draining": draining}))
        except (MisdirectedRequest, Unreachable) as error:
            return pass_failure_response(error)
        except ClientError as error:
            return _refused(error)
