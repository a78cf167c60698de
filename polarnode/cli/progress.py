"""The progress of long steps, such as the start of an engine or the build of an image."""

from collections.abc import Callable

import trio
from attrs import define, field
from rich.console import Console
from rich.status import Status

TICK_S = 1.0  # between two updates of the elapsed seconds on a terminal
PLAIN_S = 15.0  # between two lines without a terminal


@define(eq=False)
class Steps:
    """Prints each step with `write` when it begins, and the seconds that it takes: beside a spinner if
    `console` is a terminal, else in a line from time to time. `hint` says where to read more.
    """

    write: Callable[[str], None]
    console: Console | None = None
    hint: str = ""
    _text: str = field(default="", init=False)
    _began: float = field(default=0.0, init=False)
    _written: float = field(default=0.0, init=False)
    _status: Status | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)

    def report(self, text: str) -> None:
        """Begin a step. After `end`, a step is only printed."""
        self.write(text)
        if not self._over:
            self._text = text
            self._began = self._written = trio.current_time()

    def now(self) -> tuple[str, float]:
        """The current step and its seconds so far; the step is "" before the first one."""
        return self._text, trio.current_time() - self._began if self._text else 0.0

    def end(self) -> None:
        """Stop showing seconds."""
        self._over = True
        self._clear()

    async def show(self) -> None:
        """Show the seconds of the current step, until `end` or cancelled."""
        try:
            while not self._over:
                await trio.sleep(TICK_S)
                self._update_seconds(trio.current_time())
        finally:
            self._clear()

    def _update_seconds(self, now: float) -> None:
        if self._over or not self._text:
            return
        line = f"{self._text}: {now - self._began:.0f} s so far{self.hint and f' ({self.hint})'}"
        if self.console is not None and self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status("")
                self._status.start()
            self._status.update(line)
        elif now - self._written >= PLAIN_S:
            self._written = now
            self.write(line)

    def _clear(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.stop()
