"""The node put together, in the order it must come apart.

Journal, engines, runtimes and sessions are contexts, opened in this order and closed in reverse, so that a service outlives its users; the
control plane is opened last. Stopping has an order of its own: refuse new tasks, end the sessions with what they have, leave the contexts.
"""

import gc
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from socket import socket

import trio

from polarnode.config import NodeConfig
from polarnode.node.captures import open_captures
from polarnode.node.node import Node
from polarnode.node.polar import polar_face
from polarnode.node.recovery import recover
from polarnode.node.settings import engine_settings, load_node_model, retention_of, runtimes_settings, why_unrouted
from polarnode.node.weights import weights_model, weights_to_begin_with
from polarnode.shell.callbacks import open_callbacks
from polarnode.shell.descriptors import lift_descriptor_limit
from polarnode.shell.egress import NodeEgress
from polarnode.shell.engine import Engines, open_engines
from polarnode.shell.gates import Gate
from polarnode.shell.journal import Journal, open_journal
from polarnode.shell.judges import Judges, open_judges
from polarnode.shell.lag import open_lag
from polarnode.shell.live import LiveSessions
from polarnode.shell.orders import House, Stages
from polarnode.shell.podman import Images, Runtimes, open_runtimes
from polarnode.shell.podman.background import open_background
from polarnode.shell.pressure import Bounds, PressureWatch, read_machine
from polarnode.shell.scheduler import Scheduler, Who
from polarnode.shell.weights import EngineControl, open_weights
from polarnode.tokens.model import LoadedModel
from polarnode.web.control_plane import create_app
from polarnode.web.control_plane.captures import CaptureRoutes
from polarnode.web.control_plane.weights import WeightsRoutes
from polarnode.web.model import Model
from polarnode.web.model_plane import ModelPlane
from polarnode.web.recordings import Recordings
from polarnode.web.server import Address, open_server

COLLECTIONS = (20_000, 50, 100)  # new objects before a look at the young, and looks before one at the older: a request makes some 10 000
Say = Callable[[str], None]


@asynccontextmanager
async def open_node(config: NodeConfig, *, say: Say) -> AsyncIterator[Node]:
    """A node that runs, its journal recovered. `say` is told of each step that takes time. Sessions still live at the end are cancelled."""
    lift_descriptor_limit()
    state = Path(config.state_dir)
    _sessions_dir(config).mkdir(parents=True, exist_ok=True)
    async with (
        open_judges(config.judges, os.environ) as judges,
        open_journal(state / "journal.sqlite", now=time.time, retention=retention_of(config)) as journal,
        open_callbacks(journal, node=config.node_id) as callbacks,
    ):
        say(f"loading {config.model}")
        model = await trio.to_thread.run_sync(load_node_model, config)
        say("starting the engine")
        loaded, warning = await weights_to_begin_with(config, journal, say)
        async with (
            open_engines(engine_settings(config, state, model), loaded=loaded) as engines,
            open_weights(engines, journal, model=weights_model(config), warning=warning) as weights,
            open_runtimes(runtimes_settings(config)) as runtimes,
        ):
            images = Images(settings=runtimes.settings, log=state / "images.log", say=say)
            served, recordings = _served(engines, model), _recordings(config)  # of both planes: their renderings share two threads
            plane = ModelPlane(sessions=LiveSessions(), recordings=recordings, model=served)
            async with _open_sessions(config, journal, engines, runtimes, images, judges, model, plane) as scheduler:
                await recover(journal, scheduler, say)
                with rare_collections(), spawning_at_once():  # its first round holds the loop for 0.1 s, so the loop is looked at from then on
                    async with open_lag() as lag, open_captures(config, journal, scheduler, served, recordings) as captures:
                        node = Node(
                            config=config,
                            journal=journal,
                            engines=engines,
                            runtimes=runtimes,
                            images=images,
                            model=model,
                            scheduler=scheduler,
                            judges=judges,
                            lag=lag,
                            captures=captures,
                            callbacks=callbacks,
                            weights=weights,
                            engine_control=EngineControl(weights=weights, keeps=config.memory_saver == "backup"),
                        )
                        yield node
                        await node.stop(cancel=True)  # not in a finally: who leaves by force gets `interrupted` trajectories at the next start


@contextmanager
def spawning_at_once() -> Iterator[None]:
    """Programs are started with fork, not vfork, Python's documented choice (`subprocess._USE_VFORK`).

    With vfork the whole process, its threads too, stands still until the child runs its program, and on a busy machine a child waits for a CPU:
    64 sessions on two cores made the loop 104 ms late in the 99th percentile, 42 ms with fork, which copies page tables for 2 ms instead.
    """
    usual = vars(subprocess)["_USE_VFORK"]
    vars(subprocess)["_USE_VFORK"] = False
    try:
        yield
    finally:
        vars(subprocess)["_USE_VFORK"] = usual


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
    config: NodeConfig, journal: Journal, engines: Engines, runtimes: Runtimes, images: Images, judges: Judges, model: LoadedModel, plane: ModelPlane
) -> AsyncIterator[Scheduler]:
    def serve_door(session_id: str, door: socket) -> AbstractAsyncContextManager[object]:
        return open_server(plane.app_for(session_id), door)

    house = House(
        runtimes=runtimes,
        stages=_stages(config),
        serve_door=serve_door,
        publish=journal.publish,
        context_length=engines.context_length,
        log_dir=_sessions_dir(config),
        ensure_image=images.ensure,
        drops_thinking=model.template.drops_thinking_before,
        judge=judges,
        judges=judges.names,
        allowed_imports=config.import_paths,
        carried_limit=config.carried_mb << 20,
        unrouted=None if engines.routes else why_unrouted(config, model),
        volumes=config.volumes,
        egress=NodeEgress(names=config.egress, networks=config.egress_networks),
        versions=lambda: engines.versions,
    )
    async with open_background(_pressure_watch(config, house.stages, engines, runtimes).run), trio.open_nursery() as nursery:
        yield Scheduler(
            nursery=nursery,
            house=house,
            lives=plane.sessions,
            record=journal,
            who=Who(node=config.node_id, model=model.name),
            want=runtimes.want,
            warm=config.warm,
        )


def _sessions_dir(config: NodeConfig) -> Path:
    """Logs and artifacts of sessions."""
    return Path(config.state_dir) / "sessions"


def _recordings(config: NodeConfig) -> Recordings | None:
    return None if config.record_requests is None else Recordings(Path(config.record_requests))


def _served(engines: Engines, model: LoadedModel) -> Model:
    return Model(
        engine=engines,
        template=model.template,
        tokenizer=model.tokenizer,
        family=model.family,
        context_length=engines.context_length,
        id=model.name,
        now=time.time,
    )


def _pressure_watch(config: NodeConfig, stages: Stages, engines: Engines, runtimes: Runtimes) -> PressureWatch:
    places = (runtimes.settings.state_dir, Path(config.state_dir))
    bounds = Bounds(
        init=config.init_limit,
        run=config.run_limit,
        post=config.post_limit,
        memory_mb=config.memory_reserve_mb,
        disk_mb=config.disk_reserve_mb,
    )
    return PressureWatch(
        stages=stages,
        bounds=bounds,
        ready_limit=config.ready_limit,
        engines=engines.statistics,
        read=partial(read_machine, places),
        hold=runtimes.hold,
    )


def serve_control_plane(node: Node) -> AbstractAsyncContextManager[Address]:
    """The trainer's socket of a node, for as long as the block; gives its address."""
    also = (
        *WeightsRoutes(weights=node.weights, control=node.engine_control).rows(),
        *CaptureRoutes(captures=node.captures).rows(),
        *polar_face(node).rows(),
    )
    app = create_app(node, token=node.config.token, journal=node.journal, sessions_dir=_sessions_dir(node.config), also=tuple(also))
    return open_server(app, Address(host=node.config.host, port=node.config.port))


def _stages(config: NodeConfig) -> Stages:
    return Stages(
        live=Gate(limit=config.run_limit + config.ready_limit),
        init=Gate(limit=config.init_limit),
        run=Gate(limit=config.run_limit),
        post=Gate(limit=config.post_limit),
    )
