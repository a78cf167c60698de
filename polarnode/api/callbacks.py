"""Callbacks: each event of a task is POSTed to the task's URL until the receiver accepts it.

The log records which events are pending, and leases each to one node at a time: one that dies while it sends
leaves an event that another sends again, so a receiver may get one twice, under the same key. Everything kept
here may be forgotten without loss, so each table is bounded. Events of one task are sent in order. An attempt
always ends, never raises past `Callbacks`, and goes to the task's URL alone: the environment's proxies and
credentials are not used, redirects are not followed, and the address connected to is one that was checked.
The task's `callback_format` selects the body of an event; integrations register their own formats.
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
from polarnode.journal.log.port import LeasedCallback, Log, LogAway
from polarnode.journal.pending_callbacks import EVENT_FORMAT, CallbackCounts
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

    log: Log
    client: httpx2.AsyncClient
    receivers: Receivers
    formats: Mapping[str, CallbackFormat] = field(factory=dict)

    async def send(self, callback: LeasedCallback) -> bool:
        """Send one event. True when the receiver accepted it, False when the event is pruned. Raises
        CallbackFailed when the event must be sent again, and LogAway where it cannot be read now.
        """
        before = Cursor(position=callback.position - 1)
        found = await self.log.events(before, filters=Filters(kinds=USUAL_KINDS), limit=1)
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
                raise CallbackFailed(NOT_TAKEN)
            if 200 <= status < 300:
                return True
            raise CallbackFailed(
                f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else "")
            )
        logger.info("the callback %s took more than %g s", shown(callback.url), ATTEMPT_S)
        raise CallbackFailed(NO_ANSWER)

    async def _post(self, callback: LeasedCallback, event: StoredEvent, log: str) -> tuple[int, str | None]:
        """POST a body to the first of the receiver's addresses that can be connected to, and return the
        response's status, and why its receiver did not take it although the status is 2xx.
        """
        url = httpx2.URL(callback.url)
        chosen, body = await self._body(event, await self.log.task(callback.task_id), log)
        for address in await self.receivers.addresses(url):
            try:
                status, reply = await self._post_to(address, url, body, event)
                refusal = None if chosen is None or status >= 300 else chosen.refusal(reply)
                return status, refusal
            except httpx2.ConnectError as error:
                logger.info("the callback %s at %s: %s", shown(callback.url), address, error)
            except (httpx2.HTTPError, OSError) as error:
                logger.info("the callback %s at %s: %s", shown(callback.url), address, error)
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
        self, event: StoredEvent, task: TaskRecord | None, log: str
    ) -> tuple[CallbackFormat | None, CallbackBody]:
        """The task's format, and the event in it. It is the plain event of the log named `log`, and None, if
        the task is pruned or its format does not send this kind.
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

# a trainer that is up again gets its events within about a minute
PAUSES: Final = Backoff(first_s=1.0, longest_s=60.0, jitter=0.25)
AT_ONCE = 32  # concurrent POSTs to URLs that answer: each holds one session's JSON, a few megabytes
# concurrent POSTs to URLs whose last POSTs all failed, one to each: they delay no others
PROBES = 8
AT_ONE_URL = 4  # concurrent POSTs to one URL: a trainer processes its groups one after another anyway
# an event is leased when its attempt begins, and reading it and saying what came of it take a moment: the
# events of a node that died are sent by another so much later
LEASE_S = ATTEMPT_S + 15.0
# URLs whose pauses are kept: 200 bytes each; one that is dropped is only retried earlier
REMEMBERED = 20_000
TROUBLES = 20  # URLs listed in the status with their last failure
LOOK_S = 0.25  # the least time between two looks for pending events that news of the log causes
# between looks while events are pending: for those that another node failed to send, or died with
AGAIN_S = 1.0
UNREAD_S = 5.0  # before the next look when the log could not be read
SETTLE_S = 5.0  # at shutdown, for the events of the last sessions: a receiver that answers needs about one
CLOSE_S = 5.0  # for closing idle connections


@frozen(kw_only=True)
class CallbackStatistics:
    """Counts of callbacks, as GET /v1/status reports them.

    Since the node's start: events `taken` by receivers, and attempts that `failed`. Since the log was
    created: events that retention pruned before they were accepted (`expired`). Now: events of all nodes
    that are `pending`, as of the last query; POSTs `under_way` here, to so many `urls`; and `trouble`: the
    error of the last failed attempt by URL (without its query), for the last few URLs.
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
    """A URL that failed: `failures` in a row. It is tried again at `until`, and was last tried at `tried`."""

    failures: int = 0
    until: float = 0.0
    tried: float = 0.0

    @property
    def resting(self) -> bool:
        return self.until > trio.current_time()

    def extend(self) -> None:
        """Extend the pause after one more failure."""
        self.tried = trio.current_time()
        self.until = self.tried + PAUSES.delay(self.failures, draw=random.random())
        self.failures += 1


@define(eq=False)
class Callbacks:
    """Sends callbacks from a node. Created by `open_callbacks`."""

    log: Log
    poster: Poster
    _under_way: Counter[str] = field(factory=Counter, init=False)  # events that are being sent, by URL
    _accepted: Counter[str] = field(factory=Counter, init=False)  # since the first of these began
    _probed: set[str] = field(factory=set, init=False)  # URLs of these that failed before
    _urls: dict[str, UrlPause] = field(factory=dict, init=False)  # that failed
    _trouble: dict[str, str] = field(factory=dict, init=False)
    _wake: trio.Event = field(factory=trio.Event, init=False)
    _looks: int = field(default=0, init=False)
    _accepted_at: int = field(default=0, init=False)  # the looks before the last event that was accepted
    _found: int = field(default=0, init=False)  # events, by the last look
    _counted: float = field(default=-float("inf"), init=False)
    _taken: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _counts: CallbackCounts = field(factory=lambda: CallbackCounts(pending=0, expired=0), init=False)

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
            expired=self._counts.expired,
            pending=self._counts.pending,
            under_way=self._under_way.total(),
            urls=len(self._under_way),
            trouble=dict(self._trouble),
        )

    async def settle(self) -> None:
        """Return when this node has nothing to send now: what is pending rests, or is another node's."""
        begun = self._looks
        # one look may have begun before this, or before the event was accepted that the next one waited for
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
                    await trio.sleep(UNREAD_S)
                    continue
                self._looks += 1
                with trio.move_on_at(self._next_rest()):
                    await self._wake.wait()

    async def _watch(self) -> None:
        """Wake `run` at news of the log, and now and then without any."""
        while True:
            seen = self.log.news
            self._wake.set()
            await trio.sleep(LOOK_S)
            await self.log.wait_news(seen, AGAIN_S)

    # ── one look ──────────────────────────────────────────────────────────────

    async def _look(self, nursery: trio.Nursery) -> int:
        """Lease what can be sent now, and begin to send it. The number of events."""
        if not self.log.callbacks_pending:
            self._counts = evolve(self._counts, pending=0)
            return 0
        await self._count()
        rooms = {url: max(0, AT_ONE_URL - count) for url, count in self._under_way.items()}
        rooms |= dict.fromkeys(self._urls, 0)
        room = AT_ONCE - (self._under_way.total() - len(self._probed))
        found: list[LeasedCallback] = []
        if room > 0:
            found += await self.log.lease_callbacks(room, seconds=LEASE_S, each=AT_ONE_URL, rooms=rooms)
        self._begin(nursery, found)
        return len(found) + await self._probe(nursery)

    async def _probe(self, nursery: trio.Nursery) -> int:
        """Begin to send one event to each of some URLs that failed and rest no more."""
        free = PROBES - len(self._probed)
        due = [url for url, pause in self._urls.items() if not pause.resting and url not in self._under_way]
        due = sorted(due, key=lambda url: self._urls[url].until)[:free]
        if not due:
            return 0
        rooms = dict.fromkeys(due, 1)
        found = await self.log.lease_callbacks(len(due), seconds=LEASE_S, each=0, rooms=rooms)
        probed = {each.url for each in found}
        self._probed |= probed
        self._begin(nursery, found)
        for url in set(due) - probed:  # its events rest themselves, or it has none any more
            pause = self._urls[url]
            pause.until = trio.current_time() + AGAIN_S
            if pause.until - pause.tried > 2 * PAUSES.longest_s:
                del self._urls[url]
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
        self._counts = await self.log.callback_counts()
        if self._counts.expired > before:
            logger.warning(
                "%d events were pruned by the log's retention before their receivers accepted them",
                self._counts.expired - before,
            )

    def _next_rest(self) -> float:
        """When the first URL that rests now is tried again."""
        now = trio.current_time()
        return min((each.until for each in self._urls.values() if each.until > now), default=float("inf"))

    # ── one event ─────────────────────────────────────────────────────────────

    async def _serve(self, callback: LeasedCallback) -> None:
        """Send one event, and say what came of it."""
        url, before = callback.url, self._accepted[callback.url]
        try:
            accepted = await self.poster.send(callback)
        except LogAway as away:  # the lease ends by itself
            logger.warning("the callback %s of task %s: %s", shown(url), callback.task_id, away)
        except PolarnodeError as error:
            logger.info("the callback %s of task %s is tried again: %s", shown(url), callback.task_id, error)
            self._failed += 1
            remember(self._trouble, shown(url), str(error), most=TROUBLES)
            if before == self._accepted[url]:  # while it accepts others it does not rest
                pause = self._urls.get(url) or UrlPause()
                pause.extend()
                remember(self._urls, url, pause, most=REMEMBERED)
            with suppress(PolarnodeError):  # the lease ends by itself
                # without a random share, so that it is free when its URL is tried again
                await self.log.callback_failed(callback, after_s=PAUSES.delay(callback.lease - 1))
        else:
            self._taken += accepted
            self._accepted[url] += 1
            self._urls.pop(url, None)
            self._trouble.pop(shown(url), None)
            await self._acknowledge(callback)
            self._accepted_at = self._looks
        self._under_way[url] -= 1
        self._probed.discard(url)
        if not self._under_way[url]:
            del self._under_way[url], self._accepted[url]
        self._wake.set()

    async def _acknowledge(self, callback: LeasedCallback) -> None:
        """Tell the log that an event was accepted. Where it is away for too long the event is sent again."""
        with trio.move_on_after(LEASE_S):
            while True:
                try:
                    await self.log.callback_taken(callback)
                    return
                except LogAway:
                    await trio.sleep(AGAIN_S)
                except PolarnodeError as error:
                    logger.warning("a callback that was accepted is sent again: %s", error)
                    return


@asynccontextmanager
async def open_callbacks(
    log: Log,
    *,
    formats: Mapping[str, CallbackFormat] | None = None,
    receivers: Receivers | None = None,
) -> AsyncIterator[Callbacks]:
    """Send callbacks while the block runs. Events still pending SETTLE_S after its end are sent by another
    node, or by the next run of this one. `formats` are registered besides `event`; `receivers` are where they
    may go, by default loopback and private networks.
    """
    limits = httpx2.Limits(max_connections=AT_ONCE + PROBES, max_keepalive_connections=AT_ONCE)
    headers = {"accept-encoding": "identity", "user-agent": "polarnode"}
    # Use no proxies or credentials of the node's environment: an event goes directly to the host that its
    # task names, and carries no secret of this one.
    client = httpx2.AsyncClient(
        timeout=None, limits=limits, headers=headers, trust_env=False, follow_redirects=False
    )
    try:
        poster = Poster(log=log, client=client, receivers=receivers or Receivers(), formats=formats or {})
        callbacks = Callbacks(log=log, poster=poster)
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
