"""Control messages that wait for an answer: one for each, none for a host that died, none left behind."""

import pytest
import trio
import trio.testing

from polarnode.engine.protocol import Continue, Done, Pause, ToHost
from polarnode.engine.questions import PendingReplies


async def test_each_question_gets_own_answer() -> None:
    questions, posted, found = PendingReplies(), list[ToHost](), dict[str, Done | None]()

    async def ask(name: str) -> None:
        found[name] = await questions.ask(lambda call: Continue(call=call), posted.append)

    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            nursery.start_soon(ask, name)
            await trio.testing.wait_all_tasks_blocked()
        first, second = (message.call for message in posted if isinstance(message, Continue))
        questions.answer(Done(call=second, ok=False, message="no"))
        questions.answer(Done(call=99, ok=True, message="to nobody"))
        questions.answer(Done(call=first, ok=True))
    assert [each and each.ok for each in (found["a"], found["b"])] == [True, False]


async def test_dead_host_answers_no_question() -> None:
    questions = PendingReplies()

    async def ask() -> None:
        assert await questions.ask(lambda call: Pause(call=call, mode="abort"), lambda message: None) is None

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        questions.end()


async def test_cancelled_question_gets_no_answer(autojump_clock: trio.abc.Clock) -> None:
    questions, posted = PendingReplies(), list[ToHost]()
    with pytest.raises(trio.TooSlowError), trio.fail_after(1):
        await questions.ask(lambda call: Continue(call=call), posted.append)
    (message,) = posted
    assert isinstance(message, Continue)
    questions.answer(Done(call=message.call, ok=True))
