"""The commands of `polarnode fleet` and their options.

Keep heavy imports inside the commands, as in `main`.
"""

import shlex
import sys
from pathlib import Path

import click

from polarnode.cli.options import folder, log_option, node_address


@click.group(invoke_without_command=True, short_help="Start nodes that share a log, and look at them.")
@click.option(
    "--local",
    type=click.IntRange(0, 64),
    default=0,
    metavar="N",
    help="Start N nodes on this machine; --engine, --cpu, --model and --config are theirs.",
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
    help="More options of the nodes, such as '--tp 2 --run-limit 32'.",
)
@click.option(
    "--node-state-dir",
    default="~/.polarnode-ray",
    show_default=True,
    help="With --ray: folder for the nodes' state, on a disk of each machine.",
)
@click.option("--stop", is_flag=True, help="With --ray: end the nodes and their actors, and exit.")
@click.option("--engine", help="Engine of the nodes: sglang, simulated, none, or addresses of servers.")
@click.option("--cpu", is_flag=True, help="Let the nodes run the model on the CPU.")
@click.option("--model", help="Checkpoint folder of the nodes.")
@click.option("--config", "file", help="TOML file with settings of the nodes.")
@click.option(
    "--state-dir",
    type=folder(),
    default=Path(".polarnode-fleet"),
    show_default=True,
    help="Folder for this command's log, and with --local for the nodes.",
)
@log_option
@click.option("--token", envvar="POLARNODE_TOKEN", show_envvar=True, help="Bearer token of the nodes.")
@click.pass_context
def fleet(
    ctx: click.Context,
    /,
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
    state_dir: Path,
    log: str | None,
    token: str | None,
) -> None:
    """Start nodes that share a log. A trainer gives the address of any of them, and has all.

    \b
    polarnode fleet --local 3 --engine simulated --log @log.dsn
    polarnode fleet --ray auto --gpus-per-node 8 --model /models/Qwen3-8B --log @log.dsn
    polarnode fleet --ray auto --stop
    polarnode fleet status --url http://10.0.0.5:8080
    polarnode fleet drain gpu-2

    A node needs no fleet: each `polarnode --log …` is one of it, whatever starts it: Ray, SLURM, Kubernetes,
    systemd or a person; see docs/fleet.md. Nodes that Ray started go on when this command ends.
    """
    if ctx.invoked_subcommand is not None:
        return
    from polarnode.cli import fleet_run

    given = {"--engine": engine, "--model": model, "--config": file}
    options = [part for name, value in given.items() if value is not None for part in (name, value)]
    options += ["--cpu"] * cpu + shlex.split(node_options)
    if stop and ray is None:
        raise click.UsageError("--stop ends the nodes of a Ray cluster: give its address with --ray")
    if bool(local) == (ray is not None):
        raise click.UsageError(
            "say where the nodes run: --local N or --ray auto, one of them; or start each with"
            " polarnode --log"
        )
    if stop and ray is not None:
        sys.exit(fleet_run.stop_ray(ray, state_dir))
    dsn = fleet_run.required_dsn(log)
    if ray is None:
        sys.exit(fleet_run.serve_local(local, state_dir, tuple(options), dsn, token))
    sys.exit(
        fleet_run.serve_ray(
            ray, gpus_per_node, node_state_dir, tuple(options), dsn=dsn, token=token, state=state_dir
        )
    )


@fleet.command(short_help="Show the nodes that share a log.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@node_address
def status(as_json: bool, url: str, token: str | None) -> None:
    """Show the nodes that share a log with the one at --url: state, sessions, weights, labels.

    Exit codes: 0 when they were shown; 1 when the node does not answer, or has a log of its own.
    """
    from polarnode.cli import fleet_run

    fleet_run.status(url, token, as_json=as_json)


@fleet.command(short_help="Let a node take no new sessions.")
@click.argument("node")
@click.option("--back", is_flag=True, help="Let it take sessions again.")
@node_address
def drain(node: str, back: bool, url: str, token: str | None) -> None:
    """Let NODE (its name) take no new sessions, by way of any node at --url. Its sessions end; then
    `polarnode fleet status` shows that it runs none, and it can be stopped. What waits is for the others.
    """
    from polarnode.cli import fleet_run

    fleet_run.drain(node, url, token, back=back)
