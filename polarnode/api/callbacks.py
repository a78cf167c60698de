"""Callbacks: each event of a task is POSTed to the task's URL until the receiver accepts it.

The journal records which events are pending. Everything kept here may be forgotten without loss, so each
table is bounded. Events of one task are sent in order. An attempt always ends, never raises past `Callbacks`,
and goes to the task's URL alone: the environment's proxies and credentials are not used, redirects are not
followed, and the address connected to is one that was checked. The task's `callback_format` selects the body
of an event; integrations register their own formats.
"""

import logging
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import httpx2
import trio
from attrs import define, field, frozen

from polarnode.containers.egress.requests import Resolver, is_own
from polarnode.containers.egress.rules import (
    CALLBACK_NETWORKS,
    Network,
    meant,
    never_connected,
    read_network,
    within,
)
from polarnode.core.backoff import Backoff
from polarnode.core.conversation import json_key
from polarnode.core.errors import PolarnodeError, Refused, boundary
from polarnode.core.task import TaskSpec
from polarnode.journal.journal import Journal
from polarnode.journal.pending_callbacks import EVENT_FORMAT, PendingCallback
from polarnode.journal.values import USUAL_KINDS, EventKind, Filters, StoredEvent, TaskRecord
from polarnode.support.bounded import remember
from polarnode.support.concurrency import open_background

logger = logging.getLogger(__name__)

# ── bodies ────────────────────────────────────────────────────────────

HELD_BYTES = 8 << 20  # the largest body kept in memory: most groups are smaller


@frozen(kw_only=True)
class CallbackFormat:
    """A value of `callback_format`: the kinds of events it sends, and their bodies.

    `body` yields the bytes of one body, piece by piece. It is called a second time for a body larger than
    HELD_BYTES, and must yield the same bytes. `refusal` reads the reply of a receiver that answered 2xx: why
    it did not take the body nevertheless, or None. A reply over REPLY_BYTES is given as b"".
    """

    kinds: tuple[EventKind, ...]
    body: Callable[[Journal, StoredEvent, TaskRecord], AsyncGenerator[bytes, None]]
    refusal: Callable[[bytes], str | None] = lambda reply: None


@frozen(kw_only=True)
class CallbackBody:
    """A body of `size` bytes: `held` in memory, or generated again by `pieces`."""

    size: int
    held: bytes | None
    pieces: Callable[[], AsyncGenerator[bytes, None]]


async def measured(pieces: Callable[[], AsyncGenerator[bytes, None]]) -> CallbackBody:
    """Measure a body, because receivers without chunked encoding need `Content-Length`.

    A body of one piece is in memory anyway and is kept. A body larger than HELD_BYTES is generated twice.
    """
    size, kept, count = 0, list[bytes](), 0
    async for piece in pieces():
        size += len(piece)
        count += 1
        if size <= HELD_BYTES or count == 1:
            kept.append(piece)
        else:
            kept.clear()
    return CallbackBody(size=size, held=b"".join(kept) if kept or not size else None, pieces=pieces)


# ── receivers ──────────────────────────────────────────────────────────────────

LOOKUPS = 8  # names looked up at once: each is a thread that waits
LOOKUP_S = 10.0  # a resolver asks its servers for 5 s each, and most have two
ADDRESSES = 4  # tried of one name: the first two of each family get round one that is down


class CallbackFailed(PolarnodeError):
    """An event was not accepted, and why, in words for whoever may read the status."""

    boundary = "client"


# One sentence for every kind of silence: whoever may submit a task must not learn from the status which ports
# of the node's networks are open.
NO_ANSWER = "it gave no HTTP answer, or none in time: node.log has the reason"
# nor what a receiver answers
NOT_TAKEN = "it answered that it did not take the event: its own log has the reason, and node.log its answer"


def callback_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The networks of the node's setting. Raises ConfigError where one is invalid."""
    return tuple(read_network(text, "callback_networks") for text in texts)


@define(eq=False, kw_only=True)
class Receivers:
    """Where callbacks may go: `networks`, and never the node's own sockets or what `never_connected` names.

    `own_ports` are collections of ports that the node listens at on this machine; add to it whatever opens
    later. A name is looked up once for each attempt, and each address is checked before it is connected to.
    """

    networks: tuple[Network, ...] = callback_networks(CALLBACK_NETWORKS)
    own_ports: list[Collection[int]] = field(factory=list)
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = field(
        factory=lambda: Resolver(trio.CapacityLimiter(LOOKUPS))
    )
    is_own: Callable[[str], bool] = is_own

    def refusal(self, text: str, port: int) -> str | None:
        """Why no callback goes to an address, as a predicate; None when it may."""
        address = ip_address(text)
        if never_connected(address):
            return "leads to a link-local, metadata, multicast or reserved address, where no callback goes"
        ours = any(port in ports for ports in self.own_ports)
        if ours and (meant(address).is_loopback or self.is_own(text)):
            return "leads to a socket of this node itself: give the address of a receiver"
        if within(address, self.networks) or within(meant(address), self.networks):
            return None
        return (
            "leads to no network that callbacks may reach: have its network added to the node's setting"
            " callback_networks"
        )

    def check(self, url: str) -> None:
        """Raise Refused for a URL whose host is an address where no callback goes."""
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
        with suppress(ValueError):  # a name
            reason = self.refusal(str(ip_address(host)), _port(parts.scheme, parts.port))
            if reason is not None:
                raise Refused(f"callback_url {reason}", path="$.callback_url")

    async def addresses(self, url: httpx2.URL) -> Sequence[str]:
        """The addresses of a URL's host that may be connected to, in the order to try them. Raises
        CallbackFailed when there is none.
        """
        port, found = _port(url.scheme, url.port), list[str]()
        with trio.move_on_after(LOOKUP_S):
            try:
                found = list(await self.resolve(url.host, port))
            except (OSError, UnicodeError) as error:  # socket.gaierror is one
                logger.info("the callback host %s could not be looked up: %s", url.host, error)
        reasons = {each: self.refusal(each, port) for each in found}
        allowed = [each for each, reason in reasons.items() if reason is None]
        if allowed:
            return allowed[:ADDRESSES]
        for each, reason in reasons.items():
            logger.info("no callback to %s at %s port %d: it %s", url.host, each, port, reason)
        raise CallbackFailed(next((f"its host {reason}" for reason in reasons.values()), NO_ANSWER))


def _port(scheme: str, port: int | None) -> int:
    return port or (443 if scheme == "https" else 80)


# ── one attempt ────────────────────────────────────────────────────────────

# for one POST and its response: a group of long sessions is some hundred megabytes, which a loopback
# transfers in seconds
ATTEMPT_S = 60.0
# bytes of a response body that are read, so that its connection can be reused and its format can see whether
# the event was taken; of a longer one only the status is used
REPLY_BYTES = 64 << 10


@frozen(kw_only=True)
class Poster:
    """Sends events to their receivers. `formats` maps names to the formats other than `event`."""

    journal: Journal
    client: httpx2.AsyncClient
    receivers: Receivers
    formats: Mapping[str, CallbackFormat] = field(factory=dict)

    async def send(self, pending: PendingCallback) -> bool:
        """Send one event. True when the receiver accepted it, False when the event is pruned. Raises
        CallbackFailed when the event must be sent again.
        """
        page = await self.journal.events(pending.seq - 1, filters=Filters(kinds=USUAL_KINDS), limit=1)
        if not page.events or page.events[0].seq != pending.seq:
            return False
        with trio.move_on_after(ATTEMPT_S):
            with boundary(CallbackFailed, "it could not be sent"):
                status, refusal = await self._post(pending, page.events[0])
            if refusal is not None:
                logger.warning(
                    "the callback %s of task %s: the receiver did not take %s: %s",
                    shown(pending.url),
                    pending.task_id,
                    page.events[0].key,
                    refusal,
                )
                raise CallbackFailed(NOT_TAKEN)
            if 200 <= status < 300:
                return True
            raise CallbackFailed(
                f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else "")
            )
        logger.info("the callback %s took more than %g s", shown(pending.url), ATTEMPT_S)
        raise CallbackFailed(NO_ANSWER)

    async def _post(self, pending: PendingCallback, event: StoredEvent) -> tuple[int, str | None]:
        """POST a body to the first of the receiver's addresses that can be connected to, and return the
        response's status, and why its receiver did not take it although the status is 2xx.
        """
        url = httpx2.URL(pending.url)
        chosen, body = await self._body(event, await self.journal.task(pending.task_id))
        for address in await self.receivers.addresses(url):
            try:
                status, reply = await self._post_to(address, url, body, event)
                refusal = None if chosen is None or status >= 300 else chosen.refusal(reply)
                return status, refusal
            except httpx2.ConnectError as error:
                logger.info("the callback %s at %s: %s", shown(pending.url), address, error)
            except (httpx2.HTTPError, OSError) as error:
                logger.info("the callback %s at %s: %s", shown(pending.url), address, error)
                break  # its body may have been read
        raise CallbackFailed(NO_ANSWER)

    async def _post_to(
        self, address: str, url: httpx2.URL, body: CallbackBody, event: StoredEvent
    ) -> tuple[int, bytes]:
        """POST a body to the very address that was checked; the name in `url` stays in Host and in TLS. The
        status and the body of the reply.
        """
        headers = {
            "Host": url.netloc.decode("ascii"),
            "Content-Type": "application/json",
            "Content-Length": str(body.size),
            "Idempotency-Key": event.key,  # the same at every delivery
            "Polarnode-Event": event.kind,
            "Polarnode-Seq": str(event.seq),
        }
        async with aclosing(body.pieces()) as pieces:
            content = pieces if body.held is None else body.held
            async with self.client.stream(
                "POST",
                url.copy_with(host=address),
                content=content,
                headers=headers,
                extensions={"sni_hostname": url.host},
            ) as response:
                reply = b""
                if int(response.headers.get("content-length", REPLY_BYTES + 1)) <= REPLY_BYTES:
                    async for piece in response.aiter_raw():  # decoded, a small body could become a huge one
                        reply += piece
                return response.status_code, reply

    async def _body(
        self, event: StoredEvent, task: TaskRecord | None
    ) -> tuple[CallbackFormat | None, CallbackBody]:
        """The task's format, and the event in it. It is the plain event, and None, if the task is pruned or
        its format does not send this kind.
        """
        chosen = None if task is None else self.formats.get(task.spec.callback_format)
        if chosen is not None and task is not None and event.kind in chosen.kinds:
            make, record = chosen.body, task
            return chosen, await measured(lambda: make(self.journal, event, record))

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield event.json(self.journal.id)

        return None, await measured(pieces)


def shown(url: str) -> str:
    """The URL without its query, which may hold a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


# ── all of a node ────────────────────────────────────────────────────────────

# a trainer that is up again gets its events within about a minute
PAUSES: Final = Backoff(first_s=1.0, longest_s=60.0, jitter=0.25)
AT_ONCE = 32  # concurrent POSTs to URLs that answer: each holds one session's JSON, a few megabytes
# concurrent POSTs to URLs whose last POSTs all failed: separate slots, so that they delay no others
PROBES = 8
AT_ONE_URL = 4  # concurrent POSTs to one URL: a trainer processes its groups one after another anyway
URLS = 256  # URLs served at once; a URL that is paused does not count
HEADS = 64  # tasks examined in one round of a URL
# tasks and URLs whose pauses are kept: 200 bytes each; one that is dropped is only retried earlier
REMEMBERED = 20_000
TROUBLES = 20  # URLs listed in the status with their last failure
LOOK_S = 0.25  # the least time between two queries for pending events, however many events arrive
UNREAD_S = 5.0  # before the next query when the journal could not be read
SETTLE_S = 5.0  # at shutdown, for the events of the last sessions: a receiver that answers needs about one
CLOSE_S = 5.0  # for closing idle connections


@frozen(kw_only=True)
class CallbackStatistics:
    """Counts of callbacks, as GET /v1/status reports them.

    Since the node's start: events `taken` by receivers, and attempts that `failed`. Since the journal was
    created: events that retention pruned before they were accepted (`expired`). Now: events `pending` as of
    the last query, POSTs `under_way`, `urls` being served, and `trouble`: the error of the last failed
    attempt by URL (without its query), for the last few URLs.
    """

    taken: int = 0
    failed: int = 0
    expired: int = 0
    pending: int = field(default=0, metadata=json_key("owed"))
    under_way: int = 0
    urls: int = 0
    trouble: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class RetryPause:
    """How long a URL or a task is paused after failures. `url` is the URL of a task."""

    url: str = ""
    failures: int = 0
    until: float = 0.0

    @property
    def resting(self) -> bool:
        return self.until > trio.current_time()

    def extend(self) -> None:
        """Extend the pause after one more failure."""
        self.until = trio.current_time() + PAUSES.delay(self.failures, draw=random.random())
        self.failures += 1


@define(eq=False)
class Callbacks:
    """Sends a node's callbacks. Created by `open_callbacks`."""

    journal: Journal
    poster: Poster
    _slots: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(AT_ONCE), init=False)
    _probes: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(PROBES), init=False)
    _working: set[str] = field(factory=set, init=False)  # URLs
    # that failed, or whose tasks are all paused
    _urls: dict[str, RetryPause] = field(factory=dict, init=False)
    _tasks: dict[str, RetryPause] = field(factory=dict, init=False)  # whose event was not accepted
    _trouble: dict[str, str] = field(factory=dict, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)
    _taken: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _expired: int = field(default=0, init=False)
    _pending: int = field(default=0, init=False)

    @property
    def own_ports(self) -> list[Collection[int]]:
        """Ports that the node listens at on this machine, to which no callback goes. Add what opens later."""
        return self.poster.receivers.own_ports

    def check(self, spec: TaskSpec) -> None:
        """Raise Refused for a task whose `callback_format` is not registered, or whose `callback_url` is an
        address where no callback goes. A name is looked up and checked when an event is sent.
        """
        if spec.callback_url is not None:
            self.poster.receivers.check(spec.callback_url)
        names = (EVENT_FORMAT, *self.poster.formats)
        if spec.callback_format not in names:
            raise Refused(
                f"must be one of {', '.join(map(repr, names))}, not {spec.callback_format!r}",
                path="$.callback_format",
            )

    def statistics(self) -> CallbackStatistics:
        """The counts now."""
        return CallbackStatistics(
            taken=self._taken,
            failed=self._failed,
            expired=self._expired,
            pending=self._pending,
            under_way=self._slots.borrowed_tokens + self._probes.borrowed_tokens,
            urls=len(self._working),
            trouble=dict(self._trouble),
        )

    async def settle(self) -> None:
        """Return when only paused URLs have pending events."""
        await self.journal.flushed()
        while await self.journal.pending_callback_count():
            resting = [url for url, pause in self._urls.items() if pause.resting]
            if not self._working and not await self.journal.pending_callback_urls(1, resting):
                return
            await trio.sleep(LOOK_S)

    async def run(self, ready: trio.Event) -> None:
        """Send pending events until cancelled."""
        ready.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                try:
                    until = await self._begin(nursery)
                except PolarnodeError:
                    logger.exception("pending callbacks could not be read")
                    until = trio.current_time() + UNREAD_S
                await trio.sleep(LOOK_S)
                with trio.move_on_at(until):
                    await self._news.wait()
                self._news = trio.Event()

    async def _watch(self) -> None:
        """Wake `run` at every new event."""
        seen = self.journal.last_seq
        while True:
            await self.journal.wait_after(seen)
            seen = self.journal.last_seq
            self._news.set()

    async def _begin(self, nursery: trio.Nursery) -> float:
        """Start a Trio task for each URL that has pending events and is not paused. Return the time at which
        the first of the paused ones may be tried again.
        """
        self._pending = await self.journal.pending_callback_count()
        expired = await self.journal.expired_callbacks()
        if expired > self._expired:
            logger.warning(
                "%d events were pruned by the journal's retention before their receivers accepted them",
                expired - self._expired,
            )
        self._expired = expired
        resting = {url: pause.until for url, pause in self._urls.items() if pause.resting}
        if self._pending and len(self._working) < URLS:
            for url in await self.journal.pending_callback_urls(URLS, [*self._working, *resting]):
                if url not in self._working and url not in resting and len(self._working) < URLS:
                    self._working.add(url)
                    nursery.start_soon(self._serve_url, url)
        return min(resting.values(), default=float("inf"))

    # ── one URL ───────────────────────────────────────────────────────────────

    async def _serve_url(self, url: str) -> None:
        try:
            while await self._round(url):
                await self.journal.flushed()  # so that an accepted event is not read as pending again
        except PolarnodeError:
            logger.exception("pending callbacks of %s could not be read", shown(url))
            self._rest(url)
        finally:
            self._working.discard(url)
            self._news.set()

    async def _round(self, url: str) -> bool:
        """Send the oldest event of some of a URL's tasks. True when it may have more to send now."""
        resting = {
            name: pause.until for name, pause in self._tasks.items() if pause.url == url and pause.resting
        }
        heads = await self.journal.pending_callbacks(url, HEADS, resting)
        # SQLite limits the number of parameters, so the list of names to skip is bounded
        heads = tuple(head for head in heads if head.task_id not in resting)
        if not heads:
            if resting:
                self._urls.setdefault(url, RetryPause()).until = min(resting.values())
            return False
        pause = self._urls.get(url)
        failing = pause is not None and pause.failures > 0
        taken = await self._send_all(
            heads[:1] if failing else heads, self._probes if failing else self._slots
        )
        if taken:
            self._urls.pop(url, None)
            return True
        self._rest(url)
        return False

    def _rest(self, url: str) -> None:
        pause = self._urls.get(url) or RetryPause()
        pause.extend()
        remember(self._urls, url, pause, most=REMEMBERED)

    async def _send_all(self, heads: tuple[PendingCallback, ...], slots: trio.CapacityLimiter) -> int:
        """Send events and return how many were accepted. After a first failure no POST is started until one
        is accepted, so a dead URL gets a few requests at most.
        """
        ours, ends = trio.CapacityLimiter(AT_ONE_URL), list[bool]()

        async def one(head: PendingCallback) -> None:
            async with ours, slots:
                if any(ends) or not ends:
                    ends.append(await self._send(head))

        async with trio.open_nursery() as nursery:
            for head in heads:
                nursery.start_soon(one, head)
        return sum(ends)

    async def _send(self, head: PendingCallback) -> bool:
        """True when the event is no longer pending."""
        try:
            taken = await self.poster.send(head)
        except PolarnodeError as error:
            self._failed += 1
            pause = self._tasks.get(head.task_id) or RetryPause(url=head.url)
            pause.extend()
            remember(self._tasks, head.task_id, pause, most=REMEMBERED)
            remember(self._trouble, shown(head.url), str(error), most=TROUBLES)
            logger.info("the callback %s of task %s is tried again: %s", shown(head.url), head.task_id, error)
            return False
        self._taken += taken
        self._tasks.pop(head.task_id, None)
        self._trouble.pop(shown(head.url), None)
        self.journal.callback_taken(head.seq)
        return True


@asynccontextmanager
async def open_callbacks(
    journal: Journal,
    *,
    formats: Mapping[str, CallbackFormat] | None = None,
    receivers: Receivers | None = None,
) -> AsyncIterator[Callbacks]:
    """Send a node's callbacks while the block runs. Events still pending SETTLE_S after its end are sent by
    the next run of the node. `formats` are registered besides `event`; `receivers` are where they may go, by
    default loopback and private networks.
    """
    limits = httpx2.Limits(max_connections=AT_ONCE + PROBES, max_keepalive_connections=AT_ONCE)
    headers = {"accept-encoding": "identity", "user-agent": "polarnode"}
    # Use no proxies or credentials of the node's environment: an event goes directly to the host that its
    # task names, and carries no secret of this one.
    client = httpx2.AsyncClient(
        timeout=None, limits=limits, headers=headers, trust_env=False, follow_redirects=False
    )
    try:
        poster = Poster(
            journal=journal, client=client, receivers=receivers or Receivers(), formats=formats or {}
        )
        callbacks = Callbacks(journal=journal, poster=poster)
        async with open_background(callbacks.run):
            yield callbacks
            # an unreadable journal is reported elsewhere
            with trio.move_on_after(SETTLE_S), suppress(PolarnodeError):
                await callbacks.settle()
    finally:
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S),
            suppress(httpx2.HTTPError, OSError, trio.BusyResourceError),
        ):
            await client.aclose()
