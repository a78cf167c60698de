"""A control plane over engines of any kind, with nothing but the routes to weights; and a trainer, a process
of its own as trainers are.
"""

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve, frozen
from control_plane_parts import Caller, TaskTaker
from log_kit import open_postgres

from polarnode.api.app import Extension, control_plane
from polarnode.api.proxy import PassingRoutes, open_others
from polarnode.api.routes import AdapterRoutes, ControlRoutes, WeightsRoutes
from polarnode.api.weight_files import WeightFileRoutes
from polarnode.api.weight_nodes import ModelNodes, WeightNodeRoutes
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.following import Following
from polarnode.engine.host import Loaded
from polarnode.engine.memory import EngineControl
from polarnode.engine.protocol import Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine
from polarnode.engine.weight_copies import Copies
from polarnode.engine.weights import Weights, last_weights, open_weights
from polarnode.http.server import Address, listening_socket, open_server
from polarnode.integrations.sglang import sglang_extension
from polarnode.integrations.sglang_nodes import SglangNodes
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Log, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.support.concurrency import open_background
from polarnode.tokens.template import load_model

TRAINER = Path(__file__).with_name("weights_trainer.py")


MODEL = "tiny"  # what the log calls the model of these nodes


@frozen
class Plane:
    """`node` speaks HTTP to `weights` over `engines`."""

    node: Caller
    engines: Engines
    weights: Weights
    journal: Journal
    adapters: AdapterStore
    reports: list[str]
    log: Log
    following: Following

    @property
    def incarnation(self) -> int:
        return self.weights.incarnation

    async def update(self, version: str, source: dict[str, Any], mode: str = "in_place") -> dict[str, Any]:
        """New weights that must be served."""
        answer = await self.node.post("/v1/weights", {"version": version, "source": source, "mode": mode})
        assert answer.status == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def told(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.node.get("/v1/weights")).json()
        return found


@asynccontextmanager
async def open_weights_plane(
    settings: EngineSettings,
    journal_path: Path,
    *,
    loaded: Loaded | None = None,
    keeps: bool = False,
    dsn: str | None = None,
    name: str = "n",
    model: str = MODEL,
    begins: bool = False,
) -> AsyncIterator[Plane]:
    """A node alone, or with `dsn` one of those that share a log, by its name. With `begins` it serves what was
    served last, as a node that starts.
    """
    copies = journal_path.with_name("weights")
    listener = listening_socket(Address(host="127.0.0.1", port=0))
    async with (
        open_journal(journal_path, now=lambda: 5.0) as journal,
        _opened_log(journal, dsn, name) as log,
        AsyncExitStack() as stack,
    ):
        if begins:
            loaded, _ = await last_weights(log, str(settings.model_path), model, copies, resume=True)
        engines = await stack.enter_async_context(open_engines(settings, loaded=loaded))
        opened = open_weights(
            engines,
            journal.health,
            log,
            now=journal.now,
            model=str(settings.model_path),
            name=model,
            copies=copies,
        )
        weights = await stack.enter_async_context(opened)
        control, node = EngineControl(weights=weights, keeps=keeps), TaskTaker(journal=journal)
        store = AdapterStore(
            weights=weights, folder=journal_path.with_name("adapters"), reserve=0, rank=settings.lora_rank
        )
        sglang = sglang_extension(node, weights=weights, control=control, adapters=store, memory_saver=False)
        reports: list[str] = []
        await store.restore(reports.append)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        facts = NodeFacts(name=name, url=url, labels={"model": model, "node": name})
        joined = (await log.join(facts)).incarnation
        weights.incarnation = joined
        taken = Copies(log=log, folder=copies, token="secret")
        following = Following(weights, store, taken, lambda: joined)
        await stack.enter_async_context(open_background(following.run))
        files = WeightFileRoutes(weights, store)
        rows = (
            *WeightsRoutes(weights=weights, control=control).rows(),
            *AdapterRoutes(store=store).rows(),
            *files.rows(),
        )
        others = await stack.enter_async_context(open_others(log, name=name, token="secret"))
        nodes = ModelNodes(others=others, weights=weights)
        rows = tuple(PassingRoutes(others).rows(WeightNodeRoutes(nodes).rows(rows)))
        sglang = evolve(sglang, rows=tuple(SglangNodes(nodes).rows(sglang.rows)))
        app = control_plane(
            ControlRoutes(service=node).rows(), token="secret", extensions=[Extension(rows=rows), sglang]
        )
        async with open_server(app, listener):
            yield Plane(Caller(url=url), engines, weights, journal, store, reports, log, following)
        await log.leave(joined)


@asynccontextmanager
async def _opened_log(journal: Journal, dsn: str | None, name: str) -> AsyncIterator[Log]:
    if dsn is None:
        yield SqliteLog(journal)
    else:
        async with open_postgres(dsn, name=name) as log:
            yield log


def simulated_tiny(folder: Path, *, lora_rank: int = 0) -> EngineSettings:
    """A fast engine of random answers over the project's model."""
    model = load_model(TINY_MODEL)
    fast = Simulation(tokens_per_s=100, first_token_s=0, prefill_tokens_per_s=0)
    engine = SimulatedEngine(
        simulation=fast, marks=simulated_marks(model.family), vocab_size=model.tokenizer.vocab_size
    )
    return EngineSettings(
        model_path=TINY_MODEL,
        device="cpu",
        gpus=(0,),
        state_dir=folder,
        simulated=engine,
        lora_rank=lora_rank,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def disk(path: Path) -> dict[str, Any]:
    return {"kind": "disk", "path": str(path)}


@define(eq=False)
class Trainer:
    """Asked a line of JSON, it answers one."""

    process: "subprocess.Popen[str]"

    async def ask(self, **order: Any) -> Any:
        def asked() -> Any:
            stdin, stdout = self.process.stdin, self.process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        return await trio.to_thread.run_sync(asked)


@contextmanager
def open_trainer(*, device: str = "cpu") -> Iterator[Trainer]:
    """Ended with the block, whatever it waits for."""
    with subprocess.Popen(
        [sys.executable, str(TRAINER), device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Trainer(process)
        finally:
            process.kill()
