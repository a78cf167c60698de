"""When a consumer's position is told to the node.

The rule for whoever edits it: an acknowledgement that did not arrive loses nothing, for what is not acknowledged comes again; so while a stream
is read none ends it. Only the last one is waited for.
"""

from collections.abc import Callable

from attrs import define, field

from polarnode.client.commands import Script, ask
from polarnode.client.errors import ClientError, Unreachable
from polarnode.client.patience import Patience, patiently
from polarnode.client.requests import acknowledge

ACK_EVERY_S = 1.0  # between acknowledgements: each is one request and one commit; what is lost of them is only read again


@define(eq=False)
class Acks:
    """Of one stream. Without a consumer nothing is told to anyone."""

    consumer: str | None
    patience_s: float
    now: Callable[[], float]
    every_s: float = ACK_EVERY_S
    _done: int = field(default=0, init=False)
    _said: int = field(default=0, init=False)
    _said_at: float = field(init=False)

    @_said_at.default
    def _begins(self) -> float:
        return self.now()

    def move(self, seq: int) -> None:
        """Everything up to `seq` is done with. A number smaller than before is of another journal, whose numbers began anew."""
        self._said = self._said if seq >= self._done else min(self._said, seq - 1)
        self._done = seq

    def tell(self) -> Script[None]:
        """Say it, if there is something to say and the last time is long enough ago."""
        if self.consumer is None or self._done <= self._said or self.now() - self._said_at < self.every_s:
            return
        self._said_at = self.now()
        try:
            yield from ask(acknowledge(self.consumer, self._done))
            self._said = self._done
        except Unreachable:
            return
        except ClientError as error:
            if not error.passes:
                raise

    def tell_last(self) -> Script[None]:
        """Say what was not said yet."""
        if self.consumer is not None and self._done > self._said:
            yield from patiently(acknowledge(self.consumer, self._done), Patience(self.patience_s, self.now))
            self._said = self._done
