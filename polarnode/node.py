"""The node: everything put together, in the order it must come apart.

Journal, engines, runtimes and sessions are contexts, opened in this order and closed in reverse, so that a service outlives its users; the
control plane is opened last. Stopping has an order of its own: refuse new tasks, end the sessions with what they have, leave the contexts.
"""

import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from socket import socket

import trio
from attrs import define, evolve, field

from polarnode.config import NodeConfig
from polarnode.conversation import Json
from polarnode.engine_host.protocol import Marks
from polarnode.errors import ConfigError, ModelError
from polarnode.merge.trajectory import Result, assemble
from polarnode.records import Outcome
from polarnode.shell.engine import Engines, EngineSettings, Simulated, open_engines, unrouted
from polarnode.shell.gates import Gate
from polarnode.shell.journal import Journal, UnfinishedSession, open_journal
from polarnode.shell.live import LiveSessions
from polarnode.shell.orders import House, Stages
from polarnode.shell.podman import Images, Runtimes, RuntimesSettings, default_state_dir, open_runtimes
from polarnode.shell.scheduler import Scheduler, Who
from polarnode.tasks import HarnessSpec, TaskSpec
from polarnode.tokens.family import Family
from polarnode.tokens.model import LoadedModel, load_model
from polarnode.web.control_plane import Conflict, DiskFull, Submitted, create_app
from polarnode.web.control_plane.metrics import Figures
from polarnode.web.model import Model
from polarnode.web.model_plane import ModelPlane
from polarnode.web.recordings import Recordings
from polarnode.web.server import Address, open_server
from polarnode.wire import plain

logger = logging.getLogger(__name__)

COLLECTIONS = (20_000, 50, 100)  # new objects before a look at the young, and looks before one at the older: a request makes some 10 000
Say = Callable[[str], None]


@define(eq=False)
class Node:
    """A node that runs. Satisfies the control plane's `Service`."""

    config: NodeConfig
    journal: Journal
    engines: Engines
    runtimes: Runtimes
    images: Images
    model: LoadedModel
    scheduler: Scheduler
    _submitting: trio.Lock = field(factory=trio.Lock, init=False)  # two submissions of one key at once must be one task

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        """Take a task, or answer again what was answered to the same one. Raises Refused, Conflict or DiskFull."""
        async with self._submitting:
            known = await self._known(spec, idempotency_key)
            return known if known is not None else await self._taken(spec, idempotency_key)

    async def _taken(self, spec: TaskSpec, idempotency_key: str | None) -> Submitted:
        if self.journal.refuses_tasks:
            raise DiskFull("the journal's disk is full: free some, then submit again; sessions under way are kept in memory meanwhile")
        task_id, session_ids = self.scheduler.submit(spec, idempotency_key=idempotency_key)
        await self.journal.flushed()
        return Submitted(task_id=task_id, session_ids=session_ids)

    async def _known(self, spec: TaskSpec, idempotency_key: str | None) -> Submitted | None:
        record = await self.journal.task_of_key(idempotency_key) if idempotency_key else None
        record = record or (await self.journal.task(spec.task_id) if spec.task_id else None)
        if record is None:
            return None
        if evolve(record.spec, task_id=None) != evolve(spec, task_id=None):
            raise Conflict(f"task {record.task_id} was submitted before with another body: give this one its own task_id and Idempotency-Key")
        ids = tuple(session.session_id for session in record.sessions)
        return Submitted(task_id=record.task_id, session_ids=ids, created=False)

    async def cancel(self, task_id: str) -> bool:
        """End a task's sessions with what they have."""
        return self.scheduler.cancel(task_id)

    def cancel_all(self) -> None:
        """End every session with what it has."""
        self.scheduler.cancel_all()

    async def stop(self, *, cancel: bool) -> None:
        """Refuse new tasks and wait for the sessions; `cancel` ends them with what they have."""
        await self.scheduler.stop(cancel=cancel)

    def status(self) -> dict[str, Json]:
        """The node at a glance."""
        return {
            "node": self.config.node_id,
            "model": {"name": self.model.name, "family": self.model.family.name, "context_length": self.engines.context_length},
            "scheduler": plain(self.scheduler.statistics()),
            "sessions": [plain(status) for status in self.scheduler.sessions() if status.outcome is None],
            "engine": plain(self.engines.statistics()),
            "runtimes": plain(self.runtimes.statistics()),
        }

    def figures(self) -> Figures:
        """The node's numbers, for GET /metrics."""
        scheduler, journal = self.scheduler.statistics(), self.journal.statistics()
        return Figures(
            tally=self.scheduler.tally.copied(),
            engine=self.engines.statistics(),
            stages=scheduler.stages,
            live=scheduler.live,
            journal_bytes=journal.stored_bytes,
            journal_backlog=journal.backlog_bytes,
        )

    def ready(self) -> bool:
        """Whether tasks are taken and some engine host answers."""
        return not self.scheduler.stopping and any(host.state == "ready" for host in self.engines.statistics().hosts)


@asynccontextmanager
async def open_node(config: NodeConfig, *, say: Say) -> AsyncIterator[Node]:
    """A node that runs, its journal recovered. `say` is told of each step that takes time. Sessions still live at the end are cancelled."""
    state = Path(config.state_dir)
    log_dir = state / "sessions"
    log_dir.mkdir(parents=True, exist_ok=True)
    async with open_journal(state / "journal.sqlite", now=time.time) as journal:
        await _recover(journal, config, say)
        say(f"loading {config.model}")
        model = await trio.to_thread.run_sync(_load_model, config)
        say("starting the engine")
        async with open_engines(_engine_settings(config, state, model)) as engines, open_runtimes(_runtimes_settings(config)) as runtimes:
            images = Images(settings=runtimes.settings, log=state / "images.log", say=say)
            async with _open_sessions(config, journal, engines, runtimes, images, model, log_dir) as scheduler:
                node = Node(config=config, journal=journal, engines=engines, runtimes=runtimes, images=images, model=model, scheduler=scheduler)
                with rare_collections():
                    yield node
                await node.stop(cancel=True)  # not in a finally: who leaves by force gets `interrupted` trajectories at the next start


@contextmanager
def rare_collections() -> Iterator[None]:
    """Python's collector leaves alone what is loaded by now, and looks for cycles less often.

    Its default looks at every object of transformers and of all turns again and again: 17 % of a busy node's time, and 0.3 s at a stretch.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


@asynccontextmanager
async def _open_sessions(
    config: NodeConfig, journal: Journal, engines: Engines, runtimes: Runtimes, images: Images, model: LoadedModel, log_dir: Path
) -> AsyncIterator[Scheduler]:
    lives = LiveSessions()
    plane = ModelPlane(
        sessions=lives,
        recordings=None if config.record_requests is None else Recordings(Path(config.record_requests)),
        model=Model(
            engine=engines,
            template=model.template,
            tokenizer=model.tokenizer,
            family=model.family,
            context_length=engines.context_length,
            id=model.name,
            now=time.time,
        ),
    )

    def serve_door(session_id: str, door: socket) -> AbstractAsyncContextManager[object]:
        return open_server(plane.app_for(session_id), door)

    house = House(
        runtimes=runtimes,
        stages=_stages(config),
        serve_door=serve_door,
        publish=journal.publish,
        context_length=engines.context_length,
        log_dir=log_dir,
        ensure_image=images.ensure,
        drops_thinking=model.template.drops_thinking_before,
        allowed_imports=config.import_paths,
        carried_limit=config.carried_mb << 20,
        unrouted=None if engines.routes else _unrouted(config, model),
    )
    async with trio.open_nursery() as nursery:
        yield Scheduler(
            nursery=nursery,
            house=house,
            lives=lives,
            record=journal,
            who=Who(node=config.node_id, model=model.name),
            want=runtimes.want,
            warm=config.warm,
        )


def serve_control_plane(node: Node) -> AbstractAsyncContextManager[Address]:
    """The trainer's socket of a node, for as long as the block; gives its address."""
    app = create_app(node, token=node.config.token, journal=node.journal)
    return open_server(app, Address(host=node.config.host, port=node.config.port))


def _stages(config: NodeConfig) -> Stages:
    return Stages(
        live=Gate(limit=config.run_limit + config.ready_limit),
        init=Gate(limit=config.init_limit),
        run=Gate(limit=config.run_limit),
        post=Gate(limit=config.post_limit),
    )


def _load_model(config: NodeConfig) -> LoadedModel:
    """The model, by a name that says in every trajectory when its answers are random."""
    model = load_model(Path(config.model))
    return evolve(model, name=f"simulated:{model.name}") if config.engine == "simulated" else model


def _engine_settings(config: NodeConfig, state: Path, model: LoadedModel) -> EngineSettings:
    if not config.cpu and not config.gpus and config.engine != "simulated":
        raise ConfigError("say where the model runs: --gpus 0-7, --gpus 0, or --cpu")
    return EngineSettings(
        model_path=Path(config.model),
        device="cpu" if config.cpu else "cuda",
        gpus=config.gpus,
        tp=config.tp,
        context_length=config.context_length,
        mem_fraction=config.mem_fraction,
        state_dir=state,
        routed_experts=config.routed_experts,
        simulated=_simulated(config, model) if config.engine == "simulated" else None,
    )


def _unrouted(config: NodeConfig, model: LoadedModel) -> str:
    """Why the engine of this node tells no routed experts, and what to do about it."""
    settings = _engine_settings(config, Path(config.state_dir), model)
    return unrouted(settings) or "the engine was started without them; start the node with --routed-experts"


def _simulated(config: NodeConfig, model: LoadedModel) -> Simulated:
    return Simulated(simulation=config.simulated, vocab_size=model.tokenizer.vocab_size, marks=simulated_marks(model.family))


def simulated_marks(family: Family) -> Marks:
    """What random answers are written with. ModelError for a family that writes calls otherwise than as JSON between marks."""
    if family.call_syntax not in ("json", "none"):
        how = f"the simulated engine writes calls as JSON between marks, the family {family.name} writes them otherwise ({family.call_syntax})"
        raise ModelError(f"{how}: leave --model out, or name a Qwen3; a node's load hardly depends on it")
    return Marks(
        turn_end=family.stop_ids[0],
        think_open=family.think_open,
        think_close=family.think_close,
        call_open=family.call_open,
        call_close=family.call_close,
    )


def _runtimes_settings(config: NodeConfig) -> RuntimesSettings:
    state_dir = Path(config.podman_dir) if config.podman_dir else default_state_dir()
    return RuntimesSettings(
        state_dir=state_dir,
        node_id=config.node_id,
        runtimes_dir=Path(config.runtimes_dir) if config.runtimes_dir else None,
        base_image=config.base_image,
        warm=config.warm,
    )


async def _recover(journal: Journal, config: NodeConfig, say: Say) -> None:
    """Sessions that ran when an earlier life of this node ended become `interrupted` trajectories of what was captured."""
    unfinished = await journal.unfinished()
    for session in unfinished:
        journal.publish(
            assemble(session.identity, _spec(session), session.turns, Result(outcome=_interrupted(session)), allowed_imports=config.import_paths)
        )
    await journal.flushed()
    if unfinished:
        say(f"{len(unfinished)} sessions of an earlier life were interrupted; their turns are kept")


def _spec(session: UnfinishedSession) -> TaskSpec:
    """The task of an interrupted session; a capture has none, and is built as any other."""
    return session.spec or TaskSpec(instruction="", harness=HarnessSpec(name=session.identity.harness))


def _interrupted(session: UnfinishedSession) -> Outcome:
    return Outcome(status="interrupted", boundary="node", reason=f"the node ended while the session ran; {len(session.turns)} turns were captured")
