"""`polarnode watch`: a line for each session as it ends, and on a terminal a table of those that run.

The events are read in a thread of their own, because the table is redrawn while no event arrives. Lines are
the same with and without a terminal.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import click
from attrs import define, field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from polarnode.cli import output
from polarnode.cli.output import harmless, open_console
from polarnode.cli.remote import RemoteNode
from polarnode.client.api import NEWEST_POSITION
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import Event, Unreachable
from polarnode.core import codec
from polarnode.core.conversation import Json

WARNING_KINDS = ("gap", "unreadable")
PATIENCE_S = 600.0  # for a node that is restarting
REFRESH_INTERVAL_S = 1.0  # between two requests for the running sessions; each is small
LINE = 300  # characters of an exception; the name of a module is in the first words
TABLE_ROWS = 12  # rows of running sessions; the lines of ended ones stay in sight above


def watch(
    task_id: str | None,
    consumer: str | None,
    node: RemoteNode,
    *,
    newest: bool = False,
    as_json: bool = False,
) -> None:
    """Print a line for each event as it arrives; with `task_id`, until that task is done."""
    client = node.client(patience_s=PATIENCE_S)
    node.wait_started()
    if task_id is not None:
        node.client().task(task_id)
    after = NEWEST_POSITION if newest else None
    events = client.trajectories(consumer=consumer, task_id=task_id, after=after, ack=consumer is not None)
    console, ends = open_console(), SameTestEnds()
    if as_json:
        for event in events:
            note = ends.note(event)
            click.echo(codec.dump_json({**summary(event), **({"note": note} if note else {})}))
    elif console.is_terminal:
        _watch_live(client, events, task_id, console, ends)
    else:
        for event in events:
            _print_event(console, event, ends)


def _print_event(console: Console, event: Event, ends: "SameTestEnds") -> None:
    console.print(line(event), soft_wrap=True, style="yellow" if event.kind in WARNING_KINDS else "")
    if (note := ends.note(event)) is not None:
        console.print(note, soft_wrap=True, style="yellow")


# ── tests that end alike ──────────────────────────────────────────────────────

# The most sessions whose group is still awaited. A node runs some hundreds, and a reader that began late
# never hears of some groups.
MAX_AWAITED_SESSIONS = 1 << 16
# The last line of a traceback, as Python prints it and as pytest prints it.
EXCEPTION_LINE = re.compile(
    r"^(?:E +)?((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE
)
TRACED = re.compile(r"^Traceback \(most recent call last\)|^E  ", re.MULTILINE)
# What says that a test did not run, without a traceback: shells (bash, dash), Python, pytest, make, Node.
UNRUN = re.compile(
    r"^(.*: (?:command )?not found|.*: \[Errno 2\] No such file or directory|\S+: No module named .+"
    r"|.*: [Ss]yntax error\b.*|ERROR: (?:file or directory )?not found: .*"
    r"|make: \*\*\* (?:No .+|\[.+\] Error 12[67])|Error: Cannot find module .+)$",
    re.MULTILINE,
)


@define(eq=False)
class SameTestEnds:
    """Notes groups whose tests all ended alike. If the tests of all samples ended in the same traceback, or
    all lacked the same program or module, the fault is more often the test's than that of every sample.
    """

    _ends: dict[str, str | None] = field(factory=dict, init=False)  # the ends by session, oldest first

    def note(self, event: Event) -> str | None:
        """The note to print about a group that is over, if all its sessions were seen."""
        if event.kind == "trajectory":
            self._ends[event.data["session_id"]] = test_exception(event.data)
            if len(self._ends) > MAX_AWAITED_SESSIONS:
                del self._ends[next(iter(self._ends))]
        if event.kind != "group":
            return None
        ends = [self._ends.pop(each["session_id"], None) for each in event.data["sessions"]]
        if len(ends) < 2 or ends[0] is None or len(set(ends)) > 1:
            return None
        what = "traceback" if EXCEPTION_LINE.match(ends[0]) else "line"
        return f"the tests of all {len(ends)} samples ended in the same {what}: {harmless(ends[0])}"


def test_exception(value: Mapping[str, Any]) -> str | None:
    """The exception in which a session's test ended, or what the test did not find; None if it gave a reward
    or ended otherwise.
    """
    outcome, found = value["outcome"], (value.get("metrics") or {}).get("evaluation")
    said = found.get("output_tail") if isinstance(found, Mapping) else None
    if said is None and outcome.get("boundary") == "evaluator":
        said = outcome.get("reason")
    if value.get("reward") or not isinstance(said, str):
        return None
    lines = EXCEPTION_LINE.findall(said) if TRACED.search(said) else UNRUN.findall(said)
    return lines[-1].strip()[:LINE] if lines else None


# ── on a terminal ─────────────────────────────────────────────────────────────


@define(eq=False)
class WatchedEvents:
    """Reads events in a thread, until there are no more, or an error ends it."""

    events: Iterator[Event]
    queue: "SimpleQueue[Event]" = field(factory=SimpleQueue, init=False)
    error: BaseException | None = field(default=None, init=False)
    thread: threading.Thread = field(init=False)

    @thread.default
    def _begin(self) -> threading.Thread:
        # The thread is a daemon, so that a Ctrl-C ends the process in the middle of a read.
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        try:
            for event in self.events:
                self.queue.put(event)
        except Exception as error:  # `next` raises it again in the thread of the caller
            self.error = error

    def next(self, wait_s: float) -> Event | None:
        """The next event, or None after `wait_s` seconds. Raises the error that ended the reading, if any."""
        try:
            return self.queue.get(timeout=wait_s)
        except Empty:
            if self.error is not None and self.queue.empty():
                raise self.error from None
            return None

    @property
    def over(self) -> bool:
        return not self.thread.is_alive() and self.queue.empty()


def _watch_live(
    client: PolarnodeClient,
    events: Iterator[Event],
    task_id: str | None,
    console: Console,
    ends: SameTestEnds,
) -> None:
    reader, ended = WatchedEvents(events), Counter[str]()
    look = PolarnodeClient(client.base_url, token=client.token, patience_s=0.0)
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not reader.over:
                live.update(_now(look, task_id), refresh=True)
                event = reader.next(REFRESH_INTERVAL_S)
                while event is not None:
                    _print_event(console, event, ends)
                    if event.kind == "trajectory":
                        ended[event.data["outcome"]["status"]] += 1
                    event = reader.next(0) if not reader.queue.empty() else None
            reader.next(0)
    finally:
        seen = ", ".join(f"{count} {status}" for status, count in ended.most_common())
        console.print(f"{ended.total()} sessions seen{': ' if seen else ''}{seen}", style="dim")


def _now(client: PolarnodeClient, task_id: str | None) -> RenderableType:
    """The running sessions, or why nothing is known about them."""
    try:
        sessions = [each for changes in client.live_sessions(follow=False) for each in changes.sessions]
    except Unreachable as error:
        return Text(f"{error}", style="yellow")
    shown = [each for each in sessions if task_id in (None, each.task_id)]
    if not shown:
        return Text("no session runs; waiting for one to end", style="dim")
    return Group(output.live_table(shown, rows=TABLE_ROWS))


# ── lines ─────────────────────────────────────────────────────────────────────


def summary(event: Event) -> dict[str, Json]:
    """An event as JSON for scripts, without tokens."""
    if event.kind != "trajectory":
        return {"event": event.kind, "id": event.id, **event.data}
    value, trajectory = event.data, event.trajectory
    return {
        "event": event.kind,
        "id": event.id,
        **{name: value[name] for name in ("session_id", "task_id", "group_id", "sample_index", "reward")},
        "harness": value["harness"]["name"],
        "outcome": value["outcome"],
        "turns": len(value["turns"]),
        "traces": len(value["traces"]),
        "trainable_tokens": 0 if trajectory is None else trajectory.trainable_tokens,
        "left_out_tokens": output.left_out_tokens(trajectory),
    }


def line(event: Event) -> str:
    """An event as one line of text."""
    match event.kind:
        case "trajectory":
            return _trajectory_line(event)
        case "group":
            return _group_line(event.data)
        case "task":
            counts = ", ".join(f"{count} {status}" for status, count in event.data["counts"].items())
            return f"task {event.data['task_id']} is done: {counts}"
        case "gap":
            return (
                f"events {event.data['after']} to {event.data['oldest']} are no longer kept: read more often"
            )
        case "unreadable":
            return (
                f"event {event.seq} ({harmless(event.key)}) cannot be read: {harmless(event.data['reason'])}"
            )
    return f"{event.kind}: unknown event, this polarnode is older than the node"


def _group_line(data: Mapping[str, Any]) -> str:
    """A group's line; an older node sends no state."""
    rewards = " ".join(output.reward_text(reward) for reward in data["rewards"])
    state, reason = data.get("state"), data.get("reason")
    why = (
        ""
        if state is None
        else f", {harmless(state)}"
        if reason is None
        else f", {harmless(state)} ({harmless(reason)})"
    )
    return f"group {data['group_id']} is done{why}: rewards {rewards}"


def _trajectory_line(event: Event) -> str:
    value, trajectory = event.data, event.trajectory
    trainable = 0 if trajectory is None else trajectory.trainable_tokens
    head = (
        f"{value['session_id']} {harmless(value['harness']['name'])} {value['outcome']['status']} reward"
        f" {output.reward_text(value['reward'])}"
    )
    counts = f"turns {len(value['turns'])} traces {len(value['traces'])} trainable {trainable}"
    left_out = output.left_out_tokens(trajectory)
    if left_out:
        tokens = ", ".join(f"{harmless(reason)} {count}" for reason, count in left_out.items())
        counts = f"{counts}, left out: {tokens}"
    if trajectory is not None and trajectory.forked_from is not None:
        counts = f"{counts} fork of {harmless(output.fork_text(trajectory.forked_from))}"
    if trajectory is None or trajectory.outcome.status == "completed":
        return f"{head} {counts}"
    return f"{head} {counts} · {output.why(trajectory.outcome)}"
