"""`polarnode`: the verbs and what each takes. Heavy imports wait until a verb needs them, so that `--help` is
instant.

The verb `gym-agent`. The rule for whoever edits it: what it serves is imported when it is called, so that
every other verb starts as quickly.
"""

import sys
from pathlib import Path
from typing import Any

import click

from polarnode.cli.options import (
    as_exit,
    config_of,
    export_options,
    given_settings,
    node_address,
    node_options,
    node_serving,
    source_options,
    source_path,
    take_sources,
    task_file,
)
from polarnode.core.errors import PolarnodeError

# ── main ────────────────────────────────────────────────────────────

FOLDER = click.Path(file_okay=False, path_type=Path)
FOUND = click.Path(exists=True, file_okay=False, path_type=Path)  # a folder that is there


class Verbs(click.Group):
    """A group whose errors are one sentence on stderr, not a traceback; a bug still shows its own."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (PolarnodeError, KeyboardInterrupt, BaseExceptionGroup) as error:
            known = as_exit(error)
            if known is None:
                raise
            raise known from error


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@node_options
@click.option(
    "--host",
    help="Where trainers reach this node; anything but loopback needs POLARNODE_TOKEN. [default: 127.0.0.1]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Where trainers reach this node; 0 takes a free one. [default: 8080]",
)
@click.option(
    "--state-dir",
    help=(
        "Journal and logs of this node; a new start takes up what an earlier one left. [default: .polarnode]"
    ),
)
@click.version_option(package_name="polarnode")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Serve a model to agent harnesses, record every token, and stream training sequences.

    \b
    polarnode doctor                                   what this machine has and lacks, and what to do
    polarnode run --cpu examples/demo/pi.toml          one task, start to end, here, without a GPU
    polarnode --gpus 0-7 --model /models/Qwen3-8B      serve on eight GPUs, until Ctrl-C
    polarnode convert --harness pi tasks/              what a folder of tasks, or a dataset, becomes
    polarnode submit task.toml                         give a node that serves a task
    polarnode watch                                    see its sessions end

    Every setting of a node can stand in a TOML file (--config), in the environment (POLARNODE_PORT=9000), or
    here; the later of these wins.
    """
    if ctx.invoked_subcommand is not None:
        return
    config = node_serving(given, hint="polarnode --cpu")
    from polarnode.cli import serve

    sys.exit(serve.serve(config))


@main.command(short_help="Run tasks from sources, start to end, on a node of their own.")
@click.argument("sources", nargs=-1, required=True, type=source_path())
@node_options
@source_options
@click.option(
    "--out",
    type=FOLDER,
    default=Path("out/run"),
    show_default=True,
    help="Folder for trajectories.jsonl, journal and logs.",
)
@click.option("--expect-reward", is_flag=True, help="Exit 1 unless some session was rewarded.")
@click.pass_context
def run(
    ctx: click.Context, /, sources: tuple[Path, ...], out: Path, expect_reward: bool, **given: Any
) -> None:
    """Run the tasks of SOURCES from start to end on a node of their own, which ends with them.

    \b
    polarnode run --cpu examples/demo/pi.toml
    polarnode run --gpus 0 --model /models/Qwen3-8B --samples 16 --out out/try task.toml
    polarnode run --gpus 0-7 --model /models/Qwen3-8B --harness pi --only 'django__*' swe-bench-verified/

    A source is a task in TOML or JSON, tasks in JSONL, a Harbor task directory or a folder of them, a dataset
    in the shape of SWE-bench on disk, or Polar's task files; `polarnode convert` shows what it becomes.
    Images of tasks that come as a folder are built first.

    Shows the sessions as they run, then a table. OUT/trajectories.jsonl holds every token and is replaced
    when the sessions are over; each run keeps its journal and logs in a folder of its own under OUT/state,
    which may be deleted.

    Ctrl-C ends the sessions with what they have, and still writes and shows it; once more leaves at once.

    Exit code 0 when every session delivered its trajectory, none ended in an error of the node's, and no law
    of tokens was broken (a harness that fails or runs out of time is a result, not a fault); 1 when not, or
    when it was stopped; 130 when it was left by force.
    """
    taken = take_sources(sources, given)
    config = node_serving(given_settings(ctx, given), hint="polarnode run --cpu")
    from polarnode.cli import run as running

    sys.exit(running.run(config, taken, out=out, expect_reward=expect_reward))


@main.command(short_help="Show what a source of tasks becomes.")
@click.argument("sources", nargs=-1, required=True, type=source_path())
@source_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write TaskSpecs as JSONL; - for stdout.",
)
@click.option("--skip", is_flag=True, help="Go on without tasks that can not be converted.")
@click.option(
    "--build", is_flag=True, help="Build the images of tasks that come as a folder, on this machine."
)
def convert(sources: tuple[Path, ...], out: Path | None, skip: bool, build: bool, **given: Any) -> None:
    """Show what the tasks of SOURCES become: harness, image, evaluator, budgets, and what could not be said.

    \b
    polarnode convert --harness pi terminal-bench-2/
    polarnode convert --harness codex --samples 8 --out tasks.jsonl swe-gym/data/train-00000-of-00001.parquet
    polarnode convert --skip --out - tasks.jsonl | jq .runtime.image

    Nothing is run and no node is needed. Each task that can not be converted is one sentence on stderr.

    Exit code 0 when every task could be converted.
    """
    from polarnode.cli.sources import convert

    taken = take_sources(sources, given)
    sys.exit(convert(taken, config_of(given), out=out, skip=skip, build=build))


@main.command(short_help="Make offline data of sources of tasks: SFT conversations and token rows.")
@click.argument("sources", nargs=-1, required=True, type=source_path())
@node_options
@source_options
@click.option(
    "--accept",
    default="reward >= 1",
    show_default=True,
    help="Which sessions are data: an expression over the columns of docs/offline-data.md.",
)
@click.option(
    "--retry-empty",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    help="How often a session that said nothing is run again.",
)
@click.option(
    "--by",
    metavar="KEY",
    help="Metadata key that groups the table. [default: repo, dataset or source, the first there is]",
)
@click.option(
    "--held-out-by", metavar="KEY", help="Hold out whole values of this metadata key, in files of their own."
)
@click.option(
    "--held-out", type=float, default=0.1, show_default=True, help="The share of its values that is held out."
)
@click.option(
    "--rows",
    type=click.Choice(["accepted", "all", "none"]),
    default="accepted",
    show_default=True,
    help="Whose tokens rows.parquet has.",
)
@click.option(
    "--out", type=FOLDER, required=True, help="Folder of the data, and of the node's state meanwhile."
)
@click.pass_context
def generate(ctx: click.Context, /, sources: tuple[Path, ...], **given: Any) -> None:
    """Run every task of SOURCES (as `polarnode run` takes them), and make data of the sessions that are
    accepted.

    \b
    polarnode generate --cpu examples/demo/pi.toml --samples 4 --out data/demo
    polarnode generate --gpus 0-7 --model /models/Qwen3-8B --harness pi --samples 4 \\
        --accept 'reward >= 1 and turns < 60' --out data/swe swe-gym/

    OUT/sft.jsonl has a line of messages and tools for each accepted main lineage, OUT/rows.parquet a row for
    each training sequence, OUT/accepted.jsonl and OUT/rejected.jsonl a line for each session, with the
    reason; OUT/table.json the table that is printed.

    Stopped by Ctrl-C or killed, the same command goes on where it was: sessions that ended are not run again,
    interrupted ones are. With nothing left to run it only judges and writes anew, so that --accept and what
    is written may be changed.

    Exit code 0 when every session ran to its end, whatever came of it; 1 when some did not; 130 when it was
    left by force.
    """
    from polarnode.cli import generate as generating

    taken = take_sources(sources, given)
    asked = generating.asked(taken, **{name: given.pop(name) for name in generating.OPTIONS})
    sys.exit(
        generating.generate(node_serving(given_settings(ctx, given), hint="polarnode generate --cpu"), asked)
    )


@main.command(short_help="Submit tasks to a node that serves.")
@click.argument("sources", nargs=-1, required=True, type=source_path())
@source_options
@node_address
def submit(sources: tuple[Path, ...], url: str, token: str | None, **given: Any) -> None:
    """Submit the tasks of SOURCES (as `polarnode run` takes them) to a node that serves; prints their task
    ids.

    \b
    polarnode submit task.toml
    polarnode submit --harness pi --samples 8 terminal-bench-2/
    polarnode watch --task $(polarnode submit task.toml)
    """
    from polarnode.cli import remote

    remote.submit(take_sources(sources, given), remote.Where(url=url, token=token), config_of(given))


@main.command(short_help="Show sessions of a node as they end.")
@click.option("--task", "task_id", help="Only this task; ends when it is done.")
@click.option(
    "--consumer",
    help="A name whose position the node keeps: what was shown is acknowledged, and not shown again.",
)
@node_address
def watch(task_id: str | None, consumer: str | None, url: str, token: str | None) -> None:
    """Show the sessions of a node as they end, one line each; first those that are over, then each as it
    comes.

    \b
    polarnode watch
    polarnode watch --task task-1dcb2842ecd2e338
    """
    from polarnode.cli import remote

    remote.watch(task_id, consumer, remote.Where(url=url, token=token))


@main.command(
    short_help=(
        "Write a node's finished trajectories, in our JSON, a trainer's, as conversations or as Parquet."
    )
)
@export_options
@node_address
def export(output: Path | None, url: str, token: str | None, **query: Any) -> None:
    """Write the trajectories of a node that are over, oldest first.

    \b
    polarnode export -o trajectories.jsonl
    polarnode export --min-reward 1 --format slime | head -1
    """
    from polarnode.cli import remote

    remote.export(query, output, remote.Where(url=url, token=token))


@main.command(short_help="Show one session's turns and traces, trainable tokens marked.")
@click.argument("session", required=False)
@click.option(
    "--from",
    "file",
    type=task_file(),
    help="A trajectories.jsonl instead of a node; a beginning of SESSION is then enough, and none shows all.",
)
@click.option("--model", type=FOUND, help="Checkpoint folder to decode with.")
@click.option(
    "--plain",
    is_flag=True,
    help="Trainable tokens between « and » instead of in colour, as where there is no terminal.",
)
@node_address
def inspect(
    session: str | None, file: Path | None, model: Path | None, plain: bool, url: str, token: str | None
) -> None:
    """Show SESSION: its turns and what each extends, why turns were left out, and its traces with the
    trainable tokens marked.

    Without one: what the lineages of a file's sessions came to, and their sums.

    \b
    polarnode inspect --from out/run/trajectories.jsonl 4f
    polarnode inspect 4f1c09aa72be3d55 --model /models/Qwen3-8B
    polarnode inspect --from out/run/trajectories.jsonl
    """
    from polarnode.cli import inspection, remote

    if session is None:
        if file is None:
            raise click.UsageError("say which SESSION of the node, or --from FILE for the sums of a file")
        inspection.summarise(file)
        return
    inspection.inspect(
        session, file if file is not None else remote.Where(url=url, token=token), model, plain=plain
    )


@main.command(short_help="Say what each recorded request of a harness extends, and what of it is new.")
@click.argument("folder", metavar="DIR", type=FOUND)
@click.option(
    "--tokenizer",
    type=FOUND,
    help="Checkpoint folder, without weights if you like. [default: the embedded polarnode-tiny]",
)
@click.option("--json", "as_json", is_flag=True, help="One object a line on stdout; the totals go to stderr.")
def replay(folder: Path, tokenizer: Path | None, as_json: bool) -> None:
    """Feed recorded requests (NN-request.json) through the providers and lineage: what each extends, why, and
    how many tokens are new.

    \b
    polarnode replay recordings/
    polarnode replay --json --tokenizer /models/Qwen3-8B recordings/pi | jq .kind

    Every folder under DIR that holds requests is one session. No engine is started: a request's answer is
    what the harness shows in a later one.

    Exit code 0 when no request was refused.
    """
    from polarnode.cli import recordings

    sys.exit(recordings.replay(folder, tokenizer, as_json=as_json))


@main.command(short_help="Merge model calls recorded elsewhere into training sequences, by tokens alone.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: stdout]"
)
def merge(file: Path, output: Path | None) -> None:
    """Merge FILE (JSONL; - for stdin), model calls of any engine or gateway, into rows in which every sampled
    token is trainable once.

    \b
    polarnode merge calls.jsonl -o rows.jsonl
    zcat calls.jsonl.gz | polarnode merge - | head -1

    A line is {session_id, turn_id, prompt_ids, sampled_ids, logprobs, weight_version?}, a session's in the
    order they were asked, sessions in any. A call goes on in a row when its prompt holds an earlier prompt
    and reply of the session exactly; any other begins a row, and is counted. A row is {session_id, token_ids,
    loss_mask, logprobs, turn_spans, version_spans}. Counts go to stderr.

    Exit code 0 when every line was a call; 1 when one was not: it is told, and the others are merged all the
    same.
    """
    from polarnode.cli import recordings

    sys.exit(recordings.merge(file, output))


@main.command(short_help="Say what this machine has and lacks for a node, and what to do.")
@node_options
@click.pass_context
def doctor(ctx: click.Context, /, **given: Any) -> None:
    """Say what this machine has for a node, what it lacks, and what to do about it. Starts no engine and no
    container.

    \b
    polarnode doctor
    polarnode doctor --gpus 0-7 --model /models/Qwen3-8B

    Exit code 0 when a node would start here.
    """
    from polarnode.cli import doctor as examining

    sys.exit(examining.examine(config_of(given_settings(ctx, given))))


# ── gym ────────────────────────────────────────────────────────────


@click.command(short_help="Serve NeMo Gym's /run with the harnesses of a node.")
@click.option(
    "--task-template",
    "template",
    required=True,
    type=task_file(),
    help="TOML of a task, with {{input}} and {{row.field}} in it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where Gym finds this agent server.")
@click.option("--port", type=int, default=0, help="0 takes a free one.  [default: 0]")
@node_address
def gym_agent(template: Path, host: str, port: int, url: str, token: str | None) -> None:
    """Serve an agent server of NeMo Gym: each /run is a task on a node that serves, made of a template and
    the row of Gym's dataset.

    \b
    polarnode gym-agent --task-template task.toml --port 11000
    """
    from polarnode.cli import gym

    gym.serve_agent(template, url=url, token=token, host=host, port=port)
