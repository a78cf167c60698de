"""The sessions of a generation: what the journal knows of them, which run now, and what comes of each as it
ends.

The rule for whoever edits it: as many tasks are submitted as the node can have on their way, and no more, so
that ten thousand sessions cost what a hundred do; a session's end is heard of as an event, by its task's
name, and read from the journal, so that what was seen live is what the next start will see.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import trio
from attrs import define, field, frozen
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from polarnode.cli import output
from polarnode.cli.run import FRAME_ROWS, PLAIN_REFRESH_S, REFRESH_S, on_own_node
from polarnode.cli.serve import Stop
from polarnode.core import codec
from polarnode.journal.journal import Journal
from polarnode.journal.values import Filters, StoredEvent, TaskRecord
from polarnode.node.config import NodeConfig
from polarnode.node.node import Node
from polarnode.offline.acceptance import Acceptance, is_empty, judge
from polarnode.offline.generation import Attempt, Slot, finished, next_attempt

ENDS = Filters(kinds=("task",))


@frozen(kw_only=True)
class Work:
    """The slots that are still to run, what is asked of them, and how many there were before: done, and
    accepted of those.
    """

    slots: Sequence[Slot]
    acceptance: Acceptance
    retry_empty: int
    done: int = 0
    accepted: int = 0


@frozen(kw_only=True)
class Made:
    """What this run came to."""

    wall_s: float
    stopped: bool
    ended: int = 0


# ── what the journal knows ────────────────────────────────────────────────────


async def survey(
    journal: Journal, slots: Sequence[Slot], acceptance: Acceptance
) -> Mapping[Slot, list[Attempt]]:
    """The attempts at each slot; one that has not ended counts as interrupted."""
    return {slot: await attempts_at(journal, slot, acceptance) for slot in slots}


async def attempts_at(journal: Journal, slot: Slot, acceptance: Acceptance) -> list[Attempt]:
    """The attempts at one slot, in order."""
    found: list[Attempt] = []
    while (record := await journal.task(slot.named(len(found)))) is not None:
        found.append(await _attempt(journal, record, acceptance))
    return found


async def latest(journal: Journal, slot: Slot) -> TaskRecord | None:
    """The task of the last attempt at a slot."""
    found, number = None, 0
    while (record := await journal.task(slot.named(number))) is not None:
        found, number = record, number + 1
    return found


async def _attempt(journal: Journal, record: TaskRecord, acceptance: Acceptance) -> Attempt:
    """What became of a task's one session. Of one that spoke at all only its trajectory says whether it said
    something.
    """
    session = record.sessions[0]
    if session.outcome is None:
        return Attempt(session_id=session.session_id, status="interrupted", empty=False)
    trajectory = await journal.trajectory(session.session_id) if session.sampled_tokens else None
    if trajectory is None:
        return Attempt(
            session_id=session.session_id, status=session.outcome.status, empty=not session.sampled_tokens
        )
    accepted = judge(acceptance, trajectory).accepted
    return Attempt(
        session_id=session.session_id,
        status=session.outcome.status,
        empty=is_empty(trajectory),
        accepted=accepted,
    )


# ── running ───────────────────────────────────────────────────────────────────


async def run_work(config: NodeConfig, work: Work, console: Console) -> Made | None:
    """Run what is still to run, to its end or until it is stopped. None when it was stopped before the node
    was there.
    """
    return await on_own_node(config, console, lambda node, stop: _made(node, work, stop, console))


async def _made(node: Node, work: Work, stop: Stop, console: Console) -> Made:
    started = trio.current_time()
    under_way = UnderWay(node=node, work=work, started=started, most=_on_their_way(node.config))

    def end() -> None:
        console.print(
            "· stopping: sessions end with what they have, and are run again next time; once more to leave at"
            " once",
            style="dim",
        )
        under_way.stop()

    stop.act = end
    if stop.asked:
        under_way.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, under_way, console)
        await under_way.run()
        nursery.cancel_scope.cancel()
    await node.journal.flushed()
    return Made(wall_s=trio.current_time() - started, stopped=under_way.stopped, ended=under_way.ended)


def _on_their_way(config: NodeConfig) -> int:
    """Sessions the node can have in all its stages at once, and as many again in line, so that no stage waits
    for this loop.
    """
    return 2 * (config.init_limit + config.ready_limit + config.run_limit + config.post_limit)


@define(eq=False)
class UnderWay:
    """The slots that run and those in line. `run` ends when there is none of either, or when the last has
    ended after `stop`.
    """

    node: Node
    work: Work
    started: float
    most: int
    stopped: bool = False
    done: int = field(init=False)  # slots that are finished, those of earlier runs included
    accepted: int = field(init=False)
    ended: int = 0  # sessions that ended in this run
    _attempts: dict[Slot, list[Attempt]] = field(factory=dict)
    _line: deque[Slot] = field(factory=deque)
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
        """Begin no more, and end what runs with what it has."""
        self.stopped = True
        self.node.cancel_all()

    async def run(self) -> None:
        """Everything, to its end."""
        journal = self.node.journal
        seen = journal.last_seq  # before the survey: what ends meanwhile is heard of twice, and not missed
        await self._take_up()
        await self._fill()
        while self._running:
            await journal.wait_after(seen)
            page = await journal.events(seen, filters=ENDS)
            seen = page.seen
            for event in page.events:
                await self._heard(event)
            await self._fill()

    async def _take_up(self) -> None:
        """Where earlier runs left each slot: done, in line, or given a fresh session by the node's own
        recovery.
        """
        for slot in self.work.slots:
            # before it is looked at: one that ends in between is heard of
            record = await latest(self.node.journal, slot)
            self._attempts[slot] = await self._look(slot)
            if record is not None and not record.finished:
                self._running[record.task_id] = slot
            else:
                self._settle(slot)

    async def _look(self, slot: Slot) -> list[Attempt]:
        return await attempts_at(self.node.journal, slot, self.work.acceptance)

    def _settle(self, slot: Slot) -> None:
        """A slot of which nothing runs is done, or goes in line."""
        found = self._attempts[slot]
        if finished(found, retry_empty=self.work.retry_empty):
            self.done += 1
            self.accepted += found[-1].accepted
        else:
            self._line.append(slot)

    async def _fill(self) -> None:
        while self._line and not self.stopped and len(self._running) < self.most:
            slot = self._line.popleft()
            order = slot.order(next_attempt(self._attempts[slot]))
            self._running[slot.named(next_attempt(self._attempts[slot]))] = slot
            await self.node.submit(order, idempotency_key=None)
        if self.stopped:
            self.node.cancel_all()  # one that was submitted while the stop came

    async def _heard(self, event: StoredEvent) -> None:
        """A task is over: its slot is done, or goes in line again."""
        body = codec.read_json(event.body)
        slot = self._running.pop(str(body.get("task_id")), None) if isinstance(body, dict) else None
        if slot is None:
            return
        self.ended += 1
        self._attempts[slot] = await self._look(slot)
        self._settle(slot)


# ── while they run ────────────────────────────────────────────────────────────


def progress(under_way: UnderWay, now: float) -> str:
    """A line of how far it is: `12 of 40 sessions done, 5 accepted (42 %), 8 under way, 3.1 a minute, about 9
    min left`.
    """
    done, spent = under_way.done, now - under_way.started
    said = [f"{done} of {under_way.total} sessions done"]
    if done:
        said.append(f"{under_way.accepted} accepted ({100 * under_way.accepted / done:.0f} %)")
    said.append(f"{under_way.running} under way")
    if under_way.ended and spent > 0:
        rate = under_way.ended / spent
        said += [f"{60 * rate:.1f} a minute", f"about {duration((under_way.total - done) / rate)} left"]
    return ", ".join(said)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


async def _watch(under_way: UnderWay, console: Console) -> None:
    """Show how far it is until it is cancelled: a live table on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        while True:
            await trio.sleep(PLAIN_REFRESH_S)
            console.print(f"· {progress(under_way, trio.current_time())}")
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while True:
            alive = [status for status in under_way.node.scheduler.sessions() if status.outcome is None]
            table = output.live_table(alive, rows=max(1, console.height - FRAME_ROWS - 1))
            live.update(Group(Text(progress(under_way, trio.current_time())), table))
            await trio.sleep(REFRESH_S)
