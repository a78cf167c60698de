"""The commands of `polarnode fleet` and their options.

Keep heavy imports inside the commands, as in `main`.
"""

import shlex
import sys
from typing import Any

import click

from polarnode.cli.options import WRITTEN, node_address


@click.group(invoke_without_command=True, short_help="Serve many nodes as one.")
@click.option(
    "--nodes",
    multiple=True,
    metavar="URL,URL|@FILE|dns:NAME:PORT",
    help="The nodes: addresses, a file with one a line, or a DNS name; asked again every 5 s. Repeatable.",
)
@click.option(
    "--local",
    type=click.IntRange(0, 64),
    default=0,
    metavar="N",
    help="Start N nodes on this machine, to try a fleet; --engine, --cpu, --model and --config are theirs.",
)
@click.option(
    "--ray",
    metavar="auto|ADDRESS",
    help="Keep a node on each machine of this Ray cluster that has GPUs; the same options are theirs.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(0, 64),
    default=8,
    show_default=True,
    help="With --ray: GPUs of each node. 0: a node on every machine, without GPUs.",
)
@click.option(
    "--node-options",
    default="",
    metavar="OPTIONS",
    help="With --ray or --local: more options of the nodes, such as '--tp 2 --run-limit 32'.",
)
@click.option(
    "--node-state-dir",
    default="~/.polarnode-ray",
    show_default=True,
    help="With --ray: folder for the nodes' state, on a disk of each machine.",
)
@click.option("--stop", is_flag=True, help="With --ray: end the nodes and their actors, and exit.")
@click.option(
    "--engine", help="Engine of the nodes started here: sglang, simulated, or addresses of servers."
)
@click.option("--cpu", is_flag=True, help="Let the nodes started here run the model on the CPU.")
@click.option("--model", help="Checkpoint folder of the nodes started here.")
@click.option("--config", "file", help="TOML file with settings of the nodes started here.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need TLS.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: a free one.")
@click.option(
    "--join",
    is_flag=True,
    help="Let nodes join with the token that is printed; so it is off loopback without --nodes.",
)
@click.option(
    "--public-url", help="Address that nodes and trainers are given. [default: of --host and --port]"
)
@click.option("--tls-cert", help="PEM file of the front's certificate with its chain. [default: its own]")
@click.option("--tls-key", help="PEM file of its key.")
@click.option(
    "--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="Host name that is served too."
)
@click.option("--state-dir", default=".polarnode-fleet", show_default=True, help="Folder for the log.")
@click.option("--token", envvar="POLARNODE_TOKEN", show_envvar=True, help="Bearer token of trainers.")
@click.option(
    "--node-token",
    envvar="POLARNODE_NODE_TOKEN",
    show_envvar=True,
    help="Bearer token of the nodes. [default: that of trainers]",
)
@click.pass_context
def fleet(
    ctx: click.Context,
    /,
    nodes: tuple[str, ...],
    local: int,
    ray: str | None,
    gpus_per_node: int,
    node_options: str,
    node_state_dir: str,
    stop: bool,
    engine: str | None,
    cpu: bool,
    model: str | None,
    file: str | None,
    **params: Any,
) -> None:
    """Serve many nodes as one: a trainer has one address, one stream, one position.

    \b
    polarnode fleet --local 3 --engine simulated
    polarnode fleet --host 10.0.0.1
    polarnode fleet --nodes http://10.0.0.5:8080,http://10.0.0.6:8080
    polarnode fleet --ray auto --gpus-per-node 8 --model /models/Qwen3-8B
    polarnode fleet --nodes @nodes.txt --host 0.0.0.0 --tls-cert front.pem --tls-key front.key
    polarnode fleet status
    polarnode fleet drain node-2

    Nodes are started by whatever starts programs where you are: Ray, SLURM, Kubernetes, systemd; see
    docs/fleet.md. The front keeps nothing: it may be restarted, also on another machine.
    """
    if ctx.invoked_subcommand is not None:
        return
    from polarnode.cli import fleet_run
    from polarnode.core.codec.limits import is_loopback
    from polarnode.fleet.config import FleetConfig

    ctx.meta[WRITTEN] = {name: f"--{name.replace('_', '-')}" for name in params}
    given = {"--engine": engine, "--cpu": cpu, "--model": model, "--config": file}
    options = [part for name, value in given.items() if value for part in (name, value) if part is not True]
    options += shlex.split(node_options)
    urls = tuple(url.strip() for each in nodes for url in each.split(",") if url.strip())
    alone = not (urls or local or ray is not None or is_loopback(params["host"]))
    config = FleetConfig(nodes=urls, **{**params, "join": params["join"] or alone})
    order = None
    if ray is not None:
        order = fleet_run.ray_order(config, ray, gpus_per_node, node_state_dir, tuple(options))
    elif stop:
        raise click.UsageError("--stop ends the nodes of a Ray cluster: give its address with --ray")
    if stop and order is not None:
        sys.exit(fleet_run.stop_ray(config, order))
    sys.exit(fleet_run.serve(config, local=local, options=tuple(options), order=order))


@fleet.command(short_help="Show the nodes of a fleet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@node_address
def status(as_json: bool, url: str, token: str | None) -> None:
    """Show the nodes of a fleet: state, sessions, weights, copies, results that wait for a second home."""
    from polarnode.cli import fleet_run

    fleet_run.status(url, token, as_json=as_json)


@fleet.command(short_help="Let a node take no new tasks.")
@click.argument("node")
@click.option("--back", is_flag=True, help="Let it take tasks again.")
@node_address
def drain(node: str, back: bool, url: str, token: str | None) -> None:
    """Let NODE (its name or address) take no new tasks. Its sessions end and are read to the last event; then
    `polarnode fleet status` shows it as left, and it can be stopped.
    """
    from polarnode.cli import fleet_run

    fleet_run.drain(node, url, token, back=back)
