"""The model endpoints: the providers' routes, for harnesses that hold a session's key.

`ModelEndpoint.serve` answers one HTTP request: it reads the body, finds the session by its key, and replies
or runs a model call (`call.py`). It is a direct app and not one of a web framework, because the status of a
response is chosen as late as its first bytes, and a stream is two tasks around one exchange. A framework's
response object would separate the two. It serves nothing that a trainer uses.

Invariants. Every response has the provider's own shape, refusals included. No request with a right key is
refused before its body was read, because clients do not read while they send. The endpoint of captures
accepts only keys of captures, and the bodies of each capture have a budget of their own. If other machines
reach that endpoint, a client without a key of a capture gets the same refusal everywhere, and learns nothing
about the keys there were.
"""

from collections.abc import Mapping
from functools import partial
from secrets import token_hex
from time import thread_time
from typing import Final, assert_never

import orjson
import trio
from attrs import define, evolve, field, frozen
from hypercorn.typing import ASGIReceiveCallable, HTTPScope

from polarnode.core.conversation import ModelRequest
from polarnode.core.errors import Refused
from polarnode.gateway.call import IncomingCall, Model, ModelCall
from polarnode.gateway.earlier_requests import MAX_KNOWN_BYTES, BodyDigest
from polarnode.gateway.exchange import SESSION_OVER_FAULT
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.gateway.model_requests import (
    RequestLimits,
    check_constraint,
    enforceable_request,
    request_key,
)
from polarnode.gateway.recordings import Recordings, ResponseCopy
from polarnode.http.asgi import (
    MAX_BODY_S,
    Body,
    BodyBudget,
    BrowserGuard,
    ClientDisconnected,
    OverBudget,
    ResponseSender,
    TooLarge,
    TooSlow,
    announced_length,
    drained,
    header_map,
    read_body,
)
from polarnode.http.connections import DirectApp, ResponseWriter
from polarnode.http.places import MAX_KEY_CONNECTIONS, slot_of
from polarnode.merge.attach import join_answer_calls
from polarnode.providers.contract import JSON_TYPE, Fault, Reply, RequestEnvelope
from polarnode.providers.dialect import Route, missed, not_found_dialect, route, session_keys
from polarnode.support.bounded import remember, trim_memory
from polarnode.support.concurrency import ThreadShare

# ── endpoint of a session ────────────────────────────────────────────────────────────

# The bodies that may be read at once for one session and for all sessions together, counted in the size of
# the longest body. A body takes of the node's share only after its first bytes, so a request of the usual
# size is never refused because of another session.
MAX_SESSION_BODIES: Final = 2
MAX_NODE_BODIES: Final = 8
ANY_SESSION_FOLDER: Final = "any"  # The folder for recordings of an endpoint that serves every session.
# The number of threads that read long bodies. Reading holds the GIL, so more threads would only delay the
# event loop.
READERS: Final = 2
# After a longer body the node gives free memory back to the system, which takes a thread some milliseconds. A
# prompt of 100k tokens is shorter.
LARGE_BODY_BYTES: Final = 512 << 10

_ALIVE_REPLY: Final = Reply(status=200, headers=(("content-type", JSON_TYPE),), body=b'{"status":"ok"}')
_OVERLOADED_FAULT: Final = Fault(
    kind="overloaded",
    message="too many long requests of this session are being read at once: send it again",
    retry_after_s=1,
)
_TOO_SLOW_FAULT: Final = Fault(
    kind="overloaded", message=f"the body was not complete after {MAX_BODY_S:.0f} s: send it again"
)
_UNKNOWN_KEY_FAULT: Final = Fault(
    kind="unauthorized", message="no session of this node has this key: send the one the harness was given"
)


@define(eq=False, kw_only=True)
class ModelPlane:
    """What the model endpoints of one node share. `app_for` returns the app of one session's endpoint."""

    sessions: LiveSessions
    model: Model
    # It writes every request and its response; None: nothing is recorded.
    recordings: Recordings | None = None
    limits: RequestLimits = field(init=False)
    bodies: BodyBudget = field(init=False)  # the budget of all endpoints together
    reader_limiter: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(READERS))

    def __attrs_post_init__(self) -> None:
        self.limits = RequestLimits(self.model.context_length)
        self.bodies = BodyBudget(MAX_NODE_BODIES * self.limits.body_bytes)

    def app_for(self, session_id: str | None) -> DirectApp:
        """The app of a model endpoint. It accepts only the key of `session_id`; None accepts the key of every
        live session.
        """
        budget = BodyBudget(MAX_SESSION_BODIES * self.limits.body_bytes, shared=self.bodies)
        return DirectApp(ModelEndpoint(self, session_id, budget).serve)


@frozen(kw_only=True)
class _Request:
    """A whole request of a live session."""

    route: Route
    session: LiveSession
    query: str
    headers: Mapping[str, str]
    body: bytes


@frozen
class ModelEndpoint:
    """The providers' routes at the endpoint of `session_id`; None stands for every live session. `budget` is
    for the bodies that it reads.
    """

    plane: ModelPlane
    session_id: str | None
    budget: BodyBudget

    async def serve(self, scope: HTTPScope, receive: ASGIReceiveCallable, response: ResponseWriter) -> None:
        """Answer one request. The body is released before a call runs, because a call may last minutes and
        needs only what was read from the body.
        """
        plane, keys, place = self.plane, _keys(scope), slot_of(scope)
        # 1. The connection of a request with a key of this endpoint is not closed when the socket is full.
        if place is not None and not place.admitted:
            place.admitted = plane.sessions.find_at_endpoint(self.session_id, keys) is not None
        copy = None if plane.recordings is None else ResponseCopy(plane.recordings, response)
        responder = ResponseSender(response if copy is None else copy, token_hex(16))
        large = False
        answer: Reply | IncomingCall | ClientDisconnected | None = None
        try:
            # 2. Read the body, and from it the reply or the call.
            with self.budget.reserve() as reservation:
                body = await read_body(
                    receive,
                    reservation=reservation,
                    limit=plane.limits.body_bytes,
                    announced=announced_length(header_map(scope["headers"])),
                )
                large = reservation.bytes > LARGE_BODY_BYTES
                if copy is not None and isinstance(body, bytes):
                    await copy.keep_request(self.session_id or ANY_SESSION_FOLDER, scope, body)
                answer = await self._answer(scope, keys, body)
                del body
            # 3. Send the reply, or run the call.
            match answer:
                case ClientDisconnected():
                    pass
                case Reply():
                    await responder.reply(answer)
                case IncomingCall():
                    await ModelCall(plane.model, answer, responder).run()
                case _:
                    assert_never(answer)
        finally:
            if copy is not None or large:
                answer = None  # This frees what was read from the body as well.
                with trio.CancelScope(shield=True):  # milliseconds
                    if copy is not None:
                        await copy.save()
                    if large:
                        await trim_memory()

    async def _answer(
        self, scope: HTTPScope, keys: tuple[str, ...], body: Body
    ) -> Reply | IncomingCall | ClientDisconnected:
        """The reply to a request, or the call to run for it."""
        if isinstance(body, ClientDisconnected):
            return body
        method, path, headers = scope["method"], scope["path"], header_map(scope["headers"])
        found = route(method, path, headers)
        if found is None:
            return (
                _ALIVE_REPLY if path == "/" and method in ("GET", "HEAD") else missed(method, path, headers)
            )
        dialect = found.dialect
        if not isinstance(body, bytes):
            return dialect.error(self._unread_fault(found, body))
        session = self._find_session(keys)
        match found.operation:
            case "models" | "model":
                # This needs no key, because hermes asks without one. A wrong key is refused.
                if isinstance(session, Fault) and keys:
                    return dialect.error(session)
                served, name = self.plane.model.served, found.model
                return _json(dialect.models(served) if name is None else dialect.model(served, name=name))
            case "count_tokens" | "generate" | "compact":
                if isinstance(session, Fault):
                    return dialect.error(session)
                query = scope["query_string"].decode("latin1")
                request = _Request(route=found, session=session, query=query, headers=headers, body=body)
                if found.operation == "count_tokens":
                    return await self._count_tokens(request)
                return await self._accept(request)
            case _:
                assert_never(found.operation)

    def _unread_fault(self, found: Route, body: TooLarge | OverBudget | TooSlow) -> Fault:
        """The fault of a body that was not kept. A body that is too large has a prompt that is too long, or
        images, which harnesses drop when they compact.
        """
        match body:
            case TooLarge() if found.operation in ("models", "model"):
                return Fault(kind="too_large", message="this route takes no body: send none")
            case TooLarge(size):
                return Fault.of(self.plane.limits.too_long(size))
            case OverBudget():
                return _OVERLOADED_FAULT
            case TooSlow():
                return _TOO_SLOW_FAULT
            case _:
                assert_never(body)

    def _find_session(self, keys: tuple[str, ...]) -> LiveSession | Fault:
        """The session of the first key that this endpoint accepts. The fault is SESSION_OVER_FAULT for the
        key of a session that has ended.
        """
        sessions = self.plane.sessions
        if (session := sessions.find_at_endpoint(self.session_id, keys)) is not None:
            return session
        ended = {sessions.ended_session_id(key) for key in keys} - {None}
        is_over = ended and (self.session_id is None or self.session_id in ended)
        return SESSION_OVER_FAULT if is_over else _UNKNOWN_KEY_FAULT

    async def _count_tokens(self, request: _Request) -> Reply:
        """The number of tokens of a request's prompt, rendered after the turn that the request extends.
        Nothing is recorded.
        """
        dialect, session = request.route.dialect, request.session
        if session.calls.closed:
            return dialect.error(SESSION_OVER_FAULT)
        try:
            read, _ = await self._read(request)
            history, new, prefill = session.lineages.look(read.conversation, hints=read.hints)
            rendered = await self.plane.model.prompt(
                read.conversation, new, history, threads=session.threads, prefill=prefill
            )
            body = dialect.count(len(rendered.prompt))
        except Refused as error:
            return dialect.error(Fault.of(error))
        return (
            dialect.error(Fault(kind="not_found", message="this API counts no tokens"))
            if body is None
            else _json(body)
        )

    async def _accept(self, request: _Request) -> IncomingCall | Reply:
        """The call to run for a request, or the refusal it gets before anything is planned."""
        dialect, session = request.route.dialect, request.session
        try:
            read, key = await self._read(request)
        except Refused as error:
            fault = Fault.of(error)
            session.budget.count_refusal(fault)
            return dialect.error(fault)
        return IncomingCall(session=session, dialect=dialect, request=read, key=key)

    async def _read(self, request: _Request) -> tuple[ModelRequest, str]:
        """Read the body as a request; return it with its key. A body that takes long is read in a thread.
        Raises Refused with the path of the field.
        """
        plane, session = self.plane, request.session
        session.earlier.large |= len(request.body) > LARGE_BODY_BYTES
        read = partial(_read_request, request, plane.model, plane.limits)
        share = ThreadShare(session.threads, plane.reader_limiter)
        if len(request.body) > MAX_KNOWN_BYTES:
            found, key, _ = await share.run(read)
            return found, key
        histories, digest = session.earlier.histories, BodyDigest.of(request.body, request.route.operation)
        found, key, seconds = read() if histories.is_short(digest) else await share.run(read)
        histories.note(digest, seconds)
        return found, key


def _read_request(request: _Request, model: Model, limits: RequestLimits) -> tuple[ModelRequest, str, float]:
    """The request, its key, and the CPU seconds that reading it took."""
    began = thread_time()
    found, body, session = request.route, request.body, request.session
    limits.check_body(body)
    envelope = RequestEnvelope(
        headers=request.headers,
        model=found.model,
        stream=found.stream,
        operation=found.operation,
        query=request.query,
        memory=session.earlier.memory,
        parts=session.earlier.parts,
    )
    read = found.dialect.read(body, envelope)
    limits.check_conversation(read.conversation, body_bytes=len(body))
    if read.constraint is not None:
        check_constraint(read.constraint)
    if session.inherited.resumed is not None:
        read = session.inherited.resumed.strip_marker(read)
    read = join_answer_calls(read, session.lineages.references)
    kept = enforceable_request(read, headers=model.family.harmony is not None)
    session.lineages.prepare(kept.conversation)
    # The key covers the request as it was read, so that parts which the node leaves out of the prompt do not
    # make it another request.
    key = request_key(kept, found.operation)
    return kept, key, thread_time() - began


def _json(body: bytes) -> Reply:
    return Reply(status=200, headers=(("content-type", JSON_TYPE),), body=body)


# ── endpoint of captures ────────────────────────────────────────────────────────────

# This is no session id. A client without a key gets what needs none, and is refused the rest.
NOBODY: Final = ""
_TOO_MANY_KEYS: Final = Fault(
    kind="overloaded",
    message="too many wrong keys came from this address: send the key of a capture that is open",
    retry_after_s=5,  # In 5 s an address regains a hundred tries.
)
_TOO_MANY_CONNECTIONS: Final = Fault(
    kind="overloaded",
    message=f"this key has {MAX_KEY_CONNECTIONS} connections, as many as one may: wait for one of them",
    retry_after_s=1,
)
_CLOSE: Final = ("connection", "close")
# Any `Host` is accepted, because a page that rebinds its name to this machine has no key.
PAGE_GUARD: Final = BrowserGuard(any_host=True)
# The number of cached endpoints, more than a node has open captures. A dropped endpoint is made again.
MAX_ENDPOINTS: Final = 1_000


@define(eq=False)
class CaptureEndpoint:
    """The endpoint of all captures, in front of the endpoint of each. It refuses what a web page of another
    origin sends before its body is read, and an address that has tried too many wrong keys.

    `public`: other machines reach it. A client without the key of an open capture then gets the same 401 for
    every route.
    """

    plane: ModelPlane
    public: bool = False
    _endpoints: dict[str, DirectApp] = field(factory=dict, init=False)

    async def serve(self, scope: HTTPScope, receive: ASGIReceiveCallable, response: ResponseWriter) -> None:
        """Refuse a request, or pass it to the endpoint of the capture whose key it has."""
        keys, place = _keys(scope), slot_of(scope)
        live = next(filter(None, map(self.plane.sessions.by_key, keys)), None)
        refused = None
        if live is None and (keys or self.public):
            over = place is not None and not place.try_key()
            if over or self.public:
                # On HTTPS the connection is closed, because the server then drops the address's next
                # connection before its handshake, which is cheap. On plain HTTP a new connection would cost
                # more than a request on this one.
                whole = not (over and scope["scheme"] == "https") and await drained(receive)
                fault = _TOO_MANY_KEYS if over else _UNKNOWN_KEY_FAULT
                refused = _fault_reply(scope, fault, *(() if whole else (_CLOSE,)))
        refused = refused or _page_refusal(scope)
        if live is not None and refused is None and place is not None and not place.admit(live.session_id):
            refused = _fault_reply(scope, _TOO_MANY_CONNECTIONS, _CLOSE)
        if refused is not None:
            await ResponseSender(response, token_hex(16)).reply(refused)
            return
        ended = next(filter(None, map(self.plane.sessions.ended_session_id, keys)), NOBODY)
        session_id = ended if live is None else live.session_id
        endpoint = self._endpoints.get(session_id) or self.plane.app_for(session_id)
        remember(self._endpoints, session_id, endpoint, most=MAX_ENDPOINTS)
        await endpoint.serve(scope, receive, response)


def _keys(scope: HTTPScope) -> tuple[str, ...]:
    query = scope["query_string"].decode("latin1")
    return session_keys(f"{scope['path']}?{query}", header_map(scope["headers"]))


def _fault_reply(scope: HTTPScope, fault: Fault, *headers: tuple[str, str]) -> Reply:
    """A fault in the format of the API that a request uses, whether or not the request has a route."""
    names = header_map(scope["headers"])
    found = route(scope["method"], scope["path"], names)
    reply = (found.dialect if found else not_found_dialect(scope["path"], names)).error(fault)
    return evolve(reply, headers=(*reply.headers, *headers))


def _page_refusal(scope: HTTPScope) -> Reply | None:
    headers = header_map(scope["headers"])
    sentence = PAGE_GUARD.refusal(
        host=headers.get("host"), origin=headers.get("origin"), site=headers.get("sec-fetch-site")
    )
    if sentence is None:
        return None
    body = orjson.dumps({"error": {"type": "forbidden", "message": sentence}})
    return Reply(status=403, headers=(("content-type", JSON_TYPE),), body=body)
