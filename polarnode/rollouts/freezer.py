"""Freezes the containers of sessions whose calls are held, while the machine's memory is short.

A held call waits for its session's place in the engine's cache (`engine.residents`), for HOLD_S at most. Its
harness only waits meanwhile, but a test run or a server that it left in the background goes on taking memory,
which the sessions with a place need until they end. The time of a hold is credited to the run, so freezing
costs it no budget.

Nothing is frozen while memory suffices, and a session's container is thawed when its call goes on.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import trio
from attrs import define, field

from polarnode.core.errors import RuntimeFault

logger = logging.getLogger(__name__)

# The seconds until a change is tried again that Podman refused, or that a runtime ignored because it was
# being ended. The Podman service is restarted within a few seconds.
AGAIN_S = 5.0


class Freezable(Protocol):
    """A runtime whose programs can be stopped and continued."""

    @property
    def frozen(self) -> bool: ...

    async def freeze(self) -> None:
        """Stop its programs; do nothing where it cannot be frozen. Raises RuntimeFault."""

    async def thaw(self) -> None:
        """Let its programs go on. Raises RuntimeFault."""


@define(eq=False)
class _FollowedSession:
    """The container of one session. `held` says whether the session's calls are held. `not_before` is when
    the next attempt may be made, on Trio's clock.
    """

    runtime: Freezable
    held: bool = False
    changing: bool = False
    not_before: float = 0.0


@define(eq=False)
class ContainerFreezer:
    """The containers of one node's running sessions. `held` and `memory_short` only take notes; `run`
    acts.
    """

    _followed: dict[str, _FollowedSession] = field(factory=dict, init=False)  # by session
    _short: bool = field(default=False, init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    def memory_short(self, short: bool) -> None:
        """Take note whether the machine's memory is short."""
        self._short = short
        self._changed.set()

    def held(self, session: str, held: bool) -> None:
        """Take note whether a session's calls are held."""
        if (found := self._followed.get(session)) is not None:
            found.held = held
            self._changed.set()

    @contextmanager
    def follow(self, session: str, runtime: Freezable) -> Iterator[None]:
        """While the block runs, a session's container may be frozen. Leaving the block thaws nothing, because
        the code that ends the container's programs thaws it first.
        """
        self._followed[session] = _FollowedSession(runtime)
        self._changed.set()
        try:
            yield
        finally:
            del self._followed[session]

    async def run(self, ready: trio.Event) -> None:
        """Freeze and thaw until cancelled."""
        ready.set()
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                now, again = trio.current_time(), float("inf")
                for session, found in self._followed.items():
                    wanted = self._short and found.held
                    if found.changing or found.runtime.frozen == wanted:
                        continue
                    if found.not_before > now:
                        again = min(again, found.not_before)
                        continue
                    found.changing = True
                    nursery.start_soon(self._change, session, found, wanted)
                with trio.move_on_at(again):
                    await self._changed.wait()

    async def _change(self, session: str, found: _FollowedSession, freeze: bool) -> None:
        try:
            await (found.runtime.freeze() if freeze else found.runtime.thaw())
        except RuntimeFault as fault:
            if session in self._followed:  # Otherwise its container is being removed.
                logger.warning(
                    "the container of session %s cannot be %s: %s",
                    session,
                    "frozen" if freeze else "thawed",
                    fault,
                )
        finally:
            found.changing = False
            found.not_before = trio.current_time() + (0.0 if found.runtime.frozen == freeze else AGAIN_S)
            self._changed.set()
