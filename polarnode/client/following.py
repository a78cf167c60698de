"""One stream, read through cuts and restarts: where it goes on, and when it is given up.

The rules for whoever edits it. It goes on behind the last event that was handed out, so that nothing is missed and nothing comes twice. A
connection that only greets is no sign of life: a node that greets and fails, again and again, is given up like one that is not there.
"""

from collections.abc import Iterator
from typing import Any, Final

from attrs import define, field, frozen

from polarnode.client.commands import Close, Open, Read, Request, Script, Sleep
from polarnode.client.errors import ClientError, Unreachable
from polarnode.client.events import LIFE, Block, Decoder, Life, read_event
from polarnode.client.patience import Patience
from polarnode.client.values import Event

CONTENT_TYPE = "text/event-stream"


class Over:
    """There is no more, and there will be no more."""


OVER: Final = Over()


@frozen(kw_only=True)
class Following:
    """Which stream: its `path` with its query; it begins behind `after`. `goes_on`: its end is a cut like any other."""

    path: str
    after: int | None
    goes_on: bool


@define(eq=False)
class Follower:
    """Hands out the events of one stream after another."""

    following: Following
    patience: Patience
    position: int | None = field(init=False)
    _pieces: Iterator[Block | Life] | None = field(default=None, init=False)  # None while nothing is open
    _decoder: Decoder = field(factory=Decoder, init=False)
    _greeted: bool = field(default=False, init=False)

    @position.default
    def _begins(self) -> int | None:
        return self.following.after

    def next(self) -> Script[Event | Life | Over]:
        """The next event; or a sign of life, which tells whoever waits that time goes by."""
        while True:
            try:
                if self._pieces is None:
                    yield from self._open()
                if (heard := self._heard()) is not None:
                    return heard
                if not (yield from self._more()):
                    return OVER
            except (ClientError, Unreachable) as error:
                self._pieces = None
                yield Close()
                yield Sleep(self.patience.pause(error))

    def _open(self) -> Script[None]:
        headers = {} if self.position is None else {"Last-Event-ID": str(self.position)}
        request: Request[Any] = Request(method="GET", path=self.following.path, headers=headers, read=bytes)
        found = yield Open(request)
        if not found.startswith(CONTENT_TYPE):
            raise ClientError(f"the answer is {found or 'of no type'}, not the stream of a polarnode", status=200, type="garbled")
        self._decoder, self._pieces, self._greeted = Decoder(), iter(()), False

    def _heard(self) -> Event | Life | None:
        """What the bytes read so far hold; None when more are needed."""
        for piece in self._pieces or ():
            if isinstance(piece, Life):
                if self._greeted:
                    self.patience.renew()
                self._greeted = True
                return LIFE
            event = read_event(piece)
            if event.kind == "gap" or self.position is None or event.seq > self.position:
                self.patience.renew()
                self.position = event.seq
                return event
        return None

    def _more(self) -> Script[bool]:
        """Read on; False when all is told."""
        data = yield Read()
        self._pieces = self._decoder.feed(data)
        if data:
            return True
        if self.following.goes_on:
            raise Unreachable("the node keeps ending the stream")
        yield Close()
        return False
