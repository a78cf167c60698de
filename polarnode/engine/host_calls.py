"""The generation calls of one engine host: those that wait for it, and those in its engine.

A call waits first until its session has its place in the cache (`residents`), then until its session's turn
has come (`queue`). Then it is sent, and it is in the engine until the host has sent its last message about
it, even if its consumer leaves before. When the host dies, the calls in its engine fail, and those that were
never sent find another host.
"""

from collections import Counter
from collections.abc import Callable

import trio
from attrs import define, field

from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.core.ports import GenerateOrder
from polarnode.engine.calls import Call, to_generate
from polarnode.engine.drafts import COUNTED
from polarnode.engine.protocol import Abort, Load, Piece, Ready, RoutedRows, ToHost
from polarnode.engine.residents import ResidencyGate
from polarnode.engine.routing import SAMPLED, FairQueue


@define(eq=False)
class _WaitingOrder:
    """A generation that waits for its turn. When `decided` is set, `call` is set too, or it stays None
    because the host died.
    """

    order: GenerateOrder
    context_length: int
    adapter: str
    expected: int  # tokens of the KV cache that it is expected to need
    call: Call | None = None
    decided: trio.Event = field(factory=trio.Event)


@define(eq=False)
class HostCalls:
    """The calls of one host. `serving` is what its engine reported of itself, or None while no call may be
    sent. `on_change` is called when the last call is over, and whenever a call of an adapter is.
    """

    residents: ResidencyGate
    _post: Callable[[ToHost], None]
    _serving: Callable[[], Ready | None]
    _on_change: Callable[[], None]
    queue: FairQueue[_WaitingOrder] = field(factory=FairQueue, init=False)
    drafts: Counter[str] = field(factory=Counter, init=False)  # sums of the drafts that `Piece` counts
    _in_engine: dict[str, Call] = field(factory=dict, init=False)  # by request id

    @property
    def in_flight(self) -> int:
        """The number of calls in the engine, those included that it is told to abort."""
        return len(self._in_engine)

    def samples_by(self, version: str) -> int:
        """The number of calls in the engine that sample by a version of an adapter."""
        return sum(call.adapter == version for call in self._in_engine.values())

    async def begin(self, order: GenerateOrder, *, context_length: int, adapter: str = "") -> Call | None:
        """Send a generation when its session has its place in the cache and it is its turn. Returns None if
        the host died meanwhile. `adapter` is the version that samples.
        """
        if order.request_id in self._in_engine:
            raise EngineError(
                f"request id {order.request_id} is in use: every generation needs its own", retryable=False
            )
        if not await self.residents.enter(order):
            return None
        expected = len(order.prompt) + min(order.sampling.max_tokens or SAMPLED, SAMPLED)
        waiting, session = _WaitingOrder(order, context_length, adapter, expected), order.affinity
        self.queue.add(session, waiting, tokens=expected)
        self.admit()
        try:
            if not waiting.decided.is_set():
                await waiting.decided.wait()
        except trio.Cancelled:
            self.queue.withdraw(session, waiting, trio.current_time())
            if waiting.call is None:
                self.residents.left(order)
            else:
                self.end(waiting.call)
            raise
        return waiting.call

    def admit(self) -> None:
        """Send the calls whose turn it is."""
        while (ready := self._serving()) is not None:
            waiting = self.queue.take(trio.current_time())
            if waiting is None:
                return
            order = waiting.order
            waiting.call = self._in_engine[order.request_id] = Call(
                rid=order.request_id,
                vocab_size=ready.vocab_size,
                top_logprobs=order.top_logprobs,
                session=order.affinity,
                chain=order.chain,
                sent=trio.current_time(),
                prompt_tokens=len(order.prompt),
                expected=waiting.expected,
                adapter=waiting.adapter,
                whole=order.whole,
            )
            self._post(to_generate(order, context_length=waiting.context_length, adapter=waiting.adapter))
            waiting.decided.set()

    def note_load(self, load: Load) -> None:
        """The engine reported how busy it is, so there may be room for more calls."""
        self.queue.report(running=load.running, waiting=load.waiting, most=load.max_running)
        self.admit()

    def take(self, message: Piece | RoutedRows) -> None:
        """Give a call what the engine sampled for it."""
        if isinstance(message, Piece) and message.verified:
            self.drafts.update({name: getattr(message, name) for name in COUNTED})
        if (call := self._in_engine.get(message.rid)) is None:
            return
        if call.take(message):
            self.residents.read(call)
        if not call.over:
            return
        if isinstance(message, RoutedRows) or message.finish is None:
            # The call failed on this message, and the host goes on sampling.
            self._post(Abort(rid=call.rid))
        self._go_on_after(call)

    def fail(self, rid: str, error: EngineError | EngineRefusal) -> None:
        """The engine failed a call. Nothing happens if there is no such call."""
        if (call := self._in_engine.get(rid)) is not None:
            self._go_on_after(call)
            call.fail(error)

    def end(self, call: Call) -> None:
        """The consumer left. The call stays counted until the host has sent its last message about it."""
        call.close()
        if not call.over and self._in_engine.get(call.rid) is call:
            self._post(Abort(rid=call.rid))

    def end_all(self, sentence: str) -> None:
        """The host died: fail the calls in its engine with a sentence, and let those that wait find another
        host.
        """
        for call in list(self._in_engine.values()):
            self._count_out(call)
            call.fail(EngineError(sentence))
        self.residents.lost()
        for waiting in self.queue.empty(trio.current_time()):
            waiting.decided.set()

    def _go_on_after(self, call: Call) -> None:
        """A call is over: wake who waits for that, and send the calls whose turn it is now."""
        self._count_out(call)
        if call.adapter or not self._in_engine:
            # An update may wait for it, and the version of an adapter may not be needed any more.
            self._on_change()
        self.admit()

    def _count_out(self, call: Call) -> None:
        del self._in_engine[call.rid]
        self.queue.ended(call.session, tokens=call.expected, served=call.served, now=trio.current_time())
        self.residents.ended(call)
