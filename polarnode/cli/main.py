"""`polarnode`: the options of a node, and the verbs. Heavy imports wait until a verb needs them, so that `--help` is instant."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from polarnode.config import NodeConfig, parse_gpus, read_config
from polarnode.conversation import Json
from polarnode.errors import PolarnodeError, Refused

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_URL = "http://127.0.0.1:8080"


class Verbs(click.Group):
    """A group whose errors are one sentence on stderr, not a traceback; a bug still shows its own."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PolarnodeError as error:
            where = f" (at {error.path})" if isinstance(error, Refused) and error.path else ""
            raise click.ClickException(f"{error}{where}") from error


def node_options(command: Command) -> Command:
    """The settings of a node that can be given as flags; all of them can stand in the file or the environment as well."""
    options = [
        click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Settings as TOML."),
        click.option("--gpus", help="GPUs to use: 0-7, 0, 0,2. One engine per GPU, or per --tp of them."),
        click.option("--cpu", is_flag=True, default=None, help="Run the engine on the CPU (for the embedded tiny model, demos and tests)."),
        click.option("--tp", type=int, help="GPUs per engine (tensor parallel). [default: 1]"),
        click.option("--model", help="Checkpoint folder. [default: the embedded polarnode-tiny]"),
        click.option("--context-length", type=int, help="Tokens a prompt and its answer may have. [default: the checkpoint's]"),
        click.option("--state-dir", help="Journal and logs of this node. [default: .polarnode]"),
        click.option("--run-limit", type=int, help="Harnesses running at once. [default: 64]"),
        click.option("--base-image", help="Public Debian image to build runtimes on. [default: one that can be had, else built here]"),
        click.option("--allow-import", "import_paths", multiple=True, help="Module prefix tasks may name code from; repeatable."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def config_of(given: Mapping[str, Any], defaults: Mapping[str, Json] | None = None) -> NodeConfig:
    """The node's config from flags, POLARNODE_* variables and the file, in that order of weight."""
    flags: dict[str, Json] = {name: value for name, value in given.items() if name not in ("config_file", "gpus", "import_paths")}
    if given.get("gpus") is not None:
        flags["gpus"] = parse_gpus(given["gpus"])
    if given.get("import_paths"):
        flags["import_paths"] = list(given["import_paths"])
    file = given.get("config_file")
    toml = file.read_text() if file is not None else None
    return read_config(toml=toml, environment=os.environ, flags={**(defaults or {}), **{k: v for k, v in flags.items() if v is not None}})


@click.group(cls=Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@node_options
@click.option("--host", help="Where trainers reach this node; anything but loopback needs POLARNODE_TOKEN. [default: 127.0.0.1]")
@click.option("--port", type=int, help="[default: 8080]")
@click.version_option(package_name="polarnode")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Serve a model to agent harnesses, record every token, and stream training sequences.

    \b
    polarnode --gpus 0-7 --model /models/Qwen3-8B     serve on eight GPUs
    polarnode --cpu                                    serve the embedded tiny model
    polarnode run --cpu task.toml                      one task, start to end, here
    polarnode submit task.toml && polarnode watch      the same on a node that serves
    polarnode doctor                                   what this machine has and lacks
    """
    if ctx.invoked_subcommand is not None:
        return
    config = config_of(given)
    if not config.cpu and not config.gpus:
        raise click.UsageError("say where the model runs: --gpus 0-7, --gpus 0, or --cpu (see polarnode --help)")
    from polarnode.cli import serve

    sys.exit(serve.serve(config))


@main.command()
@click.argument("tasks", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@node_options
@click.option("--samples", type=int, help="Sessions per task, instead of what the files say.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for trajectories.jsonl and logs. [default: out/run]")
@click.option("--expect-reward", is_flag=True, help="Exit 1 unless some session was rewarded.")
def run(tasks: tuple[Path, ...], samples: int | None, out: Path | None, expect_reward: bool, **given: Any) -> None:
    """Run TASKS (TOML or JSON) from start to end on a node of their own: live progress, a table, trajectories.jsonl.

    Exit code 0 when every session delivered its trajectory and no law of tokens was broken.
    """
    from polarnode.cli import run as running

    config = config_of(given)
    if not config.cpu and not config.gpus:
        raise click.UsageError("say where the model runs: --gpus 0 or --cpu")
    sys.exit(running.run(config, tasks, samples=samples, out=out or Path("out/run"), expect_reward=expect_reward))


def node_address(command: Command) -> Command:
    """How a verb finds a node that serves."""
    url = click.option("--url", default=DEFAULT_URL, envvar="POLARNODE_URL", show_default=True, help="The node's control plane.")
    token = click.option("--token", envvar="POLARNODE_TOKEN", help="Bearer token.")
    return url(token(command))


@main.command()
@click.argument("task", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@node_address
def submit(task: Path, url: str, token: str | None) -> None:
    """Submit TASK (TOML or JSON) to a node; prints its task id."""
    from polarnode.cli import remote

    remote.submit(task, url, token)


@main.command()
@click.option("--task", "task_id", help="Only this task; ends when it is done.")
@click.option("--consumer", help="A name whose position the node keeps; what is shown is acknowledged.")
@node_address
def watch(task_id: str | None, consumer: str | None, url: str, token: str | None) -> None:
    """Show trajectories as sessions end."""
    from polarnode.cli import remote

    remote.watch(task_id, consumer, url, token)


@main.command()
@click.option("--task", "task_id", help="Only this task.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: stdout]")
@node_address
def export(task_id: str | None, output: Path | None, url: str, token: str | None) -> None:
    """Write finished trajectories as JSONL."""
    from polarnode.cli import remote

    remote.export(task_id, output, url, token)


@main.command()
@click.argument("session")
@click.option("--from", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A trajectories.jsonl instead of a node.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Checkpoint folder to decode with.")
@node_address
def inspect(session: str, file: Path | None, model: Path | None, url: str, token: str | None) -> None:
    """Show SESSION: its turns, lineages and traces, trainable tokens coloured. A beginning of its id is enough with --from."""
    from polarnode.cli import inspection

    inspection.inspect(session, file, model, url, token)


@main.command()
@node_options
def doctor(**given: Any) -> None:
    """Say what this machine has for a node, what it lacks, and what to do about it."""
    from polarnode.cli import doctor as examining

    sys.exit(examining.examine(config_of(given)))
