"""The options that several commands share, the node's config made from them, and the exit of a command.

Nurseries raise errors in groups, so one expected fault may arrive as a tree. Invariant: a tree that holds
anything but expected errors is a bug, and its traceback is shown.
"""

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.exceptions import Exit

from polarnode.containers.user_namespace import enter_user_namespace
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, EngineError, PolarnodeError, Refused, boundary
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import (
    as_written,
    names_as_written,
    parse_gpus,
    read_config,
    unknown_variables,
)
from polarnode.sources.values import KINDS, Overrides

if TYPE_CHECKING:
    from polarnode.cli.sources import SourceSelection

# ── options ───────────────────────────────────────────────────────────────────

Command = TypeVar("Command", bound=Callable[..., Any])
WRITTEN = "polarnode.written"  # key in a context's `meta`: how the command's settings were written
DEFAULT_URL = "http://127.0.0.1:8080"
SAMPLES = click.IntRange(min=1, max=4096)  # the same limit as in a task
SOURCE_OPTIONS = ("kind", "harness", "samples", "over", "only", "limit", "split", "image_template")
ENGINE_ARG = "An argument of SGLang, such as attention_backend=triton; repeatable."
CONVERTED_FLAGS = (
    "config_file",
    "gpus",
    "import_paths",
    "log",
    "allowed_hosts",
    "adapters",
    "engine_args",
    "labels",
)  # flags whose form differs from their config field


def existing_file_type() -> click.Path:
    """The type of an existing file."""
    return click.Path(exists=True, dir_okay=False, path_type=Path)


def folder(*, exists: bool = False) -> click.Path:
    """The type of a folder; the argument says whether it must exist."""
    return click.Path(exists=exists, file_okay=False, path_type=Path)


def existing_path_type() -> click.Path:
    """The type of an existing file or folder."""
    return click.Path(exists=True, path_type=Path)


def renamed(old: str, new: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option that was renamed: using `old` is refused with a sentence that names `new`."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value not in (None, False):
            raise click.UsageError(f"{old} is called {new} now", ctx)

    return click.option(
        old,
        f"renamed_{old.strip('-').replace('-', '_')}",
        hidden=True,
        expose_value=False,
        callback=refuse,
        help=f"Renamed to {new}.",
        **attributes,
    )


def node_options(command: Command) -> Command:
    """The node's settings that have a flag. The config file and the environment take these and all others."""
    options = [
        click.option(
            "--config",
            "config_file",
            type=existing_file_type(),
            help="TOML file with settings; docs/api.md lists them.",
        ),
        click.option("--gpus", help="GPUs, such as 0-7, 0 or 0,2. One engine per GPU, or per --tp GPUs."),
        click.option("--cpu", is_flag=True, default=None, help="Engine on the CPU: tests, the tiny model."),
        click.option(
            "--engine",
            metavar="sglang|simulated|none|URL,…",
            help="URL: SGLang servers that somebody else runs (docs/engines.md). simulated: RANDOM answers at"
            " a set speed, to size a node without GPUs. none: runs no session and serves what the nodes of"
            " its --log run. [default: sglang]",
        ),
        click.option("--tp", type=int, help="GPUs per engine (tensor parallel). [default: 1]"),
        click.option("--model", help="Checkpoint folder. [default: the embedded polarnode-tiny]"),
        click.option(
            "--context-length",
            type=int,
            help="Most tokens of a prompt and its answer together. [default: the checkpoint's]",
        ),
        click.option("--routed-experts", is_flag=True, default=None, help="Record them for tasks that ask."),
        click.option("--lora-rank", type=int, help="Largest rank of adapters. [default: 0, none taken]"),
        click.option("--adapter", "adapters", metavar="NAME=FOLDER", multiple=True, help="One to serve."),
        click.option("--engine-arg", "engine_args", metavar="NAME=VALUE", multiple=True, help=ENGINE_ARG),
        click.option("--label", "labels", metavar="NAME=VALUE", multiple=True, help="Tasks require it."),
        click.option("--run-limit", type=int, help="Most harnesses running at once. [default: 64]"),
        click.option(
            "--no-containers",
            "containers",
            is_flag=True,
            flag_value=False,
            default=None,
            help="Take captures alone.",
        ),
        click.option("--limits", metavar="enforced|best_effort", help="Whether sessions' limits must hold."),
        click.option(
            "--record-requests",
            metavar="FOLDER",
            help="Write every request of a harness and its response to FOLDER, for `polarnode replay`.",
        ),
        click.option(
            "--base-image",
            help="Debian image to build runtimes on. [default: a public one, else built here]",
        ),
        click.option(
            "--allow-import",
            "import_paths",
            metavar="PREFIX",
            multiple=True,
            help="Module prefix that tasks may import code from; repeatable.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def log_option(command: Command) -> Command:
    """The option for the log that nodes share."""
    return click.option(
        "--log",
        metavar="@FILE|DSN",
        help="PostgreSQL that nodes share: a file with its DSN, or a DSN without a password."
        " [default: POLARNODE_LOG, or none]",
    )(command)


def source_options(command: Command) -> Command:
    """The options of the commands that read tasks: which tasks, and what to change in each."""
    options = [
        click.option("--kind", type=click.Choice(KINDS), help="Format of the sources. [default: detected]"),
        click.option(
            "--harness", help="Harness to run each task with, such as pi; required if the source names none."
        ),
        click.option("--samples", type=SAMPLES, help="Sessions per task, instead of the source's number."),
        click.option(
            "--override",
            "over",
            type=existing_file_type(),
            help="TOML file with part of a task (budgets, runtime, sampling), merged over each task.",
        ),
        renamed("--with", "--override"),
        click.option("--only", metavar="PATTERN", help="Only tasks whose name matches, such as 'django__*'."),
        click.option("--limit", type=click.IntRange(min=1), help="Most tasks to take from each source."),
        click.option("--split", help="Split to read from a dataset that has several."),
        click.option(
            "--image-template",
            help="Image of a dataset row, such as 'mine/{id}:latest'; docs/tasks.md lists the fields.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def take_sources(paths: tuple[Path, ...], params: dict[str, Any]) -> "SourceSelection":
    """The sources of a command. Removes their options from `params`; the rest are the node's settings."""
    from polarnode.cli.sources import SourceSelection
    from polarnode.sources.reading import read_task_toml

    options = {name: params.pop(name, None) for name in SOURCE_OPTIONS}
    over = options.pop("over")
    kind = options.pop("kind")
    overrides = Overrides(over={} if over is None else read_task_toml(over), **options)
    return SourceSelection(paths=paths, kind=kind, overrides=overrides)


def export_options(command: Command) -> Command:
    """Which trajectories to export and in which format: the parameters of GET /v1/export."""
    options = [
        click.option("--task", "task_id", help="Only this task."),
        click.option("--group", "group_id", help="Only this group."),
        click.option(
            "--outcome",
            help="Only this outcome: completed, timeout, failed, error, cancelled or interrupted.",
        ),
        click.option("--min-reward", type=float, help="Only sessions with at least this reward."),
        click.option(
            "--turns",
            type=click.Choice(["table", "full"]),
            default="table",
            show_default=True,
            help="full: include each turn's own tokens.",
        ),
        click.option(
            "--format",
            help="A trainer's format, one session per line (verl, slime, trl …), or parquet for token rows."
            " [default: polarnode's JSON]",
        ),
        click.option(
            "--kind",
            type=click.Choice(["trajectories", "sft", "rewards"]),
            help="sft: conversations for supervised fine-tuning; rewards: those of later evaluations.",
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
    """The URL and token of a running node."""
    url = click.option(
        "--url",
        default=DEFAULT_URL,
        envvar="POLARNODE_URL",
        show_default=True,
        show_envvar=True,
        help="URL of the node.",
    )
    token = click.option("--token", envvar="POLARNODE_TOKEN", show_envvar=True, help="Bearer token.")
    return url(token(command))


# ── config ────────────────────────────────────────────────────────────────────


def merged_settings(ctx: click.Context, params: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command merged over those before its name: `polarnode --cpu run task.toml` works too."""
    group = ctx.parent
    before = {
        name: value
        for name, value in (group.params.items() if group is not None else ())
        if group is not None and group.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return {**before, **{name: value for name, value in params.items() if value not in (None, ())}}


def config_of(params: Mapping[str, Any]) -> NodeConfig:
    """The node's config: flags over POLARNODE_* variables over the file."""
    flags: dict[str, Json] = {
        name: value for name, value in params.items() if name not in CONVERTED_FLAGS and value is not None
    }
    if params.get("gpus") is not None:
        # --gpus and --cpu exclude each other: a flag also resets the other one where the file sets it
        flags = {"cpu": False, **flags, "gpus": parse_gpus(params["gpus"])}
    elif params.get("cpu"):
        flags["gpus"] = []
    for name in ("import_paths", "allowed_hosts"):
        if params.get(name):
            flags[name] = list(params[name])
    for name, flag, form in (("adapters", "--adapter", "NAME=FOLDER"), ("labels", "--label", "NAME=VALUE")):
        if named := [each.partition("=") for each in params.get(name) or ()]:
            if bad := [first for first, _, second in named if not second]:
                raise ConfigError(f"{flag} {bad[0]}: write it as {form}")
            flags[name] = {first: second for first, _, second in named}
    if params.get("engine_args"):
        flags["engine_args"] = dict(map(_engine_argument, params["engine_args"]))
    if params.get("log") is not None:
        flags["log"] = log_dsn(params["log"])
    file: Path | None = params.get("config_file")
    with boundary(ConfigError, f"--config {file} cannot be read"):
        toml = None if file is None else file.read_text()
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[WRITTEN] = names_as_written(toml=toml, environment=os.environ, flags=flags)
    config = read_config(toml=toml, environment=os.environ, flags=flags)
    for unknown in unknown_variables(os.environ, config):
        click.echo(f"warning: {unknown}", err=True)
    if file is not None and "token" in tomllib.loads(toml or ""):
        _warn_if_readable(file)
    return config


def _engine_argument(text: str) -> tuple[str, Json]:
    """Read NAME=VALUE: the name as SGLang or its command line writes it, the value as TOML, or as text if it
    is not TOML.
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"--engine-arg {text}: write it as NAME=VALUE, such as attention_backend=triton")
    try:
        read: Json = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        read = value
    return name.strip("-").replace("-", "_"), read


def log_dsn(given: str) -> str:
    """The DSN that `--log` gives: the text of @FILE, or the value itself if it has no password, because other
    users can see command lines. The DSN is never part of a message.
    """
    if given.startswith("@"):
        with boundary(ConfigError, f"--log {given} cannot be read"):
            return Path(given[1:]).read_text().strip()
    from polarnode.journal.log.postgres.connection import read_dsn

    if read_dsn(given).get("password"):
        raise ConfigError(
            "--log must not hold a password, for command lines are visible to others: give --log @FILE, or"
            " set POLARNODE_LOG"
        )
    return given


def _warn_if_readable(file: Path) -> None:
    """Warn of a config file whose token other users of the machine may read."""
    if file.stat().st_mode & 0o077:
        click.echo(
            f"warning: {file} has the node's token and other users may read it: chmod 600 {file}", err=True
        )


def serving_config(params: Mapping[str, Any], *, hint: str) -> NodeConfig:
    """The config of a node that is about to start, as root of a user namespace at least. Refused if it does
    not say where the model runs.
    """
    config = config_of(params)
    if config.runs_tasks:
        enter_user_namespace()
    if not config.cpu and not config.gpus and config.engine == "sglang":
        raise click.UsageError(f"choose where the model runs: --gpus 0-7, --gpus 0 or --cpu; try: {hint}")
    return config


# ── errors ────────────────────────────────────────────────────────────────────

EXIT_INTERRUPTED = 130  # the exit code that a shell gives a program ended by SIGINT


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group at any depth; a plain error is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def is_bug(error: BaseException) -> bool:
    """Whether an error is, or contains, one that is not expected."""
    return any(not isinstance(leaf, PolarnodeError | KeyboardInterrupt) for leaf in leaves(error))


def interrupted(error: BaseException) -> bool:
    """Whether the user interrupted, and no bug is among the errors."""
    return not is_bug(error) and any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


def sentence(error: PolarnodeError) -> str:
    """The message of an error, with the path of the field it names, if any."""
    return f"{error} (at {error.path})" if isinstance(error, Refused) and error.path else str(error)


def setting_names() -> Mapping[str, str]:
    """How the user wrote the settings of the running command."""
    context = click.get_current_context(silent=True)
    found: Mapping[str, str] = {} if context is None else context.meta.get(WRITTEN, {})
    return found


def command_exit(error: BaseException) -> click.ClickException | Exit | None:
    """The exit for an error: code 130 when interrupted, else code 1 with each distinct sentence, which names
    settings as the command's user wrote them; None for a bug.
    """
    if is_bug(error):
        return None
    if interrupted(error):
        return Exit(EXIT_INTERRUPTED)
    names = setting_names()
    sentences = dict.fromkeys(
        as_written(sentence(leaf), names) if isinstance(leaf, ConfigError | EngineError) else sentence(leaf)
        for leaf in leaves(error)
        if isinstance(leaf, PolarnodeError)
    )
    from polarnode.cli.output import harmless  # slow to import, and only errors need it

    return click.ClickException(harmless("\n".join(sentences)))
