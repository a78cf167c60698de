"""Serving until a signal: `polarnode --gpus 0-7` opens a node, `gym-agent` an agent server before a running
one.

The first SIGINT or SIGTERM ends the sessions and delivers their trajectories; the second exits at once.
"""

import logging
import os
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from socket import socket

import trio
from rich.console import Console

from polarnode.cli.output import open_console
from polarnode.cli.progress import Steps
from polarnode.cli.stopping import StopRequest, requested, stop_on_signals
from polarnode.client.asynchronous import AsyncPolarnodeClient
from polarnode.core.errors import ConfigError, boundary
from polarnode.http.asgi import BrowserGuard
from polarnode.http.server import Address, listening_socket, open_server
from polarnode.integrations.nemo_gym.app import LostPolicy, Rollouts, create_gym_app
from polarnode.integrations.nemo_gym.requests import TaskTemplate
from polarnode.node import checks
from polarnode.node.config import NodeConfig, check_hosts
from polarnode.node.joining import control_plane_url, shared_config
from polarnode.node.node import Node, control_certificate
from polarnode.node.opening import STARTING_ENGINE, WAITING_LOG, open_node
from polarnode.node.orphan import has_work, wait_orphaned
from polarnode.node.serving import serve_control_plane
from polarnode.node.starting import StartingNode
from polarnode.sources.reading import read_task_toml
from polarnode.support.bounded import make_private_folder, open_node_log
from polarnode.support.concurrency import open_background

logger = logging.getLogger(__name__)

# ── serve ─────────────────────────────────────────────────────────────────────


def serve(config: NodeConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    state = Path(config.state_dir)
    with boundary(ConfigError, f"--state-dir {state} cannot be written"):
        make_private_folder(state)
    self_signed = config.tls_cert is None
    config = shared_config(config)
    # The port is opened before the engine starts, so that a taken port is reported now, and requests are
    # answered from now on.
    with listening_socket(Address(host=config.host, port=config.port)) as listener:
        checks.refuse_unfit(config)
        with boundary(ConfigError, f"--state-dir {state} cannot be written"):
            open_node_log(state)
        process = os.getpid()
        logger.info("node %s starts: polarnode %s, process %d", config.node_id, version("polarnode"), process)
        trio.run(_serve, config, listener, open_console(), self_signed)
    logger.info("node %s has stopped", config.node_id)
    return 0


async def _serve(config: NodeConfig, listener: socket, console: Console, self_signed: bool) -> None:
    async with trio.open_nursery() as nursery:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        steps = Steps(
            lambda text: console.print(f"· {text}", style="dim"), console, f"logs: {config.state_dir}"
        )
        nursery.start_soon(steps.show)
        starting = StartingNode(listener, control_certificate(config), partial(_starting_text, steps))
        await nursery.start(starting.serve)
        async with (
            open_node(config, report=steps.report, url=control_plane_url(config, listener)) as node,
            serve_control_plane(node, starting.hand_over()) as address,
            open_background(partial(_stop_as_orphan, node, stop)),
        ):
            steps.end()
            logger.info("node %s serves model %s: it takes tasks", config.node_id, node.model.name)
            scheme = "http" if config.tls_cert is None else "https"
            url = f"{scheme}://{address.host}:{address.port}"
            if config.log is not None:
                _show_shared(config, control_plane_url(config, listener), self_signed, console)
            console.print(f"serving on {url} · model {node.model.name} · state in {config.state_dir}")
            if config.engine == "simulated":
                console.print(
                    "· the engine is simulated: every answer is random, no model is loaded",
                    style="bold yellow",
                )
            if (why := node.unready()) is not None:
                logger.warning("node %s is not ready: %s", config.node_id, why)
                console.print(f"· it is not ready: {why}", style="bold yellow", soft_wrap=True)
            console.print(f"· its page is {url}/ui/", style="dim", soft_wrap=True)
            # With a shared log, the printed export sets the address and its certificate.
            named = f" --url {url}" if config.log is None else ""
            console.print(
                f"· submit tasks with: polarnode submit task.toml{named}; Ctrl-C stops", style="dim"
            )
            await requested(stop)
            await _end(node, console)
        nursery.cancel_scope.cancel()


def _show_shared(config: NodeConfig, url: str, self_signed: bool, console: Console) -> None:
    """Print the address to give to trainers; it may be that of any node of the log."""
    certificate = control_certificate(config) if self_signed else None
    pinned = url if certificate is None else f"{url}#{certificate.digest}"
    console.print(f"· node {config.node_id} shares a log with others; for trainers:", style="dim")
    console.print(f"export POLARNODE_URL='{pinned}'", soft_wrap=True, markup=False, highlight=False)


def _starting_text(steps: Steps) -> str:
    """What a starting node answers to requests. It is not the text of the step, because that names
    folders.
    """
    step, seconds = steps.now()
    what = "the engine starts" if step == STARTING_ENGINE else "the node starts"
    if step.startswith(WAITING_LOG):
        what = "the log is away, and the node waits for it"
    return f"{what}, {seconds:.0f} s so far"


async def _stop_as_orphan(node: Node, stop: StopRequest, ready: trio.Event) -> None:
    """Stop a node that has a lifeline once no process holds the lifeline and nobody needs the node any
    more.
    """
    config = node.config
    ready.set()
    if config.lifeline is None:
        return

    async def needed() -> bool:
        live = node.scheduler.statistics().live
        return await has_work(node.log, live, orphan_s=config.orphan_s, now=time.time())

    await wait_orphaned(Path(config.lifeline), config.orphan_s, None if config.log is None else needed)
    logger.warning("nobody has held or needed this node for %g s: it ends", config.orphan_s)
    stop()


async def _end(node: Node, console: Console) -> None:
    console.print("· stopping: sessions are ended and saved; press Ctrl-C again to exit at once", style="dim")
    live = node.scheduler.statistics().live
    logger.info("node %s stops: %d sessions are ended and saved", node.node_id, live)
    await node.stop(cancel=True)


def serve_agent(
    template: Path,
    *,
    url: str,
    token: str | None,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...] = (),
    lost: LostPolicy = "fail",
) -> None:
    """Serve until SIGINT or SIGTERM. Raises Refused if the template is not a task, and Unreachable if the
    node does not answer.
    """
    check_hosts(allowed_hosts)
    parsed = TaskTemplate(value=read_task_toml(template))
    trio.run(
        _serve_agent,
        parsed,
        AsyncPolarnodeClient(url, token=token),
        Address(host=host, port=port),
        BrowserGuard(bound=host.lower(), allowed=allowed_hosts),
        lost,
        open_console(),
    )


async def _serve_agent(
    template: TaskTemplate,
    client: AsyncPolarnodeClient,
    where: Address,
    guard: BrowserGuard,
    lost: LostPolicy,
    console: Console,
) -> None:
    async with trio.open_nursery() as nursery, client:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        rollouts = Rollouts(client)
        await nursery.start(rollouts.follow)
        gym_app = create_gym_app(rollouts, template, guard=guard, lost=lost)
        async with open_server(gym_app, where) as address:
            console.print(
                f"serving NeMo Gym's /run on http://{address.host}:{address.port} · node {client.base_url}"
            )
            await trio.sleep_forever()
