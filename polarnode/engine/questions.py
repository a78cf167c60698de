"""Control messages of one host that wait for an answer."""

from collections.abc import Callable
from itertools import count

import trio
from attrs import define, field

from polarnode.engine.protocol import Done, ToHost


@define(eq=False)
class _PendingReply:
    answered: trio.Event = field(factory=trio.Event)
    done: Done | None = None


@define(eq=False)
class PendingReplies:
    """Control messages of one host that wait for an answer, over all restarts of its process."""

    _open: dict[int, _PendingReply] = field(factory=dict)
    _numbers: "count[int]" = field(factory=count)

    async def ask(self, make: Callable[[int], ToHost], post: Callable[[ToHost], None]) -> Done | None:
        """Post a question and wait for its answer. Returns None if the host died. Leaving early only drops
        the answer.
        """
        number = next(self._numbers)
        question = self._open[number] = _PendingReply()
        post(make(number))
        try:
            await question.answered.wait()
        finally:
            self._open.pop(number, None)
        return question.done

    def answer(self, done: Done) -> None:
        """Deliver an answer. It is dropped if its question is no longer waiting."""
        if (question := self._open.get(done.call)) is not None:
            question.done = done
            question.answered.set()

    def end(self) -> None:
        """Answer every open question with None, because the host died."""
        for question in self._open.values():
            question.answered.set()
