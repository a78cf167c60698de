"""How long to go on when the node does not answer or has no room: pauses that grow, until no sign of life came for too long.

The rule for whoever edits it: only what passes by itself is waited for, and only as long as the caller said.
"""

from collections.abc import Callable

from attrs import define, field

from polarnode.client.commands import Request, Script, Sleep, T, ask
from polarnode.client.errors import ClientError, Unreachable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between attempts: a restart takes about a second, an absent node is not hammered


@define(eq=False)
class Patience:
    """Of one stream, or of one request."""

    seconds: float
    now: Callable[[], float]
    _pause_s: float = field(default=FIRST_PAUSE_S, init=False)
    _last_life: float = field(init=False)

    @_last_life.default
    def _begins(self) -> float:
        return self.now()

    def renew(self) -> None:
        """A sign of life: what follows is a new trouble."""
        self._pause_s, self._last_life = FIRST_PAUSE_S, self.now()

    def pause(self, error: ClientError | Unreachable) -> float:
        """Seconds to wait before the next attempt. Raises `error` when it does not pass, or not before patience is at its end."""
        left = self._last_life + self.seconds - self.now()
        wish = error.retry_after or 0.0 if isinstance(error, ClientError) else 0.0
        if left <= 0 or wish > left or (isinstance(error, ClientError) and not error.passes):
            raise error
        pause = max(self._pause_s, wish)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return min(pause, left)


def patiently(request: Request[T], patience: Patience) -> Script[T]:
    """One request that may be sent more than once: again when it was not answered, or when there was no room."""
    while True:
        try:
            return (yield from ask(request))
        except (ClientError, Unreachable) as error:
            yield Sleep(patience.pause(error))
