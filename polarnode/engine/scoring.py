"""Rows that an engine scores: the logprob of each given token, after the tokens before it.

A row costs the engine one prefill and nothing is sampled. Scoring comes after sampling: while an engine host
samples, it reads one row at a time, and rests between rows (`ScoreTurns`), so that agents have most of it. A
row can be read again without harm, so it is read again if its host dies, or if the weights change meanwhile.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Protocol
from uuid import uuid4

import numpy
import trio
from attrs import define, field, frozen

from polarnode.core.arrays import floats
from polarnode.core.codec.json import plain
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, EngineError, PolarnodeError, Refused
from polarnode.core.ports import RowScores, ScoreOrder, Scorer
from polarnode.core.status import ScoredRow, ScoreRequest, ScoreRow
from polarnode.engine.protocol import Abort, Ready, RowLogprobs, ScoreTokens, ToHost
from polarnode.engine.routing import EngineStatistics
from polarnode.merge.token_extras import masked_logprobs

# Rows in a host that samples nothing: SGLang reads prompts in passes of 8,192 tokens or more, and so many
# rows of a thousand tokens fill one.
ROWS_WHEN_IDLE = 8
# Seconds of rest for each second that a sampling host read a row: agents keep three quarters of its time, and
# a sibling's call waits for one row at most.
REST = 3.0
ATTEMPTS = 3  # attempts at a row; if a host dies three times under one row, it dies of it


def check_score(order: ScoreOrder, *, vocab_size: int, context_length: int) -> None:
    """Raise Refused for a row that the engine cannot read. An id outside the vocabulary would end its
    process.
    """
    length = len(order.row)
    if not 1 <= order.start < length:
        raise Refused(
            f"a row of {length} tokens cannot be scored from token {order.start} on: give 1 to {length - 1}"
        )
    row = numpy.frombuffer(order.row, dtype=numpy.int32)
    # One pass suffices: read as unsigned, what is below 0 is above everything.
    if not row.view(numpy.uint32).max() < vocab_size:
        raise Refused(
            f"the row has token ids from {row.min()} to {row.max()}, this model knows 0 to {vocab_size - 1}"
        )
    if length >= context_length:  # SGLang keeps a place for a sample
        raise Refused(f"the row has {length} tokens, and this engine reads {context_length - 1} at most")


@define(eq=False)
class ScoreCall:
    """A row in an engine host, until its end comes."""

    count: int  # number of logprobs that are due
    over: bool = field(default=False, init=False)
    _scores: RowScores | None = field(default=None, init=False)
    _error: EngineError | None = field(default=None, init=False)
    _ended: trio.Event = field(factory=trio.Event, init=False)

    def take(self, scored: RowLogprobs) -> None:
        """Take the row's end. An end that does not fit the row fails it."""
        values = numpy.frombuffer(scored.logprobs[: len(scored.logprobs) // 4 * 4], dtype=numpy.float32)
        if len(scored.logprobs) != 4 * self.count or numpy.isnan(values).any():
            sentence = f"the engine gave {len(scored.logprobs)} bytes of logprobs for {self.count} tokens"
            self.fail(EngineError(f"{sentence}, or some that are no numbers", retryable=False))
            return
        self._scores = RowScores(logprobs=floats(scored.logprobs), version=scored.version)
        self._end()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self.over = True
        self._ended.set()

    async def result(self) -> RowScores:
        """The scores. Raises the error with which the row failed."""
        await self._ended.wait()
        if self._scores is None:
            raise self._error or EngineError("the row has no end")
        return self._scores


@define(eq=False)
class ScoreTurns:
    """Whose row one host reads next: first come, first served. `samples` says whether the host samples
    now.
    """

    samples: Callable[[], bool]
    waiting: int = field(default=0, init=False)  # rows that wait or are being read
    _running: int = field(default=0, init=False)
    _rests_until: float = field(default=-inf, init=False)
    _next: trio.StrictFIFOLock = field(factory=trio.StrictFIFOLock, init=False)
    _freed: trio.Event = field(factory=trio.Event, init=False)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            async with self._next:
                await self._free()
                self._running += 1
            began = trio.current_time()
            try:
                yield
            finally:
                self._running -= 1
                now = trio.current_time()
                self._rests_until = now + REST * (now - began)
                self._freed.set()
                self._freed = trio.Event()
        finally:
            self.waiting -= 1

    async def _free(self) -> None:
        while self._running >= (1 if self.samples() else ROWS_WHEN_IDLE) or (
            self.samples() and trio.current_time() < self._rests_until
        ):
            with trio.move_on_at(inf if self._running else self._rests_until):
                await self._freed.wait()


@define(eq=False)
class HostScoring:
    """The rows of one host: those that wait for their turn, and those in its engine. `serving` is what its
    engine reported of itself, or None while no row may be sent. `on_change` is called when the last row is
    over, because an update may wait for it.
    """

    turns: ScoreTurns
    _post: Callable[[ToHost], None]
    _serving: Callable[[], Ready | None]
    _on_change: Callable[[], None]
    _in_engine: dict[str, ScoreCall] = field(factory=dict, init=False)  # by request id

    @property
    def in_flight(self) -> int:
        """The number of rows in the engine, those included that it is told to abort."""
        return len(self._in_engine)

    async def score(self, order: ScoreOrder, adapter: str) -> RowScores | None:
        """Score a row when its turn has come, by a version of an adapter. Returns None if the host died
        before, or if its weights change. Raises EngineError when it dies meanwhile, or refuses the row.
        """
        async with self.turns.turn():
            if self._serving() is None:
                return None
            rid = order.request_id
            call = self._in_engine[rid] = ScoreCall(len(order.row) - order.start)
            self._post(ScoreTokens(rid=rid, row=order.row.tobytes(), start=order.start, adapter=adapter))
            try:
                return await call.result()
            finally:
                if not call.over:
                    self._post(Abort(rid=rid))

    def take(self, scored: RowLogprobs) -> None:
        """The engine has scored a row."""
        if (call := self._count_out(scored.rid)) is not None:
            call.take(scored)

    def fail(self, rid: str, error: EngineError) -> None:
        """The engine failed a row. Nothing happens if there is no such row."""
        if (call := self._count_out(rid)) is not None:
            call.fail(error)

    def fail_all(self, sentence: str) -> None:
        """The host died: fail the rows in its engine with a sentence."""
        for call in self._in_engine.values():
            call.fail(EngineError(sentence))
        self._in_engine.clear()

    def _count_out(self, rid: str) -> ScoreCall | None:
        call = self._in_engine.pop(rid, None)
        if call is not None and not self._in_engine:
            self._on_change()
        return call


# ── the engines of a node ─────────────────────────────────────────────────────

POLICY = "policy"  # the name of the engine that samples
# Rows of a request: those of a group. More would take minutes, and a cut connection loses them all.
ROWS = 1024
# Tokens of a request's rows together: 22 MB of base64, and about two minutes of a GPU for an 8B model.
TOKENS = 1 << 22
REQUESTS = 8  # requests at once: 130 MB of rows and answers; more only wait for the same engines
RETRY_AFTER_S = 2.0  # a request of a few rows is over sooner


@frozen(kw_only=True)
class _RequestedRow:
    """A row of a request. `order` is None if nothing of it is to be scored. `mask` is 1 at the tokens that
    are.
    """

    mask: bytes
    order: ScoreOrder | None


class ScoringEngine(Scorer, Protocol):
    """What the engines of `ScoringEngines` must have: `Engines` has it, but imports this module."""

    def statistics(self) -> EngineStatistics: ...


@define(eq=False)
class ScoringEngines:
    """The engines of a node that score, by name: its policy and its teachers."""

    engines: Mapping[str, ScoringEngine] = field(factory=dict)
    _requests: int = field(default=0, init=False)

    def require_engine(self, name: str, path: str) -> None:
        """Raise Refused if no engine has the name."""
        if name not in self.engines:
            raise Refused(
                f"no engine of this node is called {name!r}: name {', '.join(self.engines) or 'none'}, or add"
                f" [teachers.{name}] to its settings",
                path=path,
            )

    def status(self) -> dict[str, Json]:
        """The teachers, by name, for GET /v1/status."""
        teachers = ((name, engine) for name, engine in self.engines.items() if name != POLICY)
        return {name: plain(engine.statistics()) for name, engine in teachers}

    async def answer(self, request: ScoreRequest) -> tuple[ScoredRow, ...]:
        """Score the rows of a request. Raises Refused with a row's path, Busy, and EngineError. Leaving early
        ends what is in the engine.
        """
        self.require_engine(request.engine, "$.engine")
        if request.adapter and request.engine != POLICY:
            raise Refused("adapter: only the policy has adapters, leave it out", path="$.adapter")
        asked = _asked(request)
        if self._requests >= REQUESTS:
            sentence = f"{REQUESTS} requests are being scored, as many as a node takes: wait for one to end"
            raise Busy(sentence, retry_after=RETRY_AFTER_S)
        self._requests += 1
        found: dict[int, RowScores | PolarnodeError] = {}
        try:
            orders = {place: each.order for place, each in enumerate(asked) if each.order is not None}
            await score_all(self.engines[request.engine], orders, found)
        finally:
            self._requests -= 1
        for place, scores in found.items():
            if isinstance(scores, Refused):
                raise Refused(f"row {place}: {scores}", path=f"$.rows[{place}]")
            if isinstance(scores, PolarnodeError):
                raise scores
        return tuple(_scored_row(each, found.get(place)) for place, each in enumerate(asked))


async def score_all(
    scorer: Scorer, orders: Mapping[int, ScoreOrder], found: dict[int, RowScores | PolarnodeError]
) -> None:
    """Score rows, and put their scores or errors into `found` as they come. After an EngineError no other row
    is begun.
    """
    places = iter(orders)

    async def work() -> None:
        for place in places:
            if any(isinstance(each, EngineError) for each in found.values()):
                return
            try:
                found[place] = await scorer.score(orders[place])
            except PolarnodeError as error:  # kept as a value, because a nursery would wrap it in a group
                found[place] = error

    async with trio.open_nursery() as nursery:
        for _ in range(
            min(ROWS_WHEN_IDLE, len(orders))
        ):  # one caller must not fill the queue before another's
            nursery.start_soon(work)


def _asked(request: ScoreRequest) -> list[_RequestedRow]:
    """What a request asks for, row by row. Raises Refused."""
    if not 1 <= len(request.rows) <= ROWS:
        raise Refused(f"rows has {len(request.rows)} rows: send 1 to {ROWS}", path="$.rows")
    tokens = sum(len(row.token_ids) for row in request.rows)
    if tokens > TOKENS:
        sentence = f"the rows have {tokens} tokens together: send {TOKENS} at most in a request"
        raise Refused(sentence, path="$.rows")
    return [
        _requested_row(row, f"$.rows[{place}]", request.adapter) for place, row in enumerate(request.rows)
    ]


def _requested_row(row: ScoreRow, path: str, adapter: str) -> _RequestedRow:
    length = len(row.token_ids)
    given = bytes([1]) * length if row.loss_mask is None else row.loss_mask
    if len(given) != length:
        raise Refused(f"has {len(given)} values for {length} tokens", path=f"{path}.loss_mask")
    if not 0 <= row.start <= length:
        raise Refused(f"must be 0 to {length}, not {row.start}", path=f"{path}.start")
    start = max(1, row.start)
    mask = (bytes(start) + given[start:])[:length]
    first, end = mask.find(1), mask.rfind(1) + 1
    if not end:
        return _RequestedRow(mask=mask, order=None)
    order = ScoreOrder(request_id=uuid4().hex, row=row.token_ids[:end], start=first, adapter=adapter)
    return _RequestedRow(mask=mask, order=order)


def _scored_row(asked: _RequestedRow, scores: RowScores | PolarnodeError | None) -> ScoredRow:
    if asked.order is None or not isinstance(scores, RowScores):
        return ScoredRow(logprobs=floats(bytes(4 * len(asked.mask))), version=None)
    logprobs = masked_logprobs(asked.mask, scores.logprobs, begin=asked.order.start)
    return ScoredRow(logprobs=logprobs, version=scores.version)
