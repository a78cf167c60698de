"""Control messages that wait for an answer: each gets its own, or a failure if the host died."""

import pytest
import trio
import trio.testing

from polarnode.engine.host_process import PendingReplies
from polarnode.engine.protocol import Continue, Done, Pause, ToHost


async def test_each_question_gets_own_answer() -> None:
    replies, posted, found = PendingReplies(), list[ToHost](), dict[str, Done]()

    async def ask(name: str) -> None:
        found[name] = await replies.ask(lambda call: Continue(call=call), posted.append)

    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            nursery.start_soon(ask, name)
            await trio.testing.wait_all_tasks_blocked()
        first, second = (message.call for message in posted if isinstance(message, Continue))
        replies.answer(Done(call=second, ok=False, message="no"))
        replies.answer(Done(call=99, ok=True, message="to nobody"))
        replies.answer(Done(call=first, ok=True))
    assert [found["a"].ok, found["b"].ok] == [True, False]


async def test_dead_host_fails_questions() -> None:
    replies = PendingReplies()

    async def ask() -> None:
        done = await replies.ask(lambda call: Pause(call=call, mode="abort"), lambda message: None)
        assert (done.ok, done.message) == (False, "it died")

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        replies.fail("it died")


async def test_cancelled_question_gets_no_answer(autojump_clock: trio.abc.Clock) -> None:
    replies, posted = PendingReplies(), list[ToHost]()
    with pytest.raises(trio.TooSlowError), trio.fail_after(1):
        await replies.ask(lambda call: Continue(call=call), posted.append)
    (message,) = posted
    assert isinstance(message, Continue)
    replies.answer(Done(call=message.call, ok=True))
