"""Results of whole tasks as Polar tells them, piece by piece, so that a group of long sessions is never in
memory as a whole.

The rule for whoever edits it: each piece is read, made and written in a thread, and nothing is kept of it;
who asks again gets the same bytes.

What a callback is sent for an event: the event as the stream has it, or Polar's TaskResult or SessionResult.

The rule for whoever edits it: receivers that know no chunks read `Content-Length`, so that every body has
one; a body that is too large to be held is made twice, once to be measured.

One attempt: an event read, made a body, POSTed; taken, or what went wrong as a sentence.

The rule for whoever edits it: an attempt always ends, and never as an exception; nothing of the node's
environment leads it elsewhere, and neither does the receiver: it goes to the task's URL or it fails.

What is known of callbacks from outside, and how long whoever failed is left alone. The rule for whoever edits
it: every number has its reason.

Who is told when: a task for each URL to which something is owed, at work while it is and at rest while it
fails.

The rule for whoever edits it: what is kept here is forgotten without harm, because the journal knows what is
owed; so each table has an end.
"""

import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import httpx2
import trio
from attrs import define, field, frozen

from polarnode.core.backoff import Backoff
from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, boundary
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.journal.journal import Journal
from polarnode.journal.pending_callbacks import Owed
from polarnode.journal.queries import Recent
from polarnode.journal.values import USUAL_KINDS, Filters, SessionRecord, StoredEvent, TaskRecord
from polarnode.support.background import open_background
from polarnode.support.bounded import remember
from polarnode.trainers.polar import missing_result, origin_of, session_result, task_word

# ── polar results ────────────────────────────────────────────────────────────


async def session_body(
    journal: Journal, task: TaskRecord, session: SessionRecord, *, node: str, recent: Recent | None = None
) -> bytes:
    """The SessionResult of a session that is over; from `recent` where it was made a moment ago, as bridges
    poll.
    """
    found = await journal.trajectory(session.session_id)
    if found is not None:
        made = partial(_made, found, task.spec)
        return await journal.read(made if recent is None else partial(recent.get, session.session_id, made))
    if session.outcome is None:
        return b"null"
    missing = partial(
        missing_result, session.session_id, task.task_id, session.outcome, task.spec.metadata, node
    )
    return await journal.read(lambda: dump_json(missing()))


def _made(trajectory: Trajectory, spec: TaskSpec) -> bytes:
    return dump_json(session_result(trajectory, spec))


async def task_body(
    journal: Journal,
    task: TaskRecord,
    head: dict[str, Json],
    *,
    node: str,
    results: bool = True,
    recent: Recent | None = None,
) -> AsyncGenerator[bytes, None]:
    """A JSON object: what `head` says, and `results` of the sessions that are over, in order of their
    samples.
    """
    yield dump_json({**head, "result_paths": []})[:-1] + b',"results":['
    first = True
    for session in task.sessions if results else ():
        if session.outcome is not None:
            piece = await session_body(journal, task, session, node=node, recent=recent)
            yield piece if first else b"," + piece
            first = False
    yield b"]}"


def result_head(task: TaskRecord) -> dict[str, Json]:
    """What a TaskResult begins with."""
    return {
        "task_id": polar_id(task),
        "status": task_word(finished=task.finished, cancelled=task.cancelled is not None),
    }


def status_head(task: TaskRecord) -> dict[str, Json]:
    """What a TaskStatus begins with."""
    over = sum(session.outcome is not None for session in task.sessions)
    return {**result_head(task), "total_sessions": len(task.sessions), "completed_sessions": over}


def polar_id(task: TaskRecord) -> str:
    """A task's id as whoever submitted it says it."""
    return origin_of(task.spec.metadata).task_id or task.task_id


# ── bodies ────────────────────────────────────────────────────────────

HELD_BYTES = 8 << 20  # of a body in memory: most groups are smaller


@frozen(kw_only=True)
class Body:
    """`held` in memory, or made again piece by piece; `size` bytes."""

    size: int
    held: bytes | None
    pieces: Callable[[], AsyncGenerator[bytes, None]]


async def body_of(journal: Journal, event: StoredEvent, task: TaskRecord | None, *, node: str) -> Body:
    """The body for an event, as its task wants it. A task that is not kept any more wants the event
    itself.
    """
    wanted = "event" if task is None else task.spec.callback_format
    if task is not None and wanted == "polar_task" and event.kind == "task":
        whole = task
        return await _measured(lambda: task_body(journal, whole, result_head(whole), node=node))
    session = (
        None
        if task is None
        else next((one for one in task.sessions if event.key == f"trajectory:{one.session_id}"), None)
    )
    if task is not None and wanted == "polar_session" and session is not None:
        return _whole(await session_body(journal, task, session, node=node))
    return _whole(event.json)


def _whole(body: bytes) -> Body:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    return Body(size=len(body), held=body, pieces=pieces)


async def _measured(pieces: Callable[[], AsyncGenerator[bytes, None]]) -> Body:
    size, kept = 0, list[bytes]()
    async for piece in pieces():
        size += len(piece)
        if size <= HELD_BYTES:
            kept.append(piece)
        else:
            kept.clear()
    return Body(size=size, held=b"".join(kept) if size <= HELD_BYTES else None, pieces=pieces)


# ── posting ────────────────────────────────────────────────────────────

# for one POST and its answer: a whole group of long sessions is some hundred megabytes, which a loopback
# takes in seconds
ATTEMPT_S = 60.0
# of an answer's body that is read, so that its connection can be used again; of others only the status is
REPLY_BYTES = 64 << 10


class CallbackFailed(PolarnodeError):
    """An event was not taken, and why."""

    boundary = "client"


@frozen(kw_only=True)
class Poster:
    """Tells receivers. `node` is what results call this node."""

    journal: Journal
    node: str
    client: httpx2.AsyncClient

    async def told(self, owed: Owed) -> bool:
        """Whether it was taken; False where the event is not kept any more. Raises CallbackFailed when it is
        to be tried again.
        """
        event = await self._event(owed.seq)
        if event is None:
            return False
        with trio.move_on_after(ATTEMPT_S):
            with boundary(CallbackFailed, "it could not be told"):
                status = await self._posted(owed, event)
            if 200 <= status < 300:
                return True
            raise CallbackFailed(
                f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else "")
            )
        raise CallbackFailed(f"it gave no answer within {ATTEMPT_S:g} s")

    async def _event(self, seq: int) -> StoredEvent | None:
        page = await self.journal.events(seq - 1, filters=Filters(kinds=USUAL_KINDS), limit=1)
        return page.events[0] if page.events and page.events[0].seq == seq else None

    async def _posted(self, owed: Owed, event: StoredEvent) -> int:
        """The status of the answer."""
        body = await body_of(self.journal, event, await self.journal.task(owed.task_id), node=self.node)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(body.size),
            "Idempotency-Key": event.key,  # the same however often it comes
            "Polarnode-Event": event.kind,
            "Polarnode-Seq": str(event.seq),
        }
        async with aclosing(body.pieces()) as pieces:
            content = pieces if body.held is None else body.held
            async with self.client.stream("POST", owed.url, content=content, headers=headers) as response:
                if int(response.headers.get("content-length", REPLY_BYTES + 1)) <= REPLY_BYTES:
                    await response.aread()
                return response.status_code


def shown(url: str) -> str:
    """A URL as others may see it: what stands in a query may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


# ── values ────────────────────────────────────────────────────────────

# after a failure: a trainer that is back gets its events within a minute or so; what failed together does not
# come back together
PAUSES = Backoff(first_s=1.0, longest_s=60.0, jitter=0.25)


@frozen(kw_only=True)
class CallbackStatistics:
    """Since the node's start: events `taken`, attempts that `failed`. Since there is this journal: events
    that went with its retention before they were taken (`expired`).

    Now: `owed` events as of the last look, POSTs `under_way`, `urls` looked after, `trouble` by URL (without
    its query): what its last failed attempt met, of the last few.
    """

    taken: int = 0
    failed: int = 0
    expired: int = 0
    owed: int = 0
    under_way: int = 0
    urls: int = 0
    trouble: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class Pause:
    """How long somebody is left alone. `url` is whose it is, where it is a task's."""

    url: str = ""
    failures: int = 0
    until: float = 0.0

    @property
    def resting(self) -> bool:
        return self.until > trio.current_time()

    def longer(self) -> None:
        """It failed again."""
        self.until = trio.current_time() + PAUSES.delay(self.failures, draw=random.random())
        self.failures += 1


# ── callbacks ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

AT_ONCE = 32  # POSTs under way to URLs that answer: each holds one session's JSON, a few megabytes
PROBES = 8  # to URLs whose last POSTs all failed: places of their own, so that those hold up no others
AT_ONE_URL = 4  # to one URL: a trainer takes its groups one after another anyway
URLS = 256  # at work at once; one that rests is none of them
HEADS = 64  # tasks looked at in a round of one URL
# tasks and URLs whose pauses are known: 200 bytes each; one that is forgotten is only tried earlier
REMEMBERED = 20_000
TROUBLES = 20  # URLs with their last trouble in the status
LOOK_S = 0.25  # between two looks at what is owed, however many events come
UNREAD_S = 5.0  # before another look where the journal could not be read
SETTLE_S = 5.0  # at the node's end, for what its last sessions owe: whoever answers is told in one
CLOSE_S = 5.0  # for closing idle connections


@define(eq=False)
class Callbacks:
    """Made by `open_callbacks`."""

    journal: Journal
    poster: Poster
    _places: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(AT_ONCE), init=False)
    _probes: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(PROBES), init=False)
    _working: set[str] = field(factory=set, init=False)  # URLs
    _lanes: dict[str, Pause] = field(factory=dict, init=False)  # of URLs that failed, or whose tasks all rest
    _tasks: dict[str, Pause] = field(factory=dict, init=False)  # of tasks whose event was not taken
    _trouble: dict[str, str] = field(factory=dict, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)
    _taken: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _expired: int = field(default=0, init=False)
    _owed: int = field(default=0, init=False)

    def statistics(self) -> CallbackStatistics:
        """The counts now."""
        return CallbackStatistics(
            taken=self._taken,
            failed=self._failed,
            expired=self._expired,
            owed=self._owed,
            under_way=self._places.borrowed_tokens + self._probes.borrowed_tokens,
            urls=len(self._working),
            trouble=dict(self._trouble),
        )

    async def settled(self) -> None:
        """Return when all that is owed is owed to URLs that rest."""
        await self.journal.flushed()
        while await self.journal.owed_count():
            resting = [url for url, pause in self._lanes.items() if pause.resting]
            if not self._working and not await self.journal.owed_urls(1, resting):
                return
            await trio.sleep(LOOK_S)

    # ── who is at work ────────────────────────────────────────────────────────

    async def run(self, ready: trio.Event) -> None:
        """For ever."""
        ready.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                try:
                    until = await self._begin(nursery)
                except PolarnodeError:
                    logger.exception("what is owed to callbacks could not be read")
                    until = trio.current_time() + UNREAD_S
                await trio.sleep(LOOK_S)
                with trio.move_on_at(until):
                    await self._news.wait()
                self._news = trio.Event()

    async def _watch(self) -> None:
        """Every event is news, and so is what an earlier life left."""
        seen = self.journal.last_seq
        while True:
            await self.journal.wait_after(seen)
            seen = self.journal.last_seq
            self._news.set()

    async def _begin(self, nursery: trio.Nursery) -> float:
        """Set to work whoever is owed something and does not rest; when the first of the others has rested
        enough.
        """
        self._owed = await self.journal.owed_count()
        await self._count_expired()
        resting = {url: pause.until for url, pause in self._lanes.items() if pause.resting}
        if self._owed and len(self._working) < URLS:
            for url in await self.journal.owed_urls(URLS, [*self._working, *resting]):
                if url not in self._working and url not in resting and len(self._working) < URLS:
                    self._working.add(url)
                    nursery.start_soon(self._lane, url)
        return min(resting.values(), default=float("inf"))

    async def _count_expired(self) -> None:
        expired = await self.journal.owed_expired()
        if expired > self._expired:
            logger.warning(
                "%d events went with the journal's retention before their callbacks took them",
                expired - self._expired,
            )
        self._expired = expired

    # ── one URL ───────────────────────────────────────────────────────────────

    async def _lane(self, url: str) -> None:
        try:
            while await self._round(url):
                await self.journal.flushed()  # what was taken is no longer owed when it is looked for again
        except PolarnodeError:
            logger.exception("what is owed to %s could not be read", shown(url))
            self._rest(url)
        finally:
            self._working.discard(url)
            self._news.set()

    async def _round(self, url: str) -> bool:
        """Tell the URL the oldest event of some of its tasks; whether there may be more for it now."""
        resting = {
            name: pause.until for name, pause in self._tasks.items() if pause.url == url and pause.resting
        }
        heads = await self.journal.owed(url, HEADS, resting)
        heads = tuple(head for head in heads if head.task_id not in resting)
        lane = self._lanes.get(url)
        if not heads:
            if resting:
                self._lanes.setdefault(url, Pause()).until = min(resting.values())
            return False
        failing = lane is not None and lane.failures > 0
        taken = await self._all_told(
            heads[:1] if failing else heads, self._probes if failing else self._places
        )
        if taken:
            self._lanes.pop(url, None)
            return True
        self._rest(url)
        return False

    def _rest(self, url: str) -> None:
        lane = self._lanes.get(url) or Pause()
        lane.longer()
        remember(self._lanes, url, lane, most=REMEMBERED)

    async def _all_told(self, heads: tuple[Owed, ...], places: trio.CapacityLimiter) -> int:
        """How many were taken. After the first failure none is begun until one was taken: a URL that is dead
        is asked a few times at most.
        """
        ours, ends = trio.CapacityLimiter(AT_ONE_URL), list[bool]()

        async def one(head: Owed) -> None:
            async with ours, places:
                if any(ends) or not ends:
                    ends.append(await self._told(head))

        async with trio.open_nursery() as nursery:
            for head in heads:
                nursery.start_soon(one, head)
        return sum(ends)

    async def _told(self, head: Owed) -> bool:
        """Whether an event is owed no more."""
        try:
            taken = await self.poster.told(head)
        except PolarnodeError as error:
            self._not_taken(head, error)
            return False
        self._taken += taken
        self._tasks.pop(head.task_id, None)
        self._trouble.pop(shown(head.url), None)
        self.journal.callback_taken(head.seq)
        return True

    def _not_taken(self, head: Owed, error: PolarnodeError) -> None:
        self._failed += 1
        pause = self._tasks.get(head.task_id) or Pause(url=head.url)
        pause.longer()
        remember(self._tasks, head.task_id, pause, most=REMEMBERED)
        remember(self._trouble, shown(head.url), str(error), most=TROUBLES)
        logger.info("the callback %s of task %s is tried again: %s", shown(head.url), head.task_id, error)


@asynccontextmanager
async def open_callbacks(journal: Journal, *, node: str) -> AsyncIterator[Callbacks]:
    """The callbacks of a node, told behind the block. What is still owed SETTLE_S after its end is told in
    the node's next life.
    """
    limits = httpx2.Limits(max_connections=AT_ONCE + PROBES, max_keepalive_connections=AT_ONCE)
    headers = {"accept-encoding": "identity", "user-agent": "polarnode"}
    # Neither proxies nor credentials of the node's environment: an event goes to the machine that its task
    # names, and says nothing of this one.
    client = httpx2.AsyncClient(
        timeout=None, limits=limits, headers=headers, trust_env=False, follow_redirects=False
    )
    try:
        callbacks = Callbacks(journal=journal, poster=Poster(journal=journal, node=node, client=client))
        async with open_background(callbacks.run):
            yield callbacks
            # a journal that can not be read is said elsewhere
            with trio.move_on_after(SETTLE_S), suppress(PolarnodeError):
                await callbacks.settled()
    finally:
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S),
            suppress(httpx2.HTTPError, OSError, trio.BusyResourceError),
        ):
            await client.aclose()
