"""The weights a node serves: one update at a time, on all hosts or on none, recorded in the journal.

A version is in the journal before a token is sampled by it. The trainer that sent an update may leave at any
time, but an update that began ends within a bound. A restarted node serves the weights it served last, or
reports why it does not.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import trio
from attrs import define, evolve, field

from polarnode.core.codec.json import plain, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Conflict, EngineError, Refused
from polarnode.core.weights import HostReport, UpdateOpened, WeightsReport, WeightsState
from polarnode.engine.checkpoints import BadCheckpoint, check_files, fingerprint
from polarnode.engine.engines import Engines
from polarnode.engine.host import Loaded
from polarnode.engine.update import Make, Update
from polarnode.engine.weight_values import (
    DiskSource,
    PauseOrder,
    Served,
    UpdateOrder,
    check,
    digest,
    loads,
    source_record,
)
from polarnode.journal.entries import WeightsRow
from polarnode.journal.journal import Journal
from polarnode.support.concurrency import open_background

logger = logging.getLogger(__name__)


def served_of(row: WeightsRow) -> Served:
    return evolve(structure(row.body, Served), at=row.at)


def plain_of(served: Served) -> dict[str, Json]:
    body: dict[str, Json] = plain(served)
    return body


def report_of(served: Served, *, created: bool) -> WeightsReport:
    return WeightsReport(
        version=served.version,
        mode=served.mode,
        source=served.source,
        seconds=served.seconds,
        hosts=served.hosts,
        created=created,
    )


async def report_if_served(
    journal: Journal, versions: Sequence[str], order: UpdateOrder
) -> WeightsReport | None:
    """The report of an order whose weights are served already; None for a new one. Conflict for a version
    that names other weights.

    `versions` were served since the node started. A version that was served last before a restart, and could
    not be loaded afterwards, may be sent again.
    """
    row = await journal.weights_of(order.version)
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
    recorded, last = served_of(row), (await journal.weights(1))[0]
    if (isinstance(order.source, DiskSource) and recorded.digest != digest(order)) or recorded.source[
        "kind"
    ] != order.source.kind:
        raise Conflict(
            f"version {order.version!r} was served with another source: give these weights a version of"
            " their own"
        )
    if order.version == versions[-1] and recorded.digest == digest(order):
        if not await _unchanged(recorded):
            raise Conflict(
                f"version {order.version!r} was served from files that have changed"
                " since: give these weights a version and a folder of their own"
            )
        return report_of(recorded, created=False)
    if order.version in versions or order.version != last.version or not await _unchanged(recorded):
        raise Conflict(
            f"version {order.version!r} was served before and others are now: give these weights a version of"
            " their own"
        )
    return None


async def _unchanged(recorded: Served) -> bool:
    """Whether the same version still means the same weights; of a trainer's own tensors this is assumed."""
    return (
        recorded.source["kind"] != "disk"
        or await trio.to_thread.run_sync(fingerprint, Path(recorded.source["path"])) == recorded.files
    )


async def last_weights(journal: Journal, model: str, *, resume: bool) -> tuple[Loaded | None, str | None]:
    """The weights to serve instead of `model`'s own, and a sentence if the last version cannot or must not be
    served.
    """
    rows = await journal.weights(1)
    if not rows:
        return None, None
    last = served_of(rows[0])
    if (why := await trio.to_thread.run_sync(_why_not, last, model, resume)) is None:
        return Loaded(version=last.version, path=last.source["path"], files=last.files), None
    return (
        None,
        (
            f"weights {last.version!r}, the last of this journal, are not served: {why}; those of {model}"
            " are, until an update"
        ),
    )


def _why_not(last: Served, model: str, resume: bool) -> str | None:
    if not resume:
        return "resume_weights is false"
    if last.model != model:
        return f"they are of another model, {last.model}"
    if last.source["kind"] != "disk":
        return f"they came as {last.source['kind']} from a trainer, and no disk has them"
    path = Path(last.source["path"])
    if not path.is_dir():
        return f"their folder {path} is gone"
    return None if fingerprint(path) == last.files else f"the files under {path} have changed since"


# seconds for one update, everything included: 70 GB from a network disk take four minutes, on a bad day three
# times that
UPDATE_S = 900.0
# seconds an update of several requests waits for the next: gathering a bucket of 2 GB takes a sharded trainer
# seconds
IDLE_S = 120.0
OPEN_S = 30.0  # seconds for the files of a checkpoint to open, a hundred of them on a network disk
# seconds for a version to be on disk before it is served: a full disk, which is waited out, must not hold
# generation
WRITTEN_S = 5.0
CLOSE_S = 30.0  # seconds to roll back what is open when the node ends: its engines end next
HISTORY = 100  # versions listed: a trainer's last hours


@define(eq=False)
class _Open:
    """An update of several requests; `stack` holds `Engines.updating`, `last_seen` is when its trainer last
    sent something.
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
    """Made by `open_weights`. `model` is the checkpoint the node was started with."""

    engines: Engines
    journal: Journal
    model: str
    warning: str | None = None
    _lock: trio.Lock = field(factory=trio.Lock, init=False)
    # a disk that hangs keeps the thread that looks at it: one, and none of those that all share
    _opening: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1), init=False)
    _open: _Open | None = field(default=None, init=False)
    _updating: str | None = field(default=None, init=False)
    # the last that was committed, for a commit whose answer was lost
    _committed: tuple[str, WeightsReport] | None = field(default=None, init=False)
    _updates: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)
    _last: float | None = field(default=None, init=False)
    released: set[str] = field(factory=set, init=False)
    # the weights' memory was given back and not kept: only an update brings some
    discarded: bool = field(default=False, init=False)

    # ── an update of one request ──────────────────────────────────────────────

    async def update(self, order: UpdateOrder) -> WeightsReport:
        """Serve new weights from now on. Conflict for a version that was used for others; Refused and
        EngineError with the old ones served.
        """
        self.engines.insist_own()
        check(order)
        makes = loads(order, hosts=len(self.engines.restarts), ranks=self.engines.ranks)
        async with self._lock:
            if (again := await report_if_served(self.journal, self.engines.versions, order)) is not None:
                return again
            self.insist_free()
            await self._openable(order)
            with trio.move_on_after(UPDATE_S, shield=True):
                return await self._update(order, makes)
            raise EngineError(
                f"the weights {order.version!r} were not there after {UPDATE_S:.0f} s, those before are"
                " served",
                retryable=False,
            )

    async def _update(self, order: UpdateOrder, makes: list[Make]) -> WeightsReport:
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

        An open update to the same version is given up: its trainer did not get an answer and begins again.
        """
        self.engines.insist_own()
        check(order)
        if isinstance(order.source, DiskSource):
            raise Refused("a checkpoint on a disk is one request: POST /v1/weights", path="$.source.kind")
        makes = loads(order, hosts=len(self.engines.restarts), ranks=self.engines.ranks)
        async with self._lock:
            if await report_if_served(self.journal, self.engines.versions, order) is not None:
                raise Conflict(f"version {order.version!r} is served already")
            if self._open is not None and self._open.order.version == order.version:
                with trio.CancelScope(shield=True):
                    await self._close(self._open)
            self.insist_free()
            with trio.CancelScope(shield=True):  # bounded by the steps' own bounds
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

    async def add(self, update_id: str, make: Make) -> UpdateOpened:
        """Load one more bucket. If it cannot be loaded, the update ends and the old weights are served."""
        async with self._lock:
            self.opened(update_id)
            with trio.CancelScope(shield=True):
                await self._load(make)
            return self._opened()

    async def _load(self, make: Make) -> None:
        held = self._held()
        try:
            await held.update.load(make)
        except BaseException:
            with trio.move_on_after(UPDATE_S, shield=True):
                await self._close(held)
            raise
        held.buckets, held.last_seen = held.buckets + 1, trio.current_time()

    async def commit(self, update_id: str) -> WeightsReport:
        """Serve the new weights once all buckets have arrived. Repeated, it gives the same answer."""
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
        """The node ends."""
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
        # what is written is served; bounded by WRITTEN_S and the steps of a commit
        with trio.CancelScope(shield=True):
            await self._written(served)
            await self.engines.commit(update, Loaded(version=order.version, path=path, files=files))
        self._updates, self._last, self.warning, self.discarded = (
            self._updates + 1,
            served.seconds,
            None,
            False,
        )
        logger.info("weights %s are served (%s, %.1f s)", served.version, served.mode, served.seconds)
        return report_of(served, created=True)

    async def _written(self, served: Served) -> None:
        self.journal.weights_served(served.version, plain_of(served))
        with trio.move_on_after(WRITTEN_S):
            await self.journal.flushed()

    async def _openable(self, order: UpdateOrder) -> None:
        """Raise Refused where a checkpoint's files do not open: the engine's loop would wait for them."""
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

    def insist_closed(self) -> None:
        """Raise Conflict while an update of several requests is open."""
        if self._open is not None:
            raise Conflict(
                f"an update to version {self._open.order.version!r} is open: commit it or give it up first"
            )

    def insist_free(self) -> None:
        """Raise Conflict while an update is open, or while the memory of the weights is lent; JournalDamaged
        where the version could not be written down.
        """
        self.journal.insist_whole()
        self.insist_closed()
        if "weights" in self.released:
            raise Conflict(
                "the memory of the weights is released: take it again first, by POST /v1/engine/memory/resume"
            )

    async def pause(self, order: PauseOrder) -> WeightsState:
        """Hold generation until `resume`; calls that arrive meanwhile wait."""
        async with self.alone():
            self.insist_closed()
            await self.engines.pause(order.mode)
            return self.status()

    async def resume(self) -> WeightsState:
        async with self.alone():
            self.insist_closed()
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
        """While nothing else changes."""
        async with self._lock:
            yield

    async def history(self) -> tuple[Served, ...]:
        """Newest first, HISTORY at most."""
        return tuple(served_of(row) for row in await self.journal.weights(HISTORY))

    def status(self) -> WeightsState:
        return WeightsState(
            version=self.engines.versions[-1],
            versions=self.engines.versions,
            updating=self._updating,
            paused=self.engines.statistics().paused,
            released=tuple(sorted(self.released)),
            updates=self._updates,
            failures=self._failures,
            last_seconds=self._last,
            warning=self.warning,
            ranks=len(self.engines.restarts) * self.engines.ranks,
        )


@asynccontextmanager
async def open_weights(
    engines: Engines, journal: Journal, *, model: str, warning: str | None = None
) -> AsyncIterator[Weights]:
    """The weights of a node, with the watch over updates whose trainer is gone."""
    weights = Weights(engines=engines, journal=journal, model=model, warning=warning)
    async with open_background(weights.watch):
        try:
            yield weights
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await weights.close()
