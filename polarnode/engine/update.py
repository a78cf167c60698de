"""One update of the weights on all hosts: paused, loaded, checked, then served; or rolled back everywhere.

Every host must pass `check`. Whatever fails before that is rolled back on all hosts. After it the new version
is the node's, and a host that cannot follow is restarted with it. A host that does not answer is ended,
because a process with unknown weights must not serve.
"""

from collections.abc import Callable, Iterable

import trio
from attrs import define, field

from polarnode.core.errors import EngineError, Refused
from polarnode.core.weights import PauseMode, UpdateMode
from polarnode.engine.host import Host, Loaded
from polarnode.engine.protocol import (
    BeginUpdate,
    CheckUpdate,
    CommitUpdate,
    Continue,
    Done,
    Pause,
    RollBack,
    ToHost,
)

# Makes the message for a host, given the number of its answer and the index of the host.
MessageMaker = Callable[[int, int], ToHost]

# Seconds for one step on all hosts: 70 GB from a network disk take four minutes. This also bounds a sender
# that never sends.
STEP_S = 600.0
# Seconds for calls under way to end: 8,000 tokens take that long at 80 a second, and longer answers are rare.
# After that the calls are retracted.
DRAIN_S = 120.0
ALIVE_STATES = ("ready", "stale")


@define(eq=False)
class Update:
    """One update, made by `Engines.updating`. `hosts` are those that run, and `everyone` includes the dead
    ones.
    """

    everyone: tuple[Host, ...]
    mode: UpdateMode
    before: PauseMode | None
    hosts: tuple[Host, ...] = ()
    seconds: dict[int, float] = field(factory=dict)  # seconds until each host had loaded all parts
    committed: bool = False
    _kept: set[int] = field(factory=set)

    async def begin(self, drained: Callable[[], bool], changed: Callable[[], trio.Event]) -> None:
        """Hold generation and keep a copy of the served weights. `drained` says whether no call is under
        way.
        """
        self.hosts = tuple(host for host in self.everyone if host.state in ALIVE_STATES)
        if not self.hosts:
            raise EngineError("no engine host serves at present: update the weights again once one does")
        if self.mode == "drain" and self.before is None:
            with trio.move_on_after(DRAIN_S):
                while not drained():
                    await changed().wait()
        pause: PauseMode = "retract" if self.mode == "drain" else self.mode
        self._require(await self._ask(self.hosts, lambda call, _: Pause(call=call, mode=pause)))
        ranks = sum(host.ranks for host in self.hosts)
        answers = await self._ask(self.hosts, lambda call, _: BeginUpdate(call=call, ranks=ranks))
        self._kept = {index for index, answer in answers.items() if answer.ok}
        self._require(answers)

    async def load(self, make: MessageMaker) -> None:
        """Load one part of the new weights, on every host at once."""
        began = trio.current_time()

        def note(host: Host) -> None:
            self.seconds[host.index] = self.seconds.get(host.index, 0.0) + trio.current_time() - began

        self._require(await self._ask(self.hosts, make, note))

    async def check(self) -> None:
        """Check the weights after everything was sent. When this returns, every host can serve them and none
        does yet.
        """
        # Requests that are frozen in place keep their cache. No other request finds it, because the version
        # is its salt.
        flush = self.mode != "in_place"
        self._require(await self._ask(self.hosts, lambda call, _: CheckUpdate(call=call, flush=flush)))

    async def commit(self, loaded: Loaded) -> None:
        """Serve the new weights, and resume generation unless it was held before the update."""
        self.committed = True
        for host in self.everyone:
            host.loaded = loaded  # set first, so that a host that dies from here on comes back with it
        answers = await self._ask(self.hosts, lambda call, _: CommitUpdate(call=call, version=loaded.version))
        for host in self._end_failed_hosts(answers, f"could not serve weights {loaded.version}"):
            host.serve(loaded.version)
        await self._continue()

    async def roll_back(self) -> None:
        """Serve the previous weights again."""
        kept = [host for host in self.hosts if host.index in self._kept]
        self._end_failed_hosts(
            await self._ask(kept, lambda call, _: RollBack(call=call)),
            "could not go back to the weights before",
        )
        await self._continue()

    async def _continue(self) -> None:
        if self.before is None:
            self._end_failed_hosts(
                await self._ask(self.hosts, lambda call, _: Continue(call=call)),
                "could not continue after an update of weights",
            )

    async def _ask(
        self, hosts: Iterable[Host], make: MessageMaker, note: Callable[[Host], None] = lambda _: None
    ) -> dict[int, Done]:
        """The answer of each of `hosts`. A host that died or is silent for STEP_S has failed, and a silent
        one is ended.
        """
        addressed = tuple(hosts)
        answers = {
            host.index: Done(call=0, ok=False, message=host.last_error or "the engine host died")
            for host in addressed
        }

        async def ask(host: Host) -> None:
            answers[host.index] = await host.process.ask(lambda call: make(call, host.index))
            note(host)

        with trio.move_on_after(STEP_S) as patience:
            async with trio.open_nursery() as nursery:
                for host in addressed:
                    if host.state in ALIVE_STATES:
                        answers[host.index] = Done(
                            call=0, ok=False, message=f"no answer within {STEP_S:.0f} s"
                        )
                        nursery.start_soon(ask, host)
        if patience.cancelled_caught:
            for host in addressed:
                if answers[host.index].message.startswith("no answer"):
                    host.process.restart_with_reason(answers[host.index].message)
        return answers

    def _end_failed_hosts(self, answers: dict[int, Done], what: str) -> list[Host]:
        """The hosts that carried out the order. The others are ended."""
        for host in self.hosts:
            answer = answers.get(host.index)
            if answer is not None and not answer.ok and host.state in ALIVE_STATES:
                host.process.restart_with_reason(f"{what}: {answer.message}")
        return [host for host in self.hosts if host.index in answers and answers[host.index].ok]

    def _require(self, answers: dict[int, Done]) -> None:
        failed = {index: answer.message for index, answer in answers.items() if not answer.ok}
        if not failed:
            return
        text = "; ".join(f"engine host {index}: {message}" for index, message in failed.items())
        if all(host.state in ALIVE_STATES for host in self.hosts):
            raise Refused(f"the weights were refused, the previous ones are served: {text}", path="$.source")
        raise EngineError(f"the weights were refused, the previous ones are served: {text}")
