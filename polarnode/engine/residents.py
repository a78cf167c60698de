"""The sessions of one engine host, and the calls that wait for their session's place in its cache.

`residency.ResidencyPolicy` decides, and this module carries its decisions out in time: a held call waits for
an event, the engine is told whose prefixes it may drop, and a session's clock is credited with the time that
its calls were held. Every way out of a wait gives the place back, synchronously.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import trio
from attrs import define, field

from polarnode.core.ports import GenerateOrder
from polarnode.engine.calls import Call, prefix_name
from polarnode.engine.learned_sizes import read_learned, write_learned
from polarnode.engine.residency import HOLD_S, HeldCall, LearnedSizes, ResidencyPolicy, ResidencyStatistics

logger = logging.getLogger(__name__)

# Share of all prompt tokens that are read again without a decision, above which an operator is warned. The
# policy itself stays below 2 %.
WARN_SHARE = 0.05
WARN_TOKENS = 200_000  # prompt tokens before a share means something: those of some ten long prompts
WARN_EVERY_S = 600.0  # seconds; so the log of a week stays readable
SAVE_INTERVAL_S = 60.0  # seconds between writes of what was learned; a killed node loses that much

# Moves a session's deadline by seconds: by more than 0 where its calls begin to be held, and back or by 0
# where none is held any more.
MoveDeadline = Callable[[float], None]


@define(eq=False)
class _HeldWait:
    """A held call. `lost` is set if the host died, so that another one must be asked."""

    held: trio.Event = field(factory=trio.Event)
    lost: bool = False


@define(eq=False)
class _HeldSession:
    """The held calls of a session, since the first of them."""

    since: float
    calls: int = 0


@define(eq=False)
class ResidencyGate:
    """`machine` is None where the engine's capacity is not known, or the policy is off: then every call
    passes. `forget` sends the engine the name of a conversation whose prefix may be evicted first. `path` is
    the file of what is learned of sessions, for the next node.
    """

    index: int
    forget: Callable[[str], None]
    path: Path
    machine: ResidencyPolicy | None = None
    _kept: LearnedSizes | None = field(default=None, init=False)  # what was written last
    _waits: dict[str, _HeldWait] = field(factory=dict, init=False)  # by request
    _credits: dict[str, MoveDeadline] = field(factory=dict, init=False)  # by session
    _held_sessions: dict[str, _HeldSession] = field(factory=dict, init=False)  # by session
    _wake: trio.Event = field(factory=trio.Event, init=False)
    _warned: tuple[float, int, int] = field(default=(0.0, 0, 0), init=False)

    @property
    def statistics(self) -> ResidencyStatistics | None:
        return None if self.machine is None else self.machine.statistics(trio.current_time())

    def open(self, capacity: int, longest: int) -> None:
        """The host serves, with an empty cache of so many tokens. What was learned before stays."""
        if self.machine is None:
            self.machine = ResidencyPolicy(capacity=capacity, longest=longest)
            if (learned := read_learned(self.path)) is not None:
                self.machine.recall(learned)
        self.machine.capacity = capacity
        self._wake.set()

    # ── sessions ──────────────────────────────────────────────────────────────

    def has(self, session: str) -> bool:
        """Whether the session's tokens are counted here."""
        return self.machine is not None and self.machine.has(session)

    def may_begin(self, kind: str, group: str, now: float) -> bool:
        """Whether another session of a kind and group may begin here."""
        return self.machine is None or self.machine.may_begin(kind, now, group=group)

    def rank(self, group: str) -> tuple[bool, int]:
        """The rank of this host for a session of `group`. Of several hosts, the one with the least rank is
        best.
        """
        return (True, 0) if self.machine is None else (not self.machine.has_group(group), -self.machine.room)

    def begin(
        self, session: str, kind: str, group: str, credit: MoveDeadline, *, resident: bool = True
    ) -> None:
        """A session begins here, without a place unless `resident`."""
        if self.machine is not None:
            self.machine.begin(session, kind, trio.current_time(), group=group, resident=resident)
            self._credits[session] = credit

    def over(self, session: str) -> None:
        """A session ended. Those of its calls that are still held go to the engine, and end there."""
        self._credits.pop(session, None)
        if self.machine is not None and self.machine.has(session):
            for call in self.machine.over(session):
                self._let_go(call)
            self._look()

    # ── calls ─────────────────────────────────────────────────────────────────

    async def enter(self, order: GenerateOrder) -> bool:
        """Wait for the place of an order's session. Returns False if the host died meanwhile."""
        if self.machine is None or not order.affinity:
            return True
        call, session, now = order.request_id, order.affinity, trio.current_time()
        if self.machine.ask(call, session, order.chain, now, tokens=len(order.prompt)):
            return True
        wait = self._waits[call] = _HeldWait()
        self._hold(session, now)
        self._look()
        self._wake.set()
        try:
            await wait.held.wait()
        except trio.Cancelled:
            if wait.held.is_set():
                self.left(order)
            else:
                self.machine.withdraw(call)
                self._release_clock(call, session)
            raise
        return not wait.lost

    def left(self, order: GenerateOrder) -> None:
        """A call that had its place was never sent."""
        if self.machine is not None:
            self.machine.ended(order.affinity, order.chain, tokens=None, now=trio.current_time())
            self._look()

    def read(self, call: Call) -> None:
        """The engine has read the prompt of a call."""
        if self.machine is not None:
            self.machine.read(
                call.session,
                call.chain,
                prompt=call.prompt_tokens,
                cached=call.cached,
                seconds=trio.current_time() - call.sent,
            )

    def ended(self, call: Call) -> None:
        """A call is over."""
        if self.machine is not None:
            tokens = call.prompt_tokens + call.sampled if call.was_read else None
            self.machine.ended(call.session, call.chain, tokens=tokens, now=trio.current_time())
            self._look()

    def lost(self) -> None:
        """The host died with its cache."""
        if self.machine is not None:
            for call in self.machine.lost():
                self._waits[call.id].lost = True
                self._let_go(call)

    def cold(self) -> None:
        """The weights changed: nothing that is cached is found again."""
        if self.machine is not None:
            self.machine.cold()

    # ── time ──────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Let calls go when their time has come, until cancelled."""
        while True:
            deadline = float("inf")
            if self.machine is not None:
                self._look()
                deadline = max(self.machine.next_decision(trio.current_time()), trio.current_time() + 0.01)
                self._warn_rereads(self.machine)
            self._wake = trio.Event()
            with trio.move_on_at(deadline):
                await self._wake.wait()

    async def keep(self) -> None:
        """Write what is learned to `path`, until cancelled; then once more."""
        try:
            while True:
                await trio.sleep(SAVE_INTERVAL_S)
                if (learned := self._unsaved_sizes()) is not None:
                    await trio.to_thread.run_sync(write_learned, self.path, learned)
        finally:
            if (learned := self._unsaved_sizes()) is not None:
                write_learned(self.path, learned)

    def _unsaved_sizes(self) -> LearnedSizes | None:
        learned = None if self.machine is None else self.machine.learned()
        if learned is None or not learned.ends or learned == self._kept:
            return None
        self._kept = learned
        return learned

    def _look(self) -> None:
        if self.machine is not None:
            for call in self.machine.look(trio.current_time()):
                self._let_go(call)
            for session, chain in self.machine.forgotten():
                self.forget(prefix_name(session, chain))

    def _let_go(self, call: HeldCall) -> None:
        self._waits[call.id].held.set()
        self._release_clock(call.id, call.session)

    # ── a session's clock ─────────────────────────────────────────────────────

    def _hold(self, session: str, now: float) -> None:
        """Move the session's clock by the whole time that it may be held, so that it does not run out
        meanwhile.
        """
        holding = self._held_sessions.get(session)
        if holding is None:
            holding = self._held_sessions[session] = _HeldSession(since=now)
            if (credit := self._credits.get(session)) is not None:
                credit(HOLD_S)
        holding.calls += 1

    def _release_clock(self, call: str, session: str) -> None:
        del self._waits[call]
        holding = self._held_sessions[session]
        holding.calls -= 1
        if not holding.calls:
            del self._held_sessions[session]
            if (credit := self._credits.get(session)) is not None:
                credit(trio.current_time() - holding.since - HOLD_S)

    def _warn_rereads(self, machine: ResidencyPolicy) -> None:
        now, totals = trio.current_time(), machine.feedback.totals
        before, prompt, again = self._warned
        read = totals.prompt - prompt
        if now < before + WARN_EVERY_S or read < WARN_TOKENS:
            return
        share = (totals.unplanned - again) / read
        self._warned = (now, totals.prompt, totals.unplanned)
        if share > WARN_SHARE:
            logger.warning(
                "engine host %d read %.0f %% of its prompt tokens again, because its cache of %d tokens had"
                " dropped them: give it more of the GPU (mem_fraction), or run fewer sessions at once"
                " (run_limit)",
                self.index,
                100 * share,
                machine.capacity,
            )
