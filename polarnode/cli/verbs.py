"""The commands that look at a running node and steer it, and shell completion.

Keep heavy imports inside the commands, as in `main`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import get_completion_class

from polarnode.cli.options import existing_file_type, folder, merged_settings, node_address, serving_config
from polarnode.core.weights import PauseMode

Command = TypeVar("Command", bound=Callable[..., Any])
# The modes that hold generation; `drain` lets it come to an end instead.
HOLDING_MODES = tuple(mode for mode in get_args(PauseMode) if mode != "drain")
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command(short_help="Start a node and serve until Ctrl-C.")
@click.pass_context
def serve(ctx: click.Context, /, **params: Any) -> None:
    """Start a node and serve until Ctrl-C; the same as `polarnode` with these options and no command.

    \b
    polarnode serve --cpu
    polarnode serve --gpus 0-7 --model /models/Qwen3-8B

    Exit codes: 0 when it was stopped; 1 when it could not start; 130 after a second Ctrl-C.
    """
    config = serving_config(merged_settings(ctx, params), hint="polarnode serve --cpu")
    from polarnode.cli.serve import serve as serving

    sys.exit(serving(config))


@click.command(short_help="Show what a node does: stages, engines, journal, consumers.")
@as_json
@node_address
def status(as_json: bool, url: str, token: str | None) -> None:
    """Show the state of a node, and the nodes of its log: stages, engines with their KV caches, the journal,
    how far consumers are behind, and warnings.

    \b
    polarnode status
    polarnode status --json | jq .scheduler.live

    resident: sessions that the KV cache holds; displaced: those whose prefix it gave up; held: calls that
    wait for their session's place. docs/engines.md explains them.

    Exit codes: 0 when it was shown; 1 when the node does not answer.
    """
    from polarnode.cli import node_view, remote

    node_view.status(remote.RemoteNode(url=url, token=token), as_json=as_json)


@click.command(short_help="List tasks, newest first.")
@click.option(
    "--limit", type=click.IntRange(1, 999), default=20, show_default=True, help="Most tasks to show."
)
@click.option("--before", metavar="TASK", help="Only tasks older than this one.")
@as_json
@node_address
def tasks(limit: int, before: str | None, as_json: bool, url: str, token: str | None) -> None:
    """List a node's tasks, newest first, a row each, with the number of their sessions by outcome.

    \b
    polarnode tasks
    polarnode tasks --limit 100 --json | jq .tasks[0].task_id

    Exit codes: 0 when they were shown; 1 when the node does not answer.
    """
    from polarnode.cli import node_view, remote

    node = remote.RemoteNode(url=url, token=token)
    node_view.tasks(node, limit=limit, before=before, as_json=as_json)


@click.command(short_help="Fork a session: go on from one of its states.")
@click.argument("session")
@click.option(
    "--turn", "-t", type=click.IntRange(0), required=True, help="Its first turn to sample anew, from 0."
)
@click.option("-n", "num_samples", type=click.IntRange(1, 4096), default=1, show_default=True, help="Forks.")
@click.option(
    "--by",
    type=click.Choice(("resume", "replay", "freeze")),
    default="resume",
    show_default=True,
    help="From a snapshot's files, by answering from the record, or from its frozen processes.",
)
@as_json
@node_address
def fork(
    session: str, turn: int, num_samples: int, by: str, as_json: bool, url: str, token: str | None
) -> None:
    """Submit a task of forks of a session: its own task again, from its state before a turn. The turns before
    it are context, and trained in the parent alone. docs/forks.md

    \b
    polarnode fork 4f1c09aa72be3d55 --turn 3 -n 4 --by replay

    Exit codes: 0 when the task was taken; 1 when it was refused or the node does not answer.
    """
    from polarnode.cli import remote

    node = remote.RemoteNode(url=url, token=token)
    way: Any = by  # click has checked the value
    remote.fork(session, node, turn=turn, num_samples=num_samples, by=way, as_json=as_json)


@click.command(short_help="Print the log of a session, of the node or of an engine.")
@click.argument("target", metavar="[SESSION|node|engine-N]", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on as the log grows, until the session is over.")
@click.option(
    "--tail",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Lines of the log's end to begin with.",
)
@as_json
@node_address
def logs(target: str | None, follow: bool, tail: int, as_json: bool, url: str, token: str | None) -> None:
    """Print the end of a log: what a session's harness printed, running or ended, or the log of the node or
    one of its engines. Without a name, list the node's own logs.

    \b
    polarnode logs 4f1c09aa72be3d55 -f
    polarnode logs node --tail 20
    polarnode logs engine-0
    polarnode logs node-1/engine-0 --url http://10.0.0.5:8080

    Exit codes: 0 when it was printed; 1 when there is no such log; 130 after Ctrl-C.
    """
    from polarnode.cli import node_view, remote

    if follow and (as_json or target is None):
        raise click.UsageError("--follow needs one SESSION, node or engine-N, and cannot go with --json")
    node = remote.RemoteNode(url=url, token=token)
    node_view.logs(target, node, follow=follow, tail=tail, as_json=as_json)


@click.command(short_help="End a task's sessions.")
@click.argument("task_id", metavar="TASK")
@as_json
@node_address
def cancel(task_id: str, as_json: bool, url: str, token: str | None) -> None:
    """End the sessions of TASK. Each keeps the turns it has and delivers its trajectory as `cancelled`.

    \b
    polarnode cancel task-1dcb2842ecd2e338

    Exit codes: 0 when its sessions end, or had ended; 1 when there is no such task.
    """
    from polarnode.cli import node_view, remote

    node_view.cancel(task_id, remote.RemoteNode(url=url, token=token), as_json=as_json)


@click.command(short_help="Hold generation; sessions wait.")
@click.option(
    "--mode",
    type=click.Choice(HOLDING_MODES),
    default="in_place",
    show_default=True,
    help="What becomes of calls in progress: docs/weights.md.",
)
@as_json
@node_address
def pause(mode: PauseMode, as_json: bool, url: str, token: str | None) -> None:
    """Hold generation: calls in progress and new ones wait until `polarnode resume`.

    \b
    polarnode pause
    polarnode pause --mode retract

    Exit codes: 0 when generation is held; 1 otherwise.
    """
    from polarnode.cli import node_view, remote

    node_view.hold(mode, remote.RemoteNode(url=url, token=token), as_json=as_json)


@click.command(short_help="Continue generation after pause.")
@as_json
@node_address
def resume(as_json: bool, url: str, token: str | None) -> None:
    """Continue generation after `polarnode pause`.

    \b
    polarnode resume

    Exit codes: 0 when generation goes on; 1 otherwise.
    """
    from polarnode.cli import node_view, remote

    node_view.go_on(remote.RemoteNode(url=url, token=token), as_json=as_json)


@click.command(short_help="Show the weights served and the last updates.")
@as_json
@node_address
def weights(as_json: bool, url: str, token: str | None) -> None:
    """Show the version of the weights that is served, whether generation is held, and the last updates.

    \b
    polarnode weights
    polarnode weights --json | jq .version

    Exit codes: 0 when they were shown; 1 when the node does not answer.
    """
    from polarnode.cli import node_view, remote

    node_view.weights(remote.RemoteNode(url=url, token=token), as_json=as_json)


@click.command(short_help="Show how far each consumer is behind.")
@click.option("--forget", metavar="NAME", help="Delete this consumer first: nothing more is kept for it.")
@as_json
@node_address
def consumers(forget: str | None, as_json: bool, url: str, token: str | None) -> None:
    """Show the consumers that a node keeps a position for, and how far behind each is.

    \b
    polarnode consumers
    polarnode consumers --forget old-trainer

    Exit codes: 0 when they were shown; 1 when there is no consumer to forget, or it reads a stream.
    """
    from polarnode.cli import node_view, remote

    node_view.consumers(remote.RemoteNode(url=url, token=token), forget=forget, as_json=as_json)


@click.command(short_help="Measure how far weights are from those that sampled a session.")
@click.argument("session", metavar="SESSION")
@click.option(
    "--weights",
    default="policy",
    show_default=True,
    help="What scores: policy (what is served now), the version served, an adapter, or a teacher.",
)
@click.option("--tokens", is_flag=True, help="Print each sampled token too.")
@as_json
@node_address
def score(session: str, weights: str, tokens: bool, as_json: bool, url: str, token: str | None) -> None:
    """Compute the logprobs that other weights give the tokens of SESSION, which has finished, and compare
    them with the recorded ones: staleness, measured. Nothing is sampled.

    \b
    polarnode score 4f1c09aa72be3d55
    polarnode score 4f1c09aa72be3d55 --weights run-a --json | jq .total.k3

    A row is a turn, or the part of one that a version sampled. KL k1 and k3 estimate the KL divergence from
    the weights that sampled to those that score; the last column is the share of tokens whose probability
    ratio PPO would clip. docs/teachers.md explains them.

    Exit codes: 0 when it was measured; 1 when the session has not finished, or the node does not hold the
    weights.
    """
    from polarnode.cli import remote
    from polarnode.cli import score as scoring

    node = remote.RemoteNode(url=url, token=token)
    scoring.score(session, weights, node, tokens=tokens, as_json=as_json)


@click.command(short_help="Print a script that completes commands in your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that lets SHELL complete commands and options.

    \b
    polarnode completion bash >> ~/.bashrc
    polarnode completion zsh >> ~/.zshrc
    polarnode completion fish > ~/.config/fish/completions/polarnode.fish

    Exit codes: 0 when it was printed; 2 for another shell.
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"this version of click completes no {shell}")
    click.echo(found(ctx.find_root().command, {}, "polarnode", "_POLARNODE_COMPLETE").source())


@click.command(short_help="Show a file's sessions as a page: groups, timelines, tokens.")
@click.option("--from", "file", type=existing_file_type(), required=True, help="A trajectories.jsonl.")
@click.option("--model", type=folder(exists=True), help="Checkpoint whose tokenizer decodes the tokens.")
@click.option("--port", default=0, show_default="any free one", help="Serve the page on 127.0.0.1 here.")
@click.option("--bundle", "out", type=folder(), help="Write page and data into this new folder instead.")
def view(file: Path, model: Path | None, port: int, out: Path | None) -> None:
    """Serve the page of a node over a file, without a node, until Ctrl-C.

    \b
    polarnode view --from out/run/trajectories.jsonl
    polarnode view --from out/run/trajectories.jsonl --bundle shared

    A node has the same page at /ui/. With --bundle, a folder that any web server can serve is written.
    Without --model, tokens of other models than the embedded one are shown as ids.

    Exit codes: 0 when it was stopped, or written; 1 when the file cannot be shown.
    """
    from polarnode.cli import view as viewing

    viewing.view(file, model=model, port=port, out=out)


COMMANDS = (
    view,
    serve,
    status,
    tasks,
    logs,
    fork,
    cancel,
    pause,
    resume,
    weights,
    consumers,
    score,
    completion,
)


def add_verbs(main: click.Group) -> None:
    """Add these commands to the command line. `serve` takes the options that `main` takes without a
    command.
    """
    serve.params = [each for each in main.params if each.name != "version"]
    for command in COMMANDS:
        main.add_command(command)
