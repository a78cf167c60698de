"""`polarnode fleet`: starts nodes that share a log, shows them and drains one.

Invariant: this module only shows what a node and its log say and decides nothing, and nodes that run do not
need this command.
"""

import os
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from polarnode.cli.options import log_dsn
from polarnode.cli.output import open_console
from polarnode.cli.progress import Steps
from polarnode.cli.stopping import StopRequest, requested, stop_on_signals
from polarnode.client.pins import node_address
from polarnode.core.codec.json import dump_json
from polarnode.core.errors import ConfigError, boundary
from polarnode.fleet.local_nodes import local_nodes
from polarnode.fleet.ray_launcher import RayNodes, check_ray, ray_nodes, stop_nodes
from polarnode.fleet.ray_machines import RayOrder
from polarnode.http.link import Link
from polarnode.journal.log.port import LogUnavailable, NodeRow
from polarnode.journal.log.postgres import membership
from polarnode.journal.log.postgres.connection import Database, LogConnection, check_dsn
from polarnode.journal.log.postgres.migrations import applied_migrations, read_migrations
from polarnode.support.bounded import make_private_folder, open_node_log

LOOK_S: Final = 1.0  # between looks at nodes that are starting
# The start of the nodes is shown for this long. A model of hundreds of gigabytes is read in minutes; after
# that `polarnode fleet status` shows more.
SHOWN_S: Final = 900.0
COLUMNS: Final = ("node", "state", "sessions", "weights", "labels")
COLOURS: Final = {"alive": "green", "lost": "red", "replaced": "yellow", "left": "dim"}


def required_dsn(given: str | None) -> str:
    """The DSN of the log that the nodes are to share. Raises ConfigError."""
    dsn = os.environ.get("POLARNODE_LOG") if given is None else log_dsn(given)
    if not dsn:
        raise ConfigError("name the PostgreSQL that the nodes share: give --log, or set POLARNODE_LOG")
    return check_dsn(dsn)


def _open_state(state: Path) -> None:
    with boundary(ConfigError, f"--state-dir {state} cannot be written"):
        make_private_folder(state)
        open_node_log(state)


# ── nodes of this machine ─────────────────────────────────────────────────────


def serve_local(count: int, state: Path, options: tuple[str, ...], dsn: str, token: str | None) -> int:
    """Keep a number of nodes running on this machine until SIGINT or SIGTERM; returns the exit code."""
    _open_state(state)
    trio.run(_serve_local, count, state, options, dsn, token, open_console())
    return 0


def local_prefix(state: Path) -> str:
    """The prefix of the names of local nodes. It differs by machine and folder, because nodes of others may
    share the log. The same folder gives the same names again, because it holds the journals of these nodes.
    """
    return f"{socket.gethostname()}-{sha256(os.fsencode(state.resolve())).hexdigest()[:4]}"


async def _serve_local(
    count: int, state: Path, options: tuple[str, ...], dsn: str, token: str | None, console: Console
) -> None:
    prefix = local_prefix(state)
    environment = {
        **os.environ,
        "POLARNODE_LOG": dsn,
        **({} if token is None else {"POLARNODE_TOKEN": token}),
    }
    async with (
        local_nodes(count, state / "nodes", options, environment, prefix=prefix) as nodes,
        trio.open_nursery() as nursery,
    ):
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        for name, url in nodes.items():
            console.print(f"· {name} starts at {url}", style="dim")
        console.print(f"· their logs: {state / 'nodes'}/NAME.log; Ctrl-C ends the nodes", style="dim")
        console.print(f"export POLARNODE_URL='{next(iter(nodes.values()))}'", markup=False, highlight=False)
        nursery.start_soon(show_joining, dsn, frozenset(nodes), console, state)
        await requested(stop)
        nursery.cancel_scope.cancel()


async def show_joining(dsn: str, names: frozenset[str], console: Console, state: Path) -> None:
    """Show how many of these nodes are in the log, until all are, or for SHOWN_S seconds."""
    steps, log = Steps(_dim_printer(console), console, f"logs: {state}"), LogConnection(dsn, "fleet")
    try:
        with trio.move_on_after(SHOWN_S):
            shown = ""
            while True:
                text = "waiting for the log"
                try:
                    rows = await log.run(_nodes)
                    alive = len(names & {row.facts.name for row in rows})
                    text = f"{alive} of {len(names)} nodes take sessions"
                    if alive == len(names):
                        steps.report(text)
                        return
                except LogUnavailable as error:
                    text = f"waiting for the log: {error.reason}"
                if text != shown:
                    steps.report(text)
                    shown = text
                await trio.sleep(LOOK_S)
    finally:
        steps.end()
        log.close_now()


def _nodes(db: Database) -> tuple[NodeRow, ...]:
    """The nodes that are alive; none before the first node has made the tables."""
    return membership.nodes(db, every=False) if len(applied_migrations(db)) == len(read_migrations()) else ()


def _dim_printer(console: Console) -> Any:
    return lambda text: console.print(f"· {text}", style="dim")


# ── nodes of a Ray cluster ────────────────────────────────────────────────────


def serve_ray(
    address: str,
    gpus: int,
    folder: str,
    options: tuple[str, ...],
    *,
    dsn: str,
    token: str | None,
    state: Path,
) -> int:
    """Keep the nodes of a Ray cluster running until SIGINT or SIGTERM, after which they still run. Returns
    the exit code.
    """
    check_ray()
    _open_state(state)
    order = RayOrder(
        address=address, gpus_per_node=gpus, folder=folder, options=options, token=token, log=dsn
    )
    trio.run(_serve_ray, order, state, open_console())
    return 0


async def _serve_ray(order: RayOrder, state: Path, console: Console) -> None:
    steps = Steps(_dim_printer(console), console, f"logs: {state}")
    async with trio.open_nursery() as nursery:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        nursery.start_soon(steps.show)
        steps.report(f"asking Ray at {order.address} for its machines")
        async with ray_nodes(order, state) as nodes, trio.open_nursery() as looking:
            console.print("· nodes go on when this command ends; --stop ends them", style="dim")
            looking.start_soon(show_machines, nodes, steps, console)
            await requested(stop)
            nursery.cancel_scope.cancel()


async def show_machines(nodes: RayNodes, steps: Steps, console: Console) -> None:
    """Show, whenever it changes, which machines have a node that serves, and why others have none."""
    urls, problems = dict[str, str](), dict[str, str]()
    while True:
        if nodes.urls != urls:
            if not urls and nodes.urls:
                url = await pinned_url(nodes.order.log, nodes.urls[min(nodes.urls)])
                console.print(f"export POLARNODE_URL='{url}'", markup=False, highlight=False, soft_wrap=True)
            urls = dict(nodes.urls)
            steps.report(f"{len(urls)} nodes serve: {', '.join(sorted(urls))}")
            steps.end()
        for name, problem in nodes.problems.items():
            if problems.get(name) != problem:
                console.print(f"· {name}: {problem}", style="dim", markup=False)
        problems = dict(nodes.problems)
        await trio.sleep(LOOK_S)


async def pinned_url(dsn: str, url: str) -> str:
    """The address of a node, with the digest of its certificate if the log has it."""
    log = LogConnection(dsn, "fleet")
    try:
        rows = await log.run(_nodes)
    except LogUnavailable:
        return url
    finally:
        log.close_now()
    found = next((row.facts.certificate for row in rows if row.facts.url == url), "")
    return f"{url}#{found}" if found else url


def stop_ray(address: str, state: Path) -> int:
    """End the nodes of a Ray cluster; returns the exit code."""
    check_ray()
    _open_state(state)
    ended = trio.run(stop_nodes, RayOrder(address=address, gpus_per_node=0, folder=""), state)
    open_console().print(f"{ended} nodes of the Ray cluster were ended")
    return 0


# ── looking at nodes ──────────────────────────────────────────────────────────


def status(url: str, token: str | None, *, as_json: bool) -> None:
    """Print the nodes that share the log of the node at `url`. Raises ConfigError if that node shares no
    log.
    """
    answer: dict[str, Any] = trio.run(_asked, url, token, "GET", "/v1/status", None)
    if "nodes" not in answer:
        raise ConfigError(f"{url} is a node alone: nodes that share a log are started with --log")
    nodes = answer["nodes"]
    if nodes is None:
        raise ConfigError(f"{url} cannot reach its log now, so it does not know the other nodes: try again")
    if as_json:
        print(dump_json({"nodes": nodes}).decode())
        return
    open_console().print(nodes_table(nodes))


def nodes_table(nodes: list[dict[str, Any]]) -> Group:
    """A table of the nodes in GET /v1/status, with one row each."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name == "sessions" else "left")
    for node in nodes:
        labels = {name: value for name, value in node.get("labels", {}).items() if name != "node"}
        state = "draining" if node.get("draining") else node["state"]
        table.add_row(
            Text.assemble(node["name"], " ", (node["url"], "dim")),
            Text(state, style=COLOURS.get(state, "yellow")),
            str(node["running"]),
            (node.get("serving") or {}).get("", "") or "–",
            " ".join(f"{name}={value}" for name, value in sorted(labels.items())),
        )
    return Group(table, Text(f"{len(nodes)} nodes", style="dim"))


def drain(node: str, url: str, token: str | None, *, back: bool) -> None:
    """Drain a node, so that it takes no new sessions, or let it take sessions again. The node at `url` passes
    the request on.
    """
    trio.run(_asked, url, token, "POST", "/v1/fleet/drain", {"node": node, "draining": not back})
    open_console().print(f"{node} {'takes sessions again' if back else 'takes no new sessions'}")


async def _asked(url: str, token: str | None, method: str, path: str, value: object) -> Any:
    address, certificate = node_address(url)
    link = Link(url=address, token=token, certificate=certificate)
    try:
        return await link.call(method, path, value=value)
    finally:
        await link.close()  # noqa: ASYNC102 - bounded and shielded there
