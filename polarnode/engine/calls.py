"""One generation in flight, on the node's side: a request becomes SGLang's, and the host's messages become
chunks.

Everything here is synchronous except the wait for a chunk, so that a call can end inside any cleanup.
"""

import re
from array import array
from math import isfinite
from typing import Self

import numpy
import trio
from attrs import define, evolve, field

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import FinishReason, Json, Sampling
from polarnode.core.errors import ContextTooLong, EngineError, EngineRefusal
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import VersionSpan
from polarnode.engine.drafts import check_draft_call
from polarnode.engine.protocol import Generate, Piece, RoutedRows

TOP_LOGPROBS = 20  # what OpenAI and Google allow; each costs 8 bytes a token on the wire
# Tokens of a whole answer that wait before they are read: parsing so many takes 0.3 ms of the loop.
WITHHELD_TOKENS = 512
# Tokens of a piece of a whole answer. Each piece wakes the node and costs it 0.2 ms. A client that leaves, or
# an engine that dies, loses what is not yet a piece: less than a second of sampling.
WHOLE_PIECE_TOKENS = 64
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


def check_order(
    order: GenerateOrder, *, vocab_size: int, context_length: int, routes: bool = False, drafts: str = ""
) -> None:
    """Raise ContextTooLong for a prompt that is too long. Raise EngineError for a request that would end the
    engine's process, such as one with an id outside the vocabulary or an ambiguous name. Raise Refused for
    what an engine that `drafts` does not honour.
    """
    if not _REQUEST_ID.fullmatch(order.request_id):
        raise EngineError(
            f"request id {order.request_id!r} is not 32 hex digits: the engine matches aborts by prefix",
            retryable=False,
        )
    if not order.prompt:
        raise EngineError("the prompt is empty: give at least one token id", retryable=False)
    # A Python min over 375 000 ids would hold the loop for 15 ms.
    prompt = numpy.frombuffer(order.prompt, dtype=numpy.int32)
    # One pass suffices: read as unsigned, what is below 0 is above everything.
    if not prompt.view(numpy.uint32).max() < vocab_size:
        raise EngineError(
            f"the prompt has token ids from {prompt.min()} to {prompt.max()}, this model knows 0 to"
            f" {vocab_size - 1}",
            retryable=False,
        )
    if len(order.prompt) >= context_length:
        raise ContextTooLong(prompt_tokens=len(order.prompt), limit=context_length)
    if order.sampling.max_tokens is not None and order.sampling.max_tokens < 1:
        raise EngineError(
            f"max_tokens {order.sampling.max_tokens} asks for nothing: give 1 or more", retryable=False
        )
    if not 0 <= order.top_logprobs <= min(TOP_LOGPROBS, vocab_size):
        raise EngineError(
            f"top_logprobs {order.top_logprobs}: give 0 to {min(TOP_LOGPROBS, vocab_size)}", retryable=False
        )
    if order.routed_from is not None and not routes:
        raise EngineError(
            "this engine does not remember which experts read a token: start the node with --routed-experts",
            retryable=False,
        )
    if order.routed_from is not None and not 0 <= order.routed_from <= len(order.prompt):
        raise EngineError(
            f"routed_from {order.routed_from}: give 0 to {len(order.prompt)}, the length of the prompt",
            retryable=False,
        )
    if order.constraint is not None and not order.constraint.text:
        raise EngineError(
            f"the constraint's {order.constraint.kind} is empty: leave it out, or give what the answer must"
            " match",
            retryable=False,
        )
    check_draft_call(order, drafts)
    # The grammar would refuse what the processor chose.
    if order.steering is not None and order.constraint is not None:
        raise EngineError("an order has a constraint or a steering, not both", retryable=False)


def to_generate(order: GenerateOrder, *, context_length: int, adapter: str = "") -> Generate:
    """The message for the host. `max_tokens` is clipped to what the context still holds, and always set,
    because SGLang's own default is 128. `adapter` is the version that samples.
    """
    room = context_length - len(order.prompt)
    sampling = sampling_parameters(order.sampling, max_tokens=min(order.sampling.max_tokens or room, room))
    return Generate(
        rid=order.request_id,
        prompt=order.prompt.tobytes(),
        sampling={
            **sampling,
            "sampling_seed": _sampling_seed(order),
            "stop_token_ids": list(order.stop_ids),
            **_constraint_parameters(order),
        },
        top_logprobs=order.top_logprobs,
        processor=None if order.steering is None else order.steering.processor,
        constraint_after=None if order.constraint is None else order.constraint_after,
        routed_from=order.routed_from,
        adapter=adapter,
        session=prefix_name(order.affinity, order.chain),
        piece_tokens=WHOLE_PIECE_TOKENS if order.whole else 0,
    )


def prefix_name(session: str, chain: str) -> str:
    """The name by which the engine knows a conversation's prefix. It is empty for a call of no session."""
    return f"{session}/{chain}" if session else ""


def _sampling_seed(order: GenerateOrder) -> int:
    """The requested seed, or else a seed derived from the call: with deterministic inference SGLang gives all
    calls without a seed the same samples.
    """
    return int(order.request_id[:7], 16) if order.sampling.seed is None else order.sampling.seed


def _constraint_parameters(order: GenerateOrder) -> dict[str, Json]:
    """The constraint on the choice of tokens, if any. SGLang's fields have the names of our kinds."""
    if order.steering is not None:
        return {"custom_params": dict(order.steering.parameters)}
    return {} if order.constraint is None else {order.constraint.kind: order.constraint.text}


def sampling_parameters(sampling: Sampling, *, max_tokens: int) -> dict[str, Json]:
    """SGLang's sampling parameters, all of them, so that no default of an engine or a checkpoint changes the
    request.

    The node itself watches for `stop` strings. A seed only has a meaning with
    `enable_deterministic_inference` among the engine's arguments (`engine_args`).
    """
    return {
        "max_new_tokens": max_tokens,
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or -1,  # 0 and -1 both mean the whole vocabulary to clients
        "min_p": sampling.min_p or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "repetition_penalty": 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        "sampling_seed": sampling.seed,
    }


@define(eq=False)
class Call:
    """An async iterator of chunks. What arrived since the consumer last looked is one chunk, so that a busy
    loop handles fewer chunks, not more. The reader of a `whole` answer is woken by its end, and by each
    WITHHELD_TOKENS before it.

    Invariant: a chunk's ids are in the vocabulary, and each has one finite logprob and as many alternatives
    as were requested. A piece that does not fit fails the call, and nothing of it is sampled.

    The buffer is bounded by the requested `max_tokens`, 8 bytes each.
    """

    rid: str
    vocab_size: int | None = None  # None where the host has not reported it
    top_logprobs: int = 0  # alternatives requested for each token
    session: str = ""
    chain: str = ""  # the conversation of its session
    sent: float = 0.0  # when the call was sent to the engine
    prompt_tokens: int = 0
    expected: int = 0  # tokens of the KV cache that it is expected to need
    adapter: str = ""  # the version of the adapter that samples
    whole: bool = False
    over: bool = field(default=False, init=False)  # the host sends nothing more about it
    was_read: bool = field(default=False, init=False)  # the engine has read its prompt
    _left: bool = field(default=False, init=False)
    _ids: "array[int]" = field(factory=ids, init=False)
    _logprobs: "array[float]" = field(factory=floats, init=False)
    _alternatives: bytearray = field(factory=bytearray, init=False)  # ids of the alternatives
    _alternative_logprobs: bytearray = field(factory=bytearray, init=False)
    _routed: list[RoutedRows] = field(factory=list, init=False)
    _cached: int = field(default=0, init=False)
    _served_cached: int = field(default=0, init=False)  # the largest number that was reported
    _finish: FinishReason | None = field(default=None, init=False)
    _error: EngineError | EngineRefusal | None = field(default=None, init=False)
    _spans: list[VersionSpan] = field(factory=list, init=False)
    _length: int = field(default=0, init=False)
    _first_at: float | None = field(default=None, init=False)  # when its first tokens came
    _arrived: trio.Event = field(factory=trio.Event, init=False)

    def take(self, piece: Piece | RoutedRows) -> bool:
        """Take a piece from the host, or some of the routed experts that precede the last piece. One that
        does not fit the call fails it. Returns True for the first piece, which means that the prompt was
        read.
        """
        problem = self._experts_problem(piece) if isinstance(piece, RoutedRows) else self._problem(piece)
        if problem is not None:
            self.fail(EngineError(f"the engine's answer cannot be used: {problem}"))
            return False
        self.over = isinstance(piece, Piece) and piece.finish is not None
        first = isinstance(piece, Piece) and not self.was_read
        if isinstance(piece, Piece):
            self.was_read = True
            self._served_cached = max(self._served_cached, piece.cached_tokens)
        if self._left:
            return first
        if isinstance(piece, RoutedRows):
            self._routed.append(piece)
            return False
        sampled = ids(piece.ids)
        if self._first_at is None and sampled:
            self._first_at = trio.current_time()
        self._grow(len(sampled), piece.version)
        if piece.spans:
            self._spans = [
                VersionSpan(version=version, start=start, end=end)
                for version, start, end in piece.spans
                if end > start
            ]
        self._ids += sampled
        self._logprobs += floats(piece.logprobs)
        if piece.alternative_ids:
            self._alternatives += piece.alternative_ids
            self._alternative_logprobs += piece.alternative_logprobs
        self._cached = max(self._cached, piece.cached_tokens)
        self._finish = piece.finish
        if not self.whole or piece.finish is not None or len(self._ids) >= WITHHELD_TOKENS:
            self._arrived.set()
        return first

    def _problem(self, piece: Piece) -> str | None:
        """Why a piece does not fit the call. None if it does."""
        count, rest = divmod(len(piece.ids), 4)
        if rest or len(piece.logprobs) != 4 * count:
            return f"{len(piece.ids)} bytes of token ids with {len(piece.logprobs)} bytes of logprobs"
        others = 4 * count * self.top_logprobs
        if (len(piece.alternative_ids), len(piece.alternative_logprobs)) != (others, others):
            return f"{len(piece.alternative_ids)} bytes of alternatives for {count} tokens, {others} are due"
        for name, sampled, logprobs in (
            ("a token", piece.ids, piece.logprobs),
            ("an alternative", piece.alternative_ids, piece.alternative_logprobs),
        ):
            if not sampled:
                continue
            # Most pieces are one token, for which numpy takes ten times as long. Read without a sign, an id
            # below 0 is above everything. A sum is finite if all of its float32 are.
            largest = max(memoryview(sampled).cast("I"))
            if self.vocab_size is not None and largest >= self.vocab_size:
                return f"{name} outside the vocabulary of {self.vocab_size} tokens"
            if not isfinite(sum(memoryview(logprobs).cast("f"))):
                return f"{name} with a logprob that is not a number"
        end = 0
        for _, start, stop in piece.spans:
            if start != end or stop < start:
                return f"weight versions of tokens {start} to {stop}, where {end} is due"
            end = stop
        if piece.spans and end != self._length + count:
            return f"weight versions of {end} tokens, {self._length + count} were sampled"
        return None

    def _experts_problem(self, part: RoutedRows) -> str | None:
        """Why rows of experts do not follow those before. None if they do."""
        width = part.layers * part.top_k * (2 if part.wide else 1)
        if min(part.start, part.layers - 1, part.top_k - 1) < 0 or len(part.data) % width:
            return f"{len(part.data)} bytes of routed experts from {part.start} on, {width} a position"
        if not self._routed:
            return None
        last = self._routed[-1]
        shape, due = (last.layers, last.top_k, last.wide), last.start + len(last.data) // width
        if (part.layers, part.top_k, part.wide) != shape or part.start != due:
            return f"routed experts of another shape, or from {part.start} on where {due} is due"
        return None

    def fail(self, error: EngineError | EngineRefusal) -> None:
        """Fail the call. Chunks that arrived before are still delivered first."""
        self.over, self._error = True, error
        self._arrived.set()

    def close(self) -> None:
        """The consumer left. Later messages are dropped."""
        self._left = True

    @property
    def cached(self) -> int:
        """The number of prompt tokens that were in the engine's cache."""
        return self._served_cached

    @property
    def sampled(self) -> int:
        """The number of tokens sampled so far, without those that arrived after `close`."""
        return self._length

    @property
    def served(self) -> int:
        """The number of tokens that the engine computed for this call: prompt tokens that were not cached,
        and sampled ones. Those that arrived after `close` do not count.
        """
        return max(0, self.prompt_tokens - self._served_cached) + self._length

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            await self._arrived.wait()  # a checkpoint, waiting or not
            if self._ids or self._finish is not None:
                return self._chunk()
            if self.over:
                raise self._error or StopAsyncIteration
            self._arrived = trio.Event()  # the piece had no tokens

    def withheld(self) -> Chunk | None:
        """What is described at `ports.WithheldChunks`, for a reader that leaves. It omits an end that has
        come meanwhile.
        """
        if not self.whole or not self._ids:
            return None
        return evolve(self._chunk(), finish_reason=None, routed=None)

    def _chunk(self) -> Chunk:
        """Everything that has arrived, as one chunk. The next call waits for more unless this generation has
        ended.
        """
        chunk = Chunk(
            ids=self._ids,
            logprobs=self._logprobs,
            finish_reason=self._finish,
            version_spans=tuple(self._spans),
            cached_tokens=self._cached,
            first_at=self._first_at,
            top_logprobs=_top(len(self._ids), self._alternatives, self._alternative_logprobs),
            routed=_experts(self._routed) if self._finish is not None else None,
        )
        self._ids, self._logprobs, self._finish, self._cached = ids(), floats(), None, 0
        self._alternatives, self._alternative_logprobs = bytearray(), bytearray()
        if not self.over:
            self._arrived = trio.Event()
        return chunk

    def _grow(self, count: int, version: str) -> None:
        """Extend the running spans by `count` tokens of `version`. The last piece's exact spans replace
        them.
        """
        end = self._length + count
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = VersionSpan(version=version, start=self._spans[-1].start, end=end)
        elif count:
            self._spans.append(VersionSpan(version=version, start=self._length, end=end))
        self._length = end


def _top(count: int, alternatives: bytearray, logprobs: bytearray) -> TopLogprobs | None:
    """The alternatives of `count` tokens, equally many for each."""
    if not alternatives:
        return None
    return TopLogprobs(
        k=len(alternatives) // (4 * count), ids=ids(bytes(alternatives)), logprobs=floats(bytes(logprobs))
    )


def _experts(parts: list[RoutedRows]) -> RoutedExperts | None:
    """All rows, which arrive in order."""
    if not parts:
        return None
    first, data = parts[0], b"".join(part.data for part in parts)
    return RoutedExperts(
        start=first.start,
        layers=first.layers,
        top_k=first.top_k,
        dtype="int16" if first.wide else "uint8",
        data=data,
    )
