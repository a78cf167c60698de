"""What a provider module is: a reader of requests and a writer of answers, without a clock, a socket or a thought of its own.

The rule for whoever edits it: everything a provider says to a client goes through `Dialect` and `StreamWriter`, and everything that can go
wrong is a `FaultKind`. A new kind is added here and mypy then names every dialect whose table lacks it. What is decided about a request
(who may ask, what is sampled, when to stop) is not decided here.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from attrs import frozen

from polarnode.conversation import Answer, Delta, Json, ModelRequest, Usage
from polarnode.errors import ContextTooLong, Refused
from polarnode.wire import dump_json

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"  # without a charset: Qwen Code ends at once when this is not exactly an event stream

# Two seconds, what was measured to bring every harness back on its second try. Codex gives up at once without the header, so it is never absent.
RETRY_AFTER_S = 2

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
    "too_large",
]


@frozen(kw_only=True)
class Fault:
    """Why a request is not answered, before a dialect has put it into its own words.

    `path` names the field of a `bad_request`; `retry_after_s` (whole seconds) is for `overloaded` and `engine_failed`; `prompt_tokens` and
    `limit` belong to `context_too_long`; `allow` (the method that is served) to `method_not_allowed`.
    """

    kind: FaultKind
    message: str
    path: str | None = None
    retry_after_s: int | None = None
    prompt_tokens: int | None = None
    limit: int | None = None
    allow: str | None = None

    @classmethod
    def of(cls, error: Refused) -> "Fault":
        """The fault a refusal is: harnesses compact on `context_too_long`, so it is told apart from other bad requests."""
        if isinstance(error, ContextTooLong):
            return cls(kind="context_too_long", message=str(error), prompt_tokens=error.prompt_tokens, limit=error.limit)
        return cls(kind="bad_request", message=str(error), path=error.path)


@frozen(kw_only=True)
class Reply:
    """An HTTP answer that is whole: status, headers (lower-case names) and body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@frozen(kw_only=True)
class Call:
    """What an answer must carry beside its words.

    `model` is the name the client used. `id` is hex, unique to the call; `created` unix seconds; `signature` the opaque reference put where
    a dialect signs thinking; `include_usage` is the request's.
    """

    model: str
    id: str
    created: int
    signature: str
    include_usage: bool = True


@frozen(kw_only=True)
class ServedModel:
    """The one model of this node. `context_length` in tokens, `created` unix seconds."""

    id: str
    context_length: int
    created: int = 0


class StreamWriter(Protocol):
    """One streamed answer. Every method returns the bytes to send now, which may be none; it holds no more than block numbers.

    `keep_alive` is legal at any time, before `start` as well. `end` closes the answer with every terminal marker its clients wait for.
    """

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def end(self, answer: Answer, usage: Usage) -> bytes: ...

    def failed(self, fault: Fault) -> bytes | None:
        """After headers are out: an error event to send, then close; or None, break the TCP connection. Never end such a stream cleanly."""
        ...


class Dialect(Protocol):
    """One provider's API. `headers` have lower-case names, or look names up regardless of case."""

    @property
    def name(self) -> str: ...

    def read(self, body: bytes, *, headers: Mapping[str, str], model: str | None, counting: bool = False) -> ModelRequest:
        """The request in `body`; Refused with the field's path. `counting`: it will only be counted, so what sampling needs may lack."""
        ...

    def whole(self, call: Call, answer: Answer, usage: Usage) -> bytes:
        """The JSON body of an answer that is not streamed (status 200)."""
        ...

    def stream(self, call: Call) -> StreamWriter: ...

    def error(self, fault: Fault) -> Reply: ...

    def count(self, tokens: int) -> bytes | None:
        """The answer to a count_tokens request; None where the API has no such call."""
        ...

    def models(self, served: ServedModel) -> bytes:
        """The list of the one model."""
        ...

    def model(self, served: ServedModel, *, asked: str) -> bytes:
        """One model, under the name it was asked by: every name is served by the same model."""
        ...


def error_reply(status: int, body: Json, fault: Fault) -> Reply:
    """An error as JSON, with the headers its kind demands."""
    headers = [("content-type", JSON_TYPE)]
    if fault.kind in ("overloaded", "engine_failed"):
        headers.append(("retry-after", str(fault.retry_after_s or RETRY_AFTER_S)))
    if fault.allow is not None:
        headers.append(("allow", fault.allow))
    return Reply(status=status, headers=tuple(headers), body=dump_json(body))
