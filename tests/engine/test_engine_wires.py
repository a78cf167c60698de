"""What ties a node to one life of a host: who holds which end, and the logs of the last two lives."""

import os
import select
from pathlib import Path

import pytest

from polarnode.engine.diagnosis import TAIL
from polarnode.engine.host_resources import log_tail, open_log, open_wires


def closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def test_all_descriptors_close_after_block() -> None:
    with open_wires() as wires:
        ends = {wires.ours.fileno(), *wires.theirs()}
        assert not any(map(closed, ends))
        assert not any(map(os.get_inheritable, ends))
    assert all(map(closed, ends))


def test_host_arguments_name_two_descriptors() -> None:
    with open_wires() as wires:
        socket, lifeline = wires.theirs()
        assert wires.arguments() == ["--fd", str(socket), "--lifeline-fd", str(lifeline)]


def test_cut_lifeline_wakes_its_reader() -> None:
    with open_wires() as wires:
        lifeline = wires.theirs()[1]
        assert select.select([lifeline], [], [], 0)[0] == []
        wires.cut()
        assert os.read(lifeline, 1) == b""


def test_socket_closes_with_host() -> None:
    """Our socket ends with the host once we have closed our copy of its end."""
    with open_wires() as wires:
        held = os.dup(wires.theirs()[0])  # as the host's process would
        wires.close_host_ends()
        with pytest.raises(BlockingIOError):
            wires.ours.recv(1)
        os.close(held)
        assert wires.ours.recv(1) == b""


def test_previous_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "engine-0.log"
    for text in (b"first", b"second", b"third"):
        with open_log(path) as log:
            log.write(text)
    assert path.read_bytes() == b"third"
    assert path.with_suffix(".log.1").read_bytes() == b"second"
    assert len(list(path.parent.iterdir())) == 2


def test_log_tail_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_bytes(b"x" * TAIL + b"\xff the end")
    assert log_tail(path).endswith("\N{REPLACEMENT CHARACTER} the end")
    assert len(log_tail(path)) == TAIL
