"""Output of programs: frames cut from any stream of bytes, the end kept in memory, the beginning and the end
kept in a file.
"""

import io
import socket
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from polarnode.containers.client import HijackedStream
from polarnode.containers.exec import FrameSplitter, OutputTail, _pump
from polarnode.core.errors import RuntimeFault
from polarnode.support.bounded import BoundedLog, open_bounded_log

PIECES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=8)


def framed(pieces: list[tuple[int, bytes]]) -> bytes:
    return b"".join(
        bytes([number, 0, 0, 0]) + len(content).to_bytes(4, "big") + content for number, content in pieces
    )


@given(pieces=PIECES, cuts=st.lists(st.integers(1, 30), max_size=30))
def test_frames_whole_for_any_chunking(pieces: list[tuple[int, bytes]], cuts: list[int]) -> None:
    """Frames come out whole however the stream is cut."""
    stream, frames = framed(pieces), FrameSplitter()
    kept = {"stdout": b"", "stderr": b""}
    while stream:
        size = cuts.pop() if cuts else len(stream)
        for channel, piece in frames.feed(stream[:size]):
            kept[channel] += piece
        stream = stream[size:]
    assert kept["stdout"] == b"".join(content for number, content in pieces if number == 1)
    assert kept["stderr"] == b"".join(content for number, content in pieces if number == 2)


PODMANS = b"Error: read unixpacket @->/proc/self/fd/21/attach: read: connection reset by peer\n"


@pytest.mark.parametrize(
    ("frames", "kept"),
    [
        ([(2, b"note\n"), (1, b"out"), (2, PODMANS)], b"note\nout"),
        ([(2, PODMANS), (1, b"out")], PODMANS + b"out"),
        ([(2, b"mine: " + PODMANS)], b"mine: " + PODMANS),
        ([(1, PODMANS)], PODMANS),
        ([(2, b"Error: mine\n")], b"Error: mine\n"),
    ],
)
async def test_podman_messages_are_not_output(frames: list[tuple[int, bytes]], kept: bytes) -> None:
    """It adds them to what a program wrote, as the last, where another process holds its output."""
    ours, theirs = trio.socket.socketpair()
    said = bytearray()
    with ours, theirs:
        await theirs.send(framed(frames))
        theirs.shutdown(socket.SHUT_WR)
        await _pump(HijackedStream(trio.SocketStream(ours)), b"", lambda _, piece: said.extend(piece))
    assert bytes(said) == kept


def test_long_frame_is_streamed() -> None:
    frames = FrameSplitter()
    assert list(frames.feed(bytes([1, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]) + b"begin")) == [("stdout", b"begin")]
    assert list(frames.feed(b"more")) == [("stdout", b"more")]


def test_invalid_frame_is_a_fault() -> None:
    with pytest.raises(RuntimeFault, match="kind 72"):
        list(FrameSplitter().feed(b"HTTP/1.1 400"))


@given(pieces=st.lists(st.binary(max_size=30), max_size=20), limit=st.integers(1, 50))
def test_the_end_is_kept(pieces: list[bytes], limit: int) -> None:
    tail, whole = OutputTail(limit), b"".join(pieces)
    for piece in pieces:
        tail.write(piece)
    assert tail.value() == whole[-limit:]
    assert tail.dropped == max(0, len(whole) - limit)
    assert tail.value() == whole[-limit:], "asking twice changes nothing"


@given(pieces=st.lists(st.binary(max_size=30), max_size=20), limit=st.integers(2, 60))
def test_output_keeps_beginning_and_end(pieces: list[bytes], limit: int) -> None:
    """Beginning and end are kept in a file."""
    sink, whole = io.BytesIO(), b"".join(pieces)
    log = BoundedLog(sink, limit)
    for piece in pieces:
        log.write(piece)
        assert len(sink.getvalue()) <= limit
    log.finish()
    if len(whole) <= limit:
        assert sink.getvalue() == whole
    else:
        note = b"\n... %d bytes left out ...\n" % (len(whole) - limit)
        assert sink.getvalue() == whole[: limit // 2] + note + whole[len(whole) - (limit - limit // 2) :]


def test_log_writes_at_once_and_restarts(tmp_path: Path) -> None:
    """What was written is on disk at once, and a log begins anew."""
    path = tmp_path / "deep" / "session.log"
    with open_bounded_log(path, 100) as log:
        log.write(b"so far")
        assert path.read_bytes() == b"so far"
    with open_bounded_log(path, 100) as log:
        log.write(b"new")
    assert path.read_bytes() == b"new"


def test_log_is_trimmed_after_failure(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(ZeroDivisionError), open_bounded_log(path, 10) as log:  # noqa: PT012
        log.write(b"0123456789abcdefgh")
        raise ZeroDivisionError
    assert path.read_bytes() == b"01234\n... 8 bytes left out ...\ndefgh"
