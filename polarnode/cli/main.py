"""`polarnode`: the verbs and what each takes. Heavy imports wait until a verb needs them, so that `--help` is instant."""

import sys
from pathlib import Path
from typing import Any

import click

from polarnode.cli.faults import as_exit
from polarnode.cli.options import config_of, given_settings, node_address, node_options, node_serving, task_file
from polarnode.errors import PolarnodeError

FOLDER = click.Path(file_okay=False, path_type=Path)
FOUND = click.Path(exists=True, file_okay=False, path_type=Path)  # a folder that is there
SAMPLES = click.IntRange(min=1, max=4096)  # the task's own law (wire/laws.py)


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


@click.group(cls=Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@node_options
@click.option("--host", help="Where trainers reach this node; anything but loopback needs POLARNODE_TOKEN. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Where trainers reach this node; 0 takes a free one. [default: 8080]")
@click.option("--state-dir", help="Journal and logs of this node; a new start takes up what an earlier one left. [default: .polarnode]")
@click.version_option(package_name="polarnode")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Serve a model to agent harnesses, record every token, and stream training sequences.

    \b
    polarnode doctor                                   what this machine has and lacks, and what to do
    polarnode run --cpu examples/demo/pi.toml          one task, start to end, here, without a GPU
    polarnode --gpus 0-7 --model /models/Qwen3-8B      serve on eight GPUs, until Ctrl-C
    polarnode submit task.toml                         give a node that serves a task
    polarnode watch                                    see its sessions end

    Every setting of a node can stand in a TOML file (--config), in the environment (POLARNODE_PORT=9000), or here; the later of these wins.
    """
    if ctx.invoked_subcommand is not None:
        return
    config = node_serving(given, hint="polarnode --cpu")
    from polarnode.cli import serve

    sys.exit(serve.serve(config))


@main.command(short_help="Run tasks from files, start to end, on a node of their own.")
@click.argument("tasks", nargs=-1, required=True, type=task_file())
@node_options
@click.option("--samples", type=SAMPLES, help="Sessions per task, instead of what the files say.")
@click.option("--out", type=FOLDER, default=Path("out/run"), show_default=True, help="Folder for trajectories.jsonl, journal and logs.")
@click.option("--expect-reward", is_flag=True, help="Exit 1 unless some session was rewarded.")
@click.pass_context
def run(ctx: click.Context, /, tasks: tuple[Path, ...], samples: int | None, out: Path, expect_reward: bool, **given: Any) -> None:
    """Run TASKS (TOML or JSON files) from start to end on a node of their own, which ends with them.

    \b
    polarnode run --cpu examples/demo/pi.toml
    polarnode run --gpus 0 --model /models/Qwen3-8B --samples 16 --out out/try task.toml

    Shows the sessions as they run, then a table. OUT/trajectories.jsonl holds every token and is replaced when the sessions are over; each
    run keeps its journal and logs in a folder of its own under OUT/state, which may be deleted.

    Ctrl-C ends the sessions with what they have, and still writes and shows it; once more leaves at once.

    Exit code 0 when every session delivered its trajectory, none ended in an error of the node's, and no law of tokens was broken (a harness
    that fails or runs out of time is a result, not a fault); 1 when not, or when it was stopped; 130 when it was left by force.
    """
    config = node_serving(given_settings(ctx, given), hint="polarnode run --cpu")
    from polarnode.cli import run as running

    sys.exit(running.run(config, tasks, samples=samples, out=out, expect_reward=expect_reward))


@main.command(short_help="Submit a task to a node that serves.")
@click.argument("task", type=task_file())
@click.option("--samples", type=SAMPLES, help="Sessions, instead of what the file says.")
@node_address
def submit(task: Path, samples: int | None, url: str, token: str | None) -> None:
    """Submit TASK (a TOML or JSON file) to a node that serves; prints its task id.

    \b
    polarnode submit task.toml
    polarnode watch --task $(polarnode submit task.toml)
    """
    from polarnode.cli import remote

    remote.submit(task, remote.Where(url=url, token=token), samples=samples)


@main.command(short_help="Show sessions of a node as they end.")
@click.option("--task", "task_id", help="Only this task; ends when it is done.")
@click.option("--consumer", help="A name whose position the node keeps: what was shown is acknowledged, and not shown again.")
@node_address
def watch(task_id: str | None, consumer: str | None, url: str, token: str | None) -> None:
    """Show the sessions of a node as they end, one line each; first those that are over, then each as it comes.

    \b
    polarnode watch
    polarnode watch --task task-1dcb2842ecd2e338
    """
    from polarnode.cli import remote

    remote.watch(task_id, consumer, remote.Where(url=url, token=token))


@main.command(short_help="Write a node's finished trajectories as JSONL.")
@click.option("--task", "task_id", help="Only this task.")
@click.option("--group", "group_id", help="Only this group.")
@click.option("--outcome", help="Only sessions that ended so: completed, timeout, failed, error, cancelled or interrupted.")
@click.option("--min-reward", type=float, help="Only sessions with this reward or more.")
@click.option("--turns", type=click.Choice(["table", "full"]), default="table", show_default=True, help="full: each turn's own tokens as well.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: stdout]")
@node_address
def export(output: Path | None, turns: str, url: str, token: str | None, **filters: Any) -> None:
    """Write the trajectories of a node that are over as JSONL, oldest first.

    \b
    polarnode export -o trajectories.jsonl
    polarnode export --min-reward 1 --turns full | head -1
    """
    from polarnode.cli import remote

    remote.export(filters, "full" if turns == "full" else "table", output, remote.Where(url=url, token=token))


@main.command(short_help="Show one session's turns and traces, trainable tokens marked.")
@click.argument("session", required=False)
@click.option(
    "--from", "file", type=task_file(), help="A trajectories.jsonl instead of a node; a beginning of SESSION is then enough, and none shows all."
)
@click.option("--model", type=FOUND, help="Checkpoint folder to decode with.")
@click.option("--plain", is_flag=True, help="Trainable tokens between « and » instead of in colour, as where there is no terminal.")
@node_address
def inspect(session: str | None, file: Path | None, model: Path | None, plain: bool, url: str, token: str | None) -> None:
    """Show SESSION: its turns and what each extends, why turns were left out, and its traces with the trainable tokens marked.

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
    inspection.inspect(session, file if file is not None else remote.Where(url=url, token=token), model, plain=plain)


@main.command(short_help="Say what each recorded request of a harness extends, and what of it is new.")
@click.argument("folder", metavar="DIR", type=FOUND)
@click.option("--tokenizer", type=FOUND, help="Checkpoint folder, without weights if you like. [default: the embedded polarnode-tiny]")
@click.option("--json", "as_json", is_flag=True, help="One object a line on stdout; the totals go to stderr.")
def replay(folder: Path, tokenizer: Path | None, as_json: bool) -> None:
    """Feed recorded requests (NN-request.json) through the providers and lineage: what each extends, why, and how many tokens are new.

    \b
    polarnode replay recordings/
    polarnode replay --json --tokenizer /models/Qwen3-8B recordings/pi | jq .kind

    Every folder under DIR that holds requests is one session. No engine is started: a request's answer is what the harness shows in a later one.

    Exit code 0 when no request was refused.
    """
    from polarnode.cli import replay as replaying

    sys.exit(replaying.replay(folder, tokenizer, as_json=as_json))


@main.command(short_help="Merge model calls recorded elsewhere into training sequences, by tokens alone.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: stdout]")
def merge(file: Path, output: Path | None) -> None:
    """Merge FILE (JSONL; - for stdin), model calls of any engine or gateway, into rows in which every sampled token is trainable once.

    \b
    polarnode merge calls.jsonl -o rows.jsonl
    zcat calls.jsonl.gz | polarnode merge - | head -1

    A line is {session_id, turn_id, prompt_ids, sampled_ids, logprobs, weight_version?}, a session's in the order they were asked, sessions in
    any. A call goes on in a row when its prompt holds an earlier prompt and reply of the session exactly; any other begins a row, and is
    counted. A row is {session_id, token_ids, loss_mask, logprobs, turn_spans, version_spans}. Counts go to stderr.

    Exit code 0 when every line was a call; 1 when one was not: it is told, and the others are merged all the same.
    """
    from polarnode.cli import merge as merging

    sys.exit(merging.merge(file, output))


@main.command(short_help="Say what this machine has and lacks for a node, and what to do.")
@node_options
@click.pass_context
def doctor(ctx: click.Context, /, **given: Any) -> None:
    """Say what this machine has for a node, what it lacks, and what to do about it. Starts no engine and no container.

    \b
    polarnode doctor
    polarnode doctor --gpus 0-7 --model /models/Qwen3-8B

    Exit code 0 when a node would start here.
    """
    from polarnode.cli import doctor as examining

    sys.exit(examining.examine(config_of(given_settings(ctx, given))))
