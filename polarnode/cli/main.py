"""The commands of `polarnode` and their options.

Keep heavy imports inside the commands: `--help` and the start of every command stay fast.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import click

from polarnode.cli import NODE
from polarnode.cli.file_commands import FILE_COMMANDS
from polarnode.cli.fleet import fleet
from polarnode.cli.image import image
from polarnode.cli.options import (
    command_exit,
    config_of,
    existing_file_type,
    existing_path_type,
    export_options,
    folder,
    log_option,
    merged_settings,
    node_address,
    node_options,
    renamed,
    serving_config,
    source_options,
    take_sources,
)
from polarnode.cli.verbs import add_verbs, as_json
from polarnode.containers.user_namespace import enter_user_namespace
from polarnode.core.errors import PolarnodeError, RuntimeFault
from polarnode.core.spelling import nearest

# The modules of the packages in `polarnode[node]`.
NODE_MODULES = frozenset(
    {"trio", "hypercorn", "quart", "quart_trio", "podman", "h11", "jinja2", "transformers", "tokenizers"}
    | {"rich", "cryptography", "prometheus_client", "fsspec", "psycopg", "yaml", "regex"}
)


class CommandGroup(click.Group):
    """A group that prints an expected error as one sentence on stderr, also if a command's packages are
    missing. A bug still shows its traceback.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            if Path(name).exists():
                remedy = f"it is a file: polarnode run {name}, or polarnode submit {name}"
            else:
                near = nearest(name, self.commands)
                remedy = "see polarnode --help" if near is None else f"did you mean {near}?"
            raise click.UsageError(f"there is no command {name}: {remedy}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in NODE_MODULES:
                raise
            raise click.ClickException(NODE.format(missing=error.name)) from error
        except (PolarnodeError, KeyboardInterrupt, BaseExceptionGroup) as error:
            expected = command_exit(error)
            if expected is None:
                raise
            raise expected from error


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@node_options
@click.option(
    "--host",
    help="Address to listen on; any but loopback needs POLARNODE_TOKEN. [default: 127.0.0.1]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Host name that is served besides loopback's and --host; repeatable. Any is, with a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free one. [default: 8080]",
)
@log_option
@click.option(
    "--node-url",
    metavar="URL",
    help="Address at which other nodes of --log reach this one. [default: of --host and --port]",
)
@click.option("--tls-cert", help="PEM file of the control plane's certificate with its chain.")
@click.option("--tls-key", help="PEM file of its key.")
@click.option(
    "--state-dir",
    help="Folder for the journal and logs; a new start resumes from it. [default: .polarnode]",
)
@click.version_option(package_name="polarnode")
@click.pass_context
def main(ctx: click.Context, /, **params: Any) -> None:
    """Serve a model to agent harnesses, record every token, and stream training sequences.

    \b
    polarnode doctor                                check this machine
    polarnode run --cpu examples/demo/pi.toml       run one task, without a GPU
    polarnode serve --gpus 0-7 --model DIR          serve until Ctrl-C
    polarnode convert --harness pi tasks/           preview tasks or a dataset
    polarnode submit task.toml                      send a task to a running node
    polarnode watch                                 print sessions as they end
    polarnode status                                what the node does now

    Without a command it starts a node and serves. Every setting of a node can also be set in a TOML file
    (--config) or in the environment (POLARNODE_PORT=9000). Flags override the environment, which overrides
    the file.
    """
    if ctx.invoked_subcommand is not None:
        return
    config = serving_config(params, hint="polarnode --cpu")
    from polarnode.cli import serve

    sys.exit(serve.serve(config))


@main.command(short_help="Run tasks from start to end on a temporary node.")
@click.argument("sources", nargs=-1, required=True, type=existing_path_type())
@node_options
@source_options
@click.option(
    "--out",
    type=folder(),
    default=Path("out/run"),
    show_default=True,
    help="Folder for trajectories.jsonl, the journal and logs.",
)
@click.option("--expect-reward", is_flag=True, help="Exit 1 unless at least one reward is above 0.")
@click.pass_context
def run(
    ctx: click.Context, /, sources: tuple[Path, ...], out: Path, expect_reward: bool, **params: Any
) -> None:
    """Run the tasks of SOURCES from start to end on a temporary node.

    \b
    polarnode run --cpu examples/demo/pi.toml
    polarnode run --gpus 0 --model /models/Qwen3-8B --samples 16 task.toml
    polarnode run --gpus 0 --harness pi --only 'django__*' swe-bench-verified/

    A source is one of: a task in TOML or JSON, tasks in JSONL, a Harbor task directory or a folder of them,
    a SWE-bench dataset on disk, or Polar task files. `polarnode convert` shows the tasks of a source. A task
    that comes with a Dockerfile has its image built first.

    Shows the sessions while they run, then a table. OUT/trajectories.jsonl holds every token; it is replaced
    when all sessions have ended. Each run keeps its journal and logs in its own folder under OUT/state, which
    you can delete.

    Ctrl-C ends the running sessions and still writes their trajectories. A second Ctrl-C exits at once.

    Exit codes: 0 when every session delivered a trajectory, no session ended in a node error, and every
    trajectory kept the token invariants (a harness that fails or times out is a result, not an error);
    1 otherwise, or when the run was stopped; 130 when it was stopped before any session began, or by a
    second Ctrl-C.
    """
    selection = take_sources(sources, params)
    config = serving_config(merged_settings(ctx, params), hint="polarnode run --cpu")
    from polarnode.cli import run as running

    sys.exit(running.run(config, selection, out=out, expect_reward=expect_reward))


@main.command(short_help="Show the tasks of a source, or write them as JSONL.")
@click.argument("sources", nargs=-1, required=True, type=existing_path_type())
@source_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the tasks as JSONL TaskSpecs; - for stdout. [default: show a table]",
)
@click.option("--skip-invalid", "skip", is_flag=True, help="Skip tasks that cannot be converted.")
@renamed("--skip", "--skip-invalid", is_flag=True)
@click.option("--build", is_flag=True, help="Build the tasks' images on this machine.")
def convert(sources: tuple[Path, ...], out: Path | None, skip: bool, build: bool, **params: Any) -> None:
    """Show the tasks of SOURCES as polarnode will run them: harness, image, evaluator, budgets, and what the
    conversion could not express.

    \b
    polarnode convert --harness pi terminal-bench-2/
    polarnode convert --harness codex --samples 8 --out tasks.jsonl swe-gym/
    polarnode convert --skip-invalid --out - tasks.jsonl | jq .runtime.image

    Runs nothing and needs no node. Prints one sentence on stderr for each task that cannot be converted.

    Exit codes: 0 when every task was converted; 1 otherwise.
    """
    from polarnode.cli.sources import convert

    selection = take_sources(sources, params)
    sys.exit(convert(selection, config_of(params), out=out, skip=skip, build=build))


@main.command(short_help="Generate offline data: SFT conversations and token rows.")
@click.argument("sources", nargs=-1, required=True, type=existing_path_type())
@node_options
@source_options
@click.option(
    "--accept",
    default="reward >= 1",
    show_default=True,
    help="Which sessions become data: an expression over the columns in docs/offline-data.md.",
)
@click.option(
    "--retry-empty",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    help="How often to run a session again whose model wrote nothing.",
)
@click.option(
    "--group-by",
    "by",
    metavar="KEY",
    help="Metadata key to group the table by. [default: repo, else dataset, else source]",
)
@renamed("--by", "--group-by")
@click.option(
    "--held-out-by",
    metavar="KEY",
    help="Split by this metadata key: some of its values go to held-out files.",
)
@click.option(
    "--held-out", type=float, default=0.1, show_default=True, help="Share of the key's values to hold out."
)
@click.option(
    "--rows",
    type=click.Choice(["accepted", "all", "none"]),
    default="accepted",
    show_default=True,
    help="Which sessions' tokens to write to rows.parquet.",
)
@click.option("--out", type=folder(), required=True, help="Folder for the data and the node's state.")
@click.pass_context
def generate(ctx: click.Context, /, sources: tuple[Path, ...], **params: Any) -> None:
    """Run every task of SOURCES (see `polarnode run --help`) and write the accepted sessions as data.

    \b
    polarnode generate --cpu examples/demo/pi.toml --samples 4 --out data/demo
    polarnode generate --gpus 0-7 --model /models/Qwen3-8B --harness pi \\
        --accept 'reward >= 1 and turns < 60' --out data/swe swe-gym/

    \b
    OUT/sft.jsonl        messages and tools, one accepted main lineage per line
    OUT/rows.parquet     token rows, one training sequence per row
    OUT/accepted.jsonl   one accepted session per line
    OUT/rejected.jsonl   one rejected session per line, with the reason
    OUT/table.json       the printed table

    After Ctrl-C or a crash, the same command resumes: it keeps sessions that ended and repeats interrupted
    ones. Run it again on a finished folder to apply another --accept, --rows, --group-by or --held-out-by
    without running any session.

    Exit codes: 0 when every session ran to its end, accepted or not; 1 when some did not; 130 when it was
    stopped before any session began, or by a second Ctrl-C.
    """
    from polarnode.cli import generate as generating

    selection = take_sources(sources, params)
    request = generating.make_request(
        selection, **{name: params.pop(name) for name in generating.REQUEST_OPTIONS}
    )
    config = serving_config(merged_settings(ctx, params), hint="polarnode generate --cpu")
    sys.exit(generating.generate(config, request))


@main.command(short_help="Submit tasks to a running node.")
@click.argument("sources", nargs=-1, required=True, type=existing_path_type())
@source_options
@node_address
def submit(sources: tuple[Path, ...], url: str, token: str | None, **params: Any) -> None:
    """Submit the tasks of SOURCES (see `polarnode run --help`) to a running node and print their task ids.

    \b
    polarnode submit task.toml
    polarnode submit --harness pi --samples 8 terminal-bench-2/
    polarnode watch --task $(polarnode submit task.toml)

    Task ids go to stdout, one per line; everything else goes to stderr.

    Exit codes: 0 when the node accepted every task; 1 otherwise.
    """
    from polarnode.cli import remote

    node = remote.RemoteNode(url=url, token=token)
    remote.submit(take_sources(sources, params), node, config_of(params))


@main.command(short_help="Print a node's sessions as they end.")
@click.option("--task", "task_id", help="Print this task only, and exit when it is done.")
@click.option(
    "--consumer",
    metavar="NAME",
    help="Acknowledge what is printed under this name; the next watch continues after it.",
)
@click.option("--newest", is_flag=True, help="Leave out what ended before; a known --consumer goes on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event, without tokens.")
@node_address
def watch(
    task_id: str | None, consumer: str | None, newest: bool, as_json: bool, url: str, token: str | None
) -> None:
    """Print the sessions of a node, one line each: first those that have ended, then each as it ends, with
    the reason where it did not complete. On a terminal a table of those that run stands below.

    \b
    polarnode watch
    polarnode watch --task task-1dcb2842ecd2e338
    polarnode watch --newest --json | jq .reward

    Ends with Ctrl-C, or with --task when the task is done.

    Exit codes: 0 when the task is done; 1 when there is no such task or the node is away for long; 130 after
    Ctrl-C.
    """
    from polarnode.cli import remote, watching

    node = remote.RemoteNode(url=url, token=token)
    watching.watch(task_id, consumer, node, newest=newest, as_json=as_json)


@main.command(short_help="Write a node's trajectories as JSONL, Parquet or SFT data.")
@export_options
@node_address
def export(output: Path | None, url: str, token: str | None, **query: Any) -> None:
    """Write the finished trajectories of a node, oldest first.

    \b
    polarnode export -o trajectories.jsonl
    polarnode export --min-reward 1 --format slime | head -1

    The output file is replaced only when the export is complete.

    Exit codes: 0 when the export is complete; 1 otherwise.
    """
    from polarnode.cli import remote

    remote.export(query, output, remote.RemoteNode(url=url, token=token))


@main.command(short_help="Evaluate finished sessions of a node again.")
@click.argument("sessions", nargs=-1, metavar="[SESSION]...")
@click.option("--task", "task_id", help="The sessions of this task.")
@click.option("--group", "group_id", help="The sessions of this group.")
@click.option("--file", type=existing_file_type(), help="The sessions of this trajectories.jsonl.")
@click.option(
    "--evaluator",
    type=existing_file_type(),
    help="TOML file with an evaluator, or a task with one. [default: each task's own]",
)
@click.option("--reason", help="Returned with each reward.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@node_address
def evaluate(
    sessions: tuple[str, ...],
    file: Path | None,
    evaluator: Path | None,
    as_json: bool,
    url: str,
    token: str | None,
    **named: str | None,
) -> None:
    """Evaluate finished sessions of a running node again, without inference, and print their first and new
    rewards.

    \b
    polarnode evaluate 4f1c09aa72be3d55
    polarnode evaluate --task task-1dcb2842ecd2e338 --evaluator mended.toml
    polarnode evaluate --file trajectories.jsonl --reason "the judge was down"

    A new reward is an event of kind `reward`; trajectories stay as they are. Ctrl-C ends this command, not
    the evaluation. A node that is stopped must be started again on its state folder; with `polarnode
    --engine simulated` that needs no GPU.

    Exit codes: 0 when every session was evaluated; 1 otherwise.
    """
    from polarnode.cli import remote

    node = remote.RemoteNode(url=url, token=token)
    sys.exit(remote.evaluate(sessions, file, evaluator, node, as_json=as_json, named=named))


@main.command(short_help="Show a session's turns and traces, with trainable tokens marked.")
@click.argument("session", required=False)
@click.option(
    "--from",
    "file",
    type=existing_file_type(),
    help="Read this trajectories.jsonl, not a node. SESSION may then be a prefix, or absent.",
)
@click.option("--model", type=folder(exists=True), help="Checkpoint whose tokenizer decodes the tokens.")
@click.option(
    "--plain",
    is_flag=True,
    help="Mark trainable tokens with « and », not with colour. Always on without a terminal.",
)
@as_json
@node_address
def inspect(
    session: str | None,
    file: Path | None,
    model: Path | None,
    plain: bool,
    as_json: bool,
    url: str,
    token: str | None,
) -> None:
    """Show SESSION: its turns, which turn each one extends, why turns were left out, its time, evaluation and
    traces with the trainable tokens marked; of one that did not complete the reason and the end of its log;
    of one that runs its turns so far and the end of its log. Without SESSION, show the lineage figures of
    every session in a file.

    \b
    polarnode inspect --from out/run/trajectories.jsonl 4f
    polarnode inspect 4f1c09aa72be3d55 --model /models/Qwen3-8B
    polarnode inspect --from out/run/trajectories.jsonl

    Exit codes: 0 when it was shown; 1 when there is no such session.
    """
    from polarnode.cli import inspection, remote

    if session is None:
        if file is None or as_json:
            raise click.UsageError("name a SESSION of the node, or give --from FILE to summarise a file")
        inspection.print_lineages(file)
        return
    source = file if file is not None else remote.RemoteNode(url=url, token=token)
    inspection.inspect(session, source, model, plain=plain, as_json=as_json)


@main.command(short_help="Check whether a node can start here, and how to fix what prevents it.")
@node_options
@log_option
@as_json
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, **params: Any) -> None:
    """Check whether a node can start on this machine, and print how to fix what prevents it. Starts no engine
    and no container.

    \b
    polarnode doctor
    polarnode doctor --gpus 0-7 --model /models/Qwen3-8B
    polarnode doctor --engine none --log @log.dsn   check the PostgreSQL that nodes share, alone

    Exit codes: 0 when a node can start here; 1 otherwise.
    """
    from polarnode.cli import doctor as examining

    config = config_of(merged_settings(ctx, params))
    if config.runs_tasks:
        with suppress(RuntimeFault):  # a finding says what is missing
            enter_user_namespace()
    sys.exit(examining.run_doctor(config, as_json=as_json))


@main.command(short_help="Make or upgrade the tables of the PostgreSQL that nodes share.")
@log_option
@click.option(
    "--from",
    "journal",
    type=existing_path_type(),
    metavar="STATE_DIR/journal.sqlite",
    help="Take what this journal of a stopped node has into a log that is empty.",
)
def migrate(log: str | None, journal: Path | None) -> None:
    """Make the tables of the log, or bring them to this version: the numbered files that it lacks, each in a
    transaction. A node does so by itself only where the database has no tables yet.

    \b
    polarnode migrate --log postgresql://migrator@db/polarnode
    polarnode migrate --log @migrator.dsn --from .polarnode/journal.sqlite

    With --from, tasks, sessions with their turns, events at their positions, consumers, weights and
    evaluations are copied in one transaction. The journal is only read.

    Exit codes: 0 when the log is of this version; 1 otherwise.
    """
    from polarnode.cli import migrating

    migrating.migrate(log, journal)


@main.command("gym-agent", short_help="Serve a NeMo Gym agent that runs on a node.")
@click.option(
    "--task-template",
    "template",
    required=True,
    type=existing_file_type(),
    help="Task in TOML, with the placeholders {{input}} and {{row.FIELD}}.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Host name that is served besides loopback's and --host; repeatable.",
)
@click.option("--port", type=int, default=0, help="Port to listen on; 0 takes a free one.  [default: 0]")
@click.option(
    "--lost",
    type=click.Choice(["fail", "mask"]),
    default="fail",
    show_default=True,
    help="What a rollout becomes that cannot be trained: tried again, then 503; or a masked sample.",
)
@node_address
def gym_agent(
    template: Path,
    host: str,
    allowed_hosts: tuple[str, ...],
    port: int,
    lost: Literal["fail", "mask"],
    url: str,
    token: str | None,
) -> None:
    """Serve an agent server of NeMo Gym. Each /run becomes a task on a running node, made from the template
    and the row of Gym's dataset.

    \b
    polarnode gym-agent --task-template task.toml --port 11000

    Serves until Ctrl-C.
    """
    from polarnode.cli import serve

    serve.serve_agent(
        template, url=url, token=token, host=host, port=port, allowed_hosts=allowed_hosts, lost=lost
    )


main.add_command(image)
main.add_command(fleet)
add_verbs(main)
for command in FILE_COMMANDS:
    main.add_command(command)
