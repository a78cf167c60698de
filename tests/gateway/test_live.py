"""Live sessions: keys, budgets, and how calls end with their session."""

import logging
from contextlib import ExitStack
from typing import Any

import pytest
import trio
import trio.testing

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, Conversation, Message, Sampling, TextPart
from polarnode.core.errors import InvariantViolated
from polarnode.core.task import Budgets
from polarnode.core.trajectory import Turn, TurnState
from polarnode.gateway import live_sessions
from polarnode.gateway.live_sessions import SAMPLES, LiveSession, LiveSessions, SessionBudget
from polarnode.merge.lineage import Lineages
from polarnode.providers.contract import Fault


def new_session(
    *, session_id: str = "s", key: str = "key", record: Any = None, **budgets: Any
) -> LiveSession:
    return LiveSession(
        session_id=session_id,
        key=key,
        lineages=Lineages(session_id=session_id, secret=b"secret"),
        sampling=Sampling(),
        budget=SessionBudget(Budgets(**budgets)),
        record=record or (lambda turn: None),
    )


def new_turn(session: LiveSession, *, sampled: int = 3, state: TurnState = "complete") -> Turn:
    plan = session.lineages.plan(Conversation(messages=(Message(role="user", text="hi"),)))
    answer = Answer(parts=(TextPart("x"),), finish_reason="stop")
    return Turn(
        session_id=session.session_id,
        index=plan.index,
        provider="p",
        lineage=plan.lineage,
        parent=plan.parent,
        kind=plan.kind,
        reason=plan.reason,
        state=state,
        prompt_delta=ids([1, 2]),
        prompt_length=2,
        sampled=ids(range(sampled)),
        logprobs=floats([0.0] * sampled),
        before_key=plan.before_key,
        message_key=plan.after(answer),
        answer=answer,
    )


# ── what is spent ─────────────────────────────────────────────────────────────


def test_turn_committed_before_journal() -> None:
    """A turn is kept where the next call finds it, and then in the journal."""
    seen: list[tuple[Turn, int]] = []
    session = new_session(record=lambda turn: seen.append((turn, len(session.lineages.turns))))
    turn = new_turn(session)
    session.commit(turn)
    assert seen == [(turn, 1)]
    assert (session.budget.counters.turns, session.budget.counters.sampled_tokens) == (1, 3)


def test_unplanned_turn_reaches_no_journal() -> None:
    seen: list[Turn] = []
    session = new_session(record=seen.append)
    turn = new_turn(session)
    session.commit(turn)
    with pytest.raises(InvariantViolated):
        session.commit(turn)
    assert seen == [turn]


async def test_turn_budget_counts_running_not_failed() -> None:
    """A budget of turns counts those under way, and not the engine's failures."""
    session = new_session(max_turns=2)
    session.commit(new_turn(session, state="failed"))
    session.commit(new_turn(session))
    assert session.refusal() is None
    with session.calls.enter(trio.CancelScope()):
        await trio.lowlevel.checkpoint()
        fault = session.refusal()
        assert fault is not None
        assert fault.kind == "budget_spent"
        assert "2 turns" in fault.message
    assert session.refusal() is None


async def test_several_samples_need_room_for_all() -> None:
    """A call of several samples needs room for all of them."""
    session = new_session(max_turns=3)
    assert session.refusal(samples=3) is None
    with session.calls.enter(trio.CancelScope(), samples=2):
        await trio.lowlevel.checkpoint()
        assert session.calls.count == 1
        assert session.refusal() is None
        fault = session.refusal(samples=2)
        assert fault is not None
        session.budget.count_refusal(fault, samples=2)
    assert session.budget.spent_clock == "turns"
    assert session.refusal(samples=3) is None


def test_token_budget_is_room_until_spent() -> None:
    session = new_session(max_tokens=5)
    assert session.budget.token_room == 5
    session.commit(new_turn(session))
    assert (session.budget.token_room, session.refusal()) == (2, None)
    session.commit(new_turn(session))
    assert session.budget.token_room == 0
    assert session.refusal() is not None
    assert new_session().budget.token_room is None


def test_first_budget_refusal_names_clock() -> None:
    """The first refusal for a budget is reported once and names the clock."""
    spent_clocks: list[str] = []
    session = new_session(max_tokens=3)
    session.budget.on_spent = lambda: spent_clocks.append(str(session.budget.spent_clock))
    session.commit(new_turn(session))
    # a session that stops by itself in time has spent nothing
    assert (session.budget.spent_clock, spent_clocks) == (None, [])
    for _ in range(2):
        fault = session.refusal()
        assert fault is not None
        session.budget.count_refusal(fault)
    assert (session.budget.spent_clock, spent_clocks) == ("tokens", ["tokens"])


def test_other_refusals_spend_no_budget() -> None:
    """Other refusals are counted and spend nothing."""
    session = new_session()
    session.budget.count_refusal(Fault(kind="bad_request", message="no"))
    session.budget.count_refusal(Fault(kind="bad_request", message="no"))
    session.commit(new_turn(session, state="partial"))
    assert session.budget.spent_clock is None
    counts = {
        "turns": 1,
        "failed_turns": 0,
        "partial_turns": 1,
        "resumed_turns": 0,
        "replayed": 0,
        "prewarmed": 0,
        "sampled_tokens": 3,
        "waited_s": 0.0,
    }
    assert session.metrics() == counts | {"refusals": {"bad_request": 2}}


async def test_concurrent_samples_are_bounded() -> None:
    """Samples in progress are bounded, and a spent budget is named first."""
    session = new_session()
    with ExitStack() as calls:
        for _ in range(SAMPLES // 8 - 1):
            calls.enter_context(session.calls.enter(trio.CancelScope(), samples=8))
        assert session.refusal(samples=8) is None
        fault = session.refusal(samples=9)
        assert fault is not None
        assert (fault.kind, fault.retry_after_s) == ("overloaded", 1)
        session.budget.limits = Budgets(max_turns=1)
        spent = session.refusal(samples=9)
        assert spent is not None
        assert spent.kind == "budget_spent", "waiting would not help"
        session.budget.limits = Budgets()
    assert session.refusal(samples=SAMPLES) is None


def test_session_never_shows_its_key() -> None:
    assert "sk-secret" not in repr(new_session(key="sk-secret"))


# ── how it ends ───────────────────────────────────────────────────────────────


async def test_close_waits_for_calls_to_record(nursery: trio.Nursery) -> None:
    """Closing cancels the calls and waits until each has recorded."""
    session = new_session()
    recorded: list[str] = []

    async def call(name: str) -> None:
        with session.calls.enter(trio.CancelScope()):
            try:
                await trio.sleep_forever()
            finally:
                recorded.append(name)

    for name in "abc":
        nursery.start_soon(call, name)
    await trio.testing.wait_all_tasks_blocked()
    assert session.calls.count == 3
    await session.close()
    assert sorted(recorded) == ["a", "b", "c"]
    assert session.calls.count == 0
    fault = session.refusal()
    assert fault is not None
    assert fault.kind == "session_over"
    await session.close()  # twice is once


async def test_closed_session_call_ends_at_wait() -> None:
    """A call of a closed session ends at its first wait."""
    session = new_session()
    await session.close()
    scope = trio.CancelScope()
    with session.calls.enter(scope):
        await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_close_is_bounded_names_losses(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing has a time limit and names the turns that it lost."""
    session = new_session()

    async def deaf() -> None:
        with (
            session.calls.enter(trio.CancelScope()),
            trio.CancelScope(shield=True, deadline=trio.current_time() + 60),
        ):
            await trio.sleep_forever()

    nursery.start_soon(deaf)
    await trio.testing.wait_all_tasks_blocked()
    started = trio.current_time()
    with caplog.at_level(logging.ERROR):
        await session.close()
    assert trio.current_time() - started == live_sessions.CLOSING_S
    assert "1 calls did not end" in caplog.text
    nursery.cancel_scope.cancel()


async def test_cancelled_close_still_waits(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """A session's teardown is cancelled with its task; the turns of its calls must be there all the same."""
    session = new_session()
    recorded: list[float] = []

    async def slow_to_record() -> None:
        with session.calls.enter(trio.CancelScope()):
            try:
                await trio.sleep_forever()
            finally:
                with trio.move_on_after(1, shield=True):
                    await trio.sleep(0.5)
                recorded.append(trio.current_time())

    nursery.start_soon(slow_to_record)
    await trio.testing.wait_all_tasks_blocked()
    with trio.CancelScope() as cancelled:
        cancelled.cancel()
        await session.close()
    assert len(recorded) == 1


# ── keys ──────────────────────────────────────────────────────────────────────


def test_parent_key_opens_its_copy_alone() -> None:
    """A parent's key opens the endpoint of its own copy alone."""
    sessions = LiveSessions()
    parent, copy = new_session(), new_session(session_id="copy", key="own")
    copy.inherited.parent_key = "key"
    sessions.add(parent)
    sessions.add(copy)
    assert sessions.find_at_endpoint("s", ["key"]) is parent
    assert sessions.find_at_endpoint("copy", ["other", "key"]) is copy
    assert sessions.find_at_endpoint("copy", ["own"]) is copy
    assert sessions.find_at_endpoint("copy", ["other"]) is None
    assert sessions.find_at_endpoint("s", ["own"]) is None
    assert sessions.find_at_endpoint(None, ["key"]) is parent
    sessions.remove(parent)  # the copy outlives it
    assert sessions.find_at_endpoint("copy", ["key"]) is copy
    sessions.remove(copy)
    assert sessions.find_at_endpoint("copy", ["key"]) is None


def test_key_after_session_end() -> None:
    """A key opens its session, and afterwards says that it did."""
    sessions = LiveSessions()
    session = new_session()
    assert sessions.by_key("key") is None
    sessions.add(session)
    assert sessions.by_key("key") is session
    assert sessions.ended_session_id("key") is None
    sessions.remove(session)
    assert sessions.by_key("key") is None
    assert sessions.ended_session_id("key") == "s"
    assert sessions.ended_session_id("never") is None
    sessions.remove(session)  # twice is once
    assert sessions.statistics().ended == 1


def test_ended_keys_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sessions, "MAX_ENDED_KEYS", 3)
    sessions = LiveSessions()
    for number in range(5):
        session = new_session(session_id=f"s{number}", key=f"k{number}")
        sessions.add(session)
        sessions.remove(session)
    assert [sessions.ended_session_id(f"k{number}") for number in range(5)] == [None, None, "s2", "s3", "s4"]


async def test_statistics_count_running_calls() -> None:
    sessions = LiveSessions()
    session = new_session()
    sessions.add(session)
    sessions.remove(new_session(key="never added"))
    with session.calls.enter(trio.CancelScope()):
        await trio.lowlevel.checkpoint()
        found = sessions.statistics()
    assert (found.live, found.in_flight, found.ended) == (1, 1, 0)
