"""Callbacks: each event of a task is POSTed to the task's URL until the receiver accepts it.

The log records which events are pending, and leases each to one node at a time. If a node dies while it sends
an event, another node sends it again, so a receiver may get an event twice, under the same key. Everything
that this module keeps may be forgotten without loss, so each table is bounded. Events of one task are sent in
order. An attempt always ends, never raises past `Callbacks`, and goes only to the task's URL: proxies and
credentials of the environment are not used, redirects are not followed, and every address is checked before
it is connected to. The task's `callback_format` selects the body of an event; integrations register their own
formats.
"""

import logging
import random
from collections import Counter
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
from attrs import define, evolve, field, frozen

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
from polarnode.core.cursors import Cursor
from polarnode.core.errors import PolarnodeError, Refused, boundary
from polarnode.core.task import TaskSpec
from polarnode.journal.log.port import LeasedCallback, Log, LogUnavailable
from polarnode.journal.pending_callbacks import EVENT_FORMAT, EVENT_KINDS, CallbackCounts
from polarnode.journal.values import DEFAULT_KINDS, EventFilters, EventKind, StoredEvent, TaskRecord
from polarnode.support.bounded import remember
from polarnode.support.concurrency import open_background

logger = logging.getLogger(__name__)

# ── bodies ────────────────────────────────────────────────────────────

MAX_HELD_BYTES = 8 << 20  # the largest body that is kept in memory; most groups are smaller


@frozen(kw_only=True)
class CallbackFormat:
    """A value of `callback_format`: the kinds of events it sends, and their bodies.

    `body` yields the bytes of one body, piece by piece. It is called a second time for a body larger than
    MAX_HELD_BYTES, and must yield the same bytes. `refusal` reads the reply of a receiver that answered 2xx,
    and returns why the receiver still did not take the body, or None. A reply over MAX_REPLY_BYTES is given
    as b"".
    """

    kinds: tuple[EventKind, ...]
    body: Callable[[Log, StoredEvent, TaskRecord], AsyncGenerator[bytes, None]]
    refusal: Callable[[bytes], str | None] = lambda reply: None


@frozen(kw_only=True)
class CallbackBody:
    """A body of `size` bytes: `held` in memory, or generated again by `pieces`."""

    size: int
    held: bytes | None
    pieces: Callable[[], AsyncGenerator[bytes, None]]


async def measured(pieces: Callable[[], AsyncGenerator[bytes, None]]) -> CallbackBody:
    """Measure a body, because receivers without chunked encoding need `Content-Length`.

    A body of one piece is in memory anyway and is kept. A body larger than MAX_HELD_BYTES is generated twice.
    """
    size, kept, count = 0, list[bytes](), 0
    async for piece in pieces():
        size += len(piece)
        count += 1
        if size <= MAX_HELD_BYTES or count == 1:
            kept.append(piece)
        else:
            kept.clear()
    return CallbackBody(size=size, held=b"".join(kept) if kept or not size else None, pieces=pieces)


# ── receivers ──────────────────────────────────────────────────────────────────

MAX_LOOKUPS = 8  # names looked up at once; each lookup is a thread that waits
LOOKUP_TIMEOUT_S = 10.0  # a resolver waits 5 s for each of its servers, and most have two
MAX_ADDRESSES = 4  # addresses tried for one name: two of each family, so that one may be down


class CallbackFailed(PolarnodeError):
    """An event was not accepted. The message says why, in words that anyone who reads the status may see."""

    boundary = "client"


# One sentence for every kind of silence: whoever may submit a task must not learn from the status which ports
# of the node's networks are open.
NO_ANSWER_REASON = "it gave no HTTP answer, or none in time: node.log has the reason"
# For the same reason the status does not show what a receiver answers.
NOT_TAKEN_REASON = (
    "it answered that it did not take the event: its own log has the reason, and node.log its answer"
)


def callback_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The networks of the node's setting. Raises ConfigError where one is invalid."""
    return tuple(read_network(text, "callback_networks") for text in texts)


@define(eq=False, kw_only=True)
class CallbackReceivers:
    """The addresses that callbacks may go to: `networks`, but never the node's own sockets or the addresses
    that `never_connected` names.

    `own_ports` are collections of ports that the node listens at on this machine; add to it whatever opens
    later. A name is looked up once for each attempt, and each address is checked before it is connected to.
    """

    networks: tuple[Network, ...] = callback_networks(CALLBACK_NETWORKS)
    own_ports: list[Collection[int]] = field(factory=list)
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = field(
        factory=lambda: Resolver(trio.CapacityLimiter(MAX_LOOKUPS))
    )
    is_own: Callable[[str], bool] = is_own

    def refusal(self, text: str, port: int) -> str | None:
        """Why no callback may go to an address, as the predicate of a sentence; None if one may."""
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
        with suppress(ValueError):  # the host is a name
            reason = self.refusal(str(ip_address(host)), _url_port(parts.scheme, parts.port))
            if reason is not None:
                raise Refused(f"callback_url {reason}", path="$.callback_url")

    async def addresses(self, url: httpx2.URL) -> Sequence[str]:
        """The addresses of a URL's host that may be connected to, in the order to try them. Raises
        CallbackFailed when there is none.
        """
        port, found = _url_port(url.scheme, url.port), list[str]()
        with trio.move_on_after(LOOKUP_TIMEOUT_S):
            try:
                found = list(await self.resolve(url.host, port))
            except (OSError, UnicodeError) as error:  # socket.gaierror is an OSError
                logger.info("the callback host %s could not be looked up: %s", url.host, error)
        reasons = {each: self.refusal(each, port) for each in found}
        allowed = [each for each, reason in reasons.items() if reason is None]
        if allowed:
            return allowed[:MAX_ADDRESSES]
        for each, reason in reasons.items():
            logger.info("no callback to %s at %s port %d: it %s", url.host, each, port, reason)
        raise CallbackFailed(next((f"its host {reason}" for reason in reasons.values()), NO_ANSWER_REASON))


def _url_port(scheme: str, port: int | None) -> int:
    return port or (443 if scheme == "https" else 80)


# ── one attempt ────────────────────────────────────────────────────────────

# The time for one POST and its response. A group of long sessions is some hundred megabytes, which a loopback
# connection transfers in seconds.
ATTEMPT_S = 60.0
# At most this many bytes of a response body are read, so that its connection can be reused and its format can
# see whether the event was taken. Of a longer response only the status is used.
MAX_REPLY_BYTES = 64 << 10


@frozen(kw_only=True)
class CallbackSender:
    """Sends events to their receivers. `formats` maps names to the formats other than `event`."""

    log: Log
    client: httpx2.AsyncClient
    receivers: CallbackReceivers
    formats: Mapping[str, CallbackFormat] = field(factory=dict)

    async def send(self, callback: LeasedCallback) -> bool:
        """Send one event. True when the receiver accepted it, False when the event is pruned. Raises
        CallbackFailed when the event must be sent again, and LogAway where it cannot be read now.
        """
        before = Cursor(position=callback.position - 1)
        found = await self.log.events(before, filters=EventFilters(kinds=DEFAULT_KINDS), limit=1)
        if not found.page.events or found.page.events[0].seq != callback.position:
            return False
        with trio.move_on_after(ATTEMPT_S):
            with boundary(CallbackFailed, "it could not be sent"):
                status, refusal = await self._post(callback, found.page.events[0], found.log)
            if refusal is not None:
                logger.warning(
                    "the callback %s of task %s: the receiver did not take %s: %s",
                    shown(callback.url),
                    callback.task_id,
                    callback.key,
                    refusal,
                )
                raise CallbackFailed(NOT_TAKEN_REASON)
            if 200 <= status < 300:
                return True
            raise CallbackFailed(
                f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else "")
            )
        logger.info("the callback %s took more than %g s", shown(callback.url), ATTEMPT_S)
        raise CallbackFailed(NO_ANSWER_REASON)

    async def _post(self, callback: LeasedCallback, event: StoredEvent, log: str) -> tuple[int, str | None]:
        """POST a body to the first of the receiver's addresses that can be connected to, and return the
        response's status, and why its receiver did not take it although the status is 2xx.
        """
        url = httpx2.URL(callback.url)
        chosen, body = await self._body(event, await self.log.task(callback.task_id), log)
        for address in await self.receivers.addresses(url):
            try:
                status, reply = await self._post_to_address(address, url, body, event)
                refusal = None if chosen is None or status >= 300 else chosen.refusal(reply)
                return status, refusal
            except httpx2.ConnectError as error:
                logger.info("the callback %s at %s: %s", shown(callback.url), address, error)
            except (httpx2.HTTPError, OSError) as error:
                logger.info("the callback %s at %s: %s", shown(callback.url), address, error)
                break  # its receiver may have read the body
        raise CallbackFailed(NO_ANSWER_REASON)

    async def _post_to_address(
        self, address: str, url: httpx2.URL, body: CallbackBody, event: StoredEvent
    ) -> tuple[int, bytes]:
        """POST a body to exactly the address that was checked; the name in `url` stays in Host and in TLS.
        Returns the status and the body of the reply.
        """
        headers = {
            "Host": url.netloc.decode("ascii"),
            "Content-Type": "application/json",
            "Content-Length": str(body.size),
            "Idempotency-Key": event.key,  # the same key at every delivery
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
                if int(response.headers.get("content-length", MAX_REPLY_BYTES + 1)) <= MAX_REPLY_BYTES:
                    async for piece in response.aiter_raw():  # decoded, a small body could become a huge one
                        reply += piece
                return response.status_code, reply

    async def _body(
        self, event: StoredEvent, task: TaskRecord | None, log: str
    ) -> tuple[CallbackFormat | None, CallbackBody]:
        """The event as a body, and the task's format. If the task is pruned, or its format does not send this
        kind of event, it is the plain event of the log named `log`, and None.
        """
        chosen = None if task is None else self.formats.get(task.spec.callback_format)
        if chosen is not None and task is not None and event.kind in chosen.kinds:
            make, record = chosen.body, task
            return chosen, await measured(lambda: make(self.log, event, record))

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield event.json(log)

        return None, await measured(pieces)


def shown(url: str) -> str:
    """The URL without its query, which may hold a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


# ── all of a node ────────────────────────────────────────────────────────────

# A trainer that is up again gets its events within about a minute.
PAUSES: Final = Backoff(first_s=1.0, longest_s=60.0, jitter=0.25)
AT_ONCE = 32  # concurrent POSTs to URLs that answer; each holds one session's JSON, some MB
# Concurrent POSTs to URLs whose last POSTs all failed, one to each. They do not delay POSTs to other URLs.
MAX_PROBES = 8
MAX_POSTS_PER_URL = 4  # concurrent POSTs to one URL; a trainer handles its groups one after another anyway
# The length of a lease, which begins with an attempt; the 15 s are for reading the event and for recording
# the result. After this time another node sends the events of a node that died.
LEASE_S = ATTEMPT_S + 15.0
# URLs whose pauses are kept: 200 bytes each; one that is dropped is only retried earlier
REMEMBERED = 20_000
MAX_TROUBLE_URLS = 20  # URLs listed in the status with their last failure
LOOK_S = 0.25  # the least time between two reads of the log when it reports new events
# The time between reads of the log while events are pending, which finds the events that another node failed
# to send or leased before it died.
AGAIN_S = 1.0
UNREADABLE_DELAY_S = 5.0  # until the next read after the log could not be read
SETTLE_S = 5.0  # at shutdown, to send the last sessions' events; about 1 s is usually enough
CLOSE_S = 5.0  # to close idle connections


@frozen(kw_only=True)
class CallbackStatistics:
    """Counts of callbacks, as GET /v1/status reports them.

    Since the node's start: events `taken` by receivers, and attempts that `failed`. Since the log was
    created: events that retention pruned before they were accepted (`expired`). Now: events of all nodes that
    are `pending`, as of the last query; POSTs `under_way` from this node, and the number of their `urls`; and
    `trouble`: the error of the last failed attempt by URL (without its query), for the last few URLs.
    """

    taken: int = 0
    failed: int = 0
    expired: int = 0
    pending: int = field(default=0, metadata=json_key("owed"))
    under_way: int = 0
    urls: int = 0
    trouble: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class UrlPause:
    """The pause of a URL whose last `failures` attempts failed. It was last tried at `tried` and is tried
    again at `until`.
    """

    failures: int = 0
    until: float = 0.0
    tried: float = 0.0

    @property
    def is_resting(self) -> bool:
        return self.until > trio.current_time()

    def extend(self) -> None:
        """Extend the pause after one more failure."""
        self.tried = trio.current_time()
        self.until = self.tried + PAUSES.delay(self.failures, draw=random.random())
        self.failures += 1


@define(eq=False)
class CallbackService:
    """Sends callbacks from a node. Created by `open_callbacks`."""

    log: Log
    poster: CallbackSender
    _under_way: Counter[str] = field(factory=Counter, init=False)  # events that are being sent, by URL
    # Events that were accepted since the first of those under way began.
    _accepted: Counter[str] = field(factory=Counter, init=False)
    _probed: set[str] = field(factory=set, init=False)  # URLs of these events that failed before
    _paused_urls: dict[str, UrlPause] = field(factory=dict, init=False)  # URLs that failed
    _trouble: dict[str, str] = field(factory=dict, init=False)
    _wake: trio.Event = field(factory=trio.Event, init=False)
    _looks: int = field(default=0, init=False)
    _accepted_at: int = field(default=0, init=False)  # `_looks` when the last event was accepted
    _found: int = field(default=0, init=False)  # events found by the last read
    _counted: float = field(default=-float("inf"), init=False)
    _taken: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _counts: CallbackCounts = field(factory=lambda: CallbackCounts(pending=0, expired=0), init=False)

    @property
    def own_ports(self) -> list[Collection[int]]:
        """Ports that the node listens at on this machine, to which no callback goes. Add ports that open
        later.
        """
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

    def kinds_for(self, spec: TaskSpec) -> tuple[EventKind, ...]:
        """The kinds of events that are sent to the task's callback."""
        chosen = self.poster.formats.get(spec.callback_format)
        return EVENT_KINDS if chosen is None else chosen.kinds

    def statistics(self) -> CallbackStatistics:
        """The current counts."""
        return CallbackStatistics(
            taken=self._taken,
            failed=self._failed,
            expired=self._counts.expired,
            pending=self._counts.pending,
            under_way=self._under_way.total(),
            urls=len(self._under_way),
            trouble=dict(self._trouble),
        )

    async def settle(self) -> None:
        """Return when this node has nothing to send now: all pending events wait for a pause, or are another
        node's.
        """
        begun = self._looks
        # Two reads of the log are needed: one may have begun before this call, or before the acceptance of an
        # event whose successor waited for it.
        while self._under_way or self._found or self._looks < max(begun, self._accepted_at) + 2:
            self._wake.set()
            await trio.sleep(LOOK_S)

    async def run(self, ready: trio.Event) -> None:
        """Send pending events until cancelled."""
        ready.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                self._wake = trio.Event()
                try:
                    self._found = await self._look(nursery)
                except PolarnodeError as error:
                    logger.warning("pending callbacks could not be read: %s", error)
                    await trio.sleep(UNREADABLE_DELAY_S)
                    continue
                self._looks += 1
                with trio.move_on_at(self._next_retry_time()):
                    await self._wake.wait()

    async def _watch(self) -> None:
        """Wake `run` when the log has news, and from time to time without news."""
        while True:
            seen = self.log.news
            self._wake.set()
            await trio.sleep(LOOK_S)
            await self.log.wait_news(seen, AGAIN_S)

    # ── one look ──────────────────────────────────────────────────────────────

    async def _look(self, nursery: trio.Nursery) -> int:
        """Lease the events that can be sent now, and begin to send them. Returns their number."""
        if not self.log.callbacks_pending:
            self._counts = evolve(self._counts, pending=0)
            return 0
        await self._count()
        rooms = {url: max(0, MAX_POSTS_PER_URL - count) for url, count in self._under_way.items()}
        rooms |= dict.fromkeys(self._paused_urls, 0)
        room = AT_ONCE - (self._under_way.total() - len(self._probed))
        found: list[LeasedCallback] = []
        if room > 0:
            found += await self.log.lease_callbacks(
                room, seconds=LEASE_S, each=MAX_POSTS_PER_URL, rooms=rooms
            )
        self._begin(nursery, found)
        return len(found) + await self._probe(nursery)

    async def _probe(self, nursery: trio.Nursery) -> int:
        """Begin to send one event to each of some URLs that failed and whose pauses are over."""
        free = MAX_PROBES - len(self._probed)
        due = [
            url
            for url, pause in self._paused_urls.items()
            if not pause.is_resting and url not in self._under_way
        ]
        due = sorted(due, key=lambda url: self._paused_urls[url].until)[:free]
        if not due:
            return 0
        rooms = dict.fromkeys(due, 1)
        found = await self.log.lease_callbacks(len(due), seconds=LEASE_S, each=0, rooms=rooms)
        probed = {each.url for each in found}
        self._probed |= probed
        self._begin(nursery, found)
        for url in set(due) - probed:  # its events are paused themselves, or it has none left
            pause = self._paused_urls[url]
            pause.until = trio.current_time() + AGAIN_S
            if pause.until - pause.tried > 2 * PAUSES.longest_s:
                del self._paused_urls[url]
        return len(found)

    def _begin(self, nursery: trio.Nursery, leased: Iterable[LeasedCallback]) -> None:
        for each in leased:
            self._under_way[each.url] += 1
            nursery.start_soon(self._serve, each)

    async def _count(self) -> None:
        now = trio.current_time()
        if now - self._counted < LOOK_S:
            return
        self._counted, before = now, self._counts.expired
        self._counts = await self.log.count_callbacks()
        if self._counts.expired > before:
            logger.warning(
                "%d events were pruned by the log's retention before their receivers accepted them",
                self._counts.expired - before,
            )

    def _next_retry_time(self) -> float:
        """The time at which the first of the paused URLs is tried again."""
        now = trio.current_time()
        return min(
            (each.until for each in self._paused_urls.values() if each.until > now), default=float("inf")
        )

    # ── one event ─────────────────────────────────────────────────────────────

    async def _serve(self, callback: LeasedCallback) -> None:
        """Send one event, and record the result in the log."""
        url, before = callback.url, self._accepted[callback.url]
        try:
            accepted = await self.poster.send(callback)
        except LogUnavailable as away:  # the lease ends by itself
            logger.warning("the callback %s of task %s: %s", shown(url), callback.task_id, away)
        except PolarnodeError as error:
            logger.info("the callback %s of task %s is tried again: %s", shown(url), callback.task_id, error)
            self._failed += 1
            remember(self._trouble, shown(url), str(error), most=MAX_TROUBLE_URLS)
            if before == self._accepted[url]:  # a URL that accepted another event is not paused
                pause = self._paused_urls.get(url) or UrlPause()
                pause.extend()
                remember(self._paused_urls, url, pause, most=REMEMBERED)
            with suppress(PolarnodeError):  # the lease ends by itself
                # The delay has no random part, so that the event is free when its URL is tried again.
                await self.log.retry_callback(callback, after_s=PAUSES.delay(callback.lease - 1))
        else:
            self._taken += accepted
            self._accepted[url] += 1
            self._paused_urls.pop(url, None)
            self._trouble.pop(shown(url), None)
            await self._acknowledge(callback)
            self._accepted_at = self._looks
        self._under_way[url] -= 1
        self._probed.discard(url)
        if not self._under_way[url]:
            del self._under_way[url], self._accepted[url]
        self._wake.set()

    async def _acknowledge(self, callback: LeasedCallback) -> None:
        """Tell the log that an event was accepted. If the log is away for too long, the event is sent
        again.
        """
        with trio.move_on_after(LEASE_S):
            while True:
                try:
                    await self.log.accept_callback(callback)
                    return
                except LogUnavailable:
                    await trio.sleep(AGAIN_S)
                except PolarnodeError as error:
                    logger.warning("a callback that was accepted is sent again: %s", error)
                    return


@asynccontextmanager
async def open_callbacks(
    log: Log,
    *,
    formats: Mapping[str, CallbackFormat] | None = None,
    receivers: CallbackReceivers | None = None,
) -> AsyncIterator[CallbackService]:
    """Send callbacks while the block runs. Events still pending SETTLE_S after its end are sent by another
    node, or by the next run of this one. `formats` are registered besides `event`; `receivers` are where they
    may go, by default loopback and private networks.
    """
    limits = httpx2.Limits(max_connections=AT_ONCE + MAX_PROBES, max_keepalive_connections=AT_ONCE)
    headers = {"accept-encoding": "identity", "user-agent": "polarnode"}
    # Use no proxies or credentials of the node's environment: an event goes directly to the host that its
    # task names, and carries no secret of this one.
    client = httpx2.AsyncClient(
        timeout=None, limits=limits, headers=headers, trust_env=False, follow_redirects=False
    )
    try:
        poster = CallbackSender(
            log=log, client=client, receivers=receivers or CallbackReceivers(), formats=formats or {}
        )
        callbacks = CallbackService(log=log, poster=poster)
        async with open_background(callbacks.run):
            yield callbacks
            with trio.move_on_after(SETTLE_S):
                await callbacks.settle()
    finally:
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S),
            suppress(httpx2.HTTPError, OSError, trio.BusyResourceError),
        ):
            await client.aclose()
