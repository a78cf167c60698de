"""Hollow nodes: the real control plane, journal and scheduler on containers and engines in memory, several in
one process (Kubemark's idea). A fleet of many costs one machine little, and a killed one is back in seconds.

    python tests/kits/hollow_node.py --folder FOLDER --ports 8101,8102 [--token TOKEN]

Prints a line of JSON for each node, {"node", "url", "journal"}, when all of them serve, and ends with its
standard input, or at SIGTERM. The harness `shell` with the command `hollow SECONDS KILOBYTES` makes one model
call of about so many kilobytes of events, in so many seconds; `hollow SECONDS kill` kills its node.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import fakes_runtime
import merge_toys as toys
import trio
from attrs import define, evolve, field
from fakes_engine import ScriptedEngine

from polarnode.containers.recipes import RuntimesSettings
from polarnode.core.conversation import Message
from polarnode.core.weights import PauseMode
from polarnode.engine.adapters import EngineAdapters
from polarnode.engine.routing import EngineStatistics
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.node import opening
from polarnode.node.config import NodeConfig
from polarnode.node.orphan import has_work, wait_orphaned
from polarnode.node.serving import serve_control_plane
from polarnode.rollouts.services import NoCachePlaces

BYTES_A_TOKEN = 27  # of a trajectory's JSON: its id, its logprob, its mask


@define(eq=False)
class HollowEngine(ScriptedEngine, NoCachePlaces):
    """An engine that has what a node asks of its own besides tokens. Nobody counts its cache."""

    ports: tuple[int, ...] = ()
    routes: bool = False
    is_own: bool = False  # it has no checkpoint to load
    restarts: tuple[int, ...] = (0,)
    ranks: int = 1
    adapters: EngineAdapters = field(factory=EngineAdapters)
    paused: PauseMode | None = field(default=None, init=False)

    def statistics(self) -> EngineStatistics:
        return evolve(super().statistics(), paused=self.paused)

    async def pause(self, mode: PauseMode) -> None:
        await trio.lowlevel.checkpoint()
        self.paused = mode

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self.paused = None

    @property
    def versions(self) -> tuple[str, ...]:
        return (self.weight_version,)


@define(eq=False, kw_only=True)
class HollowRuntimes(fakes_runtime.MemoryRuntimes):
    """Containers in memory, which are forgotten when they are closed."""

    settings: RuntimesSettings

    @asynccontextmanager
    async def open(self, spec: Any, **more: Any) -> AsyncIterator[fakes_runtime.MemoryRuntime]:
        async with fakes_runtime.MemoryRuntimes.open(self, spec, **more) as runtime:
            yield runtime
        self.opened.remove(runtime)


NO_IMAGE = "localhost/none/such"


class HollowImages:
    """Every image is there but NO_IMAGE."""

    step: str | None = None

    async def refusal(self, name: str) -> str | None:
        await trio.lowlevel.checkpoint()
        return f"no image is called {name}" if name == NO_IMAGE else None

    async def ensure(self, name: str) -> None:
        await trio.lowlevel.checkpoint()


def hollow(sessions: LiveSessions) -> fakes_runtime.ProgramFunction:
    """The harness `hollow SECONDS KILOBYTES`, also as the command of a shell."""

    async def program(call: fakes_runtime.Call) -> int:
        live = sessions.by_key(call.env["OPENAI_API_KEY"])
        assert live is not None
        words = call.argv if call.argv[0] == "hollow" else call.argv[-1].split()
        await trio.sleep(float(words[1]))
        if words[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        _record(live, max(1, int(float(words[2]) * 1000 / BYTES_A_TOKEN)))
        call.runtime.files["/work/answer"] = b"42"
        return 0

    return program


def _record(live: LiveSession, tokens: int) -> None:
    """One finished model call, as the model plane records it."""
    toy = toys.Session(live.session_id)
    toy.lineages, toy.samples = live.lineages, len(live.lineages.turns)
    with live.calls.enter(trio.CancelScope()):
        asked: Message = toys.user()
        pending = toy.begin(toys.ask(asked))
        live.commit(toy.turn(pending, toy.answer(pending.plan, "x " * tokens)))


@asynccontextmanager
async def open_hollow(config: NodeConfig) -> AsyncIterator[tuple[Any, Any]]:
    """A hollow node that serves: the node and its address. `opening` is patched while it opens."""
    made: list[LiveSessions] = []

    @asynccontextmanager
    async def engines(*_: Any) -> AsyncIterator[HollowEngine]:
        yield HollowEngine(context_length=1 << 20)

    @asynccontextmanager
    async def runtimes(settings: RuntimesSettings) -> AsyncIterator[HollowRuntimes]:
        found = HollowRuntimes(settings=settings)
        yield found

    def live_sessions() -> LiveSessions:
        made.append(LiveSessions())
        return made[-1]

    patched = {
        "_open_engines": engines,
        "open_runtimes": runtimes,
        "Images": lambda **_: HollowImages(),
        "LiveSessions": live_sessions,
    }
    usual = {name: getattr(opening, name) for name in patched}
    vars(opening).update(patched)
    async with AsyncExitStack() as stack:
        try:
            scheme = "http" if config.tls_cert is None else "https"
            url = f"{scheme}://{config.host}:{config.port}" if config.port else ""
            node = await stack.enter_async_context(
                opening.open_node(config, report=lambda text: None, url=url)
            )
        finally:
            vars(opening).update(usual)
        programs = node.runtimes.programs  # type: ignore[attr-defined]
        programs["hollow"] = programs["bash"] = hollow(made[0])
        yield node, await stack.enter_async_context(serve_control_plane(node))


async def main(folder: Path, ports: list[int], token: str | None, settings: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        for number, port in enumerate(ports):
            name = f"{folder.name}-{number}" if len(ports) > 1 else folder.name
            config = NodeConfig(
                engine="simulated",
                port=port,
                token=token,
                node_id=name,
                state_dir=str(folder / name),
                podman_dir=str(folder / "podman"),
                import_paths=("session_kit",),
                memory_reserve_mb=1,
                disk_reserve_mb=1,
                **{"log": os.environ.get("POLARNODE_LOG"), **settings},
            )
            node, address = await stack.enter_async_context(open_hollow(config))
            line = {"node": name, "url": f"http://{address.host}:{address.port}", "journal": node.journal.id}
            print(json.dumps(line), flush=True)
        if lifeline := os.environ.get("POLARNODE_LIFELINE"):  # a launcher that does not hold standard input
            orphan_s = float(os.environ["POLARNODE_ORPHAN_S"])

            async def needed() -> bool:
                live = node.scheduler.statistics().live
                return await has_work(node.log, live, orphan_s=orphan_s, now=time.time())

            await wait_orphaned(Path(lifeline), orphan_s, needed if node.log.shared else None)
        else:
            await trio.lowlevel.wait_readable(sys.stdin)  # whoever started this has gone
        os._exit(0)  # a hollow node has nothing to save that is not in its journal


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--ports", default="0")
    options.add_argument("--token")
    options.add_argument("--settings", default="{}", type=json.loads)
    given = options.parse_args()
    logging.basicConfig(level=logging.WARNING, filename=given.folder.with_suffix(".log"))
    trio.run(
        main,
        given.folder,
        [int(port) for port in given.ports.split(",")],
        given.token,
        given.settings,
    )
