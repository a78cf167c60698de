"""The sessions of a generation: reading their results from the journal, and running the missing ones.

Only as many tasks are submitted as the node can process at once, so that ten thousand sessions need no more
memory than a hundred. Invariant: the end of a session arrives as an event and its result is read from the
journal, so that a live run and a resumed one see the same.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import trio
from attrs import define, field, frozen
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from polarnode.cli import output
from polarnode.cli.run import FRAME_ROWS, PLAIN_REFRESH_S, REFRESH_INTERVAL_S, on_own_node
from polarnode.cli.stopping import StopRequest
from polarnode.core import codec
from polarnode.journal import queries
from polarnode.journal.reader import JournalReader
from polarnode.journal.values import EventFilters, StoredEvent, TaskRecord
from polarnode.node.config import NodeConfig
from polarnode.node.node import Node
from polarnode.offline.acceptance import AcceptanceRule, has_no_answer, judge
from polarnode.offline.generation import Attempt, Slot, finished, next_attempt

ENDS = EventFilters(kinds=("task",))


@frozen(kw_only=True)
class PendingWork:
    """The slots that are still to run, and how many earlier runs finished (`done`) and accepted."""

    slots: Sequence[Slot]
    acceptance: AcceptanceRule
    retry_empty: int
    done: int = 0
    accepted: int = 0


@frozen(kw_only=True)
class GenerationRun:
    """One run of the command: how many seconds it took, whether it was stopped, and how many sessions
    ended.
    """

    wall_s: float
    stopped: bool
    ended: int = 0


# ── attempts in the journal ───────────────────────────────────────────────────


async def list_attempts(
    reader: JournalReader, slots: Sequence[Slot], acceptance: AcceptanceRule
) -> Mapping[Slot, list[Attempt]]:
    """The attempts at each slot. An attempt that has not ended counts as interrupted."""
    return {slot: await attempts_at(reader, slot, acceptance) for slot in slots}


async def attempts_at(reader: JournalReader, slot: Slot, acceptance: AcceptanceRule) -> list[Attempt]:
    """The attempts at one slot, in order."""
    found: list[Attempt] = []
    while (record := await reader.query(queries.task, slot.named(len(found)))) is not None:
        found.append(await _attempt(reader, record, acceptance))
    return found


async def latest(reader: JournalReader, slot: Slot) -> TaskRecord | None:
    """The task of the last attempt at a slot."""
    found, number = None, 0
    while (record := await reader.query(queries.task, slot.named(number))) is not None:
        found, number = record, number + 1
    return found


async def _attempt(reader: JournalReader, record: TaskRecord, acceptance: AcceptanceRule) -> Attempt:
    """The attempt of a task, which has one session. Whether an answer is empty is in its trajectory."""
    session = record.sessions[0]
    if session.outcome is None:
        return Attempt(session_id=session.session_id, status="interrupted", empty=False)
    trajectory = (
        await reader.query(queries.trajectory, session.session_id) if session.sampled_tokens else None
    )
    if trajectory is None:
        return Attempt(
            session_id=session.session_id, status=session.outcome.status, empty=not session.sampled_tokens
        )
    accepted = judge(acceptance, trajectory).accepted
    return Attempt(
        session_id=session.session_id,
        status=session.outcome.status,
        empty=has_no_answer(trajectory),
        accepted=accepted,
    )


# ── running ───────────────────────────────────────────────────────────────────


async def run_work(config: NodeConfig, work: PendingWork, console: Console) -> GenerationRun | None:
    """Run the pending slots to their end or until stopped. Returns None if stopped before the node was
    open.
    """
    specs = [each.spec for each in work.slots]
    return await on_own_node(config, console, lambda node, stop: _run(node, work, stop, console), specs=specs)


async def _run(node: Node, work: PendingWork, stop: StopRequest, console: Console) -> GenerationRun:
    started = trio.current_time()
    running = RunningWork(node=node, work=work, started=started, most=_submit_limit(node.config))

    def end() -> None:
        console.print(
            "· stopping: sessions are ended and run again next time; press Ctrl-C again to exit at once",
            style="dim",
        )
        running.stop()

    stop.act = end
    if stop.requested:
        running.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, running, console)
        await running.run()
        nursery.cancel_scope.cancel()
    await node.journal.writer.flush()
    return GenerationRun(wall_s=trio.current_time() - started, stopped=running.stopped, ended=running.ended)


def _submit_limit(config: NodeConfig) -> int:
    """Sessions to keep submitted: twice what all stages of the node hold, so that no stage waits for this
    loop.
    """
    return 2 * (config.init_limit + config.ready_limit + config.run_limit + config.post_limit)


@define(eq=False)
class RunningWork:
    """The running and the queued slots. `run` ends when there are none left, or, after `stop`, when the
    running ones have ended.
    """

    node: Node
    work: PendingWork
    started: float
    most: int
    stopped: bool = False
    done: int = field(init=False)  # finished slots, including those of earlier runs
    accepted: int = field(init=False)
    ended: int = 0  # sessions that ended in this run
    _attempts: dict[Slot, list[Attempt]] = field(factory=dict)
    _queue: deque[Slot] = field(factory=deque)
    _running: dict[str, Slot] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.done, self.accepted = self.work.done, self.work.accepted

    @property
    def total(self) -> int:
        return self.work.done + len(self.work.slots)

    @property
    def running(self) -> int:
        return len(self._running)

    def stop(self) -> None:
        """Start no more sessions and end the running ones."""
        self.stopped = True
        self.node.cancel_all()

    async def run(self) -> None:
        """Run every slot to its end."""
        journal = self.node.journal
        # This is taken before the journal is read, so that an end in between is seen twice, not missed.
        seen = journal.commits.progress.last_seq
        await self._sort_slots()
        await self._fill()
        while self._running:
            await journal.commits.wait_event_after(seen)
            page = await journal.reader.events(seen, filters=ENDS)
            seen = page.seen
            for event in page.events:
                await self._task_ended(event)
            await self._fill()

    async def _sort_slots(self) -> None:
        """Sort the slots by what earlier runs left: finished, queued, or already restarted by the node's
        recovery.
        """
        for slot in self.work.slots:
            # The record is read before the attempts, so that an end in between arrives as an event.
            record = await latest(self.node.journal.reader, slot)
            self._attempts[slot] = await self._look(slot)
            if record is not None and not record.finished:
                self._running[record.task_id] = slot
            else:
                self._settle(slot)

    async def _look(self, slot: Slot) -> list[Attempt]:
        return await attempts_at(self.node.journal.reader, slot, self.work.acceptance)

    def _settle(self, slot: Slot) -> None:
        """Count a slot that does not run as done, or queue it."""
        found = self._attempts[slot]
        if finished(found, retry_empty=self.work.retry_empty):
            self.done += 1
            self.accepted += found[-1].accepted
        else:
            self._queue.append(slot)

    async def _fill(self) -> None:
        while self._queue and not self.stopped and len(self._running) < self.most:
            slot = self._queue.popleft()
            order = slot.order(next_attempt(self._attempts[slot]))
            self._running[slot.named(next_attempt(self._attempts[slot]))] = slot
            await self.node.submit(order, idempotency_key=None)
        if self.stopped:
            self.node.cancel_all()  # including a session submitted while the stop arrived

    async def _task_ended(self, event: StoredEvent) -> None:
        """A task ended: its slot is done, or queued again."""
        body = codec.read_json(event.body)
        slot = self._running.pop(str(body.get("task_id")), None) if isinstance(body, dict) else None
        if slot is None:
            return
        self.ended += 1
        self._attempts[slot] = await self._look(slot)
        self._settle(slot)


# ── progress ──────────────────────────────────────────────────────────────────


def progress(running: RunningWork, now: float) -> str:
    """A progress line: `12 of 40 sessions done, 5 accepted (42 %), 8 running, 3.1 a minute, about 9 min
    left`.
    """
    done, spent = running.done, now - running.started
    parts = [f"{done} of {running.total} sessions done"]
    if done:
        parts.append(f"{running.accepted} accepted ({100 * running.accepted / done:.0f} %)")
    parts.append(f"{running.running} running")
    if running.ended and spent > 0:
        rate = running.ended / spent
        parts += [f"{60 * rate:.1f} a minute", f"about {duration((running.total - done) / rate)} left"]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


async def _watch(running: RunningWork, console: Console) -> None:
    """Show the progress until cancelled: a live table on a terminal, else a line from time to time."""
    if not console.is_terminal:
        while True:
            await trio.sleep(PLAIN_REFRESH_S)
            step = running.node.images.step
            waits_for = f" ({step})" if step is not None else ""
            console.print(f"· {progress(running, trio.current_time())}{waits_for}")
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while True:
            alive = [status for status in running.node.scheduler.sessions() if status.outcome is None]
            table = output.live_table(alive, rows=max(1, console.height - FRAME_ROWS - 1))
            live.update(Group(Text(progress(running, trio.current_time())), table))
            await trio.sleep(REFRESH_INTERVAL_S)
