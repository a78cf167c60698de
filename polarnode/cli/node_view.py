"""What a running node does, as tables: its stages, engines, journal and consumers, its tasks, its weights.

Invariant: this module shows only what the API answers and decides nothing; `--json` prints the answer itself.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polarnode.cli.output import bounded, harmless, open_console
from polarnode.cli.remote import RemoteNode
from polarnode.client.values import ClientError
from polarnode.core import codec
from polarnode.core.status import Consumer
from polarnode.core.weights import PauseMode, WeightsStatus

UPDATES = 10  # updates shown of the weights' history; the node keeps 100


def _table(*columns: str, left: int = 1) -> Table:
    """An empty table whose first `left` columns are names, and the others figures."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    return table


def print_json(value: Any) -> None:
    click.echo(codec.dump_json(codec.plain(value)))


def _size(count: float) -> str:
    """A number of bytes with two or three digits: `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def age(seconds: float | None) -> str:
    """A span of time in its largest unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# ── status ────────────────────────────────────────────────────────────────────


def status(node: RemoteNode, *, as_json: bool) -> None:
    """Print a node's state, and the nodes that share its log."""
    client = node.client()
    found = client.status()
    if as_json:
        print_json(found)
        return
    open_console().print(status_view(found, client.consumers()))
    if found.get("nodes"):
        from polarnode.cli.fleet_run import nodes_table  # part of `polarnode[node]`

        open_console().print(nodes_table(found["nodes"]))


def status_view(found: Mapping[str, Any], consumers: tuple[Consumer, ...]) -> RenderableType:
    """GET /v1/status and the consumers as a screen of text."""
    model, scheduler, weights = found["model"], found["scheduler"], found["weights"]
    head = (
        f"node {found['node']} · model {model['name']} ({model['context_length']} tokens) · weights"
        f" {weights['version']} · {scheduler['live']} sessions, {len(found['captures']['open'])} captures"
    )
    parts: list[RenderableType] = [Text(harmless(head), style="bold")]
    parts += [Text(harmless(each), style="yellow") for each in warnings(found)]
    parts += [Text(""), _stage_table(scheduler["stages"]), Text(""), _engines(found["engine"])]
    parts += [Text(harmless(each)) for each in _lines(found)]
    if consumers:
        parts += [Text(""), consumers_table(consumers)]
    return Group(*parts)


def _stage_table(stages: Mapping[str, Any]) -> Table:
    table = _table("stage", "inside", "limit", "waiting")
    for name, each in stages.items():
        table.add_row(name, *(str(each[field]) for field in ("inside", "limit", "waiting")))
    return table


def _engines(engine: Mapping[str, Any]) -> Table:
    columns = ("running", "waiting", "queued", "KV", "resident", "displaced", "held", "restarts")
    table = _table("engine", "state", "GPUs", "weights", *columns, left=4)
    for host in engine["hosts"]:
        cache = host.get("residency")
        resident = "–" if cache is None else str(cache["busy"] + cache["idle"])
        more = ("–", "–") if cache is None else (str(cache["displaced"]), str(cache["held"]))
        state = Text(host["state"], style="green" if host["state"] == "ready" else "red")
        table.add_row(
            harmless(str(host["url"] or host["index"])),
            state,
            ",".join(map(str, host["gpus"])) or "–",
            harmless(host["weight_version"]),
            *(str(host[name]) for name in ("running", "waiting", "queued")),
            f"{100 * host['token_usage']:.0f} %",
            resident,
            *more,
            str(host["restarts"]),
        )
    return table


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines below the tables: the journal, what waits, and how late the event loop is."""
    journal = found["journal"]
    yield (
        f"\njournal: event {journal['last_seq']}, {_size(journal['stored_bytes'])} of at most"
        f" {_size(journal['most_bytes'])}, {_size(journal['disk_free'])} free on its disk;"
        f" {journal['unacknowledged_events']} events not acknowledged"
        + (
            ""
            if journal["oldest_unacknowledged_s"] is None
            else f", the oldest for {age(journal['oldest_unacknowledged_s'])}"
        )
    )
    containers, calls, again = found["runtimes"], found["callbacks"], found["evaluations"]
    yield f"containers: {containers['live']} in use, {containers['warm']} warm, {containers['failed']} failed"
    if calls["taken"] or calls["owed"]:
        yield f"callbacks: {calls['taken']} taken, {calls['owed']} pending, {calls['failed']} failed attempts"
    if again["open"]:
        yield f"evaluations: {again['open']} open, {again['sessions']} sessions to go"
    for name in found["teachers"]:
        yield f"teacher {name}"
    yield f"event loop: {1000 * found['loop']['p99']:.0f} ms late at most, 99 times of 100"


def warnings(found: Mapping[str, Any]) -> Iterator[str]:
    """The conditions that an operator should look at, one sentence each."""
    if held := found["weights"]["paused"]:
        yield f"generation is held ({held}): polarnode resume"
    if found["scheduler"]["stopping"]:
        yield "the node stops, and takes no tasks"
    for name, stage in found["scheduler"]["stages"].items():
        if stage["held_back"]:
            yield f"{name}: {stage['held_back']}"
    for host in found["engine"]["hosts"]:
        if host["last_error"]:
            yield f"engine {host['index']}: {host['last_error']}"
    for url, trouble in found["callbacks"]["trouble"].items():
        yield f"callbacks to {url}: {trouble}"
    for place in ("weights", "journal", "engine"):
        if sentence := found[place].get("warning"):
            yield f"{place}: {sentence}"


# ── tasks ─────────────────────────────────────────────────────────────────────


def tasks(node: RemoteNode, *, limit: int, before: str | None, as_json: bool) -> None:
    """Print the newest tasks."""
    # One more than the limit is asked for, to know whether there are more.
    found = node.client().tasks(limit=limit if as_json else limit + 1, before=before)
    if as_json:
        print_json({"tasks": found})
        return
    now, table = (
        time.time(),
        _table("task", "state", "sessions by outcome", "sessions", "rewarded", "age", left=3),
    )
    for each in found[:limit]:
        sessions = each["sessions"]
        rewarded = sum((one["reward"] or 0) > 0 for one in sessions)
        table.add_row(
            harmless(each["task_id"]),
            Text("done", style="green") if each["finished"] else Text("open", style="cyan"),
            ", ".join(f"{count} {name}" for name, count in each["counts"].items()),
            str(len(sessions)),
            str(rewarded),
            age(now - each["submitted"]),
        )
    console = open_console()
    console.print(table)
    if len(found) > limit:
        last = harmless(found[limit - 1]["task_id"])
        console.print(f"… more: polarnode tasks --before {last}", style="dim", soft_wrap=True)


def cancel(task_id: str, node: RemoteNode, *, as_json: bool) -> None:
    """End a task's sessions."""
    cancelled = node.client().cancel(task_id)
    if as_json:
        print_json({"task_id": task_id, "cancelled": cancelled})
    elif cancelled:
        click.echo(f"the sessions of task {harmless(task_id)} end; each keeps the turns it has")
    else:
        click.echo(f"task {harmless(task_id)} is over: nothing of it runs")


# ── weights ───────────────────────────────────────────────────────────────────


def weights(node: RemoteNode, *, as_json: bool) -> None:
    """Print the weights that are served and the last updates."""
    _print_weights(node.client().weights(), as_json=as_json)


def hold(mode: PauseMode, node: RemoteNode, *, as_json: bool) -> None:
    """Hold generation."""
    _print_weights(node.client().pause(mode), as_json=as_json)


def go_on(node: RemoteNode, *, as_json: bool) -> None:
    """Continue generation."""
    _print_weights(node.client().resume(), as_json=as_json)


def _print_weights(found: WeightsStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    held = "generation goes on" if found.paused is None else f"generation is held ({found.paused})"
    parts: list[RenderableType] = [Text(f"weights {harmless(found.version)} · {held}", style="bold")]
    if found.updating is not None:
        parts.append(Text(f"version {harmless(found.updating)} is being loaded", style="cyan"))
    if found.released:
        parts.append(Text(f"GPU memory lent: {', '.join(found.released)}", style="yellow"))
    if found.stale:
        names = ", ".join(map(harmless, found.stale))
        parts.append(Text(f"stale, and idle until they serve it: {names}", style="yellow"))
    if found.warning is not None:
        parts.append(Text(harmless(found.warning), style="yellow"))
    if found.history:
        table, now = _table("version", "mode", "source", "age", "seconds", left=3), time.time()
        shown = found.history[:UPDATES]
        for each in shown:
            source = " ".join(each.source.values())
            table.add_row(
                *map(harmless, (each.version, each.mode, source)), age(now - each.at), f"{each.seconds:.1f}"
            )
        parts += [Text(""), table]
        if len(found.history) > len(shown):
            parts.append(Text(f"… {len(found.history) - len(shown)} more", style="dim"))
    open_console().print(Group(*parts))


# ── consumers ─────────────────────────────────────────────────────────────────


def consumers(node: RemoteNode, *, forget: str | None, as_json: bool) -> None:
    """Print the consumers, after forgetting one if it is named."""
    client = node.client()
    if forget is not None:
        client.forget_consumer(forget)
    found = client.consumers()
    if as_json:
        print_json({"consumers": found})
    elif found:
        open_console().print(consumers_table(found))
    else:
        click.echo("no consumer has a position on this node")


def consumers_table(found: tuple[Consumer, ...]) -> Table:
    """A table of how far behind each consumer is, with those that have the most events waiting first."""
    table, now = _table("consumer", "behind", "bytes", "missed", "streams", "last seen"), time.time()
    ordered = sorted(found, key=lambda each: -each.behind_events)
    shown, more = bounded(ordered)
    for each in shown:
        name = harmless(each.consumer) + ("" if each.holds else " (not waited for)")
        seen = age(now - each.last_seen) + " ago" if each.last_seen else "–"
        figures = (str(each.behind_events), _size(each.behind_bytes), str(each.missed), str(each.connected))
        table.add_row(name, *figures, seen)
    for line in more:
        table.add_row(line, style="dim")
    return table


# ── logs ──────────────────────────────────────────────────────────────────────

FOLLOW_INTERVAL_S = 0.5  # between two reads of a log: as quick as tail -f, and one small request


def logs(target: str | None, node: RemoteNode, *, follow: bool, tail: int, as_json: bool) -> None:
    """Print the end of a log, or the names of the node's logs. With `follow`, lines that are added are
    printed too.
    """
    client = node.client()
    names = client.node_logs()
    if target is None:
        if as_json:
            print_json({"logs": names})
        for each in () if as_json else names:
            click.echo(f"{harmless(each.name)}  {_size(each.size)}")
        return
    read = client.node_log if any(each.name == target for each in names) else client.log
    try:
        piece = read(target, tail=tail)
    except ClientError as error:
        if error.status != 404:
            raise
        known = ", ".join(each.name for each in names) or "none"
        raise click.ClickException(harmless(f"{error}; the node's own logs are: {known}")) from error
    if as_json:
        print_json(piece)
        return
    while True:
        click.echo(harmless(piece.text), nl=False)
        if not follow or (piece.ended and piece.next_offset >= piece.size):
            break
        if piece.next_offset >= piece.size:
            time.sleep(FOLLOW_INTERVAL_S)
        piece = read(target, offset=piece.next_offset)
    if piece.text and not piece.text.endswith("\n"):
        click.echo()
    if piece.wrapped:
        click.echo("· the log is full: its second half is in order when the session is over", err=True)
