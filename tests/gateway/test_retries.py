"""What a session keeps for clients that left, and how long a body waits for its twin."""

import pytest
import trio
import trio.testing
from providers_kit import a_call

from polarnode.core.conversation import Answer, TextPart, Usage
from polarnode.gateway import live_sessions
from polarnode.gateway.exchange import CutCall, UndeliveredResponse
from polarnode.gateway.live_sessions import MAX_TWIN_WAIT_S, Retries, wait_ended


def whole(text: str = "x") -> UndeliveredResponse:
    call, answer = a_call(), Answer(parts=(TextPart(text),), finish_reason="stop")
    return UndeliveredResponse(
        id=call.id, created=call.created, signature=call.signature, answers=(answer,), usage=Usage()
    )


def left(session: Retries, name: str, response: UndeliveredResponse | CutCall) -> None:
    """An attempt that ends with a response its client did not receive."""
    with session.attempt(name) as attempt:
        attempt.keep(response)


def taken(session: Retries, name: str) -> UndeliveredResponse | CutCall | None:
    """What the next attempt takes over, without delivering it."""
    with session.attempt(name) as attempt:
        return attempt.take_over()


def test_response_undelivered_until_delivered() -> None:
    session = Retries()
    assert taken(session, "body") is None
    left(session, "body", CutCall(3))
    left(session, "other", whole())
    for _ in range(2):  # what one attempt takes over and does not deliver, the next finds again
        assert (taken(session, "body"), taken(session, "other")) == (CutCall(3), whole())
    left(session, "body", whole("y"))
    assert taken(session, "body") == whole("y")
    with session.attempt("body") as attempt:
        attempt.take_over()
        attempt.delivered()
    assert (taken(session, "body"), taken(session, "other")) == (None, whole())


def test_response_has_one_attempt_at_once() -> None:
    """A client that samples the same body in parallel gets a sample for each, never one answer twice."""
    session = Retries()
    with session.attempt("body") as first, session.attempt("body") as second:
        first.keep(whole("first"))
        assert second.take_over() is None
        second.keep(whole("second"))
        second.delivered()
    with session.attempt("body") as third, session.attempt("body") as fourth:
        assert (third.take_over(), fourth.take_over()) == (whole("first"), None)


def test_resent_response_takes_new_request() -> None:
    """A response is sent again under its own names to the request that comes again."""
    again = a_call(stream=True)
    assert whole().call(again.request) == again


def test_undelivered_responses_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Undelivered responses are bounded, and the oldest is forgotten."""
    monkeypatch.setattr(live_sessions, "MAX_UNDELIVERED", 2)
    session = Retries()
    for name in ("a", "b", "a", "c"):
        left(session, name, CutCall(1))
    assert list(session._undelivered) == ["a", "c"]


async def test_body_waits_only_for_twins(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A body waits for its earlier twins and for nobody else."""
    session = Retries()
    waited: list[float] = []

    async def ask(name: str, takes: float) -> None:
        with session.attempt(name) as attempt:
            started = trio.current_time()
            await wait_ended(attempt.earlier)
            waited.append(trio.current_time() - started)
            await trio.sleep(takes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "body", 0.1)
        await trio.sleep(0.01)
        nursery.start_soon(ask, "body", 9)
        nursery.start_soon(ask, "other", 9)
        await trio.sleep(0.2)
        nursery.start_soon(ask, "body", 9)
    assert waited == pytest.approx([0, 0, 0.09, MAX_TWIN_WAIT_S])
    assert session._in_progress == {}


async def test_failed_call_ends_for_twins() -> None:
    session = Retries()
    with pytest.raises(RuntimeError, match="bug"), session.attempt("body"):
        raise RuntimeError("bug")
    with session.attempt("body") as attempt:
        assert attempt.earlier == ()
        await trio.lowlevel.checkpoint()
