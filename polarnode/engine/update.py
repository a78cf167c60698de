"""New weights on all hosts as one version: paused, loaded, checked, and only then served; or the old ones
served again, on all.

Rule for whoever edits it: the moment of truth is `check`, which every host must pass; before it whatever
fails is rolled back everywhere, after it the new version is the node's, and a host that can not follow ends
and comes back with it. A host that does not answer is ended: a process of unknown weights must not serve.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import trio
from attrs import define, field

from polarnode.core.errors import EngineError, Refused
from polarnode.engine.host import Host, Loaded
from polarnode.engine.protocol import (
    BeginUpdate,
    CheckUpdate,
    CommitUpdate,
    Continue,
    Done,
    Pause,
    PauseMode,
    RollBack,
    ToHost,
)

UpdateMode = Literal["in_place", "retract", "drain", "abort"]
Make = Callable[[int, Host], ToHost]

# seconds for one step on all hosts: 70 GB from a network disk take four minutes; a sender that never sends is
# given up by it
STEP_S = 600.0
# seconds for calls under way to end: 8,000 tokens at 80 a second, longer answers are rare; then they are
# retracted
DRAIN_S = 120.0
ALIVE = ("ready", "stale")


@define(eq=False)
class Update:
    """One update of `hosts`. Made by `Engines.updating`; `hosts` are all that live, `everyone` the dead ones
    too.
    """

    everyone: tuple[Host, ...]
    mode: UpdateMode
    before: PauseMode | None
    hosts: tuple[Host, ...] = ()
    seconds: dict[int, float] = field(factory=dict)  # until each host had all it was to load
    committed: bool = False
    _kept: set[int] = field(factory=set)

    async def begin(self, drained: Callable[[], bool], changed: Callable[[], trio.Event]) -> None:
        """Hold generation and keep what is served. `drained`: no call is under way."""
        self.hosts = tuple(host for host in self.everyone if host.state in ALIVE)
        if not self.hosts:
            raise EngineError("no engine host serves at present: update the weights again once one does")
        if self.mode == "drain" and self.before is None:
            with trio.move_on_after(DRAIN_S):
                while not drained():
                    await changed().wait()
        pause: PauseMode = "retract" if self.mode == "drain" else self.mode
        self._insist(await self._ask(self.hosts, lambda call, _: Pause(call=call, mode=pause)))
        ranks = sum(host.ranks for host in self.hosts)
        answers = await self._ask(self.hosts, lambda call, _: BeginUpdate(call=call, ranks=ranks))
        self._kept = {index for index, said in answers.items() if said.ok}
        self._insist(answers)

    async def load(self, make: Make) -> None:
        """One part of the new weights, on every host at once."""
        began = trio.current_time()

        def note(host: Host) -> None:
            self.seconds[host.index] = self.seconds.get(host.index, 0.0) + trio.current_time() - began

        self._insist(await self._ask(self.hosts, make, note))

    async def check(self) -> None:
        """Everything has been sent. When this returns, every host can serve it and none does yet."""
        # requests frozen in place keep their cache; nobody else finds it, as the version is its salt
        flush = self.mode != "in_place"
        self._insist(await self._ask(self.hosts, lambda call, _: CheckUpdate(call=call, flush=flush)))

    async def commit(self, loaded: Loaded) -> None:
        """Serve it, and let generation go on unless it was held before."""
        self.committed = True
        for host in self.everyone:
            host.loaded = loaded  # first: who dies from here on comes back with it
        answers = await self._ask(self.hosts, lambda call, _: CommitUpdate(call=call, version=loaded.version))
        for host in self._survivors(answers, f"could not serve weights {loaded.version}"):
            host.serve(loaded.version)
        await self._go_on()

    async def roll_back(self) -> None:
        """Serve what was served before."""
        kept = [host for host in self.hosts if host.index in self._kept]
        self._survivors(
            await self._ask(kept, lambda call, _: RollBack(call=call)),
            "could not go back to the weights before",
        )
        await self._go_on()

    # ── inside ────────────────────────────────────────────────────────────────

    async def _go_on(self) -> None:
        if self.before is None:
            self._survivors(
                await self._ask(self.hosts, lambda call, _: Continue(call=call)),
                "could not go on after an update of weights",
            )

    async def _ask(
        self, hosts: Iterable[Host], make: Make, note: Callable[[Host], None] = lambda _: None
    ) -> dict[int, Done]:
        """What each of `hosts` says; who died or says nothing within STEP_S has failed, and the latter is
        ended.
        """
        asked = tuple(hosts)
        answers = {
            host.index: Done(call=0, ok=False, message=host.last_error or "the engine host died")
            for host in asked
        }

        async def ask(host: Host) -> None:
            answers[host.index] = await host.ask(lambda call: make(call, host))
            note(host)

        with trio.move_on_after(STEP_S) as patience:
            async with trio.open_nursery() as nursery:
                for host in asked:
                    if host.state in ALIVE:
                        answers[host.index] = Done(
                            call=0, ok=False, message=f"no answer within {STEP_S:.0f} s"
                        )
                        nursery.start_soon(ask, host)
        if patience.cancelled_caught:
            for host in asked:
                if answers[host.index].message.startswith("no answer"):
                    host.condemn(answers[host.index].message)
        return answers

    def _survivors(self, answers: dict[int, Done], what: str) -> list[Host]:
        """Those that did as told; the others are ended."""
        for host in self.hosts:
            said = answers.get(host.index)
            if said is not None and not said.ok and host.state in ALIVE:
                host.condemn(f"{what}: {said.message}")
        return [host for host in self.hosts if host.index in answers and answers[host.index].ok]

    def _insist(self, answers: dict[int, Done]) -> None:
        failed = {index: said.message for index, said in answers.items() if not said.ok}
        if not failed:
            return
        text = "; ".join(f"engine host {index}: {message}" for index, message in failed.items())
        if all(host.state in ALIVE for host in self.hosts):
            raise Refused(f"the weights were not taken, those before are served: {text}", path="$.source")
        raise EngineError(f"the weights were not taken, those before are served: {text}")
