"""A question as the body of a Chat Completions request, and what an endpoint's answer says: a text, or why there is none.

Pure. The rule for whoever edits it: whether asking again can help is decided here, from what the endpoint said, and nowhere else; a key never
stands in a sentence.
"""

from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from attrs import field, frozen

from polarnode import wire
from polarnode.config import JudgeConfig
from polarnode.conversation import Json
from polarnode.errors import EvaluatorError, Refused
from polarnode.ports import Question

PASSES = frozenset({408, 409, 425, 429})  # besides 5xx: the endpoint says itself that the same request may do later
SAID = 300  # characters of an endpoint's own words in a sentence
SCHEMA_NAME = "verdict"


@frozen
class Passes:
    """No answer, for a reason that passes; `after_s` is how long the endpoint asks to be left alone."""

    reason: str
    after_s: float = 0.0


@frozen(kw_only=True)
class Reply:
    """What came back over HTTP."""

    status: int
    headers: Mapping[str, str] = field(factory=dict)
    body: bytes = b""


def request_body(config: JudgeConfig, question: Question) -> bytes:
    """The request as JSON. What the config's `body` says lies over it; null there takes a field out."""
    body: dict[str, Json] = {
        "model": config.model,
        "messages": [dict(message) for message in question.messages],
        "temperature": question.temperature,
        "max_tokens": question.max_tokens,
        "stream": False,
    }
    if question.schema is not None and config.structured != "text":
        body["response_format"] = _response_format(config, question.schema)
    return wire.dump_json({name: value for name, value in {**body, **config.body}.items() if value is not None})


def _response_format(config: JudgeConfig, schema: Mapping[str, Json]) -> Json:
    if config.structured == "object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": SCHEMA_NAME, "strict": True, "schema": dict(schema)}}


def read_reply(reply: Reply, *, who: str, now: float, secret: str | None = None) -> str | Passes:
    """The answer's text, or why there is none now. EvaluatorError where asking again would not help. `now` is seconds since the epoch."""
    if reply.status == 200:
        return _text(reply, who)
    said = f"HTTP {reply.status}{_words(reply, secret)}"
    if reply.status in PASSES or reply.status >= 500:
        return Passes(said, after_s=_retry_after(reply, now))
    raise EvaluatorError(f"{who} refused the question: {said}")


# ── an answer ─────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class _Message:
    content: str | None = None
    refusal: str | None = None


@frozen(kw_only=True)
class _Choice:
    message: _Message
    finish_reason: str | None = None


@frozen(kw_only=True)
class _Completion:
    choices: tuple[_Choice, ...]


def _text(reply: Reply, who: str) -> str:
    try:
        completion = wire.structure(wire.read_json(reply.body), _Completion)
    except Refused as refused:
        raise EvaluatorError(f"{who} answered with what is no chat completion: {refused}") from refused
    if not completion.choices:
        raise EvaluatorError(f"{who} answered without a choice")
    choice = completion.choices[0]
    if choice.message.refusal:
        raise EvaluatorError(f"{who} would not answer: {choice.message.refusal[:SAID]}")
    if choice.finish_reason == "length":
        raise EvaluatorError(f"{who} was cut at its token limit: raise the evaluator's max_tokens")
    if not choice.message.content:
        raise EvaluatorError(f"{who} answered without text (finish_reason {choice.finish_reason})")
    return choice.message.content


# ── a refusal ─────────────────────────────────────────────────────────────────


def _words(reply: Reply, secret: str | None) -> str:
    """What the endpoint says of itself, as OpenAI and its like spell it, or the beginning of its body."""
    try:
        value = wire.read_json(reply.body)
    except Refused:
        value = None
    error = value.get("error", value) if isinstance(value, dict) else None
    found = error.get("message") if isinstance(error, dict) else error
    text = found if isinstance(found, str) else reply.body[: 4 * SAID].decode("utf-8", "replace")
    text = " ".join(text.split())
    if secret:
        text = text.replace(secret, "…")
    return f": {text[:SAID]}" if text else ""


def _retry_after(reply: Reply, now: float) -> float:
    """Seconds, or a date, as the header has it; 0 where there is none that can be read."""
    said = reply.headers.get("retry-after", "").strip()
    if said.replace(".", "", 1).isdecimal():
        return float(said)
    try:
        found = parsedate_to_datetime(said) if said else None
    except ValueError:
        return 0.0
    if found is None:
        return 0.0
    at: datetime = found if found.tzinfo else found.replace(tzinfo=timezone.utc)  # noqa: UP017 - as the standard library spells it
    return max(0.0, at.timestamp() - now)
