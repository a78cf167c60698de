"""The model endpoint: the providers' routes, for harnesses that hold a session's key.

It is plain ASGI because the status of a response is chosen as late as its first bytes, and a stream is two
tasks around one exchange. A framework's response object would separate the two. It serves nothing that a
trainer uses.

Invariants. Every response has the provider's own shape, refusals included. No request with a right key is
refused before its body was read, because clients do not read while they send. The endpoint of captures
accepts only keys of captures, and the bodies of each capture have a budget of their own. If other machines
reach that endpoint, a client without a key of a capture gets the same refusal everywhere, and learns nothing
about the keys there were.

The context of the model limits what one request may cost. A request is refused before the work that its size
would cause: its bytes while they arrive, its parts before they are parsed, its characters before they are
rendered. What is refused here could not fit the context, so the refusal is that of a prompt that is too long,
on which harnesses compact. `RequestLimits` is pure, and costs a request of the usual size one comparison for
each limit.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from secrets import token_hex
from time import thread_time
from typing import Final, assert_never

import orjson
import trio
from attrs import define, evolve, field, frozen
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Constraint, Conversation, Json, Message, ModelRequest
from polarnode.core.errors import ContextTooLong, Refused
from polarnode.gateway.call import IncomingCall, Model, ModelCall
from polarnode.gateway.known_histories import MAX_KNOWN_BYTES, BodyDigest
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.gateway.machine import SESSION_OVER_FAULT, enforceable_request
from polarnode.gateway.recordings import Recordings, ResponseCopy
from polarnode.gateway.request_key import request_key
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
    departure_of,
    drained,
    header_map,
    read_body,
    response_writer_of,
    writes_of,
)
from polarnode.http.places import MAX_KEY_CONNECTIONS, slot_of
from polarnode.merge.attach import join_answer_calls
from polarnode.providers.contract import JSON_TYPE, Fault, Reply, RequestEnvelope
from polarnode.providers.dialect import Route, missed, not_found_dialect, route, session_keys
from polarnode.support.bounded import remember, trim_memory
from polarnode.support.concurrency import ThreadShare

# ── what one request may cost ───────────────────────────────────────────────────────────────────────

# The characters of text accepted for each token of the context. English has 4 to 5 per token, source code 3,
# deep indentation 8. A text that has more consists of long runs of one character.
CHARS_PER_TOKEN: Final = 16
# The usual length of a token in characters or bytes, for the estimate of the size in a refusal.
TYPICAL_TOKEN_CHARS: Final = 4
# Room for images in tool results, which this node replaces by a sentence: three images of 5 MB, the largest
# that Anthropic's API accepts.
MAX_IMAGES_BYTES: Final = 16 << 20
BODY_BYTES: Final = 64 << 20  # the limit for a context of any length
# The limit on JSON's marks (quotes, commas, opening brackets), inside texts or between values. Parsing a body
# with this many blocks the event loop for 0.1 s; a message has about seven.
MARKS: Final = 1_000_000
MAX_MARKS_PER_TOKEN: Final = 2  # The limit per token of a longer context. Minified JSON has one and a half.
_MARKS: Final = (b'"', b",", b"{", b"[")
# Limits on a schema, regular expression or grammar. xgrammar compiles a list of 8,000 words in 40 ms, but
# needs cubic time for optional members: 600 take 0.3 s, 1,200 take 2.7 s.
MAX_CONSTRAINT_CHARS: Final = 64_000
MAX_CONSTRAINT_MEMBERS: Final = 500
# The limit on repetitions and optional parts of a regular expression, or of one rule of a grammar. They too
# are compiled in cubic time: 200 take 5 s for a vocabulary of 150,000 tokens, and an external engine may
# compile them in its own event loop. The pattern of an email address has ten.
MAX_CONSTRAINT_REPEATS: Final = 200
MAX_CONSTRAINT_NESTING: Final = 200  # The limit on nested brackets, which compilers follow by recursion.
# These patterns match the escapes and character classes of a regular expression, and the quoted text and
# comments of EBNF. A part that is not closed ends with the text, so that each character is read once.
_LITERAL_PATTERN: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
_QUOTED: Final = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|' + _LITERAL_PATTERN.pattern + r"|#[^\n]*", re.DOTALL
)
# After an opening bracket, `?` only names the kind of group.
_REPEAT_PATTERN: Final = re.compile(r"(?<!\()[*+?]|\{\d")
# The bodies that may be read at once for one session and for all sessions together, counted in the size of
# the longest body. A body takes of the node's share only after its first bytes, so a request of the usual
# size is never refused because of another session.
MAX_SESSION_BODIES: Final = 2
MAX_NODE_BODIES: Final = 8


@frozen
class RequestLimits:
    """The limits of one request to a model of `context_length` tokens."""

    context_length: int
    body_bytes: int = field(init=False)
    chars: int = field(init=False)  # the limit on the characters of all texts of a conversation

    def __attrs_post_init__(self) -> None:
        chars = CHARS_PER_TOKEN * self.context_length
        object.__setattr__(self, "chars", chars)
        object.__setattr__(self, "body_bytes", min(BODY_BYTES, chars + MAX_IMAGES_BYTES))

    def check_body(self, body: bytes) -> None:
        """Raise ContextTooLong for a body with more parts than a parser may be given."""
        most = max(MARKS, MAX_MARKS_PER_TOKEN * self.context_length)
        if len(body) > most and count_marks(body) > most:
            raise self.too_long(len(body))

    def check_conversation(self, conversation: Conversation, *, body_bytes: int) -> None:
        """Raise ContextTooLong for a conversation with more messages or characters than any prompt of this
        context has. A short body of `body_bytes` cannot hold so many, and is not examined. O(messages).
        """
        if body_bytes <= self.chars:  # A message takes at least 16 bytes, a character at least one.
            return
        chars = sum(map(_count_chars, conversation.messages))
        for tool in conversation.tools:
            chars += len(tool.name) + len(tool.description) + len(orjson.dumps(tool.parameters))
        if chars > self.chars or len(conversation.messages) > self.context_length:
            raise self.too_long(chars)

    def too_long(self, size: int) -> ContextTooLong:
        """The refusal of `size` characters or bytes. Its number of tokens is an estimate."""
        tokens = max(size // TYPICAL_TOKEN_CHARS, self.context_length + 1)
        return ContextTooLong(prompt_tokens=tokens, limit=self.context_length)


def count_marks(body: bytes) -> int:
    """Count the marks of JSON in a body, at the speed of C."""
    return sum(map(body.count, _MARKS))


def check_constraint(constraint: Constraint) -> None:
    """Raise Refused for a constraint whose compilation would take the engine longer than the answer."""
    fault = next(_constraint_faults(constraint), None)
    if fault is not None:
        raise Refused(fault, path=constraint.path)


def _constraint_faults(constraint: Constraint) -> Iterator[str]:
    text = constraint.text
    if len(text) > MAX_CONSTRAINT_CHARS:
        yield f"what the answer must match has {len(text)} characters: send at most {MAX_CONSTRAINT_CHARS}"
    match constraint.kind:
        case "regex":
            yield from _repetition_faults(
                _LITERAL_PATTERN.sub("x", text), "the regular expression of the answer"
            )
        case "ebnf":
            for rule in _QUOTED.sub("x", text).split("::="):
                yield from _repetition_faults(rule, "a rule of the answer's grammar")
        case "json_schema":
            yield from _schema_faults(read_json(text.encode()))
        case _:
            assert_never(constraint.kind)


def _schema_faults(schema: Json) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        if len(value) > MAX_CONSTRAINT_MEMBERS:
            yield (
                f"the JSON schema of the answer has an object of {len(value)} members: give each at most"
                f" {MAX_CONSTRAINT_MEMBERS}"
            )
        of_names = value.get("patternProperties")
        for pattern in (value.get("pattern"), *(of_names if isinstance(of_names, dict) else ())):
            if isinstance(pattern, str):
                yield from _repetition_faults(
                    _LITERAL_PATTERN.sub("x", pattern), "a pattern of the answer's JSON schema"
                )
        waiting += value.values()


def _repetition_faults(text: str, what: str) -> Iterator[str]:
    repeats, depth, deepest = len(_REPEAT_PATTERN.findall(text)), 0, 0
    for each in re.findall(r"[()]", text):
        depth += 1 if each == "(" else -1
        deepest = max(deepest, depth)
    if repeats > MAX_CONSTRAINT_REPEATS:
        yield f"{what} has {repeats} repetitions and optional parts: give it at most {MAX_CONSTRAINT_REPEATS}"
    if deepest > MAX_CONSTRAINT_NESTING:
        yield f"{what} has brackets {deepest} deep: nest them at most {MAX_CONSTRAINT_NESTING} deep"


def _count_chars(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.calls)
    return len(message.text) + len(message.thinking) + calls


# ── model plane ────────────────────────────────────────────────────────────

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


@frozen(kw_only=True)
class _Request:
    """A whole request that has a route. `target` is its path with its query; `endpoint` is the session whose
    model endpoint received it.
    """

    route: Route
    target: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    endpoint: str | None


@define(eq=False, kw_only=True)
class ModelPlane:
    """The providers' routes of one node. `app_for` returns the app of one session's model endpoint."""

    sessions: LiveSessions
    model: Model
    # It writes every request and its response; None: nothing is recorded.
    recordings: Recordings | None = None
    _reader_limiter: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(READERS))
    _limits: RequestLimits = field(init=False)
    _bodies: BodyBudget = field(init=False)  # the budget of all endpoints together

    def __attrs_post_init__(self) -> None:
        self._limits = RequestLimits(self.model.context_length)
        self._bodies = BodyBudget(MAX_NODE_BODIES * self._limits.body_bytes)

    def app_for(self, session_id: str | None) -> ASGIFramework:
        """The ASGI app of a model endpoint. It accepts only the key of `session_id`; None accepts the key of
        every live session.
        """
        budget = BodyBudget(MAX_SESSION_BODIES * self._limits.body_bytes, shared=self._bodies)

        async def endpoint(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            if scope["type"] == "http":
                self._admit(scope, session_id)
                name, writes, respond = token_hex(16), writes_of(scope), response_writer_of(scope)
                if self.recordings is None:
                    responder = ResponseSender(send, name, writes, respond)
                    await self._http(scope, receive, responder, session_id, budget)
                else:
                    async with self.recordings.copied(send) as copy:
                        responder = ResponseSender(copy, name, writes, copy.wrap_respond(respond))
                        await self._http(scope, receive, responder, session_id, budget, copy)

        return endpoint

    def _admit(self, scope: HTTPScope, endpoint: str | None) -> None:
        """Mark the connection as admitted when its request has a key of this endpoint, so that it is not
        closed when the socket is full.
        """
        place = slot_of(scope)
        if place is None or place.admitted:
            return
        place.admitted = self.sessions.find_at_endpoint(endpoint, _keys(scope)) is not None

    async def _http(
        self,
        scope: HTTPScope,
        receive: ASGIReceiveCallable,
        responder: ResponseSender,
        endpoint: str | None,
        budget: BodyBudget,
        copy: ResponseCopy | None = None,
    ) -> None:
        large = False
        answer: Reply | IncomingCall | ClientDisconnected | None = None
        try:
            with budget.reserve() as reservation:
                body = await read_body(
                    receive,
                    reservation=reservation,
                    limit=self._limits.body_bytes,
                    announced=announced_length(header_map(scope["headers"])),
                )
                large = reservation.bytes > LARGE_BODY_BYTES
                if copy is not None and isinstance(body, bytes):
                    await copy.keep_request(endpoint or ANY_SESSION_FOLDER, scope, body)
                answer = await self._answer(scope, body, endpoint)
                del body
            match answer:
                case ClientDisconnected():
                    return
                case Reply():
                    await responder.reply(answer)
                case IncomingCall():
                    await ModelCall(self.model, answer, responder).run(receive, departure_of(scope))
                case _:
                    assert_never(answer)
        finally:
            if large:
                answer = None  # This frees what was read from the body as well.
                with trio.CancelScope(shield=True):  # milliseconds
                    await trim_memory()

    async def _answer(
        self, scope: HTTPScope, body: Body, endpoint: str | None
    ) -> Reply | IncomingCall | ClientDisconnected:
        """The reply to a request, or the call to run for it. The body is released here, because a call may
        last minutes and needs only what was read from the body.
        """
        if isinstance(body, ClientDisconnected):
            return body
        method, path, headers = scope["method"], scope["path"], header_map(scope["headers"])
        query = scope["query_string"].decode("latin1")
        target = f"{path}?{query}" if query else path
        found = route(method, path, headers)
        if found is None:
            return (
                _ALIVE_REPLY if path == "/" and method in ("GET", "HEAD") else missed(method, path, headers)
            )
        if not isinstance(body, bytes):
            return found.dialect.error(self._unread_fault(found, body))
        request = _Request(
            route=found, target=target, query=query, headers=headers, body=body, endpoint=endpoint
        )
        match found.operation:
            case "models" | "model":
                return self._listed(request)
            case "count_tokens":
                return await self._counted(request)
            case "generate" | "compact":
                return await self._incoming(request)
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
                return Fault.of(self._limits.too_long(size))
            case OverBudget():
                return _OVERLOADED_FAULT
            case TooSlow():
                return _TOO_SLOW_FAULT
            case _:
                assert_never(body)

    def _listed(self, request: _Request) -> Reply:
        """The list of models. It needs no key, because hermes asks without one. A wrong key is refused."""
        dialect = request.route.dialect
        session = self._session(request)
        if isinstance(session, Fault) and session_keys(request.target, request.headers):
            return dialect.error(session)
        name = request.route.model
        return _json(
            dialect.models(self.model.served) if name is None else dialect.model(self.model.served, name=name)
        )

    async def _counted(self, request: _Request) -> Reply:
        """The number of tokens of a request's prompt, rendered after the turn that the request extends.
        Nothing is recorded.
        """
        dialect = request.route.dialect
        session = self._session(request)
        if isinstance(session, Fault):
            return dialect.error(session)
        if session.over:
            return dialect.error(SESSION_OVER_FAULT)
        try:
            read, _ = await self._read(request, session)
            history, new, prefill = session.lineages.look(read.conversation, hints=read.hints)
            rendered = await self.model.prompt(
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

    async def _incoming(self, request: _Request) -> IncomingCall | Reply:
        """A request that may be answered, or the refusal it gets before anything is planned."""
        dialect = request.route.dialect
        session = self._session(request)
        if isinstance(session, Fault):
            return dialect.error(session)
        try:
            read, key = await self._read(request, session)
        except Refused as error:
            fault = Fault.of(error)
            session.refused(fault)
            return dialect.error(fault)
        return IncomingCall(session=session, dialect=dialect, request=read, key=key)

    def _session(self, request: _Request) -> LiveSession | Fault:
        """The session of the first key that this endpoint accepts. The fault is SESSION_OVER_FAULT for the
        key of a session that has ended.
        """
        keys = session_keys(request.target, request.headers)
        if (session := self.sessions.find_at_endpoint(request.endpoint, keys)) is not None:
            return session
        ended = {self.sessions.ended_session_id(key) for key in keys} - {None}
        return (
            SESSION_OVER_FAULT
            if ended and (request.endpoint is None or request.endpoint in ended)
            else _UNKNOWN_KEY_FAULT
        )

    async def _read(self, request: _Request, session: LiveSession) -> tuple[ModelRequest, str]:
        """Read the body as a request; return it with its key. Raises Refused with the path of the field."""
        session.large |= len(request.body) > LARGE_BODY_BYTES
        read = partial(_read, request, session, self.model, self._limits)
        share = ThreadShare(session.threads, self._reader_limiter)
        if len(request.body) > MAX_KNOWN_BYTES:
            found, key, _ = await share.run(read)
            return found, key
        digest = BodyDigest.of(request.body, request.route.operation)
        found, key, seconds = read() if session.histories.is_short(digest) else await share.run(read)
        session.histories.note(digest, seconds)
        return found, key


def _read(
    request: _Request, session: LiveSession, model: Model, limits: RequestLimits
) -> tuple[ModelRequest, str, float]:
    """The request, its key, and the CPU seconds that reading it took."""
    began = thread_time()
    found, body = request.route, request.body
    limits.check_body(body)
    envelope = RequestEnvelope(
        headers=request.headers,
        model=found.model,
        stream=found.stream,
        operation=found.operation,
        query=request.query,
        memory=session.memory,
        parts=session.parts,
    )
    read = found.dialect.read(body, envelope)
    limits.check_conversation(read.conversation, body_bytes=len(body))
    if read.constraint is not None:
        check_constraint(read.constraint)
    if session.resumed is not None:
        read = session.resumed.strip_marker(read)
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
    """An ASGI app in front of a model plane whose sessions are captures. It refuses what a web page of
    another origin sends before its body is read, and an address that has tried too many wrong keys.

    `public`: other machines reach it. A client without the key of an open capture then gets the same 401 for
    every route.
    """

    plane: ModelPlane
    public: bool = False
    _endpoints: dict[str, ASGIFramework] = field(factory=dict, init=False)

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":
            return
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
            await ResponseSender(send, token_hex(16)).reply(refused)
        else:
            ended = next(filter(None, map(self.plane.sessions.ended_session_id, keys)), NOBODY)
            await self._endpoint(ended if live is None else live.session_id)(scope, receive, send)

    def _endpoint(self, session_id: str) -> ASGIFramework:
        endpoint = self._endpoints.get(session_id) or self.plane.app_for(session_id)
        remember(self._endpoints, session_id, endpoint, most=MAX_ENDPOINTS)
        return endpoint


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
