"""The weights a node serves: one update at a time, on all hosts or on none, recorded in the log.

A version is in the log before a token is sampled by it. The trainer that sent an update may leave at any
time, but an update that began ends within a bound. A restarted node serves the weights it served last, or
reports why it does not.

Nodes that share a log serve one version. A version **counts** as the log's current one when two nodes have
its files, or when the only node that is alive has them. A node that serves another version claims no tasks.
The node that was asked loads a version first, and the others find it in the log and take it from there
(`following.py`). Weights that a trainer sent from its memory have no files: they count with the first node
that serves them.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import trio
from attrs import define, evolve, field

from polarnode.core.codec.json import plain, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, Conflict, EngineError, Refused
from polarnode.core.weights import HostReport, PauseMode, UpdateOpened, WeightsReport, WeightsState
from polarnode.engine.checkpoints import BadCheckpoint, check_files, fingerprint
from polarnode.engine.engines import Engines
from polarnode.engine.host import Loaded
from polarnode.engine.protocol import LoadDisk
from polarnode.engine.update import MessageMaker, Update
from polarnode.engine.weight_values import (
    DiskSource,
    PauseOrder,
    Served,
    UpdateOrder,
    check,
    digest,
    in_order,
    loads,
    source_record,
)
from polarnode.journal.health import JournalHealth
from polarnode.journal.log.patience import retry_until_answered
from polarnode.journal.log.port import LOG_RETRY_S, Log, LogUnavailable, LogWeights, NodeRow
from polarnode.support.concurrency import open_background

logger = logging.getLogger(__name__)


def read_served(row: LogWeights) -> Served:
    return evolve(structure(row.body, Served), at=row.at)


def served_json(served: Served) -> dict[str, Json]:
    body: dict[str, Json] = plain(served)
    return body


def update_report(served: Served, *, created: bool) -> WeightsReport:
    return WeightsReport(
        version=served.version,
        mode=served.mode,
        source=served.source,
        seconds=served.seconds,
        hosts=served.hosts,
        created=created,
    )


async def report_if_served(
    log: Log, model: str, versions: Sequence[str], order: UpdateOrder, folder: Path | None = None
) -> WeightsReport | None:
    """The report of an order whose weights are served already. None for a new order. Raises Conflict for a
    version that names other weights.

    `versions` were served since the node started. A version that was served last before a restart, and could
    not be loaded afterwards, may be sent again. `folder` has the files that are served, where that is not
    known from the order.
    """
    row = await log.weights_of(order.version, model=model)
    if row is None:
        if order.version in versions:
            raise Conflict(
                f"version {order.version!r} is that of the weights the node was started with: choose another"
                " name"
            )
        return None
    if row.adapter:
        raise Conflict(
            f"version {order.version!r} is one of adapter {row.adapter!r}: give the base weights one of"
            " their own"
        )
    recorded, last = read_served(row), (await log.weights(model=model, limit=1))[0]
    if (isinstance(order.source, DiskSource) and recorded.digest != digest(order)) or recorded.source[
        "kind"
    ] != order.source.kind:
        raise Conflict(
            f"version {order.version!r} was served with another source: give these weights a version of"
            " their own"
        )
    if order.version == versions[-1] and recorded.digest == digest(order):
        if not await _is_unchanged(recorded, folder):
            raise Conflict(
                f"version {order.version!r} was served from files that have changed"
                " since: give these weights a version and a folder of their own"
            )
        return update_report(recorded, created=False)
    if (
        order.version in versions
        or order.version != last.version
        or not await _is_unchanged(recorded, folder)
    ):
        raise Conflict(
            f"version {order.version!r} was served before and others are now: give these weights a version of"
            " their own"
        )
    return None


async def _is_unchanged(recorded: Served, folder: Path | None) -> bool:
    """Whether the same version still means the same weights. For a trainer's own tensors this is assumed."""
    if recorded.source["kind"] != "disk":
        return True
    seen = await trio.to_thread.run_sync(fingerprint, Path(recorded.source["path"]))
    return seen == recorded.files or (seen == "" and folder is not None)


def folder_here(served: Served, copies: Path) -> Path | None:
    """A folder of this machine with the unchanged files of a version: the one that its trainer named, or a
    copy that this node took from another. Reads the disk.
    """
    if served.source["kind"] != "disk" or not served.files:
        return None
    own = copies / sha256(served.version.encode()).hexdigest()[:16]
    return next(
        (each for each in (Path(served.source["path"]), own) if fingerprint(each) == served.files), None
    )


async def last_weights(
    log: Log, model: str, name: str, copies: Path, *, resume: bool
) -> tuple[Loaded | None, str | None]:
    """The weights to serve instead of `model`'s own, and a sentence if the last version cannot or must not be
    served. `name` is the model's name in the log, and `copies` is the folder of this node's own copies.
    """
    row = next((each for each in await log.weights(model=name, limit=MAX_HISTORY) if each.counted), None)
    if row is None:
        return None, None
    last = read_served(row)
    folder = await trio.to_thread.run_sync(folder_here, last, copies)
    why = _why_not(last, model, folder, resume=resume, shared=log.shared)
    if why is None:
        return Loaded(version=last.version, path=str(folder), files=last.files), None
    others = "the node has them from another one" if log.shared else "an update"
    return (
        None,
        (
            f"weights {last.version!r}, the last that were served, are not: {why}; those of {model} are,"
            f" until {others}"
        ),
    )


def _why_not(last: Served, model: str, folder: Path | None, *, resume: bool, shared: bool) -> str | None:
    if not resume and not shared:
        return "resume_weights is false"
    if last.model != model and not shared:  # machines of one log may have the same model at different paths
        return f"they are of another model, {last.model}"
    if last.source["kind"] != "disk":
        return f"they came as {last.source['kind']} from a trainer, and no disk has them"
    path = Path(last.source["path"])
    if folder is None:
        return (
            f"the files under {path} have changed since" if path.is_dir() else f"their folder {path} is gone"
        )
    return None


# Seconds for one update, everything included: 70 GB from a network disk take four minutes, and on a bad day
# three times that.
UPDATE_TIMEOUT_S = 900.0
# Seconds that an update of several requests waits for the next one: gathering a bucket of 2 GB takes a
# sharded trainer seconds.
IDLE_S = 120.0
OPEN_S = 30.0  # seconds for the files of a checkpoint to open, a hundred of them on a network disk
# Seconds for a version to be on disk before it is served. A full disk, which is waited out, must not hold
# generation.
WRITTEN_S = 5.0
CLOSE_S = 30.0  # seconds to roll back what is open when the node ends; its engines end next
MAX_HISTORY = 100  # versions that are listed: those of a trainer's last hours
# Versions whose order is kept for the staleness of tokens. No trainer uses samples that are this many updates
# old.
MAX_ORDERED_VERSIONS = 512
# Seconds that the other nodes may take beyond twice what this one took: a node that must copy the files reads
# them twice, and a busy one begins late.
SPREAD_TIMEOUT_S = 60.0
LOOK_S = 1.0  # seconds between looks at what the others serve, where no news comes
# An entry among what a node serves that says: its engine is external, and takes no weights from here. No
# adapter has such a name.
EXTERNAL_MARK = "@external"


@define(eq=False)
class _Open:
    """An update of several requests. `stack` holds `Engines.updating`, and `last_seen` is when its trainer
    last sent something.
    """

    id: str
    order: UpdateOrder
    update: Update
    stack: AsyncExitStack
    began: float
    last_seen: float
    buckets: int = 0


@define(eq=False)
class Weights:
    """The weights of one node; `open_weights` makes it. `model` is the checkpoint the node was started with,
    `name` what it is called in the log, and `copies` the folder of files that came from other nodes.
    `incarnation` is the node's, once it has joined the log.
    """

    engines: Engines
    journal_health: JournalHealth
    now: Callable[[], float]
    log: Log
    model: str
    name: str
    copies: Path
    warning: str | None = None
    incarnation: int = 0
    spread_s: float = SPREAD_TIMEOUT_S
    # Other nodes that do not serve what counts, as of the last look.
    stale: tuple[str, ...] = field(default=(), init=False)
    # By adapter, the versions that counted or were served here, oldest first; "" is the base.
    _logged: dict[str, tuple[str, ...]] = field(factory=dict, init=False)
    _started_after: str | None = field(default=None, init=False)  # the last of these when the node started
    _told: "tuple[int, dict[str, str]] | None" = field(
        default=None, init=False
    )  # what the log has of `serving`
    _followed: PauseMode | None = field(default=None, init=False)  # how the log said to hold generation
    _lock: trio.Lock = field(factory=trio.Lock, init=False)
    # A disk that hangs keeps the thread that looks at it, so this takes one thread of its own and none of
    # those that all share.
    _opening: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1), init=False)
    _open: _Open | None = field(default=None, init=False)
    _updating: str | None = field(default=None, init=False)
    # The last update that was committed, for a commit whose answer was lost.
    _committed: tuple[str, WeightsReport] | None = field(default=None, init=False)
    _updates: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)
    _last: float | None = field(default=None, init=False)
    released: set[str] = field(factory=set, init=False)
    unable: set[str] = field(factory=set, init=False)  # adapters of the log that this node cannot serve
    # The weights' memory was given back and not kept, so that only an update brings weights again.
    discarded: bool = field(default=False, init=False)

    # ── an update of one request ──────────────────────────────────────────────

    async def update(self, order: UpdateOrder) -> WeightsReport:
        """Serve new weights from now on. Raises Conflict for a version that was used for other weights.
        Raises Refused and EngineError with the old weights served.
        """
        self.engines.require_own()
        check(order)
        makes = loads(order, hosts=len(self.engines.restarts), ranks=self.engines.ranks)
        async with self._lock:
            report = await self._updated(order, makes)
        if isinstance(order.source, DiskSource):
            await self.spread(report.version, seconds=self.spread_s + 2 * report.seconds)
        return evolve(report, stale=await self.lacking(report.version))

    async def _updated(self, order: UpdateOrder, makes: list[MessageMaker]) -> WeightsReport:
        again = await report_if_served(
            self.log, self.name, self.engines.versions, order, await self.folder_of(order.version)
        )
        if again is not None:
            await self.settle(again.version, has_files=isinstance(order.source, DiskSource))
            return again
        self.require_free()
        await self._check_openable(order)
        with trio.move_on_after(UPDATE_TIMEOUT_S, shield=True):
            return await self._update(order, makes)
        raise EngineError(
            f"the weights {order.version!r} were not there after {UPDATE_TIMEOUT_S:.0f} s, those before are"
            " served",
            retryable=False,
        )

    async def _update(self, order: UpdateOrder, makes: list[MessageMaker]) -> WeightsReport:
        began = trio.current_time()
        files = await self._files(order)
        async with self._counted(order.version), self.engines.updating(order.mode) as update:
            for make in makes:
                await update.load(make)
            if await self._files(order) != files:
                raise Refused(
                    "the checkpoint's files changed while they were loaded: write it whole, then send it",
                    path="$.source.path",
                )
            return await self._commit(
                order, update, began, digest=digest(order), files=files, buckets=len(makes)
            )

    # ── an update of several requests ─────────────────────────────────────────

    async def open(self, order: UpdateOrder) -> UpdateOpened:
        """Hold generation and take weights in pieces, until `commit` or `give_up`, or IDLE_S of silence.

        An open update to the same version is given up, because its trainer did not get an answer and begins
        again.
        """
        self.engines.require_own()
        check(order)
        if isinstance(order.source, DiskSource):
            raise Refused("a checkpoint on a disk is one request: POST /v1/weights", path="$.source.kind")
        makes = loads(order, hosts=len(self.engines.restarts), ranks=self.engines.ranks)
        async with self._lock:
            if await report_if_served(self.log, self.name, self.engines.versions, order) is not None:
                raise Conflict(f"version {order.version!r} is served already")
            if self._open is not None and self._open.order.version == order.version:
                with trio.CancelScope(shield=True):
                    await self._close(self._open)
            self.require_free()
            with trio.CancelScope(shield=True):  # bounded by the bounds of the steps
                await self._begin(order)
                for make in makes:
                    await self._load(make)
            return self._opened()

    async def _begin(self, order: UpdateOrder) -> None:
        began = trio.current_time()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._counted(order.version))
            update = await stack.enter_async_context(self.engines.updating(order.mode))
            self._open = _Open(
                uuid4().hex, order, update, stack.pop_all(), began, last_seen=trio.current_time()
            )

    async def add(self, update_id: str, make: MessageMaker) -> UpdateOpened:
        """Load one more bucket. If it cannot be loaded, the update ends and the old weights are served."""
        async with self._lock:
            self.opened(update_id)
            with trio.CancelScope(shield=True):
                await self._load(make)
            return self._opened()

    async def _load(self, make: MessageMaker) -> None:
        held = self._held()
        try:
            await held.update.load(make)
        except BaseException:
            with trio.move_on_after(UPDATE_TIMEOUT_S, shield=True):
                await self._close(held)
            raise
        held.buckets, held.last_seen = held.buckets + 1, trio.current_time()

    async def commit(self, update_id: str) -> WeightsReport:
        """Serve the new weights once all buckets have arrived. A repeated call gives the same answer."""
        async with self._lock:
            if self._committed is not None and self._committed[0] == update_id:
                return evolve(self._committed[1], created=False)
            held = self.opened(update_id)
            try:
                report = await self._commit(
                    held.order, held.update, held.began, digest="", files="", buckets=held.buckets
                )
                self._committed = (update_id, report)
                return report
            finally:
                with trio.CancelScope(shield=True):
                    await self._close(held)

    async def give_up(self, update_id: str) -> None:
        """Abandon the update and serve the previous weights."""
        async with self._lock:
            held = self.opened(update_id)
            with trio.CancelScope(shield=True):
                await self._close(held)

    def opened(self, update_id: str) -> _Open:
        if self._open is None or self._open.id != update_id:
            raise Conflict(
                f"no update {update_id!r} is open: it was committed or given up, or was silent for"
                f" {IDLE_S:.0f} s; begin another"
            )
        return self._open

    def _held(self) -> _Open:
        if self._open is None:
            raise Conflict("no update is open: begin one")
        return self._open

    def _opened(self) -> UpdateOpened:
        held = self._held()
        return UpdateOpened(
            update_id=held.id,
            version=held.order.version,
            mode=held.order.mode,
            buckets=held.buckets,
            idle_s=IDLE_S,
        )

    async def _close(self, held: _Open) -> None:
        self._open = None
        await held.stack.aclose()

    async def watch(self, ready: trio.Event) -> None:
        """Abandon an update whose trainer is silent, because agents wait for it."""
        ready.set()
        while True:
            held = self._open
            await trio.sleep(
                IDLE_S / 10
                if held is None
                else max(0.0, held.last_seen + IDLE_S - trio.current_time()) + 0.01
            )
            async with self._lock:
                if held is not None and held is self._open and trio.current_time() - held.last_seen > IDLE_S:
                    with trio.CancelScope(shield=True):
                        await self._close(held)

    async def close(self) -> None:
        """End an open update, because the node ends."""
        if self._open is not None:
            await self._close(self._open)

    # ── both ──────────────────────────────────────────────────────────────────

    async def _commit(
        self, order: UpdateOrder, update: Update, began: float, *, digest: str, files: str, buckets: int
    ) -> WeightsReport:
        with trio.CancelScope(shield=True):
            await update.check()
        served = Served(
            version=order.version,
            mode=order.mode,
            source=source_record(order, buckets),
            seconds=trio.current_time() - began,
            hosts=tuple(
                HostReport(index=index, seconds=seconds) for index, seconds in sorted(update.seconds.items())
            ),
            digest=digest,
            model=self.model,
            files=files,
        )
        path = order.source.path if isinstance(order.source, DiskSource) else None
        # What is written is served. This is bounded by WRITTEN_S and the steps of a commit.
        with trio.CancelScope(shield=True):
            await self.write_down(served)
            await self.engines.commit(update, Loaded(version=order.version, path=path, files=files))
            self._logged[""] = (*self._logged.get("", ()), order.version)
            await self.settle(order.version, has_files=path is not None)
        self._updates, self._last, self.warning, self.discarded = (
            self._updates + 1,
            served.seconds,
            None,
            False,
        )
        logger.info("weights %s are served (%s, %.1f s)", served.version, served.mode, served.seconds)
        return update_report(served, created=True)

    async def write_down(self, served: Served) -> None:
        """Record a version, for at most WRITTEN_S. Raises LogAway if a log that others share lacks it."""
        add, now = self.log.add_weights, self.now()
        await self.written(partial(add, served.version, served_json(served), model=self.name, at=now))

    async def written(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write to the log, for at most WRITTEN_S. What a node alone has to write is written when its disk
        answers again. The nodes that share a log would never hear of it, so there this raises LogAway.
        """
        with trio.move_on_after(WRITTEN_S) as patience:
            await write()
        if patience.cancelled_caught and self.log.shared:
            raise LogUnavailable(f"the log did not take a version of the weights within {WRITTEN_S:.0f} s")

    # ── the nodes of the log ──────────────────────────────────────────────────

    async def settle(self, version: str, adapter: str = "", *, has_files: bool = True) -> None:
        """Say that this node has a version, and make it the current one if enough nodes have it. While the
        log is away this is left to the next look.
        """
        try:
            await self.log.add_weight_holder(version, self.incarnation, model=self.name)
            await self.count_version(version, adapter, has_files=has_files)
            await self.tell_serving()
            await self.read_order()
        except LogUnavailable as error:
            logger.warning("weights %s are served here and not known to the others: %s", version, error)

    async def count_version(self, version: str, adapter: str = "", *, has_files: bool = True) -> bool:
        """Make a version the current one, if two nodes have its files, or all nodes that could. A version
        without files needs one node only, because a second one would not make it safer.
        """
        able = [each for each in await self.nodes() if each.serving.get(adapter) != ""]
        holders = min(2, len(able) or 1) if has_files else 1
        return await self.log.make_current(version, model=self.name, holders=holders)

    async def nodes(self) -> tuple[NodeRow, ...]:
        """The nodes of the log that are alive and take the weights of this node's model, in a fixed order. A
        node without an engine serves none, and nobody waits for a node whose engine is external.
        """
        return tuple(
            each
            for each in await self.log.nodes()
            if each.facts.labels.get("model", "") == self.name
            and "" in each.serving
            and EXTERNAL_MARK not in each.serving
        )

    async def lacking(self, version: str, adapter: str = "") -> tuple[str, ...]:
        """The names of the other nodes that do not serve a version, if it is the current one or is to be."""
        row = await self.log.weights_of(version, model=self.name)
        if row is None or (row.counted and not row.current):  # a later version has come
            return ()
        return tuple(
            each.facts.name
            for each in await self.nodes()
            if each.incarnation != self.incarnation and each.serving.get(adapter) != version
        )

    async def spread(self, version: str, adapter: str = "", *, seconds: float) -> None:
        """Wait until a version counts and the other nodes serve it, for so many seconds at most. Raises Busy
        if it does not count by then.
        """
        counts, away = False, list[LogUnavailable]()
        with trio.move_on_after(seconds):
            while True:
                seen = self.log.news
                try:
                    row = await self.log.weights_of(version, model=self.name)
                    counts = row is None or row.counted
                    if not counts:  # a node that had to copy it may be lost by now
                        await self.settle(version, adapter)
                    unable = {
                        each.facts.name for each in await self.nodes() if each.serving.get(adapter) == ""
                    }
                    if counts and unable.issuperset(await self.lacking(version, adapter)):
                        return
                except LogUnavailable as error:
                    away = [error]
                await self.log.wait_news(seen, LOOK_S)
        if not counts:
            if away:
                raise away[0]
            others = ", ".join(await self.lacking(version, adapter))
            raise Busy(
                f"version {version!r} does not count: it is served by this node alone, and {others} had no"
                f" copy of its files in {seconds:.0f} s; see the logs there, and send it again",
                retry_after=LOG_RETRY_S,
            )

    def serving(self) -> dict[str, str]:
        """What this node serves, by adapter. "" is the base, and an adapter without a version is one that the
        node cannot serve.
        """
        if not self.engines.restarts:
            return {}
        if not self.engines.is_own:
            return {EXTERNAL_MARK: "", "": self.engines.versions[-1]}
        adapters = {each.name: each.version for each in self.engines.adapters.status()}
        return {**dict.fromkeys(self.unable, ""), **adapters, "": self.engines.versions[-1]}

    async def tell_serving(self) -> None:
        """Tell the log what this node serves, if it does not know."""
        now = (self.incarnation, self.serving())
        if self._told != now:
            await self.log.report_serving(*now)
            self._told = now

    async def read_order(self) -> None:
        """Read the order of the versions, by which the staleness of tokens is counted."""
        logged: dict[str, list[str]] = {}
        for adapters in (False, True):
            for row in reversed(
                await self.log.weights(model=self.name, adapters=adapters, limit=MAX_ORDERED_VERSIONS)
            ):
                if row.counted or row.version in self.engines.versions:
                    logged.setdefault(row.adapter, []).append(row.version)
        self._logged = {name: tuple(versions) for name, versions in logged.items()}

    async def read_stale(self) -> None:
        """Read which nodes do not serve what counts."""
        found = await self.log.stale_nodes()
        mine = (each for each in found if each.facts.labels.get("model", "") == self.name)
        self.stale = tuple(each.facts.name for each in mine)

    def order(self, adapter: str = "") -> tuple[str, ...]:
        """The versions of all nodes of the log, oldest first; the last is what counts. Versions that no log
        has, such as the model's own, are those that this node served when it started.
        """
        logged = self._logged.get(adapter, ())
        if adapter:
            return in_order(
                logged, self.engines.adapters.versions(adapter), after=None if not logged else logged[-1]
            )
        return in_order(logged, self.engines.versions, after=self._started_after)

    def since_start(self) -> tuple[str, ...]:
        """The part of the order that began with this node's start."""
        every = self.order()
        return every[min((every.index(each) for each in self.engines.versions if each in every), default=0) :]

    def note_start(self) -> None:
        """Note where this node's own version stands in the order. What a node alone has in its log at its
        start came before what it started with. Where nodes share a log, the model's own weights came before
        all versions.
        """
        if not self.log.shared:
            self._started_after = next(reversed(self._logged.get("", ())), None)

    async def folder_of(self, version: str) -> Path | None:
        """The files of a version on this machine."""
        row = await self.log.weights_of(version, model=self.name)
        if row is None or row.adapter:
            return None
        return await trio.to_thread.run_sync(folder_here, read_served(row), self.copies)

    async def load(self, served: Served, folder: Path) -> None:
        """Serve a version that is in the log already, from a folder with its files. Raises Conflict, Refused
        and EngineError with the earlier weights served.
        """
        async with self._lock:
            if self.engines.versions[-1] == served.version:
                return
            self.require_free()
            began = trio.current_time()
            with trio.move_on_after(UPDATE_TIMEOUT_S, shield=True):
                async with self._counted(served.version), self.engines.updating(served.mode) as update:
                    await update.load(lambda call, _: LoadDisk(call=call, path=str(folder)))
                    await update.check()
                    if await trio.to_thread.run_sync(fingerprint, folder) != served.files:
                        raise Refused(f"the files under {folder} changed while they were loaded")
                    loaded = Loaded(version=served.version, path=str(folder), files=served.files)
                    await self.engines.commit(update, loaded)
                    self._updates, self._last = self._updates + 1, trio.current_time() - began
                    self.warning, self.discarded = None, False
                logger.info("weights %s of the log are served, from %s", served.version, folder)
                return
            raise EngineError(f"the weights {served.version!r} were not there after {UPDATE_TIMEOUT_S:.0f} s")

    async def _check_openable(self, order: UpdateOrder) -> None:
        """Raise Refused if a checkpoint's files do not open, because otherwise the engine's loop would wait
        for them.
        """
        if not isinstance(order.source, DiskSource):
            return
        path = "$.source.path"
        with trio.move_on_after(OPEN_S):
            try:
                await trio.to_thread.run_sync(
                    check_files, Path(order.source.path), abandon_on_cancel=True, limiter=self._opening
                )
            except BadCheckpoint as error:
                raise Refused(str(error), path=path) from None
            except OSError as error:
                raise Refused(f"the checkpoint cannot be read: {error}", path=path) from None
            return
        raise Refused(
            f"the checkpoint's files were not open after {OPEN_S:.0f} s: look at its disk", path=path
        )

    async def _files(self, order: UpdateOrder) -> str:
        if not isinstance(order.source, DiskSource):
            return ""
        return await trio.to_thread.run_sync(fingerprint, Path(order.source.path))

    @asynccontextmanager
    async def _counted(self, version: str) -> AsyncIterator[None]:
        """Record the figures of an update under way."""
        self._updating, before = version, self._updates
        try:
            yield
        finally:
            self._updating = None
            self._failures += self._updates == before

    def require_closed(self) -> None:
        """Raise Conflict while an update of several requests is open."""
        if self._open is not None:
            raise Conflict(
                f"an update to version {self._open.order.version!r} is open: commit it or give it up first"
            )

    def require_free(self) -> None:
        """Raise Conflict while an update is open, or while the memory of the weights is lent. Raise
        JournalDamaged if the version could not be written down.
        """
        self.journal_health.require_undamaged()
        self.require_closed()
        if "weights" in self.released:
            raise Conflict(
                "the memory of the weights is released: take it again first, by POST /v1/engine/memory/resume"
            )

    async def pause(self, order: PauseOrder) -> WeightsState:
        """Hold generation until `resume`. Calls that arrive meanwhile wait."""
        async with self.alone():
            self.require_closed()
            await self.engines.pause(order.mode)
            return self.status()

    async def follow_hold(self) -> None:
        """Hold generation where a trainer holds it on all nodes of the log, and let it go on where the
        trainer does. Raises Conflict while an update is open.
        """
        found = await self.log.generation_hold(model=self.name, follows=self._followed is not None)
        if found == self._followed:
            return
        async with self.alone():  # a later request to this node comes after this
            found = await self.log.generation_hold(model=self.name, follows=self._followed is not None)
            held = self.engines.statistics().paused
            if found is not None and held is None:
                self.require_closed()
                await self.engines.pause(found)
            elif found is None and held is not None and not self.released and not self.discarded:
                self.require_closed()
                await self.engines.resume()
            self._followed = found

    async def resume(self) -> WeightsState:
        async with self.alone():
            self.require_closed()
            if self.released:
                raise Conflict(
                    f"{', '.join(sorted(self.released))} are released: take that memory again first"
                )
            if self.discarded:
                raise Conflict(
                    "the weights' memory was given back and its content is gone: push weights first"
                )
            await self.engines.resume()
            return self.status()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the lock, so that nothing else changes within the block."""
        async with self._lock:
            yield

    async def history(self) -> tuple[Served, ...]:
        """The served versions, newest first, HISTORY at most."""
        return tuple(read_served(row) for row in await self.log.weights(model=self.name, limit=MAX_HISTORY))

    def status(self) -> WeightsState:
        return WeightsState(
            version=self.engines.versions[-1],
            versions=self.since_start(),
            updating=self._updating,
            paused=self.engines.statistics().paused,
            released=tuple(sorted(self.released)),
            updates=self._updates,
            failures=self._failures,
            last_seconds=self._last,
            warning=self.warning,
            ranks=len(self.engines.restarts) * self.engines.ranks,
            stale=self.stale,
        )


@asynccontextmanager
async def open_weights(
    engines: Engines,
    journal_health: JournalHealth,
    log: Log,
    *,
    now: Callable[[], float],
    model: str,
    name: str,
    copies: Path,
    warning: str | None = None,
) -> AsyncIterator[Weights]:
    """The weights of a node, with a task that watches for updates whose trainer is gone."""
    weights = Weights(
        engines=engines,
        journal_health=journal_health,
        now=now,
        log=log,
        model=model,
        name=name,
        copies=copies,
        warning=warning,
    )
    await retry_until_answered(weights.read_order, meanwhile="the node waits to start")
    weights.note_start()
    async with open_background(weights.watch):
        try:
            yield weights
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await weights.close()
