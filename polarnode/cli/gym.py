"""The verb `gym-agent`. The rule for whoever edits it: what it serves is imported when it is called, so that every other verb starts as quickly."""

from pathlib import Path

import click

from polarnode.cli.options import node_address, task_file


@click.command(short_help="Serve NeMo Gym's /run with the harnesses of a node.")
@click.option("--task-template", "template", required=True, type=task_file(), help="TOML of a task, with {{input}} and {{row.field}} in it.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where Gym finds this agent server.")
@click.option("--port", type=int, default=0, help="0 takes a free one.  [default: 0]")
@node_address
def gym_agent(template: Path, host: str, port: int, url: str, token: str | None) -> None:
    """Serve an agent server of NeMo Gym: each /run is a task on a node that serves, made of a template and the row of Gym's dataset.

    \b
    polarnode gym-agent --task-template task.toml --port 11000
    """
    from polarnode.cli import gym_serving

    gym_serving.serve_agent(template, url=url, token=token, host=host, port=port)
