"""`polarnode fleet`: the front of many nodes, its table, and draining.

Invariant: what a user sees here is what GET /v1/status of the front says; nothing is decided here.
"""

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trio
from attrs import evolve
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from polarnode.cli.output import open_console
from polarnode.cli.progress import Steps
from polarnode.cli.stopping import StopRequest, requested, stop_on_signals
from polarnode.client.pins import node_address
from polarnode.core.codec.json import dump_json
from polarnode.core.errors import ConfigError, boundary
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.front import Front
from polarnode.fleet.join_token import JoinToken
from polarnode.fleet.joining import joinable
from polarnode.fleet.members import MemberState
from polarnode.fleet.ray_launcher import check_ray, ray_nodes, stop_nodes
from polarnode.fleet.ray_machines import RayOrder
from polarnode.fleet.serving import local_nodes, serve_front
from polarnode.http.link import Link
from polarnode.http.server import Address, Certificate, listening_socket
from polarnode.support.bounded import open_node_log, private_folder, private_opener

LOOK_S = 0.5  # between looks at the nodes that start
SHOWN_S = (
    900.0  # a model of hundreds of gigabytes is read in minutes; then `polarnode fleet status` shows more
)
COLUMNS = (
    *("node", "model", "state", "for", "sessions", "slots", "s/session", "weights", "copies", "held"),
    "lost, re-run",  # places of it that other nodes ran again
)
LEFT = ("node", "model", "state", "weights")
COLOURS: dict[MemberState, str] = {"up": "green", "gone": "red", "suspect": "yellow", "stale": "yellow"}


def ray_order(
    config: FleetConfig, address: str, gpus: int, folder: str, options: tuple[str, ...]
) -> RayOrder:
    """What is to be kept on a Ray cluster. Raises ConfigError where Ray is not installed."""
    check_ray()
    token = config.node_token or config.token
    return RayOrder(address=address, gpus_per_node=gpus, folder=folder, options=options, token=token)


def stop_ray(config: FleetConfig, order: RayOrder) -> int:
    """End the nodes of a Ray cluster; returns the exit code."""
    state = Path(config.state_dir)
    with boundary(ConfigError, f"--state-dir {state} cannot be written"):
        private_folder(state)
    ended = trio.run(stop_nodes, order, state)
    open_console().print(f"{ended} nodes of the Ray cluster were ended")
    return 0


def serve(config: FleetConfig, *, local: int, options: tuple[str, ...], order: RayOrder | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. `local` nodes of this machine are started with
    `options`, those of a Ray cluster by `order`.
    """
    state = Path(config.state_dir)
    if config.join:
        with boundary(ConfigError, f"--state-dir {state} cannot be written"):
            private_folder(state)
        config = joinable(config)
    if not local:
        evolve(config, nodes=config.nodes or (("@ray",) if order else ())).check()
    listening_socket(Address(host=config.host, port=config.port)).close()
    with boundary(ConfigError, f"--state-dir {state} cannot be written"):
        private_folder(state)
        open_node_log(state)
    trio.run(_serve, config, local, options, order, open_console())
    return 0


async def _serve(
    config: FleetConfig, local: int, options: tuple[str, ...], order: RayOrder | None, console: Console
) -> None:
    def report(text: str) -> None:
        console.print(f"· {text}", style="dim")

    steps = Steps(report, console, f"logs: {config.state_dir}")
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        nursery.start_soon(steps.show)
        if local:
            folder = Path(config.state_dir) / "nodes"
            nodes = await stack.enter_async_context(local_nodes(local, folder, options, os.environ))
            console.print(f"· {local} nodes start on this machine: {', '.join(nodes)}", style="dim")
            config = evolve(config, nodes=(*config.nodes, *nodes)).check()
        if order is not None:
            steps.report(f"asking Ray at {order.address} for its machines")
            ray = await stack.enter_async_context(ray_nodes(order, Path(config.state_dir), steps.report))
            config = evolve(config, nodes=(*config.nodes, ray.entry))
            report(f"nodes of the Ray cluster are listed in {ray.file}; they go on when the front stops")
        front, address = await stack.enter_async_context(serve_front(config))
        scheme = "http" if config.tls_cert is None else "https"
        url = f"{scheme}://{address.host}:{address.port}"
        console.print(f"fleet on {url} · {len(config.nodes)} nodes or lists of nodes")
        if config.join:
            await trio.to_thread.run_sync(_print_join, config, config.public_url or url, console)
        console.print(f"· polarnode fleet status --url {url} shows them; Ctrl-C stops the front", style="dim")
        if config.nodes:
            nursery.start_soon(show_up, front, steps, console)
        await requested(stop)
        nursery.cancel_scope.cancel()


async def show_up(front: Front, steps: Steps, console: Console) -> None:
    """Show how many nodes are up, and for how long the others are waited for, until all are, or for
    SHOWN_S.
    """
    shown = (-1, 0)
    with trio.move_on_after(SHOWN_S):
        while not shown[1] or shown[0] < shown[1]:
            members = front.roster.members
            now = (len(front.roster.in_state("up", "draining", "left")), len(members))
            if now != shown and members:
                steps.report(f"{now[0]} of {now[1]} nodes are up")
                shown = now
            await trio.sleep(LOOK_S)
    steps.end()
    for each in front.roster.members.values():
        if each.state not in ("up", "draining", "left"):
            console.print(
                f"· {each.name} is {each.state}: {each.problem or 'it has not answered'}", style="dim"
            )


def _print_join(config: FleetConfig, url: str, console: Console) -> None:
    """Print what a node and a trainer are given. The line is one, however wide it is, to be copied."""
    digest = ""
    if config.tls_cert is not None and config.tls_key is not None:
        digest = Certificate(config.tls_cert, config.tls_key, settings="tls").digest
    state, token = Path(config.state_dir), config.token or ""
    text = JoinToken(url=url.rstrip("/"), certificate=digest, token=token).text
    with (
        boundary(ConfigError, f"--state-dir {state} cannot be written"),
        open(state / "join.token", "w", opener=private_opener) as file,
    ):
        file.write(text + "\n")
    pinned = f"{url}#{digest}" if digest else url
    for what, line in (
        (
            "on each GPU host (a secret; also --join @FILE, with",
            f"POLARNODE_JOIN={text} polarnode --gpus 0-7 --model …",
        ),
        ("for trainers and polarnode's commands, with POLARNODE_TOKEN:", f"export POLARNODE_URL='{pinned}'"),
    ):
        end = f" {state / 'join.token'}):" if what.endswith("with") else ""
        console.print(f"· {what}{end}", style="dim", soft_wrap=True)
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def status(url: str, token: str | None, *, as_json: bool) -> None:
    """Print the nodes of a fleet."""
    found = _status(url, token)
    if as_json:
        print(dump_json(found).decode())
        return
    open_console().print(nodes_of(found))


def _status(url: str, token: str | None) -> dict[str, Any]:
    """GET /v1/status of a front. ConfigError where a node answers: it has some of a front's routes, and would
    drain itself.
    """
    found: dict[str, Any] = trio.run(_asked, url, token, "GET", "/v1/status", None)
    if "nodes" not in found:
        raise ConfigError(f"{url} is a node, not a fleet: give the address of its front")
    return found


def nodes_of(found: dict[str, Any]) -> Group:
    """GET /v1/status of a front as a headline and a table of its nodes."""
    return Group(_headline(found), _table(found["nodes"]))


def _headline(found: dict[str, Any]) -> str:
    front, scheduler = found["front"], found["scheduler"]
    office = f"in office, term {front['term']}" if front["in_office"] else "not in office"
    versions = ", ".join(found["weights"]["versions"]) or "none"
    return (
        f"front {front['id']} {office} · {scheduler['live']} sessions on {scheduler['slots']} slots ·"
        f" queue {scheduler['queue_seconds']:g} s · weights {versions}"
    )


def _table(nodes: list[dict[str, Any]]) -> Group:
    """The nodes, and below them why some do not answer."""
    problems: list[Text] = []
    table = Table(box=None, header_style="dim", pad_edge=False)
    several = len({node["report"].get("model") for node in nodes if node["report"]}) > 1
    for name in COLUMNS if several else [each for each in COLUMNS if each != "model"]:
        table.add_column(name, justify="left" if name in LEFT else "right")
    for node in nodes:
        report = node["report"]
        load = report.get("load", {})
        colour = COLOURS.get(node["state"], "default")
        table.add_row(
            Text.assemble(node["name"], " ", (node["url"], "dim")),
            *([report.get("model") or "–"] if several else []),
            Text(node["state"], style=colour),
            f"{node['seconds']:.0f} s",
            str(load.get("live", "–")),
            str(load.get("slots", "–")),
            f"{load.get('session_s', 0):.0f}",
            report.get("version") or "–",
            str(node["copies"]),
            str(report.get("held", "–")),
            str(node["run_again"]),
        )
        if node["problem"] and node["state"] != "up":
            problems.append(Text(f"{node['name']}: {node['problem']}", style="dim"))
    return Group(table, *problems)


def drain(node: str, url: str, token: str | None, *, back: bool) -> None:
    """Let a node take no new tasks, or take some again."""
    _status(url, token)
    body = {"node": node, "draining": not back}
    found = trio.run(_asked, url, token, "POST", "/v1/fleet/drain", body)
    open_console().print(f"{found['name']} {'takes tasks again' if back else 'takes no new tasks'}")


async def _asked(url: str, token: str | None, method: str, path: str, value: object) -> Any:
    address, certificate = node_address(url)
    link = Link(url=address, token=token, certificate=certificate)
    try:
        return await link.call(method, path, value=value)
    finally:
        await link.close()  # noqa: ASYNC102 - bounded and shielded there
