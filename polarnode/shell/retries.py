"""What a session remembers of answers that did not reach their client, so that the same body asked again is no second sample.

Every harness sends the identical body again after a time-out or a cut connection, on a new connection and sometimes before the old one's end
was seen. The rule for whoever edits it: an answer is owed until its last bytes were handed to the socket of a client that was there; a body
that comes again after that is a new question, because harnesses ask again after an answer they can not use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio
from attrs import define, field, frozen

from polarnode.conversation import Answer, ModelRequest, Usage
from polarnode.exchange import Answered
from polarnode.providers.dialect import Call
from polarnode.shell.recent import remember

TWIN_S: Final = 0.25  # for the end of an earlier call to be seen; on a loopback socket it takes milliseconds, and honest twins wait this long once
OWED: Final = 64  # answers: one a parallel call whose client left (ten agents at once were seen), each a turn's own text, and asked again in minutes


@frozen(kw_only=True)
class Owed:
    """A whole answer that did not arrive, and the names it was given under; not its request, which may be megabytes and comes again."""

    id: str
    created: int
    signature: str
    answers: tuple[Answer, ...]
    usage: Usage

    @classmethod
    def of(cls, given: Answered) -> "Owed":
        """What is to be kept of an answer while it is on its way."""
        call = given.call
        return cls(id=call.id, created=call.created, signature=call.signature, answers=given.answers, usage=given.usage)

    def call(self, request: ModelRequest) -> Call:
        """The call it is given again to."""
        return Call(request=request, id=self.id, created=self.created, signature=self.signature)


@define(eq=False)
class Retries:
    """`name` says whose body it is: the provider, the agent and the body's digest. A cut turn is owed by its number, a whole answer as it is."""

    _owed: dict[str, Owed | int] = field(factory=dict, init=False)
    _asking: dict[str, list[trio.Event]] = field(factory=dict, init=False)

    @contextmanager
    def asking(self, name: str) -> Iterator[tuple[trio.Event, ...]]:
        """Around a call until its answer has left. What it yields are the ends of the same body's earlier calls."""
        ended, twins = trio.Event(), self._asking.setdefault(name, [])
        earlier = tuple(twins)
        twins.append(ended)
        try:
            yield earlier
        finally:
            twins.remove(ended)
            if not twins:
                self._asking.pop(name, None)
            ended.set()

    def owe(self, name: str, answer: Owed | int) -> None:
        """Keep an answer until it is delivered, and forget the oldest where there are too many."""
        remember(self._owed, name, answer, most=OWED)

    def owed(self, name: str) -> Owed | int | None:
        """What a client of this body never got: a whole answer, or the number of the turn that was cut."""
        return self._owed.get(name)

    def delivered(self, name: str) -> None:
        """The client has its answer."""
        self._owed.pop(name, None)


async def wait_ended(earlier: tuple[trio.Event, ...]) -> None:
    """Wait for earlier calls to end, TWIN_S at most: a client that is still there has every right to ask twice."""
    with trio.move_on_after(TWIN_S):
        for ended in earlier:
            await ended.wait()
