"""The messages between a node and an engine host: attrs values in length-prefixed msgpack frames. Sans-I/O.

A frame is four bytes of length (big-endian) and one msgpack array of messages, so that one frame may carry
the chunks of many requests. A message is an array of its class's code and its fields in order. Token ids
travel as little-endian int32 bytes and logprobs as float32 bytes, because a Python list of ints costs ten
times the memory and the time. Both ends are the same release of this package, so there is no version to
negotiate.

New weights come in steps, so that no host serves them before all can: BeginUpdate (keep the old ones), loads,
CheckUpdate (is it a whole model?), then CommitUpdate or RollBack. The node pauses the host before these
steps. A new message needs a class and a place in one of the unions below. The module imports nothing of
SGLang's, because both sides import it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Literal, NamedTuple, Union, cast, get_args, get_origin

import msgpack  # type: ignore[import-untyped]
from attrs import define, evolve, field, fields, frozen

from polarnode.core.conversation import Json
from polarnode.core.weights import MemoryTag, PauseMode


@frozen(kw_only=True)
class BeginUpdate:
    """The weights are about to change: the host copies what it serves to main memory, so that there is a way
    back. `ranks` is the number of GPUs of this machine that do so at once.
    """

    call: int
    ranks: int


@frozen(kw_only=True)
class LoadDisk:
    """Read a checkpoint's folder."""

    call: int
    path: str


@frozen(kw_only=True)
class LoadTensors:
    """Take tensors of another process of this machine. `payloads` holds what torch's ForkingPickler made of
    them, one for each rank of this host.
    """

    call: int
    payloads: Sequence[bytes]
    layout: Literal["flattened_bucket"] | None = None


@frozen(kw_only=True)
class LoadBroadcast:
    """Receive tensors from rank 0 of a group that this host has joined."""

    call: int
    group: str
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    layout: Literal["flattened_bucket"] | None = None


@frozen(kw_only=True)
class CheckUpdate:
    """All weights were sent: the host answers whether they are a whole model, and with `flush` it drops the
    KV cache of the old weights.
    """

    call: int
    flush: bool


@frozen(kw_only=True)
class CommitUpdate:
    """Name the loaded weights `version`, and drop the copy of the old ones."""

    call: int
    version: str


@frozen(kw_only=True)
class RollBack:
    """Serve the weights from before the update again."""

    call: int


@frozen(kw_only=True)
class JoinGroup:
    """Become ranks `rank`, `rank` + 1 … (one for each GPU of this host) of a torch process group. The host
    waits for the others.
    """

    call: int
    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str


@frozen(kw_only=True)
class LeaveGroup:
    call: int
    name: str


@frozen(kw_only=True)
class ChangeMemory:
    """Give memory of the GPU back to others, or take it again. The node sends this only while nothing is
    sampled.
    """

    call: int
    release: bool
    tags: Sequence[MemoryTag]


@frozen(kw_only=True)
class LoadAdapter:
    """Load the adapter under `path` (PEFT's layout) beside those that are loaded. `name` is its version, and
    no two adapters have the same.
    """

    call: int
    name: str
    path: str


@frozen(kw_only=True)
class UnloadAdapter:
    """Forget an adapter, once the requests that sample by it have ended."""

    call: int
    name: str


Update = (
    BeginUpdate
    | LoadDisk
    | LoadTensors
    | LoadBroadcast
    | CheckUpdate
    | CommitUpdate
    | RollBack
    | JoinGroup
    | LeaveGroup
    | ChangeMemory
    | LoadAdapter
    | UnloadAdapter
)


MAX_FRAME_BYTES = 16 << 20  # bytes: the largest message is a prompt, and a million tokens of it are 4 MiB
# A limit in chunks: at 16 tokens each they are about 200 KiB a frame, far below MAX_FRAME_BYTES, and neither
# loop
# stalls for long.
MAX_FRAME_CHUNKS = 1024
FULL_FRAME_BYTES = 4 << 20  # bytes of arrays: one more message of the largest kind still fits a frame
_HEAD = 4

# A config.json has one of these keys if the model is a mixture of experts.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")

HostFinish = Literal["stop", "length", "abort"]


@frozen(kw_only=True)
class Simulation:
    """The simulated engine's model: the speed of one GPU, and the shape of the random answers.

    The defaults approximate a 30B mixture of experts on one H100. `tokens_per_s` is for one request; 0 means
    without delay, also for the prefill. With `kv_tokens` all requests share one cache and one GPU
    (`kv_model.py`): then `tokens_per_s` is the speed of one request alone with a short context, and
    `first_token_s` is not used, because what it stands for is modelled.
    """

    tokens_per_s: float = 80.0
    first_token_s: float = 0.05  # seconds before the first token, added to the prefill
    prefill_tokens_per_s: float = 30_000.0  # speed of prompt tokens that are not cached
    max_running: int = 256  # requests sampled at once; the others wait
    answer_tokens: int = 256  # tokens of every answer, its end included
    # Each answer of a conversation has a tool call until the conversation holds so many of them, so that
    # harnesses come to an end.
    calling_turns: int = 29
    chunk_tokens: int = 16  # tokens a chunk
    seed: int = 0
    # Tokens of the KV cache. With 0 there are as many as are wanted, and prefills do not wait for each other.
    kv_tokens: int = 0
    kv_page: int = 64  # tokens that are found or evicted together
    kv_chunk: int = 8192  # prompt tokens that are read at once
    # Tokens of context before a token that double the time of its prefill. If infinite, attention costs
    # nothing.
    kv_past_tokens: float = 28_000.0
    kv_request_s: float = 5e-5  # seconds that each further request adds to a step of sampling
    kv_context_s: float = 5.9e-8  # seconds that each token of context adds to it
    speed: float = 1.0  # seconds of an engine with kv_tokens that pass in one real second


@frozen(kw_only=True)
class FamilyMarks:
    """A model family's marks as token ids, for an engine that writes its language without knowing it."""

    turn_end: int
    think_open: int | None = None
    think_close: int | None = None
    call_open: int | None = None
    call_close: int | None = None


@frozen(kw_only=True)
class Start:
    """The first frame: `arguments` are the keyword arguments of `sglang.Engine`."""

    arguments: Mapping[str, Json]


@frozen(kw_only=True)
class Generate:
    """One generation. `prompt` is int32 bytes; `sampling` is SGLang's own sampling parameters, complete.

    `top_logprobs` alternatives come with each token. `processor` is a logit processor in SGLang's spelling.
    The constraint among the sampling parameters begins after the token `constraint_after`, where that is set.
    `routed_from` is the first position whose experts are reported. `adapter` is the version that samples, of
    those that were loaded; if empty, the base samples. `session` says which conversation's prefix this is, so
    that `Forget` can name it. `piece_tokens` are the tokens of a piece after the first, because nobody reads
    them sooner; with 0 the engine decides.
    """

    rid: str
    prompt: bytes
    sampling: Mapping[str, Json]
    top_logprobs: int = 0
    processor: str | None = None
    constraint_after: int | None = None
    routed_from: int | None = None
    adapter: str = ""
    session: str = ""
    piece_tokens: int = 0


@frozen(kw_only=True)
class ScoreTokens:
    """One row to score: tokens [start, T) of `row`, int32 bytes. It has exactly one end, `RowLogprobs` or
    `Failed`.
    """

    rid: str
    row: bytes
    start: int
    adapter: str = ""


@frozen(kw_only=True)
class Abort:
    """Stop a generation or the scoring of a row. Its end still comes. Unknown or finished ids are ignored."""

    rid: str


@frozen(kw_only=True)
class Forget:
    """What is cached of a conversation may be evicted before that of others. There is no answer. A
    conversation that calls again is remembered again.
    """

    session: str


@frozen(kw_only=True)
class Pause:
    """Stop sampling. `call` names the answer (`Done`)."""

    call: int
    mode: PauseMode


@frozen(kw_only=True)
class Continue:
    call: int


@frozen(kw_only=True)
class Shutdown:
    """End the engine and this process."""


class ExpertShape(NamedTuple):
    """The shape of a row of routed experts: `top_k` numbers below `number` for each of `layers`."""

    layers: int
    top_k: int
    number: int


def _experts(fields: Sequence[int] | None) -> ExpertShape | None:
    found = None if fields is None else ExpertShape(*fields)
    if found is not None and not all(isinstance(number, int) and number > 0 for number in found):
        raise ValueError(f"{found} is no shape of routed experts")
    return found


@frozen(kw_only=True)
class Ready:
    """The engine serves. `capacity` is the most tokens one request may hold, prompt and sample together.
    `max_total_tokens` are those of its KV cache, and `host_tokens` those that main memory holds besides.

    `experts` is set if the engine records which experts read each token. `drafts` is the algorithm by which
    it drafts tokens that it then verifies; it is empty if the engine drafts none.
    """

    vocab_size: int
    context_length: int
    capacity: int
    max_total_tokens: int
    weight_version: str
    sglang_version: str
    host_tokens: int = 0
    experts: ExpertShape | None = field(default=None, converter=_experts)
    drafts: str = ""


def _spans(arrays: Iterable[Sequence[object]]) -> tuple[tuple[str, int, int], ...]:
    """Version spans as tuples, because arrays arrive from the wire as lists. Raises ValueError for other
    values.
    """
    found = tuple(cast(tuple[str, int, int], tuple(each)) for each in arrays)
    for version, start, end in found:
        if not isinstance(version, str) or not isinstance(start, int) or not isinstance(end, int):
            raise ValueError(f"({version!r}, {start!r}, {end!r}) is no span of a version")
    return found


@frozen(kw_only=True)
class Piece:
    """More of one sample: `ids` are int32 bytes, `logprobs` float32 bytes, all sampled by `version`.

    The last piece has `finish` and, where the engine knows better than `version`, `spans` over the whole
    sample as (version, start, end). Where alternatives were requested, there are equally many for each of
    `ids`, one token's after the other's, as int32 and float32 bytes. `drafted` are the drafted tokens since
    the piece before, `accepted` those of them that were right, and `verified` the engine's steps.
    """

    rid: str
    ids: bytes
    logprobs: bytes
    version: str
    finish: HostFinish | None = None
    spans: tuple[tuple[str, int, int], ...] = field(default=(), converter=_spans)
    cached_tokens: int = 0
    alternative_ids: bytes = b""
    alternative_logprobs: bytes = b""
    drafted: int = 0
    accepted: int = 0
    verified: int = 0


@frozen(kw_only=True)
class RoutedRows:
    """Some rows of a sample's routed experts, from position `start` on, as uint8, or as little-endian int16
    where `wide`.

    They come in order before the sample's last piece, in several messages where there are many.
    """

    rid: str
    start: int
    layers: int
    top_k: int
    wide: bool
    data: bytes


@frozen(kw_only=True)
class RowLogprobs:
    """The logprobs of a row from its `start` on, float32 bytes, all given by `version`."""

    rid: str
    logprobs: bytes
    version: str


@frozen(kw_only=True)
class Failed:
    """A generation, or the scoring of a row, failed, and `message` says why. `refused` is set if it failed
    because of what its client asked for, so that the engine is not at fault.
    """

    rid: str
    message: str
    retryable: bool
    refused: bool = False


@frozen(kw_only=True)
class Done:
    """The answer to a Pause, a Continue, or a message of an update."""

    call: int
    ok: bool
    message: str = ""


@frozen(kw_only=True)
class Load:
    """How busy the engine is, as its scheduler last reported; it is sent when it changes. `max_running` is
    how many requests the engine runs at once, 0 where it has not reported that.
    """

    running: int
    waiting: int
    token_usage: float
    weight_version: str
    max_running: int = 0


@frozen(kw_only=True)
class Waiting:
    """Why an external engine's server is not used yet. The host tries again. `unfit` is set if the server
    answers and something must be changed.
    """

    message: str
    unfit: bool = False


@frozen(kw_only=True)
class HostFatal:
    """Why the host ends: its last message."""

    message: str


ToHost = Start | Generate | ScoreTokens | Abort | Forget | Pause | Continue | Update | Shutdown
ToNode = Ready | Piece | RoutedRows | RowLogprobs | Failed | Done | Load | Waiting | HostFatal
Message = ToHost | ToNode

_CLASSES: tuple[type[Message], ...] = (*get_args(ToHost), *get_args(ToNode))
_CODES = {kind: code for code, kind in enumerate(_CLASSES)}
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in _CLASSES}


def _values(annotation: object) -> tuple[tuple[type, ...], frozenset[object] | None]:
    """The types that a field's values have on the wire, and all its values where its type lists them. A field
    that has a converter has no types here.
    """
    if get_origin(annotation) in (Union, UnionType):
        members = [_values(each) for each in get_args(annotation)]
        if not all(types for types, _ in members):
            return (), None
        named = [words for _, words in members if words is not None]
        types = tuple(kind for kinds, _ in members for kind in kinds)
        return types, frozenset().union({None}, *named) if named else None
    if get_origin(annotation) is Literal:
        return (str,), frozenset(get_args(annotation))
    if annotation is float:
        return (float, int), None
    return ((cast(type, annotation),) if annotation in (str, bytes, int, bool, NoneType) else ()), None


# Only messages to the node are checked: one host must not end the node, and what it sends must not be taken
# for tokens. The checks run for every token that is sent alone, so they call no function for each field.
_FIELD_CHECKS = {
    kind: tuple((each.name, *found) for each in fields(kind) if (found := _values(each.type))[0])
    for kind in get_args(ToNode)
}
_ARRAYS = {kind: tuple(each.name for each in fields(kind) if each.type is bytes) for kind in _CLASSES}


class FrameError(ValueError):
    """The bytes are no valid frame: the other end is not the program that the node started."""


def encode(*messages: Message) -> bytes:
    """One frame with these messages, in order. Raises FrameError when it would be longer than
    MAX_FRAME_BYTES.
    """
    body = cast(
        bytes,
        msgpack.packb(
            [
                [_CODES[type(each)], *(getattr(each, name) for name in _FIELDS[type(each)])]
                for each in messages
            ]
        ),
    )
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_HEAD, "big") + body


def encode_frames(messages: Iterable[Message]) -> Iterator[bytes]:
    """Frames for any number of messages: MAX_FRAME_CHUNKS at most in each, and fewer where the messages are
    large. The pieces of a sample that leave together are joined into one, because their reader would take
    them together anyway.
    """
    waiting: list[Message] = []
    size = 0
    for message in _together(messages):
        waiting.append(message)
        size += sum(
            len(value)
            for name in _ARRAYS[type(message)]
            if isinstance(value := getattr(message, name), bytes)
        )
        if len(waiting) == MAX_FRAME_CHUNKS or size > FULL_FRAME_BYTES:
            yield encode(*waiting)
            waiting.clear()
            size = 0
    if waiting:
        yield encode(*waiting)


def _together(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages in order, with each sample's pieces joined as far as one version sampled them and no other
    kind of message stands between.
    """
    runs: dict[str, list[Piece]] = {}
    for message in messages:
        if not isinstance(message, Piece):
            yield from map(_joined, runs.values())
            runs.clear()
            yield message
            continue
        run = runs.get(message.rid)
        if run is not None and _goes_on(run[-1], message):
            run.append(message)
        else:
            if run is not None:
                yield _joined(runs.pop(message.rid))
            runs[message.rid] = [message]
    yield from map(_joined, runs.values())


def _goes_on(before: Piece, piece: Piece) -> bool:
    """Whether a piece follows another of its sample by the same version. Pieces with alternatives, which are
    large, are never joined.
    """
    size = len(before.alternative_ids) + len(piece.alternative_ids)
    return before.finish is None and not before.spans and before.version == piece.version and not size


def _joined(run: Sequence[Piece]) -> Piece:
    """One piece made of consecutive pieces of a sample. The last of them may end it."""
    if len(run) == 1:
        return run[0]
    return evolve(
        run[-1],
        ids=b"".join(piece.ids for piece in run),
        logprobs=b"".join(piece.logprobs for piece in run),
        cached_tokens=max(piece.cached_tokens for piece in run),
    )


@define(eq=False)
class FrameDecoder:
    """Takes bytes as they arrive and gives messages once their frame is whole. It raises FrameError on
    anything else and cannot be used afterwards.
    """

    _buffer: bytearray = field(factory=bytearray, init=False)

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        found: list[Message] = []
        while (body := self._take()) is not None:
            found.extend(_read(body))
        return found

    def _take(self) -> bytes | None:
        if len(self._buffer) < _HEAD:
            return None
        length = int.from_bytes(self._buffer[:_HEAD], "big")
        if length > MAX_FRAME_BYTES:  # checked before buffering it, because a stray peer must not cost memory
            raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
        if len(self._buffer) < _HEAD + length:
            return None
        body = bytes(self._buffer[_HEAD : _HEAD + length])
        del self._buffer[: _HEAD + length]
        return body


def _read(body: bytes) -> list[Message]:
    try:
        return [_message(raw) for raw in msgpack.unpackb(body, strict_map_key=False)]
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise FrameError(f"not a frame of this protocol: {error or type(error).__name__}") from error


def _message(raw: Sequence[object]) -> Message:
    code, *values = raw
    if not isinstance(code, int) or not 0 <= code < len(_CLASSES):
        raise FrameError(f"unknown message code {code!r:.40}")
    kind = _CLASSES[code]
    found = kind(**dict(zip(_FIELDS[kind], values, strict=True)))
    for name, types, words in _FIELD_CHECKS.get(kind, ()):
        value = getattr(found, name)
        if not isinstance(value, types) or (words is not None and value not in words):
            raise FrameError(f"{kind.__name__}.{name} may not be {value!r:.60}")
    return found
