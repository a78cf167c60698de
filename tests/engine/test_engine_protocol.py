"""Frames between a node and its engine hosts: transcripts of bytes in and messages out, and every cut of them
under Hypothesis.
"""

from array import array
from typing import Any

import msgpack
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from polarnode.engine.protocol import (
    FULL_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAME_CHUNKS,
    Abort,
    BeginUpdate,
    ChangeMemory,
    CheckUpdate,
    CommitUpdate,
    Continue,
    Done,
    ExpertShape,
    Failed,
    Forget,
    FrameDecoder,
    FrameError,
    Generate,
    HostFatal,
    JoinGroup,
    LeaveGroup,
    Load,
    LoadBroadcast,
    LoadDisk,
    LoadTensors,
    Message,
    Pause,
    Piece,
    Ready,
    RollBack,
    RoutedRows,
    Shutdown,
    Start,
    encode,
    encode_frames,
)

EVERY_KIND: list[Message] = [
    Start(arguments={"model_path": "/m", "tp_size": 2, "context_length": None}),
    Generate(
        rid="0" * 32,
        prompt=array("i", [1, 2, 70_000]).tobytes(),
        sampling={"temperature": 0.7, "stop_token_ids": [5], "top_k": -1},
    ),
    Generate(
        rid="3" * 32,
        prompt=b"",
        sampling={"json_schema": "{}"},
        top_logprobs=3,
        processor="{}",
        constraint_after=7,
        routed_from=5,
        session="s1",
    ),
    Abort(rid="0" * 32),
    Forget(session="s1"),
    Pause(call=1, mode="retract"),
    Continue(call=2),
    BeginUpdate(call=3, ranks=8),
    LoadDisk(call=4, path="/w"),
    LoadTensors(call=5, payloads=[b"\x80\x04", b""], layout="flattened_bucket"),
    LoadBroadcast(
        call=6, group="weights", names=["a", "b"], dtypes=["float32", "bfloat16"], shapes=[[2, 3], []]
    ),
    CheckUpdate(call=7, flush=True),
    CommitUpdate(call=8, version="7"),
    RollBack(call=9),
    JoinGroup(call=10, name="weights", address="127.0.0.1", port=4000, rank=1, world_size=2, backend="gloo"),
    LeaveGroup(call=11, name="weights"),
    ChangeMemory(call=12, release=True, tags=["weights"]),
    Shutdown(),
    Ready(
        vocab_size=9,
        context_length=8,
        capacity=7,
        max_total_tokens=6,
        weight_version="0",
        sglang_version="0.5.23",
    ),
    Ready(
        vocab_size=9,
        context_length=8,
        capacity=7,
        max_total_tokens=6,
        host_tokens=12,
        weight_version="0",
        sglang_version="x",
        experts=ExpertShape(48, 8, 128),
    ),
    RoutedRows(rid="1" * 32, start=7, layers=2, top_k=3, wide=True, data=bytes(12)),
    Piece(rid="1" * 32, ids=b"\1\0\0\0", logprobs=b"\0\0\0\0", version="0"),
    Piece(
        rid="1" * 32,
        ids=b"",
        logprobs=b"",
        version="1",
        finish="stop",
        spans=(("0", 0, 4), ("1", 4, 9)),
        cached_tokens=3,
    ),
    Piece(
        rid="1" * 32,
        ids=b"\1\0\0\0",
        logprobs=b"\0\0\0\0",
        version="0",
        alternative_ids=b"\2\0\0\0",
        alternative_logprobs=b"\0\0\0\0",
    ),
    Failed(rid="2" * 32, message="zu lang: äöü", retryable=False),
    Done(call=3, ok=True, message="updated"),
    Load(running=1, waiting=2, token_usage=0.25, weight_version="0"),
    HostFatal(message="gone"),
]

texts = st.text(max_size=20)
counts = st.integers(0, 2**31 - 1)
messages = st.one_of(
    st.builds(
        Generate,
        rid=texts,
        prompt=st.binary(max_size=64),
        sampling=st.dictionaries(texts, st.none() | st.integers(-5, 5) | st.floats(allow_nan=False)),
        top_logprobs=st.integers(0, 20),
        processor=st.none() | texts,
        constraint_after=st.none() | counts,
        routed_from=st.none() | counts,
    ),
    st.builds(
        RoutedRows,
        rid=texts,
        start=counts,
        layers=counts,
        top_k=counts,
        wide=st.booleans(),
        data=st.binary(max_size=64),
    ),
    st.builds(Abort, rid=texts),
    st.builds(Forget, session=texts),
    st.builds(Pause, call=counts, mode=st.sampled_from(["in_place", "retract", "abort"])),
    st.builds(
        Piece,
        rid=texts,
        ids=st.binary(max_size=64),
        logprobs=st.binary(max_size=64),
        version=texts,
        finish=st.sampled_from([None, "stop", "length", "abort"]),
        spans=st.lists(st.tuples(texts, counts, counts), max_size=3).map(tuple),
        cached_tokens=counts,
        alternative_ids=st.binary(max_size=64),
        alternative_logprobs=st.binary(max_size=64),
    ),
    st.builds(Done, call=counts, ok=st.booleans(), message=texts),
    st.just(Shutdown()),
)


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda each: type(each).__name__)
def test_every_message_round_trips(message: Message) -> None:
    assert FrameDecoder().feed(encode(message)) == [message]


def test_frame_keeps_message_order() -> None:
    assert FrameDecoder().feed(encode(*EVERY_KIND)) == EVERY_KIND


def test_bytes_may_come_one_by_one() -> None:
    decoder = FrameDecoder()
    frame = encode(*EVERY_KIND)
    found = [decoder.feed(frame[place : place + 1]) for place in range(len(frame))]
    assert found[:-1] == [[]] * (len(frame) - 1)
    assert found[-1] == EVERY_KIND


@given(st.lists(st.lists(messages, min_size=1, max_size=5), max_size=4), st.data())
def test_frames_survive_every_cut(frames: list[list[Message]], data: st.DataObject) -> None:
    wire = b"".join(encode(*each) for each in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    decoder = FrameDecoder()
    found: list[Message] = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += decoder.feed(wire[start:end])
    assert found == [message for each in frames for message in each]


@given(st.binary(min_size=1, max_size=200))
def test_garbage_frames_refused_or_incomplete(garbage: bytes) -> None:
    """Garbage is refused or waited for but never anything else."""
    try:
        found = FrameDecoder().feed(garbage)
    except FrameError:
        return
    assert all(isinstance(each, Message) for each in found)


def test_many_messages_are_split_over_frames() -> None:
    many = [Abort(rid=str(number)) for number in range(2 * MAX_FRAME_CHUNKS + 1)]
    frames = list(encode_frames(many))
    assert len(frames) == 3
    assert FrameDecoder().feed(b"".join(frames)) == many
    assert list(encode_frames([])) == []


def piece(rid: str, token: int, version: str = "0", **more: Any) -> Piece:
    raw = array("i", [token]).tobytes()
    return Piece(rid=rid, ids=raw, logprobs=array("f", [-token]).tobytes(), version=version, **more)


def test_neighbouring_pieces_are_joined() -> None:
    last = piece("a", 5, finish="stop", spans=(("0", 0, 3),), cached_tokens=1)
    sent = [piece("a", 1, cached_tokens=7), piece("b", 2), piece("a", 3), last, piece("b", 4)]
    one, other = FrameDecoder().feed(b"".join(encode_frames(sent)))
    assert one == evolve(
        last,
        ids=array("i", [1, 3, 5]).tobytes(),
        logprobs=array("f", [-1, -3, -5]).tobytes(),
        cached_tokens=7,
    )
    assert other == evolve(
        piece("b", 2), ids=array("i", [2, 4]).tobytes(), logprobs=array("f", [-2, -4]).tobytes()
    )


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([], id="another version"),
        pytest.param([Done(call=1, ok=True)], id="an answer"),
        pytest.param(
            [RoutedRows(rid="a", start=0, layers=1, top_k=1, wide=False, data=b"1")],
            id="experts before the end",
        ),
    ],
)
def test_separated_pieces_stay_apart(between: list[Message]) -> None:
    second = piece("a", 2, version="0" if between else "1")
    sent: list[Message] = [piece("a", 1), *between, second]
    assert FrameDecoder().feed(b"".join(encode_frames(sent))) == sent


def test_pieces_with_alternatives_stay_apart() -> None:
    """Pieces with alternatives or an end are not joined."""
    some = {"alternative_ids": bytes(4), "alternative_logprobs": bytes(4)}
    for first in (piece("a", 1, **some), piece("a", 1, finish="abort"), piece("a", 1, spans=(("0", 0, 1),))):
        assert FrameDecoder().feed(b"".join(encode_frames([first, piece("a", 2)]))) == [first, piece("a", 2)]


def test_large_messages_get_own_frames() -> None:
    """A thousand prompts of a hundred thousand tokens are a frame each ten; all in one would end the host."""
    rows = RoutedRows(rid="1", start=0, layers=1, top_k=1, wide=False, data=bytes(FULL_FRAME_BYTES))
    prompt = Generate(rid="2", prompt=bytes(400_000), sampling={})
    many: list[Message] = [rows, *[prompt] * 25, Abort(rid="3"), rows, rows]
    frames = list(encode_frames(many))
    assert max(map(len, frames)) < 3 * FULL_FRAME_BYTES < MAX_FRAME_BYTES
    assert len(frames) == 5
    assert FrameDecoder().feed(b"".join(frames)) == many


def test_oversized_message_is_not_sent() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        encode(Generate(rid="0", prompt=bytes(MAX_FRAME_BYTES + 1), sampling={}))


def test_oversized_length_is_not_buffered() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        FrameDecoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xc1", id="not msgpack"),
        pytest.param(msgpack.packb(5), id="not a list"),
        pytest.param(msgpack.packb([[99, "x"]]), id="unknown code"),
        pytest.param(msgpack.packb([["a"]]), id="code is text"),
        pytest.param(msgpack.packb([[2]]), id="a field is missing"),
        pytest.param(msgpack.packb([[6, 1, 2]]), id="a field too many"),
        pytest.param(msgpack.packb([[]]), id="empty message"),
    ],
)
def test_invalid_message_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        FrameDecoder().feed(len(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ids": "text"}, "Piece.ids may not be 'text'"),
        ({"rid": 7}, "Piece.rid may not be 7"),
        ({"finish": "perhaps"}, "Piece.finish may not be 'perhaps'"),
        ({"spans": [["0", 0]]}, "not a frame"),
        ({"spans": [["0", 0, "1"]]}, "is no span of a version"),
        ({"cached_tokens": None}, "Piece.cached_tokens may not be None"),
    ],
)
def test_wrong_field_type_is_refused(fields: dict[str, object], why: str) -> None:
    """The node takes what a host sends for tokens, so it takes nothing that merely looks like them."""
    valid: dict[str, object] = {
        "rid": "1" * 32, "ids": b"", "logprobs": b"", "version": "0", "finish": None, "spans": [], "cached_tokens": 0,
        "alternative_ids": b"", "alternative_logprobs": b"", "drafted": 0, "accepted": 0, "verified": 0,
    }  # fmt: skip
    code = encode(Piece(rid="1" * 32, ids=b"", logprobs=b"", version="0"))[6]
    body = msgpack.packb([[code, *(valid | fields).values()]])
    with pytest.raises(FrameError, match=why):
        FrameDecoder().feed(len(body).to_bytes(4, "big") + body)
