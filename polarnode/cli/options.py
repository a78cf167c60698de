"""The options several verbs share, and the node's config as they, the environment and the file say it.

What went wrong, for the person at the terminal: expected faults as sentences, a leaving by force as such, and
a bug as it is.

Nurseries hand errors on in groups, so a fault that is one sentence arrives as a tree. The rule for whoever
edits it: a tree that holds anything but what this house raises on purpose is a bug, and its traceback is the
report.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.exceptions import Exit

from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, PolarnodeError, Refused, boundary
from polarnode.node.config import NodeConfig, parse_gpus, read_config
from polarnode.sources.values import KINDS, Overrides

# ── options ────────────────────────────────────────────────────────────

if TYPE_CHECKING:
    from polarnode.cli.sources import Sources

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_URL = "http://127.0.0.1:8080"
SAMPLES = click.IntRange(min=1, max=4096)  # the task's own law (wire/laws.py)
SOURCE_OPTIONS = ("kind", "harness", "samples", "over", "only", "limit", "split", "image_template")
NOT_SETTINGS = ("config_file", "gpus", "import_paths")  # said in another form than the config's own


def task_file() -> click.Path:
    """A file that is there."""
    return click.Path(exists=True, dir_okay=False, path_type=Path)


def source_path() -> click.Path:
    """A file or a folder that is there."""
    return click.Path(exists=True, path_type=Path)


def node_options(command: Command) -> Command:
    """The settings of a node that can be given as flags; all of them can stand in the file or the environment
    as well.
    """
    options = [
        click.option(
            "--config", "config_file", type=task_file(), help="Settings as TOML; docs/api.md lists them all."
        ),
        click.option("--gpus", help="GPUs to use: 0-7, 0, 0,2. One engine per GPU, or per --tp of them."),
        click.option(
            "--cpu",
            is_flag=True,
            default=None,
            help="Run the engine on the CPU (for the embedded tiny model, demos and tests).",
        ),
        click.option(
            "--engine",
            type=click.Choice(["sglang", "simulated"]),
            help=(
                "simulated: RANDOM answers, to size a node for GPUs that need not be there. [default: sglang]"
            ),
        ),
        click.option("--tp", type=int, help="GPUs per engine (tensor parallel). [default: 1]"),
        click.option("--model", help="Checkpoint folder. [default: the embedded polarnode-tiny]"),
        click.option(
            "--context-length",
            type=int,
            help="Tokens a prompt and its answer may have. [default: the checkpoint's]",
        ),
        click.option(
            "--routed-experts",
            is_flag=True,
            default=None,
            help="Remember which experts read each token, for tasks that carry them.",
        ),
        click.option("--run-limit", type=int, help="Harnesses running at once. [default: 64]"),
        click.option(
            "--record-requests",
            metavar="FOLDER",
            help="Write every request of a harness as it came, for polarnode replay.",
        ),
        click.option(
            "--base-image",
            help="Public Debian image to build runtimes on. [default: one that can be had, else built here]",
        ),
        click.option(
            "--allow-import",
            "import_paths",
            multiple=True,
            help="Module prefix tasks may name code from; repeatable.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def source_options(command: Command) -> Command:
    """What the verbs that read tasks lay over each of them."""
    options = [
        click.option(
            "--kind", type=click.Choice(KINDS), help="What the sources are, where their names do not say it."
        ),
        click.option(
            "--harness", help="Harness to run each task with, such as pi; needed where a source names none."
        ),
        click.option("--samples", type=SAMPLES, help="Sessions per task, instead of what the source says."),
        click.option(
            "--with",
            "over",
            type=task_file(),
            help="TOML with a part of a task (budgets, runtime, sampling), laid over each.",
        ),
        click.option("--only", metavar="PATTERN", help="Only tasks of such a name, as in django__*."),
        click.option("--limit", type=click.IntRange(min=1), help="At most so many tasks of each source."),
        click.option("--split", help="Which split of a dataset that has several."),
        click.option(
            "--image-template",
            help="Image of a dataset's rows, such as 'mine/{id}:latest'; docs/tasks.md lists the names.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def take_sources(paths: tuple[Path, ...], given: dict[str, Any]) -> "Sources":
    """The sources a verb was given; their options are taken out of `given`, whose rest is the node's."""
    from polarnode.cli.sources import Sources
    from polarnode.sources.reading import task_value

    said = {name: given.pop(name, None) for name in SOURCE_OPTIONS}
    over = said.pop("over")
    kind = said.pop("kind")
    return Sources(
        paths=paths, kind=kind, overrides=Overrides(over={} if over is None else task_value(over), **said)
    )


def export_options(command: Command) -> Command:
    """What of a node is exported, and in which shape: the parameters of GET /v1/export."""
    options = [
        click.option("--task", "task_id", help="Only this task."),
        click.option("--group", "group_id", help="Only this group."),
        click.option(
            "--outcome",
            help="Only sessions that ended so: completed, timeout, failed, error, cancelled or interrupted.",
        ),
        click.option("--min-reward", type=float, help="Only sessions with this reward or more."),
        click.option(
            "--turns",
            type=click.Choice(["table", "full"]),
            default="table",
            show_default=True,
            help="full: each turn's own tokens as well.",
        ),
        click.option(
            "--format",
            help="A trainer's: verl, slime, trl …, a line each session; or parquet, of the rows' tokens.",
        ),
        click.option(
            "--kind", type=click.Choice(["trajectories", "sft"]), help="sft: conversations, a line each."
        ),
        click.option(
            "--output",
            "-o",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File to write. [default: stdout]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def node_address(command: Command) -> Command:
    """How a verb finds a node that serves."""
    url = click.option(
        "--url",
        default=DEFAULT_URL,
        envvar="POLARNODE_URL",
        show_default=True,
        show_envvar=True,
        help="The node's control plane.",
    )
    token = click.option("--token", envvar="POLARNODE_TOKEN", show_envvar=True, help="Bearer token.")
    return url(token(command))


def given_settings(ctx: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's settings over those said before the verb: `polarnode --cpu run task.toml` means what it looks
    like.
    """
    before = ctx.parent
    said = (
        {}
        if before is None
        else {name: value for name, value in before.params.items() if _was_given(before, name)}
    )
    return {**said, **{name: value for name, value in given.items() if value not in (None, ())}}


def _was_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def config_of(given: Mapping[str, Any]) -> NodeConfig:
    """The node's config from flags, POLARNODE_* variables and the file, in that order of weight."""
    flags: dict[str, Json] = {
        name: value for name, value in given.items() if name not in NOT_SETTINGS and value is not None
    }
    if given.get("gpus") is not None:
        # each of the two takes back the other of a weaker source
        flags = {"cpu": False, **flags, "gpus": parse_gpus(given["gpus"])}
    elif given.get("cpu"):
        flags["gpus"] = []
    if given.get("import_paths"):
        flags["import_paths"] = list(given["import_paths"])
    return read_config(toml=_toml(given.get("config_file")), environment=os.environ, flags=flags)


def _toml(file: Path | None) -> str | None:
    with boundary(ConfigError, f"{file} can not be read"):
        return None if file is None else file.read_text()


def node_serving(given: Mapping[str, Any], *, hint: str) -> NodeConfig:
    """The config of a node that is to start: it must say where the model runs."""
    config = config_of(given)
    if not config.cpu and not config.gpus and config.engine != "simulated":
        raise click.UsageError(f"say where the model runs: --gpus 0-7, --gpus 0, or --cpu, such as: {hint}")
    return config


# ── faults ────────────────────────────────────────────────────────────

LEFT_BY_FORCE = 130  # what a shell says of a program that SIGINT ended


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors a group holds, however deep; a plain error is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def is_bug(error: BaseException) -> bool:
    """Whether something is in it that nobody raised on purpose."""
    return any(not isinstance(leaf, PolarnodeError | KeyboardInterrupt) for leaf in leaves(error))


def left_by_force(error: BaseException) -> bool:
    """Whether the person interrupted, and nothing else is the matter."""
    return not is_bug(error) and any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


def sentence(error: PolarnodeError) -> str:
    """What an error says, with the field's path where it names one."""
    return f"{error} (at {error.path})" if isinstance(error, Refused) and error.path else str(error)


def as_exit(error: BaseException) -> click.ClickException | Exit | None:
    """How the program ends over it: 130 when it was interrupted, 1 with each sentence once; None for
    a bug.
    """
    if is_bug(error):
        return None
    if left_by_force(error):
        return Exit(LEFT_BY_FORCE)
    said = dict.fromkeys(sentence(leaf) for leaf in leaves(error) if isinstance(leaf, PolarnodeError))
    return click.ClickException("\n".join(said))
