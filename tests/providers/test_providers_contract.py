"""What every dialect shares: faults from refusals, and the headers an error carries."""

from typing import get_args

import pytest
from providers_kit import a_call

from polarnode.core.errors import ContextTooLong, Refused
from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.contract import RETRY_AFTER_S, Dialect, Fault, FaultKind, StreamWriter, error_reply
from polarnode.providers.google import GOOGLE
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_responses import OPENAI_RESPONSES

DIALECTS: tuple[Dialect, ...] = (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GOOGLE)
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def test_refusal_is_400_with_path() -> None:
    """A refusal is a bad request with its path."""
    assert Fault.of(Refused("no", path="$.a[0]")) == Fault(kind="bad_request", message="no", path="$.a[0]")


def test_long_context_keeps_its_numbers() -> None:
    fault = Fault.of(ContextTooLong(prompt_tokens=12, limit=8))
    assert (fault.kind, fault.prompt_tokens, fault.limit) == ("context_too_long", 12, 8)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("kind", KINDS)
def test_retry_after_where_retryable(dialect: Dialect, kind: FaultKind) -> None:
    """Retry-After is whole seconds on what may be tried again, and on nothing else."""
    reply = dialect.error(Fault(kind=kind, message="m", retry_after_s=7))
    retried = reply.status == 429 or reply.status >= 500
    assert dict(reply.headers).get("retry-after") == ("7" if retried else None)
    assert retried == (kind in ("overloaded", "engine_failed", "cancelled"))
    assert dict(dialect.error(Fault(kind="overloaded", message="m")).headers)["retry-after"] == str(
        RETRY_AFTER_S
    )


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_ended_session_not_retried(dialect: Dialect) -> None:
    """An ended session is a status that no client tries again."""
    assert dialect.error(Fault(kind="budget_spent", message="m")).status == 400
    assert dialect.error(Fault(kind="session_over", message="m")).status == 410


def test_error_body_is_json_with_advice() -> None:
    """An error is JSON and says what is allowed."""
    reply = error_reply(405, {"a": 1}, Fault(kind="method_not_allowed", message="m", allow="GET"))
    assert reply.body == b'{"a":1}'
    assert reply.headers == (("content-type", "application/json"), ("allow", "GET"))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_each_call_has_new_writer(dialect: Dialect) -> None:
    call = a_call()
    first: StreamWriter = dialect.stream(call)
    assert first.start(prompt_tokens=1, cached_tokens=0)
    assert first.start(prompt_tokens=1, cached_tokens=0) == b""
    assert dialect.stream(call).start(prompt_tokens=1, cached_tokens=0)


def test_long_refusal_is_shortened() -> None:
    """A refusal repeats only as much of a request as a person reads."""
    fault = Fault.of(Refused("x" * 50_000 + ": send something shorter", path="$." + "y" * 50_000))
    assert fault.path is not None
    assert len(fault.message) < 1_100 > len(fault.path)
    assert fault.message.endswith(": send something shorter")
    assert Fault.of(Refused("short", path="$.a")) == Fault(kind="bad_request", message="short", path="$.a")
