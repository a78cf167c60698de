"""The simulated engine at work: requests wait, are prefilled, and give their tokens when a real engine would.

As in the real host every request gets exactly one end and every control call one `Done`. One task keeps the
time of all requests, so that a thousand of them cost a heap and no tasks. What is due together leaves in one
frame. Prefix-cache hits are estimated from hashes of every BLOCK tokens. Weight updates obey the same orders
and are refused for the same reasons, as far as those can be seen without torch; of a payload only its pickle
header is looked at. If `kv_tokens` bounds the cache, `cache.py` says what is found and when tokens come.
"""

import asyncio
import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import assert_never

from attrs import define, field

from polarnode.engine.checkpoints import BadCheckpoint, Manifest, check_folder, manifest, require
from polarnode.engine.protocol import (
    Abort,
    BeginUpdate,
    ChangeMemory,
    CheckUpdate,
    CommitUpdate,
    Continue,
    Done,
    Failed,
    Forget,
    FrameDecoder,
    Generate,
    JoinGroup,
    LeaveGroup,
    Load,
    LoadAdapter,
    LoadBroadcast,
    LoadDisk,
    LoadTensors,
    Message,
    Pause,
    Piece,
    Ready,
    RollBack,
    RowLogprobs,
    ScoreTokens,
    Shutdown,
    Simulation,
    ToNode,
    UnloadAdapter,
    Update,
    encode_frames,
)
from polarnode.engine.simulated.answers import AnswerMaker, RandomAnswer, simulated_scores
from polarnode.engine.simulated.cache import RequestProgress, SimulatedCache

BLOCK = 256  # tokens; a prompt of 30 000 is 120 hashes, some 0.2 ms
KEPT = 1 << 16  # blocks, the latest used: 16 million tokens, more than the cache of any one GPU


@define(eq=False)
class Prefixes:
    """The latest prompts. `clear` drops those of other weights."""

    _known: "OrderedDict[bytes, None]" = field(factory=OrderedDict, init=False)

    def cached(self, prompt: bytes, salt: str = "") -> int:
        """The number of cached tokens of an int32 prompt, which is then cached itself. It has a salt of its
        own if an adapter samples. At least one token is always computed.
        """
        size, digest, leading, found = 4 * BLOCK, blake2b(salt.encode(), digest_size=8), True, 0
        for start in range(0, len(prompt) - size, size):
            digest.update(prompt[start : start + size])
            key = digest.digest()
            leading = leading and key in self._known
            found += BLOCK if leading else 0
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found

    def clear(self) -> None:
        self._known.clear()


PICKLE_HEADER = b"\x80"


@define(eq=False)
class SimulatedWeights:
    """The weights of one simulated host. `model` is what its checkpoint holds, and `adapters` names what is
    loaded beside it.
    """

    version: str
    model: Manifest
    _kept: bool = field(default=False, init=False)
    _loaded: int = field(default=0, init=False)
    _groups: set[str] = field(factory=set, init=False)
    adapters: set[str] = field(factory=set, init=False)

    def obey(self, order: Update) -> tuple[bool, str]:
        try:
            self._obey(order)
        # A disk's fault ends no sessions, and SGLang refuses it too.
        except (BadCheckpoint, OSError) as error:
            return False, str(error)
        return True, ""

    def _obey(self, order: Update) -> None:
        match order:
            case BeginUpdate():
                self._kept, self._loaded = True, 0
            case LoadDisk() | LoadTensors() | LoadBroadcast():
                self._load(order)
                self._loaded += 1
            case CheckUpdate():
                require(self._loaded > 0, "nothing was sent: send every tensor of the model")
            case CommitUpdate(version=version):
                self.version, self._kept = version, False
            case RollBack():
                require(self._kept, "no old weights are kept to roll back to")
                self._kept = False
            case JoinGroup(name=name):
                self._groups.add(name)
            case LeaveGroup(name=name):
                require(name in self._groups, "The group to be destroyed does not exist.")
                self._groups.discard(name)
            case LoadAdapter(name=name, path=path):
                require(bool(manifest(Path(path))), f"there is no adapter under {path}")
                self.adapters.add(name)
            case UnloadAdapter(name=name):
                self.adapters.discard(name)
            case ChangeMemory():
                raise BadCheckpoint("a simulated engine has no memory to give back")
            case _:
                assert_never(order)

    def _load(self, order: LoadDisk | LoadTensors | LoadBroadcast) -> None:
        match order:
            case LoadDisk(path=path):
                check_folder(Path(path), self.model)
            case LoadTensors(payloads=payloads):
                require(all(each.startswith(PICKLE_HEADER) for each in payloads), "a payload is no pickle")
            case LoadBroadcast(group=group):
                require(group in self._groups, f"Group {group} not in {sorted(self._groups)}")
            case _:
                assert_never(order)


LOAD_INTERVAL_S = 0.25  # seconds, as in the real host
SEND_WINDOW_S = 0.002  # seconds; what is due within them leaves in one frame
READ_SIZE = 1 << 18


@define(eq=False)
class SimulatedRequest:
    """One generation. `begun` is the time when its first token is due, and `sent` counts the tokens that were
    sent.
    """

    order: Generate
    answer: RandomAnswer
    alternatives: tuple[bytes, bytes] = (b"", b"")
    cached: int = 0
    begun: float = 0.0
    sent: int = 0
    over: bool = False


@define(eq=False, kw_only=True)
class Serving:
    """One connection to the node."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decoder: FrameDecoder
    answers: AnswerMaker
    settings: Simulation
    ready: Ready
    updates: SimulatedWeights
    cache: SimulatedCache | None = None
    # Evict what sessions refer to after everything else, as SGLang does if that is set.
    session_cache: bool = False
    _requests: dict[str, SimulatedRequest] = field(factory=dict, init=False)
    _scores: dict[str, asyncio.TimerHandle] = field(factory=dict, init=False)  # rows that are being read
    # Bounded by the calls that the node has in flight.
    _waiting: "deque[SimulatedRequest]" = field(factory=deque, init=False)
    _running: int = field(default=0, init=False)
    _due: "list[tuple[float, int, SimulatedRequest]]" = field(factory=list, init=False)
    _numbers: "count[int]" = field(factory=count, init=False)
    _prefixes: Prefixes = field(factory=Prefixes, init=False)
    _outbox: list[ToNode] = field(factory=list, init=False)
    _wake: asyncio.Event = field(factory=asyncio.Event, init=False)
    _paused_at: float | None = field(default=None, init=False)
    _load: Load | None = field(default=None, init=False)

    async def run(self) -> None:
        """Serve until the node sends Shutdown or closes the connection."""
        self._outbox.append(self.ready)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._keep_time()), tasks.create_task(self._report_load())]
            await self._obey()
            for each in beside:
                each.cancel()

    # ── the connection ────────────────────────────────────────────────────────

    async def _obey(self) -> None:
        while data := await self.reader.read(READ_SIZE):
            for message in self.decoder.feed(data):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            self._wake.set()

    def _handle(self, message: Message) -> None:
        match message:
            case Generate():
                self._take(message)
            case ScoreTokens():
                self._score(message)
            case Abort(rid=rid) if rid in self._scores:
                self._scores.pop(rid).cancel()
                self._outbox.append(Failed(rid=rid, message="the row was given up", retryable=True))
            case Abort(rid=rid):
                self._abort_request(rid)
            case Forget(session=session):
                if self.cache is not None and self.session_cache:
                    self.cache.forget(session)
            case _:
                if not isinstance(message, Pause | Continue | Update):
                    raise ValueError(f"the node may not send {type(message).__name__} here")
                ok, text = self._obeyed(message)
                self._outbox.append(Done(call=message.call, ok=ok, message=text))

    async def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        for frame in encode_frames(messages):
            self.writer.write(frame)
        await self.writer.drain()

    # ── requests ──────────────────────────────────────────────────────────────

    def _take(self, order: Generate) -> None:
        if order.adapter and order.adapter not in self.updates.adapters:
            message = f"adapter version {order.adapter} is not loaded"
            self._outbox.append(Failed(rid=order.rid, message=message, retryable=False))
            return
        try:
            answer = self.answers.answer(order)
            if self.cache is not None:
                self.cache.require(len(order.prompt) // 4 + len(answer.ids))
        except ValueError as error:
            self._outbox.append(Failed(rid=order.rid, message=str(error), retryable=False, refused=True))
            return
        request = SimulatedRequest(order, answer)
        if order.top_logprobs:
            ids, logprobs = self.answers.alternatives(order, answer)
            request.alternatives = (ids.tobytes(), logprobs.tobytes())
        self._requests[order.rid] = request
        self._waiting.append(request)
        self._admit()

    def _score(self, order: ScoreTokens) -> None:
        """Read a row, which takes as long as its prefill."""
        rate = self.settings.prefill_tokens_per_s
        seconds = self.settings.first_token_s + (len(order.row) / 4 / rate if rate else 0.0)
        self._scores[order.rid] = asyncio.get_running_loop().call_later(seconds, self._scored, order)

    def _scored(self, order: ScoreTokens) -> None:
        if self._paused_at is not None:  # the row is computed after the pause
            self._score(order)
            return
        del self._scores[order.rid]
        logprobs = simulated_scores(array("i", order.row), order.start)
        self._outbox.append(
            RowLogprobs(rid=order.rid, logprobs=logprobs.tobytes(), version=self.updates.version)
        )
        self._wake.set()

    def _admit(self) -> None:
        """Start requests that may run. None starts while paused, because its prompt would be computed by
        weights that are about to change.
        """
        now = asyncio.get_running_loop().time()
        while self._waiting and self._running < self.settings.max_running and self._paused_at is None:
            request = self._waiting.popleft()
            if request.over:
                continue
            if self.cache is not None:
                self._share_cache(self.cache, request, now)
                continue
            self._running += 1
            request.cached = self._prefixes.cached(request.order.prompt, request.order.adapter)
            rate = self.settings.prefill_tokens_per_s
            prefill = (len(request.order.prompt) // 4 - request.cached) / rate if rate else 0.0
            request.begun = now + self.settings.first_token_s + prefill
            self._schedule_chunk(request)

    def _share_cache(self, cache: SimulatedCache, request: SimulatedRequest, now: float) -> None:
        """Let a request wait, be read and be sampled among the others of one cache."""
        order = request.order
        moved = cache.submit(
            order.rid,
            array("i", order.prompt),
            request.answer.ids,
            max_new=int(str(order.sampling["max_new_tokens"])),
            salt=f"{self.updates.version} {order.adapter}",
            session=order.session,
            now=now,
        )
        self._send_moved(moved)

    def _send_moved(self, moved: Sequence[RequestProgress]) -> None:
        """Send the pieces of requests that have come further."""
        for each in moved:
            request = self._requests[each.rid]
            request.cached = each.cached
            while each.over or each.sampled - request.sent >= self._piece_tokens(request):
                self._outbox.append(self._piece(request))
                if request.over:
                    break

    def _piece_tokens(self, request: SimulatedRequest) -> int:
        """The tokens of the next piece. The first one is not delayed, because it gives the time of the first
        token.
        """
        later = request.order.piece_tokens if request.sent else 0
        return max(later, self.settings.chunk_tokens)

    def _schedule_chunk(self, request: SimulatedRequest) -> None:
        """Schedule the time when the next chunk is complete. A chunk's tokens are sampled one by one."""
        if self.cache is not None:
            return
        rate = self.settings.tokens_per_s
        last = min(request.sent + self._piece_tokens(request), len(request.answer.ids))
        heapq.heappush(
            self._due, (request.begun + ((last - 1) / rate if rate else 0.0), next(self._numbers), request)
        )

    def _abort_request(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is not None:
            if self.cache is not None:
                self.cache.abort(rid)
            self._outbox.append(
                Piece(rid=rid, ids=b"", logprobs=b"", version=self._version(request.order), finish="abort")
            )
            self._end(request)

    def _version(self, order: Generate) -> str:
        return order.adapter or self.updates.version

    def _end(self, request: SimulatedRequest) -> None:
        request.over = True
        del self._requests[request.order.rid]
        if request.begun:
            self._running -= 1
            self._admit()

    # ── time ──────────────────────────────────────────────────────────────────

    async def _keep_time(self) -> None:
        """Send what is due, then sleep until the next chunk is due or something happens."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._send_due(loop.time() + SEND_WINDOW_S)
            if self._outbox:
                await self._flush()
                continue
            due = None if self._paused_at is not None else self._next_due()
            alarm = None if due is None else loop.call_at(due, self._wake.set)
            await self._wake.wait()
            if alarm is not None:
                alarm.cancel()

    def _next_due(self) -> float | None:
        if self.cache is not None:
            return self.cache.due()
        return self._due[0][0] if self._due else None

    def _send_due(self, now: float) -> None:
        if self.cache is not None and self._paused_at is None:
            self._send_moved(self.cache.advance(now))
        while self._due and self._due[0][0] <= now and self._paused_at is None:
            request = heapq.heappop(self._due)[2]
            if not request.over:
                self._outbox.append(self._piece(request))

    def _piece(self, request: SimulatedRequest) -> Piece:
        """The next chunk. This schedules the one after it, or ends the request."""
        first, total = request.sent, len(request.answer.ids)
        last = request.sent = min(first + self._piece_tokens(request), total)
        others, (ids, logprobs) = 4 * request.order.top_logprobs, request.alternatives
        if last < total:
            self._schedule_chunk(request)
        else:
            self._end(request)
        return Piece(
            rid=request.order.rid,
            ids=request.answer.ids[first:last].tobytes(),
            logprobs=request.answer.logprobs[first:last].tobytes(),
            version=self._version(request.order),
            finish=request.answer.finish if last == total else None,
            cached_tokens=request.cached,
            alternative_ids=ids[first * others : last * others],
            alternative_logprobs=logprobs[first * others : last * others],
        )

    async def _report_load(self) -> None:
        while True:
            cache, running = self.cache, self._running if self.cache is None else self.cache.running
            load = Load(
                running=running,
                waiting=len(self._requests) - running,
                token_usage=running / self.settings.max_running if cache is None else cache.usage,
                weight_version=self.updates.version,
                max_running=self.settings.max_running,
            )
            if load != self._load:
                self._load = load
                self._outbox.append(load)
                self._wake.set()
            await asyncio.sleep(LOAD_INTERVAL_S)

    # ── control ───────────────────────────────────────────────────────────────

    def _obeyed(self, message: Pause | Continue | Update) -> tuple[bool, str]:
        match message:
            case Pause(mode=mode):
                self._pause()
                if mode == "abort":
                    self._abort_all()
            case Continue():
                self._continue()
            case _:
                return self._updated(message)
        return True, ""

    def _updated(self, message: Update) -> tuple[bool, str]:
        done = self.updates.obey(message)
        if isinstance(message, CheckUpdate) and message.flush:
            self._prefixes.clear()
            if self.cache is not None:
                self.cache.flush()
        return done

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = asyncio.get_running_loop().time()

    def _continue(self) -> None:
        """Delay everything by the length of the pause."""
        if self._paused_at is not None:
            late = asyncio.get_running_loop().time() - self._paused_at
            self._paused_at = None
            if self.cache is not None:
                self.cache.delay(late)
            for _, _, request in self._due:
                request.begun += late
            # All are moved by the same time, so this is still a heap.
            self._due = [(due + late, number, request) for due, number, request in self._due]
            self._admit()

    def _abort_all(self) -> None:
        for rid in list(self._requests):
            self._abort_request(rid)
