"""What a session keeps for clients that left, and how long a body waits for its twin."""

import pytest
import trio
import trio.testing
from providers_kit import a_call

from polarnode.core.conversation import Answer, TextPart, Usage
from polarnode.gateway import live_sessions
from polarnode.gateway.call_events import UndeliveredResponse
from polarnode.gateway.live_sessions import TWIN_S, Retries, wait_ended


def whole(text: str = "x") -> UndeliveredResponse:
    call, answer = a_call(), Answer(parts=(TextPart(text),), finish_reason="stop")
    return UndeliveredResponse(
        id=call.id, created=call.created, signature=call.signature, answers=(answer,), usage=Usage()
    )


def test_a_response_is_undelivered_until_it_is_delivered() -> None:
    session = Retries()
    assert session.undelivered("body") is None
    session.keep("body", 3)
    session.keep("other", whole())
    assert (session.undelivered("body"), session.undelivered("other")) == (3, whole())
    session.keep("body", whole("y"))
    assert session.undelivered("body") == whole("y")
    session.delivered("body")
    session.delivered("body")  # twice is once
    assert (session.undelivered("body"), session.undelivered("other")) == (None, whole())


def test_it_is_sent_again_under_its_names_to_the_request_that_comes_again() -> None:
    again = a_call(stream=True)
    assert whole().call(again.request) == again


def test_undelivered_responses_are_bounded_and_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_sessions, "UNDELIVERED", 2)
    session = Retries()
    for name in ("a", "b", "a", "c"):
        session.keep(name, 1)
    assert [session.undelivered(name) for name in "abc"] == [1, None, 1]


async def test_a_body_waits_for_its_earlier_twins_and_for_nobody_else(
    autojump_clock: trio.testing.MockClock,
) -> None:
    session = Retries()
    waited: list[float] = []

    async def ask(name: str, takes: float) -> None:
        with session.in_progress(name) as earlier:
            started = trio.current_time()
            await wait_ended(earlier)
            waited.append(trio.current_time() - started)
            await trio.sleep(takes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "body", 0.1)
        await trio.sleep(0.01)
        nursery.start_soon(ask, "body", 9)
        nursery.start_soon(ask, "other", 9)
        await trio.sleep(0.2)
        nursery.start_soon(ask, "body", 9)
    assert waited == pytest.approx([0, 0, 0.09, TWIN_S])
    assert session._in_progress == {}


async def test_a_call_that_fails_ends_for_its_twins_too() -> None:
    session = Retries()
    with pytest.raises(RuntimeError, match="bug"), session.in_progress("body"):
        raise RuntimeError("bug")
    with session.in_progress("body") as earlier:
        assert earlier == ()
        await trio.lowlevel.checkpoint()
