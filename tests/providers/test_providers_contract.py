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


def test_a_refusal_is_a_bad_request_with_its_path() -> None:
    assert Fault.of(Refused("no", path="$.a[0]")) == Fault(kind="bad_request", message="no", path="$.a[0]")


def test_a_long_context_keeps_its_numbers() -> None:
    fault = Fault.of(ContextTooLong(prompt_tokens=12, limit=8))
    assert (fault.kind, fault.prompt_tokens, fault.limit) == ("context_too_long", 12, 8)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("kind", KINDS)
def test_14_22_retry_after_is_whole_seconds_on_what_may_be_tried_again_and_on_nothing_else(
    dialect: Dialect, kind: FaultKind
) -> None:
    reply = dialect.error(Fault(kind=kind, message="m", retry_after_s=7))
    retried = reply.status == 429 or reply.status >= 500
    assert dict(reply.headers).get("retry-after") == ("7" if retried else None)
    assert retried == (kind in ("overloaded", "engine_failed", "cancelled"))
    assert dict(dialect.error(Fault(kind="overloaded", message="m")).headers)["retry-after"] == str(
        RETRY_AFTER_S
    )


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_14_22_a_session_that_must_stop_is_told_by_a_status_nobody_tries_again(dialect: Dialect) -> None:
    assert dialect.error(Fault(kind="budget_spent", message="m")).status == 400
    assert dialect.error(Fault(kind="session_over", message="m")).status == 410


def test_an_error_is_json_and_says_what_is_allowed() -> None:
    reply = error_reply(405, {"a": 1}, Fault(kind="method_not_allowed", message="m", allow="GET"))
    assert reply.body == b'{"a":1}'
    assert reply.headers == (("content-type", "application/json"), ("allow", "GET"))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_writer_is_new_for_each_call(dialect: Dialect) -> None:
    call = a_call()
    first: StreamWriter = dialect.stream(call)
    assert first.start(prompt_tokens=1, cached_tokens=0)
    assert first.start(prompt_tokens=1, cached_tokens=0) == b""
    assert dialect.stream(call).start(prompt_tokens=1, cached_tokens=0)


def test_a_refusal_repeats_no_more_of_a_request_than_a_person_reads() -> None:
    fault = Fault.of(Refused("x" * 50_000 + ": send something shorter", path="$." + "y" * 50_000))
    assert fault.path is not None
    assert len(fault.message) < 1_100 > len(fault.path)
    assert fault.message.endswith(": send something shorter")
    assert Fault.of(Refused("short", path="$.a")) == Fault(kind="bad_request", message="short", path="$.a")
