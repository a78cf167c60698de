"""What a provider module implements: a `Dialect` reads requests, and a `StreamWriter` writes a streamed
answer, both without a clock or a socket.

Everything that a provider sends to a client goes through these two, and everything that can go wrong is a
`FaultKind`. For a new kind, mypy names every dialect whose table lacks it. Decisions about a request (who may
send it, what is sampled, when to stop) are made elsewhere.

Server-sent events are JSON on one line, in UTF-8, ended by an empty line. SSE comments are never sent: Codex,
Qwen Code and OpenClaw do not count them as activity, and Gemini CLI drops the answer when it sees one.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final, Literal, Protocol

from attrs import field, frozen

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Answer, Delta, Json, ModelRequest, Usage
from polarnode.core.errors import Busy, ContextTooLong, Refused, shortened
from polarnode.providers.read_parts import PartsCache

# ── requests and answers ────────────────────────────────────────────────────────────

JSON_TYPE = "application/json"
# There is no charset, because Qwen Code stops if this is not exactly `text/event-stream`.
STREAM_TYPE = "text/event-stream"

# Measured: after two seconds every harness tries a second time. The header is always sent, because Codex
# gives up at once without it.
RETRY_AFTER_S = 2

# The characters of a request that a refusal repeats: enough for a long sentence with two long names.
REPEATED = 1000

# `compact` belongs to the Responses API. It is answered like `generate`, with an item that replaces the
# history.
Operation = Literal["generate", "compact", "count_tokens", "models", "model"]

FaultKind = Literal[
    "bad_request",
    "unauthorized",
    "not_found",
    "method_not_allowed",
    "session_over",
    "context_too_long",
    "budget_spent",
    "overloaded",
    "engine_failed",
    "cancelled",
    "too_large",
]

# Transient faults. A status with `retry-after`, or a broken connection, makes clients send the request again.
RETRYABLE_FAULTS: Final[frozenset[FaultKind]] = frozenset(("overloaded", "engine_failed", "cancelled"))


@frozen(kw_only=True)
class Fault:
    """Why a request is not answered. A dialect renders it in its own format.

    `path` names the field of a `bad_request`. `retry_after_s` (whole seconds) is for `overloaded`,
    `engine_failed` and `cancelled` (an operator or new weights ended the generation; the same request, sent
    again, gets the rest of the answer). `prompt_tokens` and `limit` belong to `context_too_long`, `allow`
    (the method that is served) to `method_not_allowed`.
    """

    kind: FaultKind
    message: str
    path: str | None = None
    retry_after_s: int | None = None
    prompt_tokens: int | None = None
    limit: int | None = None
    allow: str | None = None

    @classmethod
    def of(cls, error: Refused | Busy) -> "Fault":
        """The fault for a refusal. `context_too_long` is a kind of its own among bad requests, because
        harnesses compact on it.
        """
        if isinstance(error, Busy):
            return cls(kind="overloaded", message=str(error), retry_after_s=ceil(error.retry_after))
        if isinstance(error, ContextTooLong):
            return cls(
                kind="context_too_long",
                message=str(error),
                prompt_tokens=error.prompt_tokens,
                limit=error.limit,
            )
        # Harnesses show the parts of their request that a refusal repeats, and some pass them to the model.
        message, path = shortened(str(error), REPEATED), error.path and shortened(error.path, REPEATED)
        return cls(kind="bad_request", message=message, path=path)


@frozen(kw_only=True)
class Reply:
    """A whole HTTP response: status, headers (lower-case names) and body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@frozen(kw_only=True)
class ModelCallInfo:
    """What a response says about its model call.

    `request` is the request being answered. `id` is hex and unique to the call; `created` is in unix seconds;
    `signature` is the opaque reference that stands where a dialect signs thinking. `calls_first`: an answer
    with calls is reported as ended by its calls even if it was cut, for a harness that runs no call of a cut
    answer.
    """

    request: ModelRequest
    id: str
    created: int
    signature: str
    calls_first: bool = False

    @property
    def model(self) -> str:
        """The model name that the client used."""
        return self.request.model

    def cut(self, answer: Answer) -> bool:
        """Whether the client is told that an answer is incomplete."""
        return answer.cut and not (self.calls_first and answer.calls)


@frozen(kw_only=True)
class ServedModel:
    """The one model of this node. `context_length` is in tokens, `created` in unix seconds."""

    id: str
    context_length: int
    created: int = 0


class Memory(Protocol):
    """What one session remembers for its dialects: JSON values by name. It is bounded; the oldest are
    dropped.
    """

    def recall(self, name: str) -> Json | None: ...

    def keep(self, name: str, value: Json) -> None: ...


@frozen
class NoMemory:
    """A memory that keeps nothing."""

    def recall(self, name: str) -> Json | None:
        return None

    def keep(self, name: str, value: Json) -> None:
        pass


@frozen(kw_only=True)
class RequestEnvelope:
    """Everything of a request but its body. `headers` have lower-case names; `model` is the name in the path,
    if the path has one; `query` is verbatim.

    `stream` says whether the path asks for a stream, in the one API whose path decides that. `parts` caches
    the parts of the session's earlier requests.
    """

    headers: Mapping[str, str] = field(factory=dict)
    model: str | None = None
    stream: bool | None = None
    operation: Operation = "generate"
    query: str = ""
    memory: Memory = NoMemory()
    parts: PartsCache = field(factory=PartsCache)


@frozen
class FinalBytes:
    """The last bytes of a failed stream, which is then ended properly. They are for an API whose clients
    recognise a failure by these bytes, but lose them if the connection breaks right after them.
    """

    data: bytes


class StreamWriter(Protocol):
    """One streamed response. Every method returns the bytes to send now, which may be none. A writer holds no
    more than block numbers.

    `keep_alive` may be called at any time, also before `start`. `end` closes the response with every terminal
    marker that its clients wait for. It takes as many answers as the request asked for; `delta` names the
    choice to which it belongs.
    """

    @property
    def content_type(self) -> str: ...

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes: ...

    def delta(self, delta: Delta, *, choice: int = 0) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes: ...

    def failed(self, fault: Fault) -> bytes | FinalBytes | None:
        """The bytes to send after a failure: an error event before the connection is broken, or None to only
        break it. After `FinalBytes` the stream is ended properly instead, because no client takes those bytes
        for the end of an answer.
        """


class Dialect(Protocol):
    """One provider's API."""

    @property
    def name(self) -> str: ...

    def read(self, body: bytes, envelope: RequestEnvelope) -> ModelRequest:
        """Read `body` as a request. Raises Refused with the path of the field. The body of a count request
        may lack what sampling needs.
        """

    def whole(self, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The JSON body of a response that is not streamed (status 200), with as many answers as the request
        asked for.
        """

    def remember(self, call: ModelCallInfo, answer: Answer, memory: Memory) -> None:
        """Keep what a later request of this API may refer to by name. This is called once, when an answer is
        complete. Most APIs keep nothing.
        """

    def stream(self, call: ModelCallInfo) -> StreamWriter: ...

    def error(self, fault: Fault) -> Reply: ...

    def count(self, tokens: int) -> bytes | None:
        """The response to a count_tokens request. None if the API has no such call."""

    def models(self, served: ServedModel) -> bytes:
        """The list of models, which has one entry."""

    def model(self, served: ServedModel, *, name: str) -> bytes:
        """One model, under the requested name, because the same model serves every name."""


@frozen
class FaultRow:
    """How an API reports one kind of fault: the HTTP status, its name for the error, and OpenAI's
    `error.code`.
    """

    status: int
    type: str
    code: str | None = None


def error_reply(status: int, body: Json, fault: Fault) -> Reply:
    """An error as JSON, with the headers that its kind requires."""
    headers = [("content-type", JSON_TYPE)]
    if fault.kind in RETRYABLE_FAULTS:
        headers.append(("retry-after", str(fault.retry_after_s or RETRY_AFTER_S)))
    if fault.allow is not None:
        headers.append(("allow", fault.allow))
    return Reply(status=status, headers=tuple(headers), body=dump_json(body))


# ── server-sent events ────────────────────────────────────────────────────────────

DONE = b"data: [DONE]\n\n"


def event(data: Json, *, name: str | None = None) -> bytes:
    """One server-sent event. `name` becomes its `event:` line, which Anthropic's clients need and OpenAI's
    API does not have.
    """
    line = b"data: " + dump_json(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line
