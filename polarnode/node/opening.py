"""Opens the parts of a node in order, and closes them in reverse.

Journal, engines, runtimes and sessions are contexts. They open in this order and close in reverse, so that a
service outlives its users; the control plane opens last. A node stops in three steps: it refuses new tasks,
ends the sessions with what they have, and leaves the contexts. A node begins with the weights that it served
last, where a disk still has them. If it cannot, `report` is called at once and status keeps a warning.
"""

import gc
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from importlib.metadata import version
from pathlib import Path
from socket import socket

import trio
from attrs import evolve

from polarnode.api.callbacks import CallbackReceivers, callback_networks, open_callbacks
from polarnode.containers.egress.proxy import NodeEgress
from polarnode.containers.images import Images
from polarnode.containers.runtimes import AbsentRuntimes, NodeRuntimes, open_runtimes
from polarnode.core.errors import ConfigError, EngineError, ModelError, boundary
from polarnode.core.labels import all_labels
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.external import KEY_VARIABLE, ServerUnreachable, UnfitServer, Wanted, connect
from polarnode.engine.following import Following
from polarnode.engine.host import Loaded
from polarnode.engine.memory import EngineControl
from polarnode.engine.scoring import POLICY, ScoringEngines
from polarnode.engine.settings import (
    EngineSettings,
)
from polarnode.engine.weight_copies import Copies
from polarnode.engine.weights import Weights, last_weights, open_weights
from polarnode.gateway.call import Model
from polarnode.gateway.endpoint import ModelPlane
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.gateway.recordings import Recordings
from polarnode.http.server import open_server
from polarnode.integrations.polar.extension import callback_formats
from polarnode.journal.health import JournalHealth
from polarnode.journal.held import ResultStore
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import LOG_RETRY_S, Log, LogUnavailable, NodeFacts
from polarnode.journal.log.postgres.postgres import open_postgres_log
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.node import Node, control_certificate, open_captures
from polarnode.node.settings import (
    engine_settings,
    no_experts_reason,
    retention_settings,
    runtimes_settings,
    teacher_settings,
)
from polarnode.rollouts.admission import TaskAdmission, TaskSubmission
from polarnode.rollouts.evaluations import Evaluations
from polarnode.rollouts.forks import ForkNodes
from polarnode.rollouts.freezer import ContainerFreezer
from polarnode.rollouts.judges import NodeJudges, open_judges
from polarnode.rollouts.lifecycle import LiveSessionFactory
from polarnode.rollouts.machine_watch import MachineWatch, read_machine
from polarnode.rollouts.recovery import recover
from polarnode.rollouts.scheduler import Scheduler, make_scheduler
from polarnode.rollouts.services import NodeIdentity, StageSlots
from polarnode.rollouts.session import SessionServices
from polarnode.rollouts.session_containers import NodeContainers
from polarnode.rollouts.session_records import SharedSessionRecords
from polarnode.rollouts.snapshot_store import open_snapshot_store
from polarnode.rollouts.snapshots import NoCopies, NodeSnapshots
from polarnode.rollouts.stage_limits import StageBounds
from polarnode.support.bounded import make_private_folder
from polarnode.support.concurrency import PrioritySemaphore, open_background
from polarnode.support.metrics import NodeCounters, lift_descriptor_limit, open_loop_lag
from polarnode.tokens.template import LoadedModel, load_model

# ── model ────────────────────────────────────────────────────────────


def load_node_model(config: NodeConfig) -> LoadedModel:
    """Load the model. Its name says in every trajectory whether the answers are random."""
    model = load_model(Path(config.model))
    return evolve(model, name=f"simulated:{model.name}") if config.engine == "simulated" else model


async def with_served_model(config: NodeConfig) -> NodeConfig:
    """Fill in the model that an external engine serves, where the config names none. Raises ConfigError where
    its tokenizer is not on this machine.
    """
    if not config.engine_urls or config.model != str(TINY_MODEL):
        return config
    url = config.engine_urls[0]
    try:
        async with connect(Wanted(url=url, vocab_size=0), os.environ.get(KEY_VARIABLE)) as server:
            model = await server.model()
    except (ServerUnreachable, UnfitServer) as error:
        raise ConfigError(
            f"name --model, the folder of the model that the engine serves: its server was asked, and {error}"
        ) from error
    if not await trio.Path(model, "config.json").is_file():
        raise ConfigError(
            f"{url} serves {model}, which is no folder of this machine: name --model, a folder with that"
            " model's config.json and tokenizer"
        )
    return evolve(config, model=str(await trio.Path(model).resolve()))


# ── teachers ────────────────────────────────────────────────────────────


@asynccontextmanager
async def _open_scoring(
    config: NodeConfig,
    state: Path,
    model: LoadedModel,
    policy: Engines,
    own_ports: list[Collection[int]],
    report: Callable[[str], None],
) -> AsyncIterator[ScoringEngines]:
    """Open the engines of the teachers, which score like the policy's. Each has hosts of its own, which
    restart alone.
    """
    found: dict[str, Engines] = {POLICY: policy}
    own_ports.append(policy.ports)
    async with AsyncExitStack() as stack:
        for name, teacher in config.teachers.items():
            make = partial(teacher_settings, name, teacher, state, model, Path(config.model))
            try:
                settings = await trio.to_thread.run_sync(make)
                make_private_folder(settings.state_dir)
                found[name] = await stack.enter_async_context(_open_engines(settings, None, report))
            except (EngineError, ModelError) as error:
                raise ConfigError(f"teachers.{name}: {error}") from error
            own_ports.append(found[name].ports)
        yield ScoringEngines(found)


# ── weights ────────────────────────────────────────────────────────────


def checkpoint_path(config: NodeConfig) -> str:
    """The checkpoint that a node is started with, as the history of weights names it."""
    return str(Path(config.model).resolve())


async def initial_weights(
    config: NodeConfig, log: Log, name: str, report: Callable[[str], None]
) -> tuple[Loaded | None, str | None]:
    """The last version of the weights in the log, or a warning where it cannot be loaded. `name` is the
    model's name in the log. An external engine has its own weights, so there is neither.
    """
    if config.engine_urls:
        return None, None
    loaded, warning = await last_weights(
        log, checkpoint_path(config), name, weight_copies_dir(config), resume=config.resume_weights
    )
    if loaded is not None:
        report(f"serving weights {loaded.version!r} from {loaded.path}, the last that were served")
    if warning is not None:
        report(warning)
    return loaded, warning


def weight_copies_dir(config: NodeConfig) -> Path:
    """The folder for files of weights that came from other nodes."""
    return Path(config.state_dir) / "weights"


async def _restore_adapters(
    config: NodeConfig, weights: Weights, report: Callable[[str], None]
) -> AdapterStore:
    """Serve the adapters of this node's folder and log again."""
    store = AdapterStore(
        weights=weights,
        folder=Path(config.state_dir) / "adapters",
        reserve=config.disk_reserve_mb << 20,
        rank=config.lora_rank,
        slots=config.lora_slots,
    )
    await store.restore(report)
    return store


# ── opening ────────────────────────────────────────────────────────────

# The thresholds of Python's garbage collector: new objects before it collects the youngest generation, and
# collections of a generation before one of the next. A request makes some 10 000 objects.
GC_THRESHOLDS = (20_000, 50, 100)
# Sessions that are claimed for each slot of the first stage. The next sessions stand ready, and all others
# stay in the log, where every node may claim them.
CLAIMS_PER_SLOT = 2
DAMAGE_INTERVAL_S = (
    1.0  # between looks for sessions that began on a damaged journal; most attempts pause so long
)
Report = Callable[[str], None]
STARTING_ENGINE = "starting the engine"  # a report
WAITING_LOG = "waiting for the log"


@asynccontextmanager
async def open_node(
    config: NodeConfig, *, report: Report, url: str = "", images: Images | None = None
) -> AsyncIterator[Node]:
    """Run a node for as long as the block, with its journal recovered.

    `report` is called for each step that takes time. Sessions that are live at the end are cancelled. `url`
    is where the node's control plane is served, for the other nodes of its log. `images` are those that are
    being built already.
    """
    lift_descriptor_limit()
    state, formats = _make_state_folder(config), callback_formats(node=config.node_id)
    async with (
        open_judges(config.judges, os.environ) as judges,
        _open_journal(config) as journal,
        _open_log(config, journal, report) as log,
        open_callbacks(log, formats=formats, receivers=_callback_receivers(config)) as callbacks,
    ):
        config, model = await _load_served_model(config, report)
        begin_with = partial(initial_weights, config, log, model.name, report)
        loaded, warning = await retry_until_answered(begin_with, meanwhile="the node waits to start")
        async with (
            _open_engines(engine_settings(config, state, model), loaded, report) as engines,
            _open_scoring(config, state, model, engines, callbacks.own_ports, report) as scoring,
            open_weights(
                engines,
                journal.health,
                log,
                now=journal.now,
                model=checkpoint_path(config),
                name=model.name,
                copies=weight_copies_dir(config),
                warning=warning,
            ) as weights,
            _open_runtimes(config) as runtimes,
        ):
            control = EngineControl(weights=weights, keeps=config.memory_saver == "backup")
            adapters = await retry_until_answered(
                partial(_restore_adapters, config, weights, report), meanwhile="the node waits to start"
            )
            images = images or Images(settings=runtimes.settings, log=state / "images.log", report=report)
            served = _served_model(engines, model)
            plane = _model_plane(config, served)
            async with (
                _open_sessions(
                    config, journal, log, engines, weights, runtimes, images, judges, model, plane, scoring
                ) as scheduler,
            ):
                # While a trainer holds generation, a node that begins must not sample either.
                with suppress(EngineError):  # generation is held at a host that does not answer yet
                    await retry_until_answered(weights.follow_hold, meanwhile="the node waits to start")
                await recover(journal, scheduler, _node_facts(config, url, model.name), report)
                membership = scheduler.claims.membership
                weights.incarnation = membership.incarnation
                following = Following(
                    weights=weights,
                    adapters=adapters,
                    copies=Copies(
                        log=log,
                        folder=weight_copies_dir(config),
                        token=config.token,
                        reserve=config.disk_reserve_mb << 20,
                    ),
                    incarnation=lambda: membership.incarnation,
                )
                submission = TaskSubmission(
                    log=log,
                    admission=scheduler.admission,
                    registry=scheduler.registry,
                    now=time.time,
                    runs_tasks=config.runs_tasks,
                )
                # The first collection blocks the event loop for 0.1 s, so the loop's lag is measured after
                # it.
                with rare_collections(), without_vfork():
                    async with (
                        open_loop_lag() as lag,
                        open_background(partial(_end_when_damaged, journal.health, scheduler)),
                        open_background(following.run),
                        _open_evaluations(config, journal, scheduler) as evaluations,
                        open_captures(config, journal, scheduler, served, plane.recordings) as captures,
                    ):
                        serve = partial(adapters.serve_from_start, config.adapters, report)
                        await retry_until_answered(serve, meanwhile="the node waits to start")
                        node = Node(
                            config=config,
                            journal=journal,
                            log=log,
                            engines=engines,
                            runtimes=runtimes,
                            images=images,
                            model=model,
                            membership=membership,
                            submission=submission,
                            scheduler=scheduler,
                            judges=judges,
                            lag=lag,
                            captures=captures,
                            callbacks=callbacks,
                            weights=weights,
                            adapters=adapters,
                            evaluations=evaluations,
                            engine_control=control,
                        )
                        yield node
                        # This is not in a `finally`: a node that is left by force publishes `interrupted`
                        # trajectories at its next start.
                        await node.stop(cancel=True)


async def _end_when_damaged(health: JournalHealth, scheduler: Scheduler, ready: trio.Event) -> None:
    """End all sessions when the journal's file turns out to be damaged, because answered turns could be lost.
    A session that is tried again meanwhile is ended too.
    """
    ready.set()
    await health.damage_event.wait()
    while True:
        scheduler.registry.cancel_all()
        await trio.sleep(DAMAGE_INTERVAL_S)


def _make_state_folder(config: NodeConfig) -> Path:
    state = Path(config.state_dir)
    with boundary(ConfigError, f"state_dir {state} cannot be written"):
        make_private_folder(state)
        make_private_folder(sessions_dir(config))
    return state


async def _load_served_model(config: NodeConfig, report: Report) -> tuple[NodeConfig, LoadedModel]:
    config = await with_served_model(config)
    report(f"loading {config.model}")
    return config, await trio.to_thread.run_sync(load_node_model, config)


@asynccontextmanager
async def _open_engines(
    settings: EngineSettings, loaded: Loaded | None, report: Report
) -> AsyncIterator[Engines]:
    """Open engines, and report each external server that the node waits for."""
    report(STARTING_ENGINE)
    async with open_engines(settings, loaded=loaded) as engines:
        for host in engines.statistics().hosts:
            if host.url is not None and host.state != "ready":
                report(f"waiting for {host.url}: {host.last_error}; calls wait until it answers")
        yield engines


def _callback_receivers(config: NodeConfig) -> CallbackReceivers:
    """The addresses to which callbacks may go. Ports that are fixed are excluded before anything listens
    there.
    """
    return CallbackReceivers(
        networks=callback_networks(config.callback_networks),
        own_ports=[{config.port, config.capture_port} - {0}],
    )


def _open_journal(config: NodeConfig) -> AbstractAsyncContextManager[Journal]:
    return open_journal(
        Path(config.state_dir) / "journal.sqlite", now=time.time, retention=retention_settings(config)
    )


@asynccontextmanager
async def _open_log(config: NodeConfig, journal: Journal, report: Report) -> AsyncIterator[Log]:
    """Open the log that the node shares with others, or its own. A shared log that is away is waited for."""
    if config.log is None:
        yield SqliteLog(journal)
        return
    opening = partial(
        open_postgres_log, config.log, name=config.node_id, retention=retention_settings(config)
    )
    async with AsyncExitStack() as stack:
        told = ""
        while True:
            try:
                log = await stack.enter_async_context(opening())
                break
            except LogUnavailable as error:  # `StartingNode` answers requests meanwhile, with this reason
                if told != error.reason:
                    report(f"{WAITING_LOG}: {error.reason}")
                    told = error.reason
                await trio.sleep(LOG_RETRY_S)
        yield log


def _node_facts(config: NodeConfig, url: str, model: str) -> NodeFacts:
    """The facts that the other nodes are told of this one."""
    certificate = control_certificate(config)
    return NodeFacts(
        name=config.node_id,
        url=url,
        certificate="" if certificate is None else certificate.digest,
        version=version("polarnode"),
        labels=all_labels(config.labels, node=config.node_id, model=model),
    )


@contextmanager
def without_vfork() -> Iterator[None]:
    """Start programs with fork and not with vfork, by Python's documented switch `subprocess._USE_VFORK`.

    With vfork the whole process, with its threads, stands still until the child runs its program, and on a
    busy machine a child waits for a CPU. With 64 sessions on two cores the event loop was 104 ms late in the
    99th percentile. With fork, which copies page tables for 2 ms instead, it was 42 ms late.
    """
    usual = vars(subprocess)["_USE_VFORK"]
    vars(subprocess)["_USE_VFORK"] = False
    try:
        yield
    finally:
        vars(subprocess)["_USE_VFORK"] = usual


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's garbage collector ignore what is loaded by now, and look for cycles less often.

    By default it looks at every object of transformers and of all turns again and again. That took 17 % of a
    busy node's time, and 0.3 s at a stretch.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


@asynccontextmanager
async def _open_runtimes(config: NodeConfig) -> AsyncIterator[NodeRuntimes | AbsentRuntimes]:
    settings = runtimes_settings(config)
    if config.runs_tasks:
        async with open_runtimes(settings) as runtimes:
            yield runtimes
    else:
        yield AbsentRuntimes(settings=settings)


@asynccontextmanager
async def _open_sessions(
    config: NodeConfig,
    journal: Journal,
    log: Log,
    engines: Engines,
    weights: Weights,
    runtimes: NodeRuntimes | AbsentRuntimes,
    images: Images,
    judges: NodeJudges,
    model: LoadedModel,
    plane: ModelPlane,
    scoring: ScoringEngines,
) -> AsyncIterator[Scheduler]:
    def serve_endpoint(session_id: str, listener: socket) -> AbstractAsyncContextManager[object]:
        return open_server(plane.app_for(session_id), listener)

    folder, store = sessions_dir(config), None
    if config.snapshots is not None and log.shared:
        store = open_snapshot_store(
            config.snapshots, folder=folder, journal_writer=journal.writer, journal_reader=journal.reader
        )
    copies = store or NoCopies()
    parents = ForkNodes(
        log=log,
        journal_writer=journal.writer,
        journal_reader=journal.reader,
        node=config.node_id,
        snapshots=folder,
        copies=copies,
    )
    records = SharedSessionRecords(journal.writer, log) if log.shared else None
    tally, drops_thinking = NodeCounters(), model.template.drops_thinking_before
    admission = TaskAdmission(
        identity=NodeIdentity(node=config.node_id, model=model.name, labels=config.labels),
        context_length=engines.context_length,
        allowed_imports=config.import_paths,
        judges=judges.names,
        unrouted=None if engines.routes else no_experts_reason(config, model),
        volumes=config.volumes,
        egress=config.egress,
        adapters=engines.adapters,
        scoring=scoring,
    )
    session_factory = LiveSessionFactory(
        journal=records or journal.writer,
        tally=tally,
        drops_thinking=drops_thinking,
        carried_limit=config.carried_mb << 20,
    )
    services = SessionServices(
        journal=records or journal.writer,
        stages=_make_stages(config),
        parents=parents,
        snapshots=NodeSnapshots(folder=folder, runtimes=runtimes, copies=copies, tally=tally),
        drops_thinking=drops_thinking,
        containers=NodeContainers(
            runtimes=runtimes,
            ensure_image=images.ensure,
            folder=folder,
            egress=NodeEgress(names=config.egress, networks=config.egress_networks),
        ),
        serve_endpoint=serve_endpoint,
        context_length=engines.context_length,
        places=engines,
        freezer=ContainerFreezer(),
        judge=judges,
    )
    watch = _machine_watch(config, services.stages, runtimes, services.freezer, engines)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_background(services.freezer.run))
        await stack.enter_async_context(open_background(watch.run))
        for shared in (records, store):
            if shared is not None:
                await stack.enter_async_context(open_background(shared.run))
        nursery = await stack.enter_async_context(trio.open_nursery())
        scheduler = make_scheduler(
            log,
            nursery,
            admission=admission,
            services=services,
            session_factory=session_factory,
            sessions_by_key=plane.sessions,
            now=time.time,
            most_claimed=CLAIMS_PER_SLOT * services.stages.live.limit if config.runs_tasks else 0,
            warm=config.warm,
            served_versions=weights.order,
            serving=weights.serving,
            engines_ready=lambda: any(host.state == "ready" for host in engines.statistics().hosts),
            held=ResultStore(journal.writer, journal.reader, time.time) if log.shared else None,
        )
        async with (
            open_background(scheduler.registry.results.run),
            open_background(partial(scheduler.claims.run, scheduler)),
        ):
            yield scheduler


@asynccontextmanager
async def _open_evaluations(
    config: NodeConfig, journal: Journal, scheduler: Scheduler
) -> AsyncIterator[Evaluations]:
    membership, services = scheduler.claims.membership, scheduler.services
    evaluations = Evaluations(
        admission=scheduler.admission,
        stages=services.stages,
        containers=services.containers,
        judge=services.judge,
        copies=services.snapshots.copies,
        journal_health=journal.health,
        now=journal.now,
        log=scheduler.log,
        incarnation=lambda: membership.incarnation,
        workers=config.post_limit,
    )
    async with open_background(evaluations.run):
        yield evaluations


def sessions_dir(config: NodeConfig) -> Path:
    """The folder of the logs and artifacts of sessions."""
    return Path(config.state_dir) / "sessions"


def _model_plane(config: NodeConfig, served: Model) -> ModelPlane:
    recordings = Recordings(Path(config.record_requests)) if config.record_requests else None
    return ModelPlane(sessions=LiveSessions(), recordings=recordings, model=served)


def _served_model(engines: Engines, model: LoadedModel) -> Model:
    return Model(
        engine=engines,
        template=model.template,
        tokenizer=model.tokenizer,
        family=model.family,
        context_length=engines.context_length,
        id=model.name,
        now=time.time,
    )


def _machine_watch(
    config: NodeConfig,
    stages: StageSlots,
    runtimes: NodeRuntimes | AbsentRuntimes,
    freezer: ContainerFreezer,
    engines: Engines,
) -> MachineWatch:
    return MachineWatch(
        stages=stages,
        bounds=StageBounds(
            init=config.init_limit,
            run=config.run_limit,
            post=config.post_limit,
            memory_mb=config.memory_reserve_mb,
            disk_mb=config.disk_reserve_mb,
        ),
        ready_limit=config.ready_limit,
        engines=engines.statistics,
        read=partial(read_machine, (runtimes.settings.state_dir, Path(config.state_dir))),
        pause_prewarm=runtimes.hold,
        memory_short=freezer.memory_short,
    )


def _make_stages(config: NodeConfig) -> StageSlots:
    return StageSlots(
        live=PrioritySemaphore(limit=config.run_limit + config.ready_limit),
        init=PrioritySemaphore(limit=config.init_limit),
        run=PrioritySemaphore(limit=config.run_limit),
        post=PrioritySemaphore(limit=config.post_limit),
    )
